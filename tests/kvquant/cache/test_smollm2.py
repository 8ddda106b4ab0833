"""The cache on a real model: SmolLM2, 30 layers, 3 KV heads of 64."""

from __future__ import annotations

import pydoc_data.topics
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from calib.collect import collect
from calib.solve import solve
from kvquant import KVScales, QuantizedCache
from kvquant.cache.decoding import Decoding, Prompt
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry
from kvquant.models.loading import LoadedModel, load, make_local, resolve
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

pytestmark = pytest.mark.real_model

BLOCK, TOKENS = 64, 512
NEW = 24


def quiet(message: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(make_local(resolve("smollm2"), quiet), dtype="float32", device="cpu", notify=quiet)


@pytest.fixture(scope="module")
def text(loaded: LoadedModel) -> torch.Tensor:
    """Tokens of the standard library's help topics."""
    joined = " ".join(pydoc_data.topics.topics.values())
    ids = loaded.tokenizer.encode(joined, add_special_tokens=False, verbose=False)
    return torch.tensor(ids[: 3 * TOKENS + 1])


@pytest.fixture(scope="module")
def scales(loaded: LoadedModel, text: torch.Tensor) -> KVScales:
    """Of other tokens than those that are scored."""
    model = loaded.model
    blocks = list(text[TOKENS + 1 :].view(2, TOKENS).numpy())
    stats = collect(model, blocks, CacheGeometry.from_config(model.config))
    tensor = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    return solve(stats, QuantScheme(tensor, tensor))


def logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        taken = {cache_argument(model.get_decoder()): cache}
        found: torch.Tensor = model(input_ids=ids[None], use_cache=True, **taken).logits[0]
    return found.double().log_softmax(-1)


def divergences(model: Any, text: torch.Tensor, caches: dict[str, Any]) -> dict[str, float]:
    """Mean KL in blocks of 64, scored from token 256 on, as benchmarks/cache.py has it."""
    reference = DynamicCache(config=model.config)
    sums = dict.fromkeys(caches, 0.0)
    for start in range(0, TOKENS, BLOCK):
        block = text[start : start + BLOCK]
        exact = logits(model, block, reference)
        for name, cache in caches.items():
            found = logits(model, block, cache)
            if start >= 256:
                sums[name] += float((exact.exp() * (exact - found)).sum())
    return {name: total / (TOKENS - 256) for name, total in sums.items()}


def test_nothing_changes_where_nothing_is_rounded(loaded: LoadedModel, text: torch.Tensor) -> None:
    decoding, prompt = Decoding(loaded.model), Prompt.of(text[None, :48])
    expected, exact = decoding.without_cache(prompt, 6)
    cache = QuantizedCache.from_model(loaded.model, "none")
    found = decoding.with_cache(prompt, expected, cache, [17, 31])
    assert torch.equal(found.argmax(-1), expected)
    assert float((found - exact).abs().max()) < 1e-3  # of logits up to 30
    assert cache.live_nbytes() == 30 * 2 * 3 * 64 * 4 * (48 + 5)


def test_how_far_predictions_move(
    loaded: LoadedModel, text: torch.Tensor, scales: KVScales
) -> None:
    def make(scheme: str, **options: Any) -> Any:
        return QuantizedCache.from_model(loaded.model, scheme, force=True, **options)

    caches = {
        "none": make("none"),
        "int8": make("int8"),
        "int4": make("int4", scales=scales),
        "int4, uncalibrated": make("int4"),
        "fp8": make("fp8", scales=scales),
    }
    found = divergences(loaded.model, text, caches)
    assert found["none"] < 1e-6, found
    assert found["int8"] < 0.001, found
    assert found["int4"] < 0.01, found
    assert found["int4"] < found["int4, uncalibrated"], found
    assert found["fp8"] < 0.02, found
    bits = {
        name: 8 * cache.live_nbytes() / (TOKENS * 30 * 2 * 3 * 64) for name, cache in caches.items()
    }
    assert bits["int8"] == 8.25
    assert bits["fp8"] == 8.0
    assert 4.5 < bits["int4"] < 4.8, bits


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-kivi", "fp8"])
def test_attention_over_codes_says_the_same(
    loaded: LoadedModel, text: torch.Tensor, scales: KVScales, scheme: str
) -> None:
    """Tokens are equal, or first differ where the two likeliest are all but equal."""
    model, prompt = loaded.model, text[None, :256]
    found = {}
    for attention in ("auto", "dequantize"):
        cache = QuantizedCache.from_model(
            model,
            scheme,
            None if scheme == "int4-kivi" else scales,
            force=True,
            attention=attention,
        )
        found[attention] = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **{cache_argument(model.get_decoder()): cache},
        )
    ours, theirs = (it.sequences[0, 256:] for it in found.values())
    different = (ours != theirs).nonzero()
    if len(different):
        step = int(different[0])
        best = found["dequantize"].logits[step][0].topk(2).values
        assert float(best[0] - best[1]) < 1e-3, f"token {step}: {best}"
