"""The whole of an export: model, scales, engines, directory, and a look at the result.

::

    model ── merge adapters ── fold ──┐
    scales ── belong to it? ──────────┴→ what each engine wants → directory → verify
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant import __version__
from kvquant.errors import ExportError, FingerprintError
from kvquant.geometry import CacheGeometry
from kvquant.models.source import ModelSource
from kvquant.storage import load_scales

from .checkpoint import Checkpoint, attention_modules, read_checkpoint
from .combine import combined, contribute
from .directory import Written, write_export
from .target import Contribution, ExportJob, ExportTarget
from .targets import shared, target
from .verify import verifiable, verify
from .verify_report import Finding

if TYPE_CHECKING:
    from kvquant.fingerprint import Fingerprint
    from kvquant.scales import KVScales

    from .folded import Folded

ALL = "all"
"""``--engine all``: those that one directory serves together."""


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
    targets = _targets(request)
    base = _local(request.source, notify)
    checkpoint = read_checkpoint(Path(base.model))
    scales = None if request.scales is None else load_scales(request.scales)
    if request.sidecar:
        assert scales is not None
        return _sidecar(request, base, checkpoint, scales, notify)
    if scales is not None and request.fold is None:
        # Whatever an engine refuses is said before anything takes long.
        contribute(targets, job_of(request, checkpoint, scales), ALL in request.engines)
    with _model(request, base, checkpoint, scales, notify) as model:
        return _export(request, targets, model, scales, notify)


def _targets(request: ExportRequest) -> list[ExportTarget]:
    if request.sidecar:
        return []
    if ALL in request.engines:
        return shared()
    return [target(name) for name in dict.fromkeys(request.engines)]


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
        scales.check_model(_unknown(), geometry)  # says what differs
    return ExportJob(
        checkpoint, geometry, modules, scales, request.per_head, request.tensor_parallel
    )


def _unknown() -> Fingerprint:
    from kvquant.fingerprint import Fingerprint

    return Fingerprint()


@contextmanager
def _model(
    request: ExportRequest,
    base: ModelSource,
    checkpoint: Checkpoint,
    scales: KVScales | None,
    notify: Callable[[str], None],
) -> Iterator[Checkpoint]:
    """The checkpoint to export: the base, or one with the adapters merged that is gone after."""
    if base.adapters and request.merge_adapter:
        from .merged import write_merged

        def check(served: Fingerprint) -> None:
            _check_scales(request, scales, served, checkpoint, notify)

        with scratch(request.output) as directory:
            write_merged(base, checkpoint, check, directory, notify)
            yield read_checkpoint(directory)
        return
    served = _fingerprint(replace(base, adapters=()), notify)
    _check_scales(request, scales, served, checkpoint, notify)
    yield checkpoint


def _fingerprint(source: ModelSource, notify: Callable[[str], None]) -> Fingerprint:
    """Identity of a model on disk, which is loaded only if there is no other way."""
    from kvquant.fingerprint import checkpoint_fingerprint, fingerprint

    found = None if source.adapters else checkpoint_fingerprint(Path(source.model))
    if found is None:
        from kvquant.models.loading import load

        notify(f"loading {source} to see that the scales belong to it")
        found = fingerprint(load(source, device="cpu", notify=notify).model)
    return found


def _check_scales(
    request: ExportRequest,
    scales: KVScales | None,
    served: Fingerprint,
    checkpoint: Checkpoint,
    notify: Callable[[str], None],
) -> None:
    """Makes sure that the scales are those of the model that will be served."""
    if scales is None:
        return
    geometry = CacheGeometry.from_config(dict(checkpoint.config))
    try:
        scales.check_model(served, geometry)
    except FingerprintError as error:
        if request.force and geometry == scales.geometry:
            notify(f"forced: {error}")
            return
        if request.source.adapters and not (request.merge_adapter or request.sidecar):
            raise FingerprintError(
                f"{error}. Without --merge-adapter the base is served, with scales that are safe "
                "for it and the adapters: kvquant calibrate --shared"
            ) from error
        raise


@contextmanager
def scratch(output: Path | None) -> Iterator[Path]:
    """A directory on the filesystem of the output, gone at the end."""
    assert output is not None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=".kvquant-", dir=output.parent)
    except OSError as error:
        raise ExportError(f"cannot write {output}: {error.strerror or error}") from error
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


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
    whole = combined(wanted)
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
        ExportError: No output was named, or it cannot be written.
    """
    output = options.pop("output", request.output)
    if output is None:
        raise ExportError("this export writes a directory: name it with --output")
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
    return write_export(
        checkpoint, whole, output, copy=request.copy, record=record, notify=notify, **options
    )


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
    launch = tuple(line.format(model=place) for line in one.launch)
    if written is None or name not in verifiable() or (not one.tensors and not one.files):
        return EngineOutcome(name, launch)
    report = verify(written.directory, name)
    found = sum(1 for layer in report.layers if layer.key is not None and layer.value is not None)
    return EngineOutcome(name, launch, found, report.findings)


def _sidecar(
    request: ExportRequest,
    base: ModelSource,
    checkpoint: Checkpoint,
    scales: KVScales,
    notify: Callable[[str], None],
) -> ExportResult:
    """Scales beside an adapter."""
    from .sidecar import FILE, write_sidecar

    if len(base.adapters) != 1:
        raise ExportError(
            f"a sidecar belongs to one adapter, {len(base.adapters)} are given: name its directory "
            "as the model"
        )
    _check_scales(request, scales, _fingerprint(base, notify), checkpoint, notify)
    adapter = Path(base.adapters[0]).expanduser()
    remarks = write_sidecar(job_of(request, checkpoint, scales), adapter)
    return ExportResult((), None, (), remarks, sidecar=adapter / FILE)
