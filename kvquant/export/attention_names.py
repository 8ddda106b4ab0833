"""Finds each layer's attention in the names of a checkpoint's tensors.

Engines look for scales under the names of the *checkpoint*, not of the modules that Transformers
makes of it, so the names are taken as they lie on disk. A key is read from the left::

    model.language_model.layers . 3 . self_attn . k_proj . weight
    trunk                         layer  module   projection

A checkpoint may hold several trunks: a vision tower and layers for multi-token prediction have
attention of their own, and no cache that is quantized.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvquant.errors import ExportError

_PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "q": ("q_proj", "query", "to_q", "wq"),
    "k": ("k_proj", "key", "to_k", "wk"),
    "v": ("v_proj", "value", "to_v", "wv"),
    "kv": ("kv_proj",),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "W_pack", "att_proj", "qkv"),
    "q_a": ("q_a_proj", "wq_a"),
    "q_b": ("q_b_proj", "wq_b"),
    "kv_a": ("kv_a_proj_with_mqa", "wkv_a_with_mqa"),
    "kv_b": ("kv_b_proj", "wkv_b"),
    "o": ("o_proj", "out_proj", "c_proj", "dense", "to_out", "wo", "attn_out"),
}
"""What a projection makes -> how model families call it."""

_ROLES = {name: role for role, names in _PROJECTIONS.items() for name in names}
_KEY_MAKERS = frozenset({"k", "kv", "qkv", "kv_a"})

_WEIGHTS = ("weight", "weight_packed", "qweight")
"""compressed-tensors packs integers into ``weight_packed``, GPTQ and AWQ into ``qweight``."""

_MODULE = re.compile(r"(?P<trunk>.+?)\.(?P<layer>\d+)\.(?P<inside>.+)")
_TWICE = re.compile(r"\.(\d+)$")
_OTHER_TRUNK = re.compile(
    r"(^|[._])(vision|visual|vit|image|img|audio|speech|talker|code_predictor|mtp|nextn|draft|eagle)"
)
_TEXT_TRUNK = re.compile(r"(^|[._])(language|text|llm|thinker)")
_OTHER_MODULE = re.compile(r"(^|[._])(cross\w*|encoder_attn|indexer|linear_attn)($|[._])")


@dataclass(frozen=True)
class AttentionModule:
    """What one layer's attention is called in a checkpoint.

    Attributes:
        layer: Its layer in the whole model, from 0.
        path: Name of the module: ``model.layers.0.self_attn``, ``transformer.h.0.attn``.
        projections: The weights that make queries, keys, values and the output, by what they make:
            ``q``, ``k``, ``v``, ``o``; ``qkv`` or ``kv`` where one tensor makes several; for MLA
            ``kv_a``, ``kv_b``, and ``q_a``, ``q_b`` where queries are compressed too. Gemma 4 has
            layers without ``v``: their keys are their values.
    """

    layer: int
    path: str
    projections: Mapping[str, str]


def find_attention(names: Iterable[str], layers: Collection[int]) -> dict[int, AttentionModule]:
    """The attention of each of `layers`, by layer.

    Args:
        names: Names of all tensors in a checkpoint.
        layers: Layers that keep keys and values.

    Raises:
        ExportError: Nothing is known to make the keys of a layer, or more than one thing does.
    """
    trunks = {
        trunk: [module for module in modules if module.layer in layers]
        for trunk, modules in _trunks(names).items()
    }
    complete = [trunk for trunk in trunks if set(layers) <= _layers(trunks[trunk])]
    if layers and not complete:
        best = max(map(_layers, trunks.values()), key=len, default=set())
        raise ExportError(_missing(sorted(set(layers) - best), len(layers)))
    text = [trunk for trunk in complete if _TEXT_TRUNK.search(trunk)] or complete
    found: dict[int, AttentionModule] = {}
    for module in (module for trunk in text for module in trunks[trunk]):
        if module.layer in found:
            raise ExportError(
                f"the checkpoint has two attentions in layer {module.layer}, "
                f"{found[module.layer].path} and {module.path}: it is not clear which of them "
                f"fills the cache"
            )
        found[module.layer] = module
    return {layer: found[layer] for layer in layers}


def _layers(modules: Iterable[AttentionModule]) -> set[int]:
    return {module.layer for module in modules}


def _trunks(names: Iterable[str]) -> dict[str, list[AttentionModule]]:
    """Modules that make keys, by trunk."""
    found: dict[str, dict[tuple[int, str], dict[str, str]]] = {}
    for name in names:
        path, _, rest = name.rpartition(".")
        path, _, projection = path.rpartition(".")
        match = _MODULE.fullmatch(path) if rest in _WEIGHTS and projection in _ROLES else None
        if match is None or _OTHER_TRUNK.search(match["trunk"]):
            continue
        if _OTHER_MODULE.search(match["inside"]):
            continue
        modules = found.setdefault(match["trunk"], {})
        made = modules.setdefault((int(match["layer"]), match["inside"]), {})
        made[_ROLES[projection]] = name
    return {trunk: _numbered(trunk, modules) for trunk, modules in found.items()}


def _numbered(
    trunk: str, modules: Mapping[tuple[int, str], Mapping[str, str]]
) -> list[AttentionModule]:
    """Modules of a trunk that make keys, numbered as the layers of the cache are.

    LongCat attends twice in each layer, in ``self_attn.0`` and ``self_attn.1``, and each counts as
    a layer of the cache.
    """
    makers = {place: made for place, made in modules.items() if _KEY_MAKERS & made.keys()}
    matches = {inside: _TWICE.search(inside) for _, inside in makers}
    numbers = {inside: int(match[1]) for inside, match in matches.items() if match}
    each = 1 + max(numbers.values(), default=0)
    return [
        AttentionModule(layer * each + numbers.get(inside, 0), f"{trunk}.{layer}.{inside}", made)
        for (layer, inside), made in makers.items()
    ]


def _missing(absent: Sequence[int], wanted: int) -> str:
    return (
        f"the checkpoint has no weight that is known to make the keys of layer {absent[0]} "
        f"({len(absent)} such layers of {wanted}; looked for k_proj, qkv_proj, query_key_value, "
        f"c_attn, kv_a_proj_with_mqa and the like): under which names engines look for its scales "
        f"is not known"
    )
