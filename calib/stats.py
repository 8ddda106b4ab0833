"""What calibration remembers of a cache: per-channel statistics that merge associatively.

`CalibrationStats` holds a `LayerStats` for each layer that was recorded, and that one a
`ChannelStats` each for what goes into the key slot and the value slot of the cache (for MLA layers
those are the latent and the rotary part). Extremes are float32 and exact; sums are float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch

from kvquant.errors import FingerprintError, InputError, NotObservedError
from kvquant.geometry import CacheGeometry
from kvquant.provenance import Provenance
from kvquant.rotary import RotaryLayout

from .sketch import QuantileSketch


@dataclass
class ChannelStats:
    """Statistics of one slot of one layer; shapes are ``[kv_heads, dim]`` unless said otherwise.

    Attributes:
        minimum: Smallest value, float32; +inf before the first token.
        maximum: Largest value, float32; -inf before the first token.
        total: Sum over tokens, float64.
        total_squares: Sum of squares over tokens, float64.
        sketch: Distribution of each channel, rows in the order ``kv_heads * dim``.
        token_amax: Distribution over tokens of each head's largest magnitude, ``kv_heads`` rows.
        tokens: Tokens counted, padding left out.
        rotary: Where the rotary part lies, None if the slot is not rotated or it is not known.
        total_unrotated: Sum over tokens before rotation, float64; None where `rotary` is.
    """

    minimum: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor
    total_squares: torch.Tensor
    sketch: QuantileSketch
    token_amax: QuantileSketch
    tokens: int = 0
    rotary: RotaryLayout | None = None
    total_unrotated: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        kv_heads: int,
        dim: int,
        device: torch.device | str = "cpu",
        rotary: RotaryLayout | None = None,
    ) -> ChannelStats:
        """Statistics of nothing yet."""
        shape = (kv_heads, dim)
        total = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(
            minimum=torch.full(shape, float("inf"), device=device),
            maximum=torch.full(shape, float("-inf"), device=device),
            total=total,
            total_squares=total.clone(),
            sketch=QuantileSketch.empty(kv_heads * dim, device),
            token_amax=QuantileSketch.empty(kv_heads, device),
            rotary=rotary,
            total_unrotated=None if rotary is None else total.clone(),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(kv_heads, dim)``."""
        kv_heads, dim = self.minimum.shape
        return kv_heads, dim

    @property
    def amax(self) -> torch.Tensor:
        """Largest magnitude, float32 ``[kv_heads, dim]``."""
        return torch.maximum(self.minimum.abs(), self.maximum.abs())

    @property
    def mean(self) -> torch.Tensor:
        """Mean over tokens, float64 ``[kv_heads, dim]``."""
        return self.total / self.tokens

    @property
    def mean_square(self) -> torch.Tensor:
        """Mean square over tokens, float64 ``[kv_heads, dim]``."""
        return self.total_squares / self.tokens

    @property
    def mean_unrotated(self) -> torch.Tensor | None:
        """Mean over tokens before rotation, float64 ``[kv_heads, dim]``, if it was measured."""
        return None if self.total_unrotated is None else self.total_unrotated / self.tokens

    def update(self, states: torch.Tensor, unrotated: torch.Tensor | None = None) -> None:
        """Counts tokens.

        Args:
            states: ``[tokens, kv_heads, dim]`` of real tokens, any float dtype.
            unrotated: Their sum over tokens before rotation, ``[kv_heads, dim]``; needed where
                `rotary` is known.
        """
        if not states.shape[0]:
            return
        values = states.float()
        low, high = values.amin(0), values.amax(0)
        amax = torch.maximum(low.abs(), high.abs())
        self.minimum = torch.minimum(self.minimum, low)
        self.maximum = torch.maximum(self.maximum, high)
        self.total += values.sum(0)
        self.total_squares += values.square().sum(0)
        self.sketch.update(values.flatten(1), amax.flatten())
        token_amax = values.abs().amax(2)
        self.token_amax.update(token_amax, amax.amax(1))
        self.tokens += states.shape[0]
        if self.total_unrotated is not None:
            assert unrotated is not None, "rotated channels need their sum before rotation too"
            self.total_unrotated += unrotated

    def merge(self, other: ChannelStats) -> ChannelStats:
        """Statistics of both inputs' tokens together.

        Raises:
            InputError: The shapes differ, or only one of them knows its rotation.
        """
        if self.shape != other.shape or self.rotary != other.rotary:
            raise InputError(
                f"statistics do not merge: {self.shape[0]} heads of {self.shape[1]} "
                f"(rotary {self.rotary}) and {other.shape[0]} of {other.shape[1]} "
                f"(rotary {other.rotary})"
            )
        unrotated = self.total_unrotated
        if unrotated is not None and other.total_unrotated is not None:
            unrotated = unrotated + other.total_unrotated
        return replace(
            self,
            minimum=torch.minimum(self.minimum, other.minimum),
            maximum=torch.maximum(self.maximum, other.maximum),
            total=self.total + other.total,
            total_squares=self.total_squares + other.total_squares,
            sketch=self.sketch.merge(other.sketch),
            token_amax=self.token_amax.merge(other.token_amax),
            tokens=self.tokens + other.tokens,
            total_unrotated=unrotated,
        )

    def check(self, what: str) -> None:
        """Makes sure that scales can be computed.

        Raises:
            NotObservedError: No token was counted.
            InputError: A value was NaN or infinite.
        """
        if self.tokens == 0:
            raise NotObservedError(f"{what}: not one token was recorded")
        if not bool(torch.isfinite(self.amax).all()):
            head, channel = torch.nonzero(~torch.isfinite(self.amax))[0].tolist()
            raise InputError(
                f"{what}, head {head}, channel {channel}: the model itself produced NaN or "
                "infinite values; try --dtype float32, or check the weights"
            )

    def to(self, device: torch.device | str) -> ChannelStats:
        """A copy on `device`, which does not go on counting with the original."""

        def moved(value: Any) -> Any:
            if isinstance(value, QuantileSketch):
                return QuantileSketch(moved(value.exponent), moved(value.counts))
            return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value

        return replace(self, **{name: moved(value) for name, value in vars(self).items()})


@dataclass
class LayerStats:
    """Both slots of one layer."""

    key: ChannelStats
    value: ChannelStats

    def merge(self, other: LayerStats) -> LayerStats:
        """Statistics of both inputs' tokens together."""
        return LayerStats(self.key.merge(other.key), self.value.merge(other.value))

    def to(self, device: torch.device | str) -> LayerStats:
        """A copy on `device`."""
        return LayerStats(self.key.to(device), self.value.to(device))


@dataclass
class CalibrationStats:
    """Statistics of a whole model.

    Attributes:
        geometry: Shape of the model's cache.
        layers: Recorded layers by index; skipped ones are absent.
        provenance: Which model, adapters, text and versions they come from.
    """

    geometry: CacheGeometry
    layers: dict[int, LayerStats]
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def tokens(self) -> int:
        """Tokens counted per layer (the same in all, or the smallest)."""
        return min((layer.key.tokens for layer in self.layers.values()), default=0)

    def merge(self, other: CalibrationStats) -> CalibrationStats:
        """Statistics of both inputs' tokens together: associative, extremes bit for bit.

        Raises:
            FingerprintError: They are of different models, adapters or geometries.
            InputError: They cover different layers.
        """
        if self.geometry != other.geometry:
            raise FingerprintError(
                f"statistics do not merge: the first are of a {self.geometry.summary()}; "
                f"the second of a {other.geometry.summary()}"
            )
        if self.layers.keys() != other.layers.keys():
            only = sorted(self.layers.keys() ^ other.layers.keys())
            raise InputError(f"statistics cover different layers: {only} in one of them only")
        layers = {index: layer.merge(other.layers[index]) for index, layer in self.layers.items()}
        return CalibrationStats(self.geometry, layers, self.provenance.merge(other.provenance))

    def check(self, expected: Iterable[int] | None = None) -> None:
        """Makes sure that every expected layer was seen and is finite.

        Args:
            expected: Layers that must be there, others do not matter; by default those recorded.

        Raises:
            NotObservedError: Names the layers never seen.
            InputError: Something is not finite.
        """
        if not self.layers:
            raise NotObservedError("no layer ever wrote to the cache during calibration")
        wanted = sorted(self.layers if expected is None else expected)
        missing = [index for index in wanted if index not in self.layers]
        if missing:
            raise NotObservedError(
                f"layers {missing} never wrote to the cache during calibration; "
                "give them to --skip-layers if they hold no keys and values"
            )
        for index in wanted:
            self.layers[index].key.check(f"layer {index}, keys")
            self.layers[index].value.check(f"layer {index}, values")


def merge_all(parts: Iterable[CalibrationStats]) -> CalibrationStats:
    """All `parts` as one."""
    return reduce(CalibrationStats.merge, parts)
