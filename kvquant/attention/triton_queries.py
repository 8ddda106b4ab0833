"""Kernels before and after the attention kernel: a program for each query.

`fold_kernel` does to queries what was done to the keys when they were stored: it rotates them, or
scales them by channel, so that their products with codes are scores.

`combine_kernel` adds up what the splits found, and does to the sums over coded values the inverse
of what was done to the values::

    out = (R^T (scale ∘ coded) + weight of coded values * mean + exact) / weight
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["factor", "turn", "kv_heads", "heads", "new"])
def fold_kernel(
    # [rows, heads, new, DIM] with strides.
    raw,
    row_stride,
    head_stride,
    token_stride,
    # Of the keys' codec: factors and mean [kv_heads, DIM], rotation [DIM, DIM], or None.
    scale,
    mean,
    rotation,
    # Rotary pairs with a mean that turns: channels [PAIRS], means [kv_heads, PAIRS].
    one,
    other,
    one_mean,
    other_mean,
    # Results, as triton_shapes.Query has them.
    folded,
    facts,
    waves,
    factor: tl.float32,
    turn: tl.float32,
    kv_heads: tl.int32,
    heads: tl.int32,
    new: tl.int32,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Folds a query, `BLOCK` channels at once; entries of `rotation` are in units of `turn`."""
    query = tl.program_id(0).to(tl.int64)
    row, head, token = query // (heads * new), query // new % heads, query % new
    shared = heads // kv_heads
    kv_head = head // shared
    lane = (row * kv_heads + kv_head) * shared * new + head % shared * new + token
    raw += row * row_stride + head * head_stride + token * token_stride
    channel = tl.arange(0, PAD)
    real = channel < DIM
    numbers = tl.load(raw + channel, mask=real, other=0.0).to(tl.float32)
    score = 0.0
    if mean is not None:
        means = tl.load(mean + kv_head * DIM + channel, mask=real, other=0.0)
        score = tl.sum(numbers * means, 0)
    if scale is not None:
        numbers *= tl.load(scale + kv_head * DIM + channel, mask=real, other=0.0)
    folded += lane * DIM
    if rotation is None:
        tl.store(folded + channel, numbers, mask=real)
        total = tl.sum(numbers, 0)
    else:
        total = 0.0
        for start in range(0, DIM, BLOCK):
            out = start + tl.arange(0, BLOCK)
            held = (out < DIM)[:, None] & real[None, :]
            entry = tl.load(rotation + out[:, None] * DIM + channel[None, :], mask=held, other=0)
            turned = tl.sum(entry.to(tl.float32) * numbers[None, :], 1) * turn
            tl.store(folded + out, turned, mask=out < DIM)
            total += tl.sum(turned, 0)
    tl.store(facts + lane * 2, total * factor)
    tl.store(facts + lane * 2 + 1, score * factor)
    if PAIRS:
        pair = tl.arange(0, PAIRS)
        first = tl.load(raw + tl.load(one + pair)).to(tl.float32) * factor
        second = tl.load(raw + tl.load(other + pair)).to(tl.float32) * factor
        first_mean = tl.load(one_mean + kv_head * PAIRS + pair)
        second_mean = tl.load(other_mean + kv_head * PAIRS + pair)
        waves += lane * 2 * PAIRS + pair
        tl.store(waves, first * first_mean + second * second_mean)
        tl.store(waves + PAIRS, second * first_mean - first * second_mean)


@triton.jit(do_not_specialize=["turn", "kv_heads", "heads", "new", "splits", "coded_splits"])
def combine_kernel(
    # As the attention kernel left them.
    sums,
    tops,
    # Of the values' codec: factors and mean [kv_heads, DIM], rotation [DIM, DIM], or None.
    scale,
    mean,
    rotation,
    # Logits [heads] that take part in the softmax, or None.
    sinks,
    # [rows, new, heads, DIM], without gaps.
    out,
    turn: tl.float32,
    kv_heads: tl.int32,
    heads: tl.int32,
    new: tl.int32,
    splits: tl.int32,
    coded_splits: tl.int32,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attention of a query; values of the first `coded_splits` splits are coded.

    `SPLITS` splits and `BLOCK` channels are worked on at once.
    """
    query = tl.program_id(0).to(tl.int64)
    row, head, token = query // (heads * new), query // new % heads, query % new
    shared = heads // kv_heads
    kv_head = head // shared
    lanes = shared * new
    # Place of the first split; a split farther on lies `lanes` places farther on.
    place = (row * kv_heads + kv_head) * splits * lanes + head % shared * new + token
    top, weight, coded_weight = _total(tops, place, lanes, splits, coded_splits, SPLITS)
    if sinks is not None:
        logit = tl.load(sinks + head).to(tl.float32) * _LOG2E
        highest = tl.maximum(top, logit)
        shrink = tl.exp2(top - highest)
        weight, coded_weight = weight * shrink + tl.exp2(logit - highest), coded_weight * shrink
        top = highest
    channel = tl.arange(0, PAD)
    coded = _summed(sums, tops, place, lanes, 0, coded_splits, top, channel, DIM, SPLITS)
    out += ((row * new + token) * heads + head) * DIM
    if scale is not None:
        coded *= tl.load(scale + kv_head * DIM + channel, mask=channel < DIM, other=0.0)
    if mean is not None:
        mean += kv_head * DIM
    if rotation is None:
        exact = _summed(sums, tops, place, lanes, coded_splits, splits, top, channel, DIM, SPLITS)
        _finish(coded + exact, coded_weight, weight, mean, out, channel, DIM)
    else:
        for start in range(0, DIM, BLOCK):
            some = start + tl.arange(0, BLOCK)
            held = (channel < DIM)[:, None] & (some < DIM)[None, :]
            entry = tl.load(rotation + channel[:, None] * DIM + some[None, :], mask=held, other=0)
            turned = tl.sum(coded[:, None] * entry.to(tl.float32), 0) * turn
            exact = _summed(sums, tops, place, lanes, coded_splits, splits, top, some, DIM, SPLITS)
            _finish(turned + exact, coded_weight, weight, mean, out, some, DIM)


@triton.jit
def _total(tops, place, lanes, splits, coded_splits, SPLITS: tl.constexpr):
    """The largest score of all splits, sum of all weights, and of those of coded values."""
    top = -1e30
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        own = tl.load(tops + (place + split * lanes) * 2, mask=split < splits, other=-1e30)
        top = tl.maximum(top, tl.max(own, 0))
    weight, coded_weight = 0.0, 0.0
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        at = tops + (place + split * lanes) * 2
        own = tl.load(at, mask=split < splits, other=-1e30)
        weights = tl.load(at + 1, mask=split < splits, other=0.0) * tl.exp2(own - top)
        weight += tl.sum(weights, 0)
        coded_weight += tl.sum(tl.where(split < coded_splits, weights, 0.0), 0)
    return top, weight, coded_weight


@triton.jit
def _summed(
    sums,
    tops,
    place,
    lanes,
    first,
    stop,
    top,
    channel,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Sums over the values of the splits from `first` on, of some channels."""
    total = tl.zeros([channel.shape[0]], tl.float32)
    for start in range(first, stop, SPLITS):
        split = start + tl.arange(0, SPLITS)
        there = split < stop
        at = place + split * lanes
        shrink = tl.exp2(tl.load(tops + at * 2, mask=there, other=-1e30) - top)
        held = there[:, None] & (channel < DIM)[None, :]
        own = tl.load(sums + (at * DIM)[:, None] + channel[None, :], mask=held, other=0.0)
        total += tl.sum(own * shrink[:, None], 0)
    return total


@triton.jit
def _finish(total, coded_weight, weight, mean, out, channel, DIM: tl.constexpr):
    """Adds the mean of coded values, divides by the weight, and writes."""
    if mean is not None:
        total += tl.load(mean + channel, mask=channel < DIM, other=0.0) * coded_weight
    tl.store(out + channel, (total / weight).to(out.dtype.element_ty), mask=channel < DIM)
