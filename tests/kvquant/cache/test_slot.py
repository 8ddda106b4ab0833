"""The rule that makes the cache trustworthy, against a slow and obvious model of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.cache.slot import SlotStore
from kvquant.cache.window import ROLLBACK, Window
from kvquant.presets import preset
from kvquant.quantize.codec import Center, Codec
from kvquant.rotary import RotaryLayout
from kvquant.scales import TensorScales
from kvquant.scheme import EXACT, Granularity, TensorScheme, tensor_format

HEADS = 2
BATCH = 2


# Schemes: every slot of every preset, static ones, and means that stay or turn


def kivi(group_size: int) -> TensorScheme:
    return preset("int4-kivi", group_size=group_size).key


def static(name: str, granularity: Granularity, symmetric: bool = True) -> TensorScheme:
    return TensorScheme(tensor_format(name), granularity, symmetric)


SCHEMES: dict[str, TensorScheme] = {
    "none": EXACT,
    "bf16": preset("bf16").key,
    "fp16": preset("fp16").key,
    "fp8": preset("fp8").key,
    "fp8_e5m2": preset("fp8_e5m2").value,
    "int8": preset("int8").key,
    "kivi keys 4": kivi(4),
    "kivi keys 64": kivi(64),
    "kivi values": preset("int4-kivi").value,
    "int4": preset("int4").key,
    "int3": preset("int3").value,
    "int4 centered": preset("int4").key,
    "int3 turned": preset("int3").key,
    "fp8 per-tensor": static("fp8_e4m3", Granularity.PER_TENSOR),
    "int8 per-head": static("int8", Granularity.PER_HEAD, symmetric=False),
    "int4 per-channel": static("int4", Granularity.PER_CHANNEL),
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def angles(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.arange(count)[:, None] * torch.tensor([1.0, 0.1])
    return turns.cos(), turns.sin()


def make_codec(name: str, dim: int, dtype: torch.dtype, kind: type[Codec] = Codec) -> Codec:
    scheme, center, scales = SCHEMES[name], None, None
    if "centered" in name:
        center = Center(seeded(HEADS, dim, seed=1))
    if "turned" in name:
        fixed, turned = seeded(HEADS, dim, seed=1), seeded(HEADS, dim, seed=2)
        fixed[:, :4], turned[:, 4:] = 0, 0
        center = Center(fixed, turned, RotaryLayout(0, 4, False, "half"), angles)
    if scheme.granularity.is_static:
        shape = scheme.granularity.scale_shape(HEADS, dim)
        scale = 4.0 / scheme.format.qmax * (1 + seeded(*shape, seed=3).abs())
        zero = None if scheme.symmetric else torch.full(shape, 128.0)
        scales = TensorScales(scale, zero)
    return kind(scheme, dim, dtype, scales=scales, center=center)


def make_states(tokens: int, dim: int, dtype: torch.dtype, batch: int = BATCH) -> torch.Tensor:
    """Values of many sizes; channel 0 of all is the number of the token modulo 251."""
    states = seeded(batch, HEADS, tokens, dim) * torch.exp2(seeded(1, 1, tokens, dim, seed=5))
    states[..., 0] = torch.arange(tokens) % 251
    return states.to(dtype)


def positions(start: int, stop: int) -> torch.Tensor:
    """Each row of the batch has its own, and they are not the tokens' numbers."""
    return torch.arange(start, stop) * 3 + torch.tensor([[0], [7]])


BOUND = 10_000


class Counting(Codec):
    """A codec that writes down which tokens it encodes, as their first channel tells."""

    def encode_into(self, targets: Any, states: torch.Tensor, *args: Any) -> None:
        seen: list[int] = self.__dict__.setdefault("seen", [])
        seen.extend(states[0, 0, :, 0].int().tolist())
        super().encode_into(targets, states, *args)


# The model


@dataclass
class Unit:
    """Codes of consecutive tokens, and what each of these is read back as."""

    first: int
    size: int
    codes: tuple[torch.Tensor, ...]
    read: tuple[torch.Tensor, ...]


@dataclass
class Oracle:
    """What a store has to hold, worked out token by token.

    Each token is a sink, in a unit of codes, or exact, as its absolute index says. Units are
    encoded one at a time, as soon as all their tokens are older than the newest `residual`.
    """

    codec: Codec
    window: Window
    records: bool = False
    tokens: list[torch.Tensor] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    coded_end: int = 0
    dropped: int = 0
    """Tokens before this one may be gone."""

    def __post_init__(self) -> None:
        self.coded_end = self.window.sinks

    @property
    def visible(self) -> int:
        """Index of the oldest token that can be seen."""
        keep = self.window.keep
        return 0 if keep is None else max(0, len(self.tokens) - keep)

    def append(self, states: torch.Tensor) -> None:
        self._step()
        for number in range(states.shape[2]):
            self.tokens.append(states[:, :, number : number + 1])
            self._step()

    def settle(self) -> None:
        records, self.records = self.records, False
        self._step()
        self.records = records

    def crop(self, count: int) -> None:
        length = max(0, len(self.tokens) - count)
        del self.tokens[length:]
        self.units = [unit for unit in self.units if unit.first < length]
        if self.units:
            last = self.units[-1]
            last.size = min(last.size, length - last.first)
        self.coded_end = max(self.window.sinks, min(self.coded_end, length))

    def read(self, count: int) -> torch.Tensor:
        """The newest `count` tokens."""
        found = list(self.tokens)
        for unit in self.units:
            found[unit.first : unit.first + unit.size] = unit.read[: unit.size]
        return torch.cat(found[len(found) - count :], dim=2)

    def live_units(self) -> list[Unit]:
        """Units of which some token can be seen, or could be after taking tokens back."""
        return [unit for unit in self.units if unit.first + unit.size > self._needed()]

    def live_tail(self) -> list[torch.Tensor]:
        exact_only = self.window.keep is not None and self.window.residual >= self.window.keep
        return self.tokens[max(self.coded_end, self._needed() if exact_only else 0) :]

    def live_sinks(self) -> list[torch.Tensor]:
        return self.tokens[self._needed() : self.window.sinks]

    def _needed(self) -> int:
        return self.dropped

    def _step(self) -> None:
        window, length = self.window, len(self.tokens)
        delay = ROLLBACK if self.records else 0
        if window.keep is not None:
            self.dropped = max(self.dropped, length - delay - window.keep)
            if window.residual >= window.keep:
                return
        if window.residual == 0 and window.unit == 1:
            delay = 0
        while length - delay - window.residual - self.coded_end >= window.unit:
            self.units.append(self._encoded(self.coded_end))
            self.coded_end += window.unit

    def _encoded(self, first: int) -> Unit:
        size = self.window.unit
        members = torch.cat(self.tokens[first : first + size], dim=2)
        where = None if size > 1 else positions(first, first + 1)
        codes, out = self.codec.encode(members, where, BOUND), torch.empty_like(members)
        self.codec.decode(codes, out, where, BOUND)
        return Unit(first, size, codes, out.split(1, dim=2))


def live(buffer: Any) -> list[torch.Tensor]:
    """Rows held of each field of a buffer; empty if there are none."""
    parts = [views for _, views in buffer.views(buffer.first, buffer.end)]
    return [torch.cat(runs, dim=2) for runs in zip(*parts, strict=True)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether tensors are the same bit for bit."""
    return len(found) == len(wanted) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        for a, b in zip(found, wanted, strict=True)
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def joined(rows: Iterable[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [torch.cat(parts, dim=2) for parts in zip(*rows, strict=True)]


def check(store: SlotStore, oracle: Oracle) -> None:
    """`store` holds what `oracle` says, and reads it back."""
    assert store.length == len(oracle.tokens)
    sinks, coded, tail = store.buffers
    assert same(live(sinks), joined((token,) for token in oracle.live_sinks()))
    assert same(live(coded), joined(unit.codes for unit in oracle.live_units()))
    assert same(live(tail), joined((token,) for token in oracle.live_tail()))
    seen = store.length - oracle.visible
    for count in dict.fromkeys((seen, seen - 1, seen // 2, 1)):
        if 0 < count <= seen:
            assert same([read(store, count)], [oracle.read(count)])


def read(store: SlotStore, count: int) -> torch.Tensor:
    """The newest tokens, read into the middle of something larger."""
    batch = next(b.tensors[0].shape[0] for b in store.buffers if b.tensors)
    whole = torch.full((batch, HEADS, count + 2, store.codec.dim), 77, dtype=store.codec.dtype)
    store.read(whole[:, :, 1:-1], positions, BOUND)
    assert bool((whole[:, :, 0] == 77).all())
    assert bool((whole[:, :, -1] == 77).all())
    return whole[:, :, 1:-1]


def fed(codec: Codec, window: Window, states: torch.Tensor, sizes: Iterable[int]) -> SlotStore:
    """A store that got `states` in calls of these sizes, over and over."""
    store, done = SlotStore(codec, window), 0
    for size in itertools.cycle(sizes):
        if done >= states.shape[2]:
            return store
        store.append(states[:, :, done : done + size], positions, BOUND)
        done += size
    raise AssertionError


def held(store: SlotStore) -> list[torch.Tensor]:
    """All that a store holds."""
    return [rows for buffer in store.buffers for rows in live(buffer)]


# The rule

WINDOWS = list(itertools.product((0, 1, 4), (0, 5, 128)))
"""Sinks and residual."""
SIZES = ([1], [3], [5], [7], [2, 19, 1, 1])


def plain(name: str, sinks: int, residual: int, keep: int | None = None) -> Window:
    return Window(sinks, residual, SCHEMES[name].unit, keep)


def text_length(window: Window) -> int:
    """Enough tokens for two units and a bit."""
    return window.sinks + window.residual + 2 * window.unit + (3 if window.unit > 1 else 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_stored_does_not_depend_on_how_calls_were_cut(
    name: str, dim: int, dtype: torch.dtype
) -> None:
    codec = make_codec(name, dim, dtype)
    windows = WINDOWS if dim == 64 else [(0, 0), (1, 128), (4, 5)]
    for sinks, residual in windows:
        window = plain(name, sinks, residual)
        states = make_states(text_length(window), dim, dtype)
        oracle = Oracle(codec, window)
        oracle.append(states)
        assert len(oracle.units) >= 2
        whole = fed(codec, window, states, [states.shape[2]])
        check(whole, oracle)
        for sizes in SIZES if dim == 64 else SIZES[:-1]:
            cut = fed(codec, window, states, sizes)
            assert same(held(cut), held(whole)), (window, sizes)
            assert same([read(cut, cut.length)], [read(whole, cut.length)])
            assert cut.live_nbytes() == whole.live_nbytes()


class Reference(Codec):
    """A codec in plain torch, as devices use it."""

    encode = Codec.encode_reference
    decode = Codec.decode_reference

    def encode_into(self, targets: Any, states: torch.Tensor, *args: Any) -> None:
        coded, done = self.encode_reference(states, *args), 0
        for target in targets:
            units = target[0].shape[2]
            for held, part in zip(target, coded, strict=True):
                held.copy_(part[:, :, done : done + units])
            done += units


@pytest.mark.parametrize("name", SCHEMES)
def test_the_rule_holds_in_plain_torch_too(name: str) -> None:
    window = plain(name, 4, 5)
    for dim, dtype in ((64, torch.float32), (256, torch.bfloat16)):
        codec = make_codec(name, dim, dtype, Reference)
        states = make_states(text_length(window), dim, dtype)
        whole = fed(codec, window, states, [states.shape[2]])
        for sizes in ([1], [3], [5], [7]):
            cut = fed(codec, window, states, sizes)
            assert same(held(cut), held(whole))
            assert same([read(cut, cut.length)], [read(whole, cut.length)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cuts_give_what_the_model_says(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(SCHEMES)))
    dim = data.draw(st.sampled_from((1, 5, 8, 12)))
    window = plain(
        name,
        data.draw(st.integers(0, 5)),
        data.draw(st.integers(0, 9)),
        data.draw(st.none() | st.integers(0, 30)),
    )
    if "turned" in name:
        dim = max(dim, 4)
    codec = make_codec(name, dim, torch.float32)
    sizes = data.draw(st.lists(st.integers(0, 70), max_size=8))
    states = make_states(sum(sizes), dim, torch.float32)
    store, oracle = SlotStore(codec, window), Oracle(codec, window)
    done = 0
    for size in sizes:
        part = states[:, :, done : done + size]
        store.append(part, positions, BOUND)
        oracle.append(part)
        done += size
        check(store, oracle)


@pytest.mark.parametrize("name", ["none", "int8", "int4 centered", "kivi keys 4", "kivi keys 64"])
@pytest.mark.parametrize("keep", [None, 20])
def test_no_token_is_encoded_twice_nor_from_codes(name: str, keep: int | None) -> None:
    window = plain(name, 4, 5, keep)
    states = make_states(200, 8, torch.float32)
    codec = make_codec(name, 8, torch.float32, Counting)
    store = SlotStore(codec, window)
    for start in range(0, 200, 7):
        store.append(states[:, :, start : start + 7], positions, BOUND)
        seen = codec.__dict__.get("seen", [])
        assert len(set(seen)) == len(seen)
        assert seen == list(range(4, window.coded_end(store.length)))
        read(store, store.length - window.first_kept(store.length))
        assert codec.__dict__.get("seen", []) == seen


def test_of_a_prompt_longer_than_the_window_only_what_is_seen_is_encoded() -> None:
    codec = make_codec("kivi keys 4", 8, torch.float32, Counting)
    store = SlotStore(codec, Window(4, 5, 4, 20))
    store.append(make_states(200, 8, torch.float32), positions, BOUND)
    # 200 - 20 = 180 is the first token of the group 180 … 183; the last group ends at 192.
    assert codec.__dict__["seen"] == list(range(180, 192))


@pytest.mark.parametrize("unit", [1, 4, 64])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 40])
def test_the_newest_tokens_are_exact(unit: int, length: int) -> None:
    # Case G1: after the prompt and after each of 20 decoding steps.
    name = {1: "int8", 4: "kivi keys 4", 64: "kivi keys 64"}[unit]
    residual = 8
    store = SlotStore(make_codec(name, 8, torch.float32), plain(name, 0, residual))
    states = make_states(length + 20 + 3 * unit, 8, torch.float32)
    store.append(states[:, :, :length], positions, BOUND)
    for step in range(20 + 3 * unit):
        newest = min(store.length, residual)
        assert torch.equal(read(store, newest), states[:, :, store.length - newest : store.length])
        exact = len(store.tail)
        if store.length >= residual:
            assert residual <= exact <= residual + unit - 1
        else:
            assert exact == store.length
        store.append(states[:, :, length + step : length + step + 1], positions, BOUND)


def test_codes_really_lose_something() -> None:
    # Without this, all the equalities above could be between exact numbers.
    states = make_states(40, 64, torch.float32)
    for name, scheme in SCHEMES.items():
        store = fed(make_codec(name, 64, torch.float32), Window(4, 5, scheme.unit), states, [40])
        off = (read(store, 40) - states).abs().amax(dim=(0, 1, 3)) > 0
        assert not bool(off[:4].any())
        assert not bool(off[-5:].any())
        if name != "none" and scheme.unit < 64:
            assert int(off.sum()) > 20, name


# Sliding windows

LONG = 180
SLIDING = [
    ("none", 0, 0, 7),
    ("int8", 0, 0, 1),
    ("int8", 4, 0, 100),
    ("int8", 4, 3, 7),
    ("int8", 4, 6, 7),  # one code is seen
    ("int8", 4, 7, 7),  # none is
    ("int8", 4, 130, 70),
    ("int4 centered", 4, 0, 3),
    ("int3 turned", 2, 2, 66),
    ("kivi keys 4", 0, 0, 7),
    ("kivi keys 4", 1, 3, 20),
    ("kivi keys 64", 0, 0, 7),  # window smaller than a group
    ("kivi keys 64", 4, 5, 66),
    ("kivi keys 64", 0, 128, 100),
    ("int8", 4, 0, 0),  # nothing is ever seen again
]


@pytest.mark.parametrize(("name", "sinks", "residual", "keep"), SLIDING)
@pytest.mark.parametrize("sizes", [[1], [5], [LONG], [3, 77, 1]])
def test_a_sliding_window_holds_what_is_seen_and_stops_growing(
    name: str, sinks: int, residual: int, keep: int, sizes: list[int]
) -> None:
    window = plain(name, sinks, residual, keep)
    states = make_states(LONG + 3 * window.unit + 40, 8, torch.float32)
    codec = make_codec(name, 8, torch.float32)
    store, oracle = SlotStore(codec, window), Oracle(codec, window)
    done, rooms = 0, []
    for size in itertools.cycle(sizes):
        size = min(size, LONG - done) if done < LONG else min(size, 5)
        part = states[:, :, done : done + size]
        if not part.shape[2]:
            break
        store.append(part, positions, BOUND)
        oracle.append(part)
        done += size
        tokens = len(store.sinks) + len(store.coded) * window.unit + len(store.tail)
        pending = 0 if residual >= keep else residual + window.unit - 1
        assert tokens <= max(keep, pending) + window.unit - 1
        if done >= LONG + 2 * window.unit:
            rooms.append(store.nbytes())
        if size > 5 or done % 16 < size:
            check(store, oracle)
    check(store, oracle)
    assert len(rooms) >= 8
    assert len(set(rooms)) == 1
    assert store.sinks.nbytes() == 0


@pytest.mark.parametrize(("name", "sinks", "residual", "keep"), SLIDING)
def test_any_visible_range_of_a_sliding_window_reads(
    name: str, sinks: int, residual: int, keep: int
) -> None:
    window = plain(name, sinks, residual, keep)
    codec = make_codec(name, 8, torch.float32)
    oracle = Oracle(codec, window)
    states = make_states(2 * keep + 70, 8, torch.float32)
    oracle.append(states)
    store = fed(codec, window, states, [11])
    for count in range(1, keep + 1):
        assert same([read(store, count)], [oracle.read(count)])


@pytest.mark.parametrize(
    ("window", "sinks", "coded", "tail"),
    [
        # The residual's room, and codes of the window without it, in pages of 64.
        (Window(0, 0, 1, 4095), 0, 4096, 0),
        (Window(4, 0, 1, 4095), 0, 4096, 0),
        (Window(0, 128, 1, 4095), 0, 3968, 128),
        (Window(0, 128, 64, 4095), 0, 62, 192),
        (Window(0, 0, 64, 4095), 0, 64, 64),
        (Window(0, 0, 64, 7), 0, 1, 64),
        (Window(0, 128, 64, 100), 0, 0, 128),
        (Window(0, 128, 1, 128), 0, 0, 128),
    ],
)
def test_rooms_of_a_window_long_passed(window: Window, sinks: int, coded: int, tail: int) -> None:
    name = {1: "int8", 64: "kivi keys 64"}[window.unit]
    codec = make_codec(name, 2, torch.float32)
    states = make_states(6000, 2, torch.float32, batch=1)
    assert SCHEMES[name].unit == window.unit

    def first_row(start: int, stop: int) -> torch.Tensor:
        return positions(start, stop)[:1]

    for sizes in ([6000], [500], [4000, 1, 700]):
        store, done = SlotStore(codec, window), 0
        for size in itertools.cycle(sizes):
            store.append(states[:, :, done : done + size], first_row, BOUND)
            done += size
            if done >= 6000:
                break
        for _ in range(300):
            store.append(states[:, :, :1], first_row, BOUND)
        assert [buffer.room for buffer in store.buffers] == [sinks, coded, tail], sizes


# Taking tokens back


@dataclass
class Pair:
    """A store and its model, which are given the same."""

    name: str
    window: Window
    dim: int = 8
    source: int = 0

    def __post_init__(self) -> None:
        codec = make_codec(self.name, self.dim, torch.float32)
        self.store, self.oracle = SlotStore(codec, self.window), Oracle(codec, self.window)
        self.states = make_states(600, self.dim, torch.float32)

    def append(self, count: int, first: int | None = None) -> None:
        first = self.store.length if first is None else first
        part = self.states[:, :, first : first + count]
        self.store.append(part, positions, BOUND)
        self.oracle.append(part)

    def crop(self, count: int) -> None:
        self.store.crop(count)
        self.oracle.crop(count)
        self.check()

    def check(self) -> None:
        check(self.store, self.oracle)


APPEND_ONLY = ["none", "fp8", "int8", "int4", "int4 centered", "int3 turned", "fp8 per-tensor"]


@pytest.mark.parametrize("name", APPEND_ONLY)
@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_append_only_schemes_forget_a_crop_without_a_trace(name: str, sinks: int) -> None:
    codec, window = make_codec(name, 8, torch.float32), plain(name, sinks, 0)
    states = make_states(30, 8, torch.float32)
    straight = fed(codec, window, states, [30])
    store = fed(codec, window, states[:, :, :22], [5])
    for count in (0, 3, 9, 1, 7, 40):
        store.crop(count)
        again = states[:, :, store.length : 22 if count < 40 else 30]
        wrong = torch.randn(again.shape)  # a draft that is taken back
        store.append(wrong, positions, BOUND)
        store.crop(again.shape[2])
        store.append(again, positions, BOUND)
    assert same(held(store), held(straight))
    assert same([read(store, 30)], [read(straight, 30)])
    assert store.live_nbytes() == straight.live_nbytes()


@pytest.mark.parametrize(("count", "left"), [(0, 3), (1, 2), (3, 0), (5, 0)])
@pytest.mark.parametrize("name", ["none", "int8", "kivi keys 4"])
@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_a_crop_takes_back_as_many_as_it_says(count: int, left: int, name: str, sinks: int) -> None:
    # Case G3: 3 stored; then appending gives exactly the new tokens.
    pair = Pair(name, plain(name, sinks, 0))
    pair.append(3)
    pair.crop(count)
    assert pair.store.length == left
    pair.append(9, first=100)
    pair.check()
    if name == "none":
        assert torch.equal(read(pair.store, left + 9)[:, :, left:], pair.states[:, :, 100:109])


def test_a_cut_group_keeps_its_parameters_and_stays_short() -> None:
    pair = Pair("kivi keys 4", Window(1, 2, 4))
    pair.append(15)  # 1 sink, groups 1-4, 5-8, 9-12, 2 exact
    assert (len(pair.store.coded), len(pair.store.tail)) == (3, 2)
    before = live(pair.store.coded)
    pair.crop(8)  # 7 left: the second group has tokens 5 and 6
    after = live(pair.store.coded)
    assert same(after, [rows[:, :, :2] for rows in before])
    assert (len(pair.store.coded), len(pair.store.tail)) == (2, 0)
    # The residual refills: 5 exact ones before the next group, 7-10, closes.
    for exact, units in ((1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (2, 3), (3, 3)):
        pair.append(1, first=300 + exact)
        pair.check()
        assert (len(pair.store.tail), len(pair.store.coded)) == (exact, units)
    assert same([rows[:, :, :2] for rows in live(pair.store.coded)], after)


def test_groups_can_be_cut_again_and_again() -> None:
    pair = Pair("kivi keys 4", Window(0, 0, 4))
    for _ in range(5):
        pair.append(6)
        pair.check()
        pair.crop(5)
    assert pair.store.length == 5
    assert len(pair.store.coded) == 5  # one token each
    pair.append(40)
    pair.check()
    pair.crop(42)
    pair.crop(0)
    pair.append(9)
    pair.check()
    pair.crop(500)
    pair.append(9)
    pair.check()


def test_the_residual_refills_after_a_crop() -> None:
    pair = Pair("int8", Window(0, 5, 1))
    pair.append(20)
    assert (len(pair.store.coded), len(pair.store.tail)) == (15, 5)
    pair.crop(3)
    assert (len(pair.store.coded), len(pair.store.tail)) == (15, 2)
    pair.crop(4)  # into the codes, which are not made exact again
    assert (len(pair.store.coded), len(pair.store.tail)) == (13, 0)
    for exact in (1, 2, 3, 4, 5, 5):
        pair.append(1)
        assert len(pair.store.tail) == exact
        pair.check()
    assert len(pair.store.coded) == 14


def test_a_crop_can_reach_into_the_sinks() -> None:
    for name in ("int8", "kivi keys 4"):
        pair = Pair(name, plain(name, 4, 0))
        pair.append(13)
        pair.crop(10)
        assert (pair.store.length, len(pair.store.sinks), len(pair.store.coded)) == (3, 3, 0)
        pair.append(13, first=50)
        pair.check()
        straight = Pair(name, pair.window)
        straight.append(3)
        straight.append(13, first=50)
        assert same(held(pair.store), held(straight.store))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("append", "append", "crop", "settle", "record", "stop", "copy")),
        st.integers(0, 12) | st.sampled_from((64, 127, 128, 129, 150)),
    ),
    max_size=14,
)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_history_gives_what_the_model_says(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(("int8", "kivi keys 4", "none", "int3 turned")))
    window = plain(
        name,
        data.draw(st.sampled_from((0, 1, 4))),
        data.draw(st.sampled_from((0, 0, 1, 3, 9))),
        data.draw(st.none() | st.sampled_from((1, 3, 9, 40))),
    )
    pair = Pair(name, window, dim=4)
    for step, number in data.draw(STEPS):
        if step == "append":
            number = min(number, 600 - pair.store.length)
            pair.append(number)
        elif step == "crop":
            left = max(0, len(pair.oracle.tokens) - number)
            seen = 0 if window.keep is None else max(0, left - window.keep)
            assert pair.store.can_crop(number) is (seen >= pair.oracle.dropped)
            if pair.store.can_crop(number):
                pair.crop(number)
        elif step == "settle":
            pair.store.settle(positions, BOUND)
            pair.oracle.settle()
        elif step == "copy":
            pair.store = pair.store.copy()
            pair.store.map(torch.clone)
        else:
            pair.store.records = pair.oracle.records = step == "record"
        pair.check()


# Taking back what was only a draft

DRAFTED = [
    ("int8", Window(4, 0, 1)),
    ("int8", Window(4, 5, 1)),
    ("kivi keys 4", Window(1, 3, 4)),
    ("kivi keys 64", Window(0, 128, 64)),
    ("int8", Window(4, 0, 1, 30)),
    ("int8", Window(4, 5, 1, 30)),
    ("kivi keys 4", Window(1, 3, 4, 30)),
    ("kivi keys 4", Window(1, 40, 4, 30)),
    ("kivi keys 64", Window(1, 3, 64, 30)),
]


@pytest.mark.parametrize(("name", "window"), DRAFTED)
@pytest.mark.parametrize("start", [2, 29, 100, 300])
def test_a_draft_that_is_taken_back_leaves_no_trace(name: str, window: Window, start: int) -> None:
    codec = make_codec(name, 8, torch.float32)
    states = make_states(start + ROLLBACK + 40, 8, torch.float32)
    straight = fed(codec, window, states[:, :, :start], [start])
    store = fed(codec, window, states[:, :, :start], [start])
    store.records = True
    for draft in (1, 5, ROLLBACK):
        store.append(torch.randn(BATCH, HEADS, draft, 8), positions, BOUND)
        assert store.can_crop(draft)
        store.crop(draft)
        store.settle(positions, BOUND)
        assert same(held(store), held(straight))
        assert store.live_nbytes() == straight.live_nbytes()
    # Partly accepted drafts end where plain decoding does.
    length = start
    for draft, accepted in ((5, 3), (7, 7), (20, 0), (9, 1)):
        good = states[:, :, length : length + accepted]
        bad = torch.randn(BATCH, HEADS, draft - accepted, 8)
        store.append(torch.cat((good, bad), dim=2), positions, BOUND)
        store.crop(draft - accepted)
        store.settle(positions, BOUND)
        length += accepted
    straight.append(states[:, :, start:length], positions, BOUND)
    assert store.length == straight.length
    assert same(held(store), held(straight))
    seen = store.length - window.first_kept(store.length)
    assert same([read(store, seen)], [read(straight, seen)])


def test_while_recording_the_newest_wait_and_settling_catches_up() -> None:
    store = SlotStore(make_codec("int8", 8, torch.float32), Window(0, 5, 1))
    states = make_states(300, 8, torch.float32)
    store.records = True
    store.append(states, positions, BOUND)
    assert (len(store.coded), len(store.tail)) == (300 - 128 - 5, 133)
    store.settle(positions, BOUND)
    assert (len(store.coded), len(store.tail)) == (295, 5)
    assert store.records
    store.append(states[:, :, :4], positions, BOUND)
    assert (len(store.coded), len(store.tail)) == (295, 9)


def test_append_only_codes_need_not_wait() -> None:
    store = SlotStore(make_codec("int8", 8, torch.float32), Window(4, 0, 1))
    store.records = True
    store.append(make_states(300, 8, torch.float32), positions, BOUND)
    assert (len(store.coded), len(store.tail)) == (296, 0)


@pytest.mark.parametrize(
    ("keep", "records", "length", "possible"),
    [
        (None, False, 50, 50),
        (9, False, 9, 9),  # nothing has left yet
        (9, False, 10, 0),
        (9, False, 50, 0),
        (9, True, 50, 50),
        (9, True, 137, 137),
        (9, True, 138, 128),
        (9, True, 400, 128),
    ],
)
@pytest.mark.parametrize(("name", "residual"), [("int8", 0), ("int8", 20), ("kivi keys 4", 3)])
def test_can_crop_says_how_far_back_it_goes(
    keep: int | None, records: bool, length: int, possible: int, name: str, residual: int
) -> None:
    pair = Pair(name, plain(name, 2, residual, keep))
    pair.store.records = pair.oracle.records = records
    pair.append(length)
    for count in (0, 1, possible - 1, possible, possible + 1, length - 1, length, length + 9):
        expected = 0 <= count <= possible or (possible == length and count >= 0)
        assert pair.store.can_crop(max(count, 0)) is (expected or count < 0), count
    pair.crop(possible)


# Rows


def test_a_copy_and_its_original_go_their_own_ways() -> None:
    pair = Pair("kivi keys 4", Window(1, 3, 4))
    pair.append(22)
    pair.crop(10)  # cuts the last group
    pair.append(3)
    twin = pair.store.copy()
    twin.map(lambda rows: rows.index_select(0, torch.tensor([1, 0])))
    assert same([read(twin, 15)], [pair.oracle.read(15)[[1, 0]]])
    twin.append(pair.states[:, :, :9], positions, BOUND)
    pair.check()
    pair.append(9)
    pair.check()
    twin.crop(25)
    assert twin.length == 0
    pair.check()


def test_rows_do_not_depend_on_each_other() -> None:
    for name, scheme in SCHEMES.items():
        codec, window = make_codec(name, 8, torch.float32), Window(1, 3, scheme.unit)
        states = make_states(80, 8, torch.float32)
        both = fed(codec, window, states, [13])
        changed = states.clone()
        changed[1] *= 100
        other = fed(codec, window, changed, [80])
        for a, b in zip(held(both), held(other), strict=True):
            assert same([a[:1]], [b[:1]]), name


def test_what_is_read_may_be_of_another_dtype() -> None:
    codec = make_codec("int8", 8, torch.float32)
    store = fed(codec, Window(2, 3, 1), make_states(20, 8, torch.float32), [20])
    out = torch.empty(BATCH, HEADS, 20, 8, dtype=torch.bfloat16)
    store.read(out, positions, BOUND)
    assert torch.equal(out, read(store, 20).bfloat16())


def test_bytes_are_those_of_the_three_buffers() -> None:
    store = fed(
        make_codec("kivi keys 4", 6, torch.bfloat16),
        Window(2, 3, 4),
        make_states(23, 6, torch.bfloat16),
        [23],
    )
    # 2 sinks, 4 groups, 5 exact: 6 numbers of 2 bytes; a group has 4 rows of 3 bytes, and scale
    # and middle in fp16 for 6 channels.
    rows = BATCH * HEADS
    group = 4 * 3 + 2 * 6 * 2
    assert store.live_nbytes() == rows * (2 * 12 + 4 * group + 5 * 12)
    assert store.nbytes() == rows * (2 * 12 + 16 * group + 64 * 12)
