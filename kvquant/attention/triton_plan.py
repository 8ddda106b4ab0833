"""Which tokens are read how, by which programs: integers only."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Region:
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
    tiles: int = 0
    splits: int = 0

    def split(self, size: int, least: int, most: int) -> Region:
        """The same, cut into at most `most` splits of at least `least` tiles of `size` tokens."""
        if self.start >= self.stop:
            return self
        tiles = -(-(self.stop - self.origin) // size)
        own = max(least, -(-tiles // most))
        return replace(self, tiles=own, splits=-(-tiles // own))


@dataclass(frozen=True)
class Regions:
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


@dataclass(frozen=True, eq=False)
class Plan:
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
    regions = _regions(keys, values, visible, stored)
    pairs = 0 if of_keys.waves is None else len(of_keys.waves)
    shape = Shape(
        keys.shape,
        values.shape,
        mixed=regions.coded_slot,
        lanes=_LANES,
        tokens=_tile(_tokens(keys.shape, values.shape, query, pairs), keys.shape.group),
        exact_tokens=_tile(_EXACT_TOKENS, keys.shape.group),
        pairs=pairs,
        windowed=stored.window is not None,
        softcapped=softcapped,
        half=query.dtype != torch.float32,
        whole=of_keys.scale is None and of_keys.rotation is None,
        ptx=not IS_INTERPRETED,
        stages=_STAGES,
    )
    made = Plan(query, stored, keys, values, of_keys, of_values, shape, regions, kv_heads)
    return replace(made, regions=_split(made))


def _tokens(keys: SlotShape, values: SlotShape, query: torch.Tensor, pairs: int) -> int:
    """Tokens of a tile of codes: as many as registers have room for."""
    most = _TOKENS if not pairs else _TOKENS // 2 if pairs == 16 else _EXACT_TOKENS
    size = max(1, keys.row + values.row) * (query.itemsize // 2) ** 2
    return min(most, max(_EXACT_TOKENS, 1 << (_TILE_BYTES // size).bit_length() >> 1))


def _tile(most: int, group: int) -> int:
    """Tokens of a tile: at most `most`, and a divisor of `group` if that is not 1."""
    return most if group == 1 else min(most, group & -group)


def _regions(keys: Slot, values: Slot, visible: int, stored: StoredRows) -> Regions:
    """The tokens from `visible` on by how they are stored."""
    end = stored.past + stored.new
    coded = [it for it in (keys, values) if it.codec is not None]
    spans = [(max(it.start, visible), it.stop) for it in coded] or [(end, end)]
    if len({start for start, _ in spans}) > 1:
        raise RefusedError("codes of keys and of values begin at different tokens")
    start, stop = spans[0][0], max(stop for _, stop in spans)
    both = min(stop for _, stop in spans) if len(spans) == 2 else start
    coded_slot = "none"
    if both < stop:
        coded_slot = "key" if keys.codec is not None and keys.stop == stop else "value"
    front, back = start - visible, end - stop
    return Regions(
        coded=Region(start, start, both),
        mixed=Region(both, both, stop),
        exact=Region(0, 0, front + back),
        first=visible,
        front=front,
        back=stop,
        coded_slot=coded_slot,
    )


def _split(made: Plan) -> Regions:
    """The regions, in as many splits as keep the GPU busy."""
    shape, regions, keys = made.shape, made.regions, made.keys
    most = max(1, _programs(shape, made.query.device) // (made.groups * made.blocks))

    def aligned(region: Region, size: int, is_grouped: bool) -> Region:
        # Tiles of keys in groups do not cross groups.
        ahead = (region.start - keys.start) % size if is_grouped else 0
        return replace(region, origin=region.start - ahead)

    grouped = keys.shape.group > 1
    mixed = aligned(regions.mixed, shape.exact_tokens, grouped and regions.coded_slot == "key")
    mixed = mixed.split(shape.exact_tokens, _LEAST_EXACT, most)
    exact = regions.exact.split(shape.exact_tokens, _LEAST_EXACT, most)
    coded = aligned(regions.coded, shape.tokens, grouped)
    coded = coded.split(shape.tokens, 1, max(1, most - mixed.splits - exact.splits))
    return replace(regions, coded=coded, mixed=mixed, exact=exact)


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
