"""Retrieval prompts that fit: text with needles in it, a question, and room for the answer.

A prompt is token ids in two parts. The first is read in one call, the second after it, so that
whatever is asked for is read from the cache::

    ├──────────────── haystack ────────────────┤├─ question ─┤├─ answer ─┤
    BOS, instruction, text, NEEDLE, text … text.  The … is:    to be made
                            depth %
    ├──────────────────────── length, exactly ───────────────────────────┤

Needles and question are always whole; it is the text that is cut. With a chat template its
beginning is part of the haystack; its end, and the beginning of the answer, are of the question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvquant.errors import InputError

from .encoding import Encoding
from .haystack import Haystack, Ids, noise
from .tasks import TASKS, Quiz
from .words import Vocabulary

_SLACK = 8
"""Tokens that an answer may take beyond its shortest form."""
_SAMPLES = 32
"""Questions looked at for what a task takes: words may cost a token more beside others."""
_DRAWS = 100
"""Times that a question is drawn until it takes no more than those; nearly always it is once."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt.

    Attributes:
        task: One of `TASKS`.
        length: Tokens of haystack, question and answer together.
        depth: Where the needle is, 0 (beginning) to 100 (just before the question).
        trial: Number among those of the same task, length and depth.
        haystack: Token ids ``[tokens]``, int64; a BOS token and a chat template's beginning
            included.
        question: Token ids ``[tokens]``, int64; its end is where the answer begins.
        answer_tokens: Tokens that the answer has room for.
        expected: What the answer has to contain.
        needles: Where each needle begins and ends in `haystack`, in order.
        at_depth: Which of them is at `depth`: one that is asked for.
    """

    task: str
    length: int
    depth: int
    trial: int
    haystack: Ids
    question: Ids
    answer_tokens: int
    expected: tuple[str, ...]
    needles: tuple[tuple[int, int], ...]
    at_depth: int


@dataclass(frozen=True)
class _Parts:
    """Token ids of a question's pieces, and how many tokens its answer takes."""

    front: list[int]
    asked: list[list[int]]
    others: list[list[int]]
    question: list[int]
    answer: int

    @property
    def tokens(self) -> int:
        """Of everything but the text and the answer."""
        needles = [*self.asked, *self.others]
        return len(self.front) + sum(map(len, needles)) + len(self.question)


class Needles:
    """Makes prompts for one tokenizer.

    A prompt depends on the seed, its task, length, depth and trial, and on no other prompt. All
    prompts of a task and length have equally long parts, unless the tokenizer makes more or fewer
    tokens of a word depending on its neighbors.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool = False,
        answer_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """Looks how the tokenizer writes what is needed; no model is.

        Args:
            tokenizer: The model's.
            chat: Prompts go through its chat template.
            answer_tokens: Room for an answer; by default what the task's answer takes and some
                more.
            seed: Of words, numbers, and the places in the text.

        Raises:
            InputError: No chat template; a tokenizer that cannot write the needles; a bad number.
        """
        _check_whole("seed", seed, 0)
        if answer_tokens is not None:
            _check_whole("number of answer tokens", answer_tokens, 1)
        self.encoding = Encoding(tokenizer)
        self._frame = self.encoding.frame(chat)
        self._vocabulary = Vocabulary.of(self.encoding)
        self._noise = noise(self.encoding)
        self._chat, self._room, self._seed = chat, answer_tokens, seed
        self._needs: dict[str, tuple[int, int]] = {}

    def answer_tokens(self, task: str) -> int:
        """Room for an answer.

        Raises:
            InputError: As asked for it is less than the answer takes; or there is no such task.
        """
        answer = self._need(task)[1]
        if self._room is not None and self._room < answer:
            raise InputError(
                f"an answer to {task!r} takes {answer} tokens, and there is room for {self._room}: "
                f"give --answer-tokens {answer} or more"
            )
        return self._room or answer + _SLACK

    def smallest(self, task: str) -> int:
        """The smallest length: needles, question and answer without any text."""
        return self._need(task)[0] + self.answer_tokens(task)

    def check_lengths(self, tasks: Sequence[str], lengths: Sequence[int]) -> None:
        """Looks before anything long begins.

        Raises:
            InputError: A length in which a task has no room, or a task that there is not.
        """
        for task in tasks:
            smallest = self.smallest(task)
            for length in lengths:
                _check_whole("length", length, 1)
                if length < smallest:
                    raise _too_short(task, length, smallest)

    def cells(
        self,
        text: Haystack,
        tasks: Sequence[str],
        lengths: Sequence[int],
        depths: Sequence[int],
        trials: int,
    ) -> Iterator[Prompt]:
        """Prompts of a grid, one by one: by task, then length, depth and trial.

        Args:
            text: What needles are hidden in; the task ``repeat`` has its own.
            tasks: Of `TASKS`.
            lengths: Tokens of haystack, question and answer together.
            depths: Percent.
            trials: Prompts for each of all these.

        Raises:
            InputError: Anything impossible, before the first prompt is made.
        """
        self.check_lengths(tasks, lengths)
        for depth in depths:
            _check_depth(depth)
        _check_whole("number of trials", trials, 1)
        return (
            self.prompt(text, task, length, depth, trial)
            for task in tasks
            for length in lengths
            for depth in depths
            for trial in range(trials)
        )

    def prompt(self, text: Haystack, task: str, length: int, depth: int, trial: int) -> Prompt:
        """One prompt.

        Raises:
            InputError: As `cells`.
        """
        self.check_lengths([task], [length])
        _check_depth(depth)
        generator = np.random.default_rng(
            [self._seed, int.from_bytes(task.encode(), "little"), length, depth, trial]
        )
        quiz, parts = self._draw(task, generator)
        room = self.answer_tokens(task)
        source = self._noise if task == "repeat" else text
        ids, places = source.draw(generator, length - parts.tokens - room)
        needles, shares, at_depth = _spread(parts, depth / 100, generator)
        haystack, spans = _insert(parts.front, ids, needles, _nearest(places, shares))
        return Prompt(
            task=task,
            length=length,
            depth=depth,
            trial=trial,
            haystack=haystack,
            question=np.array(parts.question, dtype=np.int64),
            answer_tokens=room,
            expected=quiz.expected,
            needles=spans,
            at_depth=at_depth,
        )

    def _draw(self, task: str, generator: np.random.Generator) -> tuple[Quiz, _Parts]:
        """A question that fits wherever the task does."""
        for _ in range(_DRAWS):
            quiz = TASKS[task](self._vocabulary, generator)
            parts = self._parts(quiz)
            if parts.tokens <= self._need(task)[0]:
                return quiz, parts
        raise InputError(f"the tokenizer makes no two needles of {task!r} equally long")

    def _need(self, task: str) -> tuple[int, int]:
        """Tokens that a task takes without text and answer, and those of its answer."""
        if task not in TASKS:
            raise InputError(f"there is no task {task!r}: possible are {', '.join(TASKS)}")
        if task not in self._needs:
            generators = map(np.random.default_rng, range(_SAMPLES))
            samples = [self._parts(TASKS[task](self._vocabulary, it)) for it in generators]
            self._needs[task] = max(it.tokens for it in samples), max(it.answer for it in samples)
        return self._needs[task]

    def _parts(self, quiz: Quiz) -> _Parts:
        encoding, frame = self.encoding, self._frame
        needles = encoding.sentences([*quiz.asked, *quiz.others])
        count = len(quiz.asked)
        if self._chat:
            question = encoding.text(f"\n{quiz.question}")
            question += [*frame.after, *encoding.text(quiz.opening)]
        else:
            question = encoding.text(f"\n{quiz.opening}")
        return _Parts(
            front=[*frame.before, *encoding.text(f"{quiz.instruction}\n")],
            asked=needles[:count],
            others=needles[count:],
            question=question,
            answer=len(encoding.sentences([quiz.answer])[0]),
        )


def _spread(
    parts: _Parts, depth: float, generator: np.random.Generator
) -> tuple[list[list[int]], list[float], int]:
    """Puts needles in order: one that is asked for at `depth`, all others spread over the text.

    Spread evenly, each at random within its part of the text. Both kinds keep their order.

    Returns:
        Needles in the order in which they appear; the share of the text before each; and which of
        them is the one at `depth`.
    """
    rest = len(parts.asked) + len(parts.others) - 1
    shares = [(part + generator.random()) / rest for part in range(rest)]
    at_depth = sum(share < depth for share in shares)
    is_asked = generator.permutation([True] * (len(parts.asked) - 1) + [False] * len(parts.others))
    kinds = [bool(it) for it in is_asked]
    kinds.insert(at_depth, True)
    asked, others = iter(parts.asked), iter(parts.others)
    needles = [next(asked) if kind else next(others) for kind in kinds]
    return needles, [*shares[:at_depth], depth, *shares[at_depth:]], at_depth


def _nearest(places: Ids, shares: Sequence[float]) -> list[int]:
    """For each share of the text, the place nearest to it where a sentence ends."""
    return [int(places[np.abs(places - share * places[-1]).argmin()]) for share in shares]


def _insert(
    front: list[int], text: Ids, needles: list[list[int]], places: list[int]
) -> tuple[Ids, tuple[tuple[int, int], ...]]:
    """`front` and `text` with needles at the places (ascending) of the text, and their spans."""
    pieces: list[Any] = [front]
    spans: list[tuple[int, int]] = []
    done, tokens = 0, len(front)
    for needle, place in zip(needles, places, strict=True):
        tokens += place - done
        spans.append((tokens, tokens + len(needle)))
        pieces += [text[done:place], needle]
        done, tokens = place, tokens + len(needle)
    pieces.append(text[done:])
    return np.concatenate([np.asarray(it, dtype=np.int64) for it in pieces]), tuple(spans)


def _too_short(task: str, length: int, smallest: int) -> InputError:
    return InputError(
        f"{length} tokens are too few for the task {task!r}: needles, question and answer alone "
        f"take {smallest}; give a length of {smallest} or more"
    )


def _check_depth(depth: int) -> None:
    if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= 100:
        raise InputError(f"a depth is a whole number of percent from 0 to 100, not {depth!r}")


def _check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"the {name} must be a whole number of at least {least}, not {value!r}")
