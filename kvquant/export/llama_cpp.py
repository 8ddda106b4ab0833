"""llama.cpp: types of its cache for a command line. It reads no scales from anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvquant.errors import ExportError
from kvquant.scheme import Granularity

from .refusals import refuse_latent, refuse_skipped_layers
from .rounding import exact_tokens
from .target import Contribution, ExportJob, Facts

if TYPE_CHECKING:
    from kvquant.geometry import CacheGeometry
    from kvquant.scheme import QuantScheme, TensorScheme

_TYPES = {"none": "f16", "fp16": "f16", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
_BLOCK = 32
"""Values that share a scale in q8_0 and q4_0; a head is divided into whole blocks."""


class LlamaCpp:
    """A command line: its types compute a scale for each 32 values while serving."""

    name = "llama.cpp"
    facts = Facts(
        title="llama.cpp",
        formats=("q8_0 for int8", "q4_0 for int4"),
        granularity="computed by the engine",
        files="none, a command line",
        versions="options of 2026-08-16 (4df29be4), block sizes of gguf 0.19.0",
        needs_weights=False,
        shares_directory=False,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """Types for keys and values, and flash attention where the values' type needs it."""
        refuse_skipped_layers(job, "llama.cpp")
        refuse_latent(job, "llama.cpp", "is not known to store it in a type of its own")
        key, value = cache_types(job.scales.scheme, job.geometry)
        flash = "" if value == "f16" else " -fa on"
        return Contribution(
            launch=(f"llama-server -m MODEL.gguf -ctk {key} -ctv {value}{flash}",),
            remarks=(
                "llama.cpp computes a scale for every 32 values of a head: calibrated scales are "
                "not used, and nothing is written",
                "MODEL.gguf is the model as llama.cpp reads it; other types for keys than for "
                "values may need a build with GGML_CUDA_FA_ALL_QUANTS",
                *exact_tokens(job.scales.scheme),
            ),
        )


def cache_types(scheme: QuantScheme, geometry: CacheGeometry) -> tuple[str, str]:
    """llama.cpp's types for keys and values: ``("q8_0", "q4_0")``.

    Args:
        scheme: How keys and values are quantized, with calibrated scales or without.
        geometry: Shape of the cache.

    Raises:
        ExportError: A scheme that llama.cpp has nothing like, or heads that its blocks do not fit.
    """
    layers = [geometry.layers[index] for index in scheme.quantized_layers(geometry)]
    key = _type(scheme.key, "keys", sorted({layer.key_dim for layer in layers}))
    return key, _type(scheme.value, "values", sorted({layer.value_dim for layer in layers}))


def _type(scheme: TensorScheme, what: str, dims: list[int]) -> str:
    across = scheme.granularity in (Granularity.PER_CHANNEL, Granularity.PER_GROUP)
    if scheme.format.name not in _TYPES or (scheme.format.is_scaled and across):
        raise ExportError(
            f"llama.cpp has nothing like {what} as {scheme}: its types are integers with a scale "
            f"for each {_BLOCK} values of a token; int8 and int4 per token, per head or per "
            "tensor become q8_0 and q4_0"
        )
    found = _TYPES[scheme.format.name]
    odd = [dim for dim in dims if dim % _BLOCK]
    if scheme.format.is_scaled and odd:
        raise ExportError(
            f"llama.cpp's {found} has blocks of {_BLOCK} values, which do not divide a head of "
            f"{odd[0]}: serve {what} as f16"
        )
    return found
