"""From the options of `kvquant plan` to what is to be planned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant.errors import InputError

from .format_names import Overrides, parse_formats, scheme_format
from .formats import CacheFormat
from .memory import choose_memory
from .parallel import Parallel
from .plan import Request
from .spec import ModelSpec, describe
from .weights import WEIGHT_BITS, Weights, find_weights
from .wording import nearest
from .workload import Workload, read_traffic

if TYPE_CHECKING:
    from .calibrated import Calibrated

DEFAULT_FORMATS = ("bf16", "fp8", "int4")
DEFAULT_CONTEXT = 8192
_LAYER = re.compile(r"-?\d{1,5}")


@dataclass(frozen=True)
class Question:
    """What the command line asks.

    Attributes:
        request: What is to be planned.
        forms: Formats, side by side.
        scales: The calibrated scales that were named.
    """

    request: Request
    forms: list[CacheFormat]
    scales: Calibrated | None


def ask(model_name: str, options: Mapping[str, Any]) -> Question:
    """Reads model and options.

    Raises:
        KVQuantError: Something that cannot be used.
    """
    model = describe(model_name)
    parallel = Parallel(options["tp"], options["pp"], options["dp"])
    parallel.check(model)
    memory = choose_memory(
        options["gpu"], options["memory_gb"], options["bandwidth_tbs"], options["overhead_gb"]
    )
    weights = _weights(model, options, needed=memory is not None)
    workload = _workload(model, options)
    reserved = options["reserve"]
    if reserved is not None and reserved < workload.longest:
        raise InputError(
            f"--reserve {reserved:,} is less than the longest sequence, {workload.longest:,} tokens"
        )
    reserved = reserved or model.geometry.max_positions or workload.longest
    request = Request(
        model,
        weights,
        memory,
        parallel,
        workload,
        options["page_size"],
        max(reserved, workload.longest),
    )
    scales = None
    if options["scales"] is not None:
        from .calibrated import read_calibrated

        scales = read_calibrated(options["scales"], model)
    return Question(request, _formats(model, options, scales), scales)


def _weights(model: ModelSpec, options: Mapping[str, Any], needed: bool) -> Weights | None:
    dtype = options["weights_dtype"]
    if dtype is not None and dtype not in WEIGHT_BITS:
        raise InputError(
            f"unknown format of weights {dtype!r}{nearest(dtype, list(WEIGHT_BITS))}; possible are "
            f"{', '.join(WEIGHT_BITS)}"
        )
    found = find_weights(model, dtype, options["weights_gb"])
    if found is None and (needed or dtype is not None):
        raise InputError(
            f"how large the weights of {model.name} are is not known (model type "
            f"{model.model_type!r}, no weight files): give --weights-gb"
        )
    return found


def _workload(model: ModelSpec, options: Mapping[str, Any]) -> Workload:
    given = [name for name in ("context", "contexts", "traffic") if options[name] is not None]
    if len(given) > 1:
        raise InputError(f"--{given[0]} and --{given[1]} both say how long sequences are: give one")
    if options["adapters"] > 1 and not options["prefix_tokens"]:
        raise InputError(
            "--adapters says how many copies there are of a shared prefix: give --prefix-tokens"
        )
    added = options["template_tokens"] + options["thinking_tokens"]
    concurrency = options["concurrency"]
    if options["traffic"] is not None:
        lengths = tuple(read_traffic(Path(options["traffic"]).expanduser()))
    elif options["contexts"] is not None:
        lengths = options["contexts"]
        concurrency = concurrency or len(lengths)
    else:
        default = min(DEFAULT_CONTEXT, model.geometry.max_positions or DEFAULT_CONTEXT)
        lengths = (options["context"] or default,)
    return Workload(
        tuple(length + added for length in lengths),
        concurrency,
        options["traffic"] is not None,
        added,
        options["prefix_tokens"],
        options["adapters"],
    )


def _formats(
    model: ModelSpec, options: Mapping[str, Any], scales: Calibrated | None
) -> list[CacheFormat]:
    skipped = skipped_layers(options["skip_layers"], len(model.geometry.layers))
    overrides = Overrides(
        options["sink_tokens"], options["residual_length"], options["group_size"], skipped
    )
    turns = scales is not None and scales.turns_means
    names = options["formats"] or DEFAULT_FORMATS
    forms = parse_formats(names, overrides, model.dtype_bytes, turns_means=turns)
    if scales is not None:
        taken = scales.name in (form.name for form in forms)
        name = f"{scales.name}.safetensors" if taken else scales.name
        forms.append(scheme_format(name, scales.scheme, skipped, model.dtype_bytes, turns))
    return forms


def skipped_layers(text: str, layers: int) -> frozenset[int]:
    """Layers of ``0,1,-1``.

    Raises:
        InputError: Not numbers, or layers that the model does not have.
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    for part in parts:
        if not _LAYER.fullmatch(part) or not -layers <= int(part) < layers:
            raise InputError(
                f"--skip-layers {text}: {part or 'nothing'} is none of the layers 0 to {layers - 1}"
            )
    return frozenset(int(part) % layers for part in parts)
