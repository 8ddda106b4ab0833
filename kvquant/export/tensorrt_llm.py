"""TensorRT-LLM, PyTorch backend: ModelOpt's names and hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvquant.errors import ExportError

from . import modelopt
from .refusals import refuse_latent, refuse_skipped_layers, refuse_stale_scales
from .rounding import LORA, tensor_scales
from .target import Contribution, ExportJob, Facts

if TYPE_CHECKING:
    import torch

_OFFERS = "Its caches are fp8 and nvfp4 (trtllm-serve MODEL --kv_cache_dtype fp8)."
_INSTEAD = {name: _OFFERS for name in ("int8", "int4", "fp8_e5m2")}
_VERSIONS = "single files of 2026 (model_config.py 008e0af89, linear.py 00bbf71e7)"


class TensorRtLlm:
    """FP8. The engine has no place for scales there: only the format of the cache is chosen."""

    name = "tensorrt-llm"
    facts = Facts(
        title="TensorRT-LLM, FP8",
        formats=("fp8_e4m3",),
        granularity="scale 1.0, whatever is written",
        files="scales shard, index, hf_quant_config.json",
        versions=_VERSIONS,
        needs_weights=True,
        shares_directory=False,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """An FP8 cache, with the scales as ModelOpt writes them."""
        ignored = (
            "TensorRT-LLM's FP8 cache ignores every scale and stores at 1.0: the export chooses "
            "the format, calibration changes nothing; --engine tensorrt-llm-nvfp4 uses scales"
        )
        return _contribute(job, "FP8", (ignored,))


class TensorRtLlmNvfp4:
    """NVFP4. Its global scales are those of FP8, amax / 448; blocks have scales beside them."""

    name = "tensorrt-llm-nvfp4"
    facts = Facts(
        title="TensorRT-LLM, NVFP4",
        formats=("nvfp4",),
        granularity="per tensor, beside blocks computed by the engine",
        files="scales shard, index, hf_quant_config.json",
        versions=_VERSIONS,
        needs_weights=True,
        shares_directory=False,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """An NVFP4 cache with calibrated global scales."""
        refuse_latent(
            job,
            "TensorRT-LLM",
            "takes NVFP4 scales with k_proj and v_proj, which such layers do not have",
        )
        used = (
            "the scales are the global ones of NVFP4, amax / 448 as for FP8; what is lost to 4 "
            "bits was not measured by calibrating for fp8_e4m3"
        )
        switch = "TRTLLM_LOAD_KV_SCALES=0 in the environment would make it ignore them"
        return _contribute(job, "NVFP4", (used, switch))


def _contribute(job: ExportJob, algorithm: str, notes: tuple[str, ...]) -> Contribution:
    refuse_skipped_layers(job, "TensorRT-LLM")
    _check_base(job, algorithm)
    scales, remarks = tensor_scales(job, False, "TensorRT-LLM", _INSTEAD)
    tensors: dict[str, torch.Tensor] = {}
    for index, (key, value) in scales.items():
        tensors |= modelopt.scale_tensors(job.modules[index].path, key, value)
    config, files = _config(job, algorithm)
    return Contribution(
        tensors, config, files, ("trtllm-serve {model}",), (*remarks, *notes, *_remarks())
    )


def _check_base(job: ExportJob, algorithm: str) -> None:
    method = job.checkpoint.quant_method
    if method is not None and method not in modelopt.METHODS:
        raise ExportError(
            f"{job.checkpoint.directory} is quantized with {method}: TensorRT-LLM takes the "
            "cache's format from hf_quant_config.json, which would contradict that: export the "
            "unquantized model, or launch trtllm-serve MODEL --kv_cache_dtype fp8 on the model "
            "itself, at scale 1.0"
        )
    whole = job.checkpoint.directory / modelopt.FILE
    if method is not None and algorithm == "NVFP4" and not whole.exists():
        raise ExportError(
            f"{job.checkpoint.directory} has no {modelopt.FILE}, and from config.json alone "
            "TensorRT-LLM takes no NVFP4 cache: export a base as ModelOpt wrote it"
        )
    refuse_stale_scales(job.checkpoint)


def _config(job: ExportJob, algorithm: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    if job.checkpoint.quant_method is None:
        return {}, modelopt.file_alone(algorithm)
    return modelopt.extended(job.checkpoint, algorithm)


def _remarks() -> Iterator[str]:
    yield (
        "this directory is for TensorRT-LLM alone: it refuses the config by which vLLM and SGLang "
        "load scales"
    )
    yield LORA
