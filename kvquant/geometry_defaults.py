"""What Transformers' config classes fill in where a config.json is silent, for each model_type.

A config.json omits what equals the class default, so the shape of a cache cannot be read from it
alone. Each `Family` holds the defaults of one config class that the cache depends on, and names the
rules by which the rest follows. Read from Transformers 5.24.0; a test compares every row with the
config classes of the version installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import geometry_rules as rules
from .geometry_rules import CROSS, FULL, HYBRID, INDEXED, LINEAR, Derive, LayerTypes, Settings


@dataclass(frozen=True)
class Family:
    """Defaults of one config class, and what it derives from them.

    Attributes:
        layers: Number of layers.
        heads: Attention heads.
        hidden: Model width.
        positions: Longest position, before RoPE scaling is looked at; None if there is no limit.
        kv_heads: KV heads; None means as many as attention heads.
        head_dim: Width of a head; None means ``hidden // heads``.
        more: Further keys and their defaults.
        layer_types: Layer types where the config lists none; None infers them from the windows.
        derive: What the class computes from other keys.
        latent: Whether full attention caches the MLA latent and the rotary part instead of heads.
    """

    layers: int
    heads: int
    hidden: int
    positions: int | None
    kv_heads: int | None = None
    head_dim: int | None = None
    more: Settings = field(default_factory=dict)
    layer_types: LayerTypes | None = None
    derive: Derive | None = None
    latent: bool = False

    @property
    def defaults(self) -> Settings:
        """The defaults under canonical names."""
        return {
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "hidden_size": self.hidden,
            "max_position_embeddings": self.positions,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            **self.more,
        }


def _mha(layers: int, heads: int, hidden: int, positions: int | None) -> Family:
    """Multi-head attention, where no config can change KV heads or head_dim."""
    return Family(layers, heads, hidden, positions, derive=rules.multi_head)


def _mla(
    shape: tuple[int, int, int, int | None],
    latent: tuple[int, int] = (512, 64),
    layer_types: LayerTypes | None = None,
    derive: Derive | None = None,
    **more: Any,
) -> Family:
    """Multi-head latent attention: `latent` is kv_lora_rank and qk_rope_head_dim."""
    widths = {"kv_lora_rank": latent[0], "qk_rope_head_dim": latent[1]}
    return Family(*shape, None, None, {**widths, **more}, layer_types, derive, latent=True)


def _window(size: int | None, **more: Any) -> Settings:
    return {"sliding_window": size, **more}


def _rope(rope_type: str, factor: float, original: int) -> Settings:
    scaling = {"rope_type": rope_type, "factor": factor}
    return {"rope_parameters": {**scaling, "original_max_position_embeddings": original}}


def _qwen(window: int = 4096, first: int = 28) -> Settings:
    return _window(window, use_sliding_window=False, max_window_layers=first)


def _gemma4(window: int) -> Settings:
    return _window(
        window,
        global_head_dim=512,
        num_global_key_value_heads=None,
        attention_k_eq_v=False,
        num_kv_shared_layers=0,
    )


_ALL_FULL, _ALL_HYBRID = rules.uniform(FULL), rules.uniform(HYBRID)
_ALL_INDEXED, _ALL_LINEAR = rules.uniform(INDEXED), rules.uniform(LINEAR)
_EVERY_2, _EVERY_4, _EVERY_5 = rules.every(2), rules.every(4), rules.every(5)
_EVERY_N = rules.every("global_attn_every_n_layers")
_EVERY_4_LINEAR = rules.every(4, rest=LINEAR)
_FIRST_OF_4 = rules.every(4, 0)
_FIRST_OF_2_LINEAR = rules.every(2, 0, rest=LINEAR)
_BY_PATTERN = rules.every("sliding_window_pattern")
_BY_INTERVAL = rules.every("full_attention_interval", rest=LINEAR)
_BY_GROUP = rules.every("layer_group_size", rest=LINEAR)
_BY_PERIOD = rules.every("attn_layer_period", "attn_layer_offset", rest=LINEAR)
_FULL_LISTED = rules.numbered("attn_layer_indices", FULL, LINEAR)
_CROSS_LISTED = rules.numbered("cross_attention_layers", CROSS, FULL)

_NO_WINDOW = _window(None)
_AFMOE = _window(1024, global_attn_every_n_layers=4)
_BAMBA = {"attn_layer_indices": None}
_COHERE2 = _window(4096, sliding_window_pattern=4)
_COHERE2_MOE = {**_COHERE2, "first_k_dense_replace": 0, "prefix_dense_sliding_window_pattern": 1}
_CWM = {**_window(8192), **_rope("llama3", 16.0, 8192)}
_DOTS1 = _window(4096, max_window_layers=62)
_GEMMA3 = _window(4096, sliding_window_pattern=6)
_GEMMA3N = _window(512, num_kv_shared_layers=15)
_GPT_OSS = {**_window(128), **_rope("yarn", 32.0, 4096)}
_GRIFFIN = _window(2048, block_types=["recurrent", "recurrent", "attention"])
_INTERVAL = {"full_attention_interval": 4}
_JAMBA = {"attn_layer_period": 8, "attn_layer_offset": 4}
_LARGE4 = {"no_rope_layer_interval": 4, **_rope("yarn", 2048.0, 512)}
_LFM2 = {"full_attn_idxs": None}
_LLAMA4 = {"attention_chunk_size": 8192, "no_rope_layer_interval": 4}
_MIMO = _window(129, v_head_dim=128)
_MINISTRAL3 = {**_window(None), **_rope("yarn", 16.0, 16384)}
_MLLAMA = {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}
_SMOLLM3 = _window(None, use_sliding_window=False, no_rope_layer_interval=4)
_ZAMBA = {"attn_layer_period": 6, "attn_layer_offset": 4}
_ZAMBA2 = {"use_long_context": False}

FAMILIES: Mapping[str, Family] = {
    # Every layer attends to everything.
    "apertus": Family(32, 32, 4096, 65536, more=_rope("llama3", 8.0, 8192)),
    "arcee": Family(32, 32, 2560, 4096),
    "aria_text": Family(32, 32, 4096, 2048),
    "biogpt": _mha(24, 16, 1024, 1024),
    "bitnet": Family(30, 20, 2560, 2048, 5),
    "bloom": _mha(2, 8, 64, None),
    "chameleon": Family(32, 32, 4096, 4096, 32),
    "codegen": _mha(28, 16, 4096, 2048),
    "cohere": Family(40, 64, 8192, 8192),
    "cosmos3_edge_text": Family(28, 16, 2048, 131072, 8, 128),
    "dbrx": Family(24, 16, 2048, 2048, derive=rules.dbrx),
    "deepseek_ocr2_text": Family(32, 32, 4096, 2048, derive=rules.own_head_dim),
    "diffllama": Family(16, 32, 2048, 2048),
    "emu3_text_model": Family(32, 32, 4096, 9216, 8),
    "ernie4_5": Family(18, 16, 1024, 131072, 2, 128),
    "ernie4_5_moe": Family(28, 20, 2560, 131072, 4),
    "ernie4_5_vl_moe_text": Family(28, 20, 2560, 131072, 4),
    "exaone": Family(32, 32, 4096, 4096, 8),
    "falcon": Family(32, 71, 4544, 2048, derive=rules.falcon),
    "flex_olmo": Family(32, 32, 4096, 4096),
    "gemma": Family(28, 16, 3072, 8192, 16, 256),
    "glm": Family(40, 32, 4096, 131072, 2, 128),
    "glm4": Family(40, 32, 4096, 131072, 2, 128),
    "glm4_moe": Family(46, 96, 4096, 131072, 8),
    "glm4v_moe_text": Family(46, 96, 4096, 65536, 8),
    "glm4v_text": Family(40, 32, 4096, 32768, 2),
    "glm_ocr_text": Family(16, 16, 1024, 131072, 8),
    "gpt2": _mha(12, 12, 768, 1024),
    "gpt_bigcode": Family(12, 12, 768, 1024, derive=rules.gpt_bigcode),
    "gpt_neo": _mha(24, 16, 2048, 2048),
    "gpt_neox": _mha(44, 64, 6144, 2048),
    "gpt_neox_japanese": _mha(32, 32, 2560, 2048),
    "gptj": _mha(28, 16, 4096, 2048),
    "granite": Family(32, 32, 4096, 2048),
    "granite4_vision_text": Family(32, 32, 4096, 2048),
    "granite_docling_text": Family(28, 16, 1024, 32768, 4),
    "granitemoe": Family(32, 32, 4096, 2048),
    "granitemoeshared": Family(32, 32, 4096, 2048),
    "helium": Family(24, 20, 2560, 4096, 20, 128),
    "hunyuan_v1_dense": Family(32, 32, 4096, 2048),
    "hunyuan_v1_moe": Family(32, 32, 4096, 2048),
    "hunyuan_vl_text": Family(32, 32, 4096, 2048),
    "hy_v3": Family(80, 64, 4096, 131072, 8, 128),
    "hyperclovax": Family(32, 32, 4096, 2048),
    "internlm3": Family(48, 32, 4096, 32768, 2, 128),
    "iquestcoder": Family(80, 40, 5120, 131072, 8, 128),
    "jais2": Family(32, 26, 3328, 8192),
    "jetmoe": Family(12, 32, 2048, 4096, 16, 128),
    "llama": Family(32, 32, 4096, 2048),
    "minimax_m2": Family(62, 48, 3072, 196608, 8, 128),
    "minimax_m3_vl_text": Family(60, 64, 6144, 524288, 4, 128, layer_types=rules.minimax_m3),
    "molmo2_text": Family(36, 32, 4096, 36864, 8, 128),
    "mpt": _mha(24, 16, 2048, 2048),
    "nanochat": Family(12, 6, 768, 2048),
    "nemotron": Family(32, 48, 6144, 4096),
    "olmo": Family(32, 32, 4096, 2048),
    "olmo2": Family(32, 32, 4096, 2048),
    "olmoe": Family(16, 16, 2048, 4096),
    "opt": _mha(12, 12, 768, 2048),
    "paddleocr_vl_text": Family(18, 16, 1024, 131072, 2, 128),
    "persimmon": _mha(36, 64, 4096, 16384),
    "phi": Family(24, 32, 2048, 2048),
    "qwen3_vl_moe_text": Family(24, 16, 2048, 128000, 16),
    "qwen3_vl_text": Family(32, 32, 4096, 128000, 32, 128),
    "sarvam_moe": Family(19, 64, 4096, 131072, 4, 64),
    "seed_oss": Family(64, 80, 4096, 524288, 8, 128),
    "solar_open": Family(48, 64, 4096, 131072, 8, 128),
    "stablelm": Family(32, 32, 2560, 4096, 32),
    # One window for all layers, or none.
    "doge": Family(32, 8, 1024, 2048, None, None, _NO_WINDOW),
    "ministral": Family(32, 32, 4096, 131072, 8, None, _window(4096)),
    "ministral3": Family(34, 32, 4096, 262144, 8, 128, _MINISTRAL3),
    "mistral": Family(32, 32, 4096, 131072, 8, None, _window(4096)),
    "mixtral": Family(32, 32, 4096, 131072, 8, None, _NO_WINDOW),
    "phi3": Family(32, 32, 3072, 4096, None, None, _NO_WINDOW),
    "phi4_multimodal": Family(32, 32, 3072, 131072, 8, None, _NO_WINDOW),
    "phimoe": Family(32, 32, 4096, 131072, 8, None, _NO_WINDOW),
    "qwen3_moe": Family(24, 32, 2048, 32768, 4, None, _qwen()),
    "qwen3_omni_moe_text": Family(28, 28, 2048, 32768, 4, None, _NO_WINDOW),
    "starcoder2": Family(30, 24, 3072, 4096, 2, None, _NO_WINDOW),
    # Sliding or chunked layers between full ones.
    "afmoe": Family(32, 16, 2048, 16384, None, 128, _AFMOE, _EVERY_N),
    "cohere2": Family(40, 64, 8192, 8192, None, None, _COHERE2, _BY_PATTERN),
    "cohere2_moe": Family(40, 64, 8192, 8192, None, 128, _COHERE2_MOE, rules.cohere2_moe),
    "cwm": Family(64, 48, 6144, 131072, 8, 128, _CWM, _FIRST_OF_4),
    "dots1": Family(62, 32, 4608, 2048, 32, None, _DOTS1, rules.qwen_windows),
    "exaone4": Family(32, 32, 4096, 2048, 32, None, _COHERE2, rules.exaone4),
    "exaone_moe": Family(32, 32, 4096, 2048, 32, None, _COHERE2, rules.exaone4),
    "gemma2": Family(26, 8, 2304, 8192, 4, 256, _window(4096), _EVERY_2),
    "gemma3_text": Family(26, 8, 2304, 131072, 4, 256, _GEMMA3, _BY_PATTERN),
    "gemma3n_text": Family(35, 8, 2048, 32768, 2, 256, _GEMMA3N, _EVERY_5),
    "gemma4_text": Family(30, 8, 2304, 131072, 4, 256, _gemma4(512), derive=rules.gemma4),
    "gemma4_unified_text": Family(30, 8, 2304, 262144, 4, 256, _gemma4(1024), derive=rules.gemma4),
    "gpt_oss": Family(36, 64, 2880, 131072, 8, 64, _GPT_OSS, _EVERY_2),
    "granite_swa": Family(24, 20, 2560, 8192, 4, None, _window(128), _FIRST_OF_4),
    "granitemoe_swa": Family(32, 32, 4096, 2048, None, None, _window(128), _FIRST_OF_4),
    "kolibri1": Family(50, 48, 2560, 262144, 4, 128, _window(513), _EVERY_5),
    "laguna": Family(40, 48, 2048, 131072, 8, 128, _window(512), _ALL_FULL),
    "llama4_text": Family(48, 40, 5120, 131072, 8, 128, _LLAMA4, rules.llama4),
    "mellum": Family(28, 32, 2304, 131072, 4, 128, _window(1024), _ALL_FULL),
    "mimo_v2_flash": Family(48, 64, 4096, 131072, 4, 192, _MIMO, derive=rules.mimo),
    "olmo3": Family(32, 32, 4096, 2048, None, None, _window(4096), _EVERY_4),
    "qwen2": Family(32, 32, 4096, 32768, 32, None, _qwen(), rules.qwen_windows),
    "qwen2_5_omni_text": Family(28, 28, 3584, 32768, 4, None, _qwen(32768), rules.qwen_windows),
    "qwen2_5_vl_text": Family(80, 64, 8192, 32768, 8, None, _qwen(first=80), rules.qwen_windows),
    "qwen2_moe": Family(24, 16, 2048, 32768, 16, None, _qwen(), rules.qwen2_moe),
    "qwen2_vl_text": Family(80, 64, 8192, 32768, 8, None, _qwen(first=80), rules.qwen_windows),
    "qwen3": Family(32, 32, 4096, 32768, 32, 128, _qwen(), rules.qwen_windows),
    "smollm3": Family(36, 16, 2048, 32768, 4, None, _SMOLLM3, rules.smollm3),
    "step3p5": Family(45, 64, 4096, 128000, 8, 128, _NO_WINDOW, _ALL_FULL, rules.step3),
    "vaultgemma": Family(26, 8, 2304, 8192, 4, 256, _window(4096), _EVERY_2),
    # Layers that look at an image, not at the text.
    "mllama_text_model": Family(40, 32, 4096, 131072, 8, None, _MLLAMA, _CROSS_LISTED),
    # Multi-head latent attention; with an indexer, attention is sparse and the cache the same
    # (in Transformers 5.17 models with an indexer cache expanded heads).
    "axk1": _mla((61, 64, 7168, 32768)),
    "axk2": _mla((48, 32, 2048, 131072), (128, 32), _ALL_INDEXED),
    "deepseek_v2": _mla((32, 32, 4096, 2048)),
    "deepseek_v3": _mla((61, 128, 7168, 4096)),
    "deepseek_v32": _mla((61, 128, 7168, 163840), layer_types=_ALL_INDEXED),
    "glm4_moe_lite": _mla((47, 20, 2048, 202752)),
    "glm_moe_dsa": _mla((78, 64, 6144, 202752), layer_types=_ALL_INDEXED),
    "hy_v4": _mla((34, 32, 2816, 262144), layer_types=_ALL_INDEXED),
    "hy_v4_vl_text": _mla((78, 64, 6144, 262144), layer_types=_ALL_INDEXED),
    "longcat_flash": _mla((56, 64, 6144, 131072), derive=rules.longcat),
    "minicpm3": _mla((62, 40, 2560, 32768), (256, 32)),
    "mistral4": _mla((36, 32, 4096, 1048576), (256, 64), **_rope("yarn", 128.0, 8192)),
    "mistral_large4_text": _mla(
        (72, 64, 6144, 1048576), (512, 64), _ALL_INDEXED, rules.mistral_large4, **_LARGE4
    ),
    "sarvam_mla": _mla((32, 64, 4096, 4096)),
    "youtu": _mla((32, 16, 2048, 131072)),
    # Attention next to recurrent, convolutional or expert-only layers.
    "bailing_hybrid": _mla((42, 32, 2560, 262144), layer_types=_BY_GROUP, layer_group_size=6),
    "bamba": Family(32, 32, 4096, 262144, 8, None, _BAMBA, _FULL_LISTED),
    "falcon_h1": Family(32, 32, 4096, 8192, 8, layer_types=_ALL_HYBRID),
    "glm5_next_text": _mla((45, 64, 4096, 1048576), (512, 0), _EVERY_4_LINEAR),
    "granitemoehybrid": Family(32, 32, 4096, 2048, layer_types=_ALL_LINEAR),
    "jamba": Family(32, 32, 4096, 262144, 8, None, _JAMBA, _BY_PERIOD),
    "kimi_linear": _mla((27, 32, 2304, 1048576), layer_types=rules.kimi_linear),
    "lfm2": Family(32, 32, 2560, 128000, 8, None, _LFM2, rules.lfm2),
    "lfm2_moe": Family(32, 32, 2048, 128000, 8),
    "lfm3": Family(24, 16, 2048, 128000, 4, 128, _window(256), rules.lfm3),
    "minimax": Family(32, 32, 4096, 131072, 8, None, _NO_WINDOW, _FIRST_OF_2_LINEAR),
    "nemotron_h": Family(4, 32, 4096, 4096, 8, 128, derive=rules.nemotron_h),
    "olmo_hybrid": Family(32, 30, 3840, 65536, layer_types=rules.olmo_hybrid),
    "qwen3_5_moe_text": Family(40, 16, 2048, 32768, 2, 256, _INTERVAL, _BY_INTERVAL),
    "qwen3_5_text": Family(32, 16, 4096, 32768, 4, 256, _INTERVAL, _BY_INTERVAL),
    "qwen4_exp_text": Family(40, 16, 2048, 32768, 2, 256, _INTERVAL, _BY_INTERVAL),
    "qwen3_next": Family(48, 16, 2048, 32768, 2, 256, _INTERVAL, _BY_INTERVAL),
    "recurrent_gemma": Family(26, 10, 2560, None, None, None, _GRIFFIN, rules.recurrent_gemma),
    "zamba": Family(76, 16, 3712, 4096, 16, None, _ZAMBA, rules.zamba, rules.zamba_head_dim),
    "zamba2": Family(54, 32, 2560, 4096, None, None, _ZAMBA2, rules.zamba2, rules.zamba2_widths),
    "zaya": Family(40, 8, 2048, 131072, 2, 128, _NO_WINDOW, _ALL_HYBRID),
}
"""model_type of a text model -> what its config class fills in."""

_STATE_ONLY = "keeps a recurrent state and no keys and values: there is no KV cache to quantize"
_PER_LOOP = "caches keys and values once per loop over the same layers"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _STATE_ONLY),
    **dict.fromkeys(("dory", "hrm_text", "inkling2_loop_text"), _PER_LOOP),
    "deepseek_v4": "compresses several tokens into one cache entry",
    "unlimited_ocr_text": "keeps all of the prompt and a window of what it generates",
}
"""model_type -> why its cache cannot be described as keys and values of each token."""

_COMPOSITES: Mapping[str, str] = {
    "aria_text": "aria",
    "cohere2": "aya_vision cohere2_vision",
    "deepseek_ocr2_text": "deepseek_ocr2",
    "deepseek_v3": "kimi_k25",
    "emu3_text_model": "emu3",
    "ernie4_5_vl_moe_text": "ernie4_5_vl_moe",
    "exaone4": "exaone4_5",
    "gemma": "paligemma",
    "gemma3_text": "gemma3 shieldgemma2",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4_unified",
    "glm4v_moe_text": "glm4v_moe",
    "glm4v_text": "glm4v glm46v glmga",
    "glm5_next_text": "glm5_next",
    "glm_ocr_text": "glm_ocr",
    "granite4_vision_text": "granite4_vision",
    "granite_docling_text": "granite_docling",
    "hunyuan_vl_text": "hunyuan_vl",
    "hy_v4_vl_text": "hy_v4_vl",
    "hyperclovax": "hyperclovax_vision_v2",
    "lfm2": "lfm2_vl",
    "lfm3": "lfm3_vl",
    "llama": "deepseek_vl deepseek_vl_hybrid idefics3 janus llava llava_next llava_next_video "
    "perception_lm smolvlm video_llava vipllava",
    "llama4_text": "llama4",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "mistral": "idefics2 mistral3",
    "mistral_large4_text": "mistral_large4",
    "mllama_text_model": "mllama",
    "molmo2_text": "molmo2",
    "nemotron_h": "nemotron_h_omni",
    "opt": "blip-2 instructblip instructblipvideo",
    "paddleocr_vl_text": "paddleocr_vl",
    "persimmon": "fuyu",
    "qwen2": "fast_vlm got_ocr2 internvl llava_onevision ovis2 pp_chart2table video_llama_3",
    "qwen2_5_omni_text": "qwen2_5_omni qwen2_5_omni_thinker",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3": "lighton_ocr moss_transcribe_diarize qianfan_ocr",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "minicpm_ocr minicpmv4_6 minicpmv4_7 qwen3_5",
    "qwen3_omni_moe_text": "qwen3_omni_moe qwen3_omni_moe_thinker",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_vl_text": "cosmos3_omni qwen3_vl",
    "qwen4_exp_text": "qwen4_exp",
    "step3p5": "step3p7",
    "unlimited_ocr_text": "unlimited_ocr",
}
TEXT_PARTS: Mapping[str, str] = {
    composite: text for text, names in _COMPOSITES.items() for composite in names.split()
}
"""model_type of a model with several parts -> that of its text part, where the config is silent."""
