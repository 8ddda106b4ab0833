"""SGLang: scales in the checkpoint, under the names that its model classes know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvquant.errors import ExportError

from . import compressed_tensors, modelopt
from .loader_rules import sglang_knows, sglang_names
from .refusals import (
    architecture,
    is_latent,
    refuse_bases,
    refuse_skipped_layers,
)
from .rounding import LORA, tensor_scales
from .target import Contribution, ExportJob, Facts

if TYPE_CHECKING:
    import torch

INSTEAD = {
    "int8": "It has no int8 cache at all.",
    "int4": "It has no int4 cache at all.",
    "fp8_e5m2": "Its fp8_e5m2 takes no calibrated scales: launch python -m sglang.launch_server "
    "--model-path MODEL --kv-cache-dtype fp8_e5m2 on the model itself.",
}
SERVE = "python -m sglang.launch_server --model-path {model} --kv-cache-dtype fp8_e4m3"
_WARNING = (
    'SGLang logs "Using FP8 KV cache but no scaling factors provided" even when it loaded these '
    "scales: it looks at its JSON option only"
)


class Sglang:
    """FP8 with one scale per layer for keys and one for values, declared as vLLM's."""

    name = "sglang"
    facts = Facts(
        title="SGLang 0.5.23 and later",
        formats=("fp8_e4m3",),
        granularity="per tensor",
        files="scales shard, index, config.json",
        versions="0.5.23",
        needs_weights=True,
        shares_directory=True,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """Scales under the names that the model's own loader knows, which differ by its class."""
        return _contribute(job, modelopt_style=is_latent(job))


class SglangModelopt:
    """The same for SGLang before 0.5.23, which reads no scales beside compressed-tensors."""

    name = "sglang-modelopt"
    facts = Facts(
        title="SGLang before 0.5.23",
        formats=("fp8_e4m3",),
        granularity="per tensor",
        files="scales shard, index, config.json as ModelOpt writes it",
        versions="source of 2026-07-20 (8905cbd42f)",
        needs_weights=True,
        shares_directory=False,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """As for SGLang 0.5.23, but declared as ModelOpt does."""
        if job.checkpoint.quant_method == compressed_tensors.METHOD:
            raise ExportError(
                f"{job.checkpoint.directory} is quantized with compressed-tensors, beside which "
                "SGLang before 0.5.23 drops KV scales without a word: update, and export with "
                "--engine sglang"
            )
        return _contribute(job, modelopt_style=True)


def _contribute(job: ExportJob, modelopt_style: bool) -> Contribution:
    refuse_skipped_layers(job, "SGLang")
    readable = (compressed_tensors.METHOD, "fp8", *modelopt.METHODS)
    refuse_bases(job.checkpoint, "SGLang", readable)
    scales, remarks = tensor_scales(job, False, "SGLang", INSTEAD)
    tensors: dict[str, torch.Tensor] = {}
    for index, (key, value) in scales.items():
        tensors |= _tensors(job, index, key, value)
    config, files = _config(job, modelopt_style)
    return Contribution(tensors, config, files, (SERVE,), (*remarks, *_remarks(job)))


def _tensors(
    job: ExportJob, index: int, key: torch.Tensor, value: torch.Tensor
) -> dict[str, torch.Tensor]:
    names = sglang_names(job.modules[index].path, architecture(job.checkpoint))
    return {names[0]: key.clone(), names[1]: value.clone()}


def _config(job: ExportJob, modelopt_style: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
    method = job.checkpoint.quant_method
    if method in modelopt.METHODS:
        return modelopt.extended(job.checkpoint, "FP8")
    if method == "fp8":
        return {}, {}
    if modelopt_style and method is None:
        return modelopt.cache_alone(), {}
    return compressed_tensors.config(job.checkpoint), {}


def _remarks(job: ExportJob) -> Iterator[str]:
    model_class = architecture(job.checkpoint)
    if not sglang_knows(model_class):
        yield (
            f"how SGLang loads scales of {model_class} is not known: they are called as its "
            "modules usually are, self_attn.attn.k_scale"
        )
    if is_latent(job):
        yield (
            "that SGLang loads scales of a latent cache (MLA) in this form was read in its source, "
            "not run"
        )
    if any(job.geometry.layers[i].key_dim > 256 for i in job.scales.layers) and not is_latent(job):
        yield "SGLang's FlashAttention 3 uses no scales for head sizes beyond 256"
    yield _WARNING
    yield LORA
