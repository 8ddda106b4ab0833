"""Named schemes. docs/schemes.md defines each, with its formulas and bits per value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .errors import SchemeError
from .scheme import EXACT, Granularity, QuantScheme, TensorScheme, tensor_format

GROUP_SIZE = 64
"""Tokens of a KIVI group, by default."""

SINK_TOKENS = 4
"""First tokens that int4 and int3 keep exactly (attention sinks, arXiv 2309.17453)."""

KIVI_RESIDUAL = 128
"""Newest tokens that int4-kivi keeps exactly, as its authors do (arXiv 2402.02750)."""


def _per_token(format_name: str, **kind: Any) -> TensorScheme:
    # bf16 scales keep their precision however small or large the values of a model are.
    return TensorScheme(
        tensor_format(format_name), Granularity.PER_TOKEN, scale_format="bf16", **kind
    )


def _both(slot: TensorScheme) -> QuantScheme:
    return QuantScheme(slot, slot)


def _centered(format_name: str) -> QuantScheme:
    slot = _per_token(format_name, symmetric=False, center=True, rotate=True)
    return QuantScheme(slot, slot, sink_tokens=SINK_TOKENS)


def _kivi(group_size: int) -> QuantScheme:
    # fp16: the middle of a key channel with a large bias wants more digits than bf16 has.
    key = TensorScheme(
        tensor_format("int4"),
        Granularity.PER_GROUP,
        symmetric=False,
        group_size=group_size,
        scale_format="fp16",
    )
    value = _per_token("int4", symmetric=False)
    return QuantScheme(key, value, residual_length=KIVI_RESIDUAL)


_PRESETS: Mapping[str, Callable[[], QuantScheme]] = {
    "none": lambda: _both(EXACT),
    "bf16": lambda: _both(_per_token("bf16")),
    "fp16": lambda: _both(_per_token("fp16")),
    "fp8": lambda: _both(_per_token("fp8")),
    "fp8_e5m2": lambda: _both(_per_token("fp8_e5m2")),
    "int8": lambda: _both(_per_token("int8")),
    "int4-kivi": lambda: _kivi(GROUP_SIZE),
    "int4": lambda: _centered("int4"),
    "int3": lambda: _centered("int3"),
}


def preset_names() -> list[str]:
    """All preset names, as users type them."""
    return list(_PRESETS)


def preset(
    name: str,
    *,
    key_format: str | None = None,
    value_format: str | None = None,
    rotary_format: str | None = None,
    sink_tokens: int | None = None,
    residual_length: int | None = None,
    group_size: int | None = None,
) -> QuantScheme:
    """The scheme called `name`, changed as asked.

    Args:
        name: One of `preset_names`; ``fp8_e4m3`` is ``fp8``.
        key_format: Preset whose key slot to take instead.
        value_format: Preset whose value slot to take instead. Sinks and residual become the larger
            of those that take part.
        rotary_format: Preset for the rotary part of MLA layers, which is exact otherwise.
        sink_tokens: First tokens to keep exactly.
        residual_length: Newest tokens to keep exactly.
        group_size: Tokens of a key group, for int4-kivi.

    Raises:
        SchemeError: No such preset, or a group size for a preset without groups.
    """
    base, key, value = _find(name), _find(key_format or name), _find(value_format or name)
    taking_part = (key, value)
    scheme = replace(
        base,
        key=key.key,
        value=value.value,
        sink_tokens=max(part.sink_tokens for part in taking_part),
        residual_length=max(part.residual_length for part in taking_part),
    )
    if rotary_format is not None:
        scheme = replace(scheme, rotary_part=_find(rotary_format).value)
    if group_size is not None:
        if scheme.key.group_size is None:
            raise SchemeError(
                f"{key_format or name} has no groups: a group size goes with int4-kivi"
            )
        scheme = replace(scheme, key=replace(scheme.key, group_size=group_size))
    if sink_tokens is not None:
        scheme = replace(scheme, sink_tokens=sink_tokens)
    if residual_length is not None:
        scheme = replace(scheme, residual_length=residual_length)
    return scheme


def _find(name: str) -> QuantScheme:
    made = _PRESETS.get("fp8" if name == "fp8_e4m3" else name)
    if made is None:
        raise SchemeError(f"unknown scheme {name!r}: possible are {', '.join(_PRESETS)}")
    return made()
