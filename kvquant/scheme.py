"""What a cache is quantized to: formats, granularities and the frozen QuantScheme that joins them.

Nothing here imports torch: planning and ``--help`` read schemes too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
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
        bits: Bits per stored value, metadata not counted; 0 for ``none``, which keeps the model's
            own dtype.
        qmax: Largest representable code. A scale is ``amax / qmax`` for symmetric quantization.
        qmin: Smallest representable code.
        is_float: True for formats whose codes are themselves floating point.
    """

    name: str
    bits: int
    qmin: float
    qmax: float
    is_float: bool

    @property
    def is_scaled(self) -> bool:
        """Whether codes need a scale; ``none``, ``bf16`` and ``fp16`` store numbers as they are."""
        return self.qmax != math.inf


_FORMATS = {
    f.name: f
    for f in (
        # Maxima: OCP 8-bit floating point specification 1.0, table 1.
        TensorFormat("fp8_e4m3", 8, -448.0, 448.0, True),
        TensorFormat("fp8_e5m2", 8, -57344.0, 57344.0, True),
        # Symmetric integers leave the most negative code unused, so that -amax and amax both fit.
        TensorFormat("int8", 8, -127.0, 127.0, False),
        TensorFormat("int4", 4, -7.0, 7.0, False),
        TensorFormat("int3", 3, -3.0, 3.0, False),
        TensorFormat("bf16", 16, -math.inf, math.inf, True),
        TensorFormat("fp16", 16, -math.inf, math.inf, True),
        TensorFormat("none", 0, -math.inf, math.inf, True),
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
            f"unknown format {name!r}: possible are {', '.join(_FORMATS)} (fp8 = fp8_e4m3)"
        )
    return found


def format_names() -> list[str]:
    """Names of the formats that calibration finds scales for, as users type them."""
    return [name for name, f in _FORMATS.items() if f.is_scaled and name != "int3"]


class Granularity(str, Enum):
    """What shares one scale.

    The first three are *static*: measured by calibration, used for every text. The others are
    *dynamic*: computed from the tokens that are being stored.

    =========== ===================================== ==========================================
    value       shares a scale                        shape of one layer's scale
    =========== ===================================== ==========================================
    per-tensor  the whole layer                       ``[1, 1]``
    per-head    one KV head                           ``[kv_heads, 1]``
    per-channel one channel                           ``[kv_heads, dim]``
    per-token   one token of one KV head              ``[batch, kv_heads, tokens]``
    per-group   one channel over group_size tokens    ``[batch, kv_heads, groups, dim]``
    =========== ===================================== ==========================================
    """

    PER_TENSOR = "per-tensor"
    PER_HEAD = "per-head"
    PER_CHANNEL = "per-channel"
    PER_TOKEN = "per-token"
    PER_GROUP = "per-group"

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

    @property
    def is_static(self) -> bool:
        """Whether its scales come from calibration."""
        return self not in (Granularity.PER_TOKEN, Granularity.PER_GROUP)

    def scale_shape(self, kv_heads: int, dim: int) -> tuple[int, int]:
        """Shape of one layer's scale tensor, for static granularities."""
        heads = 1 if self is Granularity.PER_TENSOR else kv_heads
        return heads, dim if self is Granularity.PER_CHANNEL else 1

    @property
    def fineness(self) -> int:
        """0 for the coarsest; scales reduce from finer to coarser only."""
        return list(Granularity).index(self)


SCALE_BITS = {"bf16": 16, "fp16": 16, "fp32": 32}
"""Formats in which dynamic scales are kept, and their bits."""


@dataclass(frozen=True)
class TensorScheme:
    """How the keys or the values are quantized. docs/schemes.md has the formulas.

    Asymmetric static quantization adds a zero point: ``x ≈ (q - zero_point) * scale`` with integer
    codes over the full range (255 or 15 steps). Asymmetric dynamic quantization keeps the middle of
    the range instead: ``x ≈ (q - levels / 2) * scale + middle``. FP8 codes are symmetric around
    zero by construction.

    Attributes:
        format: How one number is stored.
        granularity: What shares a scale. Without a meaning for formats that have none.
        symmetric: No zero point, no middle.
        group_size: Consecutive tokens that share a channel's scale, for per-group.
        center: The calibrated mean is subtracted first, per-token only.
        rotate: Each head is multiplied by an orthogonal matrix first (a Hadamard matrix where there
            is one), per-token only.
        scale_format: In what dynamic scales are kept: ``bf16``, ``fp16`` or ``fp32``.

    Raises:
        SchemeError: A combination that does not exist.
    """

    format: TensorFormat
    granularity: Granularity
    symmetric: bool = True
    group_size: int | None = None
    center: bool = False
    rotate: bool = False
    scale_format: str = "fp32"

    def __post_init__(self) -> None:
        """Refuses what cannot exist."""
        name, granularity = self.format.name, self.granularity
        if self.format.is_float and not self.symmetric:
            integer = ", ".join(f.name for f in _FORMATS.values() if not f.is_float)
            raise SchemeError(f"{name} has no zero point: asymmetric is possible with {integer}")
        if self.scale_format not in SCALE_BITS:
            raise SchemeError(
                f"scales are kept in {', '.join(SCALE_BITS)}, not {self.scale_format!r}"
            )
        if granularity.is_static and (name == "int3" or not self.format.is_scaled):
            raise SchemeError(f"{name} has no calibrated scales: it goes with per-token")
        if granularity.is_static and self.scale_format != "fp32":
            raise SchemeError(f"calibrated scales are kept in fp32, not {self.scale_format}")
        if (self.group_size is not None) != (granularity is Granularity.PER_GROUP):
            raise SchemeError("a group size goes with per-group, and only with it")
        if not isinstance(self.group_size, int | None):
            raise SchemeError(f"a group size is a number of tokens, not {self.group_size!r}")
        if self.group_size is not None and (self.group_size < 1 or self.format.is_float):
            raise SchemeError(
                f"per-group takes an integer format and a group size of at least 1, not {name} "
                f"and {self.group_size}"
            )
        plain = granularity is not Granularity.PER_TOKEN or not self.format.is_scaled
        if (self.center or self.rotate) and plain:
            raise SchemeError(
                f"mean and rotation are for scaled per-token formats, not {name} "
                f"{granularity.value}"
            )

    @property
    def is_exact(self) -> bool:
        """Whether numbers are kept in the model's own dtype."""
        return self.format.name == "none"

    @property
    def unit(self) -> int:
        """Tokens that are quantized together."""
        return self.group_size or 1

    @property
    def levels(self) -> float:
        """Number of steps between smallest and largest code of an asymmetric integer format."""
        return 2.0**self.format.bits - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what only dynamic schemes have is there only if it is set."""
        extra = {
            name: getattr(self, name)
            for name, default in _DYNAMIC_DEFAULTS.items()
            if getattr(self, name) != default
        }
        return {
            "format": self.format.name,
            "granularity": self.granularity.value,
            "symmetric": self.symmetric,
            **extra,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TensorScheme:
        """Inverse of `to_dict`."""
        return cls(
            tensor_format(values["format"]),
            Granularity.parse(values["granularity"]),
            bool(values["symmetric"]),
            **{name: values.get(name, default) for name, default in _DYNAMIC_DEFAULTS.items()},
        )

    def __str__(self) -> str:
        """For tables: ``int8 per-channel asymmetric``."""
        if not self.format.is_scaled:
            return self.format.name
        grain = self.granularity.value
        if self.group_size is not None:
            grain = f"per-channel in groups of {self.group_size} tokens"
        extras = [
            word
            for word, there in (
                ("asymmetric", not self.symmetric),
                ("centered", self.center),
                ("rotated", self.rotate),
            )
            if there
        ]
        return " ".join([self.format.name, grain, *extras])


_DYNAMIC_DEFAULTS: dict[str, Any] = {
    "group_size": None,
    "center": False,
    "rotate": False,
    "scale_format": "fp32",
}

EXACT = TensorScheme(_FORMATS["none"], Granularity.PER_TOKEN)
"""Keeps numbers in the model's own dtype."""


@dataclass(frozen=True)
class QuantScheme:
    """What one cache is quantized to; keys and values differ freely.

    Attributes:
        key: Scheme of the keys (of the latent, for MLA layers).
        value: Scheme of the values.
        skip_layers: Layers that stay in the model's own dtype.
        sink_tokens: First tokens of each text, kept exactly.
        residual_length: Newest tokens, kept exactly.
        rotary_part: Scheme of the rotary part, which MLA layers keep in the value slot.
        layers: Layers that have a scheme of their own, as pairs of number and scheme.

    Raises:
        SchemeError: A negative layer, sink or residual, a layer named twice, or a layer's scheme
            with layers of its own.
    """

    key: TensorScheme
    value: TensorScheme
    skip_layers: frozenset[int] = field(default_factory=frozenset)
    sink_tokens: int = 0
    residual_length: int = 0
    rotary_part: TensorScheme = EXACT
    layers: tuple[tuple[int, QuantScheme], ...] = ()

    def __post_init__(self) -> None:
        """Refuses what cannot exist."""
        named = [*self.skip_layers, *(index for index, _ in self.layers)]
        wrong = [layer for layer in named if not isinstance(layer, int)]
        if wrong:
            raise SchemeError(f"layers are named by their numbers, not {wrong[0]!r}")
        if any(layer < 0 for layer in named):
            raise SchemeError(f"layers are counted from 0, not {min(named)}")
        twice = [layer for layer in named if named.count(layer) > 1]
        if twice:
            raise SchemeError(f"layer {twice[0]} is named twice: one scheme a layer, or skip it")
        for name in ("sink_tokens", "residual_length"):
            tokens = getattr(self, name)
            if not isinstance(tokens, int):
                raise SchemeError(f"{name} is a number of tokens, not {tokens!r}")
            if tokens < 0:
                raise SchemeError(f"{name} must be at least 0, not {tokens}")
        if any(own.layers or own.skip_layers for _, own in self.layers):
            raise SchemeError("the scheme of one layer cannot name layers of its own")

    @property
    def is_static(self) -> bool:
        """Whether all scales come from calibration."""
        return self.key.granularity.is_static and self.value.granularity.is_static

    def layer(self, index: int) -> QuantScheme:
        """The scheme that holds for layer `index`."""
        if index in self.skip_layers:
            return QuantScheme(EXACT, EXACT)
        own = dict(self.layers).get(index)
        return replace(self, skip_layers=frozenset(), layers=()) if own is None else own

    def quantized_layers(self, geometry: CacheGeometry) -> list[int]:
        """Layers of a model that the scheme quantizes: they keep tokens and are not skipped."""
        return [layer for layer in geometry.attention_layers if layer not in self.skip_layers]

    def check(self, geometry: CacheGeometry) -> None:
        """Makes sure that the scheme fits a model's cache.

        Raises:
            SchemeError: A named layer that the model does not have, nothing left to quantize, a
                layer with an empty value slot, or a scheme for a rotary part that there is not.
        """
        last = len(geometry.layers) - 1
        beyond = [layer for layer in self.skip_layers if layer > last]
        if beyond:
            raise SchemeError(f"cannot skip layer {max(beyond)}: the model has layers 0 to {last}")
        beyond = [layer for layer, _ in self.layers if layer > last]
        if beyond:
            raise SchemeError(
                f"no layer {max(beyond)} to give a scheme of its own: the model has layers 0 to "
                f"{last}"
            )
        tokenless = [n for n, _ in self.layers if not geometry.layers[n].keeps_tokens]
        if tokenless:
            kind = geometry.layers[tokenless[0]]
            raise SchemeError(f"layer {tokenless[0]} ({kind}) has no cache of its own to quantize")
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
        self._check_rotary_part(geometry)

    def _check_rotary_part(self, geometry: CacheGeometry) -> None:
        """Refuses a scheme for rotary parts where none is kept apart, which would do nothing."""
        latent = geometry.latent_layers
        if self.rotary_part != EXACT and not latent:
            raise SchemeError(
                f"{self.rotary_part} for the rotary part does nothing: only layers with a latent "
                "(MLA) keep one apart, and this model has none; leave rotary_format away"
            )
        for index, own in self.layers:
            if own.rotary_part != EXACT and index not in latent:
                raise SchemeError(
                    f"{own.rotary_part} for the rotary part of layer {index} does nothing: it has "
                    "no latent (MLA); leave rotary_format away"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as stored in a file header; the rest only if it is set."""
        extra: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("sink_tokens", "residual_length")
            if getattr(self, name)
        }
        if self.rotary_part != EXACT:
            extra["rotary_part"] = self.rotary_part.to_dict()
        if self.layers:
            extra["layers"] = {str(index): own.to_dict() for index, own in self.layers}
        return {
            "key": self.key.to_dict(),
            "value": self.value.to_dict(),
            "skip_layers": sorted(self.skip_layers),
            **extra,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QuantScheme:
        """Inverse of `to_dict`.

        Raises:
            SchemeError: An unknown format or granularity.
        """
        rotary_part, layers = values.get("rotary_part"), values.get("layers", {})
        return cls(
            TensorScheme.from_dict(values["key"]),
            TensorScheme.from_dict(values["value"]),
            frozenset(values["skip_layers"]),
            int(values.get("sink_tokens", 0)),
            int(values.get("residual_length", 0)),
            EXACT if rotary_part is None else TensorScheme.from_dict(rotary_part),
            tuple((int(index), cls.from_dict(own)) for index, own in layers.items()),
        )

    def __str__(self) -> str:
        """For tables and messages."""
        parts = [f"K {self.key}, V {self.value}"]
        if self.sink_tokens:
            parts.append(f"first {self.sink_tokens} tokens exact")
        if self.residual_length:
            parts.append(f"newest {self.residual_length} tokens exact")
        if self.rotary_part != EXACT:
            parts.append(f"rotary part of the latent {self.rotary_part}")
        if self.skip_layers:
            parts.append(f"layers {sorted(self.skip_layers)} unquantized")
        parts += [f"layer {index}: {own}" for index, own in self.layers]
        return ", ".join(parts)
