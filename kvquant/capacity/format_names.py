"""From the names that ``--kv`` takes to cache formats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvquant.errors import SchemeError
from kvquant.presets import preset, preset_names
from kvquant.scheme import QuantScheme

from .formats import (
    BLOCKS,
    PAIRS,
    PLAIN,
    Block,
    BlockFormat,
    CacheFormat,
    SchemeFormat,
    ds_mla,
    groups,
    kivi,
)
from .wording import nearest

_DS_MLA = "fp8_ds_mla"
_GROUPS = re.compile(r"int([2348])-g([1-9]\d{0,4})")
_KIVI = re.compile(r"kivi([24])(?:-g([1-9]\d{0,4}))?")
_KIVI_GROUP = 32

PATTERNS = ("int4-g128", "int2-g32", "kivi2", "kivi4-g64")
"""Examples of names that have a number in them."""


@dataclass(frozen=True)
class Overrides:
    """What the command line changes about the formats that it names.

    Attributes:
        sink_tokens: First tokens that our quantized presets keep exactly.
        residual_length: Newest tokens that they keep exactly.
        group_size: Tokens of a key group, for int4-kivi.
        skip_layers: Layers that stay in the model's own dtype.
    """

    sink_tokens: int | None = None
    residual_length: int | None = None
    group_size: int | None = None
    skip_layers: frozenset[int] = field(default_factory=frozenset)


def format_names() -> list[str]:
    """All names without a number in them."""
    own = [name for name in preset_names() if name not in PLAIN]
    return [*own, *PLAIN, *BLOCKS, *PAIRS, _DS_MLA]


def parse_formats(
    names: Sequence[str], overrides: Overrides, dtype_bytes: int, *, turns_means: bool = False
) -> list[CacheFormat]:
    """The formats called `names`.

    Args:
        names: Names, or pairs of a name for the keys and one for the values: ``int8:int4``.
        overrides: What the command line changes about them.
        dtype_bytes: Bytes of a number in the model's own dtype.
        turns_means: Whether the model's calibrated means turn with the position.

    Raises:
        SchemeError: An unknown name, a pair that no cache stores, or a name twice.
    """
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SchemeError(f"--kv {twice} is there twice")
    formats = [_parse(name, overrides, dtype_bytes, turns_means) for name in names]
    own = [form.scheme for form in formats if isinstance(form, SchemeFormat)]
    if overrides.group_size is not None and not any(s.key.group_size for s in own):
        raise SchemeError("--group-size goes with --kv int4-kivi")
    exact = overrides.sink_tokens is not None or overrides.residual_length is not None
    if exact and not any(_quantizes(s) for s in own):
        raise SchemeError(
            "--sink-tokens and --residual-length go with quantized formats of ours, such as "
            "--kv int4; none is among the formats"
        )
    return formats


def scheme_format(
    name: str, scheme: QuantScheme, skipped: frozenset[int], dtype_bytes: int, turns_means: bool
) -> SchemeFormat:
    """A scheme as a format, some layers left in the model's own dtype."""
    layers = tuple((index, own) for index, own in scheme.layers if index not in skipped)
    scheme = replace(scheme, skip_layers=scheme.skip_layers | skipped, layers=layers)
    parts = (scheme, *(own for _, own in layers))
    centered = any(slot.center for part in parts for slot in (part.key, part.value))
    return SchemeFormat(name, scheme, dtype_bytes, turns_means and centered)


def _parse(name: str, overrides: Overrides, dtype_bytes: int, turns_means: bool) -> CacheFormat:
    skipped = overrides.skip_layers
    if name == _DS_MLA:
        return ds_mla(name, dtype_bytes, skipped)
    pair = _KIVI.fullmatch(name)
    if name in PAIRS or pair is not None:
        found = PAIRS[name] if pair is None else kivi(int(pair[1]), int(pair[2] or _KIVI_GROUP))
        return BlockFormat(name, *found, dtype_bytes, skipped)
    key, _, value = name.partition(":")
    if ":" not in name:
        value = key
    elif not key or not value:
        raise SchemeError(f"--kv {name} names half of a pair: write K:V, such as int8:int4")
    if _is_own(key) and _is_own(value):
        scheme = _preset(key, value, overrides)
        return scheme_format(name, scheme, skipped, dtype_bytes, turns_means)
    first = _block(key, name)
    second = first if key == value else _block(value, name)
    return BlockFormat(name, first, second, dtype_bytes, skipped)


def _is_own(name: str) -> bool:
    return name in preset_names() or name == "fp8_e4m3"


def _preset(key: str, value: str, overrides: Overrides) -> QuantScheme:
    """The preset, or pair of presets, changed as asked where that means something."""
    scheme = preset(key, value_format=value)
    quantized = _quantizes(scheme)
    return preset(
        key,
        value_format=value,
        sink_tokens=overrides.sink_tokens if quantized else None,
        residual_length=overrides.residual_length if quantized else None,
        group_size=overrides.group_size if scheme.key.group_size else None,
    )


def _quantizes(scheme: QuantScheme) -> bool:
    return scheme.key.format.is_scaled or scheme.value.format.is_scaled


def _block(side: str, name: str) -> Block:
    """How an engine stores what is called `side`, one half of `name` or all of it."""
    found = PLAIN.get(side) or BLOCKS.get(side)
    if found is not None:
        return found
    numbered = _GROUPS.fullmatch(side)
    if numbered is not None:
        return groups(int(numbered[1]), int(numbered[2]))
    if _is_own(side):
        raise SchemeError(
            f"{name}: {side} is a preset of ours and the other one is not; keys and values of one "
            "cache are both ours or both an engine's"
        )
    if side in (*PAIRS, _DS_MLA) or _KIVI.fullmatch(side):
        raise SchemeError(f"{name}: {side} is a format of keys and values together, no half of one")
    raise SchemeError(
        f"unknown cache format {side!r}{nearest(side, [*format_names(), *PATTERNS])}; "
        "--list-kv shows all"
    )
