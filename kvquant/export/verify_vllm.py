"""What vLLM (source of August 2026) would do with a directory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kvquant.geometry import LayerKind

from . import verify_config as config
from .attention_names import AttentionModule
from .loader_rules import older_vllm_parameter, vllm_parameter
from .served_files import CONFIG, HF_QUANT_CONFIG, Reading, ServedDirectory
from .served_model import ServedModel
from .simulated_loader import Absent, Loaded, Loader, load, stored_scales
from .verify_files import file_findings
from .verify_report import Finding, LayerVerdict, ranges, some
from .verify_scales import scale_findings

ENGINE = "vLLM"
_BASE_PATH = ("fp8", "quark", *config.MODELOPT)
_FALLBACK_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")
_ALGORITHMS = (*_FALLBACK_ALGORITHMS, "MXFP8", "MIXED_PRECISION")
_SKIPPED = re.compile(r"--kv-cache-dtype-skip-layers((?: (?:\d+|sliding_window))+)")
_RECORD = "kvquant_export.json"


def check_vllm(
    served: ServedDirectory, model: ServedModel
) -> tuple[list[LayerVerdict], list[Finding]]:
    """The scales that vLLM would serve each layer with, and what is wrong."""
    findings = [*file_findings(served, ENGINE, Reading.INDEXED), *config.contradiction(served)]
    block = config.declared(served) or served.hf_quant_config
    declared = _declared(served, model, block)
    findings += declared
    if block is None or any(finding.serious for finding in declared):
        return model.not_loaded(), findings
    files = served.read_by(Reading.INDEXED)
    exact = _left_exact(served, model)

    def loaded(rename: Callable[..., str]) -> Loaded:
        loader = _loader(served, model, block, rename)
        return load(loader, files, model.modules, model.geometry, exact)

    now = loaded(vllm_parameter)
    findings += scale_findings(now)
    findings += _older(now, loaded(older_vllm_parameter))
    findings += _queries(now, block)
    findings += _launch(model, block, exact)
    return list(now.verdicts()), findings


# --- may it load scales at all --------------------------------------------------------------------


def _declared(
    served: ServedDirectory, model: ServedModel, block: Mapping[str, Any] | None
) -> list[Finding]:
    """What is wrong with the config; a serious finding means that no scales are loaded."""
    if block is None:
        return [_undeclared(served)]
    method = config.quant_method(block)
    if method == config.COMPRESSED_TENSORS:
        findings = _compressed_tensors(block)
    elif method in config.MODELOPT:
        findings = _modelopt(served, block)
    elif method in _BASE_PATH:
        findings = []
    else:
        return [_unfit(method)]
    return [*findings, *_latent(model, method, block)]


def _undeclared(served: ServedDirectory) -> Finding:
    scales = stored_scales(served.read_by(Reading.INDEXED))
    fix = (
        'add "quantization_config": {"quant_method": "compressed-tensors", "format": "dense", '
        '"config_groups": {}, "ignore": [], "kv_cache_scheme": {…}}'
    )
    if not scales:
        return Finding(
            f"{CONFIG} has no quantization_config, and there is no scale: {ENGINE} would serve "
            f"--kv-cache-dtype fp8 at scale 1.0",
            "export scales into this directory",
        )
    return Finding(
        f"{CONFIG} has no quantization_config, but there are {some(len(scales), 'scale tensor')}: "
        f"{ENGINE} stops at the first (no parameter named {scales[0].name})",
        fix,
    )


def _unfit(method: str) -> Finding:
    known = config.WITHOUT_SCALES.get(method)
    how = f"quantized with {known}" if known else f"declared as quant_method {method!r}"
    return Finding(
        f"the weights are {how}: {ENGINE} loads no KV scales beside them and serves "
        f"--kv-cache-dtype fp8 at scale 1.0",
        "export from the unquantized model, or use --kv-cache-dtype fp8_per_token_head",
    )


def _compressed_tensors(block: Mapping[str, Any]) -> list[Finding]:
    rules = config.SchemeRules(
        ENGINE, ("tensor", "attn_head"), "stops at it (NotImplementedError)", symmetric=True
    )
    groups = config.group_findings(block, ENGINE, required=_per_head(block))
    return [*config.scheme_findings(block, rules), *groups]


def _per_head(block: Mapping[str, Any]) -> bool:
    scheme = block.get("kv_cache_scheme")
    return isinstance(scheme, Mapping) and scheme.get("strategy") == "attn_head"


def _modelopt(served: ServedDirectory, block: Mapping[str, Any]) -> list[Finding]:
    found = config.read_modelopt(block)
    where = CONFIG if config.declared(served) else HF_QUANT_CONFIG
    known = _ALGORITHMS if where == CONFIG else _FALLBACK_ALGORITHMS
    findings = []
    if found.quant_algo not in known:
        what = "no quant_algo" if found.quant_algo is None else f"quant_algo {found.quant_algo}"
        findings.append(
            Finding(
                f"{where} has {what}: {ENGINE} stops at it",
                'for unquantized weights write "quant_algo": "FP8" with "ignore": ["*"]',
            )
        )
    producer = block.get("producer")
    if where == HF_QUANT_CONFIG and not _made_by_modelopt(producer):
        findings.append(
            Finding(
                f"{where} does not name modelopt as its producer: {ENGINE} does not read it, and "
                f"serves --kv-cache-dtype fp8 at scale 1.0",
                'add "producer": {"name": "modelopt"}',
            )
        )
    return [
        *findings,
        *config.weights_not_quantized(served, found, ENGINE),
        *_cache_undeclared(found, where),
    ]


def _made_by_modelopt(producer: Any) -> bool:
    return isinstance(producer, Mapping) and producer.get("name") == "modelopt"


def _cache_undeclared(found: config.ModelOpt, where: str) -> list[Finding]:
    if found.kv_algo == "FP8":
        return []
    declares = (
        f"declares the cache as {found.kv_algo}"
        if found.kv_algo
        else "does not say how the cache is quantized"
    )
    return [
        Finding(
            f"{where} {declares}: {ENGINE} keeps it in 16 bits unless launched with "
            f"--kv-cache-dtype fp8",
            'add "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": false}',
            serious=False,
        )
    ]


def _latent(model: ServedModel, method: str, block: Mapping[str, Any]) -> list[Finding]:
    layers = model.latent_layers
    mixed = method in config.MODELOPT and (
        method == "modelopt_mixed" or config.read_modelopt(block).quant_algo == "MIXED_PRECISION"
    )
    if not layers or (method in config.MODELOPT and not mixed):
        return []
    return [
        Finding(
            f"layers {ranges(layers)} keep a latent (MLA), for which {ENGINE} loads scales beside "
            f"ModelOpt configs only, not beside {'mixed ones' if mixed else method}: they are "
            f"served at 1.0",
            'declare {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"], '
            '"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": false}}',
        )
    ]


# --- how it loads them ----------------------------------------------------------------------------


def _loader(
    served: ServedDirectory,
    model: ServedModel,
    block: Mapping[str, Any],
    rename: Callable[..., str],
) -> Loader:
    method, latent = config.quant_method(block), bool(model.latent_layers)
    loader = Loader(
        ENGINE,
        partial(rename, output_scales=method in ("fp8", "quark"), latent=latent),
        partial(_parameters, latent=latent),
        partial(_names, latent=latent),
        Absent.COPIED,
        extras=("q_scale", "prob_scale"),
        not_positive="takes that for a missing scale, or stops with an AssertionError",
        held_in=config.model_dtype(served.config),
    )
    if method != config.COMPRESSED_TENSORS:
        return loader
    return replace(
        loader,
        absent=Absent.ONE,
        extras=("q_scale",),
        per_head=_per_head(block),
        not_positive="uses it as it is",
        held_in="float32",
    )


def _parameters(module: AttentionModule, latent: bool) -> tuple[str, str]:
    inner = "mla_attn.mla_attn" if latent else "attn"
    return f"{module.path}.{inner}.k_scale", f"{module.path}.{inner}.v_scale"


def _names(module: AttentionModule, latent: bool) -> tuple[str, str]:
    if latent:
        return f"{module.path}.k_proj.k_scale", f"{module.path}.v_proj.v_scale"
    # A module that is called attn itself is not renamed: GPT-2.
    prefix = f"{module.path}.attn" if module.path.endswith(".attn") else module.path
    return f"{prefix}.k_scale", f"{prefix}.v_scale"


def _left_exact(served: ServedDirectory, model: ServedModel) -> frozenset[int]:
    """Layers that the record of the export launches unquantized."""
    try:
        record = (served.path / _RECORD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return frozenset()
    words = {word for match in _SKIPPED.finditer(record) for word in match[1].split()}
    sliding = (i for i in model.modules if model.geometry.layers[i].kind is LayerKind.SLIDING)
    named = {int(word) for word in words if word.isdigit()}
    return frozenset(named.union(sliding if "sliding_window" in words else ()))


# --- remarks --------------------------------------------------------------------------------------


def _older(now: Loaded, then: Loaded) -> list[Finding]:
    """Layers for which older versions do not find what newer ones find."""
    lost = [i for i, slots in now.found.items() if all(slots) and not all(then.found[i])]
    if not lost:
        return []
    return [
        Finding(
            f"vLLM before June 2026 drops names such as {now.found[lost[0]][0][-1].name}, and "
            f"serves layers {ranges(lost)} at 1.0",
            "use a newer vLLM",
            serious=False,
        )
    ]


def _queries(loaded: Loaded, block: Mapping[str, Any]) -> list[Finding]:
    parameters = [loaded.loader.parameter(stored.name) for stored in loaded.scales]
    if (
        config.quant_method(block) == config.COMPRESSED_TENSORS
        or any(name.endswith(".q_scale") for name in parameters)
        or not all(map(all, loaded.found.values()))
    ):
        return []
    return [
        Finding(
            f"there are no scales of queries: {ENGINE} takes the keys' for them where attention "
            f"runs in FP8 (FlashAttention 3)",
            "nothing, unless queries are far larger than keys",
            serious=False,
        )
    ]


def _launch(model: ServedModel, block: Mapping[str, Any], exact: frozenset[int]) -> list[Finding]:
    skipped = f" --kv-cache-dtype-skip-layers {' '.join(map(str, sorted(exact)))}" if exact else ""
    latent = ", and fp8_ds_mla uses scales of its own" if model.latent_layers else ""
    remarks = [
        Finding(
            f"launch with --kv-cache-dtype fp8{skipped}: some versions do not choose it "
            f"themselves, and fp8_e5m2 is refused beside scales{latent}",
            serious=False,
        )
    ]
    if _per_head(block):
        remarks.append(
            Finding(
                "scales per head need the backend FlashAttention 3 or newer and vLLM from "
                "January 2026 on",
                serious=False,
            )
        )
    odd = [
        layer
        for layer in sorted(model.modules)
        if layer not in model.latent_layers and model.geometry.layers[layer].key_dim % 16
    ]
    if odd:
        remarks.append(
            Finding(
                f"layers {ranges(odd)} have heads of {model.geometry.layers[odd[0]].key_dim}, no "
                f"multiple of 16: few backends of {ENGINE} keep them in FP8",
                "try the launch before relying on it",
                serious=False,
            )
        )
    return remarks
