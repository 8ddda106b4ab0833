"""Model and tokenizer from whatever the user named, on the right device, and really loaded.

A calibration of weights that are not there gives scales that look like scales: missing, offloaded
or all-zero weights are errors here.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, ModelError
from . import smollm2
from .source import (
    ModelSource,
    fetch_tokenizer,
    fetch_weights,
    first_line,
    has_tokenizer,
    has_weights,
    read_config,
    resolve,
)

__all__ = [
    "LoadedModel",
    "ModelSource",
    "load",
    "load_tokenizer",
    "make_local",
    "read_config",
    "resolve",
]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KEY_PROJECTION = re.compile(r"(k_proj|kv_[ab]_proj|qkv|c_attn|query_key_value).*weight$")


@dataclass
class LoadedModel:
    """A model in eval mode and its tokenizer.

    Attributes:
        model: A Transformers model, or the PeftModel around it if there are adapters.
        tokenizer: Its tokenizer.
        source: What was loaded; `source.model` is a local directory by now.
    """

    model: Any
    tokenizer: Any
    source: ModelSource


def load(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> LoadedModel:
    """Loads model, tokenizer and adapters.

    Args:
        source: From `resolve`.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: the checkpoint's on an
            accelerator, float32 on a CPU, where it is exact and faster than bfloat16.
        device: ``cpu``, ``cuda``, ``cuda:1``, …; a GPU if there is one, else the CPU.
        device_map: ``auto`` spreads a model over all GPUs; takes the place of `device`.
        notify: Told what takes long: a download, a conversion. By default nobody is.

    Raises:
        ModelError: No usable model: the message says what is missing and what to do.
        AdapterError: An adapter does not fit the model.
        InputError: A dtype or device that there is not.
    """
    placement, torch_dtype = _placement(dtype, device, device_map)
    source = make_local(source, notify)
    with quiet():
        auto_class = _auto_class(source)
        tokenizer = load_tokenizer(source)
        model, missing = _read_weights(source, auto_class, placement, torch_dtype)
    _check_weights(model, missing, source)
    if source.adapters:
        from .adapters import attach

        model = attach(model, source.adapters)
    return LoadedModel(model.eval(), tokenizer, source)


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer alone, so that text can be checked before weights are read.

    The first adapter directory that brings a tokenizer of its own takes precedence over the base:
    fine-tunes add tokens and chat templates.

    Raises:
        ModelError: There is none, or it cannot be read.
    """
    for adapter in (Path(path).expanduser() for path in source.adapters):
        if has_tokenizer(adapter) and (adapter / "tokenizer_config.json").is_file():
            return _read_tokenizer(adapter, str(adapter))
    if source.gguf_file is not None:
        tokenizer = _read_tokenizer(Path(source.model), str(source), gguf_file=source.gguf_file)
        return _with_special_tokens(tokenizer, read_config(source))
    directory = fetch_tokenizer(source)
    if not has_tokenizer(directory):
        raise ModelError(
            f"{source} has no tokenizer (tokenizer.json or the like): copy it from the base model"
        )
    return _read_tokenizer(directory, str(source))


def _read_tokenizer(directory: Path, name: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as error:
        raise ModelError(f"cannot read the tokenizer of {name}: {first_line(error)}") from error


def _with_special_tokens(tokenizer: Any, config: dict[str, Any]) -> Any:
    """Special tokens as the GGUF metadata number them; older Transformers mix some of them up."""
    for kind in ("bos", "eos", "unk", "pad"):
        token_id = config.get(f"{kind}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokenizer):
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(token_id))
    return tokenizer


def _placement(
    dtype: str, device: str | None, device_map: str | None
) -> tuple[dict[str, Any], Any]:
    """Arguments of ``from_pretrained`` for where to load, and the dtype to load in."""
    import torch

    if dtype not in _DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: possible are {', '.join(_DTYPES)}")
    if device is not None and device_map is not None:
        raise InputError("device and device map exclude each other: give one of them")
    accelerated = torch.cuda.is_available()
    name = device or ("cuda" if accelerated else "cpu")
    if device_map is None:
        accelerated = _device_type(name) != "cpu"
    placement = {"device_map": device_map or {"": name}} if device_map or accelerated else {}
    if dtype == "auto":
        return placement, "auto" if accelerated else torch.float32
    return placement, getattr(torch, dtype)


def _device_type(name: str) -> str:
    """What kind of device `name` is, as ``cpu`` or ``cuda``.

    Raises:
        InputError: No such device on this machine.
    """
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"no device {name!r} on this machine: {first_line(error)}") from error
    return device.type


def make_local(
    source: ModelSource, notify: Callable[[str], None] = lambda message: None
) -> ModelSource:
    """The same source with all files on this machine: downloaded, and SmolLM2 converted."""
    if source.gguf_file is None:
        directory = fetch_weights(source, notify)
        if not has_weights(directory):
            raise ModelError(
                f"{source} has no complete weights (model*.safetensors or pytorch_model*.bin) "
                f"beside its config"
            )
        return replace(source, model=str(directory))
    if not smollm2.is_wheel_file(Path(source.model) / source.gguf_file):
        return source
    target = smollm2.converted_directory()
    if not target.is_dir():
        smollm2.convert(lambda directory: _write_checkpoint(source, directory), target, notify)
    return replace(source, model=str(target), gguf_file=None)


def _write_checkpoint(source: ModelSource, directory: Path) -> None:
    """Saves a GGUF model as float32 safetensors, tokenizer and chat template beside it.

    float32 holds the dequantized values exactly: a block's scale and minimum are float16, its
    codes 4 bits.
    """
    import torch

    with quiet():
        model, missing = _read_weights(source, _auto_class(source), {}, torch.float32)
        _check_weights(model, missing, source)
        vars(model.config).pop("quantization_config", None)  # makes save_pretrained refuse
        model.save_pretrained(directory)
        load_tokenizer(source).save_pretrained(directory)


def _auto_class(source: ModelSource) -> Any:
    """The Auto class that builds the model with its language-model head.

    Raises:
        ModelError: Transformers does not know the model, or it is no decoder with a KV cache.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto as auto

    try:
        config = AutoConfig.from_pretrained(source.model, **_local(source))
    except Exception as error:
        raise ModelError(f"cannot use the config of {source}: {first_line(error)}") from error
    masked = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{source} ({config.model_type}) is an encoder-decoder: {_WHAT_WORKS}")
    if masked and getattr(config, "is_decoder", True) is False:
        raise ModelError(f"{source} ({config.model_type}) is an encoder: {_WHAT_WORKS}")
    if config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    if config.model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    raise ModelError(f"{source} ({config.model_type}) is no language model: {_WHAT_WORKS}")


_WHAT_WORKS = "only decoder-only language models keep the cache that this is about"


def _local(source: ModelSource) -> dict[str, Any]:
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    return options if source.gguf_file is None else {**options, "gguf_file": source.gguf_file}


def _read_weights(
    source: ModelSource, auto_class: Any, placement: dict[str, Any], dtype: Any
) -> tuple[Any, set[str]]:
    """The model, and the names of the weights that its checkpoint lacks."""
    options = {**_local(source), **placement}
    with contextlib.ExitStack() as stack:
        if source.gguf_file is None:
            options |= _without_cache_scheme(source)
        else:
            from transformers import GgufConfig

            # Packed weights would bring their own matmul and attention kernels.
            options["quantization_config"] = GgufConfig(dequantize=True)
            # Its progress bar has no switch.
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            model, info = auto_class.from_pretrained(
                source.model,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # to be refused below, with names and shapes
                **options,
            )
        except Exception as error:
            raise ModelError(f"cannot load {source}: {first_line(error)}") from error
    if info["mismatched_keys"]:
        name, held, configured = sorted(info["mismatched_keys"])[0]
        raise ModelError(
            f"{len(info['mismatched_keys'])} weights of {source} do not fit its config: {name} is "
            f"{list(held)}, the config makes it {list(configured)}; is that the right config.json?"
        )
    return model, set(info["missing_keys"])


def _without_cache_scheme(source: ModelSource) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that keep an export's cache as the model makes it.

    compressed-tensors rounds what is cached where a checkpoint declares a quantized cache, as
    exports do: statistics would be those of rounded values. Quantized weights stay so.
    """
    from transformers import AutoConfig

    block = read_config(source).get("quantization_config")
    if not isinstance(block, dict) or not isinstance(block.get("kv_cache_scheme"), dict):
        return {}
    if block.get("quant_method") != "compressed-tensors":
        return {}
    config = AutoConfig.from_pretrained(source.model, **_local(source))
    if block.get("config_groups"):
        config.quantization_config = {**block, "kv_cache_scheme": None}
    else:
        vars(config).pop("quantization_config", None)
    return {"config": config}


def _check_weights(model: Any, missing: Iterable[str], source: ModelSource) -> None:
    """Makes sure that every weight holds what the checkpoint said.

    Raises:
        ModelError: Weights are missing (and so random), not in memory, or keys are all zero.
    """
    names = sorted(missing)
    if names:
        raise ModelError(
            f"the checkpoint of {source} lacks {len(names)} weights of the model, such as "
            f"{', '.join(names[:3])}: is it a {type(model).__name__}?"
        )
    offloaded = [name for name, value in model.named_parameters() if value.is_meta]
    if offloaded:
        raise ModelError(
            f"{len(offloaded)} weights of {source}, such as {offloaded[0]}, did not fit into "
            "memory and were offloaded: use more GPUs, a narrower dtype, or the CPU"
        )
    keys = [value for name, value in model.named_parameters() if _KEY_PROJECTION.search(name)]
    if keys and not any(bool(value.any()) for value in keys):
        raise ModelError(
            f"all key projections of {source} are zero: these are no trained weights, "
            "is it the right directory?"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Transformers' progress bars and notices off the terminal."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
