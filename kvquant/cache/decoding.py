"""Greedy decoding step by step, with and without a cache, so that the two can be compared.

`generate()` does the same for users; here every step's logits are kept, and a cache is fed the
tokens that were decoded without one, so that one early difference does not spoil what follows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kvquant.errors import InputError
from kvquant.models.adapters import base_model
from kvquant.models.source import first_line

from .transformers_compat import cache_argument


@dataclass(frozen=True)
class Prompt:
    """Texts of a batch, padded on the left.

    Attributes:
        ids: ``[batch, tokens]``.
        mask: Likewise, 1 for real tokens and 0 for padding.
    """

    ids: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor) -> Prompt:
        """A batch without padding."""
        return cls(ids, torch.ones_like(ids))

    def extended(self, tokens: torch.Tensor) -> Prompt:
        """With `tokens` ``[batch, more]`` at the end."""
        mask = torch.ones_like(tokens)
        return Prompt(torch.cat((self.ids, tokens), 1), torch.cat((self.mask, mask), 1))


class Decoding:
    """Forward passes of one model.

    Attributes:
        model: The model.
        decoder: Its decoder, which caches are made for.
    """

    def __init__(self, model: Any) -> None:
        """Looks which arguments the model takes."""
        self.model = model
        self.decoder = base_model(model).get_decoder()
        self._takes = inspect.signature(base_model(model).forward).parameters
        self._cache_argument = cache_argument(self.decoder)

    def without_cache(self, prompt: Prompt, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next `count` tokens ``[batch, count]``, and logits ``[batch, count, vocabulary]``.

        Everything is computed anew for every token.

        Raises:
            InputError: The model fails.
        """
        logits: list[torch.Tensor] = []
        tokens = prompt.ids[:, :0]
        for _ in range(count):
            try:
                logits.append(self._last_logits(prompt.extended(tokens), 0, use_cache=False))
            except Exception as error:
                raise InputError(
                    f"the model fails without any cache: {first_line(error)}"
                ) from error
            tokens = torch.cat((tokens, logits[-1].argmax(-1)), 1)
        return tokens, torch.cat(logits, 1)

    def with_cache(
        self, prompt: Prompt, tokens: torch.Tensor, cache: Any, pieces: Iterable[int]
    ) -> torch.Tensor:
        """Logits ``[batch, count, vocabulary]`` with which `tokens` ``[batch, count]`` are chosen.

        Args:
            prompt: What comes before; fed in pieces.
            tokens: Fed one by one.
            cache: An empty cache.
            pieces: Sizes of the prompt's pieces, which add up to it.
        """
        for size in pieces:
            logits = self.feed(prompt, size, cache)
        found = [logits]
        for step in range(tokens.shape[1] - 1):
            found.append(self.feed(prompt.extended(tokens[:, : step + 1]), 1, cache))
        return torch.cat(found, 1)

    def feed(self, prompt: Prompt, size: int, cache: Any) -> torch.Tensor:
        """Adds the next `size` tokens of `prompt` to `cache`; logits ``[batch, 1, vocabulary]``."""
        start = cache.get_seq_length()
        stop = start + size
        part = Prompt(prompt.ids[:, :stop], prompt.mask[:, :stop])
        return self._last_logits(part, start, use_cache=True, **{self._cache_argument: cache})

    def generate(self, prompt: Prompt, count: int, cache: Any) -> torch.Tensor:
        """What `generate()` makes of it greedily: ``[batch, count]``."""
        made: torch.Tensor = self.model.generate(
            input_ids=prompt.ids,
            attention_mask=prompt.mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
            **{self._cache_argument: cache},
        )
        return made[:, prompt.ids.shape[1] :]

    @torch.no_grad()
    def _last_logits(self, text: Prompt, start: int, **cache: Any) -> torch.Tensor:
        """Logits of the last token, float32, of a call with the tokens from `start` on."""
        call: dict[str, Any] = {"input_ids": text.ids[:, start:], "attention_mask": text.mask}
        if "position_ids" in self._takes:
            call["position_ids"] = (text.mask.cumsum(1) - 1).clamp(min=0)[:, start:]
        if "logits_to_keep" in self._takes:
            call["logits_to_keep"] = 1
        logits: torch.Tensor = self.model(**call, **cache).logits
        return logits[:, -1:].float()
