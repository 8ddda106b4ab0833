"""The attention kernel: softmax attention of queries over a split of the stored tokens.

A program has the queries of one row that share a KV head, the *lanes*, and reads each of its tokens
once for all of them. Its tokens are of one region, by how keys and values are stored::

    token    0 1 2 3 | 4 …                      … 979 | 980 …        … 1003 | 1004 … 1023
    keys     exact   | codes                          | exact               | exact
    values   exact   | codes                          | codes               | exact
    region   exact   | coded                          | mixed               | exact

Scores of coded keys are::

    score = scale * (q' · codes) + middle * sum(q') + q · mean(position)

with q' the query rotated and scaled by channel as the keys were when they were stored, so that
nothing is done to a code but a product (`triton_queries` prepares it). Sums over coded values stay
in that form, too, until `triton_queries` turns them back.

With 16-bit queries the products are of float16, in which codes are exact. Queries and weights are
brought into its range, and queries are the sum of two float16 where one is not exact. float32
queries take products of float32.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from .triton_shapes import RUNS, Codes, Found, Lanes, Rows, Split, Stored
from .triton_tiles import (
    LIFT,
    add_coded,
    add_exact,
    coded_scores,
    exact_queries,
    exact_tile,
    folded_queries,
    nothing,
    product,
    store_sums,
    wave_scores,
)

_LOG2E = tl.constexpr(1.4426950408889634)

_UNSTEADY = [
    *("factor", "softcap", "kv_heads", "new", "lanes", "past", "window", "positions_first"),
    *("key_first", "key_cut", "key_jump", "key_scale_jump"),
    *("value_first", "value_cut", "value_jump", "value_scale_jump"),
    *(f"key_{word}{number}" for word in ("run", "from") for number in range(RUNS)),
    *(f"value_{word}{number}" for word in ("run", "from") for number in range(RUNS)),
    *("coded_origin", "coded_start", "coded_stop", "coded_tiles", "coded_splits"),
    *("mixed_origin", "mixed_start", "mixed_stop", "mixed_tiles", "mixed_splits"),
    *("exact_first", "exact_front", "exact_back", "exact_stop", "exact_tiles"),
]
"""Numbers that change from step to step: no kernel is compiled anew for them."""

_SOMEWHERE = ["key_scale", "key_middle", "value_scale", "value_middle", "positions"]
"""Views that begin at any token; likewise."""


@triton.jit(do_not_specialize=_UNSTEADY, do_not_specialize_on_alignment=_SOMEWHERE)
def attend_kernel(
    # Tensors with strides, as triton_shapes has them.
    query,
    turned,
    key,
    value,
    key_exact,
    value_exact,
    key_scale,
    key_middle,
    value_scale,
    value_middle,
    positions,
    # Results: float32 [groups, splits, lanes, value_dim] and [groups, splits, lanes, 2].
    sums,
    tops,
    factor: tl.float32,
    softcap: tl.float32,
    kv_heads: tl.int32,
    new: tl.int32,
    lanes: tl.int32,
    past: tl.int32,
    window: tl.int32,
    positions_first: tl.int32,
    # Codes: the token that would begin their tensors, the first of the second part, and how much
    # farther on that lies, in codes and in scales.
    key_first: tl.int32,
    key_cut: tl.int32,
    key_jump: tl.int64,
    key_scale_jump: tl.int64,
    value_first: tl.int32,
    value_cut: tl.int32,
    value_jump: tl.int64,
    value_scale_jump: tl.int64,
    # Exact runs: their first tokens, and the tokens that would begin their tensors.
    key_run0: tl.int32,
    key_run1: tl.int32,
    key_run2: tl.int32,
    key_run3: tl.int32,
    key_from0: tl.int32,
    key_from1: tl.int32,
    key_from2: tl.int32,
    key_from3: tl.int32,
    value_run0: tl.int32,
    value_run1: tl.int32,
    value_run2: tl.int32,
    value_run3: tl.int32,
    value_from0: tl.int32,
    value_from1: tl.int32,
    value_from2: tl.int32,
    value_from3: tl.int32,
    # Regions: where tiles begin, first token, token after the last, tiles to a split.
    coded_origin: tl.int32,
    coded_start: tl.int32,
    coded_stop: tl.int32,
    coded_tiles: tl.int32,
    coded_splits: tl.int32,
    mixed_origin: tl.int32,
    mixed_start: tl.int32,
    mixed_stop: tl.int32,
    mixed_tiles: tl.int32,
    mixed_splits: tl.int32,
    # The exact region has two pieces: `exact_front` tokens from `exact_first` on, and others from
    # `exact_back` on, `exact_stop` together.
    exact_first: tl.int32,
    exact_front: tl.int32,
    exact_back: tl.int32,
    exact_stop: tl.int32,
    exact_tiles: tl.int32,
    SHAPE: tl.constexpr,
):
    """A program for each block of lanes and split: first the coded region's, then mixed, exact."""
    blocks = tl.cdiv(lanes, SHAPE.lanes)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    row, head = group // kv_heads, group % kv_heads
    lane = (tl.program_id(0) % blocks) * SHAPE.lanes + tl.arange(0, SHAPE.lanes)
    raw = query.raw + row * query.row + (head * (lanes // new) + lane // new) * query.head
    raw += (lane % new) * query.token
    if SHAPE.pairs:
        positions += row * turned.position_row - positions_first * turned.position_token
    newest = past + lane % new
    asking = Lanes(lane, raw, positions, lanes, group, newest, newest - window, factor, softcap)
    key_at = (key_first, key_cut, key_jump, key_scale_jump)
    value_at = (value_first, value_cut, value_jump, value_scale_jump)
    key_runs = (key_run0, key_run1, key_run2, key_run3)
    key_froms = (key_from0, key_from1, key_from2, key_from3)
    value_runs = (value_run0, value_run1, value_run2, value_run3)
    value_froms = (value_from0, value_from1, value_from2, value_from3)
    stored = Stored(
        _codes(key, key_scale, key_middle, row, head, key_at),
        _codes(value, value_scale, value_middle, row, head, value_at),
        _rows(key_exact, row, head, key_runs, key_froms),
        _rows(value_exact, row, head, value_runs, value_froms),
    )
    split = tl.program_id(1)
    found = Found(sums, tops, (group * tl.num_programs(1) + split) * lanes + lane)
    if split < coded_splits:
        if SHAPE.keys.kind != "exact" and SHAPE.values.kind != "exact":
            begin = coded_origin + split * coded_tiles * SHAPE.tokens
            end = tl.minimum(begin + coded_tiles * SHAPE.tokens, coded_stop)
            tokens = Split(begin, end, coded_start, coded_stop, coded_start, 0, 0)
            _attend(query, turned, asking, stored, tokens, found, True, True, SHAPE)
    elif split < coded_splits + mixed_splits:
        if SHAPE.mixed != "none":
            KEYS: tl.constexpr = SHAPE.mixed == "key"
            VALUES: tl.constexpr = SHAPE.mixed == "value"
            begin = mixed_origin + (split - coded_splits) * mixed_tiles * SHAPE.exact_tokens
            end = tl.minimum(begin + mixed_tiles * SHAPE.exact_tokens, mixed_stop)
            tokens = Split(begin, end, mixed_start, mixed_stop, mixed_start, 0, 0)
            _attend(query, turned, asking, stored, tokens, found, KEYS, VALUES, SHAPE)
    else:
        begin = (split - coded_splits - mixed_splits) * exact_tiles * SHAPE.exact_tokens
        end = tl.minimum(begin + exact_tiles * SHAPE.exact_tokens, exact_stop)
        back_shift = exact_back - exact_front
        tokens = Split(begin, end, begin * 0, exact_stop, exact_front, exact_first, back_shift)
        _attend(query, turned, asking, stored, tokens, found, False, False, SHAPE)


@triton.jit
def _codes(slot, scale, middle, row, head, at):
    """The codes of one head."""
    codes = slot.codes + row * slot.row + head * slot.head
    place = row * slot.scale_row + head * slot.scale_head
    scale += place
    middle += place
    return Codes(codes, scale, middle, slot.unit, slot.scale_unit, at[0], at[1], at[2], at[3])


@triton.jit
def _rows(slot, row, head, firsts, froms):
    """The exact runs of one head."""
    return Rows(
        slot.runs[0] + row * slot.rows[0] + head * slot.heads[0],
        slot.runs[1] + row * slot.rows[1] + head * slot.heads[1],
        slot.runs[2] + row * slot.rows[2] + head * slot.heads[2],
        slot.runs[3] + row * slot.rows[3] + head * slot.heads[3],
        slot.tokens,
        firsts,
        froms,
    )


@triton.jit
def _attend(
    query,
    turned,
    asking,
    stored,
    tokens,
    found,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Attention over the tokens of a split, whose keys and values are coded or not."""
    TOKENS: tl.constexpr = SHAPE.tokens if KEYS and VALUES else SHAPE.exact_tokens
    KEY: tl.constexpr = SHAPE.keys
    VALUE: tl.constexpr = SHAPE.values
    queries = folded_queries(query, asking, SHAPE) if KEYS else exact_queries(asking, KEY)
    state = nothing(VALUES, SHAPE)
    # Whether a lane may not see what another one does.
    PARTIAL: tl.constexpr = SHAPE.several and (SHAPE.windowed or not (KEYS or VALUES))
    for at in tl.range(tokens.begin, tokens.end, TOKENS, num_stages=SHAPE.stages):
        index = at + tl.arange(0, TOKENS)
        # One comparison: what lies before the first token is a large number without its sign.
        there = (index - tokens.start).to(tl.uint32) < (tokens.stop - tokens.start).to(tl.uint32)
        token = index
        if not (KEYS or VALUES):
            token += tl.where(index < tokens.front, tokens.front_shift, tokens.back_shift)
        if KEYS:
            scores = coded_scores(
                queries, stored.coded_keys, at, there, asking.factor, TOKENS, SHAPE
            )
            if SHAPE.pairs:
                scores += wave_scores(query, turned, asking, token, there, TOKENS, SHAPE)
        else:
            tile = exact_tile(stored.exact_keys, token, there, KEY)
            scores = product(queries, tl.trans(tile), SHAPE) * asking.factor
        seen = _seen(token, there, asking, KEYS or VALUES, SHAPE)
        scores = tl.where(seen, _capped(scores, asking, SHAPE), float("-inf"))
        if VALUES:
            values = stored.coded_values
            state = add_coded(state, scores, seen, values, at, there, TOKENS, PARTIAL, SHAPE)
        else:
            tile = exact_tile(stored.exact_values, token, there, VALUE)
            state = add_exact(state, scores, seen, tile, TOKENS, PARTIAL, SHAPE)
    held = asking.lane < asking.count
    tl.store(found.tops + found.place * 2, state.top - LIFT, mask=held)
    tl.store(found.tops + found.place * 2 + 1, tl.sum(state.total, 1), mask=held)
    store_sums(state, found.sums + found.place * VALUE.dim, held, VALUES, SHAPE)


@triton.jit
def _capped(scores, asking, SHAPE: tl.constexpr):
    """Scores to the base of 2."""
    if SHAPE.softcapped:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        power = tl.exp2(scores * (2.0 * _LOG2E / asking.softcap))
        scores = (1.0 - 2.0 / (power + 1.0)) * (asking.softcap * _LOG2E)
    return scores


@triton.jit
def _seen(token, there, asking, PAST: tl.constexpr, SHAPE: tl.constexpr):
    """Which tokens each lane sees, ``[lanes, tokens]``; ``[1, tokens]`` where that is the same."""
    seen = there[None, :]
    if not PAST:
        seen = seen & (token[None, :] <= asking.newest[:, None])
    if SHAPE.windowed:
        seen = seen & (token[None, :] > asking.oldest[:, None])
    return seen
