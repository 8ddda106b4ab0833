"""Texts that go on side by side: where they part, and how much is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from evals.continuation import continue_text
from evals.reading import Reader
from kvquant import QuantizedCache

PROMPT = np.frombuffer(b"The quick brown fox jumps over the lazy dog", dtype=np.uint8).astype(int)


def greedy(model: Any, ids: list[int], tokens: int) -> list[int]:
    """Without any cache."""
    for _ in range(tokens):
        with torch.no_grad():
            found = model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()
        ids = [*ids, int(found)]
    return ids[-tokens:]


class Distorting(QuantizedCache):
    """Forgets what it holds after so many tokens."""

    after = 0

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **more: Any) -> Any:
        if self.get_seq_length() >= self.after:
            keys, values = 8 * torch.roll(keys, 1, -1), -8 * torch.roll(values, 1, -1)
        return super().update(keys, values, layer_idx, *args, **more)


def distorting(model: Any, after: int) -> Any:
    cache = QuantizedCache.from_model(model, "none")
    cache.__class__ = Distorting
    cache.after = after
    return cache


def test_the_unquantized_cache_goes_on_as_the_model_does(
    tiny_once: Any, byte_tokenizer: Any
) -> None:
    model = tiny_once("llama")
    arms = {"none": QuantizedCache.from_model(model, "none")}
    found = continue_text(Reader(model), byte_tokenizer, PROMPT, 6, arms)
    expected = greedy(model, PROMPT.tolist(), 6)
    assert found.reference == byte_tokenizer.decode(expected)
    assert (found.prompt_tokens, found.tokens) == (len(PROMPT), 6)
    assert found.texts == {"none": found.reference}
    assert found.first_difference == {"none": None}
    assert found.agreement == {"none": 1.0}


@pytest.mark.parametrize("chunk", [None, 5])
def test_first_difference_and_agreement_are_those_of_the_tokens(
    tiny_once: Any, byte_tokenizer: Any, chunk: int | None
) -> None:
    model, tokens = tiny_once("llama"), 8
    reader = Reader(model)
    # All of the prompt is distorted, nothing is, and what follows the third new token.
    arms = {
        "all": distorting(model, 0),
        "none": distorting(model, 10_000),
        "late": distorting(model, len(PROMPT) + 2),
    }
    found = continue_text(reader, byte_tokenizer, PROMPT, tokens, arms, chunk=chunk)
    expected = greedy(model, PROMPT.tolist(), tokens)
    assert found.reference == byte_tokenizer.decode(expected)
    assert found.first_difference["none"] is None and found.agreement["none"] == 1.0
    for name, first_possible in (("all", 0), ("late", 3)):
        held = [ord(it) for it in found.texts[name]]
        assert len(held) == tokens, "a byte a token"
        same = [a == b for a, b in zip(held, expected, strict=True)]
        assert found.first_difference[name] == (None if all(same) else same.index(False))
        assert found.agreement[name] == pytest.approx(sum(same) / tokens)
        assert not all(same) and same.index(False) >= first_possible


def test_a_prompt_of_two_tokens_is_the_shortest(tiny_once: Any, byte_tokenizer: Any) -> None:
    model = tiny_once("llama")
    arms = {"int8": QuantizedCache.from_model(model, "int8")}
    found = continue_text(Reader(model), byte_tokenizer, PROMPT[:2], 1, arms)
    assert found.prompt_tokens == 2
    assert found.first_difference["int8"] in (None, 0)
    assert found.agreement["int8"] == (1.0 if found.first_difference["int8"] is None else 0.0)
