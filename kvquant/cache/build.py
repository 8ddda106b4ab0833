"""From geometry, scheme and scales to the layers of a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from kvquant.attention.interface import NAME
from kvquant.errors import NotObservedError, SchemeError
from kvquant.geometry import CacheGeometry, LayerKind
from kvquant.quantize.codec import Center, Codec
from kvquant.rotary import RotaryLayout
from kvquant.scales import KVScales, TensorScales
from kvquant.scheme import QuantScheme, TensorScheme

from .angles import RotaryAngles, embedding_of
from .companions import QuantizedHybridLayer, QuantizedIndexedLayer
from .layer import MakeCodec, QuantizedLayer
from .ledger import TokenLedger
from .workspace import Workspace

_ATTENDED = (LayerKind.FULL, LayerKind.SLIDING)
"""Kinds of layers whose queries see all tokens, or the newest ones."""

_CLASSES: dict[type, type] = {
    DynamicLayer: QuantizedLayer,
    DynamicSlidingWindowLayer: QuantizedLayer,
    DynamicIndexedLayer: QuantizedIndexedLayer,
    LinearAttentionAndFullAttentionLayer: QuantizedHybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: QuantizedHybridLayer,
}


@dataclass(eq=False)
class Plan:
    """What a cache is made from, and what all its layers share.

    Attributes:
        geometry: Shape of the model's cache.
        scheme: Its scheme.
        scales: Calibrated scales and means, or None.
        decoder: The model's decoder, whose rotary module gives cosines and sines.
        backend: What attends to tokens as they are stored (`kvquant.attention.interface.BACKENDS`);
            None if they are always dequantized.
        is_compiled: Whether the decoder runs compiled, which does not know handles.
    """

    geometry: CacheGeometry
    scheme: QuantScheme
    scales: KVScales | None
    decoder: Any
    backend: str | None = None
    is_compiled: bool = False
    _angles: dict[Any, RotaryAngles] = field(default_factory=dict)

    def slot_scheme(self, layer_idx: int, slot: str) -> TensorScheme:
        """Scheme of the ``key`` or ``value`` slot of a layer."""
        scheme = self.scheme.layer(layer_idx)
        if slot == "value" and self.geometry.layers[layer_idx].kind is LayerKind.LATENT:
            return scheme.rotary_part
        return scheme.key if slot == "key" else scheme.value

    def tensor_scales(self, layer_idx: int, slot: str) -> TensorScales | None:
        """Calibrated numbers of a slot, or None."""
        if self.scales is None or layer_idx not in self.scales.layers:
            return None
        found: TensorScales = getattr(self.scales.layers[layer_idx], slot)
        return found

    def turned_pairs(self, layer_idx: int, slot: str) -> torch.Tensor | None:
        """Which rotary pairs of a slot have their mean turned, bool ``[pairs]``; None if none."""
        scales = self.tensor_scales(layer_idx, slot)
        if not self.slot_scheme(layer_idx, slot).center or scales is None:
            return None
        pairs = scales.turned_pairs
        if pairs is None or not bool(pairs.any()):
            return None
        return None if embedding_of(self.decoder, layer_idx) is None else pairs

    @property
    def turns_means(self) -> bool:
        """Whether some slot's mean turns with the position."""
        return any(
            self.turned_pairs(index, slot) is not None
            for index in self.geometry.attention_layers
            for slot in ("key", "value")
        )

    def why_dequantized(self, layer_idx: int) -> str:
        """Why a layer's tokens are dequantized for the model's own attention, or ""."""
        return self.why_always_dequantized(layer_idx) or self.why_now_dequantized()

    def why_always_dequantized(self, layer_idx: int) -> str:
        """Reasons that lie in the layer and in what was asked for."""
        if self.backend is None:
            return "as asked"
        if self.geometry.layers[layer_idx].kind not in _ATTENDED:
            return f"{self.geometry.layers[layer_idx].kind.value} attention"
        slots = (self.slot_scheme(layer_idx, slot) for slot in ("key", "value"))
        return "" if any(slot.format.is_scaled for slot in slots) else "nothing is quantized"

    def why_now_dequantized(self) -> str:
        """Reasons that lie in how the model runs at the moment."""
        if self.is_compiled:
            return "the model is compiled"
        if self.decoder.config._attn_implementation != NAME:
            return f"the model attends with {self.decoder.config._attn_implementation}"
        return ""

    def codec(self, layer_idx: int, slot: str, dtype: torch.dtype, device: torch.device) -> Codec:
        """Codec of a slot.

        Raises:
            NotObservedError: A static scheme without scales for this layer.
        """
        layer = self.geometry.layers[layer_idx]
        scheme = self.slot_scheme(layer_idx, slot)
        dim = layer.key_dim if slot == "key" else layer.value_dim
        center = self._center(layer_idx, slot, device) if scheme.center else None
        scales = self.tensor_scales(layer_idx, slot) if scheme.granularity.is_static else None
        return Codec(scheme, dim, dtype, scales=scales, center=center)

    def check_scales(self) -> None:
        """Makes sure that every static scheme has scales made for it.

        Raises:
            NotObservedError: A layer has none.
            SchemeError: They are of another scheme.
        """
        for index in self.geometry.attention_layers:
            for slot in ("key", "value"):
                scheme = self.slot_scheme(index, slot)
                if not scheme.granularity.is_static:
                    continue
                if self.tensor_scales(index, slot) is None:
                    raise NotObservedError(
                        f"layer {index}: {scheme} needs calibrated {slot} scales, and there are "
                        "none: give scales=…, or a preset such as int8, which needs none"
                    )
                assert self.scales is not None
                known = getattr(self.scales.scheme, slot)
                if known != scheme:
                    raise SchemeError(
                        f"layer {index}: the {slot} scales are {known}, the scheme is {scheme}"
                    )

    def nbytes(self) -> int:
        """Bytes of the tables of angles."""
        return sum(angles.nbytes() for angles in self._angles.values())

    def _center(self, layer_idx: int, slot: str, device: torch.device) -> Center | None:
        scales = self.tensor_scales(layer_idx, slot)
        if scales is None or scales.mean is None:
            return None
        fixed, pairs = scales.mean.clone(), self.turned_pairs(layer_idx, slot)
        if pairs is None or scales.rotary is None or scales.mean_unrotated is None:
            return Center(fixed.to(device), None, None, None)
        turned = torch.zeros_like(fixed)
        for target, source in zip(
            scales.rotary.split(turned), scales.rotary.split(scales.mean_unrotated), strict=True
        ):
            target.copy_(source * pairs)
        for target in scales.rotary.split(fixed):
            target.mul_(~pairs)
        angles = self._angles_of(layer_idx, scales.rotary, device)
        return Center(fixed.to(device), turned.to(device), scales.rotary, angles)

    def _angles_of(
        self, layer_idx: int, layout: RotaryLayout, device: torch.device
    ) -> RotaryAngles:
        """The table of a layer, shared by the layers that rotate alike."""
        types = getattr(self.decoder.config, "layer_types", None)
        place = (types and types[layer_idx], layout, device)
        if place not in self._angles:
            embed = embedding_of(self.decoder, layer_idx)
            assert embed is not None
            self._angles[place] = RotaryAngles(embed, layout, device)
        return self._angles[place]


def build_layers(
    plan: Plan, ledger: TokenLedger, workspace: Workspace, offloading: bool = False
) -> list[Any]:
    """One layer for each that Transformers would make; those that keep no tokens are its own.

    Raises:
        SchemeError: A kind of layer that cannot be quantized, or cross-attention.
        NotObservedError: A static scheme without scales.
    """
    _refuse_cross_attention(plan.decoder.config)
    plan.check_scales()
    sources = {layer.shared_from for layer in plan.geometry.layers}
    layers: list[Any] = DynamicCache(config=plan.decoder.config).layers
    for index in plan.geometry.attention_layers:
        kind = _CLASSES.get(type(layers[index]))
        if kind is None:
            raise SchemeError(
                f"layer {index} is a {type(layers[index]).__name__}, which cannot be quantized"
            )
        own: dict[str, Any] = {}
        if kind is QuantizedHybridLayer:
            own["number_of_states"] = layers[index].number_of_states
        layers[index] = kind(
            plan.geometry.layers[index],
            plan.scheme.layer(index),
            _codec_maker(plan, index),
            ledger,
            # What others read later must not be overwritten by the next layer.
            None if index in sources else workspace,
            _backend_chooser(plan, index, kind, offloading),
            **own,
        )
    return layers


def _refuse_cross_attention(config: Any) -> None:
    """Attention to what an encoder made, of images or another text, caches tokens of its own.

    Raises:
        SchemeError: The decoder has such attention.
    """
    types = getattr(config, "layer_types", None) or ()
    listed = getattr(config, "cross_attention_layers", None)
    if listed or "cross_attention" in types or getattr(config, "add_cross_attention", False):
        raise SchemeError(
            f"{config.model_type} has cross-attention, which caches keys and values of an encoder: "
            "such a cache cannot be quantized"
        )


def _backend_chooser(
    plan: Plan, layer_idx: int, kind: type, offloading: bool
) -> Callable[[], str | None]:
    # Attention of picked tokens reads keys in its own way; offloaded tokens are gone too soon.
    is_fit = kind is not QuantizedIndexedLayer and not offloading
    is_fit = is_fit and not plan.why_always_dequantized(layer_idx)

    def choose() -> str | None:
        return plan.backend if is_fit and not plan.why_now_dequantized() else None

    return choose


def _codec_maker(plan: Plan, layer_idx: int) -> MakeCodec:
    def make(slot: str, dtype: torch.dtype, device: torch.device) -> Codec:
        return plan.codec(layer_idx, slot, dtype, device)

    return make
