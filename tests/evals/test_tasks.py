from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.scoring import score
from evals.tasks import TASKS
from evals.words import ADJECTIVES, NOUNS, Vocabulary

VOCABULARY = Vocabulary(
    adjectives=("amber", "quiet", "round"),
    nouns=("bridge", "lantern"),
    numbers=("1111111", "2222222", "3333333", "4444444", "5555555"),
    variables=tuple(letter * 5 for letter in "BCDFGHJKL"),
)


def quiz(task, seed=0):
    return TASKS[task](VOCABULARY, np.random.default_rng(seed))


def test_there_are_five_tasks():
    assert list(TASKS) == ["single", "repeat", "multikey", "multivalue", "tracking"]


@pytest.mark.parametrize("task", ["single", "repeat"])
def test_one_needle(task):
    it = quiz(task)
    [value], [needle] = it.expected, it.asked
    found = re.fullmatch(r"One of the secret numbers of the (\w+ \w+) is: (\d{7})\.", needle)
    assert found is not None
    assert found.groups() == (found[1], value)
    assert it.others == ()
    assert it.opening == f"The secret number of the {found[1]} is:"
    assert it.question == f"What is the secret number of the {found[1]}?"
    assert it.answer == f"{value}."


@given(st.integers(0, 2**32))
def test_many_keys_and_one_asked_for(seed):
    it = quiz("multikey", seed)
    parts = [re.search(r"s of the (.*) is: (\d+)\.$", text) for text in (*it.asked, *it.others)]
    keys, values = zip(*(part.groups() for part in parts), strict=True)
    assert (len(it.asked), len(it.others)) == (1, 3)
    assert len(set(keys)) == len(set(values)) == 4
    assert it.expected == (values[0],)
    assert it.opening == f"The secret number of the {keys[0]} is:"


@given(st.integers(0, 2**32))
def test_many_values_of_one_key(seed):
    it = quiz("multivalue", seed)
    [key] = {re.search(r"numbers of the (.*) is: ", needle)[1] for needle in it.asked}
    assert it.opening == f"The 4 secret numbers of the {key} are:"
    assert it.asked == tuple(
        f"One of the secret numbers of the {key} is: {value}." for value in it.expected
    )
    assert len(set(it.expected)) == 4
    assert it.others == ()


@given(st.integers(0, 2**32))
def test_two_chains_of_assignments_of_which_one_is_asked_for(seed):
    it = quiz("tracking", seed)
    held: dict[str, str] = {}
    for needle in (*it.asked, *it.others):
        name, source = re.fullmatch(r"VAR (\w{5}) = (?:VAR )?(\w+)\.", needle).groups()
        held[name] = held.get(source, source)
    value = re.fullmatch(r"The 4 variables that have the value (\d{7}) are:", it.opening)[1]
    assert len(held) == 8
    assert sorted(it.expected) == sorted(name for name in held if held[name] == value)
    assert len(it.expected) == 4
    assert len(set(held.values())) == 2


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_as_it_may_be_given_scores_and_the_question_alone_does_not(task):
    it = quiz(task)
    assert score(it.answer, it.expected) == 1.0
    assert score(f"{it.instruction} {it.question} {it.opening}", it.expected) == 0.0
    assert it.opening.endswith(":")


@pytest.mark.parametrize("task", TASKS)
def test_the_generator_alone_decides(task):
    assert quiz(task, 5) == quiz(task, 5)
    assert len({quiz(task, seed) for seed in range(20)}) > 10


@pytest.mark.parametrize("words", [ADJECTIVES, NOUNS])
def test_the_word_lists(words):
    assert list(words) == sorted(set(words))
    assert len(words) > 150
    assert all(re.fullmatch("[a-z]{3,8}", word) for word in words)
    assert not {"secret", "number", "numbers", "value"} & set(words)


def test_no_word_is_both_adjective_and_noun():
    assert not set(ADJECTIVES) & set(NOUNS)
