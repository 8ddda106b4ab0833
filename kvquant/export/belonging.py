"""Whether scales are those of the model, and of the adapters, that they are exported for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant.errors import FingerprintError, ModelError

from .verify_report import some

if TYPE_CHECKING:
    from kvquant.fingerprint import Fingerprint
    from kvquant.models.source import ModelSource
    from kvquant.scales import KVScales

    from .export import ExportRequest


def checked(
    request: ExportRequest, scales: KVScales, base: ModelSource, notify: Callable[[str], None]
) -> KVScales:
    """The scales, if they are those of a model on disk; with a note if they are forced on it.

    The model is loaded only if there is no other way to tell, and not at all if it does not matter.

    Args:
        request: What was asked for.
        scales: The scales.
        base: The base on this machine, and the adapters.
        notify: Told what takes long.

    Raises:
        FingerprintError: They belong to another model or adapter set.
        ModelError: The model cannot be loaded, and there is no other way to tell.
    """
    from kvquant.fingerprint import checkpoint_fingerprint, fingerprint

    if base.adapters and not (request.merge_adapter or request.sidecar):
        return _beside(request, scales, base, notify)
    found = None if base.adapters else checkpoint_fingerprint(Path(base.model))
    if found is None and request.force:
        return _forced(scales, f"whether the scales belong to {base} was not looked at", notify)
    return belonging(request, scales, found or fingerprint(_loaded(base, notify)), notify)


def belonging(
    request: ExportRequest,
    scales: KVScales,
    served: Fingerprint,
    notify: Callable[[str], None],
) -> KVScales:
    """The scales, if they are those of the model that will be served, or forced on it.

    Raises:
        FingerprintError: They belong to another model or adapter set.
    """
    try:
        scales.provenance.check(served)
    except FingerprintError as error:
        if not request.force:
            raise
        return _forced(scales, str(error), notify)
    return scales


def forced_notes(scales: KVScales | None) -> list[str]:
    """What a reader has to know about scales that were forced on a model."""
    notes = () if scales is None else scales.provenance.notes
    return [note for note in notes if note.startswith("forced: ")]


def _forced(scales: KVScales, why: str, notify: Callable[[str], None]) -> KVScales:
    """The same scales, with a note that goes wherever they go."""
    notify(f"forced: {why}")
    notes = (*scales.provenance.notes, f"forced: {why}")
    return replace(scales, provenance=replace(scales.provenance, notes=notes))


def _loaded(source: ModelSource, notify: Callable[[str], None]) -> Any:
    from kvquant.models.loading import load

    notify(f"loading {source} to see that the scales belong to it")
    try:
        return load(source, device="cpu", notify=notify).model
    except ModelError as error:
        raise ModelError(
            f"{error}; without loading it nobody can tell whether the scales belong to it: "
            "--force takes them unseen"
        ) from error


# --- a base that is served with adapters, one per request -----------------------------------------


def _beside(
    request: ExportRequest, scales: KVScales, base: ModelSource, notify: Callable[[str], None]
) -> KVScales:
    """The scales, if they are known to be safe for the base and for each adapter."""
    try:
        _check_number(scales, base)
        if request.force:
            return _forced(scales, "which adapters the scales are of was not looked at", notify)
        _check_each(scales, _loaded(base, notify), base)
    except FingerprintError as error:
        if request.force:
            return _forced(scales, str(error), notify)
        raise FingerprintError(
            f"{error}. Without --merge-adapter the base is served, with scales that are safe for "
            "it and the adapters: kvquant calibrate --shared"
        ) from error
    return scales


def _check_number(scales: KVScales, base: ModelSource) -> None:
    """What can be told without loading anything."""
    from kvquant.fingerprint import checkpoint_fingerprint

    served = checkpoint_fingerprint(Path(base.model))
    if served is None:
        return
    scales.provenance.check(served)
    known = scales.provenance.fingerprints
    covered = sum(len(each.adapters) > len(served.adapters) for each in known)
    if covered < len(base.adapters):
        raise FingerprintError(
            f"the scales belong to {scales.provenance.origin}, which covers {covered} of "
            f"{some(len(base.adapters), 'adapter')}"
        )


def _check_each(scales: KVScales, model: Any, base: ModelSource) -> None:
    """Makes sure that the scales cover the base, and each adapter alone on it."""
    from kvquant.fingerprint import fingerprint
    from kvquant.models.adapters import activate, adapter_names

    with activate(model, []):
        scales.provenance.check(fingerprint(model))
    for name, adapter in zip(adapter_names(model), base.adapters, strict=True):
        with activate(model, [name]):
            served = fingerprint(model)
        if all(served.differences(each) for each in scales.provenance.fingerprints):
            raise FingerprintError(
                f"the scales belong to {scales.provenance.origin}, which does not cover the "
                f"adapter {adapter}: {served}"
            )
