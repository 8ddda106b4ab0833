"""Log-probabilities of continuations, read from the cache in block decode.

::

    context            C o n t e x t ,            prefill, shared by its continuations
    read in blocks                    , a b l o | c k s
    scores                            a b l o c   k s .

The last token of a context is read with its continuation: what it predicts is the first token to
score, and that is to come from the cache as well. A context of one token has no prefill.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvquant.cache.cache import QuantizedCache

from .arms import BoundArm
from .harness_account import Account
from .reading import Reader

Answer = tuple[float, bool]
"""Log-probability of a continuation, and whether it is the greedy one."""
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A continuation, and what to read to score it.

    Attributes:
        context: What is prefilled: the context without its last token; may be empty.
        read: That token, and the continuation without its own last one.
        targets: The continuation.
    """

    context: Tokens
    read: Tokens
    targets: Tokens

    @classmethod
    def of(cls, context: Sequence[int], targets: Sequence[int], lost: int = 0) -> Request:
        """Of a context of 1 token or more, and a continuation that fits; `lost` is cut off.

        >>> Request.of([1, 2, 3], [4, 5])
        Request(context=(1, 2), read=(3, 4), targets=(4, 5))
        """
        tokens = (*context, *targets)[lost:]
        first = len(tokens) - len(targets) - 1
        return cls(tokens[:first], tokens[first:-1], tokens[first + 1 :])


class Scorer:
    """Scores requests of one model through one arm."""

    def __init__(
        self, reader: Reader, arm: BoundArm, *, block: int, chunk: int | None, rows: int
    ) -> None:
        """What to read with.

        Args:
            reader: Of the model.
            arm: Makes the caches.
            block: Tokens that are scored in one call.
            chunk: Tokens of a call of a prefill; None for all in one.
            rows: Continuations of one context that are read together.
        """
        self._reader = reader
        self._arm = arm
        self._block = block
        self._chunk = chunk
        self._rows = rows

    def answers(
        self, requests: Sequence[Request], account: Account, advance: Callable[[int], None]
    ) -> Iterator[tuple[int, Answer]]:
        """Answers with the number of their request, as they are found.

        Args:
            requests: What to score.
            account: Told of what is read.
            advance: Told of tokens read; `tokens_to_read` says how many there are.
        """
        groups = _grouped(requests)
        # The longest first: memory that does not suffice shows at once.
        for context in sorted(groups, key=len, reverse=True):
            yield from self._after(context, groups[context], requests, account, advance)

    def prefill(self, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None) -> None:
        """Reads tokens of which nothing is scored.

        Args:
            ids: ``[batch, tokens]``, perhaps no tokens.
            cache: An empty one.
            mask: Which of them are real, as in ``attention_mask``; padding is on the left.
        """
        size = self._chunk or max(ids.shape[1], 1)
        for start in range(0, ids.shape[1], size):
            stop = start + size
            extra = {} if mask is None or bool(mask.all()) else _padding(mask, start, stop)
            self._reader.read(ids[:, start:stop], cache, logits=1, **extra)

    def _after(
        self,
        context: Tokens,
        reads: Mapping[Tokens, list[int]],
        requests: Sequence[Request],
        account: Account,
        advance: Callable[[int], None],
    ) -> Iterator[tuple[int, Answer]]:
        """Answers to the requests of one context, by what they read."""
        filled = self._filled(context)
        advance(len(context))
        is_ours = isinstance(filled, QuantizedCache)
        # Rows are independent in our caches only: others have scales that rows share.
        size = self._rows if is_ours else 1
        ordered = sorted(reads, key=len, reverse=True)
        for start in range(0, len(ordered), size):
            rows = ordered[start : start + size]
            cache = filled
            if start + size < len(ordered):
                # Not taken back instead: tokens that left the exact part would stay codes. Of
                # Transformers' caches some cannot be copied.
                cache = copy.deepcopy(filled) if is_ours else self._filled(context)
            if len(rows) > 1:
                cache.batch_repeat_interleave(len(rows))
            members = [reads[row] for row in rows]
            targets = [[requests[number].targets for number in them] for them in members]
            found = self._score(rows, targets, cache, account)
            for them, answers in zip(members, found, strict=True):
                yield from zip(them, answers, strict=True)
            advance(sum(map(len, rows)))

    def _filled(self, context: Tokens) -> Any:
        cache = self._arm.make()
        self.prefill(torch.tensor([context], dtype=torch.long), cache)
        return cache

    def _score(
        self,
        rows: Sequence[Tokens],
        targets: Sequence[Sequence[Tokens]],
        cache: Any,
        account: Account,
    ) -> list[list[Answer]]:
        """Reads rows, the longest first, in blocks.

        Args:
            rows: What to read; shorter ones are filled up at their end, which nothing before sees.
            targets: For each row, all that it may be followed by, token by token.
            cache: What came before.
            account: Told of what is read.

        Returns:
            For each row, an answer for each of its targets.
        """
        ids = torch.tensor([row + row[-1:] * (len(rows[0]) - len(row)) for row in rows])
        tallies = [_Tally(it, self._reader.decoder.device) for it in targets]
        for start in range(0, ids.shape[1], self._block):
            piece = ids[:, start : start + self._block]
            account.reads.of(cache, piece.shape[1])
            logits = self._reader.read(piece, cache)
            for row, tally in enumerate(tallies):
                tally.add(start, logits[row])
        return [tally.answers() for tally in tallies]


class _Tally:
    """What a row's blocks have said so far about all that it may be followed by."""

    def __init__(self, targets: Sequence[Tokens], device: torch.device) -> None:
        self._targets = torch.tensor(targets, device=device)
        self._scores = torch.zeros(len(targets), dtype=torch.float64)
        self._is_greedy = torch.ones(len(targets), dtype=torch.bool)

    def add(self, start: int, logits: torch.Tensor) -> None:
        """Logits ``[tokens, vocabulary]`` of the block that begins at `start`."""
        wanted = self._targets[:, start : start + len(logits)]
        if not wanted.shape[1]:
            return  # the row has ended
        scores = logits[: wanted.shape[1]].float().log_softmax(-1)
        self._scores += scores.gather(1, wanted.T).double().sum(0).cpu()
        self._is_greedy &= (scores.argmax(-1) == wanted).all(1).cpu()

    def answers(self) -> list[Answer]:
        """One for each target."""
        return list(zip(self._scores.tolist(), self._is_greedy.tolist(), strict=True))


def tokens_to_read(requests: Sequence[Request]) -> int:
    """How many tokens `Scorer.answers` is going to read."""
    groups = _grouped(requests)
    return sum(len(context) + sum(map(len, reads)) for context, reads in groups.items())


def _grouped(requests: Sequence[Request]) -> dict[Tokens, dict[Tokens, list[int]]]:
    """Numbers of requests by context, and by what is to be read after it."""
    groups: dict[Tokens, dict[Tokens, list[int]]] = {}
    for number, it in enumerate(requests):
        groups.setdefault(it.context, {}).setdefault(it.read, []).append(number)
    return groups


def _padding(mask: torch.Tensor, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Arguments that tell a model of padding on the left."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
