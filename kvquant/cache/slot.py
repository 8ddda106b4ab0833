"""SlotStore: the keys or the values of one layer, exact where they must be and codes elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from kvquant.attention.stored import Positions, Run
from kvquant.quantize.codec import Codec, Field

from .storage import State, TokenBuffer
from .window import PAGE, ROLLBACK, Window

_BUFFERS = ("sinks", "coded", "tail")


class SlotStore:
    """Tokens of rows that have equally many, from the oldest that can be seen to the newest.

    What is stored depends on a token's index, its position and the values of its unit, never on how
    calls were cut; nothing stored is ever quantized again.

    Attributes:
        length: Tokens seen so far, those that have left a sliding window included.
        records: Whether the newest `ROLLBACK` tokens are to stay as they were for a while, so that
            `crop` can take them back without a trace.
    """

    def __init__(self, codec: Codec, window: Window) -> None:
        """An empty store.

        Args:
            codec: Turns tokens into codes.
            window: Which tokens are exact, and which can be seen.
        """
        self.codec = codec
        self.window = window
        self.length = 0
        self.records = False
        exact = (Field("exact", (codec.dim,), codec.dtype),)
        keep, unit = window.keep, window.unit
        # Units end where the residual begins, or before.
        coded_limit = None if keep is None else -(-(keep - window.residual) // unit)
        self.sinks = TokenBuffer(exact, max(1, window.sinks))
        self.coded = TokenBuffer(codec.fields, max(1, PAGE // unit), coded_limit)
        self.tail = TokenBuffer(exact, PAGE, keep if window.never_codes else None)
        self.tail.restart(window.sinks)
        self._coded_end = window.sinks
        self._forgotten = 0
        # Units that a crop left short, with the tokens they have.
        self._short: dict[int, int] = {}

    @property
    def buffers(self) -> tuple[TokenBuffer, TokenBuffer, TokenBuffer]:
        """Sinks, codes, tail."""
        return self.sinks, self.coded, self.tail

    def append(self, states: torch.Tensor, positions: Positions, bound: int = 0) -> None:
        """Adds tokens.

        Args:
            states: ``[batch, kv_heads, tokens, dim]``.
            positions: Of any token so far and of these.
            bound: Larger than any position.
        """
        old, self.length = self.length, self.length + states.shape[2]
        sinks = min(max(self.window.sinks - old, 0), states.shape[2])
        self.sinks.append((states[:, :, :sinks],))
        self._encode(states, old, positions, bound)
        start = self._trim_tail()
        self.tail.append((states[:, :, max(start - old, 0) :],))

    def settle(self, positions: Positions, bound: int = 0) -> None:
        """Quantizes and forgets what only waited because it might have been taken back."""
        records, self.records = self.records, False
        self._encode(None, self.length, positions, bound)
        self._trim_tail()
        self.records = records

    def can_crop(self, count: int) -> bool:
        """Whether everything that can be seen without the newest `count` tokens is still held."""
        return self.window.first_kept(max(0, self.length - count)) >= self._forgotten

    def crop(self, count: int) -> None:
        """Takes the newest `count` tokens back.

        Codes that stay keep their scales. A unit that is cut stays short for good.
        """
        self.length = max(0, self.length - count)
        if self.length < self._coded_end:
            self._cut_codes()
            self.tail.restart(self._coded_end)
        else:
            self.tail.cut(self.length)
        self.sinks.cut(self.length)

    def read(self, out: torch.Tensor, positions: Positions, bound: int = 0) -> None:
        """Writes the newest tokens to `out`.

        Args:
            out: ``[batch, kv_heads, tokens, dim]``; any float dtype and any strides but the last.
            positions: Of any token so far.
            bound: Larger than any position.
        """
        origin = self.length - out.shape[2]
        exact_sinks = min(self.window.sinks, self.length)
        for buffer, start, stop in (
            (self.sinks, origin, exact_sinks),
            (self.tail, max(origin, self._coded_end), self.length),
        ):
            place = start - origin
            for count, (exact,) in buffer.views(start, stop):
                out[:, :, place : place + count].copy_(exact)
                place += count
        for unit, stop, start, count in self._runs(max(origin, self.window.sinks)):
            target = out[:, :, start - origin : start - origin + count]
            self._decode(unit, stop, start, target, positions, bound)

    def runs(self, origin: int) -> list[Run] | None:
        """Tokens from `origin` on as they are stored, and perhaps some before.

        None if a unit was cut short by `crop`, which only `read` knows how to read.
        """
        if self._short:
            return None
        found: list[Run] = []
        first = origin = max(origin, 0)
        for count, place in self.sinks.places(origin, min(self.window.sinks, self.length)):
            found.append(Run(first, count, None, self.sinks.tensors, place))
            first += count
        origin = max(origin, self.window.sinks)
        if origin < self._coded_end:
            unit = self._unit_of(origin)
            first = self._start_of(unit)
            for units, place in self.coded.places(unit, self.coded.end):
                count = units * self.window.unit
                found.append(Run(first, count, self.codec, self.coded.tensors, place))
                first += count
        first = max(origin, self._coded_end)
        for count, place in self.tail.places(first, self.length):
            found.append(Run(first, count, None, self.tail.tensors, place))
            first += count
        return found

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor held by what `change` makes of it."""
        for buffer in self.buffers:
            buffer.map(change)

    def copy(self) -> SlotStore:
        """Another store with the same content; the two share no tensor after a `map` of either."""
        twin = SlotStore(self.codec, self.window)
        twin.length, twin.records = self.length, self.records
        twin.sinks, twin.coded, twin.tail = (buffer.copy() for buffer in self.buffers)
        twin._coded_end, twin._forgotten = self._coded_end, self._forgotten
        twin._short = dict(self._short)
        return twin

    def state(self) -> State:
        """What `restore` makes the same content from, of live rows only."""
        numbers = {
            "tokens": self.length,
            "coded_end": self._coded_end,
            "forgotten": self._forgotten,
            "short": sorted(map(list, self._short.items())),
            "rows": [[buffer.first, buffer.end] for buffer in self.buffers],
        }
        tensors = {
            f"{name}.{field}": rows
            for name, buffer in zip(_BUFFERS, self.buffers, strict=True)
            for field, rows in buffer.rows().items()
        }
        return numbers, tensors

    def restore(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes an empty store what another was when `state` was asked.

        Raises:
            KeyError: Something is missing.
            ValueError: Rows that do not fit.
        """
        self.length, self._coded_end = numbers["tokens"], numbers["coded_end"]
        self._forgotten, self._short = numbers["forgotten"], dict(numbers["short"])
        for name, buffer, (first, end) in zip(_BUFFERS, self.buffers, numbers["rows"], strict=True):
            own = {
                field.removeprefix(f"{name}."): rows
                for field, rows in tensors.items()
                if field.startswith(f"{name}.")
            }
            buffer.restore(first, end, own)

    def nbytes(self) -> int:
        """Bytes held, unused room included."""
        return sum(buffer.nbytes() for buffer in self.buffers)

    def live_nbytes(self) -> int:
        """Bytes of the tokens held."""
        return sum(buffer.live_nbytes() for buffer in self.buffers)

    def _trim_tail(self) -> int:
        """Drops exact tokens that are quantized or out of sight; tells where the others begin."""
        start = self._coded_end
        if self.window.never_codes:
            start = max(start, self._oldest_needed())
        self.tail.skip_to(start)
        return start

    def _oldest_needed(self) -> int:
        """Index of the oldest token that may still be seen."""
        return self.window.first_kept(self.length - (ROLLBACK if self.records else 0))

    def _encode(
        self, states: torch.Tensor | None, old: int, positions: Positions, bound: int
    ) -> None:
        """Quantizes all units that are due; `states` are the tokens from `old` on."""
        self._forget()
        waiting = ROLLBACK if self.records and not self.window.is_append_only else 0
        start, end = (
            self._coded_end,
            self.window.coded_end(self.length - waiting, self._coded_end),
        )
        if start == end:
            return
        # Of a prompt longer than the window, only what can be seen.
        unseen = max(0, min(self._oldest_needed(), end) - start) // self.window.unit
        start += unseen * self.window.unit
        self.coded.skip_to(self.coded.end + unseen if unseen else 0)
        if start < end:
            block = self._gather(start, end, states, old)
            where = positions(start, end) if self.codec.needs_positions else None
            targets = self.coded.grow((end - start) // self.window.unit, block)
            self.codec.encode_into(targets, block, where, bound)
        self._coded_end = end

    def _gather(self, start: int, end: int, states: torch.Tensor | None, old: int) -> torch.Tensor:
        """Exact tokens `start` to `end`, from the tail and from `states`."""
        parts = [exact for _, (exact,) in self.tail.views(start, min(end, old))]
        if states is not None and end > old:
            parts.append(states[:, :, max(start - old, 0) : end - old])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _forget(self) -> None:
        """Drops what has left the window."""
        oldest = self._oldest_needed()
        if oldest <= self._forgotten:
            return
        self._forgotten = oldest
        self.sinks.skip_to(min(oldest, self.sinks.end))
        if not len(self.sinks):
            self.sinks.release()
        if oldest > self.window.sinks:
            self.coded.skip_to(min(self._unit_of(oldest), self.coded.end))

    def _cut_codes(self) -> None:
        """Drops codes of tokens from `length` on."""
        if self.length <= self.window.sinks:
            self.coded.restart(0)
            self._short.clear()
            self._coded_end = self.window.sinks
            return
        last = self._unit_of(self.length - 1)
        held = self.length - self._start_of(last)
        self.coded.cut(last + 1)
        self._short = {unit: size for unit, size in self._short.items() if unit < last}
        if held < self.window.unit:
            self._short[last] = held
        self._coded_end = self.length

    def _start_of(self, unit: int) -> int:
        """Index of the first token of `unit`."""
        missing = sum(
            self.window.unit - size for index, size in self._short.items() if index < unit
        )
        return self.window.sinks + unit * self.window.unit - missing

    def _unit_of(self, token: int) -> int:
        """The unit that holds `token`, counted as if all to come were whole."""
        base, start = 0, self.window.sinks
        for unit, size in sorted(self._short.items()):
            end = start + (unit - base) * self.window.unit + size
            if token < end:
                break
            base, start = unit + 1, end
        return base + (token - start) // self.window.unit

    def _runs(self, token: int) -> Iterator[tuple[int, int, int, int]]:
        """Codes from `token` on, as runs of units that can be read at once.

        Yields:
            First unit, unit after the last, first token, number of tokens.
        """
        if token >= self._coded_end:
            return
        unit = self._unit_of(token)
        while unit < self.coded.end:
            start, size = self._start_of(unit), self._short.get(unit, self.window.unit)
            if start < token or size < self.window.unit:
                first = max(start, token)
                yield unit, unit + 1, first, start + size - first
                unit += 1
                continue
            stop = min((cut for cut in self._short if cut > unit), default=self.coded.end)
            yield unit, stop, start, (stop - unit) * self.window.unit
            unit = stop

    def _decode(
        self,
        unit: int,
        stop: int,
        start: int,
        out: torch.Tensor,
        positions: Positions,
        bound: int,
    ) -> None:
        """Reads units `unit` to `stop` into `out`, which begins at token `start`."""
        size = self.window.unit
        if out.shape[2] < (stop - unit) * size:
            # Part of one unit: read all of it, as codes of a unit belong together.
            whole = out.new_empty((*out.shape[:2], size, out.shape[3]))
            ((_, coded),) = self.coded.views(unit, stop)
            self.codec.decode(coded, whole, None, bound)
            skipped = start - self._start_of(unit)
            out.copy_(whole[:, :, skipped : skipped + out.shape[2]])
            return
        done = 0
        for units, coded in self.coded.views(unit, stop):
            count = units * size
            where = None
            if self.codec.needs_positions:
                where = positions(start + done, start + done + count)
            self.codec.decode(coded, out[:, :, done : done + count], where, bound)
            done += count
