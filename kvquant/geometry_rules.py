"""How layer types and head counts follow from other keys of a config.

Config classes of Transformers compute part of what the cache depends on in ``__post_init__`` or in
their attention module. Each function here does what one of them does (read in Transformers 5.24.0;
where 5.17 differs, it says so); `kvquant.geometry_defaults` says which family uses which.

A `LayerTypes` function returns one layer type for each layer, under Transformers' names; a `Derive`
function returns the settings with what the class changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Settings = Mapping[str, Any]
"""A flat config under canonical names, defaults filled in."""
LayerTypes = Callable[[Settings], list[str]]
Derive = Callable[[Settings], Settings]

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
INDEXED = "indexed_attention"
LINEAR = "linear_attention"
HYBRID = "hybrid"
CONV = "conv"
CROSS = "cross_attention"


# --- layer types ---------------------------------------------------------------------------------


def every(
    period: int | str, offset: int | str = -1, special: str = FULL, rest: str = SLIDING
) -> LayerTypes:
    """`special` on each layer ``i`` with ``(i - offset) % period == 0``; a str names a key.

    ::

        every(4)     S S S F S S S F        every(3, 0)    F S S F S S F S
    """

    def types(settings: Settings) -> list[str]:
        step = settings[period] if isinstance(period, str) else period
        start = settings[offset] if isinstance(offset, str) else offset
        layers = range(settings["num_hidden_layers"])
        return [special if (i - start) % step == 0 else rest for i in layers]

    return types


def uniform(layer_type: str) -> LayerTypes:
    """The same on every layer."""
    return every(1, special=layer_type)


def numbered(key: str, listed: str, rest: str) -> LayerTypes:
    """`listed` on the layers whose numbers stand under `key`."""

    def types(settings: Settings) -> list[str]:
        numbers = set(settings[key] or ())
        return [listed if i in numbers else rest for i in range(settings["num_hidden_layers"])]

    return types


def qwen_windows(settings: Settings) -> list[str]:
    """Qwen 2 and 3: the layers from ``max_window_layers`` on slide, if anything does."""
    slides = settings["sliding_window"] is not None
    first = settings["max_window_layers"] if slides else settings["num_hidden_layers"]
    return [SLIDING if i >= first else FULL for i in range(settings["num_hidden_layers"])]


def qwen2_moe(settings: Settings) -> list[str]:
    """Every other layer below ``max_window_layers`` slides, if anything does."""
    slides = settings["sliding_window"] is not None
    below = settings["max_window_layers"] if slides else 0
    layers = range(settings["num_hidden_layers"])
    return [SLIDING if i % 2 == 0 and i < below else FULL for i in layers]


def _rope_layers(settings: Settings) -> list[bool]:
    """Which layers rotate: the list of ``no_rope_layers`` says 1 for those that do."""
    interval, layers = settings["no_rope_layer_interval"], range(settings["num_hidden_layers"])
    listed = settings.get("no_rope_layers") or [(i + 1) % interval != 0 for i in layers]
    return [bool(rotates) for rotates in listed]


def llama4(settings: Settings) -> list[str]:
    """Layers with RoPE attend within chunks, the others to everything."""
    chunked = settings["attention_chunk_size"] is not None
    return [CHUNKED if rotates and chunked else FULL for rotates in _rope_layers(settings)]


def smollm3(settings: Settings) -> list[str]:
    """Layers without RoPE slide, if a window is set and used."""
    slides = settings["sliding_window"] is not None
    return [SLIDING if slides and not rotates else FULL for rotates in _rope_layers(settings)]


def exaone4(settings: Settings) -> list[str]:
    """Three layers of four slide, if there is a window."""
    if settings["sliding_window"] is None:
        return uniform(FULL)(settings)
    return every("sliding_window_pattern")(settings)


def cohere2_moe(settings: Settings) -> list[str]:
    """The dense prefix has a pattern of its own, and counting starts again after it."""
    prefix = settings["first_k_dense_replace"]
    rest = settings["num_hidden_layers"] - prefix
    dense = every("prefix_dense_sliding_window_pattern")({**settings, "num_hidden_layers": prefix})
    return dense + every("sliding_window_pattern")({**settings, "num_hidden_layers": rest})


def kimi_linear(settings: Settings) -> list[str]:
    """Published configs list the full layers, counted from 1; else every fourth from layer 4."""
    listed = (settings.get("linear_attn_config") or {}).get("full_attn_layers")
    layers = range(settings["num_hidden_layers"])
    if listed is not None:
        return [FULL if i + 1 in listed else LINEAR for i in layers]
    return [FULL if i and i % 4 == 0 else LINEAR for i in layers]


def lfm2(settings: Settings) -> list[str]:
    """Short convolutions, except on the layers listed as attention; all attention if none are."""
    if settings["full_attn_idxs"] is None:
        return uniform(FULL)(settings)
    return numbered("full_attn_idxs", FULL, CONV)(settings)


def lfm3(settings: Settings) -> list[str]:
    """C C F C, then S C F C over and over."""
    cycle = [SLIDING, CONV, FULL, CONV]
    return [CONV if i == 0 else cycle[i % 4] for i in range(settings["num_hidden_layers"])]


def minimax_m3(settings: Settings) -> list[str]:
    """Published configs mark the sparse layers with 1."""
    marks = (settings.get("sparse_attention_config") or {}).get("sparse_attention_freq")
    if marks is None:
        return uniform(FULL)(settings)
    return [INDEXED if sparse else FULL for sparse in marks]


def olmo_hybrid(settings: Settings) -> list[str]:
    """Every fourth layer attends; in a model of fewer layers, the last."""
    types = every(4, rest=LINEAR)(settings)
    return types if FULL in types else [*types[:-1], FULL]


def recurrent_gemma(settings: Settings) -> list[str]:
    """A list of block types, repeated; attention always slides."""
    blocks = settings["block_types"]
    names = {"recurrent": LINEAR, "attention": SLIDING}
    return [names[blocks[i % len(blocks)]] for i in range(settings["num_hidden_layers"])]


def zamba(settings: Settings) -> list[str]:
    """Two state layers, one with attention next to the state, and a period after these three."""
    tail = {**settings, "num_hidden_layers": settings["num_hidden_layers"] - 3}
    pattern = every("attn_layer_period", "attn_layer_offset", HYBRID, LINEAR)
    return [LINEAR, LINEAR, HYBRID, *pattern(tail)]


def zamba2(settings: Settings) -> list[str]:
    """The 54 layers of Zamba2-2.7B, whatever the number of layers: other sizes list theirs."""
    sixes = [*[LINEAR] * 5, HYBRID] * 7
    return [LINEAR, *sixes, *[LINEAR] * 4, HYBRID, *[LINEAR] * 3, HYBRID, LINEAR, LINEAR]


# --- what classes derive -------------------------------------------------------------------------


def own_head_dim(settings: Settings) -> Settings:
    """Classes whose attention computes ``hidden // heads`` whatever the config says."""
    return {**settings, "head_dim": None}


def multi_head(settings: Settings) -> Settings:
    """Classes that know neither KV heads nor a head_dim: both follow from the heads."""
    return {**settings, "head_dim": None, "num_key_value_heads": None}


def zamba_head_dim(settings: Settings) -> Settings:
    """Attention sees the hidden state next to the embedding: twice the width."""
    wide = 2 * settings["hidden_size"] // settings["num_attention_heads"]
    return {**settings, "head_dim": settings["head_dim"] or wide}


def zamba2_widths(settings: Settings) -> Settings:
    """As in Zamba; the long-context option has a length of its own."""
    longer = {"max_position_embeddings": 16384} if settings["use_long_context"] else {}
    return zamba_head_dim({**settings, **longer})


def falcon(settings: Settings) -> Settings:
    """The new architecture caches its KV heads already repeated, one for each attention head."""
    kv_heads = settings["num_key_value_heads"]
    if settings.get("new_decoder_architecture", False):
        kv_heads = settings["num_attention_heads"]
    elif settings.get("multi_query", True):
        kv_heads = 1
    return {**settings, "num_key_value_heads": kv_heads, "head_dim": None}


def gpt_bigcode(settings: Settings) -> Settings:
    """One KV head, or as many as attention heads."""
    kv_heads = 1 if settings.get("multi_query", True) else None
    return {**settings, "num_key_value_heads": kv_heads, "head_dim": None}


def dbrx(settings: Settings) -> Settings:
    """KV heads are counted in a part of their own."""
    attention = settings.get("attn_config") or {}
    return {**settings, "num_key_value_heads": attention.get("kv_n_heads", 1), "head_dim": None}


def _per_type(settings: Settings, types: list[str], which: str, **differs: Any) -> Settings:
    """Overrides for the layers of one type, unless the config lists overrides itself."""
    overrides = {i: differs for i, layer_type in enumerate(types) if layer_type == which}
    return {"per_layer_config": overrides, **settings, "layer_types": types}


def gemma4(settings: Settings) -> Settings:
    """Full layers have a head_dim, and with shared K and V also a number of heads, of their own."""
    types = [*(settings.get("layer_types") or every(6)(settings))[:-1], FULL]
    differs = {"head_dim": settings["global_head_dim"]}
    kv_heads = settings["num_global_key_value_heads"] if settings["attention_k_eq_v"] else None
    if kv_heads is not None:
        differs["num_key_value_heads"] = kv_heads
    return _per_type(settings, types, FULL, **differs)


def mimo(settings: Settings) -> Settings:
    """Sliding layers have twice the KV heads; the window counts the query (in 5.17 it does not)."""
    if settings.get("sliding_window_size") is not None:
        settings = {**settings, "sliding_window": settings["sliding_window_size"] + 1}
    types = settings.get("layer_types") or [FULL, *every(6)(settings)[1:]]
    kv_heads = 2 * settings["num_key_value_heads"]
    return _per_type(settings, types, SLIDING, num_key_value_heads=kv_heads)


def mistral_large4(settings: Settings) -> Settings:
    """Layers without RoPE cache the latent only: the place of the rotary part stays empty."""
    rotates = _rope_layers(settings)
    overrides = {i: {"qk_rope_head_dim": 0} for i, rotated in enumerate(rotates) if not rotated}
    return {"per_layer_config": overrides, **settings}


def longcat(settings: Settings) -> Settings:
    """Each layer of the config attends twice, and caches twice."""
    if "num_layers" in settings:
        return {**settings, "num_hidden_layers": 2 * settings["num_layers"]}
    return settings


_NEMOTRON_CODES = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def nemotron_h(settings: Settings) -> Settings:
    """The list of layer types decides how many layers there are."""
    codes = settings.get("hybrid_override_pattern") or "ME*-"
    types = settings.get("layer_types") or [_NEMOTRON_CODES.get(code, code) for code in codes]
    return {**settings, "layer_types": types, "num_hidden_layers": len(types)}


def step3(settings: Settings) -> Settings:
    """Published lists go on with the layers for multi-token prediction, which are not run."""
    types = settings.get("layer_types")
    return {**settings, "layer_types": types and types[: settings["num_hidden_layers"]]}
