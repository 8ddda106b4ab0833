"""Tiles against the reference, with tiles so small that their edges are everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvquant.attention import tiles
from kvquant.attention.reference import attend_reference, seen
from kvquant.attention.stored import Run, StoredRows

CPU = torch.device("cpu")
SCHEMES = ["none", "bf16", "fp8", "int8", "int4", "int3", "int4-kivi 8", "int8 per-channel"]


@pytest.fixture(params=[(1, 1 << 25), (7, 300), (8, 1), (1024, 1 << 25)], ids=str)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Tokens of a tile, and scores that are held at once."""
    tile, scores = request.param
    monkeypatch.setattr(tiles, "TILE", tile)
    monkeypatch.setattr(tiles, "_SCORES", scores)
    return tile, scores


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


def error_of(
    case: Any, stored: StoredRows, dtype: torch.dtype = torch.float32, **options: Any
) -> float:
    query, scaling = case.query(dtype), case.key_dim**-0.5
    found = tiles.attend(query, stored, scaling, **options)
    assert found.dtype == dtype
    return distance(found, attend_reference(query, stored, scaling, **options))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_is_the_reference(
    scheme: str, sizes: Any, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    for past, new, window in product((0, 1, 20), (1, 9), (None, 1, 8, 20, 40)):
        case = make_case(scheme, past=past, new=new, window=window, rows=2, sinks=4, tail=3)
        assert error_of(case, make_stored(case)) <= 1e-5, (past, new, window)


@pytest.mark.parametrize("scheme", ["int4", "int4-kivi 8"])
def test_scores_are_capped_and_sinks_take_part(
    scheme: str, sizes: Any, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    for past, new in ((20, 1), (20, 6), (0, 20)):
        case = make_case(scheme, past=past, new=new, group=3, window=15, sinks=4)
        stored, logits = make_stored(case), case.sink_logits()
        assert error_of(case, stored, softcap=2.0) <= 1e-5
        for sinks in (logits, logits + 20, logits - 20, logits - torch.inf, logits.bfloat16()):
            assert error_of(case, stored, sinks=sinks) <= 1e-5
        assert error_of(case, stored, softcap=5.0, sinks=logits) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(
    dtype: torch.dtype, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int8", past=300, new=20, dtype=dtype, key_dim=32)
    limit = 2e-2 if dtype == torch.bfloat16 else 3e-3
    assert error_of(case, make_stored(case), dtype) <= limit


@pytest.mark.parametrize("window", [None, 400])
def test_sums_of_values_may_be_beyond_float16(
    window: int | None, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("none", past=1480, new=20, window=window, dtype=torch.float16)
    values = torch.full((1, 2, 1500, 16), 300.0, dtype=torch.float16)
    stored = replace(make_stored(case), values=(Run(0, 1500, None, (values,)),))
    found = tiles.attend(case.query(torch.float16), stored, 0.01)
    assert float((found - 300).abs().max()) <= 0.25


def test_outputs_lie_as_a_model_wants_them(
    sizes: Any, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int4", "int8", rows=2, new=9, value_dim=24)
    found = tiles.attend(case.query(), make_stored(case), 0.25)
    assert found.shape == (2, 4, 9, 24)
    assert found.transpose(1, 2).is_contiguous()


# Masks


def masked(
    query: torch.Tensor, stored: StoredRows, mask: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Attention in float64 by a mask for the newest tokens, bool or to add."""
    keys, values = (
        tiles.read_range(runs, 0, stored.past + stored.new, stored, torch.float32).double()
        for runs in (stored.keys, stored.values)
    )
    group = query.shape[1] // keys.shape[1]
    scores = query.double() @ keys.repeat_interleave(group, 1).mT * 0.25
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    mask = mask[..., -scores.shape[-1] :]
    hidden = ~mask if mask.dtype == torch.bool else torch.zeros_like(mask, dtype=torch.bool)
    added = torch.zeros_like(scores) if mask.dtype == torch.bool else mask.double()
    weights = (scores + added).masked_fill(hidden, -torch.inf).softmax(-1)
    return weights @ values.repeat_interleave(group, 1)


def random_mask(*shape: int, seed: int = 0) -> torch.Tensor:
    """Hides half of the tokens, but never all."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[..., -1] = True
    return mask


@pytest.mark.parametrize("scheme", ["none", "int4", "int4-kivi 8"])
@pytest.mark.parametrize("lead", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_mask_is_the_last_word(
    scheme: str,
    lead: tuple[int, int],
    sizes: Any,
    make_case: Any,
    make_stored: Callable[..., StoredRows],
) -> None:
    case = make_case(scheme, rows=2, past=30, new=6, sinks=4, tail=3)
    stored, query, mask = make_stored(case), case.query(), random_mask(*lead, 6, 36)
    found = tiles.attend(query, stored, 0.25, mask=mask)
    assert distance(found, masked(query, stored, mask)) <= 1e-5
    found = tiles.attend(query, stored, 0.25, mask=mask, softcap=3.0)
    assert distance(found, masked(query, stored, mask, softcap=3.0)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [-torch.inf, "min"])
def test_a_mask_of_numbers_is_added(
    dtype: torch.dtype,
    hidden: Any,
    sizes: Any,
    make_case: Any,
    make_stored: Callable[..., StoredRows],
) -> None:
    case = make_case("int8", rows=2, past=30, new=6)
    stored, query = make_stored(case), case.query()
    bias = torch.randn(2, 4, 6, 36, generator=torch.Generator().manual_seed(1)).to(dtype)
    least = torch.finfo(dtype).min if hidden == "min" else hidden
    mask = bias.masked_fill(~random_mask(2, 1, 6, 36), least)
    found = tiles.attend(query, stored, 0.25, mask=mask)
    assert distance(found, masked(query, stored, mask)) <= 1e-5


def test_a_mask_that_hides_what_is_hidden_anyway(
    sizes: Any, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    for window in (None, 10):
        case = make_case("int4", past=30, new=6, window=window)
        stored, query = make_stored(case), case.query()
        first = 0 if window is None else 21
        usual = seen(stored, first, CPU)[None, None]
        for mask in (usual, torch.zeros(usual.shape).masked_fill(~usual, -torch.inf)):
            found = tiles.attend(query, stored, 0.25, mask=mask)
            expected = attend_reference(query, stored, 0.25)
            assert distance(found, expected) <= 1e-5


def test_a_mask_may_show_later_tokens(
    sizes: Any, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    """Tokens of an image that see each other, for one."""
    case = make_case("int4", past=30, new=6)
    stored, query = make_stored(case), case.query()
    mask = torch.ones(1, 1, 6, 36, dtype=torch.bool)
    found = tiles.attend(query, stored, 0.25, mask=mask)
    assert distance(found, masked(query, stored, mask)) <= 1e-5


def test_columns_of_a_mask_are_the_newest_tokens(
    sizes: Any, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    """Left padding, which is not stored, has columns of its own in front."""
    case = make_case("int8", past=30, new=3)
    stored, query, mask = make_stored(case), case.query(), random_mask(1, 1, 3, 33)
    wider = torch.cat((torch.zeros(1, 1, 3, 5, dtype=torch.bool), mask), dim=-1)
    found = tiles.attend(query, stored, 0.25, mask=wider)
    assert torch.equal(found, tiles.attend(query, stored, 0.25, mask=mask))


def test_a_query_that_sees_nothing_spoils_no_other(
    sizes: Any, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    """As one of padding, whose output nobody reads."""
    case = make_case("int4", past=20, new=4)
    stored, query, mask = make_stored(case), case.query(), random_mask(1, 1, 4, 24)
    blind = mask.clone()
    blind[:, :, 1] = False
    found, expected = (tiles.attend(query, stored, 0.25, mask=it) for it in (blind, mask))
    assert found.isfinite().all()
    others = [0, 2, 3]
    torch.testing.assert_close(found[:, :, others], expected[:, :, others])


# Numbers that are none


@pytest.mark.parametrize("slot", ["keys", "values"])
@pytest.mark.parametrize("scheme", [*SCHEMES, "fp8 per-head", "fp8_e5m2"])
def test_only_queries_that_see_nan_are_nan(
    scheme: str,
    slot: str,
    sizes: Any,
    make_case: Any,
    make_stored: Callable[..., StoredRows],
    spoil_token: Any,
) -> None:
    for token, number in ((1, torch.nan), (10, torch.nan), (25, torch.inf), (33, torch.nan)):
        for window, kind in product((None, 11), ("none", "bool", "added")):
            case = make_case(scheme, past=30, new=9, window=window, sinks=4, tail=3)
            stored, query = make_stored(case), case.query()
            spoil_token(stored, slot, token, number)
            mask = None if kind == "none" else seen(stored, 0, CPU)[None, None]
            if kind == "added":
                mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
            found = tiles.attend(query, stored, 0.25, mask=mask)
            wanted = attend_reference(query, stored, 0.25)
            # All channels are, where the reference has one of a value.
            real = wanted.isfinite().all(-1)
            assert found.isfinite().all(-1).equal(real), (token, window, kind)
            assert not found[~real].isfinite().any()
            assert distance(found[real], wanted[real]) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_numbers_are_numbers(
    dtype: torch.dtype, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("none", past=20, new=2, value_dim=128, dtype=dtype)
    stored = make_stored(case)
    for run in stored.values:
        run.tensors[0].fill_(min(5e35, torch.finfo(dtype).max / 2))
    assert tiles.attend(case.query(dtype), stored, 0.25).isfinite().all()


# Memory


class Largest(TorchDispatchMode):
    """Notes the numbers in the largest tensor that any operation makes; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            given = [it for it in tree_leaves(args) if isinstance(it, torch.Tensor)]
            places = {it.untyped_storage().data_ptr() for it in given}
            if made.untyped_storage().data_ptr() not in places:
                self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("scheme", ["int4", "int8", "int4-kivi 8"])
def test_neither_all_tokens_nor_all_scores_are_in_memory_at_once(
    scheme: str,
    with_mask: bool,
    make_case: Any,
    make_stored: Callable[..., StoredRows],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(tiles, "_SCORES", 4 * 32 * 50)
    case = make_case(scheme, past=2000, new=100, key_dim=16, sinks=4)
    stored, query = make_stored(case), case.query()
    mask = seen(stored, 0, CPU)[None, None] if with_mask else None
    with Largest() as largest:
        tiles.attend(query, stored, 0.25, mask=mask)
    # The output, and scores of 50 queries of 4 heads with 32 tokens, are 6,400 numbers each; the
    # mean of int4 turns by a table of 1,024 positions or more, which is there anyway.
    table = 2176 * 8 if scheme == "int4" else 0
    assert 4 * 50 * 32 <= largest.numbers <= max(6400, table)
    assert stored.past * case.key_dim * case.kv_heads > 60_000


@pytest.mark.parametrize("with_mask", [False, True])
def test_what_is_read_is_what_is_seen(
    with_mask: bool,
    make_case: Any,
    make_stored: Callable[..., StoredRows],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "TILE", 16)
    monkeypatch.setattr(tiles, "_SCORES", 4 * 16 * 10)
    ranges: list[tuple[int, int]] = []
    read_range = tiles.read_range

    def noted(runs: Any, start: int, stop: int, *rest: Any) -> torch.Tensor:
        ranges.append((start, stop))
        return read_range(runs, start, stop, *rest)

    monkeypatch.setattr(tiles, "read_range", noted)
    case = make_case("int8", past=100, new=15, window=40)
    stored = make_stored(case)
    mask = seen(stored, 61, CPU)[None, None] if with_mask else None
    tiles.attend(case.query(), stored, 0.25, mask=mask)
    # Ten queries that see 61 … 109, then five that see 71 … 114; keys and values each.
    first = [(61, 77), (77, 93), (93, 109), (109, 115 if with_mask else 110)]
    then = [(71, 87), (87, 103), (103, 115)]
    assert ranges == [pair for pair in (*first, *then) for _ in range(2)]


# Ranges


@pytest.mark.parametrize("scheme", ["int4", "int8", "int4-kivi 8", "int4-kivi 5"])
def test_ranges_are_parts_of_the_whole(
    scheme: str, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case(scheme, past=50, sinks=3, tail=6, cuts=((0.5,), (0.3, 0.6)), mean="most")
    stored = make_stored(case)
    for runs in (stored.keys, stored.values):
        whole = tiles.read_range(runs, 0, 51, stored, torch.float32)
        for start, stop in ((0, 1), (2, 4), (3, 9), (11, 12), (20, 44), (40, 51), (50, 51)):
            part = tiles.read_range(runs, start, stop, stored, torch.float32)
            assert torch.equal(part, whole[:, :, start:stop]), (start, stop)
        half = tiles.read_range(runs, 2, 48, stored, torch.bfloat16)
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half, whole[:, :, 2:48].bfloat16())


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_call(data: Any, make_case: Any, make_stored: Callable[..., StoredRows]) -> None:
    draw = data.draw
    case = make_case(
        draw(st.sampled_from(SCHEMES)),
        draw(st.sampled_from(SCHEMES)),
        rows=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 5)),
        key_dim=draw(st.sampled_from([1, 8, 20, 33])),
        value_dim=draw(st.sampled_from([0, 5, 16])),
        past=draw(st.integers(0, 60)),
        new=draw(st.integers(1, 40)),
        window=draw(st.none() | st.integers(1, 80)),
        sinks=draw(st.integers(0, 5)),
        tail=draw(st.integers(0, 20)),
        positions=draw(st.sampled_from(["plain", "rows", "holes"])),
    )
    first = 0 if case.window is None else max(0, case.past + 1 - case.window)
    stored = make_stored(replace(case, first=draw(st.sampled_from([0, first]))))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["softcap"] = draw(st.floats(0.5, 60))
    if draw(st.booleans()):
        options["sinks"] = case.sink_logits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE", draw(st.integers(1, 70)))
        patch.setattr(tiles, "_SCORES", draw(st.sampled_from([1, 500, 1 << 25])))
        assert error_of(case, stored, **options) <= 1e-5
