"""How compressed-tensors writes FP8 scales of a cache: names, shapes, and config.json.

vLLM, SGLang from 0.5.23 on and Transformers read this form, weights quantized or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .checkpoint import Checkpoint

METHOD = "compressed-tensors"


def scale_tensors(
    path: str, key: torch.Tensor, value: torch.Tensor, per_head: bool = False
) -> dict[str, torch.Tensor]:
    """Scales of the attention at `path`: ``[1]``, or ``[kv_heads, 1, 1]`` per head."""
    shape = (-1, 1, 1) if per_head else (1,)
    # Copies: safetensors does not store one tensor under two names.
    return {
        f"{path}.k_scale": key.reshape(shape).clone(),
        f"{path}.v_scale": value.reshape(shape).clone(),
    }


def kv_cache_scheme(per_head: bool) -> dict[str, Any]:
    """Static symmetric FP8. The format allows no key of ours in here."""
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": "attn_head" if per_head else "tensor",
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def config(checkpoint: Checkpoint, per_head: bool = False) -> dict[str, Any]:
    """Keys of config.json: the base's own block with a KV scheme, or one for the cache alone.

    The base's block stays where it is, at the top or in the text part.
    """
    scheme = kv_cache_scheme(per_head)
    if checkpoint.quantization is None:
        return {"quantization_config": {**_CACHE_ALONE, "kv_cache_scheme": scheme}}
    block = {**checkpoint.quantization, "kv_cache_scheme": scheme}
    return place(checkpoint, block)


def place(checkpoint: Checkpoint, block: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json that put `block` where the base has its quantization_config."""
    text = checkpoint.config.get("text_config")
    if "quantization_config" not in checkpoint.config and isinstance(text, Mapping):
        return {"text_config": {**text, "quantization_config": dict(block)}}
    return {"quantization_config": dict(block)}


_CACHE_ALONE: Mapping[str, Any] = {
    "quant_method": METHOD,
    "format": "dense",
    "quantization_status": "frozen",
    "global_compression_ratio": None,
    # Empty, not absent: vLLM then quantizes no weight, and still learns how many heads there are.
    "config_groups": {},
    "ignore": [],
}
