from __future__ import annotations

from typing import Any

import pytest
import torch

from kvquant.cache.padding import real_tokens
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
        (torch.ones(2, 4), r"is \[2, 4\], but 2 rows of 2 cached and 3 new tokens need \[2, 5\]"),
        (torch.ones(1, 5), r"is \[1, 5\], but 2 rows"),
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
