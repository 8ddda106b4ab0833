"""Shares of keys read from codes: counted by hand on two blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evals.arms import bind, parse_arms, prepare_arms
from evals.perplexity import score_document
from evals.reading import Reader
from evals.shares import ReadCount, attention_shares
from evals.windows import Span, spans
from kvquant import QuantizedCache

IDS = torch.randint(3, 128, (13,), generator=torch.Generator().manual_seed(1)).numpy()
TWO_BLOCKS = spans(13, prefill=8, block=2)
"""Past of 8, then of 10; queries see 9 and 10, then 11 and 12 keys."""


def counted(model: Any, make: Callable[[], Any]) -> float:
    reader, cache = Reader(model), make()
    count = ReadCount(reader, cache)
    assert count.share == 0.0
    score_document(reader, IDS, TWO_BLOCKS, reader.reference(), {"": cache}, before=count.before)
    return count.share


def test_the_blocks() -> None:
    assert list(TWO_BLOCKS) == [Span(0, 8), Span(8, 10), Span(10, 12)]


def test_all_of_the_past_is_codes(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    found = counted(model, lambda: QuantizedCache.from_model(model, "int8"))
    assert found == (8 + 8 + 10 + 10) / (9 + 10 + 11 + 12)


def test_all_but_sinks_and_residual(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    made = lambda: QuantizedCache.from_model(model, "int4", residual_length=2)  # noqa: E731
    assert counted(model, made) == (2 * (8 - 6) + 2 * (10 - 6)) / 42


def test_a_layer_that_is_skipped(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    made = lambda: QuantizedCache.from_model(model, "int8", layers={0: "none"})  # noqa: E731
    assert counted(model, made) == 36 / (2 * 42)


def test_nothing_is_codes(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    assert counted(model, lambda: QuantizedCache.from_model(model, "none")) == 0.0
    assert counted(model, Reader(model).reference) == 0.0


def test_keys_out_of_a_window_are_not_read(tiny_once: Callable[..., Any]) -> None:
    """Of 7 past slots in a window of 8, the first query sees 7 and itself, the next 6 and two."""
    model = tiny_once("mistral")
    assert counted(model, lambda: QuantizedCache.from_model(model, "int8")) == 13 / 16


def indifferent(model: Any) -> Any:
    """Without queries, attention is even."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    return model


def test_shares_of_even_attention(tiny: Callable[..., Any]) -> None:
    model = indifferent(tiny("llama"))
    made = {
        "int8": lambda: QuantizedCache.from_model(model, "int8"),
        "int4": lambda: QuantizedCache.from_model(model, "int4"),
        "skipped": lambda: QuantizedCache.from_model(model, "int8", layers={1: "none"}),
        "none": lambda: QuantizedCache.from_model(model, "none"),
    }
    found = attention_shares(Reader(model), IDS, TWO_BLOCKS, made)
    of_int8 = ((8 / 9 + 8 / 10) / 2 + (10 / 11 + 10 / 12) / 2) / 2
    of_int4 = ((4 / 9 + 4 / 10) / 2 + (6 / 11 + 6 / 12) / 2) / 2
    assert found == {
        "int8": pytest.approx(of_int8, rel=1e-5),
        "int4": pytest.approx(of_int4, rel=1e-5),
        "skipped": pytest.approx(of_int8 / 2, rel=1e-5),
        "none": 0.0,
    }


def test_shares_of_even_attention_in_a_window(tiny: Callable[..., Any]) -> None:
    model = indifferent(tiny("mistral"))
    made = {"int8": lambda: QuantizedCache.from_model(model, "int8")}
    found = attention_shares(Reader(model), IDS, TWO_BLOCKS, made)
    assert found["int8"] == pytest.approx((7 / 8 + 6 / 8) / 2, rel=1e-5)


def test_a_cache_of_transformers(tiny: Callable[..., Any]) -> None:
    model = indifferent(tiny("llama"))
    (arm,) = prepare_arms(parse_arms(["hf:quanto"], []), Reader(model).geometry)
    found = attention_shares(Reader(model), IDS, TWO_BLOCKS, {"": bind(arm, model, None).make})
    # Its 8 codes stay 8; what comes is exact.
    assert found[""] == pytest.approx(((8 / 9 + 8 / 10) + (8 / 11 + 8 / 12)) / 4, rel=1e-5)


def test_the_model_attends_as_before(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    made = {"": lambda: QuantizedCache.from_model(model, "int8")}
    made[""]()
    before = model.config._attn_implementation
    assert before == "kvquant"
    attention_shares(Reader(model), IDS, TWO_BLOCKS, made)
    assert model.config._attn_implementation == before


def test_none_where_weights_do_not_fit_layers(tiny_once: Callable[..., Any]) -> None:
    """Gemma 3n gives weights of layers that read what others store."""
    model = tiny_once("gemma3n_text")
    made = {"": lambda: QuantizedCache.from_model(model, "int8")}
    assert attention_shares(Reader(model), IDS, TWO_BLOCKS, made) == {"": None}
