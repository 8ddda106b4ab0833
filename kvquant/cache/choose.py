"""Which scales and which scheme the arguments of `QuantizedCache.from_model` ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvquant.errors import AdapterError, InputError, SchemeError
from kvquant.geometry import CacheGeometry
from kvquant.presets import preset
from kvquant.scales import KVScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme
from kvquant.storage import check_belonging, load_scales

_OWN_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds of adapters whose virtual tokens are keys and values."""


def check_adapters(model: Any) -> None:
    """Makes sure that no active adapter keeps tokens in a cache of its own.

    Raises:
        AdapterError: One does (prefix tuning and its kin): PEFT then passes over the cache that it
            is given.
    """
    # Such an adapter cannot be active together with others.
    config = getattr(model, "active_peft_config", None)
    kind = getattr(getattr(config, "peft_type", None), "value", "")
    if kind in _OWN_CACHE:
        raise AdapterError(
            f"adapter {model.active_adapter} ({kind}) keeps keys and values of its own, which PEFT "
            "puts in place of the cache that it is given: they cannot be quantized. Use LoRA, or "
            "prompt tuning"
        )


def find_scales(
    model: Any,
    scales: KVScales | Path | str | None,
    geometry: CacheGeometry,
    tokenizer: Any,
    force: bool,
) -> KVScales | None:
    """Calibrated scales, from memory or a file, made sure to belong to `model`.

    Raises:
        FingerprintError: They are another model's.
        FileFormatError: No such file, or a damaged one.
    """
    if scales is None:
        return None
    if not isinstance(scales, KVScales):
        return load_scales(scales, model, tokenizer=tokenizer, force=force)
    if force:
        scales.check_shape(geometry)
    else:
        check_belonging(scales, model, tokenizer, force)
    return scales


def choose_scheme(
    scheme: str | QuantScheme | None,
    scales: KVScales | None,
    changes: dict[str, Any],
    layers: Mapping[int, str | QuantScheme],
    geometry: CacheGeometry,
) -> QuantScheme:
    """The scheme that the arguments of `from_model` ask for.

    Raises:
        InputError: Nothing was asked for, or changes of something that is not a preset.
        SchemeError: A layer that the model does not have, a format for values where it has none,
            or no scheme at all.
    """
    count = len(geometry.layers)
    changed = {name: value for name, value in changes.items() if value is not None}
    if "value_format" in changed and geometry.latent_layers == geometry.attention_layers:
        raise SchemeError(
            "value_format does nothing: this model keeps a latent, which key_format is for, and "
            "its rotary part, which rotary_format is for"
        )
    if isinstance(scheme, str):
        chosen = _calibrated(preset(scheme, **changed), scales)
    elif changed:
        raise InputError(f"{', '.join(changed)} change a preset: give its name as scheme")
    elif isinstance(scheme, QuantScheme):
        chosen = scheme
    elif scheme is not None:
        raise SchemeError(f"scheme must be a preset's name or a QuantScheme, not {scheme!r}")
    elif scales is not None:
        chosen = scales.scheme
    else:
        raise InputError("give a scheme, such as scheme='int8', or scales=… of kvquant calibrate")
    own = {}
    for index, layer in layers.items():
        if not isinstance(index, int):
            raise SchemeError(f"layers are named by their numbers, not {index!r}")
        if not isinstance(layer, str | QuantScheme):
            raise SchemeError(f"layer {index}: give a preset's name or a scheme, not {layer!r}")
        if not -count <= index < count:
            raise SchemeError(f"no layer {index}: the model has layers 0 to {count - 1}")
        named = preset(layer) if isinstance(layer, str) else layer
        if index % count in own:
            raise SchemeError(f"layer {index % count} is named twice: one scheme a layer")
        own[index % count] = _calibrated(named, scales)
    return replace(chosen, layers=tuple(sorted({**dict(chosen.layers), **own}.items())))


def _calibrated(scheme: QuantScheme, scales: KVScales | None) -> QuantScheme:
    """`scheme` with the calibrated slots of `scales` for the fp8 and int8 of the same format."""
    if scales is None:
        return scheme

    def static(asked: TensorScheme, known: TensorScheme) -> TensorScheme:
        plain = asked.granularity is Granularity.PER_TOKEN and asked.symmetric and not asked.center
        return known if plain and asked.format == known.format else asked

    return replace(
        scheme,
        key=static(scheme.key, scales.scheme.key),
        value=static(scheme.value, scales.scheme.value),
        rotary_part=static(scheme.rotary_part, scales.scheme.value),
    )


def choose_backend(attention: str, device: torch.device) -> str | None:
    """What attends to codes, of what was asked for; None if they are to be dequantized.

    Raises:
        InputError: There is no such thing, or not on this device.
    """
    from kvquant.attention.interface import BACKENDS, kernel_for

    if attention == "dequantize":
        return None
    if attention not in BACKENDS:
        raise InputError(
            f"unknown attention {attention!r}: possible are {', '.join(BACKENDS)}, dequantize"
        )
    chosen, reason = kernel_for(device, attention)
    if attention not in ("auto", chosen):
        raise InputError(f"attention {attention!r} is not possible: {reason}")
    return attention
