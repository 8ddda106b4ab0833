"""TensorHandle: keys or values that have not been read yet.

`QuantizedLayer.update` returns two of them, of the shape, dtype and device that the tensors would
have. Attention that knows them reads the codes themselves; whatever else touches one gets the
tensor that it stands for.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from .stored import StoredRows

KEY, VALUE = 0, 1


class Reading(Protocol):
    """What one call can read of one layer.

    Attributes:
        backend: What is to attend to it: a name in `kvquant.attention.interface.BACKENDS`.
    """

    backend: str

    def rows(self) -> list[StoredRows] | None:
        """The tokens as they are stored, or None where only `read` gives them."""
        ...

    def read(self, slot: int) -> torch.Tensor:
        """Keys (`KEY`) or values (`VALUE`) of all tokens, in the model's dtype."""
        ...


class TensorHandle(torch.Tensor):
    """Stands for ``reading.read(slot)``.

    Attributes:
        reading: What it reads from; good until the cache is used for the next call.
        slot: `KEY` or `VALUE`.
    """

    reading: Reading
    slot: int

    # Without this, asking for a shape would cost as much as a small kernel.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[TensorHandle],
        reading: Reading,
        slot: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> TensorHandle:
        """A handle on keys or values.

        Args:
            cls: This class.
            reading: Where they are read from.
            slot: `KEY` or `VALUE`.
            shape: ``[batch, kv_heads, tokens, dim]``.
            dtype: Of the model.
            device: Of the model.
        """
        made: TensorHandle = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        made.reading, made.slot = reading, slot
        return made

    def __init__(self, *_: Any) -> None:
        """Everything is done by `__new__`."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Without reading anything."""
        name = "values" if self.slot == VALUE else "keys"
        return f"TensorHandle({name} {list(self.shape)} {self.dtype})"

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """A copy of the tensor that it stands for."""
        return self.materialize().clone()

    def materialize(self) -> torch.Tensor:
        """The tensor that it stands for."""
        return self.reading.read(self.slot)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Any operation gets the tensors that the handles stand for."""
        args, kwargs = tree_map_only(TensorHandle, TensorHandle.materialize, (args, kwargs or {}))
        return function(*args, **kwargs)
