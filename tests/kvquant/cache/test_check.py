"""The check finds nothing on sound models, and every defect that is planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from calib.collect import collect
from calib.solve import solve
from kvquant.cache.check import CASES, check, prompt_length
from kvquant.cache.layer import QuantizedLayer
from kvquant.cache.slot import SlotStore
from kvquant.errors import FingerprintError, InputError, SchemeError
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.presets import preset_names
from kvquant.quantize.codec import Codec
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

SHORT: dict[str, Any] = {"prompt_tokens": 30, "tokens": 4}


MODELS = ["llama", "qwen2", "gemma2", "gemma3n_text", "llama4_text", "gpt_oss", "gpt2", "deepseek"]
HYBRIDS = ["qwen3_next", "falcon_h1", "lfm2"]


@pytest.mark.parametrize("name", [*MODELS, *HYBRIDS])
def test_sound_models_pass(tiny: Callable[..., Any], byte_tokenizer: Any, name: str) -> None:
    report = check(tiny(name), byte_tokenizer, **SHORT)
    assert report.findings == []
    assert [stored.scheme for stored in report.schemes] == preset_names()
    assert [case.name for case in report.cases] == [
        "one text", "a text in 5 pieces", "a padded batch", "generate()",
    ]  # fmt: skip
    for case in report.cases[:3]:
        assert case.quantized.first_difference is None
        assert case.quantized.logit_difference is not None
        assert case.quantized.logit_difference < 2e-6
        assert case.apart == 0.0
    assert all(stored.live_nbytes == stored.expected_nbytes > 0 for stored in report.schemes)
    assert report.schemes[0].key_difference == 0.0 < report.schemes[-1].key_difference < 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sound_models_pass_in_16_bits(
    tiny: Callable[..., Any], byte_tokenizer: Any, dtype: torch.dtype
) -> None:
    model = tiny("llama").to(dtype)
    report = check(model, byte_tokenizer, schemes=("none", "int4"), **SHORT)
    assert report.findings == []
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert report.schemes[0].bits_per_value == 16.0
    assert report.schemes[0].ratio == 1.0


def test_literal_sizes(tiny: Callable[..., Any], byte_tokenizer: Any) -> None:
    report = check(tiny("llama"), byte_tokenizer, schemes=("none", "int8"), **SHORT)
    none, int8 = report.schemes
    # 34 tokens, 2 layers, 2 KV heads, keys and values, 16 channels.
    assert none.live_nbytes == 34 * 8 * 64
    assert int8.live_nbytes == 34 * 8 * (16 + 2)
    assert int8.bits_per_value == 9.0
    assert int8.ratio == 32 / 18
    assert 0.0 < int8.key_difference < 0.01


def test_calibrated_scales_take_part(tiny: Callable[..., Any], byte_tokenizer: Any) -> None:
    model = tiny("qwen2")
    scales = _calibrated(model)
    found = check(model, byte_tokenizer, scales=scales, schemes=("int8", "int4"), **SHORT)
    plain = check(model, byte_tokenizer, schemes=("int8", "int4"), **SHORT)
    assert found.findings == []
    assert "per-channel" in found.schemes[0].description
    assert found.schemes[1].key_difference < plain.schemes[1].key_difference / 2
    # Means turn: a position of four bytes for each token.
    assert found.schemes[1].live_nbytes == plain.schemes[1].live_nbytes + 34 * 4
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    with pytest.raises(FingerprintError, match="weights differ"):
        check(model, byte_tokenizer, scales=scales, **SHORT)


def _calibrated(model: Any) -> Any:
    how = TensorScheme(tensor_format("int8"), Granularity.PER_CHANNEL)
    geometry = CacheGeometry.from_config(model.config)
    stats = collect(model, [[3 + 5 * i % 120 for i in range(64)]], geometry)
    origin = replace(stats.provenance, fingerprints=(fingerprint(model),))
    return solve(replace(stats, provenance=origin), QuantScheme(how, how))


UPDATE = QuantizedLayer.update


def _forgets_a_token(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    """What is stored of the third token of a call is zero."""
    read = UPDATE(self, keys, values, *args, **kwargs)
    for key, value in self.stores:
        for store in (key, value):
            if keys.shape[2] > 2 and len(store.coded):
                for held in store.coded.tensors:
                    held[:, :, 2] = 0
    return read


def _drops_a_token(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    """A prompt's first token is never seen."""
    first = 1 if keys.shape[2] > 1 else 0
    return UPDATE(self, keys[:, :, first:], values[:, :, first:], *args, **kwargs)


def _swaps_heads(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    read = UPDATE(self, keys, values, *args, **kwargs)
    return read[0], read[1].flip(1)


def _fails(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("no such argument\nsecond line")


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (_forgets_a_token, "logits are .* away from those without a cache; rounding explains"),
        (_drops_a_token, "one text: "),
        (_swaps_heads, "generate\\(\\): new token 0 is not the one of DynamicCache"),
        (_fails, "^one text, .*, none, int8: TypeError: no such argument$"),
    ],
)
def test_a_layer_with_a_defect_is_found(
    tiny: Callable[..., Any],
    byte_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    update: Callable[..., Any],
    words: str,
) -> None:
    import re

    monkeypatch.setattr(QuantizedLayer, "update", update)
    report = check(tiny("llama"), byte_tokenizer, schemes=("none", "int8"), **SHORT)
    assert any(re.search(words, finding) for finding in report.findings), report.findings
    assert not any(case.note for case in report.cases)
    json.dumps(report.to_dict())


def test_wrong_bytes_are_found(
    tiny: Callable[..., Any], byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_nbytes = SlotStore.live_nbytes
    monkeypatch.setattr(SlotStore, "live_nbytes", lambda self: live_nbytes(self) + 1)
    report = check(tiny("llama"), byte_tokenizer, schemes=("int8",), **SHORT)
    assert report.findings == ["int8: stores 4,900 bytes, the formula says 4,896"]


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_values_that_do_not_come_back_are_found(
    tiny: Callable[..., Any],
    byte_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
) -> None:
    decode = Codec.decode

    def decode_badly(self: Codec, coded: Any, out: torch.Tensor, *args: Any) -> None:
        decode(self, coded, out, *args)
        if not self.scheme.is_exact:
            out.fill_(value)

    monkeypatch.setattr(Codec, "decode", decode_badly)
    report = check(tiny("llama"), byte_tokenizer, schemes=("none", "int8"), **SHORT)
    shown = "1" if value == 0 else "nan"
    assert report.findings == [f"int8: keys come back changed by {shown} of their norm"]


def test_what_transformers_does_too_is_no_finding(
    tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    # Beyond 128 positions this model turns all its keys in another way, cached ones excepted.
    report = check(
        tiny("phi3_longrope"), byte_tokenizer, schemes=("none",), prompt_tokens=126, tokens=4
    )
    assert report.findings == []
    (note,) = [note for note in report.notes if note.startswith("one text")]
    assert "with DynamicCache, logits are" in note


def test_a_text_that_is_too_short_is_noted(tiny: Callable[..., Any], byte_tokenizer: Any) -> None:
    model = tiny("mistral", sliding_window=200)
    report = check(model, byte_tokenizer, schemes=("int4-kivi",), **SHORT)
    assert report.findings == []
    assert report.notes == [
        "int4-kivi: no token is old enough to be quantized; raise --prompt-tokens",
        "the window of 200 tokens is not passed; raise --prompt-tokens",
    ]
    long = check(model, byte_tokenizer, schemes=("int4-kivi",), prompt_tokens=200, tokens=1)
    assert long.notes == []


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_window_that_the_residual_covers_is_noted(
    tiny: Callable[..., Any], byte_tokenizer: Any, name: str
) -> None:
    """No longer text helps there; other layers of Gemma 2 do quantize."""
    model = tiny(name, sliding_window=24)
    report = check(model, byte_tokenizer, schemes=("int4-kivi",), prompt_tokens=200, tokens=4)
    assert report.findings == []
    assert report.notes == [
        "int4-kivi: the residual of 128 tokens covers the window of 24: nothing is ever quantized "
        "there; a residual_length below 23 changes that"
    ]


def test_advice_that_the_model_has_no_positions_for_is_not_given(
    tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    notes = []
    for positions in (192, 193):
        model = tiny("llama", max_position_embeddings=positions)
        notes += check(model, byte_tokenizer, schemes=("int4-kivi",), **SHORT).notes
    assert notes == [
        # A value is quantized after 129 tokens, a group of keys after 192.
        "int4-kivi: no token is old enough to be quantized; raise --prompt-tokens",
        "int4-kivi: no token is old enough to be quantized; raise --prompt-tokens",
    ]
    model = tiny("llama", max_position_embeddings=129)
    assert check(model, byte_tokenizer, schemes=("int4-kivi",), **SHORT).notes == [
        "int4-kivi: the first tokens are quantized after 129, and the model has 129 positions"
    ]


def test_a_latent_and_its_rotary_part_are_told_apart(
    tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    report = check(tiny("deepseek"), byte_tokenizer, schemes=("int4",), **SHORT)
    (note,) = report.notes
    assert note.startswith("of layers with a latent (MLA) keys are the latent and values its rot")
    assert report.schemes[0].value_difference == 0.0


def test_the_adapters_are_named(tiny: Callable[..., Any], byte_tokenizer: Any) -> None:
    named = {"name": "dir/tiny-llama", "adapters": ["dir/tiny-lora"], "schemes": ("none",)}
    report = check(tiny("llama"), byte_tokenizer, **named, **SHORT)
    assert report.title == "tiny-llama + tiny-lora"
    assert (report.model, report.adapters) == ("dir/tiny-llama", ("dir/tiny-lora",))


def test_a_name_is_no_model(byte_tokenizer: Any) -> None:
    with pytest.raises(InputError, match="must be a model in memory, not 'tiny-llama'"):
        check("tiny-llama", byte_tokenizer)


def test_steps_are_told_as_they_begin(tiny: Callable[..., Any], byte_tokenizer: Any) -> None:
    steps: list[str] = []
    check(tiny("llama"), byte_tokenizer, schemes=("int8", "int4"), progress=steps.append, **SHORT)
    assert steps[CASES:] == ["int8", "int4"]
    assert len(set(steps)) == CASES + 2


def test_what_cannot_be_is_refused_before_anything_is_decoded(
    tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    model = tiny("llama")
    steps: list[str] = []
    for schemes, error in ((("int5",), SchemeError), (("int8", "int4-kvi"), SchemeError)):
        with pytest.raises(error, match="unknown scheme"):
            check(model, byte_tokenizer, schemes=schemes, progress=steps.append, **SHORT)
    with pytest.raises(InputError, match=r"a prompt of 500, 12 to .* 513 .*, the model has 512"):
        check(model, byte_tokenizer, prompt_tokens=500, tokens=12, progress=steps.append)
    assert steps == []


def test_a_model_that_fails_by_itself_is_bad_input(
    tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(7, 64)
    with pytest.raises(InputError, match="the model fails without any cache: "):
        check(model, byte_tokenizer, schemes=("none",), **SHORT)


@pytest.mark.parametrize(
    ("positions", "asked", "tokens", "expected"),
    [
        (None, None, 32, 192),
        (None, 100_000, 32, 100_000),
        (512, None, 32, 192),
        (512, 479, 32, 479),
        (100, None, 32, 67),
        (34, None, 32, 1),
    ],
)
def test_lengths_that_fit(
    positions: int | None, asked: int | None, tokens: int, expected: int
) -> None:
    assert prompt_length(CacheGeometry("test", (), positions), asked, tokens) == expected


@pytest.mark.parametrize(
    ("positions", "asked", "tokens", "message"),
    [
        (
            512,
            480,
            32,
            "a prompt of 480, 32 to decode and one more that reads them need 513 positions, the "
            "model has 512: use a prompt of 1 to 479",
        ),
        (
            512,
            9000,
            32,
            "a prompt of 9,000, 32 to decode and one more that reads them need 9,033 posi",
        ),
        (512, -1, 32, "a prompt of -1, .*: use a prompt of 1 to 479"),
        (
            512,
            None,
            600,
            "600 to decode and one more that reads them need 602 positions with the shortest "
            "prompt, the model has 512: decode at most 510",
        ),
        (
            33,
            None,
            32,
            "32 to decode and one more that reads them need 34 positions with .* has 33: ",
        ),
        (10, 5, 32, "32 to decode and one more that reads them need 34 .* decode at most 8"),
    ],
)
def test_lengths_that_do_not_fit(
    positions: int, asked: int | None, tokens: int, message: str
) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        prompt_length(CacheGeometry("test", (), positions), asked, tokens)
