"""What is kept of a model's layers, against what its cache holds and its queries are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvquant.errors import ExportError
from kvquant.export.fold_observe import observe


def token_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


def test_states_are_those_that_are_cached(
    tiny: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model, blocks = tiny("qwen3"), [token_ids(40), token_ids(2, 30)]
    expected: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for block in (blocks[0][None], blocks[1]):
        cache = DynamicCache(config=model.config)
        forward(model, block, cache)
        for layer, kept in expected.items():
            kept.append(cache.layers[layer].keys.transpose(0, 1).flatten(1, 2))
    found = observe(model, blocks)
    assert list(found) == [0, 1]
    for layer, kept in expected.items():
        torch.testing.assert_close(found[layer].key.states, torch.cat(kept, 1))
        assert found[layer].value.states.shape == (2, 100, 16)


def test_a_sample_is_evenly_spaced_and_bounded(tiny: Callable[..., Any]) -> None:
    """1,200 tokens: every third is kept."""
    model, blocks = tiny("llama"), [token_ids(400, seed=seed) for seed in range(3)]
    whole = observe(model, blocks[:1])[1].key.states
    assert whole.shape == (2, 400, 16)
    found = observe(model, blocks)[1].key.states
    assert found.shape == (2, 400, 16)
    # The second block begins with token 400, the first to be kept of it is 402.
    torch.testing.assert_close(found[:, :134], whole[:, ::3])
    second = observe(model, blocks[1:2])[1].key.states
    torch.testing.assert_close(found[:, 134:267], second[:, 2::3])


def test_reading_is_the_mean_square_of_a_groups_queries(tiny: Callable[..., Any]) -> None:
    model, ids = tiny("smollm3"), token_ids(50)
    attention = model.model.layers[3].self_attn  # not rotated: queries are what q_proj makes
    queries: list[torch.Tensor] = []
    handle = attention.q_proj.register_forward_hook(lambda *call: queries.append(call[2]))
    found = observe(model, [ids])[3]
    handle.remove()
    heads = queries[-1][0].view(50, 2, 2, 16).double()  # two KV heads, two query heads each
    expected = torch.einsum("tkgc,tkgd->kcd", heads, heads) / 100
    torch.testing.assert_close(found.key.reading.double(), expected, rtol=1e-5, atol=1e-7)
    assert found.key.groups.tolist() == list(range(16))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_values_are_read_by_the_columns_of_their_heads(tiny: Callable[..., Any], name: str) -> None:
    model = tiny(name)
    found = observe(model, [token_ids(20)])[0].value
    if name == "llama":
        columns, kv_heads = model.model.layers[0].self_attn.o_proj.weight, 2
    else:
        columns, kv_heads = model.transformer.h[0].attn.c_proj.weight.T, 4
    error = torch.randn(kv_heads, 16)
    cost = torch.einsum("kc,kcd,kd->", error, found.reading, error)
    by_head = columns.detach().view(64, kv_heads, -1, 16)
    expected = torch.einsum("hkgc,kc->kgh", by_head, error).square().sum()
    torch.testing.assert_close(cost, expected)


def test_norms_of_all_heads_share_their_factors(tiny: Callable[..., Any]) -> None:
    found = observe(tiny("qwen3"), [token_ids(20)])[0]
    assert found.key.is_shared
    assert not found.value.is_shared
    assert not observe(tiny("qwen2"), [token_ids(20)])[0].key.is_shared


@pytest.mark.parametrize("blocks", [[], [torch.zeros(0, dtype=torch.long)]])
def test_no_text_is_refused(tiny: Callable[..., Any], blocks: list[torch.Tensor]) -> None:
    with pytest.raises(ExportError, match="has to see some text"):
        observe(tiny("llama"), blocks)


def test_adapters_have_to_be_merged(tiny: Callable[..., Any]) -> None:
    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["k_proj"]))
    with pytest.raises(ExportError, match="merge the adapter first"):
        observe(model, [token_ids(20)])


def test_an_attention_that_somebody_put_into_the_table_stays_there(
    tiny: Callable[..., Any],
) -> None:
    model, calls = tiny("llama"), 0
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return usual(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = counting
    try:
        observe(model, [token_ids(20)])
        assert calls == 4, "two layers: once to find the places, once to observe"
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is counting
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual
