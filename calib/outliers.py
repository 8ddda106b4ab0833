"""Channels that no shared scale serves well, and what else to know of a layer before quantizing."""

from __future__ import annotations

from dataclasses import dataclass

from kvquant.scheme import tensor_format

from .stats import CalibrationStats, ChannelStats

OUTLIER_RATIO = 10.0
"""Largest channel amax by the median one from which on a layer counts as outlier-dominated.

With one int4 scale for all, whose largest code is 7, the median channel then peaks at 0.7 of a
step: what is not near its peak rounds to 0. SmolLM2 has ratios of 2 to 6; a key bias like Qwen2's,
which destroyed int4 caches (huggingface/transformers#35185), makes for far more.
"""


@dataclass(frozen=True)
class Outlier:
    """The channel that reaches farthest.

    Attributes:
        head: KV head.
        channel: Channel within the head.
        ratio: Its amax by the median channel's; channels that are zero throughout do not count.
    """

    head: int
    channel: int
    ratio: float


@dataclass(frozen=True)
class Remark:
    """Something that a person should know of one slot of one layer.

    Attributes:
        layer: Layer index.
        slot: ``key`` or ``value``.
        kind: ``outlier-dominated``, ``beyond-fp8`` or ``all-zero``.
        text: What it is, with numbers; ``h1 c40`` is channel 40 of KV head 1.
    """

    layer: int
    slot: str
    kind: str
    text: str


def outlier(stats: ChannelStats) -> Outlier:
    """The channel of largest amax over all heads."""
    amax = stats.amax
    head, channel = divmod(int(amax.argmax()), stats.shape[1])
    alive = amax[amax > 0]
    ratio = float(amax.max() / alive.median()) if alive.numel() else 1.0
    return Outlier(head, channel, ratio)


def outlier_ratio(stats: ChannelStats) -> float:
    """Largest channel amax by the median one; 1 where all channels are alike."""
    return outlier(stats).ratio


def outlier_dominated(stats: ChannelStats) -> bool:
    """Whether a scale shared by all channels wastes its range on a few (see `OUTLIER_RATIO`)."""
    return outlier_ratio(stats) >= OUTLIER_RATIO


def remarks(stats: CalibrationStats) -> list[Remark]:
    """Everything worth a remark, by layer, keys first."""
    return [
        Remark(index, slot, kind, text)
        for index, layer in sorted(stats.layers.items())
        for slot, side in (("key", layer.key), ("value", layer.value))
        for kind, text in _slot_remarks(side)
    ]


def _slot_remarks(stats: ChannelStats) -> list[tuple[str, str]]:
    found = []
    far = outlier(stats)
    if outlier_dominated(stats):
        place = f"h{far.head} c{far.channel}"
        found.append(("outlier-dominated", f"outlier-dominated ({place}, {far.ratio:.0f}x)"))
    largest, limit = float(stats.amax.max()), tensor_format("fp8_e4m3").qmax
    if largest > limit:
        found.append(("beyond-fp8", f"{largest:.0f}: clipped at {limit:.0f} by fp8 at scale 1.0"))
    dead = int((stats.amax == 0).sum())
    if dead:
        found.append(("all-zero", f"{dead} of {stats.amax.numel()} channels all zero"))
    return found
