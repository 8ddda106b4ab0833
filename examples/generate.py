"""Generates text with a calibrated quantized cache beside the full-precision answer.

    python examples/generate.py --model smollm2 --adapter my-adapter --scales my-scales

The same prompt goes through Transformers' own cache and through quantized ones; shown are the
texts, how many tokens agree from the start, the time that a token takes, and the bytes that each
cache holds at the end.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvquant import QuantizedCache
from kvquant.errors import KVQuantError
from kvquant.models.loading import load, resolve

console = Console()


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for kvquant calibrate")
    parser.add_argument("--adapter", action="append", default=[])
    parser.add_argument("--scales", required=True, help="scales file of kvquant calibrate")
    parser.add_argument("--scheme", action="append", default=[], help="presets, docs/schemes.md")
    parser.add_argument("--prompt-file", type=Path, help="text to go on with")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="how much of it")
    parser.add_argument("--tokens", type=int, default=48, help="how many to generate")
    args = parser.parse_args()
    try:
        compare(args)
    except KVQuantError as error:
        parser.exit(2, f"error: {error}\n")


def compare(args: argparse.Namespace) -> None:
    """Generates with each cache and prints what came out."""
    loaded = load(resolve(args.model, adapters=args.adapter), notify=console.print)
    model, tokenizer = loaded.model, loaded.tokenizer
    prompt = tokenizer(read_prompt(args), return_tensors="pt")["input_ids"][:, : args.prompt_tokens]
    full = DynamicCache(config=model.config)
    expected, seconds = generate(model, prompt, full, args.tokens)
    full_bytes = sum(
        tensor.numel() * 2 for layer in full.layers for tensor in (layer.keys, layer.values)
    )
    table = Table(box=box.SIMPLE_HEAD, title=f"{args.tokens} tokens after {prompt.shape[1]}")
    columns = ("cache", "what it goes on with", "tokens agree", "ms a token", "bytes", "bf16 / it")
    for column in columns:
        table.add_column(column, justify="left" if "with" in column else "right")
    text = tokenizer.decode(expected)
    table.add_row("full", text, "", f"{1000 * seconds:.0f}", f"{full_bytes:,}", "1.00")
    for scheme in args.scheme or ["fp8", "int4"]:
        cache = QuantizedCache.from_model(
            model, scheme=scheme, scales=args.scales, tokenizer=tokenizer
        )
        found, seconds = generate(model, prompt, cache, args.tokens)
        agree = int((found == expected).long().cumprod(0).sum())
        held = cache.live_nbytes()
        shown = (f"{1000 * seconds:.0f}", f"{held:,}", f"{full_bytes / held:.2f}")
        table.add_row(scheme, tokenizer.decode(found), str(agree), *shown)
    console.print(table)
    print(cache.summary())  # as it is: a terminal cuts lines better than rich does


def read_prompt(args: argparse.Namespace) -> str:
    """Text to go on with."""
    if args.prompt_file is None:
        return inspect.cleandoc(str(argparse.ArgumentParser.__doc__)) + "\n\nclass ArgumentParser"
    return str(args.prompt_file.read_text(encoding="utf-8"))


class Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A token; the prompt first."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """All is done."""

    @property
    def step(self) -> float:
        """Seconds from a token to the next, the median; the prompt's own time is not in it."""
        return statistics.median(b - a for a, b in pairwise(self.times[1:]))


def generate(
    model: Any, prompt: torch.Tensor, cache: Any, tokens: int
) -> tuple[torch.Tensor, float]:
    """Greedy continuation of `prompt`, token ids ``[tokens]``, and seconds a token."""
    clock = Clock()
    made: torch.Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=model.config.eos_token_id,
        streamer=clock,
    )
    return made[0, prompt.shape[1] :], clock.step


if __name__ == "__main__":
    main()
