"""How ModelOpt writes FP8 scales of a cache: names, and its two forms of a config.

The flat form is in config.json, the older one in hf_quant_config.json; ModelOpt writes both.
TensorRT-LLM reads this, and vLLM and SGLang do beside others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvquant import __version__
from kvquant.errors import ExportError

from .compressed_tensors import place

if TYPE_CHECKING:
    import torch

    from .checkpoint import Checkpoint

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")
FILE = "hf_quant_config.json"

_FLAT_FP8: Mapping[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}


def is_mixed(checkpoint: Checkpoint) -> bool:
    """Whether ModelOpt quantized a base's layers differently."""
    values: Mapping[str, Any] = checkpoint.quantization or {}
    algorithm = values.get("quantization", values).get("quant_algo")
    return bool(algorithm == "MIXED_PRECISION")


def scale_tensors(path: str, key: torch.Tensor, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scales ``[1]`` of the attention at `path`, whether or not it has such projections."""
    return {
        f"{path}.k_proj.k_scale": key.reshape(1).clone(),
        f"{path}.v_proj.v_scale": value.reshape(1).clone(),
    }


def cache_alone() -> dict[str, Any]:
    """Keys of config.json that quantize the cache and, all weights being ignored, nothing else.

    For vLLM and SGLang: both refuse the honest ``"quant_algo": null``.
    """
    return {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["*"],
            "kv_cache_scheme": dict(_FLAT_FP8),
        }
    }


def file_alone(algorithm: str) -> dict[str, bytes]:
    """hf_quant_config.json for unquantized weights, as TensorRT-LLM reads it.

    Args:
        algorithm: ``FP8`` or ``NVFP4``.
    """
    values = {
        # The name by which the parser knows the format; who calibrated stands below.
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "calibrated_by": f"kvquant {__version__}",
        "quantization": {
            "quant_algo": None,
            "kv_cache_quant_algo": algorithm,
            "exclude_modules": [],
        },
    }
    return {FILE: _dump(values)}


def extended(checkpoint: Checkpoint, algorithm: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What a base quantized by ModelOpt says of itself, with a format for the cache.

    Both places say the same afterwards, as far as the base has them.

    Args:
        checkpoint: Such a base.
        algorithm: ``FP8`` or ``NVFP4``.

    Returns:
        Keys of config.json, and hf_quant_config.json by its name; each empty where the base has
        none.

    Raises:
        ExportError: hf_quant_config.json cannot be read.
    """
    path, files = checkpoint.directory / FILE, {}
    if path.exists():
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            files[FILE] = _dump(_with_cache(values, algorithm))
        except (OSError, ValueError, TypeError) as error:
            raise ExportError(f"{path} cannot be read: {error}") from error
    inline = _inline(checkpoint)
    config = {} if inline is None else place(checkpoint, _with_cache(inline, algorithm))
    return config, files


def _inline(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """quantization_config of config.json or of its text part."""
    text = checkpoint.config.get("text_config")
    parts = (checkpoint.config, text if isinstance(text, Mapping) else {})
    return next(
        (part["quantization_config"] for part in parts if "quantization_config" in part), None
    )


def _with_cache(values: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    if "quantization" in values:
        inner = {**values["quantization"], "kv_cache_quant_algo": algorithm}
        return {**values, "quantization": inner}
    # ModelOpt keeps the name of all but FP8.
    scheme = dict(_FLAT_FP8) if algorithm == "FP8" else algorithm
    named = {"kv_cache_quant_algo": algorithm} if "kv_cache_quant_algo" in values else {}
    return {**values, "kv_cache_scheme": scheme, **named}


def _dump(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=4) + "\n").encode()
