"""What the kernels have to know about a codec, worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from . import numba_formats as formats
from .numba_panel import (
    FIRST_SECTION,
    PER_GROUP,
    PER_TOKEN,
    SECTIONS,
    STATIC,
    VECTOR_BYTES,
    Job,
)
from .numba_vectors import LANES

if TYPE_CHECKING:
    from .codec import Center, Codec

SPAN = 64
"""Tokens of a task, where they share no range: a multiple of eight."""

_KINDS = {"fp32": formats.FP32, "bf16": formats.BF16, "fp16": formats.FP16}
_CODINGS = {"fp8_e4m3": formats.E4M3, "fp8_e5m2": formats.E5M2}


@dataclass(frozen=True, eq=False)
class Plan:
    """Jobs for one codec that lack only their tensors.

    Attributes:
        center: Of the codec, which may get another one.
        scales: Likewise.
        encoding: Job of the encoder.
        decoding: Job of the decoder.
        kv_heads: As many as calibration knows, or None where it does not matter.
        tables: What addresses in the jobs belong to.
    """

    center: object
    scales: object
    encoding: Job
    decoding: Job
    kv_heads: int | None
    tables: list[torch.Tensor]


_NO_PAIR = -1

_plans: WeakKeyDictionary[Codec, Plan] = WeakKeyDictionary()


def plan(codec: Codec) -> Plan | None:
    """The plan of a codec, or None if there is no kernel for it."""
    found = _plans.get(codec)
    if found is None or found.center is not codec.center or found.scales is not codec.scales:
        if not codec.scheme.format.is_scaled:
            return None
        found = _plans[codec] = _make(codec)
    return found


def _make(codec: Codec) -> Plan:
    encoding, decoding = Job(), Job()
    tables: list[torch.Tensor] = []
    for job, is_encoding in ((encoding, True), (decoding, False)):
        _set_shape(job, codec)
        _set_format(job, codec, is_encoding)
        if codec.rotation is not None:
            tables.append(_set_rotation(job, codec, is_encoding))
        if codec.center is not None:
            tables += _set_center(job, codec.center)
        if codec.scales is not None:
            tables.append(_set_scales(job, codec, is_encoding))
    calibrated = [] if codec.center is None else [codec.center.fixed]
    calibrated += [] if codec.scales is None else [codec.scales.scale]
    heads = max((tensor.shape[0] for tensor in calibrated), default=1)
    kv_heads = heads if codec.center is not None or heads > 1 else None
    return Plan(codec.center, codec.scales, encoding, decoding, kv_heads, tables)


def _zeros(*shape: int) -> torch.Tensor:
    """What kernels read: whatever dtype and device torch makes by default."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _width(dim: int) -> int:
    """Channels that a panel has room for: whole vectors, and one more."""
    return -(-dim // LANES) * LANES + LANES


def _set_shape(job: Job, codec: Codec) -> None:
    width, granularity = _width(codec.dim), codec.scheme.granularity
    job.dim, job.row_bytes, job.core_order = codec.dim, codec.row_bytes, 1
    job.lanes = LANES
    job.section, job.pitch = VECTOR_BYTES * width, 4 * width
    # Whole cache lines: threads have theirs side by side.
    job.scratch = -(-(FIRST_SECTION + SECTIONS * job.section) // 64) * 64
    job.grain = STATIC if granularity.is_static else PER_TOKEN
    job.span = SPAN
    if codec.scheme.group_size is not None:
        job.grain, job.span = PER_GROUP, codec.unit


def _set_format(job: Job, codec: Codec, is_encoding: bool) -> None:
    scheme, form = codec.scheme, codec.scheme.format
    job.bits, job.coding = form.bits, _CODINGS.get(form.name, formats.INTEGER)
    job.ranges_kind, job.symmetric = _KINDS[scheme.scale_format], scheme.symmetric
    job.factor = 1.0
    job.steps, job.lowest, job.highest = form.qmax, form.qmin, form.qmax
    if not scheme.symmetric:
        job.steps, job.lowest, job.highest = scheme.levels / 2, 0.0, scheme.levels
        job.zero = scheme.levels / 2
    elif not form.is_float:
        # Signed codes are stored as unsigned ones.
        job.offset = 1 << (form.bits - 1)
        job.zero = 0.0 if is_encoding else job.offset


def _set_rotation(job: Job, codec: Codec, is_encoding: bool) -> torch.Tensor:
    """Returns the core: row i has what input i contributes to each output; zeros at last."""
    rotation = codec.rotation
    assert rotation is not None
    job.rotated, job.factor = True, rotation.factor
    job.core_order = codec.dim // rotation.butterflies
    core = _zeros(job.core_order + 1, job.core_order + LANES)
    if rotation.core is not None:
        core[:-1, :-LANES] = rotation.core.T if is_encoding else rotation.core
    job.core = core.data_ptr()
    return core


def _set_center(job: Job, center: Center) -> list[torch.Tensor]:
    """Returns the fixed mean, what each channel adds of its pair's cosine and sine, and the pairs.

    A pair (i, j) of t turns to ``t_i cos - t_j sin`` and ``t_j cos + t_i sin``.
    """
    kv_heads, dim = center.fixed.shape
    tables = _zeros(3, kv_heads, job.pitch // 4)
    pair_of = torch.full((job.pitch // 4,), _NO_PAIR, device="cpu")
    tables[0, :, :dim] = center.fixed
    if bool(center.fixed.any()):
        job.fixed = tables[0].data_ptr()
    if turns(center):
        assert center.turned is not None and center.layout is not None
        first, second = center.layout.split(torch.arange(dim, device="cpu"))
        tables[1, :, :dim] = center.turned
        tables[2][:, first] = -center.turned[:, second]
        tables[2][:, second] = center.turned[:, first]
        pair_of[first] = pair_of[second] = torch.arange(len(first), device="cpu")
        job.pairs, job.pair_of = len(first), pair_of.data_ptr()
        job.turned_cos, job.turned_sin = tables[1].data_ptr(), tables[2].data_ptr()
        job.by_channel = not _are_runs(pair_of)
    pair_of.clamp_(min=0)  # the angles of any pair, times zero
    return [tables, pair_of]


def turns(center: Center | None) -> bool:
    """Whether some mean turns with the position."""
    return (
        center is not None
        and center.turned is not None
        and center.layout is not None
        and center.angles is not None
    )


def _are_runs(pair_of: torch.Tensor) -> bool:
    """Whether each eight channels have eight consecutive pairs, or none."""
    runs = pair_of.view(-1, LANES)
    is_run = (runs - runs[:, :1] == torch.arange(LANES, device="cpu")).all(1)
    return bool((is_run | (runs == _NO_PAIR).all(1)).all())


def _set_scales(job: Job, codec: Codec, is_encoding: bool) -> torch.Tensor:
    """Returns rows of middle, scale and zero, for each KV head or for all."""
    scales = codec.scales
    assert scales is not None
    heads, dim = scales.scale.shape[0], codec.dim
    table = _zeros(heads, 3, job.pitch // 4)
    table[:, 1] = 1.0
    table[:, 1, :dim] = scales.scale
    table[:, 2, :dim] = job.zero if scales.zero_point is None else scales.zero_point
    job.tables, job.tables_head = table.data_ptr(), 0 if heads == 1 else 3 * job.pitch
    return table
