"""Statistics, scales and drift as terminal tables: the layers that matter, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvquant.fingerprint import Fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.provenance import Provenance
from kvquant.scales import KVScales, TensorScales
from kvquant.scheme import QuantScheme, TensorScheme

from .drift import DriftReport, HeadDrift
from .mean_form import mean_form_lines
from .outliers import OUTLIER_RATIO, Remark, outlier, outlier_ratio, remarks
from .stats import CalibrationStats, ChannelStats, LayerStats
from .wording import model_title, percent

TOP = 8
"""Rows of a table that is not verbose; remarkable layers may double them."""

_SHORT = {"key": "K", "value": "V"}
_BAR = 6
_BLOCKS = " ▏▎▍▌▋▊▉█"


def stats_summary(stats: CalibrationStats, verbose: bool = False) -> RenderableType:
    """Table of the layers with the largest keys, the largest outliers, or a remark.

    Args:
        stats: Statistics of a model.
        verbose: Show every recorded layer.
    """
    found = remarks(stats)
    shown = sorted(stats.layers) if verbose else _layers_that_matter(stats, found)
    largest = max((float(layer.key.amax.max()) for layer in stats.layers.values()), default=0.0)
    table = _table(
        f"{model_title(stats.provenance)}: {_layer_count(shown, stats.layers)}, "
        f"{stats.tokens:,} tokens",
        "layer",
        ("K amax", "right"),
        ("", "left"),
        ("V amax", "right"),
        ("K outlier", "right"),
        ("where", "left"),
        ("K in mean", "right"),
        "remarks",
    )
    for index in shown:
        layer = stats.layers[index]
        amax, far = float(layer.key.amax.max()), outlier(layer.key)
        table.add_row(
            str(index),
            _number(amax),
            Text(_bar(amax / largest if largest else 0.0), style="cyan"),
            _number(float(layer.value.amax.max())),
            _times(far.ratio),
            f"h{far.head} c{far.channel}",
            f"{_mean_share(layer.key):.0%}",
            _remark_cell(index, found),
        )
    return Group(table, *_stats_captions(stats, shown, found))


def scales_summary(scales: KVScales, verbose: bool = False) -> RenderableType:
    """Table of the layers whose keys and values need the widest range, and the means' forms.

    Args:
        scales: Scales of a model.
        verbose: Show every quantized layer.
    """
    slots = ("key", scales.scheme.key), ("value", scales.scheme.value)
    wide = {index: _reach(layer.key, scales.scheme.key) for index, layer in scales.layers.items()}
    shown = sorted(wide if verbose else sorted(wide, key=lambda index: -wide[index])[:TOP])
    table = _table(
        f"{model_title(scales.provenance)}: scales of {_layer_count(shown, scales.layers)}",
        "layer",
        ("K scale", "right"),
        ("K range", "right"),
        ("V scale", "right"),
        ("V range", "right"),
    )
    for index in shown:
        cells = [
            cell
            for slot, scheme in slots
            for cell in _scale_cells(getattr(scales.layers[index], slot), scheme)
        ]
        table.add_row(str(index), *cells)
    caption = Text(
        f"{scales.scheme}; ranges by {scales.method}. "
        f"{_choice(shown, scales.layers, 'widest ranges')}Scale: x ≈ (code - zero point) x scale, "
        "smallest … largest of the layer. Range: what is represented without clipping.",
        style="dim",
    )
    means = [Text(line) for line in mean_form_lines(scales)]
    return Group(table, caption, *means, *_latent_caption(scales.geometry))


def provenance_panel(provenance: Provenance, geometry: CacheGeometry) -> Panel:
    """Panel that says which model, text and versions the numbers come from."""
    versions = ", ".join(f"{name} {number}" for name, number in provenance.versions.items())
    rows: list[tuple[str, Iterable[str]]] = [
        ("model", [provenance.model]),
        ("adapters", provenance.adapters),
        ("fits", map(str, provenance.fingerprints)),
        ("cache", [geometry.summary()]),
        ("text", map(_corpus_line, provenance.corpora)),
        ("tokens", [_tokens_line(provenance)]),
        ("versions", [versions]),
        ("command", provenance.command),
        ("notes", provenance.notes),
    ]
    return _panel("where it comes from", rows)


def prefix_panel(values: Mapping[str, Any]) -> Panel:
    """Panel that says what a prefix holds, and which model it is for.

    Args:
        values: Fields of its header (docs/files.md), and of its ledger ``rows`` and ``tokens``; the
            ``bytes`` of its tensors.
    """
    scales, rows = values["scales"], values["rows"]
    each = "1 row" if rows == 1 else f"each of {rows} rows, padding included"
    made = scales and model_title(Provenance.from_dict(scales["provenance"]))
    return _panel(
        "a quantized prefix",
        [
            ("fits", [str(Fingerprint.from_dict(values["fingerprint"]))]),
            ("cache", [CacheGeometry.from_dict(values["geometry"]).summary()]),
            ("dtype", [values["dtype"]]),
            ("scheme", [str(QuantScheme.from_dict(values["scheme"]))]),
            ("scales", [made and f"of {made}"]),
            ("tokens", [f"{values['tokens']:,} in {each}"]),
            ("size", [f"{values['bytes']:,} bytes"]),
        ],
    )


def drift_table(report: DriftReport, verbose: bool = False) -> RenderableType:
    """The worst heads, the verdict with its limits, and what to do next.

    Args:
        report: From `drift`.
        verbose: Show every head.
    """
    ranked = report.worst_first()
    shown = ranked if verbose else ranked[:TOP]
    table = _table(
        f"{report.tuned} under the scales of {report.base}: "
        f"{'all' if len(shown) == len(ranked) else f'worst {len(shown)} of'} {len(ranked)} heads",
        "layer",
        "head",
        ("amax", "right"),
        ("ratio", "right"),
        ("clipped", "right"),
        ("own", "right"),
        ("base", "right"),
        ("loss", "right"),
        ("moved", "right"),
        ("channel", "right"),
    )
    for head in shown:
        table.add_row(*_drift_cells(head, report))
    caption = Text(
        f"{report.scheme}; ranges by {report.method}. amax: largest magnitude, base → fine-tune. "
        "clipped: share of the fine-tune's values beyond the base's range. own, base, loss: dB of "
        "signal to quantization noise under the fine-tune's own scales, under the base's, and the "
        "difference. moved: the mean, by the head's rms. channel: which grew most, and its ratio.",
        style="dim",
    )
    notes = [Text(f"note: {note}", style="yellow") for note in report.notes]
    return Group(table, caption, *notes, *_verdict(report))


def sharing_table(costs: Sequence[dict[str, Any]]) -> RenderableType:
    """What each model pays for scales that it shares.

    Args:
        costs: From `sharing_costs`.
    """
    table = _table(
        "cost of sharing one set of scales",
        "model",
        ("mean loss", "right"),
        ("worst head's loss", "right"),
        "which",
    )
    for cost in costs:
        losses = (f"{_decibel(cost[name])} dB" for name in ("mean_loss_db", "worst_loss_db"))
        table.add_row(str(cost["name"]), *losses, str(cost["worst"]))
    return table


def _panel(title: str, rows: Iterable[tuple[str, Iterable[str]]]) -> Panel:
    """Lines under a name each; names without a line are left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, lines in rows:
        content = "\n".join(filter(None, lines))
        if content:
            grid.add_row(name, Text(content))
    return Panel(grid, title=title, title_align="left", expand=False)


def _table(title: str, *columns: str | tuple[str, JustifyMethod]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        name, justify = (column, None) if isinstance(column, str) else column
        table.add_column(name, justify=justify or "left")
    return table


def _layers_that_matter(stats: CalibrationStats, found: list[Remark]) -> list[int]:
    """At most `TOP` layers of largest keys or outliers, and as many again that have remarks."""
    by_amax = sorted(stats.layers, key=lambda i: -float(stats.layers[i].key.amax.max()))
    by_ratio = sorted(stats.layers, key=lambda i: -outlier_ratio(stats.layers[i].key))
    ranked = dict.fromkeys(i for pair in zip(by_amax, by_ratio, strict=True) for i in pair)
    top = list(ranked)[:TOP]
    remarked = [i for i in dict.fromkeys(remark.layer for remark in found) if i not in top]
    return sorted([*top, *remarked[:TOP]])


def _layer_count(shown: Sequence[int], layers: Iterable[int]) -> str:
    total = len(list(layers))
    return f"all {total} layers" if len(shown) == total else f"{len(shown)} of {total} layers"


def _choice(shown: Sequence[int], layers: Iterable[int], what: str) -> str:
    """How the layers of a short table were chosen."""
    return "" if len(shown) == len(list(layers)) else f"Shown: {what}; -v shows all. "


def _stats_captions(
    stats: CalibrationStats, shown: Sequence[int], found: list[Remark]
) -> list[Text]:
    lines = [
        Text(
            f"{_choice(shown, stats.layers, 'largest keys and outliers')}"
            "amax: largest magnitude. K outlier: largest channel by the median channel, and "
            "where it is (KV head, channel); from "
            f"{OUTLIER_RATIO:g} x on a shared integer scale serves few but that one. K in mean: "
            f"share of the keys' energy in their mean{_rotation_phrase(stats.layers.values())}: a "
            "cache that keeps the mean apart spends no bits on it.",
            style="dim",
        ),
        *_latent_caption(stats.geometry),
    ]
    hidden = sorted({remark.layer for remark in found} - set(shown))
    if hidden:
        layers = ", ".join(map(str, hidden))
        lines.append(Text(f"layers {layers} have remarks too: --verbose", style="yellow"))
    if any(remark.kind == "outlier-dominated" for remark in found):
        lines.append(
            Text(
                "outlier-dominated layers lose most of their channels under int4, and precision "
                "under int8, if channels share a scale: use --key-granularity per-channel, or fp8",
                style="yellow",
            )
        )
    return lines


def _rotation_phrase(layers: Iterable[LayerStats]) -> str:
    known = [layer.key.mean_unrotated is not None for layer in layers]
    if all(known):
        return " (before rotary embedding)"
    return " (before rotary embedding where that is known)" if any(known) else ""


def _latent_caption(geometry: CacheGeometry) -> list[Text]:
    if not geometry.latent_layers:
        return []
    return [Text("latent layers: K is the latent, V the rotary part", style="dim")]


def _mean_share(stats: ChannelStats) -> float:
    """Share of the energy that lies in the mean, before rotation where it is known."""
    unrotated = stats.mean_unrotated
    mean = stats.mean if unrotated is None else unrotated
    energy = float(stats.mean_square.sum())
    return float(mean.square().sum()) / energy if energy else 0.0


def _remark_cell(layer: int, found: list[Remark]) -> Text:
    lines = [f"{_SHORT[remark.slot]} {remark.text}" for remark in found if remark.layer == layer]
    return Text("\n".join(lines), style="yellow")


def _reach(scales: TensorScales, scheme: TensorScheme) -> float:
    low, high = scales.range(scheme)
    return max(float(-low.min()), float(high.max()))


def _scale_cells(scales: TensorScales, scheme: TensorScheme) -> tuple[str, str]:
    """Smallest and largest scale; smallest and largest value that is not clipped."""
    low, high = scales.range(scheme)
    ends = _number(float(scales.scale.min())), _number(float(scales.scale.max()))
    span = f"{_number(float(low.min()))} … {_number(float(high.max()))}"
    if scheme.symmetric:
        span = f"±{_number(float(high.max()))}"
    return ends[0] if ends[0] == ends[1] else " … ".join(ends), span


def _corpus_line(corpus: dict[str, Any]) -> str:
    used = corpus.get("tokens_used")
    digest = str(corpus.get("sha256", ""))[:12]
    parts = (
        str(corpus.get("source", "")),
        f"{used:,} tokens" if isinstance(used, int) else "",
        f"sha256 {digest}" if digest else "",
    )
    return ", ".join(filter(None, parts))


def _tokens_line(provenance: Provenance) -> str:
    parts = (
        (provenance.tokens, "{:,} recorded"),
        (provenance.context_length, "blocks of {:,}"),
        (provenance.longest_position, "known up to position {:,}"),
    )
    return ", ".join(phrase.format(number) for number, phrase in parts if number)


def _drift_cells(head: HeadDrift, report: DriftReport) -> list[str | Text]:
    limits = report.thresholds
    return [
        str(head.layer),
        f"{_SHORT[head.slot]} {head.head}",
        f"{_number(head.amax_base)} → {_number(head.amax_tuned)}",
        _times(head.amax_ratio),
        _flagged(percent(head.clipped), head.extra_clipped > limits.max_clipped),
        _decibel(head.sqnr_own_db),
        _decibel(head.sqnr_base_db),
        _flagged(_decibel(head.loss_db), head.loss_db > limits.max_loss_db),
        f"{head.mean_shift:.0%}",
        f"c{head.worst_channel} {_times(head.worst_channel_ratio)}",
    ]


def _flagged(text: str, beyond: bool) -> Text:
    return Text(text, style="bold red" if beyond else "")


def _verdict(report: DriftReport) -> list[Text]:
    if report.safe:
        verdict = Text("safe", style="bold green")
        advice = "the fine-tune may keep the base's scales"
    else:
        verdict = Text("recalibrate", style="bold red")
        advice = (
            "next: solve scales from the fine-tune's own statistics (kvquant solve), or one set "
            "that is safe for both (kvquant calibrate --shared)"
        )
    return [
        Text.assemble(verdict, f": {report.reasons[0]}"),
        *map(Text, report.reasons[1:]),
        Text(advice),
    ]


def _number(value: float) -> str:
    """Three significant digits."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def _times(ratio: float) -> str:
    digits = 2 if ratio < 10 else 1 if ratio < 100 else 0
    return "∞" if math.isinf(ratio) else f"{ratio:,.{digits}f}x"


def _decibel(value: float) -> str:
    return _number(value) if math.isinf(value) else f"{value:.1f}"


def _bar(share: float) -> str:
    """Horizontal bar of eighths of a character, `_BAR` wide."""
    eighths = round(share * _BAR * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[rest] if rest else "")
