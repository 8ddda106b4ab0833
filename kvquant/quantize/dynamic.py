"""Ranges computed from the values that are being stored, in plain torch: the definition of correct.

Symmetric::

    scale = up(amax / qmax)        code = clamp(round(x / scale))        x ≈ code * scale

Asymmetric, over ``levels = 2^bits - 1`` steps::

    middle = nearest((lo + hi) / 2)        scale = up(max(hi - middle, middle - lo) / (levels / 2))
    code = clamp(round((x - middle) / scale + levels / 2))
    x ≈ (code - levels / 2) * scale + middle

`up` and `nearest` round to the format that scales are kept in. Codes are computed with what is
kept, and scales are rounded up, so that both ends stay in range. A scale of 0 says that all values
are the middle (or 0), and they are read back as exactly that. A scale of NaN says that one of them
was NaN or infinite: all are read back as NaN.

All arithmetic is float32, in this order; nothing depends on how many tokens there are.
"""

from __future__ import annotations

import torch

from kvquant.scheme import TensorScheme

from .packing import FP8

SCALE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What scales and middles are kept in, by `TensorScheme.scale_format`."""

_FP16_MAX = 65504.0


def quantize(
    values: torch.Tensor, scheme: TensorScheme, axis: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes with the range that they have along `axis`.

    Args:
        values: float32; what shares a range lies along `axis`.
        scheme: Of per-token or per-group.
        axis: Channels for per-token, the tokens of a group for per-group.

    Returns:
        Codes of the shape of `values` (``float8``, ``int8`` if symmetric, else ``uint8``; not
        packed), scale without `axis`, and middle likewise or None.
    """
    if scheme.symmetric:
        codes, scale = _symmetric(values, scheme, axis)
        return codes, scale.squeeze(axis), None
    codes, scale, middle = _asymmetric(values, scheme, axis)
    return codes, scale.squeeze(axis), middle.squeeze(axis)


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    middle: torch.Tensor | None,
    scheme: TensorScheme,
    axis: int,
) -> torch.Tensor:
    """Values of `codes`, float32: inverse of `quantize`."""
    scale = scale.float().unsqueeze(axis)
    if middle is None:
        return codes.float() * scale
    return (codes.float() - scheme.levels / 2) * scale + middle.float().unsqueeze(axis)


def round_up(values: torch.Tensor, scale_format: str) -> torch.Tensor:
    """The smallest number of `scale_format` that is no less; fp16 saturates at 65504.

    Args:
        values: float32, not negative, or NaN, which stays NaN.
        scale_format: ``bf16``, ``fp16`` or ``fp32``.
    """
    if scale_format == "fp32":
        return values
    if scale_format == "fp16":
        values = values.clamp(max=_FP16_MAX)
    nearest = values.to(SCALE_DTYPES[scale_format])
    next_one = (nearest.view(torch.int16) + 1).view(nearest.dtype)
    return torch.where(nearest.float() < values, next_one, nearest)


def round_nearest(values: torch.Tensor, scale_format: str) -> torch.Tensor:
    """The nearest number of `scale_format`, halves to even; fp16 saturates at ±65504."""
    if scale_format == "fp16":
        values = values.clamp(-_FP16_MAX, _FP16_MAX)
    return values.to(SCALE_DTYPES[scale_format])


def whole(steps: torch.Tensor, lowest: float, highest: float) -> torch.Tensor:
    """Codes of an integer format, still as floats; the lowest one for NaN, which has none."""
    return steps.round().clamp(lowest, highest).nan_to_num(nan=lowest)


def _symmetric(
    values: torch.Tensor, scheme: TensorScheme, axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    form = scheme.format
    amax = _finite(values.abs().amax(axis, keepdim=True))
    scale = round_up(amax / _constant(form.qmax, values), scheme.scale_format)
    scaled = values / _divisor(scale)
    if form.is_float:
        return scaled.clamp(form.qmin, form.qmax).to(FP8[form.name]), scale
    return whole(scaled, form.qmin, form.qmax).to(torch.int8), scale


def _asymmetric(
    values: torch.Tensor, scheme: TensorScheme, axis: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    center = scheme.levels / 2
    low = _finite(values.amin(axis, keepdim=True))
    high = _finite(values.amax(axis, keepdim=True))
    # Halved first, so that the sum stays finite; plus 0, so that the sign of a zero is one and the
    # same whichever of several zeros was taken for the extreme.
    middle = round_nearest(low * 0.5 + high * 0.5 + 0.0, scheme.scale_format)
    reach = torch.maximum(high - middle.float(), middle.float() - low)
    scale = round_up(reach / _constant(center, values), scheme.scale_format)
    steps = (values - middle.float()) / _divisor(scale) + center
    return whole(steps, 0, scheme.levels).to(torch.uint8), scale, middle


def _finite(values: torch.Tensor) -> torch.Tensor:
    """`values`, but NaN in place of infinities."""
    return values + (values - values)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """`scale` as kept, in float32, with 1 in place of 0."""
    divisor = scale.float()
    return divisor.masked_fill(divisor == 0, 1.0)


def _constant(number: float, like: torch.Tensor) -> torch.Tensor:
    """`number` where `like` is: CUDA divides by a Python number via its rounded reciprocal."""
    return like.new_full((), number)
