"""The promises on a real model: SmolLM2 finds plain needles, and int8 loses none of them."""

from __future__ import annotations

from typing import Any

import pytest

from evals.haystack import read_haystack
from evals.needle import Needles
from evals.reading import Reader
from evals.retrieval import answer_prompts
from evals.statistics import losses
from kvquant import QuantizedCache
from kvquant.models.loading import LoadedModel, load, make_local
from kvquant.models.source import resolve

pytestmark = pytest.mark.real_model

DEPTHS = (0, 25, 50, 75, 100)


def quiet(message: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(make_local(resolve("smollm2"), quiet), device="cpu", dtype="float32", notify=quiet)


@pytest.mark.parametrize("length", [512, 1024])
def test_the_reference_finds_plain_needles_and_int8_loses_none(
    loaded: LoadedModel, length: int
) -> None:
    needles = Needles(loaded.tokenizer)
    text = read_haystack((), needles.encoding, longest=length, notify=quiet)
    prompts = list(needles.cells(text, ["single"], [length], DEPTHS, 1))
    arms: dict[str, Any] = {"int8": QuantizedCache.from_model(loaded.model, "int8")}
    cells = answer_prompts(Reader(loaded.model), loaded.tokenizer, prompts, arms)
    assert [cell.depth for cell in cells] == list(DEPTHS)
    [found] = losses(cells)
    assert found.trials >= 0.9 * found.cells == 4.5, [cell.reference.text for cell in cells]
    assert found.losses == 0
