"""The sums behind a plan, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .formats import held_tokens
from .parallel import Parallel
from .plan import FormatPlan, Request
from .sequence import AlikeLayers, SequencePrice
from .wording import GB, exact, ranges, size, some


def explain(request: Request, plans: Sequence[FormatPlan]) -> Iterator[str]:
    """Every step from a head's bytes to tokens a second."""
    layers = range(len(request.model.geometry.layers))
    for p in plans:
        price = SequencePrice(request.model, p.form, Parallel(), layers)
        same = p.form.name == p.form.description
        yield p.form.name if same else f"{p.form.name}: {p.form.description}"
        for line in (*_sequence(request, price), *_fit(request, p), *_step(request, p)):
            yield f"  {line}"
        yield ""


def _sequence(request: Request, price: SequencePrice) -> Iterator[str]:
    tokens = request.workload.longest
    yield f"one sequence of {tokens:,} tokens, the whole model:"
    for alike in price.alike:
        yield from _layer(price, alike, tokens)
    if price.form.position_nbytes:
        nbytes = price.form.position_nbytes
        yield f"  positions: {tokens:,} x {nbytes} = {tokens * nbytes:,} bytes"
    total = price.nbytes(tokens)
    yield f"  sum: {total:,} bytes = {size(total)}"
    yield f"  a token more, while no window is full: {exact(price.token_nbytes)} bytes"


def _layer(price: SequencePrice, alike: AlikeLayers, tokens: int) -> Iterator[str]:
    """One kind of layer: what a token takes, how many are kept, what is exact, what is beside."""
    layer, number = alike.layer, len(alike.indices)
    beside = alike.companion.constant + alike.companion.per_token * tokens
    nbytes = price.layer_nbytes(alike, tokens)
    yield f"  layers {ranges(alike.indices)}: {layer}"
    terms = []
    if layer.keeps_tokens:
        held, heads = held_tokens(layer, tokens), layer.kv_heads
        per_head, per_token = exact(alike.token_nbytes / heads), exact(alike.token_nbytes)
        yield f"    {some(heads, 'KV head')} x {per_head} = {per_token} bytes a token"
        terms.append(f"{held:,} tokens x {per_token}")
        more = nbytes - beside - held * alike.token_nbytes
        if more:
            terms.append(f"{exact(more)} for tokens kept exactly")
    if beside:
        terms.append(f"{beside:,} beside keys and values")
    if terms:
        yield f"    {' + '.join(terms)} = {nbytes:,} bytes a layer"
        yield f"    x {some(number, 'layer')} = {number * nbytes:,} bytes"


def _fit(request: Request, p: FormatPlan) -> Iterator[str]:
    memory, free, weights = request.memory, request.free_nbytes, request.weights
    if p.outgrows_weights_tokens is not None and weights is not None:
        yield (
            f"cache outgrows weights at {weights.nbytes:,} bytes / "
            f"({p.sequence_nbytes:,} / {request.workload.longest:,}) = "
            f"{p.outgrows_weights_tokens:,} cached tokens"
        )
    if memory is None or free is None:
        return
    yield (
        f"free on a GPU: {memory.nbytes / GB:.2f} GB - {memory.overhead_nbytes / GB:.2f} kept free "
        f"- {(request.weights_nbytes or 0) / GB:.2f} of weights = {free / GB:.2f} GB"
    )
    copies = f" on each of {request.parallel.data} copies" if request.parallel.data > 1 else ""
    limit = "no limit" if p.max_sequences is None else f"{p.max_sequences:,} in all"
    workload = request.workload
    if workload.prefix_tokens or len(set(workload.lengths)) > 1:
        how = f"as many as take no more than {free / GB:.2f} GB"
    else:
        how = f"{free / GB:.2f} GB / {p.gpu_sequence_nbytes / GB:.4f} GB a sequence"
    yield f"sequences that fit: {how} on the fullest GPU{copies}: {limit}"


def _step(request: Request, p: FormatPlan) -> Iterator[str]:
    decode, memory = p.decode, request.memory
    if decode is None or memory is None or memory.bandwidth is None:
        return
    if request.weights is not None and request.weights.expert_nbytes:
        yield (
            f"of the weights {request.weights.chosen} of {request.weights.experts} experts a token "
            "are read: as many as are expected if each token chooses at random"
        )
    speed = memory.bandwidth / 1e12
    yield (
        f"a step reads {decode.weights_nbytes / GB:.2f} GB of weights + "
        f"{decode.cache_nbytes / GB:.2f} GB of cache: / {speed:g} TB/s = "
        f"{decode.step_seconds * 1e3:.2f} ms"
    )
    yield (
        f"{some(decode.sequences, 'sequence')} / {decode.step_seconds * 1e3:.2f} ms = "
        f"{decode.tokens_per_second:,.1f} tokens/s, {1 / decode.step_seconds:,.1f} for each"
    )
    yield f"a cached token costs {decode.token_seconds * 1e9:.2f} ns a step"
