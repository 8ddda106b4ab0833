"""Watches a cache being filled and keeps statistics of what goes into it.

`Recorder` wraps the cache's own ``update``, so that it sees keys and values exactly as they are
cached, for any architecture and any adapter: after rotary embedding and q/k norm, before heads are
repeated, the latent for MLA. ``update`` is not told which tokens are padding; that comes from a
hook on the decoder, which also counts positions. Leaving the ``with`` block removes everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from kvquant.cache.padding import real_tokens
from kvquant.cache.transformers_compat import by_name, cache_of_call
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
        self._running: list[tuple[torch.nn.Module, dict[str, Any]]] = []

    def __enter__(self) -> Recorder:
        """Installs the hooks."""
        self._handles.append(
            self._decoder.register_forward_pre_hook(self._note_call, with_kwargs=True)
        )
        for module in self._decoder.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                self._handles += (
                    module.register_forward_pre_hook(self._enter_layer, with_kwargs=True),
                    module.register_forward_hook(self._leave_layer, always_call=True),
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
        self._running.clear()

    def watch(self, cache: Any) -> Any:
        """Records everything written to `cache` from now on; returns it."""
        update = cache.update

        def recording_update(
            keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            if layer_idx not in self._skipped:
                with torch.no_grad():
                    self._record(cache, layer_idx, keys, values)
            return update(keys, values, layer_idx, *args, **kwargs)

        cache.update = recording_update
        self._watched.append(cache)
        return cache

    def release(self, cache: Any) -> None:
        """Stops watching `cache`, so that its memory can go."""
        self._watched.remove(cache)
        del cache.update

    def _note_call(
        self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Reads padding and positions of the call that begins."""
        kwargs = by_name(decoder, args, kwargs)
        tokens = kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        new = tokens.shape[1]
        cache = cache_of_call(kwargs)
        start = 0 if cache is None else int(cache.get_seq_length())
        mask = kwargs.get("attention_mask")
        real = real_tokens(mask, tokens.shape[0], start, new)
        self._real = None if real is None or bool(real.all()) else real
        seen = start + new
        if isinstance(mask, torch.Tensor):
            seen = int(mask[:, :seen].bool().sum(1).max())
        self.longest_position = max(self.longest_position, seen)

    def _enter_layer(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Remembers what a layer is called with, for as long as it runs."""
        self._running.append((module, by_name(module, args, kwargs)))

    def _leave_layer(self, *_: Any) -> None:
        self._running.pop()

    def _record(self, cache: Any, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        module, call = self._running[-1] if self._running else (self._decoder, {})
        embeddings = call.get("position_embeddings")
        stats = self.layers.get(layer)
        if stats is None:
            self._geometry.check_tensors(layer, tuple(keys.shape), tuple(values.shape))
            layouts: tuple[RotaryLayout | None, RotaryLayout | None] = (None, None)
            # One token alone, at position 0, is not turned and would tell nothing.
            if embeddings is not None and keys.shape[2] > 1:
                layouts = find_layouts(module, call, cache, (keys, values))
            stats = self.layers[layer] = LayerStats(
                *(
                    ChannelStats.empty(states.shape[1], states.shape[3], states.device, layout)
                    for states, layout in zip((keys, values), layouts, strict=True)
                )
            )
        for slot, states in ((stats.key, keys), (stats.value, values)):
            self._count(slot, states, embeddings)

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
