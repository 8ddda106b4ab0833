"""What Transformers with compressed-tensors would do with a directory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from . import verify_config as config
from .attention_names import AttentionModule
from .served_files import CONFIG, Reading, ServedDirectory
from .served_model import ServedModel
from .simulated_loader import Absent, Loader, load, stored_scales
from .verify_files import file_findings
from .verify_report import Finding, LayerVerdict, some, spread
from .verify_scales import scale_findings

ENGINE = "Transformers"
_STRATEGIES = ("tensor", "attn_head")
_KNOWN_PROJECTIONS = frozenset({"k_proj", "v_proj", "qkv_proj", "kv_b_proj"})
"""By which compressed-tensors 0.20 tells an attention that has a cache."""


def check_transformers(
    served: ServedDirectory, model: ServedModel
) -> tuple[list[LayerVerdict], list[Finding]]:
    """The scales that Transformers would run each layer with, and what is wrong."""
    findings = file_findings(served, ENGINE, Reading.SINGLE_FIRST)
    block = config.declared(served)
    declared = [*_declared(served, block), *_overlooked(model)]
    findings += declared
    if block is None or any(finding.serious for finding in declared):
        return model.not_loaded(), findings
    files = served.read_by(Reading.SINGLE_FIRST)
    loaded = load(_loader(served, block), files, model.modules, model.geometry)
    findings += scale_findings(loaded)
    findings.append(
        Finding(
            "use transformers 5.22 with compressed-tensors 0.20: 5.24 skips the scheme of the "
            "cache without a word, 5.21 does not load it, and of 5.17 to 5.23 only 5.22 takes "
            "experts stored one by one beside an empty config_groups",
            "kvquant verify --run shows whether the scales are used",
            serious=False,
        )
    )
    return list(loaded.verdicts()), findings


def _declared(served: ServedDirectory, block: Mapping[str, Any] | None) -> list[Finding]:
    """What is wrong with the config; a serious finding means that no scales are loaded."""
    if block is None:
        count = len(stored_scales(served.read_by(Reading.SINGLE_FIRST)))
        return [
            Finding(
                f"{CONFIG} has no quantization_config: {ENGINE} ignores "
                f"{some(count, 'scale tensor')} as unexpected",
                'add "quantization_config" with "quant_method": "compressed-tensors"',
            )
        ]
    method = config.quant_method(block)
    if method != config.COMPRESSED_TENSORS:
        return [
            Finding(
                f"quant_method is {method!r}: {ENGINE} loads KV scales beside compressed-tensors "
                f"only",
                "export with --engine transformers",
            )
        ]
    rules = config.SchemeRules(
        ENGINE, _STRATEGIES, "does not use the scales", integers=True, forbids=True
    )
    found = [
        *config.scheme_findings(block, rules),
        *config.group_findings(block, ENGINE, required=True),
        *_integers(block),
    ]
    return found if any(finding.serious for finding in found) else [*found, *_parsed(block)]


def _overlooked(model: ServedModel) -> list[Finding]:
    """Layers in which compressed-tensors sees no attention that has a cache."""
    odd = {
        layer: sorted(name.split(".")[-2] for name in module.projections.values())
        for layer, module in model.modules.items()
        if not _KNOWN_PROJECTIONS & {name.split(".")[-2] for name in module.projections.values()}
    }

    def say(layer: int, where: str) -> tuple[str, str]:
        return (
            f"{where}: compressed-tensors takes no scales for an attention made of "
            f"{', '.join(odd[layer])}; it looks for k_proj, v_proj, qkv_proj or kv_b_proj",
            "try this model in another engine",
        )

    return spread(list(odd), model.modules, say)


def _integers(block: Mapping[str, Any]) -> list[Finding]:
    scheme = block.get("kv_cache_scheme")
    kind = scheme.get("type") if isinstance(scheme, Mapping) else None
    if kind != "int":
        return []
    return [
        Finding(
            f"kv_cache_scheme has type 'int': {ENGINE} simulates it, and no serving engine has a "
            f"static integer cache",
            "use it to see what integers would cost, and serve FP8",
            serious=False,
        )
    ]


def _parsed(block: Mapping[str, Any]) -> list[Finding]:
    """What compressed-tensors' own class says about the block, where it is installed."""
    try:
        quantization = import_module("compressed_tensors.quantization")
    except ImportError:
        return []
    try:
        quantization.QuantizationConfig.model_validate(dict(block))
    except (NotImplementedError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        return [Finding(f"compressed-tensors refuses quantization_config: {why}", "mend it")]
    return []


def _names(module: AttentionModule) -> tuple[str, str]:
    return f"{module.path}.k_scale", f"{module.path}.v_scale"


def _loader(served: ServedDirectory, block: Mapping[str, Any]) -> Loader:
    scheme = block["kv_cache_scheme"]
    return Loader(
        ENGINE,
        lambda name: name,
        _names,
        _names,
        Absent.GARBAGE,
        extras=("q_scale",),
        per_head=scheme.get("strategy") == "attn_head",
        shapes=((), (1,)),
        head_axes=(3,),
        held_in=config.model_dtype(served.config),
    )
