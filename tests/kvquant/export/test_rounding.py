from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.errors import ExportError
from kvquant.export.rounding import tensor_scales, times, up_to_bfloat16
from kvquant.geometry import LayerGeometry, LayerKind

LARGEST = 3.3895313892515355e38
LATENT = LayerGeometry(LayerKind.LATENT, 1, 16, 4)


@settings(deadline=None)
@given(st.floats(min_value=2.0**-149, max_value=LARGEST, width=32))
def test_the_next_bfloat16_and_no_other(number: float) -> None:
    scale = torch.tensor([number])
    rounded = up_to_bfloat16(scale)
    assert rounded.dtype == torch.float32
    assert torch.isfinite(rounded).all()
    assert rounded >= scale
    assert rounded.bfloat16().float() == rounded
    below = (rounded.view(torch.int32) - 0x10000).view(torch.float32)
    assert below.bfloat16().float() == below
    assert below < scale


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (1.0, 1.0),
        (1.0000001, 1.0078125),
        (0.01, 0.010009765625),  # 2^-7 x 1.28125
        (0.0625, 0.0625),
        (1e-7, 1.0011717677116394e-07),
        (2.0**-126, 2.0**-126),
        (300.0, 300.0),
        (300.1, 302.0),
    ],
)
def test_rounded_up(scale: float, expected: float) -> None:
    assert up_to_bfloat16(torch.tensor([[scale]])).tolist() == [[expected]]


def test_per_tensor_scales_pass_as_they_are(make_job: Callable[..., Any]) -> None:
    scales, remarks = tensor_scales(make_job({0: (0.5, 0.25), 1: (1e-7, 1.0)}), False)
    assert {i: (k.tolist(), v.tolist()) for i, (k, v) in scales.items()} == {
        0: ([0.5], [0.25]),
        1: ([1.0011717677116394e-07], [1.0]),
    }
    assert len(remarks) == 1
    assert "rounded up to the next bfloat16" in remarks[0]


def test_finer_scales_become_their_maximum_and_the_largest_step_is_told(
    make_job: Callable[..., Any],
) -> None:
    job = make_job(
        {
            0: ([[0.5] * 15 + [0.25], [0.5] * 16], [1.0, 0.5]),
            1: ([[0.5] * 16, [2.0] * 15 + [0.125]], [0.25, 0.25]),
        }
    )
    scales, remarks = tensor_scales(job, False)
    assert {i: (k.tolist(), v.tolist()) for i, (k, v) in scales.items()} == {
        0: ([0.5], [1.0]),
        1: ([2.0], [0.25]),
    }
    assert remarks[0] == (
        "keys per-channel and values per-head were reduced to per-tensor by the maximum; most in "
        "the keys of layer 1, where a scale of 0.125 would have done and 2 is used (16 times)"
    )


def test_per_head(make_job: Callable[..., Any]) -> None:
    job = make_job({0: ([[0.5] * 16, [0.25] * 15 + [1.0]], [0.125, 0.0625])}, per_head=True)
    scales, remarks = tensor_scales(job, True)
    assert [side.tolist() for side in scales[0]] == [[0.5, 1.0], [0.125, 0.0625]]
    assert "keys per-channel and values per-head were reduced to per-head" in remarks[0]
    assert (
        "keys of layer 0, where a scale of 0.25 would have done and 1 is used (4 times)"
        in (remarks[0])
    )


def test_scales_too_coarse_for_heads_are_refused(make_job: Callable[..., Any]) -> None:
    job = make_job({0: ([0.5, 0.5], 0.25)}, per_head=True)
    with pytest.raises(
        ExportError,
        match=r"values are calibrated per-tensor.*kvquant solve STATS --format fp8 --granularity "
        r"per-head --output NAME",
    ):
        tensor_scales(job, True)


def test_an_engine_that_wants_no_heads_says_so(make_job: Callable[..., Any]) -> None:
    _, remarks = tensor_scales(make_job({0: ([0.5, 0.5], [1.0, 1.0])}, per_head=True), False, "X")
    assert remarks[0] == "X takes no scales per head from such a checkpoint: they are per layer"


def test_a_latent_and_its_rotary_part_share_the_larger_scale(make_job: Callable[..., Any]) -> None:
    job = make_job({0: (0.5, 0.25), 1: (0.125, 1.0)}, layers=[LATENT, LATENT])
    scales, remarks = tensor_scales(job, False)
    assert {i: (k.tolist(), v.tolist()) for i, (k, v) in scales.items()} == {
        0: ([0.5], [0.5]),
        1: ([1.0], [1.0]),
    }
    assert remarks[0].endswith("in layer 1: latent 0.125, rotary part 1 (8 times)")


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        ({"key_format": "int8"}, "for keys as int8 per-tensor, but X reads .* of fp8_e4m3 only"),
        ({"value_format": "int4"}, r"for values as int4 per-tensor.* X has no int4 cache\. For"),
        ({"value_format": "fp8_e5m2"}, "fp8_e5m2"),
        (
            {"key_format": "int8", "value_format": "int8", "asymmetric": True},
            "keys as int8 per-tensor asymmetric",
        ),
    ],
)
def test_other_formats_are_refused(
    make_job: Callable[..., Any], formats: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ExportError, match=expected) as refused:
        tensor_scales(make_job({0: (0.5, 0.25)}, **formats), False, "X")
    message = str(refused.value)
    assert message.endswith("For FP8 scales: kvquant solve STATS --format fp8 --output NAME")
    assert "\n" not in message


def test_tokens_that_the_scheme_keeps_exactly(make_job: Callable[..., Any]) -> None:
    _, remarks = tensor_scales(make_job({0: (0.5, 0.25)}, residual_length=128), False)
    assert "first 0 and the newest 128 tokens exactly; serving engines quantize all" in remarks[0]


def test_times() -> None:
    assert [times(ratio) for ratio in (1.0, 1.25, 40.04, 12345.6)] == [
        "1 times",
        "1.25 times",
        "40 times",
        "12,346 times",
    ]
