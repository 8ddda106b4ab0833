from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvquant.cache.transformers_compat import cache_argument
from kvquant.capacity.companions import NOTHING, Companion, companions
from kvquant.capacity.format_names import Overrides, parse_formats
from kvquant.capacity.parallel import Parallel
from kvquant.capacity.sequence import SequencePrice
from kvquant.capacity.spec import ModelSpec

_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": _DELTA,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "conv_L_cache": 3,
    },
}


@pytest.mark.parametrize("model_type", _HYBRIDS)
def test_states_are_as_large_as_those_of_transformers(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **_BASE, **_HYBRIDS[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=model.get_decoder().config)
    name = cache_argument(model.get_decoder())
    with torch.no_grad():
        model(torch.arange(3, 40)[None], use_cache=True, **{name: cache})
    spec = ModelSpec.from_config({**config.to_dict(), "dtype": "bfloat16"}, "m", "")
    for layer, companion in zip(cache.layers, spec.companions, strict=True):
        states = [
            state
            for kind in ("conv_states", "recurrent_states")
            for state in getattr(layer, kind, {}).values()
            if state is not None
        ]
        assert companion.known
        assert companion.constant == sum(s.numel() * s.element_size() for s in states)
    assert any(companion.constant for companion in spec.companions)


def test_a_state_does_not_grow_with_the_text() -> None:
    spec = ModelSpec.from_config({"model_type": "qwen3_5_text", **_BASE, **_DELTA}, "m", "")
    (form,) = parse_formats(["bf16"], Overrides(), 2)
    price = SequencePrice(spec, form, Parallel(), range(4))
    state = 3 * (80 * 4 * 2 + 4 * 8 * 12 * 4)
    assert price.nbytes(0) == state
    assert price.nbytes(100) == state + 100 * 2 * 2 * 16 * 2
    assert price.token_nbytes == 2 * 2 * 16 * 2


def test_indexer_keys_grow_with_the_text() -> None:
    settings = {"num_hidden_layers": 3, "layer_types": ["indexed_attention"] * 3}
    known = companions("deepseek_v32", {**settings, "index_head_dim": 128}, 2)
    assert known == [Companion(per_token=256)] * 3
    kinds = ["full", "shared", "full"]
    some = companions("x", {**settings, "index_head_dim": 8, "indexer_types": kinds}, 4)
    assert some == [Companion(per_token=32), NOTHING, Companion(per_token=32)]
    assert not companions("deepseek_v32", settings, 2)[0].known


@pytest.mark.parametrize("model_type", ["minimax", "qwen3_next", "jamba"])
def test_what_is_not_known_is_said(model_type: str) -> None:
    settings = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    state, attention = companions(model_type, settings, 2)
    assert not state.known
    assert attention == NOTHING
