"""G26, LMCache/LMCache#688, vllm-project/vllm#25350, jy-yuan/KIVI#17: wrong memory numbers.

The plan is held against real caches of every kind of layer, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvquant.cache.cache import QuantizedCache
from kvquant.cache.transformers_compat import cache_argument
from kvquant.capacity.command import plan
from kvquant.capacity.format_names import Overrides, parse_formats
from kvquant.capacity.parallel import Parallel
from kvquant.capacity.sequence import SequencePrice
from kvquant.capacity.spec import ModelSpec
from kvquant.cli import run
from kvquant.geometry import LayerKind

_BASE = {
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
_MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 128}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "q_lora_rank": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 8,
}
_OTHERS: dict[str, dict[str, Any]] = {
    "llama4_text": {**_BASE, **_MOE, "attention_chunk_size": 8},
    "gemma3n_text": {
        **_BASE,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": None,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "deepseek_v32": {**{k: v for k, v in _BASE.items() if k != "head_dim"}, **_MLA},
    "lfm2": {
        **_BASE,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "conv_L_cache": 3,
    },
    "falcon_h1": {**_BASE, **_MAMBA, "mamba_d_ssm": 128},
}
_TINY = (
    "llama",
    "llama_wide",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "deepseek",
    "qwen3_next",
)
_SCHEMES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {}),
    ("bf16", {}),
    ("fp8", {}),
    ("int8", {"residual_length": 5}),
    ("int4-kivi", {"group_size": 4, "residual_length": 6, "sink_tokens": 2}),
    ("int4", {}),
    ("int3", {"sink_tokens": 0}),
)


def build(name: str, tiny: Callable[..., Any]) -> Any:
    """A tiny model, by a name of the fixture or of `_OTHERS`."""
    if name in _TINY:
        return tiny(name)
    if name == "deepseek_v32" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **_OTHERS[name])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def planned(model: Any, name: str, tokens: int, **changes: Any) -> int:
    """Bytes by arithmetic on the config alone."""
    spec = ModelSpec.from_config(
        {**model.config.to_dict(), "dtype": "float32"}, "tiny", "the model"
    )
    (form,) = parse_formats([name], Overrides(**changes), spec.dtype_bytes)
    return SequencePrice(spec, form, Parallel(), range(len(spec.geometry.layers))).nbytes(tokens)


def fill(model: Any, cache: Any, tokens: int, rows: int = 1) -> None:
    """Reads so many tokens, the last two one by one."""
    torch.manual_seed(1)
    ids = torch.randint(3, 128, (rows, tokens))
    name = cache_argument(model.get_decoder())
    with torch.no_grad():
        for part in ids.split([tokens - 2, 1, 1], dim=1):
            mask = torch.ones(rows, cache.get_seq_length() + part.shape[1], dtype=torch.long)
            model(part, attention_mask=mask, use_cache=True, **{name: cache})


def held(layer: Any) -> int:
    """Bytes of all tensors of one of Transformers' own layers."""
    tensors = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    tensors += [
        state
        for name in ("conv_states", "recurrent_states")
        for state in getattr(layer, name, {}).values()
    ]
    return sum(t.numel() * t.element_size() for t in tensors if torch.is_tensor(t))


@pytest.mark.parametrize("tokens", [4, 11, 37])
@pytest.mark.parametrize("name", [*_TINY, *_OTHERS])
def test_dynamic_cache_holds_what_is_planned(
    tiny: Callable[..., Any], name: str, tokens: int
) -> None:
    model = build(name, tiny)
    cache = DynamicCache(config=model.get_decoder().config)
    fill(model, cache, tokens)
    assert sum(map(held, cache.layers)) == planned(model, "none", tokens)


@pytest.mark.parametrize(("scheme", "changes"), _SCHEMES)
@pytest.mark.parametrize("name", [*_TINY, *_OTHERS])
def test_quantized_cache_holds_what_is_planned(
    tiny: Callable[..., Any], name: str, scheme: str, changes: dict[str, Any]
) -> None:
    model = build(name, tiny)
    for tokens in (4, 37):
        cache = QuantizedCache.from_model(model, scheme=scheme, **changes)
        fill(model, cache, tokens)
        assert cache.live_nbytes() == planned(model, scheme, tokens, **changes), tokens


def test_rows_of_a_batch_cost_as_much_each(tiny: Callable[..., Any]) -> None:
    model = tiny("gemma2")
    cache = QuantizedCache.from_model(model, scheme="int4")
    fill(model, cache, 21, rows=3)
    assert cache.live_nbytes() == 3 * planned(model, "int4", 21)


def test_every_kind_of_layer_is_there(tiny: Callable[..., Any]) -> None:
    kinds = {
        layer.kind
        for name in (*_TINY, "llama4_text", "gemma3n_text", "lfm2")
        for layer in ModelSpec.from_config(
            build(name, tiny).config.to_dict(), name, ""
        ).geometry.layers
    }
    assert kinds == set(LayerKind) - {LayerKind.NONE}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_bytes_per_token_by_hand(tiny: Callable[..., Any], kv_heads: int) -> None:
    """2 x layers x kv_heads x 24 x bytes, although hidden / heads is 16."""
    model = tiny("llama_wide", num_key_value_heads=kv_heads)
    numbers = 2 * 2 * kv_heads * 24
    assert planned(model, "bf16", 1) == numbers * 2
    assert planned(model, "none", 1) == numbers * 4
    assert planned(model, "fp8", 1) == numbers + 2 * 2 * kv_heads * 2
    assert planned(model, "fp8-static", 1) == numbers
    assert planned(model, "int4-g8", 1) == numbers // 2 + 2 * 2 * kv_heads * 3 * 4


def test_int4_in_groups_of_32_is_five_bits(tiny: Callable[..., Any]) -> None:
    model = tiny("llama", head_dim=64)
    numbers = 2 * 2 * 2 * 64
    assert Fraction(planned(model, "int4-g32", 100) * 8, numbers * 100) == 5


@pytest.mark.parametrize("calibrated", [True, False])
def test_scales_file_plans_the_cache_made_with_it(
    tiny: Callable[..., Any],
    save_tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calibrated: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny("qwen2")
    save_tiny(model, tmp_path / "model")
    (tmp_path / "text.txt").write_text("words and more words " * 40)
    assert (
        run(
            [
                "calibrate",
                "-m",
                "model",
                "-d",
                "text.txt",
                "-c",
                "64",
                "-n",
                "2",
                "--format",
                "int8",
                "-o",
                "scales",
            ]
        )
        == 0
    )
    scheme = None if calibrated else "int4"
    cache = QuantizedCache.from_model(model, scheme=scheme, scales="scales")
    fill(model, cache, 37)
    assert cache.plan.turns_means is not calibrated
    asked = ["-m", "model", "--scales", "scales", "-c", "37", "--kv", "int4", "--json"]
    answer = json.loads(CliRunner().invoke(plan, asked).output)
    name = "scales" if calibrated else "int4"
    assert answer["kv"][name]["bytes_per_sequence"] == cache.live_nbytes()
