"""Regions and splits of tokens, with literal numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvquant.attention import triton_plan
from kvquant.attention.triton_plan import Plan, Region, plan

__test__ = os.environ.get("TRITON_INTERPRET") != "1"


@pytest.fixture
def planned(
    make_case: Callable[..., Any],
    make_stored: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Plan]:
    """``planned(**fields)``: the plan of a case, for a GPU of 10 multiprocessors."""
    monkeypatch.setattr(triton_plan, "_gpu", lambda device: (10, 3))

    def make(**fields: Any) -> Plan:
        case = make_case(**{"key_dim": 128, "dtype": torch.bfloat16, "mean": "fixed", **fields})
        return plan(case.query(case.dtype), make_stored(case))

    return make


def test_sinks_codes_and_the_call(planned: Any) -> None:
    found = planned(key="int4", past=1000, sinks=4, kv_heads=1).regions

    # 20 programs, one of which has the exact tokens; 8 tiles of 128 tokens.
    assert found.coded == Region(4, 4, 1000, tiles=1, splits=8)
    assert found.mixed == Region(1000, 1000, 1000, tiles=0, splits=0)
    assert (found.first, found.front, found.back) == (0, 4, 1000)
    assert found.exact == Region(0, 0, 5, tiles=4, splits=1)
    assert found.splits == 9
    assert found.coded_value_splits == 8


def test_long_texts_take_as_many_programs_as_run_at_once(planned: Any) -> None:
    made = planned(key="int4", past=20_000, sinks=4, kv_heads=2)

    # 10 programs a KV head: 157 tiles in 9 splits, and the exact tokens.
    assert made.shape.residents == 2
    assert made.regions.coded == Region(4, 4, 20_000, tiles=18, splits=9)


def test_keys_wait_for_their_group_and_values_do_not(planned: Any) -> None:
    found = planned(key="int4-kivi", value="int4", past=300, tail=60, kv_heads=1).regions

    assert found.coded == Region(0, 0, 192, tiles=1, splits=3)
    assert found.mixed == Region(192, 192, 240, tiles=4, splits=1)
    assert found.coded_slot == "value"
    assert (found.front, found.back, found.exact.stop) == (0, 240, 61)
    assert found.coded_value_splits == 4


def test_tiles_of_groups_begin_with_a_group(planned: Any) -> None:
    found = planned(
        key="int4-kivi", value="int8", past=300, tail=10, window=200, first=101, kv_heads=1
    ).regions

    # The window begins with token 101; the second group with token 64.
    assert found.coded == Region(64, 101, 256, tiles=1, splits=3)
    assert found.first == 101


def test_values_that_are_all_exact(planned: Any) -> None:
    found = planned(key="int8", value="none", past=100, sinks=4, kv_heads=1).regions

    assert (found.coded.start, found.coded.stop) == (4, 4)
    assert (found.mixed.start, found.mixed.stop, found.coded_slot) == (4, 100, "key")
    assert found.coded_value_splits == 0


def test_nothing_coded(planned: Any) -> None:
    found = planned(key="int4", past=3, sinks=4, kv_heads=1).regions

    assert found.splits == found.exact.splits == 1
    assert (found.front, found.exact.stop) == (4, 4)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"key": "int4"}, 128),
        ({"key": "int4", "key_dim": 64}, 128),
        ({"key": "int4", "key_dim": 256}, 64),
        ({"key": "int8"}, 64),
        ({"key": "int8", "key_dim": 256}, 32),
        ({"key": "int8", "value": "int4"}, 64),
        ({"key": "int4-kivi", "value": "int4"}, 64),
        ({"key": "int4-kivi 16", "value": "int4"}, 16),
        ({"key": "int4", "mean": "few"}, 64),
        ({"key": "int4", "mean": "all"}, 32),
        ({"key": "int4", "dtype": torch.float32}, 32),
    ],
)
def test_tiles(fields: dict[str, Any], tokens: int, planned: Any) -> None:
    assert planned(past=100, **fields).shape.tokens == tokens


def test_queries_are_whole_where_keys_are_only_scaled_by_token(planned: Any) -> None:
    made = {key: planned(key=key, past=40) for key in ("int8", "int4", "fp8 per-head")}

    assert {key: it.shape.whole for key, it in made.items()} == {
        "int8": True,
        "int4": False,
        "fp8 per-head": False,
    }
