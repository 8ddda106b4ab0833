"""Looks over the shoulder of a model's attention: its queries, keys, values and result.

Transformers calls attention through a table of functions. While `watched` is active, the entry
that a model uses hands on what it is given, so that no model class has to be known here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvquant.errors import ExportError


@dataclass(frozen=True)
class AttentionCall:
    """One call of a layer's attention function.

    Attributes:
        module: The attention module that calls it.
        query: ``[batch, heads, tokens, key_dim]``, as it is multiplied with the keys.
        key: ``[batch, kv_heads, tokens, key_dim]``, as it comes from the cache.
        value: ``[batch, kv_heads, tokens, value_dim]``, likewise.
        output: What attention makes of them, ``[batch, tokens, heads * value_dim]``.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor

    @property
    def layer(self) -> int:
        """Number of the layer."""
        index = self.module.layer_idx
        assert isinstance(index, int)
        return index


@contextmanager
def watched(decoder: Any, look: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Within the block, `look` is told each call of the attention of `decoder`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    name = decoder.config._attn_implementation
    usual = functions.get(name)

    def watching(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = (usual or _eager(module))(module, query, key, value, *args, **kwargs)
        look(AttentionCall(module, query, key, value, result[0].flatten(2)))
        return result

    functions[name] = watching
    try:
        yield
    finally:
        del functions[name]
        if functions.get(name) is not usual:
            functions[name] = usual


def _eager(module: torch.nn.Module) -> Any:
    """The attention function of a model's own file, which is in no table."""
    found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise ExportError(
            f"{type(module).__name__} has an attention of its own, which cannot be observed: "
            "this model cannot be folded"
        )
    return found


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within the block, `model` is in eval mode and without gradients; then as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
