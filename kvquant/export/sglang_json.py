"""SGLang's ``--quantization-param-path``: a JSON file beside the checkpoint, long broken there."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvquant.errors import ExportError

from . import compressed_tensors, modelopt
from .refusals import architecture, refuse_skipped_layers, refuse_stale_scales
from .rounding import LORA, tensor_scales, times
from .sglang import INSTEAD, SERVE
from .sglang_models import JSON_SCALES
from .target import Contribution, ExportJob, Facts
from .verify_report import some


class SglangJson:
    """The file for ``--quantization-param-path``: one number for keys and values of a layer."""

    name = "sglang-json"
    facts = Facts(
        title="SGLang, --quantization-param-path (legacy)",
        formats=("fp8_e4m3",),
        granularity="per tensor, one for keys and values",
        files="one JSON for each number of GPUs",
        versions="0.5.23",
        needs_weights=True,
        shares_directory=False,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """The file, with the larger one of each layer's two scales."""
        refuse_skipped_layers(job, "SGLang")
        _check_json(job)
        scales, remarks = tensor_scales(job, False, "SGLang", INSTEAD)
        pairs = {index: (key.item(), value.item()) for index, (key, value) in scales.items()}
        larger = {str(index): max(pair) for index, pair in pairs.items()}
        file = f"kv_cache_scales_tp{job.tensor_parallel}.json"
        launch = f"{SERVE} --quantization-param-path {{model}}/{file}"
        if job.tensor_parallel > 1:
            launch += f" --tp-size {job.tensor_parallel}"
        return Contribution(
            files={file: _json(job, larger)},
            launch=(launch,),
            remarks=(*remarks, _shared_remark(pairs), *_json_remarks(job, file)),
        )


def _check_json(job: ExportJob) -> None:
    model_class = architecture(job.checkpoint)
    if job.tensor_parallel < 1:
        raise ExportError(f"--tensor-parallel is at least 1, not {job.tensor_parallel}")
    if model_class not in JSON_SCALES:
        raise ExportError(
            f"SGLang takes no JSON of KV scales for {model_class}: export with --engine sglang"
        )
    if job.checkpoint.quant_method in (compressed_tensors.METHOD, "fp8", *modelopt.METHODS):
        raise ExportError(
            f"{job.checkpoint.directory} is quantized with {job.checkpoint.quant_method}: there "
            "SGLang fails to put numbers of a JSON in the place of scales: export with --engine "
            "sglang"
        )
    refuse_stale_scales(job.checkpoint)
    without = len(job.geometry.layers) - len(job.geometry.attention_layers)
    if without:
        raise ExportError(
            f"{without} of {len(job.geometry.layers)} layers keep{'s' * (without == 1)} no tokens, "
            "but the JSON needs a number for each: export with --engine sglang"
        )


def _json(job: ExportJob, larger: dict[str, float]) -> bytes:
    ranks = {str(rank): larger for rank in range(job.tensor_parallel)}
    values = {
        "model_type": job.checkpoint.config["model_type"],
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": ranks},
    }
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


def _shared_remark(pairs: dict[int, tuple[float, float]]) -> str:
    ratios = {index: max(pair) / min(pair) for index, pair in pairs.items()}
    most = max(ratios, key=ratios.__getitem__)
    key, value = pairs[most]
    return (
        "keys and values of a layer share one number here, the larger scale; most apart in layer "
        f"{most}: keys {key:.3g}, values {value:.3g} ({times(ratios[most])})"
    )


def _json_remarks(job: ExportJob, file: str) -> Iterator[str]:
    yield (
        f"{file} is for layers on {some(job.tensor_parallel, 'GPU')} each (--tp-size), and for no "
        "other number"
    )
    yield (
        "SGLang 0.5.23 does not use these numbers as it should (sgl-project/sglang#18818): "
        "FlashInfer divides by them and never multiplies back, FlashAttention 3 fails, only "
        "trtllm_mha works; --engine sglang puts scales into the checkpoint instead"
    )
    yield (
        "if it dislikes anything about the file, SGLang logs that it defaults to scales of 1.0, "
        "and serves"
    )
    yield LORA
