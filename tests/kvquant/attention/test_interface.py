"""Attention as Transformers calls it: what attends, what a mask does, and who is left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma4TextConfig,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvquant.attention import interface, tiles
from kvquant.attention.handle import KEY, VALUE, TensorHandle
from kvquant.attention.reference import attend_reference, seen
from kvquant.attention.stored import StoredRows
from kvquant.cache.cache import QuantizedCache
from kvquant.cache.hook import remove_hook

CPU = torch.device("cpu")


class Attention(torch.nn.Module):
    """What a model's attention module is to its attention function."""

    is_causal = True

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.num_key_value_groups = groups


class Held:
    """A reading of stored tokens, which notes what was dequantized as a whole."""

    def __init__(self, groups: list[StoredRows] | None, whole: list[torch.Tensor]) -> None:
        self.backend = "auto"
        self.groups = groups
        self.whole = whole
        self.asked: list[int] = []

    def rows(self) -> list[StoredRows] | None:
        return self.groups

    def read(self, slot: int) -> torch.Tensor:
        self.asked.append(slot)
        return self.whole[slot]

    def handles(self) -> tuple[TensorHandle, TensorHandle]:
        key, value = (
            TensorHandle(self, slot, tuple(self.whole[slot].shape), torch.float32, CPU)
            for slot in (KEY, VALUE)
        )
        return key, value


def held(stored: StoredRows) -> Held:
    """A reading of rows without padding."""
    whole = [
        tiles.read_range(runs, stored.first_seen(0), runs[-1].stop, stored, torch.float32)
        for runs in (stored.keys, stored.values)
    ]
    return Held([stored], whole)


def attend(
    reading: Held, query: torch.Tensor, mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """``[batch, heads, tokens, dim]``."""
    groups = query.shape[1] // reading.whole[KEY].shape[1]
    out, weights = interface.attention_forward(
        Attention(groups), query, *reading.handles(), mask, **kwargs
    )
    assert weights is None
    assert out.shape[:3] == (query.shape[0], query.shape[2], query.shape[1])
    return out.transpose(1, 2)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found.double() - expected.double()).norm() / expected.double().norm()) <= 1e-5


def sdpa(reading: Held, query: torch.Tensor, mask: Any, **kwargs: Any) -> torch.Tensor:
    """What the model does without us, on dequantized tokens."""
    groups = query.shape[1] // reading.whole[KEY].shape[1]
    return sdpa_attention_forward(Attention(groups), query, *reading.whole, mask, **kwargs)[
        0
    ].transpose(1, 2)


# Registered


def test_the_name_is_known() -> None:
    for _ in range(2):
        interface.register()
        assert AttentionInterface._global_mapping["kvquant"] is interface.attention_forward
        assert AttentionMaskInterface._global_mapping["kvquant"] is interface.attention_mask


def test_masks_are_those_of_sdpa() -> None:
    padded = torch.ones(2, 7, dtype=torch.bool)
    padded[0, :3] = False
    for queries, keys, mask in ((4, 7, None), (1, 7, padded), (7, 7, padded)):
        sizes = {"batch_size": 2, "q_length": queries, "kv_length": keys, "attention_mask": mask}
        made = interface.attention_mask(**sizes, q_offset=keys - queries)
        expected = sdpa_mask(**sizes, q_offset=keys - queries)
        assert made is not None
        assert expected is not None
        assert torch.equal(made, expected)
    for queries in (1, 7):
        sizes = {"batch_size": 2, "q_length": queries, "kv_length": 7, "q_offset": 7 - queries}
        assert interface.attention_mask(**sizes) is None
    made = interface.attention_mask(**sizes, config=Gemma4TextConfig())
    assert made is not None
    assert torch.equal(made[0, 0], torch.ones(7, 7, dtype=torch.bool).tril())


def test_a_model_may_ask_for_it_by_name(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    interface.register()
    plain, ids = tiny_once("llama"), torch.arange(3, 25).view(2, 11)
    model = AutoModelForCausalLM.from_config(plain.config, attn_implementation="kvquant").eval()
    model.load_state_dict(plain.state_dict())
    assert model.config._attn_implementation == "kvquant"
    assert torch.equal(forward(model, ids), forward(plain, ids))


# What attends


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        ("cpu", "auto", ("numba", "")),
        ("cpu", "numba", ("numba", "")),
        ("cpu", "torch", ("torch", "")),
        ("cuda", "torch", ("torch", "")),
        ("cuda", "numba", ("torch", "numba does not run on cuda")),
        ("meta", "auto", ("torch", "no kernel for meta")),
        ("mps", "numba", ("torch", "numba does not run on mps")),
    ],
)
def test_what_attends(device: str, backend: str, expected: tuple[str, str]) -> None:
    assert interface.kernel_for(torch.device(device), backend) == expected


def test_triton_is_for_cuda() -> None:
    pytest.importorskip("triton")
    assert interface.kernel_for(torch.device("cuda")) == ("triton", "")
    found = interface.kernel_for(CPU, "triton")
    assert found == ("torch", "triton does not run on cpu")


WITHOUT = """
import logging, sys
sys.modules["numba"] = sys.modules["triton"] = None
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from kvquant.attention.interface import kernel_for
from kvquant.cache.cache import QuantizedCache
from kvquant.cache.transformers_compat import cache_argument
from kvquant.errors import InputError

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("kvquant").addHandler(handler)

numba, triton = "numba is not installed: pip install numba", "triton is not installed: pip install"
assert kernel_for(torch.device("cpu")) == ("torch", numba)
assert kernel_for(torch.device("cuda"))[0] == "torch"
assert kernel_for(torch.device("cuda"))[1].startswith(triton)

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
ids, found = torch.arange(3, 23)[None], []
for attention in ("dequantize", "auto"):
    cache = QuantizedCache.from_model(model, scheme="int8", attention=attention)
    own = {cache_argument(model.get_decoder()): cache}
    found.append(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **own))
assert torch.equal(*found)
assert lines == [f"attention over codes runs in plain torch, which is slow: {numba}"], lines
assert f"plain torch ({numba})" in cache.summary()
try:
    QuantizedCache.from_model(model, scheme="int8", attention="numba")
except InputError as error:
    assert "pip install numba" in str(error)
else:
    raise AssertionError("numba is not there")
"""


def test_without_kernels_it_works_and_says_once_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["auto", "numba", "torch"])
@pytest.mark.parametrize("new", [1, 3, 40])
def test_handles_are_attended_to_as_they_are_stored(
    backend: str, new: int, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int4", "int8", rows=2, past=60, new=new, sinks=4, value_dim=24, window=50)
    stored, query = make_stored(case), case.query()
    reading = held(stored)
    reading.backend = backend
    found = attend(reading, query, scaling=0.3)
    assert close(found, attend_reference(query, stored, 0.3))
    assert reading.asked == []
    assert found.transpose(1, 2).is_contiguous()


def test_the_scaling_is_that_of_sdpa_by_default(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int8")
    reading, query = held(make_stored(case)), case.query()
    assert close(attend(reading, query), sdpa(reading, query, None))


def test_softcap_and_sinks_are_those_of_the_call(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    for new in (1, 20):
        case = make_case("int8", new=new)
        stored, query, sinks = make_stored(case), case.query(), case.sink_logits()
        found = attend(held(stored), query, scaling=1.0, softcap=2.0, s_aux=sinks)
        assert close(found, attend_reference(query, stored, 1.0, softcap=2.0, sinks=sinks))


def test_a_kernel_that_refuses_is_told_of_once(
    make_case: Any,
    make_stored: Callable[..., StoredRows],
    caplog: pytest.LogCaptureFixture,
) -> None:
    interface._say_once.cache_clear()
    case = make_case("int8")
    stored, query = make_stored(case), case.query().repeat_interleave(2, -1)[..., ::2]
    for _ in range(3):
        assert close(attend(held(stored), query), attend_reference(query, stored, 0.25))
    assert [record.getMessage() for record in caplog.records] == [
        "attention over codes runs in plain torch, which is slow: numba: queries have gaps"
    ]


def test_many_queries_are_no_reason_to_complain(
    make_case: Any,
    make_stored: Callable[..., StoredRows],
    caplog: pytest.LogCaptureFixture,
) -> None:
    interface._say_once.cache_clear()
    case = make_case("int8", new=40)
    attend(held(make_stored(case)), case.query())
    assert caplog.records == []


# Masks


@pytest.mark.parametrize("new", [1, 3, 30])
@pytest.mark.parametrize("window", [None, 20])
def test_a_mask_that_says_the_usual_changes_nothing(
    new: int, window: int | None, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int4", rows=2, past=40, new=new, window=window, sinks=4)
    stored, query = make_stored(case), case.query()
    reading = held(stored)
    usual = seen(stored, stored.first_seen(0), CPU)[None, None]
    expected = attend(reading, query)
    for mask in (usual, usual.expand(2, 1, -1, -1)):
        found = attend(reading, query, mask)
        assert torch.equal(found, expected) if new <= 16 else close(found, expected)
    added = torch.zeros(usual.shape).masked_fill(~usual, torch.finfo(torch.float32).min)
    assert close(attend(reading, query, added), expected)
    assert reading.asked == []


@pytest.mark.parametrize("new", [1, 3])
def test_padding_on_the_left_of_all_rows_is_the_usual_too(
    new: int, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    """It has columns in the mask, and no tokens: numbers are those of the kernel, to the bit."""
    case = make_case("int4", rows=2, past=40, new=new)
    stored, query = make_stored(case), case.query()
    reading = held(stored)
    expected = attend(reading, query)
    reading.whole = [torch.nn.functional.pad(part, (0, 0, 5, 0)) for part in reading.whole]
    mask = torch.nn.functional.pad(seen(stored, 0, CPU)[None, None], (5, 0))
    assert mask.shape[-1] == 45 + new
    assert torch.equal(attend(reading, query, mask), expected)
    assert close(expected, sdpa(reading, query, mask))
    reading.backend = "torch"
    assert close(attend(reading, query, mask), expected)
    assert not torch.equal(attend(reading, query, mask), expected)
    assert reading.asked == []


@pytest.mark.parametrize("new", [1, 3])
def test_a_mask_that_hides_more_is_obeyed(
    new: int, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int8", rows=2, past=40, new=new)
    stored, query = make_stored(case), case.query()
    reading = held(stored)
    usual = seen(stored, 0, CPU)[None, None].expand(2, 1, -1, -1)
    less = usual.clone()
    less[1, :, :, 7:20] = False
    for mask in (less, torch.zeros(less.shape).masked_fill(~less, -torch.inf)):
        found = attend(reading, query, mask)
        assert close(found, sdpa(reading, query, mask))
        assert not close(found, attend(reading, query))
    assert reading.asked == []


def padded(
    make_case: Any, make_stored: Callable[..., StoredRows], new: int = 1
) -> tuple[Held, torch.Tensor, torch.Tensor]:
    """Rows 0 and 2 of three have 30 tokens, row 1 has 41; their queries and their mask."""
    short = make_case("int4", rows=2, past=30 - new, new=new, sinks=4)
    long = replace(short, rows=1, past=41 - new, seed=9)
    rows = [torch.tensor([0, 2]), torch.tensor([1])]
    groups = [
        replace(make_stored(case), rows=index)
        for case, index in zip((short, long), rows, strict=True)
    ]
    whole = [torch.zeros(3, 2, 41, 16) for _ in range(2)]
    query, mask = torch.zeros(3, 4, new, 16), torch.zeros(3, 1, new, 41, dtype=torch.bool)
    for stored, case in zip(groups, (short, long), strict=True):
        assert stored.rows is not None
        count = stored.past + new
        for target, runs in zip(whole, (stored.keys, stored.values), strict=True):
            target[stored.rows, :, -count:] = tiles.read_range(
                runs, 0, count, stored, torch.float32
            )
        query[stored.rows] = case.query()
        mask[stored.rows, :, :, -count:] = seen(stored, 0, CPU)
    return Held(groups, whole), query, mask


def test_rows_of_other_lengths(make_case: Any, make_stored: Callable[..., StoredRows]) -> None:
    reading, query, mask = padded(make_case, make_stored)
    expected = sdpa(reading, query, mask)
    assert close(attend(reading, query, mask), expected)
    # Without a mask it is clear as well.
    assert close(attend(reading, query), expected)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(0))
    found = attend(reading, query, mask, s_aux=sinks)
    for stored in reading.groups or ():
        assert stored.rows is not None
        part = attend_reference(query[stored.rows], stored, 0.25, sinks=sinks)
        assert close(found[stored.rows], part)
    assert reading.asked == []


@pytest.mark.parametrize("kind", ["numbers", "hides more", "several tokens", "several hide more"])
def test_rows_of_other_lengths_with_masks_of_their_own(
    kind: str, make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    new = 3 if "several" in kind else 1
    reading, query, mask = padded(make_case, make_stored, new)
    if "hide" in kind:
        mask[2, :, :, 20:25] = False
    given = mask
    if kind == "numbers":
        given = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert close(attend(reading, query, given), sdpa(reading, query, given))


def test_fewer_queries_than_tokens_are_those_that_the_mask_says(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    """Gemma 4 asks only for the last tokens of a prompt."""
    case = make_case("int8", past=40, new=9)
    stored = make_stored(case)
    reading, query = held(stored), case.query()
    mask = seen(stored, 0, CPU)[None, None]
    expected = attend(reading, query, mask)
    for count in (1, 2):
        some = attend(reading, query[:, :, -count:], mask[:, :, -count:])
        assert close(some, expected[:, :, -count:])
    assert reading.asked == []
    found = attend(reading, query[:, :, -1:])
    assert torch.equal(found, sdpa(reading, query[:, :, -1:], None))


def test_tokens_that_cannot_be_read_as_stored(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int8", new=3)
    reading, query = held(make_stored(case)), case.query()
    mask = seen(make_stored(case), 0, CPU)[None, None]
    reading.groups = None
    assert torch.equal(attend(reading, query, mask), sdpa(reading, query, mask))
    assert reading.asked == [KEY, VALUE]


# What only the model's own attention knows


@pytest.mark.parametrize(
    "asked",
    [
        {"position_bias": torch.randn(1, 4, 3, 23, generator=torch.Generator().manual_seed(0))},
        {"is_causal": False},
        {"output_attentions": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_is_not_known_here_goes_to_the_models_own(
    asked: dict[str, Any], make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int8", new=3)
    reading, query = held(make_stored(case)), case.query()
    found = attend(reading, query, None, **asked)
    assert torch.equal(found, sdpa(reading, query, None, **asked))
    assert set(reading.asked) == {KEY, VALUE}


def test_what_says_nothing_new_does_not(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int8", new=3)
    stored, query = make_stored(case), case.query()
    reading = held(stored)
    nothing = {"position_bias": None, "is_causal": True, "output_attentions": False}
    found = attend(reading, query, softcap=None, s_aux=None, sliding_window=9, **nothing)
    assert close(found, attend_reference(query, stored, 0.25))
    assert reading.asked == []


def test_dropout_is_the_models_own(make_case: Any, make_stored: Callable[..., StoredRows]) -> None:
    case = make_case("int8")
    reading, query = held(make_stored(case)), case.query()
    assert not attend(reading, query, dropout=1.0).any()
    assert reading.asked == [KEY, VALUE]


def test_keys_and_values_that_do_not_belong_together(
    make_case: Any, make_stored: Callable[..., StoredRows]
) -> None:
    case = make_case("int8")
    one, other = (held(make_stored(replace(case, seed=seed))) for seed in (0, 7))
    query, expected = case.query(), Held(None, [one.whole[KEY], other.whole[VALUE]])
    for key, value in (
        (one.handles()[KEY], other.handles()[VALUE]),
        (one.whole[KEY], other.handles()[VALUE]),
        (one.handles()[KEY], other.whole[VALUE]),
    ):
        out, _ = interface.attention_forward(Attention(), query, key, value, None)
        assert torch.equal(out.transpose(1, 2), sdpa(expected, query, None))


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_plain_tensors_get_what_sdpa_gives(queries: int, mask: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, tokens, 8, generator=generator)
        for heads, tokens in ((4, queries), (2, 5), (2, 5))
    )
    given = torch.rand(2, 1, queries, 5, generator=generator) < 0.7
    given[..., 0] = True
    masks = {"none": None, "bool": given, "float": (~given).float() * -3}
    for scaling in (None, 0.7):
        arguments = (Attention(), query, key, value, masks[mask])
        found, weights = interface.attention_forward(*arguments, scaling=scaling)
        assert torch.equal(found, sdpa_attention_forward(*arguments, scaling=scaling)[0])
        assert weights is None


def test_a_module_whose_file_is_unknown() -> None:
    kind = type("Elsewhere", (Attention,), {"__module__": "no.such.file"})
    query, key = torch.ones(1, 4, 1, 8), torch.ones(1, 2, 5, 8)
    found, _ = interface.attention_forward(kind(), query, key, key, None)
    assert torch.equal(found, torch.ones(1, 1, 4, 8))


# Models that know only eager attention, and those that ask for sdpa by its name


def left_padded() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (2, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    return {"input_ids": ids, "attention_mask": mask}


def calls(model: Any, forward: Callable[..., Any], generate: Callable[..., Any]) -> list[Any]:
    """What a model gives with caches that are not ours."""
    given, config = left_padded(), model.config
    ids, mask = given["input_ids"], given["attention_mask"]
    found = [forward(model, ids, None, attention_mask=mask)[mask.bool()], forward(model, ids)]
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=40)):
        found += [forward(model, ids[:, a:b], cache) for a, b in ((0, 15), (15, 16), (16, 21))]
    own = {"attention_mask": mask}
    found += [generate(model, ids, None, 12, **own), generate(model, ids, None, 6, num_beams=3)]
    with torch.no_grad():
        weights = model(ids, output_attentions=True, use_cache=False).attentions
    return found + list(weights or ())


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama", "mistral"])
def test_with_other_caches_a_model_does_what_it_did(
    name: str, tiny: Callable[..., Any], forward: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    model = tiny(name)
    before, expected = model.config._attn_implementation, calls(model, forward, generate)
    QuantizedCache.from_model(model, scheme="int8")
    assert model.config._attn_implementation == "kvquant"
    for found, wanted in zip(calls(model, forward, generate), expected, strict=True):
        assert torch.equal(found, wanted)
    remove_hook(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["deepseek_v32", "gemma4_text", "qwen3_next", "llama4_text"])
def test_a_model_that_asks_for_sdpa_by_its_name(
    name: str, tiny: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    """DeepSeek V3.2 masks what its indexer did not pick, Gemma 4 cuts queries off, there only."""
    model, ids = tiny(name), left_padded()["input_ids"]

    def run() -> list[torch.Tensor]:
        kept = [forward(model, ids, DynamicCache(config=model.config), logits_to_keep=3)]
        return [forward(model, ids), *kept]

    expected = run()
    QuantizedCache.from_model(model, scheme="int8")
    for found, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_implementation_that_was_chosen_stays(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    cache = QuantizedCache.from_model(model, scheme="int8")
    assert model.config._attn_implementation == "eager"
    assert "the model attends with eager" in cache.summary()
    remove_hook(model)
    assert model.config._attn_implementation == "eager"


def test_the_models_attention_comes_back_however_many_caches(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    QuantizedCache.from_model(model, scheme="int8", attention="dequantize")
    assert model.config._attn_implementation == "sdpa"
    for attention in ("auto", "torch", "dequantize"):
        QuantizedCache.from_model(model, scheme="int8", attention=attention)
        assert model.config._attn_implementation == "kvquant"
    for _ in range(2):
        remove_hook(model)
        assert model.config._attn_implementation == "sdpa"
    QuantizedCache.from_model(model, scheme="int8")
    assert model.config._attn_implementation == "kvquant"


def test_a_saved_model_knows_nothing_of_it(tiny: Callable[..., Any], tmp_path: Any) -> None:
    model = tiny("llama")
    QuantizedCache.from_model(model, scheme="int8")
    model.save_pretrained(tmp_path)
    assert "kvquant" not in (tmp_path / "config.json").read_text()


# On a device


@pytest.fixture
def guardless(without_device_guards: Any) -> Callable[[], Any]:
    """As `without_device_guards`, for two bindings more."""

    class Guardless(without_device_guards):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.__invert__:
                return torch.ops.aten.logical_not(*args)
            if func is torch.Tensor.contiguous:
                return torch.ops.aten.clone(*args, memory_format=torch.contiguous_format)
            return super().__torch_function__(func, types, args, kwargs)

    return Guardless


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("scheme", ["int4", "int8", "int4-kivi 8"])
def test_plain_torch_does_not_wait_for_a_device(
    scheme: str,
    new: int,
    make_case: Any,
    make_stored: Callable[..., StoredRows],
    guardless: Callable[[], Any],
) -> None:
    stored = make_stored(make_case(scheme, past=50, new=new, sinks=4, window=40, mean="none"))
    with FakeTensorMode(), guardless(), torch.no_grad():

        def there(runs: Any) -> Any:
            return tuple(replace(run, held=tuple(map(on_device, run.held))) for run in runs)

        def on_device(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

        fake = replace(
            stored,
            keys=there(stored.keys),
            values=there(stored.values),
            positions=lambda *_: None,
        )
        whole = [torch.empty(1, 2, 39 + new, 16, device="cuda") for _ in range(2)]
        reading = Held([fake], whole)
        reading.backend = "torch"
        query = torch.empty(1, 4, new, 16, device="cuda")
        shape = (1, 1, new, 39 + new)
        for mask in (None, torch.empty(shape, dtype=torch.bool, device="cuda")):
            out, _ = interface.attention_forward(Attention(), query, *reading.handles(), mask)
            assert (tuple(out.shape), out.device.type) == ((1, new, 4, 16), "cuda")
        assert reading.asked == []
