"""Requests to plan, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvquant.capacity.ask import Question, ask
from kvquant.capacity.plan import FormatPlan, plan

_NOTHING: dict[str, Any] = {
    "formats": ("bf16",),
    "scales": None,
    "sink_tokens": None,
    "residual_length": None,
    "group_size": None,
    "skip_layers": "",
    "gpu": None,
    "memory_gb": None,
    "bandwidth_tbs": None,
    "overhead_gb": None,
    "weights_dtype": None,
    "weights_gb": None,
    "context": None,
    "contexts": None,
    "traffic": None,
    "concurrency": None,
    "template_tokens": 0,
    "thinking_tokens": 0,
    "prefix_tokens": 0,
    "adapters": 1,
    "page_size": 16,
    "reserve": None,
    "tp": 1,
    "pp": 1,
    "dp": 1,
}


@pytest.fixture(scope="session")
def question() -> Callable[..., Question]:
    """``question(model, **options)``: what the command line makes of these options."""

    def build(model: str, **options: Any) -> Question:
        assert not set(options) - set(_NOTHING)
        return ask(model, {**_NOTHING, **options})

    return build


@pytest.fixture(scope="session")
def planned(question: Callable[..., Question]) -> Callable[..., FormatPlan]:
    """``planned(model, kv, **options)``: the plan of one format."""

    def build(model: str, kv: str = "bf16", **options: Any) -> FormatPlan:
        asked = question(model, formats=(kv,), **options)
        return plan(asked.request, asked.forms[0])

    return build
