"""Which tokens are read how, by which programs: integers only."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .stored import StoredRows
from .triton_launch import IS_INTERPRETED
from .triton_shapes import Shape, SlotShape
from .triton_slots import NO_CONSTANTS, Constants, RefusedError, Slot, constants, slot

# Queries of a program. More are shared out to several, which find the codes in the L2 cache: Triton
# would have each warp unpack all codes if there were more queries than channels to a warp.
_LANES = 16
_TOKENS = 128
_EXACT_TOKENS = 32
_TILE_BYTES = 16384
_STAGES = 3
# Words of a row of values below which Triton has all warps compute the same.
_NARROWEST = 32
# Tiles of exact tokens that are worth a program.
_LEAST_EXACT = 4
# GPUs with 100 KB of shared memory in a multiprocessor; kernels for heads of 128 take 43 to 45 KB.
_SMALL = {(8, 6), (8, 9), (12, 0), (12, 1)}
# Programs that are to run at once where there is no GPU to ask.
_INTERPRETED_PROGRAMS = 32


class Region(NamedTuple):
    """Tokens whose keys and values are stored alike.

    Attributes:
        origin: Where tiles begin.
        start: First token.
        stop: Token after the last.
        tiles: Tiles of a split.
        splits: Number of splits.
    """

    origin: int
    start: int
    stop: int
    tiles: int
    splits: int


class Regions(NamedTuple):
    """All tokens that are seen.

    Attributes:
        coded: Keys and values are codes.
        mixed: Keys or values are.
        exact: Neither; numbers of tokens in the region.
        first: First token of the exact region.
        front: How many tokens follow each other from it on.
        back: First of the others.
        coded_slot: Which slot is coded in the mixed region: ``key``, ``value`` or ``none``.
    """

    coded: Region
    mixed: Region
    exact: Region
    first: int
    front: int
    back: int
    coded_slot: str

    @property
    def splits(self) -> int:
        """Splits of all regions."""
        return self.coded.splits + self.mixed.splits + self.exact.splits

    @property
    def coded_value_splits(self) -> int:
        """Splits whose values are coded; they come first."""
        return self.coded.splits + (self.mixed.splits if self.coded_slot == "value" else 0)


class Plan(NamedTuple):
    """What is to be done, without a look at any number.

    Attributes:
        query: ``[rows, heads, new, key_dim]``.
        stored: What is attended to.
        keys: Runs of keys.
        values: Runs of values.
        of_keys: Numbers of the keys' codec.
        of_values: Numbers of the values' codec.
        shape: What the attention kernel is compiled for.
        regions: The tokens, in splits.
        kv_heads: KV heads.
    """

    query: torch.Tensor
    stored: StoredRows
    keys: Slot
    values: Slot
    of_keys: Constants
    of_values: Constants
    shape: Shape
    regions: Regions
    kv_heads: int

    @property
    def lanes(self) -> int:
        """Queries on a KV head."""
        return self.query.shape[1] // self.kv_heads * self.query.shape[2]

    @property
    def groups(self) -> int:
        """KV heads of all rows."""
        return self.query.shape[0] * self.kv_heads

    @property
    def blocks(self) -> int:
        """Programs that share the lanes of a group."""
        return -(-self.lanes // self.shape.lanes)


def plan(query: torch.Tensor, stored: StoredRows, softcapped: bool = False) -> Plan:
    """How to attend to `stored`.

    Raises:
        RefusedError: No kernel can.
    """
    kv_heads = stored.keys[0].held[0].shape[1]
    visible = max(stored.first_seen(0), stored.keys[0].first, stored.values[0].first)
    keys = slot(stored.keys, visible, narrowest=1, grouped=True)
    values = slot(stored.values, visible, narrowest=_NARROWEST, grouped=False)
    of_keys, of_values = (
        NO_CONSTANTS if it.codec is None else constants(it.codec, kv_heads, query.device)
        for it in (keys, values)
    )
    if of_values.waves is not None:
        raise RefusedError("values have a mean that turns")
    span = _span(keys, values, visible, stored.past + stored.new)
    pairs = 0 if of_keys.waves is None else len(of_keys.waves)
    whole = of_keys.scale is None and of_keys.rotation is None
    windowed = stored.window is not None
    shape = _shape(
        *(keys.shape, values.shape, span.coded_slot, pairs, whole),
        *(query.shape[2] > 1, windowed, softcapped, query.itemsize),
    )
    groups, lanes = query.shape[0] * kv_heads, query.shape[1] // kv_heads * query.shape[2]
    most = _programs(shape, query.device) // (groups * -(-lanes // shape.lanes))
    regions = _regions(span, keys, shape, max(1, most))
    return Plan(query, stored, keys, values, of_keys, of_values, shape, regions, kv_heads)


@functools.cache
def _shape(
    keys: SlotShape,
    values: SlotShape,
    mixed: str,
    pairs: int,
    whole: bool,
    several: bool,
    windowed: bool,
    softcapped: bool,
    itemsize: int,
) -> Shape:
    """What the attention kernel is compiled for; queries have numbers of `itemsize` bytes."""
    return Shape(
        keys,
        values,
        mixed=mixed,
        lanes=_LANES,
        tokens=_tile(_tokens(keys, values, itemsize, pairs), keys.group),
        exact_tokens=_tile(_EXACT_TOKENS, keys.group),
        pairs=pairs,
        several=several,
        windowed=windowed,
        softcapped=softcapped,
        half=itemsize == 2,
        whole=whole,
        ptx=not IS_INTERPRETED,
        stages=_STAGES,
    )


def _tokens(keys: SlotShape, values: SlotShape, itemsize: int, pairs: int) -> int:
    """Tokens of a tile of codes: as many as registers have room for."""
    most = _TOKENS if not pairs else _TOKENS // 2 if pairs == 16 else _EXACT_TOKENS
    size = max(1, keys.row + values.row) * (itemsize // 2) ** 2
    return min(most, max(_EXACT_TOKENS, 1 << (_TILE_BYTES // size).bit_length() >> 1))


def _tile(most: int, group: int) -> int:
    """Tokens of a tile: at most `most`, and a divisor of `group` if that is not 1."""
    return most if group == 1 else min(most, group & -group)


class Span(NamedTuple):
    """Where codes are.

    Attributes:
        visible: First token that is seen.
        start: First token with codes.
        both: First one after it that lacks codes of keys or of values.
        stop: First one after it that lacks both.
        end: Number of tokens.
        coded_slot: Which slot has codes from `both` to `stop`: ``key``, ``value`` or ``none``.
    """

    visible: int
    start: int
    both: int
    stop: int
    end: int
    coded_slot: str


def _span(keys: Slot, values: Slot, visible: int, end: int) -> Span:
    coded = [it for it in (keys, values) if it.codec is not None]
    starts = {max(it.start, visible) for it in coded} or {end}
    if len(starts) > 1:
        raise RefusedError("codes of keys and of values begin at different tokens")
    (start,) = starts
    stop = max((it.stop for it in coded), default=end)
    both = min(keys.stop, values.stop) if len(coded) == 2 else start
    if both == stop:
        return Span(visible, start, both, stop, end, "none")
    is_key = keys.codec is not None and keys.stop == stop
    return Span(visible, start, both, stop, end, "key" if is_key else "value")


def _regions(span: Span, keys: Slot, shape: Shape, most: int) -> Regions:
    """The tokens in at most `most` splits; those without codes get theirs first."""
    exact_count = span.start - span.visible + span.end - span.stop
    exact = _region(0, 0, exact_count, shape.exact_tokens, _LEAST_EXACT, most)
    # Tiles of keys in groups do not cross groups.
    ahead, mixed_ahead = 0, 0
    if shape.keys.group > 1:
        ahead = (span.start - keys.start) % shape.tokens
        mixed_ahead = (span.both - keys.start) % shape.exact_tokens * (span.coded_slot == "key")
    mixed = _region(
        span.both - mixed_ahead, span.both, span.stop, shape.exact_tokens, _LEAST_EXACT, most
    )
    left = max(1, most - mixed.splits - exact.splits)
    coded = _region(span.start - ahead, span.start, span.both, shape.tokens, 1, left)
    front = span.start - span.visible
    return Regions(coded, mixed, exact, span.visible, front, span.stop, span.coded_slot)


def _region(origin: int, start: int, stop: int, size: int, least: int, most: int) -> Region:
    """Tokens in at most `most` splits of at least `least` tiles of `size` tokens."""
    if start >= stop:
        return Region(origin, start, stop, 0, 0)
    tiles = -(-(stop - origin) // size)
    own = max(least, -(-tiles // most))
    return Region(origin, start, stop, own, -(-tiles // own))


def _programs(shape: Shape, device: torch.device) -> int:
    """Programs that run at once: more would have to wait for all of those to end."""
    if IS_INTERPRETED:
        return _INTERPRETED_PROGRAMS
    multiprocessors, most = _gpu(device)
    return min(shape.residents, most) * multiprocessors


@functools.cache
def _gpu(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and programs that the shared memory of one has room for."""
    is_small = torch.cuda.get_device_capability(device) in _SMALL
    return torch.cuda.get_device_properties(device).multi_processor_count, 2 if is_small else 3
