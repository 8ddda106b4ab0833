from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvquant.errors import SchemeError
from kvquant.presets import preset, preset_names
from kvquant.scheme import (
    EXACT,
    SCALE_BITS,
    Granularity,
    QuantScheme,
    TensorScheme,
    tensor_format,
)


def per_token(name: str, **kind: Any) -> TensorScheme:
    return TensorScheme(
        tensor_format(name), Granularity.PER_TOKEN, **{"scale_format": "bf16", **kind}
    )


CENTERED = {"symmetric": False, "center": True, "rotate": True}
KIVI_KEY = TensorScheme(
    tensor_format("int4"),
    Granularity.PER_GROUP,
    symmetric=False,
    group_size=64,
    scale_format="fp16",
)
KIVI_VALUE = per_token("int4", symmetric=False)
EXPECTED = {
    "none": QuantScheme(EXACT, EXACT),
    "bf16": QuantScheme(per_token("bf16"), per_token("bf16")),
    "fp16": QuantScheme(per_token("fp16"), per_token("fp16")),
    "fp8": QuantScheme(per_token("fp8_e4m3"), per_token("fp8_e4m3")),
    "fp8_e5m2": QuantScheme(per_token("fp8_e5m2"), per_token("fp8_e5m2")),
    "int8": QuantScheme(per_token("int8"), per_token("int8")),
    "int4-kivi": QuantScheme(KIVI_KEY, KIVI_VALUE, residual_length=128),
    "int4": QuantScheme(
        per_token("int4", **CENTERED), per_token("int4", **CENTERED), sink_tokens=4
    ),
    "int3": QuantScheme(
        per_token("int3", **CENTERED), per_token("int3", **CENTERED), sink_tokens=4
    ),
}


def test_these_are_the_presets() -> None:
    assert preset_names() == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_preset_is_what_its_page_says(name: str) -> None:
    assert preset(name) == EXPECTED[name]
    assert QuantScheme.from_dict(preset(name).to_dict()) == preset(name)


def test_fp8_is_e4m3() -> None:
    assert preset("fp8_e4m3") == preset("fp8")
    assert preset("int8", key_format="fp8_e4m3").key == preset("fp8").key


@pytest.mark.parametrize(
    ("options", "slot"),
    [
        ({"name": "int5"}, "int5"),
        ({"name": ""}, ""),
        ({"name": "int8", "key_format": "INT8"}, "INT8"),
        ({"name": "int8", "value_format": "kivi"}, "kivi"),
        ({"name": "int8", "rotary_format": "int2"}, "int2"),
    ],
)
def test_an_unknown_preset_is_answered_with_the_possible_ones(
    options: dict[str, str], slot: str
) -> None:
    with pytest.raises(SchemeError) as caught:
        preset(**options)
    assert str(caught.value) == (
        f"unknown scheme {slot!r}: possible are none, bf16, fp16, fp8, fp8_e5m2, int8, int4-kivi, "
        "int4, int3"
    )


@pytest.mark.parametrize("key", EXPECTED)
@pytest.mark.parametrize("value", EXPECTED)
def test_keys_and_values_differ_freely(key: str, value: str) -> None:
    """G14. Sinks and residual are the larger of the two; the preset they start from has no say."""
    expected = QuantScheme(
        EXPECTED[key].key,
        EXPECTED[value].value,
        sink_tokens=max(EXPECTED[part].sink_tokens for part in (key, value)),
        residual_length=max(EXPECTED[part].residual_length for part in (key, value)),
    )
    assert preset(key, value_format=value) == expected
    assert preset(value, key_format=key) == expected
    assert preset("int4-kivi", key_format=key, value_format=value) == expected


def test_the_rotary_part_of_a_latent_is_exact_unless_asked_for() -> None:
    assert preset("int4").rotary_part == EXACT
    assert preset("int4", rotary_format="int8") == replace(
        EXPECTED["int4"], rotary_part=per_token("int8")
    )
    assert preset("int8", rotary_format="int4-kivi").rotary_part == KIVI_VALUE


def test_counts_of_exact_tokens_can_be_set_and_unset() -> None:
    assert preset("int8", sink_tokens=2, residual_length=7) == replace(
        EXPECTED["int8"], sink_tokens=2, residual_length=7
    )
    assert preset("int4", sink_tokens=0).sink_tokens == 0
    assert preset("int4-kivi", residual_length=0).residual_length == 0
    with pytest.raises(SchemeError, match="sink_tokens must be at least 0, not -1"):
        preset("int4", sink_tokens=-1)


def test_groups_can_be_of_another_size() -> None:
    kivi = preset("int4-kivi", group_size=32)
    assert kivi == replace(EXPECTED["int4-kivi"], key=replace(KIVI_KEY, group_size=32))
    assert preset("int8", key_format="int4-kivi", group_size=8).key.group_size == 8
    with pytest.raises(SchemeError, match="at least 1, not int4 and 0"):
        preset("int4-kivi", group_size=0)


@pytest.mark.parametrize(
    ("options", "which"),
    [
        ({"name": "int4"}, "int4"),
        ({"name": "int8", "value_format": "int4-kivi"}, "int8"),
        ({"name": "int4-kivi", "key_format": "int8"}, "int8"),
    ],
)
def test_a_group_size_without_groups_is_refused(options: dict[str, str], which: str) -> None:
    with pytest.raises(SchemeError) as caught:
        preset(**options, group_size=64)
    assert str(caught.value) == f"{which} has no groups: a group size goes with int4-kivi"


def bits(slot: TensorScheme, dim: int) -> float:
    """Bits of a value with its share of scale and middle."""
    numbers = 1 if slot.symmetric else 2
    shared = dim if slot.granularity is Granularity.PER_TOKEN else slot.group_size
    assert shared is not None
    return slot.format.bits + SCALE_BITS[slot.scale_format] * numbers / shared


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [
        ("fp8", (8.25, 8.125), (8.25, 8.125)),
        ("fp8_e5m2", (8.25, 8.125), (8.25, 8.125)),
        ("int8", (8.25, 8.125), (8.25, 8.125)),
        ("int4-kivi", (4.5, 4.5), (4.5, 4.25)),
        ("int4", (4.5, 4.25), (4.5, 4.25)),
        ("int3", (3.5, 3.25), (3.5, 3.25)),
    ],
)
def test_bits_per_value_at_head_dim_64_and_128(
    name: str, keys: tuple[float, float], values: tuple[float, float]
) -> None:
    scheme = preset(name)
    assert tuple(bits(scheme.key, dim) for dim in (64, 128)) == keys
    assert tuple(bits(scheme.value, dim) for dim in (64, 128)) == values


PAGE = (Path(__file__).parents[2] / "docs" / "schemes.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading of docs/schemes.md, without its head."""
    table = re.split(rf"^## {heading}$", PAGE, flags=re.M)[1].split("\n\n|")[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("| ").split("|")] for row in table.split("\n")[2:]]


def test_the_page_has_every_preset() -> None:
    names = [
        name for row in rows("All of them at a glance") for name in re.findall("`(.*?)`", row[0])
    ]
    assert sorted(names) == sorted(preset_names())


def test_the_page_has_the_bits_per_value() -> None:
    counted = set()
    for name, slots, *shown in rows("Bits per value"):
        scheme = preset(name.strip("`"))
        for slot in slots.split(", "):
            tensor = scheme.key if slot == "keys" else scheme.value
            assert [bits(tensor, dim) for dim in (64, 128)] == list(map(float, shown)), (name, slot)
            counted.add((name.strip("`"), slot))
    scaled = [name for name in preset_names() if preset(name).key.format.is_scaled]
    assert counted == {(name, slot) for name in scaled for slot in ("keys", "values")}


def test_planning_reads_presets_without_torch() -> None:
    code = "import sys, kvquant.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
