"""The sketch against numpy's histogram, its quantiles against sorting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.sketch import BINS, QuantileSketch

HALF = BINS // 2


def sketch_of(values: torch.Tensor) -> QuantileSketch:
    """`values` ``[tokens, rows]`` counted at once."""
    sketch = QuantileSketch.empty(values.shape[1])
    sketch.update(values.float(), values.float().abs().amax(0))
    return sketch


def histogram(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Counts of one row by numpy: magnitudes in half-open bins, mirrored for negative values."""
    positive = edges[HALF + 1 :]
    zero = int((np.abs(values) < positive[0]).sum())
    above, _ = np.histogram(values[values >= positive[0]], positive)
    below, _ = np.histogram(-values[values <= -positive[0]], positive)
    return np.concatenate([below[::-1], [zero], above])


def same(one: QuantileSketch, other: QuantileSketch) -> bool:
    return torch.equal(one.exponent, other.exponent) and torch.equal(one.counts, other.counts)


def samples(kind: str, tokens: int = 4000) -> torch.Tensor:
    """``[tokens, 3]``, another magnitude in each row."""
    torch.manual_seed(0)
    scale = torch.tensor([1e-3, 1.0, 40.0])
    return (
        scale
        * {
            "normal": lambda: torch.randn(tokens, 3),
            "uniform": lambda: torch.rand(tokens, 3) - 0.3,
            "heavy": lambda: torch.distributions.StudentT(2.0).sample((tokens, 3)),
            "positive": lambda: torch.rand(tokens, 3) + 0.5,
            "sparse": lambda: torch.randn(tokens, 3) * (torch.rand(tokens, 3) > 0.7),
        }[kind]()
    )


KINDS = ["normal", "uniform", "heavy", "positive", "sparse"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_equal_numpys_histogram(kind: str, dtype: torch.dtype) -> None:
    values = samples(kind).to(dtype)
    sketch = sketch_of(values)
    edges = sketch.edges().numpy()
    for row in range(3):
        expected = histogram(values[:, row].double().numpy(), edges[row])
        assert sketch.counts[row].tolist() == expected.tolist()
        assert expected.sum() == len(values)


def test_bins_of_literal_values() -> None:
    values = [1.0, -1.0, 1.0624, 1.0625, 1.99, 2**-9, 2**-9 - 1e-9, 0.0, -0.0, -(2**-9)]
    sketch = sketch_of(torch.tensor(values)[:, None])
    assert sketch.exponent.tolist() == [1]
    counted = {i - HALF: n for i, n in enumerate(sketch.counts[0].tolist()) if n}
    # 2^-9 opens the first bin beside zero, 1.0 the first of the top octave, 1.99 is in the last.
    assert counted == {-145: 1, -1: 1, 0: 3, 1: 1, 145: 2, 146: 1, 160: 1}


def test_edges_are_those_of_a_float_with_four_mantissa_bits() -> None:
    edges = sketch_of(torch.tensor([[1.5]])).edges()[0]
    assert len(edges) == BINS + 1
    assert edges[-17:].tolist() == [1 + i / 16 for i in range(17)]
    assert edges[HALF + 1] == 2**-9
    assert torch.equal(edges, -edges.flip(0))


@pytest.mark.parametrize("magnitude", [1e-37, 1e-30, 1e-10, 1.0, 1e10, 1e30, 3e38])
def test_any_magnitude_is_resolved_alike(magnitude: float) -> None:
    values = torch.tensor([-1.0, -0.5, 0.0, 0.25, 0.999])[:, None] * magnitude
    sketch = sketch_of(values)
    edges = sketch.edges()[0].numpy()
    assert sketch.counts[0].tolist() == histogram(values[:, 0].double().numpy(), edges).tolist()
    for q, expected in zip((0.1, 0.3, 0.5, 0.7, 0.9), values[:, 0].tolist(), strict=True):
        assert sketch.quantile(q).item() == pytest.approx(expected, rel=1 / 16, abs=magnitude / 256)


@pytest.mark.parametrize("values", [[0.0, 0.0], [-0.0, 0.0], [1e-40, -1e-44]])
def test_zeros_and_denormals_lie_in_the_zero_bin(values: list[float]) -> None:
    sketch = sketch_of(torch.tensor(values)[:, None])
    assert sketch.counts[0, HALF] == 2
    raised = sketch.merge(sketch_of(torch.tensor([[2.0**-120]])))
    assert raised.counts[0, HALF] == 2
    assert raised.counts.sum() == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_quantiles_are_within_a_bin_of_the_sorted_values(kind: str, q: float) -> None:
    values = samples(kind)
    exact = np.quantile(values.double().numpy(), q, axis=0, method="inverted_cdf")
    edges, found = sketch_of(values).edges().numpy(), sketch_of(values).quantile(q).numpy()
    for row in range(3):
        index = np.searchsorted(edges[row], exact[row], side="right") - 1
        assert edges[row][index] <= found[row] <= edges[row][index + 1]


@pytest.mark.parametrize("q", [0.05, 0.3, 0.5, 0.8, 0.95])
def test_quantiles_of_many_values_are_within_half_a_bin(q: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(200_000, 1) * 3 + 1
    exact = float(np.quantile(values.numpy(), q))
    assert sketch_of(values).quantile(q).item() == pytest.approx(exact, rel=1 / 32, abs=0.01)


def test_known_extremes_bound_the_quantiles() -> None:
    values = torch.full((10, 1), 1.03)
    sketch = sketch_of(values)
    assert sketch.quantile(0.5).item() == pytest.approx(1.03125)
    extreme = values[0]
    for q in (0.0, 0.5, 1.0):
        assert sketch.quantile(q, extreme, extreme).tolist() == [float(extreme)]
    # What lies in the zero bin has no sign there; a row of magnitudes says that it has.
    tiny = sketch_of(torch.cat([torch.full((9, 1), 2.0**-12), torch.ones(1, 1)]))
    assert tiny.quantile(0.1).item() < 0
    assert 0 <= tiny.quantile(0.1, minimum=torch.zeros(1)).item() < 2**-9


def test_quantile_of_nothing_is_zero() -> None:
    assert QuantileSketch.empty(2).quantile(0.5).tolist() == [0.0, 0.0]


magnitudes = st.one_of(
    st.just(0.0),
    st.floats(2.0**-100, 2.0**100, width=32),
    st.floats(0.5, 2.0, width=32),
    st.sampled_from([2.0**k for k in range(-20, 20)]),
)
numbers = st.builds(lambda m, sign: sign * m, magnitudes, st.sampled_from([1, -1]))
rows_of_numbers = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(rows_of_numbers, st.data())
def test_merging_any_split_in_any_order_equals_counting_at_once(
    rows: list[tuple[float, float]], data: st.DataObject
) -> None:
    values = torch.tensor(rows, dtype=torch.float32)
    whole = sketch_of(values)
    one, two = sorted(data.draw(st.lists(st.integers(0, len(rows)), min_size=2, max_size=2)))
    a, b, c = (
        sketch_of(part) if len(part) else QuantileSketch.empty(2)
        for part in (values[:one], values[one:two], values[two:])
    )
    assert same(a.merge(b).merge(c), whole)
    assert same(a.merge(b.merge(c)), whole)
    assert same(c.merge(a).merge(b), whole)
    streamed = QuantileSketch.empty(2)
    for part in (values[two:], values[:one], values[one:two]):
        if len(part):
            streamed.update(part, part.abs().amax(0))
    assert same(streamed, whole)


def test_merging_leaves_its_inputs_alone() -> None:
    small, large = sketch_of(torch.ones(3, 1)), sketch_of(torch.full((2, 1), 1e4))
    before = [small.counts.clone(), large.counts.clone()]
    small.merge(large)
    large.merge(small)
    assert torch.equal(small.counts, before[0])
    assert torch.equal(large.counts, before[1])
    assert (small.exponent.item(), large.exponent.item()) == (1, 14)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_pooled_rows_equal_one_row_of_their_values(groups: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(500, 6) * torch.tensor([1e-30, 1.0, 3.0, 0.0, 1e5, 1e30])
    pooled = sketch_of(values).pool(groups)
    # [tokens, rows] -> the values of a group in one column
    joined = values.view(500, groups, -1).transpose(1, 2).reshape(-1, groups)
    assert same(pooled, QuantileSketch(sketch_of(joined).exponent, sketch_of(joined).counts.long()))


def test_magnitudes_equal_the_sketch_of_absolute_values() -> None:
    values = samples("normal")
    assert same(sketch_of(values).magnitudes(), sketch_of(values.abs()))


def test_transposed_input_counts_alike() -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 50)
    assert same(sketch_of(values.T), sketch_of(values.T.contiguous()))
