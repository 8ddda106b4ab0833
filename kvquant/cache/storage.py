"""TokenBuffer: tensors that grow along their token axis by pages, and drop tokens at either end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from kvquant.quantize.codec import Field

from .window import capacity, rounded_up
from .workspace import outside_inference_mode

Tensors = tuple[torch.Tensor, ...]

State = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""What a part of a cache is made again from: JSON values, and tensors by name."""


class TokenBuffer:
    """Rows of one or several fields, one row a unit of tokens, numbered from the text's beginning.

    Row i lies at ``i % room``. A buffer that drops rows at its front therefore needs no more room
    than it holds rows, and nothing is moved when it does.

    Attributes:
        first: Number of the oldest row held.
        end: Number after the newest row.
    """

    def __init__(self, fields: tuple[Field, ...], page: int, limit: int | None = None) -> None:
        """An empty buffer.

        Args:
            fields: Name, shape and dtype of one row of each tensor, per batch row and KV head.
            page: Rows by which it grows.
            limit: Rows that it holds at most, if that is known.
        """
        self._fields = fields
        self._page = page
        self._limit = None if limit is None else rounded_up(limit, page)
        self._tensors: Tensors | None = None
        self.first = 0
        self.end = 0

    def __len__(self) -> int:
        """Rows held."""
        return self.end - self.first

    @property
    def room(self) -> int:
        """Rows that fit without growing."""
        return 0 if self._tensors is None else self._tensors[0].shape[2]

    @property
    def tensors(self) -> Tensors:
        """What is held, ``[batch, kv_heads, room, *shape]`` each; empty before the first row."""
        return self._tensors or ()

    def append(self, parts: Tensors) -> None:
        """Adds rows ``[batch, kv_heads, rows, *shape]`` at the end."""
        count = parts[0].shape[2]
        if count == 0:
            return
        self._reserve(len(self) + count, parts[0])
        done = 0
        for start, stop in self._spans(self.end, self.end + count):
            size = stop - start
            for held, part in zip(self.tensors, parts, strict=True):
                held[:, :, start:stop].copy_(part[:, :, done : done + size])
            done += size
        self.end += count

    def skip_to(self, first: int) -> None:
        """Drops rows before `first`; rows that never were count as dropped."""
        self.first = max(self.first, first)
        self.end = max(self.end, self.first)

    def cut(self, end: int) -> None:
        """Drops rows from `end` on."""
        self.end = max(self.first, min(self.end, end))

    def restart(self, at: int) -> None:
        """Drops all rows; the next one has the number `at`."""
        self.first = self.end = at

    def release(self) -> None:
        """Gives the memory of a buffer without rows back."""
        self._tensors = None

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where rows `start` to `stop` lie, as at most two runs: number of rows, first place."""
        for a, b in self._spans(start, stop):
            yield b - a, a

    def grow(self, count: int, like: torch.Tensor) -> list[Tensors]:
        """Adds `count` rows at the end, to be written to the views that it returns.

        Args:
            count: Number of rows.
            like: Has the batch rows, KV heads and device.
        """
        self._reserve(len(self) + count, like)
        self.end += count
        return [parts for _, parts in self.views(self.end - count, self.end)]

    def views(self, start: int, stop: int) -> Iterator[tuple[int, Tensors]]:
        """Rows `start` to `stop` as at most two runs: number of rows, and views of each tensor."""
        for a, b in self._spans(start, stop):
            yield b - a, tuple(tensor[:, :, a:b] for tensor in self.tensors)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by what `change` makes of it."""
        if self._tensors is not None:
            with outside_inference_mode():
                self._tensors = tuple(map(change, self._tensors))

    def copy(self) -> TokenBuffer:
        """Another buffer that holds the same tensors until either changes them through `map`."""
        twin = TokenBuffer(self._fields, self._page, self._limit)
        twin._tensors, twin.first, twin.end = self._tensors, self.first, self.end
        return twin

    def rows(self) -> dict[str, torch.Tensor]:
        """The rows held by the names of their fields, oldest first; nothing if there are none."""
        runs = [parts for _, parts in self.views(self.first, self.end)]
        columns = zip(*runs, strict=True)
        return {
            field.name: torch.cat(column, dim=2)
            for field, column in zip(self._fields, columns, strict=False)
        }

    def restore(self, first: int, end: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Holds what `rows` gave, numbered from `first` to `end`.

        Raises:
            KeyError: A field is missing.
            ValueError: Rows of another number, shape or dtype.
        """
        self.restart(first)
        if end == first:
            return
        parts = tuple(rows[field.name] for field in self._fields)
        for field, part in zip(self._fields, parts, strict=True):
            found = (part.shape[2], tuple(part.shape[3:]), part.dtype)
            wanted = (end - first, field.shape, field.dtype)
            if found != wanted:
                raise ValueError(f"{field.name} must be {wanted}, not {found}")
        self.append(parts)

    def nbytes(self) -> int:
        """Bytes held, unused room included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def live_nbytes(self) -> int:
        """Bytes of the rows held."""
        return self.nbytes() // self.room * len(self) if self.room else 0

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Places of rows `start` to `stop`: one run, or two where they go round the end."""
        while start < stop:
            place = start % self.room
            size = min(stop - start, self.room - place)
            yield place, place + size
            start += size

    def _reserve(self, rows: int, like: torch.Tensor) -> None:
        """Makes room for `rows` rows."""
        if rows <= self.room:
            return
        room = capacity(rows, self._page)
        if self._limit is not None and rows <= self._limit:
            room = min(room, self._limit)
        batch, kv_heads = like.shape[:2]
        with outside_inference_mode():
            grown = tuple(
                torch.zeros(
                    (batch, kv_heads, room, *field.shape), dtype=field.dtype, device=like.device
                )
                for field in self._fields
            )
        held = [parts for _, parts in self.views(self.first, self.end)]
        self._tensors, self.end = grown, self.first
        for parts in held:
            self.append(parts)
