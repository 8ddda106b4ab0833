"""New weights of a folded model, and the proof that it is the same model.

Only tensors that change are read and written, each in the dtype it is stored in. A power of two
changes a float's exponent and nothing else, as long as the result is neither too large nor so small
that bits fall off; that is checked for every number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from kvquant.errors import ExportError
from kvquant.models.adapters import base_model

from .fold_attention import evaluating
from .fold_places import Place

if TYPE_CHECKING:
    from .checkpoint import AttentionModule, Checkpoint
    from .fold import LayerFold

_DTYPES = ("F32", "BF16", "F16")
_LOGITS = 1e-4
"""Largest difference of logits, in proportion to the largest logit where that is above 1."""

_NOTHING = 2.0**-100
"""Smaller numbers add nothing to any sum, so that bits of theirs may fall off."""

_ROUNDING = 2.0**-22
"""Of float32, for norms that multiply by 1 + weight: no other dtype comes near."""


def folded_tensors(
    checkpoint: Checkpoint,
    modules: Mapping[int, AttentionModule],
    folds: Mapping[int, LayerFold],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint that folding changes, by name, in the dtype they are stored in.

    Args:
        checkpoint: The model that was observed, as it lies on disk.
        modules: Its attention modules, by layer.
        folds: From `choose`.

    Raises:
        ExportError: A weight that the checkpoint stores under another name or quantized, or one
            that its dtype cannot hold exactly when scaled.
    """
    for change in _changes(checkpoint, modules, folds):
        stored = _read(checkpoint, change.name)
        yield change.name, change.apply(stored)


@dataclass(frozen=True)
class FoldCheck:
    """What `check_folded` found.

    Attributes:
        tensors: How many tensors were folded, all of them exactly.
        logits: Largest difference of the model's logits.
    """

    tensors: int
    logits: float


def check_folded(
    base: Checkpoint,
    folded: Checkpoint,
    modules: Mapping[int, AttentionModule],
    folds: Mapping[int, LayerFold],
    model: Any,
    tokens: torch.Tensor,
) -> FoldCheck:
    """Makes sure that a folded directory holds the same model.

    Its weights, read again, are base weight times factor bit for bit, all others have the shape and
    dtype they had; and with them in the place of its own, `model` gives the same logits.

    Args:
        base: The model as it was.
        folded: The directory that was written.
        modules: Attention modules of `base`.
        folds: What was folded; from an observation of `model`.
        model: The base, loaded; in float32 the comparison is sharpest. It is left as it was.
        tokens: Token ids to compare logits on, ``[tokens]`` or ``[batch, tokens]``.

    Raises:
        ExportError: It does not; the message says where.
    """
    _check_headers(base, folded)
    changes = list(_changes(base, modules, folds))
    for change in changes:
        expected, found = change.apply(_read(base, change.name)), _read(folded, change.name)
        if not torch.equal(found, expected):
            raise ExportError(
                f"{change.name} in {folded.directory} is not the base's times its factors: "
                "export again"
            )
    ids = tokens.reshape(-1, tokens.shape[-1])
    before = _logits(model, ids)
    with _replaced(folded, changes):
        difference = float((_logits(model, ids) - before).abs().max())
    allowed = _LOGITS * max(1.0, float(before.abs().max()))
    if not difference <= allowed:
        raise ExportError(
            f"the folded model's logits differ by {difference:.2g}, allowed are {allowed:.2g}: "
            f"folding is not exact for {type(base_model(model)).__name__}, export without --fold"
        )
    return FoldCheck(len(changes), difference)


@dataclass(frozen=True, eq=False)
class _Scaling:
    """Factors for some entries of a tensor."""

    axis: int | None
    entries: torch.Tensor
    factors: torch.Tensor
    offset: float

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """float64 `values` with the factors."""
        axis = 0 if self.axis is None else self.axis
        flat = values.flatten() if self.axis is None else values
        vector = flat.new_ones(flat.shape[axis])
        vector[self.entries.flatten()] = self.factors.flatten().to(flat.dtype)
        vector = vector.view([-1 if at == axis else 1 for at in range(flat.dim())])
        return ((flat + self.offset) * vector - self.offset).view(values.shape)


@dataclass(frozen=True, eq=False)
class _Change:
    """What happens to one tensor: its name in the checkpoint, and its parameter in the model."""

    name: str
    parameter: torch.Tensor
    scalings: tuple[_Scaling, ...]

    def apply(self, stored: torch.Tensor) -> torch.Tensor:
        """`stored` with all factors, in its dtype.

        Raises:
            ExportError: That dtype does not hold the result exactly.
        """
        exact = stored.double()
        for scaling in self.scalings:
            exact = scaling.apply(exact)
        scaled = exact.to(stored.dtype)
        offset = self.scalings[0].offset
        wrong = _inexact(stored, exact, scaled) if not offset else _rounded(offset, exact, scaled)
        if bool(wrong.any()):
            raise ExportError(self._why(stored, offset, int(wrong.sum())))
        return scaled

    def _why(self, stored: torch.Tensor, offset: float, wrong: int) -> str:
        dtype = str(stored.dtype).removeprefix("torch.")
        if offset:
            return (
                f"{self.name} is multiplied by as 1 + weight, and {wrong} of {stored.numel():,} "
                f"factors on that are none that a {dtype} weight can hold: fold a float32 "
                "checkpoint, or export without --fold"
            )
        return (
            f"{wrong:,} of {stored.numel():,} values of {self.name} leave the normal range of "
            f"{dtype} when scaled: fold a bfloat16 or float32 checkpoint, or export without --fold"
        )


def _inexact(stored: torch.Tensor, exact: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    """Where scaling lost bits, or left the range in which every device computes with all bits."""
    least = torch.finfo(stored.dtype).tiny
    fell = (scaled.abs() < least) & (stored.abs() >= least)
    return ((scaled.double() != exact) | fell) & (exact.abs() >= _NOTHING)


def _rounded(offset: float, exact: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    """Where what a norm multiplies by is off by more than float32 rounds."""
    wanted = exact + offset
    found = (scaled.float() + offset).double()
    return (found - wanted).abs() > _ROUNDING * wanted.abs()


def _changes(
    checkpoint: Checkpoint,
    modules: Mapping[int, AttentionModule],
    folds: Mapping[int, LayerFold],
) -> Iterator[_Change]:
    for layer, fold in sorted(folds.items()):
        scalings: dict[str, list[_Scaling]] = defaultdict(list)
        parameters: dict[str, torch.Tensor] = {}
        for place, factors in _factors(fold):
            for kind, parameter in (("weight", place.weight), ("bias", place.bias)):
                if parameter is None:
                    continue
                name = f"{modules[layer].path}.{place.module}.{kind}"
                axis, offset = (place.axis, place.offset) if kind == "weight" else (None, 0.0)
                scalings[name].append(_Scaling(axis, place.entries, factors, offset))
                parameters[name] = parameter
        for name, parameter in parameters.items():
            _check_stored(checkpoint, name, parameter)
            yield _Change(name, parameter, tuple(scalings[name]))


def _factors(fold: LayerFold) -> Iterator[tuple[Place, torch.Tensor]]:
    """Where something changes, and the factors there, ``[heads, dim]``."""
    places = fold.places
    for factors, into, inverse in (
        (fold.key, places.key, places.query),
        (fold.value, places.value, places.output),
    ):
        if bool((factors == 1).all()):
            continue
        yield into, factors
        group = len(inverse.entries) // len(factors)
        yield inverse, (1 / factors).repeat_interleave(group, 0)


def _check_stored(checkpoint: Checkpoint, name: str, parameter: torch.Tensor) -> None:
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise ExportError(
            f"{checkpoint.directory} has no tensor {name}: its attention is stored in another form "
            "than it runs in, and cannot be folded"
        )
    if stored.dtype not in _DTYPES:
        raise ExportError(
            f"{name} is stored as {stored.dtype}: quantized weights cannot be folded, fold the "
            "model before its weights are quantized"
        )
    if tuple(stored.shape) != tuple(parameter.shape):
        raise ExportError(
            f"{name} is {list(stored.shape)} in {checkpoint.directory} and "
            f"{list(parameter.shape)} in the model: it cannot be folded"
        )


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    path = checkpoint.directory / checkpoint.shards[name]
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(name)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _check_headers(base: Checkpoint, folded: Checkpoint) -> None:
    """Makes sure that each tensor of the base is there, with its dtype and shape."""
    for name, was in base.tensors.items():
        now = folded.tensors.get(name)
        if now is None or (now.dtype, now.shape) != (was.dtype, was.shape):
            found = "is missing" if now is None else f"is {now.dtype} {list(now.shape)}"
            raise ExportError(
                f"{name} {found} in {folded.directory}, the base has {was.dtype} "
                f"{list(was.shape)}: export again"
            )


@contextmanager
def _replaced(folded: Checkpoint, changes: list[_Change]) -> Iterator[None]:
    """The model with the folded weights in the place of its own."""
    kept = [(change.parameter, change.parameter.data) for change in changes]
    try:
        for change in changes:
            change.parameter.data = _read(folded, change.name).to(change.parameter)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    base = base_model(model)
    with evaluating(base):
        device = base.get_input_embeddings().weight.device
        logits = base(input_ids=ids.to(device), use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits.float()
