"""A quantized prefix on disk: a system prompt or a long document, read by the model only once.

Keys and values of a prefix are right for the model, its config, the adapters, the tokenizer and the
chat template that they were made with, and silently wrong for any other. So the file notes all of
them, and loading compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import LinearAttentionLayer

from kvquant.errors import FingerprintError, InputError
from kvquant.fingerprint import Fingerprint, check_model, differing, fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import base_model
from kvquant.scales import KVScales
from kvquant.scheme import QuantScheme
from kvquant.storage import (
    SUFFIX,
    find,
    pack_scales,
    parsing,
    read,
    suffixed,
    unpack_scales,
    warn,
    write,
)

from .cache import QuantizedCache
from .companions import recurrent_state, restore_recurrent_state
from .layer import QuantizedLayer
from .storage import State

KIND = "prefix"
_SCALES = "scales."
_OF_THE_FILE = ("version", "kind", "sha256")

_CHANGES_NOTHING = frozenset(
    (
        # names of the model and its parts; `dtype` is looked at apart
        *("_name_or_path", "name_or_path", "architectures", "auto_map", "kvquant_lineage", "dtype"),
        # what is returned, and what happens after the last layer
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "num_logits_to_keep", "problem_type", "num_labels"),
        *("id2label", "label2id", "tie_word_embeddings"),
        # training, and how work is split
        *("router_aux_loss_coef", "pretraining_tp", "chunk_size_feed_forward"),
        # what `generate` needs
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    )
)
"""Settings of a config that change no keys or values. Any other counts, known or not."""
_CHANGES_NOTHING_EITHER = ("dropout", "pdrop", "initializer", "_version", "attn_implementation")
"""Parts of names of such settings."""


def save_prefix(cache: QuantizedCache, path: Path | str, model: Any, tokenizer: Any) -> None:
    """Writes what `cache` holds; `QuantizedCache.save` has the details.

    Raises:
        InputError: An empty cache, one of another model, or a place that cannot be written.
    """
    check_model(model)
    file = suffixed(path, SUFFIX)
    decoder = base_model(model).get_decoder()
    if decoder is not cache.plan.decoder:
        raise InputError("this cache was made for another model: save it with the one it was for")
    _check_filled(cache)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # layers may still be on their way to the CPU
    numbers, tensors = _content(cache)
    header = {
        "fingerprint": fingerprint(model, tokenizer).to_dict(),
        "geometry": cache.geometry.to_dict(),
        "config": _settings(decoder),
        "transformers": transformers.__version__,
        "dtype": _dtype(model),
        "scheme": cache.scheme.to_dict(),
        "codecs_sha256": _codecs_sha256(cache),
        "scales": None,
        **numbers,
    }
    if cache.scales is not None:
        packed, header["scales"] = pack_scales(cache.scales)
        tensors |= {f"{_SCALES}{name}": tensor for name, tensor in packed.items()}
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    write(file, KIND, tensors, {**header, "sha256": _sha256(tensors, header)})


def load_prefix(
    path: Path | str,
    model: Any,
    tokenizer: Any,
    scales: KVScales | Path | str | None,
    force: bool,
) -> QuantizedCache:
    """The cache that was saved; `QuantizedCache.load` has the details.

    Raises:
        FileFormatError: Not such a file, or a damaged one.
        FingerprintError: A prefix of another model, config, adapter set, tokenizer, chat template,
            or quantized with other scales.
    """
    check_model(model)
    file = find(path, SUFFIX)
    tensors, header = read(file, KIND)
    decoder = base_model(model).get_decoder()
    with parsing(file):
        _check_intact(tensors, header)
        saved = Fingerprint.from_dict(header["fingerprint"])
        geometry = CacheGeometry.from_dict(header["geometry"])
        scheme = QuantScheme.from_dict(header["scheme"])
        own = _own_scales(tensors, header)
        other_settings = _other_settings(header, decoder)
    served = fingerprint(model, tokenizer)
    is_other_shape = geometry != CacheGeometry.from_config(model.config)
    if is_other_shape:
        other_settings = ["cache geometry"]
    refusal = _refusal(file, saved, served, other_settings)
    # Codes do not fit into layers of another shape.
    if refusal and (not force or is_other_shape):
        raise FingerprintError(refusal)
    if scales is None:
        # What they were calibrated on was looked at when the prefix was made.
        cache = QuantizedCache.from_model(model, scheme, own, force=True)
    else:
        cache = QuantizedCache.from_model(model, scheme, scales, tokenizer=tokenizer, force=force)
    with parsing(file):
        _restore(cache, tensors, header)
    if _codecs_sha256(cache) != header["codecs_sha256"]:
        raise FingerprintError(
            f"{file} was quantized with other scales or means: leave scales away, the file has "
            "its own"
        )
    if refusal:
        warn(f"forced: {refusal}")
    _warn_of_what_is_not_known(saved, served, header["dtype"], _dtype(model))
    return cache


def _check_filled(cache: QuantizedCache) -> None:
    lengths = {layer.cumulative_length for layer in _quantized(cache).values()}
    if lengths == {0}:
        raise InputError("there is nothing to save: let the model read the prefix first")
    if lengths != {cache._ledger.slots}:
        raise InputError(
            f"layers hold {min(lengths)} to {max(lengths)} tokens of {cache._ledger.slots}: a "
            "forward pass was cut off. reset() the cache and start again"
        )


def _quantized(cache: QuantizedCache) -> dict[int, QuantizedLayer]:
    layers = enumerate(cache.layers)
    return {index: layer for index, layer in layers if isinstance(layer, QuantizedLayer)}


def _content(cache: QuantizedCache) -> State:
    """What the ledger and the layers hold."""
    ledger, positions = cache._ledger.state()
    layers, tensors = [], {f"ledger.{name}": tensor for name, tensor in positions.items()}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, QuantizedLayer):
            numbers, own = layer.state()
        elif isinstance(layer, LinearAttentionLayer):
            numbers, own = recurrent_state(layer)
        else:
            continue  # keeps nothing
        layers.append({"layer": index, **numbers})
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in own.items()}
    return {"ledger": ledger, "states": layers}, tensors


def _restore(
    cache: QuantizedCache, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]
) -> None:
    """Inverse of `_content`, into an empty cache."""
    decoder = cache.plan.decoder
    cache._ledger.restore(header["ledger"], _below("ledger.", tensors, decoder.device))
    devices = _devices(decoder)
    for numbers in header["states"]:
        index = numbers["layer"]
        layer, device = cache.layers[index], devices.get(index, decoder.device)
        own = _below(f"layers.{index}.", tensors, device)
        if isinstance(layer, QuantizedLayer):
            layer.restore(numbers, own, device)
        else:
            restore_recurrent_state(layer, numbers, own, device)


def _below(
    prefix: str, tensors: Mapping[str, torch.Tensor], device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Tensors whose names begin with `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): tensor if device is None else tensor.to(device)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _devices(decoder: torch.nn.Module) -> dict[int, torch.device]:
    """Where the modules that know their layer's number have their weights."""
    found: dict[int, torch.device] = {}
    for module in decoder.modules():
        index, weight = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(index, int) and weight is not None and not weight.is_meta:
            found.setdefault(index, weight.device)
    return found


def _own_scales(tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> KVScales | None:
    """The scales that the file brings along."""
    if header["scales"] is None:
        return None
    return unpack_scales(_below(_SCALES, tensors), header["scales"])


def _refusal(file: Path, saved: Fingerprint, served: Fingerprint, other_settings: list[str]) -> str:
    """What makes the prefix wrong, and what to do; a tokenizer that is not known does not."""
    of_model = [*saved.differences(served), *other_settings]
    of_text = []
    if saved.tokenizer and served.tokenizer:
        names = {"tokenizer": "tokenizer", "chat_template": "chat template"}
        of_text = [
            shown for name, shown in names.items() if getattr(saved, name) != getattr(served, name)
        ]
    if not of_model and not of_text:
        return ""
    who = f"{file} is a prefix of this model ({saved})"
    if saved.differences(served):
        who = f"{file} is a prefix of {saved}, the model is {served}"
    what = differing([*of_model, *of_text])
    if of_model:
        return (
            f"{who}: {what}, so that its keys and values would be wrong; let this model read the "
            "prefix and save it"
        )
    return (
        f"{who}, but the {what}, so that its tokens may be others than those of your text; give "
        "the tokenizer that it was saved with, or let the model read the prefix again and save it"
    )


def _warn_of_what_is_not_known(
    saved: Fingerprint, served: Fingerprint, saved_dtype: str, served_dtype: str
) -> None:
    """Warns of what may make a difference."""
    if not (saved.tokenizer and served.tokenizer):
        which = "the prefix" if served.tokenizer else "this call"
        warn(
            f"{which} does not say which tokenizer it is for, so that another one or another chat "
            "template goes unnoticed: give tokenizer=… to save and to load"
        )
    if saved_dtype != served_dtype:
        warn(
            f"the prefix was computed in {saved_dtype}, the model is in {served_dtype}, so that "
            "what follows is not exactly what it would be without the file: load the model in "
            f"{saved_dtype}, or let it read the prefix and save it again"
        )


def _settings(decoder: Any) -> dict[str, Any]:
    """What the config says of how keys and values are computed, which the weights do not tell."""
    settings = json.loads(json.dumps(decoder.config.to_dict(), default=str))
    return {
        name: value
        for name, value in settings.items()
        if name not in _CHANGES_NOTHING
        and not any(part in name for part in _CHANGES_NOTHING_EITHER)
    }


def _other_settings(header: Mapping[str, Any], decoder: Any) -> list[str]:
    """Settings that are others than when the prefix was read, with both values; at most four."""
    saved, served = header["config"], _settings(decoder)
    names = saved.keys() | served.keys()
    if header["transformers"] != transformers.__version__:
        names = saved.keys() & served.keys()  # the rest are new ones, with what was done before
    other = [name for name in sorted(names) if saved.get(name) != served.get(name)]
    shown = [f"{it} ({_short(saved.get(it))}, here {_short(served.get(it))})" for it in other]
    return shown if len(shown) <= 4 else [*shown[:3], f"{len(shown) - 3} other settings"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _codecs_sha256(cache: QuantizedCache) -> str:
    """Hash of the means and static scales that the codes in the cache depend on."""
    settings: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor | None] = {}
    for index, layer in _quantized(cache).items():
        for slot, store in enumerate(layer.stores[0]):
            name, center = f"{index}.{slot}", store.codec.center
            if store.codec.scales is not None:
                tensors[f"{name}.scale"] = store.codec.scales.scale
                tensors[f"{name}.zero_point"] = store.codec.scales.zero_point
            if center is not None:
                tensors[f"{name}.fixed"] = center.fixed
                tensors[f"{name}.turned"] = center.turned
                settings[name] = None if center.layout is None else center.layout.to_dict()
    held = {name: tensor.cpu() for name, tensor in tensors.items() if tensor is not None}
    return _sha256(held, settings)


def _check_intact(tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Makes sure that the content is what was written: a changed byte changes what is generated.

    Raises:
        ValueError: It is not.
    """
    noted = {name: value for name, value in header.items() if name not in _OF_THE_FILE}
    if _sha256(tensors, noted) != header["sha256"]:
        raise ValueError("its content has changed since it was written (SHA-256)")


def _sha256(tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> str:
    """Hash of named tensors on the CPU, and of JSON values."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
