"""PEFT adapters: attach, describe, switch, merge; and leave the base as it was.

PEFT works in place: attaching injects layers into the base, merging adds to its weights. What is
measured on "the base" and on "the adapter" is only worth something if one does not leak into the
other, so everything that goes through here is undone, or done to a copy.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import AdapterError
from ..fingerprint import fingerprint, record_lineage
from .attach import BASE, AdapterWarning, attach
from .source import first_line
from .switching import (
    AdapterState,
    adapter_names,
    base_model,
    detach,
    set_active,
    without_warnings,
)

__all__ = [
    "BASE",
    "AdapterInfo",
    "AdapterWarning",
    "activate",
    "adapter_names",
    "attach",
    "base_model",
    "describe",
    "merge",
]

_KEY_VALUE_MODULE = re.compile(
    r"(^|[._])(k|v|key|value|kv_[ab]|qkv|c_attn|query_key_value|Wqkv)(_proj\w*)?$"
)


@dataclass(frozen=True)
class AdapterInfo:
    """What an attached adapter is.

    Attributes:
        name: Its name in the model.
        path: Directory it was loaded from, or None if it was made in memory.
        peft_type: ``LORA``, ``IA3``, …
        rank: LoRA rank without exceptions per layer, or None for other types.
        alpha: LoRA alpha, likewise.
        use_rslora: Whether scaling is alpha/√rank (rank-stabilized LoRA, arXiv:2312.03732).
        use_dora: Whether magnitudes are trained too (DoRA, arXiv:2402.09353).
        target_modules: Names of the modules that it changes, as ``k_proj``, sorted.
        modules_to_save: Names of the modules that it replaces, sorted.
        touches_kv: Whether it changes a module that makes keys or values, or the embeddings. Where
            it does not, it still changes keys and values of later layers through their input.
    """

    name: str
    path: str | None
    peft_type: str
    rank: int | None
    alpha: float | None
    use_rslora: bool
    use_dora: bool
    target_modules: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    touches_kv: bool


def describe(model: Any) -> list[AdapterInfo]:
    """What is attached to `model`, active or not."""
    return [_describe(model, name) for name in adapter_names(model)]


@contextmanager
def activate(model: Any, names: Sequence[str]) -> Iterator[None]:
    """Exactly these adapters take part, none for ``[]``; afterwards all is as it was.

    That covers active adapters, disabled layers, merged weights (bit for bit) and the
    ``requires_grad`` of every parameter.

    Raises:
        AdapterError: An adapter that is not attached, or two that replace the same module.
    """
    _check_names(model, names)
    if not adapter_names(model):
        yield
        return
    state = AdapterState(model)
    try:
        set_active(model, names)
        yield
    finally:
        state.restore()


def merge(model: Any, names: Sequence[str]) -> Any:
    """A copy of the base with the adapters `names` merged into its weights.

    Neither the base nor the adapters of `model` change. Needs memory for a second model. The copy's
    config notes what it was merged from, so that scales measured on the live adapters fit it.

    Raises:
        AdapterError: PEFT cannot merge these adapters, or the merged weights would not compute what
            the live adapters do: that is so for DoRA on a module that another adapter changes too.
    """
    _check_names(model, names)
    if not adapter_names(model):
        return copy.deepcopy(model)
    _check_magnitudes_alone(model, names)
    with activate(model, names):
        origin = fingerprint(model)
        copied = copy.deepcopy(model)
    if not names:
        return detach(copied)
    _untie(copied, names)
    with without_warnings():
        try:
            merged = copied.merge_and_unload(safe_merge=True, adapter_names=list(names))
        except (ValueError, NotImplementedError, AttributeError) as error:
            raise AdapterError(f"cannot merge {', '.join(names)}: {first_line(error)}") from error
    record_lineage(merged, origin)
    return merged


def _check_names(model: Any, names: Sequence[str]) -> None:
    attached = adapter_names(model)
    unknown = [name for name in names if name not in attached]
    if unknown:
        raise AdapterError(
            f"no adapter {unknown[0]!r} is attached: there are {', '.join(attached) or 'none'}"
        )


def _changed_modules(model: Any, name: str) -> list[str]:
    """Full names of the modules that the adapter `name` changes or replaces."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    changed = []
    for path, module in base_model(model).named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            parts = (getattr(module, attribute) for attribute in module.adapter_layer_names)
            if any(name in part for part in parts):
                changed.append(path)
    return changed


def _check_magnitudes_alone(model: Any, names: Sequence[str]) -> None:
    """DoRA rescales by the norm of base + its own update; merging in turn mixes in the others'."""
    for name in names:
        if not getattr(model.peft_config[name], "use_dora", False):
            continue
        for other in names:
            shared = set(_changed_modules(model, name)) & set(_changed_modules(model, other))
            if other != name and shared:
                raise AdapterError(
                    f"{name} (DoRA) and {other} both change {sorted(shared)[0]}: merged one after "
                    "the other they would not compute what they do live; merge one of them"
                )


def _untie(model: Any, names: Sequence[str]) -> None:
    """Gives the output embeddings weights of their own if an adapter changes one of a tied pair."""
    import torch

    base = base_model(model)
    modules = dict(base.named_modules())
    pair = base.get_input_embeddings(), base.get_output_embeddings()
    changed = [modules[path] for name in names for path in _changed_modules(model, name)]
    if None in pair or not any(layer in changed for layer in pair):
        return
    if pair[0].weight is pair[1].weight:
        outputs = getattr(pair[1], "base_layer", pair[1])
        outputs.weight = torch.nn.Parameter(outputs.weight.detach().clone(), requires_grad=False)


def _describe(model: Any, name: str) -> AdapterInfo:
    config = model.peft_config[name]
    changed = _changed_modules(model, name)
    embeddings = base_model(model).get_input_embeddings()
    paths = dict(base_model(model).named_modules())
    replaced = tuple(sorted(getattr(config, "modules_to_save", None) or ()))
    leaves = {path.rpartition(".")[2] for path in changed}
    return AdapterInfo(
        name=name,
        path=getattr(config, "kvquant_path", None),
        peft_type=str(getattr(config.peft_type, "value", config.peft_type)),
        rank=getattr(config, "r", None),
        alpha=getattr(config, "lora_alpha", None),
        use_rslora=bool(getattr(config, "use_rslora", False)),
        use_dora=bool(getattr(config, "use_dora", False)),
        target_modules=tuple(sorted(leaves - set(replaced))),
        modules_to_save=replaced,
        touches_kv=any(
            _KEY_VALUE_MODULE.search(path) or paths[path] is embeddings for path in changed
        ),
    )
