"""vLLM: scales in the checkpoint, which it loads beside the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvquant.errors import ExportError
from kvquant.geometry import LayerKind

from . import compressed_tensors, modelopt
from .refusals import is_latent, refuse_bases, same_kv_heads, skipped_layers
from .rounding import LORA, tensor_scales
from .target import Contribution, ExportJob, Facts
from .verify_report import some

if TYPE_CHECKING:
    import torch

_DYNAMIC = (
    "For {0} launch vllm serve MODEL --kv-cache-dtype {0}_per_token_head on the model itself, "
    "which computes scales while serving."
)
_INSTEAD = {
    "int8": _DYNAMIC.format("int8"),
    "int4": _DYNAMIC.format("int4"),
    "fp8_e5m2": "It stores fp8_e5m2 without scales, and not for checkpoints that declare them: "
    "launch vllm serve MODEL --kv-cache-dtype fp8_e5m2 on the model itself.",
}


class Vllm:
    """FP8 with static scales, per layer or, with FlashAttention 3 and later, per KV head."""

    name = "vllm"
    facts = Facts(
        title="vLLM",
        formats=("fp8_e4m3",),
        granularity="per tensor or per head",
        files="scales shard, index, config.json",
        versions="source of 2026-08-17 (017e9f4448)",
        needs_weights=True,
        shares_directory=True,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """Scales for the attention modules, and a config in whose company vLLM loads them."""
        _check_base(job)
        per_head = job.per_head and _by_compressed_tensors(job)
        if per_head:
            same_kv_heads(job, "vLLM per head", "leave --per-head out")
        scales, remarks = tensor_scales(job, per_head, "vLLM", _INSTEAD)
        tensors: dict[str, torch.Tensor] = {}
        for index, (key, value) in scales.items():
            tensors |= _tensors(job, index, key, value, per_head)
        config, files = _config(job, per_head)
        return Contribution(
            tensors, config, files, (_launch(job),), (*remarks, *_remarks(job, per_head))
        )


_CT = compressed_tensors.METHOD


def _check_base(job: ExportJob) -> None:
    latent = is_latent(job)
    readable = modelopt.METHODS if latent else (_CT, "fp8", *modelopt.METHODS)
    refuse_bases(job.checkpoint, "vLLM for a latent cache (MLA)" if latent else "vLLM", readable)
    if latent and modelopt.is_mixed(job.checkpoint):
        raise ExportError(
            f"{job.checkpoint.directory} is quantized by ModelOpt in mixed precision: vLLM reads "
            "no scales of a latent cache (MLA) there: export the unquantized model"
        )


def _by_compressed_tensors(job: ExportJob) -> bool:
    """Whether the scales are declared so; else they are as in ModelOpt's and FP8 checkpoints."""
    return job.checkpoint.quant_method in (None, _CT) and not is_latent(job)


def _tensors(
    job: ExportJob, index: int, key: torch.Tensor, value: torch.Tensor, per_head: bool
) -> dict[str, torch.Tensor]:
    path = job.modules[index].path
    if job.geometry.layers[index].kind is LayerKind.LATENT:
        return modelopt.scale_tensors(path, key, value)
    if _is_literal(job, index):
        path = f"{path}.attn"
    return compressed_tensors.scale_tensors(path, key, value, per_head)


def _is_literal(job: ExportJob, index: int) -> bool:
    """Whether a scale is to be called as vLLM's own parameter.

    vLLM appends ".attn" to the module of a scale, except to one that ends so: GPT-2's, and
    GPT-OSS's, whose self_attn it renames to attn before.
    """
    if job.geometry.layers[index].kind is LayerKind.LATENT:
        return False
    return job.modules[index].path.endswith(".attn") or job.geometry.model_type == "gpt_oss"


def _config(job: ExportJob, per_head: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
    if _by_compressed_tensors(job):
        return compressed_tensors.config(job.checkpoint, per_head), {}
    if job.checkpoint.quant_method is None:
        return modelopt.cache_alone(), {}
    if job.checkpoint.quant_method == "fp8":
        return {}, {}
    return modelopt.extended(job.checkpoint, "FP8")


def _launch(job: ExportJob) -> str:
    skipped = skipped_layers(job)
    exact = f" --kv-cache-dtype-skip-layers {' '.join(map(str, skipped))}" if skipped else ""
    return f"vllm serve {{model}} --kv-cache-dtype fp8{exact}"


def _remarks(job: ExportJob, per_head: bool) -> Iterator[str]:
    if per_head:
        yield (
            "scales per head need FlashAttention 3 or later as vLLM's attention backend, and vLLM "
            "from 2026-01-22 on; FlashInfer and Triton do not take them"
        )
    yield from _of_the_loader(job)
    if any(_is_literal(job, index) for index in job.scales.layers):
        yield (
            'names that end in ".attn.k_scale" need vLLM from June 2026 on; older versions double '
            'the ".attn" and drop the scale without a word'
        )
    odd = sorted({d for d in _dims(job) if d % 16})
    if odd:
        yield f"head size {odd[0]} is no multiple of 16: vLLM may refuse FP8 for it"
    sliding = [i for i in job.scales.layers if job.geometry.layers[i].kind is LayerKind.SLIDING]
    if sliding and len(sliding) < len(job.scales.layers):
        yield (
            f"{some(len(sliding), 'sliding-window layer')} among the others: there "
            "quantization costs more and saves less; --kv-cache-dtype-skip-layers sliding_window "
            "keeps them exact"
        )
    yield LORA


def _of_the_loader(job: ExportJob) -> Iterator[str]:
    """What differs between vLLM's two ways to load scales."""
    if _by_compressed_tensors(job):
        yield (
            "queries keep scale 1.0 where the backend quantizes them too, which is fine up to 448; "
            "on MI300 vLLM does not convert such scales, so values beyond 240 scales saturate"
        )
        return
    yield (
        "vLLM uses the scale of the keys for queries too, where the backend quantizes those, and "
        "says so in its log: kvquant does not measure queries"
    )
    if is_latent(job):
        yield (
            "that vLLM loads scales of a latent cache in this form was read in its source, not "
            'run: its log must not say "Using KV cache scaling factor 1.0"'
        )


def _dims(job: ExportJob) -> Iterator[int]:
    for index in job.scales.layers:
        layer = job.geometry.layers[index]
        if layer.kind is not LayerKind.LATENT:
            yield from (layer.key_dim, layer.value_dim)
