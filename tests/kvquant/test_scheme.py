from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from kvquant.errors import SchemeError
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.scheme import (
    EXACT,
    SCALE_BITS,
    Granularity,
    QuantScheme,
    TensorScheme,
    format_names,
    tensor_format,
)

ALL_FORMATS = ["fp8_e4m3", "fp8_e5m2", "int8", "int4", "int3", "bf16", "fp16", "none"]
INTEGERS = ["int8", "int4", "int3"]
UNSCALED = ["bf16", "fp16", "none"]
STATIC = [granularity for granularity in Granularity if granularity.is_static]


def scheme(
    name: str, granularity: str = "per-tensor", symmetric: bool = True, **dynamic: Any
) -> TensorScheme:
    return TensorScheme(tensor_format(name), Granularity.parse(granularity), symmetric, **dynamic)


POSSIBLE = [
    *(
        TensorScheme(tensor_format(name), granularity, symmetric)
        for name, granularity, symmetric in product(format_names(), STATIC, (True, False))
        if symmetric or name in INTEGERS
    ),
    *(
        scheme(name, "token", symmetric, center=center, rotate=rotate, scale_format=scale_format)
        for name, symmetric, center, rotate, scale_format in product(
            ALL_FORMATS, (True, False), (True, False), (True, False), SCALE_BITS
        )
        if (symmetric or name in INTEGERS)
        and (name not in UNSCALED or (center, rotate, scale_format) == (False, False, "fp32"))
    ),
    *(
        scheme(name, "group", symmetric, group_size=group_size)
        for name, symmetric, group_size in product(INTEGERS, (True, False), (1, 32, 64))
    ),
]


# Formats


@pytest.mark.parametrize(
    ("name", "bits", "qmin", "qmax", "is_float"),
    [
        ("fp8_e4m3", 8, -448.0, 448.0, True),
        ("fp8_e5m2", 8, -57344.0, 57344.0, True),
        ("int8", 8, -127.0, 127.0, False),
        ("int4", 4, -7.0, 7.0, False),
        ("int3", 3, -3.0, 3.0, False),
        ("bf16", 16, -math.inf, math.inf, True),
        ("fp16", 16, -math.inf, math.inf, True),
        ("none", 0, -math.inf, math.inf, True),
    ],
)
def test_formats_have_the_published_maxima(
    name: str, bits: int, qmin: float, qmax: float, is_float: bool
) -> None:
    found = tensor_format(name)
    assert dataclasses.astuple(found) == (name, bits, qmin, qmax, is_float)
    assert found.is_scaled is (name not in UNSCALED)


def test_fp8_is_short_for_e4m3() -> None:
    assert tensor_format("fp8") is tensor_format("fp8_e4m3")


def test_calibration_finds_scales_for_these() -> None:
    assert format_names() == ["fp8_e4m3", "fp8_e5m2", "int8", "int4"]


@pytest.mark.parametrize("name", ["", "int5", "FP8", "fp8_e4m3fn", "e4m3", "int8 "])
def test_an_unknown_format_is_answered_with_the_possible_ones(name: str) -> None:
    with pytest.raises(SchemeError) as caught:
        tensor_format(name)
    message = str(caught.value)
    assert message.startswith(f"unknown format {name!r}")
    assert all(possible in message for possible in [*ALL_FORMATS, "fp8 ="])
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
    assert [(g.value, g.fineness) for g in Granularity] == [
        ("per-tensor", 0),
        ("per-head", 1),
        ("per-channel", 2),
        ("per-token", 3),
        ("per-group", 4),
    ]


def test_what_is_computed_while_serving_is_not_static() -> None:
    assert STATIC == [Granularity.PER_TENSOR, Granularity.PER_HEAD, Granularity.PER_CHANNEL]
    assert [Granularity.parse(name) for name in ("token", "per-group")] == [
        granularity for granularity in Granularity if not granularity.is_static
    ]


@pytest.mark.parametrize("name", ["", "per-", "per-row", "per-per-head", "Tensor"])
def test_an_unknown_granularity_is_answered_with_the_possible_ones(name: str) -> None:
    with pytest.raises(SchemeError) as caught:
        Granularity.parse(name)
    assert str(caught.value) == (
        f"unknown granularity {name!r}: possible are per-tensor, per-head, per-channel, per-token, "
        "per-group"
    )


# What joins them


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2", *UNSCALED])
@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_floats_have_no_zero_point(name: str, granularity: str) -> None:
    with pytest.raises(
        SchemeError, match=r"no zero point: asymmetric is possible with int8, int4, int3$"
    ):
        scheme(name, granularity, symmetric=False)


@pytest.mark.parametrize(("name", "levels"), [("int8", 255), ("int4", 15), ("int3", 7)])
def test_asymmetric_codes_use_the_whole_range(name: str, levels: int) -> None:
    assert scheme(name, "token", symmetric=False).levels == levels


@pytest.mark.parametrize(
    ("impossible", "complaint"),
    [
        *(
            ({"name": name, "granularity": granularity.value}, f"{name} has no calibrated scales")
            for name in ("int3", *UNSCALED)
            for granularity in STATIC
        ),
        ({"granularity": "token", "scale_format": "fp8"}, "bf16, fp16, fp32, not 'fp8'"),
        ({"granularity": "tensor", "scale_format": "bf16"}, "calibrated scales are kept in fp32"),
        ({"granularity": "group"}, "a group size goes with per-group"),
        ({"granularity": "token", "group_size": 32}, "a group size goes with per-group"),
        ({"granularity": "channel", "group_size": 32}, "a group size goes with per-group"),
        ({"granularity": "group", "group_size": 0}, "at least 1, not int8 and 0"),
        ({"granularity": "group", "group_size": -64}, "at least 1, not int8 and -64"),
        ({"name": "fp8", "granularity": "group", "group_size": 64}, "not fp8_e4m3 and 64"),
        ({"name": "none", "granularity": "group", "group_size": 64}, "not none and 64"),
        *(
            ({"name": name, "granularity": granularity, "group_size": size, what: True}, "mean and")
            for what in ("center", "rotate")
            for name, granularity, size in (
                ("int8", "tensor", None),
                ("fp8", "channel", None),
                ("int4", "group", 64),
                ("bf16", "token", None),
                ("none", "token", None),
            )
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_line(impossible: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SchemeError) as caught:
        scheme(**{"name": "int8", **impossible})
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokens_that_are_quantized_together() -> None:
    assert scheme("int4", "group", group_size=64).unit == 64
    assert scheme("int4", "token").unit == scheme("fp8").unit == EXACT.unit == 1


def test_only_none_keeps_the_models_own_dtype() -> None:
    exact = [name for name in ALL_FORMATS if scheme(name, "token").is_exact]
    assert exact == ["none"]
    assert scheme("none", "token") == EXACT


@pytest.mark.parametrize("skipped", [{-1}, {0, -3}])
def test_layers_are_counted_from_zero(skipped: set[int]) -> None:
    int8 = scheme("int8")
    with pytest.raises(SchemeError, match=str(min(skipped))):
        QuantScheme(int8, int8, frozenset(skipped))


@pytest.mark.parametrize("name", ["sink_tokens", "residual_length"])
def test_counts_of_exact_tokens_are_not_negative(name: str) -> None:
    int4 = scheme("int4", "token")
    with pytest.raises(SchemeError, match=f"{name} must be at least 0, not -1"):
        QuantScheme(int4, int4, **{name: -1})
    assert getattr(QuantScheme(int4, int4), name) == 0


def test_a_layer_has_one_scheme_of_its_own_at_most() -> None:
    int8 = QuantScheme(scheme("int8"), scheme("int8"))
    nested = dataclasses.replace(int8, layers=((0, int8),))
    skipping = dataclasses.replace(int8, skip_layers=frozenset({0}))
    for own in (nested, skipping):
        with pytest.raises(SchemeError, match="cannot name layers of its own"):
            dataclasses.replace(int8, layers=((1, own),))
    with pytest.raises(SchemeError, match="counted from 0, not -2"):
        dataclasses.replace(int8, layers=((3, int8), (-2, int8)))
    with pytest.raises(SchemeError, match="layer 3 is named twice"):
        dataclasses.replace(int8, layers=((3, int8), (1, int8), (3, int8)))
    with pytest.raises(SchemeError, match="layer 0 is named twice"):
        dataclasses.replace(skipping, layers=((0, int8),))


@pytest.mark.parametrize("wrong", ["4", 4.5, 4.0, None])
def test_numbers_are_numbers(wrong: Any) -> None:
    int8 = QuantScheme(scheme("int8", "token"), scheme("int8", "token"))
    for name in ("sink_tokens", "residual_length"):
        with pytest.raises(SchemeError, match=f"{name} is a number of tokens, not {wrong!r}"):
            dataclasses.replace(int8, **{name: wrong})
    for changes in ({"skip_layers": frozenset({wrong})}, {"layers": ((wrong, int8),)}):
        with pytest.raises(SchemeError, match=f"layers are named by their numbers, not {wrong!r}"):
            dataclasses.replace(int8, **changes)
    if wrong is not None:
        group = {"granularity": Granularity.PER_GROUP, "group_size": wrong}
        with pytest.raises(SchemeError, match=f"a group size is a number of tokens, not {wrong!r}"):
            TensorScheme(tensor_format("int4"), symmetric=False, **group)


def test_each_layer_finds_its_scheme() -> None:
    own = QuantScheme(scheme("int8", "token"), EXACT, sink_tokens=1)
    whole = QuantScheme(
        scheme("int4", "token"),
        scheme("int4", "token"),
        frozenset({2}),
        sink_tokens=4,
        residual_length=8,
        layers=((1, own),),
    )
    others = dataclasses.replace(whole, skip_layers=frozenset(), layers=())
    assert [whole.layer(index) for index in range(4)] == [
        others,
        own,
        QuantScheme(EXACT, EXACT),
        others,
    ]


def test_static_is_what_calibration_finds_all_scales_of() -> None:
    static, dynamic = scheme("fp8"), scheme("int8", "token")
    assert QuantScheme(static, static).is_static
    for key, value in ((static, dynamic), (dynamic, static), (dynamic, dynamic), (EXACT, EXACT)):
        assert not QuantScheme(key, value).is_static


def geometry(count: int) -> CacheGeometry:
    return CacheGeometry("llama", (LayerGeometry(LayerKind.FULL, 2, 8, 8),) * count, 64)


def test_a_scheme_names_layers_that_the_model_has() -> None:
    int8 = QuantScheme(scheme("int8"), scheme("int8"))
    whole = dataclasses.replace(int8, layers=((0, int8), (3, int8)), skip_layers=frozenset({1}))
    whole.check(geometry(4))
    with pytest.raises(SchemeError, match=r"no layer 3 to give a scheme of its own.*0 to 2"):
        whole.check(geometry(3))
    with pytest.raises(SchemeError, match=r"cannot skip layer 1.*0 to 0"):
        whole.check(geometry(1))


def test_a_scheme_for_rotary_parts_needs_layers_that_keep_them_apart() -> None:
    int8 = scheme("int8", "token")
    rotary = QuantScheme(int8, int8, rotary_part=int8)
    latent, full = LayerGeometry(LayerKind.LATENT, 1, 8, 4), LayerGeometry(LayerKind.FULL, 2, 8, 8)
    for layers in ((latent,), (full, latent)):
        rotary.check(CacheGeometry("test", layers, 64))
    with pytest.raises(
        SchemeError, match=r"int8 per-token for the rotary part does nothing.* none"
    ):
        rotary.check(geometry(2))
    own = QuantScheme(int8, int8, layers=((1, rotary),))
    own.check(CacheGeometry("test", (full, latent), 64))
    with pytest.raises(SchemeError, match="rotary part of layer 1 does nothing: it has no latent"):
        own.check(CacheGeometry("test", (latent, full), 64))


@pytest.mark.parametrize("key", POSSIBLE, ids=repr)
def test_every_scheme_survives_json(key: TensorScheme) -> None:
    for value in POSSIBLE:
        whole = QuantScheme(key, value, frozenset({4, 0}))
        assert QuantScheme.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


def test_all_of_a_whole_scheme_survives_json() -> None:
    own = QuantScheme(scheme("bf16", "token"), scheme("int8", "token"), residual_length=3)
    whole = QuantScheme(
        scheme("int4", "token", symmetric=False, center=True, rotate=True, scale_format="bf16"),
        scheme("int8", "group", group_size=32),
        frozenset({1}),
        sink_tokens=4,
        residual_length=64,
        rotary_part=scheme("int8", "token"),
        layers=((0, own), (7, own)),
    )
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


def test_what_only_dynamic_schemes_have_is_stored_if_it_is_set() -> None:
    key = scheme("int4", "group", symmetric=False, group_size=64, scale_format="fp16")
    value = scheme("int4", "token", center=True, rotate=True)
    own = QuantScheme(EXACT, EXACT)
    whole = QuantScheme(key, value, rotary_part=value, residual_length=128, layers=((3, own),))
    exact = {"format": "none", "granularity": "per-token", "symmetric": True}
    centered = {
        "format": "int4",
        "granularity": "per-token",
        "symmetric": True,
        "center": True,
        "rotate": True,
    }
    assert whole.to_dict() == {
        "key": {
            "format": "int4",
            "granularity": "per-group",
            "symmetric": False,
            "group_size": 64,
            "scale_format": "fp16",
        },
        "value": centered,
        "skip_layers": [],
        "residual_length": 128,
        "rotary_part": centered,
        "layers": {"3": {"key": exact, "value": exact, "skip_layers": []}},
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


def test_people_read_what_a_dynamic_scheme_is() -> None:
    centered = scheme("int4", "token", symmetric=False, center=True, rotate=True)
    assert str(centered) == "int4 per-token asymmetric centered rotated"
    grouped = scheme("int4", "group", symmetric=False, group_size=64)
    assert str(grouped) == "int4 per-channel in groups of 64 tokens asymmetric"
    assert str(EXACT) == "none"
    whole = QuantScheme(
        grouped,
        scheme("bf16", "token"),
        frozenset({1}),
        sink_tokens=4,
        residual_length=128,
        rotary_part=scheme("int8", "token"),
        layers=((0, QuantScheme(EXACT, EXACT)),),
    )
    assert str(whole) == (
        f"K {grouped}, V bf16, first 4 tokens exact, newest 128 tokens exact, rotary part of the "
        "latent int8 per-token, layers [1] unquantized, layer 0: K none, V none"
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
