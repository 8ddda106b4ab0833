"""How the model classes of SGLang 0.5.23 treat the names of KV scales, by architecture.

Each class loads its weights itself. Read in the wheel; which names load, are dropped or stop the
load was seen by running the `load_weights` of each class on one name after the other.
"""

from __future__ import annotations


def _classes(text: str) -> frozenset[str]:
    return frozenset(text.split())


RENAMING = _classes(
    """
    ApertusForCausalLM ArceeForCausalLM Cohere2ForCausalLM CohereForCausalLM DbrxForCausalLM
    DeciLMForCausalLM DiffusionGemmaForBlockDiffusion Exaone4ForCausalLM GPTJForCausalLM
    Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM
    Gemma3nForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration
    HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM IQuestCoderForCausalLM InternLM3ForCausalLM
    KimiK3LinearForCausalLM KimiLinearForCausalLM KimiVLForConditionalGeneration Llama4ForCausalLM
    Llama4ForConditionalGeneration LlamaForCausalLM MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM
    MiniMaxM3SparseForConditionalGeneration Ministral3ForCausalLM MistralForCausalLM
    MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration NemotronHForCausalLM
    NemotronHPuzzleForCausalLM Phi3ForCausalLM PhiMoEForCausalLM Qwen3ForCausalLM SDARForCausalLM
    SDARMoeForCausalLM TeleFLMForCausalLM
    """
)
"""Call `maybe_remap_kv_scale_name`: ``…self_attn.k_scale`` loads, ``…self_attn.attn.k_scale`` does
not."""

LITERAL = _classes(
    """
    AfmoeForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM
    Cohere2MoeForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
    GlmOcrForConditionalGeneration GptOssForCausalLM HYV3ForCausalLM IQuestLoopCoderForCausalLM
    LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM MellumForCausalLM MixtralForCausalLM
    MossVLForConditionalGeneration NanbeigeForCausalLM OPTForCausalLM OrionForCausalLM
    PersimmonForCausalLM PhiForCausalLM QWenLMHeadModel Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen2_5_VLForConditionalGeneration Qwen3MoeForCausalLM Qwen3OmniMoeForConditionalGeneration
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration SarvamMoEForCausalLM
    SolarForCausalLM Spark2_5ForCausalLM Starcoder2ForCausalLM Step3p5ForCausalLM XllmForCausalLM
    ZayaForCausalLM
    """
)
"""Rename nothing: only ``…self_attn.attn.k_scale`` loads, other names are dropped."""

STRICT = _classes(
    """
    BaichuanForCausalLM ChatGLMModel DeepseekForCausalLM DeepseekVL2ForCausalLM
    Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM ExaoneForCausalLM GPT2LMHeadModel
    GPTBigCodeForCausalLM GemmaForCausalLM GraniteForCausalLM GraniteMoeHybridForCausalLM
    GraniteSWAForCausalLM InternLM2ForCausalLM InternS1ForConditionalGeneration
    JetNemotronForCausalLM MiMoForCausalLM MiniCPMForCausalLM MiniCPMSALAForCausalLM
    MllamaForConditionalGeneration MuseSparkForConditionalGeneration Olmo2ForCausalLM
    OlmoForCausalLM OlmoeForCausalLM PaddleOCRVLForConditionalGeneration Phi3SmallForCausalLM
    Qwen2AudioForConditionalGeneration Qwen2VLForConditionalGeneration StableLmForCausalLM
    XverseForCausalLM XverseMoeForCausalLM
    """
)
"""Rename nothing, and stop with a KeyError at a name that is no parameter."""

NO_PROJECTIONS = _classes(
    """
    Cohere2ForCausalLM CohereForCausalLM Gemma2ForCausalLM Gemma3ForConditionalGeneration
    Gemma3nForConditionalGeneration HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
    KimiK3LinearForCausalLM KimiLinearForCausalLM MixtralForCausalLM OPTForCausalLM
    PhiMoEForCausalLM Starcoder2ForCausalLM
    """
)
"""Take ``k_proj.k_scale`` for a part of ``qkv_proj`` and stop with a KeyError."""

LATENT = _classes(
    """
    DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM GigaChat35ForCausalLM
    GlmMoeDsaForCausalLM HYV4ForCausalLM LongcatFlashForCausalLM
    """
)
"""Multi-head latent attention: ``…self_attn.k_proj.k_scale`` becomes ``…attn_mqa.k_scale``."""

LATENT_LITERAL = _classes("Glm4MoeLiteForCausalLM")
"""Likewise, but its renaming goes wrong: only ``…self_attn.attn_mqa.k_scale`` loads."""

QWEN3_5 = _classes(
    """
    InternS2MobiusForConditionalGeneration InternS2PreviewForConditionalGeneration
    Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
    Qwen3_5MoeForConditionalGeneration
    """
)
"""Drop ``.self_attn`` from every name, and know both styles of scales."""

QWEN3_NEXT = _classes("Qwen3NextForCausalLM Qwen4ExpForConditionalGeneration")
"""Drop ``.self_attn`` from every name, and know the scales of the projections only."""

JSON_SCALES = _classes(
    """
    ApertusForCausalLM ArceeForCausalLM Exaone4ForCausalLM Glm4ForCausalLM
    Glm5NextForConditionalGeneration HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
    IQuestCoderForCausalLM InternLM3ForCausalLM Llama4ForCausalLM LlamaForCausalLM
    MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM Ministral3ForCausalLM
    MistralForCausalLM OPTForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM
    SolarForCausalLM TeleFLMForCausalLM
    """
)
"""Define `load_kv_cache_scales`, which ``--quantization-param-path`` needs."""
