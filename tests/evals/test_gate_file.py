"""Gate files: what they change, and that nothing in them is silently left out."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import gate_file
from evals.gate_file import DEFAULTS, MEANINGS, MEANT_FOR, Gate, load_gate
from kvquant.errors import FileFormatError, InputError


def load(tmp_path: Path, text: str) -> Gate:
    path = tmp_path / "gate.toml"
    path.write_text(text, encoding="utf-8")
    return load_gate(path)


def test_defaults() -> None:
    gate = load_gate(None)
    assert gate == Gate() == Gate("defaults", 0.05, {}, {})
    assert gate.limits("int4", "4-bit") == {
        "delta_ln_ppl": pytest.approx(math.log(1.01), abs=5e-6),
        "kl_mean": 0.01,
        "kl_p99": 0.1,
        "kl_slope": 0.001,
        "top1": 0.97,
        "top1_confident": 0.995,
        "delta_p_rms": 0.02,
        "loss_rate": 0.05,
    }
    assert gate.named("int4", "4-bit") == frozenset()


def test_fewer_bits_are_allowed_more() -> None:
    assert list(DEFAULTS) == ["exact", "8-bit", "4-bit", "3-bit"]
    tight = [DEFAULTS[name] for name in DEFAULTS]
    for one, other in pairwise(tight):
        assert list(one) == list(other) == [name for name in MEANINGS if name != "agreement"]
        for name in one:
            if name.startswith("top1"):
                assert one[name] > other[name]
            elif name == "loss_rate":
                assert one[name] <= other[name]
            else:
                assert one[name] < other[name]


def test_example_of_the_docstring(tmp_path: Path) -> None:
    assert gate_file.__doc__ is not None
    text = "\n".join(re.findall(r"^    (.*)$", gate_file.__doc__, re.MULTILINE))
    gate = load(tmp_path, text)
    assert gate.significance == 0.05
    assert gate.classes == {"4-bit": {"kl_mean": 0.02, "loss_rate": 0.02}}
    assert gate.arms == {"int4@ft-scales": {"kl_slope": None}}


def test_arm_over_class_over_default(tmp_path: Path) -> None:
    gate = load(
        tmp_path,
        """
        ["4-bit"]
        kl_mean = 0.02
        kl_p99 = 0.2
        top1 = false
        [arms.int4]
        kl_p99 = 0.3
        agreement = 1
        kl_slope = false
        """,
    )
    limits = gate.limits("int4", "4-bit")
    assert limits["delta_ln_ppl"] == DEFAULTS["4-bit"]["delta_ln_ppl"]
    assert (limits["kl_mean"], limits["kl_p99"], limits["agreement"]) == (0.02, 0.3, 1.0)
    assert "top1" not in limits and "kl_slope" not in limits
    assert list(limits) == [name for name in MEANINGS if name in limits]
    assert gate.named("int4", "4-bit") == {"kl_mean", "kl_p99", "top1", "agreement", "kl_slope"}

    others = gate.limits("int4-kivi", "4-bit")
    assert (others["kl_mean"], others["kl_p99"]) == (0.02, 0.2)
    assert "agreement" not in others and "kl_slope" in others
    assert gate.named("int4-kivi", "4-bit") == {"kl_mean", "kl_p99", "top1"}

    assert gate.limits("int8", "8-bit") == DEFAULTS["8-bit"]
    assert gate.named("int8", "8-bit") == frozenset()


def test_arm_switches_on_what_its_class_switches_off(tmp_path: Path) -> None:
    gate = load(tmp_path, '["4-bit"]\ntop1 = false\n[arms.int4]\ntop1 = 0.9')
    assert gate.limits("int4", "4-bit")["top1"] == 0.9


def test_source_is_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, "").source == str(tmp_path / "gate.toml")


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert replace(load(tmp_path, "# nothing"), source="defaults") == Gate()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kl_mean = 0.1", r"no 'kl_mean' in a gate; there are significance, exact, 8-bit, 4-bit"),
        ('["5-bit"]\nkl_mean = 0.1', "no '5-bit' in a gate; there are .*3-bit, arms"),
        ('["4-bit"]\nkl = 0.1', r'\["4-bit"\]: no threshold is called \'kl\'; .*kl_mean, kl_p99'),
        ('["4-bit"]\nmcnemar_p = 0.1', "no threshold is called 'mcnemar_p'"),
        ("[arms.x]\nKL_mean = 0.1", r'\[arms\."x"\]: no threshold is called \'KL_mean\''),
        ("[arms.x.y]\nkl_mean = 0.1", r'\[arms\."x"\]: no threshold is called \'y\''),
        ("[arms]\nkl_mean = 0.1", "0.1 stands where a section is wanted"),
        ("arms = 1", r"\[arms\]: 1 stands where a section is wanted"),
        ("'4-bit' = false", r'\["4-bit"\]: False stands where a section is wanted'),
        ("[[arms]]\nname = 'x'", r"\[arms\]: \[{'name': 'x'}\] stands where"),
        ("significance = 0", "significance: 0 is no number above 0, at most 0.5"),
        ("significance = 0.51", "significance: 0.51 is no"),
        ("significance = true", "significance: True is no"),
        ("significance = nan", "significance: nan is no"),
        ("significance = '5 %'", "significance: '5 %' is no"),
    ],
)
def test_unknown_names_and_misplaced_values(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as raised:
        load(tmp_path, text)
    assert str(raised.value).startswith(str(tmp_path / "gate.toml"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["delta_ln_ppl", "kl_mean", "kl_p99", "kl_slope"])
@pytest.mark.parametrize("value", ["0", "-0.1", "1000", "1e400", "nan", "inf", "true", "'1'", "[]"])
def test_no_amounts(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(
        InputError, match=rf'\["8-bit"\], {name}: .* is no number above 0 and below'
    ):
        load(tmp_path, f'["8-bit"]\n{name} = {value}')


@pytest.mark.parametrize("name", ["top1", "top1_confident", "delta_p_rms", "loss_rate"])
@pytest.mark.parametrize("value", ["0", "1", "1.0", "97", "-0.1", "nan", "true", "'97 %'"])
def test_no_shares(tmp_path: Path, name: str, value: str) -> None:
    example = DEFAULTS["4-bit"][name]
    with pytest.raises(InputError, match=rf"{name}: .* is no share such as {example}, above 0 and"):
        load(tmp_path, f'["8-bit"]\n{name} = {value}')


@pytest.mark.parametrize("value", ["0", "1.01", "90"])
def test_no_agreement(tmp_path: Path, value: str) -> None:
    with pytest.raises(InputError, match=r"agreement: .* is no share such as 0\.9"):
        load(tmp_path, f"[arms.x]\nagreement = {value}")


def test_huge_integers_are_refused_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"kl_mean: 1000.* is no number"):
        load(tmp_path, f'["8-bit"]\nkl_mean = 1{"0" * 400}')


@pytest.mark.parametrize(
    "text",
    [
        "kl_mean =",
        "[4-bit",
        "a = 1\na = 2",
        pytest.param(f"x = {'[' * 5000}", id="deep"),
        pytest.param(f"x = {'1' * 5000}", id="long"),
    ],
)
def test_no_toml(tmp_path: Path, text: str) -> None:
    with pytest.raises(FileFormatError, match=r"gate\.toml is no TOML file: "):
        load(tmp_path, text)


def test_no_text(tmp_path: Path) -> None:
    (tmp_path / "gate.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match=r"gate\.toml is no TOML file: "):
        load_gate(tmp_path / "gate.toml")


def test_byte_order_mark_of_windows(tmp_path: Path) -> None:
    (tmp_path / "gate.toml").write_bytes(b"\xef\xbb\xbfsignificance = 0.01\r\n")
    assert load_gate(str(tmp_path / "gate.toml")).significance == 0.01


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the gate .*none\.toml: No such file"):
        load_gate(tmp_path / "none.toml")
    with pytest.raises(InputError, match=r"cannot read the gate .*: Is a directory"):
        load_gate(tmp_path)


# Whether a gate fits the arms


def test_gate_that_fits(tmp_path: Path) -> None:
    gate = load(tmp_path, "[arms.int4]\nkl_mean = 0.1\n[arms.odd]\nkl_mean = 0.2")
    gate.check({"int4": "4-bit", "int8": "8-bit", "odd": "2-bit", "none": "exact"})
    assert gate.limits("odd", "2-bit") == {"kl_mean": 0.2}


def test_arm_that_would_not_be_evaluated(tmp_path: Path) -> None:
    gate = load(tmp_path, "[arms.int5]\nkl_mean = 0.1")
    complaint = "gate.toml has thresholds for int5, which would not be evaluated.* int4, int8"
    with pytest.raises(InputError, match=complaint):
        gate.check({"int4": "4-bit", "int8": "8-bit"})


def test_class_without_thresholds() -> None:
    complaint = r'no thresholds for odd, a 2-bit scheme: put a section \[arms\."odd"\]'
    with pytest.raises(InputError, match=complaint):
        Gate().check({"int4": "4-bit", "odd": "2-bit"})


# Gates as files


def test_default_gate_as_a_file(tmp_path: Path) -> None:
    text = Gate().to_toml()
    assert text.isascii() and text.endswith("\n") and not text.endswith("\n\n")
    assert max(map(len, text.splitlines())) <= 100
    comments = " ".join(line[2:] for line in text.splitlines() if line.startswith("#"))
    assert MEANT_FOR in comments
    assert all(f" {name} " in comments for name in (*MEANINGS, "significance"))
    gate = load(tmp_path, text)
    for name in DEFAULTS:
        assert gate.limits("x", name) == Gate().limits("x", name)
        assert gate.named("x", name) == DEFAULTS[name].keys()


LIMITS = st.fixed_dictionaries(
    {},
    optional={
        name: st.none() | st.floats(1e-9, 0.99) for name in (*DEFAULTS["4-bit"], "agreement")
    },
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ['a"b', "a.b", "\x7f", "\x00\n", "\\", "", "int4@fs", "🚀"]
)


@given(
    significance=st.floats(0.001, 0.5),
    classes=st.dictionaries(st.sampled_from(list(DEFAULTS)), LIMITS),
    arms=st.dictionaries(NAMES, LIMITS),
)
def test_any_gate_as_a_file(
    tmp_path_factory: pytest.TempPathFactory, significance: float, classes: Any, arms: Any
) -> None:
    gate = Gate("x", significance, classes, arms)
    again = load(tmp_path_factory.mktemp("gate"), gate.to_toml())
    assert again.significance == significance
    assert again.arms == arms
    for scheme_class in DEFAULTS:
        for arm in (*arms, "other"):
            assert again.limits(arm, scheme_class) == gate.limits(arm, scheme_class)


def test_gates_need_no_torch() -> None:
    code = "import sys, evals.gate_file; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
