from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvquant.cache.companions import QuantizedHybridLayer, QuantizedIndexedLayer
from kvquant.cache.layer import QuantizedLayer
from kvquant.cache.ledger import TokenLedger
from kvquant.cache.slot import SlotStore
from kvquant.cache.window import Window
from kvquant.cache.workspace import Workspace
from kvquant.errors import GeometryError, InputError
from kvquant.geometry import LayerGeometry, LayerKind
from kvquant.presets import preset, preset_names
from kvquant.quantize.codec import Center, Codec
from kvquant.rotary import RotaryLayout
from kvquant.scales import TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

CPU = torch.device("cpu")
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 6


def geometry(
    window: int | None = None, heads: int = HEADS, dims: tuple[int, int] = (KEY_DIM, VALUE_DIM)
) -> LayerGeometry:
    kind = LayerKind.FULL if window is None else LayerKind.SLIDING
    return LayerGeometry(kind, heads, *dims, window)


def angles(count: int, device: str | torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.arange(count, device=device)[:, None] * torch.tensor([1.0, 0.1], device=device)
    return turns.cos(), turns.sin()


def scheme_of(name: str) -> QuantScheme:
    """A preset, a static scheme, or one whose residual and groups come into play soon."""
    if name == "small kivi":
        return preset("int4-kivi", group_size=4, residual_length=5, sink_tokens=1)
    if name == "fp8 static":
        slot = TensorScheme(tensor_format("fp8"), Granularity.PER_HEAD)
        return QuantScheme(slot, slot)
    return preset(name.removesuffix(" turned"))


def make_layer(
    name: str | QuantScheme,
    shape: LayerGeometry | None = None,
    ledger: TokenLedger | None = None,
    workspace: Workspace | None = None,
    kind: type[QuantizedLayer] = QuantizedLayer,
) -> QuantizedLayer:
    shape = geometry() if shape is None else shape
    scheme = scheme_of(name) if isinstance(name, str) else name
    turned = isinstance(name, str) and name.endswith("turned")
    ledger = TokenLedger(turned) if ledger is None else ledger

    def make_codec(slot: str, dtype: torch.dtype, device: torch.device) -> Codec:
        own = scheme.key if slot == "key" else scheme.value
        dim = shape.key_dim if slot == "key" else shape.value_dim
        scales, center = None, None
        if own.granularity.is_static:
            scales = TensorScales(torch.full((shape.kv_heads, 1), 0.01, device=device))
        if own.center and turned and slot == "key":
            mean = torch.ones(shape.kv_heads, dim, device=device)
            layout = RotaryLayout(0, 4, False, "half")
            center = Center(0 * mean, mean, layout, lambda count: angles(count, device))
        return Codec(own, dim, dtype, scales=scales, center=center)

    return kind(shape, scheme, make_codec, ledger, workspace or Workspace())


def states(
    tokens: int, batch: int = 2, shape: LayerGeometry | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = geometry() if shape is None else shape
    chance = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, shape.kv_heads, tokens, dim, generator=chance) + 1
        for dim in (shape.key_dim, shape.value_dim)
    )


def cut(pair: tuple[torch.Tensor, torch.Tensor], start: int, stop: int) -> Any:
    return tuple(part[:, :, start:stop] for part in pair)


def held(layer: QuantizedLayer) -> list[torch.Tensor]:
    """All rows of all stores, in the order of the text."""
    return [
        torch.cat(runs, dim=2)
        for stores in layer.stores
        for store in stores
        for buffer in store.buffers
        for runs in zip(
            *(views for _, views in buffer.views(buffer.first, buffer.end)), strict=True
        )
    ]


def same(one: QuantizedLayer, other: QuantizedLayer) -> bool:
    a, b = held(one), held(other)
    return len(a) == len(b) and all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )


NAMES = [*preset_names(), "small kivi", "int4 turned", "fp8 static"]
CUTS = [[1], [3, 5, 1], [40], [17, 1, 1, 1]]


# What attention reads


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("window", [None, 2, 8, 25, 100])
def test_without_quantization_it_is_the_layer_of_transformers(
    window: int | None, sizes: list[int]
) -> None:
    plain = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    layer = make_layer("none", geometry(window))
    assert layer.is_sliding is (window is not None)
    assert layer.get_max_length() == (-1 if window is None else window)
    pair, done = states(40), 0
    for size in itertools.cycle(sizes):
        part = cut(pair, done, done + size)
        if not part[0].shape[2]:
            break
        assert layer.get_mask_sizes(size) == plain.get_mask_sizes(size)
        for found, wanted in zip(layer.update(*part), plain.update(*part), strict=True):
            assert torch.equal(found, wanted)
        done = min(done + size, 40)
        assert layer.get_seq_length() == plain.get_seq_length() == done


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("name", NAMES)
def test_earlier_tokens_are_read_from_codes_and_these_are_exact(
    name: str, window: int | None
) -> None:
    layer = make_layer(name, geometry(window))
    pair, done = states(170), 0
    scheme = scheme_of(name)
    stores = None
    for size in (20, 1, 3, 130, 1, 15):
        part = cut(pair, done, done + size)
        read = layer.update(*part)
        if stores is None:
            assert read[0] is part[0]  # of a first call nothing is copied
            stores = [
                SlotStore(
                    codec,
                    Window(
                        scheme.sink_tokens,
                        scheme.residual_length,
                        codec.unit,
                        None if window is None else window - 1,
                    ),
                )
                for codec in layer._codecs or ()
            ]
        past = done if window is None else min(done, window - 1)
        for store, found, new in zip(stores, read, part, strict=True):
            assert found.shape[2] == past + size
            assert torch.equal(found[:, :, past:], new)
            earlier = torch.empty_like(found[:, :, :past])
            if past:
                store.read(earlier, ordinals, 1000)
            assert torch.equal(found[:, :, :past], earlier)
            store.append(new, ordinals, 1000)
        done += size


def ordinals(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop).expand(2, -1)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("name", NAMES)
def test_how_calls_were_cut_cannot_be_told_from_what_is_stored(
    name: str, window: int | None
) -> None:
    pair, layers = states(220), []
    for sizes in ([220], [1], [7, 90, 3]):
        layer, done = make_layer(name, geometry(window)), 0
        for size in itertools.cycle(sizes):
            part = cut(pair, done, done + size)
            if not part[0].shape[2]:
                break
            layer.update(*part)
            done += size
        layers.append(layer)
    assert same(layers[0], layers[1])
    assert same(layers[0], layers[2])
    assert len({layer.live_nbytes() for layer in layers}) == 1


# Padding


PADDED = {
    "left": ["...abcdefgh", "abcdefghijk", ".abcdefghij"],
    "right": ["abcdefgh...", "abcdefghijk", "abcdefghij."],
    "middle": ["abc...defgh", "abcdefghijk", ".abc..def.g"],
    "nothing real": ["...........", "abcdefghijk", "..........."],
    "all alike": ["..abcdefghi", "..abcdefghi", "..abcdefghi"],
}


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("name", ["none", "int8", "int4", "small kivi", "int4 turned"])
def test_padding_is_not_stored_and_rows_are_as_if_alone(
    name: str, kind: str, window: int | None
) -> None:
    # Case G8. Positions of the rows alone are their slots here, as they are in the batch.
    real = torch.tensor([[char != "." for char in row] for row in PADDED[kind]])
    pair = states(11 + 9, batch=3)
    for part in pair:  # padding is a hundred times larger than text
        part[:, :, :11][(~real)[:, None].expand(-1, HEADS, -1)] *= 100
    batched = make_layer(name, geometry(window))
    alone = [make_layer(name, geometry(window)) for _ in range(3)]
    done, seen = 0, real
    for size in (11, 1, 5, 1, 2):
        part = cut(pair, done, done + size)
        if done == 0:
            batched._ledger.begin(3, size, CPU, real)
        else:
            seen = torch.cat((seen, torch.ones(3, size, dtype=torch.bool)), dim=1)
        read = batched.update(*part)
        visible = read[0].shape[2]
        for row, layer in enumerate(alone):
            slots = (seen[row, done:].nonzero()[:, 0] + done).tolist()
            if slots:
                layer._ledger.begin(1, len(slots), CPU, None, torch.tensor([slots]))
                own = layer.update(*(p[row : row + 1, :, slots] for p in pair))
            past = seen[row, done + size - visible : done]
            for index, found in enumerate(read):
                earlier = found[row, :, : visible - size]
                assert bool((earlier[:, ~past] == 0).all())
                if slots and past.any():
                    count = int(past.sum())
                    wanted = own[index][0][:, : own[index].shape[2] - len(slots)]
                    assert torch.equal(earlier[:, past], wanted[:, wanted.shape[1] - count :])
        done += size
    for stores, group in zip(batched.stores, batched._ledger.groups, strict=True):
        for place, row in enumerate(range(3) if group.rows is None else group.rows):
            batched._stores, kept = [stores], batched.stores
            mine = [rows[place : place + 1] for rows in held(batched)]
            batched._stores = kept
            assert all(map(torch.equal, mine, held(alone[row])))
            assert len(mine) == len(held(alone[row]))
            assert stores[0].length == alone[row].stores[0][0].length


def test_padding_in_a_later_call_splits_what_is_stored() -> None:
    layer, pair = make_layer("none"), states(9)
    layer.update(*cut(pair, 0, 4))
    sources = layer._ledger.begin(2, 3, CPU, torch.tensor([[0, 1, 1], [1, 1, 1]]).bool())
    assert sources is not None
    layer.regroup(sources)
    layer.update(*cut(pair, 4, 7))
    key, _ = layer.update(*cut(pair, 7, 9))
    assert torch.equal(key[1], pair[0][1])
    wanted = pair[0][0].clone()
    wanted[:, 4] = 0
    assert torch.equal(key[0], wanted)
    assert [stores[0].length for stores in layer.stores] == [8, 9]


# The workspace


def test_layers_read_into_the_same_memory() -> None:
    workspace, ledger = Workspace(), TokenLedger(False)
    layers = [make_layer("int8", None, ledger, workspace) for _ in range(5)]
    pair, places = states(60), set()
    with torch.no_grad():
        for start in (0, 50):
            for layer in layers:
                key, value = layer.update(*cut(pair, start, start + 10))
                places.add((key.data_ptr(), value.data_ptr()))
    assert len(places) == 2  # the first call's own tensors, and the workspace
    assert key.is_contiguous()
    assert workspace.nbytes() == 4 * 2 * HEADS * (60 - 40) * 14 * 9 // 8


def test_what_a_layer_without_workspace_returns_stays() -> None:
    workspace, ledger = Workspace(), TokenLedger(False)
    shared = make_layer("none", None, ledger, workspace)
    shared._workspace = None
    other = make_layer("none", None, ledger, workspace)
    pair = states(12)
    with torch.no_grad():
        for layer in (shared, other):
            layer.update(*cut(pair, 0, 8))
        kept = shared.update(*cut(pair, 8, 12))
        other.update(*cut(states(12, seed=1), 8, 12))
    assert torch.equal(kept[0], pair[0])


def test_gradients_reach_the_current_tokens() -> None:
    layer, pair = make_layer("int8"), states(12)
    layer.update(*cut(pair, 0, 8))
    key, value = (part.clone().requires_grad_() for part in cut(pair, 8, 12))
    read = layer.update(key, value)
    (read[0].sum() + 2 * read[1].sum()).backward()
    assert torch.equal(key.grad, torch.ones_like(key))
    assert torch.equal(value.grad, torch.full_like(value, 2))
    assert not any(tensor.requires_grad for tensor in held(layer))
    before = read[0].clone()
    layer.update(*cut(states(12, seed=3), 0, 4))
    assert torch.equal(read[0], before)  # nobody overwrites what a backward pass may need


def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it() -> None:
    # The tensors that generate() leaves behind under torch.inference_mode() cannot be written to.
    for name in ("none", "int4", "small kivi"):
        layer, plain, pair = make_layer(name), make_layer(name), states(40)
        layer._ledger = plain._ledger = TokenLedger(True)
        with torch.inference_mode():
            layer.update(*cut(pair, 0, 9))
            layer.update(*cut(pair, 9, 12))
            layer.regroup([(0, torch.tensor([0, 1]))])
        with torch.no_grad():
            layer.update(*cut(pair, 12, 30))
            plain.update(*cut(pair, 0, 30))
        assert same(layer, plain)


# Taking back


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_leaves_no_trace(name: str) -> None:
    for window in (None, 30):
        pair = states(200)
        plain, layer = (make_layer(name, geometry(window)) for _ in range(2))
        plain.update(*cut(pair, 0, 170))
        layer.update(*cut(pair, 0, 170))
        layer.activate_past_recording()
        assert layer.is_croppable
        for draft in (5, 1, 12):
            layer.update(*states(draft, seed=draft))
            layer._ledger.crop(draft)
            layer.crop(-draft)
        assert layer.get_seq_length() == 170
        assert same(layer, plain)
        for one in (layer, plain):
            one.record_past = False
            one.update(*cut(pair, 170, 200))
        assert same(layer, plain)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("name", ["int8", "small kivi", "int4-kivi", "int4 turned"])
def test_what_is_accepted_of_a_draft_is_stored_as_if_there_had_been_none(
    name: str, window: int | None
) -> None:
    pair, length = states(200), 150
    plain, layer = (make_layer(name, geometry(window)) for _ in range(2))
    for one in (plain, layer):
        one.update(*cut(pair, 0, length))
    layer.activate_past_recording()
    for draft, accepted in ((5, 3), (9, 9), (4, 0), (6, 1)):
        good, bad = cut(pair, length, length + accepted), states(draft - accepted, seed=draft)
        layer.update(*(torch.cat(parts, dim=2) for parts in zip(good, bad, strict=True)))
        layer._ledger.crop(draft - accepted)
        layer.crop(accepted - draft)
        if accepted:
            plain.update(*good)
        length += accepted
        assert same(layer, plain)


@pytest.mark.parametrize(("count", "left"), [(0, 3), (1, 2), (3, 0), (5, 0)])
@pytest.mark.parametrize("name", ["none", "int4", "small kivi"])
def test_crop_counts_what_to_take_back(name: str, count: int, left: int) -> None:
    # Case G3.
    layer, pair = make_layer(name), states(9)
    layer.update(*cut(pair, 0, 3))
    layer._ledger.crop(count)
    layer.crop(-count)
    assert layer.get_seq_length() == left
    key, value = layer.update(*cut(pair, 5, 9))
    assert key.shape[2] == value.shape[2] == left + 4
    if name == "none":
        assert torch.equal(key, torch.cat((pair[0][:, :, :left], pair[0][:, :, 5:9]), dim=2))


@pytest.mark.parametrize("kind", [QuantizedLayer, QuantizedIndexedLayer])
def test_an_empty_layer_has_nothing_to_take_back(kind: type[QuantizedLayer]) -> None:
    for window in (None, 8):
        layer = make_layer("int8", geometry(window), kind=kind)
        layer.crop(0)
        layer.crop(-3)
        layer.activate_past_recording()
        layer.crop(-1)
        assert layer.get_seq_length() == 0


def test_a_window_that_was_passed_says_why_it_cannot_crop() -> None:
    layer, pair = make_layer("int8", geometry(8)), states(40)
    layer.update(*cut(pair, 0, 7))
    layer._ledger.crop(2)
    layer.crop(-2)  # nothing has left yet
    layer.update(*cut(pair, 5, 20))
    layer.crop(0)
    before = held(layer)
    for refused in (lambda: layer.check_crop(3, [3]), lambda: layer.crop(-3)):
        with pytest.raises(
            RuntimeError, match=r"cannot take 3 tokens back.*window of 8.*activate_past_recording"
        ):
            refused()
    assert layer.get_seq_length() == 20
    assert all(map(torch.equal, held(layer), before))


@pytest.mark.parametrize(
    ("scheme", "window", "croppable"),
    [
        (preset("int8"), None, True),
        (preset("int4"), None, True),
        (preset("none"), None, True),
        (preset("int8", residual_length=1), None, False),
        (preset("int4-kivi", residual_length=0), None, False),
        (preset("int4-kivi"), None, False),
        (QuantScheme(preset("int8").key, preset("int4-kivi").key), None, False),
        (preset("int8"), 8, False),
        (preset("int4-kivi"), 8, False),
    ],
)
def test_it_is_croppable_where_no_trace_is_left(
    scheme: QuantScheme, window: int | None, croppable: bool
) -> None:
    layer = make_layer(scheme, geometry(window))
    assert layer.is_croppable is croppable
    layer.activate_past_recording()
    assert layer.is_croppable is True
    layer.reset()
    assert layer.is_croppable is croppable


def test_a_state_that_cannot_be_taken_back_makes_a_hybrid_layer_not_croppable() -> None:
    def hybrid(scheme: QuantScheme) -> QuantizedHybridLayer:
        made = make_layer(scheme, kind=QuantizedHybridLayer)
        assert isinstance(made, QuantizedHybridLayer)
        made.update(*states(3))
        return made

    with_state = hybrid(preset("int8"))
    with_state.update_recurrent_state(torch.zeros(2, 3))
    convolution, quantized = hybrid(preset("int8")), hybrid(preset("int4-kivi"))
    for layer in (convolution, quantized):
        layer.update_conv_state(torch.zeros(2, 3, 4))
    assert not with_state.is_croppable
    assert convolution.is_croppable
    assert not quantized.is_croppable
    quantized.activate_past_recording()
    assert quantized.is_croppable


def test_reset_forgets_everything() -> None:
    layer = make_layer("int4")
    layer.update(*states(30))
    layer.activate_past_recording()
    layer.reset()
    layer._ledger.reset()
    assert (layer.get_seq_length(), layer.nbytes(), layer.live_nbytes()) == (0, 0, 0)
    assert not layer.record_past
    other = make_layer("int4")
    for one in (layer, other):
        one.update(*states(30, batch=1))  # another number of rows
    assert same(layer, other)


# Rows


def test_rows_move_with_all_that_belongs_to_them() -> None:
    layer, pair = make_layer("small kivi"), states(40, batch=3)
    layer.update(*cut(pair, 0, 33))
    index = torch.tensor([2, 2, 0, 1])
    layer.select_rows(index, layer._ledger.select(index))
    other = make_layer("small kivi")
    other.update(*(part[index, :, :33] for part in pair))
    assert same(layer, other)
    read = layer.update(*(part[index, :, 33:] for part in pair))
    wanted = other.update(*(part[index, :, 33:] for part in pair))
    assert all(map(torch.equal, read, wanted))


def test_indexer_keys_move_with_the_rows() -> None:
    layer = make_layer("int8", kind=QuantizedIndexedLayer)
    assert isinstance(layer, QuantizedIndexedLayer)
    layer.update(*states(4))
    keys = layer.update_indexer(torch.arange(8.0).view(2, 4, 1))
    assert layer.nbytes() - layer.live_nbytes() == QuantizedLayer.nbytes(
        layer
    ) - QuantizedLayer.live_nbytes(layer)
    assert layer.live_nbytes() - QuantizedLayer.live_nbytes(layer) == 8 * 4
    layer.select_rows(torch.tensor([1, 1, 0]), layer._ledger.select(torch.tensor([1, 1, 0])))
    assert torch.equal(layer.indexer_keys, keys[[1, 1, 0]])
    layer.crop_groups(3, [3])
    assert torch.equal(layer.indexer_keys, keys[[1, 1, 0], :1])


def test_rows_are_not_reordered_in_one_layer_alone() -> None:
    with pytest.raises(InputError, match="in all layers at once"):
        make_layer("int8").reorder_cache(torch.tensor([0]))


def test_another_number_of_rows_is_refused() -> None:
    layer = make_layer("int8")
    layer.update(*states(3))
    with pytest.raises(InputError, match="holds 2 rows, the call has 3"):
        layer.update(*states(1, batch=3))
    other = make_layer("int8", ledger=layer._ledger)
    with pytest.raises(InputError, match="holds 2 rows, the call has 1"):
        other.update(*states(9, batch=1))


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        (geometry(heads=4), r"\(\(4, 8\), \(4, 6\)\)"),
        (geometry(dims=(8, 8)), r"\(\(2, 8\), \(2, 8\)\)"),
        (geometry(dims=(6, 8)), r"\(\(2, 6\), \(2, 8\)\)"),
    ],
)
def test_tensors_of_another_model_are_refused(shape: LayerGeometry, found: str) -> None:
    layer = make_layer("int8")
    with pytest.raises(GeometryError, match=rf"{found} .*made for \(\(2, 8\), \(2, 6\)\)"):
        layer.update(*states(3, shape=shape))


# Bytes


def row_bytes(name: str, dim: int, exact: int) -> int:
    """Bytes of a quantized token of one head: codes, and scale and middle where there are."""
    return {
        "none": exact * dim,
        "bf16": 2 * dim,
        "fp16": 2 * dim,
        "fp8": dim + 2,
        "fp8_e5m2": dim + 2,
        "int8": dim + 2,
        "int4": -(-dim // 2) + 4,
        "int3": 3 * -(-dim // 8) + 4,
        "int4-kivi": -(-dim // 2) + 4,
        "fp8 static": dim,
    }[name]


def hand_bytes(name: str, tokens: int, dims: tuple[int, int], exact: int) -> int:
    """Bytes of one head for a text, keys and values, by the definition of the preset."""
    key, value = dims
    if name in ("int4", "int3"):
        return 4 * exact * (key + value) + (tokens - 4) * sum(
            row_bytes(name, dim, exact) for dim in dims
        )
    if name == "int4-kivi":
        groups = max(0, tokens - 128) // 64
        group = 64 * -(-key // 2) + 2 * key * 2
        coded = max(0, tokens - 128)
        return (
            groups * group
            + (tokens - 64 * groups) * exact * key
            + coded * row_bytes(name, value, exact)
            + (tokens - coded) * exact * value
        )
    return tokens * sum(row_bytes(name, dim, exact) for dim in dims)


@pytest.mark.parametrize("dims", [(64, 64), (80, 112), (5, 7), (71, 24), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*preset_names(), "fp8 static"])
def test_live_bytes_are_what_the_tokens_need(
    name: str, dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    shape = geometry(heads=3, dims=dims)
    layer = make_layer(name, shape)
    done = 0
    for size in (20, 180, 1):
        layer.update(*(part.to(dtype) for part in states(size, 2, shape)))
        done += size
        assert layer.live_nbytes() == 2 * 3 * hand_bytes(name, done, dims, dtype.itemsize)
        assert layer.nbytes() >= layer.live_nbytes()


@pytest.mark.parametrize(("window", "kept"), [(8, 7), (2, 1), (50, 40)])
def test_a_sliding_layer_holds_what_the_next_call_can_see(window: int, kept: int) -> None:
    layer = make_layer("int8", geometry(window))
    for start in range(0, 40, 4):
        layer.update(*cut(states(40), start, start + 4))
    assert layer.live_nbytes() == 2 * HEADS * kept * (KEY_DIM + 2 + VALUE_DIM + 2)


@pytest.mark.parametrize(
    ("name", "tokens", "bytes_held"),
    [
        ("none", 65, 128 * 14 * 4),
        ("bf16", 65, 128 * 14 * 2),
        ("int8", 513, 576 * (14 + 4)),
        ("fp8 static", 600, 704 * 14),
        # 4 sinks, and 508 codes in 512; one more page for the 513th.
        ("int4", 516, 4 * 14 * 4 + 512 * (4 + 3 + 8)),
        ("int4", 517, 4 * 14 * 4 + 576 * (4 + 3 + 8)),
        ("int3", 100, 4 * 14 * 4 + 128 * (3 + 3 + 8)),
        # Keys: 1 group and 136 exact, in 192; values: 72 codes and 128 exact.
        ("int4-kivi", 200, (64 * 4 + 32) + 192 * 32 + 128 * (3 + 4) + 128 * 24),
    ],
)
def test_bytes_held_are_rounded_up_to_pages(name: str, tokens: int, bytes_held: int) -> None:
    layer = make_layer(name)
    layer.update(*states(tokens, batch=1))
    assert layer.nbytes() == HEADS * bytes_held


@pytest.mark.parametrize(
    ("name", "dim", "most", "exactly"),
    [
        ("int4", 128, 4.3, (4092 * 68 + 4 * 512) * 8 / (4096 * 128)),
        ("int4", 64, 4.55, (4092 * 36 + 4 * 256) * 8 / (4096 * 64)),
        ("fp8 static", 64, 8.1, 8.0),
        ("fp8 static", 128, 8.1, 8.0),
    ],
)
def test_bits_per_value_at_4096_tokens(name: str, dim: int, most: float, exactly: float) -> None:
    shape = geometry(heads=1, dims=(dim, dim))
    layer = make_layer(name, shape)
    layer.update(*states(4096, 1, shape))
    bits = layer.live_nbytes() * 8 / (2 * 4096 * dim)
    assert bits == exactly
    assert bits <= most


@pytest.mark.parametrize("name", ["none", "bf16", "fp8", "int8", "int4", "int3", "fp8 static"])
def test_a_window_of_4096_saves_eight_times_at_32768_tokens(name: str) -> None:
    dims = (8, 8)
    full, sliding = geometry(None, 1, dims), geometry(4096, 1, dims)
    layers = [make_layer(name, shape) for shape in (full, sliding)]
    pair = states(32_768 + 100, 1, full)
    for layer in layers:
        layer.update(*cut(pair, 0, 32_000))
        layer.update(*cut(pair, 32_000, 32_768))
    assert layers[0].nbytes() >= 8 * layers[1].nbytes()
    assert layers[0].live_nbytes() >= 8 * layers[1].live_nbytes()
    before = layers[1].nbytes()
    for start in range(32_768, 32_768 + 100):
        layers[1].update(*cut(pair, start, start + 1))
    assert layers[1].nbytes() == before


def test_moving_to_the_cpu_and_back_changes_nothing() -> None:
    layer, plain = make_layer("small kivi"), make_layer("small kivi")
    for one in (layer, plain):
        one.update(*states(40))
    layer.offload()
    layer.prefetch()
    assert same(layer, plain)


# On a GPU, without one

COMPLAINTS = r"_local_scalar_dense|\.tolist\(\) is not supported"


FAKE = [*preset_names(), "small kivi", "int4 turned", "fp8 static"]


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.bfloat16), (24, torch.float32)])
@pytest.mark.parametrize("name", FAKE)
def test_a_device_is_never_waited_for(
    name: str,
    window: int | None,
    dtype: torch.dtype,
    without_device_guards: Callable[..., Any],
) -> None:
    # Reading a fake tensor's values on the host raises.
    shape = geometry(window, dims=(16, 12))
    layer = make_layer(name, shape)

    def made(tokens: int) -> list[torch.Tensor]:
        return [torch.empty(2, HEADS, tokens, dim, device="cuda", dtype=dtype) for dim in (16, 12)]

    with FakeTensorMode(), without_device_guards(), torch.no_grad():
        length = 0
        for size in (200, 1, 70):
            read = layer.update(*made(size))
            past = length if window is None else min(length, window - 1)
            for part, dim in zip(read, (16, 12), strict=True):
                assert part.shape == (2, HEADS, past + size, dim)
                assert (part.device.type, part.dtype) == ("cuda", dtype)
            length += size
        layer.activate_past_recording()
        layer.update(*made(5))
        layer._ledger.crop(4)
        layer.crop(-4)
        index = torch.tensor([1, 0, 1], device="cuda")
        layer.select_rows(index, [(0, index)])
        layer._ledger.batch = 3
        assert layer.get_seq_length() == length + 1
        assert {tensor.device.type for tensor in held(layer)} == {"cuda"}
        layer.offload()
        assert {tensor.device.type for tensor in held(layer)} == {"cpu"}
        layer.prefetch()
        assert {tensor.device.type for tensor in held(layer)} == {"cuda"}


@pytest.mark.parametrize("name", ["none", "int4", "small kivi"])
def test_padded_rows_on_a_device_do_not_wait_either(
    name: str, without_device_guards: Callable[..., Any]
) -> None:
    layer = make_layer(name)
    layer._ledger.begin(2, 20, CPU, torch.arange(20) >= torch.tensor([[3], [0]]))
    with FakeTensorMode(), without_device_guards(), torch.no_grad():
        for size in (20, 1, 3):
            pair = [torch.empty(2, HEADS, size, dim, device="cuda") for dim in (8, 6)]
            key, _ = layer.update(*pair)
        assert key.shape == (2, HEADS, 24, 8)
        assert [stores[0].length for stores in layer.stores] == [21, 24]


@pytest.mark.parametrize("look", [torch.Tensor.item, torch.Tensor.tolist, bool])
def test_looking_at_values_would_have_raised(
    look: Callable[[torch.Tensor], Any], without_device_guards: Callable[..., Any]
) -> None:
    with FakeTensorMode(), without_device_guards(), pytest.raises(Exception, match=COMPLAINTS):
        look(torch.zeros(1, device="cuda"))


def test_a_scheme_of_its_own_is_what_the_layer_uses() -> None:
    scheme = replace(preset("int8"), sink_tokens=2, residual_length=3)
    layer = make_layer(scheme)
    layer.update(*states(20))
    key, value = layer.stores[0]
    for store in (key, value):
        assert [len(buffer) for buffer in store.buffers] == [2, 15, 3]
