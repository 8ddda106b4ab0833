"""What one model's cache looks like, layer by layer, read from its config without torch.

`CacheGeometry.from_config` describes what Transformers' ``cache.update`` receives: keys after RoPE
and q/k norm, values, and for multi-head latent attention (MLA) the latent in the place of the keys
and the rotary part in the place of the values.

An example, two layers of Gemma 2 with 4 KV heads::

    layer 0   sliding   4 x 256 keys, 4 x 256 values, the last 4,096 tokens
    layer 1   full      4 x 256 keys, 4 x 256 values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from .errors import GeometryError
from .geometry_config import (
    head_dim,
    kv_heads,
    max_positions,
    per_layer,
    read_settings,
    shared_sources,
    whole,
)
from .geometry_defaults import FAMILIES
from .geometry_rules import CHUNKED, CROSS, FULL, SLIDING, Settings

_OTHER_CONFIG = (
    "this config belongs to another model, or this version of Transformers caches something else "
    "for it"
)


class LayerKind(str, Enum):
    """What a layer keeps per token.

    A layer that keeps a recurrent state next to its keys and values counts as the kind of its
    attention; one whose attention picks tokens by an index is FULL or LATENT.
    """

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

    @property
    def is_latent(self) -> bool:
        """Whether a latent is in the key slot, and its rotary part in the value slot (MLA)."""
        return self.kind is LayerKind.LATENT

    def __str__(self) -> str:
        """For people: ``sliding (4,096), 8 KV heads of 128``."""
        if not self.keeps_tokens:
            return (
                self.kind.value if self.shared_from is None else f"shared from {self.shared_from}"
            )
        window = "" if self.window is None else f" ({self.window:,})"
        heads = "1 KV head" if self.kv_heads == 1 else f"{self.kv_heads} KV heads"
        dims = "+".join(map(str, dict.fromkeys((self.key_dim, self.value_dim))))
        return f"{self.kind.value}{window}, {heads} of {dims}"


@dataclass(frozen=True)
class CacheGeometry:
    """Shape of a whole cache.

    Attributes:
        model_type: Of the text part, as Transformers names it.
        layers: One entry per model layer.
        max_positions: Positions the model was built for (with RoPE scaling as configured), or None.
    """

    model_type: str
    layers: tuple[LayerGeometry, ...]
    max_positions: int | None

    @classmethod
    def from_config(cls, config: Any) -> CacheGeometry:
        """Reads a config, which is a parsed config.json or a Transformers PreTrainedConfig.

        Keys that a config.json leaves out are filled in for the model types that
        `kvquant.geometry_defaults` knows. Any other model type must name its layers, heads, KV
        heads, and head_dim or hidden_size itself.

        Raises:
            GeometryError: Something the cache depends on is missing (all of it is named), is not a
                number, contradicts something else, or is a kind of cache that holds no keys and
                values of each token.
        """
        try:
            model_type, settings = read_settings(config)
            return cls(model_type, _layers(model_type, settings), max_positions(settings))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Keys beyond the plain numbers are not checked one by one.
            raise GeometryError(f"this config has a key of the wrong kind: {error!r}") from error

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that store keys and values of their own."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.keeps_tokens)

    @property
    def latent_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that store a latent."""
        return tuple(i for i in self.attention_layers if self.layers[i].is_latent)

    def summary(self) -> str:
        """For people: ``llama cache: 30 x full, 3 KV heads of 64; 8,192 positions``."""
        shapes: dict[str, int] = {}
        for layer in self.layers:
            shapes[str(layer)] = shapes.get(str(layer), 0) + 1
        layers = " + ".join(f"{count} x {shape}" for shape, count in shapes.items())
        limit = f"{self.max_positions:,}" if self.max_positions else "unlimited"
        return f"{self.model_type} cache: {layers}; {limit} positions"

    def check_tensors(
        self,
        layer_idx: int,
        key_shape: Sequence[int],
        value_shape: Sequence[int],
        *,
        whose: str = "its config",
        advice: str = _OTHER_CONFIG,
    ) -> None:
        """Compares what a model caches with what its config promised.

        Args:
            layer_idx: Layer, from 0.
            key_shape: ``[batch, kv_heads, tokens, key_dim]``.
            value_shape: ``[batch, kv_heads, tokens, value_dim]``.
            whose: What this geometry is of, for messages.
            advice: What a difference means, for messages.

        Raises:
            GeometryError: They differ; the message has both sizes.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise GeometryError(
                f"the model caches in layer {layer_idx}, but {whose} has {len(self.layers)} "
                f"layers: {advice}"
            )
        layer = self.layers[layer_idx]
        if not layer.keeps_tokens:
            raise GeometryError(
                f"layer {layer_idx} caches keys and values, but {whose} has one of the kind "
                f"{layer.kind.value!r} there, which has none: {advice}"
            )
        for name, shape, dim in (
            ("keys", key_shape, layer.key_dim),
            ("values", value_shape, layer.value_dim),
        ):
            if len(shape) != 4 or shape[1] != layer.kv_heads or shape[3] != dim:
                found = _heads(shape[1], shape[3]) if len(shape) == 4 else f"{list(shape)}"
                raise GeometryError(
                    f"layer {layer_idx} caches {name} of {found}, but {whose} has "
                    f"{_heads(layer.kv_heads, dim)}: {advice}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as stored in a file header."""
        return {
            "model_type": self.model_type,
            "max_positions": self.max_positions,
            "layers": [{**asdict(layer), "kind": layer.kind.value} for layer in self.layers],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheGeometry:
        """Inverse of `to_dict`.

        Raises:
            GeometryError: Not what `to_dict` writes.
        """
        try:
            layers = tuple(
                LayerGeometry(**{**layer, "kind": LayerKind(layer["kind"])})
                for layer in values["layers"]
            )
            return cls(values["model_type"], layers, values["max_positions"])
        except (KeyError, TypeError, ValueError) as error:
            raise GeometryError(f"this is no cache geometry: {error!r}") from None


def _heads(count: int, dim: int) -> str:
    return f"{count} head x {dim}" if count == 1 else f"{count} heads x {dim}"


_KINDS: Mapping[str, LayerKind] = {
    FULL: LayerKind.FULL,
    "attention": LayerKind.FULL,
    "indexed_attention": LayerKind.FULL,
    "deepseek_sparse_attention": LayerKind.FULL,
    "qwen_sparse_attention": LayerKind.FULL,
    "minimax_m3_sparse": LayerKind.FULL,
    "hybrid": LayerKind.FULL,
    SLIDING: LayerKind.SLIDING,
    "hybrid_sliding": LayerKind.SLIDING,
    CHUNKED: LayerKind.CHUNKED,
    "linear_attention": LayerKind.LINEAR,
    "mamba": LayerKind.LINEAR,
    "conv": LayerKind.LINEAR,
    "moe": LayerKind.NONE,
    "mlp": LayerKind.NONE,
    CROSS: LayerKind.NONE,
}
"""Transformers' layer types (and their former names) -> what such a layer keeps."""

_WINDOW_KEYS = {LayerKind.SLIDING: "sliding_window", LayerKind.CHUNKED: "attention_chunk_size"}


def _layers(model_type: str, settings: Settings) -> tuple[LayerGeometry, ...]:
    count = whole(settings, "num_hidden_layers")
    types = settings["layer_types"]
    if types is not None and len(types) != count:
        raise GeometryError(f"the config has {count} layers, but {len(types)} layer_types")
    sources = shared_sources(settings, count)
    latent = model_type in FAMILIES and FAMILIES[model_type].latent
    layers = []
    for layer_idx, own in enumerate(per_layer(settings, count)):
        if layer_idx in sources:
            layers.append(LayerGeometry(LayerKind.SHARED, shared_from=sources[layer_idx]))
            continue
        kind = _layer_kind(own, types and types[layer_idx], layer_idx)
        layers.append(_layer(own, kind, latent))
    return tuple(layers)


def _layer_kind(settings: Settings, layer_type: str | None, layer_idx: int) -> LayerKind:
    """What a layer keeps; without layer types, by its windows, as Transformers' DynamicCache."""
    if layer_type is None:
        windows = (k for k, key in _WINDOW_KEYS.items() if settings.get(key) is not None)
        return next(windows, LayerKind.FULL)
    kind = _KINDS.get(layer_type)
    if kind is None:
        raise GeometryError(
            f"layer {layer_idx} is of the type {layer_type!r}, whose cache is not known; "
            f"known are {', '.join(_KINDS)}"
        )
    return kind


def _layer(settings: Settings, kind: LayerKind, latent: bool) -> LayerGeometry:
    if kind in (LayerKind.LINEAR, LayerKind.NONE):
        return LayerGeometry(kind)
    window = whole(settings, _WINDOW_KEYS[kind]) if kind in _WINDOW_KEYS else None
    if latent:
        rank = whole(settings, "kv_lora_rank")
        return LayerGeometry(
            LayerKind.LATENT, 1, rank, whole(settings, "qk_rope_head_dim", least=0), window
        )
    key_dim = head_dim(settings)
    value_dim = key_dim if settings.get("v_head_dim") is None else whole(settings, "v_head_dim")
    return LayerGeometry(kind, kv_heads(settings), key_dim, value_dim, window)
