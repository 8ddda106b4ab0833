"""Moves per-channel differences of keys and values into the weights, where that is exact.

Engines take one scale for a layer, or one for a token. A factor on a channel of the keys and its
inverse on the same channel of the queries change no score, so that both can go into the weights,
and the engine's scale then meets keys that suit it::

    q·k = (q / f)·(k f)            f into the rows of k_proj, 1/f into those of q_proj
    W v = (W / g) (v g)            g into the rows of v_proj, 1/g into the columns of o_proj

Factors are powers of two: a bfloat16 weight changes its exponent and nothing else. docs/folding.md
derives all of it, and says what is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvquant.errors import ExportError
from kvquant.geometry import CacheGeometry, LayerKind
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity

from .fold_error import errors
from .fold_observe import ObservedLayer, ObservedSlot
from .fold_places import FoldPlaces, find_places

_LARGEST = 10
"""Exponents go no further from a head's usual one: 1,024 times is more than any outlier needs."""

_LEAST_GAIN = 0.02
"""A head's factors have to take away at least this share of the squared error; less is not worth
another set of weights."""

_STEP_GAIN = 1e-3
"""A single step likewise, lest the search follow the noise of rounding."""

_MOST_SWEEPS = 8


@dataclass(frozen=True, eq=False)
class LayerFold:
    """Factors of one layer, all of them powers of two.

    Attributes:
        key: Of each key channel, float32 ``[kv_heads, key_dim]``.
        value: Of each value channel, float32 ``[kv_heads, value_dim]``.
        places: Where they go.
    """

    key: torch.Tensor
    value: torch.Tensor
    places: FoldPlaces

    @property
    def changes(self) -> bool:
        """Whether any factor is not 1."""
        return bool((self.key != 1).any() or (self.value != 1).any())


def check_foldable(config: Any, geometry: CacheGeometry, model: Any = None) -> None:
    """Makes sure that folding is exact for an architecture.

    Args:
        config: config.json as parsed, or a Transformers config.
        geometry: Shape of the cache.
        model: The model, if it is loaded: then each layer is looked at too.

    Raises:
        ExportError: It is not; the message says why.
    """
    for index, layer in enumerate(geometry.layers):
        if layer.kind is LayerKind.LATENT:
            raise ExportError(
                f"layer {index} caches a latent (MLA), from which all heads make keys and values: "
                "its channels have no rows of their own, so that it cannot be folded"
            )
        if layer.kind is LayerKind.SHARED:
            raise ExportError(
                f"layer {index} reads the keys and values of layer {layer.shared_from}: factors of "
                "one layer would have to go into both, which is not done; it cannot be folded"
            )
    if model is None:
        return
    dtype = _stored_dtype(config)
    for index, places in find_places(model, geometry).items():
        offset = max(place.offset for place in (places.query, places.key, places.value))
        if offset and dtype in ("bfloat16", "float16"):
            raise ExportError(
                f"{places.key.module} of layer {index} multiplies by 1 + weight: a factor on that "
                f"is no factor on the weight, which {dtype} would have to round; it can be folded "
                "from a float32 checkpoint only"
            )


def _stored_dtype(config: Any) -> str:
    """``bfloat16``, ``float32`` … as a config says; "" where it does not."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    parts = [values, values.get("text_config") or {}]
    named = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return str(next((name for name in named if name), "")).removeprefix("torch.")


def choose(observed: Mapping[int, ObservedLayer], quantizer: str) -> dict[int, LayerFold]:
    """Factors with which a quantizer loses least of what was observed.

    Each head's are searched on half of the tokens and kept only if the other half agrees;
    otherwise they are 1. So no layer loses more than unfolded.

    Args:
        observed: From `observe`.
        quantizer: What the engine does: one of `kvquant.export.fold_error.quantizer_names`.

    Raises:
        ExportError: No such quantizer.
    """
    return {
        layer: LayerFold(
            _factors(seen.key, quantizer), _factors(seen.value, quantizer), seen.places
        )
        for layer, seen in observed.items()
    }


def folded_scales(scales: KVScales, folds: Mapping[int, LayerFold]) -> KVScales:
    """Scales of the folded model, from those of the model as it was: exact, being per channel.

    Raises:
        ExportError: The scales are coarser than that, so that they say nothing about one channel.
    """
    for slot, name in ((scales.scheme.key, "keys"), (scales.scheme.value, "values")):
        if slot.granularity is not Granularity.PER_CHANNEL:
            raise ExportError(
                f"{name} are calibrated {slot.granularity.value}, folding changes single channels: "
                "solve the statistics again with --granularity per-channel (kvquant solve)"
            )
    layers = {
        index: LayerScales(
            _times(layer.key, folds[index].key), _times(layer.value, folds[index].value)
        )
        if index in folds
        else layer
        for index, layer in scales.layers.items()
    }
    return replace(scales, layers=layers)


def _times(scales: TensorScales, factors: torch.Tensor) -> TensorScales:
    return replace(
        scales,
        scale=scales.scale * factors,
        mean=None if scales.mean is None else scales.mean * factors,
        mean_unrotated=None if scales.mean_unrotated is None else scales.mean_unrotated * factors,
    )


def _factors(slot: ObservedSlot, quantizer: str) -> torch.Tensor:
    """Factors of a layer's keys or values, ``[kv_heads, dim]``."""
    search = _Search(slot, quantizer)
    exponents = search.run()
    found = search.spread(exponents)
    kept = torch.ones(len(found), dtype=torch.bool)
    for half in (0, 1):
        kept &= search.cost(found, half) < (1 - _LEAST_GAIN) * search.cost(
            torch.ones_like(found), half
        )
    found = torch.where(kept[:, None], found, 1.0)
    # Where heads share a scale, what is good for each need not be good for all.
    before, after = (
        float(errors(slot.states, slot.reading, factors, quantizer).sum())
        for factors in (torch.ones_like(found), found)
    )
    return found if after < before else torch.ones_like(found)


class _Search:
    """Looks for the exponents of one slot, ``[kv_heads, groups]``.

    Per-token quantizers do not mind a factor that a whole head has in common, so exponents count
    from a head's most frequent one. For fp8 the layer's scale stays as it is unfolded: a power of
    two then changes nothing but which numbers are too small for it, or too large.
    """

    def __init__(self, slot: ObservedSlot, quantizer: str) -> None:
        self._slot = slot
        self._quantizer = quantizer
        self._amax = slot.states.abs().amax() if quantizer == "fp8" else None

    def run(self) -> torch.Tensor:
        """The best start, then single steps for as long as they help."""
        starts = self._starts()
        exponents, cost = self._better(starts[0], self.cost(self.spread(starts[0])), starts[1:])
        for _ in range(_MOST_SWEEPS):
            before = float(cost.sum())
            for group in range(exponents.shape[1]):
                steps = exponents.repeat(2, 1, 1)
                steps[0, :, group] = (steps[0, :, group] + 1).clamp(max=_LARGEST)
                steps[1, :, group] = (steps[1, :, group] - 1).clamp(min=-_LARGEST)
                exponents, cost = self._better(exponents, cost, steps)
            if float(cost.sum()) > (1 - _STEP_GAIN) * before:
                break
        return self._counted_from_usual(exponents)

    def cost(self, factors: torch.Tensor, half: int = 0) -> torch.Tensor:
        """What `factors` ``[…, kv_heads, dim]`` cost each head, on every other token."""
        found = errors(
            self._slot.states[:, half::2], self._slot.reading, factors, self._quantizer, self._amax
        )
        return found.sum(-1, keepdim=True).expand_as(found) if self._slot.is_shared else found

    def spread(self, exponents: torch.Tensor) -> torch.Tensor:
        """Factors of the channels, ``[…, kv_heads, dim]``."""
        return torch.exp2(exponents)[..., self._slot.groups]

    def _better(
        self, exponents: torch.Tensor, cost: torch.Tensor, candidates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each head the candidate that costs least, if it costs less by enough."""
        least, which = self.cost(self.spread(candidates)).min(0)
        pays = least < (1 - _STEP_GAIN) * cost
        found = candidates[which, torch.arange(len(which))]
        return torch.where(pays[:, None], found, exponents), torch.where(pays, least, cost)

    def _starts(self) -> torch.Tensor:
        """Exponents to begin with, ``[starts, kv_heads, groups]``.

        None; amax made equal, half-way and wholly; and (R / E x^2)^(1/4), R being how much a
        channel is read: it minimises (sum f^2 E x^2) (sum R / f^2), which is the squared range of
        a rotated head times what a step of it costs. For fp8 none, and all raised to the layer's
        amax: numbers that are far too small need more than one step to become more than 0.
        """
        slot = self._slot
        amax = self._by_group(slot.states.abs().amax(1), "amax")
        square = self._by_group(slot.states.square().mean(1), "mean")
        read = self._by_group(slot.reading.diagonal(dim1=-2, dim2=-1), "mean")
        unmoved = torch.zeros_like(amax)
        if self._amax is not None:
            raised = (self._amax / amax).log2().floor().clamp(0, _LARGEST)
            return torch.stack([unmoved, raised])
        logarithms = (-amax.log2() / 2, -amax.log2(), (read.log2() - square.log2()) / 4)
        return torch.stack([unmoved, *map(self._counted_from_usual, logarithms)])

    def _by_group(self, channels: torch.Tensor, how: str) -> torch.Tensor:
        """``[kv_heads, groups]`` of a positive ``[kv_heads, dim]``; the same rows if shared."""
        groups = self._slot.groups.expand_as(channels)
        found = channels.new_zeros(len(channels), int(groups.max()) + 1)
        found.scatter_reduce_(1, groups, channels, how, include_self=False)
        if self._slot.is_shared:
            found = (found.amax(0) if how == "amax" else found.mean(0)).expand_as(found)
        return found.clamp(min=2.0**-60)

    def _counted_from_usual(self, logarithms: torch.Tensor) -> torch.Tensor:
        if self._amax is not None:
            return logarithms
        whole = logarithms.round()
        return (whole - whole.mode(1, keepdim=True).values).clamp(-_LARGEST, _LARGEST)
