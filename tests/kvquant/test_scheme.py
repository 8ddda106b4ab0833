from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from itertools import product

import pytest

from kvquant.errors import SchemeError
from kvquant.scheme import (
    Granularity,
    QuantScheme,
    TensorScheme,
    format_names,
    tensor_format,
)

POSSIBLE = [
    TensorScheme(tensor_format(name), granularity, symmetric)
    for name, granularity, symmetric in product(format_names(), Granularity, (True, False))
    if symmetric or name.startswith("int")
]


def scheme(name: str, granularity: str = "per-tensor", symmetric: bool = True) -> TensorScheme:
    return TensorScheme(tensor_format(name), Granularity.parse(granularity), symmetric)


# Formats


@pytest.mark.parametrize(
    ("name", "bits", "qmin", "qmax", "is_float"),
    [
        ("fp8_e4m3", 8, -448.0, 448.0, True),
        ("fp8_e5m2", 8, -57344.0, 57344.0, True),
        ("int8", 8, -127.0, 127.0, False),
        ("int4", 4, -7.0, 7.0, False),
    ],
)
def test_formats_have_the_published_maxima(
    name: str, bits: int, qmin: float, qmax: float, is_float: bool
) -> None:
    found = tensor_format(name)
    assert dataclasses.astuple(found) == (name, bits, qmin, qmax, is_float)


def test_fp8_is_short_for_e4m3() -> None:
    assert tensor_format("fp8") is tensor_format("fp8_e4m3")


def test_the_names_are_those_of_the_table_above() -> None:
    assert format_names() == ["fp8_e4m3", "fp8_e5m2", "int8", "int4"]


@pytest.mark.parametrize("name", ["", "int3", "FP8", "fp8_e4m3fn", "e4m3", "int8 "])
def test_an_unknown_format_is_answered_with_the_possible_ones(name: str) -> None:
    with pytest.raises(SchemeError) as caught:
        tensor_format(name)
    message = str(caught.value)
    assert message.startswith(f"unknown format {name!r}")
    assert all(possible in message for possible in [*format_names(), "fp8 ="])
    assert "\n" not in message


# Granularities


@pytest.mark.parametrize(
    ("name", "shape"),
    [("per-tensor", (1, 1)), ("per-head", (3, 1)), ("per-channel", (3, 64))],
)
def test_a_granularity_is_the_shape_of_a_layers_scale(name: str, shape: tuple[int, int]) -> None:
    assert Granularity.parse(name).scale_shape(3, 64) == shape
    assert Granularity.parse(name.removeprefix("per-")) is Granularity.parse(name)


def test_granularities_are_ordered_from_coarse_to_fine() -> None:
    assert [granularity.fineness for granularity in Granularity] == [0, 1, 2]
    assert Granularity.PER_TENSOR.fineness < Granularity.PER_CHANNEL.fineness


@pytest.mark.parametrize("name", ["", "per-", "per-token", "per-per-head", "Tensor"])
def test_an_unknown_granularity_is_answered_with_the_possible_ones(name: str) -> None:
    with pytest.raises(SchemeError, match="per-tensor, per-head, per-channel"):
        Granularity.parse(name)


# What joins them


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_has_no_zero_point(name: str) -> None:
    with pytest.raises(SchemeError, match=r"no zero point: asymmetric is possible with int8, int4"):
        scheme(name, symmetric=False)


@pytest.mark.parametrize(("name", "levels"), [("int8", 255), ("int4", 15)])
def test_asymmetric_codes_use_the_whole_range(name: str, levels: int) -> None:
    assert scheme(name, symmetric=False).levels == levels


@pytest.mark.parametrize("skipped", [{-1}, {0, -3}])
def test_layers_are_counted_from_zero(skipped: set[int]) -> None:
    int8 = scheme("int8")
    with pytest.raises(SchemeError, match=str(min(skipped))):
        QuantScheme(int8, int8, frozenset(skipped))


@pytest.mark.parametrize("key", POSSIBLE, ids=str)
def test_every_scheme_survives_json(key: TensorScheme) -> None:
    for value in POSSIBLE:
        whole = QuantScheme(key, value, frozenset({4, 0}))
        assert QuantScheme.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


def test_the_stored_form_is_the_documented_one() -> None:
    whole = QuantScheme(
        scheme("fp8"), scheme("int4", "channel", symmetric=False), frozenset({10, 2})
    )
    assert whole.to_dict() == {
        "key": {"format": "fp8_e4m3", "granularity": "per-tensor", "symmetric": True},
        "value": {"format": "int4", "granularity": "per-channel", "symmetric": False},
        "skip_layers": [2, 10],
    }


def test_a_stored_scheme_with_an_impossible_combination_is_refused() -> None:
    stored = QuantScheme(scheme("fp8"), scheme("int8")).to_dict()
    stored["key"]["symmetric"] = False
    with pytest.raises(SchemeError):
        QuantScheme.from_dict(stored)


def test_people_read_what_a_scheme_is() -> None:
    asymmetric = scheme("int8", "channel", symmetric=False)
    assert str(asymmetric) == "int8 per-channel asymmetric"
    whole = QuantScheme(scheme("fp8"), asymmetric, frozenset({3, 1}))
    assert str(whole) == (
        "K fp8_e4m3 per-tensor, V int8 per-channel asymmetric, layers [1, 3] unquantized"
    )
    assert str(QuantScheme(scheme("int4"), scheme("int4"))) == (
        "K int4 per-tensor, V int4 per-tensor"
    )


def test_schemes_are_values() -> None:
    one, same = (
        QuantScheme(scheme("int8"), scheme("fp8")),
        QuantScheme(scheme("int8"), scheme("fp8")),
    )
    assert one == same
    assert len({one, same, QuantScheme(scheme("fp8"), scheme("int8"))}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.key = scheme("int4")  # type: ignore[misc]


def test_planning_reads_schemes_without_torch() -> None:
    code = "import sys, kvquant.scheme; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
