from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvquant.errors import ExportError
from kvquant.export.lmdeploy import LmDeploy, policy
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.presets import preset

FULL = LayerGeometry(LayerKind.FULL, 2, 16, 16)


def cache_of(dim: int) -> CacheGeometry:
    return CacheGeometry("llama", (LayerGeometry(LayerKind.FULL, 2, dim, dim),), None)


@pytest.mark.parametrize(
    ("form", "found"),
    [
        ("int4", "4"),
        ("int8", "8"),
        ("fp8", "fp8 --backend pytorch"),
        ("fp8_e5m2", "fp8_e5m2 --backend pytorch"),
    ],
)
def test_a_command_line(make_job: Callable[..., Any], form: str, found: str) -> None:
    made = LmDeploy().contribute(make_job({0: (1.0, 1.0)}, key_format=form, value_format=form))
    assert made.launch == (f"lmdeploy serve api_server {{model}} --quant-policy {found}",)
    assert (made.tensors, made.config, made.files) == ({}, {}, {})
    assert "calibrated scales are not used, and nothing is written" in made.remarks[0]
    assert ("at 1.0" in made.remarks[0]) == form.startswith("fp8")


@pytest.mark.parametrize(("name", "found"), [("none", "0"), ("int4-kivi", "4"), ("int8", "8")])
def test_presets(name: str, found: str) -> None:
    assert policy(preset(name), cache_of(16)) == found


@pytest.mark.parametrize(
    ("name", "value", "dim", "said"),
    [
        ("int8", "int4", 16, "one policy for keys and values, not int8 and int4"),
        ("int3", "int3", 16, "no int3 cache: it has none, int4, int8"),
        ("int4", "int4", 15, "two values in a byte, not a head of 15"),
    ],
)
def test_presets_that_it_does_not_have(name: str, value: str, dim: int, said: str) -> None:
    with pytest.raises(ExportError, match=said):
        policy(preset(name, value_format=value), cache_of(dim))


def test_skipped_layers_are_refused(make_job: Callable[..., Any]) -> None:
    with pytest.raises(ExportError, match="leave layer 1 exact, but LMDeploy"):
        LmDeploy().contribute(make_job({0: (1.0, 1.0)}, layers=[FULL, FULL]))
