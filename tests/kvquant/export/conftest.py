"""Jobs for exporters, and directories for verifiers, built by hand.

In a job a scale is a number, a list per head or rows per channel. The names in a directory are
those that each engine's documentation gives, not the exporters'.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from kvquant.export.checkpoint import AttentionModule, Checkpoint
from kvquant.export.target import ExportJob
from kvquant.export.verify_report import Finding, VerifyReport
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.tensor_files import StoredTensor, read_header


def _granularity(scale: Any) -> Granularity:
    if not isinstance(scale, list):
        return Granularity.PER_TENSOR
    return Granularity.PER_CHANNEL if isinstance(scale[0], list) else Granularity.PER_HEAD


def _tensor(scale: Any) -> torch.Tensor:
    rows = scale if isinstance(scale, list) else [scale]
    return torch.tensor([row if isinstance(row, list) else [row] for row in rows]).float()


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., ExportJob]:
    """``make_job({0: (key scale, value scale), …}, **what_differs)`` for a model of Llama's kind.

    Layers are of 2 KV heads of 16 unless `layers` has their geometry; those without scales are
    skipped.
    """

    def make(
        scales: Mapping[int, tuple[Any, Any]],
        *,
        layers: Sequence[LayerGeometry] | None = None,
        model_type: str = "llama",
        architecture: str = "LlamaForCausalLM",
        path: str = "model.layers.{}.self_attn",
        projections: Sequence[str] = ("k_proj", "v_proj"),
        key_format: str = "fp8",
        value_format: str = "fp8",
        asymmetric: bool = False,
        residual_length: int = 0,
        config: Mapping[str, Any] | None = None,
        quantization: Mapping[str, Any] | None = None,
        tensors: Sequence[str] = (),
        per_head: bool = False,
        tensor_parallel: int = 1,
    ) -> ExportJob:
        if layers is None:
            layers = [LayerGeometry(LayerKind.FULL, 2, 16, 16)] * len(scales)
        geometry = CacheGeometry(model_type, tuple(layers), 512)
        first = next(iter(scales.values()))
        key, value = (
            TensorScheme(tensor_format(name), _granularity(scale), not asymmetric)
            for name, scale in zip((key_format, value_format), first, strict=True)
        )
        skipped = frozenset(geometry.attention_layers) - scales.keys()
        scheme = QuantScheme(key, value, skipped, residual_length=residual_length)

        def module(index: int) -> AttentionModule:
            name = path.format(index)
            return AttentionModule(index, name, {p: f"{name}.{p}.weight" for p in projections})

        def slot(scale: Any) -> TensorScales:
            made = _tensor(scale)
            return TensorScales(made, torch.zeros_like(made) if asymmetric else None)

        checkpoint = Checkpoint(
            tmp_path,
            {"architectures": [architecture], "model_type": model_type, **(config or {})},
            {name: StoredTensor("F32", (1,), 8, 12) for name in tensors},
            {name: "model.safetensors" for name in tensors},
            None,
            quantization,
        )
        return ExportJob(
            checkpoint,
            geometry,
            {i: module(i) for i in geometry.attention_layers},
            KVScales(
                geometry,
                scheme,
                {i: LayerScales(slot(k), slot(v)) for i, (k, v) in scales.items()},
            ),
            per_head,
            tensor_parallel,
        )

    return make


@pytest.fixture
def plain() -> Callable[..., dict[str, tuple[str, Any]]]:
    """``plain(tensors)``: name -> dtype and numbers, for literal comparison."""

    def run(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, Any]]:
        return {
            name: (str(tensor.dtype).removeprefix("torch."), tensor.tolist())
            for name, tensor in tensors.items()
        }

    return run


# --- directories for verifiers, built by hand -----------------------------------------------------

SCALES = "model-00002-of-00002.safetensors"
BASE = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "compressed-tensors": {
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
        },
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["*"],
        "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "quark": {"quant_method": "quark"},
}
"""How config.json declares quantization."""

PLAIN, PROJECTIONS = ("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")
LLAMA = "model.layers.{}.self_attn"


class Export:
    """A directory with a model's weights and a shard of scales, to be changed and written."""

    def __init__(self, base: Path, path: Path, block: str | None) -> None:
        self.path = Path(shutil.copytree(base, path))
        (path / "model.safetensors").rename(path / BASE)
        self.config = json.loads((path / "config.json").read_text())
        if block is not None:
            self.declare(block)
        self.scales: dict[str, Any] = {}
        self.metadata: dict[str, str] | None = {"format": "pt"}
        self.index: dict[str, Any] | None = {}

    def declare(self, block: str, **changes: Any) -> Export:
        """The quantization_config of that name."""
        self.config["quantization_config"] = {**json.loads(json.dumps(BLOCKS[block])), **changes}
        return self

    def beside(self, **quantization: Any) -> None:
        """ModelOpt's own file."""
        values = {"producer": {"name": "modelopt"}, "quantization": quantization}
        (self.path / "hf_quant_config.json").write_text(json.dumps(values))

    @property
    def scheme(self) -> dict[str, Any]:
        """The KV part of the config."""
        found: dict[str, Any] = self.config["quantization_config"]["kv_cache_scheme"]
        return found

    def add(self, path: str, layers: range | list[int], names: tuple[str, str] = PLAIN) -> Export:
        """Scales 0.25, 0.26 … of keys and 0.125, 0.135 … of values."""
        for layer in layers:
            for name, first in zip(names, (0.25, 0.125), strict=True):
                scale = np.array([first + layer / 100], np.float32)
                self.scales[f"{path.format(layer)}.{name}"] = scale
        return self

    def rename(self, old: str, new: str) -> None:
        """A scale by another name."""
        self.scales[new] = self.scales.pop(old)

    def write(self) -> Path:
        """Puts it all on disk."""
        save_file(self.scales, self.path / SCALES, metadata=self.metadata)
        (self.path / "config.json").write_text(json.dumps(self.config))
        if self.index is not None:
            files = {name: read_header(self.path / name) for name in (BASE, SCALES)}
            listed = {key: name for name, file in files.items() for key in file.tensors}
            size = sum(files[name].nbytes(key) for key, name in listed.items())
            index = {"metadata": {"total_size": size}, "weight_map": listed, **self.index}
            (self.path / INDEX).write_text(json.dumps(index))
        return self.path


@pytest.fixture(scope="session")
def bases(
    tiny_once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """``bases(family)``: a tiny model on disk, saved once."""
    made: dict[str, Path] = {}

    def build(family: str, **overrides: Any) -> Path:
        place = f"{family} {sorted(overrides.items())}"
        if place not in made:
            made[place] = tmp_path_factory.mktemp("base") / "model"
            tiny_once(family, **overrides).save_pretrained(made[place])
        return made[place]

    return build


@pytest.fixture(scope="session")
def export_at(bases: Callable[..., Path]) -> Callable[..., Export]:
    """``export_at(path, block, family, **overrides)``: an `Export` without scales yet."""

    def build(path: Path, block: str | None, family: str = "llama", **other: Any) -> Export:
        return Export(bases(family, **other), path, block)

    return build


@pytest.fixture
def export(export_at: Callable[..., Export], tmp_path: Path) -> Callable[..., Export]:
    """``export(block, family, path, **overrides)``: the same in a directory of the test's own."""

    def build(
        block: str | None, family: str = "llama", path: str = "export", **other: Any
    ) -> Export:
        return export_at(tmp_path / path, block, family, **other)

    return build


@pytest.fixture
def llama(export: Callable[..., Export]) -> Callable[[str], Export]:
    """``llama(engine)``: a good export of a Llama with 3 layers, not written yet."""

    def build(engine: str) -> Export:
        block, names = {
            "vllm": ("compressed-tensors", PLAIN),
            "vllm fp8": ("fp8", PLAIN),
            "vllm modelopt": ("modelopt", PROJECTIONS),
            "sglang": ("compressed-tensors", PLAIN),
            "sglang-modelopt": ("modelopt", PLAIN),
            "tensorrt-llm": (None, PROJECTIONS),
            "tensorrt-llm-nvfp4": (None, PROJECTIONS),
            "tgi": (None, PLAIN),
            "transformers": ("compressed-tensors", PLAIN),
        }[engine]
        made = export(block, num_hidden_layers=3).add(LLAMA, range(3), names)
        if engine.startswith("tensorrt"):
            algorithm = "FP8" if engine == "tensorrt-llm" else "NVFP4"
            made.beside(quant_algo=None, kv_cache_quant_algo=algorithm, exclude_modules=[])
        return made

    return build


@pytest.fixture
def check_new() -> Callable[..., None]:
    """``check_new(report, findings before, expected)``: these are new, and no others.

    What is expected is a pattern, the layer and whether it is serious.
    """

    def check(
        report: VerifyReport,
        before: tuple[Finding, ...],
        expected: Sequence[tuple[str, int | None, bool]],
    ) -> None:
        new = [finding for finding in report.findings if finding not in before]
        left = list(new)
        for pattern, layer, serious in expected:
            found = [finding for finding in left if re.search(pattern, finding.what)]
            assert found, (pattern, [finding.what for finding in new])
            assert (found[0].layer, found[0].serious) == (layer, serious)
            assert found[0].fix
            left.remove(found[0])
        assert [finding.what for finding in left] == []
        assert report.ok is not any(serious for _, _, serious in expected)

    return check
