"""Bytes by the formula: literal values, and what real caches hold."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvquant import QuantizedCache
from kvquant.cache.layer import QuantizedLayer
from kvquant.cache.sizes import live_nbytes
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.presets import preset, preset_names


def geometry(*layers: LayerGeometry) -> CacheGeometry:
    return CacheGeometry("test", layers, None)


def full(kv_heads: int = 1, dim: int = 64) -> LayerGeometry:
    return LayerGeometry(LayerKind.FULL, kv_heads, dim, dim)


def sliding(window: int) -> LayerGeometry:
    return LayerGeometry(LayerKind.SLIDING, 1, 64, 64, window)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", 100 * 2 * 64 * 4),
        ("bf16", 100 * 2 * 64 * 2),
        ("fp8", 100 * 2 * (64 + 2)),
        ("int8", 100 * 2 * (64 + 2)),
        # Four sinks in float32; a scale and a middle of two bytes each beside the codes.
        ("int4", 2 * (4 * 64 * 4 + 96 * (32 + 4))),
        ("int3", 2 * (4 * 64 * 4 + 96 * (24 + 4))),
        # All within the residual window of 128.
        ("int4-kivi", 100 * 2 * 64 * 4),
    ],
)
def test_100_tokens_of_one_head_of_64(name: str, expected: int) -> None:
    assert live_nbytes(geometry(full()), preset(name), 100, 4) == expected


def test_groups_of_keys_and_single_values() -> None:
    # Of 300 tokens 172 are older than the newest 128: two groups of 64 keys, and 172 values.
    keys = 2 * (64 * 32 + 2 * 64 * 2) + (300 - 128) * 64 * 2
    values = 172 * (32 + 4) + 128 * 64 * 2
    assert live_nbytes(geometry(full()), preset("int4-kivi"), 300, 2) == keys + values


def test_the_drawing_is_true() -> None:
    scheme = preset("int4-kivi", group_size=4, sink_tokens=4, residual_length=5)
    keys = 4 * 128 + 2 * (4 * 32 + 2 * 64 * 2) + 8 * 128
    values = 4 * 128 + 11 * 36 + 5 * 128
    assert live_nbytes(geometry(full()), scheme, 20, 2) == keys + values


@pytest.mark.parametrize(
    ("tokens", "exact", "codes"),
    [
        (0, 0, 0),
        (3, 3, 0),
        (4, 4, 0),
        (15, 4, 11),
        (16, 3, 12),  # the 15 tokens before the next one, of which 3 are sinks
        (18, 1, 14),
        (19, 0, 15),
        (1000, 0, 15),
    ],
)
def test_a_window_of_16_with_4_sinks(tokens: int, exact: int, codes: int) -> None:
    expected = 2 * (exact * 128 + codes * 36)
    assert live_nbytes(geometry(sliding(16)), preset("int4"), tokens, 2) == expected


def test_a_window_within_the_residual_is_exact() -> None:
    small, large = preset("int4-kivi"), preset("int4-kivi", residual_length=99)
    assert live_nbytes(geometry(sliding(129)), small, 1000, 2) == 2 * 128 * 128
    assert live_nbytes(geometry(sliding(100)), large, 1000, 2) == 2 * 99 * 128


def test_layers_that_keep_nothing_cost_nothing_and_the_others_add_up() -> None:
    linear, shared = LayerGeometry(LayerKind.LINEAR), LayerGeometry(LayerKind.SHARED, shared_from=0)
    alone = live_nbytes(geometry(full(3)), preset("int8"), 10, 2)
    assert alone == 3 * 10 * 2 * 66
    assert live_nbytes(geometry(full(3), linear, shared), preset("int8"), 10, 2) == alone
    assert live_nbytes(geometry(full(3), full(3)), preset("int8"), 10, 2) == 2 * alone
    positions = live_nbytes(geometry(full(3)), preset("int8"), 10, 2, keeps_positions=True)
    assert positions == alone + 40


def test_the_rotary_part_of_a_latent_is_exact_by_default() -> None:
    latent = geometry(LayerGeometry(LayerKind.LATENT, 1, 512, 64))
    assert live_nbytes(latent, preset("int8"), 10, 2) == 10 * (512 + 2 + 64 * 2)
    both = preset("int8", rotary_format="int8")
    assert live_nbytes(latent, both, 10, 2) == 10 * (512 + 2 + 64 + 2)


@pytest.mark.parametrize(
    ("dim", "int4", "int3"),
    [(80, 40, 30), (96, 48, 36), (112, 56, 42), (5, 3, 3), (1, 1, 3), (9, 5, 6)],
)
def test_odd_widths_are_padded_to_whole_bytes(dim: int, int4: int, int3: int) -> None:
    for name, row in (("int4", int4), ("int3", int3)):
        scheme = preset(name, sink_tokens=0)
        assert live_nbytes(geometry(full(1, dim)), scheme, 7, 2) == 7 * 2 * (row + 4)


def test_skipped_layers_and_layers_of_their_own() -> None:
    from dataclasses import replace

    two = geometry(full(), full())
    skipped = replace(preset("int8"), skip_layers=frozenset({1}))
    assert live_nbytes(two, skipped, 10, 2) == 10 * 2 * (66 + 128)
    own = replace(preset("int8"), layers=((0, preset("fp16")),))
    assert live_nbytes(two, own, 10, 4) == 10 * 2 * (128 + 66)


def test_calibrated_scales_belong_to_the_model() -> None:
    from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

    how = TensorScheme(tensor_format("int8"), Granularity.PER_CHANNEL, symmetric=False)
    assert live_nbytes(geometry(full()), QuantScheme(how, how), 10, 2) == 10 * 2 * 64


@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(1, 8),
)
def test_a_window_stops_growing_and_everything_else_grows_evenly(
    tokens: int, window: int, sinks: int, residual: int, group: int
) -> None:
    scheme = preset("int4-kivi", sink_tokens=sinks, residual_length=residual, group_size=group)
    start = tokens + window + sinks + residual + group
    now, later = (
        [live_nbytes(geometry(layer), scheme, n, 2) for layer in (sliding(window), full())]
        for n in (start, start + group)
    )
    assert later[0] == now[0]
    assert later[1] - now[1] == (32 * group + 256) + (32 + 4) * group


MODELS = ("llama", "llama_wide", "gemma3n_text", "llama4_text", "gpt_oss", "deepseek", "falcon_h1")


@pytest.mark.parametrize("name", MODELS)
def test_real_caches_hold_what_the_formula_says(tiny: Callable[..., Any], name: str) -> None:
    model = tiny(name)
    decoder = model.get_decoder()
    settings: list[dict[str, Any]] = [{}, {"residual_length": 5, "sink_tokens": 3}]
    groups = {"group_size": 4, "residual_length": 5, "sink_tokens": 2}
    for scheme in preset_names():
        for own in [*settings, groups] if scheme == "int4-kivi" else settings:
            cache = QuantizedCache.from_model(model, scheme, **own)
            seen = 0
            for count in (1, 13, 26):
                seen += count
                ids = torch.randint(3, 128, (1, count))
                with torch.no_grad():
                    decoder(input_ids=ids, **{cache_argument(decoder): cache})
                stored = sum(
                    QuantizedLayer.live_nbytes(layer)
                    for layer in cache.layers
                    if isinstance(layer, QuantizedLayer)
                )
                expected = live_nbytes(cache.geometry, cache.scheme, seen, 4)
                assert stored == expected, (scheme, own, seen)


def test_planning_needs_no_torch() -> None:
    code = "import sys, kvquant.cache.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
