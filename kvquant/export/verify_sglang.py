"""What SGLang would do with a directory: 0.5.23, and older versions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from . import verify_config as config
from .loader_rules import (
    sglang_knows,
    sglang_names,
    sglang_parameter,
    sglang_parameters,
    sglang_refuses,
)
from .served_files import CONFIG, HF_QUANT_CONFIG, Reading, ServedDirectory
from .served_model import ServedModel
from .simulated_loader import Absent, Loader, load, stored_scales
from .verify_files import file_findings
from .verify_report import Finding, LayerVerdict, some
from .verify_scales import scale_findings

ENGINE = "SGLang"


def check_sglang(
    served: ServedDirectory, model: ServedModel, *, older: bool = False
) -> tuple[list[LayerVerdict], list[Finding]]:
    """The scales that SGLang would serve each layer with, and what is wrong.

    Args:
        served: What lies in the directory.
        model: Its attention.
        older: Whether a version before 0.5.23 is meant, which knows nothing of compressed-tensors'
            scales.
    """
    findings = [*file_findings(served, ENGINE, Reading.INDEXED), *config.contradiction(served)]
    declared = _declared(served, older)
    findings += declared
    if any(finding.serious for finding in declared):
        return model.not_loaded(), findings
    loader = _loader(served.architecture)
    loaded = load(loader, served.read_by(Reading.INDEXED), model.modules, model.geometry)
    findings += _unknown_class(served.architecture)
    findings += scale_findings(loaded)
    findings.append(
        Finding(
            "launch with --kv-cache-dtype fp8_e4m3, and SGLANG_ENABLE_WEIGHT_LOADER_V2 not set; it "
            'logs "no scaling factors provided" even though it loads these',
            serious=False,
        )
    )
    return list(loaded.verdicts()), findings


def _declared(served: ServedDirectory, older: bool) -> list[Finding]:
    """What is wrong with the config; a serious finding means that no scales are loaded."""
    block = config.declared(served) or served.hf_quant_config
    if block is None:
        return [_undeclared(served)]
    method = config.quant_method(block)
    if method == config.COMPRESSED_TENSORS:
        return _compressed_tensors(block, older)
    if method in config.MODELOPT:
        return _modelopt(served, block)
    if method in ("fp8", "quark"):
        return []
    known = config.WITHOUT_SCALES.get(method)
    how = f"quantized with {known}" if known else f"declared as quant_method {method!r}"
    return [
        Finding(
            f"the weights are {how}: {ENGINE} loads no KV scales beside them, and serves "
            f"--kv-cache-dtype fp8_e4m3 at scale 1.0",
            "export from the unquantized model",
        )
    ]


def _undeclared(served: ServedDirectory) -> Finding:
    count = len(stored_scales(served.read_by(Reading.INDEXED)))
    then = (
        f"drops the {some(count, 'scale tensor')} without a word and" if count else "finds none and"
    )
    return Finding(
        f"{CONFIG} has no quantization_config: {ENGINE} has no place for scales, {then} serves "
        f"--kv-cache-dtype fp8_e4m3 at scale 1.0",
        'add "quantization_config" with a "kv_cache_scheme"',
    )


def _compressed_tensors(block: Mapping[str, Any], older: bool) -> list[Finding]:
    if older:
        return [
            Finding(
                "scales are declared by compressed-tensors, which SGLang before 0.5.23 drops "
                "without a word",
                "use SGLang 0.5.23, or export with --engine sglang-modelopt",
            )
        ]
    rules = config.SchemeRules(
        ENGINE, ("tensor",), "ignores it with a warning, and serves at scale 1.0"
    )
    return [
        *config.scheme_findings(block, rules),
        *config.group_findings(block, ENGINE, required=False),
    ]


def _modelopt(served: ServedDirectory, block: Mapping[str, Any]) -> list[Finding]:
    found = config.read_modelopt(block)
    where = CONFIG if config.declared(served) else HF_QUANT_CONFIG
    findings = config.weights_not_quantized(served, found, ENGINE)
    if found.quant_algo is None:
        findings.append(
            Finding(
                f"{where} has no quant_algo: {ENGINE} stops at it",
                'for unquantized weights write "quant_algo": "FP8" with "ignore": ["*"]',
            )
        )
    if found.kv_algo is None:
        findings.append(
            Finding(
                f"{where} does not say how the cache is quantized: {ENGINE} has no place for "
                f"scales and serves --kv-cache-dtype fp8_e4m3 at scale 1.0",
                'add "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": false}',
            )
        )
    elif found.kv_algo == "NVFP4":
        findings.append(
            Finding(
                f"{where} declares the cache as NVFP4: {ENGINE} multiplies such scales by 6, but "
                f"ModelOpt and TensorRT-LLM define them as amax / 448",
                "serve this one with TensorRT-LLM, or export FP8",
            )
        )
    return findings


def _unknown_class(architecture: str) -> list[Finding]:
    if sglang_knows(architecture):
        return []
    return [
        Finding(
            f"how {ENGINE} loads scales of {architecture or 'a model without architectures'} is "
            f"not known here; taken for one that renames nothing",
            "look into the load_weights of its model class",
            serious=False,
        )
    ]


def _loader(architecture: str) -> Loader:
    return Loader(
        ENGINE,
        partial(sglang_parameter, architecture=architecture),
        lambda module: sglang_parameters(module.path, architecture),
        lambda module: sglang_names(module.path, architecture),
        Absent.COPIED,
        not_positive="takes that for a missing scale, or stops with an AssertionError",
        refuses=partial(sglang_refuses, architecture=architecture),
    )
