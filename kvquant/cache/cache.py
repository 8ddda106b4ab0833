"""QuantizedCache: a quantized KV cache for `generate()`, one layer for each layer of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvquant.errors import InputError
from kvquant.fingerprint import check_model
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import base_model
from kvquant.scales import KVScales
from kvquant.scheme import QuantScheme

from .build import Plan, build_layers
from .choose import check_adapters, choose_backend, choose_scheme, find_scales
from .companions import check_state_crop, crop_state, forget_state, keeps_state, state_nbytes
from .hook import install_hook
from .layer import QuantizedLayer
from .ledger import Sources, TokenLedger
from .padding import check_goes_on, read_mask
from .transformers_compat import (
    tokens_to_remove,
    use_attention,
)
from .workspace import Workspace, outside_inference_mode


class QuantizedCache(Cache):  # type: ignore[misc]
    """A quantized KV cache that `generate()` and `forward` take like any other.

    A call that fails or is interrupted leaves the cache as it was, or in a state in which it
    refuses everything but `reset`. When the model's decoder has returned, the call is in the cache
    (`get_seq_length` tells): if its head or a sampler fails after that, do not repeat the call.

    On an accelerator, a call of one token is taken for a decode step: its token is real whatever
    the mask says, and its position the one after the last. Looking would stall the device. Padding
    and positions that jump belong into calls of two tokens or more.

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
        self._keeps_state = any(map(keeps_state, layers))
        self._is_masked_unasked = False

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
        attention: str = "auto",
    ) -> QuantizedCache:
        """An empty cache for `model`, and a hook on its decoder that tells it about padding.

        The cache is for this model: through PEFT or compiled, too, and for deep copies that are
        made of it from now on, which have the hook; another instance's calls are refused.

        The model attends with ``attn_implementation="kvquant"`` from then on, if it would use
        ``sdpa`` (or knows nothing but ``eager``): that reads the codes of this cache, and does
        what ``sdpa`` (or ``eager``) does with every other one. `remove_hook` undoes both.

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
            force: Take scales of another model of the same shape all the same; those of a file
                with a warning.
            offloading: Keep layers on the CPU while they are not needed; on accelerators only.
            attention: What attends to the codes: ``auto`` (the kernel for the device, else plain
                torch), ``triton``, ``numba``, ``torch``; or ``dequantize``, which reads them back
                for the model's own attention.

        Raises:
            SchemeError: No such scheme, or it does not fit the model.
            GeometryError: The config does not say what the cache looks like.
            FingerprintError: Scales of another model.
            InputError: Neither scheme nor scales, or something else that cannot be used.
        """
        check_model(model)
        check_adapters(model)
        geometry = CacheGeometry.from_config(model.config)
        found = find_scales(model, scales, geometry, tokenizer, force)
        changes = {
            "key_format": key_format,
            "value_format": value_format,
            "rotary_format": rotary_format,
            "sink_tokens": sink_tokens,
            "residual_length": residual_length,
            "group_size": group_size,
        }
        chosen = choose_scheme(scheme, found, changes, layers or {}, geometry)
        chosen.check(geometry)
        decoder = base_model(model).get_decoder()
        if offloading and decoder.device.type == "cpu":
            raise InputError("offloading moves layers to the CPU, where this model already is")
        plan = Plan(geometry, chosen, found, decoder, choose_backend(attention, decoder.device))
        ledger, workspace = TokenLedger(plan.turns_means), Workspace()
        layers_made = build_layers(plan, ledger, workspace, offloading)
        if not all(map(plan.why_always_dequantized, geometry.attention_layers)):
            use_attention(decoder)
        install_hook(decoder)
        return cls(layers_made, plan, ledger, workspace, offloading)

    def __repr__(self) -> str:
        """A line; `summary` says more."""
        return (
            f"QuantizedCache({self.geometry.model_type}: {self.scheme}; layers={len(self.layers)}, "
            f"batch={self._ledger.batch}, tokens={self.get_seq_length()})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled: layers refer to the model, and codes belong to it.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a QuantizedCache cannot be pickled, since its layers refer to the model: use its save "
            "and load, or copy.deepcopy within one process"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedCache:
        """A cache that goes its own way from here; the model and its scales are shared."""
        shared: list[Any] = [self.plan, self.geometry, self.scheme, self.scales]
        shared += [
            store.codec for layer in self._quantized() for pair in layer.stores for store in pair
        ]
        shared.append(getattr(self, "prefetch_stream", None))
        memo.update({id(it): it for it in shared})
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with outside_inference_mode():
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def begin_call(
        self, call: dict[str, Any], is_compiled: bool = False, tells_end: bool = False
    ) -> None:
        """Notes padding and positions of a forward call that begins; the hook calls it.

        Args:
            call: Arguments of the decoder, by name.
            is_compiled: Whether the decoder is compiled: it gets tensors, not handles.
            tells_end: Whether `end_call` follows, so that a call that failed can be told by that.

        Raises:
            InputError: The call cannot be served from this cache.
        """
        if call.get("use_cache") is False:
            raise InputError(
                "use_cache=False and a cache contradict each other: drop one of them, or pass "
                "use_cache=True if the model's config says False"
            )
        self._forget_failed_call()
        tokens = call.get("input_ids")
        tokens = call.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            return  # the model says so itself
        batch, count = tokens.shape[:2]
        positions, mask = call.get("position_ids"), call.get("attention_mask")
        if tokens.is_meta:
            positions = mask = None  # nothing to look at
        if positions is not None and positions.dim() != 2:
            positions = None  # several dimensions: no layer of such a model turns its mean
        check_goes_on(count, self._ledger.slots, positions if mask is None else None)
        real = read_mask(mask, batch, count, self._ledger, self.plan.backend is None)
        self._ledger.check_batch(batch)
        self._ledger.is_torn = True
        self.plan.is_compiled = is_compiled
        for layer in self._quantized():
            layer.store_pending()  # as the ledger knows its tokens now
        sources = self._ledger.begin(batch, count, tokens.device, real, positions)
        if sources is not None:
            for layer in self._quantized():
                layer.regroup(sources)
        self._is_masked_unasked = False
        self._ledger.is_open = tells_end
        # Kernels move a recurrent state without telling.
        self._ledger.is_torn = tells_end and self._keeps_state

    def end_call(self) -> None:
        """Notes that the decoder is through with the call that began; the hook calls it."""
        self._ledger.is_open = self._ledger.is_torn = False

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As Transformers' cache; a model that asks without `begin_call` has not got the hook."""
        ledger = self._ledger
        if not ledger.is_open and ledger.slots == self.get_seq_length():
            self._is_masked_unasked = True
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `QuantizedLayer.update`, of the layer `layer_idx`.

        Called by hand, without `begin_call`, it takes all tokens for real.

        Raises:
            GeometryError: Not what the config of the cache's model promised.
            InputError: A model calls that is not the cache's, or an earlier call was cut off.
        """
        self.geometry.check_tensors(
            layer_idx,
            key_states.shape,
            value_states.shape,
            whose="the model that the cache was made for",
            advice="make the cache from the model that it is used with",
        )
        if self._is_masked_unasked:
            self._ledger.is_torn |= self._keeps_state  # which may have moved already
            self._is_masked_unasked = False
            raise InputError(
                "the model that calls does not tell this cache about padding: it is another "
                "instance than the cache was made from, or the hook was removed. Make the cache "
                "with from_model(...) of the model that it is used with"
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def crop(self, tokens: int) -> None:
        """Takes the newest tokens back, in all layers or, if one of them cannot, in none.

        Args:
            tokens: How many, as a negative number; 0 only forgets what a layer need not keep.

        Raises:
            RuntimeError: Tokens that would be seen again have left a window, or a recurrent state
                cannot go back.
            InputError: The cache holds part of a forward pass.
        """
        self._forget_failed_call()
        count = tokens_to_remove(tokens, self.get_seq_length())
        counts = self._ledger.real_tokens(count)
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                layer.check_crop(count, counts)
            else:
                check_state_crop(layer, count)
        self._ledger.is_torn = True
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                layer.crop_groups(count, counts)
            else:
                crop_state(layer, count)
        self._ledger.crop(count)
        self._ledger.is_torn = False

    def reset(self) -> None:
        """Empties the cache and gives its memory back."""
        self._ledger.is_torn = True
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                layer.reset()
            else:
                forget_state(layer)
        self._workspace.release()
        self._is_masked_unasked = False
        self._ledger.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i what row ``beam_idx[i]`` was.

        Raises:
            InputError: A row that is not there, or the cache holds part of a forward pass.
        """
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices`: their numbers, negative ones from the end, or a bool for each.

        Of no rows, nothing is left to go on with but `reset`.

        Raises:
            InputError: A row that is not there, or the cache holds part of a forward pass.
        """
        if indices.dtype == torch.bool:
            if self._ledger.slots and indices.shape != (self._ledger.batch,):
                raise InputError(
                    f"bools {list(indices.shape)} cannot choose among {self._ledger.batch} rows"
                )
            indices = indices.nonzero()[:, 0]
        self._select(indices.cpu())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times.

        Raises:
            InputError: The cache holds part of a forward pass.
        """
        self._forget_failed_call()
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

    def save(self, path: Path | str, model: Any, tokenizer: Any = None) -> None:
        """Writes what the cache holds, so that a prefix need be read by the model only once.

        The file has everything that `load` needs: codes, scales and means, and what the prefix
        belongs to. docs/files.md defines it.

        Args:
            path: The file, with or without its ``.safetensors``.
            model: The model that filled the cache, with the adapters active that it had then.
            tokenizer: Its tokenizer; `load` refuses another one, and another chat template.

        Raises:
            InputError: An empty cache, one of another model, one that holds part of a forward
                pass, or a place that cannot be written.
        """
        from .prefix import save_prefix

        self._forget_failed_call()
        save_prefix(self, path, model, tokenizer)

    @classmethod
    def load(
        cls,
        path: Path | str,
        model: Any,
        *,
        tokenizer: Any = None,
        scales: KVScales | Path | str | None = None,
        force: bool = False,
    ) -> QuantizedCache:
        """The cache that was saved, bit for bit; generating goes on as it would have then.

        A batch begins with the prefix in every row; padding goes between it and what follows.

        Example:
            >>> cache = QuantizedCache.load("system-prompt", model, tokenizer=tokenizer)
            >>> cache.batch_repeat_interleave(8)  # one prefix, eight questions
            >>> first = tokenizer([prefix] * 8, return_tensors="pt")
            >>> rest = tokenizer(questions, return_tensors="pt", add_special_tokens=False,
            ...                  padding=True, padding_side="left")
            >>> inputs = {name: torch.cat([first[name], rest[name]], dim=1)
            ...           for name in ("input_ids", "attention_mask")}
            >>> model.generate(**inputs, cache=cache)

        Args:
            path: The file, with or without its ``.safetensors``.
            model: The model that filled it, with the same adapters active.
            tokenizer: Its tokenizer.
            scales: The scales that it was made with, or a file of them; the prefix has its own.
            force: Take a prefix of another model of the same shape, with a warning.

        Raises:
            FileFormatError: Not such a file, or a damaged one.
            FingerprintError: A prefix of another model, adapter set, tokenizer or chat template,
                or other scales.
        """
        from .prefix import load_prefix

        return load_prefix(path, model, tokenizer, scales, force)

    def summary(self) -> str:
        """A table for people: each layer's kind, formats, tokens and bytes, against bf16."""
        from .summary import summary

        return summary(self)

    def _quantized(self) -> list[QuantizedLayer]:
        return [layer for layer in self.layers if isinstance(layer, QuantizedLayer)]

    def _forget_failed_call(self) -> None:
        """Forgets tokens that were announced, but that no layer has stored.

        Raises:
            InputError: Some layers have, or something else was cut off.
        """
        lengths = {layer.cumulative_length for layer in self._quantized()}
        if len(lengths) > 1:
            raise InputError(
                f"layers hold {min(lengths)} to {max(lengths)} tokens of {self._ledger.slots}: a "
                "forward pass was cut off. reset() the cache and start again"
            )
        self._ledger.check_whole()
        self._ledger.is_open = False
        if any(layer.is_initialized for layer in self._quantized()):
            self._ledger.crop(self._ledger.slots - lengths.pop())
        else:
            self._ledger.reset()

    def _select(self, index: torch.Tensor) -> None:
        self._forget_failed_call()
        if not self._ledger.slots:
            return
        index = self._ledger.row_numbers(index)
        self._ledger.is_torn = True
        for layer in self._quantized():
            layer.store_pending()  # of rows as they were
        sources: Sources = self._ledger.select(index)
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                layer.select_rows(index, sources)
            else:
                layer.reorder_cache(index)
        self._ledger.is_torn = False
