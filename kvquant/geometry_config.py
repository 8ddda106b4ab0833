"""Reads what a cache depends on from any config: a parsed config.json or a PreTrainedConfig.

First one flat mapping under canonical names, completed (`read_settings`); the other functions
answer one question each from it. `kvquant.geometry` makes layers of the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import GeometryError
from .geometry_defaults import FAMILIES, REFUSED, TEXT_PARTS
from .geometry_rules import Settings

_TEXT_KEYS = (
    "text_config",
    "decoder",
    "generator",
    "thinker_config",
    "language_config",
    "llm_config",
)
"""Where configs of several parts keep the text part: Transformers' names, then those on the hub."""

_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "n_kv_heads"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "max_position_embeddings": (
        "n_positions",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
        "model_max_length",
    ),
    "sliding_window": ("attention_window_size",),
    "layer_types": ("layers_block_type",),
    "rope_parameters": ("rope_scaling",),
}
"""Canonical key -> other names of it in published configs and in Transformers' attribute maps."""

_MOST_LAYERS = 100_000
_NEEDED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")

_TELLTALE = {
    "kv_lora_rank": "compresses keys and values (MLA)",
    "num_kv_shared_layers": "shares keys and values between layers",
    "hybrid_override_pattern": "has layers without attention",
    "attn_layer_period": "has layers without attention",
    "block_configs": "has layers of different shapes",
}
"""Keys of architectures that a model type must be known for."""


# --- one flat mapping ----------------------------------------------------------------------------


def read_settings(config: Any) -> tuple[str, Settings]:
    """The model type of the text part, and its config under canonical names, completed.

    Raises:
        GeometryError: No config, one that cannot be described, or one that lacks something.
    """
    model_type, raw = _text_part(_as_mapping(config), "")
    reason = "is an encoder-decoder" if raw.get("is_encoder_decoder") else REFUSED.get(model_type)
    if reason is not None:
        raise GeometryError(f"model type {model_type!r} {reason}")
    settings = _canonical(raw)
    family = FAMILIES.get(model_type)
    if family is None:
        _check_complete(model_type, settings)
    else:
        settings = {**family.defaults, **settings}
    if (layers := whole(settings, "num_hidden_layers")) > _MOST_LAYERS:
        raise GeometryError(f"num_hidden_layers is {layers:,}: no model has that many layers")
    if settings.get("use_sliding_window") is False:
        settings = {**settings, "sliding_window": None}
    return model_type, _derived(model_type, settings)


def _as_mapping(config: Any) -> Mapping[str, Any]:
    found = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(found, Mapping):
        raise GeometryError(f"a config is a JSON object, not {type(config).__name__}")
    return found


def _text_part(config: Mapping[str, Any], fallback: str) -> tuple[str, Mapping[str, Any]]:
    """The innermost text part and its model type; `fallback` where it does not name one."""
    own_type = config.get("model_type") or fallback
    text_type = TEXT_PARTS.get(own_type, own_type)
    parts = [key for key in _TEXT_KEYS if config.get(key)]
    if len(parts) > 1:
        raise GeometryError(
            f"this config has several text parts ({', '.join(parts)}): pass the one that generates"
        )
    if not parts or config.get("is_encoder_decoder"):
        return text_type, config
    return _text_part(_as_mapping(config[parts[0]]), text_type)


def _canonical(raw: Mapping[str, Any]) -> Settings:
    settings = dict(raw)
    for name, others in _OTHER_NAMES.items():
        given = [raw[key] for key in (name, *others) if key in raw]
        if given:
            settings[name] = next((value for value in given if value is not None), None)
    return settings


def _check_complete(model_type: str, settings: Settings) -> None:
    """An unknown model type must say everything itself: nothing is guessed."""
    who = f"model type {model_type!r} is not known" if model_type else "there is no model_type"
    missing = [key for key in _NEEDED if key not in settings]
    if settings.get("head_dim") is None and settings.get("hidden_size") is None:
        missing.append("head_dim (or hidden_size)")
    if missing:
        raise GeometryError(f"{who}, and its config does not say {', '.join(missing)}")
    for key, what in _TELLTALE.items():
        if settings.get(key):
            raise GeometryError(f"{who}, and its {key} says that it {what}: it cannot be guessed")


def _derived(model_type: str, settings: Settings) -> Settings:
    """What the family derives from other keys, layer types among it."""
    family = FAMILIES.get(model_type)
    if family is not None and family.derive is not None:
        settings = family.derive(settings)
    types = settings.get("layer_types")
    if types is None and family is not None and family.layer_types is not None:
        types = family.layer_types(settings)
    return {**settings, "layer_types": types}


# --- questions to it -----------------------------------------------------------------------------


def per_layer(settings: Settings, count: int) -> list[Settings]:
    """The settings of each layer: ``per_layer_config`` overrides the global ones.

    Its keys are layer numbers, which Transformers writes to JSON as "05".

    Raises:
        GeometryError: A key is not the number of a layer.
    """
    overrides = settings.get("per_layer_config") or {}
    strange = [key for key in overrides if not str(key).isdecimal() or int(key) >= count]
    if strange:
        raise GeometryError(f"per_layer_config has {strange[0]!r}, which is none of {count} layers")
    own = {int(key): values for key, values in overrides.items()}
    return [{**settings, **own.get(layer_idx, {})} for layer_idx in range(count)]


def shared_sources(settings: Settings, count: int) -> dict[int, int]:
    """Layers that read another layer's keys and values -> that layer.

    Gemma 3n and 4 share by number (``kv_sharing_modes`` in their config classes): each of the last
    ``num_kv_shared_layers`` reads the last layer of its type before them. Mistral Large 4 lists
    the sources.
    """
    listed = settings.get("kv_source_layers")
    if listed is not None:
        return {i: source for i, source in enumerate(listed) if source != i}
    shared = settings.get("num_kv_shared_layers") or 0
    if not shared:
        return {}
    types = settings["layer_types"]
    first = count - shared
    last_of = {layer_type: i for i, layer_type in enumerate(types[: max(first, 0)])}
    orphans = sorted(set(types) - set(last_of))
    if orphans:
        raise GeometryError(
            f"the last {shared} of {count} layers share keys and values, but no layer before them "
            f"is of the type {', '.join(orphans)}"
        )
    return {i: last_of[types[i]] for i in range(first, count)}


def kv_heads(settings: Settings) -> int:
    """Absent KV heads are already an error for unknown types; null means one per head."""
    given = settings["num_key_value_heads"] is not None
    return whole(settings, "num_key_value_heads" if given else "num_attention_heads")


def head_dim(settings: Settings) -> int:
    """Width of a head: given, or derived as Transformers does, rounding down."""
    if settings.get("head_dim") is not None:
        return whole(settings, "head_dim")
    return whole(settings, "hidden_size") // whole(settings, "num_attention_heads")


def whole(settings: Settings, key: str, least: int = 1) -> int:
    """The whole number under `key`."""
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise GeometryError(f"{key} must be a whole number of at least {least}, not {value!r}")
    return value


def max_positions(settings: Settings) -> int | None:
    """Positions the model was built for, by Transformers' conventions, or None without a limit.

    ``max_position_embeddings`` is the extended length in nearly all published configs. Where it
    is not, RoPE scaling says so:

    ================ ==================================================================
    llama3 longrope  at least ``factor * original_max_position_embeddings``, where the
    yarn             original is ``max_position_embeddings`` unless given
    dynamic          ``factor * max_position_embeddings``: the base grows from there
    linear, others   as it stands: published configs give the extended length
    ================ ==================================================================

    Source: ``standardize_rope_params`` and ``_compute_dynamic_ntk_parameters`` in Transformers
    5.24.0, ``modeling_rope_utils.py``.
    """
    if settings.get("max_position_embeddings") is None:
        return None
    length = whole(settings, "max_position_embeddings")
    rope = settings.get("rope_parameters") or {}
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    return max(_scaled(length, part, settings) for part in nested or [rope])


def _scaled(length: int, rope: Mapping[str, Any], settings: Settings) -> int:
    rope_type = rope.get("rope_type") or rope.get("type")
    factor = rope.get("factor") or 1.0
    if rope_type == "dynamic":
        return max(length, int(factor * length))
    if rope_type not in ("llama3", "longrope", "yarn"):
        return length
    name = "original_max_position_embeddings"
    original = settings.get(name) or rope.get(name) or length
    return max(length, int(factor * original))
