"""Text Generation Inference: scales in the checkpoint, whatever its config says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import compressed_tensors
from .refusals import refuse_latent, refuse_skipped_layers, refuse_stale_scales
from .rounding import LORA, tensor_scales
from .target import Contribution, ExportJob, Facts

if TYPE_CHECKING:
    import torch

_INSTEAD = {
    "int8": "It has no int8 cache at all.",
    "int4": "It has no int4 cache at all.",
    "fp8_e5m2": "It stores fp8_e5m2 without scales: launch text-generation-launcher --model-id "
    "MODEL --kv-cache-dtype fp8_e5m2 on the model itself.",
}


class Tgi:
    """FP8 with one scale per layer for keys and one for values."""

    name = "tgi"
    facts = Facts(
        title="Text Generation Inference (TGI)",
        formats=("fp8_e4m3",),
        granularity="per tensor",
        files="scales shard, index",
        versions="source of 2026-01-08 (db931fcf4, 3.3.7)",
        needs_weights=True,
        shares_directory=True,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """Scales beside any weights; config.json stays as it is."""
        refuse_skipped_layers(job, "TGI")
        refuse_latent(job, "TGI", "is not known to load scales for it: see --engine vllm")
        refuse_stale_scales(job.checkpoint)
        scales, remarks = tensor_scales(job, False, "TGI", _INSTEAD)
        tensors: dict[str, torch.Tensor] = {}
        for index, (key, value) in scales.items():
            tensors |= compressed_tensors.scale_tensors(job.modules[index].path, key, value)
        launch = "text-generation-launcher --model-id {model} --kv-cache-dtype fp8_e4m3fn"
        return Contribution(tensors, launch=(launch,), remarks=(*remarks, *_remarks()))


def _remarks() -> Iterator[str]:
    yield "TGI uses scales with its flashinfer and paged attention only, at scale 1.0 otherwise"
    yield LORA
