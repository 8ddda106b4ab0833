"""What a cache holds, for people to read."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvquant.attention.interface import kernel_for
from kvquant.geometry import CacheGeometry
from kvquant.scheme import QuantScheme, TensorScheme

from .companions import state_nbytes
from .layer import QuantizedLayer

if TYPE_CHECKING:
    from .cache import QuantizedCache

_WIDTH = 160


def summary(cache: QuantizedCache) -> str:
    """A table of layers that are alike, the totals, and what was made of calibration."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("layers", "kind", "keys", "values"):
        table.add_column(heading)
    for heading in ("tokens", "live", "held", "bf16", "ratio"):
        table.add_column(heading, justify="right")
    bf16 = 0
    for members, shown in _alike(cache):
        sizes = [sum(column) for column in zip(*(_sizes(cache, i) for i in members), strict=True)]
        bf16 += sizes[2]
        table.add_row(_ranges(members), *shown, *_bytes(*sizes))
    table.add_section()
    # Not their sum: the positions belong to no layer.
    table.add_row("all", "", "", "", "", *_bytes(cache.live_nbytes(), cache.nbytes(), bf16))
    stream = io.StringIO()
    console = Console(file=stream, width=_WIDTH)
    console.print(table)
    for line in _remarks(cache):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _alike(cache: QuantizedCache) -> list[tuple[list[int], tuple[str, ...]]]:
    """Layers that a row can show together, with what it shows."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for index, layer in enumerate(cache.layers):
        geometry = cache.geometry.layers[index]
        if isinstance(layer, QuantizedLayer):
            slots = tuple(_short(cache.plan.slot_scheme(index, slot)) for slot in ("key", "value"))
            shown = (str(geometry), *slots, f"{layer.get_seq_length():,}")
        else:
            shown = (str(geometry), "", "", "")
        rows.setdefault(shown, []).append(index)
    return [(members, shown) for shown, members in rows.items()]


def _short(scheme: TensorScheme) -> str:
    """``int4 per-token``; the line below the table says the rest."""
    if not scheme.format.is_scaled:
        return scheme.format.name
    return f"{scheme.format.name} {scheme.granularity.value}"


def _sizes(cache: QuantizedCache, index: int) -> tuple[int, int, int]:
    """Live bytes, bytes held, and bytes of the same tokens in bf16."""
    layer = cache.layers[index]
    if not isinstance(layer, QuantizedLayer):
        return state_nbytes(layer), state_nbytes(layer), state_nbytes(layer)
    return layer.live_nbytes(), layer.nbytes(), bf16_nbytes(layer)


def bf16_nbytes(layer: QuantizedLayer) -> int:
    """Bytes that the tokens a layer can see would take in bf16."""
    geometry = layer.geometry
    tokens = 0
    for stores in layer.stores:
        rows = next((b.tensors[0].shape[0] for b in stores[0].buffers if b.tensors), 0)
        tokens += rows * (stores[0].length - stores[0].window.first_kept(stores[0].length))
    return 2 * tokens * geometry.kv_heads * (geometry.key_dim + geometry.value_dim)


def _bytes(live: int, held: int, bf16: int) -> tuple[str, ...]:
    ratio = f"{bf16 / live:.2f} x" if live and bf16 else ""
    return size(live), size(held), size(bf16), ratio


def size(count: int) -> str:
    """``12.3 MB``."""
    if count < 1000:
        return f"{count} B"
    shown = float(count)
    for unit in ("kB", "MB"):
        shown /= 1000
        if shown < 999.5:  # what rounds to 1,000 belongs to the next unit
            return f"{shown:.3g} {unit}"
    shown /= 1000
    return f"{shown:.3g} GB" if shown < 999.5 else f"{shown:,.0f} GB"


def _ranges(numbers: list[int]) -> str:
    """``0-4,7`` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _remarks(cache: QuantizedCache) -> list[str]:
    """What was made of the calibration, what the sizes are, and which memory is not among them."""
    dtype = str(cache.plan.decoder.dtype).removeprefix("torch.")
    lines = [
        f"sizes: the model is in {dtype}; live is what the tokens need, held includes room for "
        "more; bf16 is what the same tokens need in bf16, ratio is bf16 / live",
        f"scheme: {cache.scheme}",
    ]
    lines += [*covered_windows(cache.scheme, cache.geometry), *_latent(cache)]
    lines += [*_means(cache), *_unused_ranges(cache)]
    lines.append(f"attention: {attention(cache)}")
    shared = cache.workspace_nbytes()
    if shared:
        lines.append(
            f"beside it: {size(shared)} that all layers share to read into, whatever the number "
            "of layers"
        )
    return lines


def attention(cache: QuantizedCache) -> str:
    """What attends to which layers."""
    reasons: dict[str, list[int]] = {}
    for index in cache.geometry.attention_layers:
        reasons.setdefault(cache.plan.why_dequantized(index), []).append(index)
    attended = reasons.pop("", [])
    if not attended:
        return f"the model's own, on dequantized tokens ({', '.join(reasons)})"
    assert cache.plan.backend is not None
    name, trouble = kernel_for(cache.plan.decoder.device, cache.plan.backend)
    by = "plain torch" if name == "torch" else name
    by += f" ({trouble})" if trouble else ""
    if not reasons:
        return f"over the codes by {by} in {_all(len(attended))}"
    others = "; ".join(f"{_ranges(layers)} ({reason})" for reason, layers in reasons.items())
    return f"over the codes by {by} in layers {_ranges(attended)}; the model's own in {others}"


def _all(count: int) -> str:
    return f"all {count} layers" if count > 1 else "the only layer that caches anything"


def _means(cache: QuantizedCache) -> list[str]:
    """One line on the means that were subtracted."""
    slots: list[tuple[int, str]] = [
        (index, slot)
        for index in cache.geometry.attention_layers
        for slot in ("key", "value")
        if cache.plan.slot_scheme(index, slot).center
    ]
    if not slots:
        return []
    found = {place: cache.plan.tensor_scales(*place) for place in slots}
    known = [place for place, scales in found.items() if scales and scales.mean is not None]
    if not known:
        return ["means: none, the cache is not calibrated; give scales=… for a smaller error"]
    turned: list[Any] = [
        pairs for place in known if (pairs := cache.plan.turned_pairs(*place)) is not None
    ]
    line = f"means: calibrated for {len(known)} of {len(slots)} slots"
    if turned:
        average = sum(int(pairs.sum()) for pairs in turned) / len(turned)
        line += (
            f"; turned with the position in {len(turned)} "
            f"({average:.0f} of {len(turned[0])} rotary pairs on average), fixed in the others"
        )
    return [line]


def covered_windows(scheme: QuantScheme, geometry: CacheGeometry) -> list[str]:
    """A line for each sliding window that the newest exact tokens fill."""
    found = set()
    for index in scheme.quantized_layers(geometry):
        layer, own = geometry.layers[index], scheme.layer(index)
        value = own.rotary_part if layer.is_latent else own.value
        if layer.window is None or (own.key.is_exact and value.is_exact):
            continue
        if own.residual_length >= layer.window - 1 > 0:  # what the next token sees beside itself
            found.add((own.residual_length, layer.window))
    return [
        f"the residual of {residual:,} tokens covers the window of {window:,}: nothing is ever "
        f"quantized there; a residual_length below {window - 1:,} changes that"
        for residual, window in sorted(found)
    ]


def _latent(cache: QuantizedCache) -> list[str]:
    """One line on what the slots of latent layers hold."""
    layers = cache.geometry.latent_layers
    if not layers:
        return []
    line = "latent layers: keys are the latent, values its rotary part"
    if all(cache.plan.slot_scheme(index, "value").is_exact for index in layers):
        line += ", kept exact unless rotary_format is given"
    return [line]


def _unused_ranges(cache: QuantizedCache) -> list[str]:
    """One line on calibrated scales whose ranges the scheme does not use."""
    slots = {
        (index, slot): cache.plan.slot_scheme(index, slot)
        for index in cache.geometry.attention_layers
        for slot in ("key", "value")
    }
    is_used = any(how.granularity.is_static for how in slots.values())
    dynamic = [
        place
        for place, how in slots.items()
        if how.format.is_scaled and not how.granularity.is_static
    ]
    if cache.scales is None or (is_used and not dynamic):
        return []
    line = f"scales: made for {cache.scales.scheme}"
    if is_used:
        which = [f"{name}s" for name in ("key", "value") if any(s == name for _, s in dynamic)]
        where = _ranges(sorted({index for index, _ in dynamic}))
        ranges = f"the ranges of the {' and '.join(which)} in layers {where}"
        return [f"{line}; {ranges} are computed from what is stored instead"]
    why = "computes its ranges from what it stores" if dynamic else "has no ranges"
    has_means = any(
        how.center and (known := cache.plan.tensor_scales(*place)) and known.mean is not None
        for place, how in slots.items()
    )
    used = "only their means are used" if has_means else "nothing of them is used"
    return [f"{line}; this scheme {why}, so that {used}"]
