"""An export with folded weights: the same model, with scales of what it caches now."""

from __future__ import annotations

import hashlib
import json
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

from calib.collect import collect
from calib.solve import solve
from kvquant.errors import DataError, ExportError
from kvquant.export.export import ExportRequest, ExportResult, export
from kvquant.export.verify import verify
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.source import resolve
from kvquant.provenance import Provenance
from kvquant.scales import KVScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales

INDEX = "model.safetensors.index.json"
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. " * 40


def calibrated(model: Any, granularity: Granularity) -> KVScales:
    """FP8 scales from the text."""
    slot = TensorScheme(tensor_format("fp8"), granularity)
    geometry = CacheGeometry.from_config(model.config)
    stats = collect(model, [list(TEXT.encode()[:200])], geometry)
    return solve(stats, QuantScheme(slot, slot))


def furnished(model: Any, save_tiny: Callable[..., Path], root: Path) -> Path:
    """A directory with a model, its scales per channel and per head, and a text."""
    save_tiny(model, root / "base")
    (root / "text.txt").write_text(TEXT)
    for granularity in (Granularity.PER_CHANNEL, Granularity.PER_HEAD):
        known = Provenance(fingerprints=(fingerprint(model),))
        scales = replace(calibrated(model, granularity), provenance=known)
        save_scales(scales, root / f"{granularity.value}.safetensors")
    return root


@pytest.fixture(scope="module")
def root(tiny: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path_factory: Any) -> Path:
    """Such a directory for Qwen2 with a key outlier."""
    return furnished(tiny("qwen2"), save_tiny, tmp_path_factory.mktemp("folded"))


def folded(
    root: Path, output: Path | None, fold: str, *engines: str, said: list[str] | None = None,
    **options: Any,
) -> ExportResult:  # fmt: skip
    if fold == "fp8":
        options = {"scales": str(root / "per-channel"), **options}
    request = ExportRequest(
        resolve(str(root / "base")),
        engines=engines,
        output=output,
        fold=fold,
        data=str(root / "text.txt"),
        **options,
    )
    return export(request, (lambda line: None) if said is None else said.append)


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    index = json.loads((directory / INDEX).read_text())["weight_map"]
    return {name: load_file(directory / file)[name] for name, file in index.items()}


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def test_for_an_engine_that_computes_scales(
    root: Path, tmp_path: Path, forward: Callable[..., Any]
) -> None:
    from transformers import AutoModelForCausalLM

    before, said = digests(root / "base"), []
    result = folded(root, tmp_path / "out", "int4", "vllm", said=said)

    assert digests(root / "base") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert result.ok and result.tensors == ()
    (engine,) = result.engines
    assert engine.launch == (f"vllm serve {tmp_path / 'out'} --kv-cache-dtype int4_per_token_head",)
    assert engine.layers is None  # there is nothing to verify
    assert result.folded is not None
    assert (result.folded.quantizer, result.folded.layers) == ("int4-rotated", 2)
    assert result.folded.check.tensors > 0
    assert result.folded.check.logits < 1e-4
    errors = [each for each in result.folded.errors if each.quantizer == "int4-rotated"]
    assert all(each.key[1] < each.key[0] and each.value[1] <= each.value[0] for each in errors)
    assert said[-1] == "reading it back"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())

    assert result.written is not None
    assert result.written.directory == tmp_path / "out"
    assert set(result.written.files) == {path.name for path in (tmp_path / "out").iterdir()}
    base = load_file(root / "base" / "model.safetensors")
    new = load_all(tmp_path / "out")
    assert new.keys() == base.keys()
    changed = {name for name, tensor in new.items() if not torch.equal(tensor, base[name])}
    written = load_file(tmp_path / "out" / "model-00002-of-00002.safetensors")
    assert len(written) == result.folded.check.tensors
    assert changed == {name for name in written if base[name].any()}  # some biases are zero
    assert all(name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj") for name in changed)
    for name in changed:
        factors = (new[name] / base[name])[base[name] != 0].log2()
        assert torch.equal(factors, factors.round())
    ids = torch.arange(3, 40)[None]
    models = [
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        for place in (root / "base", tmp_path / "out")
    ]
    one, other = (forward(model, ids) for model in models)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)

    record = json.loads((tmp_path / "out" / "kvquant_export.json").read_text())
    assert record["scales"] is None
    assert record["engines"] == ["vllm"]
    assert record["launch"] == ["vllm serve {model} --kv-cache-dtype int4_per_token_head"]
    assert any("LoRA adapters of this model do not fit" in line for line in result.remarks)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_whoever_may_read_new_files_may_read_the_weights(
    root: Path, tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        folded(root, tmp_path / "out", "int4", "lmdeploy")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(modes, mode)


def test_an_outlier_among_the_key_channels(root: Path, tmp_path: Path) -> None:
    """Integers with one scale a token and head lose half of what they lost, and less."""
    result = folded(root, tmp_path / "out", "int4", "lmdeploy")
    assert result.folded is not None
    errors = [each for each in result.folded.errors if each.quantizer == "int4"]
    assert [each.layer for each in errors] == [0, 1]
    assert all(each.key[1] < each.key[0] / 2 for each in errors)
    assert result.engines[0].launch == (
        f"lmdeploy serve api_server {tmp_path / 'out'} --quant-policy 4",
    )


@pytest.fixture(scope="module")
def uneven(tiny: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path_factory: Any) -> Path:
    """The same for a model with value channels too small for FP8 beside the others.

    What reads them is as much larger, so that they matter.
    """
    root, model = tmp_path_factory.mktemp("uneven"), tiny("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[16:24] *= 2.0**-16
            for head in (2, 3):  # of queries, which read the second KV head
                layer.self_attn.o_proj.weight[:, 16 * head : 16 * head + 8] *= 2.0**16
            layer.self_attn.v_proj.weight[24:] /= 4  # so that the head's scale may grow
    return furnished(model, save_tiny, root)


@pytest.mark.parametrize("per_head", [False, True])
def test_static_scales_are_those_of_the_folded_model(
    uneven: Path, tmp_path: Path, per_head: bool
) -> None:
    """Calibrating what was written finds the very scales that were written with it."""
    from transformers import AutoModelForCausalLM

    result = folded(uneven, tmp_path / "out", "fp8", "vllm", per_head=per_head)

    assert result.ok
    assert result.folded is not None and result.folded.layers == 2
    errors = [each for each in result.folded.errors if each.quantizer == "fp8"]
    assert all(each.value[1] < each.value[0] / 2 for each in errors)
    assert [engine.layers for engine in result.engines] == [2]
    assert result.engines[0].launch[0].startswith(f"vllm serve {tmp_path / 'out'} ")
    layers = verify(tmp_path / "out", "vllm").layers
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]  # by which Transformers 5.17 would round what is cached
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert [layer.layer for layer in layers] == [0, 1]
    scales = calibrated(model, Granularity.PER_HEAD if per_head else Granularity.PER_TENSOR)
    for layer in layers:
        found = scales.layers[layer.layer]
        for held, needed in ((layer.key_scale, found.key), (layer.value_scale, found.value)):
            numbers = needed.scale.flatten().tolist()
            assert len(held) == len(numbers) == (2 if per_head else 1)
            assert all(
                least * (1 - 1e-5) <= scale <= least * 1.008
                for scale, least in zip(held, numbers, strict=True)
            )


def test_of_several_files_only_those_concerned_are_written(
    tiny_once: Callable[..., Any], save_tiny: Callable[..., Path], root: Path, tmp_path: Path
) -> None:
    base = save_tiny(tiny_once("qwen2"), tmp_path / "base")
    (base / "model.safetensors").unlink()
    tiny_once("qwen2").save_pretrained(base, max_shard_size="40KB")
    (tmp_path / "text.txt").write_text(TEXT)
    result = folded(tmp_path, tmp_path / "out", "int8", "vllm")
    assert result.written is not None
    linked = [
        path.name
        for path in base.glob("*.safetensors")
        if (tmp_path / "out" / path.name).exists() and (tmp_path / "out" / path.name).samefile(path)
    ]
    assert linked
    new = sum(
        (tmp_path / "out" / name).stat().st_size
        for name in result.written.files
        if name not in linked
    )
    assert result.written.new_bytes == new
    one = folded(root, tmp_path / "single", "int8", "vllm")
    assert one.folded == result.folded
    expected = load_all(tmp_path / "single")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in
               load_all(tmp_path / "out").items())  # fmt: skip


# What is refused, before anything takes long


@pytest.mark.parametrize(
    ("fold", "engines", "message"),
    [
        (
            "int8",
            ["sglang"],
            "what an int8 cache of SGLang 0.5.23 and later does to keys and values is not known "
            "here: folding for int8 is for vllm",
        ),
        (
            "int4",
            ["all"],
            "what an int4 cache of SGLang 0.5.23 and later does to keys and values is not known "
            "here: folding for int4 is for vllm and lmdeploy",
        ),
        (
            "int4",
            ["vllm", "lmdeploy"],
            "vllm and lmdeploy quantize to int4 in different ways: fold for one at a time",
        ),
        ("fp8", ["llama.cpp"], "llama.cpp has nothing like keys as fp8_e4m3 per-channel"),
    ],
)
def test_engines_that_do_not_fit(
    root: Path, tmp_path: Path, fold: str, engines: list[str], message: str
) -> None:
    said: list[str] = []
    with pytest.raises(ExportError) as refused:
        folded(root, tmp_path / "out", fold, *engines, said=said)
    assert str(refused.value).startswith(message)
    assert (said, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": None}, "folding for fp8 exports static scales too: give them with --scales"),
        (
            {"scales": "per-head"},
            "keys are calibrated per-head, folding changes single channels: solve the statistics "
            "again with --granularity per-channel (kvquant solve)",
        ),
        ({"output": None}, "this export writes a directory: name it with --output"),
    ],
)
def test_what_is_missing(root: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    if options.get("scales"):
        options = {"scales": str(root / options["scales"])}
    output = options.pop("output", tmp_path / "out")
    said: list[str] = []
    with pytest.raises(ExportError) as refused:
        folded(root, output, "fp8", "vllm", said=said, **options)
    assert str(refused.value) == message
    assert (said, list(tmp_path.iterdir())) == ([], [])


def test_a_model_that_cannot_be_folded(
    tiny_once: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    save_tiny(tiny_once("deepseek"), tmp_path / "base")
    said: list[str] = []
    with pytest.raises(ExportError, match=r"layer 0 caches a latent \(MLA\)"):
        folded(tmp_path, tmp_path / "out", "int8", "vllm", said=said)
    assert said == []
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_text_that_is_not_there(root: Path, tmp_path: Path) -> None:
    request = ExportRequest(
        resolve(str(root / "base")),
        engines=("vllm",),
        output=tmp_path / "out",
        fold="int8",
        data=str(tmp_path / "nothing.txt"),
    )
    with pytest.raises(DataError, match=r"nothing\.txt"):
        export(request, print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["loading", "looking", "choosing", "writing", "reading"])
def test_an_interrupt_leaves_nothing(root: Path, tmp_path: Path, moment: str) -> None:
    before = digests(root / "base")

    def interrupted(message: str) -> None:
        if message.startswith(moment):
            raise KeyboardInterrupt

    request = ExportRequest(
        resolve(str(root / "base")),
        engines=("vllm",),
        output=tmp_path / "out",
        fold="int8",
        data=str(root / "text.txt"),
    )
    with pytest.raises(KeyboardInterrupt):
        export(request, interrupted)
    assert list(tmp_path.iterdir()) == []
    assert digests(root / "base") == before


def test_a_disk_that_is_full(root: Path, tmp_path: Path) -> None:
    """Room for the folded tensors, not for the rest of their file: errors name what was asked."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def notify(message: str) -> None:
        if message.startswith("writing"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))

    request = ExportRequest(
        resolve(str(root / "base")),
        engines=("vllm",),
        output=tmp_path / "out",
        fold="int8",
        data=str(root / "text.txt"),
    )
    try:
        with pytest.raises(ExportError) as failed:
            export(request, notify)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(failed.value).startswith(f"cannot write {tmp_path / 'out'}: File too large (")
    assert list(tmp_path.iterdir()) == []


def test_an_output_behind_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "empty")
    assert folded(root, tmp_path / "out", "int8", "vllm").ok
    assert (tmp_path / "out" / "config.json").is_file()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["empty"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]
