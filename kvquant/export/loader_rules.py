"""By which names each engine's loader looks for KV scales.

Pure functions from the name of a tensor in a checkpoint to the name of the parameter that it would
be loaded into. Whether the model has such a parameter is another question (`verify_scales`): a
name that leads nowhere is dropped, usually without a word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import sglang_models

_KV_SCALE = re.compile(
    r"(?:^|[._])(?:"
    r"(?:[qkv]|kv|query|key|value)_(?:global_|cache_)?scales?"
    r"|[qkv]_proj\.output_scale|prob_output_scale|prob_scale"
    r"|[kv]_cache\.scale|self_attn\.q\.scale"
    r"|(?:kv|k|v|key|value)_cache_scaling_factor"
    r")$"
)
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def is_kv_scale(name: str) -> bool:
    """Whether somebody means this tensor to be a scale of a KV cache, in whatever style.

    Scales of weights and activations (``weight_scale``, ``input_scale``) are not.
    """
    return _KV_SCALE.search(name) is not None


def layer_number(name: str) -> int | None:
    """The layer that a name speaks of: 3 for ``model.layers.3.self_attn.k_scale``."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


# --- vLLM -----------------------------------------------------------------------------------------

_Rules = Sequence[tuple[re.Pattern[str], str]]


def _rules(*pairs: tuple[str, str]) -> _Rules:
    return tuple((re.compile(pattern), new) for pattern, new in pairs)


def _renamed(name: str, rules: _Rules) -> str:
    """The name that the first rule that fits makes of `name`."""
    for pattern, new in rules:
        renamed, count = pattern.subn(new, name)
        if count:
            return renamed
    return name


_VLLM: _Rules = _rules(
    (r"\.kv_scale$", r".attn.k_scale"),
    (r"\.self_attn\.[kv]_proj\.([kv])_scale$", r".self_attn.attn.\1_scale"),
    (r"\.self_attn\.qk(?:qk)?v_proj\.([kv])_scale$", r".self_attn.attn.\1_scale"),
    (r"\.mixer\.[kv]_proj\.([kv])_scale$", r".mixer.attn.\1_scale"),
    (r"\.self_attn\.q\.scale$", r".self_attn.attn.q_scale"),
    (r"\.self_attn\.([kv])_cache\.scale$", r".self_attn.attn.\1_scale"),
    (r"(?<!\.attn)\.([qkv])_scale$", r".attn.\1_scale"),
)
_OUTPUT_SCALES: _Rules = _rules(
    (r"\.([qkv])_proj\.output_scale$", r".attn.\1_scale"),
    (r"\.self_attn\.prob_output_scale$", r".self_attn.attn.prob_scale"),
)
_MLA: _Rules = _rules(
    (r"\.self_attn\.[kv]_proj\.([kv])_scale$", r".self_attn.mla_attn.mla_attn.\1_scale"),
)
_DOUBLED: _Rules = _rules((r"\.attn\.([kv])_scale$", r".attn.attn.\1_scale"))


def vllm_parameter(name: str, *, output_scales: bool = False, latent: bool = False) -> str:
    """The parameter that vLLM (August 2026) loads a tensor into.

    Args:
        name: In the checkpoint.
        output_scales: Whether names such as ``k_proj.output_scale`` are known, as with the
            configs ``fp8`` and ``quark``.
        latent: Whether the model has multi-head latent attention, whose parameters only the rule
            for ``k_proj.k_scale`` knows.
    """
    extra = (*(_MLA if latent else ()), *(_OUTPUT_SCALES if output_scales else ()))
    return _renamed(name, (*extra, *_VLLM))


def older_vllm_parameter(name: str, *, output_scales: bool = False, latent: bool = False) -> str:
    """The same for vLLM before June 2026, which doubled the ``.attn`` of names that have it."""
    doubled = _renamed(name, _DOUBLED)
    if doubled != name:
        return doubled
    return vllm_parameter(name, output_scales=output_scales, latent=latent)


# --- SGLang ---------------------------------------------------------------------------------------

_PROJECTIONS: _Rules = _rules(
    (r"\.(self_attn|mixer)\.([kv])_proj\.\2_scale$", r".\1.attn.\2_scale")
)
_SGLANG: _Rules = (
    *_PROJECTIONS,
    *_rules(
        (r"\.kv_scale$", r".attn.k_scale"),
        (r"\.([kv])_scale$", r".attn.\1_scale"),
        (r"\.([qkv])_proj\.output_scale$", r".attn.\1_scale"),
        (r"self_attn\.prob_output_scale$", r".attn.prob_scale"),
    ),
)
"""`maybe_remap_kv_scale_name`."""

_SGLANG_LATENT: _Rules = _rules((r"\.([kv])_proj\.\1_scale$", r".attn_mqa.\1_scale"))
_QWEN3_5: _Rules = (
    *_PROJECTIONS,
    *_rules((r"\.self_attn\.([kv])_scale$", r".self_attn.attn.\1_scale")),
)


def sglang_parameter(name: str, architecture: str) -> str:
    """The parameter that SGLang 0.5.23 loads a tensor into.

    Classes that drop ``.self_attn`` from all names are described as if they kept it.

    Args:
        name: In the checkpoint.
        architecture: The model class, as config.json names it; one that is not known here is
            taken for one that renames nothing.
    """
    for architectures, rules in (
        (sglang_models.RENAMING, _SGLANG),
        (sglang_models.LATENT, _SGLANG_LATENT),
        (sglang_models.QWEN3_5, _QWEN3_5),
        (sglang_models.QWEN3_NEXT, _PROJECTIONS),
    ):
        if architecture in architectures:
            return _renamed(name, rules)
    return name


def sglang_parameters(module: str, architecture: str) -> tuple[str, str]:
    """The parameters of an attention module that hold its scales in SGLang 0.5.23."""
    latent = sglang_models.LATENT | sglang_models.LATENT_LITERAL
    inner = "attn_mqa" if architecture in latent else "attn"
    return f"{module}.{inner}.k_scale", f"{module}.{inner}.v_scale"


def sglang_names(module: str, architecture: str) -> tuple[str, str]:
    """What to call the scales of an attention module so that SGLang 0.5.23 loads them.

    Args:
        module: Name of the attention module in the checkpoint: ``model.layers.0.self_attn``.
        architecture: The model class, as config.json names it.
    """
    if architecture in sglang_models.RENAMING | sglang_models.QWEN3_5:
        return f"{module}.k_scale", f"{module}.v_scale"
    if architecture in sglang_models.LATENT | sglang_models.QWEN3_NEXT:
        return f"{module}.k_proj.k_scale", f"{module}.v_proj.v_scale"
    return sglang_parameters(module, architecture)


def sglang_refuses(name: str, parameter: str, known: bool, architecture: str) -> bool:
    """Whether SGLang 0.5.23 stops with a KeyError at a scale.

    Args:
        name: In the checkpoint.
        parameter: Where it would go.
        known: Whether the model has this parameter.
        architecture: The model class, as config.json names it.
    """
    if architecture in sglang_models.NO_PROJECTIONS and re.search(r"\.[qkv]_proj\.", name):
        return True
    return architecture in sglang_models.STRICT and not known


def sglang_knows(architecture: str) -> bool:
    """Whether the loader of this model class was looked at."""
    return any(
        architecture in names
        for names in (
            sglang_models.RENAMING,
            sglang_models.LITERAL,
            sglang_models.STRICT,
            sglang_models.LATENT,
            sglang_models.LATENT_LITERAL,
            sglang_models.QWEN3_5,
            sglang_models.QWEN3_NEXT,
        )
    )
