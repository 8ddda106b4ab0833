"""What the attention kernel does with a tile of tokens."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment,attr-defined,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from .triton_codes import channel_of, codes_of, load_words, parts_of
from .triton_shapes import Folded, Softmax

LIFT = tl.constexpr(14.0)
"""Weights reach 2^14, so that float16 holds small ones with all digits."""

_NOTHING = tl.constexpr(-1e30)
_PAIRS = tl.constexpr(16)


# Products


@triton.jit
def product(one, other, SHAPE: tl.constexpr):
    """Matrix product of float32; what was of 16 bits is exact in tf32."""
    PRECISION: tl.constexpr = "tf32" if SHAPE.half else "tf32x3"
    return tl.dot(one, other, input_precision=PRECISION)


@triton.jit
def added_product(one, other, total, SHAPE: tl.constexpr):
    """`total` plus the matrix product of float32."""
    PRECISION: tl.constexpr = "tf32" if SHAPE.half else "tf32x3"
    return tl.dot(one, other, total, input_precision=PRECISION)


@triton.jit
def _added_codes(one, codes, total, WHOLE: tl.constexpr, SHAPE: tl.constexpr):
    """`total` plus the matrix product with codes; `one` is `WHOLE` if it is exact in float16."""
    if not SHAPE.half:
        return tl.dot(one, codes.to(tl.float32), total, input_precision="tf32x3")
    else:
        near = one.to(tl.float16)
        total = tl.dot(near, codes, total)
        if not WHOLE:
            total = tl.dot((one - near.to(tl.float32)).to(tl.float16), codes, total)
        return total


# Queries


@triton.jit
def exact_queries(asking, KEY: tl.constexpr):
    """Queries as they came, float32."""
    channel = tl.arange(0, KEY.pad)
    held = (asking.lane < asking.count)[:, None] & (channel[None, :] < KEY.dim)
    return tl.load(asking.raw[:, None] + channel[None, :], mask=held, other=0.0).to(tl.float32)


@triton.jit
def folded_queries(query, asking, SHAPE: tl.constexpr):
    """Prepared queries, a tile for each part of the keys' words."""
    KEY: tl.constexpr = SHAPE.keys
    PARTS: tl.constexpr = parts_of(KEY.kind, KEY.word)
    held = asking.lane < asking.count
    place = asking.group * asking.count + asking.lane
    word = tl.arange(0, KEY.block)
    parts = ()
    norm = 0.0
    for part in tl.static_range(PARTS):
        channel = channel_of(word, part, KEY)
        real = held[:, None] & _is_channel(word, channel, KEY)[None, :]
        rows = query.folded + (place * KEY.dim)[:, None] + channel[None, :]
        tile = tl.load(rows, mask=real, other=0.0)
        parts = parts + (tile,)  # noqa: RUF005
        sizes = tl.abs(tile)
        sizes = tl.where(sizes < float("inf"), sizes, 0.0)  # one lane's infinity is not all lanes'
        norm = tl.maximum(norm, tl.max(tl.max(sizes, 1), 0))
    total = tl.load(query.facts + place * 2, mask=held, other=0.0)
    mean = tl.load(query.facts + place * 2 + 1, mask=held, other=0.0)
    # A power of two, so that dividing by it is exact.
    norm = (norm.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    norm = tl.where(norm > 0, norm, 1.0) if SHAPE.half else 1.0
    normed = ()
    for part in tl.static_range(PARTS):
        normed = normed + (parts[part] / norm,)  # noqa: RUF005
    return Folded(normed, norm, total, mean)


@triton.jit
def _is_channel(word, channel, SLOT: tl.constexpr):
    return (word * SLOT.word < SLOT.row) & (channel < SLOT.dim)


# Scores


@triton.jit
def exact_tile(rows, token, there, SLOT: tl.constexpr):
    """Exact keys or values of `token`, float32 ``[tokens, pad]``."""
    at = rows.first + (token - rows.froms[0]).to(tl.int64) * rows.tokens[0]
    second = rows.second + (token - rows.froms[1]).to(tl.int64) * rows.tokens[1]
    third = rows.third + (token - rows.froms[2]).to(tl.int64) * rows.tokens[2]
    fourth = rows.fourth + (token - rows.froms[3]).to(tl.int64) * rows.tokens[3]
    at = tl.where(token >= rows.firsts[1], second, at)
    at = tl.where(token >= rows.firsts[2], third, at)
    at = tl.where(token >= rows.firsts[3], fourth, at)
    EXACT_ALIGN: tl.constexpr = SLOT.exact_align
    at = tl.multiple_of(at, EXACT_ALIGN)
    channel = tl.arange(0, SLOT.pad)
    held = there[:, None]
    if SLOT.dim != SLOT.pad:
        held = held & (channel[None, :] < SLOT.dim)
    return tl.load(at[:, None] + channel[None, :], mask=held, other=0.0).to(tl.float32)


@triton.jit
def _words(slot, at, there, TOKENS: tl.constexpr, SLOT: tl.constexpr):
    """Words of the tokens from `at` on, uint16 ``[tokens, block]``."""
    token = at + tl.arange(0, TOKENS)
    if SLOT.group > 1:
        unit = (at - slot.first) // SLOT.group
        inside = (token - slot.first) % SLOT.group
        place = unit.to(tl.int64) * slot.unit + inside * SLOT.row
    else:
        place = (token - slot.first).to(tl.int64) * slot.unit
    place += tl.where(token >= slot.cut, slot.jump, 0)
    ALIGN: tl.constexpr = SLOT.align
    place = tl.multiple_of(place, ALIGN)
    return load_words(slot.codes + place, there, SLOT)


@triton.jit
def _ranges(slot, at, there, TOKENS: tl.constexpr, SLOT: tl.constexpr):
    """Scales and middles of the tokens from `at` on; middles are of codes that are centred."""
    token = at + tl.arange(0, TOKENS)
    place = (token - slot.first).to(tl.int64) * slot.scale_unit
    place += tl.where(token >= slot.cut, slot.scale_jump, 0)
    scale = tl.load(slot.scale + place, mask=there, other=0.0).to(tl.float32)
    middle = scale
    if SLOT.middle:
        middle = tl.load(slot.middle + place, mask=there, other=0.0).to(tl.float32) + 0.5 * scale
    return scale, middle


@triton.jit
def coded_scores(folded, keys, at, there, factor, TOKENS: tl.constexpr, SHAPE: tl.constexpr):
    """Scores of the keys from `at` on, ``[lanes, tokens]``; without the mean that turns."""
    LANES: tl.constexpr = SHAPE.lanes
    KEY: tl.constexpr = SHAPE.keys
    PARTS: tl.constexpr = parts_of(KEY.kind, KEY.word)
    words = _words(keys, at, there, TOKENS, KEY)
    scores = tl.zeros([LANES, TOKENS], tl.float32)
    if KEY.group > 1:
        scores = _group_scores(folded, keys, words, scores, at, SHAPE) * (folded.norm * factor)
    else:
        for part in tl.static_range(PARTS):
            codes = tl.trans(codes_of(words, part, KEY, SHAPE))
            scores = _added_codes(folded.parts[part], codes, scores, SHAPE.whole, SHAPE)
        norm = folded.norm * (KEY.gain * factor)
        if KEY.scaled:
            scale, middle = _ranges(keys, at, there, TOKENS, KEY)
            scores *= (scale * norm)[None, :]
            if KEY.middle:
                scores += folded.total[:, None] * middle[None, :]
        else:
            scores *= norm
    return scores + folded.mean[:, None]


@triton.jit
def _group_scores(folded, keys, words, scores, at, SHAPE: tl.constexpr):
    """Scores of keys of one group, in units of the queries: its scales go into those."""
    LANES: tl.constexpr = SHAPE.lanes
    KEY: tl.constexpr = SHAPE.keys
    PARTS: tl.constexpr = parts_of(KEY.kind, KEY.word)
    unit = ((at - keys.first) // KEY.group).to(tl.int64)
    place = unit * keys.scale_unit + tl.where(at >= keys.cut, keys.scale_jump, 0)
    word = tl.arange(0, KEY.block)
    shared = tl.zeros([LANES], tl.float32)
    for part in tl.static_range(PARTS):
        channel = channel_of(word, part, KEY)
        real = _is_channel(word, channel, KEY)
        scale = tl.load(keys.scale + place + channel, mask=real, other=0.0).to(tl.float32)
        queries = folded.parts[part]
        if KEY.middle:
            middle = tl.load(keys.middle + place + channel, mask=real, other=0.0).to(tl.float32)
            shared += tl.sum(queries * (middle + 0.5 * scale)[None, :], 1)
        codes = tl.trans(codes_of(words, part, KEY, SHAPE))
        scores = _added_codes(queries * scale[None, :], codes, scores, False, SHAPE)
    return scores * KEY.gain + shared[:, None]


@triton.jit
def wave_scores(
    query,
    turned,
    asking,
    token,
    there,
    TOKENS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Scores of the mean that turns, of coded keys."""
    LANES: tl.constexpr = SHAPE.lanes
    PAIRS: tl.constexpr = SHAPE.pairs
    held = asking.lane < asking.count
    place = (asking.group * asking.count + asking.lane)[:, None] * (2 * PAIRS)
    position = asking.positions + token * turned.position_token
    position = tl.load(position, mask=there, other=0).to(tl.int64)
    scores = tl.zeros([LANES, TOKENS], tl.float32)
    for start in tl.static_range(0, PAIRS, _PAIRS):
        pair = start + tl.arange(0, _PAIRS)
        column = tl.load(turned.columns + pair)
        wave = query.waves + place + pair[None, :]
        cos = turned.cos + position[None, :] * turned.cos_row + column[:, None]
        sin = turned.sin + position[None, :] * turned.sin_row + column[:, None]
        of_cos = tl.load(wave, mask=held[:, None], other=0.0)
        of_sin = tl.load(wave + PAIRS, mask=held[:, None], other=0.0)
        cosines = tl.load(cos, mask=there[None, :], other=0.0)
        sines = tl.load(sin, mask=there[None, :], other=0.0)
        scores = tl.dot(of_cos, cosines, scores, input_precision="tf32x3")
        scores = tl.dot(of_sin, sines, scores, input_precision="tf32x3")
    return scores


# Sums


@triton.jit
def nothing(VALUES: tl.constexpr, SHAPE: tl.constexpr):
    """Attention over no tokens."""
    LANES: tl.constexpr = SHAPE.lanes
    VALUE: tl.constexpr = SHAPE.values
    PARTS: tl.constexpr = parts_of(VALUE.kind, VALUE.word) if VALUES else 1
    WIDTH: tl.constexpr = VALUE.block if VALUES else VALUE.pad
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([LANES, WIDTH], tl.float32),)  # noqa: RUF005
    top = tl.full([LANES], _NOTHING, tl.float32)
    COLUMNS: tl.constexpr = SHAPE.exact_tokens
    total = tl.zeros([LANES, COLUMNS], tl.float32)
    return Softmax(top, total, total, 0.0, sums)


@triton.jit
def _columns(weights, TOKENS: tl.constexpr, SHAPE: tl.constexpr):
    """Sums of every 32nd column: those that a thread has, so that no thread waits for another."""
    LANES: tl.constexpr = SHAPE.lanes
    COLUMNS: tl.constexpr = SHAPE.exact_tokens
    return tl.sum(tl.reshape(weights, (LANES, TOKENS // COLUMNS, COLUMNS)), 1)


@triton.jit
def _weights(state, scores):
    """New tops, what earlier sums shrink by, and weights of `scores`."""
    top = tl.maximum(state.top, tl.max(scores, 1))
    return top, tl.exp2(state.top - top), tl.exp2(scores - (top - LIFT)[:, None])


# What a lane does not see must not reach it as zero times NaN, or times infinity. Where lanes see
# different tokens (`PARTIAL`), values that are no numbers are left out of the sums, which become
# NaN where they were seen.


@triton.jit
def _split(tile):
    """A tile with 0 for what is no number, and 1 in place of that."""
    real = tile * 0.0 == 0.0
    return tl.where(real, tile, 0.0), tl.where(real, 0.0, 1.0).to(tl.float16)


@triton.jit
def _spoilt(sums, seen, wrong):
    """`sums`, but NaN where a lane sees something `wrong`."""
    found = tl.dot(tl.where(seen, 1.0, 0.0).to(tl.float16), wrong)
    return tl.where(found > 0.0, float("nan"), sums)


@triton.jit
def _scaled(weights, numbers, seen, PARTIAL: tl.constexpr):
    """Weights times numbers of their tokens."""
    weights *= numbers[None, :]
    if PARTIAL:
        weights = tl.where(seen, weights, 0.0)
    return weights


@triton.jit
def add_exact(
    state, scores, seen, tile, TOKENS: tl.constexpr, PARTIAL: tl.constexpr, SHAPE: tl.constexpr
):
    """Attention over the tokens of `state` and those of a tile of exact values."""
    top, shrink, weights = _weights(state, scores)
    total = state.total * shrink[:, None] + _columns(weights, TOKENS, SHAPE)
    earlier = state.sums[0] * shrink[:, None]
    if PARTIAL:
        tile, wrong = _split(tile)
        earlier = _spoilt(earlier, seen, wrong)
    sums = added_product(weights, tile, earlier, SHAPE)
    return Softmax(top, total, state.middle, state.unit, (sums,))


@triton.jit
def add_coded(
    state,
    scores,
    seen,
    values,
    at,
    there,
    TOKENS: tl.constexpr,
    PARTIAL: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Attention over the tokens of `state` and those of coded values from `at` on."""
    VALUE: tl.constexpr = SHAPE.values
    # Codes of e4m3 that have scales are read as numbers.
    IS_FLOAT: tl.constexpr = VALUE.kind == "e5m2" or (VALUE.kind == "e4m3" and not VALUE.scaled)
    PARTS: tl.constexpr = parts_of(VALUE.kind, VALUE.word)
    words = _words(values, at, there, TOKENS, VALUE)
    top, shrink, weights = _weights(state, scores)
    total = state.total * shrink[:, None] + _columns(weights, TOKENS, SHAPE)
    middle, unit = state.middle, state.unit
    if VALUE.scaled:
        scale, middles = _ranges(values, at, there, TOKENS, VALUE)
        if VALUE.middle:
            own = _columns(_scaled(weights, middles, seen, PARTIAL), TOKENS, SHAPE)
            middle = middle * shrink[:, None] + own
        unit = tl.maximum(unit, tl.max(scale, 0))
        whole = tl.where(unit > 0, unit, 1.0)
        weights = _scaled(weights, scale / whole, seen, PARTIAL)
        shrink *= state.unit / whole
    sums = ()
    for part in tl.static_range(PARTS):
        codes = codes_of(words, part, VALUE, SHAPE)
        earlier = state.sums[part] * shrink[:, None]
        if PARTIAL and IS_FLOAT:
            codes, wrong = _split(codes)
            if not VALUE.scaled:  # else weights are NaN
                earlier = _spoilt(earlier, seen, wrong)
        sums = sums + (_added_codes(weights, codes, earlier, True, SHAPE),)  # noqa: RUF005
    return Softmax(top, total, middle, unit, sums)


@triton.jit
def store_sums(state, rows, held, VALUES: tl.constexpr, SHAPE: tl.constexpr):
    """Writes sums over values ``[lanes, dim]``, still rotated where the values are."""
    VALUE: tl.constexpr = SHAPE.values
    if not VALUES:
        channel = tl.arange(0, VALUE.pad)
        real = held[:, None] & (channel[None, :] < VALUE.dim)
        tl.store(rows[:, None] + channel[None, :], state.sums[0], mask=real)
    else:
        PARTS: tl.constexpr = parts_of(VALUE.kind, VALUE.word)
        unit = state.unit * VALUE.gain if VALUE.scaled else VALUE.gain
        word = tl.arange(0, VALUE.block)
        middle = tl.sum(state.middle, 1)[:, None]
        for part in tl.static_range(PARTS):
            channel = channel_of(word, part, VALUE)
            real = held[:, None] & _is_channel(word, channel, VALUE)[None, :]
            sums = state.sums[part] * unit + middle
            tl.store(rows[:, None] + channel[None, :], sums, mask=real)
