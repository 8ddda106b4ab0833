"""Models small enough to build in milliseconds, a tokenizer to match, a way to put both on disk.

Everything is built from a config with a fixed seed; nothing is downloaded. Sizes are those of
the case reports: hidden 64, 2 layers, 4 heads on 2 KV heads of 16, vocabulary 128, 512 positions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EOS_ID = 2
"""Takes the place of a control character that no text holds."""

_COMMON = {
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
_BASE = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LONG = {"original_max_position_embeddings": 128}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


# What a name adds to _BASE, and the model_type it builds. None removes a key that the class lacks.
_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_wide": ("llama", {"head_dim": 24}),
    "llama_linear": ("llama", _rope("linear", factor=4.0)),
    "llama_yarn": ("llama", _rope("yarn", factor=4.0, **_LONG)),
    "llama_llama3": (
        "llama",
        _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **_LONG),
    ),
    "phi3": ("phi3", {}),
    "phi3_longrope": (
        "phi3",
        {
            **_LONG,
            **_rope("longrope", short_factor=[1.0] * 8, long_factor=[1.0] * 4 + [4.0] * 4, **_LONG),
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gemma2": ("gemma2", {"num_hidden_layers": 4, "sliding_window": 8}),
    "gemma3_text": ("gemma3_text", {"num_hidden_layers": 6, "sliding_window": 8}),
    "glm": ("glm", {}),
    "cohere": ("cohere", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "gpt2": (
        "gpt2",
        {"intermediate_size": None, "num_key_value_heads": None, "head_dim": None},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_rope("yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False, **_LONG),
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek": (
        "deepseek_v3",
        {
            **_MOE,
            "num_key_value_heads": 4,
            "head_dim": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "q_lora_rank": 24,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_MOE,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {
            **_MOE,
            "num_key_value_heads": 4,
            "head_dim": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "q_lora_rank": 24,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "index_topk": 8,
            "index_head_dim": 8,
            "index_n_heads": 2,
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "moe_layers": [],
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "gemma3n_text": (
        "gemma3n_text",
        {
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": 8,
            "intermediate_size": [128] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "head_dim": 8,
            "global_head_dim": 16,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_ff_dim": 128,
        },
    ),
}
_OPTIONAL = {"intermediate_size", "num_key_value_heads", "head_dim"}

OUTLIER_CHANNEL = 7
"""Its rotary pair turns by 0.0003 rad a token, so that the outlier stays in one channel."""


def _settings(name: str, overrides: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if name not in _TINY:
        raise KeyError(f"no tiny model {name!r}; there are {', '.join(_TINY)}")
    model_type, own = _TINY[name]
    merged = {**_BASE, **own, **overrides}
    dropped = {key for key in _OPTIONAL if key in own and merged[key] is None}
    return model_type, {key: value for key, value in merged.items() if key not in dropped}


def _add_key_outlier(model: Any) -> None:
    """Gives each layer a key bias of about 0.1, and 100 times that in one channel of KV head 0."""
    import torch

    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias.uniform_(0.05, 0.15)
            bias[OUTLIER_CHANNEL] = 10.0


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """``tiny(name, **config_overrides)``: a fresh fp32 model in eval mode, the same each time.

    ``qwen2`` has a key bias with channel 7 of KV head 0 at 100 times the rest.
    """

    def build(name: str, **config_overrides: Any) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        model_type, settings = _settings(name, config_overrides)
        config = AutoConfig.for_model(model_type, **settings)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if name == "qwen2":
            _add_key_outlier(model)
        return model

    return build


@pytest.fixture(scope="session")
def tiny_once(tiny: Callable[..., Any]) -> Callable[..., Any]:
    """`tiny`, but the same model each time: for tests that leave it as it is."""
    made: dict[str, Any] = {}

    def build(name: str, **config_overrides: Any) -> Any:
        place = f"{name} {config_overrides}"
        if place not in made:
            made[place] = tiny(name, **config_overrides)
        return made[place]

    return build


@pytest.fixture(scope="session")
def forward() -> Callable[..., Any]:
    """``forward(model, ids, cache=None, **kwargs)``: logits, without gradients.

    Like every caller it names the cache as the model's own version of Transformers does.
    """
    import torch

    from kvquant.cache.transformers_compat import cache_argument

    def run(model: Any, ids: Any, cache: Any = None, **kwargs: Any) -> Any:
        if cache is None:
            kwargs["use_cache"] = False
        else:
            kwargs[cache_argument(model.get_decoder())] = cache
        with torch.no_grad():
            return model(input_ids=ids, **kwargs).logits

    return run


@pytest.fixture(scope="session")
def generate() -> Callable[..., Any]:
    """``generate(model, ids, cache=None, tokens=8, **kwargs)``: exactly so many more, greedily.

    Without a cache, `generate()` makes a DynamicCache.
    """
    from kvquant.cache.transformers_compat import cache_argument

    def run(model: Any, ids: Any, cache: Any = None, tokens: int = 8, **kwargs: Any) -> Any:
        if cache is not None:
            kwargs[cache_argument(model.get_decoder())] = cache
        settings = {
            "do_sample": False,
            "max_new_tokens": tokens,
            "min_new_tokens": tokens,
            "pad_token_id": 0,
            **kwargs,
        }
        return model.generate(ids, **settings)

    return run


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shown = {byte: chr(byte) if 33 <= byte <= 126 else chr(256 + byte) for byte in range(127)}
    shown[127] = chr(256 + 33)  # GPT-2's byte alphabet numbers the unprintable bytes in order
    vocab = {char: byte for byte, char in shown.items() if byte != EOS_ID}
    backend = Tokenizer(models.BPE({**vocab, "<eos>": EOS_ID}, [], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def byte_tokenizer() -> Any:
    """A real fast tokenizer: one token a byte, id = byte value, ``<eos>`` = 2, no pad, no BOS.

    Bytes beyond ASCII become ``?``, one each.
    """
    return _byte_tokenizer()


@pytest.fixture(scope="session")
def save_tiny() -> Callable[..., Path]:
    """``save_tiny(model, directory, tokenizer=True)``: a directory that the Auto classes load."""

    def save(model: Any, directory: Path | str, tokenizer: bool = True) -> Path:
        model.save_pretrained(directory)
        if tokenizer:
            _byte_tokenizer().save_pretrained(directory)
        return Path(directory)

    return save


@pytest.fixture
def cached_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., dict[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """``cached_shapes(model, tokens=5)``: layer -> shapes of the keys and values it caches.

    The model runs with the DynamicCache that it makes itself; only its `update` is looked at.
    """
    from transformers import DynamicCache

    update = DynamicCache.update

    def run(model: Any, tokens: int = 5) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        import torch

        seen: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

        def observed(
            cache: Any, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            seen[layer_idx] = tuple(key.shape), tuple(value.shape)
            return update(cache, key, value, layer_idx, *args, **kwargs)

        monkeypatch.setattr(DynamicCache, "update", observed)
        with torch.no_grad():
            model(torch.arange(3, 3 + tokens)[None], use_cache=True)
        return seen

    return run


@pytest.fixture
def without_device_guards() -> Callable[..., Any]:
    """A mode beside `FakeTensorMode`, in which fake CUDA tensors work without CUDA.

    In a torch that was built without CUDA the Python bindings of indexing and copying ask for a
    device guard that such a build does not have; the operators behind them do not.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutDeviceGuards(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.__getitem__:
                return _select(*args)
            if func is torch.Tensor.copy_:
                return torch.ops.aten.copy_(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    return WithoutDeviceGuards


def _select(tensor: Any, index: Any) -> Any:
    """``tensor[index]`` for slices, None, numbers and an ellipsis; no list of rows."""
    import torch

    index, axis = index if isinstance(index, tuple) else (index,), 0
    for count, item in enumerate(index):
        if item is ...:
            axis = tensor.dim() - sum(later is not None for later in index[count + 1 :])
        elif item is None:
            tensor, axis = tensor.unsqueeze(axis), axis + 1
        elif isinstance(item, int):
            tensor = tensor.select(axis, item)
        else:
            assert isinstance(item, slice), "a list of rows is copied to the device at each call"
            step = item.step or 1
            tensor = torch.ops.aten.slice(tensor, axis, item.start, item.stop, step)
            axis += 1
    return tensor
