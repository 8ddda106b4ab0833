"""Attention over codes on an NVIDIA GPU: fold the queries, attend by splits, combine.

Nothing here looks at a number on the GPU, and all sizes are known beforehand, so that a step can be
captured in a CUDA graph. Only the first call with a codec looks at what it does to all tokens.
"""

from __future__ import annotations

import functools

import torch

from .stored import StoredRows
from .triton_append import append
from .triton_attend import attend_kernel
from .triton_launch import IS_INTERPRETED, Launch, start
from .triton_plan import Plan, Region, plan
from .triton_queries import combine_kernel, fold_kernel
from .triton_shapes import Query, Turned
from .triton_slots import RefusedError, Slot

__all__ = ["MOST_QUERIES", "append", "attend", "refusal"]

MOST_QUERIES = 16
"""Tokens of a call beyond which matrix products are faster."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CAPABILITY = (8, 0)
_LOG2E = 1.4426950408889634
_ALL = (1 << 31) - 1
_WARPS = 4
_WIDE_WARPS = 8
_REGISTERS = 255
_TURNED = 128
_SPLITS = 16


def refusal(query: torch.Tensor, stored: StoredRows) -> str | None:
    """Why no kernel can do a call, in a few words; None if one can."""
    if type(query) is not torch.Tensor or query.dtype not in _DTYPES:
        return f"queries are {query.dtype}"
    reason = None if IS_INTERPRETED else _missing(query.device)
    if reason is None and stored.new > MOST_QUERIES:
        reason = f"{stored.new} tokens at once"
    if reason is None and query.stride(3) != 1:
        reason = "queries have gaps"
    if reason is not None:
        return reason
    try:
        plan(query, stored)
    except RefusedError as refused:
        return str(refused)
    return None


def attend(
    query: torch.Tensor,
    stored: StoredRows,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attend_reference`, with sums in float32; where `refusal` has nothing against it.

    Returns:
        ``[rows, heads, new, value_dim]``, in the dtype of `query`; a view of
        ``[rows, new, heads, value_dim]``.
    """
    launched, out = launches(plan(query, stored, softcap is not None), scaling, softcap, sinks)
    start(launched, query.device)
    return out


@functools.cache
def _missing(device: torch.device) -> str | None:
    """What a device lacks."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "not on an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return "compute capability {}.{}, less than 8.0".format(*capability)
    return None


def launches(
    made: Plan, scaling: float, softcap: float | None, sinks: torch.Tensor | None
) -> tuple[list[Launch], torch.Tensor]:
    """The kernels that `attend` starts, and the tensor that the last of them fills."""
    query, shape, lanes = made.query, made.shape, made.lanes
    rows, heads, new, _ = query.shape
    empty = functools.partial(torch.empty, dtype=torch.float32, device=query.device)
    folded = facts = waves = None
    if made.keys.codec is not None:
        folded = empty((made.groups, lanes, shape.keys.dim))
        facts = empty((made.groups, lanes, 2))
        waves = empty((made.groups, lanes, 2, shape.pairs)) if shape.pairs else None
    row, head, token, _ = query.stride()
    asked = Query(query, row, head, token, folded, facts, waves)
    factor = scaling * (1.0 if softcap else _LOG2E)
    sums = empty((made.groups, made.regions.splits, lanes, shape.values.dim))
    tops = empty((made.groups, made.regions.splits, lanes, 2))
    out = query.new_empty((rows, new, heads, shape.values.dim)).transpose(1, 2)
    launched = [
        _attention(made, asked, sums, tops, factor, softcap or 1.0),
        _combination(made, sums, tops, sinks, out),
    ]
    if folded is not None:
        launched.insert(0, _folding(made, asked, factor))
    return launched, out


def _folding(made: Plan, asked: Query, factor: float) -> Launch:
    rows, heads, new, dim = made.query.shape
    known, waves = made.of_keys, made.of_keys.waves
    arguments = {
        "raw": asked.raw,
        "row_stride": asked.row,
        "head_stride": asked.head,
        "token_stride": asked.token,
        "scale": known.scale,
        "mean": known.mean,
        "rotation": known.rotation,
        "one": None if waves is None else waves.one,
        "other": None if waves is None else waves.other,
        "one_mean": None if waves is None else waves.one_mean,
        "other_mean": None if waves is None else waves.other_mean,
        "folded": asked.folded,
        "facts": asked.facts,
        "waves": asked.waves,
        "factor": factor,
        "turn": known.turn,
        "kv_heads": made.kv_heads,
        "heads": heads,
        "new": new,
        "DIM": dim,
        "PAD": made.shape.keys.pad,
        "PAIRS": made.shape.pairs,
        "BLOCK": _block(made.shape.keys.pad),
    }
    return Launch(fold_kernel, (rows * heads * new,), arguments, _WIDE_WARPS)


def _attention(
    made: Plan,
    asked: Query,
    sums: torch.Tensor,
    tops: torch.Tensor,
    factor: float,
    softcap: float,
) -> Launch:
    keys, values, stored, regions = made.keys, made.values, made.stored, made.regions
    turned, positions = _turned(made)
    arguments = {
        "query": asked,
        "turned": turned,
        "key": keys.coded,
        "value": values.coded,
        "key_exact": keys.exact,
        "value_exact": values.exact,
        "key_scale": keys.scale,
        "key_middle": keys.middle,
        "value_scale": values.scale,
        "value_middle": values.middle,
        "positions": positions,
        "sums": sums,
        "tops": tops,
        "factor": factor,
        "softcap": softcap,
        "kv_heads": made.kv_heads,
        "new": stored.new,
        "lanes": made.lanes,
        "past": stored.past,
        "window": _ALL if stored.window is None else stored.window,
        "positions_first": keys.start,
        **_places("key", keys),
        **_places("value", values),
        **_tiles("coded", regions.coded),
        **_tiles("mixed", regions.mixed),
        "exact_first": regions.first,
        "exact_front": regions.front,
        "exact_back": regions.back,
        "exact_stop": regions.exact.stop,
        "exact_tiles": regions.exact.tiles,
        "SHAPE": made.shape,
    }
    grid = (made.groups * made.blocks, regions.splits)
    # Left alone, the assembler would rather spill than let fewer programs run at once.
    registers = _REGISTERS if made.shape.residents == 2 else None
    return Launch(attend_kernel, grid, arguments, _WARPS, made.shape.stages, registers=registers)


def _combination(
    made: Plan,
    sums: torch.Tensor,
    tops: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> Launch:
    rows, heads, new, dim = out.shape
    arguments = {
        "sums": sums,
        "tops": tops,
        "scale": made.of_values.scale,
        "mean": made.of_values.mean,
        "rotation": made.of_values.rotation,
        "sinks": sinks,
        "out": out,
        "turn": made.of_values.turn,
        "kv_heads": made.kv_heads,
        "heads": heads,
        "new": new,
        "splits": made.regions.splits,
        "coded_splits": made.regions.coded_value_splits,
        "DIM": dim,
        "PAD": made.shape.values.pad,
        "SPLITS": _SPLITS,
        "BLOCK": _block(made.shape.values.pad),
    }
    return Launch(combine_kernel, (rows * heads * new,), arguments, _WIDE_WARPS)


def _block(pad: int) -> int:
    """Rows of a rotation that are read at once: all of them, so that memory is waited for once."""
    return pad if pad <= _TURNED else _TURNED // 2


def _places(name: str, it: Slot) -> dict[str, int]:
    """Where the runs of a slot lie."""
    return {
        f"{name}_first": it.origin,
        f"{name}_cut": it.cut,
        f"{name}_jump": it.jump,
        f"{name}_scale_jump": it.scale_jump,
        **{f"{name}_run{number}": first for number, first in enumerate(it.firsts)},
        **{f"{name}_from{number}": first for number, first in enumerate(it.froms)},
    }


def _tiles(name: str, region: Region) -> dict[str, int]:
    return {f"{name}_{field}": value for field, value in region._asdict().items()}


def _turned(made: Plan) -> tuple[Turned, torch.Tensor | None]:
    """Tables of the mean that turns, and positions of the coded keys; nothing if none turns."""
    keys, stored, waves = made.keys, made.stored, made.of_keys.waves
    if waves is None:
        return Turned(None, None, None, 0, 0, 0, 0), None
    assert keys.codec is not None and keys.codec.center is not None
    assert keys.codec.center.angles is not None
    cos, sin = keys.codec.center.angles(stored.bound)
    positions = stored.positions(keys.start, keys.stop)
    assert positions is not None and cos.stride(1) == sin.stride(1) == 1
    row, token = positions.stride()
    return Turned(cos, sin, waves.columns, cos.stride(0), sin.stride(0), row, token), positions
