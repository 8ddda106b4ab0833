"""TokenLedger: which slots of which rows hold real tokens, and at which positions.

Transformers numbers the tokens of a batch by slots, padding included. Here padding is never stored:
rows with the same pattern of padding form a group, which counts real tokens only. Without padding
there is one group, and slot and token are the same thing. A batch of two, left-padded::

    slot     0 1 2 3 4 5 6
    row 0    . . . a b c d     group 0: rows [0], runs [(3, 4)]
    row 1    a b c d e f g     group 1: rows [1], runs [(0, 7)]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvquant.attention.stored import Positions
from kvquant.errors import InputError
from kvquant.quantize.codec import Field

from .storage import State, TokenBuffer
from .window import PAGE

Sources = list[tuple[int, torch.Tensor]]
"""For each new group: the old one it comes from, and which of its rows."""


@dataclass
class RowGroup:
    """Rows of a batch that hold real tokens in the same slots.

    Attributes:
        rows: Their numbers; None for all of a batch.
        runs: First slot and number of slots of each run of real tokens, ascending.
    """

    rows: tuple[int, ...] | None = None
    runs: list[tuple[int, int]] = field(default_factory=list)
    _index: torch.Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Real tokens in each row."""
        return sum(count for _, count in self.runs)

    def index(self, device: torch.device) -> torch.Tensor:
        """`rows` as a tensor, which is brought to a device once: doing so stalls it."""
        if self._index is None or self._index.device != device:
            self._index = torch.tensor(self.rows, dtype=torch.int64, device=device)
        return self._index

    def add(self, slot: int, count: int) -> None:
        """Notes that `count` slots from `slot` on hold real tokens."""
        if self.runs and sum(self.runs[-1]) == slot:
            first, old = self.runs.pop()
            slot, count = first, old + count
        if count:
            self.runs.append((slot, count))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Real tokens in the slots `start` to `stop`: first slot, its token index, count."""
        token = 0
        for slot, count in self.runs:
            first, last = max(slot, start), min(slot + count, stop)
            if first < last:
                yield first, token + first - slot, last - first
            token += count

    def slots_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Slots of the real tokens `start` to `stop`, as pairs of first and one past the last."""
        found, token = [], 0
        for slot, count in self.runs:
            first, last = max(token, start), min(token + count, stop)
            if first < last:
                found.append((slot + first - token, slot + last - token))
            token += count
        return found

    def crop(self, slots: int) -> None:
        """Forgets everything from slot `slots` on."""
        self.runs = [(a, min(count, slots - a)) for a, count in self.runs if a < slots]


class TokenLedger:
    """What all layers of a cache have to know about the tokens in it.

    Attributes:
        batch: Rows, or 0 before the first call.
        slots: Slots filled, padding included.
        groups: Rows by their padding.
        bound: Larger than any position.
        is_open: Whether a decoder is in the middle of a call, whose end it will tell.
        is_torn: Whether something is being changed or was when it failed, so that what the layers
            hold may not fit together.
    """

    def __init__(self, keeps_positions: bool) -> None:
        """An empty ledger.

        Args:
            keeps_positions: Whether some layer turns its mean with the position.
        """
        self._keeps_positions = keeps_positions
        self._found: dict[tuple[int, int, int, torch.device], torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.batch = 0
        self.slots = 0
        self.bound = 0
        self.is_open = self.is_torn = False
        self.groups = [RowGroup()]
        self._found.clear()
        self._positions = TokenBuffer((Field("position", (), torch.int32),), PAGE)

    def begin(
        self,
        batch: int,
        tokens: int,
        device: torch.device,
        real: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> Sources | None:
        """Notes the tokens of a call.

        Args:
            batch: Rows of the call.
            tokens: Slots that it fills.
            device: Where positions are kept.
            real: Which of them are no padding, bool ``[batch, tokens]`` on the CPU; None if all.
            positions: ``[batch or 1, tokens]``; by default the slots' numbers.

        Returns:
            Where each group now comes from, if groups had to be split; None if not.

        Raises:
            InputError: The batch has another number of rows than before.
        """
        self.check_batch(batch)
        self.batch = batch
        self._found.clear()
        start, self.slots = self.slots, self.slots + tokens
        self._note_positions(start, tokens, device, positions)
        if real is None or bool(real.all()):
            for group in self.groups:
                group.add(start, tokens)
            return None
        return self._split(start, real)

    def check_whole(self) -> None:
        """Makes sure that nothing that changed the layers was cut off.

        Raises:
            InputError: It was.
        """
        if self.is_torn:
            raise InputError(
                "a forward pass, or another change of the cache, was cut off: what its layers hold "
                "may not fit together. reset() the cache and start again"
            )

    def check_batch(self, batch: int) -> None:
        """Makes sure that a call has as many rows as are held.

        Raises:
            InputError: It has not.
        """
        if batch != self.batch and (self.batch or self.slots):
            held = "1 row" if self.batch == 1 else f"{self.batch} rows"
            raise InputError(
                f"the cache holds {held}, the call has {batch}: reset() the cache, or use "
                "batch_select_indices or batch_repeat_interleave"
            )

    def positions_of(self, group: RowGroup, device: torch.device) -> Positions:
        """Access to the positions of a group's real tokens, until the next call."""

        def positions(start: int, stop: int) -> torch.Tensor | None:
            if not self._keeps_positions:
                return None
            # Layer after layer asks for the same ones.
            place = (id(group), start, stop, device)
            if place not in self._found:
                self._found[place] = find(start, stop)
            return self._found[place]

        def find(start: int, stop: int) -> torch.Tensor:
            parts = [
                view[:, 0]
                for span in group.slots_of(start, stop)
                for _, (view,) in self._positions.views(*span)
            ]
            found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            if group.rows is not None:
                found = found.index_select(0, group.index(found.device))
            return found.to(device)

        return positions

    @property
    def is_padded(self) -> bool:
        """Whether some slot of some row holds no real token."""
        return any(group.tokens < self.slots for group in self.groups)

    def real_slots(self) -> torch.Tensor:
        """Which slots hold real tokens, bool ``[batch, slots]`` on the CPU."""
        held = torch.zeros((self.batch, self.slots), dtype=torch.bool)
        for group in self.groups:
            rows = slice(None) if group.rows is None else list(group.rows)
            for slot, count in group.runs:
                held[rows, slot : slot + count] = True
        return held

    def real_tokens(self, count: int) -> list[int]:
        """How many of the newest `count` slots hold real tokens, per group."""
        start = max(0, self.slots - count)
        return [sum(n for _, _, n in group.pieces(start, self.slots)) for group in self.groups]

    def crop(self, count: int) -> list[int]:
        """Takes the newest `count` slots back; tells how many real tokens that is, per group."""
        counts = self.real_tokens(count)
        self._found.clear()
        self.slots = max(0, self.slots - count)
        self._positions.cut(self.slots)
        for group in self.groups:
            group.crop(self.slots)
        return counts

    def row_numbers(self, index: torch.Tensor) -> torch.Tensor:
        """Rows that `index` names, negative ones from the end, as numbers from 0 on.

        Raises:
            InputError: A row that is not there. On a device, rows without padding are not looked
                at: that would stall it.
        """
        if index.dim() != 1 or index.dtype.is_floating_point or index.dtype == torch.bool:
            raise InputError(
                f"rows are given as a list of whole numbers, not as {index.dtype} "
                f"{list(index.shape)}"
            )
        if index.device.type == "cpu" or len(self.groups) > 1:
            for row in index.tolist():
                if not -self.batch <= row < self.batch:
                    raise InputError(f"there is no row {row}: the cache holds {self.batch}")
        return torch.where(index < 0, index + self.batch, index)

    def select(self, index: torch.Tensor) -> Sources:
        """Makes row i what row ``index[i]`` was; tells where each group comes from.

        Args:
            index: As `row_numbers` gives it.
        """
        self._positions.map(lambda held: held.index_select(0, index.to(held.device)))
        self._found.clear()
        self.batch = index.shape[0]
        if len(self.groups) == 1 or not self.batch:
            self._set_groups(self.groups[:1])
            return [(0, index)]
        groups, sources = [], []
        wanted = index.tolist()
        for number, group in enumerate(self.groups):
            local = {row: place for place, row in enumerate(group.rows or ())}
            rows = tuple(new for new, old in enumerate(wanted) if old in local)
            if rows:
                groups.append(RowGroup(rows, list(group.runs)))
                sources.append((number, torch.tensor([local[wanted[new]] for new in rows])))
        self._set_groups(groups)
        return sources

    def state(self) -> State:
        """What `restore` makes the same ledger from."""
        numbers = {
            "batch": self.batch,
            "slots": self.slots,
            "bound": self.bound,
            "row_groups": [
                {"batch_rows": group.rows, "runs": list(map(list, group.runs))}
                for group in self.groups
            ],
        }
        return numbers, self._positions.rows()

    def restore(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes an empty ledger what another was when `state` was asked.

        Raises:
            KeyError: Something is missing.
            ValueError: Positions that do not fit.
        """
        self.batch, self.slots = numbers["batch"], numbers["slots"]
        self.bound = numbers["bound"]
        self.groups = [
            RowGroup(
                None if group["batch_rows"] is None else tuple(group["batch_rows"]),
                [(slot, count) for slot, count in group["runs"]],
            )
            for group in numbers["row_groups"]
        ]
        if self._keeps_positions:
            self._positions.restore(0, self.slots, tensors)

    def nbytes(self) -> int:
        """Bytes of the positions held."""
        return self._positions.nbytes()

    def live_nbytes(self) -> int:
        """Bytes of the positions needed."""
        return self._positions.live_nbytes()

    def _note_positions(
        self, start: int, tokens: int, device: torch.device, positions: torch.Tensor | None
    ) -> None:
        if positions is None:
            self.bound = max(self.bound, start + tokens)
        elif tokens > 1 or start == 0 or positions.device.type == "cpu":
            # On a device, once a prompt, since it stalls it; a decode step goes on by one.
            self.bound = max(self.bound, start + tokens, int(positions.max()) + 1)
        else:
            self.bound += 1
        if not self._keeps_positions:
            return
        if positions is None:
            positions = torch.arange(start, start + tokens, device=device)[None]
        wide = positions.to(torch.int32).expand(self.batch, tokens)
        self._positions.append((wide[:, None],))

    def _split(self, start: int, real: torch.Tensor) -> Sources:
        """Adds a call's real tokens, splitting groups whose rows differ in padding."""
        patterns = [tuple(row) for row in real.tolist()]
        groups, sources = [], []
        for number, group in enumerate(self.groups):
            rows = range(self.batch) if group.rows is None else group.rows
            places: dict[tuple[bool, ...], list[int]] = {}
            for place, row in enumerate(rows):
                places.setdefault(patterns[row], []).append(place)
            for pattern, members in places.items():
                made = RowGroup(tuple(rows[place] for place in members), list(group.runs))
                for slot, is_real in enumerate(pattern, start):
                    made.add(slot, int(is_real))
                groups.append(made)
                sources.append((number, torch.tensor(members)))
        self._set_groups(groups)
        return sources

    def _set_groups(self, groups: list[RowGroup]) -> None:
        self.groups = groups
        if len(groups) == 1:
            groups[0].rows = None
