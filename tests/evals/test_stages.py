"""Bars: all to be seen from the beginning, none ahead of what is done."""

from __future__ import annotations

import pytest

from evals.stages import Stages


def test_bars_end_where_the_work_does(capfd: pytest.CaptureFixture[str]) -> None:
    with Stages() as stages:
        stages.add("self-check", 3)
        stages.add("needles", 10)
        stages.add("never", 5)
        for name in ("reading", "poison", "attention"):
            stages.step("self-check", name)
        assert stages.done("self-check") == 2, "the third one is only begun"
        stages.finish("self-check")
        stages.advance("needles", 4)
        stages.reach("needles", 10)
        assert [stages.done(name) for name in ("self-check", "needles", "never")] == [3, 10, 0]
    shown = capfd.readouterr()
    assert shown.out == ""
    last = {line.split()[0]: line for line in shown.err.splitlines() if line.strip()}
    assert list(last) == ["self-check", "needles", "never"]
    assert "100%" in last["self-check"] and "100%" in last["needles"] and "  0%" in last["never"]


def test_a_clock_runs_from_the_beginning_of_a_part() -> None:
    with Stages() as stages:
        stages.add("needles", 10)
        assert stages.begin("needles") is True
        assert stages.begin("needles") is False
        stages.advance("needles", 1)
        assert stages.begin("needles") is False
        assert stages.done("needles") == 1


def test_an_error_goes_through_and_the_bars_stay(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Stages() as stages:
        stages.add("needles", 10)
        stages.advance("needles", 5)
        raise KeyboardInterrupt
    assert " 50%" in capfd.readouterr().err
