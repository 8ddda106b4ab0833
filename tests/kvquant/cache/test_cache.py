"""QuantizedCache as its user meets it: what is asked for, what is refused, what it holds then."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from calib.collect import collect
from calib.solve import solve
from kvquant import KVScales, QuantizedCache
from kvquant.cache.hook import remove_hook
from kvquant.cache.layer import QuantizedLayer
from kvquant.cache.transformers_compat import cache_argument
from kvquant.errors import (
    FingerprintError,
    GeometryError,
    InputError,
    NotObservedError,
    SchemeError,
)
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.presets import preset
from kvquant.quantize.reference import dequantize, quantize
from kvquant.scheme import EXACT, Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales

MADE_FOR = "the model that the cache was made for"
SMALL_KIVI = {"residual_length": 4, "group_size": 4}
OLD = Version(transformers.__version__) < Version("5.24")


def prompt(batch: int = 1, tokens: int = 21, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def calibrated(model: Any, scheme: QuantScheme) -> KVScales:
    stats = collect(model, prompt(4, 48, 7).tolist(), CacheGeometry.from_config(model.config))
    origin = replace(stats.provenance, fingerprints=(fingerprint(model),))
    return solve(replace(stats, provenance=origin), scheme)


def static(
    name: str, granularity: Granularity = Granularity.PER_CHANNEL, symmetric: bool = True
) -> QuantScheme:
    slot = TensorScheme(tensor_format(name), granularity, symmetric)
    return QuantScheme(slot, slot)


def past(cache: Any, layer_idx: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a layer's next call would read."""
    layer = cache.geometry.layers[layer_idx]
    new = [torch.zeros(1, layer.kv_heads, 1, d) for d in (layer.key_dim, layer.value_dim)]
    keys, values = copy.deepcopy(cache).update(new[0], new[1], layer_idx)
    return keys[:, :, :-1], values[:, :, :-1]


def exact(
    forward: Callable[..., Any], model: Any, ids: torch.Tensor, layer_idx: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, as the model makes them in one call."""
    cache = DynamicCache(config=model.get_decoder().config)
    forward(model, ids, cache)
    return cache.layers[layer_idx].keys, cache.layers[layer_idx].values


# Schemes


def formats(cache: QuantizedCache) -> list[tuple[str, str]]:
    return [
        (layer.scheme.key.format.name, layer.scheme.value.format.name) for layer in cache.layers
    ]


def test_keys_and_values_have_formats_of_their_own(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model = tiny_once("llama")
    cache = QuantizedCache.from_model(model, "int8", value_format="int4", sink_tokens=0)
    assert formats(cache) == [("int8", "int4")] * 2
    forward(model, prompt(), cache)
    assert cache.live_nbytes() == 21 * 2 * 2 * ((16 + 2) + (8 + 4))
    cache = QuantizedCache.from_model(model, "int4", key_format="int8")
    assert formats(cache) == [("int8", "int4")] * 2
    assert cache.scheme.sink_tokens == 4


def test_layers_have_schemes_of_their_own(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model = tiny_once("smollm3")
    cache = QuantizedCache.from_model(
        model, "int4", layers={0: "none", -1: "int8", 1: preset("int4-kivi", **SMALL_KIVI)}
    )
    assert [kind for kind, _ in formats(cache)] == ["none", "int4", "int4", "int8"]
    assert [layer.scheme.key.unit for layer in cache.layers] == [1, 4, 1, 1]
    forward(model, prompt(), cache)
    keys, values = exact(forward, model, prompt())
    assert torch.equal(past(cache)[0], keys)
    assert torch.equal(past(cache)[1], values)
    assert [layer.live_nbytes() // 2 for layer in cache.layers] == [
        21 * 2 * 64,
        # 4 groups of keys and 17 values are old enough, of 21 tokens with a residual of 4.
        16 * 8 + 4 * (16 * 2 * 2) + 5 * 64 + 17 * (8 + 4) + 4 * 64,
        4 * 2 * 64 + 17 * 2 * (8 + 4),
        21 * 2 * (16 + 2),
    ]


def test_formats_by_number_of_bits(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    """One head of 16 takes so many bytes a token: codes, scale, middle."""
    model, ids = tiny_once("llama"), prompt()
    wanted = {"none": 64, "bf16": 32, "fp16": 32, "fp8": 18, "fp8_e5m2": 18, "int8": 18}
    wanted |= {"int4": 8 + 4, "int3": 6 + 4}
    for name, row in wanted.items():
        cache = QuantizedCache.from_model(model, name, sink_tokens=0)
        forward(model, ids, cache)
        assert cache.live_nbytes() == 21 * 2 * 2 * 2 * row, name
        assert cache.nbytes() == 64 * 2 * 2 * 2 * row, "one page"


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({}, InputError, "give a scheme"),
        ({"scheme": "int5"}, SchemeError, "unknown scheme 'int5'"),
        ({"scheme": "int8", "key_format": "int5"}, SchemeError, "unknown scheme 'int5'"),
        ({"scheme": preset("int8"), "sink_tokens": 2}, InputError, "sink_tokens change a preset"),
        ({"scheme": "int8", "group_size": 32}, SchemeError, "int8 has no groups"),
        ({"scheme": "int4-kivi", "group_size": 0}, SchemeError, "group size of at least 1"),
        ({"scheme": "int8", "sink_tokens": -1}, SchemeError, "sink_tokens must be at least 0"),
        ({"scheme": "int8", "residual_length": -1}, SchemeError, "residual_length must be"),
        ({"scheme": "int8", "layers": {2: "none"}}, SchemeError, "no layer 2: .* 0 to 1"),
        ({"scheme": "int8", "layers": {-3: "none"}}, SchemeError, "no layer -3: .* 0 to 1"),
        ({"scheme": "int8", "layers": {0: "none", -2: "int4"}}, SchemeError, "layer 0 is named tw"),
        ({"scheme": "int8", "layers": {0: "int7"}}, SchemeError, "unknown scheme 'int7'"),
        ({"scheme": static("int8")}, NotObservedError, "layer 0: int8 per-channel needs calibra"),
        ({"scheme": "int8", "layers": {1: static("fp8")}}, NotObservedError, "layer 1: fp8_e4m3"),
        ({"scheme": "int8", "offloading": True}, InputError, "where this model already is"),
        ({"scheme": "int8", "scales": "nowhere"}, InputError, "nowhere.* does not exist"),
        (
            {"scheme": replace(preset("int8"), skip_layers=frozenset({0, 1}))},
            SchemeError,
            "nothing to quantize",
        ),
        (
            {"scheme": replace(preset("int8"), skip_layers=frozenset({5}))},
            SchemeError,
            "cannot skip layer 5",
        ),
        (
            {"scheme": replace(preset("int8"), skip_layers=frozenset({0})), "layers": {0: "int4"}},
            SchemeError,
            "layer 0 is named twice",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_forward_pass(
    tiny_once: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as raised:
        QuantizedCache.from_model(tiny_once("llama"), **asked)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("llama", {"rotary_format": "int8"}, "this model has none; leave rotary_format away"),
        ("gemma2", {"rotary_format": "none", "value_format": "int4"}, ""),
        (
            "llama",
            {"layers": {1: preset("int8", rotary_format="fp8")}},
            "fp8_e4m3 per-token for the rotary part of layer 1 does nothing",
        ),
        ("deepseek", {"value_format": "int4"}, "value_format does nothing: this model keeps a la"),
        ("deepseek", {"rotary_format": "int4", "key_format": "fp8"}, ""),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    tiny_once: Callable[..., Any], name: str, asked: dict[str, Any], message: str
) -> None:
    if not message:
        QuantizedCache.from_model(tiny_once(name), "int8", **asked)
        return
    with pytest.raises(SchemeError, match=message):
        QuantizedCache.from_model(tiny_once(name), "int8", **asked)


def test_names_in_the_place_of_a_model_are_refused(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_once("llama")
    cache = QuantizedCache.from_model(model, "int8")
    forward(model, prompt(), cache)
    cache.save(tmp_path / "prefix", model)
    for ask in (
        lambda: QuantizedCache.from_model("tiny-llama", scheme="int4"),
        lambda: QuantizedCache.from_model("tiny-llama", scheme="int4", scales="nowhere"),
        lambda: cache.save(tmp_path / "other", "tiny-llama"),
        lambda: QuantizedCache.load(tmp_path / "prefix", "tiny-llama"),
        lambda: remove_hook("tiny-llama"),
    ):
        with pytest.raises(InputError, match="must be a model in memory, not 'tiny-llama': give"):
            ask()
    with pytest.raises(InputError, match="must be a model in memory, not a Linear: give"):
        QuantizedCache.from_model(torch.nn.Linear(2, 2), scheme="int4")
    with pytest.raises(InputError, match="tokenizer must be a tokenizer in memory, not 'tiny-ll"):
        cache.save(tmp_path / "other", model, "tiny-llama")


@pytest.mark.parametrize("kind", ["t5", "mamba"])
def test_models_without_such_a_cache_are_refused(kind: str) -> None:
    config = AutoConfig.for_model(kind, vocab_size=32, d_model=16, hidden_size=16, num_layers=1)
    with torch.device("meta"):
        model = (
            AutoModelForCausalLM.from_config(config)
            if kind == "mamba"
            else transformers.AutoModelForSeq2SeqLM.from_config(config)
        )
    with pytest.raises(GeometryError, match=kind):
        QuantizedCache.from_model(model, "int8")


# Calibrated scales


@pytest.mark.parametrize(
    ("name", "symmetric"),
    [
        ("fp8", True),
        ("fp8_e5m2", True),
        ("int8", True),
        ("int8", False),
        ("int4", True),
        ("int4", False),
    ],
)
@pytest.mark.parametrize("granularity", [g for g in Granularity if g.is_static])
def test_static_schemes_read_what_the_reference_says(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    name: str,
    granularity: Granularity,
    symmetric: bool,
) -> None:
    model, ids = tiny_once("llama"), prompt()
    scales = calibrated(model, static(name, granularity, symmetric))
    cache = QuantizedCache.from_model(model, scales=scales)
    forward(model, ids[:, :13], cache)
    forward(model, ids[:, 13:], cache)
    row = 8 if name == "int4" else 16
    assert cache.live_nbytes() == 21 * 2 * 2 * 2 * row, "no scale a token"
    for states, read, slot in zip(
        exact(forward, model, ids), past(cache), ("key", "value"), strict=True
    ):
        numbers, how = getattr(scales.layers[0], slot), getattr(scales.scheme, slot)
        expected = dequantize(quantize(states, numbers, how), numbers)
        step = numbers.scale.max() if not name.startswith("fp8") else expected.abs().max() / 8
        # The last bit of a value may round it to the next code.
        assert float((read - expected).abs().max()) <= float(step) * 1.001
        assert float((read != expected).float().mean()) < 0.01


def test_scales_make_static_what_they_were_made_for(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    scales = {name: calibrated(model, static(name)) for name in ("fp8", "int8", "int4")}
    for name in ("fp8", "int8"):
        cache = QuantizedCache.from_model(model, name, scales[name])
        assert cache.scheme.key == cache.scheme.value == scales[name].scheme.key
    # The others are defined by scales of each token or group, and take the means at most.
    for name, made_for in (("int8", "fp8"), ("int4", "int4"), ("int4-kivi", "int4")):
        cache = QuantizedCache.from_model(model, name, scales[made_for])
        assert cache.scheme.key == preset(name).key, name
        assert cache.scheme.value == preset(name).value, name
    cache = QuantizedCache.from_model(model, "int4", scales["fp8"])
    assert "means: calibrated for 4 of 4 slots" in cache.summary()


def test_layers_that_calibration_skipped_stay_exact(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model, ids = tiny_once("smollm3"), prompt()
    scales = calibrated(model, replace(static("int8"), skip_layers=frozenset({0, 3})))
    cache = QuantizedCache.from_model(model, scales=scales)
    forward(model, ids, cache)
    assert [layer.scheme.key == EXACT for layer in cache.layers] == [True, False, False, True]
    for layer_idx in (0, 3):
        for read, states in zip(
            past(cache, layer_idx), exact(forward, model, ids, layer_idx), strict=True
        ):
            assert torch.equal(read, states)


def test_scales_may_be_a_file(tiny_once: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_once("llama")
    scales = calibrated(model, static("int8"))
    save_scales(scales, tmp_path / "own.safetensors")
    for path in (tmp_path / "own.safetensors", str(tmp_path / "own")):
        found = QuantizedCache.from_model(model, scales=path).scales
        assert found is not None
        assert found.layers == scales.layers


def test_scales_of_another_model_are_refused(
    tiny: Callable[..., Any], tiny_once: Callable[..., Any], tmp_path: Path
) -> None:
    other = tiny("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight *= 2
    scales = calibrated(other, static("int8"))
    save_scales(scales, tmp_path / "other.safetensors")
    model = tiny_once("llama")
    for source in (scales, tmp_path / "other"):
        with pytest.raises(FingerprintError, match="weights differ"):
            QuantizedCache.from_model(model, "int8", source)
    with pytest.warns(UserWarning, match="forced: .* weights differ; calibrate this m") as caught:
        assert QuantizedCache.from_model(model, "int8", tmp_path / "other", force=True)
    assert [warning.filename for warning in caught] == [__file__], "it points here"
    assert QuantizedCache.from_model(model, "int8", scales, force=True).scheme.is_static


@pytest.mark.parametrize("as_file", [False, True])
def test_another_tokenizer_is_worth_a_warning_that_says_what_to_do(
    tiny_once: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path, as_file: bool
) -> None:
    model = tiny_once("llama")
    scales = calibrated(model, static("int8"))
    origin = replace(scales.provenance, fingerprints=(fingerprint(model, byte_tokenizer),))
    scales = replace(scales, provenance=origin)
    save_scales(scales, tmp_path / "own")
    byte_tokenizer.add_tokens(["<new>"])
    given = tmp_path / "own" if as_file else scales
    message = "calibrated with another tokenizer .*: calibrate with the tokenizer that you serve"
    with pytest.warns(UserWarning, match=message) as caught:
        QuantizedCache.from_model(model, "int8", given, tokenizer=byte_tokenizer)
    assert [warning.filename for warning in caught] == [__file__], "it points here"


@pytest.mark.parametrize("name", ["llama_wide", "smollm3", "deepseek"])
def test_scales_of_another_shape_cannot_even_be_forced(
    tiny_once: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    scales = calibrated(tiny_once(name), static("int8"))
    save_scales(scales, tmp_path / "other.safetensors")
    with pytest.raises(FingerprintError, match=r"in the scales, .* in the model"):
        QuantizedCache.from_model(tiny_once("llama"), "int4", scales)
    with pytest.raises(FingerprintError, match="cannot be forced"):
        QuantizedCache.from_model(tiny_once("llama"), "int4", scales, force=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing was forced
        with pytest.raises(FingerprintError, match="cannot be forced"):
            QuantizedCache.from_model(tiny_once("llama"), "int4", tmp_path / "other", force=True)


def test_scales_of_another_scheme_are_refused(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    scales = calibrated(model, static("int8", Granularity.PER_HEAD))
    with pytest.raises(SchemeError, match="the key scales are int8 per-head, the scheme is int8"):
        QuantizedCache.from_model(model, static("int8"), scales)


# Calls that cannot be served


def call(model: Any, cache: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, **{cache_argument(model.get_decoder()): cache}, **kwargs)


def test_use_cache_false_is_a_contradiction(
    tiny_once: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    model, cache = tiny_once("llama"), QuantizedCache.from_model(tiny_once("llama"), "int8")
    with pytest.raises(InputError, match="use_cache=False and a cache contradict each other"):
        generate(model, prompt(), cache, use_cache=False)
    with pytest.raises(InputError, match="use_cache=False"):
        call(model, cache, prompt(), use_cache=False)
    assert cache.get_seq_length() == 0
    generate(model, prompt(), cache)
    assert cache.get_seq_length() == 28


def test_a_config_without_a_cache_has_to_be_overruled(
    tiny: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    """Training leaves it so; a DynamicCache then gets the whole text again with every token."""
    model = tiny("llama", use_cache=False)
    cache = QuantizedCache.from_model(model, "none")
    with pytest.raises(InputError, match="pass use_cache=True if the model's config says False"):
        generate(model, prompt(), cache)
    expected = generate(model, prompt(), None, use_cache=True)
    assert torch.equal(generate(model, prompt(), cache, use_cache=True), expected)


def test_a_call_without_tokens_is_the_models_to_refuse(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    for cache in (QuantizedCache.from_model(model, "int8"), DynamicCache(config=model.config)):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            call(model, cache, None)


def test_nothing_is_looked_at_where_there_are_no_values(tiny: Callable[..., Any]) -> None:
    """What a cache will need can be asked of a model without weights."""
    model = tiny("mistral").to("meta")
    cache, mask = QuantizedCache.from_model(model, "int8"), torch.ones(2, 21, device="meta")
    call(model, cache, prompt(2).to("meta"), attention_mask=mask)
    assert cache.get_seq_length() == 21
    assert cache.nbytes() == 64 * 2 * 2 * 2 * 2 * 18


@pytest.mark.parametrize("batch", [1, 3])
def test_another_number_of_rows_is_refused(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], batch: int
) -> None:
    model = tiny_once("llama")
    cache = QuantizedCache.from_model(model, "int8")
    forward(model, prompt(2), cache)
    with pytest.raises(InputError, match=f"holds 2 rows, the call has {batch}: reset"):
        forward(model, prompt(batch), cache)
    forward(model, prompt(2), cache)
    assert cache.get_seq_length() == 42
    cache.reset()
    forward(model, prompt(batch), cache)
    assert cache.get_seq_length() == 21


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 1, 21, 21), "needs an attention mask .batch, tokens., not 4-D"),
        (torch.ones(2, 21, 21), "not 3-D"),
        (
            torch.ones(2, 20),
            r"the attention mask is \[2, 20\], not \[2, 21\] \(0 cached and 21 new\)$",
        ),
        (torch.ones(1, 21), r"the attention mask is \[1, 21\], not \[2, 21\]"),
    ],
)
def test_masks_that_do_not_tell_padding_are_refused(
    tiny_once: Callable[..., Any], mask: torch.Tensor, message: str
) -> None:
    cache = QuantizedCache.from_model(tiny_once("llama"), "int8")
    with pytest.raises(InputError, match=message):
        call(tiny_once("llama"), cache, prompt(2), attention_mask=mask)
    call(tiny_once("llama"), cache, prompt(2), attention_mask=torch.ones(2, 21))


def test_a_mask_of_the_new_tokens_alone_is_refused(tiny_once: Callable[..., Any]) -> None:
    cache = QuantizedCache.from_model(tiny_once("llama"), "int8")
    call(tiny_once("llama"), cache, prompt())
    with pytest.raises(InputError, match=r"is \[1, 5\], not \[1, 26\] \(21 cached and 5 new\)"):
        call(tiny_once("llama"), cache, prompt(1, 5), attention_mask=torch.ones(1, 5))


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize(
    ("other", "changes", "message"),
    [
        ("llama_wide", {}, f"layer 0 caches keys of 2 heads x 24, but {MADE_FOR} has 2 heads x 16"),
        ("llama", {"num_key_value_heads": 4}, "layer 0 caches keys of 4 heads x 16"),
        ("llama", {"num_hidden_layers": 5}, f"caches in layer 2, but {MADE_FOR} has 2 layers"),
    ],
)
def test_a_second_model_cannot_use_it(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    other: str,
    changes: dict[str, Any],
    message: str,
    filled: bool,
) -> None:
    cache = QuantizedCache.from_model(tiny_once("llama"), "int4")
    QuantizedCache.from_model(tiny_once(other, **changes), "int4")
    if filled:
        forward(tiny_once("llama"), prompt(), cache)
    with pytest.raises(GeometryError, match=message) as refused:
        forward(tiny_once(other, **changes), prompt(), cache)
    assert str(refused.value).endswith(": make the cache from the model that it is used with")


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 10, 11, 14, 20, 21])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next"])
def test_a_prompt_has_to_go_on_where_the_cache_ends(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    name: str,
    tokens: int,
    embedded: bool,
) -> None:
    """`generate()` hands over no token, or tokens from the middle, when a prompt is shorter."""
    model, ids = tiny_once(name), prompt()
    cache = QuantizedCache.from_model(model, "int8")
    forward(model, ids, cache)
    given: dict[str, Any] = {"input_ids": ids[:, :tokens]}
    if embedded:
        given = {"inputs_embeds": model.get_input_embeddings()(ids[:, :tokens])}
    given |= {cache_argument(model.get_decoder()): cache, "attention_mask": torch.ones(1, tokens)}
    with pytest.raises(InputError, match=r"21( cached|\)).*: a prompt begins with what is cached"):
        model.generate(**given, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert cache.get_seq_length() == 21
    with pytest.raises(
        InputError, match=r"brings nothing new to .* \(length 21\): a prompt begins"
    ):
        call(model, cache, ids[:, :0])


def test_a_forward_pass_that_was_cut_off_is_noticed(
    tiny: Callable[..., Any], forward: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    model = tiny("llama")
    cache = QuantizedCache.from_model(model, "int8")
    expected = generate(model, prompt(), cache)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, prompt(1, 5), cache)
    handle.remove()
    for again in (
        lambda: forward(model, prompt(1, 5), cache),
        lambda: cache.crop(-1),
        lambda: generate(model, expected, cache),
    ):
        with pytest.raises(InputError, match=r"layers hold 28 to 33 tokens of 33: .* reset"):
            again()
    cache.reset()
    assert torch.equal(generate(model, prompt(), cache), expected)


def test_a_call_that_failed_before_any_layer_leaves_no_trace(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model = tiny_once("llama")
    cache, expected = (QuantizedCache.from_model(model, "int8") for _ in range(2))
    unknown, mask = torch.full((3, 4), 9999), torch.ones(3, 4)
    mask[0, :2] = 0
    for batch, ids in ((3, unknown), (2, unknown[:2])):
        with pytest.raises(IndexError):
            forward(model, ids, cache, attention_mask=mask[:batch])
    forward(model, prompt(), cache)
    forward(model, prompt(), expected)
    with pytest.raises(IndexError):
        forward(model, unknown[:1], cache)
    for one in (cache, expected):
        one.crop(-3)
        forward(model, prompt(1, 4), one)
    for mine, other in zip(past(cache), past(expected), strict=True):
        assert torch.equal(mine, other)


@contextmanager
def cut_off_at(number: int) -> Iterator[list[str]]:
    """Ctrl-C at the `number`-th call of a function of the cache; notes which were called."""
    called: list[str] = []

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        if frame.f_globals.get("__name__", "").startswith("kvquant.cache."):
            called.append(frame.f_code.co_name)
            if len(called) == number:
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        yield called
    finally:
        sys.setprofile(None)


def feed(cache: QuantizedCache, mask: torch.Tensor | None, start: int, stop: int) -> list[Any]:
    """A call as the hook announces it; what each layer reads. Quicker than a model."""
    given = None if mask is None else mask[:, :stop]
    cache.begin_call(
        {"input_ids": torch.empty(2, stop - start), "attention_mask": given}, tells_end=True
    )
    values, read = torch.Generator().manual_seed(5), []
    for index, layer in enumerate(cache.geometry.layers):
        new = [
            torch.randn(2, layer.kv_heads, 40, dim, generator=values)[:, :, start:stop]
            for dim in (layer.key_dim, layer.value_dim)
        ]
        with torch.no_grad():
            read += [states.clone() for states in cache.update(new[0], new[1], index)]
    cache.end_call()
    return read


def refuses_all_but_reset(cache: QuantizedCache, again: Callable[[], Any], model: Any) -> bool:
    """Whether each way to go on is refused, with the advice to reset; else it fails."""
    for use in (
        again,
        partial(cache.save, "nowhere", model),
        partial(cache.crop, -1),
        partial(cache.reorder_cache, torch.tensor([0, 1])),
        partial(cache.batch_repeat_interleave, 2),
    ):
        with pytest.raises(InputError, match=r"cut off: .*reset\(\) the cache|cut off\. reset"):
            use()
    return True


@pytest.mark.parametrize(
    ("name", "scheme", "changes", "padded"),
    [
        ("llama", "int4", {}, False),
        ("llama", "int4-kivi", SMALL_KIVI, True),
        ("mistral", "int8", {"attention": "dequantize"}, False),
        ("deepseek", "none", {}, False),
    ],
)
def test_a_call_cut_off_anywhere_can_be_repeated_or_is_refused(
    tiny_once: Callable[..., Any], name: str, scheme: str, changes: dict[str, Any], padded: bool
) -> None:
    """Between layers, between key and value, while the call before is stored, anywhere."""
    model, mask = tiny_once(name), None
    if padded:
        mask = torch.ones(2, 26, dtype=torch.long)
        mask[0, :5] = mask[1, 17] = mask[1, 21] = 0

    def filled() -> QuantizedCache:
        cache = QuantizedCache.from_model(model, scheme, **changes)
        feed(cache, mask, 0, 16)
        feed(cache, mask, 16, 20)  # some of which waits to be stored
        return cache

    whole, expected = filled(), []
    with cut_off_at(0) as called:
        expected += feed(whole, mask, 20, 24)
    assert called.count("append") >= 2 * len(whole.layers)
    expected += feed(whole, mask, 24, 26)
    right = refused = 0
    for number in range(1, len(called) + 1):
        cache = filled()
        with cut_off_at(number), pytest.raises(KeyboardInterrupt):
            feed(cache, mask, 20, 24)
        if cache._ledger.is_torn:
            assert refuses_all_but_reset(cache, partial(feed, cache, mask, 20, 24), model)
            refused += 1
            continue
        found = feed(cache, mask, 20, 24) + feed(cache, mask, 24, 26)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), called[number]
        right += 1
    assert min(right, refused) > 20
    cache.reset()
    for start, stop in ((0, 16), (16, 20), (20, 24)):
        found = feed(cache, mask, start, stop)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=False))


@pytest.mark.parametrize(
    ("change", "padded"), [("select", True), ("crop", False), ("measure", False)]
)
def test_any_other_change_cut_off_anywhere_can_be_repeated_or_is_refused(
    tiny_once: Callable[..., Any], change: str, padded: bool
) -> None:
    model, mask = tiny_once("llama"), None
    if padded:
        mask = torch.ones(2, 26, dtype=torch.long)
        mask[0, :5] = 0
    changes = {
        "select": lambda cache: cache.reorder_cache(torch.tensor([0, 1])),
        "crop": lambda cache: cache.crop(-4),
        "measure": QuantizedCache.nbytes,
    }

    def filled() -> QuantizedCache:
        cache = QuantizedCache.from_model(model, "int4", residual_length=4)
        cache.activate_past_recording()
        feed(cache, mask, 0, 16)
        feed(cache, mask, 16, 20)
        return cache

    whole = filled()
    with cut_off_at(0) as called:
        changes[change](whole)
    start = whole.get_seq_length()
    expected = feed(whole, mask, start, 24)
    refused = 0
    for number in range(1, len(called) + 1):
        cache = filled()
        with cut_off_at(number), pytest.raises(KeyboardInterrupt):
            changes[change](cache)
        if cache._ledger.is_torn:
            assert refuses_all_but_reset(cache, partial(feed, cache, mask, start, 24), model)
            refused += 1
            continue
        changes[change](cache)
        found = feed(cache, mask, start, 24)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), called[number]
    assert refused > 5


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "qwen3_next", "lfm2", "deepseek_v32"])
def test_a_model_cut_off_in_any_of_its_layers_is_refused_the_second_time(
    tiny: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    """Attention of the last layer included, when all layers hold the call's tokens."""
    if name == "deepseek_v32" and OLD:
        pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
    model = tiny(name)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for layer in model.get_decoder().layers:
        parts = [part for part in layer.children() if any(True for _ in part.parameters())]
        for part in (*parts, layer):
            cache = QuantizedCache.from_model(model, "int8")
            forward(model, prompt(), cache)
            handle = part.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                forward(model, prompt(1, 5), cache)
            handle.remove()
            expected = QuantizedCache.from_model(model, "int8")
            forward(model, prompt(), expected)
            again = partial(forward, model, prompt(1, 5))
            if part is layer or cache._ledger.is_torn:
                assert refuses_all_but_reset(cache, partial(again, cache), model)
                continue
            assert torch.equal(again(cache), again(expected))
            assert cache.get_seq_length() == 26


def test_what_fails_behind_the_decoder_leaves_the_call_in_the_cache(
    tiny: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model = tiny("llama")
    cache = QuantizedCache.from_model(model, "int8")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.lm_head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, prompt(), cache)
    handle.remove()
    assert cache.get_seq_length() == 21
    cache.crop(-1)
    whole = QuantizedCache.from_model(model, "int8")
    forward(model, prompt()[:, :20], whole)
    again = [forward(model, prompt()[:, 20:], one) for one in (cache, whole)]
    assert torch.equal(*again)


def test_what_was_held_before_a_call_that_failed_can_be_saved(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_once("llama")
    cache = QuantizedCache.from_model(model, "int8")
    forward(model, prompt(), cache)
    with pytest.raises(IndexError):
        forward(model, torch.full((1, 4), 9999), cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache.save(tmp_path / "prefix", model)
        loaded = QuantizedCache.load(tmp_path / "prefix", model)
    found, expected = (forward(model, prompt(1, 5), one) for one in (loaded, cache))
    assert torch.equal(found, expected)


# Taking back, copying, moving


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "falcon_h1", "lfm2", "deepseek_v32"])
def test_reset_gives_everything_back_and_another_batch_fits(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    if name == "deepseek_v32" and OLD:
        pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
    model = tiny_once(name)
    cache = QuantizedCache.from_model(model, "int8")
    forward(model, prompt(2), cache)
    cache.activate_past_recording()
    cache.reset()
    assert (cache.nbytes(), cache.live_nbytes(), cache.workspace_nbytes()) == (0, 0, 0)
    fresh = QuantizedCache.from_model(model, "int8")
    for ids in (prompt(3, 12), prompt(3, 2)):
        assert torch.equal(forward(model, ids, cache), forward(model, ids, fresh))
    assert cache.nbytes() == fresh.nbytes()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_rows_that_are_not_there_change_nothing(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str, padded: bool
) -> None:
    model, mask = tiny_once(name), torch.ones(2, 23, dtype=torch.long)
    mask[0, :5] = int(not padded)
    caches = [QuantizedCache.from_model(model, "int8") for _ in range(2)]
    for cache in caches:
        forward(model, prompt(2), cache, attention_mask=mask[:, :21])
    for index, message in (
        (torch.tensor([0, 5, 1]), "there is no row 5: the cache holds 2"),
        (torch.tensor([-3]), "there is no row -3"),
        (torch.tensor([0.5]), "whole numbers"),
        (torch.tensor([True]), r"bools \[1\] cannot choose among 2 rows"),
    ):
        with pytest.raises(InputError, match=message):
            caches[0].batch_select_indices(index)
    with pytest.raises(InputError, match="there is no row 2"):
        caches[0].reorder_cache(torch.tensor([2]))
    last = [forward(model, prompt(2, 2), cache, attention_mask=mask) for cache in caches]
    assert torch.equal(*last)


@pytest.mark.parametrize("name", ["llama", "mistral", "lfm2"])
def test_rows_may_be_counted_from_the_end(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    model, mask = tiny_once(name), torch.ones(3, 21, dtype=torch.long)
    mask[0, :5] = mask[2, :2] = 0
    found = []
    for index in ([-1, 0, -2], [2, 0, 1]):
        cache = QuantizedCache.from_model(model, "int4")
        forward(model, prompt(3), cache, attention_mask=mask)
        cache.batch_select_indices(torch.tensor(index))
        assert len(cache._ledger.groups) == 3
        more = torch.cat([mask[index], torch.ones(3, 2, dtype=torch.long)], dim=1)
        found.append(forward(model, prompt(3, 2), cache, attention_mask=more))
    assert torch.equal(*found)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_where_no_row_is_left_only_reset_helps(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str, padded: bool
) -> None:
    model, mask = tiny_once(name), torch.ones(2, 21, dtype=torch.long)
    mask[0, :5] = int(not padded)
    cache = QuantizedCache.from_model(model, "int4")
    forward(model, prompt(2), cache, attention_mask=mask)
    cache.batch_select_indices(torch.tensor([False, False]))
    assert cache.live_nbytes() == 0
    for _ in range(2):
        with pytest.raises(InputError, match="holds 0 rows, the call has 2: reset"):
            forward(model, prompt(2, 3), cache)
    with pytest.raises(InputError, match="there is no row 0"):
        cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    fresh = QuantizedCache.from_model(model, "int4")
    assert torch.equal(forward(model, prompt(2), cache), forward(model, prompt(2), fresh))


@pytest.mark.parametrize(
    ("name", "scheme", "changes", "before", "recording"),
    [
        ("llama", "none", {}, True, True),
        ("llama", "int8", {}, True, True),
        ("llama", "int4", {}, True, True),
        ("llama", "int4", {"residual_length": 4}, False, True),
        ("llama", "int4-kivi", {}, False, True),
        ("deepseek", "int4", {}, True, True),
        ("deepseek", "int4", {"rotary_format": "int8"}, True, True),
        ("mistral", "none", {}, False, True),
        ("gemma2", "int8", {}, False, True),
        ("qwen3_next", "int8", {}, False, False),
        ("falcon_h1", "none", {}, False, False),
        ("lfm2", "int8", {}, True, True),
        ("lfm2", "int4-kivi", {}, False, True),
    ],
)
def test_it_says_whether_it_can_be_cropped_without_a_trace(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    name: str,
    scheme: str,
    changes: dict[str, Any],
    before: bool,
    recording: bool,
) -> None:
    model = tiny_once(name)
    cache = QuantizedCache.from_model(model, scheme, **changes)
    forward(model, prompt(), cache)
    assert cache.is_croppable is before
    cache.activate_past_recording()
    assert cache.is_croppable is recording


def test_an_empty_cache_can_be_cropped_to_nothing(tiny_once: Callable[..., Any]) -> None:
    for name in ("llama", "mistral", "qwen3_next", "falcon_h1", "lfm2", "gemma3n_text"):
        cache = QuantizedCache.from_model(tiny_once(name), "int4")
        cache.crop(0)
        cache.crop(-3)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gemma2", {}),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("qwen3_next", {}),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"] * 2}),
        ("falcon_h1", {}),
    ],
)
def test_a_crop_that_is_refused_changes_nothing(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    name: str,
    overrides: dict[str, Any],
) -> None:
    """Windows that were passed and recurrent states refuse; none of the others is cropped then."""
    model, mask = tiny_once(name, **overrides), torch.ones(2, 26)
    mask[0, :4] = 0
    caches = [QuantizedCache.from_model(model, "int8") for _ in range(2)]
    found = []
    for number, cache in enumerate(caches):
        forward(model, prompt(2), cache, attention_mask=mask[:, :21])
        if number:
            with pytest.raises(RuntimeError, match="cannot take 2 tokens back"):
                cache.crop(-2)
        assert cache.get_seq_length() == 21
        found.append(forward(model, prompt(2, 5), cache, attention_mask=mask))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "qwen3_next"])
def test_what_a_state_records_goes_with_the_next_crop(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    model = tiny_once(name)
    cache = QuantizedCache.from_model(model, "int8")
    before: list[int] = []
    for _ in range(2):
        forward(model, prompt(), cache)
        widths = [
            state.shape[-1]
            for layer in cache.layers
            for state in getattr(layer, "conv_states", {}).values()
        ]
        before = before or widths
        cache.activate_past_recording()
    assert min(now - then for now, then in zip(widths, before, strict=True)) > 0
    cache.crop(0)
    assert [
        state.shape[-1]
        for layer in cache.layers
        for state in getattr(layer, "conv_states", {}).values()
    ] == before


@pytest.mark.parametrize("name", ["gemma2", "lfm2", "deepseek_v32"])
@pytest.mark.parametrize("scheme", ["none", "int8", "int4-kivi"])
def test_a_rejected_draft_leaves_no_trace(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str, scheme: str
) -> None:
    if name == "deepseek_v32" and OLD:
        pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
    model = tiny_once(name)
    changes = SMALL_KIVI if scheme == "int4-kivi" else {}
    caches = [QuantizedCache.from_model(model, scheme, **changes) for _ in range(2)]
    for cache in caches:
        cache.activate_past_recording()
        forward(model, prompt(), cache)
        cache.crop(0)
    caches[1].crop(0)
    forward(model, prompt(1, 6, seed=9), caches[1])
    caches[1].crop(-6)
    assert caches[0].live_nbytes() == caches[1].live_nbytes()
    found = [forward(model, prompt(1, 5, seed=3), cache) for cache in caches]
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek", "qwen3_next", "lfm2"])
@pytest.mark.parametrize("scheme", ["none", "int4", "int4-kivi"])
def test_a_deep_copy_goes_its_own_way(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str, scheme: str
) -> None:
    """As Transformers' guide has it, to answer several questions about one prompt."""
    model = tiny_once(name)
    cache = QuantizedCache.from_model(model, scheme, **(SMALL_KIVI if "kivi" in scheme else {}))
    mask = torch.ones(2, 26)
    mask[0, :5] = 0
    forward(model, prompt(2), cache, attention_mask=mask[:, :21])
    twins = [copy.deepcopy(cache) for _ in range(2)]
    assert all(twin.plan is cache.plan and twin.scales is cache.scales for twin in twins)
    other = forward(model, prompt(2, 5, seed=8), twins[0], attention_mask=mask)
    kept = forward(model, prompt(2, 5), cache, attention_mask=mask)
    again = forward(model, prompt(2, 5), twins[1], attention_mask=mask)
    assert torch.equal(kept, again)
    assert not torch.equal(kept, other)
    assert cache.nbytes() == twins[0].nbytes() == twins[1].nbytes()


@pytest.mark.parametrize("scheme", ["none", "int4", "int4-kivi"])
def test_a_copy_made_in_inference_mode_goes_on_outside_of_it(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], scheme: str
) -> None:
    """A serving loop often runs in inference mode, and copies a prefix there."""
    model = tiny_once("llama")
    cache = QuantizedCache.from_model(model, scheme)
    forward(model, prompt(2), cache)
    with torch.inference_mode():
        twin = copy.deepcopy(cache)
    for ids in (prompt(2, 3), prompt(2, 1)):
        assert torch.equal(forward(model, ids, twin), forward(model, ids, cache))


def test_it_cannot_be_pickled_and_says_what_to_do(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    cache = QuantizedCache.from_model(tiny_once("llama"), "int8")
    for _ in range(2):
        with pytest.raises(TypeError, match=r"cannot be pickled.*: use its save and load"):
            pickle.dumps(cache)
        forward(tiny_once("llama"), prompt(), cache)


def test_it_is_shown_in_one_line(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    cache = QuantizedCache.from_model(tiny_once("gemma2"), "int8", residual_length=3)
    made = "QuantizedCache(gemma2: K int8 per-token, V int8 per-token, newest 3 tokens exact; "
    assert repr(cache) == f"{made}layers=4, batch=0, tokens=0)"
    forward(tiny_once("gemma2"), prompt(1), cache)
    assert repr(cache) == str(cache) == f"{made}layers=4, batch=1, tokens=21)"


def test_it_is_no_larger_than_it_says(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    for name in ("llama", "gemma2", "deepseek", "qwen3_next", "falcon_h1"):
        cache = QuantizedCache.from_model(tiny_once(name), "int4")
        forward(tiny_once(name), prompt(2), cache)
        assert 0 < cache.live_nbytes() <= cache.nbytes()
        layers = [layer for layer in cache.layers if isinstance(layer, QuantizedLayer)]
        stores = [store for layer in layers for pair in layer.stores for store in pair]
        tensors = [t for store in stores for buffer in store.buffers for t in buffer.tensors]
        tensors += [
            state
            for layer in cache.layers
            for kind in ("conv_states", "recurrent_states")
            for state in getattr(layer, kind, {}).values()
        ]
        assert cache.nbytes() == sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_it_is_not_compiled_with_the_model(tiny_once: Callable[..., Any]) -> None:
    for name in ("llama", "mistral", "qwen3_next", "falcon_h1"):
        assert not QuantizedCache.from_model(tiny_once(name), "int8").is_compileable


def test_nothing_keeps_a_cache_alive(
    tiny_once: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    cache = QuantizedCache.from_model(tiny_once("gemma2"), "int4")
    generate(tiny_once("gemma2"), prompt(), cache)
    found = weakref.ref(cache)
    del cache
    gc.collect()
    assert found() is None


# Padding


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek"])
@pytest.mark.parametrize("step", [1, 4, 21])
def test_left_padding_is_not_stored_however_calls_are_cut(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str, step: int
) -> None:
    model, mask = tiny_once(name), torch.ones(2, 21, dtype=torch.long)
    mask[0, :9] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache = QuantizedCache.from_model(model, "int8")
    for start in range(0, 21, step):
        stop = min(21, start + step)
        forward(
            model,
            prompt(2)[:, start:stop],
            cache,
            attention_mask=mask[:, :stop],
            position_ids=places[:, start:stop],
        )
    for layer in cache.layers:
        assert sorted(stores[0].length for stores in layer.stores) == [12, 21]
