"""Answers to needle prompts, with the unquantized cache and with every arm."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from .needle import Prompt
from .reading import Reader
from .results import Answer, Cell
from .scoring import score


def batches(prompts: Iterable[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Consecutive prompts whose parts are equally long, at most `size` of them together."""

    def shape(prompt: Prompt) -> tuple[int, int, int]:
        return len(prompt.haystack), len(prompt.question), prompt.answer_tokens

    for _, alike in groupby(prompts, key=shape):
        batch: list[Prompt] = []
        for prompt in alike:
            batch.append(prompt)
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch


def answer_prompts(
    reader: Reader,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    arms: Mapping[str, Any],
    *,
    chunk: int | None = None,
) -> list[Cell]:
    """Answers to prompts whose parts are equally long.

    The haystack is read first, the question and the answer through what the caches hold of it.

    Args:
        reader: Of the model.
        tokenizer: Its tokenizer.
        prompts: Of one shape.
        arms: Empty caches, by name.
        chunk: As `Reader.fill` takes it.
    """
    haystack = _stacked([prompt.haystack for prompt in prompts])
    question = _stacked([prompt.question for prompt in prompts])
    reference = reader.reference()
    reader.fill(haystack, reference, arms, chunk)
    stop = end_tokens(reader.model, tokenizer)
    answers = {
        name: _answers(reader, tokenizer, prompts, question, cache, stop)
        for name, cache in {"": reference, **arms}.items()
    }
    return [
        Cell(
            task=prompt.task,
            length=prompt.length,
            depth=prompt.depth,
            trial=prompt.trial,
            expected=prompt.expected,
            reference=answers[""][row],
            arms={name: answers[name][row] for name in arms},
        )
        for row, prompt in enumerate(prompts)
    ]


def _answers(
    reader: Reader,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    question: torch.Tensor,
    cache: Any,
    stop: Collection[int],
) -> list[Answer]:
    made = reader.answer(question, cache, prompts[0].answer_tokens, stop).tolist()
    texts = [text_of(tokenizer, ids, stop) for ids in made]
    return [
        Answer(text, score(text, prompt.expected))
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def text_of(tokenizer: Any, ids: Sequence[int], stop: Collection[int]) -> str:
    """The text of an answer, up to the token that ends it."""
    end = next((place for place, token in enumerate(ids) if token in stop), len(ids))
    return str(tokenizer.decode(ids[:end], skip_special_tokens=True))


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: of the tokenizer, and of the model's generation settings."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = found if isinstance(found, list) else [found]
    return frozenset(it for it in (*several, tokenizer.eos_token_id) if it is not None)


def _stacked(rows: Sequence[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))
