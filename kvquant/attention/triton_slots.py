"""How the runs of keys or of values look to kernels, and what those have to know of a codec."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvquant.quantize.codec import Center, Codec
from kvquant.quantize.rotation import Rotation
from kvquant.scales import TensorScales
from kvquant.scheme import TensorScheme

from .stored import Run
from .triton_codes import CENTERS, GAIN, KINDS
from .triton_shapes import RUNS, Coded, Exact, SlotShape

WIDEST = 256
"""Channels of a head that a program has room for."""

_NEVER = (1 << 31) - 1
_VECTOR = 16


class RefusedError(Exception):
    """There is no kernel for something; the message says why, in a few words."""


@dataclass(frozen=True, eq=False)
class Waves:
    """Rotary pairs with a mean that turns, rounded up to a power of two by pairs without one.

    Attributes:
        columns: Of the tables of cosines and sines, int32 ``[pairs]``.
        one: Channels that are first in their pair, likewise.
        other: Channels that are second, likewise.
        one_mean: float32 ``[kv_heads, pairs]``.
        other_mean: Likewise.
    """

    columns: torch.Tensor
    one: torch.Tensor
    other: torch.Tensor
    one_mean: torch.Tensor
    other_mean: torch.Tensor

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.columns)


@dataclass(frozen=True, eq=False)
class Constants:
    """What a codec does to all tokens alike; tensors are float32 ``[kv_heads, dim]``.

    Attributes:
        source: The codec's center and scales that this was made from.
        scale: Of a static scheme.
        mean: What decoded tokens are above scaled codes, that are centred and rotated back.
        rotation: What tokens were multiplied by, ``[dim, dim]``; int8 where it is ±1.
        turn: What `rotation` is in units of.
        waves: The mean that turns with the position.
    """

    source: tuple[Center | None, TensorScales | None]
    scale: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rotation: torch.Tensor | None = None
    turn: float = 1.0
    waves: Waves | None = None


NO_CONSTANTS = Constants((None, None))
"""Of a slot without codes."""


class Slot(NamedTuple):
    """The runs of keys or values that are visible.

    Attributes:
        shape: What kernels are compiled for.
        codec: Of the coded run, if there is one.
        coded: The coded run.
        scale: Its scales; like `middle` and codes some other tensor where there are none.
        middle: Its middles.
        start: First coded token, 0 without any.
        stop: Token after the last.
        origin: The token that would begin the tensors.
        cut: First token of the run's second part.
        jump: How much farther on that part lies, in codes.
        scale_jump: Likewise, in scales.
        exact: The exact runs.
        firsts: Their first tokens.
        froms: The tokens that would begin their tensors.
    """

    shape: SlotShape
    codec: Codec | None
    coded: Coded
    scale: torch.Tensor
    middle: torch.Tensor
    start: int
    stop: int
    origin: int
    cut: int
    jump: int
    scale_jump: int
    exact: Exact
    firsts: tuple[int, ...]
    froms: tuple[int, ...]


def is_coded(run: Run) -> bool:
    """Whether a run holds codes, not numbers."""
    return run.codec is not None and run.codec.scheme.format.is_scaled


def slot(runs: tuple[Run, ...], visible: int, *, narrowest: int, grouped: bool) -> Slot:
    """Runs from token `visible` on, as kernels take them.

    Args:
        runs: Of a slot.
        visible: First token that is seen.
        narrowest: Words that a row should have at least.
        grouped: Whether groups are allowed.

    Raises:
        RefusedError: Kernels cannot read them.
    """
    coded: list[Run] = []
    exact: list[Run] = []
    for run in runs:
        if run.stop > max(visible, run.first):
            (coded if is_coded(run) else exact).append(run)
    tensors, firsts, froms = _exact(exact)
    align = _exact_align(tensors)
    if not coded:
        other = tensors.runs[0]
        shape = _slot_shape("exact", _dim(other.shape[-1]), align)
        nothing, places = Coded(other, 0, 0, 0, 0, 0, 0), (0, 0, 0, _NEVER, 0, 0)
        return Slot(shape, None, nothing, other, other, *places, tensors, firsts, froms)
    first, codec = coded[0], coded[0].codec
    assert codec is not None
    _check_parts(coded, codec, grouped)
    fields, jumps = _coded(coded)
    codes, *ranges = first.held
    dim, row, unit = _dim(codec.dim), codec.row_bytes, codec.unit
    steps = fields.row | fields.head | fields.unit | jumps[0] | row
    is_even = (steps | codes.data_ptr()) % 2 == 0
    word = 2 if is_even and row >= 2 * narrowest else 1
    kind = KINDS[codec.scheme.format.name]
    shape = _slot_shape(kind, dim, align, row, word, _align(steps), unit, len(ranges))
    scale, middle = (*ranges, codes, codes)[:2]
    cut = coded[1].first if len(coded) > 1 else _NEVER
    places = (first.first, coded[-1].stop, first.first - first.place * unit, cut, *jumps)
    return Slot(shape, codec, fields, scale, middle, *places, tensors, firsts, froms)


@functools.cache
def _slot_shape(
    kind: str,
    dim: int,
    exact_align: int,
    row: int = 0,
    word: int = 1,
    align: int = 1,
    group: int = 1,
    ranges: int = 0,
) -> SlotShape:
    """What kernels are compiled for; `ranges` counts scales and middles."""
    return SlotShape(
        kind,
        dim,
        _padded(dim),
        exact_align,
        row=row,
        word=word,
        block=_padded(-(-row // word)),
        align=align,
        group=group,
        scaled=ranges > 0,
        middle=ranges > 1,
        gain=GAIN.get(kind, 1.0),
    )


def _dim(dim: int) -> int:
    """Width of a head, where kernels have room for it."""
    if dim > WIDEST:
        raise RefusedError(f"heads of {dim} channels, more than {WIDEST}")
    return dim


def check_scheme(scheme: TensorScheme) -> None:
    """Makes sure that there are kernels for codes of a scheme.

    Raises:
        RefusedError: There are none.
    """
    if scheme.format.name not in KINDS:
        raise RefusedError(f"no kernel reads {scheme.format.name}")
    if scheme.unit > 1 and scheme.unit % _VECTOR:
        raise RefusedError(f"groups of {scheme.unit} tokens, no multiple of {_VECTOR}")


def _check_parts(coded: list[Run], codec: Codec, grouped: bool) -> None:
    check_scheme(codec.scheme)
    if codec.unit > 1 and not grouped:
        raise RefusedError("values in groups")
    if len(coded) > 2 or any(run.codec is not codec for run in coded):
        raise RefusedError(f"codes in {len(coded)} pieces")
    if coded[-1].first != coded[0].first + sum(run.count for run in coded[:-1]):
        raise RefusedError("exact tokens between codes")


def _exact(runs: list[Run]) -> tuple[Exact, tuple[int, ...], tuple[int, ...]]:
    """Exact runs, as many as kernels take; their first tokens, and those of their tensors."""
    if not runs:
        raise RefusedError("no exact tokens, though those of the call are")
    if len(runs) > RUNS:
        raise RefusedError(f"exact tokens in {len(runs)} pieces, more than {RUNS}")
    tensors = [run.held[0] for run in runs]
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise RefusedError("exact tokens of several dtypes")
    if any(tensor.stride(3) != 1 for tensor in tensors):
        raise RefusedError("exact tokens with gaps")
    missing = RUNS - len(runs)
    tensors += [tensors[0]] * missing
    firsts = (*(run.first for run in runs), *[_NEVER] * missing)
    froms = (*(run.first - run.place for run in runs), *[0] * missing)
    rows, heads, tokens = zip(*(tensor.stride()[:3] for tensor in tensors), strict=True)
    return Exact(tuple(tensors), rows, heads, tokens), firsts, froms


def _coded(runs: list[Run]) -> tuple[Coded, tuple[int, int]]:
    """Codes with strides; how much farther on the second part lies, in codes and in scales."""
    codes, *ranges = runs[0].held
    if not all(map(_is_dense, runs[0].held)):
        raise RefusedError("codes with gaps")
    if len({tensor.stride() for tensor in ranges}) > 1:
        raise RefusedError("scales and middles that lie differently")
    strides = ranges[0].stride()[:3] if ranges else (0, 0, 0)
    fields = Coded(codes, *codes.stride()[:3], *strides)
    if len(runs) == 1:
        return fields, (0, 0)
    jumps = [_jump(runs[0], runs[1], number) for number in range(len(runs[0].held))]
    if len(set(jumps[1:])) > 1:
        raise RefusedError("scales and middles that lie differently")
    return fields, (jumps[0], jumps[-1])


def _jump(one: Run, other: Run, number: int) -> int:
    """Elements from where a field of `other` would follow that of `one` to where it is."""
    held, second = one.held[number], other.held[number]
    if held.stride()[:3] != second.stride()[:3]:
        raise RefusedError("parts of a ring that lie differently")
    assert one.codec is not None
    apart, rest = divmod(second.data_ptr() - held.data_ptr(), held.itemsize)
    assert rest == 0
    return apart + (other.place - one.place - one.count // one.codec.unit) * held.stride(2)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a unit lie without gaps."""
    expected = 1
    for axis in range(tensor.dim() - 1, 2, -1):
        if tensor.shape[axis] > 1 and tensor.stride(axis) != expected:
            return False
        expected *= tensor.shape[axis]
    return True


def _exact_align(exact: Exact) -> int:
    """Bytes that all exact tokens begin at a multiple of."""
    size = exact.runs[0].itemsize
    steps = 0
    for step in (*exact.rows, *exact.heads, *exact.tokens):
        steps |= step * size
    for run in exact.runs:
        steps |= run.data_ptr()
    return _align(steps)


def _align(steps: int) -> int:
    """The largest power of two, up to the widest access to memory, that divides all of `steps`."""
    return min(_VECTOR, steps & -steps) if steps else _VECTOR


def _padded(count: int) -> int:
    """`count`, rounded up to a power of two that tensor cores take."""
    return max(16, 1 << (count - 1).bit_length())


# What codecs do to all tokens alike

_constants: WeakKeyDictionary[Codec, dict[torch.device, Constants]] = WeakKeyDictionary()


def constants(codec: Codec, kv_heads: int, device: torch.device) -> Constants:
    """What kernels have to know of a codec; worked out once, with a look at the numbers."""
    known = _constants.setdefault(codec, {})
    made = known.get(device)
    # A codec replaces what it has once states of another device come.
    if made is None or made.source[0] is not codec.center or made.source[1] is not codec.scales:
        made = known[device] = _made(codec, kv_heads, device)
    return made


def _made(codec: Codec, kv_heads: int, device: torch.device) -> Constants:
    made = Constants((codec.center, codec.scales))
    if codec.scales is not None:
        scale, offset = _static(codec, kv_heads)
        offset = None if offset is None else offset.to(device)
        made = replace(made, scale=scale.to(device), mean=offset)
    if codec.rotation is not None:
        matrix, turn = _matrix(codec.rotation)
        made = replace(made, rotation=matrix.to(device), turn=turn)
    if codec.center is not None:
        fixed = codec.center.fixed
        mean = fixed.to(device).contiguous() if bool(fixed.any()) else None
        made = replace(made, mean=mean, waves=_waves(codec.center, device))
    return made


def _static(codec: Codec, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calibrated scales of all channels, and what a code of 0 (once centred) stands for."""
    assert codec.scales is not None
    shape = (kv_heads, codec.dim)
    scale = codec.scales.scale.expand(shape).contiguous()
    zero = codec.scales.zero_point
    if zero is None:
        return scale, None
    center = CENTERS[KINDS[codec.scheme.format.name]]
    return scale, ((center - zero.double()) * scale.double()).float().expand(shape).contiguous()


def _matrix(rotation: Rotation) -> tuple[torch.Tensor, float]:
    """The rotation, as signs and a factor where it is one."""
    matrix = rotation.matrix()
    signs = torch.round(matrix / rotation.factor)
    if bool((signs.abs() == 1).all()):
        return signs.to(torch.int8), rotation.factor
    return matrix, 1.0


def _waves(center: Center, device: torch.device) -> Waves | None:
    """The pairs whose mean turns, if there are any."""
    if center.turned is None or center.layout is None:
        return None
    one_mean, other_mean = (part.cpu() for part in center.layout.split(center.turned))
    (columns,) = ((one_mean != 0) | (other_mean != 0)).any(0).nonzero(as_tuple=True)
    if not len(columns):
        return None
    one, other = center.layout.split(torch.arange(center.turned.shape[-1]))
    room = _padded(len(columns)) - len(columns)

    def filled(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        part = torch.nn.functional.pad(part[..., columns], (0, room))
        return part.to(device, dtype).contiguous()

    return Waves(
        torch.nn.functional.pad(columns, (0, room)).to(device, torch.int32),
        filled(one, torch.int32),
        filled(other, torch.int32),
        filled(one_mean, torch.float32),
        filled(other_mean, torch.float32),
    )
