"""A real model and its adapter, exported for vLLM, and loaded with the scales bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from calib.collect import collect
from calib.solve import solve
from kvquant.export.directory import LinkMode
from kvquant.export.export import ExportRequest, ExportResult, export
from kvquant.export.verify import verify
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import activate, adapter_names
from kvquant.models.loading import load
from kvquant.models.source import resolve
from kvquant.provenance import Provenance
from kvquant.scales import KVScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales
from kvquant.tensor_files import read_header
from kvquant.text.corpus import token_blocks
from kvquant.text.rows import read_rows

pytestmark = pytest.mark.real_model

ADAPTER = Path(__file__).parents[2] / "assets" / "smollm2-python-lora"
INDEX = "model.safetensors.index.json"
NAMES = [
    f"model.layers.{layer}.self_attn.{slot}_scale" for layer in range(30) for slot in ("k", "v")
]


def quiet(message: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def scales(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, KVScales]]:
    """FP8 scales of SmolLM2 and of it with the adapter, in a file and in memory."""
    loaded = load(resolve(str(ADAPTER)), device="cpu", notify=quiet)
    rows = read_rows(None, notify=quiet)
    blocks = token_blocks(rows, loaded.tokenizer, context_length=128, samples=2).blocks
    geometry = CacheGeometry.from_config(loaded.model.get_base_model().config)
    slot = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    root, made = tmp_path_factory.mktemp("scales"), {}
    for name, active in (("base", []), ("adapter", adapter_names(loaded.model))):
        with activate(loaded.model, active):
            found = solve(collect(loaded.model, blocks, geometry), QuantScheme(slot, slot))
            known = Provenance(fingerprints=(fingerprint(loaded.model),))
        found = replace(found, provenance=known)
        save_scales(found, root / f"{name}.safetensors")
        made[name] = root / name, found
    return made


def exported(
    scales: dict[str, tuple[Path, KVScales]], name: str, output: Path
) -> tuple[ExportResult, list[str]]:
    """``base`` as it is, or the ``adapter`` merged."""
    source = resolve("smollm2" if name == "base" else str(ADAPTER))
    said: list[str] = []
    request = ExportRequest(
        source, str(scales[name][0]), ("vllm",), output, merge_adapter=name == "adapter"
    )
    return export(request, said.append), said


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """The scales, by their bytes in the files that the index names."""
    shards = json.loads((directory / INDEX).read_text())["weight_map"]
    found = {}
    for name in NAMES:
        file = read_header(directory / shards[name])
        assert (file.tensors[name].dtype, file.tensors[name].shape) == ("F32", (1,))
        found[name] = torch.frombuffer(bytearray(file.read(name)), dtype=torch.float32)
    assert {name for name in shards if name.endswith("_scale")} == set(NAMES)
    return found


def assert_meant(found: dict[str, torch.Tensor], scales: KVScales) -> None:
    """Each is the smallest bfloat16 number that is not below what calibration found."""
    for index, layer in scales.layers.items():
        for slot, needed in (("k", layer.key.scale), ("v", layer.value.scale)):
            held = found[f"model.layers.{index}.self_attn.{slot}_scale"]
            assert held.bfloat16().float().equal(held)
            below = (held.bfloat16().view(torch.int16) - 1).view(torch.bfloat16).float()
            assert below.item() < needed.item() <= held.item()


@pytest.fixture(scope="module")
def exports(
    scales: dict[str, tuple[Path, KVScales]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, ExportResult, list[str]]]:
    root = tmp_path_factory.mktemp("exports")
    return {name: (root / name, *exported(scales, name, root / name)) for name in scales}


def test_the_base(
    scales: dict[str, tuple[Path, KVScales]],
    exports: dict[str, tuple[Path, ExportResult, list[str]]],
) -> None:
    output, result, said = exports["base"]
    assert result.ok and result.written is not None
    assert result.written.weights in (LinkMode.HARD, LinkMode.SYMBOLIC)
    assert result.written.new_bytes < 1_000_000
    assert len(said) == 1 and said[0].startswith("linking 1 weight file (53")
    found = stored(output)
    assert_meant(found, scales["base"][1])
    report = verify(output, "vllm")
    assert report.ok
    for layer in report.layers:
        name = f"model.layers.{layer.layer}.self_attn"
        assert layer.key_scale == (found[f"{name}.k_scale"].item(),)
        assert layer.value_scale == (found[f"{name}.v_scale"].item(),)


def test_the_adapter_merged(
    scales: dict[str, tuple[Path, KVScales]],
    exports: dict[str, tuple[Path, ExportResult, list[str]]],
) -> None:
    output, result, _ = exports["adapter"]
    assert result.ok and result.written is not None
    assert result.written.weights is LinkMode.COPY
    assert result.written.new_bytes > 500_000_000
    found = stored(output)
    assert_meant(found, scales["adapter"][1])
    with pytest.raises(AssertionError):  # the base's are others
        assert_meant(found, scales["base"][1])
    assert sorted(path.name for path in output.parent.iterdir()) == ["adapter", "base"]


VERSION = version("transformers")
IS_SKIPPING = tuple(map(int, VERSION.split(".")[:2])) >= (5, 23)


@pytest.mark.skipif(IS_SKIPPING, reason=f"Transformers {VERSION} skips the scheme of a cache")
@pytest.mark.parametrize("name", ["base", "adapter"])
def test_transformers_holds_them_bit_for_bit(
    exports: dict[str, tuple[Path, ExportResult, list[str]]], name: str
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        exports[name][0], dtype="auto", output_loading_info=True
    )
    assert set(info["missing_keys"]) == set(info["unexpected_keys"]) == set()
    held = dict(model.named_parameters())
    assert {key for key in held if key.endswith("_scale")} == set(NAMES)
    for key, scale in stored(exports[name][0]).items():
        assert held[key].dtype == torch.float32
        assert torch.equal(held[key].detach(), scale), key
