from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvquant.errors import ExportError
from kvquant.export.llama_cpp import LlamaCpp, cache_types
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.presets import preset

FULL = LayerGeometry(LayerKind.FULL, 2, 64, 64)
LATENT = LayerGeometry(LayerKind.LATENT, 1, 32, 32)


def cache_of(key_dim: int, value_dim: int) -> CacheGeometry:
    layer = LayerGeometry(LayerKind.FULL, 2, key_dim, value_dim)
    return CacheGeometry("llama", (layer, LayerGeometry(LayerKind.LINEAR)), None)


@pytest.mark.parametrize(
    ("key", "value", "types"),
    [
        ("int8", "int8", "-ctk q8_0 -ctv q8_0 -fa on"),
        ("int8", "int4", "-ctk q8_0 -ctv q4_0 -fa on"),
        ("int4", "int8", "-ctk q4_0 -ctv q8_0 -fa on"),
    ],
)
def test_a_command_line(make_job: Callable[..., Any], key: str, value: str, types: str) -> None:
    job = make_job({0: (1.0, [1.0, 1.0])}, layers=[FULL], key_format=key, value_format=value)
    made = LlamaCpp().contribute(job)
    assert made.launch == (f"llama-server -m MODEL.gguf {types}",)
    assert (made.tensors, made.config, made.files) == ({}, {}, {})
    assert "calibrated scales are not used, and nothing is written" in made.remarks[0]


@pytest.mark.parametrize(
    ("key", "value", "types"),
    [
        ("none", "none", ("f16", "f16")),
        ("fp16", "bf16", ("f16", "bf16")),
        ("int8", "none", ("q8_0", "f16")),
        ("none", "int8", ("f16", "q8_0")),
        ("int4", "int8", ("q4_0", "q8_0")),
    ],
)
def test_types_of_presets(key: str, value: str, types: tuple[str, str]) -> None:
    scheme = preset("none", key_format=key, value_format=value)
    assert cache_types(scheme, cache_of(64, 64)) == types


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("fp8", "int8", "nothing like keys as fp8_e4m3 per-token"),
        ("int8", "fp8_e5m2", "nothing like values as fp8_e5m2 per-token"),
        ("int3", "int8", "nothing like keys as int3"),
        ("int4-kivi", "int4", "nothing like keys as int4 per-channel in groups of 64 tokens"),
    ],
)
def test_presets_without_a_counterpart(key: str, value: str, said: str) -> None:
    with pytest.raises(ExportError, match=said):
        cache_types(preset("none", key_format=key, value_format=value), cache_of(64, 64))


def test_static_per_channel_has_no_counterpart(make_job: Callable[..., Any]) -> None:
    job = make_job(
        {0: ([[1.0] * 64] * 2, 1.0)}, layers=[FULL], key_format="int8", value_format="int8"
    )
    with pytest.raises(ExportError, match="nothing like keys as int8 per-channel"):
        LlamaCpp().contribute(job)


@pytest.mark.parametrize(
    ("key", "value", "dims", "said"),
    [
        ("int8", "none", (80, 80), "q8_0 has blocks of 32 .* a head of 80: serve keys as f16"),
        ("none", "int4", (80, 80), "q4_0 has blocks of 32 .* a head of 80: serve values as f16"),
        ("int8", "int8", (64, 48), "a head of 48: serve values as f16"),
    ],
)
def test_heads_that_blocks_do_not_divide(
    key: str, value: str, dims: tuple[int, int], said: str
) -> None:
    with pytest.raises(ExportError, match=said):
        cache_types(preset("none", key_format=key, value_format=value), cache_of(*dims))


def test_what_blocks_do_divide_or_need_not() -> None:
    int8 = preset("int8")
    assert cache_types(int8, cache_of(96, 96)) == ("q8_0", "q8_0")
    key_only = preset("none", key_format="int8")
    assert cache_types(key_only, cache_of(96, 80)) == ("q8_0", "f16")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": [FULL, FULL]}, "leave layer 1 exact, but llama.cpp"),
        ({"layers": [LATENT]}, "llama.cpp is not known to store it"),
    ],
)
def test_refused(make_job: Callable[..., Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ExportError, match=said):
        LlamaCpp().contribute(
            make_job({0: (1.0, 1.0)}, key_format="int8", value_format="int8", **changes)
        )
