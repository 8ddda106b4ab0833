"""What attention gets to read of a layer, and what models generate that read the codes themselves.

Whatever attends, tokens are the same: `dequantize` is what the others are held against.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from calib.collect import collect
from calib.solve import solve
from kvquant.attention import interface, tiles
from kvquant.attention.handle import KEY, VALUE, TensorHandle
from kvquant.attention.reference import attend_reference
from kvquant.attention.stored import StoredRows
from kvquant.cache.cache import QuantizedCache
from kvquant.cache.hook import remove_hook
from kvquant.cache.layer import QuantizedLayer
from kvquant.cache.ledger import TokenLedger
from kvquant.cache.transformers_compat import cache_argument
from kvquant.cache.workspace import Workspace
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.presets import preset
from kvquant.quantize.codec import Center, Codec
from kvquant.rotary import RotaryLayout
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

CPU = torch.device("cpu")
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 6
KIVI = {"group_size": 4, "residual_length": 5, "sink_tokens": 1}
SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {},
    "int4": {},
    "fp8": {"residual_length": 3},
    "int4-kivi": KIVI,
}
WINDOWS = [None, 1, 2, 8, 30]

each_scheme = pytest.mark.parametrize("name", SCHEMES)
each_window = pytest.mark.parametrize("window", WINDOWS)


def angles(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.arange(count)[:, None] * torch.tensor([1.0, 0.1])
    return turns.cos(), turns.sin()


def layer_of(
    name: str | QuantScheme,
    window: int | None = None,
    backend: str | None = "auto",
    ledger: TokenLedger | None = None,
    workspace: bool = True,
) -> QuantizedLayer:
    """A layer whose int4 keys have a mean that turns."""
    kind = LayerKind.FULL if window is None else LayerKind.SLIDING
    shape = LayerGeometry(kind, HEADS, KEY_DIM, VALUE_DIM, window)
    scheme = preset(name, **SCHEMES[name]) if isinstance(name, str) else name

    def make_codec(slot: str, dtype: torch.dtype, device: torch.device) -> Codec:
        own, dim = (scheme.key, KEY_DIM) if slot == "key" else (scheme.value, VALUE_DIM)
        center = None
        if own.center and device.type == "cpu":
            mean = torch.linspace(-2, 2, HEADS * dim).view(HEADS, dim)
            center = Center(mean)
            if slot == "key":
                center = Center(0 * mean, mean, RotaryLayout(0, 4, False, "half"), angles)
        return Codec(own, dim, dtype, center=center)

    return QuantizedLayer(
        shape,
        scheme,
        make_codec,
        TokenLedger(True) if ledger is None else ledger,
        Workspace() if workspace else None,
        lambda: backend,
    )


def states(tokens: int, seed: int = 0, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * tokens + seed)
    key, value = (
        torch.randn(batch, HEADS, tokens, dim, generator=generator) for dim in (KEY_DIM, VALUE_DIM)
    )
    return key, value


def rows_of(read: Any) -> list[StoredRows] | None:
    key, value = read
    assert type(key) is type(value) is TensorHandle
    assert key.reading is value.reading
    found: list[StoredRows] | None = key.reading.rows()
    return found


def runs(stored: StoredRows) -> tuple[list[tuple[int, int, bool]], ...]:
    """Of keys and of values: first token, number of tokens, and whether they are codes."""
    return tuple(
        [(run.first, run.count, run.codec is not None) for run in slot]
        for slot in (stored.keys, stored.values)
    )


# Handles


@each_scheme
@each_window
def test_handles_stand_for_what_would_be_read(name: str, window: int | None) -> None:
    ours, plain = layer_of(name, window), layer_of(name, window, None)
    with torch.no_grad():
        for step, tokens in enumerate((21, 1, 1, 7, 40, 1, 100, 2)):
            pair = states(tokens, step)
            found, expected = ours.update(*pair), plain.update(*pair)
            for one, other in zip(found, expected, strict=True):
                assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, CPU)
                assert type(one) is (TensorHandle if step and window != 1 else torch.Tensor)
                assert torch.equal(one + 0, other)
    assert ours.get_seq_length() == plain.get_seq_length() == 173


def test_a_first_call_gets_its_own_tensors() -> None:
    layer, pair = layer_of("int8"), states(5)
    with torch.no_grad():
        read = layer.update(*pair)
    assert read[KEY] is pair[KEY]
    assert read[VALUE] is pair[VALUE]


@pytest.mark.parametrize(("backend", "gradients"), [(None, False), ("auto", True)])
def test_tensors_where_handles_are_of_no_use(backend: str | None, gradients: bool) -> None:
    layer = layer_of("int8", backend=backend)
    with torch.set_grad_enabled(gradients):
        layer.update(*states(5))
        for part in layer.update(*states(1)):
            assert type(part) is torch.Tensor
    assert layer.pending is None


def test_the_backend_is_asked_in_each_call() -> None:
    answers = iter(["numba", None, "torch"])
    layer = layer_of("int8")
    layer._backend = lambda: next(answers)
    with torch.no_grad():
        layer.update(*states(5))
        read = [layer.update(*states(1))[KEY] for _ in range(3)]
    assert [type(key) is TensorHandle for key in read] == [True, False, True]
    first, _, last = read
    assert isinstance(first, TensorHandle)
    assert isinstance(last, TensorHandle)
    assert (first.reading.backend, last.reading.backend) == ("numba", "torch")


# Rows


@each_scheme
@each_window
def test_rows_are_the_tokens_that_handles_stand_for(name: str, window: int | None) -> None:
    layer = layer_of(name, window)
    with torch.no_grad():
        for step, tokens in enumerate((21, 1, 1, 7, 40, 1, 100, 2)):
            read = layer.update(*states(tokens, step))
            if type(read[KEY]) is not TensorHandle:
                continue
            (stored,) = rows_of(read) or ()
            past = layer.get_seq_length() - tokens
            assert (stored.rows, stored.past, stored.new) == (None, past, tokens)
            assert (stored.window, stored.bound) == (window, past + tokens)
            for slot, part in zip((stored.keys, stored.values), read, strict=True):
                oldest = past + tokens - part.shape[2]
                assert oldest == stored.first_seen(0)
                assert slot[0].first <= oldest
                stops = [0 if window else slot[0].first, *(run.stop for run in slot)]
                assert [run.first for run in slot[1:]] == stops[1:-1]
                assert stops[-1] == past + tokens
                whole = tiles.read_range(slot, oldest, past + tokens, stored, torch.float32)
                assert torch.equal(whole, part + 0)
            positions = stored.positions(stored.keys[0].first, past + tokens)
            assert positions is not None
            expected = torch.arange(stored.keys[0].first, past + tokens)
            assert torch.equal(positions.long(), expected.expand(2, -1))


def test_how_tokens_are_stored() -> None:
    with torch.no_grad():
        layer = layer_of("int4")
        layer.update(*states(10))
        (stored,) = rows_of(layer.update(*states(3))) or ()
        expected = [(0, 4, False), (4, 6, True), (10, 3, False)]
        assert runs(stored) == (expected, expected)
        layer = layer_of("int4-kivi")
        layer.update(*states(17))
        (stored,) = rows_of(layer.update(*states(1))) or ()
        # Of 16 tokens behind the sink 5 are residual; keys wait until their four are there.
        assert runs(stored) == (
            [(0, 1, False), (1, 8, True), (9, 8, False), (17, 1, False)],
            [(0, 1, False), (1, 11, True), (12, 5, False), (17, 1, False)],
        )
        layer = layer_of("int8", window=8)
        layer.update(*states(60))
        layer.update(*states(7))
        (stored,) = rows_of(layer.update(*states(1))) or ()
        # The newest 7, in a ring of 64: rows 60 … 63, then 0 … 2.
        expected = [(60, 4, True), (64, 3, True), (67, 1, False)]
        assert runs(stored) == (expected, expected)


def test_nothing_is_copied() -> None:
    layer = layer_of("int4-kivi")
    with torch.no_grad():
        layer.update(*states(30))
        pair = states(2)
        (stored,) = rows_of(layer.update(*pair)) or ()
        held = {
            tensor.untyped_storage().data_ptr()
            for store in layer._stores[0]
            for buffer in store.buffers
            for tensor in buffer.tensors
        }
    for slot, new in zip((stored.keys, stored.values), pair, strict=True):
        *before, last = slot
        assert last.tensors[0].data_ptr() == new.data_ptr()
        for run in before:
            assert {tensor.untyped_storage().data_ptr() for tensor in run.tensors} <= held


def padded_ledger(*padding: int, tokens: int = 20) -> TokenLedger:
    """Rows with so much padding on their left."""
    ledger = TokenLedger(True)
    real = torch.arange(tokens) >= torch.tensor(padding)[:, None]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    ledger.begin(len(padding), tokens, CPU, real, positions)
    return ledger


@each_scheme
@pytest.mark.parametrize("window", [None, 8, 30])
def test_rows_with_other_padding_are_apart(name: str, window: int | None) -> None:
    layer = layer_of(name, window, ledger=padded_ledger(5, 0, 5))
    query = torch.randn(3, 4, 1, KEY_DIM, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.update(*states(20, batch=3))
        for step in range(12):
            read = layer.update(*states(1, step, batch=3))
            one, other = rows_of(read) or ()
            assert one.rows is not None
            assert other.rows is not None
            assert (one.rows.tolist(), other.rows.tolist()) == ([0, 2], [1])
            assert (one.past, other.past) == (15 + step, 20 + step)
            length = read[KEY].shape[2]
            for stored in (one, other):
                assert stored.rows is not None
                count = min(stored.past + 1, length)
                for slot, part in zip((stored.keys, stored.values), read, strict=True):
                    end = stored.past + 1
                    found = tiles.read_range(slot, end - count, end, stored, torch.float32)
                    assert torch.equal(found, (part + 0)[stored.rows, :, -count:])
            out, _ = interface.attention_forward(torch.nn.Module(), query, *read, None)
            for stored in (one, other):
                assert stored.rows is not None
                expected = attend_reference(query[stored.rows], stored, KEY_DIM**-0.5)
                found = out.transpose(1, 2)[stored.rows].double()
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_padding_in_a_call_can_only_be_read() -> None:
    ledger = padded_ledger(5, 0)
    layer, plain = (
        layer_of("int8", ledger=copy.deepcopy(ledger), backend=backend)
        for backend in ("auto", None)
    )
    real = torch.tensor([[False, True, True], [True, True, True]])
    with torch.no_grad():
        for one in (layer, plain):
            one.update(*states(20))
            one.store_pending()
            sources = one._ledger.begin(2, 3, CPU, real)
            if sources is not None:
                one.regroup(sources)
        read, expected = layer.update(*states(3)), plain.update(*states(3))
        assert rows_of(read) is None
        for found, other in zip(read, expected, strict=True):
            assert torch.equal(found + 0, other)


def test_groups_that_a_crop_cut_can_only_be_read() -> None:
    layer, plain = layer_of("int4-kivi"), layer_of("int4-kivi", backend=None)
    with torch.no_grad():
        for one in (layer, plain):
            one.update(*states(30))
            one.crop(-12)
            one._ledger.crop(12)
        read, expected = layer.update(*states(2)), plain.update(*states(2))
        assert rows_of(read) is None
        for found, other in zip(read, expected, strict=True):
            assert torch.equal(found + 0, other)


# How long it can be read, and when tokens are stored


LATER: dict[str, Callable[[QuantizedLayer], Any]] = {
    "the next call": lambda layer: layer.update(*states(1)),
    "asking for what is stored": lambda layer: layer.nbytes(),
    "crop": lambda layer: layer.crop(-1),
    "reset": lambda layer: layer.reset(),
    "regrouping": lambda layer: layer.regroup([(0, torch.tensor([1, 0]))]),
    "saving": lambda layer: layer.state(),
}


@pytest.mark.parametrize("event", LATER)
def test_reading_too_late(event: str) -> None:
    layer = layer_of("int8")
    with torch.no_grad():
        layer.update(*states(5))
        key, value = layer.update(*states(1))
        assert (key + 0).shape == (*value.shape[:3], KEY_DIM)
        LATER[event](layer)
        assert isinstance(key, TensorHandle)
        late: list[Callable[[], Any]] = [
            lambda: key + 0,
            value.clone,
            key.reading.rows,
            lambda: interface.attention_forward(
                torch.nn.Module(), torch.zeros(2, 4, 1, KEY_DIM), key, value, None
            ),
        ]
        for read in late:
            with pytest.raises(RuntimeError, match="read too late: the cache has gone on"):
                read()
        assert repr(key) == "TensorHandle(keys [2, 2, 6, 8] torch.float32)"


@each_scheme
@each_window
def test_what_is_stored_does_not_depend_on_who_reads(name: str, window: int | None) -> None:
    ours, plain = layer_of(name, window), layer_of(name, window, None)
    for layer in (ours, plain):
        with torch.no_grad():
            for step, tokens in enumerate((21, 1, 7, 1, 40, 1)):
                read = layer.update(*states(tokens, step))
                if step % 2 and type(read[KEY]) is TensorHandle:
                    rows_of(read)
    (numbers, tensors), (expected_numbers, expected) = ours.state(), plain.state()
    assert numbers == expected_numbers
    assert tensors.keys() == expected.keys()
    for place, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.uint8), expected[place].view(torch.uint8))
    assert (ours.nbytes(), ours.live_nbytes()) == (plain.nbytes(), plain.live_nbytes())
    again = layer_of(name, window)
    again._ledger.begin(2, 71, CPU)
    again.restore(numbers, tensors, CPU)
    with torch.no_grad():
        for one, other in zip(again.update(*states(1)), ours.update(*states(1)), strict=True):
            assert torch.equal(one + 0, other + 0)


def test_tokens_of_a_call_are_stored_when_it_is_over() -> None:
    layer = layer_of("int8")
    with torch.no_grad():
        layer.update(*states(5))
        assert layer._stores[0][KEY].length == 5
        read = layer.update(*states(3))
        assert layer._stores[0][KEY].length == 5
        assert layer.get_seq_length() == 8
        assert layer.get_mask_sizes(1) == (9, 0)
        rows_of(read)
        assert layer._stores[0][KEY].length == 5
        assert layer.stores[0][KEY].length == 8
        assert layer.pending is None


def test_what_others_share_is_read_into_memory_of_its_own() -> None:
    layer, shared = (layer_of("int8", workspace=has) for has in (True, False))
    with torch.no_grad():
        for one in (layer, shared):
            one.update(*states(5))
        (again, _), (kept, _) = layer.update(*states(1)), shared.update(*states(1))
        assert (again + 0).data_ptr() != (again + 0).data_ptr()
        assert again.view(-1).data_ptr() == again.view(-1).data_ptr(), "the workspace"
        first, second = kept.view(-1), kept.view(-1)
        assert first.data_ptr() != second.data_ptr()
        assert torch.equal(first, second)


# On a device


@each_scheme
@pytest.mark.parametrize("window", [None, 30])
def test_a_device_is_not_waited_for(
    name: str, window: int | None, without_device_guards: Any
) -> None:
    class Guardless(without_device_guards):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.__invert__:
                return torch.ops.aten.logical_not(*args)
            if func is torch.Tensor.contiguous:
                return torch.ops.aten.clone(*args, memory_format=torch.contiguous_format)
            return super().__torch_function__(func, types, args, kwargs)

    layer = layer_of(name, window, "torch")
    with FakeTensorMode(), Guardless(), torch.no_grad():
        for step, tokens in enumerate((70, 1, 1, 40)):
            pair = [
                torch.empty(2, HEADS, tokens, dim, device="cuda") for dim in (KEY_DIM, VALUE_DIM)
            ]
            read = layer.update(*pair)
            query = torch.empty(2, 4, tokens, KEY_DIM, device="cuda")
            mask = torch.empty(2, 1, tokens, read[KEY].shape[2], dtype=torch.bool, device="cuda")
            if not step:
                continue
            assert type(read[KEY]) is TensorHandle
            for given in (None, mask):
                out, _ = interface.attention_forward(torch.nn.Module(), query, *read, given)
                assert tuple(out.shape) == (2, tokens, 4, VALUE_DIM)
                assert out.device.type == "cuda"
        assert layer._workspace is not None
        assert layer._workspace.nbytes() == 0, "nothing was dequantized as a whole"


# Models


def prompt(batch: int = 1, tokens: int = 21, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, of 12 and 21 tokens, and their mask."""
    ids, mask = prompt(2), torch.ones(2, 21, dtype=torch.long)
    ids[0, :9] = mask[0, :9] = 0
    return ids, mask


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in (
            "llama",
            "llama_wide",
            "phi3",
            "qwen2",
            "qwen3",
            "mistral",
            "gemma2",
            "gemma3_text",
            "gemma3n_text",
            "gemma4_text",
            "gpt_oss",
            "gpt2",
            "glm",
            "smollm3",
            "falcon_h1",
            "lfm2",
            "qwen3_next",
            "llama4_text",
            "deepseek",
        )
    },
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "a KV head each": ("llama", {"num_key_value_heads": 4}),
    "head_dim 71": ("gpt2", {"hidden_size": 142, "num_attention_heads": 2}),
}


def made(build: Callable[..., Any], family: str) -> Any:
    name, overrides = FAMILIES[family]
    return build(name, **overrides)


def cache_of(model: Any, name: str, attention: str, **more: Any) -> QuantizedCache:
    return QuantizedCache.from_model(
        model, scheme=name, attention=attention, **{**SCHEMES[name], **more}
    )


@pytest.fixture(scope="session")
def spread(forward: Callable[..., Any]) -> Callable[..., float]:
    """``spread(model, cache, ids, mask, calls)``: how far logits are apart, whoever attends.

    Each call finds the same content: of copies of one cache, which goes on with dequantized tokens.
    Otherwise a code that is rounded the other way would make a difference in later calls.
    """

    def run(
        model: Any,
        cache: QuantizedCache,
        ids: torch.Tensor,
        mask: torch.Tensor,
        calls: list[tuple[int, int]],
        **kwargs: Any,
    ) -> float:
        worst, plan = 0.0, cache.plan
        places = (mask.cumsum(1) - 1).clamp(min=0)
        for start, stop in calls:
            given = {"attention_mask": mask[:, :stop], "position_ids": places[:, start:stop]}
            found = []
            for plan.backend in ("auto", "torch", None):
                twin = copy.deepcopy(cache)
                found.append(forward(model, ids[:, start:stop], twin, **given, **kwargs))
            cache, expected = twin, found[-1]
            real = mask[:, start:stop].bool()[:, -expected.shape[1] :]
            assert expected[real].isfinite().all()
            for other in found[:-1]:
                worst = max(worst, float((other - expected)[real].abs().max()))
        return worst

    return run


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in FAMILIES for name in ("int4", "int4-kivi")),
        *((family, name) for family in ("llama", "gpt_oss") for name in ("int8", "fp8")),
    ],
)
def test_logits_are_those_of_dequantized_tokens(
    tiny_once: Callable[..., Any], spread: Callable[..., float], family: str, name: str
) -> None:
    """Of two left-padded rows, past all windows."""
    model, (ids, mask) = made(tiny_once, family), left_padded()
    ids = torch.cat((ids, prompt(2, 30, seed=4)), 1)
    mask = torch.cat((mask, torch.ones(2, 30, dtype=torch.long)), 1)
    calls = [(0, 21), (21, 22), (22, 23), (23, 28), (28, 48)]
    assert spread(model, cache_of(model, name, "auto"), ids, mask, calls) <= 1e-4


@pytest.mark.parametrize("name", ["int4", "int4-kivi"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "gemma3n_text"])
@pytest.mark.parametrize("padding", [0, 4])
def test_logits_of_one_row(
    tiny_once: Callable[..., Any],
    spread: Callable[..., float],
    family: str,
    name: str,
    padding: int,
) -> None:
    model, ids = tiny_once(family), prompt(tokens=38)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    calls = [(0, 21), *((i, i + 1) for i in range(21, 30)), (30, 38)]
    assert spread(model, cache_of(model, name, "auto"), ids, mask, calls) <= 1e-4


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("apart", [False, True])
def test_padding_between_tokens(
    tiny_once: Callable[..., Any],
    spread: Callable[..., float],
    family: str,
    rows: int,
    apart: bool,
) -> None:
    """Prompts that were padded on their right, all alike or not, and go on."""
    model, ids = tiny_once(family), prompt(rows, 30)
    mask = torch.ones_like(ids)
    mask[:, 10:14] = 0
    if apart:
        mask[0, :3] = 0
    calls = [(0, 14), *((i, i + 1) for i in range(14, 26)), (26, 30)]
    assert spread(model, cache_of(model, "int8", "auto"), ids, mask, calls) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "glm", "gemma2", "gpt_oss", "gemma3n_text"])
def test_logits_with_means_that_turn(
    tiny: Callable[..., Any], spread: Callable[..., float], family: str
) -> None:
    model, (ids, mask) = tiny(family), left_padded()
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight += 3 * weight.std() * torch.linspace(-1, 1, weight.shape[1]).sin().sign()
    slot = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    blocks = prompt(6, 40, seed=8).tolist()
    stats = collect(model, blocks, CacheGeometry.from_config(model.config))
    scales = solve(stats, QuantScheme(slot, slot))
    layers = {  # all pairs turn, also those that hardly do within 40 positions
        index: replace(layer, key=replace(layer.key, turned=None))
        for index, layer in scales.layers.items()
    }
    for given in (scales, replace(scales, layers=layers)):
        cache = cache_of(model, "int4", "auto", scales=given, force=True, sink_tokens=1)
        assert cache.plan.turns_means or given is scales
        calls = [(0, 18), (18, 19), (19, 20), (20, 21)]
        assert spread(model, cache, ids, mask, calls) <= 1e-4


@pytest.mark.parametrize("keep", [1, 3])
def test_fewer_logits_than_tokens(
    tiny_once: Callable[..., Any], spread: Callable[..., float], keep: int
) -> None:
    """Gemma 4 asks the layers that share keys only for the last tokens."""
    model, ids = tiny_once("gemma4_text"), prompt(tokens=30)
    calls, cache = [(0, 12), (12, 30)], cache_of(model, "int8", "auto")
    assert spread(model, cache, ids, torch.ones_like(ids), calls, logits_to_keep=keep) <= 1e-4


OPERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 3.0, "num_return_sequences": 2},
}
EXACT = 20
"""Tokens that are generated are exact: rounded the other way, a code may change the text."""


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["int4", "int4-kivi"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gemma3n_text", "falcon_h1"])
def test_tokens_are_those_of_dequantized_tokens(
    tiny_once: Callable[..., Any],
    generate: Callable[..., Any],
    family: str,
    name: str,
    operation: str,
) -> None:
    model, (ids, mask) = tiny_once(family), left_padded()
    ids = torch.cat((ids, prompt(2, 15, seed=3)), 1)
    mask = torch.cat((mask, torch.ones(2, 15, dtype=torch.long)), 1)
    found = []
    for attention in ("dequantize", "auto"):
        torch.manual_seed(5)
        cache = cache_of(model, name, attention, residual_length=EXACT)
        own = OPERATIONS[operation]
        found.append(generate(model, ids, cache, 9, attention_mask=mask, **own))
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("own", [{"prompt_lookup_num_tokens": 3}, {}], ids=["lookup", "model"])
def test_drafts_are_tried_as_before(
    tiny_once: Callable[..., Any],
    generate: Callable[..., Any],
    family: str,
    own: dict[str, Any],
) -> None:
    model, ids = tiny_once(family), prompt(tokens=10).repeat(1, 3)
    given = own or {"assistant_model": tiny_once("llama", num_hidden_layers=1)}
    found = [
        generate(model, ids, cache_of(model, "int8", attention), 12, **given)
        for attention in ("dequantize", "auto")
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(
    tiny: Callable[..., Any], forward: Callable[..., Any], dtype: torch.dtype
) -> None:
    model, ids = tiny("llama").to(dtype), prompt(2, 40)
    found = []
    for attention in ("dequantize", "auto", "torch"):
        cache = cache_of(model, "int4", attention)
        forward(model, ids[:, :30], cache)
        found.append(forward(model, ids[:, 30:31], cache))
        assert found[-1].dtype == dtype
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=5e-2, atol=5e-2)


def test_gradients_flow_as_before(tiny_once: Callable[..., Any]) -> None:
    model, ids = tiny_once("gemma2"), prompt(tokens=25)
    embed, found = model.get_input_embeddings(), []
    for attention in ("dequantize", "auto"):
        cache = cache_of(model, "int4", attention, residual_length=EXACT)
        given = {cache_argument(model.get_decoder()): cache}
        with torch.no_grad():
            model(ids[:, :20], **given)
            model(ids[:, 20:21], **given)
        new = embed(ids[:, 21:]).detach().requires_grad_()
        logits = model(inputs_embeds=new, **given).logits
        found.append((logits.detach(), *torch.autograd.grad(logits.square().sum(), new)))
    assert float(found[0][1].abs().max()) > 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_cache_serves_whatever_attends(
    tiny: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    """The model's attention may change between calls: what is stored does not."""
    model, ids = tiny("llama"), prompt(tokens=30)
    plain, mixed = (
        cache_of(model, "int4", attention, residual_length=EXACT)
        for attention in ("dequantize", "auto")
    )
    expected = [forward(model, ids[:, a:b], plain) for a, b in ((0, 20), (20, 21), (21, 30))]
    found = [forward(model, ids[:, :20], mixed)]
    model.set_attn_implementation("eager")
    found.append(forward(model, ids[:, 20:21], mixed))
    assert all(layer.pending is None for layer in mixed._quantized())
    model.set_attn_implementation("kvquant")
    found.append(forward(model, ids[:, 21:], mixed))
    assert all(layer.pending is not None for layer in mixed._quantized())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    remove_hook(model)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3n_text"])
def test_nothing_is_dequantized_as_a_whole(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = tiny_once(family), prompt(2, 40)
    cache = cache_of(model, "int4", "auto")
    forward(model, ids[:, :30], cache)

    def unwanted(*_: Any) -> None:
        raise AssertionError("a layer was read as a whole")

    monkeypatch.setattr(QuantizedLayer, "read", unwanted)
    forward(model, ids[:, 30:31], cache)
    forward(model, ids[:, 31:], cache)
