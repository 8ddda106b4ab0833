"""Codes <-> bytes: how the codes of one token of one head lie in a row of uint8.

::

    8 bits   byte j holds channel j; symmetric codes are stored as code + 128, FP8 as its bits
    4 bits   h = ceil(dim / 2) bytes: channel j in the low nibble, channel j + h in the high one
    3 bits   P = dim rounded up to 8: P/4 bytes with the two low bits of channels j, j + P/4,
             j + P/2 and j + 3P/4 (from bit 0 on), then P/8 bytes with the top bit of channel
             j + k * P/8 at bit k

Channels beyond dim store code 0. Halves and not neighbours share a byte, so that what is unpacked
from one run of bytes is a run of channels.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from kvquant.scheme import TensorFormat, TensorScheme

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def row_bytes(form: TensorFormat, dim: int) -> int:
    """Bytes that the codes of one token of one head take."""
    return _padded(form, dim) * form.bits // 8


def pack(codes: torch.Tensor, scheme: TensorScheme) -> torch.Tensor:
    """Rows of bytes, uint8 ``[..., row_bytes]``.

    Args:
        codes: ``[..., dim]`` as quantizing gives them: ``float8``, ``int8`` (symmetric) or
            ``uint8`` (asymmetric).
        scheme: What they are codes of.
    """
    form = scheme.format
    stored = codes.view(torch.uint8)
    if scheme.symmetric and not form.is_float:
        stored = stored + _offset(form)  # modulo 256
    stored = pad(stored, (0, _padded(form, codes.shape[-1]) - codes.shape[-1]))
    if form.bits == 4:
        return _fold(stored, 4)
    if form.bits == 3:
        return torch.cat((_fold(stored & 3, 2), _fold(stored >> 2, 1)), dim=-1)
    return stored


def unpack(rows: torch.Tensor, scheme: TensorScheme, dim: int) -> torch.Tensor:
    """Inverse of `pack`: codes ``[..., dim]`` in the dtype that quantizing gives."""
    form = scheme.format
    stored = rows
    if form.bits == 4:
        stored = _spread(rows, 4)
    elif form.bits == 3:
        split = _padded(form, dim) // 4
        stored = _spread(rows[..., :split], 2) | (_spread(rows[..., split:], 1) << 2)
    stored = stored[..., :dim]
    if form.is_float:
        return stored.view(FP8[form.name])
    return (stored - _offset(form)).view(torch.int8) if scheme.symmetric else stored


def _padded(form: TensorFormat, dim: int) -> int:
    """Channels that whole bytes hold."""
    share = {8: 1, 4: 2, 3: 8}[form.bits]
    return -(-dim // share) * share


def _offset(form: TensorFormat) -> int:
    """What makes symmetric codes, which are signed, unsigned."""
    return 1 << (form.bits - 1)


def _fold(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """8/bits equal parts of a row, one above the other in the same bytes."""
    parts = torch.unflatten(stored, -1, (8 // bits, -1))
    return (parts << _shifts(stored, bits)).sum(dim=-2, dtype=torch.uint8)


def _spread(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `_fold`."""
    parts = rows.unsqueeze(-2) >> _shifts(rows, bits)
    return (parts & ((1 << bits) - 1)).flatten(-2)


def _shifts(like: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)[:, None]
