"""What TensorRT-LLM's PyTorch backend would do with a directory, for an FP8 or an NVFP4 cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from . import verify_config as config
from .attention_names import AttentionModule
from .served_files import CONFIG, HF_QUANT_CONFIG, Reading, ServedDirectory
from .served_model import ServedModel
from .simulated_loader import Absent, Loader, load, stored_scales
from .verify_files import file_findings
from .verify_report import Finding, LayerVerdict, ranges, some
from .verify_scales import scale_findings

ENGINE = "TensorRT-LLM"
_LEGACY = re.compile(r"kv_cache_scaling_factor$")


def check_tensorrt_llm(
    served: ServedDirectory, model: ServedModel, *, nvfp4: bool = False
) -> tuple[list[LayerVerdict], list[Finding]]:
    """The scales that TensorRT-LLM would serve each layer with, and what is wrong.

    Args:
        served: What lies in the directory.
        model: Its attention.
        nvfp4: Whether the cache is NVFP4, whose scales are used; those of FP8 are not.
    """
    algorithm = "NVFP4" if nvfp4 else "FP8"
    findings = file_findings(served, ENGINE, Reading.NOT_CONSOLIDATED)
    findings += config.contradiction(served)
    declared = [*_declared(served, algorithm), *(_latent(model) if nvfp4 else ())]
    findings += declared
    if any(finding.serious for finding in declared):
        return model.not_loaded(), findings
    files = served.read_by(Reading.NOT_CONSOLIDATED)
    launch = Finding(
        f"launch it as it is, or with --kv_cache_dtype {algorithm.lower()}, and "
        f"TRTLLM_LOAD_KV_SCALES not set to 0",
        serious=False,
    )
    if not nvfp4:
        return _fp8(model), [*findings, _unused(len(stored_scales(files))), launch]
    loaded = load(_LOADER, files, model.modules, model.geometry)
    return list(loaded.verdicts()), [*findings, *scale_findings(loaded), launch]


def _latent(model: ServedModel) -> list[Finding]:
    layers = model.latent_layers
    if not layers:
        return []
    return [
        Finding(
            f"layers {ranges(layers)} keep a latent (MLA): {ENGINE} takes NVFP4 scales with k_proj "
            f"and v_proj, which such layers do not have",
            "serve an FP8 cache (--engine tensorrt-llm)",
        )
    ]


def _fp8(model: ServedModel) -> list[LayerVerdict]:
    source = "1.0 by design"
    return [LayerVerdict(i, None, None, (1.0,), (1.0,), source) for i in sorted(model.modules)]


def _unused(count: int) -> Finding:
    held = f", the {some(count, 'scale tensor')} here included" if count else ""
    return Finding(
        f"{ENGINE} serves an FP8 cache at scale 1.0 and ignores calibrated scales{held}",
        "serve NVFP4 (--engine tensorrt-llm-nvfp4), which uses them, or another engine",
        serious=False,
    )


# --- config ---------------------------------------------------------------------------------------


def _declared(served: ServedDirectory, algorithm: str) -> list[Finding]:
    """What is wrong with the config; a serious finding means that no scales are loaded."""
    inline, beside = config.declared(served), served.hf_quant_config
    block = beside if beside is not None else inline
    if block is None:
        return [
            Finding(
                f"there is neither {HF_QUANT_CONFIG} nor a quantization_config: {ENGINE} keeps the "
                f"cache in 16 bits",
                f'write {HF_QUANT_CONFIG} with "kv_cache_quant_algo": "{algorithm}"',
            )
        ]
    findings = _modelopt(block, algorithm, HF_QUANT_CONFIG if beside is not None else CONFIG)
    if inline is not None and _is_read(inline, beside):
        findings += _inline(inline)
    return findings


def _is_read(inline: Mapping[str, Any], beside: Mapping[str, Any] | None) -> bool:
    """Whether quantization_config is looked at, though hf_quant_config.json comes first."""
    return beside is None or config.read_modelopt(beside).quant_algo is None


def _inline(block: Mapping[str, Any]) -> list[Finding]:
    if config.quant_method(block) != config.COMPRESSED_TENSORS:
        return []
    groups = block.get("config_groups")
    if groups:
        return [
            Finding(
                f"{CONFIG} has a compressed-tensors block, from which {ENGINE} takes no scales of "
                f"a cache",
                "export with --engine tensorrt-llm-nvfp4 into a directory of its own",
            )
        ]
    return [
        Finding(
            f"{CONFIG} has a compressed-tensors block with config_groups {groups!r}: {ENGINE} "
            f"stops at it (ValueError: config_groups is empty)",
            f"take quantization_config out of {CONFIG}; {HF_QUANT_CONFIG} is enough",
        )
    ]


def _modelopt(block: Mapping[str, Any], algorithm: str, where: str) -> list[Finding]:
    method = config.quant_method(block)
    if method == config.COMPRESSED_TENSORS:
        return []  # said by _inline
    if method not in config.MODELOPT:
        known = config.WITHOUT_SCALES.get(method, repr(method))
        return [
            Finding(
                f"the weights are quantized with {known}, and nothing declares the cache as "
                f"{algorithm}",
                "export from the unquantized model",
            )
        ]
    found = config.read_modelopt(block)
    if found.kv_algo == algorithm and not (found.flat and algorithm != "FP8"):
        return []
    if found.flat and found.kv_algo == algorithm:
        return [
            Finding(
                f"{where} declares the cache as {algorithm} in the flat form, in which {ENGINE} "
                f"recognises FP8 only: it keeps the cache in 16 bits",
                f"write {HF_QUANT_CONFIG} in the nested form",
            )
        ]
    return [
        Finding(
            f"{where} declares the cache as {found.kv_algo}, not {algorithm}",
            f'write "kv_cache_quant_algo": "{algorithm}" into {HF_QUANT_CONFIG}',
        )
    ]


# --- names ----------------------------------------------------------------------------------------


def _names(module: AttentionModule) -> tuple[str, str]:
    return f"{module.path}.k_proj.k_scale", f"{module.path}.v_proj.v_scale"


_LOADER = Loader(
    ENGINE,
    lambda name: name,
    _names,
    _names,
    Absent.STOPS,
    not_positive="divides by it",
)
