"""Adapters merged into a checkpoint of their own, of which nothing but the export is left."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvquant.errors import ExportError, FingerprintError
from kvquant.export.checkpoint import Checkpoint, read_checkpoint
from kvquant.export.directory import LinkMode
from kvquant.export.merged import scratch, stored_dtype, write_from_scratch, write_merged
from kvquant.export.target import Contribution
from kvquant.fingerprint import Fingerprint, checkpoint_fingerprint, fingerprint
from kvquant.models.loading import load
from kvquant.models.source import ModelSource, resolve
from kvquant.tensor_files import StoredTensor

KEY = "model.layers.{}.self_attn.k_proj.weight"
SCALES = Contribution({"model.layers.0.self_attn.k_scale": torch.tensor([0.5])})


def quiet(message: str) -> None:
    """Nobody listens."""


def accept(found: Fingerprint) -> None:
    """Whatever it is."""


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="session")
def lora(
    tiny: Callable[..., Any],
    save_tiny: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], ModelSource]:
    """``lora(dtype)``: a base of that dtype with an adapter that changes keys and values."""
    from peft import LoraConfig, get_peft_model

    made: dict[str, ModelSource] = {}

    def build(dtype: str) -> ModelSource:
        if dtype not in made:
            root = tmp_path_factory.mktemp("merged")
            model = tiny("llama").to(getattr(torch, dtype))
            save_tiny(model, root / "base")
            model.name_or_path = str(root / "base")
            torch.manual_seed(1)
            config = LoraConfig(
                target_modules=["k_proj", "v_proj"], r=2, lora_alpha=6, init_lora_weights=False
            )
            get_peft_model(model, config).save_pretrained(root / "adapter")
            made[dtype] = resolve(str(root / "adapter"))
        return made[dtype]

    return build


# The dtype of a checkpoint


def checkpoint_of(directory: Path, **nbytes: int) -> Checkpoint:
    tensors = {
        name: StoredTensor(name.rstrip("_"), (size,), 8, 8 + size) for name, size in nbytes.items()
    }
    return Checkpoint(directory, {}, tensors, {}, None, None)


@pytest.mark.parametrize(
    ("nbytes", "dtype"),
    [
        ({"F32": 4}, "float32"),
        ({"BF16": 100, "F32": 4}, "bfloat16"),
        ({"F16": 100, "I64": 8}, "float16"),
        ({"F32": 6, "BF16": 4, "BF16_": 4}, "bfloat16"),
    ],
)
def test_the_dtype_is_that_of_most_bytes(
    tmp_path: Path, nbytes: dict[str, int], dtype: str
) -> None:
    assert stored_dtype(checkpoint_of(tmp_path, **nbytes)) == dtype


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I32", "U8"])
def test_weights_that_nothing_can_be_merged_into(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ExportError) as refused:
        stored_dtype(checkpoint_of(tmp_path, **{dtype: 100, "BF16": 4}))
    assert str(refused.value) == (
        f"the weights of {tmp_path} are {dtype}: adapters can only be merged into float32, "
        "bfloat16 or float16"
    )


# The merged model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_weights(lora: Callable[[str], ModelSource], tmp_path: Path, dtype: str) -> None:
    source = lora(dtype)
    base, adapter = Path(source.model), Path(source.adapters[0])
    before, seen = digests(base.parent), []

    write_merged(source, read_checkpoint(base), seen.append, tmp_path, quiet)

    assert digests(base.parent) == before
    old, new = load_file(base / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        found = parts.get(f"base_model.model.{name}".replace(".weight", ".lora_A.weight"))
        if found is None:
            assert torch.equal(new[name], tensor), name
            continue
        up = parts[f"base_model.model.{name}".replace(".weight", ".lora_B.weight")]
        expected = tensor.double() + 3.0 * up.double() @ found.double()  # alpha / r
        # In bfloat16 the update is rounded, and the sum.
        bound = 1e-6 if dtype == "float32" else 2**-7
        torch.testing.assert_close(new[name].double(), expected, rtol=bound, atol=bound / 4)
        assert not torch.equal(new[name], tensor)
    assert {str(tensor.dtype) for tensor in new.values()} == {f"torch.{dtype}"}
    assert {"config.json", "tokenizer.json"} <= {path.name for path in tmp_path.iterdir()}
    # What is checked is the live adapter, and the merged model is known to be the same one.
    live = fingerprint(load(source, device="cpu", notify=quiet).model)
    assert [(each.weights, each.adapters) for each in seen] == [(live.weights, live.adapters)]
    assert len(live.adapters) == 1
    assert checkpoint_fingerprint(tmp_path) == live


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_whoever_may_read_new_files_may_read_the_weights(
    lora: Callable[[str], ModelSource], tmp_path: Path, umask: int, mode: int
) -> None:
    source = lora("float32")
    before = os.umask(umask)
    try:
        write_merged(source, read_checkpoint(Path(source.model)), accept, tmp_path, quiet)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(modes, mode)
    assert "model.safetensors" in modes


def test_several_adapters(
    lora: Callable[[str], ModelSource], tiny: Callable[..., Any], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    source = lora("float32")
    model = tiny("llama")
    model.name_or_path = source.model
    torch.manual_seed(2)
    config = LoraConfig(target_modules=["k_proj"], r=1, lora_alpha=1, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "second")
    both = resolve(source.requested, adapters=[str(tmp_path / "second")])
    (tmp_path / "merged").mkdir()
    write_merged(both, read_checkpoint(Path(both.model)), accept, tmp_path / "merged", quiet)
    new = load_file(tmp_path / "merged" / "model.safetensors")
    expected = load_file(Path(source.model) / "model.safetensors")[KEY.format(1)]
    for directory, scaling in ((source.adapters[0], 3.0), (tmp_path / "second", 1.0)):
        parts = load_file(Path(directory) / "adapter_model.safetensors")
        name = f"base_model.model.{KEY.format(1)}".removesuffix("weight")
        expected = (
            expected + scaling * parts[f"{name}lora_B.weight"] @ parts[f"{name}lora_A.weight"]
        )
    torch.testing.assert_close(new[KEY.format(1)], expected, rtol=1e-5, atol=1e-6)


def test_what_serves_pictures_comes_along(
    lora: Callable[[str], ModelSource], tmp_path: Path
) -> None:
    source = lora("float32")
    for place in ("base", "merged"):
        (tmp_path / place).mkdir()
    for path in Path(source.model).iterdir():
        (tmp_path / "base" / path.name).write_bytes(path.read_bytes())
    others = ("preprocessor_config.json", "processor_config.json", "LICENSE", "README.md")
    for name in others:
        (tmp_path / "base" / name).write_text(name)
    moved = replace(source, model=str(tmp_path / "base"))
    checkpoint = read_checkpoint(tmp_path / "base")
    write_merged(moved, checkpoint, accept, tmp_path / "merged", quiet)
    for name in others[:3]:
        assert (tmp_path / "merged" / name).read_text() == name
    assert not (tmp_path / "merged" / "README.md").exists()


def test_scales_that_do_not_belong_stop_it_before_anything_is_written(
    lora: Callable[[str], ModelSource], tmp_path: Path
) -> None:
    def refuse(found: Fingerprint) -> None:
        raise FingerprintError("not yours")

    source = lora("float32")
    with pytest.raises(FingerprintError, match="not yours"):
        write_merged(source, read_checkpoint(Path(source.model)), refuse, tmp_path, quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full(lora: Callable[[str], ModelSource], tmp_path: Path) -> None:
    """A file size limit ends a write half-way, as a full disk does."""
    source, limits = lora("float32"), resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint = read_checkpoint(Path(source.model))
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(ExportError) as failed:
            write_merged(source, checkpoint, accept, tmp_path, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(failed.value).startswith("cannot write the merged model beside the output: ")
    assert "File too large" in str(failed.value)


# The place where it lies meanwhile


def test_scratch_lies_beside_the_output_and_goes(tmp_path: Path) -> None:
    with scratch(tmp_path / "new" / "out") as directory:
        assert directory.parent == tmp_path / "new"
        assert directory.name.startswith(".kvquant-")
        (directory / "a").write_text("a")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_scratch_goes_after_any_error(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), scratch(tmp_path / "out"):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_scratch_lies_where_a_link_leads(tmp_path: Path) -> None:
    """Else what is made there could be neither linked nor renamed into the output."""
    (tmp_path / "large" / "disk").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "large" / "disk")
    with scratch(tmp_path / "out") as directory:
        assert directory.parent == tmp_path / "large"


def test_scratch_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(ExportError, match=r"cannot write .*file/out: (File exists|Not a directory)"),
        scratch(tmp_path / "file" / "out"),
    ):
        raise AssertionError("never reached")


# An export from there


@pytest.fixture
def base(tiny_once: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return save_tiny(tiny_once("llama"), tmp_path / "scratch" / "merged")


def written_and_gone(base: Path, output: Path) -> Any:
    """An export that outlives its base."""
    before = load_file(base / "model.safetensors")
    written = write_from_scratch(read_checkpoint(base), SCALES, output, record={}, notify=quiet)
    for path in sorted(base.iterdir()):
        path.unlink()
    assert not any(path.is_symlink() for path in output.iterdir())
    after = load_file(output / "model-00001-of-00002.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert written.files == tuple(sorted(path.name for path in output.iterdir()))
    return written


def test_all_of_it_is_new(base: Path, tmp_path: Path) -> None:
    weights = base / "model.safetensors"
    size, node = weights.stat().st_size, weights.stat().st_ino
    written = written_and_gone(base, tmp_path / "out")
    assert written.weights is LinkMode.COPY
    assert written.new_bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert written.new_bytes > size
    assert written.remarks == ()
    # Not written twice, though.
    assert (tmp_path / "out" / "model-00001-of-00002.safetensors").stat().st_ino == node


def test_without_hard_links_it_is_copied(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symbolic link would lead nowhere afterwards."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    assert written_and_gone(base, tmp_path / "out").remarks == ()
