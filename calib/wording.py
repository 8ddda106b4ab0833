"""How results are worded, in tables, plots and messages alike."""

from __future__ import annotations

from pathlib import PurePath

from kvquant.provenance import Provenance


def model_title(provenance: Provenance) -> str:
    """Model and adapters without the directories they lie in.

    ``smollm2 + my-lora`` for adapters that are active together; ``smollm2 shared with lora-a,
    lora-b`` for scales that serve the base and each adapter apart.
    """
    model, *adapters = (
        PurePath(name).name or name for name in (provenance.model, *provenance.adapters)
    )
    if len(provenance.fingerprints) > 1:
        return f"{model or 'unnamed model'} shared with {', '.join(adapters) or 'others'}"
    return " + ".join(filter(None, (model, *adapters))) or "unnamed model"


def percent(share: float) -> str:
    """A share with two significant digits, never rounded to nothing: ``1.6%``, ``<0.001%``.

    >>> percent(0.0156), percent(0.000038), percent(3e-7), percent(0.0)
    ('1.6%', '0.0038%', '<0.001%', '0%')
    """
    if 0 < share < 1e-5:
        return "<0.001%"
    return f"{share:.0%}" if share >= 0.0995 else f"{share * 100:.2g}%"
