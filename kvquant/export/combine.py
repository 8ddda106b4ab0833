"""What several engines want in one directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvquant.errors import ExportError

from .loader_rules import sglang_parameter, sglang_refuses
from .refusals import FP8_SCALES, architecture
from .target import Contribution, ExportJob, ExportTarget
from .targets import shared, target

ALL = "all"
"""``--engine all``: those that one directory serves together."""

_SGLANG = "sglang"


def asked(engines: Iterable[str]) -> list[ExportTarget]:
    """The engines that are meant by what ``--engine`` was given.

    Raises:
        ExportError: An unknown one, or one beside ``all`` that needs an export of its own.
    """
    names = dict.fromkeys(engines)
    if ALL not in names:
        return [target(name) for name in names]
    together = shared()
    apart = [name for name in names if name != ALL and target(name) not in together]
    if apart:
        raise ExportError(
            f"--engine all is {', '.join(each.name for each in together)}, which one directory "
            f"serves; export for {' and '.join(apart)} apart"
        )
    return together


def contribute(
    targets: Iterable[ExportTarget], job: ExportJob, lenient: bool
) -> tuple[dict[str, Contribution], dict[str, str]]:
    """What each engine wants, by name, and why others cannot take part.

    Args:
        targets: The engines.
        job: What is exported.
        lenient: Leave out engines that refuse or that others would stop, as long as one is left.

    Raises:
        ExportError: An engine refuses, or all of them do.
    """
    wanted: dict[str, Contribution] = {}
    refused: dict[str, str] = {}
    for each in targets:
        try:
            wanted[each.name] = each.contribute(job)
        except ExportError as error:
            if not lenient:
                raise
            refused[each.name] = str(error)
    if lenient and (stop := _stops_sglang(wanted, job)):
        del wanted[_SGLANG]
        refused[_SGLANG] = (
            f"it stops at names that other engines need, such as {stop}: export for it into a "
            "directory of its own"
        )
    if not wanted:
        raise ExportError(f"no engine can read this: {_joined(refused)}")
    return wanted, refused


def _joined(refused: Mapping[str, str]) -> str:
    """Reasons of several engines; an advice that all give comes once, at the end."""
    common = FP8_SCALES if all(FP8_SCALES in reason for reason in refused.values()) else ""
    reasons = (
        f"{name}: {reason.replace(common, '').strip()}" if common else f"{name}: {reason}"
        for name, reason in refused.items()
    )
    return f"{'; '.join(reasons)} {common}".strip()


def _stops_sglang(wanted: Mapping[str, Contribution], job: ExportJob) -> str:
    """The name of a scale at which SGLang would stop, "" if there is none."""
    if _SGLANG not in wanted:
        return ""
    model_class, own = architecture(job.checkpoint), wanted[_SGLANG].tensors
    names = (name for one in wanted.values() for name in one.tensors if name not in own)
    return next(
        (
            name
            for name in names
            if sglang_refuses(name, sglang_parameter(name, model_class), False, model_class)
        ),
        "",
    )


def combined(contributions: Mapping[str, Contribution], notes: Iterable[str] = ()) -> Contribution:
    """One contribution of all; remarks that several make come once.

    Args:
        contributions: What each engine wants, by name.
        notes: Remarks of the scales themselves, which come first.

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
    return Contribution(tensors, config, files, tuple(launch), (*notes, *remarks))


def _conflict(engine: str, key: str, held: Any, wanted: Any) -> ExportError:
    return ExportError(
        f"{engine} wants {key} as {wanted}, another engine as {held}: export them into a directory "
        "each, or leave --per-head out"
    )
