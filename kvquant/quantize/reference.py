"""Quantize and dequantize with calibrated scales in plain torch: the definition of correct."""

from __future__ import annotations

import torch

from kvquant.scales import TensorScales
from kvquant.scheme import TensorScheme

from .dynamic import whole

_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def quantize(states: torch.Tensor, scales: TensorScales, scheme: TensorScheme) -> torch.Tensor:
    """Codes of `states`.

    Values beyond the range saturate: FP8 is clamped before the cast, since e4m3fn has no infinity
    and a bare cast would give NaN; integers are clamped before they could wrap around. NaN is NaN
    in FP8, and the lowest code of an integer format, which has no other for it.

    Args:
        states: ``[batch, kv_heads, tokens, dim]``, any float dtype.
        scales: As calibrated for this layer and slot.
        scheme: What `scales` were solved for.

    Returns:
        Codes of the same shape: ``float8``, ``int8`` (symmetric) or ``uint8`` (asymmetric); int4
        is not packed here.
    """
    scale = scales.scale[:, None, :]
    scaled = states.float() / scale
    if scheme.format.is_float:
        clamped = scaled.clamp(scheme.format.qmin, scheme.format.qmax)
        return clamped.to(_FP8[scheme.format.name])
    if scales.zero_point is None:
        return whole(scaled, scheme.format.qmin, scheme.format.qmax).to(torch.int8)
    return whole(scaled + scales.zero_point[:, None, :], 0, scheme.levels).to(torch.uint8)


def dequantize(codes: torch.Tensor, scales: TensorScales) -> torch.Tensor:
    """Values of `codes`, float32 ``[batch, kv_heads, tokens, dim]``."""
    values = codes.float()
    if scales.zero_point is not None:
        values = values - scales.zero_point[:, None, :]
    return values * scales.scale[:, None, :]
