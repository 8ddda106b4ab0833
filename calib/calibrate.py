"""The whole of a calibration: model, text, statistics, scales, files."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from importlib.metadata import version
from pathlib import Path

from kvquant import storage
from kvquant.errors import InputError
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import BASE, activate, adapter_names
from kvquant.models.loading import (
    LoadedModel,
    ModelSource,
    load,
    load_tokenizer,
    make_local,
    read_config,
)
from kvquant.progress import notify, token_progress
from kvquant.provenance import Provenance
from kvquant.scales import KVScales
from kvquant.scheme import QuantScheme
from kvquant.text.corpus import TokenBlocks, read_rows, token_blocks

from .collect import Watcher, collect
from .method import RangeMethod
from .resume import Resume
from .solve import solve
from .stats import CalibrationStats
from .stats_file import save_stats

DEFAULT_CONTEXT = 8192
DEFAULT_TOKENS = 32768
MIN_SAMPLES = 4


@dataclass(frozen=True)
class Request:
    """What `kvquant calibrate` was asked for, as far as it is about reading the model.

    Attributes:
        source: The model and its adapters.
        scheme: What to solve for.
        method: How ranges are chosen.
        data: Calibration text, or None for the default text.
        text_field: Field of its rows that holds the text, or None.
        chat: Whether rows are message lists for the chat template.
        context_length: Tokens per block, or None for the default.
        samples: Blocks, or None for the default.
        chunk: Tokens per forward pass.
        dtype: As `load` takes it; so are `device` and `device_map`.
        shared: Whether base and adapters are measured apart and share one set of scales.
    """

    source: ModelSource
    scheme: QuantScheme
    method: RangeMethod
    data: str | None = None
    text_field: str | None = None
    chat: bool = False
    context_length: int | None = None
    samples: int | None = None
    chunk: int = 2048
    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    shared: bool = False


@dataclass(frozen=True)
class Member:
    """One model whose cache the scales serve: its name, statistics and own scales."""

    name: str
    stats: CalibrationStats
    scales: KVScales


@dataclass(frozen=True)
class Calibration:
    """What came out.

    Attributes:
        scales: The scales, shared by all members.
        members: One per model measured: one, or the base and each adapter with ``--shared``.
        seconds: Time spent reading the text.
    """

    scales: KVScales
    members: tuple[Member, ...]
    seconds: float


def calibrate(request: Request, output: str) -> Calibration:
    """Measures the model's cache and solves scales for it.

    Everything that can be wrong is looked at before weights are read.

    Args:
        request: What to do.
        output: Name that `save` will be given; beside it lie the statistics of an unfinished run,
            which is continued.
    """
    if (request.device or "").startswith("mps"):
        raise InputError("mps has no float64, which sums need to be exact: use --device cpu")
    if request.shared and not request.source.adapters:
        raise InputError("--shared joins the base and its adapters: give at least one --adapter")
    for suffix in (".safetensors", ".stats"):
        storage.check_writable(Path(f"{output}{suffix}"))
    geometry = CacheGeometry.from_config(read_config(request.source))
    request.scheme.check(geometry)
    length = context_length(request.context_length, geometry)
    samples = request.samples or max(MIN_SAMPLES, -(-DEFAULT_TOKENS // length))
    source = make_local(request.source, notify)
    blocks = _blocks(request, source, length, samples)
    loaded = load(
        source,
        dtype=request.dtype,
        device=request.device,
        device_map=request.device_map,
        notify=notify,
    )
    started = time.monotonic()
    members = []
    if len(adapter_names(loaded.model)) > 1 and not request.shared:
        notify(
            f"{' + '.join(adapter_names(loaded.model))} are active together, as a sum; to serve "
            "each of them apart with one set of scales, use --shared"
        )
    for name, adapters in _members(loaded, request.shared):
        with activate(loaded.model, adapters):
            origin = _provenance(request, loaded, blocks, length, adapters)
            partial = Path(f"{_stem(output, name, request.shared)}.partial")
            resume = Resume(partial, origin, geometry)
            stats = _measure(request, loaded, blocks, geometry, name, resume)
        members.append(Member(name, stats, solve(stats, request.scheme, request.method)))
    seconds = time.monotonic() - started
    scales = reduce(KVScales.union, (member.scales for member in members))
    return Calibration(scales, tuple(members), seconds)


def save(calibration: Calibration, output: str) -> list[Path]:
    """Writes the scales and, beside them, the statistics; returns the files.

    What was kept for the case that the run does not finish is needed no more only then.
    """
    members = calibration.members
    stems = [_stem(output, member.name, len(members) > 1) for member in members]
    stats_paths = [Path(f"{stem}.stats") for stem in stems]
    for member, path in zip(members, stats_paths, strict=True):
        save_stats(member.stats, path)
    scales_path = Path(f"{output}.safetensors")
    storage.save_scales(calibration.scales, scales_path)
    for stem in stems:
        Path(f"{stem}.partial").unlink(missing_ok=True)
    return [scales_path, *stats_paths]


def _stem(output: str, member: str, shared: bool) -> str:
    """Name of a member's own files, without suffix."""
    return f"{output}.{member}" if shared else output


def context_length(asked: int | None, geometry: CacheGeometry) -> int:
    """Tokens per block: what was asked for, at most what the model has positions for.

    Raises:
        InputError: More than the model's positions.
    """
    limit = geometry.max_positions
    if asked is None:
        length = min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
        notify(
            f"context length {length:,} (model: {limit or 'unlimited'} positions); "
            "give the length you serve with --context-length"
        )
        return length
    if limit is not None and asked > limit:
        raise InputError(
            f"--context-length {asked:,} is beyond the model's {limit:,} positions: "
            f"what lies there is noise; use at most {limit:,}"
        )
    return asked


def _blocks(request: Request, source: ModelSource, length: int, samples: int) -> TokenBlocks:
    rows = read_rows(request.data, text_field=request.text_field, chat=request.chat, notify=notify)
    tokenizer = load_tokenizer(source)
    blocks = token_blocks(
        rows, tokenizer, context_length=length, samples=samples, chat=request.chat
    )
    notify(str(blocks.report))
    found, asked = sum(map(len, blocks.blocks)), length * samples
    if 2 * found < asked:
        notify(
            f"warning: the text has only {found:,} of the {asked:,} tokens asked for, and scales "
            "from so few may clip what you serve: give more text with --data"
        )
    return blocks


def _members(loaded: LoadedModel, shared: bool) -> Iterator[tuple[str, list[str]]]:
    """Names of what is measured, and the adapters active in each."""
    names = adapter_names(loaded.model)
    if not shared:
        yield "+".join(names) or BASE, names
        return
    yield BASE, []
    for name in names:
        yield name, [name]


def _measure(
    request: Request,
    loaded: LoadedModel,
    blocks: TokenBlocks,
    geometry: CacheGeometry,
    name: str,
    resume: Resume,
) -> CalibrationStats:
    """Statistics of the model as it is now, with provenance; continues an unfinished run."""
    left = blocks.blocks[resume.finished_blocks :]
    if not left:
        return resume.result(None)
    with token_progress(f"reading with {name}", sum(map(len, left))) as advance:
        stats = collect(
            loaded.model,
            left,
            geometry,
            chunk=request.chunk,
            skip_layers=request.scheme.skip_layers,
            watcher=Watcher(read=advance, finished=resume.keep),
        )
    return resume.result(stats)


def _provenance(
    request: Request,
    loaded: LoadedModel,
    blocks: TokenBlocks,
    length: int,
    adapters: Sequence[str],
) -> Provenance:
    paths = dict(zip(adapter_names(loaded.model), request.source.adapters, strict=True))
    return Provenance(
        model=request.source.base,
        adapters=tuple(str(paths[name]) for name in adapters),
        fingerprints=(fingerprint(loaded.model, loaded.tokenizer),),
        corpora=(asdict(blocks.report),),
        context_length=length,
        versions=_versions(),
        command=(shlex.join(["kvquant", *sys.argv[1:]]),),
        notes=_settings(request),
    )


def _settings(request: Request) -> tuple[str, ...]:
    skipped = sorted(request.scheme.skip_layers)
    return (
        f"forward passes of {request.chunk} tokens, dtype {request.dtype}",
        *((f"layers {skipped} not recorded",) if skipped else ()),
    )


def _versions() -> dict[str, str]:
    names: Sequence[str] = ("kvquant-toolkit", "torch", "transformers", "peft")
    return {name: version(name) for name in names} | {"python": platform.python_version()}
