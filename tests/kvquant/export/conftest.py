"""Jobs for exporters, built by hand: a scale is a number, a list per head or rows per channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant.export.checkpoint import AttentionModule, Checkpoint
from kvquant.export.target import ExportJob
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.tensor_files import StoredTensor


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
