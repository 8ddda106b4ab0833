"""How results are worded, in tables, plots and messages alike."""

from __future__ import annotations

from kvquant.provenance import Provenance, title


def model_title(provenance: Provenance) -> str:
    """Model and adapters without the directories they lie in.

    ``smollm2 + my-lora`` for adapters that are active together; ``smollm2 shared with lora-a,
    lora-b`` for scales that serve the base and each adapter apart.
    """
    if len(provenance.fingerprints) > 1:
        others = ", ".join(map(title, provenance.adapters)) or "others"
        return f"{title(provenance.model)} shared with {others}"
    return title(provenance.model, provenance.adapters)


def percent(share: float) -> str:
    """A share with two significant digits, never rounded to nothing: ``1.6%``, ``<0.001%``.

    >>> percent(0.0156), percent(0.000038), percent(3e-7), percent(0.0)
    ('1.6%', '0.0038%', '<0.001%', '0%')
    """
    if 0 < share < 1e-5:
        return "<0.001%"
    return f"{share:.0%}" if share >= 0.0995 else f"{share * 100:.2g}%"
