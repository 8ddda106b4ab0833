"""KVScales: the calibrated numbers a quantized cache needs, with where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from .errors import FingerprintError, NotObservedError, SchemeError
from .fingerprint import Fingerprint
from .geometry import CacheGeometry
from .provenance import Provenance
from .rotary import RotaryLayout
from .scheme import Granularity, QuantScheme, TensorScheme


@dataclass(frozen=True, eq=False)
class TensorScales:
    """Scales of the keys or the values of one layer: ``x ≈ (q - zero_point) * scale``.

    Attributes:
        scale: float32, shape as the granularity says: ``[1, 1]``, ``[kv_heads, 1]`` or
            ``[kv_heads, dim]``; finite and positive.
        zero_point: float32 of `scale`'s shape with whole numbers, or None if symmetric.
        mean: Mean of each channel, float32 ``[kv_heads, dim]``.
        mean_unrotated: Mean before rotary embedding, likewise, or None where it is not rotated.
        rotary: Which channels are rotated, and how.
        turned: Rotary pairs whose mean turns with the position, bool ``[rotary.width // 2]`` in the
            order of `RotaryLayout.split`. None where nothing is rotated, or in files that do not
            say: then all do.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    mean_unrotated: torch.Tensor | None = None
    rotary: RotaryLayout | None = None
    turned: torch.Tensor | None = None

    def __eq__(self, other: object) -> bool:
        """Whether all numbers are the same, bit for bit."""
        if not isinstance(other, TensorScales):
            return NotImplemented
        return all(_same(mine, vars(other)[name]) for name, mine in vars(self).items())

    def check(self, what: str, scheme: TensorScheme, kv_heads: int, dim: int) -> None:
        """Makes sure that the numbers can be used.

        Raises:
            SchemeError: A wrong shape or dtype, a scale that is not finite and positive, a zero
                point that is not a whole number, a mean that is not finite, or turned pairs that
                are not those of the rotary layout.
        """
        shape = scheme.granularity.scale_shape(kv_heads, dim)
        _check_tensor(f"{what}: {scheme.granularity.value} scales", self.scale, shape)
        unusable = self.scale[~(self.scale > 0)]
        if unusable.numel():
            raise SchemeError(f"{what}: scales must be > 0, found {float(unusable[0]):g}")
        if (self.zero_point is None) != scheme.symmetric:
            raise SchemeError(f"{what}: zero points go with asymmetric schemes, and only with them")
        if self.zero_point is not None:
            _check_tensor(f"{what}: zero points", self.zero_point, shape)
            if not bool((self.zero_point == self.zero_point.round()).all()):
                raise SchemeError(f"{what}: zero points must be whole numbers")
        for mean in (self.mean, self.mean_unrotated):
            if mean is not None:
                _check_tensor(f"{what}: means", mean, (kv_heads, dim))
        if self.turned is not None:
            _check_turned(what, self.turned, self.rotary)

    @property
    def turned_pairs(self) -> torch.Tensor | None:
        """`turned`, made whole: all pairs where a file does not say; None without rotation."""
        if self.rotary is None or self.mean_unrotated is None:
            return None
        if self.turned is not None:
            return self.turned
        return torch.ones(self.rotary.width // 2, dtype=torch.bool)

    def range(self, scheme: TensorScheme) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest representable value, float64 of `scale`'s shape.

        In float64, so that the way back through `from_range` gives the same scale bit for bit.
        """
        scale = self.scale.double()
        if self.zero_point is None:
            return scheme.format.qmin * scale, scheme.format.qmax * scale
        return -self.zero_point * scale, (scheme.levels - self.zero_point) * scale

    @classmethod
    def from_range(
        cls, low: torch.Tensor, high: torch.Tensor, scheme: TensorScheme
    ) -> TensorScales:
        """Scales that represent ``low … high``, float32 or float64 of the granularity's shape.

        Symmetric: ``scale = max(|low|, |high|) / qmax``. Asymmetric: ``scale = (high - low) /
        levels`` and ``zero_point = round(-low / scale)``, so that code 0 stands for `low`.

        A channel that was zero throughout gets a range of 2^-14 (the smallest normal float16), and
        zeros come back as zeros. An asymmetric range is at least 2^-12 as wide as it is away from
        zero, which keeps the zero point of a constant channel a number that float32 holds.
        """
        low, high = low.double(), high.double()
        width, steps = torch.maximum(low.abs(), high.abs()), scheme.format.qmax
        if not scheme.symmetric:
            away = torch.minimum(low.abs(), high.abs())
            width, steps = torch.maximum(high - low, away * 2.0**-12), scheme.levels
        width = torch.where(width > 0, width, 2.0**-14)
        # Normal numbers only: devices that flush subnormal ones to zero would divide by it.
        scale = (width / steps).float().clamp(min=2.0**-126)
        return cls(scale, None if scheme.symmetric else torch.round(-low / scale).float())


@dataclass(frozen=True)
class LayerScales:
    """Scales of one layer: what goes into the key slot and into the value slot."""

    key: TensorScales
    value: TensorScales


@dataclass(frozen=True)
class KVScales:
    """Scales of a whole model.

    Attributes:
        geometry: Shape of the cache they fit.
        scheme: What they quantize to.
        layers: Quantized layers by index; the others stay in the model's dtype.
        provenance: What they were measured on.
        method: How the range was chosen, for people: ``amax``, ``percentile 99.9``, ``mse``.

    Raises:
        SchemeError: A scheme that takes no calibrated scales, a tensor of wrong shape, or a scale
            that is not finite and positive.
        NotObservedError: A layer that the scheme quantizes has no scales.
    """

    geometry: CacheGeometry
    scheme: QuantScheme
    layers: Mapping[int, LayerScales]
    provenance: Provenance = field(default_factory=Provenance)
    method: str = "amax"

    def __post_init__(self) -> None:
        """Refuses what no cache could use."""
        _check_static(self.scheme)
        wanted = set(self.scheme.quantized_layers(self.geometry))
        if wanted != set(self.layers):
            missing, extra = wanted - self.layers.keys(), self.layers.keys() - wanted
            raise NotObservedError(
                f"scales for layers {sorted(self.layers)} do not fit the scheme: "
                f"missing {sorted(missing)}, unexpected {sorted(extra)}"
            )
        for index, layer in self.layers.items():
            shape = self.geometry.layers[index]
            layer.key.check(f"layer {index}, keys", self.scheme.key, shape.kv_heads, shape.key_dim)
            layer.value.check(
                f"layer {index}, values", self.scheme.value, shape.kv_heads, shape.value_dim
            )

    def __repr__(self) -> str:
        """A line; the numbers are many."""
        return f"KVScales({self.scheme}; {self.method}; {self.geometry.summary()})"

    def check_model(self, model: Fingerprint, geometry: CacheGeometry) -> None:
        """Makes sure that the scales were measured on this model.

        Raises:
            FingerprintError: They belong to other weights, adapters or to another geometry.
        """
        if geometry != self.geometry:
            what = _difference(self.geometry, geometry)
            if any(not own.differences(model) for own in self.provenance.fingerprints):
                raise FingerprintError(
                    f"the scales belong to this model ({model}), but not to its config: {what}; "
                    "calibrate it with the config that it is served with"
                )
            who = f", the model is {model}" if model.weights else ""
            raise FingerprintError(
                f"the scales belong to {self.provenance.origin}{who}: {what}; calibrate this model"
            )
        self.provenance.check(model)

    def check_shape(self, geometry: CacheGeometry) -> None:
        """Makes sure that the numbers fit a cache, whatever model they were measured on.

        Raises:
            FingerprintError: They do not, so that nobody can force them on it.
        """
        if geometry.layers != self.geometry.layers:
            raise FingerprintError(
                f"scales of another cache cannot be forced: {self.geometry.summary()} in the "
                f"scales, {geometry.summary()} in the model"
            )

    def reduce(self, granularity: Granularity) -> KVScales:
        """Coarser scales for an engine that takes fewer: each covers all that it stands for.

        Raises:
            SchemeError: `granularity` is finer than what there is.
        """
        slots = (self.scheme.key, self.scheme.value)
        for slot, name in zip(slots, ("keys", "values"), strict=True):
            if granularity.fineness > slot.granularity.fineness:
                raise SchemeError(
                    f"{name} are calibrated {slot.granularity.value}, which cannot be refined to "
                    f"{granularity.value}: solve the statistics again"
                )
        key, value = (replace(slot, granularity=granularity) for slot in slots)
        layers = {
            index: LayerScales(
                _reduce(layer.key, self.scheme.key, key),
                _reduce(layer.value, self.scheme.value, value),
            )
            for index, layer in self.layers.items()
        }
        return replace(self, scheme=replace(self.scheme, key=key, value=value), layers=layers)

    def union(self, other: KVScales) -> KVScales:
        """Scales that are safe for both: element-wise the wider range. Means stay the first's.

        Raises:
            SchemeError: The two have different schemes.
            FingerprintError: They fit different geometries.
        """
        if self.geometry != other.geometry:
            raise FingerprintError(
                f"scales of different caches cannot be shared: {self.geometry.summary()}; and "
                f"{other.geometry.summary()}"
            )
        if self.scheme != other.scheme:
            raise SchemeError(f"scales to share have two schemes: {self.scheme}; {other.scheme}")
        layers = {
            index: LayerScales(
                _union(layer.key, other.layers[index].key, self.scheme.key),
                _union(layer.value, other.layers[index].value, self.scheme.value),
            )
            for index, layer in self.layers.items()
        }
        return replace(
            self,
            layers=layers,
            provenance=self.provenance.union(other.provenance),
            method=" | ".join(dict.fromkeys((self.method, other.method))),
        )


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.equal(other)
    return type(one) is type(other) and one == other


def _check_static(scheme: QuantScheme) -> None:
    for slot, name in ((scheme.key, "keys"), (scheme.value, "values")):
        if not slot.granularity.is_static:
            raise SchemeError(
                f"{name} as {slot} take no calibrated scales: those are per-tensor, per-head or "
                "per-channel"
            )
    if scheme.layers:
        raise SchemeError("calibrated scales are of one scheme; layers can only be skipped")


def _check_turned(what: str, turned: torch.Tensor, rotary: RotaryLayout | None) -> None:
    if rotary is None:
        raise SchemeError(f"{what}: turned pairs go with a rotary layout, and only with it")
    if turned.dtype != torch.bool or tuple(turned.shape) != (rotary.width // 2,):
        raise SchemeError(
            f"{what}: turned pairs must be bool [{rotary.width // 2}], not "
            f"{str(turned.dtype).removeprefix('torch.')} {list(turned.shape)}"
        )


def _check_tensor(what: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise SchemeError(
            f"{what} must be float32 {list(shape)}, not "
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise SchemeError(f"{what} must be finite, found {float(tensor[~tensor.isfinite()][0])}")


def _difference(mine: CacheGeometry, theirs: CacheGeometry) -> str:
    """The first thing that differs: ``layer 3: kv_heads 2 in the scales, 4 in the model``."""
    if len(mine.layers) != len(theirs.layers):
        return f"{len(mine.layers)} layers in the scales, {len(theirs.layers)} in the model"
    pairs = zip(mine.layers, theirs.layers, strict=True)
    things = [(f"layer {i}: ", vars(a), vars(b)) for i, (a, b) in enumerate(pairs)]
    return next(
        f"{where}{name} {_plain(a[name])} in the scales, {_plain(b[name])} in the model"
        for where, a, b in [*things, ("", vars(mine), vars(theirs))]
        for name in a
        if a[name] != b[name]
    )


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _reduce(scales: TensorScales, fine: TensorScheme, coarse: TensorScheme) -> TensorScales:
    low, high = scales.range(fine)
    if coarse.granularity is not Granularity.PER_CHANNEL:
        axes = (0, 1) if coarse.granularity is Granularity.PER_TENSOR else (1,)
        low, high = low.amin(axes, keepdim=True), high.amax(axes, keepdim=True)
    return _with_range(scales, low, high, coarse)


def _union(one: TensorScales, other: TensorScales, scheme: TensorScheme) -> TensorScales:
    (low, high), (other_low, other_high) = one.range(scheme), other.range(scheme)
    return _with_range(one, torch.minimum(low, other_low), torch.maximum(high, other_high), scheme)


def _with_range(
    scales: TensorScales, low: torch.Tensor, high: torch.Tensor, scheme: TensorScheme
) -> TensorScales:
    """`scales` with a new range."""
    made = TensorScales.from_range(low, high, scheme)
    return replace(scales, scale=made.scale, zero_point=made.zero_point)
