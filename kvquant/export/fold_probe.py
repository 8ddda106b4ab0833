"""What happens inside a model's attention modules, seen on a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from kvquant.cache.transformers_compat import by_name, cache_argument
from kvquant.errors import ExportError
from kvquant.geometry import CacheGeometry
from kvquant.rotary import RotaryLayout, find_layouts

from .fold_attention import AttentionCall, evaluating, watched

_TOKENS = 37
"""Tokens that are looked at: enough to tell channels apart, and no model has as many heads."""


@dataclass(frozen=True, eq=False)
class SeenLayer:
    """What was seen of one layer, on one sequence.

    Attributes:
        call: Of its attention function.
        ran: Modules inside, with the first input and output of each, in the order they ran.
        layout: How its keys are rotated, None if they are not, or not in a way that is known.
        embeddings: Position embeddings of the call, or None.
    """

    call: AttentionCall
    ran: dict[str, tuple[torch.nn.Module, torch.Tensor, torch.Tensor]]
    layout: RotaryLayout | None
    embeddings: Any

    @property
    def name(self) -> str:
        """For messages."""
        return f"layer {self.call.layer}"


def probe(decoder: Any, geometry: CacheGeometry) -> dict[int, SeenLayer]:
    """Runs a few tokens through a decoder, and says what was seen of each attention layer.

    Raises:
        ExportError: The attention of a layer cannot be observed, does not attend to what is
            cached, or has a weight in common with another.
    """
    _check_not_tied(decoder)
    running = _Probe(decoder, geometry)
    running.run()
    unseen = set(geometry.attention_layers) - running.layers.keys()
    if unseen:
        raise ExportError(
            f"the attention of layer {min(unseen)} does not go through Transformers' table of "
            "attention functions and cannot be observed: this model cannot be folded"
        )
    return dict(sorted(running.layers.items()))


@dataclass
class _Probe:
    """Runs a few tokens through a decoder and notes what happens inside its attention modules."""

    decoder: Any
    geometry: CacheGeometry
    layers: dict[int, SeenLayer] = field(default_factory=dict)
    _ran: dict[int, dict[str, Any]] = field(default_factory=dict)
    _arguments: dict[int, dict[str, Any]] = field(default_factory=dict)
    _running: list[torch.nn.Module] = field(default_factory=list)
    _layouts: dict[int, RotaryLayout | None] = field(default_factory=dict)

    def run(self) -> None:
        """One forward pass."""
        cache = DynamicCache(config=self.decoder.config)
        self._watch(cache)
        handles = [handle for module in _holders(self.decoder) for handle in self._hook(module)]
        try:
            with evaluating(self.decoder), watched(self.decoder, self._note_attention):
                self.decoder(
                    input_ids=_some_tokens(self.decoder),
                    use_cache=True,
                    **{cache_argument(self.decoder): cache},
                )
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, module: torch.nn.Module) -> Iterator[Any]:
        ran: dict[str, Any] = {}
        self._ran[id(module)] = ran
        yield module.register_forward_pre_hook(self._enter, with_kwargs=True)
        yield module.register_forward_hook(self._leave)
        for name, child in module.named_modules():
            if name and child._parameters:
                yield child.register_forward_hook(_note(ran, name))

    def _enter(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._running.append(module)
        self._arguments[id(module)] = by_name(module, args, kwargs)

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def _watch(self, cache: Any) -> None:
        update = cache.update

        def watching(
            keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
        ) -> Any:
            self._find_layout(cache, keys, values, layer)
            return update(keys, values, layer, *args, **kwargs)

        cache.update = watching

    def _find_layout(
        self, cache: Any, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> None:
        self.geometry.check_tensors(layer, tuple(keys.shape), tuple(values.shape))
        if not self._running:
            return
        module = self._running[-1]
        arguments = self._arguments[id(module)]
        if arguments.get("position_embeddings") is not None:
            self._layouts[layer], _ = find_layouts(module, arguments, cache, (keys, values))

    def _note_attention(self, call: AttentionCall) -> None:
        shape = self.geometry.layers[call.layer]
        found = call.key.shape[1], call.key.shape[3], call.value.shape[3]
        if found != (shape.kv_heads, shape.key_dim, shape.value_dim):
            raise ExportError(
                f"layer {call.layer} does not attend to the keys that it caches: its attention "
                f"gets {found[0]} heads x {found[1]}, cached are {shape.kv_heads} x "
                f"{shape.key_dim}; such a model cannot be folded"
            )
        module = id(call.module)
        self.layers[call.layer] = SeenLayer(
            call,
            self._ran.get(module, {}),
            self._layouts.get(call.layer),
            self._arguments.get(module, {}).get("position_embeddings"),
        )


def _note(ran: dict[str, Any], name: str) -> Any:
    """A hook that keeps the first input and output of a module.

    `find_layouts` runs a layer once more, with other positions: that must not count.
    """

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
            ran.setdefault(name, (module, args[0], output))

    return hook


def _holders(decoder: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that know their layer's number; where such are nested, the innermost."""

    def numbered(module: torch.nn.Module) -> bool:
        return isinstance(getattr(module, "layer_idx", None), int)

    return [
        module
        for module in decoder.modules()
        if numbered(module)
        and not any(numbered(inner) for inner in module.modules() if inner is not module)
    ]


def _some_tokens(decoder: Any) -> torch.Tensor:
    """Token ids ``[1, tokens]``, always the same ones."""
    table = decoder.get_input_embeddings().weight
    picked = torch.randint(table.shape[0], (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    return picked.to(table.device)


def _check_not_tied(decoder: torch.nn.Module) -> None:
    """Makes sure that no layer's attention has a weight of another's.

    Raises:
        ExportError: One has.
    """
    seen: dict[int, int] = {}
    for module in _holders(decoder):
        assert isinstance(module.layer_idx, int)
        for name, weight in module.named_parameters():
            other = seen.setdefault(id(weight), module.layer_idx)
            if other != module.layer_idx:
                raise ExportError(
                    f"layers {other} and {module.layer_idx} have the same {name}: factors of one "
                    "would change the other, it cannot be folded"
                )
