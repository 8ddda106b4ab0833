"""What became of the requests of an lm-eval run: what was read from codes, what was cut off."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .arms import EvalArm
from .shares import ReadCount
from .windows import Span


class Reads(ReadCount):
    """Counts over the caches of many requests."""

    def of(self, cache: Any, new: int) -> None:
        """Counts what the next call reads, which is of `new` tokens."""
        self._cache = cache
        past = cache.get_seq_length()
        self.before(Span(past, past + new))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was read."""
        return not self._read


@dataclass
class Account:
    """What became of the requests of one kind.

    Attributes:
        kind: As lm-eval calls them: ``loglikelihood`` …
        reads: Keys that were read to score or to generate; prefills read none.
        limit: Tokens that the model sees at once.
        requests: How many there were.
        cut: Tokens that each request lost which was longer than that.
        longest: Tokens of the longest one, as read.
        no_numbers: Scores that are NaN.
    """

    kind: str
    reads: Reads
    limit: int
    requests: int = 0
    cut: list[int] = field(default_factory=list)
    longest: int = 0
    no_numbers: int = 0

    def note(self, tokens: int) -> int:
        """Notes a request of so many tokens; says how many of them have to go."""
        lost = max(tokens - self.limit, 0)
        if lost:
            self.cut.append(lost)
        self.longest = max(self.longest, tokens - lost)
        return lost

    def answered(self, score: float) -> None:
        """Notes a score: the harness takes the first of several NaN for the best answer."""
        self.no_numbers += math.isnan(score)

    @property
    def share(self) -> float | None:
        """Of the keys read, those that were codes; None if nothing was read."""
        return None if self.reads.is_empty else self.reads.share

    def remarks(self, arm: EvalArm, kernel: str) -> Iterator[str]:
        """What is to be known of it, a line each."""
        if self.share is not None:
            read = f"{self.share:.1%} of the keys read were codes"
            yield f"{self.kind}: {read} ({arm.name}; {kernel})"
        if self.share == 0 and arm.scheme_class != "exact":
            yield (
                f"warning: {self.kind} never read a code: {arm.name} ({arm.description}) kept all "
                "tokens exact, and these are the scores of the unquantized cache; take longer "
                "contexts, or a scheme that keeps fewer tokens exact"
            )
        if self.no_numbers:
            yield (
                f"warning: {self.no_numbers:,} scores of {self.kind} are NaN, so that accuracies "
                "mean nothing: values overflow, or the model's weights are damaged"
            )
        if self.cut:
            yield (
                f"warning: {len(self.cut)} of {self.requests} requests of {self.kind} did not fit "
                f"{self.limit} tokens and lost up to {max(self.cut)} at their beginning, which "
                "the answers may have depended on"
            )
        known = arm.scales.provenance.longest_position if arm.scales is not None else 0
        if 0 < known < self.longest:
            yield (
                f"warning: the scales of {arm.name} were calibrated up to {known:,} tokens, and "
                f"{self.longest:,} were read: they may clip; calibrate with --context-length "
                f"{self.longest}"
            )

    def summary(self) -> dict[str, Any]:
        """For the results."""
        return {
            "requests": self.requests,
            "keys_read_from_codes": self.share,
            "requests_cut": len(self.cut),
            "longest": self.longest,
            "scores_without_numbers": self.no_numbers,
        }
