"""Builds a LoRA adapter whose keys no longer fit the base model's scales.

    python examples/outlier_adapter.py --output outlier-adapter

Nothing is trained: two rows of one `k_proj`, the two channels of a rotary pair, come out `--factor`
times as large. A mild fine-tune does not do that; this is what `kvquant drift` has to catch. The
default pair holds nearly the largest key of its layer in SmolLM2 (19.2 of 20.8 over 1,024 tokens
of English), so that a scale per tensor is as wrong as one per channel.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console

from kvquant.errors import InputError, KVQuantError
from kvquant.geometry import CacheGeometry
from kvquant.models.loading import load, resolve

console = Console()


def pair_channels(config: Any, layer: int, pair: int, kv_head: int) -> list[int]:
    """Rows of `k_proj` that RoPE turns together: channels ``pair`` and ``pair + key_dim / 2``.

    Raises:
        InputError: No such layer, KV head or pair.
    """
    layers = CacheGeometry.from_config(config).layers
    if not 0 <= layer < len(layers):
        raise InputError(f"layer {layer} of {len(layers)}: choose 0 to {len(layers) - 1}")
    heads, half = layers[layer].kv_heads, layers[layer].key_dim // 2
    if not (0 <= kv_head < heads and 0 <= pair < half):
        raise InputError(
            f"KV head {kv_head}, pair {pair}: layer {layer} has KV heads 0 to {heads - 1} "
            f"with pairs 0 to {half - 1}"
        )
    first = kv_head * 2 * half + pair
    return [first, first + half]


@torch.no_grad()
def outlier_adapter(
    model: Any, layer: int, pair: int, factor: float, kv_head: int = 0
) -> PeftModel:
    """Wraps the model with an adapter that multiplies one rotary pair of keys.

    LoRA computes ``W + scaling * B @ A``. With the pair's rows of W, times ``(factor - 1) /
    scaling``, as A ``[2, hidden]``, and B ``[kv_heads * key_dim, 2]`` putting them back in their
    places, these rows become ``factor * W`` and all others stay as they are.

    Args:
        model: A Llama-like model: RoPE over the whole head, neither key bias nor key norm.
        layer: Layer whose keys change.
        pair: Rotary pair within the head.
        factor: What its keys are multiplied by.
        kv_head: KV head whose keys change.

    Raises:
        InputError: No such layer, KV head or pair.
    """
    rows = pair_channels(model.config, layer, pair, kv_head)
    config = LoraConfig(
        r=2,
        lora_alpha=2,
        target_modules=["k_proj"],
        layers_to_transform=[layer],
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    k_proj = model.model.layers[layer].self_attn.k_proj
    scaling = k_proj.scaling["default"]
    k_proj.lora_A["default"].weight.copy_(k_proj.weight[rows] * ((factor - 1) / scaling))
    into = k_proj.lora_B["default"].weight.zero_()
    into[rows, [0, 1]] = 1.0
    return adapted


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="LoRA adapter with outlier keys, built.")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a Llama-like directory")
    parser.add_argument("--output", type=Path, required=True, help="directory for the adapter")
    parser.add_argument("--factor", type=float, default=8.0, help="what the pair is multiplied by")
    parser.add_argument("--layer", type=int, default=10, help="layer whose keys change")
    parser.add_argument("--kv-head", type=int, default=0, help="KV head whose keys change")
    parser.add_argument("--pair", type=int, default=23, help="rotary pair within the head")
    return parser


def build(options: argparse.Namespace) -> None:
    """Load, wrap, save.

    Raises:
        KVQuantError: The model cannot be loaded, or has no such layer, KV head or pair.
    """
    source = resolve(options.model)
    model = load(source, dtype="float32", device="cpu", notify=console.print).model
    # PEFT copies the name from here; by default it is a directory of this machine.
    model.name_or_path = model.config._name_or_path = options.model
    adapted = outlier_adapter(
        model, options.layer, options.pair, options.factor, kv_head=options.kv_head
    )
    # Told that no embedding was trained, PEFT need not look the base up on the network.
    adapted.save_pretrained(str(options.output), save_embedding_layers=False)
    console.print(
        f"{options.output}: keys of layer {options.layer}, KV head {options.kv_head}, "
        f"pair {options.pair} times {options.factor:g}"
    )


def main() -> None:
    """Entry point; a mistake of the user's ends with one line and exit code 2."""
    parser = arguments()
    try:
        build(parser.parse_args())
    except KVQuantError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
