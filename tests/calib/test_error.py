"""The expected error against quantizing the very samples that the sketch counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from calib.error import QuantError, expected_error
from calib.sketch import QuantileSketch
from kvquant.quantize.reference import dequantize, quantize
from kvquant.scales import TensorScales
from kvquant.scheme import Granularity, TensorScheme, tensor_format

TOKENS = 20_000


def scheme(name: str, symmetric: bool = True) -> TensorScheme:
    return TensorScheme(tensor_format(name), Granularity.PER_HEAD, symmetric)


SCHEMES = [
    scheme("int8"),
    scheme("int4"),
    scheme("int8", symmetric=False),
    scheme("int4", symmetric=False),
    scheme("fp8_e4m3"),
    scheme("fp8_e5m2"),
]


def with_outliers() -> torch.Tensor:
    values = torch.randn(TOKENS)
    values[::100] *= 30
    return values


DISTRIBUTIONS: dict[str, Callable[[], torch.Tensor]] = {
    "normal": lambda: torch.randn(TOKENS),
    "shifted": lambda: torch.randn(TOKENS) + 6,
    "uniform": lambda: torch.rand(TOKENS) * 3 - 1,
    "heavy": lambda: torch.distributions.StudentT(3.0).sample((TOKENS,)),
    "outliers": with_outliers,
    "small": lambda: torch.randn(TOKENS) * 1e-2,
}


def sampled(name: str) -> torch.Tensor:
    """``[TOKENS, 1]``."""
    torch.manual_seed(0)
    return DISTRIBUTIONS[name]()[:, None]


def own_scales(values: torch.Tensor, how: TensorScheme, share: float = 1.0) -> TensorScales:
    """Scales of `share` of each row's range, shrunk around its middle (0 for symmetric ones)."""
    low, high = values.amin(0)[:, None].double(), values.amax(0)[:, None].double()
    if how.symmetric:
        high = torch.maximum(low.abs(), high.abs())
        low = -high
    middle, half = (low + high) / 2, (high - low) / 2 * share
    return TensorScales.from_range(middle - half, middle + half, how)


def estimated(values: torch.Tensor, scales: TensorScales, how: TensorScheme) -> QuantError:
    sketch = QuantileSketch.empty(values.shape[1])
    sketch.update(values, values.abs().amax(0))
    return expected_error(sketch, values.amin(0), values.amax(0), scales, how)


def squared_by_quantizing(
    values: torch.Tensor, scales: TensorScales, how: TensorScheme
) -> torch.Tensor:
    """Sum of squared errors of each row of `values` ``[tokens, rows]``."""
    states = values.T[None, :, :, None]
    error = dequantize(quantize(states, scales, how), scales).double() - states.double()
    return error.square().sum((0, 2, 3))


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2])
@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_squared_error_equals_that_of_real_samples(
    name: str, how: TensorScheme, share: float
) -> None:
    values = sampled(name)
    scales = own_scales(values, how, share)
    expected = squared_by_quantizing(values, scales, how).item()
    # A few clipped values or outliers, spread over wide bins, carry most of the error then.
    tolerance = 0.15 if share < 1 or name == "outliers" else 0.05
    assert estimated(values, scales, how).squared.item() == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_scales_that_cover_everything_clip_nothing(name: str, how: TensorScheme) -> None:
    values = sampled(name)
    for share in (1.0, 1.5):
        assert estimated(values, own_scales(values, how, share), how).clipped.item() == 0


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_clipped_values_are_counted_to_within_a_bin(name: str, how: TensorScheme) -> None:
    values = sampled(name)
    scales = own_scales(values, how, 0.4)
    low, high = scales.range(how)

    def beyond(slack: float) -> int:
        """Samples outside the range widened by `slack` of either end."""
        wide_low, wide_high = low - low.abs() * slack, high + high.abs() * slack
        return int(((values < wide_low) | (values > wide_high)).sum())

    half = (scales.scale / 2 / torch.maximum(low.abs(), high.abs())).item()
    found = estimated(values, scales, how).clipped.item()
    assert beyond(half + 1 / 16) <= found <= beyond(half - 1 / 16)
    assert found == pytest.approx(beyond(half), rel=0.15, abs=2)


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.7, 0.1234567, 400.1, -1e-3])
def test_constant_channels_have_the_error_of_their_one_value(
    constant: float, how: TensorScheme
) -> None:
    values = torch.full((100, 1), constant)
    scales = own_scales(values, how)
    found = estimated(values, scales, how)
    assert found.clipped.item() == 0
    expected = squared_by_quantizing(values, scales, how).item()
    assert found.squared.item() == pytest.approx(expected, rel=1e-6, abs=1e-20)


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_constant_channel_beyond_the_range_is_clipped_with_its_distance(how: TensorScheme) -> None:
    scales = own_scales(torch.tensor([[-1.0], [1.0]]), how)
    found = estimated(torch.full((100, 1), 3.0), scales, how)
    assert found.clipped.item() == 100
    # The zero point of -1 ... 1 is a half, so that the asymmetric range is off by half a step.
    top = scales.range(how)[1].item()
    assert found.squared.item() == pytest.approx(100 * (3 - top) ** 2, rel=1e-6)


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_rows_do_not_affect_one_another(how: TensorScheme) -> None:
    columns = [sampled(name) for name in DISTRIBUTIONS]
    together = torch.cat(columns, 1)
    all_rows = estimated(together, own_scales(together, how, 0.5), how)
    for row, column in enumerate(columns):
        alone = estimated(column, own_scales(column, how, 0.5), how)
        assert all_rows.squared[row].item() == pytest.approx(alone.squared.item(), rel=1e-12)
        assert all_rows.clipped[row].item() == pytest.approx(alone.clipped.item(), rel=1e-12)


@pytest.mark.parametrize("magnitude", [1e-3, 1e10, 1e30])
@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_error_scales_with_the_values(how: TensorScheme, magnitude: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(TOKENS, 1) * magnitude
    scales = own_scales(values, how)
    found = estimated(values, scales, how)
    expected = squared_by_quantizing(values, scales, how).item()
    assert found.squared.item() == pytest.approx(expected, rel=0.05)
    assert found.clipped.item() == 0


def test_one_huge_outlier_leaves_the_error_of_a_pooled_layer_right() -> None:
    """Per-tensor rows are pooled channels of very different size; their bins still tell enough."""
    torch.manual_seed(0)
    values = torch.cat([torch.randn(TOKENS, 1) * 0.01, torch.randn(TOKENS, 1) + 8], 1)
    sketch = QuantileSketch.empty(2)
    sketch.update(values, values.abs().amax(0))
    for how in SCHEMES:
        flat = values.reshape(-1, 1)
        scales = own_scales(flat, how)
        found = expected_error(sketch.pool(1), flat.amin(0), flat.amax(0), scales, how)
        expected = squared_by_quantizing(flat, scales, how).item()
        assert found.squared.item() == pytest.approx(expected, rel=0.1)
