"""Loads KV scales as an engine would, from the headers of files alone.

Each engine is a `Loader`: which parameter a tensor is loaded into, which parameters a layer has,
and what becomes of a layer whose parameters stay empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvquant.geometry import CacheGeometry
from kvquant.tensor_files import TensorFile

from .attention_names import AttentionModule
from .loader_rules import is_kv_scale, layer_number
from .served_files import numbers
from .verify_report import LayerVerdict


class Absent(Enum):
    """What becomes of a layer whose scales are not all found."""

    ONE = "each missing scale stays 1.0, without a word"
    COPIED = "missing values take the keys' scale; values alone stop the load; else both are 1.0"
    BOTH = "one alone is not used; both are 1.0"
    STOPS = "one alone stops the load; else both are 1.0"
    GARBAGE = "a missing scale is whatever the memory holds"


def _takes_any(name: str, parameter: str, known: bool) -> bool:
    return False


@dataclass(frozen=True)
class Loader:
    """How an engine loads scales.

    Attributes:
        engine: Its name.
        parameter: Name of a tensor in the checkpoint -> the parameter that it is loaded into.
        parameters: Attention module in the checkpoint -> its parameters for keys and values.
        names: Attention module in the checkpoint -> what to call its scales there.
        absent: What becomes of layers without.
        extras: Further parameters beside ``k_scale`` and ``v_scale``, such as ``q_scale``.
        fused: Attention module in the checkpoint -> the parameter that stands for both, where an
            engine looks for one.
        per_head: Whether one scale per KV head is expected.
        shapes: Shapes that a single number may have; None for any.
        head_axes: Numbers of axes that scales per head may have.
        not_positive: What the engine makes of a scale that is zero, negative or no number.
        held_in: Type in which it holds scales: ``float32``, ``bfloat16`` …
        refuses: Whether it stops at a tensor, given its name, the parameter, and whether the
            model has that.
    """

    engine: str
    parameter: Callable[[str], str]
    parameters: Callable[[AttentionModule], tuple[str, str]]
    names: Callable[[AttentionModule], tuple[str, str]]
    absent: Absent
    extras: tuple[str, ...] = ()
    fused: Callable[[AttentionModule], str] | None = None
    per_head: bool = False
    shapes: tuple[tuple[int, ...], ...] | None = None
    head_axes: tuple[int, ...] = (1, 3)
    not_positive: str = "uses it as it is"
    held_in: str = "float32"
    refuses: Callable[[str, str, bool], bool] = _takes_any


@dataclass(frozen=True)
class Stored:
    """One tensor of scales.

    Attributes:
        name: Its name.
        file: Where it is.
        numbers: What it holds, None if that cannot be read as numbers.
    """

    name: str
    file: TensorFile
    numbers: tuple[float, ...] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.file.tensors[self.name].shape

    @property
    def dtype(self) -> str:
        """Its type, as safetensors names it."""
        return self.file.tensors[self.name].dtype


Slot = tuple[Stored, ...]
"""What is loaded into one parameter, in the order of names; the last one stays."""


def stored_scales(files: Sequence[TensorFile]) -> list[Stored]:
    """Every tensor of KV scales in these files, in the order of their names."""
    found = [
        Stored(name, file, numbers(file, name))
        for file in files
        for name in file.tensors
        if is_kv_scale(name)
    ]
    return sorted(found, key=lambda stored: stored.name)


@dataclass(frozen=True)
class Loaded:
    """What a loader has put where.

    Attributes:
        loader: The engine's rules.
        modules: Attention of each layer that keeps tokens.
        geometry: Shape of the cache.
        exact: Layers that are launched unquantized, and need no scales.
        scales: All tensors of scales.
        found: Those for keys and for values of each layer.
        dropped: Those for which the model has no parameter.
        refused: Those at which the load stops.
    """

    loader: Loader
    modules: Mapping[int, AttentionModule]
    geometry: CacheGeometry
    exact: frozenset[int]
    scales: Slot
    found: Mapping[int, tuple[Slot, Slot]]
    dropped: Slot
    refused: Slot = field(default=())

    def layer(self, name: str) -> int | None:
        """The layer of the cache that a name speaks of; None if that keeps no tokens."""
        for layer, module in self.modules.items():
            if name.startswith(f"{module.path}."):
                return layer
        number = layer_number(name)
        return number if number in self.modules else None

    def verdicts(self) -> tuple[LayerVerdict, ...]:
        """The scales that each layer is served with."""
        return tuple(self._verdict(layer) for layer in sorted(self.modules))

    def _verdict(self, layer: int) -> LayerVerdict:
        key, value = (slot[-1] if slot else None for slot in self.found[layer])
        names = (key.name if key else None, value.name if value else None)
        if layer in self.exact and not (key and value):
            return LayerVerdict(layer, *names, (), (), "not quantized")
        key_scale, value_scale, source = self._used(key, value)
        return LayerVerdict(layer, *names, key_scale, value_scale, source)

    def _used(
        self, key: Stored | None, value: Stored | None
    ) -> tuple[tuple[float, ...], tuple[float, ...], str]:
        """The numbers for keys and for values, and where they come from."""
        absent = self.loader.absent
        own = [(stored.numbers or ()) if stored else () for stored in (key, value)]
        if self.refused or (absent is Absent.COPIED and value and not key):
            return (), (), "does not load"
        if key and value:
            return own[0], own[1], "checkpoint"
        if absent is Absent.GARBAGE:
            return own[0], own[1], "uninitialised memory"
        if absent is Absent.ONE and (key or value):
            return own[0] or (1.0,), own[1] or (1.0,), "checkpoint and 1.0"
        if absent is Absent.COPIED and key:
            return own[0], own[0], "checkpoint, one for both"
        if absent is Absent.STOPS and (key or value):
            return (), (), "does not load"
        return (1.0,), (1.0,), "default 1.0"


def load(
    loader: Loader,
    files: Sequence[TensorFile],
    modules: Mapping[int, AttentionModule],
    geometry: CacheGeometry,
    exact: frozenset[int] = frozenset(),
) -> Loaded:
    """Loads the scales in `files`."""
    landed: dict[str, list[Stored]] = {}
    scales = tuple(stored_scales(files))
    for stored in scales:
        landed.setdefault(loader.parameter(stored.name), []).append(stored)
    found = {layer: _slots(loader, module, landed) for layer, module in modules.items()}
    known = {name for module in modules.values() for name in _parameters(loader, module)}

    def refuses(stored: Stored) -> bool:
        parameter = loader.parameter(stored.name)
        return loader.refuses(stored.name, parameter, parameter in known)

    dropped = tuple(stored for stored in scales if loader.parameter(stored.name) not in known)
    refused = tuple(filter(refuses, scales))
    return Loaded(loader, modules, geometry, exact, scales, found, dropped, refused)


def _slots(
    loader: Loader, module: AttentionModule, landed: Mapping[str, list[Stored]]
) -> tuple[Slot, Slot]:
    key, value = (tuple(landed.get(name, ())) for name in loader.parameters(module))
    if loader.fused is not None and not (key and value):
        both = tuple(landed.get(loader.fused(module), ()))
        return (both, both) if both else (key, value)
    return key, value


def _parameters(loader: Loader, module: AttentionModule) -> set[str]:
    """All parameters of a module that hold scales."""
    own = loader.parameters(module)
    prefix = own[0].rpartition(".")[0]
    fused = () if loader.fused is None else (loader.fused(module),)
    return {*own, *fused, *(f"{prefix}.{extra}" for extra in loader.extras)}
