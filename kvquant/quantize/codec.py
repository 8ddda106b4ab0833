"""Codec: what the keys or the values of one layer are stored as, and how they are read back.

::

    states ── minus mean ── rotate ── quantize ── pack ──→ codes, scale, middle     encode
    out ←── plus mean ── rotate back ── dequantize ── unpack ──┘                    decode

What is encoded depends on the values and positions of a unit (a token, or a group of tokens) alone,
bit for bit, however many are encoded together. docs/schemes.md has the formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from kvquant.rotary import RotaryLayout
from kvquant.scales import TensorScales
from kvquant.scheme import TensorScheme

from . import dynamic, packing, reference
from .rotation import rotation

_FP16_MAX = 65504.0
_PER_TOKEN_AXIS, _PER_GROUP_AXIS = -1, 3


@dataclass(frozen=True)
class Field:
    """One of the tensors that units are stored in, ``[batch, kv_heads, units, *shape]``.

    Attributes:
        name: ``codes``, ``scale``, ``middle`` or ``values``.
        shape: Of one unit.
        dtype: As stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Center:
    """What is subtracted before quantizing: a mean that stays, or one that turns with the position.

    Attributes:
        fixed: float32 ``[kv_heads, dim]``; 0 where turned.
        turned: Mean before rotary embedding, likewise; 0 where fixed, None if nothing turns.
        layout: Which channels are the rotary pairs, if something turns.
        angles: Cosine and sine of the positions below a number, each float32 ``[positions or more,
            pairs]`` and on the states' device.
    """

    fixed: torch.Tensor
    turned: torch.Tensor | None = None
    layout: RotaryLayout | None = None
    angles: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None

    def to(self, device: torch.device) -> Center:
        """The same on `device`."""
        turned = None if self.turned is None else self.turned.to(device)
        return replace(self, fixed=self.fixed.to(device), turned=turned)

    def subtract(
        self, states: torch.Tensor, positions: torch.Tensor | None, bound: int
    ) -> torch.Tensor:
        """`states` ``[batch, kv_heads, tokens, dim]`` minus the mean at their positions."""
        states = states - self.fixed[:, None, :]
        for part, mean in self._turned(states, positions, bound):
            part.sub_(mean)
        return states

    def add(self, states: torch.Tensor, positions: torch.Tensor | None, bound: int) -> torch.Tensor:
        """Inverse of `subtract`."""
        states = states + self.fixed[:, None, :]
        for part, mean in self._turned(states, positions, bound):
            part.add_(mean)
        return states

    def _turned(
        self, states: torch.Tensor, positions: torch.Tensor | None, bound: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The channels of `states` in rotary pairs, as views, each with its mean."""
        if self.turned is None or self.layout is None or self.angles is None:
            return []
        assert positions is not None
        batch, _, tokens, _ = states.shape
        cos, sin = (
            table.index_select(0, positions.flatten()).view(batch, 1, tokens, table.shape[-1])
            for table in self.angles(bound)
        )
        one, other = self.layout.split(self.turned[:, None, :])
        means = one * cos - other * sin, other * cos + one * sin
        return list(zip(self.layout.split(states), means, strict=True))


class Codec:
    """Encodes and decodes one slot (keys or values) of one layer.

    Attributes:
        scheme: How it is quantized.
        dim: Width of a head.
        dtype: Dtype of the model, in which the scheme ``none`` keeps numbers.
        unit: Tokens that are encoded together.
        fields: What a unit is stored as.
        scales: Of a static scheme, else None.
        center: What is subtracted, or None.
        rotation: What heads are multiplied by, or None.
        row_bytes: Bytes that the codes (or values) of one token of one head take.
    """

    def __init__(
        self,
        scheme: TensorScheme,
        dim: int,
        dtype: torch.dtype,
        *,
        scales: TensorScales | None = None,
        center: Center | None = None,
    ) -> None:
        """Prepares.

        Args:
            scheme: How to quantize.
            dim: Width of a head.
            dtype: Dtype of the model.
            scales: Calibrated scales, which a static scheme needs; others do not look at them.
            center: Calibrated mean. A centered scheme without one subtracts nothing; others do not
                look at it.

        Raises:
            ValueError: A static scheme without scales, or with those of another width.
        """
        self.scheme, self.dim, self.dtype, self.unit = scheme, dim, dtype, scheme.unit
        self.is_static = scheme.format.is_scaled and scheme.granularity.is_static
        self.scales = _checked(scales, scheme, dim) if self.is_static else None
        self.center = center if scheme.center else None
        self.rotation = rotation(dim) if scheme.rotate else None
        self.fields = _fields(scheme, dim, dtype)
        values = self.fields[0]
        self.row_bytes = values.shape[-1] * values.dtype.itemsize

    def encode(
        self, states: torch.Tensor, positions: torch.Tensor | None = None, bound: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """What to store for `states`: a tensor for each of `fields`.

        Args:
            states: ``[batch, kv_heads, units * unit, dim]``, any float dtype.
            positions: ``[batch, tokens]``, int32 or int64; for a center that turns.
            bound: Above all positions; known without looking at them.

        Raises:
            ValueError: Another width, tokens that are no whole units, or missing positions.
        """
        self._prepare(states, positions)
        kernels = _kernels(states)
        if kernels is not None:
            coded: tuple[torch.Tensor, ...] | None
            coded = kernels.encode(self, states, positions, bound)
            if coded is not None:
                return coded
        return self.encode_reference(states, positions, bound)

    @property
    def needs_positions(self) -> bool:
        """Whether some mean turns with the position."""
        return self.center is not None and self.center.turned is not None

    def encode_into(
        self,
        targets: Sequence[tuple[torch.Tensor, ...]],
        states: torch.Tensor,
        positions: torch.Tensor | None = None,
        bound: int = 0,
    ) -> None:
        """`encode`, written to where it is to be kept.

        Args:
            targets: One after the other, tensors as `encode` returns them; together they have room
                for all units of `states`.
            states: As for `encode`.
            positions: Likewise.
            bound: Likewise.
        """
        if len(targets) == 1:
            self._prepare(states, positions)
            kernels = _kernels(states)
            if kernels is not None and kernels.encode(self, states, positions, bound, targets[0]):
                return
        done, coded = 0, self.encode(states, positions, bound)
        for target in targets:
            units = target[0].shape[2]
            for held, part in zip(target, coded, strict=True):
                held.copy_(part[:, :, done : done + units])
            done += units

    def decode(
        self,
        coded: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        positions: torch.Tensor | None = None,
        bound: int = 0,
    ) -> None:
        """Reads `coded` back into `out`.

        Args:
            coded: As `encode` returned it; views of larger tensors will do.
            out: ``[batch, kv_heads, units * unit, dim]``, float32, bfloat16 or float16; a view of
                a larger tensor will do.
            positions: As for `encode`.
            bound: As for `encode`.

        Raises:
            ValueError: `out` has another shape than `coded`, or positions are missing.
        """
        self._prepare(out, positions)
        self._check_coded(coded, out)
        kernels = _kernels(out)
        if kernels is None or not kernels.decode(self, coded, out, positions, bound):
            self.decode_reference(coded, out, positions, bound)

    def encode_reference(
        self, states: torch.Tensor, positions: torch.Tensor | None = None, bound: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """`encode` in plain torch, on any device: the definition of correct."""
        self._prepare(states, positions)
        states = states.detach()
        if not self.scheme.format.is_scaled:
            return (self._cast(states),)
        if self.scales is not None:
            codes = reference.quantize(states, self.scales, self.scheme)
            return (packing.pack(codes, self.scheme),)
        states = states.float()
        if self.center is not None:
            states = self.center.subtract(states, positions, bound)
        if self.rotation is not None:
            states = self.rotation.apply(states)
        codes, *ranges = dynamic.quantize(self._units(states), self.scheme, self._axis)
        return (packing.pack(codes, self.scheme), *(kept for kept in ranges if kept is not None))

    def decode_reference(
        self,
        coded: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        positions: torch.Tensor | None = None,
        bound: int = 0,
    ) -> None:
        """`decode` in plain torch, on any device."""
        self._prepare(out, positions)
        self._check_coded(coded, out)
        if self.scheme.is_exact:
            out.copy_(coded[0])
            return
        values = self._values(coded).reshape(out.shape)
        if self.rotation is not None:
            values = self.rotation.invert(values)
        if self.center is not None:
            values = self.center.add(values, positions, bound)
        if out.dtype == torch.float16:
            # Half a step beyond the largest value that went in may be beyond float16.
            values = values.clamp(-_FP16_MAX, _FP16_MAX)
        out.copy_(values)

    @property
    def _axis(self) -> int:
        """What shares a dynamic range: channels, or the tokens of a group."""
        return _PER_TOKEN_AXIS if self.scheme.group_size is None else _PER_GROUP_AXIS

    def _values(self, coded: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Dequantized values, float32, still rotated and without the mean."""
        if not self.scheme.format.is_scaled:
            return coded[0].float()
        codes = packing.unpack(coded[0], self.scheme, self.dim)
        if self.scales is not None:
            return reference.dequantize(codes, self.scales)
        middle = coded[2] if len(coded) > 2 else None
        return dynamic.dequantize(codes, coded[1], middle, self.scheme, self._axis)

    def _units(self, states: torch.Tensor) -> torch.Tensor:
        """Tokens of a group on an axis of their own, where there are groups."""
        if self.scheme.group_size is None:
            return states
        return torch.unflatten(states, 2, (states.shape[2] // self.unit, self.unit))

    def _cast(self, states: torch.Tensor) -> torch.Tensor:
        """Numbers that are stored as they are."""
        if self.scheme.format.name == "fp16":
            states = states.float().clamp(-_FP16_MAX, _FP16_MAX)
        return states.to(self.fields[0].dtype)

    def _prepare(self, states: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Looks at the shapes, and brings calibrated numbers to where the states are."""
        self._check_states(states)
        if self.center is not None:
            if self.center.turned is not None:
                _check_positions(states, positions)
            if self.center.fixed.device != states.device:
                self.center = self.center.to(states.device)
        if self.scales is not None and self.scales.scale.device != states.device:
            scale, zero = self.scales.scale.to(states.device), self.scales.zero_point
            zero = None if zero is None else zero.to(states.device)
            self.scales = replace(self.scales, scale=scale, zero_point=zero)

    def _check_states(self, states: torch.Tensor) -> None:
        if states.dim() != 4 or states.shape[3] != self.dim:
            raise ValueError(
                f"states must be [batch, kv_heads, tokens, {self.dim}], not {list(states.shape)}"
            )
        if states.shape[2] % self.unit:
            raise ValueError(
                f"{states.shape[2]} tokens are no whole groups of {self.unit} (shape "
                f"{list(states.shape)})"
            )

    def _check_coded(self, coded: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        batch, kv_heads, tokens, _ = out.shape
        lead = (batch, kv_heads, tokens // self.unit)
        wanted = [(*lead, *field.shape) for field in self.fields]
        found = [tuple(tensor.shape) for tensor in coded]
        if wanted != found:
            raise ValueError(
                f"to fill {list(out.shape)}, {self.scheme} needs tensors of {wanted}, not {found}"
            )


def _check_positions(states: torch.Tensor, positions: torch.Tensor | None) -> None:
    batch, _, tokens, _ = states.shape
    if positions is None or positions.shape != (batch, tokens):
        found = None if positions is None else list(positions.shape)
        raise ValueError(
            f"a mean that turns needs the position of each token: [{batch}, {tokens}], not {found}"
        )


def _checked(scales: TensorScales | None, scheme: TensorScheme, dim: int) -> TensorScales:
    if scales is None:
        raise ValueError(f"{scheme} needs calibrated scales")
    if scales.scale.shape[-1] not in (1, dim):
        raise ValueError(f"scales of {scales.scale.shape[-1]} channels, but heads have {dim}")
    return scales


def _fields(scheme: TensorScheme, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
    form = scheme.format
    if not form.is_scaled:
        kept = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(form.name, dtype)
        return (Field("values", (dim,), kept),)
    grouped = scheme.group_size is not None
    row = packing.row_bytes(form, dim)
    codes = Field("codes", (scheme.unit, row) if grouped else (row,), torch.uint8)
    if scheme.granularity.is_static:
        return (codes,)
    names = ("scale",) if scheme.symmetric else ("scale", "middle")
    shape = (dim,) if grouped else ()
    kept = dynamic.SCALE_DTYPES[scheme.scale_format]
    return (codes, *(Field(name, shape, kept) for name in names))


def _kernels(states: torch.Tensor) -> ModuleType | None:
    """The compiled kernels, where `states` are something that they could read."""
    return _numba() if type(states) is torch.Tensor and states.device.type == "cpu" else None


@functools.cache
def _numba() -> ModuleType | None:
    try:
        from . import numba_codec
    except ImportError:  # plain torch does it all, only slower
        return None
    return numba_codec
