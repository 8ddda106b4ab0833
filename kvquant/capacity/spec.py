"""What the name of a model to plan stands for: its config, and what that says about its cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvquant.errors import ModelError
from kvquant.geometry import CacheGeometry
from kvquant.geometry_config import read_settings, whole
from kvquant.geometry_rules import Settings
from kvquant.models.source import read_config, resolve

from .companions import Companion, companions
from .models import find_model, known_models
from .wording import nearest

_DTYPE_BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model to plan, without its weights.

    Attributes:
        name: As the user typed it, or the name in the table.
        source: Where the config is from.
        config: As it stands in config.json.
        model_type: Of the text part.
        settings: Config of the text part under canonical names, defaults filled in.
        geometry: Shape of its cache.
        directory: Where its files lie, if they are on this machine.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    model_type: str
    settings: Settings
    geometry: CacheGeometry
    directory: Path | None = None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], name: str, source: str, directory: Path | None = None
    ) -> ModelSpec:
        """What a parsed config.json describes.

        Raises:
            GeometryError: It does not say what the cache looks like.
        """
        geometry = CacheGeometry.from_config(config)
        model_type, settings = read_settings(config)
        return cls(name, source, config, model_type, settings, geometry, directory)

    @property
    def query_heads(self) -> int:
        """Attention heads, which tensor parallelism divides."""
        return whole(self.settings, "num_attention_heads")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a number in the model's own dtype; 2 where the config does not say."""
        given = (self.config, self.settings)
        names = [part.get(key) for part in given for key in ("dtype", "torch_dtype")]
        name = next((str(name) for name in names if name), "bfloat16")
        return _DTYPE_BYTES.get(name.removeprefix("torch."), 2)

    @cached_property
    def companions(self) -> list[Companion]:
        """What each layer keeps beside keys and values."""
        return companions(self.model_type, self.settings, self.dtype_bytes)


def describe(name: str) -> ModelSpec:
    """The model called `name`: a directory, a config.json, a name of the table, or a hub id.

    Of a model on the hub that the table does not have, the config alone is fetched.

    Raises:
        ModelError: None of these; the nearest names are offered.
        GeometryError: Its config does not say what the cache looks like.
    """
    path = Path(name).expanduser()
    if path.suffix == ".json" and (path.is_file() or not find_model(name)):
        return ModelSpec.from_config(_read_json(path), name, str(path), path.parent)
    known = None if path.exists() else find_model(name)
    if known is not None:
        return ModelSpec.from_config(known.config, known.name, known.source)
    offered = nearest(name, [model.name for model in known_models()])
    if offered and "/" not in name and not path.exists():
        raise ModelError(f"there is no file, directory or known model {name!r}{offered}")
    try:
        source = resolve(name)
        config = read_config(source)
    except ModelError as error:
        raise ModelError(f"{error}{offered or '; --list-models shows the known ones'}") from error
    directory = Path(source.model) if source.is_local else None
    return ModelSpec.from_config(config, name, f"{source.model}/config.json", directory)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, not a JSON object")
    return config
