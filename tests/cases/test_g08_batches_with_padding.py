"""G8, jy-yuan/KIVI#18 with huggingface/transformers#22707: other results with batch size 2.

Left padding shifted the groups, and padding's values widened their ranges. Here padding is not
stored, and groups and sinks count from each row's first real token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvquant import QuantizedCache

SCHEMES: dict[str, dict[str, Any]] = {
    "none": {},
    "fp8": {},
    "int8": {},
    "int4": {},
    "int4-kivi": {"residual_length": 3, "group_size": 4},
}
LENGTHS = (5, 17)
PAD = 0


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Of 5 and 17 tokens, left-padded, with their mask."""
    ids = torch.randint(3, 128, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :12], mask[0, :12] = PAD, 0
    return ids, mask


def with_large_padding(model: Any, factor: float) -> Any:
    with torch.no_grad():
        model.get_input_embeddings().weight[PAD] *= factor
    return model


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek"])
def test_unquantized_rows_say_what_they_say_alone(
    tiny: Callable[..., Any], generate: Callable[..., Any], name: str
) -> None:
    model, (ids, mask) = with_large_padding(tiny(name), 100), prompts()
    together = generate(
        model, ids, QuantizedCache.from_model(model, "none"), 12, attention_mask=mask
    )
    for row, length in enumerate(LENGTHS):
        alone = generate(
            model, ids[row : row + 1, -length:], QuantizedCache.from_model(model, "none"), 12
        )
        assert torch.equal(together[row, 17:], alone[0, length:])


def feed(
    cache: QuantizedCache,
    exact: DynamicCache,
    mask: torch.Tensor | None,
    rows: slice,
    tokens: slice,
) -> None:
    """Gives a cache some of the keys and values of another, as a model would."""
    given = None if mask is None else mask[rows, : tokens.stop]
    shape = (rows.stop - rows.start, tokens.stop - tokens.start)
    cache.begin_call({"input_ids": torch.empty(shape), "attention_mask": given})
    for index, layer in enumerate(exact.layers):
        cache.update(layer.keys[rows, :, tokens], layer.values[rows, :, tokens], index)


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_of_real_tokens_are_those_of_the_row_alone(
    tiny: Callable[..., Any], forward: Callable[..., Any], name: str, scheme: str
) -> None:
    """The same keys and values, bit for bit, whatever padding holds; then three more tokens."""
    model, (ids, mask) = with_large_padding(tiny(name), 100), prompts()
    ids = torch.cat([ids, ids[:, -3:]], dim=1)
    mask = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], dim=1)
    exact = DynamicCache()  # of layers that keep everything
    forward(model, ids, exact, attention_mask=mask)
    padding, real = exact.layers[0].keys[0, :, :12], exact.layers[0].keys[0, :, 12:]
    assert not bool((padding[:, -1] == real[:, 0]).any())
    together = QuantizedCache.from_model(model, scheme, **SCHEMES[scheme])
    alone = [QuantizedCache.from_model(model, scheme, **SCHEMES[scheme]) for _ in range(2)]
    for first, last in ((0, 17), (17, 18), (18, 20)):
        feed(together, exact, mask, slice(0, 2), slice(first, last))
        for row, length in enumerate(LENGTHS):
            start = max(first, 17 - length)
            feed(alone[row], exact, None, slice(row, row + 1), slice(start, last))
    compared = 0
    for index, layer in enumerate(together.layers):
        for row, stores in enumerate(layer.stores):  # a group for each row, in their order
            (expected,) = alone[row].layers[index].stores
            for mine, other in zip(stores, expected, strict=True):
                (numbers, tensors), (others, parts) = mine.state(), other.state()
                assert numbers == others
                assert tensors.keys() == parts.keys()
                assert all(torch.equal(tensor, parts[part]) for part, tensor in tensors.items())
                compared += len(tensors)
    assert compared >= 2 * 2 * 2


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_padding_holds_makes_no_difference(
    tiny: Callable[..., Any], forward: Callable[..., Any], name: str, scheme: str
) -> None:
    ids, mask = prompts()
    places, found = (mask.cumsum(1) - 1).clamp(min=0), []
    for factor in (1, 100):
        model = with_large_padding(tiny(name, tie_word_embeddings=False), factor)
        cache = QuantizedCache.from_model(model, scheme, **SCHEMES[scheme])
        logits = [
            forward(
                model,
                ids[:, part],
                cache,
                attention_mask=mask[:, : part.stop],
                position_ids=places[:, part],
            )
            for part in (slice(0, 14), slice(14, 15), slice(15, 17))
        ]
        states = [layer.state()[1] for layer in cache.layers]
        found.append((torch.cat(logits, 1)[mask.bool()], states))
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
