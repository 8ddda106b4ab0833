"""What attention is tested on: stored tokens made by real codecs, in memory that is unkind.

Everything lies in larger tensors whose other bytes are all ones: NaN as a float, and as fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvquant.attention.stored import Run, StoredRows
from kvquant.presets import preset
from kvquant.quantize.codec import Center, Codec
from kvquant.rotary import RotaryLayout
from kvquant.scales import TensorScales
from kvquant.scheme import Granularity, TensorScheme, tensor_format

ONES = 0xFF


@dataclass(frozen=True)
class Case:
    """One call of one layer.

    Attributes:
        key: Name of the keys' scheme, as `scheme_of` takes it.
        value: Of the values'; that of the keys by default.
        rows: Rows of the batch.
        kv_heads: KV heads.
        group: Query heads of each.
        key_dim: Width of a key.
        value_dim: Width of a value; that of a key by default.
        past: Tokens before the call.
        new: Tokens of the call.
        window: As of `StoredRows`.
        sinks: First tokens, exact.
        tail: Newest tokens before the call, exact; those of keys may be more.
        cuts: Where the codes of keys, and of values, are cut into runs: shares of the whole.
        mean: ``none``, ``fixed``, or what of the rotary pairs turns: ``few``, ``most``, ``all``.
        layout: ``half``, ``interleaved``, ``leading`` or ``trailing`` (half of the pairs).
        positions: ``plain``, ``rows`` (each row begins elsewhere) or ``holes``.
        dtype: Of the model.
        first: Index of the first token that is still held, by values; keys hold their whole unit.
        seed: Of everything random.
    """

    key: str = "int8"
    value: str = ""
    rows: int = 1
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int = 0
    past: int = 20
    new: int = 1
    window: int | None = None
    sinks: int = 0
    tail: int = 0
    cuts: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    mean: str = "most"
    layout: str = "half"
    positions: str = "plain"
    dtype: torch.dtype = torch.float32
    first: int = 0
    seed: int = 0

    def query(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Queries ``[rows, heads, new, key_dim]`` that lie as a model's do: tokens before heads."""
        heads = self.kv_heads * self.group
        made = random(self.seed + 1, self.rows, self.new, heads, self.key_dim)
        return made.to(dtype).transpose(1, 2)

    def sink_logits(self) -> torch.Tensor:
        """A logit for each head."""
        return random(self.seed + 2, self.kv_heads * self.group)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scheme_of(name: str) -> TensorScheme:
    """``int4`` (a preset's keys), ``int4-kivi 8`` (its group) or ``int8 per-head asymmetric``."""
    base, *rest = name.split()
    if not rest:
        return preset(base).key
    if base == "int4-kivi":
        return preset(base, group_size=int(rest[0])).key
    if rest[0].startswith("group"):
        how: dict[str, Any] = {"group_size": int(rest[0][5:]), "scale_format": "fp16"}
        return TensorScheme(tensor_format(base), Granularity.PER_GROUP, rest[-1] == rest[0], **how)
    return TensorScheme(tensor_format(base), Granularity.parse(rest[0]), "asymmetric" not in rest)


class Angles:
    """Cosines and sines in pages, as the cache makes them."""

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        self.held = (torch.empty(0, pairs), torch.empty(0, pairs))

    def __call__(self, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.held[0]) < bound:
            rows = torch.arange(-(-bound // 64) * 64)[:, None]
            turned = rows * 100.0 ** (-torch.arange(self.pairs) / max(1, self.pairs))
            self.held = turned.cos(), turned.sin()
        return self.held


def center_of(kv_heads: int, dim: int, mean: str, layout: str, seed: int) -> Center | None:
    if mean == "none":
        return None
    fixed, half = 2 * random(seed, kv_heads, dim), dim // 2
    quarter = 2 * (half // 2)
    found = {
        "half": RotaryLayout(0, 2 * half, False, "half"),
        "interleaved": RotaryLayout(0, 2 * half, True, "half"),
        "leading": RotaryLayout(0, quarter, False, "half"),
        "trailing": RotaryLayout(dim - quarter, quarter, True, "half"),
    }[layout]
    pairs = found.width // 2
    if mean == "fixed" or not pairs:
        return Center(fixed)
    turns = torch.zeros(pairs, dtype=torch.bool)
    turns[{"few": slice(1, 2), "most": slice(None, None, 2), "all": slice(None)}[mean]] = True
    turned = torch.zeros_like(fixed)
    for to, source in zip(found.split(turned), found.split(fixed), strict=True):
        to.copy_(source * turns)
        source.mul_(~turns)
    return Center(fixed, turned, found, Angles(pairs))


def codec_of(case: Case, name: str, dim: int, is_key: bool) -> Codec:
    scheme, seed = scheme_of(name), case.seed + (10 if is_key else 20)
    scales, center = None, None
    if scheme.format.is_scaled and scheme.granularity.is_static:
        shape = scheme.granularity.scale_shape(case.kv_heads, dim)
        low, high = -random(seed, *shape).abs() - 1, random(seed + 1, *shape).abs() + 1
        scales = TensorScales.from_range(low, high, scheme)
    if scheme.center:
        mean = case.mean if is_key or case.mean == "none" else "fixed"
        center = center_of(case.kv_heads, dim, mean, case.layout, seed)
    return Codec(scheme, dim, case.dtype, scales=scales, center=center)


def positions_of(case: Case) -> torch.Tensor:
    tokens = case.past + case.new
    plain = torch.arange(tokens, dtype=torch.int32)[None].repeat(case.rows, 1)
    if case.positions == "plain":
        return plain
    plain = plain + 7 * torch.arange(case.rows, dtype=torch.int32)[:, None]
    if case.positions == "holes":
        plain = plain + 3 * (plain > tokens // 3) + 40 * (plain > tokens // 2)
    return plain.int()


PLACE = 2
"""Where a run begins in what holds it."""


def surrounded(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers from unit `PLACE` on, in the middle of a larger tensor of ones."""
    batch, heads, units = tensor.shape[:3]
    held = torch.empty((batch + 1, heads + 1, units + 3, *tensor.shape[3:]), dtype=tensor.dtype)
    held.view(torch.uint8).fill_(ONES)
    rows = held[:batch, 1 : heads + 1]
    rows[:, :, PLACE : PLACE + units].copy_(tensor)
    return rows


def runs_of(case: Case, codec: Codec, is_key: bool, positions: torch.Tensor) -> tuple[Run, ...]:
    """Sinks, codes in one or more runs, exact tail, and the tokens of the call."""
    states = random(case.seed + (3 if is_key else 4), 1, 1, case.past + case.new, 1).exp()
    shape = (case.rows, case.kv_heads, case.past + case.new, codec.dim)
    states = (states * random(case.seed + (5 if is_key else 6), *shape)).to(case.dtype)
    start = min(case.sinks, case.past)
    units = max(0, case.past - case.tail - start) // codec.unit
    end = start + units * codec.unit
    kept = max(0, case.first - start) // codec.unit  # the first unit of which something is held
    bound = int(positions.max()) + 1
    found = []
    if min(case.first, start) < start:
        found.append(exact(states, case.first, start))
    cuts = [0, *(kept + int((units - kept) * share) for share in case.cuts[not is_key]), units]
    for one, other in pairwise(sorted({max(kept, cut) for cut in cuts})):
        a, b = start + one * codec.unit, start + other * codec.unit
        coded = codec.encode(states[:, :, a:b].clone(), positions[:, a:b], bound)
        found.append(Run(a, b - a, codec, tuple(map(surrounded, coded)), PLACE))
    if max(end, case.first) < case.past:
        found.append(exact(states, max(end, case.first), case.past))
    return (*found, exact(states, case.past, case.past + case.new))


def exact(states: torch.Tensor, start: int, stop: int) -> Run:
    return Run(start, stop - start, None, (surrounded(states[:, :, start:stop]),), PLACE)


def codecs_of(case: Case) -> tuple[Codec, Codec]:
    """Codecs of the keys and of the values."""
    value_dim = case.value_dim or case.key_dim
    key = codec_of(case, case.key, case.key_dim, True)
    return key, codec_of(case, case.value or case.key, value_dim, False)


def stored_of(case: Case, codecs: tuple[Codec, Codec] | None = None) -> StoredRows:
    """The tokens of a case; `codecs` are those of `codecs_of` by default."""
    key, value = codecs or codecs_of(case)
    positions = positions_of(case)

    def between(start: int, stop: int) -> torch.Tensor:
        return positions[:, start:stop]

    return StoredRows(
        rows=None,
        keys=runs_of(case, key, True, positions),
        values=runs_of(case, value, False, positions),
        past=case.past,
        new=case.new,
        window=case.window,
        positions=between,
        bound=int(positions.max()) + 1,
    )


def spoil(
    stored: StoredRows, slot: str, token: int, number: float = torch.nan, head: int = 0
) -> None:
    """Writes what is no number where a token of row 0 and a KV head is stored.

    That is a channel of exact tokens, and scale, middle and floats of codes.
    """
    for run in getattr(stored, slot):
        if not run.first <= token < run.stop:
            continue
        codes, *ranges = run.tensors
        place = (0, head, (token - run.first) // (1 if run.codec is None else run.codec.unit))
        if codes.is_floating_point():
            codes[place][codes.shape[-1] // 2] = number
        for held in ranges:
            held[place] = torch.nan
        if run.codec is not None and run.codec.scheme.format.name.startswith("fp8"):
            codes[place] = 0x7F


def distance_beside_nan(found: torch.Tensor, expected: torch.Tensor) -> float:
    """``‖found − expected‖ / ‖expected‖`` of what is finite; infinite if that is not the same."""
    real = expected.isfinite()
    if not real.equal(found.isfinite()):
        return torch.inf
    found, expected = (it.double().masked_fill(~real, 0) for it in (found, expected))
    return float((found - expected).norm() / expected.norm())


@contextmanager
def dirty() -> Iterator[None]:
    """Memory that `torch.empty` gives is full of ones."""
    empty = torch.empty

    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        made.view(-1).view(torch.uint8).fill_(ONES)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", full)
        yield


@pytest.fixture(scope="session")
def make_case() -> type[Case]:
    """``make_case(**fields)``: a `Case`."""
    return Case


@pytest.fixture(scope="session")
def make_codecs() -> Callable[[Case], tuple[Codec, Codec]]:
    """``make_codecs(case)``: of its keys and values."""
    return codecs_of


@pytest.fixture(scope="session")
def make_stored() -> Callable[..., StoredRows]:
    """``make_stored(case)``: its tokens as they are stored."""
    return stored_of


@pytest.fixture(scope="session")
def spoil_token() -> Callable[..., None]:
    """``spoil_token(stored, "keys", token, number, head)``: makes a token of a head no number."""
    return spoil


@pytest.fixture(scope="session")
def beside_nan() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """``beside_nan(found, expected)``: how far they are apart where they are finite."""
    return distance_beside_nan


@pytest.fixture(scope="session")
def dirty_memory() -> Callable[[], AbstractContextManager[None]]:
    """A context in which new tensors hold NaN, as memory that was used before may."""
    return dirty
