from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from evals.encoding import Encoding
from evals.haystack import NOISE, Haystack, read_haystack
from evals.needle import Needles
from evals.scoring import score
from evals.tasks import TASKS
from evals.words import ADJECTIVES, NOUNS
from kvquant.errors import InputError

SENTENCES = [f"The {first} {second} stands alone." for first, second in zip(ADJECTIVES, NOUNS)]  # noqa: B905
TEMPLATE = (
    "{{ bos_token }}{% for it in messages %}<user>{{ it.content }}</user>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def _trained(pre_tokenizer, decoder, normalizer=None, **options):
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator(
        [*SENTENCES, NOISE, "One of the secret numbers of the is:", "VAR = "] * 5,
        trainers.BpeTrainer(
            vocab_size=1500, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"], **options
        ),
    )
    return backend


def _byte_level():
    """As GPT-2: a blank belongs to the word after it, a digit is a token."""
    return _trained(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        decoders.ByteLevel(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )


def _sentence_piece(pre_tokenizer):
    """As Llama's first: ``▁`` for a blank, and one in front of every text."""
    return _trained(
        pre_tokenizer,
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", left=1)]
        ),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        initial_alphabet=[*map(chr, range(33, 127)), "▁", "\n"],
    )


@functools.cache
def tokenizer(name):
    """``bytes``, ``gpt`` and ``phrases`` put nothing by themselves, ``llama`` a BOS token.

    ``gpt+bos`` puts BOS and EOS. In ``phrases`` a token may span several words, so that no two
    needles are alike in length.
    """
    if name == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE({it: code for code, it in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<s>", "</s>"])
    elif name.startswith("gpt"):
        backend = _byte_level()
    else:
        words = pre_tokenizers.Split("▁", "merged_with_next") if name == "llama" else None
        backend = _sentence_piece(words)
    if name in ("llama", "gpt+bos"):
        specials = [(it, backend.token_to_id(it)) for it in ("<s>", "</s>")]
        single = "<s> $A" if name == "llama" else "<s> $A </s>"
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=specials
        )
    unk = {} if name == "bytes" else {"unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **unk
    )
    made.chat_template = TEMPLATE
    return made


ALIKE = ("bytes", "gpt", "gpt+bos", "llama")
NAMES = (*ALIKE, "phrases")


@functools.cache
def needles(name, chat=False, seed=0):
    return Needles(tokenizer(name), chat=chat, seed=seed)


@functools.cache
def text(name):
    """The sentences, tokenized by hand."""
    encoding = Encoding(tokenizer(name))
    ids = encoding.sentences(SENTENCES)
    return Haystack("test", np.concatenate(ids), np.cumsum([len(it) for it in ids]), "")


def decoded(name, ids):
    return tokenizer(name).decode(list(map(int, ids)))


def made(name, task, extra, depth=50, trial=0, **options):
    """A prompt with room for `extra` tokens of text."""
    maker = needles(name, **options)
    length = maker.smallest(task) + extra
    return maker.prompt(text(name), task, length, depth, trial)


def same(one, other):
    return (
        one.haystack.tolist() == other.haystack.tolist()
        and one.question.tolist() == other.question.tolist()
        and (one.expected, one.needles, one.at_depth)
        == (other.expected, other.needles, other.at_depth)
    )


def without_needles(prompt):
    """The haystack without its needles, and where each of them was."""
    kept = np.ones(len(prompt.haystack), dtype=bool)
    places, removed = [], 0
    for start, stop in prompt.needles:
        kept[start:stop] = False
        places.append(start - removed)
        removed += stop - start
    return prompt.haystack[kept], places


def front_of(name, ids):
    """Tokens up to the end of the instruction."""
    stops = range(len(ids) + 1)
    return next(it for it in stops if decoded(name, ids[:it]).endswith("in this text.\n"))


EVERYTHING = {
    "name": st.sampled_from(NAMES),
    "task": st.sampled_from(list(TASKS)),
    "extra": st.integers(0, 600),
    "depth": st.integers(0, 100),
    "trial": st.integers(0, 1000),
    "chat": st.booleans(),
}


@settings(deadline=None)
@given(**EVERYTHING)
def test_every_prompt_fits_exactly_with_needles_and_question_whole(
    name, task, extra, depth, trial, chat
):
    prompt = made(name, task, extra, depth, trial, chat=chat)
    maker = needles(name, chat=chat)
    assert prompt.haystack.dtype == prompt.question.dtype == np.int64
    tokens = len(prompt.haystack) + len(prompt.question) + prompt.answer_tokens
    assert tokens == prompt.length == maker.smallest(task) + extra
    assert prompt.answer_tokens == maker.answer_tokens(task)
    assert (prompt.task, prompt.depth, prompt.trial) == (task, depth, trial)

    found = [decoded(name, prompt.haystack[slice(*span)]).strip() for span in prompt.needles]
    assert all(it.startswith(("One of the secret numbers of the ", "VAR ")) for it in found)
    assert all(it.endswith(".") and it.count(".") == 1 for it in found)
    assert len(set(found)) == len(found) == {"single": 1, "repeat": 1, "tracking": 8}.get(task, 4)
    assert score(" ".join(found), prompt.expected) == 1.0
    assert score(found[prompt.at_depth], prompt.expected) > 0
    assert decoded(name, prompt.question).endswith(":")


@settings(deadline=None)
@given(**EVERYTHING)
def test_needles_are_at_their_depth_where_a_sentence_ends(name, task, extra, depth, trial, chat):
    prompt = made(name, task, extra, depth, trial, chat=chat)
    rest, places = without_needles(prompt)
    front = front_of(name, rest)
    extra = len(rest) - front
    assert places == sorted(places)
    own = needles(name)._noise if task == "repeat" else text(name)
    last = own.tokens[own.ends - 1]
    ends = {0, extra, *(np.flatnonzero(np.isin(rest[front:], last)) + 1).tolist()}
    assert {place - front for place in places} <= ends
    wanted = extra * depth / 100
    distance = abs(places[prompt.at_depth] - front - wanted)
    assert distance == min(abs(end - wanted) for end in ends)
    if depth == 0:
        assert prompt.at_depth == 0
        assert prompt.needles[0][0] == front
    if depth == 100:
        assert prompt.at_depth == len(prompt.needles) - 1
        assert prompt.needles[-1][1] == len(prompt.haystack)


@settings(deadline=None, max_examples=30)
@given(**EVERYTHING)
def test_the_text_is_the_text_and_goes_round(name, task, extra, depth, trial, chat):
    prompt = made(name, task, extra, depth, trial, chat=chat)
    rest, _ = without_needles(prompt)
    filler = rest[front_of(name, rest) :]
    extra = len(filler)
    own = needles(name)._noise if task == "repeat" else text(name)
    whole = own.tokens.tolist()
    there = whole * (extra // len(whole) + 2)
    stops = [len(there) - len(whole) + int(end) for end in own.ends]
    assert filler.tolist() in [there[stop - extra : stop] for stop in stops]


@settings(deadline=None, max_examples=10)
@given(**EVERYTHING)
def test_prompts_depend_on_nothing_but_what_they_are(name, task, extra, depth, trial, chat):
    prompt = made(name, task, extra, depth, trial, chat=chat)
    again = Needles(tokenizer(name), chat=chat)
    for other in again.cells(text(name), ["single", task], [2000], [depth], 2):
        assert other.length == 2000
    assert same(prompt, again.prompt(text(name), task, prompt.length, depth, trial))


@pytest.mark.parametrize("change", ["trial", "depth", "length", "seed"])
@pytest.mark.parametrize("task", TASKS)
def test_other_trials_are_other_prompts(task, change):
    first = made("gpt", task, 300, depth=50, trial=0)
    options = {"trial": {"trial": 1}, "depth": {"depth": 51}, "seed": {"seed": 1}, "length": {}}
    second = made("gpt", task, 300 + (change == "length"), **options[change])
    assert first.expected != second.expected
    assert first.haystack[:300].tolist() != second.haystack[:300].tolist()


def test_trials_begin_in_different_places_of_the_text():
    starts = {
        tuple(without_needles(made("gpt", "single", 300, 100, trial))[0][-50:].tolist())
        for trial in range(20)
    }
    assert len(starts) >= 15


def test_a_literal_prompt():
    prompt = needles("bytes").prompt(text("bytes"), "single", 224, 50, 0)
    assert decoded("bytes", prompt.haystack) == (
        "Remember the secret numbers in this text.\n"
        "e. The late island stands alone."
        " One of the secret numbers of the fierce desert is: 2853003."
        " The lazy jacket stands alone."
    )
    assert decoded("bytes", prompt.question) == "\nThe secret number of the fierce desert is:"
    assert prompt.expected == ("2853003",)
    assert prompt.needles == ((74, 134),)


@pytest.mark.parametrize("name", ["gpt+bos", "llama"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_bos_token_once_in_front_and_no_eos_anywhere(name, chat):
    prompt = made(name, "multikey", 100, chat=chat)
    ids = [*prompt.haystack.tolist(), *prompt.question.tolist()]
    bos, eos = tokenizer(name).bos_token_id, tokenizer(name).eos_token_id
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert ids.count(eos) == 0


def test_no_bos_token_where_the_tokenizer_puts_none():
    assert tokenizer("gpt").bos_token_id not in made("gpt", "single", 100).haystack


@pytest.mark.parametrize("name", ["bytes", "gpt", "gpt+bos"])
@pytest.mark.parametrize("task", TASKS)
def test_the_chat_template_goes_around_the_message_and_the_answer_begins_after_it(name, task):
    prompt = made(name, task, 150, chat=True)
    shown = decoded(name, [*prompt.haystack, *prompt.question])
    before, message = shown.split("<user>")
    message, opening = message.split("</user><model>")
    assert before == ("" if name in ("bytes", "gpt") else "<s>") or before == "<s>"
    assert message.startswith(("Remember the secret numbers", "Keep track of the variables"))
    assert message.endswith("?")
    assert message.count("?") == 1
    assert opening.startswith("The ")
    assert opening.endswith(":")
    rendered = tokenizer(name).apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    assert shown == rendered + opening
    assert decoded(name, prompt.haystack[-1:]).endswith(".")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_of_a_task_and_length_are_alike_in_all_lengths(name, task, chat):
    maker = needles(name, chat=chat)
    length = maker.smallest(task) + 50
    prompts = maker.cells(text(name), [task], [length], [0, 33, 100], 10)
    assert len({(len(it.haystack), len(it.question), it.answer_tokens) for it in prompts}) == 1


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", NAMES)
def test_there_is_room_for_the_answer_as_it_may_be_given(name, task):
    maker = needles(name)
    for seed in range(20):
        quiz = TASKS[task](maker._vocabulary, np.random.default_rng(seed))
        answer = len(maker.encoding.sentences([quiz.answer])[0])
        assert answer + 4 <= maker.answer_tokens(task) <= answer + 24


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("task", TASKS)
def test_a_length_too_small_names_the_smallest_and_that_one_works(name, task):
    maker = needles(name)
    smallest = maker.smallest(task)
    for length in (1, smallest - 1):
        with pytest.raises(
            InputError,
            match=rf"^{length} tokens are too few for the task '{task}': .* take {smallest}; "
            rf"give a length of {smallest} or more$",
        ):
            maker.check_lengths([task], [smallest, length])
        with pytest.raises(InputError, match=f"give a length of {smallest} or more"):
            maker.prompt(text(name), task, length, 50, 0)
    maker.check_lengths([task], [smallest, 10 * smallest])
    for depth in (0, 50, 100):
        for trial in range(20):
            prompt = maker.prompt(text(name), task, smallest, depth, trial)
            assert len(without_needles(prompt)[0]) + sum(
                stop - start for start, stop in prompt.needles
            ) == len(prompt.haystack)
            assert len(prompt.haystack) + len(prompt.question) + prompt.answer_tokens == smallest


def test_the_chat_template_counts():
    plain, chat = needles("bytes"), needles("bytes", chat=True)
    question = len("\nWhat is the secret number of the xxxxxx xxxxxx?")
    template = len("<user></user><model>") + len("<s>")
    # in place of the line break before the answer's opening
    assert chat.smallest("single") == plain.smallest("single") + question + template - 1 - 2


def test_a_grid_in_order():
    maker = needles("gpt")
    grid = maker.cells(text("gpt"), ["single", "multikey"], [300, 200], [0, 100], 2)
    found = [(it.task, it.length, it.depth, it.trial) for it in grid]
    assert found == [
        (task, length, depth, trial)
        for task in ("single", "multikey")
        for length in (300, 200)
        for depth in (0, 100)
        for trial in (0, 1)
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["single", "qa"]}, "no task 'qa': possible are single, repeat, multikey"),
        ({"lengths": [400, 5]}, "5 tokens are too few for the task 'single'"),
        ({"lengths": [0]}, "length must be a whole number of at least 1, not 0"),
        ({"lengths": [512.0]}, "length must be a whole number of at least 1, not 512.0"),
        ({"depths": [101]}, "a depth is a whole number of percent from 0 to 100, not 101"),
        ({"depths": [-1]}, "not -1"),
        ({"depths": [0.5]}, "not 0.5"),
        ({"trials": 0}, "number of trials must be a whole number of at least 1, not 0"),
    ],
)
def test_a_grid_with_anything_impossible_is_refused_before_the_first_prompt(change, message):
    grid = {"tasks": ["single"], "lengths": [400], "depths": [50], "trials": 1, **change}
    with pytest.raises(InputError, match=message):
        needles("gpt").cells(text("gpt"), **grid)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"answer_tokens": 0}, "number of answer tokens must be .* at least 1, not 0"),
        ({"answer_tokens": True}, "not True"),
    ],
)
def test_numbers_that_are_none(options, message):
    with pytest.raises(InputError, match=message):
        Needles(tokenizer("gpt"), **options)


def test_room_for_the_answer_as_asked_for():
    maker = Needles(tokenizer("bytes"), answer_tokens=40)
    assert maker.answer_tokens("single") == 40
    assert maker.smallest("single") == needles("bytes").smallest("single") + 40 - (9 + 8)
    assert maker.prompt(text("bytes"), "single", 500, 0, 0).answer_tokens == 40
    with pytest.raises(InputError, match=r"answer to 'multivalue' takes 45 tokens, .* room for 40"):
        maker.check_lengths(["multivalue"], [1000])


def test_a_chat_needs_a_template(byte_tokenizer):
    with pytest.raises(InputError, match="no chat template"):
        Needles(byte_tokenizer, chat=True)


def test_long_prompts_of_a_short_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(SENTENCES))
    said: list[str] = []
    maker = needles("gpt")
    haystack = read_haystack((str(path),), maker.encoding, longest=131_072, notify=said.append)
    assert len(said) == 1
    for task in TASKS:
        prompt = maker.prompt(haystack, task, 131_072, 50, 0)
        assert len(prompt.haystack) + len(prompt.question) + prompt.answer_tokens == 131_072
        start, _ = prompt.needles[prompt.at_depth]
        assert abs(start - 65_536) < 200
