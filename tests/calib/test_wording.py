from __future__ import annotations

import pytest

from calib.wording import model_title, percent
from kvquant.fingerprint import Fingerprint
from kvquant.provenance import Provenance


@pytest.mark.parametrize(
    ("provenance", "expected"),
    [
        (Provenance(), "unnamed model"),
        (Provenance(model="smollm2"), "smollm2"),
        (Provenance(model="org/name", adapters=("/a/b/lora", "c/")), "name + lora + c"),
        (Provenance(model="/"), "/"),
        (
            Provenance(
                model="m",
                adapters=("a/x", "a/y"),
                fingerprints=(Fingerprint(weights="w"), Fingerprint(weights="w", adapters=("x",))),
            ),
            "m shared with x, y",
        ),
    ],
)
def test_model_title(provenance: Provenance, expected: str) -> None:
    assert model_title(provenance) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0, "0%"),
        (1e-9, "<0.001%"),
        (1e-5, "0.001%"),
        (0.000038, "0.0038%"),
        (0.01, "1%"),
        (0.0156, "1.6%"),
        (0.099, "9.9%"),
        (0.5, "50%"),
        (1, "100%"),
    ],
)
def test_percent(share: float, expected: str) -> None:
    assert percent(share) == expected
