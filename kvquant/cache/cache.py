"""QuantizedCache: a quantized KV cache for `generate()`, one layer for each layer of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvquant.errors import FingerprintError, InputError, SchemeError
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import base_model
from kvquant.presets import preset
from kvquant.scales import KVScales
from kvquant.scheme import QuantScheme
from kvquant.storage import load_scales

from .build import Plan, build_layers
from .companions import state_nbytes
from .layer import QuantizedLayer
from .ledger import Sources, TokenLedger
from .transformers_compat import by_name, cache_of_call, tokens_to_remove
from .workspace import Workspace

_HOOKED = "_kvquant_cache_hook"


class QuantizedCache(Cache):  # type: ignore[misc]
    """A quantized KV cache that `generate()` and `forward` take like any other.

    Example:
        >>> cache = QuantizedCache.from_model(model, scheme="int4", scales="ft-scales")
        >>> model.generate(**inputs, cache=cache)  # past_key_values= before Transformers 5.24
        >>> print(cache.summary())

    Attributes:
        geometry: Shape of the model's cache.
        scheme: What it is quantized to.
        scales: Calibrated scales and means, if there are any.
    """

    def __init__(
        self,
        layers: list[Any],
        plan: Plan,
        ledger: TokenLedger,
        workspace: Workspace,
        offloading: bool = False,
    ) -> None:
        """Joins layers into a cache; `from_model` is the way to make one.

        Args:
            layers: One for each layer of the model.
            plan: What they were made from.
            ledger: The tokens in them.
            workspace: What they read into.
            offloading: Whether layers wait on the CPU for their turn.
        """
        super().__init__(layers=layers, offloading=offloading)
        self.geometry, self.scheme, self.scales = plan.geometry, plan.scheme, plan.scales
        self.plan = plan
        self._ledger = ledger
        self._workspace = workspace

    @classmethod
    def from_model(
        cls,
        model: Any,
        scheme: str | QuantScheme | None = None,
        scales: KVScales | Path | str | None = None,
        *,
        key_format: str | None = None,
        value_format: str | None = None,
        rotary_format: str | None = None,
        sink_tokens: int | None = None,
        residual_length: int | None = None,
        group_size: int | None = None,
        layers: Mapping[int, str | QuantScheme] | None = None,
        tokenizer: Any = None,
        force: bool = False,
        offloading: bool = False,
    ) -> QuantizedCache:
        """An empty cache for `model`, and a hook on its decoder that tells it about padding.

        Args:
            model: A Transformers model or a PeftModel, with the adapters active that it serves.
            scheme: A preset's name (docs/schemes.md) or a scheme; by default that of `scales`.
            scales: Calibrated scales, or a file of them. With ``int4`` and ``int3`` only their
                means are used. Refused if they belong to another model or adapter set.
            key_format: Preset to take for the keys.
            value_format: Preset to take for the values.
            rotary_format: Preset for the rotary part of MLA layers, which is exact otherwise.
            sink_tokens: First tokens to keep exactly.
            residual_length: Newest tokens to keep exactly.
            group_size: Tokens of a key group, for int4-kivi.
            layers: Schemes of single layers by number, negative ones from the end:
                ``{0: "none", -1: "int8"}``.
            tokenizer: The model's, if scales are to be checked against it.
            force: Take scales of another model all the same, with a warning.
            offloading: Keep layers on the CPU while they are not needed; on accelerators only.

        Raises:
            SchemeError: No such scheme, or it does not fit the model.
            GeometryError: The config does not say what the cache looks like.
            FingerprintError: Scales of another model.
            InputError: Neither scheme nor scales, or something else that cannot be used.
        """
        geometry = CacheGeometry.from_config(model.config)
        found = _find_scales(model, scales, geometry, tokenizer, force)
        changes = {
            "key_format": key_format,
            "value_format": value_format,
            "rotary_format": rotary_format,
            "sink_tokens": sink_tokens,
            "residual_length": residual_length,
            "group_size": group_size,
        }
        chosen = _choose_scheme(scheme, found, changes, layers or {}, len(geometry.layers))
        chosen.check(geometry)
        decoder = base_model(model).get_decoder()
        plan = Plan(geometry, chosen, found, decoder)
        ledger, workspace = TokenLedger(plan.turns_means), Workspace()
        _install_hook(decoder)
        return cls(build_layers(plan, ledger, workspace), plan, ledger, workspace, offloading)

    def begin_call(self, call: dict[str, Any]) -> None:
        """Notes padding and positions of a forward call that begins; the hook calls it.

        Args:
            call: Arguments of the decoder, by name.

        Raises:
            InputError: The call cannot be served from this cache.
        """
        if call.get("use_cache") is False:
            raise InputError("use_cache=False and a cache contradict each other: drop one of them")
        tokens = call.get("input_ids")
        tokens = call["inputs_embeds"] if tokens is None else tokens
        batch, count = tokens.shape[:2]
        lengths = {layer.cumulative_length for layer in self._quantized()}
        if len(lengths) > 1:
            raise InputError(
                f"layers hold {min(lengths)} to {max(lengths)} tokens: a forward pass was cut off. "
                "reset() the cache and start again"
            )
        self._ledger.crop(self._ledger.slots - lengths.pop())
        positions = call.get("position_ids")
        if positions is not None and positions.dim() != 2:
            positions = None  # several dimensions: no layer of such a model turns its mean
        sources = self._ledger.begin(
            batch, count, tokens.device, self._padding(call, count), positions
        )
        if sources is not None:
            for layer in self._quantized():
                layer.regroup(sources)

    def crop(self, tokens: int) -> None:
        """Takes the newest tokens back.

        Args:
            tokens: How many, as a negative number; 0 only forgets what a layer need not keep.

        Raises:
            RuntimeError: Tokens that would be seen again have left a window.
        """
        count = tokens_to_remove(tokens, self.get_seq_length())
        counts = self._ledger.crop(count)
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                layer.crop_groups(count, counts if layer.stores else [])
            else:
                layer.crop(-count)

    def reset(self) -> None:
        """Empties the cache and gives its memory back."""
        super().reset()
        self._ledger.reset()
        self._workspace.release()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i what row ``beam_idx[i]`` was."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices`."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        rows = torch.arange(self._ledger.batch)
        self._select(rows.repeat_interleave(repeats))

    def nbytes(self) -> int:
        """Bytes of the tensors held for tokens, unused room and recurrent states included.

        Scales and means, which belong to the model, and the workspace are not among them; see
        `summary`.
        """
        return self._ledger.nbytes() + sum(
            layer.nbytes() if isinstance(layer, QuantizedLayer) else state_nbytes(layer)
            for layer in self.layers
        )

    def live_nbytes(self) -> int:
        """Bytes that the tokens held need."""
        return self._ledger.live_nbytes() + sum(
            layer.live_nbytes() if isinstance(layer, QuantizedLayer) else state_nbytes(layer)
            for layer in self.layers
        )

    def workspace_nbytes(self) -> int:
        """Bytes of the memory that is shared by all layers and holds no tokens."""
        return self._workspace.nbytes() + self.plan.nbytes()

    def summary(self) -> str:
        """A table for people: each layer's kind, formats, tokens and bytes, against bf16."""
        from .summary import summary

        return summary(self)

    def _quantized(self) -> list[QuantizedLayer]:
        return [layer for layer in self.layers if isinstance(layer, QuantizedLayer)]

    def _padding(self, call: dict[str, Any], count: int) -> torch.Tensor | None:
        """Which of a call's tokens are real, on the CPU; None if all are."""
        mask = call.get("attention_mask")
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            kind = f"{mask.dim()}-D" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise InputError(
                f"a quantized cache needs an attention mask [batch, tokens], not {kind}: without "
                "it padding cannot be told from text"
            )
        if count == 1 and self._ledger.slots:
            return None  # a decode step: looking at the mask would stall the device
        real = mask[:, -count:].bool()
        return real.cpu()

    def _select(self, index: torch.Tensor) -> None:
        if not self._ledger.batch:
            return
        sources: Sources = self._ledger.select(index)
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                layer.select_rows(index, sources)
            else:
                layer.reorder_cache(index)


def _install_hook(decoder: torch.nn.Module) -> None:
    """Makes a decoder tell the quantized cache of each call what the call is about; once."""
    if getattr(decoder, _HOOKED, None) is not None:
        return

    def tell(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = by_name(module, args, kwargs)
        cache = cache_of_call(call)
        if isinstance(cache, QuantizedCache):
            cache.begin_call(call)

    handle = decoder.register_forward_pre_hook(tell, with_kwargs=True)
    object.__setattr__(decoder, _HOOKED, handle)


def remove_hook(model: Any) -> None:
    """Takes off what `QuantizedCache.from_model` put on a model's decoder."""
    decoder = base_model(model).get_decoder()
    handle = getattr(decoder, _HOOKED, None)
    if handle is not None:
        handle.remove()
        object.__setattr__(decoder, _HOOKED, None)


def _find_scales(
    model: Any,
    scales: KVScales | Path | str | None,
    geometry: CacheGeometry,
    tokenizer: Any,
    force: bool,
) -> KVScales | None:
    if scales is None:
        return None
    if not isinstance(scales, KVScales):
        return load_scales(scales, model, tokenizer=tokenizer, force=force)
    try:
        scales.check_model(fingerprint(model, tokenizer), geometry)
    except FingerprintError:
        if not force:
            raise
    return scales


def _choose_scheme(
    scheme: str | QuantScheme | None,
    scales: KVScales | None,
    changes: dict[str, Any],
    layers: Mapping[int, str | QuantScheme],
    count: int,
) -> QuantScheme:
    """The scheme that the arguments of `from_model` ask for.

    Raises:
        InputError: Nothing was asked for, or changes of something that is not a preset.
        SchemeError: A layer that the model does not have.
    """
    changed = {name: value for name, value in changes.items() if value is not None}
    if isinstance(scheme, str):
        chosen = _calibrated(preset(scheme, **changed), scales)
    elif changed:
        raise InputError(f"{', '.join(changed)} change a preset: give its name as scheme")
    elif scheme is not None:
        chosen = scheme
    elif scales is not None:
        chosen = scales.scheme
    else:
        raise InputError("give a scheme, such as scheme='int8', or scales=… of kvquant calibrate")
    own = {}
    for index, layer in layers.items():
        if not -count <= index < count:
            raise SchemeError(f"no layer {index}: the model has layers 0 to {count - 1}")
        named = preset(layer) if isinstance(layer, str) else layer
        own[index % count] = _calibrated(named, scales)
    return replace(chosen, layers=tuple(sorted({**dict(chosen.layers), **own}.items())))


def _calibrated(scheme: QuantScheme, scales: KVScales | None) -> QuantScheme:
    """`scheme` with the calibrated slots of `scales` where the formats are the same."""
    if scales is None:
        return scheme
    slots = {}
    for name in ("key", "value"):
        asked, known = getattr(scheme, name), getattr(scales.scheme, name)
        replaced = asked.format == known.format and not asked.center and asked.unit == 1
        slots[name] = known if replaced else asked
    return replace(scheme, **slots)
