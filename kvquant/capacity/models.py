"""Models that can be planned by name: what their config.json says, and where it was read.

Keys are those of config.json. Where the hub could not be asked, a public repository that carries
the numbers is named, with the revision; sizes are checked against the known numbers of parameters
in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

_MLC = "mlc-ai/mlc-llm python/mlc_llm/model/model_preset.py@01ced331"
_LITGPT = "Lightning-AI/litgpt litgpt/config.py@0006c973"
_META = "meta-llama/llama-models models/sku_list.py@084b88e9"
_TUNE = "pytorch/torchtune torchtune/models/"
_GEMMA = "google-deepmind/gemma gemma/gm/nn/_gemma.py@9fec24ca, Gemma3TextConfig (text part)"
_OSS = "pytorch/torchtitan torchtitan/models/gpt_oss/__init__.py@004616c3, GptOssConfig"
_NEMO = "NVIDIA/NeMo nemo/collections/llm/gpt/model/deepseek.py@04e9360c"


@dataclass(frozen=True)
class KnownModel:
    """A model of the table.

    Attributes:
        name: As users type it.
        hub_ids: Its names on the Hugging Face hub.
        config: What the cache and the weights depend on, as in config.json.
        source: Where the config was read.
    """

    name: str
    hub_ids: tuple[str, ...]
    config: Config
    source: str


def _config(
    model_type: str,
    shape: tuple[int, int, int],
    widths: tuple[int, int, int],
    positions: int,
    **more: Any,
) -> Config:
    """A config: (layers, heads, KV heads), (hidden, intermediate, vocabulary)."""
    return {
        "model_type": model_type,
        "num_hidden_layers": shape[0],
        "num_attention_heads": shape[1],
        "num_key_value_heads": shape[2],
        "hidden_size": widths[0],
        "intermediate_size": widths[1],
        "vocab_size": widths[2],
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **more,
    }


def _llama3(
    layers: int, heads: int, hidden: int, width: int, positions: int, **more: Any
) -> Config:
    return _config("llama", (layers, heads, 8), (hidden, width, 128256), positions, **more)


def _qwen3(layers: int, heads: int, hidden: int, width: int) -> Config:
    shape = (layers, heads, 8)
    return _config("qwen3", shape, (hidden, width, 151936), 40960, head_dim=128)


def _gemma2(shape: tuple[int, int, int], hidden: int, width: int, head_dim: int) -> Config:
    more = {"head_dim": head_dim, "sliding_window": 4096, "tie_word_embeddings": True}
    return _config("gemma2", shape, (hidden, width, 256000), 8192, **more)


def _gemma3(
    shape: tuple[int, int, int],
    hidden: int,
    width: int,
    head_dim: int = 256,
    window: int = 1024,
    vocab: int = 262208,
    positions: int = 131072,
) -> Config:
    more = {"head_dim": head_dim, "sliding_window": window, "tie_word_embeddings": True}
    return _config("gemma3_text", shape, (hidden, width, vocab), positions, **more)


def _gpt_oss(layers: int, experts: int) -> Config:
    more = {"head_dim": 64, "sliding_window": 128, "attention_bias": True}
    more |= {"num_local_experts": experts, "num_experts_per_tok": 4}
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    shape, widths = (layers, 64, 8), (2880, 2880, 201088)
    return _config("gpt_oss", shape, widths, 131072, **more, **quantized)


def _deepseek(
    version: int, layers: int, widths: tuple[int, int, int], experts: Mapping[str, int], **more: Any
) -> Config:
    latent = {"kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128}
    heads = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    model_type, shape = f"deepseek_v{version}", (layers, 128, 128)
    return _config(model_type, shape, widths, 163840, **latent, **heads, **experts, **more)


def _smollm2(shape: tuple[int, int, int], hidden: int, width: int) -> Config:
    return _config("llama", shape, (hidden, width, 49152), 8192, tie_word_embeddings=True)


_MISTRAL = ((32, 32, 8), (4096, 14336, 32000), 32768)
_MISTRAL_V3 = ((32, 32, 8), (4096, 14336, 32768), 32768)
_PHI3 = ((32, 32, 32), (3072, 8192, 32064))
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_V2_EXPERTS = {
    "n_routed_experts": 160,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
}
_V3_EXPERTS = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
_FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}

_MODELS = (
    KnownModel(
        "llama-2-7b",
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
        _config("llama", (32, 32, 32), (4096, 11008, 32000), 4096, torch_dtype="float16"),
        f"{_MLC} (llama2_7b; positions of llava's Llama-2-7b-hf)",
    ),
    KnownModel(
        "llama-3-8b",
        ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct"),
        _llama3(32, 32, 4096, 14336, 8192),
        f"{_MLC} (llama3_8b)",
    ),
    KnownModel(
        "llama-3-70b",
        ("meta-llama/Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B-Instruct"),
        _llama3(80, 64, 8192, 28672, 8192),
        f"{_MLC} (llama3_70b)",
    ),
    KnownModel(
        "llama-3.1-8b",
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        _llama3(32, 32, 4096, 14336, 131072),
        f"{_MLC} (llama3_1_8b)",
    ),
    KnownModel(
        "llama-3.1-70b",
        ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct"),
        _llama3(80, 64, 8192, 28672, 131072),
        f"{_MLC} (llama3_1_70b)",
    ),
    KnownModel(
        "llama-3.1-405b",
        ("meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.1-405B-Instruct"),
        _llama3(126, 128, 16384, 53248, 131072),
        f"{_META} (meta_llama3_1_405b: ffn 1.2 x, multiple of 4096)",
    ),
    KnownModel(
        "llama-3.2-1b",
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"),
        _llama3(16, 32, 2048, 8192, 131072, head_dim=64, tie_word_embeddings=True),
        f"{_MLC} (llama3_2_1b)",
    ),
    KnownModel(
        "llama-3.2-3b",
        ("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-3B-Instruct"),
        _llama3(28, 24, 3072, 8192, 131072, head_dim=128, tie_word_embeddings=True),
        f"{_MLC} (llama3_2_3b)",
    ),
    KnownModel(
        "mistral-7b-v0.1",
        ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.1"),
        _config("mistral", *_MISTRAL, sliding_window=4096),
        f"{_MLC} (mistral_7b), MistralConfig",
    ),
    KnownModel(
        "mistral-7b-v0.3",
        ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
        _config("mistral", *_MISTRAL_V3, sliding_window=None),
        f"{_MLC} (mistral_7b_v03)",
    ),
    KnownModel(
        "mixtral-8x7b",
        ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        _config("mixtral", *_MISTRAL, num_local_experts=8, num_experts_per_tok=2),
        f"{_MLC} (Mixtral-8x7B-v0.1)",
    ),
    KnownModel(
        "qwen2.5-7b",
        ("Qwen/Qwen2.5-7B",),
        _config("qwen2", (28, 28, 4), (3584, 18944, 152064), 131072, use_sliding_window=False),
        f"{_TUNE}qwen2_5/_model_builders.py@47a9e198 (qwen2_5_7b_base)",
    ),
    KnownModel(
        "qwen3-8b",
        ("Qwen/Qwen3-8B",),
        _qwen3(36, 32, 4096, 12288),
        f"{_TUNE}qwen3/_model_builders.py@010412e0 (qwen3_8b_instruct)",
    ),
    KnownModel(
        "qwen3-32b",
        ("Qwen/Qwen3-32B",),
        _qwen3(64, 64, 5120, 25600),
        f"{_TUNE}qwen3/_model_builders.py@010412e0 (qwen3_32b), {_LITGPT}",
    ),
    KnownModel(
        "qwen3-30b-a3b",
        ("Qwen/Qwen3-30B-A3B",),
        _config(
            "qwen3_moe", (48, 32, 4), (2048, 6144, 151936), 40960, head_dim=128, **_QWEN3_EXPERTS
        ),
        _LITGPT,
    ),
    KnownModel(
        "gemma-2-2b",
        ("google/gemma-2-2b", "google/gemma-2-2b-it"),
        _gemma2((26, 8, 4), 2304, 9216, 256),
        f"{_MLC} (gemma2_2b)",
    ),
    KnownModel(
        "gemma-2-9b",
        ("google/gemma-2-9b", "google/gemma-2-9b-it"),
        _gemma2((42, 16, 8), 3584, 14336, 256),
        f"{_MLC} (gemma2_9b)",
    ),
    KnownModel(
        "gemma-2-27b",
        ("google/gemma-2-27b", "google/gemma-2-27b-it"),
        _gemma2((46, 32, 16), 4608, 36864, 128),
        f"{_MLC} (gemma2_27b)",
    ),
    KnownModel(
        "gemma-3-1b",
        ("google/gemma-3-1b-pt", "google/gemma-3-1b-it"),
        _gemma3((26, 4, 1), 1152, 6912, window=512, vocab=262144, positions=32768),
        f"{_MLC} (gemma3_1b_it)",
    ),
    KnownModel(
        "gemma-3-4b",
        ("google/gemma-3-4b-pt", "google/gemma-3-4b-it"),
        _gemma3((34, 8, 4), 2560, 10240),
        _GEMMA,
    ),
    KnownModel(
        "gemma-3-12b",
        ("google/gemma-3-12b-pt", "google/gemma-3-12b-it"),
        _gemma3((48, 16, 8), 3840, 15360),
        _GEMMA,
    ),
    KnownModel(
        "gemma-3-27b",
        ("google/gemma-3-27b-pt", "google/gemma-3-27b-it"),
        _gemma3((62, 32, 16), 5376, 21504, head_dim=128),
        _GEMMA,
    ),
    KnownModel("gpt-oss-20b", ("openai/gpt-oss-20b",), _gpt_oss(24, 32), _OSS),
    KnownModel(
        "gpt-oss-120b",
        ("openai/gpt-oss-120b",),
        _gpt_oss(36, 128),
        f"{_OSS}, openai/gpt-oss gpt_oss/torch/model.py@0568dfc9",
    ),
    KnownModel(
        "deepseek-v2",
        ("deepseek-ai/DeepSeek-V2",),
        _deepseek(2, 60, (5120, 12288, 102400), _V2_EXPERTS),
        f"{_NEMO}, DeepseekV2Config",
    ),
    KnownModel(
        "deepseek-v3",
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"),
        _deepseek(3, 61, (7168, 18432, 129280), _V3_EXPERTS, quantization_config=_FP8_BLOCKS),
        f"{_NEMO}, DeepseekV3Config; weights: deepseek-ai/DeepSeek-V3 README_WEIGHTS.md",
    ),
    KnownModel(
        "phi-3-mini-4k",
        ("microsoft/Phi-3-mini-4k-instruct",),
        _config("phi3", *_PHI3, 4096, sliding_window=2047),
        f"{_MLC} (phi-3), Phi3Config",
    ),
    KnownModel(
        "phi-3.5-mini",
        ("microsoft/Phi-3.5-mini-instruct",),
        _config("phi3", *_PHI3, 131072, sliding_window=262144),
        f"{_MLC} (phi-3_5)",
    ),
    KnownModel(
        "opt-13b",
        ("facebook/opt-13b",),
        {
            "model_type": "opt",
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "hidden_size": 5120,
            "ffn_dim": 20480,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "torch_dtype": "float16",
        },
        "facebookresearch/metaseq metaseq/launcher/opt_job_constants.py@0580bd7d, OPTConfig",
    ),
    KnownModel(
        "smollm2-135m",
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        _smollm2((30, 9, 3), 576, 1536),
        f"{_MLC} (smollm2_135m)",
    ),
    KnownModel(
        "smollm2-360m",
        ("HuggingFaceTB/SmolLM2-360M", "HuggingFaceTB/SmolLM2-360M-Instruct"),
        _smollm2((32, 15, 5), 960, 2560),
        f"{_MLC} (smollm2_360m)",
    ),
    KnownModel(
        "smollm2-1.7b",
        ("HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        _smollm2((24, 32, 32), 2048, 8192),
        f"{_MLC} (smollm2_1_7b)",
    ),
)


def known_models() -> tuple[KnownModel, ...]:
    """All models of the table."""
    return _MODELS


def find_model(name: str) -> KnownModel | None:
    """The model called `name` here or on the hub, in any case; None if it is not in the table."""
    wanted = name.lower()
    for model in _MODELS:
        if wanted in (model.name, *(hub_id.lower() for hub_id in model.hub_ids)):
            return model
    return None
