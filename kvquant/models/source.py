"""What a model name stands for: a directory, a hub id, a GGUF file, an adapter, or ``smollm2``.

Nothing here imports torch, so that a wrong name or an unfit config is reported in a tenth of a
second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import AdapterError, ModelError
from . import smollm2

ADAPTER_CONFIG = "adapter_config.json"
_CONFIGS = ("config.json", ADAPTER_CONFIG)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")
_TEXT_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".json", ".pt")

# Types that add entries to the cache which are not the model's own keys and values.
_PROMPT_TYPES = frozenset(
    {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE"}
)


@dataclass(frozen=True)
class ModelSource:
    """What was asked for, resolved.

    Attributes:
        model: Directory of the base model, or its id on the Hugging Face hub.
        adapters: Adapter directories, in the order in which they were named.
        requested: What the user named: the model, or the adapter that leads to it.
        base: The base model by the name that the user or the adapter's config gives it.
        gguf_file: Name of the GGUF file in the directory `model`, else None.
    """

    model: str
    adapters: tuple[str, ...] = ()
    requested: str = ""
    base: str = ""
    gguf_file: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether all files lie on this machine already."""
        return Path(self.model).is_dir()

    def __str__(self) -> str:
        """For messages."""
        return self.requested or self.model


def resolve(name: str, *, base: str | None = None, adapters: Sequence[str] = ()) -> ModelSource:
    """Finds what `name` stands for, reading nothing larger than a config.

    Args:
        name: Directory, hub id, GGUF file, PEFT adapter directory, or ``smollm2``.
        base: Base model of an adapter directory, in place of the one its config names.
        adapters: Further adapter directories.

    Raises:
        ModelError: Neither a path nor a possible hub id, or a directory that is no model.
        AdapterError: An adapter directory that is none, or is of a kind that cannot be calibrated.
    """
    if not is_adapter_directory(name):
        if base is not None:
            raise ModelError(
                f"--base goes with an adapter directory, and {name} has no {ADAPTER_CONFIG}: "
                f"give either {name} or {base} as the model"
            )
        for adapter in adapters:
            read_adapter_config(adapter)
        located = replace(_locate(name), requested=name, base=name)
        return replace(located, adapters=tuple(adapters))
    directories = (name, *adapters)
    configs = [read_adapter_config(directory) for directory in directories]
    return replace(_locate_base(name, configs[0], base), adapters=directories, requested=name)


def is_adapter_directory(path: str | Path) -> bool:
    """Whether `path` is a directory with a PEFT adapter config."""
    return bool(str(path)) and (Path(path).expanduser() / ADAPTER_CONFIG).is_file()


def read_adapter_config(directory: str | Path) -> dict[str, Any]:
    """The adapter's config.

    Raises:
        AdapterError: No adapter there, no weights beside the config, or one that learns a prompt:
            that puts entries into the cache which are not the model's keys and values.
    """
    path = Path(directory).expanduser()
    if not str(directory) or not path.is_dir():
        raise AdapterError(f"no adapter directory at {str(directory) or repr('')}")
    if not (path / ADAPTER_CONFIG).is_file():
        raise AdapterError(f"{directory} is no PEFT adapter: it has no {ADAPTER_CONFIG}")
    config = _read_json(path / ADAPTER_CONFIG, AdapterError)
    peft_type = str(config.get("peft_type"))
    if peft_type in _PROMPT_TYPES:
        raise AdapterError(
            f"{directory} is of type {peft_type}: its learned prompt fills cache entries that no "
            "token has, so there is nothing to calibrate; adapters that change weights work"
        )
    if not any((path / f"adapter_model.{end}").is_file() for end in ("safetensors", "bin")):
        raise AdapterError(f"{directory} has {ADAPTER_CONFIG} but no adapter_model.safetensors")
    return config


def read_config(source: ModelSource) -> dict[str, Any]:
    """The base model's config as it lies on disk; of a hub model only this one file is fetched.

    Raises:
        ModelError: No readable config, or the hub does not give it.
    """
    if source.gguf_file is not None:
        return _gguf_config(source)
    directory = fetch(
        source.model, _CONFIGS, lambda path: any((path / name).is_file() for name in _CONFIGS)
    )
    if (directory / "config.json").is_file():
        return _read_json(directory / "config.json", ModelError)
    if is_adapter_directory(directory):
        raise ModelError(
            f"{source} is an adapter: hf download {source.model} --local-dir DIR, then give DIR"
        )
    raise ModelError(f"{source} has no config.json")


def has_weights(directory: Path) -> bool:
    """Whether all the weight files of a model lie in `directory`, each shard of the index too."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (directory / index).is_file():
            shards = _read_json(directory / index, ModelError).get("weight_map", {}).values()
            return all((directory / str(shard)).is_file() for shard in shards)
    return any(any(directory.glob(pattern)) for pattern in _WEIGHT_FILES)


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer's vocabulary lies in `directory`."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def fetch_tokenizer(source: ModelSource) -> Path:
    """Directory with the model's tokenizer; downloads the small text files of a hub model."""
    return fetch(source.model, _TEXT_PATTERNS, has_tokenizer)


def fetch_weights(source: ModelSource, notify: Callable[[str], None]) -> Path:
    """Directory with all that loading needs; downloads a hub model that is not here yet."""
    if source.is_local:
        return Path(source.model)
    patterns = (*_TEXT_PATTERNS, "*.safetensors")
    announce = f"downloading {source.model} from the Hugging Face hub (or updating the local copy)"
    directory = fetch(source.model, patterns, has_weights, lambda: notify(announce))
    if not has_weights(directory):
        directory = fetch(source.model, (*_TEXT_PATTERNS, "*.bin"), has_weights)
    return directory


def fetch(
    model: str,
    patterns: Sequence[str],
    complete: Callable[[Path], bool],
    announce: Callable[[], None] = lambda: None,
) -> Path:
    """Directory with the files of `model` that `patterns` name.

    A local directory is returned as it is. The local copy of a hub model is taken if `complete`
    says so, without asking the hub: nothing touches the network where files are local.

    Raises:
        ModelError: The hub has no such model, does not give it, or cannot be reached.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(model, local_files_only=True))
        if complete(cached):
            return cached
    except HFValidationError as error:
        raise ModelError(
            f"there is no file or directory {model}, and no model on the hub can be called that"
        ) from error
    except LocalEntryNotFoundError:
        pass
    announce()
    ignored = ["*/*", "consolidated*"]
    try:
        return Path(
            snapshot_download(model, allow_patterns=list(patterns), ignore_patterns=ignored)
        )
    except Exception as error:
        raise ModelError(_hub_message(model, error)) from error


def _hub_message(model: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{model} is gated: accept its terms at https://huggingface.co/{model}, then log in"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no file or directory {model}, nor a public model of that name on the hub"
    return (
        f"there is no file or directory {model}, and the Hugging Face hub could not be asked "
        f"for a model of that name ({first_line(error)})"
    )


def first_line(error: Exception) -> str:
    """The first line of a library's message, for our own one-line message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(":").strip() if lines else type(error).__name__


def _locate(name: str) -> ModelSource:
    """The base model called `name`."""
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name} is no model: it has no config.json" + _gguf_hint(path))
        return ModelSource(str(path))
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{name} is no GGUF file: give the directory that holds the model")
        return ModelSource(str(path.parent), gguf_file=path.name)
    if name == smollm2.NAME:
        directory, gguf_file = smollm2.locate()
        return ModelSource(directory, gguf_file=gguf_file)
    if not _HUB_ID.fullmatch(name) or name.endswith(_FILE_ENDINGS):
        raise ModelError(f"there is no file or directory {name or repr(name)}")
    return ModelSource(name)


def _locate_base(adapter: str, config: dict[str, Any], base: str | None) -> ModelSource:
    """The model that an adapter goes on: `base`, or the one its config names."""
    name = config.get("base_model_name_or_path") if base is None else base
    if not name:
        raise AdapterError(f"{adapter}/{ADAPTER_CONFIG} names no base model: give it with --base")
    beside = Path(adapter).expanduser() / name
    if base is None and not Path(name).exists() and beside.is_dir():
        name = str(beside)
    if is_adapter_directory(name):
        raise AdapterError(f"{name}, the base of {adapter}, is an adapter itself: merge it first")
    try:
        return replace(_locate(name), base=name)
    except ModelError as error:
        raise ModelError(f"base of {adapter}: {error}; --base names another one") from error


def _gguf_config(source: ModelSource) -> dict[str, Any]:
    """Config from a GGUF file's metadata; Transformers, and so torch, translates the keys."""
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(
            source.model, gguf_file=source.gguf_file, local_files_only=True
        )
    except Exception as error:
        raise ModelError(f"cannot read {source.gguf_file}: {first_line(error)}") from error
    return dict(config)


def _read_json(path: Path, kind: type[ModelError] | type[AdapterError]) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise kind(f"cannot read {path}: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise kind(f"{path} holds {type(values).__name__}, not a JSON object")
    return values


def _gguf_hint(directory: Path) -> str:
    files = sorted(directory.glob("*.gguf"))
    return f"; to use its GGUF file, name {files[0]}" if files else ""
