"""Step by step is what `generate()` does, and what is fed in pieces or padded is the same text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvquant.cache.decoding import Decoding, Prompt

MODELS = ("llama", "gpt2", "gemma2", "qwen3_next")
IDS = (torch.arange(17) * 7 % 120 + 4)[None]


def test_a_prompt_grows_by_real_tokens() -> None:
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    text = Prompt(IDS, mask).extended(torch.tensor([[5, 6]]))
    assert text.ids[0, -3:].tolist() == [IDS[0, -1].item(), 5, 6]
    assert text.mask[0].tolist() == [0] * 3 + [1] * 16


@pytest.mark.parametrize("name", MODELS)
def test_without_a_cache_it_is_what_generate_decodes(tiny: Callable[..., Any], name: str) -> None:
    model = tiny(name)
    tokens, logits = Decoding(model).without_cache(Prompt.of(IDS), 6)
    whole = model.generate(
        IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=0
    )
    assert torch.equal(tokens, whole[:, 17:])
    assert torch.equal(logits.argmax(-1), tokens)
    assert logits.shape == (1, 6, 128)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pieces", [[17], [1, 3, 5, 8]])
def test_with_a_cache_it_is_the_same(
    tiny: Callable[..., Any], name: str, pieces: list[int]
) -> None:
    decoding = Decoding(tiny(name))
    prompt = Prompt.of(IDS)
    tokens, logits = decoding.without_cache(prompt, 6)
    cache = DynamicCache(config=decoding.decoder.config)
    found = decoding.with_cache(prompt, tokens, cache, pieces)
    assert torch.allclose(found, logits, atol=1e-6)
    assert cache.get_seq_length() == 17 + 5
    again = decoding.generate(prompt, 6, DynamicCache(config=decoding.decoder.config))
    assert torch.equal(again, tokens)


def test_other_tokens_can_be_fed_than_would_be_chosen(tiny: Callable[..., Any]) -> None:
    decoding = Decoding(tiny("llama"))
    prompt = Prompt.of(IDS[:, :9])
    cache = DynamicCache(config=decoding.decoder.config)
    found = decoding.with_cache(prompt, IDS[:, 9:13], cache, [9])
    with torch.no_grad():
        whole = decoding.model(IDS[:, :12]).logits[:, 8:]
    assert torch.allclose(found, whole, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_next"])
def test_padding_is_not_seen(tiny: Callable[..., Any], name: str) -> None:
    decoding = Decoding(tiny(name))
    batch = IDS.repeat(2, 1)
    mask = torch.ones_like(batch)
    batch[0, 5:] = IDS[0, :12]
    mask[0, :5] = 0
    tokens, _ = decoding.without_cache(Prompt(batch, mask), 5)
    for row, text in ((0, IDS[:, :12]), (1, IDS)):
        alone, _ = decoding.without_cache(Prompt.of(text), 5)
        assert torch.equal(tokens[row], alone[0])


def test_of_a_peft_model_the_adapter_takes_part(tiny: Callable[..., Any]) -> None:
    from peft import LoraConfig, get_peft_model

    plain, _ = Decoding(tiny("llama")).without_cache(Prompt.of(IDS), 6)
    torch.manual_seed(1)
    config = LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    model = get_peft_model(tiny("llama"), config).eval()
    decoding = Decoding(model)
    tokens, logits = decoding.without_cache(Prompt.of(IDS), 6)
    assert not torch.equal(plain, tokens)
    cache = DynamicCache(config=decoding.decoder.config)
    found = decoding.with_cache(Prompt.of(IDS), tokens, cache, [17])
    assert torch.allclose(found, logits, atol=1e-6)
