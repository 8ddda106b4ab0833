from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch._subclasses.fake_tensor import FakeTensorMode

from kvquant.quantize.rotation import rotation

CORE_ORDER = {
    1: 1,
    2: 1,
    5: 5,
    12: 12,
    20: 20,
    24: 12,
    28: 28,
    64: 1,
    71: 71,
    72: 72,
    80: 20,
    96: 12,
    112: 28,
    128: 1,
    192: 12,
    256: 1,
}
"""By dim; the rest is butterflies."""

HADAMARD = [dim for dim in CORE_ORDER if dim not in (5, 71, 72)]
DIMS = pytest.mark.parametrize("dim", CORE_ORDER)


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# Which matrix it is


@DIMS
def test_as_much_as_possible_is_butterflies(dim: int) -> None:
    made = rotation(dim)
    order = CORE_ORDER[dim]
    assert made.dim == dim
    assert made.butterflies == dim // order
    assert (None if order == 1 else (order, order)) == (
        None if made.core is None else tuple(made.core.shape)
    )


@DIMS
def test_it_is_orthogonal(dim: int) -> None:
    matrix = rotation(dim).matrix().double()
    assert matrix.shape == (dim, dim)
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", HADAMARD)
def test_a_hadamard_matrix_has_entries_of_one_size(dim: int) -> None:
    matrix = rotation(dim).matrix()
    assert matrix.abs().unique().tolist() == [float(np.float32(1 / math.sqrt(dim)))]


@pytest.mark.parametrize("order", [12, 20, 28])
def test_the_cores_are_hadamard_matrices(order: int) -> None:
    core = rotation(order).core
    assert core is not None
    assert core.dtype == torch.float32
    assert core.abs().unique().tolist() == [1.0]
    assert torch.equal(core @ core.T, order * torch.eye(order))


@pytest.mark.parametrize("dim", HADAMARD)
def test_it_is_a_kronecker_product(dim: int) -> None:
    """Blocks outside, core inside: what a kernel that does the same has to know."""
    made = rotation(dim)
    core = np.ones((1, 1)) if made.core is None else made.core.numpy()
    expected = np.kron(hadamard(made.butterflies), core).astype(np.float32)
    assert np.array_equal(made.matrix().numpy(), expected * np.float32(made.factor))


def test_literal_butterflies() -> None:
    states = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rotation(4).apply(states).tolist() == [5.0, -1.0, -2.0, 0.0]
    assert rotation(1).apply(states[:, None]).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_seeded_matrix_stays_the_same() -> None:
    """Files name it by its width alone, so other numbers would make them unreadable."""
    made = rotation(5)
    first_row = [0.8326923, 0.4578664, 0.0954136, 0.2825872, 0.0895693]
    assert made.factor == 1.0
    assert made.matrix()[0].tolist() == pytest.approx(first_row, abs=1e-6)
    assert rotation(71).matrix()[-1, -1].item() == pytest.approx(-0.121798, abs=1e-6)


@pytest.mark.parametrize("dim", [64, 71, 80])
def test_it_is_float32_on_the_cpu_whatever_torch_makes_by_default(dim: int) -> None:
    expected, states = rotation(dim).matrix(), torch.ones(2, dim)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found, turned = rotation(dim).matrix(), rotation(dim).apply(states)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
    assert torch.equal(turned, rotation(dim).apply(states))


def test_it_is_made_once() -> None:
    assert rotation(72) is rotation(72)


# What it does


@DIMS
def test_applying_is_a_product_with_the_matrix(dim: int) -> None:
    states = torch.nn.functional.normalize(gaussian(50, dim), dim=-1)
    made = rotation(dim)
    product = states.double() @ made.matrix().double().T
    assert torch.allclose(made.apply(states).double(), product, rtol=0, atol=1e-6)


@DIMS
def test_inverting_is_the_way_back(dim: int) -> None:
    states = gaussian(3, 5, 7, dim)
    made = rotation(dim)
    assert torch.allclose(made.invert(made.apply(states)), states, rtol=0, atol=5e-6)
    product = states.double() @ made.matrix().double()
    assert torch.allclose(made.invert(states).double(), product, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", HADAMARD)
def test_one_large_channel_spreads_over_all(dim: int) -> None:
    spread = rotation(dim).apply(100 * torch.eye(dim))
    assert spread.abs().max().item() == pytest.approx(100 / math.sqrt(dim))


@pytest.mark.parametrize("dim", [64, 128, 256, 80, 96, 72])
@pytest.mark.parametrize("rows", [1, 3, 7, 513])
def test_a_row_does_not_depend_on_the_others(dim: int, rows: int) -> None:
    made = rotation(dim)
    states = gaussian(513, dim)
    whole = made.apply(states)
    assert torch.equal(made.apply(states[:rows]), whole[:rows])
    assert torch.equal(made.apply(states[-rows:]), whole[-rows:])


@pytest.mark.parametrize("dim", [64, 128, 256, 80, 72])
def test_how_rows_lie_in_memory_does_not_matter(dim: int) -> None:
    made = rotation(dim)
    states = gaussian(2, 7, 3, dim)
    wide = gaussian(2, 7, 3, 2 * dim)
    channels_first = states.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(made.apply(states.transpose(1, 2)), made.apply(states).transpose(1, 2))
    assert torch.equal(made.apply(wide[..., 1::2]), made.apply(wide[..., 1::2].contiguous()))
    assert torch.equal(made.apply(channels_first), made.apply(states))


@DIMS
def test_states_are_left_as_they_are(dim: int) -> None:
    states = gaussian(3, dim)
    before = states.clone()
    rotation(dim).invert(rotation(dim).apply(states))
    assert torch.equal(states, before)


@pytest.mark.parametrize("dim", [64, 80, 72])
def test_fake_tensors_leave_no_trace(dim: int) -> None:
    """A rotation first met under FakeTensorMode must work on real tensors afterwards."""
    rotation.cache_clear()
    with FakeTensorMode():
        assert rotation(dim).apply(torch.zeros(2, dim)).shape == (2, dim)
        assert rotation(dim).invert(torch.zeros(2, dim)).shape == (2, dim)
    back = rotation(dim).invert(rotation(dim).apply(torch.ones(2, dim)))
    assert torch.allclose(back, torch.ones(2, dim), atol=1e-5)
    with FakeTensorMode():
        assert rotation(dim).apply(torch.zeros(2, dim)).shape == (2, dim)
