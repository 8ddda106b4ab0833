"""Every check, passed and failed, on real models of several families."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import cache_utils

from calib.collect import collect
from calib.solve import solve
from evals.arms import ArmRequest, BoundArm, EvalArm, bind, parse_arms, prepare_arms
from evals.reading import Reader
from evals.selfcheck import STEPS, Checked, self_check
from evals.window_check import window_faults
from evals.windows import spans
from kvquant import KVScales, QuantizedCache
from kvquant.errors import InputError
from kvquant.fingerprint import fingerprint
from kvquant.presets import preset
from kvquant.provenance import Provenance
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

LENGTH, PREFILL, BLOCK = 161, 96, 32
IDS = torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(1)).numpy()
SPANS = spans(LENGTH, PREFILL, BLOCK)
needs_fp8 = pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="Transformers 5.21 and newer have it"
)


def check(model: Any, *arms: str | BoundArm, **options: Any) -> list[Checked]:
    reader = Reader(model)
    bound = [
        bind(prepare_arms(parse_arms([it], []), reader.geometry)[0], model, None)
        if isinstance(it, str)
        else it
        for it in arms
    ]
    return list(self_check(reader, bound, IDS, SPANS, served=fingerprint(model), **options))


def statuses(found: Checked) -> dict[str, str]:
    return {it.name: it.status for it in found.result.checks}


def detail(found: Checked, name: str) -> str:
    (text,) = (it.detail for it in found.result.checks if it.name == name)
    return text


def arm(make: Callable[[], Any], scheme: QuantScheme | None = None, **bound: Any) -> BoundArm:
    return BoundArm(EvalArm(ArmRequest("arm"), None, scheme or preset("int8")), make, **bound)


@pytest.fixture(scope="module")
def sharp(tiny: Callable[..., Any]) -> Callable[..., Any]:
    """``sharp(**config)``: a tiny llama whose predictions hang on what attention reads."""

    def build(**config: Any) -> Any:
        model, generator = tiny("llama", **config), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for place, weight in model.named_parameters():
                if weight.dim() == 2:
                    gain = 1.0 if "embed" in place else weight.shape[1] ** -0.5
                    weight.copy_(gain * torch.randn(weight.shape, generator=generator))
            model.lm_head.weight.mul_(3)
        return model

    return build


# ------------------------------------------------------------------------------------- families

OLD = Version(transformers.__version__) < Version("5.24")
"""Versions that cache DeepSeek V3.2 per head."""
WINDOWS = {"gemma2", "gpt_oss", "mistral", "gemma3n_text", "llama4_text"}
FAMILIES = (
    "llama",
    "gemma2",
    "mistral",
    "deepseek",
    "deepseek_v32",
    "gpt_oss",
    "qwen3_next",
    "falcon_h1",
    "gpt2",
    "gemma3n_text",
    "llama4_text",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tiny_once: Callable[..., Any], name: str) -> None:
    if name == "deepseek_v32" and OLD:
        pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
    exact, int8 = check(tiny_once(name), "none", "int8")
    window = {"window": "passed"} if name in WINDOWS else {}
    always = {"floor": "passed", "bytes": "passed", "padding": "passed", "numbers": "passed"}
    assert statuses(exact) == {"reads": "noted", "poison": "noted", **always, **window}
    assert statuses(int8) == {"reads": "passed", "poison": "passed", **always, **window}
    assert exact.result.quantized_reads == 0.0
    assert int8.result.quantized_reads > (0.1 if name == "mistral" else 0.6)
    assert exact.result.clean < 1e-6
    assert int8.result.poison > 3 * int8.result.clean > 0
    assert exact.record.scheme_class == "exact"


def test_the_lines_come_in_order(tiny_once: Callable[..., Any]) -> None:
    (found,) = check(tiny_once("gemma2"), "int8")
    assert [it.name for it in found.result.checks] == [
        *("reads", "poison", "floor", "bytes", "window", "padding", "numbers")
    ]
    assert found.result.failures == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models(sharp: Callable[..., Any], dtype: torch.dtype) -> None:
    """Rounding of 16 bit is not taken for a fault, and exact tokens take two bytes a number."""
    for found in check(sharp().to(dtype), "none", "bf16", "fp8", "int8", "int4", "int3"):
        assert found.result.failures == (), found
        assert found.record.expected_nbytes == found.record.live_nbytes
    assert check(sharp().to(dtype), "none")[0].record.bits_per_value == 16.0


def test_a_model_of_nan_passes_nothing_of_consequence(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] = torch.nan
    (found,) = check(model, "int8")
    assert {"floor", "numbers"} <= {it.name for it in found.result.failures}


# ------------------------------------------------------------------------------- what is recorded


def test_what_is_recorded(tiny_once: Callable[..., Any]) -> None:
    exact, int8, int4 = check(tiny_once("llama"), "none", "int8", "int4")
    # 160 tokens read in 2 layers x 2 slots x 2 heads of 16.
    numbers = 160 * 2 * 2 * 2 * 16
    assert exact.record.live_nbytes == 4 * numbers
    assert int8.record.live_nbytes == numbers + numbers // 16 * 2
    coded = numbers // 160 * 156
    assert int4.record.live_nbytes == coded // 2 + coded // 16 * 4 + (numbers - coded) * 4
    assert [it.record.tokens for it in (exact, int8, int4)] == [160] * 3
    assert int8.record.reference_nbytes == 2 * numbers
    assert int8.record.bits_per_value == 9.0
    assert exact.record.bits_per_value == 32.0
    assert "numba" in int8.record.kernel
    assert "dequantized tokens (nothing is quantized)" in exact.record.kernel
    assert int8.record.scales is int8.record.scales_origin is None
    keys, values = int8.record.layer_errors["1"]
    assert 0.003 < keys < 0.008 and 0.003 < values < 0.008
    assert exact.record.layer_errors == {"0": (0.0, 0.0), "1": (0.0, 0.0)}


def test_shares_by_count(tiny_once: Callable[..., Any]) -> None:
    exact, int8, int4 = check(tiny_once("llama"), "none", "int8", "int4")
    # 32 queries after 96 tokens, then 32 after 128.
    keys = sum(96 + i for i in range(1, 33)) + sum(128 + i for i in range(1, 33))
    assert int8.result.quantized_reads == 32 * (96 + 128) / keys
    assert int4.result.quantized_reads == 32 * (92 + 124) / keys
    assert exact.result.quantized_mass == 0.0
    assert int8.result.quantized_mass is not None and 0.8 < int8.result.quantized_mass < 1
    assert detail(int8, "reads") == (
        f"{int8.result.quantized_reads:.1%} of the keys read are codes, "
        f"{int8.result.quantized_mass:.1%} of attention"
    )


def test_where_attention_gives_no_weights(tiny_once: Callable[..., Any]) -> None:
    (found,) = check(tiny_once("gemma3n_text"), "int8")
    assert found.result.quantized_mass is None
    assert detail(found, "reads").endswith("of the keys read are codes")


def test_the_same_seed_gives_the_same(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    one, again, other = (check(model, "int4", seed=seed)[0] for seed in (3, 3, 4))
    assert one == again
    assert one.result.poison != other.result.poison
    assert one.result.clean == other.result.clean


def test_progress_is_told_of_every_step(tiny_once: Callable[..., Any]) -> None:
    told: list[str] = []
    check(tiny_once("llama"), "none", progress=told.append)
    assert told == ["reading", "poison", "attention", "padding", "windows"]
    assert len(told) == STEPS


def test_the_model_is_left_as_it_was(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    before = model.config._attn_implementation
    check(model, "none")
    assert model.config._attn_implementation == before
    check(model, "int8")
    assert model.config._attn_implementation == "kvquant"
    assert not any(module.training for module in model.modules())


# ---------------------------------------------------------------------------- Transformers' caches


@pytest.mark.parametrize("name", [pytest.param("hf:fp8", marks=needs_fp8), "hf:quanto", "hf:hqq"])
def test_transformers_caches(tiny_once: Callable[..., Any], name: str) -> None:
    (found,) = check(tiny_once("llama", head_dim=64), name)
    assert statuses(found) == {
        "reads": "passed",
        "poison": "passed",
        "floor": "passed",
        "bytes": "noted",
        "padding": "passed",
        "numbers": "passed",
    }
    assert detail(found, "bytes").endswith("bytes; there is no formula")
    assert found.record.expected_nbytes is None
    assert found.record.kernel == "Transformers' attention, on dequantized tokens"


@needs_fp8
def test_transformers_fp8_reads_new_tokens_from_codes_too(tiny_once: Callable[..., Any]) -> None:
    (found,) = check(tiny_once("llama"), "hf:fp8")
    assert found.result.quantized_reads == 1.0
    assert found.result.quantized_mass == pytest.approx(1.0)


# ------------------------------------------------------------------------------ what there can be


class OneKeyShort(QuantizedCache):
    """Promises as many keys as Transformers' cache, and reads the oldest of them not."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        found = super().update(*args, **kwargs)
        return tuple(states[:, :, 1:] for states in found)


def test_windows_are_looked_at_without_a_forward_pass(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("mistral")
    reader = Reader(model)
    assert window_faults(reader, lambda: QuantizedCache.from_model(model, "int8")) == []
    short = window_faults(reader, lambda: OneKeyShort.from_model(model, "int8"))
    # A window of 8, given 7 tokens and then one more: 7, then 8 keys in Transformers' cache.
    assert short is not None
    assert short[0] == "layer 0 reads 6 keys where Transformers' cache has 7"
    assert "layer 1 reads 7 keys where Transformers' cache has 8" in short
    llama = tiny_once("llama")
    assert window_faults(Reader(llama), lambda: QuantizedCache.from_model(llama, "int8")) is None


def test_a_residual_that_covers_everything(tiny_once: Callable[..., Any]) -> None:
    (found,) = check(tiny_once("mistral"), "int4-kivi")
    assert statuses(found)["reads"] == "failed"
    assert statuses(found)["poison"] == "noted"
    assert found.result.failures == (found.result.checks[0],)
    assert "0.0% of the keys read are codes, 0.0% of attention" in detail(found, "reads")
    assert "Read longer documents, or keep fewer exact tokens" in detail(found, "reads")


def test_a_model_that_is_noisy_itself(sharp: Callable[..., Any]) -> None:
    """With dropout, no difference of the arm's can be told from the model's own."""
    model = sharp(attention_dropout=0.1)
    model.train()
    torch.manual_seed(0)
    found = check(model, "int8", "int4")
    assert all(statuses(it)["floor"] == "failed" for it in found), found
    assert "the model's own noise hides the difference" in detail(found[0], "floor")
    assert found[0].result.floor > 0.01


def test_an_exact_cache_that_is_not(sharp: Callable[..., Any]) -> None:
    """Noise that changes what an exact scheme predicts: it keeps codes after all."""
    model = sharp()
    coded = arm(lambda: QuantizedCache.from_model(model, "int8"), preset("none"))
    (found,) = check(model, coded)
    assert statuses(found)["poison"] == "failed"
    assert "there are no codes" in detail(found, "poison")


def scales_of(model: Any) -> KVScales:
    slot = TensorScheme(tensor_format("int8"), Granularity.PER_TENSOR)
    stats = collect(model, [IDS.tolist()], Reader(model).geometry)
    provenance = Provenance(fingerprints=(fingerprint(model),))
    return replace(solve(stats, QuantScheme(slot, slot)), provenance=provenance)


@pytest.mark.parametrize(
    ("foreign", "told", "expected"),
    [(False, False, "passed"), (True, False, "failed"), (True, True, "noted")],
)
def test_whose_scales(tiny: Callable[..., Any], foreign: bool, told: bool, expected: str) -> None:
    model = tiny("llama")
    scales = scales_of(model)
    if foreign:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    made = replace(
        arm(lambda: QuantizedCache.from_model(model, scales=scales, force=True), scales.scheme),
        foreign=told,
    )
    made = replace(made, arm=replace(made.arm, scales=scales))
    (found,) = check(model, made)
    assert statuses(found)["scales"] == expected
    assert found.record.foreign is told
    assert found.record.scales_origin == scales.provenance.origin
    assert (detail(found, "scales").startswith("as asked for: ")) is told
    if expected == "passed":
        assert detail(found, "scales") == f"measured on {scales.provenance.origin}"


class RefusesPadding(QuantizedCache):
    """Takes no padded rows."""

    def begin_call(self, call: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        mask = call.get("attention_mask")
        if mask is not None and not bool(mask.bool().all()):
            raise InputError("no padding here\nand more")
        super().begin_call(call, *args, **kwargs)


def test_an_arm_of_ours_that_refuses_padding(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    refusing = arm(lambda: RefusesPadding.from_model(model, "int8"))
    found, other = check(model, refusing, "int4")
    assert found.result.failures == (found.result.checks[-2],)
    assert detail(found, "padding") == ("a padded batch is refused (InputError: no padding here)")
    assert statuses(other)["padding"] == "passed"  # one that fails does not take others along


def test_a_model_that_takes_no_padded_batch(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(mask.bool().all()):
            raise ValueError("left-padded")

    model.model.register_forward_pre_hook(refuse, with_kwargs=True)
    (found,) = check(model, "int8")
    assert statuses(found)["padding"] == "noted"
    assert detail(found, "padding") == ("the model takes no padded batch (ValueError: left-padded)")


def test_numbers_are_finite(tiny_once: Callable[..., Any]) -> None:
    (found,) = check(tiny_once("llama"), "int3")
    worst = max(max(pair) for pair in found.record.layer_errors.values())
    assert math.isfinite(worst)
    assert detail(found, "numbers") == f"read back within {worst:.2%} in the worst layer"
