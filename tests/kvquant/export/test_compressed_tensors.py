from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvquant.export.compressed_tensors import config, kv_cache_scheme, scale_tensors

SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
CACHE_ALONE = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "frozen",
    "global_compression_ratio": None,
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": SCHEME,
}
WEIGHTS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}


def test_names_and_shapes(plain: Callable[..., Any]) -> None:
    key, value = torch.tensor([0.5, 0.25]), torch.tensor([1.0, 2.0])
    assert plain(scale_tensors("m.self_attn", key[:1], value[:1])) == {
        "m.self_attn.k_scale": ("float32", [0.5]),
        "m.self_attn.v_scale": ("float32", [1.0]),
    }
    assert plain(scale_tensors("m.self_attn", key, value, per_head=True)) == {
        "m.self_attn.k_scale": ("float32", [[[0.5]], [[0.25]]]),
        "m.self_attn.v_scale": ("float32", [[[1.0]], [[2.0]]]),
    }


def test_names_share_no_memory() -> None:
    key = torch.tensor([0.5])
    pointers = {tensor.data_ptr() for tensor in scale_tensors("m", key, key).values()}
    assert len(pointers | {key.data_ptr()}) == 3


def test_a_config_for_the_cache_alone(make_job: Callable[..., Any]) -> None:
    job = make_job({0: (1.0, 1.0)}, config={"text_config": {"hidden_size": 8}})
    assert config(job.checkpoint) == {"quantization_config": CACHE_ALONE}
    per_head = config(job.checkpoint, per_head=True)["quantization_config"]
    assert per_head["kv_cache_scheme"] == {**SCHEME, "strategy": "attn_head"}


def test_a_block_for_weights_is_extended(make_job: Callable[..., Any]) -> None:
    base = {"quantization_config": WEIGHTS}
    job = make_job({0: (1.0, 1.0)}, config=base, quantization=WEIGHTS)
    assert config(job.checkpoint) == {"quantization_config": {**WEIGHTS, "kv_cache_scheme": SCHEME}}
    assert WEIGHTS["kv_cache_scheme"] is None


def test_a_block_of_the_text_part_stays_there(make_job: Callable[..., Any]) -> None:
    base = {"text_config": {"hidden_size": 8, "quantization_config": WEIGHTS}}
    job = make_job({0: (1.0, 1.0)}, config=base, quantization=WEIGHTS)
    assert config(job.checkpoint) == {
        "text_config": {
            "hidden_size": 8,
            "quantization_config": {**WEIGHTS, "kv_cache_scheme": SCHEME},
        }
    }


@pytest.mark.parametrize("per_head", [False, True])
def test_its_own_library_accepts_the_config(make_job: Callable[..., Any], per_head: bool) -> None:
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="compressed-tensors is not installed"
    )
    block = config(make_job({0: (1.0, 1.0)}).checkpoint, per_head)["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(block)
    scheme = parsed.kv_cache_scheme
    assert (scheme.num_bits, scheme.type) == (8, "float")
    assert scheme.strategy == ("attn_head" if per_head else "tensor")
    assert scheme.symmetric and scheme.dynamic is False
    assert parsed.config_groups == {}
    assert parsed.ignore == []
    assert kv_cache_scheme(per_head).keys() <= type(scheme).model_fields.keys()
