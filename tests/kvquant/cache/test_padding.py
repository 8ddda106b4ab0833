from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PaliGemmaConfig, PaliGemmaForConditionalGeneration

from kvquant.cache.cache import QuantizedCache
from kvquant.cache.ledger import TokenLedger
from kvquant.cache.padding import check_cached, check_goes_on, read_mask, real_tokens
from kvquant.cache.transformers_compat import cache_argument
from kvquant.errors import InputError

F, T = False, True


def test_without_a_mask_all_are_real() -> None:
    assert real_tokens(None, 2, 0, 5) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize(
    ("start", "count", "real"),
    [
        (0, 3, [[F, F, T], [T, T, T]]),
        (3, 2, [[T, F], [T, T]]),
        (4, 1, [[F], [T]]),
        (0, 5, [[F, F, T, T, F], [T, T, T, T, T]]),
    ],
)
def test_the_calls_tokens_are_those_after_what_is_cached(
    start: int, count: int, real: list[list[bool]], dtype: torch.dtype
) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 1, 1]]).to(dtype)
    found = real_tokens(mask, 2, start, count)
    assert found is not None
    assert found.dtype == torch.bool
    assert found.tolist() == real


def causal(real: list[list[bool]], past: int, window: int | None = None) -> torch.Tensor:
    """``[batch, 1, count, past + count]``: what each new token sees; all that is past is real."""
    rows = torch.tensor(real)
    keys = torch.cat([torch.ones(rows.shape[0], past, dtype=torch.bool), rows], dim=1)
    query = torch.arange(rows.shape[1])[:, None] + past
    distance = query - torch.arange(keys.shape[1])
    seen = (distance >= 0) & (distance < (window or 1000))
    return seen & keys[:, None, None, :]


@pytest.mark.parametrize("past", [0, 6])
@pytest.mark.parametrize("as_float", [False, True])
def test_made_masks_tell_it_on_their_diagonal(past: int, as_float: bool) -> None:
    real = [[F, T, T, F], [T, T, T, T], [F, F, F, F]]
    masks: dict[str, Any] = {
        "sliding_attention": causal(real, min(past, 2), 3),
        "full_attention": causal(real, past),
    }
    if as_float:  # of eager attention: what is added to the scores
        masks = {kind: torch.where(mask, 0.0, -1e30) for kind, mask in masks.items()}
    for kinds in (list(masks), list(masks)[::-1], ["full_attention"], ["sliding_attention"]):
        found = real_tokens({kind: masks[kind] for kind in kinds}, 3, past, 4)
        assert found is not None
        assert found.tolist() == real


def test_made_masks_of_flash_attention_have_two_axes() -> None:
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]])
    found = real_tokens({"full_attention": None, "sliding_attention": mask}, 2, 9, 3)
    assert found is not None
    assert found.tolist() == [[F, T, T], [T, T, F]]


def test_made_masks_that_are_not_needed_say_that_all_are_real() -> None:
    assert real_tokens({"full_attention": None, "sliding_attention": None}, 2, 3, 4) is None
    assert real_tokens({}, 2, 3, 4) is None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 1, 5, 5), "not 4-D"),
        (torch.ones(5), "not 1-D"),
        ([[1, 1, 1]], "not list"),
        ({"full_attention": "a block mask"}, "not str"),
        ({"full_attention": torch.ones(2, 5, 5)}, "not 3-D"),
        (
            torch.ones(2, 4),
            r"is \[2, 4\], not \[2, 5\] \(2 cached and 3 new\): a prompt begins with what is",
        ),
        (torch.ones(1, 5), r"is \[1, 5\], not \[2, 5\]"),
    ],
)
def test_what_does_not_tell_is_refused(mask: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        real_tokens(mask, 2, 2, 3)


def test_no_value_is_looked_at() -> None:
    """A look would stall a device; on the meta device there is none to be had."""
    mask = torch.ones(2, 9, device="meta")
    assert real_tokens(mask, 2, 4, 5).shape == (2, 5)  # type: ignore[union-attr]
    made = {"full_attention": torch.ones(2, 1, 5, 9, dtype=torch.bool, device="meta")}
    assert real_tokens(made, 2, 4, 5).shape == (2, 5)  # type: ignore[union-attr]


def drawn(*rows: str) -> torch.Tensor:
    """A mask ``[1, 1, queries, slots]``: ``x`` is seen, ``.`` is not."""
    return torch.tensor([[[[slot == "x" for slot in row] for row in rows]]])


def as_added(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize("form", [torch.Tensor.bool, as_added])
def test_a_made_mask_tells_it_by_its_last_query(form: Callable[[torch.Tensor], Any]) -> None:
    """Of a prompt that sees itself in both directions (PaliGemma), and of a causal one."""
    ledger = TokenLedger(False)
    prompt = torch.cat([drawn(".....", "..xxx", "..xxx", "..xxx", "..xxx"), drawn(*["xxxxx"] * 5)])
    told = read_mask(form(prompt), 2, 5, ledger, False)
    assert told is not None
    assert told.tolist() == [[F, F, T, T, T], [T] * 5]
    ledger.begin(2, 5, torch.device("cpu"), told, None)
    causal = torch.cat([drawn("..xxxx.", "..xxxxx"), drawn("xxxxxx.", "xxxxxxx")])
    told = read_mask(form(causal), 2, 2, ledger, False)
    assert told is not None
    assert told.tolist() == [[T, T], [T, T]]
    with pytest.raises(InputError, match="row 0: the attention mask calls 5 of the 5 cached"):
        read_mask(form(drawn("xxxxxx.", "xxxxxxx").expand(2, 1, 2, 7)), 2, 2, ledger, False)


@pytest.mark.parametrize(
    "mask",
    [
        drawn("x...", "xx..", ".xx.", "..xx"),  # a window
        drawn("x...", "xx..", "..x.", "..xx"),  # two texts in a row
        drawn("....", "....", "....", "...."),
        drawn("x...", "xx..", "xxx."),  # another number of queries
        torch.ones(1, 1, 4, 4),  # numbers that are added
    ],
)
def test_a_made_mask_that_does_not_tell_is_refused(mask: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"attention mask \[batch, tokens\], not 4-D"):
        read_mask(mask, 1, 4, TokenLedger(False), False)


@pytest.mark.parametrize("attention", ["auto", "dequantize"])
def test_paligemma_makes_such_masks(attention: str) -> None:
    text = {"model_type": "gemma", "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = PaliGemmaConfig(
        text_config={**text, "vocab_size": 128}, vision_config=vision, image_token_id=120
    )
    torch.manual_seed(0)
    model = PaliGemmaForConditionalGeneration(config).eval()
    ids = torch.randint(3, 110, (3, 14), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, :1] = 0, 0
    cache = QuantizedCache.from_model(model, "none", attention=attention)
    found = [
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            **{cache_argument(model.get_decoder()): held},
        )
        for held in (cache, DynamicCache(config=model.get_decoder().config))
    ]
    assert torch.equal(*found)
    keys = sum(store[0].live_nbytes() for store in cache.layers[0].stores)
    assert keys == (19 * 3 - 6) * 2 * 16 * 4, "padding is not stored"


# What a mask says of cached tokens


def real(*rows: str) -> torch.Tensor:
    """Bool ``[rows, slots]``: ``x`` is real, ``.`` is not."""
    return torch.tensor([[token == "x" for token in row] for row in rows])


def filled(*rows: str) -> TokenLedger:
    ledger = TokenLedger(False)
    ledger.begin(len(rows), len(rows[0]), torch.device("cpu"), real(*rows))
    return ledger


@pytest.mark.parametrize(
    ("seen", "held", "numbers"),
    [
        # Two prompts with one cached prefix, padded in front of it.
        (["xxxx", "..xx"], ["xxxx", "xxxx"], "row 1: .* calls 2 of the 4 .*, the cache holds 4. A"),
        (["...x", "xxxx"], [".xxx", "xxxx"], "row 0: .* calls 1 of the 4 .*, the cache holds 3. A"),
        (["....", "xxxx"], ["xxxx", "xxxx"], "row 0: .* calls 0 of the 4 .*, the cache holds 4. A"),
        # A prefix that was padded itself.
        (["xxxx"], ["..xx"], "row 0: .* calls 4 of the 4 .*, the cache holds 2. A"),
        (["xx.."], ["..xx"], "row 0: .* calls 2 of the 4 .*, the cache holds 2 others. A"),
        (["xxxx"], ["xx.x"], "row 0: .* calls 4 of the 4 .*, the cache holds 3. A"),
    ],
)
@pytest.mark.parametrize("may_hide", [False, True])
def test_masks_that_are_shifted_against_the_cache_are_refused(
    seen: list[str], held: list[str], numbers: str, may_hide: bool
) -> None:
    with pytest.raises(InputError, match=numbers) as refused:
        check_cached(real(*seen), real(*held), may_hide)
    message = str(refused.value)
    assert "a cached prefix comes first in every row, and padding goes between it and" in message
    assert "\n" not in message


@pytest.mark.parametrize("rows", [["xxxx", ".xx."], ["...."], ["", ""]])
def test_masks_that_repeat_what_is_cached_are_fine(rows: list[str]) -> None:
    held = real(*rows) if rows[0] else torch.ones(2, 0, dtype=torch.bool)
    check_cached(held.clone(), held, may_hide=False)


def test_tokens_behind_the_first_one_can_be_hidden_where_masks_are_looked_at() -> None:
    seen, held = real(".xx..", "xxxxx"), real(".xxxx", "xxxxx")
    check_cached(seen, held, may_hide=True)
    with pytest.raises(InputError, match=r"holds 4\. .* takes a cache with attention='dequantize'"):
        check_cached(seen, held, may_hide=False)


def test_a_mask_is_read_behind_what_is_cached() -> None:
    ledger = filled(".xx", "xxx")
    mask = torch.tensor([[0, 1, 1, 0, 1, 9], [1, 1, 1, 1, 1, 9]])
    found = read_mask(mask, 2, 2, ledger, False)
    assert found is not None
    assert found.tolist() == [[F, T], [T, T]]
    with pytest.raises(InputError, match="row 0: the attention mask calls 3 of the 3"):
        read_mask(torch.ones(2, 5), 2, 2, ledger, False)
    with pytest.raises(InputError, match=r"row 0: .* 3 of the 3 .*\(without one all are\)"):
        read_mask(None, 2, 2, ledger, False)
    assert read_mask(None, 2, 2, filled("xxx", "xxx"), False) is None


def test_the_ledger_speaks_of_another_number_of_rows() -> None:
    found = read_mask(torch.tensor([[0, 0, 0, 1]]), 1, 1, filled(".xx", "xxx"), False)
    assert found is not None and found.tolist() == [[T]]
    assert read_mask(None, 1, 1, filled(".xx", "xxx"), False) is None


def test_made_masks_tell_nothing_of_what_is_cached() -> None:
    masks = {"full_attention": causal([[F, T], [T, T]], 3)}
    found = read_mask(masks, 2, 2, filled(".xx", "xxx"), False)
    assert found is not None
    assert found.tolist() == [[F, T], [T, T]]
    assert read_mask({"full_attention": None}, 2, 2, filled(".xx", "xxx"), False) is None


def test_a_decode_step_on_a_device_looks_at_nothing() -> None:
    """On the meta device there is nothing to be had, and asking raises."""
    mask, positions = torch.ones(2, 9, device="meta"), torch.ones(2, 1, device="meta")
    assert read_mask(mask, 2, 1, filled(".xxx", "xxxx"), False) is None
    check_goes_on(1, 4, positions)
    with pytest.raises(NotImplementedError):
        read_mask(mask, 2, 2, filled(".xxx", "xxxx"), False)


@pytest.mark.parametrize("length", [7, 8, 9, 12])
def test_a_prompt_that_is_not_longer_than_what_is_cached(length: int) -> None:
    """`generate()` hands its tokens from 12 - length on over, which begins at the wrong end."""
    places = torch.arange(length)[None, 12 - length :]
    with pytest.raises(
        InputError, match=rf"\(length {length}\) is no longer than .* \(length 12\): a pr"
    ):
        check_goes_on(places.shape[1], 12, places)
    check_goes_on(places.shape[1], 12, None)
    check_goes_on(places.shape[1], 0, places)
    check_goes_on(places.shape[1], 12, places + 12)


def test_a_call_without_tokens() -> None:
    with pytest.raises(
        InputError, match=r"brings nothing new to what is cached \(length 12\): a pro"
    ):
        check_goes_on(0, 12, None)
    with pytest.raises(InputError, match="length 0"):
        check_goes_on(0, 0, torch.empty(1, 0))
