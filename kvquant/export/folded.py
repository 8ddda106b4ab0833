"""An export whose weights carry per-channel differences of keys and values; see docs/folding.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant.errors import ExportError
from kvquant.geometry import CacheGeometry
from kvquant.models.source import ModelSource

from .belonging import forced_notes
from .checkpoint import Checkpoint, attention_modules, read_checkpoint
from .combine import ALL, combined, contribute
from .target import Contribution, ExportTarget

if TYPE_CHECKING:
    import torch

    from kvquant.scales import KVScales

    from .export import ExportRequest, ExportResult
    from .fold_error import FoldError
    from .fold_weights import FoldCheck

FP8 = "fp8"
"""The quantizer whose scales are static: those of the folded model are exported with it."""

_BLOCKS, _LENGTH = 8, 512
"""Text that factors are chosen by: 4,096 tokens tell outliers from noise."""

_DYNAMIC: Mapping[tuple[str, str], tuple[str, str]] = {
    ("vllm", "int8"): ("int8", "vllm serve {model} --kv-cache-dtype int8_per_token_head"),
    # vLLM rotates each head before it quantizes to 4 bits (int4_per_token_head.py, #40835).
    ("vllm", "int4"): ("int4-rotated", "vllm serve {model} --kv-cache-dtype int4_per_token_head"),
    ("lmdeploy", "int4"): ("int4", "lmdeploy serve api_server {model} --quant-policy 4"),
}
"""Engines that compute scales for each token: how they quantize, and how to launch them, by engine
and format."""

_ADAPTERS = (
    "LoRA adapters of this model do not fit the folded weights: serve none beside them; "
    "--merge-adapter folds a model with its adapter"
)


@dataclass(frozen=True)
class Folded:
    """What folding did.

    Attributes:
        quantizer: What it was done for.
        layers: Layers with factors other than 1.
        check: What the written directory was found to be.
        errors: Error of each layer under each quantizer, without folding and with.
    """

    quantizer: str
    layers: int
    check: FoldCheck
    errors: tuple[FoldError, ...]


def export_folded(
    request: ExportRequest,
    targets: list[ExportTarget],
    checkpoint: Checkpoint,
    scales: KVScales | None,
    notify: Callable[[str], None],
) -> ExportResult:
    """Folds and exports; the result gets its name once it was found to be the same model.

    Raises:
        ExportError: Folding is not exact for this model, an engine reads no such scales, or the
            directory cannot be written.
    """
    from .directory import check_output
    from .export import result, write
    from .fold import check_foldable, choose, folded_scales
    from .fold_error import fold_report
    from .fold_observe import observe
    from .fold_weights import check_folded, folded_tensors
    from .merged import scratch

    assert request.fold is not None and request.output is not None
    target = check_output(request.output, checkpoint.directory)
    geometry = CacheGeometry.from_config(dict(checkpoint.config))
    modules = attention_modules(checkpoint, geometry)
    check_foldable(checkpoint.config, geometry)
    if request.fold == FP8 and scales is None:
        raise ExportError("folding for fp8 exports static scales too: give them with --scales")
    if request.fold == FP8 and scales is not None:
        folded_scales(scales, {})  # refuses those that are too coarse
    quantizer = FP8 if request.fold == FP8 else _quantizer(targets, request.fold)
    model, blocks = _load(request, checkpoint, notify)
    check_foldable(checkpoint.config, geometry, model)
    notify(f"looking at keys and values of {sum(map(len, blocks)):,} tokens")
    observed = observe(model, blocks)
    notify("choosing factors")
    folds = choose(observed, quantizer)
    errors = tuple(fold_report(observed, folds))
    if request.fold == FP8:
        assert scales is not None
        from .export import job_of

        scales = folded_scales(scales, folds)
        job = job_of(request, checkpoint, scales)
        wanted, refused = contribute(targets, job, ALL in request.engines)
    else:
        wanted, refused = _dynamic(targets, request.fold), {}
    whole = combined(wanted, [*forced_notes(scales), _ADAPTERS])
    with scratch(request.output) as directory:
        replaced = _write_weights(
            dict(folded_tensors(checkpoint, modules, folds)), directory / "folded.safetensors"
        )
        written = write(
            request,
            checkpoint,
            whole,
            scales,
            notify,
            output=directory / "export",
            named=request.output,
            replaced=replaced,
        )
        notify("reading it back")
        check = check_folded(
            checkpoint, read_checkpoint(written.directory), modules, folds, model, blocks[0][:256]
        )
        _rename(written.directory, target)
    written = replace(written, directory=request.output)
    changed = sum(fold.changes for fold in folds.values())
    return result(wanted, refused, whole, written, Folded(quantizer, changed, check, errors))


def _quantizer(targets: list[ExportTarget], form: str) -> str:
    """How all engines quantize to a format.

    Raises:
        ExportError: One has no such format, or they differ.
    """
    found = {each.name: _DYNAMIC.get((each.name, form), ("", ""))[0] for each in targets}
    for each in targets:
        if not found[each.name]:
            able = " and ".join(name for name, kind in _DYNAMIC if kind == form)
            raise ExportError(
                f"what an {form} cache of {each.facts.title} does to keys and values is not known "
                f"here: folding for {form} is for {able}"
            )
    if len(set(found.values())) > 1:
        raise ExportError(
            f"{' and '.join(found)} quantize to {form} in different ways: fold for one at a time"
        )
    return next(iter(found.values()))


def _dynamic(targets: list[ExportTarget], form: str) -> dict[str, Contribution]:
    """What engines want that compute scales themselves: nothing but the folded weights."""
    return {each.name: Contribution(launch=(_DYNAMIC[each.name, form][1],)) for each in targets}


def _load(
    request: ExportRequest, checkpoint: Checkpoint, notify: Callable[[str], None]
) -> tuple[Any, list[torch.Tensor]]:
    """The model in float32, and text."""
    import torch

    from kvquant.models.loading import load
    from kvquant.text.corpus import token_blocks
    from kvquant.text.rows import read_rows

    rows = read_rows(request.data, text_field=None, chat=False, notify=notify)
    notify(f"loading {request.source} in float32")
    source = ModelSource(str(checkpoint.directory), requested=str(request.source))
    loaded = load(source, dtype="float32", device="cpu", notify=notify)
    found = token_blocks(rows, loaded.tokenizer, context_length=_LENGTH, samples=_BLOCKS)
    return loaded.model, [torch.from_numpy(block) for block in found.blocks]


def _write_weights(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, Path]:
    """A file of folded weights; which tensor is in it."""
    from safetensors.torch import save_file

    from .merged import readable

    if not tensors:
        return {}
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
        readable(path)
    except Exception as error:  # the library's own, without a number
        raise ExportError(f"cannot write the folded weights beside the output: {error}") from error
    return dict.fromkeys(tensors, path)


def _rename(made: Path, target: Path) -> None:
    try:
        os.rename(made, target)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error}") from error
