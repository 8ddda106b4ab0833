"""Where scales and statistics come from: model, adapters, text, length, versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any

from .errors import FingerprintError
from .fingerprint import Fingerprint, differing


@dataclass(frozen=True)
class Provenance:
    """What produced a set of statistics; travels with the scales solved from them.

    Attributes:
        model: Model as the user named it.
        adapters: Adapter directories as the user named them.
        fingerprints: Models and adapter sets that the numbers fit; several where one set of scales
            is shared.
        corpora: One entry per corpus: source, rows read, tokens used, SHA-256 of its token ids.
        tokens: Tokens recorded.
        longest_position: Largest number of positions that any recorded token had seen, itself
            included: a scale is only known to hold up to there.
        context_length: Tokens per calibration block.
        versions: Library versions.
        command: Command lines that took part.
        notes: What a reader has to know, such as a forced fingerprint.
    """

    model: str = ""
    adapters: tuple[str, ...] = ()
    fingerprints: tuple[Fingerprint, ...] = ()
    corpora: tuple[dict[str, Any], ...] = ()
    tokens: int = 0
    longest_position: int = 0
    context_length: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def merge(self, other: Provenance) -> Provenance:
        """Provenance of merged statistics.

        Raises:
            FingerprintError: The two belong to different models or adapter sets.
        """
        if len(self.fingerprints) != len(other.fingerprints):
            raise FingerprintError(
                f"the first statistics belong to {self.origin}, the second to {other.origin}"
            )
        for mine, theirs in zip(self.fingerprints, other.fingerprints, strict=True):
            mine.check(theirs, "the first statistics", "the second")
        return Provenance(
            model=self.model or other.model,
            adapters=self.adapters or other.adapters,
            fingerprints=self.fingerprints,
            corpora=self.corpora + other.corpora,
            tokens=self.tokens + other.tokens,
            longest_position=max(self.longest_position, other.longest_position),
            context_length=max(self.context_length, other.context_length),
            versions={**other.versions, **self.versions},
            command=tuple(dict.fromkeys(self.command + other.command)),
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
        )

    def union(self, other: Provenance) -> Provenance:
        """Provenance of scales that are shared: what holds for both."""
        corpora = [corpus for corpus in other.corpora if corpus not in self.corpora]
        return replace(
            self,
            adapters=tuple(dict.fromkeys(self.adapters + other.adapters)),
            fingerprints=tuple(dict.fromkeys(self.fingerprints + other.fingerprints)),
            corpora=(*self.corpora, *corpora),
            tokens=min(self.tokens, other.tokens),
            longest_position=min(self.longest_position, other.longest_position),
            context_length=min(self.context_length, other.context_length),
            command=tuple(dict.fromkeys(self.command + other.command)),
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
        )

    @property
    def origin(self) -> str:
        """All models that the numbers fit, for messages."""
        return " or ".join(map(str, self.fingerprints)) or str(Fingerprint())

    def check(self, model: Fingerprint) -> None:
        """Makes sure that the numbers were measured on `model`.

        Raises:
            FingerprintError: They were not; the message shows both and what differs.
        """
        fits = self.fingerprints or (Fingerprint(),)
        nearest = min((own.differences(model) for own in fits), key=len)
        if nearest:
            raise FingerprintError(
                f"the scales belong to {self.origin}, the model is {model}: "
                f"{differing(nearest)}; calibrate this model"
            )

    def knows_tokenizer(self, model: Fingerprint) -> bool:
        """Whether the text was cut into tokens as `model` cuts it, or that is not known."""
        known = {own.tokenizer for own in self.fingerprints} - {""}
        return not known or not model.tokenizer or model.tokenizer in known

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Provenance:
        """Inverse of `to_dict`."""
        tuples = ("adapters", "command", "notes")
        return cls(
            **{
                **values,
                **{name: tuple(values[name]) for name in tuples},
                "corpora": tuple(map(dict, values["corpora"])),
                "fingerprints": tuple(map(Fingerprint.from_dict, values["fingerprints"])),
            }
        )


def title(model: str, adapters: Sequence[str] = ()) -> str:
    """Model and adapters that are active together, without the directories they lie in.

    >>> title("models/smollm2", ["out/my-lora"])
    'smollm2 + my-lora'
    """
    names = (PurePath(name).name or name for name in (model, *adapters))
    return " + ".join(filter(None, names)) or "unnamed model"
