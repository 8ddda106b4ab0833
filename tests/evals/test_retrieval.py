"""Answers: a model that copies what its cache holds finds needles, one that says nothing none."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaPreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from evals.encoding import Encoding
from evals.haystack import Haystack, noise
from evals.needle import Needles, Prompt
from evals.reading import Reader
from evals.retrieval import answer_prompts, batches, end_tokens, text_of
from kvquant import QuantizedCache

EOS = 2
VOCABULARY = 128


class Memory(LlamaPreTrainedModel):
    """A decoder whose keys are the token ids: what it knows of a text is what the cache gives."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
    ) -> Any:
        states = 5 * torch.sin(input_ids[..., None] * torch.arange(self.config.head_dim))
        states[..., 0] = input_ids
        keys, _ = past_key_values.update(states[:, None], states[:, None].clone(), 0)
        return BaseModelOutputWithPast(last_hidden_state=keys[:, 0, :, 0])


class Stub(LlamaPreTrainedModel):
    """Says after each call what `next_token` makes of the text in the cache."""

    def __init__(self) -> None:
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=16, eos_token_id=EOS, max_position_embeddings=4096,
        )  # fmt: skip
        super().__init__(config)
        self.model = Memory(config)

    def get_decoder(self) -> Any:
        return self.model

    def forward(
        self, input_ids: Any, past_key_values: Any = None, use_cache: Any = None,
        logits_to_keep: int = 0,
    ) -> Any:  # fmt: skip
        held = self.model(input_ids, past_key_values=past_key_values).last_hidden_state
        said = [self.next_token(row) for row in held.round().long().clamp(0, 127).tolist()]
        logits = torch.nn.functional.one_hot(torch.tensor(said), VOCABULARY).float()
        return CausalLMOutputWithPast(logits=logits[:, None])

    def next_token(self, ids: list[int]) -> int:
        return EOS


class Copier(Stub):
    """Goes on after ``is:`` as the text did where that stood before."""

    def next_token(self, ids: list[int]) -> int:
        text = bytes(ids).decode("ascii")
        before, _, begun = text.rpartition("is:")
        needle = re.search(r"is:( \d{7}\.)", before)
        rest = needle[1].removeprefix(begun) if needle else ""
        return ord(rest[0]) if rest else EOS


@pytest.fixture
def needles(byte_tokenizer: Any) -> Needles:
    return Needles(byte_tokenizer)


@pytest.fixture
def text(needles: Needles) -> Haystack:
    return noise(needles.encoding)


def caches(model: Any, *schemes: str) -> dict[str, Any]:
    """Arms that give tensors, which is all that a decoder without attention can read."""
    return {it: QuantizedCache.from_model(model, it, attention="dequantize") for it in schemes}


def test_a_model_that_copies_the_needle_scores_1(
    needles: Needles, text: Haystack, byte_tokenizer: Any
) -> None:
    model = Copier()
    prompts = list(needles.cells(text, ["single"], [512], [0, 50, 100], 1))
    cells = answer_prompts(
        Reader(model), byte_tokenizer, prompts, caches(model, "none", "int8", "int3")
    )
    assert [(it.task, it.length, it.depth, it.trial) for it in cells] == [
        ("single", 512, depth, 0) for depth in (0, 50, 100)
    ]
    for cell, prompt in zip(cells, prompts, strict=True):
        assert cell.expected == prompt.expected
        assert cell.reference.text == f" {prompt.expected[0]}."
        assert cell.reference.score == cell.arms["none"].score == cell.arms["int8"].score == 1.0
        assert cell.arms["int3"].score == 0.0, "what it has of the needle is no longer its digits"
    assert len({it.expected for it in cells}) == 3, "each row has a needle of its own"


def test_a_model_that_says_nothing_scores_0(
    needles: Needles, text: Haystack, byte_tokenizer: Any
) -> None:
    model = Stub()
    prompts = list(needles.cells(text, ["single", "multivalue"], [512], [50], 1))
    for prompt in prompts:
        [cell] = answer_prompts(Reader(model), byte_tokenizer, [prompt], caches(model, "none"))
        assert (cell.reference.text, cell.reference.score) == ("", 0.0)
        assert (cell.arms["none"].text, cell.arms["none"].score) == ("", 0.0)


def test_part_of_what_was_asked_for(needles: Needles, text: Haystack, byte_tokenizer: Any) -> None:
    class One(Stub):
        """Says one number, over and over."""

        said = f" {0:07}"

        def next_token(self, ids: list[int]) -> int:
            begun = bytes(ids).decode("ascii").rpartition("are:")[2]
            return ord(self.said[len(begun) % len(self.said)])

    model = One()
    prompt = needles.prompt(text, "multivalue", 600, 50, 0)
    model.said = f" {prompt.expected[2]}"
    [cell] = answer_prompts(Reader(model), byte_tokenizer, [prompt], {})
    assert cell.reference.score == 0.25 and not cell.reference.is_right
    assert len(cell.reference.text) == prompt.answer_tokens, "all of the room, and no more"


def test_the_question_is_read_after_the_haystack_and_all_of_it_fits(
    needles: Needles, text: Haystack, byte_tokenizer: Any
) -> None:
    model = Stub()
    calls: list[tuple[int, int]] = []

    class Counting(type(caches(model, "none")["none"])):  # type: ignore[misc]
        """Notes how many tokens are added to how many."""

        def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **more: Any) -> Any:
            calls.append((self.get_seq_length(), keys.shape[2]))
            return super().update(keys, values, layer_idx, *args, **more)

    arm = caches(model, "int8")["int8"]
    arm.__class__ = Counting
    model.next_token = lambda ids: ord("1")  # type: ignore[method-assign]
    prompt = needles.prompt(text, "single", 400, 50, 0)
    answer_prompts(Reader(model), byte_tokenizer, [prompt], {"int8": arm})
    haystack, question, room = len(prompt.haystack), len(prompt.question), prompt.answer_tokens
    assert haystack + question + room == 400
    assert calls[:2] == [(0, haystack), (haystack, question)]
    # The last token of an answer is said and not read.
    assert calls[2:] == [(haystack + question + it, 1) for it in range(room - 1)]


def shaped(haystack: int, question: int, answer: int, trial: int) -> Prompt:
    return Prompt(
        "single", haystack + question + answer, 0, trial, np.zeros(haystack, dtype=np.int64),
        np.zeros(question, dtype=np.int64), answer, ("1",), (), 0,
    )  # fmt: skip


def test_batches_are_consecutive_prompts_of_one_shape() -> None:
    shapes = [(9, 3, 2)] * 5 + [(9, 2, 3)] + [(9, 3, 2)] * 2 + [(8, 3, 2), (8, 3, 3)]
    prompts = [shaped(*shape, trial) for trial, shape in enumerate(shapes)]

    def trials(size: int) -> list[list[int]]:
        return [[prompt.trial for prompt in batch] for batch in batches(prompts, size)]

    assert trials(2) == [[0, 1], [2, 3], [4], [5], [6, 7], [8], [9]]
    assert trials(1) == [[it] for it in range(10)]
    assert trials(99) == [[0, 1, 2, 3, 4], [5], [6, 7], [8], [9]]
    assert list(batches([], 3)) == []


def test_an_answer_ends_where_the_model_ends_it(byte_tokenizer: Any) -> None:
    ids = [*b"12.", EOS, *b"34"]
    assert text_of(byte_tokenizer, ids, {EOS}) == "12."
    assert text_of(byte_tokenizer, ids, {EOS, ord(".")}) == "12"
    assert text_of(byte_tokenizer, list(b"12"), {EOS}) == "12"
    assert text_of(byte_tokenizer, [EOS], {EOS}) == ""


@pytest.mark.parametrize(
    ("of_model", "expected"),
    [(None, {2}), (2, {2}), (7, {2, 7}), ([7, 9], {2, 7, 9}), ([], {2})],
)
def test_tokens_that_end_an_answer(byte_tokenizer: Any, of_model: Any, expected: set[int]) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=of_model))
    assert end_tokens(model, byte_tokenizer) == expected
    assert end_tokens(SimpleNamespace(generation_config=None), byte_tokenizer) == {2}


def test_rows_of_a_batch_end_at_different_times(
    needles: Needles, text: Haystack, byte_tokenizer: Any
) -> None:
    class Early(Copier):
        """Ends at once where the number is even."""

        def next_token(self, ids: list[int]) -> int:
            needle = re.search(r"is: (\d{7})\.", bytes(ids).decode("ascii"))
            assert needle is not None
            return EOS if int(needle[1]) % 2 == 0 else super().next_token(ids)

    model = Early()
    prompts = list(needles.cells(text, ["single"], [512], [50], 4))
    together = answer_prompts(Reader(model), byte_tokenizer, prompts, caches(model, "int8"))
    alone = [
        answer_prompts(Reader(model), byte_tokenizer, [it], caches(model, "int8"))[0]
        for it in prompts
    ]
    assert [dataclasses.asdict(it) for it in together] == [dataclasses.asdict(it) for it in alone]
    even = [int(it.expected[0]) % 2 == 0 for it in prompts]
    assert len(set(even)) == 2, "the seed gives both"
    assert [it.reference.score for it in together] == [0.0 if it else 1.0 for it in even]


def test_a_needle_that_is_cut_into_pieces_is_found(
    needles: Needles, text: Haystack, byte_tokenizer: Any
) -> None:
    model = Copier()
    prompts = [needles.prompt(text, "single", 512, 50, 0)]
    encoding = Encoding(byte_tokenizer)
    assert encoding.tokenizer is byte_tokenizer
    for chunk in (1, 100, 10_000):
        [cell] = answer_prompts(
            Reader(model), byte_tokenizer, prompts, caches(model, "int8"), chunk=chunk
        )
        assert cell.reference.score == cell.arms["int8"].score == 1.0
