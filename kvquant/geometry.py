"""What one model's cache looks like, layer by layer, read from its config without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class LayerKind(str, Enum):
    """What a layer keeps per token."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    LATENT = "latent"
    SHARED = "shared"
    LINEAR = "linear"
    NONE = "none"


@dataclass(frozen=True)
class LayerGeometry:
    """Shape of one layer's cache.

    Attributes:
        kind: What the layer keeps.
        kv_heads: KV heads (1 for a latent layer; 0 where nothing is kept per token).
        key_dim: Width of what goes into the key slot of one head.
        value_dim: Width of what goes into the value slot of one head.
        window: Tokens a sliding or chunked layer looks back over, else None.
        shared_from: Layer whose keys and values a SHARED layer reads, else None.
    """

    kind: LayerKind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    shared_from: int | None = None

    @property
    def keeps_tokens(self) -> bool:
        """Whether the layer stores keys and values of its own."""
        return self.kind not in (LayerKind.SHARED, LayerKind.LINEAR, LayerKind.NONE)


@dataclass(frozen=True)
class CacheGeometry:
    """Shape of a whole cache.

    Attributes:
        model_type: As the config names it.
        layers: One entry per model layer.
        max_positions: Positions the model was built for (with RoPE scaling as configured), or None.
    """

    model_type: str
    layers: tuple[LayerGeometry, ...]
    max_positions: int | None

    @classmethod
    def from_config(cls, config: Any) -> CacheGeometry: ...

    def to_dict(self) -> dict[str, Any]: ...

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheGeometry: ...
