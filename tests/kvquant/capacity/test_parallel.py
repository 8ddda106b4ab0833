from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvquant.capacity.companions import Companion
from kvquant.capacity.parallel import Parallel
from kvquant.capacity.spec import describe
from kvquant.errors import InputError
from kvquant.geometry import LayerGeometry, LayerKind


@pytest.mark.parametrize(("tensor", "heads"), [(1, 8), (2, 4), (3, 3), (8, 1), (16, 1)])
def test_heads_of_a_rank(tensor: int, heads: int) -> None:
    layer = LayerGeometry(LayerKind.SLIDING, 8, 64, 32, window=5)
    assert Parallel(tensor).layer(layer) == LayerGeometry(LayerKind.SLIDING, heads, 64, 32, 5)


def test_latents_and_layers_without_tokens_are_not_divided() -> None:
    latent = LayerGeometry(LayerKind.LATENT, 1, 512, 64)
    assert Parallel(8).layer(latent) == latent
    linear = LayerGeometry(LayerKind.LINEAR)
    assert Parallel(8).layer(linear) == linear


def test_states_are_divided_and_indexer_keys_are_not() -> None:
    assert Parallel(4).companion(Companion(10, 6)) == Companion(3, 6)


def test_stages() -> None:
    assert Parallel(pipeline=3).stages(32) == [range(11), range(11, 22), range(22, 32)]
    assert Parallel().stages(5) == [range(5)]


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_are_even_and_complete(layers: int, stages: int) -> None:
    found = Parallel(pipeline=min(stages, layers)).stages(layers)
    assert [index for stage in found for index in stage] == list(range(layers))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_number_of_gpus() -> None:
    assert Parallel(2, 3, 4).gpus == 24


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(3), "--tp 3 does not divide the 32 query heads of llama-3-8b"),
        (Parallel(64), "--tp 64 does not divide the 32 query heads"),
        (Parallel(pipeline=33), "--pp 33 is more than the 32 layers of llama-3-8b"),
    ],
)
def test_what_cannot_be_divided(parallel: Parallel, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parallel.check(describe("llama-3-8b"))


def test_what_can_be_divided() -> None:
    Parallel(32, 32, 5).check(describe("llama-3-8b"))
