"""What a cache is quantized to: formats, granularities and the frozen QuantScheme that joins them.

Nothing here imports torch: planning and ``--help`` read schemes too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from .errors import SchemeError

if TYPE_CHECKING:
    from .geometry import CacheGeometry


@dataclass(frozen=True)
class TensorFormat:
    """How one number is stored.

    Attributes:
        name: The name users type.
        bits: Bits per stored value, metadata not counted.
        qmax: Largest representable code. A scale is ``amax / qmax`` for symmetric quantization.
        qmin: Smallest representable code.
        is_float: True for the FP8 formats, whose codes are themselves floating point.
    """

    name: str
    bits: int
    qmin: float
    qmax: float
    is_float: bool


_FORMATS = {
    f.name: f
    for f in (
        # Maxima: OCP 8-bit floating point specification 1.0, table 1.
        TensorFormat("fp8_e4m3", 8, -448.0, 448.0, True),
        TensorFormat("fp8_e5m2", 8, -57344.0, 57344.0, True),
        # Symmetric integers leave the most negative code unused, so that -amax and amax both fit.
        TensorFormat("int8", 8, -127.0, 127.0, False),
        TensorFormat("int4", 4, -7.0, 7.0, False),
    )
}
_ALIASES = {"fp8": "fp8_e4m3"}


def tensor_format(name: str) -> TensorFormat:
    """The format called `name`.

    Raises:
        SchemeError: No such format; the message lists the possible ones.
    """
    found = _FORMATS.get(_ALIASES.get(name, name))
    if found is None:
        raise SchemeError(
            f"unknown format {name!r}: possible are {', '.join(format_names())} (fp8 = fp8_e4m3)"
        )
    return found


def format_names() -> list[str]:
    """All format names, as users type them."""
    return list(_FORMATS)


class Granularity(str, Enum):
    """What shares one scale, and so the shape of a layer's scale tensor.

    ========== ================== ===========================
    value      shares a scale     shape of one layer's scale
    ========== ================== ===========================
    per-tensor the whole layer    ``[1, 1]``
    per-head   one KV head        ``[kv_heads, 1]``
    per-channel one channel       ``[kv_heads, dim]``
    ========== ================== ===========================
    """

    PER_TENSOR = "per-tensor"
    PER_HEAD = "per-head"
    PER_CHANNEL = "per-channel"

    @classmethod
    def parse(cls, name: str) -> Granularity:
        """The granularity called `name`, with or without the ``per-``.

        Raises:
            SchemeError: No such granularity.
        """
        wanted = name if name.startswith("per-") else f"per-{name}"
        try:
            return cls(wanted)
        except ValueError:
            possible = ", ".join(g.value for g in cls)
            raise SchemeError(f"unknown granularity {name!r}: possible are {possible}") from None

    def scale_shape(self, kv_heads: int, dim: int) -> tuple[int, int]:
        """Shape of one layer's scale tensor."""
        heads = 1 if self is Granularity.PER_TENSOR else kv_heads
        return heads, dim if self is Granularity.PER_CHANNEL else 1

    @property
    def fineness(self) -> int:
        """0 for the coarsest; scales reduce from finer to coarser only."""
        return list(Granularity).index(self)


@dataclass(frozen=True)
class TensorScheme:
    """Format, granularity and symmetry of the keys or of the values.

    Asymmetric quantization adds a zero point: ``x ≈ (q - zero_point) * scale`` with integer codes
    over the full range (255 or 15 steps). FP8 codes are symmetric around zero by construction.

    Raises:
        SchemeError: FP8 with ``symmetric=False``.
    """

    format: TensorFormat
    granularity: Granularity
    symmetric: bool = True

    def __post_init__(self) -> None:
        """Refuses what cannot exist."""
        if self.format.is_float and not self.symmetric:
            integer = ", ".join(f.name for f in _FORMATS.values() if not f.is_float)
            raise SchemeError(
                f"{self.format.name} has no zero point: asymmetric is possible with {integer}"
            )

    @property
    def levels(self) -> float:
        """Number of steps between smallest and largest code of an asymmetric integer format."""
        return 2.0**self.format.bits - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format": self.format.name,
            "granularity": self.granularity.value,
            "symmetric": self.symmetric,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TensorScheme:
        """Inverse of `to_dict`."""
        return cls(
            tensor_format(values["format"]),
            Granularity.parse(values["granularity"]),
            bool(values["symmetric"]),
        )

    def __str__(self) -> str:
        """For tables: ``int8 per-channel asymmetric``."""
        suffix = "" if self.symmetric else " asymmetric"
        return f"{self.format.name} {self.granularity.value}{suffix}"


@dataclass(frozen=True)
class QuantScheme:
    """What one calibrated cache is quantized to; keys and values differ freely.

    Attributes:
        key: Scheme of the keys (of the latent, for MLA layers).
        value: Scheme of the values (of the rotary part, for MLA layers).
        skip_layers: Layers that stay in the model's own dtype.

    Raises:
        SchemeError: A skipped layer has a negative index.
    """

    key: TensorScheme
    value: TensorScheme
    skip_layers: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        """Refuses negative layers."""
        if any(layer < 0 for layer in self.skip_layers):
            raise SchemeError(f"layers are counted from 0, not {min(self.skip_layers)}")

    def quantized_layers(self, geometry: CacheGeometry) -> list[int]:
        """Layers of a model that the scheme quantizes: they keep tokens and are not skipped."""
        return [layer for layer in geometry.attention_layers if layer not in self.skip_layers]

    def check(self, geometry: CacheGeometry) -> None:
        """Makes sure that the scheme fits a model's cache.

        Raises:
            SchemeError: A skipped layer that the model does not have, nothing left to quantize, or
                a layer with an empty value slot.
        """
        last = len(geometry.layers) - 1
        beyond = [layer for layer in self.skip_layers if layer > last]
        if beyond:
            raise SchemeError(f"cannot skip layer {max(beyond)}: the model has layers 0 to {last}")
        quantized = self.quantized_layers(geometry)
        if not quantized:
            raise SchemeError(
                f"nothing to quantize: of {last + 1} layers {len(geometry.attention_layers)} keep "
                f"keys and values, and {len(self.skip_layers)} are skipped"
            )
        empty = [index for index in quantized if not geometry.layers[index].value_dim]
        if empty:
            raise SchemeError(
                f"layer {empty[0]} caches nothing in its value slot, which is not supported: "
                f"skip layers {','.join(map(str, empty))}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as stored in a file header."""
        return {
            "key": self.key.to_dict(),
            "value": self.value.to_dict(),
            "skip_layers": sorted(self.skip_layers),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QuantScheme:
        """Inverse of `to_dict`.

        Raises:
            SchemeError: An unknown format or granularity.
        """
        return cls(
            TensorScheme.from_dict(values["key"]),
            TensorScheme.from_dict(values["value"]),
            frozenset(values["skip_layers"]),
        )

    def __str__(self) -> str:
        """For tables and messages."""
        skipped = f", layers {sorted(self.skip_layers)} unquantized" if self.skip_layers else ""
        return f"K {self.key}, V {self.value}{skipped}"
