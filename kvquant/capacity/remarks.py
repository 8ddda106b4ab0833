"""What a plan should not leave unsaid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvquant.geometry import LayerKind

from .formats import PAIRS, BlockFormat
from .parameters import experts_of
from .plan import FormatPlan, Request
from .wording import GB

if TYPE_CHECKING:
    from .calibrated import Calibrated


def remarks(request: Request, plans: Sequence[FormatPlan], scales: Calibrated | None) -> list[str]:
    """One line for each thing."""
    lines = [*_lengths(request, scales), *_layers(request, plans), *_parallel(request)]
    blocks = [p.form for p in plans if isinstance(p.form, BlockFormat)]
    turbo = [form.name for form in blocks if form.name in PAIRS and not form.plain_layers]
    if turbo:
        lines.append(
            f"{', '.join(turbo)}: vLLM leaves the first and last two layers of dense models in "
            "their own dtype: plan that with --skip-layers 0,1,-2,-1"
        )
    weights = request.weights
    if weights is not None and not weights.expert_nbytes and experts_of(request.model.settings):
        lines.append(
            "how much of the weights are experts is not known: a step is taken to read all of them"
        )
    count = request.workload.concurrency
    for p in plans:
        if count is not None and p.max_sequences is not None and p.max_sequences < count:
            lines.append(f"{p.form.name}: {p.max_sequences:,} of {count:,} sequences fit")
    return lines


def _lengths(request: Request, scales: Calibrated | None) -> list[str]:
    longest, model = request.workload.longest, request.model
    lines = []
    limit = model.geometry.max_positions
    if limit is not None and longest > limit:
        lines.append(f"{longest:,} tokens are beyond the {limit:,} positions of {model.name}")
    calibrated = scales.longest_position if scales is not None else None
    if scales is not None and calibrated and longest > calibrated:
        lines.append(
            f"{longest:,} tokens are beyond position {calibrated:,}, up to which {scales.name} was "
            "calibrated"
        )
    return lines


def _layers(request: Request, plans: Sequence[FormatPlan]) -> list[str]:
    lines, model = [], request.model
    windowed = sum(layer.window is not None for layer in model.geometry.layers)
    first = plans[0]
    kinds = {layer.window for layer in model.geometry.layers if layer.keeps_tokens}
    if len(kinds) > 1 and first.full_length_nbytes > first.sequence_nbytes:
        lines.append(
            f"an engine without an allocator for several kinds of layers keeps {windowed} windows "
            f"at full length: {first.full_length_nbytes / GB:.2f} GB a sequence in "
            f"{first.form.name}, not {first.sequence_nbytes / GB:.2f}"
        )
    if first.padding_layers:
        lines.append(
            f"vLLM puts layers of a kind into groups of one size, and adds {first.padding_layers} "
            "layers of padding for that"
        )
    unknown = sum(not companion.known for companion in model.companions)
    if unknown:
        lines.append(
            f"what {unknown} layers keep beside keys and values (recurrent states, indexer keys) "
            f"is not counted: the config of this {model.model_type} does not tell it"
        )
    return lines


def _parallel(request: Request) -> list[str]:
    layers = [layer for layer in request.model.geometry.layers if layer.keeps_tokens]
    tensor = request.parallel.tensor
    if tensor > 1 and any(layer.kind is LayerKind.LATENT for layer in layers):
        return [f"each of {tensor} GPUs holds the whole latent: --dp divides sequences instead"]
    heads = min((layer.kv_heads for layer in layers), default=tensor)
    if tensor > heads:
        return [
            f"--tp {tensor} is beyond the {heads} KV heads: GPUs hold copies of them, and the "
            "cache of a GPU shrinks no further"
        ]
    return []
