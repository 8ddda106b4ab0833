"""The whole of an export: model, scales, engines, directory, and a look at the result.

::

    model ── merge adapters ── fold ──┐
    scales ── belong to it? ──────────┴→ what each engine wants → directory → verify
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant import __version__
from kvquant.errors import ExportError
from kvquant.geometry import CacheGeometry
from kvquant.models.source import ModelSource
from kvquant.storage import load_scales

from .belonging import belonging, checked, forced_notes
from .checkpoint import Checkpoint, attention_modules, read_checkpoint
from .combine import ALL, asked, combined, contribute
from .directory import Written, check_output, write_export
from .target import Contribution, ExportJob, ExportTarget
from .verify import verifiable, verify
from .verify_report import Finding

if TYPE_CHECKING:
    from kvquant.fingerprint import Fingerprint
    from kvquant.scales import KVScales

    from .folded import Folded


@dataclass(frozen=True)
class ExportRequest:
    """What was asked for.

    Attributes:
        source: The model, resolved, with its adapters.
        scales: File of calibrated scales; None where folding for dynamic scales needs none.
        engines: Names of engines, or ``all``.
        output: Directory to write; None where nothing is written.
        per_head: One scale per KV head where the engine takes it.
        tensor_parallel: GPUs that share a layer.
        merge_adapter: Merge the adapters into the weights.
        sidecar: Write scales beside the adapter instead.
        fold: Quantizer to fold for, or None.
        data: Text to fold by; see `kvquant.text.rows`.
        copy: Copy weights instead of linking.
        force: Take scales of another model.
    """

    source: ModelSource
    scales: str | None = None
    engines: tuple[str, ...] = ()
    output: Path | None = None
    per_head: bool = False
    tensor_parallel: int = 1
    merge_adapter: bool = False
    sidecar: bool = False
    fold: str | None = None
    data: str | None = None
    copy: bool = False
    force: bool = False


@dataclass(frozen=True)
class EngineOutcome:
    """What an export is to one engine.

    Attributes:
        name: As ``--engine`` takes it.
        launch: Command lines that serve it.
        layers: Layers that the engine would find scales for; None where nothing can be verified.
        findings: What `verify` says.
        refusal: Why it takes no part, or "".
    """

    name: str
    launch: tuple[str, ...] = ()
    layers: int | None = None
    findings: tuple[Finding, ...] = ()
    refusal: str = ""

    @property
    def ok(self) -> bool:
        """Whether it would be served as meant."""
        return not self.refusal and not any(finding.serious for finding in self.findings)


@dataclass(frozen=True)
class ExportResult:
    """What became of an export.

    Attributes:
        engines: One entry for each engine asked for.
        written: What was written, or None.
        tensors: Names of the scale tensors.
        remarks: What was reduced, left out or is ignored, and why.
        folded: What folding did, or None.
        sidecar: The file beside an adapter, or None.
    """

    engines: tuple[EngineOutcome, ...]
    written: Written | None
    tensors: tuple[str, ...]
    remarks: tuple[str, ...]
    folded: Folded | None = None
    sidecar: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every engine that takes part would serve it as meant."""
        return all(engine.ok for engine in self.engines if not engine.refusal)


def export(request: ExportRequest, notify: Callable[[str], None]) -> ExportResult:
    """Exports calibrated scales.

    Raises:
        ExportError: An engine cannot read this, or it cannot be written; nothing is left behind.
        FingerprintError: Scales of another model or adapter set.
        InputError: A model, adapter or scales file that cannot be used.
    """
    targets = [] if request.sidecar else asked(request.engines)
    _check_request(request, targets)
    scales = None if request.scales is None else load_scales(request.scales)
    base = _local(request.source, notify)
    checkpoint = read_checkpoint(Path(base.model))
    if request.sidecar:
        from .sidecar import export_sidecar

        assert scales is not None
        return export_sidecar(request, base, checkpoint, scales, notify)
    # Whatever is refused is refused before anything takes long.
    if request.output is not None:
        check_output(request.output, checkpoint.directory)
    if scales is not None and request.fold in (None, "fp8"):
        contribute(targets, job_of(request, checkpoint, scales), ALL in request.engines)
    with _model(request, base, checkpoint, scales, notify) as (model, checked):
        return _export(request, targets, model, checked, notify)


def _check_request(request: ExportRequest, targets: list[ExportTarget]) -> None:
    """Refuses what lacks something, or names something that nothing would come of.

    Raises:
        ExportError: No output, one that stays empty, or no adapter to merge.
    """
    if request.merge_adapter and not request.source.adapters:
        raise ExportError(
            f"{request.source} has no adapter to merge: name one with --adapter, or leave "
            "--merge-adapter out"
        )
    if request.fold is not None and request.source.adapters and not request.merge_adapter:
        raise ExportError(
            "adapters do not fit weights that were folded without them: fold the merged model, "
            "with --merge-adapter"
        )
    writes = request.fold is not None or any(each.facts.needs_weights for each in targets)
    if writes and request.output is None:
        raise ExportError("this export writes a directory: name it with --output")
    if not writes and request.output is not None:
        names = " and ".join(each.facts.title for each in targets) or "a sidecar"
        raise ExportError(f"nothing would be written to {request.output} for {names}: leave it out")


def _local(source: ModelSource, notify: Callable[[str], None]) -> ModelSource:
    from kvquant.models.loading import make_local

    local = make_local(source, notify)
    if local.gguf_file is not None:
        raise ExportError(
            f"{source} is a GGUF file, which only llama.cpp serves, with scales of its own: "
            "export the checkpoint that it was made from"
        )
    return local


def job_of(request: ExportRequest, checkpoint: Checkpoint, scales: KVScales) -> ExportJob:
    """What engines are asked about.

    Raises:
        FingerprintError: Scales of a cache of another shape.
        ExportError: Attention modules that cannot be found in the checkpoint.
    """
    geometry = CacheGeometry.from_config(dict(checkpoint.config))
    modules = attention_modules(checkpoint, geometry)
    if scales.geometry != geometry:
        from kvquant.fingerprint import Fingerprint

        scales.check_model(Fingerprint(), geometry)  # says what differs
    return ExportJob(
        checkpoint, geometry, modules, scales, request.per_head, request.tensor_parallel
    )


@contextmanager
def _model(
    request: ExportRequest,
    base: ModelSource,
    checkpoint: Checkpoint,
    scales: KVScales | None,
    notify: Callable[[str], None],
) -> Iterator[tuple[Checkpoint, KVScales | None]]:
    """The checkpoint to export, and its scales with a note if they are forced on it.

    It is the base, or one with the adapters merged that is gone afterwards.
    """
    if not request.merge_adapter or request.output is None:
        yield checkpoint, scales and checked(request, scales, base, notify)
        return
    from .merged import scratch, write_merged

    found: list[KVScales] = []

    def check(served: Fingerprint) -> None:
        if scales is not None:
            found.append(belonging(request, scales, served, notify))

    with scratch(request.output) as directory:
        write_merged(base, checkpoint, check, directory, notify)
        yield read_checkpoint(directory), next(iter(found), None)


def _export(
    request: ExportRequest,
    targets: list[ExportTarget],
    checkpoint: Checkpoint,
    scales: KVScales | None,
    notify: Callable[[str], None],
) -> ExportResult:
    if request.fold is not None:
        from .folded import export_folded

        return export_folded(request, targets, checkpoint, scales, notify)
    assert scales is not None
    job = job_of(request, checkpoint, scales)
    wanted, refused = contribute(targets, job, ALL in request.engines)
    whole = combined(wanted, forced_notes(scales))
    written = None
    if any(each.facts.needs_weights for each in targets):
        written = write(request, checkpoint, whole, scales, notify)
    return result(wanted, refused, whole, written)


def write(
    request: ExportRequest,
    checkpoint: Checkpoint,
    whole: Contribution,
    scales: KVScales | None,
    notify: Callable[[str], None],
    **options: Any,
) -> Written:
    """Writes a directory; `options` go to `write_export`.

    Raises:
        ExportError: It cannot be written.
    """
    output = options.pop("output", request.output)
    assert output is not None
    record = {
        "kvquant": __version__,
        "model": str(request.source),
        "base": request.source.base or request.source.model,
        "adapters": list(request.source.adapters),
        "merged": request.merge_adapter,
        "engines": list(request.engines),
        "scales": None
        if scales is None
        else {
            "file": request.scales,
            "scheme": scales.scheme.to_dict(),
            "method": scales.method,
            "provenance": scales.provenance.to_dict(),
        },
        "tensors": {name: tensor.flatten().tolist() for name, tensor in whole.tensors.items()},
        "launch": list(whole.launch),
        "remarks": list(whole.remarks),
    }
    options |= {"record": record, "notify": notify}
    if request.merge_adapter:
        from .merged import write_from_scratch

        return write_from_scratch(checkpoint, whole, output, **options)
    return write_export(checkpoint, whole, output, copy=request.copy, **options)


def result(
    wanted: dict[str, Contribution],
    refused: dict[str, str],
    whole: Contribution,
    written: Written | None,
    folded: Folded | None = None,
) -> ExportResult:
    """What became of it, as each engine would see it."""
    outcomes = [_outcome(name, one, written) for name, one in wanted.items()]
    outcomes += [EngineOutcome(name, refusal=reason) for name, reason in refused.items()]
    remarks = whole.remarks + (() if written is None else written.remarks)
    return ExportResult(tuple(outcomes), written, tuple(whole.tensors), remarks, folded)


def _outcome(name: str, one: Contribution, written: Written | None) -> EngineOutcome:
    place = "MODEL" if written is None else str(written.directory)
    launch = tuple(_launched(line, place) for line in one.launch)
    if written is None or name not in verifiable() or (not one.tensors and not one.files):
        return EngineOutcome(name, launch)
    report = verify(written.directory, name)
    found = sum(1 for layer in report.layers if layer.key is not None and layer.value is not None)
    return EngineOutcome(name, launch, found, report.findings)


def _launched(line: str, place: str) -> str:
    """A launch line with a directory in it, as a shell takes it.

    A word of the line that is Python code has the directory in quotation marks.
    """
    if shlex.quote(place) == place:
        return line.replace("{model}", place)
    return shlex.join(
        word.replace("'{model}'", repr(place))
        if "'{model}'" in word
        else word.replace("{model}", place)
        for word in shlex.split(line)
    )
