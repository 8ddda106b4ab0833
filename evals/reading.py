"""Forward passes of one model through many caches: prefill, blocks, greedy answers.

A prefill in one call reads nothing from any cache: all its keys are those of the call itself. So
the unquantized cache's forward pass is that of every arm, and one pass fills all of them::

    model ── keys, values of a layer ─→ unquantized cache ─→ attention
                        └─→ arm 1 … arm n        (what they return is not looked at)

With ``chunk`` each arm reads its own pieces instead, every piece through the codes of those before
it, as an engine with chunked prefill does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from kvquant.cache.cache import QuantizedCache
from kvquant.cache.companions import keeps_state
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import base_model


class Reader:
    """Reads tokens with one model.

    Attributes:
        model: The model.
        decoder: Its decoder, which caches are made for.
        geometry: Shape of its cache.
    """

    def __init__(self, model: Any) -> None:
        """Looks which arguments the model takes."""
        self.model = model
        self.decoder = base_model(model).get_decoder()
        self.geometry = CacheGeometry.from_config(model.config)
        self._cache_argument = cache_argument(self.decoder)
        self._takes_logits = (
            "logits_to_keep" in inspect.signature(base_model(model).forward).parameters
        )

    def reference(self) -> Any:
        """An empty unquantized cache."""
        return DynamicCache(config=self.decoder.config)

    @torch.no_grad()
    def read(self, ids: torch.Tensor, cache: Any, logits: int = 0, **extra: Any) -> torch.Tensor:
        """One call.

        Args:
            ids: ``[batch, tokens]``.
            cache: What came before; these are added.
            logits: How many of the last to return, 0 for all.
            **extra: Further arguments of the model, such as a mask.

        Returns:
            ``[batch, tokens, vocabulary]``, in the model's dtype.
        """
        call = {"input_ids": ids.to(self.decoder.device), "use_cache": True, **extra}
        if self._takes_logits:
            call["logits_to_keep"] = logits
        found: torch.Tensor = self.model(**call, **{self._cache_argument: cache}).logits
        return found[:, -logits:] if logits else found

    @torch.no_grad()
    def attention(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, ...]:
        """Attention weights of one call, ``[batch, heads, tokens, keys]`` for each layer.

        Empty where the model gives none; it has to attend eagerly.
        """
        call = {"input_ids": ids.to(self.decoder.device), self._cache_argument: cache}
        output = self.decoder(**call, use_cache=True, output_attentions=True)
        weights = getattr(output, "attentions", None) or ()
        return tuple(it for it in weights if it is not None)

    def fill(
        self,
        ids: torch.Tensor,
        reference: Any,
        arms: Mapping[str, Any],
        chunk: int | None = None,
        **extra: Any,
    ) -> None:
        """Prefill of all caches, which are empty.

        Args:
            ids: ``[batch, tokens]``.
            reference: The unquantized cache.
            arms: The others.
            chunk: Tokens of a call, if the prefill is to be cut.
            **extra: Further arguments of the model, such as a mask; only for a prefill in one call.
        """
        if chunk is None and self.shares_prefill:
            with _filling(reference, arms.values(), {"input_ids": ids, **extra}):
                self.read(ids, reference, logits=1, **extra)
            return
        for cache in (*arms.values(), reference):
            for piece in torch.split(ids, chunk or ids.shape[1], dim=1):
                self.read(piece, cache, logits=1, **extra)

    @property
    def shares_prefill(self) -> bool:
        """Whether a cache holds nothing but what its `update` was given.

        Others keep a recurrent state, some in the same layer as keys and values, or the keys of an
        indexer.
        """
        return not any(map(keeps_state, self.reference().layers))

    def answer(
        self, question: torch.Tensor, cache: Any, tokens: int, stop: Iterable[int] = ()
    ) -> torch.Tensor:
        """Greedy continuation ``[batch, tokens]`` after a question, which the cache has not read.

        Args:
            question: ``[batch, tokens]``.
            cache: What came before.
            tokens: How many at most.
            stop: Tokens that end a row; what follows one in its row means nothing.
        """
        ends = torch.tensor(sorted(stop), device=self.decoder.device)
        made = [self.read(question, cache, logits=1).argmax(-1)]
        ended = torch.isin(made[-1], ends)
        while len(made) < tokens and not bool(ended.all()):
            made.append(self.read(made[-1], cache, logits=1).argmax(-1))
            ended |= torch.isin(made[-1], ends)
        return torch.cat(made, 1)


@contextmanager
def _filling(reference: Any, arms: Iterable[Any], call: dict[str, Any]) -> Iterator[None]:
    """Gives `arms`, within the block, everything that `reference` is given."""
    caches = list(arms)
    for cache in caches:
        if isinstance(cache, QuantizedCache):
            cache.begin_call(call)
    update = reference.update

    def fill(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for cache in caches:
            cache.update(keys, values, *args, **kwargs)
        return update(keys, values, *args, **kwargs)

    reference.update = fill
    try:
        yield
    finally:
        del reference.update
