"""The kernels against the reference in float64, on the same codes, in Triton's interpreter.

Collected only where the interpreter is on; test_triton_interpreter.py starts such a process.
`make_case` and `make_stored` are in conftest.py: what they make lies among NaN.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvquant.attention.reference import attend_reference
from kvquant.attention.stored import Run, StoredRows

pytest.importorskip("triton")

__test__ = os.environ.get("TRITON_INTERPRET") == "1"

if __test__:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from kvquant.attention import triton_kernels, triton_plan

    _cast = InterpreterBuilder.cast_impl

    def _cast_as_gpus_do(self: Any, source: Any, target: Any) -> Any:
        """float32 to the nearest bfloat16; the interpreter cuts the lower bits off."""
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return _cast(self, source, target)
        nearest = torch.from_numpy(source.data).to(torch.bfloat16)
        return TensorHandle(nearest.view(torch.uint16).numpy(), target.scalar)

    InterpreterBuilder.cast_impl = _cast_as_gpus_do

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 1e-3}
SCALING = 0.125


@pytest.fixture(scope="session")
def error_of(
    make_stored: Callable[..., StoredRows], dirty_memory: Callable[[], Any]
) -> Callable[..., float]:
    """``error_of(case, stored, **options)``: of the kernels' output, as a share of its norm."""

    def error(case: Any, stored: StoredRows | None = None, **options: Any) -> float:
        stored, query = stored or make_stored(case), case.query(case.dtype)
        assert triton_kernels.refusal(query, stored) is None
        with dirty_memory():
            found = triton_kernels.attend(query, stored, SCALING, **options)
        wanted = attend_reference(query, stored, SCALING, **options)
        assert found.dtype == query.dtype and found.shape == wanted.shape
        assert found.transpose(1, 2).is_contiguous()
        return float((found.double() - wanted).norm() / wanted.norm())

    return error


@pytest.fixture(scope="session")
def agrees(error_of: Callable[..., float]) -> Callable[..., bool]:
    """``agrees(case, stored, **options)``: whether the kernels find what the reference does."""

    def is_close(case: Any, stored: StoredRows | None = None, **options: Any) -> bool:
        return error_of(case, stored, **options) <= TOLERANCE[case.dtype]

    return is_close


@pytest.fixture(scope="session")
def wide(make_case: Callable[..., Any]) -> Callable[..., Any]:
    """``wide(**fields)``: a case with heads of 64 channels and some sinks."""

    def make(**fields: Any) -> Any:
        return make_case(**{"key_dim": 64, "past": 81, "sinks": 4, "tail": 5, **fields})

    return make


# Formats


FORMATS = ["none", "fp8", "fp8_e5m2", "int8", "int4", "int4-kivi"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_presets(name: str, dtype: torch.dtype, wide: Any, agrees: Any) -> None:
    value = "int4" if name == "int4-kivi" else name

    assert agrees(wide(key=name, value=value, past=150, dtype=dtype))


@pytest.mark.parametrize("key", ["int4", "int4-kivi", "int8 per-channel"])
def test_float16_models(key: str, wide: Any, agrees: Any) -> None:
    # Their outputs are rounded less, and show how exact the products are.
    assert agrees(wide(key=key, value="int4", past=150, dtype=torch.float16))


def test_numbers_kept_as_they_are_count_as_exact(wide: Any, agrees: Any) -> None:
    assert agrees(wide(key="bf16", dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp8 per-tensor", "fp8_e5m2 per-head"),
        ("fp8_e5m2 per-channel", "fp8 per-channel"),
        ("int8 per-channel asymmetric", "int8 per-tensor asymmetric"),
        ("int4 per-channel", "int4 per-head asymmetric"),
        ("int8 per-head", "int8 per-channel"),
    ],
)
def test_calibrated_scales(key: str, value: str, wide: Any, agrees: Any) -> None:
    assert agrees(wide(key=key, value=value))


@pytest.mark.parametrize(
    ("key", "value"),
    [("int4", "fp8"), ("int8", "int4"), ("int4-kivi", "int4"), ("fp8", "none"), ("none", "int8")],
)
def test_keys_and_values_of_different_formats(key: str, value: str, wide: Any, agrees: Any) -> None:
    assert agrees(wide(key=key, value=value, past=100))


@pytest.mark.parametrize("key", ["int4-kivi 16", "int8 group48", "int8 group32 asymmetric"])
def test_groups_of_other_sizes(key: str, wide: Any, agrees: Any) -> None:
    assert agrees(wide(key=key, value="int8", past=150))


# Sizes


@pytest.mark.parametrize("length", [1, 15, 16, 17])
@pytest.mark.parametrize("key", ["int4", "int4-kivi 16"])
def test_short_texts(key: str, length: int, wide: Any, agrees: Any) -> None:
    assert agrees(wide(key=key, value="int4", past=length - 1, tail=0))


@pytest.mark.parametrize("key", ["int4", "int4-kivi", "fp8"])
def test_long_texts(key: str, wide: Any, agrees: Any) -> None:
    assert agrees(wide(key=key, value="int4", past=4094, kv_heads=1, group=1, tail=128))


@pytest.mark.parametrize(
    ("key", "key_dim", "value_dim"),
    [
        ("int4", 128, 80),
        ("int8", 80, 128),
        ("int4-kivi", 71, 96),
        ("int4", 72, 71),
        ("fp8", 33, 20),
    ],
)
def test_widths(key: str, key_dim: int, value_dim: int, wide: Any, agrees: Any) -> None:
    case = wide(key=key, value="int4", past=100, kv_heads=1, key_dim=key_dim, value_dim=value_dim)

    assert agrees(case)


@pytest.mark.parametrize("group", [1, 71])
@pytest.mark.parametrize("key", ["int4", "int4-kivi"])
def test_query_heads_on_one_kv_head(key: str, group: int, wide: Any, agrees: Any) -> None:
    assert agrees(wide(key=key, value="int8", past=75, kv_heads=1, group=group))


@pytest.mark.parametrize("new", [2, 5, 8])
def test_queries_of_a_call_see_those_before_them(new: int, wide: Any, agrees: Any) -> None:
    assert agrees(wide(key="int4", new=new, group=3))


# Where tokens are


@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 40, 78, 81, 82])
def test_windows(window: int, wide: Any, agrees: Any) -> None:
    assert agrees(wide(key="int8", kv_heads=1, window=window))


@pytest.mark.parametrize("new", [1, 4])
def test_windows_that_end_within_a_group(new: int, wide: Any, agrees: Any) -> None:
    case = wide(key="int4-kivi", value="int8", past=280, new=new, kv_heads=1, window=200, first=77)

    assert agrees(case)


def test_tokens_out_of_sight_do_not_matter(wide: Any, make_stored: Any, agrees: Any) -> None:
    case = wide(key="int8", kv_heads=1, window=30)
    stored = make_stored(case)
    for run in (*stored.keys, *stored.values):
        if run.codec is not None:
            run.tensors[1][:, :, : 81 - 29 - run.first] = torch.nan

    out = triton_kernels.attend(case.query(), stored, SCALING)

    assert bool(out.isfinite().all())


@pytest.mark.parametrize("key", ["int4", "int8", "int4-kivi 16"])
def test_codes_that_have_come_round_in_their_buffer(
    key: str, wide: Any, make_stored: Any, agrees: Any
) -> None:
    case = wide(key=key, value="int4", past=150, kv_heads=1)
    stored = make_stored(case)
    stored = replace(
        stored, keys=come_round(stored.keys, 2, 1), values=come_round(stored.values, 50, 3)
    )

    assert agrees(case, stored)


def come_round(runs: tuple[Run, ...], front: int, spare: int) -> tuple[Run, ...]:
    """All runs of more than `front` units in a ring: the others at the beginning of its buffer."""
    found = []
    for run in runs:
        count = run.held[0].shape[2]
        if run.codec is None or count <= front:
            found.append(run)
            continue
        held = tuple(
            torch.cat((one[:, :, front:], one[:, :, :spare], one[:, :, :front]), dim=2)
            for one in run.tensors
        )
        place = held[0].shape[2] - front
        found.append(Run(run.first, front * run.codec.unit, run.codec, held, place))
        rest = run.count - front * run.codec.unit
        found.append(Run(found[-1].stop, rest, run.codec, held, 0))
    return tuple(found)


def test_exact_tokens_in_four_pieces(wide: Any, make_stored: Any, agrees: Any) -> None:
    case = wide(key="int4-kivi 16", value="int8", tail=20)
    stored = make_stored(case)
    keys = (*stored.keys[:-2], *halved(stored.keys[-2]), stored.keys[-1])

    assert agrees(case, replace(stored, keys=keys))


def halved(run: Run) -> tuple[Run, Run]:
    """An exact run as two, the first at a place of a tensor of its own."""
    (exact,) = run.tensors
    one = torch.cat((exact[:, :, 7:12], exact[:, :, :7]), dim=2)
    return Run(run.first, 7, None, (one,), 5), Run(run.first + 7, run.count - 7, None, (exact,), 7)


@pytest.mark.parametrize("positions", ["rows", "holes"])
def test_positions(positions: str, wide: Any, agrees: Any) -> None:
    assert agrees(wide(key="int4", rows=3, kv_heads=1, positions=positions))


# What else takes part


@pytest.mark.parametrize("mean", ["none", "fixed", "few", "all"])
@pytest.mark.parametrize("layout", ["half", "trailing"])
def test_means(mean: str, layout: str, wide: Any, agrees: Any) -> None:
    assert agrees(wide(key="int4", mean=mean, layout=layout))


@pytest.mark.parametrize("key", ["int4", "int4-kivi"])
def test_capped_scores_and_sink_logits(key: str, wide: Any, agrees: Any) -> None:
    case = wide(key=key, value="int4", past=100)

    assert agrees(case, softcap=2.0, sinks=case.sink_logits())


@pytest.mark.parametrize("power", [-16, 12])
@pytest.mark.parametrize("key", ["int4", "int8"])
def test_magnitudes_beyond_float16(
    key: str, power: int, wide: Any, make_stored: Any, error_of: Any
) -> None:
    case = wide(key=key, mean="none", dtype=torch.bfloat16)
    stored = make_stored(case)
    for run in (*stored.keys, *stored.values):
        for held in run.tensors if run.codec is None else run.tensors[1:]:
            held.mul_(2.0**power)
    query, scaling = case.query(case.dtype), SCALING * 2.0**-power

    found = triton_kernels.attend(query, stored, scaling)

    wanted = attend_reference(query, stored, scaling)
    assert float((found.double() - wanted).norm() / wanted.norm()) <= TOLERANCE[case.dtype]


def test_sharp_attention(wide: Any, make_stored: Any) -> None:
    # Nearly all weight is on one token, and hundreds of others hardly count.
    case = wide(key="int8", past=700, kv_heads=1, dtype=torch.bfloat16)
    stored, query = make_stored(case), case.query(case.dtype)

    found = triton_kernels.attend(query, stored, 3.0)

    wanted = attend_reference(query, stored, 3.0)
    assert float((found.double() - wanted).norm() / wanted.norm()) <= TOLERANCE[case.dtype]


def test_scales_of_zero(wide: Any, make_stored: Any, agrees: Any) -> None:
    case = wide(key="int8")
    stored = make_stored(case)
    for run in stored.values:
        if run.codec is not None:
            run.tensors[1].zero_()

    assert agrees(case, stored)


@pytest.mark.parametrize("programs", [1, 64])
def test_splits_make_no_difference(
    programs: int, wide: Any, agrees: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_plan, "_INTERPRETED_PROGRAMS", programs)

    assert agrees(wide(key="int4", past=700, kv_heads=1))


def test_the_same_again_is_the_same(wide: Any, make_stored: Any) -> None:
    case = wide(key="int4")
    stored, query = make_stored(case), case.query()

    one, other = (triton_kernels.attend(query, stored, SCALING) for _ in range(2))

    assert one.equal(other)


# Numbers that are none


FLOATS = ["fp8", "fp8_e5m2", "fp8 per-channel", "fp8_e5m2 per-head"]


# Tokens of the two heads: a hidden one, codes, the edge of the window, tokens of the call.
WRONG: dict[tuple[int, int | None], Any] = {
    (1, None): ([(30, torch.nan)], []),
    (1, 30): ([(51, torch.nan)], [(52, torch.nan)]),
    (5, None): ([(83, torch.inf)], [(81, torch.nan)]),
    (5, 30): ([(40, torch.nan), (53, torch.nan)], [(83, torch.nan)]),
}


@pytest.mark.parametrize("slot", ["keys", "values"])
@pytest.mark.parametrize(("new", "window"), WRONG)
@pytest.mark.parametrize("key", ["none", "int4", "int8", "int4-kivi 16", *FLOATS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_only_queries_that_see_nan_are_nan(
    key: str,
    new: int,
    window: int | None,
    slot: str,
    wide: Any,
    make_stored: Any,
    spoil_token: Any,
    beside_nan: Any,
) -> None:
    value = "int4" if "kivi" in key else key
    case = wide(key=key, value=value, new=new, window=window, group=1)
    stored, query = make_stored(case), case.query()
    for head, tokens in enumerate(WRONG[new, window]):
        for token, number in tokens:
            spoil_token(stored, slot, token, number, head)

    found = triton_kernels.attend(query, stored, SCALING, softcap=50.0)

    wanted = attend_reference(query, stored, SCALING, softcap=50.0)
    assert not wanted.isfinite().all()
    assert beside_nan(found, wanted) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("key", ["int4", "int4-kivi 16", "int8", "fp8 per-head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_query_that_is_no_number_spoils_no_other(
    number: float, dtype: torch.dtype, key: str, wide: Any, make_stored: Any, beside_nan: Any
) -> None:
    case = wide(key=key, value="int8", new=3, dtype=dtype)
    stored, query = make_stored(case), case.query(dtype)
    query[0, 1, 1, 7] = number

    found = triton_kernels.attend(query, stored, SCALING)

    wanted = attend_reference(query, stored, SCALING)
    assert wanted.isnan().sum() == case.key_dim
    assert beside_nan(found, wanted) <= TOLERANCE[dtype]


# What is refused


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"key": "int3"}, "no kernel reads int3"),
        ({"key": "int4-kivi 40", "value": "int8"}, "groups of 40 tokens, no multiple of 16"),
        ({"key": "int8", "value": "int4-kivi 16"}, "values in groups"),
        ({"key": "int8", "key_dim": 320}, "heads of 320 channels, more than 256"),
        ({"key": "int8", "new": 17}, "17 tokens at once"),
        ({"key": "int8", "cuts": ((0.3, 0.6), ())}, "codes in 3 pieces"),
    ],
)
def test_refusals(fields: dict[str, Any], reason: str, wide: Any, make_stored: Any) -> None:
    case = wide(**fields)

    assert triton_kernels.refusal(case.query(), make_stored(case)) == reason


def test_queries_of_float64_are_refused(wide: Any, make_stored: Any) -> None:
    case = wide()

    found = triton_kernels.refusal(case.query(torch.float64), make_stored(case))

    assert found == "queries are torch.float64"


def test_values_with_a_mean_that_turns_are_refused(
    wide: Any, make_stored: Any, make_codecs: Any
) -> None:
    case = wide(key="int4", value="int8")
    key, _ = make_codecs(case)

    found = triton_kernels.refusal(case.query(), make_stored(case, (key, key)))

    assert found == "values have a mean that turns"


def test_exact_tokens_of_two_dtypes_are_refused(wide: Any, make_stored: Any) -> None:
    case = wide(key="bf16", value="int8")

    found = triton_kernels.refusal(case.query(), make_stored(case))

    assert found == "exact tokens of several dtypes"
