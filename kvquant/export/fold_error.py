"""What engines' caches lose of keys and values, in the model's own coordinates.

Folded states x f are quantized, read back and divided by f again; what is left to x is the error e.
It is weighed as it is read, sqrt(sum e^T R e / sum x^T R x): for keys that is the error of the
scores q·k in proportion to the scores, for values that of what the output projection makes of them.

The quantizers, with the engines that have them::

    fp8            e4m3, one scale a layer, from calibration      vLLM, SGLang, TensorRT-LLM …
    int8           per token and head, symmetric                  vLLM int8_per_token_head
    int4           per token and head, asymmetric                 LMDeploy --quant-policy 4
    int4-rotated   the same after a Hadamard matrix with          vLLM int4_per_token_head
                   signs, integer zero point
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvquant.errors import ExportError
from kvquant.quantize import dynamic
from kvquant.quantize.rotation import rotation
from kvquant.scheme import Granularity, TensorScheme, tensor_format

if TYPE_CHECKING:
    from .fold import LayerFold
    from .fold_observe import ObservedLayer, ObservedSlot

_FP8_MAX = 448.0
_INT8 = TensorScheme(tensor_format("int8"), Granularity.PER_TOKEN)
_INT4 = TensorScheme(
    tensor_format("int4"), Granularity.PER_TOKEN, symmetric=False, scale_format="fp16"
)
_SIGN_SEED = 0x9E3779B9
"""vLLM, v1/attention/ops/int4_per_token_head.py, _get_rht_signs."""

_LEAST_SCALE = 1e-6
"""Likewise, _reshape_cache_int4_kernel."""


def read_back(
    states: torch.Tensor, quantizer: str, amax: torch.Tensor | None = None
) -> torch.Tensor:
    """What an engine reads after it has stored `states`.

    Args:
        states: float32 ``[…, kv_heads, tokens, dim]``.
        quantizer: ``fp8``, ``int8``, ``int4`` or ``int4-rotated``.
        amax: For fp8, what its scale is made of instead of `states` themselves.

    Raises:
        ExportError: No such quantizer.
    """
    if quantizer == "fp8":
        return _fp8(states, states.abs().amax((-3, -2, -1), keepdim=True) if amax is None else amax)
    if quantizer not in _PER_TOKEN:
        raise ExportError(
            f"unknown quantizer {quantizer!r}: possible are {', '.join(quantizer_names())}"
        )
    return _PER_TOKEN[quantizer](states)


def quantizer_names() -> list[str]:
    """The quantizers that engines have."""
    return ["fp8", *_PER_TOKEN]


def errors(
    states: torch.Tensor,
    reading: torch.Tensor,
    factors: torch.Tensor,
    quantizer: str,
    amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """What quantizing costs with factors folded in: sum of e^T R e, ``[…, kv_heads]``.

    Args:
        states: ``[kv_heads, tokens, dim]``.
        reading: R, ``[kv_heads, dim, dim]``.
        factors: ``[…, kv_heads, dim]``.
        quantizer: As `read_back` takes it.
        amax: Likewise.
    """
    spread = factors[..., None, :]
    error = read_back(states * spread, quantizer, amax) / spread - states
    return (error @ reading).mul_(error).sum((-2, -1))


@dataclass(frozen=True)
class FoldError:
    """What one quantizer loses of one layer, in proportion to what is read.

    Attributes:
        layer: Number of the layer.
        quantizer: One of `quantizer_names`.
        key: Error of the scores q·k, without folding and with.
        value: Error of what the output projection makes of the values, likewise.
    """

    layer: int
    quantizer: str
    key: tuple[float, float]
    value: tuple[float, float]


def fold_report(
    observed: Mapping[int, ObservedLayer], folds: Mapping[int, LayerFold]
) -> Iterator[FoldError]:
    """Errors of all layers under all quantizers, without folding and with."""
    for layer, fold in folds.items():
        seen = observed[layer]
        for quantizer in quantizer_names():
            yield FoldError(
                layer,
                quantizer,
                _before_and_after(seen.key, fold.key, quantizer),
                _before_and_after(seen.value, fold.value, quantizer),
            )


def _before_and_after(
    slot: ObservedSlot, factors: torch.Tensor, quantizer: str
) -> tuple[float, float]:
    read = float(((slot.states @ slot.reading) * slot.states).sum())
    lost = (
        float(errors(slot.states, slot.reading, each, quantizer).sum())
        for each in (torch.ones_like(factors), factors)
    )
    before, after = ((max(each, 0.0) / read) ** 0.5 if read else 0.0 for each in lost)
    return before, after


def _fp8(states: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    # As exported: rounded up to a number that bfloat16 holds.
    scale = dynamic.round_up((amax / _FP8_MAX).clamp(min=2.0**-126), "bf16").float()
    codes = (states / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return codes.float() * scale


def _by_token(states: torch.Tensor, scheme: TensorScheme) -> torch.Tensor:
    return dynamic.dequantize(*dynamic.quantize(states, scheme, -1), scheme, -1)


def _rotated(states: torch.Tensor) -> torch.Tensor:
    """The int4 of vLLM: signs, Hadamard matrix, and a zero point between 0 and 15."""
    turn = _turn(states.shape[-1]).to(states.device)
    turned = states @ turn
    low, high = turned.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=_LEAST_SCALE / states.shape[-1] ** 0.5)
    zero = (-low / scale).round().clamp(0, 15)
    codes = (turned / scale + zero).round().clamp(0, 15)
    return ((codes - zero) * scale) @ turn.T


@functools.cache
def _turn(dim: int) -> torch.Tensor:
    """Matrix that vLLM multiplies a head with, orthogonal ``[dim, dim]``; always the same one.

    vLLM's is larger by sqrt(dim), which it takes back on reading. It has none for widths that are
    no power of two; ours takes its place.
    """
    generator = torch.Generator().manual_seed(_SIGN_SEED)
    signs = 2.0 * torch.bernoulli(torch.full((dim,), 0.5), generator=generator) - 1.0
    return signs[:, None] * rotation(dim).matrix().T


_PER_TOKEN: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": functools.partial(_by_token, scheme=_INT8),
    "int4": functools.partial(_by_token, scheme=_INT4),
    "int4-rotated": _rotated,
}
