"""LightLLM: kv_cache_calib.json beside an unchanged checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from .refusals import architecture, refuse_latent, refuse_skipped_layers, same_kv_heads
from .rounding import LORA, tensor_scales
from .target import Contribution, ExportJob, Facts

if TYPE_CHECKING:
    import torch

_SERVE = "python -m lightllm.server.api_server --model_dir"
_DYNAMIC = "For {0} launch " + _SERVE + " MODEL --llm_kv_type {0}kv, which computes its scales."
_INSTEAD = {
    "int8": _DYNAMIC.format("int8"),
    "int4": _DYNAMIC.format("int4"),
    "fp8_e5m2": "It has no fp8_e5m2 cache.",
}
_FILE = "kv_cache_calib.json"


class LightLlm:
    """FP8 with static scales, per layer (through FlashInfer) or per head (FlashAttention 3)."""

    name = "lightllm"
    facts = Facts(
        title="LightLLM",
        formats=("fp8_e4m3",),
        granularity="per tensor or per head",
        files=_FILE,
        versions="source of 2026-08-21 (87881ae7c), two files of 2026-09",
        needs_weights=True,
        shares_directory=False,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """The file, one for any number of GPUs."""
        refuse_skipped_layers(job, "LightLLM")
        refuse_latent(
            job,
            "LightLLM",
            "computes scales for it while serving (--llm_kv_type fp8kv_dsa on the model itself)",
        )
        heads = same_kv_heads(job, f"LightLLM's {_FILE}", "export for another engine")
        scales, remarks = tensor_scales(job, job.per_head, "LightLLM", _INSTEAD)
        kind = "fp8kv_sph" if job.per_head else "fp8kv_spt"
        launch = (
            f"{_SERVE} {{model}} --llm_kv_type {kind} --kv_quant_calibration_config_path "
            f"{{model}}/{_FILE}"
        )
        return Contribution(
            files={_FILE: _json(job, heads, scales)},
            launch=(launch,),
            remarks=(*remarks, *_remarks(job)),
        )


def _json(
    job: ExportJob, heads: int, scales: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
) -> bytes:
    rows = [key.tolist() + value.tolist() for key, value in scales.values()]
    values = {
        "version": "1.0",
        "architectures": architecture(job.checkpoint),
        "quant_type": "per_head" if job.per_head else "per_tensor",
        "qmin": -448.0,
        "qmax": 448.0,
        "num_layers": len(rows),
        "num_head": heads,
        "scales_shape": [len(rows), len(rows[0])],
        "scales": rows,
    }
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


def _remarks(job: ExportJob) -> Iterator[str]:
    if job.per_head:
        yield (
            "the file has no q_calibration, since kvquant does not measure queries: LightLLM of "
            "2026-09 and later refuses fp8kv_sph without it, older ones do not read it; without "
            "--per-head both take the file"
        )
    yield LORA
