"""Quantizers of engines against plain loops, and errors against scores that are really computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.errors import ExportError
from kvquant.export.fold_error import errors, quantizer_names, read_back

QUANTIZERS = ["fp8", "int8", "int4", "int4-rotated"]
ROTATED_ONE = ("int4-rotated", 1)


def random_states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_names() -> None:
    assert quantizer_names() == QUANTIZERS


def test_an_unknown_quantizer_is_named() -> None:
    with pytest.raises(ExportError, match=r"'int3': possible are fp8, int8, int4, int4-rotated"):
        read_back(torch.zeros(1, 1, 4), "int3")


def test_fp8_has_one_scale_for_a_layer() -> None:
    """An amax of 448 gives the scale 1; numbers below 2^-9 are lost; the other head has it too."""
    states = torch.tensor([[[448.0, 1.06, 0.0009]], [[17.0, -3.0, 0.002]]])
    expected = torch.tensor([[[448.0, 1.0, 0.0]], [[16.0, -3.0, 2.0**-9]]])
    assert torch.equal(read_back(states, "fp8"), expected)


def test_fp8_with_a_scale_from_elsewhere_saturates() -> None:
    states = torch.tensor([[[500.0, 2.0]]])
    assert read_back(states, "fp8", torch.tensor(448.0)).tolist() == [[[448.0, 2.0]]]


def test_fp8_scales_are_rounded_up_to_bfloat16() -> None:
    """448.5 / 448 = 1.0011 becomes 1 + 2^-7, so that the largest number does not saturate."""
    states = torch.tensor([[[448.5, 1.0]]])
    assert read_back(states, "fp8").tolist() == [[[448 * (1 + 2**-7), 1 + 2**-7]]]


def test_int8_is_symmetric() -> None:
    states = torch.tensor([[[127.0, -126.4, 0.6, 0.4], [1.27, 0.0, -0.014, 0.0]]])
    expected = torch.tensor([[[127.0, -126.0, 1.0, 0.0], [1.27, 0.0, -0.01, 0.0]]])
    torch.testing.assert_close(read_back(states, "int8"), expected)


def test_int4_reaches_from_the_smallest_to_the_largest() -> None:
    states = torch.tensor([[[1.0, 16.0, 4.4, 4.6], [-15.0, 15.0, 1.2, 0.9]]])
    expected = torch.tensor([[[1.0, 16.0, 4.0, 5.0], [-15.0, 15.0, 1.0, 1.0]]])
    torch.testing.assert_close(read_back(states, "int4"), expected)


SIGNS = [1, -1, 1, 1, -1, -1, -1, -1, 1, -1, -1, 1, 1, -1, 1, -1]
"""What vLLM's generator gives for 16 channels."""


def by_loops(row: list[float]) -> list[float]:
    """One token through vLLM's int4: butterflies, integer zero point, and back."""

    def hadamard(values: list[float]) -> list[float]:
        half = 1
        while half < len(values):
            for start in range(0, len(values), 2 * half):
                for at in range(start, start + half):
                    one, other = values[at], values[at + half]
                    values[at], values[at + half] = one + other, one - other
            half *= 2
        return values

    turned = hadamard([value * sign for value, sign in zip(row, SIGNS, strict=True)])
    low, high = min(turned), max(turned)
    scale = max((high - low) / 15, 1e-6)
    zero = min(max(int(-low / scale + 0.5), 0), 15) if low < 0 else 0
    codes = [min(max(int(value / scale + zero + 0.5), 0), 15) for value in turned]
    back = hadamard([(code - zero) * scale for code in codes])
    return [value * sign / len(row) for value, sign in zip(back, SIGNS, strict=True)]


def test_rotated_int4_is_that_of_vllm() -> None:
    states = random_states(3, 20, 16).double()
    states[0, 0, 3] = 100.0
    expected = torch.tensor([[by_loops(row) for row in head] for head in states.tolist()])
    torch.testing.assert_close(
        read_back(states.float(), "int4-rotated"), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("quantizer", "dim"),
    # vLLM's int4 wants zero between the ends of the range, which one channel alone cannot give.
    [(name, dim) for name in QUANTIZERS for dim in (1, 24, 80, 128) if (name, dim) != ROTATED_ONE],
)
def test_any_width_and_all_zeros(quantizer: str, dim: int) -> None:
    states = random_states(2, 5, dim)
    states[1, 3] = 0.0
    found = read_back(states, quantizer)
    assert found.shape == states.shape
    assert bool(torch.isfinite(found).all())
    assert not found[1, 3].any()
    step = {"fp8": 0.07, "int8": 0.02}.get(quantizer, 0.5)
    assert float((found - states).abs().max()) < step * float(states.abs().max())


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_an_error_is_that_of_the_scores(quantizer: str) -> None:
    """Sum over all queries and keys of (q·k' - q·k)^2, k' being read back and unfolded."""
    keys, queries = random_states(2, 30, 16, seed=1), random_states(2, 40, 16, seed=2)
    factors = torch.exp2(torch.randint(-2, 3, (2, 16)).float())
    found = errors(keys, queries.transpose(1, 2) @ queries, factors, quantizer)
    folded_queries, folded_keys = queries / factors[:, None], keys * factors[:, None]
    scores = folded_queries @ read_back(folded_keys, quantizer).transpose(1, 2)
    expected = (scores - queries @ keys.transpose(1, 2)).square().sum((1, 2))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_candidates_are_judged_one_by_one(quantizer: str) -> None:
    keys, reading = random_states(2, 30, 16), torch.eye(16).expand(2, 16, 16)
    factors = torch.exp2(torch.randint(-2, 3, (5, 2, 16)).float())
    together = errors(keys, reading, factors, quantizer)
    assert together.shape == (5, 2)
    for candidate, found in zip(factors, together, strict=True):
        torch.testing.assert_close(errors(keys, reading, candidate, quantizer), found)


@settings(deadline=None, max_examples=30)
@given(exponent=st.integers(-8, 8), quantizer=st.sampled_from(["int8", "int4", "int4-rotated"]))
def test_one_factor_for_a_whole_head_changes_nothing(exponent: int, quantizer: str) -> None:
    keys, reading = random_states(2, 30, 16), torch.eye(16).expand(2, 16, 16)
    one = torch.ones(2, 16)
    torch.testing.assert_close(
        errors(keys, reading, one * 2.0**exponent, quantizer),
        errors(keys, reading, one, quantizer),
        rtol=2e-2,  # int4 keeps its scales in fp16, which is coarser for small ones
        atol=0,
    )
