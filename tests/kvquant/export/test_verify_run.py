"""Exports are loaded for real where compressed-tensors is installed.

Transformers 5.24 skips the scheme of a cache; with the older versions of `make test-compat` the
scales are used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvquant.errors import ExportError, ModelError
from kvquant.export.export import ExportRequest
from kvquant.export.export import export as write_export
from kvquant.export.verify_run import run
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.source import resolve
from kvquant.provenance import Provenance
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales
from kvquant.tensor_files import read_header

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
VERSION = tuple(map(int, __import__("transformers").__version__.split(".")[:2]))
SKIPS = VERSION >= (5, 24)
loads = pytest.mark.skipif(SKIPS, reason="Transformers 5.24 skips the scheme of a cache")

LLAMA = "model.layers.{}.self_attn"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def export(tiny: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """``export(family, layers, **scheme)``: scales 0.01 of keys and 0.005 of values."""

    def build(
        family: str,
        layers: list[int],
        dtype: str = "float32",
        without_keys: bool = False,
        **scheme: Any,
    ) -> Path:
        model = tiny(family).to(getattr(torch, dtype))
        if without_keys:
            model.model.layers[0].self_attn.k_proj.weight.data.zero_()
        model.save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / SHARDS[0])
        per_head = scheme.get("strategy") == "attn_head"
        scales = {
            f"{LLAMA.format(layer)}.{slot}_scale": torch.full((2, 1, 1), number)
            if per_head
            else torch.tensor([number])
            for layer in layers
            for slot, number in (("k", 0.01), ("v", 0.005))
        }
        save_file(scales, tmp_path / SHARDS[1], metadata={"format": "pt"})
        weight_map = {key: name for name in SHARDS for key in read_header(tmp_path / name).tensors}
        index = {"metadata": {}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "frozen",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": {
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "symmetric": True,
                "dynamic": False,
                **scheme,
            },
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return build


@loads
@pytest.mark.parametrize(
    ("family", "layers", "scheme"),
    [
        ("llama", [0, 1], {}),
        ("llama", [0, 1], {"strategy": "attn_head"}),
        ("llama", [0, 1], {"type": "int"}),
        ("llama", [0, 1], {"dtype": "bfloat16"}),
        ("phi3", [0, 1], {}),
        ("qwen2", [0, 1], {}),
        ("gemma3n_text", [0, 1, 2, 3], {}),
    ],
)
def test_scales_are_loaded_and_used(
    export: Callable[..., Path], family: str, layers: list[int], scheme: dict[str, Any]
) -> None:
    report = run(export(family, layers, **scheme))
    assert report.ok, report.findings
    assert (report.missing, report.unexpected) == ((), ())
    assert report.loaded == tuple(layers)
    assert len(report.generated) == 8
    assert [(change.layer, change.slot) for change in report.changes] == [
        (0, "k_scale"),
        (0, "v_scale"),
    ]
    assert all(0 < change.logits < 100 * report.spread for change in report.changes)


@loads
@pytest.mark.parametrize("family", ["qwen2", "lfm2", "falcon_h1"])
def test_names_for_another_engine_do_no_harm(
    tiny: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    """SGLang's classes want ``attn.k_scale``, for which Transformers has no parameter."""
    model = tiny(family)
    model.save_pretrained(tmp_path / "base")
    geometry = CacheGeometry.from_config(model.config)
    slot = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    scale = TensorScales(torch.tensor([[0.01]]))
    layers = dict.fromkeys(geometry.attention_layers, LayerScales(scale, scale))
    known = Provenance(fingerprints=(fingerprint(model),))
    scales, output = str(tmp_path / "scales.safetensors"), tmp_path / "export"
    save_scales(KVScales(geometry, QuantScheme(slot, slot), layers, known), Path(scales))
    request = ExportRequest(resolve(str(tmp_path / "base")), scales, ("all",), output)
    write_export(request, lambda message: None)
    report = run(output)
    assert report.ok, report.findings
    path = f"model.layers.{geometry.attention_layers[0]}.self_attn.attn"
    assert {f"{path}.k_scale", f"{path}.v_scale"} <= set(report.unexpected)
    (found,) = report.findings
    assert found.what.startswith(f"Transformers found no parameter for {path}.k_scale, ")
    assert (found.fix, found.serious) == ("nothing, if they are for another engine", False)


@loads
def test_a_scale_without_effect_is_found(export: Callable[..., Path]) -> None:
    """The keys of the first layer are 0 here, whatever their scale."""
    report = run(export("llama", [0, 1], without_keys=True))
    (found,) = report.findings
    assert "multiplying k_scale by 0.015625 changes no logit" in found.what
    assert (found.layer, found.serious, report.ok) == (0, True, False)
    assert report.changes[1].logits > 0


@loads
def test_running_it_twice_gives_the_same(export: Callable[..., Path]) -> None:
    """Scales are put back as they were."""
    directory = export("llama", [0, 1])
    assert run(directory) == run(directory)


@pytest.mark.skipif(not SKIPS, reason="older Transformers use the scheme of a cache")
def test_newer_transformers_skip_the_scheme(export: Callable[..., Path]) -> None:
    report = run(export("llama", [0, 1]))
    assert not report.ok
    assert report.loaded == report.changes == ()
    assert len(report.unexpected) == 4
    (found,) = report.findings
    assert re.match(
        r"transformers 5\.\S+ skips the scheme of the cache: no attention takes scales, and 4 "
        r"scale tensors were passed over as unexpected",
        found.what,
    )
    assert "transformers==5.22" in found.fix


def test_the_report_is_plain_json(export: Callable[..., Path]) -> None:
    values = run(export("llama", [0, 1])).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False))["ok"] is not SKIPS
    assert set(values["versions"]) == {"transformers", "compressed-tensors", "torch"}


def test_what_verify_finds_is_not_run(export: Callable[..., Path]) -> None:
    report = run(export("llama", [0]))
    assert not report.ok
    assert report.versions["torch"]
    assert "layer 1: Transformers finds no scale" in report.findings[0].what
    assert report.loaded == report.generated == ()


def test_a_model_that_does_not_load_is_a_finding(export: Callable[..., Path]) -> None:
    directory = export("llama", [0, 1])
    config = json.loads((directory / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "no such thing", "factor": 2.0}
    (directory / "config.json").write_text(json.dumps(config))
    report = run(directory)
    assert not report.ok
    assert "does not load it" in report.findings[0].what


def test_only_transformers_runs_here(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="only Transformers runs here, not vllm"):
        run(tmp_path, "vllm")
    with pytest.raises(ModelError, match="there is no directory"):
        run(tmp_path / "nowhere")
