"""The hook that tells a cache of padding and positions: once, from wherever the model is called."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration

from kvquant.cache.cache import QuantizedCache
from kvquant.cache.hook import remove_hook
from kvquant.cache.transformers_compat import cache_argument
from kvquant.errors import InputError
from kvquant.models.adapters import base_model


def prompt(batch: int = 2, tokens: int = 17) -> torch.Tensor:
    return torch.randint(3, 99, (batch, tokens), generator=torch.Generator().manual_seed(1))


def left_padded() -> torch.Tensor:
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[0, :6] = 0
    return mask


def lengths(cache: QuantizedCache) -> list[int]:
    """Real tokens of each group of rows that the first layer holds."""
    return sorted(stores[0].length for stores in cache.layers[0].stores)


@contextmanager
def counted(cache: QuantizedCache) -> Iterator[list[int]]:
    """Tokens of each call that the cache is told about."""
    told: list[int] = []
    begin = cache.begin_call

    def begin_call(call: dict[str, Any], *more: Any) -> None:
        tokens = call.get("input_ids")
        told.append((call["inputs_embeds"] if tokens is None else tokens).shape[1])
        begin(call, *more)

    cache.begin_call = begin_call  # type: ignore[method-assign]
    yield told
    del cache.begin_call


@pytest.fixture
def fine_tuned(tiny: Callable[..., Any]) -> Any:
    """A LoRA adapter with weights of its own on keys, values and the gate."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["k_proj", "v_proj", "gate_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(tiny("llama"), config).eval()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "deepseek", "qwen3_next"])
def test_it_fires_once_a_call_however_many_caches_were_made(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], name: str
) -> None:
    model = tiny_once(name)
    caches = [QuantizedCache.from_model(model, "int8") for _ in range(3)]
    with counted(caches[1]) as told:
        generate(model, prompt(), caches[1], 4, attention_mask=left_padded())
    assert told == [17, 1, 1, 1]
    assert caches[0].get_seq_length() == caches[2].get_seq_length() == 0


@pytest.mark.parametrize("of", ["the adapter", "its base", "its decoder"])
def test_it_fires_once_under_an_adapter(
    fine_tuned: Any, generate: Callable[..., Any], of: str
) -> None:
    model = {
        "the adapter": fine_tuned,
        "its base": base_model(fine_tuned),
        "its decoder": base_model(fine_tuned).get_decoder(),
    }[of]
    mask, cache = left_padded(), QuantizedCache.from_model(model, "none")
    name = cache_argument(base_model(fine_tuned).get_decoder())
    with counted(cache) as told:
        found = fine_tuned.generate(
            input_ids=prompt(),
            attention_mask=mask,
            max_new_tokens=5,
            min_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            **{name: cache},
        )
    assert told == [17, 1, 1, 1, 1]
    assert lengths(cache) == [11 + 4, 17 + 4]
    expected = base_model(fine_tuned)
    assert torch.equal(found, generate(expected, prompt(), None, 5, attention_mask=mask))
    with fine_tuned.disable_adapter():
        plain = generate(expected, prompt(), None, 5, attention_mask=mask)
    assert not torch.equal(found, plain), "the adapter says something of its own"


@pytest.mark.parametrize("how", ["by name", "by position", "embeddings", "through the decoder"])
def test_arguments_may_come_in_any_way(tiny_once: Callable[..., Any], how: str) -> None:
    model, ids, mask = tiny_once("llama"), prompt(), left_padded()
    cache = QuantizedCache.from_model(model, "int8")
    given = {cache_argument(model.get_decoder()): cache}
    with torch.no_grad():
        if how == "by name":
            model(input_ids=ids, attention_mask=mask, **given)
        elif how == "by position":
            model(ids, mask, None, cache)
        elif how == "embeddings":
            model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, **given)
        else:
            model.model(ids, mask, None, cache)
    assert lengths(cache) == [11, 17]


def test_other_caches_and_none_at_all_go_through(
    tiny: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    plain, hooked = tiny("llama"), tiny("llama")
    QuantizedCache.from_model(hooked, "int8")
    for make in (lambda model: None, lambda model: DynamicCache(config=model.config)):
        expected, found = (
            forward(model, prompt(), make(model), attention_mask=left_padded())
            for model in (plain, hooked)
        )
        assert torch.equal(expected, found)


def test_it_can_be_taken_off_and_put_on_again(
    tiny: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model = tiny("llama")
    cache = QuantizedCache.from_model(model, "int8")
    assert len(model.model._forward_pre_hooks) == 1
    remove_hook(model)
    remove_hook(model)
    assert len(model.model._forward_pre_hooks) == len(model.model._forward_hooks) == 0
    with pytest.raises(InputError, match=r"does not tell this cache about padding.*the hook was"):
        forward(model, prompt(), cache, attention_mask=left_padded())
    again = QuantizedCache.from_model(model, "int8")
    assert len(model.model._forward_pre_hooks) == 1
    forward(model, prompt(), again, attention_mask=left_padded())
    assert lengths(again) == [11, 17]


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek", "falcon_h1", "qwen3_next"])
def test_another_instance_of_the_model_is_refused_as_it_tells_no_padding(
    tiny: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    """Its padding would be stored like text."""
    model, other = tiny(name), tiny(name)
    cache = QuantizedCache.from_model(model, "none")
    given = {"attention_mask": left_padded()}
    for _ in range(2):
        with pytest.raises(InputError, match=r"another instance .* from_model\(\.\.\.\) of the"):
            forward(other, prompt(), cache, **given)
        assert cache.get_seq_length() == 0
    if name in ("falcon_h1", "qwen3_next"):  # whose recurrent states have moved
        with pytest.raises(InputError, match=r"reset\(\) the cache"):
            forward(model, prompt(), cache, **given)
        cache.reset()
    expected = forward(model, prompt(), QuantizedCache.from_model(model, "none"), **given)
    assert torch.equal(forward(model, prompt(), cache, **given), expected)
    with pytest.raises(InputError, match="another instance"):
        forward(other, prompt(2, 3), cache)


def test_by_hand_all_tokens_are_real_and_masks_may_be_made_for_announced_ones(
    tiny: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    cache = QuantizedCache.from_model(tiny("llama"), "int8")
    new = torch.ones(2, 2, 17, 16)
    cache.update(new, new, 0)
    assert lengths(cache) == [17]
    other = tiny("llama")
    cache = QuantizedCache.from_model(tiny("llama"), "int8")
    cache.begin_call({"input_ids": prompt(), "attention_mask": left_padded()})
    forward(other, prompt(), cache, attention_mask=left_padded())
    assert lengths(cache) == [11, 17]


def test_a_deep_copy_of_the_model_has_the_hook_from_the_start(
    tiny: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model = tiny("llama")
    cache = QuantizedCache.from_model(model, "int8")
    twin = copy.deepcopy(model)
    forward(twin, prompt(), cache, attention_mask=left_padded())
    assert lengths(cache) == [11, 17]
    remove_hook(twin)
    assert len(twin.model._forward_hooks) == 0
    forward(model, prompt(2, 3), cache, attention_mask=torch.cat([left_padded(), prompt(2, 3)], 1))
    assert lengths(cache) == [14, 20]


@pytest.mark.parametrize("how", ["deep copy", "pickle"])
def test_a_copied_model_has_a_hook_of_its_own(
    tiny: Callable[..., Any], forward: Callable[..., Any], how: str
) -> None:
    model = tiny("llama")
    QuantizedCache.from_model(model, "int8")
    if how == "deep copy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    cache = QuantizedCache.from_model(twin, "int8")
    with counted(cache) as told:
        forward(twin, prompt(), cache, attention_mask=left_padded())
    assert told == [17]
    assert lengths(cache) == [11, 17]


def test_it_leaves_no_trace_in_the_weights(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    names, modules = list(model.state_dict()), len(list(model.modules()))
    QuantizedCache.from_model(model, "int4")
    assert list(model.state_dict()) == names
    assert len(list(model.modules())) == modules


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_that_make_masks_for_their_decoder(
    generate: Callable[..., Any], attention: str
) -> None:
    """Gemma 3 from 4B on is such a model, also where only text goes in."""
    config = Gemma3Config(
        text_config={
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 8,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "intermediate_size": 32,
        },
        mm_tokens_per_image=4,
        boi_token_index=100,
        eoi_token_index=101,
        image_token_index=102,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    for mask in (left_padded(), torch.ones(2, 17, dtype=torch.long)):
        cache = QuantizedCache.from_model(model, "none")
        found = generate(model, prompt(), cache, 5, attention_mask=mask)
        assert torch.equal(found, generate(model, prompt(), None, 5, attention_mask=mask))
        assert lengths(cache) == sorted({int(row) + 4 for row in mask.sum(1)})
