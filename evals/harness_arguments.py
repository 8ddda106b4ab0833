"""What ``--model_args`` says, made sure to be possible before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvquant.errors import InputError
from kvquant.geometry import CacheGeometry
from kvquant.presets import preset_names

from .arms import ArmRequest, parse_arms


def arm_request(scheme: str | None, scales: str | None) -> ArmRequest:
    """The one arm that is asked for.

    Raises:
        InputError: None is, or scales for something that takes none.
        SchemeError: No such preset.
    """
    if scheme is None and scales is None:
        raise InputError(
            "nothing to evaluate: give --model_args pretrained=MODEL,scheme=NAME "
            f"({', '.join(preset_names())}, hf:quanto, hf:hqq, hf:fp8), or scales=FILE of kvquant "
            "calibrate"
        )
    if scheme is None:
        return parse_arms([], [str(scales)])[0]
    scheme = str(scheme)  # the harness makes a number of what looks like one
    if scales is not None:
        if "@" in scheme or ":" in scheme:
            raise InputError(f"scheme={scheme},scales={scales}: scales go with a preset's name")
        scheme = f"{scheme}@{scales}"
    return parse_arms([scheme], [])[0]


def directories(adapter: str | Sequence[str] | None) -> tuple[str, ...]:
    """Adapters: none, one, or a list."""
    if adapter is None:
        return ()
    return (adapter,) if isinstance(adapter, str) else tuple(map(str, adapter))


def whole_number(name: str, value: Any) -> int:
    """A whole number of 1 or more, however it was written.

    Raises:
        InputError: Something else.
    """
    text = str(value)
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise InputError(f"{name}={value}: a whole number of 1 or more is wanted")
    return int(text)


def check_lengths(max_length: int | None, stride: int | None, geometry: CacheGeometry) -> None:
    """Whether windows are within the model's positions and leave no token out.

    Raises:
        InputError: They are not.
    """
    limit = geometry.max_positions
    if max_length is not None and limit is not None and max_length > limit:
        raise InputError(
            f"max_length={max_length} is beyond the model's {limit} positions: what lies there is "
            f"noise; use at most {limit}"
        )
    window = max_length or limit
    if stride is not None and window is not None and stride > window:
        raise InputError(f"stride={stride}: tokens between windows of {window} would not be scored")
