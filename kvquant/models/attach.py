"""Putting adapters from disk onto a base: all of each adapter, and nothing but the adapter."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AdapterError
from .source import first_line, read_adapter_config
from .switching import base_model, detach, set_active, without_warnings

BASE = "base"
"""Stands for the model without its adapters; no adapter gets this name."""

_PREFIX = "base_model.model."
# Initialisations that subtract from the base's weights what they put into the adapter.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterWarning(UserWarning):
    """An adapter fits its base, but something about the pair is unusual."""


def attach(model: Any, paths: Sequence[str | Path]) -> Any:
    """A PeftModel around `model` with all adapters loaded and active together.

    Names in the model are the names of the directories, made unique. Where an adapter was trained
    with more (or fewer) tokens, the base's embeddings are resized to it; new rows are those that
    the adapter brings, or zero.

    Raises:
        AdapterError: An adapter does not fit: other shapes, layers that the base lacks, tensors
            that the adapter lacks, another vocabulary than the other adapters; or it changes the
            base's own weights.
    """
    if not paths:
        raise AdapterError("no adapter given")
    if hasattr(model, "peft_config"):
        raise AdapterError("the model has adapters already: attach all of them at once")
    files = [_read_adapter(path, model) for path in paths]
    known_rows = _fit_vocabulary(model, files)
    names = _unique_names(files, model)
    peft_model: Any = None
    try:
        with without_warnings():
            for name, file in zip(names, files, strict=True):
                peft_model = _inject(peft_model or model, name, file)
                _load(peft_model, name, file, known_rows)
        set_active(peft_model, names)
    except BaseException:
        if peft_model is not None:
            detach(peft_model)
        raise
    return peft_model.requires_grad_(False).eval()


@dataclass(frozen=True)
class _AdapterFile:
    """An adapter as it lies on disk; `tensors` without PEFT's prefix."""

    path: str
    config: Any
    tensors: dict[str, Any]


def _read_adapter(path: str | Path, model: Any) -> _AdapterFile:
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    read_adapter_config(path)
    directory = str(Path(path).expanduser())
    try:
        config = PeftConfig.from_pretrained(directory)
        tensors = load_peft_weights(directory, device="cpu")
    except Exception as error:
        raise AdapterError(f"cannot read the adapter {path}: {first_line(error)}") from error
    config.inference_mode = True
    initialisation = str(getattr(config, "init_lora_weights", "")).lower()
    if initialisation.startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{path} was made with init_lora_weights={initialisation!r}, which changes the base: "
            "convert it to a plain LoRA first (save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    _warn_about_other_base(path, config, model)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    return _AdapterFile(directory, config, tensors)


def _warn_about_other_base(path: str | Path, config: Any, model: Any) -> None:
    trained_on, given = config.base_model_name_or_path, model.name_or_path
    if trained_on and given and _short_name(trained_on) != _short_name(given):
        warnings.warn(
            f"adapter {path} says that it was trained on {trained_on}, the base given is {given}",
            AdapterWarning,
            stacklevel=4,
        )


def _short_name(model: str) -> str:
    """The last part of a path or hub id; of a path into the hub's cache, the repository's name."""
    parts = Path(model).parts
    cached = [part for part in parts if part.startswith("models--")]
    return (cached[-1].split("--")[-1] if cached else parts[-1]).lower()


def _unique_names(files: Sequence[_AdapterFile], model: Any) -> list[str]:
    """Directory names, fit to be names of modules: ``a/fine``, ``b/fine`` → ``fine-1``, ``fine-2``.

    PEFT finds an adapter's tensors by its name between dots, and resets an adapter whose name is
    part of its type's prefix (``lora_``): names that occur there, in the model, in an adapter's
    tensors (``lora_A``), or as a method of a module dictionary get a number too.
    """
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
    from torch.nn import ModuleDict, ParameterDict

    stems = [re.sub(r"[^\w-]", "_", Path(file.path).resolve().name) for file in files]
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(files[0].config.peft_type, "")
    keys = itertools.chain(model.state_dict(), *(file.tensors for file in files))
    taken = {part for key in keys for part in key.split(".")}
    taken |= {BASE, *dir(ModuleDict()), *dir(ParameterDict())}
    names: list[str] = []
    for stem in stems:
        plain = stems.count(stem) == 1 and stem not in taken and stem not in prefix
        numbered = (f"{stem}-{number}" for number in itertools.count(1))
        free = (name for name in numbered if name not in names + stems)
        names.append(stem if plain else next(free))
    return names


def _fit_vocabulary(model: Any, files: Sequence[_AdapterFile]) -> int:
    """Resizes the base to the vocabulary that the adapters bring; returns the rows it had."""
    embedding = model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])
    sizes = {file.path: size for file in files if (size := _vocabulary(model, file.tensors))}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path} {size}" for path, size in sizes.items())
        raise AdapterError(f"adapters of different vocabularies cannot go together: {listed}")
    wanted = next(iter(sizes.values()), rows)
    if wanted != rows:
        model.resize_token_embeddings(wanted, mean_resizing=False)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            if layer is not None:
                layer.weight.data[rows:] = 0
    return min(rows, wanted)


def _vocabulary(model: Any, tensors: dict[str, Any]) -> int | None:
    """Tokens that an adapter was trained with, if its tensors tell."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is it for it in layers)]
    leaves = {
        "weight": 0,
        "modules_to_save.weight": 0,
        "original_module.weight": 0,
        "base_layer.weight": 0,
        "lora_embedding_A": 1,
        "lora_embedding_A.weight": 1,
    }
    sizes = [
        tensors[f"{name}.{leaf}"].shape[dim]
        for name in names
        for leaf, dim in leaves.items()
        if f"{name}.{leaf}" in tensors
    ]
    return max(sizes, default=None)


def _inject(model: Any, name: str, file: _AdapterFile) -> Any:
    """The PeftModel with freshly made layers for the adapter `name`."""
    from peft import PeftModel, PeftModelForCausalLM

    try:
        if not isinstance(model, PeftModel):
            model = PeftModelForCausalLM(model, file.config, adapter_name=name)
        else:
            model.add_adapter(name, file.config)
    except Exception as error:
        raise AdapterError(f"{file.path} does not fit its base: {first_line(error)}") from error
    model.peft_config[name].kvquant_path = file.path
    return model


def _load(model: Any, name: str, file: _AdapterFile, known_rows: int) -> None:
    """Fills the layers of the adapter `name` with its tensors, all of them and no others."""
    weights = base_model(model).state_dict()
    own = {key: weights[key].clone() for key in file.tensors if key in weights}
    mapping = getattr(base_model(model), "_checkpoint_conversion_mapping", None)
    try:
        result = model.load_adapter(file.path, name, torch_device="cpu", key_mapping=mapping)
    except KeyError as error:
        raise AdapterError(f"{file.path} lacks the tensor {error.args[0]}") from error
    except Exception as error:
        detail = re.sub(r"\s+", " ", str(error)).split("size mismatch for ")[-1][:200]
        raise AdapterError(f"{file.path} is for another base: {detail}") from error
    _put_back(model, own, known_rows, file.path)
    ours = re.compile(rf"\.{re.escape(name)}(\.|$)")
    missing = [key for key in result.missing_keys if ours.search(key)]
    # Saving resized embeddings writes modules_to_save a second time, under PEFT's inner name.
    foreign = [key for key in result.unexpected_keys if ".modules_to_save." not in key]
    if foreign or missing:
        verb, kind = ("has", "the base lacks") if foreign else ("lacks", "the base needs")
        names = [key.removeprefix(_PREFIX).replace(f".{name}", "") for key in foreign or missing]
        raise AdapterError(
            f"{file.path} {verb} {len(names)} tensors that {kind}, such as {names[0]}: "
            "it was trained on another base, or not saved completely"
        )


def _put_back(model: Any, before: dict[str, Any], known_rows: int, path: str) -> None:
    """Undoes what loading an adapter did to the base's own tensors.

    PEFT saves resized embeddings with an adapter, and loads them over the base's. Rows of tokens
    that the base knows must be the base's, up to the rounding of the adapter's dtype.
    """
    import torch

    now = base_model(model).state_dict()
    vocabulary = len(base_model(model).get_input_embeddings().weight)
    for key, old in before.items():
        if key not in now or torch.equal(now[key], old):
            continue
        rows = slice(known_rows if len(old) == vocabulary else None)
        if not torch.allclose(now[key][rows].float(), old[rows].float(), rtol=2**-7, atol=1e-5):
            raise AdapterError(
                f"{path} changes {key} of the base itself, which nothing can switch off: merge it "
                "with PEFT and calibrate the merged model"
            )
        now[key][rows] = old[rows]
