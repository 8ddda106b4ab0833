"""What `kvquant check` finds out about a model, and what of it is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kvquant.geometry import CacheGeometry
from kvquant.provenance import title


@dataclass(frozen=True)
class Way:
    """How decoding with one cache compares with decoding without any.

    Attributes:
        first_difference: First new token that differs, from 0; None if none does.
        logit_difference: Largest difference of a logit; None where logits are not looked at.
        error: What went wrong instead.
    """

    first_difference: int | None = None
    logit_difference: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Case:
    """One way of feeding text, through Transformers' cache and through ours.

    Attributes:
        name: For people.
        transformers: How Transformers' DynamicCache did.
        quantized: How the quantized cache with the scheme ``none`` did.
        apart: Largest difference of a logit between the two; None where none were looked at.
        tolerance: Difference that rounding explains.
    """

    name: str
    transformers: Way
    quantized: Way
    apart: float | None = None
    tolerance: float = 0.0

    @property
    def finding(self) -> str:
        """What the quantized cache does wrong, or nothing."""
        ours, theirs = self.quantized, self.transformers
        if ours.error or theirs.error:
            return "" if theirs.error else f"{self.name}: {ours.error}"
        if ours.logit_difference is None:
            if ours.first_difference is None:
                return ""
            return f"{self.name}: new token {ours.first_difference} is not the one of DynamicCache"
        if self._is_rounding(ours.logit_difference) or self._is_rounding(self.apart):
            return ""
        return f"{self.name}: {self._far(ours.logit_difference)}"

    @property
    def note(self) -> str:
        """What is wrong but not the quantized cache's doing, or nothing."""
        theirs = self.transformers
        if theirs.error:
            return f"{self.name}: the model fails with DynamicCache too: {theirs.error}"
        if theirs.logit_difference is None or self._is_rounding(theirs.logit_difference):
            return ""
        return f"{self.name}: with DynamicCache, {self._far(theirs.logit_difference)}"

    def _is_rounding(self, difference: float | None) -> bool:
        return difference is not None and difference <= self.tolerance

    def _far(self, difference: float) -> str:
        return (
            f"logits are {difference:.2g} away from those without a cache; rounding explains "
            f"{self.tolerance:.2g}"
        )


@dataclass(frozen=True)
class Stored:
    """What one scheme makes of a text.

    Attributes:
        scheme: Its name.
        description: What it does.
        live_nbytes: Bytes that the cache says the tokens need.
        expected_nbytes: Bytes by the formula.
        bits_per_value: Bits per key or value that can be seen, all else included.
        ratio: Bytes of the same tokens in bf16, to these.
        key_difference: Norm of what quantizing did to the keys by their norm, in the worst layer.
        value_difference: Likewise.
        rounds: Whether the scheme quantizes anything.
        has_codes: Whether any token is old enough to be quantized, if there ever can be one.
        remarks: What is never quantized, and why.
        error: What went wrong instead.
    """

    scheme: str
    description: str
    live_nbytes: int = 0
    expected_nbytes: int = 0
    bits_per_value: float = 0.0
    ratio: float = 0.0
    key_difference: float = 0.0
    value_difference: float = 0.0
    rounds: bool = True
    has_codes: bool = True
    remarks: tuple[str, ...] = ()
    error: str = ""

    @property
    def finding(self) -> str:
        """What is wrong, or nothing."""
        if self.error:
            return f"{self.scheme}: {self.error}"
        if self.live_nbytes != self.expected_nbytes:
            return (
                f"{self.scheme}: stores {self.live_nbytes:,} bytes, the formula says "
                f"{self.expected_nbytes:,}"
            )
        for slot, difference in (("keys", self.key_difference), ("values", self.value_difference)):
            # Zeros in place of all numbers are off by 1.
            fine = difference < 1.0 if self.rounds else difference == 0.0
            if not fine:
                return f"{self.scheme}: {slot} come back changed by {difference:.2g} of their norm"
        return ""

    @property
    def note(self) -> str:
        """What is not quantized, ever or because the text is too short, or nothing."""
        lines = list(self.remarks)
        if not self.has_codes:
            lines.append("no token is old enough to be quantized; raise --prompt-tokens")
        return f"{self.scheme}: {'. '.join(lines)}" if lines and not self.error else ""


@dataclass(frozen=True)
class CheckReport:
    """What `check` found.

    Attributes:
        model: Its name, or that of its base.
        adapters: Names of the adapters that were active.
        geometry: Its cache.
        dtype: Of the model.
        prompt_tokens: Length of the text before the new tokens.
        tokens: New tokens.
        cases: Ways of feeding text.
        schemes: What each scheme stores of prompt and new tokens.
    """

    model: str
    adapters: tuple[str, ...]
    geometry: CacheGeometry
    dtype: str
    prompt_tokens: int
    tokens: int
    cases: tuple[Case, ...]
    schemes: tuple[Stored, ...]

    @property
    def title(self) -> str:
        """Model and adapters, for people."""
        return title(self.model, self.adapters)

    @property
    def findings(self) -> list[str]:
        """What is wrong, a line each."""
        return _joined(part.finding for part in self._parts)

    @property
    def notes(self) -> list[str]:
        """What else a reader has to know, a line each."""
        count = self.prompt_tokens + self.tokens
        limit = self.geometry.max_positions
        windows = {layer.window for layer in self.geometry.layers if layer.window is not None}
        passed = [
            f"the window of {window:,} tokens is not passed; raise --prompt-tokens"
            for window in sorted(windows)
            if window > count and (limit is None or window < limit)
        ]
        latent = [_LATENT] if self.geometry.latent_layers else []
        return _joined(part.note for part in self._parts) + passed + latent

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **asdict(self),
            "geometry": self.geometry.to_dict(),
            "findings": self.findings,
            "notes": self.notes,
        }

    @property
    def _parts(self) -> tuple[Case | Stored, ...]:
        return (*self.cases, *self.schemes)


_LATENT = (
    "of layers with a latent (MLA) keys are the latent and values its rotary part, which presets "
    "keep exact: rotary_format of QuantizedCache.from_model quantizes it. bits/value counts both"
)


def _joined(lines: Iterable[str]) -> list[str]:
    """Lines ``name: words`` that are not empty; those with the same words as one."""
    names: dict[str, list[str]] = {}
    for line in filter(None, lines):
        name, _, words = line.partition(": ")
        names.setdefault(words, []).append(name)
    return [f"{', '.join(found)}: {words}" for words, found in names.items()]
