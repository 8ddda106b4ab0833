"""Watches a cache being filled and keeps statistics of what goes into it.

`Recorder` wraps the cache's own ``update``, so that it sees keys and values exactly as they are
cached, for any architecture and any adapter: after rotary embedding and q/k norm, before heads are
repeated, the latent for MLA. ``update`` is not told which tokens are padding; that comes from a
hook on the decoder, which also counts positions. Leaving the ``with`` block removes everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from kvquant.cache.transformers_compat import cache_of_call
from kvquant.errors import InputError
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import base_model
from kvquant.rotary import RotaryLayout, find_layouts

from .stats import ChannelStats, LayerStats


class Recorder:
    """Records what a model caches.

    Example:
        >>> with Recorder(model, geometry) as recorder:
        ...     model(**inputs, cache=recorder.watch(DynamicCache(config=model.config)))
        >>> recorder.layers[0].key.amax  # [kv_heads, dim]

    Attributes:
        layers: Statistics of each layer seen so far.
        longest_position: Largest position seen, plus one.
    """

    def __init__(
        self, model: Any, geometry: CacheGeometry, skip_layers: Iterable[int] = ()
    ) -> None:
        """Prepares to record `model`.

        Args:
            model: A Transformers model, or a PeftModel around one.
            geometry: Shape of its cache; real tensors are held against it.
            skip_layers: Layers to leave out.
        """
        self.layers: dict[int, LayerStats] = {}
        self.longest_position = 0
        self._decoder: torch.nn.Module = base_model(model).get_decoder()
        self._geometry = geometry
        self._skipped = frozenset(skip_layers)
        self._handles: list[Any] = []
        self._watched: list[Any] = []
        self._real: torch.Tensor | None = None
        self._embeddings: dict[int, Any] = {}
        self._layouts: dict[int, tuple[RotaryLayout | None, RotaryLayout | None]] = {}

    def __enter__(self) -> Recorder:
        """Installs the hooks."""
        self._handles.append(
            self._decoder.register_forward_pre_hook(self._note_call, with_kwargs=True)
        )
        for module in self._decoder.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                self._handles.append(
                    module.register_forward_pre_hook(self._note_rotation, with_kwargs=True)
                )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes the hooks and unwraps every cache."""
        for handle in self._handles:
            handle.remove()
        for cache in self._watched:
            del cache.update
        self._handles.clear()
        self._watched.clear()
        self._embeddings.clear()

    def watch(self, cache: Any) -> Any:
        """Records everything written to `cache` from now on; returns it."""
        update = cache.update

        def recording_update(
            keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            if layer_idx not in self._skipped:
                self._record(layer_idx, keys, values)
            return update(keys, values, layer_idx, *args, **kwargs)

        cache.update = recording_update
        self._watched.append(cache)
        return cache

    def release(self, cache: Any) -> None:
        """Stops watching `cache`, so that its memory can go."""
        self._watched.remove(cache)
        del cache.update

    def _note_call(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads padding and positions of the call that begins."""
        tokens = kwargs.get("input_ids")
        if tokens is None:
            tokens = args[0] if args else kwargs["inputs_embeds"]
        batch, new = tokens.shape[:2]
        mask = kwargs.get("attention_mask")
        self._real = None
        if mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
                kind = f"{mask.dim()}-D" if isinstance(mask, torch.Tensor) else type(mask).__name__
                raise InputError(
                    f"the recorder needs an attention mask [batch, tokens], not {kind}: "
                    "without it padding cannot be told from text"
                )
            real = mask[:, -new:].bool()
            self._real = None if bool(real.all()) else real
        cache = cache_of_call(kwargs)
        past = 0 if cache is None else int(cache.get_seq_length())
        seen = past + new if self._real is None else int(mask.sum(1).max())
        self.longest_position = max(self.longest_position, seen)

    def _note_rotation(
        self, attention: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keeps the cosines and sines that a layer is called with, and probes it once."""
        layer = int(attention.layer_idx)  # type: ignore[arg-type]
        if kwargs.get("position_embeddings") is None or layer in self._skipped:
            return
        self._embeddings[layer] = kwargs["position_embeddings"]
        if layer in self.layers or layer in self._layouts:
            return
        # One token alone, at position 0, is not turned and would tell nothing.
        if cache_of_call(kwargs) is not None and (args[0] if args else kwargs["hidden_states"]).shape[1] > 1:
            self._layouts[layer] = find_layouts(attention, args, kwargs)

    def _record(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        stats = self.layers.get(layer)
        if stats is None:
            self._geometry.check_tensors(layer, tuple(keys.shape), tuple(values.shape))
            key_layout, value_layout = self._layouts.get(layer, (None, None))
            stats = self.layers[layer] = LayerStats(
                _empty_for(keys, key_layout), _empty_for(values, value_layout)
            )
        for slot, states in ((stats.key, keys), (stats.value, values)):
            self._count(slot, states, self._embeddings.get(layer))

    def _count(self, stats: ChannelStats, states: torch.Tensor, embeddings: Any) -> None:
        unrotated = None
        if stats.rotary is not None:
            unrotated = self._real_tokens(stats.rotary.unrotate(states.float(), embeddings))
            unrotated = unrotated.sum(0)
        stats.update(self._real_tokens(states), unrotated)

    def _real_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """``[tokens, kv_heads, dim]`` of the tokens that are no padding."""
        by_token = states.transpose(1, 2)
        if self._real is None:
            return by_token.flatten(0, 1)
        return by_token[self._real.to(states.device)]


def _empty_for(states: torch.Tensor, layout: RotaryLayout | None) -> ChannelStats:
    empty = ChannelStats.empty(states.shape[1], states.shape[3], states.device)
    return replace(empty, rotary=layout)
