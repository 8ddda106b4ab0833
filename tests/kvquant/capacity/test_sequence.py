from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvquant.capacity.format_names import Overrides, parse_formats
from kvquant.capacity.parallel import Parallel
from kvquant.capacity.sequence import SequencePrice, padding_layers, paged_tokens
from kvquant.capacity.spec import ModelSpec
from kvquant.geometry import LayerGeometry, LayerKind

CONFIG = {
    "model_type": "gemma2",
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 16,
    "sliding_window": 6,
}


def price(name: str = "bf16", **changes: object) -> SequencePrice:
    spec = ModelSpec.from_config({**CONFIG, **changes}, "m", "")
    (form,) = parse_formats([name], Overrides(), 2)
    return SequencePrice(spec, form, Parallel(), range(len(spec.geometry.layers)))


def test_layers_that_cost_the_same_are_one() -> None:
    sliding, full = price().alike
    assert (sliding.indices, full.indices) == ((0, 2, 4), (1, 3, 5))
    assert sliding.layer.window == 6
    assert full.layer.window is None


@pytest.mark.parametrize(
    ("tokens", "sliding", "full"), [(0, 0, 0), (5, 5, 5), (6, 5, 6), (100, 5, 100)]
)
def test_sum_over_layers(tokens: int, sliding: int, full: int) -> None:
    token = 2 * 2 * 16 * 2
    assert price().nbytes(tokens) == 3 * token * (sliding + full)
    assert price().token_nbytes == 6 * token


# Window of 6 in pages of 4: the last 5 tokens can be seen.
@pytest.mark.parametrize(
    ("tokens", "room"),
    [(0, 0), (1, 4), (4, 4), (5, 8), (8, 8), (9, 8), (10, 8), (12, 8), (13, 8), (17, 8), (18, 8)],
)
def test_pages_of_a_window(tokens: int, room: int) -> None:
    window = LayerGeometry(LayerKind.SLIDING, 1, 1, 1, window=6)
    assert paged_tokens(window, tokens, 4) == room


def test_pages_of_a_full_layer() -> None:
    full = LayerGeometry(LayerKind.FULL, 1, 1, 1)
    assert [paged_tokens(full, n, 16) for n in (0, 1, 16, 17, 1000)] == [0, 16, 16, 32, 1008]


@given(st.integers(2, 50), st.integers(0, 300), st.integers(1, 40))
def test_pages_hold_what_can_be_seen(window: int, tokens: int, page: int) -> None:
    layer = LayerGeometry(LayerKind.SLIDING, 1, 1, 1, window=window)
    room = paged_tokens(layer, tokens, page)
    seen = set(range(max(0, tokens - window + 1), tokens))
    pages = {token // page for token in seen}
    assert room >= len(seen)
    assert len(pages) * page <= room <= (len(pages) + 1) * page


def test_paged_and_full_length_bytes() -> None:
    token = 2 * 2 * 16 * 2
    assert price().paged_nbytes(10, 4) == 3 * token * (8 + 12)
    assert price().full_length_nbytes(10) == 6 * token * 10
    # Sinks are dearer than codes; the unused room is that of codes.
    exact, coded = 2 * 2 * 16 * 2, 2 * 2 * (16 // 2 + 4)
    assert price("int4", layer_types=["full_attention"] * 6).paged_nbytes(10, 16) == 6 * (
        4 * exact + 6 * coded + 6 * coded
    )


@pytest.mark.parametrize(
    ("tokens", "prefix", "sliding", "full"),
    [
        (10, 0, 5, 10),
        (10, 3, 5, 7),  # the window has left the prefix
        (5, 3, 2, 2),  # the window still shows all of it
        (8, 4, 4, 4),  # tokens 3 to 7 can be seen, one of them shared
        (10, 10, 0, 0),
    ],
)
def test_what_is_a_sequence_s_own(tokens: int, prefix: int, sliding: int, full: int) -> None:
    token = 2 * 2 * 16 * 2
    assert price().own_nbytes(tokens, prefix) == 3 * token * (sliding + full)


@pytest.mark.parametrize(
    ("kinds", "padding"),
    [
        ([], 0),
        ([32], 0),
        ([12, 12], 0),
        ([22, 4], 2),  # Gemma 3 1B: groups of 4
        ([52, 10], 8),  # Gemma 3 27B: groups of 10
        ([12, 13], 1),  # close: one group each, of 13
        ([20, 30], 10),  # 1.5 times: groups of 20
    ],
)
def test_padding_layers_of_vllm(kinds: list[int], padding: int) -> None:
    assert padding_layers(kinds) == padding


def test_kinds() -> None:
    assert sorted(price().kinds()) == [3, 3]
    assert list(price(layer_types=["full_attention"] * 6).kinds()) == [6]
