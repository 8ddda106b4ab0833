"""What a set of scales belongs to: weights, adapters, tokenizer and chat template.

The weights' identity is a SHA-256 over the name, the shape and a fixed sample of values of each of
a model's tensors, as its checkpoint holds them (`kvquant.weight_samples`): the same for every
container and load dtype, and another one after a training step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .errors import FingerprintError, InputError
from .weight_samples import Sample, checkpoint_samples, model_samples, sample

LINEAGE_KEY = "kvquant_lineage"
"""Config entry of a merged model: what it was merged from."""

_TOLD_OTHERWISE = frozenset(
    (
        # by an adapter's tensors, their names, or the layers' scaling
        *("r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora"),
        *("target_modules", "target_parameters", "exclude_modules", "modules_to_save"),
        *("layers_to_transform", "layers_pattern", "trainable_token_indices", "bias", "lora_bias"),
        # by the base's tensors
        *("layer_replication", "fan_in_fan_out", "ensure_weight_tying", "megatron_config"),
        # only matters to training, or to where things are
        *("lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "runtime_config", "megatron_core", "inference_mode", "task_type"),
        *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    )
)
"""Settings of adapters that need not be looked at to tell one from another."""


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a model as served.

    Attributes:
        weights: SHA-256 of the base weights' sample; "" where unknown.
        adapters: SHA-256 of each active adapter, sorted. A merged model that records its lineage
            has the base's `weights` and its `adapters`.
        tokenizer: SHA-256 of vocabulary and special tokens; "" where unknown.
        chat_template: SHA-256 of the chat template; "" where there is none.
    """

    weights: str = ""
    adapters: tuple[str, ...] = ()
    tokenizer: str = ""
    chat_template: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Fingerprint:
        """Inverse of `to_dict`."""
        return cls(**{**values, "adapters": tuple(values["adapters"])})

    def differences(self, other: Fingerprint) -> list[str]:
        """What differs in a way that changes keys and values: weights, adapters."""
        return [
            name for name in ("weights", "adapters") if getattr(self, name) != getattr(other, name)
        ]

    def check(
        self, other: Fingerprint, mine: str = "the scales", theirs: str = "the model"
    ) -> None:
        """Makes sure that both are of one model and adapter set.

        Raises:
            FingerprintError: They are not; the message shows both and what differs.
        """
        different = self.differences(other)
        if different:
            raise FingerprintError(
                f"{mine} belong to {self}, {theirs} to {other}: {differing(different)}"
            )

    def __str__(self) -> str:
        """Short form for tables and messages: ``3f9a12bc04de + adapter 77aa01c2d3e4``."""
        names = [self.weights[:12] or "unknown weights"]
        names += [f"adapter {adapter[:12]}" for adapter in self.adapters]
        return " + ".join(names)


def differing(names: Sequence[str]) -> str:
    """What differs, for messages: ``weights and adapters differ``, ``tokenizer differs``."""
    *others, last = names
    if others:
        return f"{', '.join(others)} and {last} differ"
    return f"{last} {'differ' if last.endswith('s') else 'differs'}"


def check_model(model: Any) -> None:
    """Makes sure that `model` is one, not the name of one.

    Raises:
        InputError: It is something else.
    """
    if not (hasattr(model, "named_modules") and hasattr(model, "config")):
        raise InputError(
            f"model must be a model in memory, not {_shown(model)}: give what "
            "AutoModelForCausalLM.from_pretrained returns"
        )


def fingerprint(model: Any, tokenizer: Any = None) -> Fingerprint:
    """Identity of a model in memory, PEFT adapters included.

    Args:
        model: A Transformers model or a PeftModel around one.
        tokenizer: Its tokenizer, if it is to be part of the identity.

    Raises:
        FingerprintError: Weights are offloaded to where they cannot be looked at.
        InputError: `model` is no model, or `tokenizer` no tokenizer.
    """
    check_model(model)
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise InputError(
            f"tokenizer must be a tokenizer in memory, not {_shown(tokenizer)}: give what "
            "AutoTokenizer.from_pretrained returns"
        )
    base = _base_model(model)
    weights = _hash_samples(model_samples(base))
    weights, adapters = _origin(base.config, weights, _active_adapters(model))
    template = getattr(tokenizer, "chat_template", None)
    return Fingerprint(
        weights=weights,
        adapters=adapters,
        tokenizer="" if tokenizer is None else _hash_json(_vocabulary(tokenizer)),
        chat_template=_hash_json(template) if template else "",
    )


def checkpoint_fingerprint(directory: Path) -> Fingerprint | None:
    """Identity of the model in `directory`, as `fingerprint` gives it once that is loaded.

    Only config.json, the headers of the weight files and the sampled values are read.

    Returns:
        None where that cannot be told, such as for quantized weights: then load the model.

    Raises:
        FileFormatError: A weight file that is cut short, or an index that is none.
    """
    skeleton = _skeleton(directory)
    samples = None if skeleton is None else checkpoint_samples(skeleton)
    if samples is None:
        return None
    return Fingerprint(*_origin(skeleton.config, _hash_samples(samples), []))


def record_lineage(merged: Any, origin: Fingerprint) -> None:
    """Notes in a merged model's config what it was merged from.

    From then on `fingerprint` of that model, saved and loaded again in the dtype it has now, gives
    `origin`'s weights and adapters, until the weights change.
    """
    setattr(
        merged.config,
        LINEAGE_KEY,
        {
            "merged": _hash_samples(model_samples(merged)),
            "weights": origin.weights,
            "adapters": list(origin.adapters),
        },
    )


def _origin(config: Any, weights: str, adapters: list[str]) -> tuple[str, tuple[str, ...]]:
    """Weights and adapters; of a merged model that records its lineage, those of its parts."""
    lineage = getattr(config, LINEAGE_KEY, None)
    if lineage and lineage["merged"] == weights:
        weights, adapters = lineage["weights"], [*adapters, *lineage["adapters"]]
    return weights, tuple(sorted(adapters))


def _skeleton(directory: Path) -> Any:
    """The model that loading `directory` gives, but on the meta device, without values.

    None where it is quantized, so that loading makes other tensors of those on disk, and where it
    cannot be built: what is wrong then is for the one to say who loads it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        if getattr(config, "quantization_config", None):
            return None
        causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        auto_class = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        with torch.device("meta"):
            return auto_class.from_config(config)
    except Exception:
        return None
    finally:
        logging.set_verbosity(verbosity)


def _shown(value: Any) -> str:
    """Names as they are; of what has a long description, its kind."""
    return repr(value) if isinstance(value, (str, Path)) else f"a {type(value).__name__}"


def _base_model(model: Any) -> Any:
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


def _active_adapters(model: Any) -> list[str]:
    """Hash of each adapter that takes part in the forward pass right now."""
    if not hasattr(model, "peft_config"):
        return []
    name = getattr(model, "active_adapter", None)
    if isinstance(name, str) and model.peft_config[name].is_prompt_learning:
        # Beside the base, which may have adapters itself.
        own = [] if model._adapters_disabled else [_adapter_hash(model, name, {})]
        return sorted([*own, *_active_adapters(model.get_base_model())])
    return _injected_adapters(model)


def _injected_adapters(model: Any) -> list[str]:
    """Hash of each adapter that takes part by layers in the base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {
        path: module
        for path, module in _base_model(model).named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    if any(layer.disable_adapters for layer in layers.values()):
        return []
    active = {
        name
        for layer in layers.values()
        for name in layer.active_adapters
        if not layer.merged and name in model.peft_config
    }
    return sorted(_adapter_hash(model, name, layers) for name in active)


def _adapter_hash(model: Any, name: str, layers: dict[str, Any]) -> str:
    """Hash of an adapter's kind, scaling, settings and weights, whatever it is called.

    Values count as bfloat16: on a base in 16 bits, PEFT rounds some of an adapter's tensors.
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    samples = [sample(key.removeprefix("base_model.model."), state[key]) for key in sorted(state)]
    samples = [replace(entry, values=entry.values.bfloat16()) for entry in samples]
    scaling = [
        [path, float(layer.scaling[name])]
        for path, layer in sorted(layers.items())
        if isinstance(getattr(layer, "scaling", None), dict) and name in layer.scaling
    ]
    config = model.peft_config[name]
    settings = _adapter_settings(config)
    kind = str(config.peft_type.value)
    return _hash_samples(samples, [kind, *scaling, *([settings] if settings else [])])


def _adapter_settings(config: Any) -> dict[str, Any]:
    """What else changes an adapter's computation: settings that are not PEFT's defaults.

    Such as a seed, where random numbers that it draws are not among its tensors.
    """
    found = {}
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(config, field.name)
        if field.name not in _TOLD_OTHERWISE and value != default:
            found[field.name] = value
    settings: dict[str, Any] = json.loads(json.dumps(found, sort_keys=True, default=_plain))
    return settings


def _plain(value: Any) -> Any:
    """JSON of what is none."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _hash_samples(samples: Iterable[Sample], settings: Iterable[Any] = ()) -> str:
    digest = hashlib.sha256(json.dumps(list(settings)).encode())
    for entry in samples:
        digest.update(json.dumps([entry.name, entry.shape]).encode())
        digest.update(entry.values.float().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _vocabulary(tokenizer: Any) -> Any:
    tokens = {str(token): index for token, index in tokenizer.get_vocab().items()}
    return [tokens, {kind: str(token) for kind, token in tokenizer.special_tokens_map.items()}]
