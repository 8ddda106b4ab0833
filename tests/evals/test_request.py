"""Lengths as asked for, as served, and those that there cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.arms import ArmRequest, EvalArm
from evals.gate_file import Gate, load_gate
from evals.request import Request, check_judges, choose_lengths
from kvquant.errors import InputError
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.models.source import ModelSource
from kvquant.presets import preset
from kvquant.provenance import Provenance
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

GEOMETRY = CacheGeometry("llama", (LayerGeometry(LayerKind.FULL, 2, 4, 4),), 8192)
INT4 = EvalArm(ArmRequest("int4", scheme="int4"), None, preset("int4"))


def calibrated(name: str, context: int, longest: int) -> EvalArm:
    """An arm with scales that were made for a context, and saw positions up to `longest`."""
    how = TensorScheme(tensor_format("int8"), Granularity.PER_TENSOR)
    ends = torch.ones(how.granularity.scale_shape(2, 4))
    tensor = TensorScales.from_range(-ends, ends, how)
    provenance = Provenance(context_length=context, longest_position=longest)
    scheme = QuantScheme(how, how)
    scales = KVScales(GEOMETRY, scheme, {0: LayerScales(tensor, tensor)}, provenance)
    return EvalArm(ArmRequest(name, scales=name), scales, scheme)


def chosen(
    asked: str | None,
    arms: list[EvalArm],
    served: int | None = None,
    geometry: CacheGeometry = GEOMETRY,
) -> tuple[tuple[int, ...], list[str]]:
    said: list[str] = []
    return choose_lengths(asked, served, arms, geometry, said.append), said


def test_lengths_as_asked_for() -> None:
    assert chosen("4k, 512,1k", [INT4]) == ((512, 1024, 4096), [])
    assert chosen("8k", [INT4]) == ((8192,), [])


@pytest.mark.parametrize("asked", [None, "served"])
def test_what_is_served_is_in_the_scales(asked: str | None) -> None:
    arms = [INT4, calibrated("short", 1024, 1024), calibrated("long", 2048, 2048)]
    lengths, said = chosen(asked, arms)
    assert lengths == (2048,)
    assert said[0] == "length 2,048; give others with --lengths 1k,4k,16k"


@pytest.mark.parametrize("asked", [None, "served"])
def test_the_length_of_the_engine_counts_more(asked: str | None) -> None:
    assert chosen(asked, [calibrated("a", 4096, 4096)], served=3000)[0] == (3000,)
    assert chosen(asked, [INT4], served=3000)[0] == (3000,)


def test_served_without_anybody_who_knows() -> None:
    with pytest.raises(InputError, match=r"no scales say .* --max-model-len"):
        chosen("served", [INT4])
    assert chosen(None, [INT4])[0] == (4096,)
    assert chosen(None, [INT4], geometry=replace(GEOMETRY, max_positions=512))[0] == (512,)
    assert chosen(None, [INT4], geometry=replace(GEOMETRY, max_positions=None))[0] == (4096,)


@pytest.mark.parametrize(("asked", "served"), [("1k,16k", None), ("served", 8193), (None, 8193)])
def test_beyond_the_positions(asked: str | None, served: int | None) -> None:
    with pytest.raises(InputError, match=r"beyond the model's 8,192 positions.* use at most 8,192"):
        chosen(asked, [INT4], served)
    unlimited = replace(GEOMETRY, max_positions=None)
    assert max(chosen(asked, [INT4], served, unlimited)[0]) > 8192


def test_scales_that_have_not_seen_such_positions() -> None:
    arms = [calibrated("short", 1024, 1000), calibrated("long", 4096, 4096)]
    lengths, said = chosen("512,4k", arms)
    assert lengths == (512, 4096)
    assert said == [
        "warning: the scales of short were calibrated up to 1,000 tokens, and 4,096 are evaluated: "
        "they may clip; calibrate with --context-length 4096"
    ]
    assert chosen("1000", arms)[1] == []
    assert chosen("1001", arms)[1] != []
    assert chosen("4k", [calibrated("unknown", 0, 0)])[1] == []


def asked_for(**options: Any) -> Request:
    return Request(ModelSource("model"), (INT4,), (512,), **options)


NOTHING = {"documents": 0, "trials": 0, "continuations": 0}


@pytest.mark.parametrize(
    "options",
    [
        NOTHING,
        {**NOTHING, "continuations": 2},
        {**NOTHING, "trials": 9, "tasks": ()},
        {"only_self_check": True},
    ],
)
def test_a_gate_without_anything_to_judge(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="nothing to judge"):
        check_judges(Gate(), asked_for(**options))


def test_a_gate_with_something_to_judge(tmp_path: Path) -> None:
    check_judges(Gate(), asked_for())
    check_judges(Gate(), asked_for(**{**NOTHING, "documents": 1}))
    check_judges(Gate(), asked_for(**{**NOTHING, "trials": 1}))
    (tmp_path / "gate.toml").write_text('[arms."int4"]\nagreement = 0.5\n')
    gate = load_gate(tmp_path / "gate.toml")
    check_judges(gate, asked_for(**{**NOTHING, "continuations": 1}))


def test_settings_are_what_numbers_depend_on() -> None:
    settings = asked_for(tasks=("single", "repeat"), depths=(0, 50), limit=3).settings()
    assert settings == {
        "prefill": 256, "block": 64, "chunk": None, "chat": False, "tokens": 64, "batch_size": 1,
        "limit": 3, "documents": 8, "tasks": ["single", "repeat"],
        "depths": [0, 50], "trials": 1,
    }  # fmt: skip


def test_foreign_scales_are_compared_with_own_ones() -> None:
    assert asked_for(force=True).settings() == asked_for().settings()
