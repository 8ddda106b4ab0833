"""One model, many caches: what a prefill puts into them, and greedy answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from evals.reading import Reader
from kvquant import QuantizedCache
from kvquant.models.adapters import base_model

OLD = Version(transformers.__version__) < Version("5.24")
"""Versions that cache DeepSeek V3.2 per head."""
SHARE = {
    "llama": True,
    "gemma2": True,  # sliding
    "llama4_text": True,  # chunked
    "gemma3n_text": True,  # layers that read what others store
    "deepseek": True,  # latent
    "gpt_oss": True,
    "gpt2": True,
    "qwen3_next": False,  # keeps a recurrent state
    "falcon_h1": False,  # beside each layer's keys
    "lfm2": False,
    "deepseek_v32": False,  # keeps the keys of an indexer
}


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


def contents(cache: QuantizedCache) -> list[Any]:
    return [
        {name: rows.clone() for name, rows in store.state()[1].items()}
        for layer in cache.layers
        if hasattr(layer, "stores")
        for pair in layer.stores
        for store in pair
    ]


def equal(one: Any, other: Any) -> bool:
    """Contents of caches, tensor by tensor."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[it], other[it]) for it in one)
    return len(one) == len(other) and all(map(equal, one, other))


@pytest.mark.parametrize("name", SHARE)
def test_whose_prefill_can_be_shared(tiny_once: Callable[..., Any], name: str) -> None:
    if name == "deepseek_v32" and OLD:
        pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
    assert Reader(tiny_once(name)).shares_prefill is SHARE[name]


@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", SHARE)
def test_a_filled_cache_is_one_that_read_for_itself(
    tiny_once: Callable[..., Any], name: str, scheme: str
) -> None:
    if name == "deepseek_v32" and OLD:
        pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
    model, reader = tiny_once(name), Reader(tiny_once(name))
    filled, alone = (QuantizedCache.from_model(model, scheme) for _ in range(2))
    reference = reader.reference()
    reader.fill(ids(1, 40), reference, {"": filled})
    reader.read(ids(1, 40), alone)
    assert equal(contents(filled), contents(alone))
    assert [it.get_seq_length() for it in (filled, alone, reference)] == [40] * 3
    block = ids(1, 5, seed=2)
    assert torch.equal(reader.read(block, filled), reader.read(block, alone))


def test_a_padded_batch_is_filled_as_it_reads(tiny_once: Callable[..., Any]) -> None:
    model, reader = tiny_once("gemma2"), Reader(tiny_once("gemma2"))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    extra = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    filled, alone = (QuantizedCache.from_model(model, "int4") for _ in range(2))
    reader.fill(ids(2, 30), reader.reference(), {"": filled}, **extra)
    reader.read(ids(2, 30), alone, **extra)
    assert equal(contents(filled), contents(alone))


def test_a_prefill_in_pieces(tiny_once: Callable[..., Any]) -> None:
    model, reader = tiny_once("llama"), Reader(tiny_once("llama"))
    filled, alone = (QuantizedCache.from_model(model, "int4") for _ in range(2))
    reader.fill(ids(1, 40), reader.reference(), {"": filled}, chunk=15)
    for piece in (slice(0, 15), slice(15, 30), slice(30, 40)):
        reader.read(ids(1, 40)[:, piece], alone)
    assert equal(contents(filled), contents(alone))


def test_nothing_is_left_on_the_reference(tiny_once: Callable[..., Any]) -> None:
    model, reader = tiny_once("llama"), Reader(tiny_once("llama"))
    reference, filled = reader.reference(), QuantizedCache.from_model(model, "int8")
    reader.fill(ids(1, 10), reference, {"": filled})
    reader.read(ids(1, 3), reference)
    assert (reference.get_seq_length(), filled.get_seq_length()) == (13, 10)


def test_nothing_is_left_on_it_after_a_failure_either(tiny_once: Callable[..., Any]) -> None:
    model, reader = tiny_once("llama"), Reader(tiny_once("llama"))
    reference, other = reader.reference(), QuantizedCache.from_model(model, "int8")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("full")

    other.update = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="full"):
        reader.fill(ids(1, 10), reference, {"": other})
    assert "update" not in vars(reference)


def test_logits(tiny_once: Callable[..., Any], forward: Callable[..., Any]) -> None:
    model, reader = tiny_once("llama"), Reader(tiny_once("llama"))
    expected = forward(model, ids(2, 9))
    found = {count: reader.read(ids(2, 9), reader.reference(), logits=count) for count in (0, 1, 4)}
    assert torch.equal(found[0], expected)
    assert {count: it.shape[1] for count, it in found.items()} == {0: 9, 1: 1, 4: 4}
    assert torch.allclose(found[4], expected[:, -4:], atol=1e-6)
    assert not found[0].requires_grad


def test_a_reader_of_a_model_with_an_adapter(tiny: Callable[..., Any]) -> None:
    from peft import LoraConfig, get_peft_model

    plain = tiny("llama")
    expected = Reader(plain).read(ids(1, 9), DynamicCache(config=plain.config))
    model = get_peft_model(
        tiny("llama"), LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False)
    ).eval()
    reader = Reader(model)
    assert reader.decoder is base_model(model).get_decoder()
    cache = QuantizedCache.from_model(model, "none")
    reader.fill(ids(1, 9), reader.reference(), {"": cache})
    with_adapter = reader.read(ids(1, 9), reader.reference())
    assert cache.get_seq_length() == 9
    assert with_adapter.shape == expected.shape
    assert not torch.allclose(with_adapter, expected)


def test_weights_of_attention(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    reader = Reader(model)
    cache = reader.reference()
    reader.read(ids(1, 10), cache)
    assert reader.attention(ids(1, 3), reader.reference()) == ()  # sdpa gives none
    model.set_attn_implementation("eager")
    weights = reader.attention(ids(1, 3), cache)
    assert [tuple(it.shape) for it in weights] == [(1, 4, 3, 13)] * 2
    assert torch.allclose(weights[0].sum(-1), torch.ones(1, 4, 3))


# ------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_an_answer_is_what_generate_says(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], scheme: str | None
) -> None:
    model, reader = tiny_once("llama"), Reader(tiny_once("llama"))
    prompt, question = ids(1, 20), ids(1, 5, seed=2)
    caches = [
        QuantizedCache.from_model(model, scheme) if scheme else reader.reference() for _ in range(2)
    ]
    reader.read(prompt, caches[0])
    found = reader.answer(question, caches[0], 8)
    reader.read(prompt, caches[1])
    expected = generate(model, torch.cat((prompt, question), 1), caches[1], tokens=8)
    assert found.tolist() == expected[:, 25:].tolist()
    assert caches[0].get_seq_length() == 20 + 5 + 7  # the last one is not read


class Script:
    """Says what it is told to, row by row, whatever it reads; counts calls."""

    def __init__(self, reader: Reader, *rows: list[int]) -> None:
        self.rows, self.calls = torch.tensor(rows), 0
        self.decoder = reader.decoder

    def read(self, asked: torch.Tensor, cache: Any, logits: int = 0) -> torch.Tensor:
        said = self.rows[:, self.calls]
        self.calls += 1
        return torch.nn.functional.one_hot(said, 128)[:, None].float()


def test_an_answer_ends_when_all_rows_have(tiny_once: Callable[..., Any]) -> None:
    script = Script(Reader(tiny_once("llama")), [5, 2, 9, 9, 9], [5, 6, 7, 3, 9])
    found = Reader.answer(script, ids(2, 4), None, 5, stop=[2, 3])  # type: ignore[arg-type]
    assert found.tolist() == [[5, 2, 9, 9], [5, 6, 7, 3]]
    assert script.calls == 4


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        (3, [], [[5, 2, 9]]),
        (3, [4], [[5, 2, 9]]),
        (5, [5], [[5]]),
        (1, [2], [[5]]),
        (5, {2}, [[5, 2]]),
    ],
)
def test_answers_of_one_row(
    tiny_once: Callable[..., Any], tokens: int, stop: Any, expected: list[list[int]]
) -> None:
    script = Script(Reader(tiny_once("llama")), [5, 2, 9, 9, 9])
    found = Reader.answer(script, ids(1, 4), None, tokens, stop)  # type: ignore[arg-type]
    assert found.tolist() == expected


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_rows_of_a_batch_answer_for_themselves(tiny_once: Callable[..., Any], scheme: str) -> None:
    model, reader = tiny_once("llama"), Reader(tiny_once("llama"))
    prompts, questions = ids(3, 20), ids(3, 5, seed=2)

    def answers(rows: slice) -> list[list[int]]:
        cache = QuantizedCache.from_model(model, scheme)
        reader.fill(prompts[rows], reader.reference(), {"": cache})
        return reader.answer(questions[rows], cache, 6).tolist()

    alone = [answers(slice(row, row + 1))[0] for row in range(3)]
    assert answers(slice(None)) == alone
    assert alone[0] != alone[1]
