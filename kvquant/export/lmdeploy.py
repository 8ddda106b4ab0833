"""LMDeploy: a policy for a command line. It has read no scales of a cache since 0.4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvquant.errors import ExportError

from .refusals import refuse_skipped_layers
from .rounding import exact_tokens
from .target import Contribution, ExportJob, Facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvquant.geometry import CacheGeometry
    from kvquant.scheme import QuantScheme

_POLICIES = {
    "none": "0",
    "int4": "4",
    "int8": "8",
    # TurboMind, the default, has no FP8.
    "fp8_e4m3": "fp8 --backend pytorch",
    "fp8_e5m2": "fp8_e5m2 --backend pytorch",
}


class LmDeploy:
    """A command line: LMDeploy computes scales while serving, and has none for FP8."""

    name = "lmdeploy"
    facts = Facts(
        title="LMDeploy",
        formats=("int8", "int4", "fp8_e4m3 at scale 1.0", "fp8_e5m2 at scale 1.0"),
        granularity="computed by the engine",
        files="none, a command line",
        versions="0.16.0 (1263d5cd8)",
        needs_weights=False,
        shares_directory=False,
    )

    def contribute(self, job: ExportJob) -> Contribution:
        """The policy, which is one for keys and values."""
        refuse_skipped_layers(job, "LMDeploy")
        found = policy(job.scales.scheme, job.geometry)
        remarks = (*_remarks(job.scales.scheme), *exact_tokens(job.scales.scheme))
        launch = f"lmdeploy serve api_server {{model}} --quant-policy {found}"
        return Contribution(launch=(launch,), remarks=remarks)


def policy(scheme: QuantScheme, geometry: CacheGeometry) -> str:
    """What follows ``--quant-policy``: ``8``, or ``fp8 --backend pytorch``.

    Args:
        scheme: How keys and values are quantized, with calibrated scales or without.
        geometry: Shape of the cache.

    Raises:
        ExportError: Keys and values of different formats, one that LMDeploy does not have, or a
            head of odd size for int4.
    """
    key, value = scheme.key.format.name, scheme.value.format.name
    if key != value:
        raise ExportError(
            f"LMDeploy has one policy for keys and values, not {key} and {value}: calibrate or "
            "solve both for one format"
        )
    if key not in _POLICIES:
        raise ExportError(f"LMDeploy has no {key} cache: it has {', '.join(_POLICIES)}")
    layers = [geometry.layers[index] for index in scheme.quantized_layers(geometry)]
    odd = sorted({d for layer in layers for d in (layer.key_dim, layer.value_dim) if d % 2})
    if key == "int4" and odd:
        raise ExportError(f"LMDeploy's int4 stores two values in a byte, not a head of {odd[0]}")
    return _POLICIES[key]


def _remarks(scheme: QuantScheme) -> Iterator[str]:
    if scheme.key.format.is_float:
        yield (
            "LMDeploy's FP8 keeps scales at 1.0 and loads none: calibrated scales are not used, "
            "and nothing is written"
        )
    else:
        yield (
            "LMDeploy computes a scale and a zero point for each token and head: calibrated scales "
            "are not used, and nothing is written"
        )
