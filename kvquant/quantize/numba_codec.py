"""Codecs on the CPU by compiled kernels: bit for bit the codes of the reference, in less time."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import numba_formats as formats
from .numba_decode import decode_tasks
from .numba_encode import encode_tasks
from .numba_panel import SIGNATURE, Job
from .numba_plan import Plan, plan, turns
from .numba_threads import run

if TYPE_CHECKING:
    from .codec import Codec

_KINDS = {torch.float32: formats.FP32, torch.bfloat16: formats.BF16, torch.float16: formats.FP16}


def encode(
    codec: Codec,
    states: torch.Tensor,
    positions: torch.Tensor | None,
    bound: int,
    coded: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...] | None:
    """`Codec.encode` for tensors on the CPU; None where there is no kernel.

    Args:
        codec: What encodes.
        states: As for `Codec.encode`.
        positions: Likewise.
        bound: Likewise.
        coded: Where to write; views whose units lie without gaps will do.
    """
    planned = plan(codec)
    if planned is None or not _is_fit(planned, states):
        return None
    angles = _angles(codec, states, positions, bound)
    if angles is None:
        return None
    if not _is_contiguous(states, 1):
        states = states.contiguous()
    if coded is None:
        lead = (states.shape[0], states.shape[1], states.shape[2] // codec.unit)
        shapes = [(*lead, *field.shape) for field in codec.fields]
        kinds = [field.dtype for field in codec.fields]
        coded = tuple(map(_empty, shapes, kinds))
    run(
        encode_tasks,
        SIGNATURE,
        _job(planned.encoding, codec, coded, states, angles),
        states.numel(),
    )
    return coded


def decode(
    codec: Codec,
    coded: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    positions: torch.Tensor | None,
    bound: int,
) -> bool:
    """`Codec.decode` for tensors on the CPU; False where there is no kernel."""
    planned = plan(codec)
    if planned is None or not _is_fit(planned, out) or not _is_contiguous(out, 1):
        return False
    for tensor, field in zip(coded, codec.fields, strict=True):
        if tensor.dtype != field.dtype or not _is_contiguous(tensor, len(field.shape)):
            return False
    angles = _angles(codec, out, positions, bound)
    if angles is None:
        return False
    job = _job(planned.decoding, codec, coded, out, angles)
    run(decode_tasks, SIGNATURE, job, out.numel())
    return True


def _is_fit(planned: Plan, states: torch.Tensor) -> bool:
    return states.dtype in _KINDS and planned.kv_heads in (None, states.shape[1])


def _is_contiguous(tensor: torch.Tensor, axes: int) -> bool:
    """Whether the last axes lie without gaps."""
    expected = 1
    for axis in range(-1, -1 - axes, -1):
        if tensor.shape[axis] > 1 and tensor.stride(axis) != expected:
            return False
        expected *= tensor.shape[axis]
    return True


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


# Jobs


def _angles(
    codec: Codec, states: torch.Tensor, positions: torch.Tensor | None, bound: int
) -> tuple[torch.Tensor, ...] | None:
    """Cosines, sines and positions; nothing if no mean turns; None if no kernel can read them."""
    if not turns(codec.center):
        return ()
    assert codec.center is not None and codec.center.angles is not None
    if positions is None or positions.shape != (states.shape[0], states.shape[2]):
        return None
    cos, sin = codec.center.angles(bound)
    is_fit = (
        cos.dtype == sin.dtype == torch.float32
        and cos.stride() == sin.stride()
        and _is_contiguous(cos, 1)
        and positions.dtype in (torch.int32, torch.int64)
        and positions.device == cos.device == states.device
    )
    return (cos, sin, positions) if is_fit else None


def _job(
    template: Job,
    codec: Codec,
    coded: tuple[torch.Tensor, ...],
    states: torch.Tensor,
    angles: tuple[torch.Tensor, ...],
) -> Job:
    """The job `template` with its tensors; they must outlive it."""
    batch, kv_heads, tokens, _ = states.shape
    job = Job.from_buffer_copy(template)
    job.tokens, job.kv_heads, job.spans = tokens, kv_heads, -(-tokens // job.span)
    job.tasks = batch * job.spans
    job.states, job.states_batch, job.states_head, job.states_token = _places(states)
    job.states_kind = _KINDS[states.dtype]
    job.codes, job.codes_batch, job.codes_head, unit = _places(coded[0])
    job.codes_span, job.codes_token = job.span * unit, unit
    if codec.scheme.group_size is not None:
        job.codes_span, job.codes_token = unit, codec.row_bytes
    if len(coded) > 1:
        job.scale, job.scale_batch, job.scale_head, job.scale_unit = _places(coded[1])
    if len(coded) > 2:
        job.middle, job.middle_batch, job.middle_head, job.middle_unit = _places(coded[2])
    if angles:
        _set_angles(job, *angles)
    return job


def _set_angles(job: Job, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
    job.cos, job.sin, job.angles_row = cos.data_ptr(), sin.data_ptr(), 4 * cos.stride(0)
    job.last_position = len(cos) - 1
    size = job.positions_size = positions.itemsize
    job.positions = positions.data_ptr()
    job.positions_batch, job.positions_token = (size * stride for stride in positions.stride())


def _places(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, and bytes from one to the next along each of the first three axes."""
    size = tensor.itemsize
    batch, head, token = tensor.stride()[:3]
    return tensor.data_ptr(), size * batch, size * head, size * token
