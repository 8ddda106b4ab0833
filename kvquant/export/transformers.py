"""Transformers with compressed-tensors: rounds what it caches as an engine would, on any device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvquant.errors import ExportError

from . import compressed_tensors
from .refusals import refuse_bases, refuse_latent, refuse_skipped_layers, same_kv_heads
from .rounding import tensor_scales
from .target import Contribution, ExportJob, Facts

if TYPE_CHECKING:
    import torch

_OURS = (
    "kvquant's own cache runs {0} there: QuantizedCache.from_model(model, scheme=..., scales=...)."
)
_INSTEAD = {name: _OURS.format(name) for name in ("int8", "int4", "fp8_e5m2")}


class Transformers:
    """FP8 with static scales, per layer or per KV head: a test of an export, not a server."""

    name = "transformers"
    facts = Facts(
        title="Transformers with compressed-tensors",
        formats=("fp8_e4m3",),
        granularity="per tensor or per head",
        files="scales shard, index, config.json",
        versions="5.17 to 5.24 with compressed-tensors 0.20.1, run",
        needs_weights=True,
        shares_directory=True,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """Scales under the attention modules' own names, declared by compressed-tensors."""
        refuse_skipped_layers(job, "Transformers")
        refuse_latent(job, "Transformers", "is not known to load scales for it: see --engine vllm")
        refuse_bases(job.checkpoint, "Transformers", (compressed_tensors.METHOD,))
        _check_model(job)
        if job.per_head:
            same_kv_heads(job, "Transformers per head", "leave --per-head out")
        scales, remarks = tensor_scales(job, job.per_head, "Transformers", _INSTEAD)
        tensors: dict[str, torch.Tensor] = {}
        for index, (key, value) in scales.items():
            path = job.modules[index].path
            tensors |= compressed_tensors.scale_tensors(path, key, value, job.per_head)
        config = compressed_tensors.config(job.checkpoint, job.per_head)
        return Contribution(tensors, config, launch=(_LAUNCH,), remarks=(*remarks, *_remarks(job)))


_LAUNCH = (
    'python -c "from transformers import AutoModelForCausalLM as Auto; '
    "model = Auto.from_pretrained('{model}')\""
)


# What a module of a class called …Attention needs so that compressed-tensors takes it for one.
_FOUND = {"k_proj", "v_proj", "qkv_proj", "kv_b_proj"}
_EXPERT = re.compile(r"\.experts\.\d+\.")


def _check_model(job: ExportJob) -> None:
    """Refuses what Transformers 5.17 to 5.23 with compressed-tensors 0.20.1 did not load as meant.

    Raises:
        ExportError: Attention that it does not find, or heads of different sizes.
    """
    for index in job.scales.layers:
        module = job.modules[index]
        if _FOUND.isdisjoint(
            part for name in module.projections.values() for part in name.split(".")
        ):
            raise ExportError(
                f"compressed-tensors knows a cache by k_proj, v_proj or qkv_proj beside it, and "
                f"{module.path} has none: Transformers would pass its scales by without a word. "
                + _OURS.format("fp8")
            )
    dims = sorted({job.geometry.layers[index].key_dim for index in job.scales.layers})
    if len(dims) > 1:
        raise ExportError(
            f"layers have heads of {dims[0]} and {dims[-1]}: compressed-tensors takes one size "
            "from the config and stops. " + _OURS.format("fp8")
        )


def _remarks(job: ExportJob) -> Iterator[str]:
    if job.checkpoint.quantization is None and any(map(_EXPERT.search, job.checkpoint.tensors)):
        yield (
            "needs compressed-tensors and Transformers 5.22: 5.17 to 5.21 and 5.23 stop at experts "
            "(MoE) stored one by one whose weights are not quantized"
        )
    yield (
        "needs compressed-tensors and Transformers up to 5.23, but not 5.21, which stops: 5.24 "
        "loads the model, but passes the scales by without a word"
    )
    yield "the cache is rounded as FP8 would, and kept in the model's dtype: no memory is saved"
