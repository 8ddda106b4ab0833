"""Decode steps of a model whose layers are Llama-3-8B's, a few of them, with each cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvquant.cache.transformers_compat import cache_argument

from .held import CHUNK, random
from .rows import Row, skipped, verdict

REFERENCE = "DynamicCache"
OWN = ("int4", "int4-kivi", "int8", "fp8")
JUDGED_FROM = 4096
_STEPS, _WARM = 12, 4


def steps(watch: Any, device: str, batch: int, tokens: int, copied: float) -> Iterator[Row]:
    """Rows for a number of tokens; there is nothing to hold against `copied`."""
    del copied
    model, baseline = build_model(device), None
    for name, make in caches(model).items():
        with skipped() as reason:
            taken = step(watch, model, make(), batch, tokens)
            if name == REFERENCE:
                baseline = taken
            yield row(name, batch, tokens, taken, baseline)
        if reason:
            yield Row("step", name, batch, tokens, verdict=reason[0])


def row(name: str, batch: int, tokens: int, taken: float, baseline: float | None) -> Row:
    """A step of `taken` seconds; from some thousand tokens on ours is to be the faster one."""
    figure = f"{1e3 * taken:.2f} ms"
    if baseline is None:
        return Row("step", name, batch, tokens, figure)
    said = verdict(taken, baseline) if name in OWN and tokens >= JUDGED_FROM else ""
    return Row("step", name, batch, tokens, figure, f"{baseline / taken:.2f}", verdict=said)


def build_model(device: str, **changes: Any) -> Any:
    """Layers of Llama-3-8B with random weights, and a small vocabulary."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "vocab_size": 1024,
        "max_position_embeddings": 1 << 18,
    }
    config = LlamaConfig(**{**shape, **changes})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().to(device)


def caches(model: Any) -> dict[str, Callable[[], Any]]:
    """What makes each cache that is compared."""
    from transformers import DynamicCache
    from transformers.cache_utils import QuantizedCache as StockCache

    from kvquant import QuantizedCache

    def own(scheme: str) -> Callable[[], Any]:
        return lambda: QuantizedCache.from_model(model, scheme)

    return {
        REFERENCE: lambda: DynamicCache(config=model.config),
        "stock quanto int4": lambda: StockCache("quanto", model.config, nbits=4),
        "stock hqq int4": lambda: StockCache(
            "hqq", model.config, nbits=4, axis_key=1, axis_value=1
        ),
        "stock fp8": lambda: StockCache("fp8", model.config),
        **{name: own(name) for name in OWN},
    }


@torch.no_grad()
def step(watch: Any, model: Any, cache: Any, batch: int, tokens: int) -> float:
    """Median seconds of a decode step after `tokens` tokens, the CPU that starts it included."""
    fill(model, cache, batch, tokens)
    token = torch.ones((batch, 1), dtype=torch.int64, device=model.device)

    def call() -> None:
        model(input_ids=token, use_cache=True, **{cache_argument(model): cache})

    return watch.calls(call, _STEPS, _WARM)


def fill(model: Any, cache: Any, batch: int, tokens: int) -> None:
    """Puts random keys and values into all layers, without attending to them."""
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    states = random(str(model.device), model.dtype, batch, config.num_key_value_heads, dim)
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        for layer in range(config.num_hidden_layers):
            cache.update(states(count), states(count), layer)
