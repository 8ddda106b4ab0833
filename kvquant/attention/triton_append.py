"""Quantize and append on a GPU: one kernel puts tokens into a buffer as `Codec.encode` would."""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from kvquant.quantize.codec import Center, Codec
from kvquant.scales import TensorScales

from .triton_encode import Form, append_kernel
from .triton_launch import IS_INTERPRETED, Launch, start

_FORMATS = ("int4", "int8", "fp8_e4m3", "fp8_e5m2")
_TOKENS = 8


@dataclass(frozen=True, eq=False)
class Numbers:
    """What a codec subtracts, multiplies and divides by; tensors are float32 ``[kv_heads, dim]``.

    Attributes:
        source: The codec's center and scales that this was made from.
        mean: Fixed mean.
        of_cos: What a mean that turns takes of the cosine.
        of_sin: What it takes of the sine.
        column: Columns of cosines and sines, int32 ``[dim]``.
        core: Core of the rotation, ``[order, order]``.
        turn: Its factor.
        scales: Calibrated scales.
        zeros: Calibrated zero points.
    """

    source: tuple[Center | None, TensorScales | None]
    mean: torch.Tensor | None = None
    of_cos: torch.Tensor | None = None
    of_sin: torch.Tensor | None = None
    column: torch.Tensor | None = None
    core: torch.Tensor | None = None
    turn: float = 1.0
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None


def append(
    codec: Codec,
    states: torch.Tensor,
    targets: tuple[torch.Tensor, ...],
    place: int,
    positions: torch.Tensor | None,
    bound: int,
) -> bool:
    """Writes what `Codec.encode` gives into a buffer.

    Args:
        codec: How to encode.
        states: ``[rows, kv_heads, tokens, dim]``; whole units.
        targets: ``[rows, kv_heads, room, *field.shape]`` for each of the codec's fields.
        place: Row of the buffer that gets the first unit; the others follow without a gap.
        positions: ``[rows, tokens]``, as `Codec.encode` takes them.
        bound: As `Codec.encode` takes it.

    Returns:
        False where there is no kernel for it, and nothing was written.
    """
    launched = launch(codec, states, targets, place, positions, bound)
    if launched is None:
        return False
    start([launched], states.device)
    return True


def launch(
    codec: Codec,
    states: torch.Tensor,
    targets: tuple[torch.Tensor, ...],
    place: int,
    positions: torch.Tensor | None,
    bound: int,
) -> Launch | None:
    """The kernel that `append` starts, or None if there is none."""
    form = _form(codec, states)
    if form is None or not all(target.stride(-1) == 1 for target in targets if target.dim() > 3):
        return None
    if states.stride(3) != 1:
        states = states.contiguous()
    rows, kv_heads, count, _ = states.shape
    known = _numbers(codec, kv_heads, states.device)
    cos, sin = _tables(codec, form, bound)
    codes, scale, middle = (*targets, None, None)[:3]
    tiles = -(-count // (form.group if form.group > 1 else form.tokens))
    arguments = {
        "states": states,
        "positions": positions if form.turned else None,
        "cos": cos,
        "sin": sin,
        "codes": codes,
        "scale": scale,
        "middle": middle,
        **{name: value for name, value in vars(known).items() if name != "source"},
        **_strides("state", states),
        **_strides("code", codes),
        **_strides("scale", scale),
        **_strides("position", positions if form.turned else None, ("row", "token")),
        **_strides("cos", cos, ("row",)),
        **_strides("sin", sin, ("row",)),
        "kv_heads": kv_heads,
        "count": count,
        "place": place,
        "FORM": form,
    }
    return Launch(append_kernel, (rows * kv_heads, tiles), arguments, warps=4, fused=False)


def _strides(
    name: str, tensor: torch.Tensor | None, axes: tuple[str, ...] = ("row", "head", "unit")
) -> dict[str, int]:
    """Strides of the first axes, as arguments of the kernel."""
    strides = (0,) * len(axes) if tensor is None else tensor.stride()
    return {f"{name}_{axis}": strides[number] for number, axis in enumerate(axes)}


def _tables(
    codec: Codec, form: Form, bound: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Cosines and sines of all positions, where a mean turns."""
    if not form.turned:
        return None, None
    assert codec.center is not None and codec.center.angles is not None
    return codec.center.angles(bound)


def _form(codec: Codec, states: torch.Tensor) -> Form | None:
    """What the kernel is to be compiled for; None if it cannot be."""
    scheme, dim = codec.scheme, codec.dim
    if scheme.format.name not in _FORMATS or not _runs_on(states.device):
        return None
    butterflies, order = 2, -(-dim // 2)
    if codec.rotation is not None:
        butterflies, order = codec.rotation.butterflies, dim // codec.rotation.butterflies
        if butterflies < 2:  # a seeded matrix, whose halves are no whole rows
            return None
    center = codec.center
    grouped = scheme.unit > 1
    single = 1 if states.shape[2] == 1 else _TOKENS
    return Form(
        name=scheme.format.name,
        dim=dim,
        row=codec.row_bytes,
        butterflies=butterflies,
        order=order,
        padded=_power(order),
        rotated=codec.rotation is not None,
        cored=codec.rotation is not None and codec.rotation.core is not None,
        centered=center is not None,
        turned=center is not None and center.turned is not None,
        static=codec.scales is not None,
        symmetric=scheme.symmetric,
        group=scheme.unit,
        tokens=_power(scheme.unit) if grouped else single,
        kept=scheme.scale_format,
        most=scheme.format.qmax if scheme.symmetric else scheme.levels,
    )


def _runs_on(device: torch.device) -> bool:
    """Whether kernels run on a device."""
    return IS_INTERPRETED or (device.type == "cuda" and torch.version.hip is None)


def _power(count: int) -> int:
    """`count`, rounded up to a power of two."""
    return 1 << (count - 1).bit_length()


_known: WeakKeyDictionary[Codec, dict[torch.device, Numbers]] = WeakKeyDictionary()


def _numbers(codec: Codec, kv_heads: int, device: torch.device) -> Numbers:
    """What the kernel needs of a codec, worked out once."""
    known = _known.setdefault(codec, {})
    made = known.get(device)
    # A codec replaces what it has once states of another device come.
    if made is None or made.source[0] is not codec.center or made.source[1] is not codec.scales:
        made = known[device] = _made(codec, kv_heads, device)
    return made


def _made(codec: Codec, kv_heads: int, device: torch.device) -> Numbers:
    made = Numbers((codec.center, codec.scales))

    def whole(numbers: torch.Tensor | None) -> torch.Tensor | None:
        if numbers is None:
            return None
        return numbers.to(device).expand(kv_heads, codec.dim).contiguous()

    if codec.scales is not None:
        scales, zeros = whole(codec.scales.scale), whole(codec.scales.zero_point)
        made = replace(made, scales=scales, zeros=zeros)
    if codec.rotation is not None:
        core = codec.rotation.core
        core = None if core is None else core.to(device)
        made = replace(made, core=core, turn=codec.rotation.factor)
    if codec.center is not None:
        made = _with_waves(replace(made, mean=whole(codec.center.fixed)), codec.center, device)
    return made


def _with_waves(made: Numbers, center: Center, device: torch.device) -> Numbers:
    """`made` with what each channel's mean takes of the cosine and sine of a pair, and which."""
    if center.turned is None or center.layout is None:
        return made
    turned = center.turned.to(device)
    of_cos, of_sin = torch.zeros_like(turned), torch.zeros_like(turned)
    column = torch.zeros(turned.shape[-1], dtype=torch.int32, device=device)
    # first = first * cos - second * sin; second = second * cos + first * sin
    first, second = center.layout.split(turned)
    for out, part in zip(center.layout.split(of_cos), (first, second), strict=True):
        out.copy_(part)
    for out, part in zip(center.layout.split(of_sin), (-second, first), strict=True):
        out.copy_(part)
    for out in center.layout.split(column):
        out.copy_(torch.arange(out.shape[-1], device=device))
    return replace(made, of_cos=of_cos, of_sin=of_sin, column=column)
