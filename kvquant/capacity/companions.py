"""Bytes that a sequence needs beside its keys and values: recurrent states, keys of an indexer.

They stay exact whatever the cache is quantized to. The shapes are those that Transformers 5.24
allocates; states are kept in float32, windows of convolutions in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvquant.geometry_rules import Settings

_STATEFUL = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")
_FLOAT32 = 4


@dataclass(frozen=True)
class Companion:
    """What one layer keeps beside keys and values.

    Attributes:
        constant: Bytes of a sequence, whatever its length.
        per_token: Bytes of a token.
        known: Whether the layer's bytes could be told from the config.
    """

    constant: int = 0
    per_token: int = 0
    known: bool = True


NOTHING = Companion()


def companions(model_type: str, settings: Settings, dtype_bytes: int) -> list[Companion]:
    """What each layer keeps beside keys and values.

    Args:
        model_type: Of the text part.
        settings: Its config under canonical names, defaults filled in.
        dtype_bytes: Bytes of a number in the model's own dtype.
    """
    layers = settings["num_hidden_layers"]
    types = settings.get("layer_types") or [None] * layers
    return [_companion(model_type, settings, dtype_bytes, kind, i) for i, kind in enumerate(types)]


def _companion(
    model_type: str, settings: Settings, dtype_bytes: int, kind: str | None, index: int
) -> Companion:
    if kind == "indexed_attention":
        return _indexer(settings, dtype_bytes, index)
    if kind not in _STATEFUL:
        return NOTHING
    count = _STATES.get(model_type)
    try:
        return Companion(known=False) if count is None else count(settings, dtype_bytes)
    except (KeyError, TypeError):
        return Companion(known=False)


def _indexer(settings: Settings, dtype_bytes: int, index: int) -> Companion:
    """Sparse attention ranks tokens by a key of their own, shared by all heads."""
    width = settings.get("index_head_dim")
    kinds = settings.get("indexer_types")
    if not isinstance(width, int):
        return Companion(known=False)
    if kinds and kinds[index] != "full":
        return NOTHING
    return Companion(per_token=width * dtype_bytes)


def _delta_net(settings: Settings, dtype_bytes: int) -> Companion:
    """Gated delta net (Qwen3-Next): a window over Q, K and V, and a matrix per value head."""
    key_dim, value_dim = settings["linear_key_head_dim"], settings["linear_value_head_dim"]
    key_heads, value_heads = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    window = channels * settings["linear_conv_kernel_dim"] * dtype_bytes
    return Companion(window + value_heads * key_dim * value_dim * _FLOAT32)


def _mamba1(settings: Settings, dtype_bytes: int) -> Companion:
    """Mamba (Jamba): a window and a state of each channel."""
    channels = settings["mamba_expand"] * settings["hidden_size"]
    window = channels * settings["mamba_d_conv"] * dtype_bytes
    return Companion(window + channels * settings["mamba_d_state"] * _FLOAT32)


def _mamba2(
    heads: str, head_dim: str, groups: str, state: str, kernel: str
) -> Callable[[Settings, int], Companion]:
    """Mamba 2, whose keys each family names differently."""

    def count(settings: Settings, dtype_bytes: int) -> Companion:
        inner = settings[heads] * settings[head_dim]
        channels = inner + 2 * settings[groups] * settings[state]
        window = channels * settings[kernel] * dtype_bytes
        return Companion(window + inner * settings[state] * _FLOAT32)

    return count


def _short_convolution(settings: Settings, dtype_bytes: int) -> Companion:
    """LFM2: a window, no state."""
    return Companion(settings["hidden_size"] * settings["conv_L_cache"] * dtype_bytes)


_BAMBA = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_STATES: Mapping[str, Callable[[Settings, int], Companion]] = {
    "qwen3_next": _delta_net,
    "qwen3_5_text": _delta_net,
    "qwen3_5_moe_text": _delta_net,
    "olmo_hybrid": _delta_net,
    "jamba": _mamba1,
    "bamba": _BAMBA,
    "granitemoehybrid": _BAMBA,
    "falcon_h1": _BAMBA,
    "nemotron_h": _mamba2(
        "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    ),
    "zamba2": _mamba2(
        "n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"
    ),
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
}
