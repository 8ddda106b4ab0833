"""Where a layer's factors go: which rows of which weights make which channel of what it caches.

Nothing about a model class is known here. A few tokens run through the model, and what each
projection and norm inside an attention module puts out is compared with the keys, values and
queries that its attention gets. Where they are the same numbers, turned by rotary embedding or not,
nothing but that rotation lies between, and a factor on a row of the weight is a factor on a
channel. Where they are not, folding is refused: a norm without a weight, a gate, a latent, or
something new lies in the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from kvquant.errors import ExportError
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import adapter_names, base_model
from kvquant.rotary import RotaryLayout

from .fold_probe import SeenLayer, probe

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_TOLERANCE = (1e-3, 1e-5)
"""What two numbers may differ by, in proportion to the largest of the channel and of the head."""

_TOLERANCE_16 = (5e-2, 1e-2)
"""The same for 16-bit models, whose rotary embedding rounds in between."""


@dataclass(frozen=True, eq=False)
class Place:
    """Which entries of a module's weight (and bias) scale with which channel.

    Attributes:
        module: Path of the module below the attention module: ``k_proj``, ``q_norm`` …
        weight: Its weight in the model.
        bias: Its bias in the model, or None.
        axis: Axis of a projection's weight that the entries lie on; None for a norm, whose weight
            has one entry a channel.
        entries: Their indices, int64 ``[heads, dim]``. A norm that all heads share has the same
            ones for each.
        offset: What the module adds to its weight: 1 for Gemma's norms, else 0.
    """

    module: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    axis: int | None
    entries: torch.Tensor
    offset: float = 0.0

    @property
    def is_shared(self) -> bool:
        """Whether all heads have the same entries, so that their factors have to be equal."""
        return self.entries.shape[0] > 1 and bool((self.entries[:1] == self.entries).all())


@dataclass(frozen=True, eq=False)
class FoldPlaces:
    """Where the factors of one layer go.

    Attributes:
        query: Gets the inverse of the key factors, once for each query head.
        key: Gets the key factors.
        value: Gets the value factors.
        output: Columns of the output projection, which get the inverse of the value factors.
        key_groups: Channels with the same number have to have the same factor, being a rotary pair;
            int64 ``[key_dim]``, counted from 0.
    """

    query: Place
    key: Place
    value: Place
    output: Place
    key_groups: torch.Tensor


def find_places(model: Any, geometry: CacheGeometry) -> dict[int, FoldPlaces]:
    """Where the factors of each layer go.

    Args:
        model: A Transformers model; merge adapters first.
        geometry: Shape of its cache.

    Raises:
        ExportError: Folding would not be exact; the message says in which layer, and why.
    """
    if adapter_names(model):
        raise ExportError(
            "factors go into the weights that are served: merge the adapter first "
            "(--merge-adapter), and fold the merged model"
        )
    seen = probe(base_model(model).get_decoder(), geometry)
    return {layer: _places(each) for layer, each in seen.items()}


def _places(seen: SeenLayer) -> FoldPlaces:
    call = seen.call
    output = _output(seen)
    value, _ = _source(seen, "value", call.value)
    key, key_turned = _source(seen, "key", call.key)
    query, query_turned = _source(seen, "query", call.query)
    if key_turned != query_turned:
        raise ExportError(f"{seen.name} rotates either keys or queries only: it cannot be folded")
    if key.module == value.module and bool(torch.isin(key.entries, value.entries).any()):
        raise ExportError(
            f"{seen.name} takes keys and values from the same rows of {key.module}: "
            "it cannot be folded"
        )
    rotary = seen.layout if key_turned else None
    return FoldPlaces(query, key, value, output, _groups(call.key.shape[3], rotary))


def _groups(dim: int, rotary: RotaryLayout | None) -> torch.Tensor:
    """Numbers of the channels, the same one for both of a rotary pair."""
    groups = torch.arange(dim)
    if rotary is not None:
        first, second = rotary.split(groups)
        second.copy_(first)  # views of groups
    _, numbers = np.unique(groups.numpy(), return_inverse=True)
    return torch.from_numpy(numbers)


def _output(seen: SeenLayer) -> Place:
    """The module that takes attention's result as it is."""
    call = seen.call
    result = call.output[0]
    heads, dim = call.query.shape[1], call.value.shape[3]
    for name, (module, given, _) in seen.ran.items():
        if not isinstance(module, (torch.nn.Linear, Conv1D)) or given.shape != call.output.shape:
            continue
        if _same(given[0], result):
            axis = 1 - _output_axis(seen, name, module)
            entries = torch.arange(heads * dim).view(heads, dim)
            return Place(name, _weight(module), None, axis, entries)
    raise ExportError(
        f"between the attention of {seen.name} and its output projection lies something else, "
        "such as a gate or a norm: it cannot be folded"
    )


def _source(seen: SeenLayer, what: str, states: torch.Tensor) -> tuple[Place, bool]:
    """The module whose output `states` are, and whether turned by rotary embedding.

    Args:
        seen: Of the layer.
        what: ``query``, ``key`` or ``value``.
        states: ``[1, heads, tokens, dim]``.
    """
    states = states[0]
    # From the last one that ran: a norm comes after its projection.
    for name, (module, given, output) in reversed(seen.ran.items()):
        for entries in _arrangements(seen, what, output):
            made = _by_head(output, states.shape)[:, entries].movedim(1, 0)
            turned = _turned(seen, made, states)
            if turned is not None:
                return _place(seen, name, module, given, entries), turned
    raise ExportError(
        f"what {seen.name} attends to as {what} is not what one of its projections or norms puts "
        "out, as it is or rotated in a way that is known: it cannot be folded"
    )


def _turned(seen: SeenLayer, made: torch.Tensor, states: torch.Tensor) -> bool | None:
    """Whether rotating `made` gives `states`; None where they are not made of it at all."""
    if _same(made, states):
        return False
    if seen.layout is not None:
        rotated = seen.layout.rotate(made[None].float(), seen.embeddings)[0]
        return True if _same(rotated.to(states.dtype), states) else None
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two are the same but for one number that all of the first is multiplied by.

    A number for each token or head would not do: it may come from a norm, and then depends on the
    very channels that are to be scaled.

    Args:
        one: ``[…, tokens, dim]``, float32 or narrower.
        other: Likewise, of the same dtype.
    """
    of_channel, of_head = _TOLERANCE if other.dtype == torch.float32 else _TOLERANCE_16
    one, other = one.float(), other.float()
    ratio = (one * other).sum() / one.square().sum()
    # By channel, so that a large one does not hide what happens to the others.
    largest = other.abs().amax(-2)
    allowed = of_channel * largest + of_head * largest.amax(-1, keepdim=True)
    return bool(((ratio * one - other).abs().amax(-2) <= allowed).all())


def _by_head(output: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A module's output as ``[tokens, width]``; ``[batch, heads, tokens, dim]`` is turned over."""
    if output.dim() == 4 and output.shape[1:3] == shape[:2]:
        output = output.transpose(1, 2)
    return output[0].flatten(1) if output.dim() > 2 else output


def _arrangements(seen: SeenLayer, what: str, output: torch.Tensor) -> Iterator[torch.Tensor]:
    """In which orders a module may put out heads: indices ``[heads, dim]`` into its width.

    A module of its own for each of query, key and value; one for all, in three blocks; or one for
    all, KV head by KV head, each with its queries before it. ``q0 q1 k0 v0`` for four query heads
    on two KV heads: ``q q q q k k v v`` and ``q q k v q q k v``.
    """
    call = seen.call
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    key_dim, value_dim = call.key.shape[3], call.value.shape[3]
    counts = {"query": heads, "key": kv_heads, "value": kv_heads}
    dims = {"query": key_dim, "key": key_dim, "value": value_dim}
    width, tokens = output[0].numel(), call.query.shape[2]
    if width == tokens * counts[what] * dims[what]:
        yield torch.arange(counts[what] * dims[what]).view(counts[what], dims[what])
    widths = [counts[slot] * dims[slot] for slot in counts]
    if width != tokens * sum(widths):
        return
    everything = torch.arange(sum(widths))
    position = list(counts).index(what)
    for rows in (everything[None], everything.view(kv_heads, -1)):
        parts = torch.split(rows, [each // len(rows) for each in widths], 1)
        yield parts[position].reshape(counts[what], dims[what])


def _place(
    seen: SeenLayer, name: str, module: torch.nn.Module, given: torch.Tensor, entries: torch.Tensor
) -> Place:
    weight, bias = _weight(module), module._parameters.get("bias")
    if isinstance(module, (torch.nn.Linear, Conv1D)):
        return Place(name, weight, bias, _output_axis(seen, name, module), entries)
    if weight.numel() == entries.shape[1]:
        entries = entries % entries.shape[1]
    elif weight.numel() != entries.numel():
        raise ExportError(_unknown(seen, name, module))
    return Place(name, weight, bias, None, entries, _norm_offset(module, given))


def _output_axis(seen: SeenLayer, name: str, module: torch.nn.Module) -> int:
    """The axis of a projection's weight that its outputs lie on."""
    if isinstance(module, Conv1D):
        return 1
    if isinstance(module, torch.nn.Linear) and module.weight.dtype in _DTYPES:
        return 0
    raise ExportError(_unknown(seen, name, module))


def _unknown(seen: SeenLayer, name: str, module: torch.nn.Module) -> str:
    return (
        f"{name} of {seen.name} is a {type(module).__name__}, whose weight cannot be scaled here: "
        "only plain projections and norms can be folded"
    )


def _weight(module: torch.nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _norm_offset(module: torch.nn.Module, given: torch.Tensor) -> float:
    """1 if a norm multiplies by 1 + weight, as Gemma's do: then it puts out something at 0."""
    zeros = {name: torch.zeros_like(value) for name, value in module.named_parameters()}
    return 1.0 if bool(functional_call(module, zeros, (given,)).any()) else 0.0
