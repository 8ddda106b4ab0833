"""Scales of an adapter in a JSON file beside it, for servers that load one adapter each.

No engine has scales by adapter, and tensors that are no adapter weights make vLLM refuse an
``adapter_model.safetensors``: hence a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvquant import __version__
from kvquant.errors import ExportError
from kvquant.scheme import format_names
from kvquant.storage import write_atomically

from .belonging import checked, forced_notes
from .rounding import tensor_scales

if TYPE_CHECKING:
    from kvquant.models.source import ModelSource
    from kvquant.scales import KVScales

    from .checkpoint import Checkpoint
    from .export import ExportRequest, ExportResult
    from .target import ExportJob

FILE = "kvquant_scales.json"

_INSTEAD = dict.fromkeys(format_names(), "No engine reads calibrated scales of other formats.")


def export_sidecar(
    request: ExportRequest,
    base: ModelSource,
    checkpoint: Checkpoint,
    scales: KVScales,
    notify: Callable[[str], None],
) -> ExportResult:
    """Writes the scales of a base with an adapter beside that adapter.

    Raises:
        ExportError: Not one adapter, or scales of a format that no engine reads.
        FingerprintError: Scales of another model or adapter set.
        InputError: The place cannot be written.
    """
    from .export import ExportResult, job_of

    if len(base.adapters) != 1:
        raise ExportError(
            f"a sidecar belongs to one adapter, {len(base.adapters)} are given: name its directory "
            "as the model"
        )
    job = job_of(request, checkpoint, scales)
    job = replace(job, scales=checked(request, scales, base, notify))
    adapter = Path(base.adapters[0]).expanduser()
    remarks = (*forced_notes(job.scales), *write_sidecar(job, adapter))
    return ExportResult((), None, (), remarks, sidecar=adapter / FILE)


def write_sidecar(job: ExportJob, adapter: Path) -> tuple[str, ...]:
    """Writes ``kvquant_scales.json`` into an adapter directory; returns what was reduced.

    Raises:
        ExportError: The scales are of a format that no engine reads.
        InputError: The place cannot be written.
    """
    if not (adapter / "adapter_config.json").is_file():
        raise ExportError(f"{adapter} is no adapter directory: it has no adapter_config.json")
    pairs, remarks = tensor_scales(job, False, "a sidecar", _INSTEAD)
    layers = {
        str(index): {"k_scale": float(key), "v_scale": float(value)}
        for index, (key, value) in pairs.items()
    }
    values = {
        "kvquant": __version__,
        "format": "fp8_e4m3",
        "meaning": "x = code * scale, one scale for the keys and one for the values of a layer",
        "layers": layers,
        "method": job.scales.method,
        "provenance": job.scales.provenance.to_dict(),
    }
    write_atomically(adapter / FILE, (json.dumps(values, indent=2) + "\n").encode())
    return remarks
