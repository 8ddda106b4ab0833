"""What the engines' scales are called for models of several families, saved by Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant.errors import ExportError
from kvquant.export.checkpoint import attention_modules, read_checkpoint
from kvquant.export.target import ExportJob
from kvquant.export.targets import target
from kvquant.geometry import CacheGeometry
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
SELF = "model.layers.{}.self_attn"

# What stands before k_scale in vLLM, SGLang and Transformers, and the layers that have scales.
NAMES: dict[str, tuple[str, str, str | None, list[int]]] = {
    "llama": (SELF, SELF, SELF, [0, 1]),
    "qwen2": (SELF, f"{SELF}.attn", SELF, [0, 1]),
    "phi3": (SELF, SELF, SELF, [0, 1]),
    "gpt2": (
        "transformer.h.{}.attn.attn",
        "transformer.h.{}.attn.attn",
        None,
        [0, 1],
    ),
    "gpt_oss": (f"{SELF}.attn", f"{SELF}.attn", SELF, [0, 1]),
    "gemma3_text": (SELF, SELF, SELF, [0, 1, 2, 3, 4, 5]),
    "gemma3n_text": (SELF, SELF, SELF, [0, 1, 2, 3]),
    "deepseek": (f"{SELF}.k_proj", f"{SELF}.k_proj", None, [0, 1]),
    "qwen3_next": (SELF, f"{SELF}.k_proj", SELF, [3]),
    "lfm2": (SELF, f"{SELF}.attn", SELF, [1, 3]),
}


@pytest.fixture
def job_of(
    tiny: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path: Path
) -> Callable[[str], ExportJob]:
    def make(family: str) -> ExportJob:
        model = tiny(family)
        checkpoint = read_checkpoint(save_tiny(model, tmp_path, tokenizer=False))
        geometry = CacheGeometry.from_config(model.config)
        layers = {
            index: LayerScales(
                TensorScales(torch.tensor([[2.0**-index]])), TensorScales(torch.tensor([[0.125]]))
            )
            for index in geometry.attention_layers
        }
        scales = KVScales(geometry, QuantScheme(FP8, FP8), layers)
        return ExportJob(checkpoint, geometry, attention_modules(checkpoint, geometry), scales)

    return make


@pytest.mark.parametrize("family", NAMES)
def test_names_and_numbers(job_of: Callable[[str], ExportJob], family: str) -> None:
    job = job_of(family)
    *prefixes, layers = NAMES[family]
    for engine, prefix in zip(("vllm", "sglang", "transformers"), prefixes, strict=True):
        if prefix is None:
            with pytest.raises(ExportError):
                target(engine).contribute(job)
            continue
        made = target(engine).contribute(job)
        latent = family == "deepseek"
        expected = {}
        for index in layers:
            key = f"{prefix}.k_scale".format(index)
            expected[key] = [2.0**-index]
            expected[key.replace("k_proj.k_", "v_proj.v_").replace(".k_scale", ".v_scale")] = [
                2.0**-index if latent else 0.125
            ]
        assert {name: scale.tolist() for name, scale in made.tensors.items()} == expected
