"""Scales of an adapter in a JSON file beside it, for servers that load one adapter each.

No engine has scales by adapter, and tensors that are no adapter weights make vLLM refuse an
``adapter_model.safetensors``: hence a file of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvquant import __version__
from kvquant.errors import ExportError
from kvquant.storage import write_atomically

from .rounding import tensor_scales

if TYPE_CHECKING:
    from .target import ExportJob

FILE = "kvquant_scales.json"


def write_sidecar(job: ExportJob, adapter: Path) -> tuple[str, ...]:
    """Writes ``kvquant_scales.json`` into an adapter directory; returns what was reduced.

    Raises:
        ExportError: The scales are of a format that no engine reads.
        InputError: The place cannot be written.
    """
    if not (adapter / "adapter_config.json").is_file():
        raise ExportError(f"{adapter} is no adapter directory: it has no adapter_config.json")
    pairs, remarks = tensor_scales(job, False, "a sidecar")
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
