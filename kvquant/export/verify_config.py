"""Reads how config.json and hf_quant_config.json declare a quantized cache, and what is odd there.

Two forms are in use. compressed-tensors has one block, with `kv_cache_scheme` for the cache.
ModelOpt has a flat form in config.json and an older, nested one in hf_quant_config.json.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .served_files import CONFIG, HF_QUANT_CONFIG, ServedDirectory
from .verify_report import Finding

COMPRESSED_TENSORS = "compressed-tensors"
MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8")
WITHOUT_SCALES = {
    "gptq": "GPTQ",
    "gptq_marlin": "GPTQ",
    "awq": "AWQ",
    "awq_marlin": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
    "gguf": "GGUF",
}
"""Ways to quantize weights beside which no engine loads KV scales."""

_SCHEME_KEYS = (
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"),
    *("actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
)
"""Of compressed-tensors 0.20; its class refuses others."""


def declared(served: ServedDirectory) -> Mapping[str, Any] | None:
    """quantization_config of config.json, or of its text part; None if there is none."""
    text = served.config.get("text_config")
    for part in (served.config, text if isinstance(text, Mapping) else {}):
        block = part.get("quantization_config")
        if isinstance(block, Mapping) and block:
            return block
    return None


def quant_method(block: Mapping[str, Any]) -> str:
    """``compressed-tensors``, ``modelopt``, ``gptq`` …; ``""`` if the block names none."""
    named = block.get("quant_method")
    if named is None and "quantization" in block:
        return "modelopt"
    return str(named or "").lower().replace("compressed_tensors", COMPRESSED_TENSORS)


def model_dtype(values: Mapping[str, Any]) -> str:
    """The type of a model's weights, by its config: ``bfloat16`` where that is silent."""
    text = values.get("text_config")
    for part in (values, text if isinstance(text, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                return str(part[key])
    return "bfloat16"


# --- ModelOpt -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOpt:
    """What a ModelOpt config declares.

    Attributes:
        quant_algo: How weights are quantized, in capitals; None where they are not.
        kv_algo: How the cache is, as the flat or the nested form says it; None if it does not.
        excluded: Patterns of modules whose weights are not quantized.
        flat: Whether it is in the flat form, in which engines know FP8 only.
    """

    quant_algo: str | None
    kv_algo: str | None
    excluded: tuple[str, ...]
    flat: bool


def read_modelopt(block: Mapping[str, Any]) -> ModelOpt:
    """Reads either form."""
    nested = block.get("quantization")
    if isinstance(nested, Mapping):
        algorithm = _capitals(nested.get("kv_cache_quant_algo"))
        excluded = nested.get("exclude_modules")
        return ModelOpt(_capitals(nested.get("quant_algo")), algorithm, _texts(excluded), False)
    return ModelOpt(
        _capitals(block.get("quant_algo")),
        _flat_kv_algo(block),
        _texts(block.get("ignore")),
        True,
    )


def _flat_kv_algo(block: Mapping[str, Any]) -> str | None:
    scheme = block.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        kind, bits = scheme.get("type"), scheme.get("num_bits")
        return "FP8" if (kind, bits) == ("float", 8) else f"{kind} of {bits} bits"
    return _capitals(scheme) or _capitals(block.get("kv_cache_quant_algo"))


def _capitals(name: Any) -> str | None:
    return str(name).upper() if name else None


def _texts(found: Any) -> tuple[str, ...]:
    return tuple(map(str, found)) if isinstance(found, list) else ()


def weights_not_quantized(served: ServedDirectory, found: ModelOpt, engine: str) -> list[Finding]:
    """Says so where weights are declared as quantized, and are not."""
    quantized = any(name.endswith("weight_scale") for name in served.names())
    if found.quant_algo is None or quantized or "*" in found.excluded:
        return []
    return [
        Finding(
            f"weights are declared as {found.quant_algo}, but no weight_scale is there: {engine} "
            f"would take 16-bit weights for quantized ones, and stops at them",
            'write "ignore": ["*"] ("exclude_modules" in hf_quant_config.json)',
        )
    ]


def contradiction(served: ServedDirectory) -> list[Finding]:
    """Says so where config.json and hf_quant_config.json do not agree."""
    block, beside = declared(served), served.hf_quant_config
    if block is None or beside is None:
        return []
    said, other = _summary(block), _summary(beside)
    if said == other:
        return []
    return [
        Finding(
            f"{CONFIG} declares {said}, but {HF_QUANT_CONFIG} {other}: vLLM and SGLang believe the "
            f"first, TensorRT-LLM the second",
            "make both say the same, or remove the one that the engine does not read",
        )
    ]


def _summary(block: Mapping[str, Any]) -> str:
    method = quant_method(block)
    if method not in MODELOPT:
        return method or "no quant_method"
    found = read_modelopt(block)
    rest = f", all but {', '.join(sorted(found.excluded))}" if found.excluded else ""
    return f"ModelOpt with weights in {found.quant_algo}, cache in {found.kv_algo}{rest}"


# --- compressed-tensors ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SchemeRules:
    """What an engine takes as kv_cache_scheme.

    Attributes:
        engine: Its name.
        strategies: Those that it knows.
        refusal: What it does with others: ``stops at it``, ``ignores it …``.
        integers: Whether it takes integers too.
        forbids: Whether it refuses keys that it does not know.
        symmetric: Whether ``symmetric`` has to be there.
    """

    engine: str
    strategies: Collection[str]
    refusal: str
    integers: bool = False
    forbids: bool = False
    symmetric: bool = False


def scheme_findings(block: Mapping[str, Any], rules: SchemeRules) -> list[Finding]:
    """What an engine makes of the KV part of a compressed-tensors block.

    A serious finding means that it loads no scales from this directory.
    """
    scheme = block.get("kv_cache_scheme")
    if scheme is None:
        return [
            Finding(
                f"quantization_config has no kv_cache_scheme: {rules.engine} keeps keys and values "
                f"in 16 bits and applies no scale",
                'add "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", '
                '"symmetric": true, "dynamic": false}',
            )
        ]
    if not isinstance(scheme, Mapping):
        return [
            Finding(
                f"kv_cache_scheme is {scheme!r}, no JSON object: {rules.engine} {rules.refusal}",
                "write it as compressed-tensors does",
            )
        ]
    problems = [
        Finding(f"kv_cache_scheme {what}: {rules.engine} {rules.refusal}", fix)
        for what, fix in _scheme_problems(scheme, rules)
    ]
    return [*problems, *_unknown_keys(scheme, rules)]


def _scheme_problems(scheme: Mapping[str, Any], rules: SchemeRules) -> list[tuple[str, str]]:
    kind, bits = scheme.get("type"), scheme.get("num_bits")
    static = "calibrate a static symmetric FP8 scheme, and export that"
    problems = []
    if (kind, bits) != ("float", 8) and not (rules.integers and kind in ("int", "float")):
        problems.append((f"has type {kind!r} with {bits} bits, not 'float' with 8", static))
    if scheme.get("strategy") not in rules.strategies:
        known = " or ".join(map(repr, rules.strategies))
        problems.append((f"has strategy {scheme.get('strategy')!r}, not {known}", static))
    if not scheme.get("symmetric", not rules.symmetric):
        problems.append((f"has symmetric {scheme.get('symmetric')!r}, not true", static))
    if scheme.get("dynamic"):
        problems.append((f"has dynamic {scheme['dynamic']!r}, so that scales are not read", static))
    return problems


def _unknown_keys(scheme: Mapping[str, Any], rules: SchemeRules) -> list[Finding]:
    unknown = sorted(set(scheme).difference(_SCHEME_KEYS))
    if not unknown:
        return []
    then = f"{rules.engine} refuses it" if rules.forbids else "compressed-tensors refuses it"
    return [
        Finding(
            f"kv_cache_scheme has the unknown key {', '.join(unknown)}: {then}",
            "remove it; put notes into a file of their own",
            serious=rules.forbids,
        )
    ]


def group_findings(block: Mapping[str, Any], engine: str, required: bool) -> list[Finding]:
    """What an engine makes of config_groups, the part about weights.

    Args:
        block: quantization_config.
        engine: Its name.
        required: Whether it refuses a block without them.
    """
    groups = block.get("config_groups")
    if isinstance(groups, Mapping):
        return _weightless(groups, engine)
    absent = "config_groups" not in block
    what = "quantization_config has no config_groups" if absent else f"config_groups is {groups!r}"
    stops = required or not absent
    then = f"{engine} stops at it" if stops else "Transformers stops at it"
    return [Finding(f"{what}: {then}", 'write "config_groups": {}', serious=stops)]


def _weightless(groups: Mapping[str, Any], engine: str) -> list[Finding]:
    findings = []
    for name, group in groups.items():
        targets = _texts(group.get("targets")) if isinstance(group, Mapping) else ()
        skipped = len(targets) == 1 and targets[0].endswith("Attention")
        if isinstance(group, Mapping) and group.get("weights") is None and not skipped:
            findings.append(
                Finding(
                    f"config_groups has {name!r} without weights (targets {', '.join(targets)}): "
                    f"{engine} stops at it",
                    "leave the group out; for a cache alone config_groups is {}",
                )
            )
    return findings
