"""Attention over codes on the CPU: what the compiled kernel needs to know about a call."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from kvquant.quantize import numba_formats as formats
from kvquant.quantize.codec import Center, Codec
from kvquant.quantize.numba_panel import FIRST_SECTION, SECTIONS
from kvquant.quantize.numba_plan import Plan, plan, turns
from kvquant.quantize.numba_threads import run
from kvquant.quantize.numba_vectors import LANES

from .numba_attend import attend_tasks
from .numba_job import (
    BLOCK,
    CODED,
    EXACT,
    QUAD,
    RUN_NUMBERS,
    SIGNATURE,
    SPAN_NUMBERS,
    TILE,
    AttendJob,
)
from .stored import Run, StoredRows

MOST_QUERIES = 16
"""Tokens of a call beyond which matrix products are faster."""

_KINDS = {torch.float32: formats.FP32, torch.bfloat16: formats.BF16, torch.float16: formats.FP16}

_SCORE_BYTES = 1 << 15
_LONGEST_SPAN = 512


def refusal(query: torch.Tensor, stored: StoredRows) -> str | None:
    """Why the kernel cannot do a call, in a few words; None if it can."""
    if type(query) is not torch.Tensor or query.device.type != "cpu":
        return "not on the CPU"
    if query.dtype not in _KINDS:
        return f"queries are {query.dtype}"
    if stored.new > MOST_QUERIES:
        return f"{stored.new} tokens at once"
    if query.stride(3) != 1:
        return "queries have gaps"
    for one in (*stored.keys, *stored.values):
        if not _is_coded(one):
            exact = one.held[0]
            if exact.dtype not in _KINDS:
                return f"exact tokens are {exact.dtype}"
            if exact.stride(3) != 1:
                return "exact tokens have gaps"
    if any(one.codec is not None and turns(one.codec.center) for one in stored.values):
        return "values have a mean that turns"
    return None


def attend(
    query: torch.Tensor,
    stored: StoredRows,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attend_reference`, in float32; where `refusal` has nothing against it.

    Returns:
        ``[rows, heads, new, value_dim]``, in the dtype of `query`; a view of
        ``[rows, new, heads, value_dim]``.
    """
    out = _attend(query, stored, scaling, softcap, sinks)
    if stored.new > 1 and bool(out.isnan().any()):
        # Zero times NaN is NaN: perhaps in a token that is not seen. One by one, none of those is
        # read.
        for number in range(stored.new):
            one, known = slice(number, number + 1), stored.seen_by(number)
            out[:, :, one] = _attend(query[:, :, one], known, scaling, softcap, sinks)
    return out


def _attend(
    query: torch.Tensor,
    stored: StoredRows,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, heads, new, _ = query.shape
    template = _template(query, stored)
    job = AttendJob.from_buffer_copy(template.job)
    out = query.new_empty((rows, new, heads, job.value_dim)).transpose(1, 2)
    job.past, job.window = stored.past, stored.window or 0
    job.scaling, job.softcap, job.has_softcap = scaling, softcap or 0.0, softcap is not None
    held = [_place_calls(job, query, out), _place_sinks(job, sinks)]
    held += _place_runs(job, stored, rows, template.span)
    if job.pairs:
        held += _place_angles(job, stored)
    run(attend_tasks, SIGNATURE, job, rows * heads * (stored.past + new) * job.key_dim)
    del held  # addresses in the job were of these
    return out


@dataclass(frozen=True, eq=False)
class _Template:
    """A job that lacks only what changes from call to call.

    Attributes:
        job: The job.
        span: Tokens of a span.
        held: What addresses in the job are of.
    """

    job: AttendJob
    span: int
    held: tuple[object, ...]


_templates: WeakKeyDictionary[Codec, dict[tuple[int, ...], _Template]] = WeakKeyDictionary()


def _template(query: torch.Tensor, stored: StoredRows) -> _Template:
    """The template of a layer, made once for each shape of its calls."""
    key, value = _codec(stored.keys), _codec(stored.values)
    plans = [None if codec is None else plan(codec) for codec in (key, value)]
    exact = stored.values[-1].held[0]
    shape = (*query.shape[1:], exact.shape[1], exact.shape[3])
    owner = key or value
    if owner is None:
        return _make(shape, key, *plans)
    known = _templates.setdefault(owner, {})
    place = (*shape, *map(id, plans))
    if place not in known:
        known[place] = _make(shape, key, *plans)
    return known[place]


def _make(
    shape: tuple[int, ...], key: Codec | None, key_plan: Plan | None, value_plan: Plan | None
) -> _Template:
    job, section = AttendJob(), 0
    held: list[object] = [key_plan, value_plan]
    heads, job.new, job.key_dim, job.kv_heads, job.value_dim = shape
    job.group = heads // job.kv_heads
    job.query_count = job.group * job.new
    job.rows = -(-job.query_count // QUAD) * QUAD
    job.key_pitch, job.value_pitch = _pitch(job.key_dim), _pitch(job.value_dim)
    if key is not None and key_plan is not None:
        job.key_plan = ctypes.addressof(key_plan.decoding)
        job.key_coder = ctypes.addressof(key_plan.encoding)
        section = key_plan.decoding.section
        if turns(key.center):
            assert key.center is not None
            pairs = _turning_pairs(key.center)
            job.pairs, job.pair_table = len(pairs), pairs.data_ptr()
            held.append(pairs)
    if value_plan is not None:
        job.value_plan = ctypes.addressof(value_plan.decoding)
        section = max(section, value_plan.decoding.section)
    span = min(_LONGEST_SPAN, max(BLOCK, _SCORE_BYTES // 4 // job.rows // BLOCK * BLOCK))
    # Scores are written up to a square beyond the last.
    job.score_pitch = 4 * (span + BLOCK)
    # Largest score and sum of weights of each query, then rows of sums.
    job.partial_bytes = _whole_lines(job.rows * (8 + job.value_pitch))
    _place_areas(job, FIRST_SECTION + SECTIONS * section)
    return _Template(job, span, tuple(held))


def _codec(runs: tuple[Run, ...]) -> Codec | None:
    """The codec of the runs that have codes; numbers in 16 bits are as good as exact ones."""
    return next((one.codec for one in runs if _is_coded(one)), None)


def _is_coded(one: Run) -> bool:
    return one.codec is not None and one.codec.scheme.format.is_scaled


def _pitch(dim: int) -> int:
    """Bytes of a row that is read into: whole vectors, and one more."""
    return 4 * (-(-dim // LANES) * LANES + LANES)


def _place_calls(job: AttendJob, query: torch.Tensor, out: torch.Tensor) -> object:
    for name, tensor in (("query", query), ("out", out)):
        batch, head, token = (tensor.itemsize * stride for stride in tensor.stride()[:3])
        setattr(job, name, tensor.data_ptr())
        setattr(job, f"{name}_batch", batch)
        setattr(job, f"{name}_head", head)
        setattr(job, f"{name}_token", token)
        setattr(job, f"{name}_kind", _KINDS[tensor.dtype])
    return query, out


def _place_sinks(job: AttendJob, sinks: torch.Tensor | None) -> object:
    if sinks is None:
        return None
    logits = sinks.detach().float().contiguous()
    job.sinks = logits.data_ptr()
    return logits


def _place_runs(job: AttendJob, stored: StoredRows, rows: int, length: int) -> list[object]:
    """Runs, spans, and the memory that spans write to."""
    keys, values = (
        array("q", [number for one in runs for number in _numbers(one)])
        for runs in (stored.keys, stored.values)
    )
    spans = array("q", [number for span in _spans(stored, length) for number in span])
    job.keys, job.key_runs = keys.buffer_info()[0], len(stored.keys)
    job.values, job.span_table = values.buffer_info()[0], spans.buffer_info()[0]
    job.spans = len(spans) // SPAN_NUMBERS
    job.tasks = rows * job.kv_heads * job.spans
    size = job.tasks * job.partial_bytes
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    turns_taken = array("q", bytes(8 * rows * job.kv_heads))
    job.partial, job.turns = memory.data_ptr(), turns_taken.buffer_info()[0]
    return [keys, values, spans, memory, turns_taken]


def _whole_lines(size: int) -> int:
    """Rounded up to cache lines."""
    return -(-size // 64) * 64


def _spans(stored: StoredRows, length: int) -> Iterator[tuple[int, int, int]]:
    """Tokens that are seen, cut where runs of values end: first, one past the last, and the run."""
    seen = stored.first_seen(0)
    for index, one in enumerate(stored.values):
        start = max(one.first, seen)
        while start < one.stop:
            stop = min(start + length, one.stop)
            yield start, stop, index
            start = stop


def _numbers(one: Run) -> list[int]:
    """What describes a run, in the order of numba_job."""
    found = [one.first, one.stop, CODED if _is_coded(one) else EXACT]
    codes = one.held[0]
    found += _place(codes, one.place)
    found.append(one.codec.row_bytes if one.codec else 0)
    found.append(_KINDS.get(codes.dtype, 0))
    for tensor in one.held[1:]:
        found += _place(tensor, one.place)
    return found + [0] * (RUN_NUMBERS - len(found))


def _place(tensor: torch.Tensor, unit: int) -> tuple[int, int, int, int]:
    """Address of a unit, and bytes from one row, KV head and unit to the next."""
    size, strides = tensor.itemsize, tensor.stride()
    step = size * strides[2]
    return tensor.data_ptr() + unit * step, size * strides[0], size * strides[1], step


def _place_areas(job: AttendJob, used: int) -> None:
    """Divides a thread's memory, of which the first bytes are used by the codecs' functions."""
    queries, floats = job.rows * job.key_pitch, 4 * job.rows
    pitch = max(job.key_pitch, job.value_pitch)
    joined = job.rows * (2 * job.value_pitch + 4)
    place = _whole_lines(used)
    for name, size in (
        ("plain_queries", queries),
        ("turned_queries", queries),
        ("folded_queries", queries),
        ("constants", floats),
        ("totals", floats),
        ("lifts", floats),
        ("pair_terms", 2 * floats * job.pairs),
        ("scores", max(job.rows * job.score_pitch, joined)),
        ("factors", 8 * TILE),
        ("products", 4 * QUAD * (TILE + 2 * LANES)),
        ("weights", 4 * QUAD * (TILE + LANES)),
        ("tile", TILE * pitch),
    ):
        setattr(job, name, place)
        place += _whole_lines(size)
    job.scratch = place


@dataclass(frozen=True)
class _Columns:
    """Cosines and sines by pair and position, each pair a row; from a table by position."""

    source: int
    cos: torch.Tensor
    sin: torch.Tensor


_columns: WeakKeyDictionary[object, _Columns] = WeakKeyDictionary()
_pairs: WeakKeyDictionary[Center, torch.Tensor] = WeakKeyDictionary()


def _place_angles(job: AttendJob, stored: StoredRows) -> list[object]:
    """Cosines and sines by pair, and the tokens' positions."""
    coded = [one for one in stored.keys if _is_coded(one)]
    codec, first, stop = coded[0].codec, coded[0].first, coded[-1].stop
    assert codec is not None and codec.center is not None
    columns, positions = _angles(codec.center, stored.bound), stored.positions(first, stop)
    assert positions is not None
    job.cos, job.sin = columns.cos.data_ptr(), columns.sin.data_ptr()
    job.angles_row = 4 * columns.cos.stride(0)
    size = job.positions_size = positions.itemsize
    positions = positions if positions.stride(1) == 1 else positions.contiguous()
    job.positions, job.positions_first = positions.data_ptr(), first
    job.positions_batch = size * positions.stride(0)
    return [columns, positions]


def _turning_pairs(center: Center) -> torch.Tensor:
    """Number and both channels of each pair whose mean turns in some head, int64 ``[pairs, 3]``."""
    found = _pairs.get(center)
    if found is None:
        assert center.turned is not None and center.layout is not None
        first, second = center.layout.split(torch.arange(center.turned.shape[1], device="cpu"))
        one, other = center.layout.split(center.turned)
        some = (one.abs() + other.abs()).amax(0) > 0
        numbers = torch.arange(len(first), device="cpu")
        found = torch.stack((numbers, first, second), dim=1)[some].contiguous()
        _pairs[center] = found
    return found


def _angles(center: Center, bound: int) -> _Columns:
    """The table of angles, turned over once for each time that it grows."""
    angles = center.angles
    assert angles is not None
    cos, sin = angles(bound)
    found = _columns.get(angles)
    if found is None or found.source != cos.data_ptr() or found.cos.shape[1] < len(cos):
        found = _Columns(cos.data_ptr(), *(_turned_over(table) for table in (cos, sin)))
        _columns[angles] = found
    return found


def _turned_over(table: torch.Tensor) -> torch.Tensor:
    """Rows by pair, with room to read a square beyond the last position."""
    rows = table.new_zeros((table.shape[1], len(table) + BLOCK + LANES))
    rows[:, : len(table)] = table.T
    return rows
