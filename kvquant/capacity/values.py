"""A plan as JSON values. Keys are stable: what a release prints, the next one prints too."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from .plan import Allocated, FormatPlan, Request
from .workload import PERCENTILE


def plan_values(
    request: Request, plans: Sequence[FormatPlan], remarks: Sequence[str]
) -> dict[str, Any]:
    """Everything that the tables show, in bytes, seconds and counts."""
    return {
        "model": _model(request),
        "gpu": _gpu(request),
        "parallel": {
            "tp": request.parallel.tensor,
            "pp": request.parallel.pipeline,
            "dp": request.parallel.data,
            "gpus": request.parallel.gpus,
        },
        "workload": _workload(request),
        "kv": {p.form.name: _format(p, plans[0]) for p in plans},
        "warnings": list(remarks),
    }


def _model(request: Request) -> dict[str, Any]:
    model, weights = request.model, request.weights
    return {
        "name": model.name,
        "source": model.source,
        "model_type": model.model_type,
        "layers": len(model.geometry.layers),
        "max_positions": model.geometry.max_positions,
        "weights_bytes": weights and weights.nbytes,
        "weights_source": weights and weights.source,
    }


def _gpu(request: Request) -> dict[str, Any] | None:
    memory = request.memory
    if memory is None:
        return None
    return {
        "name": memory.name,
        "source": memory.source,
        "memory_bytes": memory.nbytes,
        "overhead_bytes": memory.overhead_nbytes,
        "bandwidth_bytes_per_s": memory.bandwidth,
        "weights_bytes": request.weights_nbytes,
        "free_bytes": request.free_nbytes,
    }


def _workload(request: Request) -> dict[str, Any]:
    workload = request.workload
    return {
        "sequence_tokens": workload.longest,
        "concurrency": workload.concurrency,
        "lengths": None if workload.drawn else list(workload.lengths),
        "percentile": PERCENTILE if workload.drawn else None,
        "added_tokens": workload.added_tokens,
        "prefix_tokens": workload.prefix_tokens,
        "adapters": workload.adapters,
    }


def _format(p: FormatPlan, first: FormatPlan) -> dict[str, Any]:
    decode = p.decode
    return {
        "description": p.form.description,
        "bytes_per_token": plain(p.token_nbytes),
        "ratio": float(first.token_nbytes / p.token_nbytes) if p.token_nbytes else None,
        "bytes_per_sequence": p.sequence_nbytes,
        "sequences": p.sequences,
        "total_bytes": p.total_nbytes,
        "per_gpu": {
            "bytes_per_token": plain(p.gpu_token_nbytes),
            "bytes_per_sequence": p.gpu_sequence_nbytes,
            "cache_bytes": p.gpu_nbytes,
        },
        "max_sequences": p.max_sequences,
        "max_context": p.max_context,
        "outgrows_weights_tokens": p.outgrows_weights_tokens,
        "pages": _allocated(p.pages),
        "reserved": _allocated(p.reserved),
        "full_length_bytes_per_sequence": p.full_length_nbytes,
        "padding_layers": p.padding_layers,
        "decode_step_ms": decode and decode.step_seconds * 1e3,
        "tokens_per_s": decode and decode.tokens_per_second,
        "tokens_per_s_per_sequence": decode and 1 / decode.step_seconds,
        "ns_per_cached_token": decode and decode.token_seconds * 1e9,
        "cache_bound_sequences": decode and decode.cache_bound_sequences,
    }


def _allocated(allocated: Allocated) -> dict[str, Any]:
    return {
        "bytes_per_sequence": allocated.sequence_nbytes,
        "utilisation": allocated.utilisation,
        "max_sequences": allocated.max_sequences,
    }


def plain(number: Fraction) -> int | float:
    """A whole number as int."""
    return int(number) if number.denominator == 1 else float(number)
