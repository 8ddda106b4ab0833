"""Which form of the key mean pays, fixed or turned with the position, and how that is said.

int4 and int3 spend their bits on what a mean leaves over. For a rotary pair there are two means.
The *fixed* one is taken after rotary embedding and costs nothing when reading: it shifts the scores
of a query alike. The *turned* one is taken before rotary embedding and turned to each token's
position: a constant key bias is removed exactly, but reading costs a term per pair and token.

A mean leaves an energy of ``E|k|² - |mean|²``. Rotation keeps norms, so with ``m`` the fixed mean
of pair i, ``t`` the one before rotation and ``f`` the factor that some models put on their cosines
and sines (attention factor of yarn and longrope), turning the pair gains

    g_i = max(0, sum over kv_heads of f² |t|² - |m|²).

After the rotation of a head all channels share its energy, and a step of the grid is in proportion
to its root: leaving out gains of sum L, where E is what all gains would leave, costs
``0.5 · log2((E + L) / E)`` bits. The smallest set of pairs that leaves out at most `MAX_COST_BITS`
is turned, the others are fixed.
"""

from __future__ import annotations

import torch

from kvquant.rotary import RotaryLayout
from kvquant.scales import KVScales, TensorScales

from .stats import ChannelStats

MAX_COST_BITS = 0.02
"""What fixed means may cost a layer, in bits per value: half a percent of a 4-bit code."""


def choose_turned(stats: ChannelStats) -> torch.Tensor | None:
    """Pairs whose mean is to turn with the position.

    Args:
        stats: Statistics of one slot of one layer, with tokens.

    Returns:
        bool ``[rotary.width // 2]``, pairs in the order of `RotaryLayout.split`; None where nothing
        is rotated.
    """
    layout, unrotated = stats.rotary, stats.mean_unrotated
    if layout is None or unrotated is None:
        return None
    whole, fixed = stats.mean_square, stats.mean.square()
    gains = turning_gains(*(_by_pair(layout, it) for it in (whole, fixed, unrotated.square())))
    return worth_turning(gains, float((whole - fixed).sum() - gains.sum()))


def turning_gains(whole: torch.Tensor, fixed: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """Energy that turning each pair's mean removes beyond what the fixed mean does.

    The statistics divide f out, but it shows: positions only make ``|m|² / (f² |t|²)`` smaller, and
    leave it at 1 for pairs that hardly turn. So f² is the largest ``|m|² / |t|²`` of pairs whose
    mean is no accident (at least a quarter of their energy), 1 if there is none above; and at most
    what leaves every pair the energy it has.

    Args:
        whole: Mean square of each pair, float64 ``[pairs]``, as are the others.
        fixed: Squared mean after rotary embedding.
        turned: Squared mean before it.
    """
    has_mean = (fixed >= whole / 4) & (turned > 0)
    seen = torch.where(has_mean, fixed / turned, 1.0).amax().clamp(min=1.0)
    most = torch.where(turned > 0, whole / turned, torch.inf).amin()
    return (torch.minimum(seen, most) * turned - fixed).clamp(min=0.0)


def worth_turning(gains: torch.Tensor, energy: float) -> torch.Tensor:
    """The smallest set of pairs, largest gains first, without which little is lost.

    Args:
        gains: Of each pair, float64 ``[pairs]``, none negative.
        energy: What is left of the layer if all are taken.

    Returns:
        bool ``[pairs]``.
    """
    allowed = (2.0 ** (2 * MAX_COST_BITS) - 1) * max(energy, 0.0)
    order = gains.argsort(stable=True)
    chosen = torch.ones_like(gains, dtype=torch.bool)
    chosen[order[gains[order].cumsum(0) <= allowed]] = False
    return chosen


def mean_form_lines(scales: KVScales) -> list[str]:
    """What was decided, a line for the keys and one for values that are rotated.

    ``key mean: turned with position in 28 of 30 layers (11 of 32 pairs on average), fixed in 2``.
    """
    keys = [layer.key for layer in scales.layers.values() if layer.key.mean is not None]
    values = [layer.value for layer in scales.layers.values() if layer.value.rotary is not None]
    slots = (("key", keys), ("value", values))
    return [f"{name} mean: {_forms(slot)}" for name, slot in slots if slot]


def _forms(slots: list[TensorScales]) -> str:
    pairs = [slot.turned_pairs for slot in slots]
    turned = [mask for mask in pairs if mask is not None and bool(mask.any())]
    if not turned:
        return f"fixed in all {len(slots)} layers"
    chosen, there = sum(int(mask.sum()) for mask in turned), sum(len(mask) for mask in turned)
    average = f"({chosen / len(turned):.0f} of {there / len(turned):.0f} pairs on average)"
    if len(turned) == len(slots):
        return f"turned with position in all {len(slots)} layers {average}"
    fixed = len(slots) - len(turned)
    return (
        f"turned with position in {len(turned)} of {len(slots)} layers {average}, fixed in {fixed}"
    )


def _by_pair(layout: RotaryLayout, energy: torch.Tensor) -> torch.Tensor:
    """Energy of each rotary pair, ``[width / 2]``, from that of channels ``[kv_heads, dim]``."""
    first, second = layout.split(energy)
    return (first + second).sum(0)
