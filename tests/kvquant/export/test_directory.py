"""An export is complete or not there, and the base stays as it is."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvquant
from kvquant.errors import ExportError
from kvquant.export.checkpoint import read_checkpoint
from kvquant.export.directory import LinkMode, Written, write_export
from kvquant.export.target import Contribution

INDEX = "model.safetensors.index.json"
SHARDED = {"max_shard_size": "20KB"}
KEY, VALUE = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"
SCALES = {
    f"model.layers.{layer}.self_attn.{slot}_scale": torch.tensor([0.5 + layer])
    for layer in (0, 1)
    for slot in "kv"
}
KV_SCALES = Contribution(
    tensors=SCALES,
    config={"quantization_config": {"quant_method": "compressed-tensors"}},
    files={"extra.json": b"{}"},
)


@pytest.fixture
def base(tiny_once: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A Llama in one file, with a tokenizer and more."""
    return furnished(save_tiny(tiny_once("llama"), tmp_path / "base"))


@pytest.fixture
def sharded(base: Path, tiny_once: Callable[..., Any], tmp_path: Path) -> Path:
    """The same in many files."""
    shutil.copytree(base, tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    tiny_once("llama").save_pretrained(tmp_path / "sharded", **SHARDED)
    return tmp_path / "sharded"


@pytest.fixture(params=["base", "sharded"])
def either(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def furnished(directory: Path) -> Path:
    """Adds files that come along, and such that do not."""
    for name in ("chat_template.jinja", "vocab.model", "modeling_own.py", "LICENSE", "merges.txt"):
        (directory / name).write_text(name)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tools.jinja").write_text("tools")
    for name in (
        "README.md",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "model.gguf",
        "original.pth",
        "consolidated.safetensors",
        "adapter_config.json",
        "trainer_state.json",
        "kvquant_export.json",
        ".hidden.json",
    ):
        (directory / name).write_text("{}")
    return directory


def export(
    base: Path, output: Path, contribution: Contribution = KV_SCALES, **more: Any
) -> Written:
    options = {"record": {"what": "a test"}, "notify": lambda _: None, **more}
    return write_export(read_checkpoint(base), contribution, output, **options)


def state(directory: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of each file."""
    return {
        path.relative_to(directory).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def index_of(directory: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((directory / INDEX).read_text())
    return values


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """What loaders find: all tensors of the files that the index names, none of them twice."""
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index_of(directory)["weight_map"].values())):
        held = load_file(directory / name)
        assert not found.keys() & held.keys()
        found |= held
    return found


def leftovers(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.name.startswith(".kvquant")]


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


# What is written


def test_a_single_file_gets_a_shards_name(base: Path, tmp_path: Path) -> None:
    before = state(base)
    written = export(base, tmp_path / "out")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert written == Written(
        directory=tmp_path / "out",
        files=tuple(sorted(path_names(tmp_path / "out"))),
        weights=LinkMode.HARD,
        new_bytes=written.new_bytes,
        remarks=(),
    )
    assert sorted(name for name in written.files if name.endswith(".safetensors")) == names
    weights = load_file(base / "model.safetensors")
    assert_same(load_file(tmp_path / "out" / names[0]), weights)
    assert_same(load_file(tmp_path / "out" / names[1]), SCALES)
    assert index_of(tmp_path / "out") == {
        "metadata": {"total_size": sum(t.nbytes for t in weights.values()) + 4 * 4},
        "weight_map": {
            **dict.fromkeys(sorted(weights), names[0]),
            **dict.fromkeys(SCALES, names[1]),
        },
    }
    assert (tmp_path / "out" / names[0]).samefile(base / "model.safetensors")
    assert state(base) == before
    assert leftovers(tmp_path) == []


def path_names(directory: Path) -> list[str]:
    return [
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    ]


def test_shards_keep_their_names(sharded: Path, tmp_path: Path) -> None:
    before, old = state(sharded), index_of(sharded)
    written = export(sharded, tmp_path / "out")
    new = index_of(tmp_path / "out")
    assert new["weight_map"] == {
        **old["weight_map"],
        **dict.fromkeys(SCALES, "model-kvquant-scales.safetensors"),
    }
    assert list(new["weight_map"])[: len(old["weight_map"])] == list(old["weight_map"])
    assert new["metadata"] == {
        **old["metadata"],
        "total_size": old["metadata"]["total_size"] + 4 * 4,
    }
    for name in set(old["weight_map"].values()):
        assert (tmp_path / "out" / name).samefile(sharded / name)
    assert written.weights is LinkMode.HARD
    assert state(sharded) == before


@pytest.mark.parametrize("metadata", [None, {}, {"total_size": 7, "by": "hand"}])
def test_the_total_size_is_right_whatever_was_there(
    sharded: Path, tmp_path: Path, metadata: Any
) -> None:
    index = {"weight_map": index_of(sharded)["weight_map"]}
    if metadata is not None:
        index["metadata"] = metadata
    (sharded / INDEX).write_text(json.dumps(index))
    export(sharded, tmp_path / "out")
    total = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert index_of(tmp_path / "out")["metadata"] == {**(metadata or {}), "total_size": total}


def test_the_scales_say_what_they_are(either: Path, tmp_path: Path) -> None:
    export(either, tmp_path / "out")
    name = index_of(tmp_path / "out")["weight_map"][next(iter(SCALES))]
    with safe_open(tmp_path / "out" / name, "pt") as file:
        assert file.metadata() == {"format": "pt", "kvquant": kvquant.__version__}
        assert {str(file.get_tensor(key).dtype) for key in file.keys()} == {"torch.float32"}  # noqa: SIM118


def test_scales_that_share_memory_are_written(base: Path, tmp_path: Path) -> None:
    scale = torch.tensor([[2.0, 3.0]]).T
    export(base, tmp_path / "out", Contribution(tensors={"a.k_scale": scale, "a.v_scale": scale}))
    found = load_file(tmp_path / "out" / "model-00002-of-00002.safetensors")
    assert_same(found, {"a.k_scale": scale, "a.v_scale": scale})


def test_the_config_is_the_bases_and_what_is_set(base: Path, tmp_path: Path) -> None:
    old = json.loads((base / "config.json").read_text())
    export(base, tmp_path / "out", Contribution(config={"extra": {"a": 1e-05}, "vocab_size": 7}))
    new = json.loads((tmp_path / "out" / "config.json").read_text())
    assert new == {**old, "vocab_size": 7, "extra": {"a": 1e-05}}
    assert list(new) == [*old, "extra"]


def test_what_comes_along_and_what_does_not(base: Path, tmp_path: Path) -> None:
    tokenizer = [name for name in path_names(base) if name.startswith("tokenizer")]
    written = export(base, tmp_path / "out")
    assert len(tokenizer) == 2
    assert set(written.files) == {
        *tokenizer,
        "LICENSE",
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "config.json",
        "extra.json",
        "generation_config.json",
        "kvquant_export.json",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "modeling_own.py",
        "vocab.model",
    }
    assert set(written.files) == set(path_names(tmp_path / "out"))
    for name in (*tokenizer, "generation_config.json", "additional_chat_templates/tools.jinja"):
        copied = tmp_path / "out" / name
        assert copied.read_bytes() == (base / name).read_bytes()
        assert not copied.samefile(base / name), "an edit would reach the base"
    assert json.loads((tmp_path / "out" / "kvquant_export.json").read_text()) == {"what": "a test"}


def test_scales_of_another_export_stay_there(base: Path, tmp_path: Path) -> None:
    """A file of calibrated scales beside the base is of whatever was exported there."""
    for name in ("kv_cache_calib.json", "kv_cache_scales_tp2.json", "kvquant_scales.json"):
        (base / name).write_text("{}")
    new = Contribution(files={"kv_cache_scales_tp2.json": b"[]"})
    written = export(base, tmp_path / "out", new)
    assert [name for name in written.files if "scales" in name or "calib" in name] == [
        "kv_cache_scales_tp2.json"
    ]
    assert (tmp_path / "out" / "kv_cache_scales_tp2.json").read_bytes() == b"[]"


def test_new_bytes_are_all_but_the_links(either: Path, tmp_path: Path) -> None:
    linked = export(either, tmp_path / "linked")
    size = {name: (tmp_path / "linked" / name).stat().st_size for name in linked.files}
    weights = set(index_of(tmp_path / "linked")["weight_map"].values())
    ours = {name for name in weights if tensors_in(tmp_path / "linked" / name) == SCALES.keys()}
    assert len(ours) == 1
    assert linked.new_bytes == sum(size[name] for name in size if name not in weights - ours)
    copied = export(either, tmp_path / "copied", copy=True)
    assert copied.new_bytes == sum(size.values())


def tensors_in(path: Path) -> set[str]:
    return set(load_file(path))


def test_without_scales_the_weights_need_no_index(
    base: Path, sharded: Path, tmp_path: Path
) -> None:
    plain = Contribution(files={"kv_cache_calib.json": b"[]"})
    single = export(base, tmp_path / "single", plain)
    assert [name for name in single.files if "safetensors" in name] == ["model.safetensors"]
    assert (tmp_path / "single" / "kv_cache_calib.json").read_bytes() == b"[]"
    export(sharded, tmp_path / "several", plain)
    assert (tmp_path / "several" / INDEX).read_bytes() == (sharded / INDEX).read_bytes()
    assert_same(tensors_of(tmp_path / "several"), load_file(base / "model.safetensors"))


def test_files_of_an_engine_take_precedence_over_the_bases(base: Path, tmp_path: Path) -> None:
    (base / "hf_quant_config.json").write_text('{"a": 1}')
    export(base, tmp_path / "out", Contribution(files={"hf_quant_config.json": b"{}"}))
    assert (tmp_path / "out" / "hf_quant_config.json").read_bytes() == b"{}"
    assert (base / "hf_quant_config.json").read_text() == '{"a": 1}'


def test_no_file_has_a_name_that_makes_engines_ignore_the_index(
    sharded: Path, tmp_path: Path
) -> None:
    index = index_of(sharded)
    first, second = sorted(set(index["weight_map"].values()))[:2]
    unsafe = {first: "model.safetensors", second: "consolidated-00001-of-00002.safetensors"}
    for old, new in unsafe.items():
        (sharded / old).rename(sharded / new)
    index["weight_map"] = {k: unsafe.get(name, name) for k, name in index["weight_map"].items()}
    (sharded / INDEX).write_text(json.dumps(index))
    expected = tensors_of(sharded)
    written = export(sharded, tmp_path / "out")
    assert {f"base-{name}" for name in unsafe.values()} < set(written.files)
    assert not set(unsafe.values()) & set(written.files)
    assert_same(tensors_of(tmp_path / "out"), {**expected, **SCALES})


def test_a_quantized_base_passes_through(base: Path, tmp_path: Path) -> None:
    weights = load_file(base / "model.safetensors")
    weights[KEY] = weights[KEY].to(torch.float8_e4m3fn)
    weights[f"{KEY}_scale"] = torch.tensor([2.0])
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "fp8", "ignored": None}}
    (base / "config.json").write_text(json.dumps(quantized))
    export(base, tmp_path / "out", Contribution(tensors=SCALES))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == quantized
    assert_same(tensors_of(tmp_path / "out"), {**weights, **SCALES})


def test_an_export_is_exported_again(either: Path, tmp_path: Path) -> None:
    """Its scales make way for the new ones; no tensor is in two files."""
    export(either, tmp_path / "first")
    newer = {name: scale * 2 for name, scale in SCALES.items()}
    written = export(tmp_path / "first", tmp_path / "second", Contribution(tensors=newer))
    assert written.weights is LinkMode.HARD
    assert sorted(name for name in written.files if name.endswith(".safetensors")) == sorted(
        path.name for path in (tmp_path / "first").glob("*.safetensors")
    )
    assert_same(tensors_of(tmp_path / "second"), {**tensors_of(tmp_path / "first"), **newer})


def test_other_scales_than_before_are_added(sharded: Path, tmp_path: Path) -> None:
    export(sharded, tmp_path / "first")
    export(
        tmp_path / "first", tmp_path / "second", Contribution(tensors={"a.q_scale": torch.ones(1)})
    )
    assert (tmp_path / "second" / "model-kvquant-scales-2.safetensors").is_file()
    expected = {**tensors_of(tmp_path / "first"), "a.q_scale": torch.ones(1)}
    assert_same(tensors_of(tmp_path / "second"), expected)


def test_a_name_that_is_taken_is_not_used_again(sharded: Path, tmp_path: Path) -> None:
    """The first scales make way, those beside them stay."""
    second = Contribution(tensors={"a.q_scale": torch.ones(1)})
    export(sharded, tmp_path / "first")
    export(tmp_path / "first", tmp_path / "second", second)
    before = state(tmp_path / "second")
    export(tmp_path / "second", tmp_path / "third")
    assert_same(tensors_of(tmp_path / "third"), tensors_of(tmp_path / "second"))
    third = index_of(tmp_path / "third")["weight_map"]
    assert third["a.q_scale"] == "model-kvquant-scales-2.safetensors"
    assert {third[name] for name in SCALES} == {"model-kvquant-scales.safetensors"}
    more = Contribution(tensors={**SCALES, "b.q_scale": torch.ones(1)})
    (tmp_path / "second" / "model-kvquant-scales.safetensors").rename(
        tmp_path / "second" / "scales.safetensors"
    )
    index = index_of(tmp_path / "second")
    index["weight_map"] |= dict.fromkeys(SCALES, "scales.safetensors")
    (tmp_path / "second" / INDEX).write_text(json.dumps(index))
    export(tmp_path / "second", tmp_path / "fourth", more)
    fourth = tensors_of(tmp_path / "fourth")
    assert fourth.keys() == {*index["weight_map"], "b.q_scale"}
    name = "model-kvquant-scales-2.safetensors"
    assert state(tmp_path / "second")[name] == before[name]


def test_no_file_is_written_over_a_link(base: Path, tmp_path: Path) -> None:
    before = state(base)
    name = "model-00001-of-00002.safetensors"
    with pytest.raises(ExportError, match=r"cannot write .*: File exists"):
        export(base, tmp_path / "out", Contribution(tensors=SCALES, files={name: b"mine"}))
    assert_nothing_left(tmp_path, base, before)


def test_an_empty_directory_may_be_there(base: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert export(base, tmp_path / "out").directory == tmp_path / "out"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    export(base, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same(tensors_of(tmp_path / "real"), tensors_of(tmp_path / "out"))
    export(base, tmp_path / "new" / "and" / "deep")
    assert leftovers(tmp_path) == []


def test_it_says_what_it_does(sharded: Path, tmp_path: Path) -> None:
    said: list[str] = []
    export(sharded, tmp_path / "out", notify=said.append)
    count = len(set(read_checkpoint(sharded).shards.values()))
    assert said == [f"linking {count} weight files (364.3 kB)"]


# Where the weights are


def test_a_copy_is_independent(either: Path, tmp_path: Path) -> None:
    expected = {**load_all(either), **SCALES}
    written = export(either, tmp_path / "out", copy=True)
    assert written.weights is LinkMode.COPY
    shutil.rmtree(either)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "out").glob("*.safetensors"))
    assert_same(tensors_of(tmp_path / "out"), expected)


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    single = directory / "model.safetensors"
    return load_file(single) if single.is_file() else tensors_of(directory)


def test_the_hubs_cache_is_linked_to_its_blobs(sharded: Path, tmp_path: Path) -> None:
    hub = tmp_path / "models--org--name"
    blobs, snapshot = hub / "blobs", hub / "snapshots" / ("c" * 40)
    for directory in (blobs, snapshot):
        directory.mkdir(parents=True)
    files = [path for path in sorted(sharded.iterdir()) if path.is_file()]
    for number, file in enumerate(files):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    before = state(hub)
    written = export(snapshot, tmp_path / "out")
    assert written.weights is LinkMode.HARD
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert_same(tensors_of(tmp_path / "out"), {**tensors_of(sharded), **SCALES})
    shard = index_of(sharded)["weight_map"][KEY]
    assert (tmp_path / "out" / shard).stat().st_ino == (snapshot / shard).resolve().stat().st_ino
    assert state(hub) == before


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on another filesystem; where there is none, hard links fail as they do there."""
    memory = Path("/dev/shm")
    if memory.is_dir() and memory.stat().st_dev != tmp_path.stat().st_dev:
        with tempfile.TemporaryDirectory(dir=memory) as directory:
            yield Path(directory)
        return

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refused)
    (tmp_path / "elsewhere").mkdir()
    yield tmp_path / "elsewhere"


def test_on_another_filesystem_the_links_are_symbolic(
    either: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(either.parent)
    before = state(either)
    written = export(Path(either.name), elsewhere / "out")
    assert written.weights is LinkMode.SYMBOLIC
    links = [path for path in (elsewhere / "out").iterdir() if path.is_symlink()]
    assert len(links) == len(set(read_checkpoint(either).shards.values()))
    assert {Path(os.readlink(path)).parent for path in links} == {either}
    assert len(written.remarks) == 1
    assert "symbolic links" in written.remarks[0]
    assert "--copy" in written.remarks[0]
    assert written.new_bytes == sum(
        path.stat().st_size
        for path in (elsewhere / "out").rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    assert_same(tensors_of(elsewhere / "out"), {**load_all(either), **SCALES})
    assert state(either) == before


def test_a_copy_reaches_another_filesystem(base: Path, elsewhere: Path) -> None:
    written = export(base, elsewhere / "out", copy=True)
    assert (written.weights, written.remarks) == (LinkMode.COPY, ())
    assert not any(path.is_symlink() for path in (elsewhere / "out").iterdir())


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_where_hard_links_are_not_possible_the_links_are_symbolic(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Somebody else's file, too many links, a filesystem without any."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refused)
    assert export(base, tmp_path / "out").weights is LinkMode.SYMBOLIC


# Weights that are replaced


def rewritten(base: Path, path: Path, *names: str) -> Path:
    """A file with the tensors `names`, doubled."""
    held = {name: load_all(base)[name] * 2 for name in names}
    save_file(held, path, metadata={"format": "pt"})
    return path


def test_a_replaced_tensor_is_in_one_file_only(either: Path, tmp_path: Path) -> None:
    before, old = state(either), load_all(either)
    file = rewritten(either, tmp_path / "new.safetensors", KEY, VALUE)
    said: list[str] = []
    written = export(
        either, tmp_path / "out", replaced={KEY: file, VALUE: file}, notify=said.append
    )
    expected = {**old, KEY: old[KEY] * 2, VALUE: old[VALUE] * 2, **SCALES}
    assert_same(tensors_of(tmp_path / "out"), expected)
    stored = index_of(tmp_path / "out")
    assert stored["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    for name in set(stored["weight_map"].values()):
        with safe_open(tmp_path / "out" / name, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert set(opened.keys()) == {k for k, v in stored["weight_map"].items() if v == name}
    assert state(either) == before
    assert file.is_file()
    assert any("without" in line for line in said)
    assert len(written.remarks) == 1


def test_names_where_a_single_file_is_trimmed(base: Path, tmp_path: Path) -> None:
    file = rewritten(base, tmp_path / "new.safetensors", KEY)
    said: list[str] = []
    written = export(base, tmp_path / "out", replaced={KEY: file}, notify=said.append)
    names = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [name for name in written.files if name.endswith(".safetensors")] == names
    weight_map = index_of(tmp_path / "out")["weight_map"]
    assert weight_map[KEY] == names[1]
    assert {weight_map[name] for name in SCALES} == {names[2]}
    assert written.weights is LinkMode.COPY
    assert written.new_bytes == sum(
        (tmp_path / "out" / name).stat().st_size for name in written.files
    )
    assert said == [f"writing {names[0]} without 1 of its 21 tensors"]
    assert written.remarks == (
        "1 weight file (353.5 kB) written anew without the tensors that the export replaces, "
        f"because engines read whole files and a tensor must be in one of them only: {names[0]}",
    )


def test_shards_without_replaced_tensors_stay_links(sharded: Path, tmp_path: Path) -> None:
    old = index_of(sharded)["weight_map"]
    file = rewritten(sharded, tmp_path / "new.safetensors", KEY)
    written = export(sharded, tmp_path / "out", replaced={KEY: file})
    assert written.weights is LinkMode.HARD
    new = index_of(tmp_path / "out")["weight_map"]
    assert new[KEY] == "model-kvquant-weights.safetensors"
    assert (tmp_path / "out" / new[KEY]).samefile(file)
    for name in set(old.values()) - {old[KEY]}:
        assert (tmp_path / "out" / name).samefile(sharded / name)
    assert not (tmp_path / "out" / old[KEY]).exists() or not (tmp_path / "out" / old[KEY]).samefile(
        sharded / old[KEY]
    )


def test_a_shard_of_which_nothing_is_left_is_left_out(sharded: Path, tmp_path: Path) -> None:
    old = index_of(sharded)["weight_map"]
    whole = [name for name in old if old[name] == old["lm_head.weight"]]
    file = rewritten(sharded, tmp_path / "new.safetensors", *whole)
    written = export(sharded, tmp_path / "out", replaced=dict.fromkeys(whole, file))
    assert old["lm_head.weight"] not in written.files
    assert written.remarks == ()
    assert tensors_of(tmp_path / "out").keys() == old.keys() | SCALES.keys()


def test_several_files_may_replace(base: Path, tmp_path: Path) -> None:
    old = load_all(base)
    one = rewritten(base, tmp_path / "one.safetensors", KEY)
    two = rewritten(base, tmp_path / "two.safetensors", VALUE)
    nothing = Contribution()
    export(base, tmp_path / "out", nothing, replaced={KEY: one, VALUE: two})
    expected = {**old, KEY: old[KEY] * 2, VALUE: old[VALUE] * 2}
    assert_same(tensors_of(tmp_path / "out"), expected)
    assert set(index_of(tmp_path / "out")["weight_map"].values()) == {
        f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)
    }


def test_a_replaced_tensor_that_lies_in_two_shards_is_dropped_from_both(
    sharded: Path, tmp_path: Path
) -> None:
    """Some tools leave the old one behind, where the index does not point."""
    weight_map = index_of(sharded)["weight_map"]
    other = sharded / weight_map[VALUE]
    assert weight_map[VALUE] != weight_map[KEY]
    file = rewritten(sharded, tmp_path / "new.safetensors", KEY)
    expected = load_file(file)[KEY]
    save_file({**load_file(other), KEY: torch.zeros(32, 64)}, other)
    export(sharded, tmp_path / "out", replaced={KEY: file})
    assert torch.equal(tensors_of(tmp_path / "out")[KEY], expected)


def test_replacements_are_copied_from_another_filesystem(
    base: Path, elsewhere: Path, tmp_path: Path
) -> None:
    """Never linked to: who made them deletes them."""
    file = rewritten(base, elsewhere / "new.safetensors", KEY)
    export(base, tmp_path / "out", replaced={KEY: file})
    file.unlink()
    assert KEY in tensors_of(tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_a_shard_is_trimmed_without_being_read_whole(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    """Peak memory: 48 MB of weights under a limit that leaves room for less."""
    tiny("llama", vocab_size=90_000).save_pretrained(tmp_path / "base")
    file = rewritten(tmp_path / "base", tmp_path / "new.safetensors", KEY)
    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    assert size > 45_000_000
    code = (
        "import sys, resource; from pathlib import Path\n"
        "from kvquant.export.checkpoint import read_checkpoint\n"
        "from kvquant.export.directory import write_export\n"
        "from kvquant.export.target import Contribution\n"
        "base, file, out = map(Path, sys.argv[1:4])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "write_export(read_checkpoint(base), Contribution(), out, record={}, notify=print,\n"
        "    replaced={sys.argv[4]: file})\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    places = [tmp_path / "base", file, tmp_path / "out"]
    command = [sys.executable, "-c", code, *map(str, places), KEY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 30_000  # kilobytes


@pytest.mark.parametrize(
    "change",
    [
        lambda held: {**held, VALUE: held[KEY].clone()},
        lambda held: {KEY: held[KEY].bfloat16()},
        lambda held: {KEY: held[KEY].flatten()},
        lambda held: {"model.nowhere": held[KEY]},
        lambda held: {},
    ],
    ids=["more", "dtype", "shape", "another", "none"],
)
def test_a_file_that_is_no_replacement_is_refused(
    base: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any]
) -> None:
    file = rewritten(base, tmp_path / "new.safetensors", KEY)
    save_file(change(load_file(file)), file)
    with pytest.raises(ExportError, match=r"new\.safetensors has \d tensors, [01] of which"):
        export(base, tmp_path / "out", replaced={KEY: file})
    assert not (tmp_path / "out").exists()


# What is refused, and what goes wrong half-way


def assert_nothing_left(place: Path, base: Path, before: Any) -> None:
    assert leftovers(place) == []
    assert not (place / "out").exists()
    assert state(base) == before


def test_an_output_that_is_not_empty_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(ExportError, match=r"out is not empty \(1 entry\): name a new directory"):
        export(base, tmp_path / "out")
    assert path_names(tmp_path / "out") == ["mine"]
    export(base, tmp_path / "first")
    before = state(tmp_path / "first")
    with pytest.raises(ExportError, match=r"first is not empty \(15 entries\)"):
        export(base, tmp_path / "first")
    assert state(tmp_path / "first") == before


def test_an_output_that_is_a_file_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for output in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(ExportError, match="Not a directory"):
            export(base, output)
    assert (tmp_path / "out").read_text() == "mine"
    with pytest.raises(ExportError, match="File name too long"):
        export(base, tmp_path / ("o" * 300))


def test_an_output_in_the_base_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(base)
    before = state(base)
    for output in (base, base / "out", base / "a" / "b", tmp_path / "link", tmp_path / "link/out"):
        with pytest.raises(ExportError, match="is or lies in the model's own directory"):
            export(base, output)
    assert_nothing_left(tmp_path, base, before)
    assert leftovers(base) == []


def test_a_name_that_begins_like_the_bases_is_fine(base: Path, tmp_path: Path) -> None:
    export(base, tmp_path / "base-fp8kv")


EXPORT = """
import sys
from pathlib import Path
from kvquant.errors import ExportError
from kvquant.export.checkpoint import read_checkpoint
from kvquant.export.directory import write_export
from kvquant.export.target import Contribution
base, output, copy, *replaced = sys.argv[1:]
replaced = {key: Path(file) for key, file in zip(replaced[::2], replaced[1::2])}
try:
    write_export(
        read_checkpoint(Path(base)), Contribution(), Path(output),
        copy=copy == "True", replaced=replaced, record={}, notify=lambda _: None,
    )
except ExportError as error:
    sys.exit(str(error))
"""


def failed_export(*arguments: object, limit: Any = None) -> str:
    """What a process that exports says when it fails."""
    command = [sys.executable, "-c", EXPORT, *map(str, arguments)]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stderr.removesuffix("\n")


def failed_export_to_a_mount(options: str, mount: Path, *arguments: object) -> tuple[str, str]:
    """The same with a filesystem of its own at `mount`; what is in there after it, too."""
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mounted = f'mount -t tmpfs -o {options} none "$0"'
    possible = shutil.which("unshare") is not None and (
        subprocess.run([*namespace, mounted, mount], capture_output=True, check=False).returncode
        == 0
    )
    if not possible:
        pytest.skip("mounting is not possible here")
    script = f'{mounted} && "$@"; code=$?; ls -A "$0"; exit $code'
    command = [*namespace, script, mount, sys.executable, "-c", EXPORT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stderr.removesuffix("\n"), done.stdout


def test_the_root_of_a_filesystem_is_refused(base: Path, tmp_path: Path) -> None:
    """Nothing beside it could become it."""
    output = tmp_path / "volume"
    output.mkdir()
    assert failed_export_to_a_mount("size=9M", output, base, output, False) == (
        f"{output} is the root of a filesystem: name a directory in it",
        "",
    )
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("below", ["out", "new/out"])
def test_a_read_only_place_is_refused(base: Path, tmp_path: Path, below: str) -> None:
    place = tmp_path / "volume"
    place.mkdir()
    assert failed_export_to_a_mount("ro", place, base, place / below, False) == (
        f"cannot write {place / below}: Read-only file system",
        "",
    )


def test_a_disk_that_is_too_small_is_refused(base: Path, tmp_path: Path) -> None:
    """Seen before anything is written."""
    place = tmp_path / "volume"
    place.mkdir()
    said, left = failed_export_to_a_mount("size=64k", place, base, place / "out", True)
    assert said.startswith(f"cannot write {place / 'out'}: No space left on device (36")
    assert said.endswith(" kB to write, 65.5 kB free)")
    assert left == ""


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("copy", [False, True])
def test_a_disk_that_fills_up_half_way_leaves_nothing(
    sharded: Path, tmp_path: Path, copy: bool, replace: bool
) -> None:
    """A file size limit ends a write half-way, as a full disk does."""
    (sharded / "tokenizer.json").write_bytes(b" " * 60_000)
    before = state(sharded)
    file = rewritten(sharded, tmp_path / "new.safetensors", KEY)
    replaced = [KEY, file] if replace else []

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    said = failed_export(sharded, tmp_path / "out", copy, *replaced, limit=limit)
    assert said.startswith(f"cannot write {tmp_path / 'out'}: File too large (")
    assert said.endswith(" free)")
    assert_nothing_left(tmp_path, sharded, before)


@pytest.mark.parametrize(
    ("moment", "copy"),
    [("linking", False), ("copying", True), ("writing", False), ("writing", True)],
)
def test_an_interrupt_leaves_nothing(
    sharded: Path, tmp_path: Path, moment: str, copy: bool
) -> None:
    file = rewritten(sharded, tmp_path / "new.safetensors", KEY)
    before = state(sharded)

    def interrupted(message: str) -> None:
        if message.startswith(moment):
            (staging,) = leftovers(tmp_path)
            assert any((tmp_path / staging).iterdir()) == (moment == "writing")
            raise KeyboardInterrupt

    options: dict[str, Any] = {"copy": copy, "notify": interrupted, "replaced": {KEY: file}}
    with pytest.raises(KeyboardInterrupt):
        export(sharded, tmp_path / "out", **options)
    assert_nothing_left(tmp_path, sharded, before)


def test_an_interrupt_leaves_an_empty_output_empty(base: Path, tmp_path: Path) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        export(base, tmp_path / "out", notify=interrupted)
    assert list((tmp_path / "out").iterdir()) == []
    assert leftovers(tmp_path) == []


def test_an_output_that_is_filled_meanwhile_stays_as_it_is(base: Path, tmp_path: Path) -> None:
    def filled(_: str) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("theirs")

    with pytest.raises(ExportError, match=r"cannot write .*not empty"):
        export(base, tmp_path / "out", notify=filled)
    assert path_names(tmp_path / "out") == ["theirs"]
    assert leftovers(tmp_path) == []


def test_writing_needs_torch_only_for_scales(base: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from kvquant.export.checkpoint import read_checkpoint\n"
        "from kvquant.export.directory import write_export\n"
        "from kvquant.export.target import Contribution\n"
        "write_export(read_checkpoint(Path(sys.argv[1])), Contribution(), Path(sys.argv[2]),\n"
        "    record={}, notify=print)\n"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(base), str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
