"""The kernel against the reference in float64, on the same codes, in memory full of NaN.

`make_case` and `make_stored` are in conftest.py: what they make lies among NaN, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.attention import numba_kernels
from kvquant.attention.reference import attend_reference
from kvquant.attention.stored import Run, StoredRows

PRESETS = ["none", "bf16", "fp16", "fp8", "fp8_e5m2", "int8", "int4", "int3", "int4-kivi 8"]
STATIC = [
    *(
        f"{name} {grain}"
        for name in ("fp8", "fp8_e5m2", "int8", "int4")
        for grain in ("per-tensor", "per-head", "per-channel")
    ),
    "int8 per-tensor asymmetric",
    "int8 per-channel asymmetric",
    "int4 per-head asymmetric",
]
GROUPED = ["int4-kivi 5", "int8 group4", "int3 group16 asymmetric"]
SCHEMES = [*PRESETS, *STATIC, *GROUPED]

LENGTHS = (1, 15, 16, 17, 4095)
DIMS = (16, 64, 72, 80, 96, 128, 192, 256)
ODD_DIMS = (1, 2, 5, 9, 40, 63, 71)

each_scheme = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(scope="session")
def error_of(
    make_stored: Callable[..., StoredRows], dirty_memory: Callable[[], Any]
) -> Callable[..., float]:
    """``error_of(case, dtype, **options)``: ‖out − reference‖ / ‖reference‖ for its queries."""

    def error(case: Any, dtype: torch.dtype = torch.float32, **options: Any) -> float:
        stored, query = make_stored(case), case.query(dtype)
        assert numba_kernels.refusal(query, stored) is None
        scaling = case.key_dim**-0.5
        with dirty_memory():
            found = numba_kernels.attend(query, stored, scaling, **options)
        assert found.dtype == dtype
        return distance(found, attend_reference(query, stored, scaling, **options))

    return error


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


# Formats and shapes


@each_scheme
def test_lengths(scheme: str, make_case: Any, error_of: Callable[..., float]) -> None:
    for tokens in LENGTHS:
        shape = {"kv_heads": 1, "group": 2, "key_dim": 32, "value_dim": 24}
        case = make_case(scheme, past=tokens - 1, sinks=4, tail=3, **shape)
        assert error_of(case) <= 1e-5, tokens


@each_scheme
def test_widths(scheme: str, make_case: Any, error_of: Callable[..., float]) -> None:
    for dim in (*DIMS, *ODD_DIMS):
        case = make_case(scheme, key_dim=dim, past=37, sinks=2, tail=5, group=3, rows=2)
        assert error_of(case) <= 1e-5, dim


MIXED = ["none", "bf16", "fp8", "int8", "int4", "int3", "int4-kivi 8", "int8 per-channel"]


@pytest.mark.parametrize("key", MIXED)
def test_keys_and_values_of_other_formats_and_widths(
    key: str, make_case: Any, error_of: Callable[..., float]
) -> None:
    for value, (key_dim, value_dim) in product(MIXED, ((48, 24), (40, 71))):
        case = make_case(key, value, key_dim=key_dim, value_dim=value_dim, past=70, sinks=4)
        assert error_of(case) <= 1e-5, (value, key_dim, value_dim)


@pytest.mark.parametrize("scheme", ["int4", "int8", "int4-kivi 8"])
@pytest.mark.parametrize(
    ("rows", "kv_heads", "group"),
    [(1, 1, 1), (3, 2, 1), (2, 2, 2), (1, 2, 3), (1, 2, 4), (2, 1, 5), (1, 3, 8), (1, 1, 71)],
)
def test_query_heads(
    scheme: str,
    rows: int,
    kv_heads: int,
    group: int,
    make_case: Any,
    error_of: Callable[..., float],
) -> None:
    # 71 queries have spans of 64 tokens.
    for past in (30, 200):
        case = make_case(scheme, rows=rows, kv_heads=kv_heads, group=group, past=past, sinks=4)
        assert error_of(case) <= 1e-5, past


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_long_texts_of_random_data(
    scheme: str, make_case: Any, error_of: Callable[..., float]
) -> None:
    case = make_case(scheme, past=65_535, kv_heads=1, group=3, key_dim=16, sinks=4)
    assert error_of(case) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["none", "fp8", "int8", "int4", "int4-kivi 8"])
def test_half_precision(
    scheme: str, dtype: torch.dtype, make_case: Any, error_of: Callable[..., float]
) -> None:
    case = make_case(scheme, dtype=dtype, past=300, sinks=4, tail=20, key_dim=40)
    assert error_of(case, dtype) <= 2e-3
    # Queries and exact tokens need not be of the same dtype.
    assert error_of(case) <= 1e-5


# What is seen


@pytest.mark.parametrize("scheme", ["none", "int4", "int8 per-channel", "int4-kivi 8"])
@pytest.mark.parametrize("new", [1, 2, 3, 5, 16])
def test_several_new_tokens_see_those_before_them(
    scheme: str, new: int, make_case: Any, error_of: Callable[..., float]
) -> None:
    for past, group in product((0, 1, 40, 130), (1, 3)):
        case = make_case(scheme, past=past, new=new, group=group, sinks=4, tail=2)
        assert error_of(case) <= 1e-5, (past, group)


@pytest.mark.parametrize("scheme", ["none", "int4", "int8", "int4-kivi 8"])
@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 8, 39, 40, 41, 42, 43, 44, 45, 100])
def test_windows(
    scheme: str, new: int, window: int, make_case: Any, error_of: Callable[..., float]
) -> None:
    case = make_case(scheme, past=40, new=new, window=window, sinks=4, tail=3)
    assert error_of(case) <= 1e-5
    # What has left the window is no longer held.
    oldest = max(0, 41 - window)
    assert error_of(replace(case, first=oldest)) <= 1e-5
    # Nor need it be all of a span.
    assert error_of(replace(case, past=600, first=max(0, 601 - window))) <= 1e-5


@pytest.mark.parametrize("scheme", ["none", "int4", "fp8", "int8 per-head", "int4-kivi 8"])
def test_tokens_before_the_window_do_not_matter(
    scheme: str, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case(scheme, past=150, new=3, window=50, sinks=4)
    query, found = case.query(), []
    for spoiled in (False, True):
        stored = make_stored(case)
        if spoiled:
            for run in (*stored.keys, *stored.values):
                spoil(run, stored.first_seen(0))
        found.append(numba_kernels.attend(query, stored, 0.25))
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def spoil(run: Run, end: int) -> None:
    """Makes tokens of a run that lie before token `end` NaN, whole units only."""
    unit = 1 if run.codec is None else run.codec.unit
    for tensor in run.tensors:
        tensor[:, :, : max(0, end - run.first) // unit].copy_(
            torch.full((), torch.nan if tensor.is_floating_point() else 0xFF, dtype=tensor.dtype)
        )


def test_spoiled_tokens_that_are_seen_would_have_mattered(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("fp8", past=150, new=1, window=50, sinks=4)
    for slot in ("keys", "values"):
        stored = make_stored(case)
        for run in getattr(stored, slot):
            spoil(run, stored.first_seen(0) + 1)
        assert numba_kernels.attend(case.query(), stored, 0.25).isnan().all()


@each_scheme
@pytest.mark.parametrize("slot", ["keys", "values"])
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_only_queries_that_see_nan_are_nan(
    softcap: float | None,
    slot: str,
    scheme: str,
    make_case: Any,
    make_stored: Callable[..., StoredRows],
    spoil_token: Any,
    beside_nan: Any,
) -> None:
    # A sink, codes, the edges of windows, the tail, and tokens of the call.
    for token, number in ((1, torch.nan), (30, torch.nan), (53, torch.nan), (54, torch.nan),
                          (79, torch.inf), (81, torch.nan), (83, torch.inf)):  # fmt: skip
        for new, window in product((1, 5), (None, 30)):
            case = make_case(scheme, past=81, new=new, window=window, sinks=4, tail=5)
            stored, query = make_stored(case), case.query()
            spoil_token(stored, slot, token, number)
            found = numba_kernels.attend(query, stored, 0.125, softcap=softcap)
            wanted = attend_reference(query, stored, 0.125, softcap=softcap)
            assert beside_nan(found, wanted) <= 1e-5, (token, new, window)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_query_that_is_no_number_spoils_no_other(
    number: float, make_case: Any, make_stored: Callable[..., StoredRows], beside_nan: Any
) -> None:
    for scheme in ("int4", "int4-kivi 8", "int8", "fp8 per-head"):
        case = make_case(scheme, new=3)
        stored, query = make_stored(case), case.query()
        query[0, 1, 1, 7] = number
        found = numba_kernels.attend(query, stored, 0.25)
        wanted = attend_reference(query, stored, 0.25)
        assert wanted.isnan().sum() == case.key_dim
        assert beside_nan(found, wanted) <= 1e-5


# What scores go through


@pytest.mark.parametrize("scheme", ["none", "int4", "int8", "int4-kivi 8"])
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_scores_are_capped(
    scheme: str, softcap: float, make_case: Any, error_of: Callable[..., float]
) -> None:
    case = make_case(scheme, past=90, new=2, group=3, window=60, sinks=4)
    assert error_of(case, softcap=softcap) <= 1e-5
    capped = error_of(case, softcap=softcap, sinks=case.sink_logits())
    assert capped <= 1e-5


@pytest.mark.parametrize("scheme", ["none", "int4", "fp8", "int4-kivi 8"])
@pytest.mark.parametrize("logit", [0.0, 30.0, -40.0, -torch.inf])
def test_sinks_take_part(
    scheme: str, logit: float, make_case: Any, error_of: Callable[..., float]
) -> None:
    case = make_case(scheme, past=90, new=2, group=3, sinks=4)
    assert error_of(case, sinks=case.sink_logits() + logit) <= 1e-5
    half = (case.sink_logits() + logit).bfloat16()
    assert error_of(case, sinks=half) <= 1e-5


def test_a_sink_that_learns_is_not_part_of_a_graph(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int8")
    sinks = case.sink_logits().requires_grad_()
    assert not numba_kernels.attend(case.query(), make_stored(case), 1.0, sinks=sinks).requires_grad


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_small_and_large_scores(
    size: float, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    """One token takes it all, or all tokens the same; nothing overflows."""
    case = make_case("none", past=100)
    stored, query = make_stored(case), size * case.query()
    found = numba_kernels.attend(query, stored, 1.0)
    # Rounding of a score of 1e4 is 1e-3 of its weight.
    expected = attend_reference(query, stored, 1.0)
    assert distance(found, expected) <= max(1e-5, 1e-6 * size)


def test_a_scaling_of_its_own(make_case: Any, make_stored: Callable[..., StoredRows]) -> None:
    case = make_case("int4", past=50)
    stored, query = make_stored(case), case.query()
    for scaling in (1.0, 0.01, -0.5):
        found = numba_kernels.attend(query, stored, scaling)
        assert distance(found, attend_reference(query, stored, scaling)) <= 1e-5


# Means


@pytest.mark.parametrize("mean", ["none", "fixed", "few", "most", "all"])
@pytest.mark.parametrize("layout", ["half", "interleaved", "leading", "trailing"])
@pytest.mark.parametrize("scheme", ["int4", "int3"])
def test_means_turn_with_positions(
    scheme: str, layout: str, mean: str, make_case: Any, error_of: Callable[..., float]
) -> None:
    for positions, past in product(("plain", "rows", "holes"), (3, 63, 64, 200)):
        own = {"key_dim": 24, "rows": 2, "sinks": 1, "tail": 2, "cuts": ((0.4,), (0.7,))}
        case = make_case(scheme, past=past, mean=mean, layout=layout, positions=positions, **own)
        assert error_of(case) <= 1e-5, (positions, past)


def test_positions_in_other_integers_and_strides(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int4", rows=2, past=100, positions="holes")
    stored, query = make_stored(case), case.query()
    expected = numba_kernels.attend(query, stored, 0.25)
    table = stored.positions(0, 101)
    assert table is not None
    for other in (table.long(), table.T.contiguous().T):
        again = replace(stored, positions=lambda a, b, other=other: other[:, a:b])
        assert torch.equal(numba_kernels.attend(query, again, 0.25), expected)
    one = replace(stored, positions=lambda a, b: table[:1, a:b].expand(2, -1))
    assert not torch.equal(numba_kernels.attend(query, one, 0.25), expected)


def test_a_table_of_angles_that_grows(
    make_case: Any, make_codecs: Callable[..., Any], make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int4", past=40, mean="all")
    codecs = make_codecs(case)
    for past in (40, 41, 64, 150, 700):
        longer = replace(case, past=past)
        stored, query = make_stored(longer, codecs), longer.query()
        found = numba_kernels.attend(query, stored, 0.25)
        assert distance(found, attend_reference(query, stored, 0.25)) <= 1e-5, past


# Runs


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-kivi 8", "int8 per-channel"])
def test_runs_are_cut_where_buffers_please(
    scheme: str, make_case: Any, error_of: Callable[..., float]
) -> None:
    """A ring buffer that goes round its end is two runs, of keys elsewhere than of values."""
    for keys, values in product(((), (0.5,), (0.03, 0.9), (0.2, 0.21, 0.99)), repeat=2):
        case = make_case(scheme, past=170, window=150, first=21, tail=9, cuts=(keys, values))
        assert error_of(case) <= 1e-5, (keys, values)


@pytest.mark.parametrize("window", [10, 13, 16, 17, 24, 25, 40])
def test_a_window_cuts_into_groups_of_tokens(
    window: int, make_case: Any, error_of: Callable[..., float]
) -> None:
    for past, new in product((16, 41, 64, 90), (1, 3)):
        first = max(0, past + 1 - window)
        case = make_case("int4-kivi 8", past=past, new=new, window=window, first=first, tail=3)
        assert error_of(case) <= 1e-5, (past, new)


def test_queries_as_they_lie(make_case: Any, make_stored: Callable[..., StoredRows]) -> None:
    case = make_case("int4", rows=2, past=50, new=3)
    stored, query = make_stored(case), case.query()
    expected = numba_kernels.attend(query, stored, 0.25)
    wide = torch.full((2, 3, 4, 40), torch.nan)
    wide[..., 8:24] = query.transpose(1, 2)
    for other in (query.contiguous(), wide[..., 8:24].transpose(1, 2)):
        assert torch.equal(numba_kernels.attend(other, stored, 0.25), expected)
    same = query[:1].expand(2, -1, -1, -1)
    found = numba_kernels.attend(same, stored, 0.25)
    assert torch.equal(found, numba_kernels.attend(same.contiguous(), stored, 0.25))


def test_outputs_lie_as_a_model_wants_them(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int4", "int8", rows=2, new=3, value_dim=24)
    found = numba_kernels.attend(case.query(), make_stored(case), 0.25)
    assert found.shape == (2, 4, 3, 24)
    assert found.transpose(1, 2).is_contiguous()


def test_what_is_read_stays_as_it_is(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int4", "int4-kivi 8", past=50, tail=3, sinks=4)
    stored, query = make_stored(case), case.query()
    held = [query, *(part for run in (*stored.keys, *stored.values) for part in run.tensors)]
    before = copy.deepcopy(held)
    numba_kernels.attend(query, stored, 0.25)
    for one, other in zip(before, held, strict=True):
        assert torch.equal(one, other)


# Threads and memory


@pytest.mark.parametrize("scheme", ["int4", "int8", "int4-kivi 8"])
def test_threads_do_not_change_the_result(
    scheme: str, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case(scheme, rows=2, past=1500, new=2, group=3, tail=100, mean="few")
    stored, query = make_stored(case), case.query()
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            found.append(numba_kernels.attend(query, stored, 0.25))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found)


@each_scheme
def test_what_memory_held_does_not_change_the_result(
    scheme: str,
    make_case: Any,
    make_stored: Callable[..., StoredRows],
    dirty_memory: Callable[[], Any],
) -> None:
    for dim in (40, 71):
        case = make_case(scheme, past=100, key_dim=dim, sinks=3, tail=4, new=2)
        stored, query = make_stored(case), case.query()
        clean = numba_kernels.attend(query, stored, 0.25)
        with dirty_memory():
            assert torch.equal(numba_kernels.attend(query, stored, 0.25), clean), dim


# What it does not do


def why_not(query: torch.Tensor, stored: StoredRows) -> str:
    reason = numba_kernels.refusal(query, stored)
    assert reason is not None
    return reason


def test_what_is_refused(make_case: Any, make_stored: Callable[..., StoredRows]) -> None:
    case = make_case("int4", tail=2)
    stored, query = make_stored(case), case.query()
    assert numba_kernels.refusal(query, stored) is None
    assert why_not(query.double(), stored) == "queries are torch.float64"
    assert why_not(query.to("meta"), stored) == "not on the CPU"
    assert why_not(query.repeat_interleave(2, -1)[..., ::2], stored) == "queries have gaps"
    many = make_case("int4", new=17)
    assert why_not(many.query(), make_stored(many)) == "17 tokens at once"
    assert numba_kernels.refusal(*pair(make_case("int4", new=16), make_stored)) is None


def pair(case: Any, make_stored: Callable[..., StoredRows]) -> tuple[torch.Tensor, StoredRows]:
    return case.query(), make_stored(case)


@pytest.mark.parametrize("slot", ["keys", "values"])
def test_exact_tokens_of_another_kind_are_refused(
    slot: str, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    query, stored = pair(make_case("int4", tail=2), make_stored)
    *runs, last = getattr(stored, slot)

    def with_last(tensor: torch.Tensor) -> StoredRows:
        return replace(stored, **{slot: (*runs, replace(last, held=(tensor,), place=0))})

    (tensor,) = last.tensors
    assert why_not(query, with_last(tensor.double())) == "exact tokens are torch.float64"
    wide = tensor.repeat_interleave(2, -1)[..., ::2]
    assert why_not(query, with_last(wide)) == "exact tokens have gaps"
    assert numba_kernels.refusal(query, with_last(tensor.bfloat16())) is None


def test_values_whose_mean_turns_are_refused(
    make_case: Any, make_codecs: Callable[..., Any], make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int4", mean="all")
    key, value = make_codecs(case)
    reason = why_not(case.query(), make_stored(case, (value, key)))
    assert reason == "values have a mean that turns"


# All at once


def cases(make_case: Any) -> st.SearchStrategy[Any]:
    cuts = st.lists(st.floats(0, 1), max_size=2).map(tuple)
    dims = st.sampled_from((*DIMS[:5], *ODD_DIMS))
    return st.builds(
        make_case,
        st.sampled_from([*SCHEMES, "int4", "int3"]),
        st.sampled_from(["", *SCHEMES]),
        rows=st.integers(1, 3),
        kv_heads=st.integers(1, 3),
        group=st.integers(1, 9),
        key_dim=dims,
        value_dim=st.just(0) | dims,
        past=st.integers(0, 200) | st.integers(500, 530),
        new=st.just(1) | st.integers(1, 16),
        window=st.none() | st.integers(1, 250),
        sinks=st.integers(0, 5),
        tail=st.integers(0, 40),
        cuts=st.tuples(cuts, cuts),
        mean=st.sampled_from(["none", "fixed", "few", "most", "all"]),
        layout=st.sampled_from(["half", "interleaved", "leading", "trailing"]),
        positions=st.sampled_from(["plain", "rows", "holes"]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        seed=st.integers(0, 99),
    )


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_call(data: Any, make_case: Any, error_of: Callable[..., float]) -> None:
    case = data.draw(cases(make_case))
    if case.window is not None and data.draw(st.booleans()):
        case = replace(case, first=max(0, case.past + 1 - case.window))
    options: dict[str, Any] = {}
    if data.draw(st.booleans()):
        options["softcap"] = data.draw(st.floats(0.5, 60))
    if data.draw(st.booleans()):
        options["sinks"] = case.sink_logits()
    assert error_of(case, **options) <= 1e-5
