"""What several engines want in one directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvquant.errors import ExportError

from .target import Contribution, ExportJob, ExportTarget


def contribute(
    targets: Iterable[ExportTarget], job: ExportJob, lenient: bool
) -> tuple[dict[str, Contribution], dict[str, str]]:
    """What each engine wants, by name, and why others cannot take part.

    Args:
        targets: The engines.
        job: What is exported.
        lenient: Leave out engines that refuse, as long as one is left.

    Raises:
        ExportError: An engine refuses, or all of them do.
    """
    wanted: dict[str, Contribution] = {}
    refused: dict[str, str] = {}
    for target in targets:
        try:
            wanted[target.name] = target.contribute(job)
        except ExportError as error:
            if not lenient:
                raise
            refused[target.name] = str(error)
    if not wanted:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ExportError(f"no engine can read this: {reasons}")
    return wanted, refused


def combined(contributions: Mapping[str, Contribution]) -> Contribution:
    """One contribution of all; remarks that several make come once.

    Raises:
        ExportError: Two engines want the same name for different things.
    """
    tensors: dict[str, Any] = {}
    config: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for name, one in contributions.items():
        for key, tensor in one.tensors.items():
            held = tensors.setdefault(key, tensor)
            if held.shape != tensor.shape or not held.equal(tensor):
                raise _conflict(name, key, list(held.shape), list(tensor.shape))
        for made, own in ((config, one.config), (files, one.files)):
            for key, value in own.items():
                if made.setdefault(key, value) != value:
                    raise _conflict(name, key, "other content", "its own")
    launch = dict.fromkeys(line for one in contributions.values() for line in one.launch)
    remarks = dict.fromkeys(line for one in contributions.values() for line in one.remarks)
    return Contribution(tensors, config, files, tuple(launch), tuple(remarks))


def _conflict(engine: str, key: str, held: Any, wanted: Any) -> ExportError:
    return ExportError(
        f"{engine} wants {key} as {wanted}, another engine as {held}: export them into a directory "
        "each, or leave --per-head out"
    )
