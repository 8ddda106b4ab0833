"""Where scales and statistics come from: model, adapters, text, length, versions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .fingerprint import Fingerprint


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
        for mine, theirs in zip(self.fingerprints, other.fingerprints, strict=False):
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

    def check(self, model: Fingerprint) -> None:
        """Makes sure that the numbers were measured on `model`.

        Raises:
            FingerprintError: They were not; the message shows both and what differs.
        """
        if not any(not own.differences(model) for own in self.fingerprints):
            fits = Fingerprint() if not self.fingerprints else self.fingerprints[0]
            fits.check(model)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Provenance:
        """Inverse of `to_dict`."""
        tuples = ("adapters", "corpora", "command", "notes")
        return cls(
            **{
                **values,
                **{name: tuple(values[name]) for name in tuples},
                "fingerprints": tuple(map(Fingerprint.from_dict, values["fingerprints"])),
            }
        )
