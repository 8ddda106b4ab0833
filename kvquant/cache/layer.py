"""QuantizedLayer: one layer of the cache, as Transformers talks to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvquant.attention.handle import KEY, VALUE
from kvquant.attention.stored import Run, StoredRows
from kvquant.errors import GeometryError, InputError
from kvquant.geometry import LayerGeometry
from kvquant.quantize.codec import Codec
from kvquant.scheme import QuantScheme

from .ledger import RowGroup, Sources, TokenLedger
from .reading import Call, LayerReading
from .slot import SlotStore
from .storage import State
from .transformers_compat import tokens_to_remove
from .window import Window
from .workspace import Workspace

MakeCodec = Callable[[str, torch.dtype, torch.device], Codec]
"""Codec of a slot (``key`` or ``value``) for states of a dtype on a device."""

_SLOTS = ("key", "value")


class QuantizedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, quantized as its scheme says.

    `update` gives attention the current call's tokens exactly, and all earlier ones through their
    codes. A call's tokens are stored when it is over, that is, with the next one, or as soon as
    somebody asks what is stored: until then, attention can read what was stored before.

    Attributes:
        geometry: Shape of the layer's cache.
        scheme: Its scheme, without schemes of other layers.
        cumulative_length: Slots seen so far, padding included.
        record_past: Whether a decoder may take tokens back.
        pending: The last call, while its tokens are not stored.
    """

    is_compileable = False

    def __init__(
        self,
        geometry: LayerGeometry,
        scheme: QuantScheme,
        make_codec: MakeCodec,
        ledger: TokenLedger,
        workspace: Workspace | None,
        backend: Callable[[], str | None] = lambda: None,
    ) -> None:
        """An empty layer.

        Args:
            geometry: Shape of the layer's cache.
            scheme: Of this layer.
            make_codec: Called once for each slot, when dtype and device are known.
            ledger: Shared by all layers.
            workspace: Shared by all layers; None if what this layer returns is used by others.
            backend: Asked in each call: what is to attend to the tokens as they are stored; None if
                they are to be dequantized.
        """
        super().__init__()
        self.geometry = geometry
        self.scheme = scheme
        self.cumulative_length = 0
        self.record_past = False
        self.pending: Call | None = None
        self._stores: list[tuple[SlotStore, SlotStore]] = []
        self._backend = backend
        self._is_away = False
        self._make_codec = make_codec
        self._codecs: tuple[Codec, Codec] | None = None
        self._ledger = ledger
        self._workspace = workspace

    @property
    def stores(self) -> list[tuple[SlotStore, SlotStore]]:
        """Keys and values of each group of rows."""
        if self.pending is not None:
            self.store_pending()
        return self._stores

    @property
    def is_sliding(self) -> bool:
        """Whether old tokens leave the layer."""
        return self.geometry.window is not None

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` leaves no trace."""
        if self.record_past:
            return True
        scheme = self.scheme
        units = (scheme.key.unit, scheme.value.unit, scheme.rotary_part.unit)
        append_only = not scheme.residual_length and max(units) == 1
        return append_only and not self.is_sliding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the stores, once shapes, dtype and device are known.

        Raises:
            GeometryError: The tensors are not what the model's config promised.
        """
        wanted = (
            (self.geometry.kv_heads, self.geometry.key_dim),
            (self.geometry.kv_heads, self.geometry.value_dim),
        )
        found = tuple((states.shape[1], states.shape[3]) for states in (key_states, value_states))
        if found != wanted:
            raise GeometryError(
                f"this model caches keys and values of {found} (heads, width), the cache was made "
                f"for {wanted}: make it from the model that it is used with"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self._codecs = (
            self._make_codec("key", key_states.dtype, key_states.device),
            self._make_codec("value", value_states.dtype, value_states.device),
        )
        self._stores = [self._new_store() for _ in self._ledger.groups]
        self.is_initialized = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a call's tokens; returns what attention reads.

        Args:
            key_states: ``[batch, kv_heads, tokens, key_dim]``.
            value_states: ``[batch, kv_heads, tokens, value_dim]``.
            *args: As Transformers likes.
            **kwargs: Likewise.

        Returns:
            Keys and values of all tokens that can be seen: earlier ones as read from their codes,
            these exactly. Valid until the next layer's update unless gradients are on.
        """
        ledger = self._ledger
        self._store_pending()
        batch, _, tokens, _ = key_states.shape
        self._expect(batch, tokens, key_states.device)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        ledger.is_torn = True
        self.prefetch()
        past = self._visible_past()
        call = self.pending = Call((key_states, value_states), self.cumulative_length, past)
        self.cumulative_length += tokens
        backend = self._backend() if past and not torch.is_grad_enabled() else None
        if backend is not None:
            read = LayerReading(self, call, backend).handles()
        else:
            read = self.read(KEY, call), self.read(VALUE, call)
            self._store_pending()
        ledger.is_torn = ledger.is_open  # a decoder's call is whole when the decoder is through
        return read

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def store_pending(self) -> None:
        """Stores the tokens of the last call, if they are not yet."""
        self._store_pending()

    def _store_pending(self) -> None:
        if self.pending is None:
            return
        ledger = self._ledger
        was_torn, ledger.is_torn = ledger.is_torn, True
        call, self.pending = self.pending, None
        with torch.no_grad():
            for slot, states in enumerate(call.states):
                self._append(slot, states, call.start)
        ledger.is_torn = was_torn

    def read(self, slot: int, call: Call) -> torch.Tensor:
        """What a call sees: earlier tokens from their codes, then its own."""
        states, past = call.states[slot], call.past
        if past == 0:
            return states
        batch, kv_heads, tokens, dim = states.shape
        if self._workspace is None or torch.is_grad_enabled():
            read = states.new_empty((batch, kv_heads, past, dim))
            with torch.no_grad():
                self._read_past(slot, read, call.start)
            return torch.cat((read, states), dim=2)
        shape = (batch, kv_heads, past + tokens, dim)
        out = self._workspace.take(_SLOTS[slot], shape, states.dtype, states.device)
        self._read_past(slot, out[:, :, :past], call.start)
        out[:, :, past:].copy_(states)
        return out

    def stored_rows(self, call: Call) -> list[StoredRows] | None:
        """What a call sees, as it is stored; None if some of its tokens are padding."""
        new = call.states[KEY].shape[2]
        found = []
        for stores, group in zip(self._stores, self._ledger.groups, strict=True):
            if sum(n for _, _, n in group.pieces(call.start, call.start + new)) < new:
                return None
            seen = list(group.pieces(call.start - call.past, call.start + new))
            if len(seen) > 1 and self.is_sliding:
                return None  # a window is a number of slots
            rows = None if group.rows is None else group.index(self.device)
            if rows is None and len(seen) > 1:
                # A mask of slots does not fit tokens: named rows are not attended to by mask.
                rows = torch.arange(len(call.states[KEY]), device=self.device)
            past = stores[KEY].length
            runs = []
            for store, states in zip(stores, call.states, strict=True):
                mine = states if rows is None else states.index_select(0, rows)
                stored = store.runs(0 if store.window.keep is None else past - store.window.keep)
                if stored is None:
                    return None
                runs.append((*stored, Run(past, new, None, (mine,))))
            found.append(
                StoredRows(
                    rows,
                    runs[KEY],
                    runs[VALUE],
                    past,
                    new,
                    self.geometry.window,
                    self._positions(group),
                    self._ledger.bound,
                )
            )
        return found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that `update` will return, and the slot of the first one."""
        past = self._visible_past()
        return past + query_length, self.cumulative_length - past

    def get_seq_length(self) -> int:
        """Slots seen so far."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """The window of a sliding layer, -1 if there is none."""
        return -1 if self.geometry.window is None else self.geometry.window

    def activate_past_recording(self) -> None:
        """From now on, the newest tokens can be taken back without a trace."""
        self.record_past = True

    def crop(self, tokens: int) -> None:
        """Takes the newest tokens back, alone among the layers; use the cache's `crop`.

        Raises:
            RuntimeError: Tokens that would be seen again have left the window.
        """
        count = tokens_to_remove(tokens, self.cumulative_length)
        counts = [count] * len(self.stores)
        self.check_crop(count, counts)
        self.crop_groups(count, counts)

    def check_crop(self, slots: int, counts: list[int]) -> None:
        """Makes sure that `crop_groups` can do what it is asked, before anything is changed.

        Raises:
            RuntimeError: Tokens that would be seen again have left the window.
        """
        pairs = zip(self.stores, counts, strict=False)
        if not all(store.can_crop(count) for stores, count in pairs for store in stores):
            raise RuntimeError(
                f"cannot take {slots} tokens back: what a window of {self.geometry.window} would "
                "see then is gone. Call activate_past_recording() before tokens are added that may "
                "be taken back"
            )

    def crop_groups(self, slots: int, counts: list[int]) -> None:
        """Takes the newest `slots` slots back, `counts` real tokens of each group.

        `check_crop` has to come first, for all layers: a crop that fails half-way cannot be undone.
        """
        self.cumulative_length = max(0, self.cumulative_length - slots)
        # An empty layer has no stores yet.
        for stores, count, group in zip(self.stores, counts, self._ledger.groups, strict=False):
            for store in stores:
                store.crop(count)
                if self.record_past:
                    store.settle(self._positions(group), self._ledger.bound)

    def reset(self) -> None:
        """Forgets all tokens and gives their memory back."""
        self.pending = None
        self._stores = []
        self.is_initialized = False
        self.cumulative_length = 0
        self.record_past = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Not for one layer alone: the cache's `reorder_cache` moves all of them."""
        raise InputError("rows are reordered in all layers at once: use the cache's reorder_cache")

    def select_rows(self, index: torch.Tensor, sources: Sources) -> None:
        """Makes row i what row ``index[i]`` was; `sources` says so group by group."""
        self.regroup(sources)

    def regroup(self, sources: Sources) -> None:
        """Makes each group of rows from an old one and an index into its rows."""
        if not self.stores:
            return
        made = []
        for number, index in sources:
            pair = tuple(store.copy() for store in self.stores[number])
            for store in pair:
                store.map(_selector(index))
            made.append((pair[0], pair[1]))
        self._stores = made

    def offload(self) -> None:
        """Moves what is stored to the CPU."""
        self._is_away = True
        for stores in self.stores:
            for store in stores:
                store.map(lambda held: held.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Moves what is stored back to where it is needed."""
        if not self._is_away:
            return
        self._is_away = False
        for stores in self.stores:
            for store in stores:
                store.map(self._bring_back)

    def state(self) -> State:
        """What `restore` makes the same content from; of a layer that holds tokens."""
        numbers: dict[str, Any] = {
            "slots": self.cumulative_length,
            "records_past": self.record_past,
            "stores": [],
        }
        tensors = {}
        for group, stores in enumerate(self.stores):
            own = {}
            for slot, store in zip(_SLOTS, stores, strict=True):
                own[slot], rows = store.state()
                own[slot]["dtype"] = str(store.codec.dtype).removeprefix("torch.")
                tensors.update({f"{slot}.{group}.{name}": part for name, part in rows.items()})
            numbers["stores"].append(own)
        return numbers, tensors

    def restore(
        self,
        numbers: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """Makes an empty layer what another was when `state` was asked; the ledger comes first.

        Raises:
            KeyError: Something is missing.
            ValueError: Tensors that do not fit.
        """
        self.record_past = numbers["records_past"]
        shape = self.geometry
        empty = (
            torch.empty(
                (self._ledger.batch, shape.kv_heads, 0, dim),
                dtype=getattr(torch, numbers["stores"][0][slot]["dtype"]),
                device=device,
            )
            for slot, dim in zip(_SLOTS, (shape.key_dim, shape.value_dim), strict=True)
        )
        self.lazy_initialization(*empty)
        self.cumulative_length = numbers["slots"]
        for group, (own, stores) in enumerate(zip(numbers["stores"], self.stores, strict=True)):
            for slot, store in zip(_SLOTS, stores, strict=True):
                prefix = f"{slot}.{group}."
                rows = {
                    name.removeprefix(prefix): part.to(device)
                    for name, part in tensors.items()
                    if name.startswith(prefix)
                }
                store.restore(own[slot], rows)

    def nbytes(self) -> int:
        """Bytes held, unused room included."""
        return sum(store.nbytes() for stores in self.stores for store in stores)

    def live_nbytes(self) -> int:
        """Bytes of the tokens held."""
        return sum(store.live_nbytes() for stores in self.stores for store in stores)

    def _expect(self, batch: int, tokens: int, device: torch.device) -> None:
        """Makes sure that the ledger knows about the tokens that come.

        Raises:
            InputError: Another number of rows than is held, or an earlier call was cut off.
        """
        missing = self.cumulative_length + tokens - self._ledger.slots
        if missing > 0 or not self._ledger.is_open:
            self._ledger.check_whole()
        if missing > 0:
            # No hook told about this call: no padding, and slots are positions.
            self._ledger.begin(batch, missing, device)
        if not self.is_initialized:
            return
        for stores, group in zip(self.stores, self._ledger.groups, strict=True):
            for store in stores:
                store.records = self.record_past
                rows = batch if group.rows is None else len(group.rows)
                held = next((b.tensors[0].shape[0] for b in store.buffers if b.tensors), rows)
                if held != rows:
                    raise InputError(f"the cache holds {held} rows, the call has {rows}")

    def _new_store(self) -> tuple[SlotStore, SlotStore]:
        assert self._codecs is not None
        window = self.geometry.window
        key, value = (
            SlotStore(
                codec,
                Window(
                    self.scheme.sink_tokens,
                    self.scheme.residual_length,
                    codec.unit,
                    None if window is None else window - 1,
                ),
            )
            for codec in self._codecs
        )
        key.records = value.records = self.record_past
        return key, value

    def _visible_past(self) -> int:
        """Earlier slots that the next call can see."""
        window = self.geometry.window
        length = self.cumulative_length
        return length if window is None else min(length, window - 1)

    def _read_past(self, slot: int, out: torch.Tensor, end: int) -> None:
        """Fills `out` with the newest slots before `end`; padding becomes zeros."""
        start = end - out.shape[2]
        for stores, group in zip(self._stores, self._ledger.groups, strict=True):
            store, positions = stores[slot], self._positions(group)
            pieces = list(group.pieces(start, end))
            whole = len(pieces) == 1 and pieces[0][2] == out.shape[2]
            if whole and group.rows is None:
                store.read(out, positions, self._ledger.bound)
                continue
            seen = sum(count for _, _, count in pieces)
            rows = out.shape[0] if group.rows is None else len(group.rows)
            packed = out.new_empty((rows, out.shape[1], seen, out.shape[3]))
            store.read(packed, positions, self._ledger.bound)
            spread = out.new_zeros((rows, *out.shape[1:]))
            done = 0
            for first, _, count in pieces:
                place = spread[:, :, first - start : first - start + count]
                place.copy_(packed[:, :, done : done + count])
                done += count
            if group.rows is None:
                out.copy_(spread)
            else:
                out.index_copy_(0, group.index(out.device), spread)

    def _append(self, slot: int, states: torch.Tensor, start: int) -> None:
        """Stores the real ones among the tokens whose first slot is `start`."""
        stop = start + states.shape[2]
        for stores, group in zip(self._stores, self._ledger.groups, strict=True):
            pieces = list(group.pieces(start, stop))
            if not pieces:
                continue
            mine = states
            if group.rows is not None:
                mine = states.index_select(0, group.index(states.device))
            parts = [mine[:, :, first - start : first - start + n] for first, _, n in pieces]
            real = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
            stores[slot].append(real, self._positions(group), self._ledger.bound)

    def _positions(self, group: RowGroup) -> Any:
        return self._ledger.positions_of(group, self.device)

    def _bring_back(self, held: torch.Tensor) -> torch.Tensor:
        if held.device == self.device:
            return held
        return held.to(self.device, non_blocking=True)


def _selector(index: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda held: held.index_select(0, index.to(held.device))
