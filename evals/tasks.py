"""What is hidden and what is asked, as text: five tasks of the RULER family, in our own words.

    single      one number in prose
    repeat      one number in a sentence that is repeated
    multikey    four numbers under different keys, one of them asked for
    multivalue  four numbers under one key, all asked for
    tracking    two chains of assignments; all variables that hold the value of one

Families: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
2024. Each question ends in the beginning of its answer, so that a model without any training in
chat says nothing but the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .words import Vocabulary

_MANY = 4
"""Needles of a task that has several, variables of a chain."""
_NUMBERS = "Remember the secret numbers in this text."
_VARIABLES = "Keep track of the variables in this text."


@dataclass(frozen=True)
class Quiz:
    """One question.

    Attributes:
        instruction: Stands in front of everything.
        asked: Needles that the answer depends on, in the order in which they are to appear.
        others: Needles that it does not, likewise.
        question: For a chat.
        opening: Of the answer; the model goes on from there.
        expected: What the answer has to contain.
        answer: How it may well be given, to see how many tokens that takes.
    """

    instruction: str
    asked: tuple[str, ...]
    others: tuple[str, ...]
    question: str
    opening: str
    expected: tuple[str, ...]
    answer: str


def _number_of_one(vocabulary: Vocabulary, generator: np.random.Generator, keys: int) -> Quiz:
    """A number under one key, with needles under as many keys in all."""
    names = vocabulary.keys(generator, keys)
    values = vocabulary.values(generator, keys)
    needle, *others = (_needle(*it) for it in zip(names, values, strict=True))
    return Quiz(
        instruction=_NUMBERS,
        asked=(needle,),
        others=tuple(others),
        question=f"What is the secret number of the {names[0]}?",
        opening=f"The secret number of the {names[0]} is:",
        expected=(values[0],),
        answer=f"{values[0]}.",
    )


def _single(vocabulary: Vocabulary, generator: np.random.Generator) -> Quiz:
    return _number_of_one(vocabulary, generator, 1)


def _multikey(vocabulary: Vocabulary, generator: np.random.Generator) -> Quiz:
    return _number_of_one(vocabulary, generator, _MANY)


def _multivalue(vocabulary: Vocabulary, generator: np.random.Generator) -> Quiz:
    [key] = vocabulary.keys(generator, 1)
    values = vocabulary.values(generator, _MANY)
    return Quiz(
        instruction=_NUMBERS,
        asked=tuple(_needle(key, value) for value in values),
        others=(),
        question=f"What are all {_MANY} secret numbers of the {key}?",
        opening=f"The {_MANY} secret numbers of the {key} are:",
        expected=tuple(values),
        answer=_listed(values),
    )


def _tracking(vocabulary: Vocabulary, generator: np.random.Generator) -> Quiz:
    names = vocabulary.names(generator, 2 * _MANY)
    values = vocabulary.values(generator, 2)
    asked = tuple(names[:_MANY])
    return Quiz(
        instruction=_VARIABLES,
        asked=_chain(values[0], names[:_MANY]),
        others=_chain(values[1], names[_MANY:]),
        question=f"Which {_MANY} variables have the value {values[0]}?",
        opening=f"The {_MANY} variables that have the value {values[0]} are:",
        expected=asked,
        answer=_listed([f"VAR {name}" for name in asked]),
    )


TASKS: dict[str, Callable[[Vocabulary, np.random.Generator], Quiz]] = {
    "single": _single,
    "repeat": _single,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "tracking": _tracking,
}
"""How a question of each task is drawn."""


def _needle(key: str, value: str) -> str:
    return f"One of the secret numbers of the {key} is: {value}."


def _chain(value: str, names: list[str]) -> tuple[str, ...]:
    """Assigns the value to the first name and each name to the next: ``VAR A = 1234567.`` …."""
    sources = [value, *(f"VAR {name}" for name in names)]
    return tuple(f"VAR {name} = {it}." for name, it in zip(names, sources, strict=False))


def _listed(answers: Sequence[str]) -> str:
    """The longest way in which models give several answers: one a line, numbered."""
    return "".join(f"\n{number}. {answer}" for number, answer in enumerate(answers, 1))
