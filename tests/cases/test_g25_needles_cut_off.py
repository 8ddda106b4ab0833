"""EleutherAI/lm-evaluation-harness#1642, #3421 and #2963, marin-community/marin PR#4737.

Needles cut off with the prompt that they are in, and loops that never find a prompt that is short
enough. And Neroued/ninfer#171: a needle's score that measured wording, not recall.
"""

from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from evals.haystack import read_haystack
from evals.needle import Needles
from evals.scoring import score
from evals.tasks import TASKS
from evals.words import ADJECTIVES, NOUNS
from kvquant.errors import InputError

LENGTHS = (64, 65, 127, 512)
DEPTHS = (0, 50, 100)
SENTENCES = [f"Number {row} of these sentences has ten words in it." for row in range(200)]
TEMPLATE = "{% for it in messages %}<user>{{ it.content }}<bot>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    """Words as tokens, digits one by one; BOS and EOS put by itself."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    phrases = "Remember the secret numbers in this text. One of the number is: VAR ="
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words = [f" {word}" for word in (*ADJECTIVES, *NOUNS)]
    backend.train_from_iterator([*SENTENCES, *[phrases, *words] * 5], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


@pytest.fixture
def needles(tokenizer):
    return Needles(tokenizer)


@pytest.fixture
def text(tmp_path, needles):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(SENTENCES))
    return read_haystack((str(path),), needles.encoding, longest=512, notify=print)


def needle_of(prompt, tokenizer):
    [(start, stop)] = prompt.needles
    return tokenizer.decode(prompt.haystack[start:stop])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_prompts_fit_with_needle_and_question_whole_and_in_place(
    tokenizer, needles, text, length, depth
):
    for trial in range(10):
        prompt = needles.prompt(text, "single", length, depth, trial)
        ids = [*prompt.haystack.tolist(), *prompt.question.tolist()]
        assert len(ids) + prompt.answer_tokens == length
        assert (ids.count(0), ids.count(1), ids[0]) == (1, 0, 0)

        needle = needle_of(prompt, tokenizer)
        [value] = prompt.expected
        found = re.fullmatch(rf" One of the secret numbers of the (\w+ \w+) is: {value}\.", needle)
        assert found is not None
        shown = tokenizer.decode(ids)
        assert shown.startswith("<s>Remember the secret numbers in this text.\n")
        assert shown.endswith(f"\nThe secret number of the {found[1]} is:")
        assert shown.count(needle) == 1

        [(start, stop)] = prompt.needles
        front = tokenizer.decode(prompt.haystack[:start])
        if depth == 0:
            assert front == "<s>Remember the secret numbers in this text.\n"
        if depth == 100:
            assert stop == len(prompt.haystack)
        if depth == 50 and length > 200:
            assert 0.45 < (start - 9) / (len(prompt.haystack) - 9 - (stop - start)) < 0.55


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_a_length_too_small_raises_at_once_with_the_smallest_that_works(
    tokenizer, text, task, chat
):
    needles = Needles(tokenizer, chat=chat)
    smallest = needles.smallest(task)
    for length in (1, 16, smallest - 1):
        with pytest.raises(InputError, match=rf"give a length of {smallest} or more"):
            needles.check_lengths([task], [4096, length])
        with pytest.raises(InputError, match=rf"give a length of {smallest} or more"):
            needles.prompt(text, task, length, 50, 0)
    prompt = needles.prompt(text, task, smallest, 50, 0)
    assert len(prompt.haystack) + len(prompt.question) + prompt.answer_tokens == smallest


@pytest.mark.parametrize("length", LENGTHS[:3])
def test_bytes_need_more_room_than_words(byte_tokenizer, length):
    # 42 for the instruction, 60 for the needle, 43 for the question, 9 + 8 for the answer
    with pytest.raises(InputError, match=rf"^{length} tokens are too few .* take 162;"):
        Needles(byte_tokenizer).check_lengths(["single"], [length])
    Needles(byte_tokenizer).check_lengths(["single"], [162, 512])


def test_the_chat_template_counts(tokenizer, needles, text):
    chat = Needles(tokenizer, chat=True)
    assert chat.smallest("single") > needles.smallest("single")
    prompt = chat.prompt(text, "single", 128, 100, 0)
    assert len(prompt.haystack) + len(prompt.question) + prompt.answer_tokens == 128
    shown = tokenizer.decode([*prompt.haystack, *prompt.question])
    assert shown.startswith("<s><user>Remember the secret numbers")
    assert "?<bot>The secret number of the " in shown


def test_same_seed_same_prompts(tokenizer, text):
    def made(seed):
        maker = Needles(tokenizer, seed=seed)
        grid = maker.cells(text, ["single", "repeat"], LENGTHS, DEPTHS, 2)
        return [(it.haystack.tolist(), it.question.tolist(), it.expected) for it in grid]

    assert made(3) == made(3)
    assert all(one != other for one, other in zip(made(3), made(4), strict=True))


def test_copying_the_needle_is_right_and_silence_is_wrong(tokenizer, needles, text):
    for prompt in needles.cells(text, ["single", "repeat"], LENGTHS, DEPTHS, 2):
        needle = needle_of(prompt, tokenizer)
        assert score(needle, prompt.expected) == 1.0
        assert score("", prompt.expected) == 0.0


def test_another_wording_of_the_answer_is_as_right(needles, text):
    prompt = needles.prompt(text, "single", 512, 50, 0)
    [value] = prompt.expected
    for wording in (
        f"Sure! The number that goes with it is\n\n**{int(value):,}**\n",
        f" {value}, as the text says somewhere in the middle.",
        f"{value[0]} {value[1:4]} {value[4:]}",
    ):
        assert score(wording, prompt.expected) == 1.0
    assert score(f"It is 9{value}.", prompt.expected) == 0.0
