"""The classic faults, planted into a cache: self-check or gate catches each and says which it is.

Structural faults (a window off by one, padding taken for text, another model's scales, codes that
nobody reads) are the self-check's. Faults of scales leave a cache that is what it says it is: only
what it does to predictions tells, which is the gate's.

Models have random weights of unit gain, so that predictions hang on attention and attention on the
cache; nothing else is done for a fault to show.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from calib.collect import collect
from calib.solve import solve
from evals.arms import ArmRequest, BoundArm, EvalArm
from evals.gate import judge
from evals.gate_file import Gate
from evals.perplexity import score_document
from evals.reading import Reader
from evals.results import EvalReport, GateLine, Origin, Perplexity, SelfCheck
from evals.selfcheck import Checked, self_check
from evals.statistics import Scores, divergence
from evals.windows import spans
from kvquant import KVScales, QuantizedCache
from kvquant.fingerprint import fingerprint
from kvquant.models.loading import LoadedModel, load, make_local, resolve
from kvquant.presets import preset
from kvquant.provenance import Provenance
from kvquant.scales import LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.text.corpus import read_rows, token_blocks

Make = Callable[[], Any]

LENGTH, PREFILL, BLOCK = 160, 64, 32
GATE = Gate(
    "the test's gate",
    # Limits of KL and perplexity are the defaults. Favourites of a small or random model are close
    # to ties, and there are too few documents for the last tenth of a percent.
    classes={
        "8-bit": {"top1": 0.9, "top1_confident": 0.9, "delta_ln_ppl": 0.01, "delta_p_rms": 0.02}
    },
)


def documents(count: int, seed: int) -> list[np.ndarray[Any, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (LENGTH,), generator=generator).numpy() for _ in range(count)]


@pytest.fixture(scope="module")
def sharp(tiny: Callable[..., Any]) -> Callable[..., Any]:
    """``sharp(name, **config)``: a tiny model whose weights have unit gain."""

    def build(name: str, **config: Any) -> Any:
        model, generator = tiny(name, **config), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for place, weight in model.named_parameters():
                if weight.dim() == 2:
                    gain = 1.0 if "embed" in place else weight.shape[1] ** -0.5
                    weight.copy_(gain * torch.randn(weight.shape, generator=generator))
            model.get_output_embeddings().weight.mul_(3)
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(2)
        return model

    return build


def arm(
    name: str, make: Make, scheme: QuantScheme | None = None, scales: KVScales | None = None
) -> BoundArm:
    """What `bind` would make of it, had it looked at nothing."""
    return BoundArm(EvalArm(ArmRequest(name), scales, scheme or preset("int8")), make)


# ------------------------------------------------------------------ structural: the self-check's


def checked(model: Any, arms: Sequence[BoundArm], tokens: int = LENGTH + 1) -> list[Checked]:
    (ids,) = documents(1, seed=1)
    ids = np.resize(ids, tokens)
    read = spans(tokens, 96, BLOCK)
    return list(self_check(Reader(model), arms, ids, read, served=fingerprint(model)))


def failures(found: SelfCheck) -> dict[str, str]:
    return {check.name: check.detail for check in found.failures}


def statuses(model: Any, make: Make, scheme: QuantScheme | None = None) -> dict[str, str]:
    (found,) = checked(model, [arm("planted", make, scheme)])
    return {check.name: check.status for check in found.result.checks}


def failed(model: Any, make: Make, scheme: QuantScheme | None = None) -> dict[str, str]:
    (found,) = checked(model, [arm("planted", make, scheme)])
    return failures(found.result)


SCHEMES = {
    "int8": preset("int8"),
    "int4": preset("int4"),
    "int4-kivi": preset("int4-kivi", group_size=8, residual_length=16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_clean_cache_passes_everything(
    sharp: Callable[..., Any], scheme: str, dtype: torch.dtype
) -> None:
    model = sharp("gemma2").to(dtype)
    found = statuses(model, lambda: QuantizedCache.from_model(model, SCHEMES[scheme]))
    names = ("reads", "poison", "floor", "bytes", "window", "padding", "numbers")
    assert found == dict.fromkeys(names, "passed")


def with_window_off_by(model: Any, by: int) -> QuantizedCache:
    cache = QuantizedCache.from_model(model, "int8")
    for layer in cache.layers:
        if layer.geometry.window is not None:
            layer.geometry = replace(layer.geometry, window=layer.geometry.window + by)
    return cache


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_window_off_by_one(sharp: Callable[..., Any], name: str, by: int) -> None:
    model = sharp(name)
    found = failed(model, lambda: with_window_off_by(model, by))
    # Its bytes are those of another window: that is seen as well, and nothing else.
    assert found.keys() == {"window", "bytes"}, found
    saw = "7 tokens from slot 1 on, Transformers' cache 8 from 0"
    if by > 0:
        saw = "9 tokens from slot 0 on, Transformers' cache 8 from 1"
    assert f"layer 0 sees {saw}" in found["window"]


def with_padding_as_text(model: Any, scheme: QuantScheme) -> QuantizedCache:
    """A ledger that is told of no padding, as if the hook passed on token ids alone."""
    cache = QuantizedCache.from_model(model, scheme)
    begin = cache.begin_call

    def blind(call: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        begin({"input_ids": call.get("input_ids")}, *args, **kwargs)

    cache.begin_call = blind  # type: ignore[method-assign]
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int4", "int4-kivi"])
def test_left_padding_that_shifts_sinks_or_groups(
    sharp: Callable[..., Any], scheme: str, dtype: torch.dtype
) -> None:
    model = sharp("gemma2").to(dtype)
    found = failed(model, lambda: with_padding_as_text(model, SCHEMES[scheme]))
    assert found.keys() == {"padding"}, found
    assert "padding changes what is stored of the tokens beside it" in found["padding"]


class ShiftedRows(QuantizedCache):
    """Gives the first row of a batch one slot late."""

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        found = super().update(keys, values, layer_idx, *args, **kwargs)
        if len(keys) == 1:
            return found
        found = tuple(states[:, :, :].clone() for states in found)
        for states in found:
            states[0] = states[0].roll(1, dims=1)
        return found


class Unmasked(QuantizedCache):
    """Knows about padding, but lets attention see the empty slots."""

    def begin_call(self, call: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().begin_call(dict(call), *args, **kwargs)
        if "attention_mask" in call:
            call["attention_mask"] = None


@pytest.mark.parametrize(
    ("kind", "saw"),
    [(ShiftedRows, "layer 0 reads a token of a padded row"), (Unmasked, "KL .* of a padded row")],
)
def test_padded_rows_that_are_shifted_or_not_masked(
    sharp: Callable[..., Any], kind: type[QuantizedCache], saw: str
) -> None:
    model = sharp("llama")
    found = failed(model, lambda: kind.from_model(model, "int8", attention="dequantize"))
    assert found.keys() == {"padding"}, found
    assert re.search(saw, found["padding"]), found


def scales_of(model: Any, texts: Sequence[Any], format_name: str = "int8") -> KVScales:
    """Static scales a tensor, the model's fingerprint in them."""
    slot = TensorScheme(tensor_format(format_name), Granularity.PER_TENSOR)
    stats = collect(model, [text.tolist() for text in texts], Reader(model).geometry)
    provenance = Provenance(fingerprints=(fingerprint(model),))
    return replace(solve(stats, QuantScheme(slot, slot)), provenance=provenance)


def test_scales_of_another_model(sharp: Callable[..., Any]) -> None:
    model, other = sharp("llama"), sharp("llama")
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    found = {}
    for name, owner in {"own": model, "foreign": other}.items():
        scales = scales_of(owner, documents(2, seed=2))
        make = lambda scales=scales: QuantizedCache.from_model(model, scales=scales, force=True)  # noqa: E731
        (result,) = checked(model, [arm(name, make, scales.scheme, scales)])
        found[name] = failures(result.result)
    assert found["own"] == {}
    assert found["foreign"].keys() == {"scales"}, found
    assert "weights differ" in found["foreign"]["scales"]


class NeverRead(QuantizedCache):
    """Stores codes, and hands attention what it was given."""

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        super().update(keys, values, layer_idx, *args, **kwargs)
        if not hasattr(self, "exact"):
            self.exact = DynamicCache(config=self.plan.decoder.config)
        return self.exact.update(keys, values, layer_idx)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_quantized_part_that_is_never_read(
    sharp: Callable[..., Any], name: str, scheme: str
) -> None:
    model = sharp(name)
    found = failed(model, lambda: NeverRead.from_model(model, SCHEMES[scheme]))
    assert found.keys() == {"poison"}, found
    assert "the codes are not what the model reads" in found["poison"]


def test_more_exact_tokens_than_the_scheme_says(sharp: Callable[..., Any]) -> None:
    model = sharp("llama")

    def make() -> QuantizedCache:
        cache = QuantizedCache.from_model(model, "int8")
        for layer in cache.layers:
            layer.scheme = replace(layer.scheme, residual_length=16)
        return cache

    found = failed(model, make)
    assert found.keys() == {"bytes"}, found
    assert "the cache does not keep what its scheme says" in found["bytes"]


def test_codes_that_read_back_as_no_numbers(sharp: Callable[..., Any]) -> None:
    model = sharp("llama")

    def make() -> QuantizedCache:
        cache = QuantizedCache.from_model(model, "int8")
        update = cache.update

        def broken(keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            keys, values = update(keys, values, layer_idx, *args, **kwargs)
            if layer_idx == 1 and keys.shape[2] > 96:
                values = values[:, :, :].clone()
                values[:, :, 7] = torch.nan
            return keys, values

        cache.update = broken  # type: ignore[method-assign]
        return cache

    found = failed(model, make)
    assert found["numbers"] == "layers 1 read back no numbers"


# ------------------------------------------------------------------------ scales: the gate's


def report(
    model: Any, arms: Sequence[BoundArm], texts: Sequence[Any], prefill: int, block: int
) -> EvalReport:
    """An evaluation without needles, as the runner makes it."""
    reader = Reader(model)
    parts: dict[str, list[Scores]] = {it.name: [] for it in arms}
    for number, ids in enumerate(texts):
        found = score_document(
            reader,
            ids,
            spans(len(ids), prefill, block),
            reader.reference(),
            {it.name: it.make() for it in arms},
            document=number,
        )
        for name, scores in found.items():
            parts[name].append(scores)
    first = texts[0]
    results = self_check(
        reader, arms, first, spans(len(first), prefill, block), served=fingerprint(model)
    )
    joined = {name: Scores.join(it) for name, it in parts.items()}
    reference = next(iter(joined.values())).nll_reference
    return EvalReport(
        origin=Origin("m", "m", (), "", 0, "float32", "cpu", 0, (len(first),), {}, {}, "", ""),
        arms=tuple(it.record for it in results),
        self_checks=tuple(it.result for it in results),
        perplexity=Perplexity(
            documents=len(texts),
            document_tokens=len(first),
            prefill=prefill,
            block=block,
            scored_tokens=len(reference),
            reference_nll=float(reference.mean()),
            corpus={},
            arms={name: divergence(it, seed=0) for name, it in joined.items()},
        ),
    )


def with_scales(
    scales: KVScales, change: Callable[[LayerScales], tuple[torch.Tensor, torch.Tensor]]
) -> KVScales:
    """Other scales for keys and values of each layer."""

    def changed(slot: TensorScales, scale: torch.Tensor) -> TensorScales:
        return replace(slot, scale=scale)

    layers = {
        index: LayerScales(*map(changed, (layer.key, layer.value), change(layer)))
        for index, layer in scales.layers.items()
    }
    return replace(scales, layers=layers)


def swapped(scales: KVScales) -> KVScales:
    return with_scales(scales, lambda layer: (layer.value.scale, layer.key.scale))


def all_one(scales: KVScales) -> KVScales:
    one = torch.ones(1, 1)
    return with_scales(scales, lambda layer: (one, one))


def arms_with(model: Any, sets: Mapping[str, KVScales]) -> list[BoundArm]:
    def make(scales: KVScales) -> Make:
        return lambda: QuantizedCache.from_model(model, scales=scales, force=True)

    return [arm(name, make(it), it.scheme, it) for name, it in sets.items()]


@pytest.fixture(scope="module")
def static_int8(sharp: Callable[..., Any]) -> EvalReport:
    """Static int8, right and wrong, and int8 that computes its own scales.

    Keys are four times as large as values (and queries a fourth of what they were, so that it is
    the same model), as in any model they are not alike.
    """
    model = sharp("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(4)
            layer.self_attn.q_proj.weight.div_(4)
    good = scales_of(model, documents(8, seed=2))
    sets = {
        "calibrated": good,
        "swapped": swapped(good),
        "one": all_one(good),
        "frozen": scales_of(model, [documents(1, seed=3)[0][:3]]),
    }
    arms = arms_with(model, sets)
    arms.append(arm("int8", lambda: QuantizedCache.from_model(model, "int8")))
    return report(model, arms, documents(16, seed=1), PREFILL, BLOCK)


def judged(found: EvalReport, name: str) -> dict[str, GateLine]:
    return {line.name: line for line in judge(found, GATE).lines if line.arm == name}


def shown(found: EvalReport, name: str) -> str:
    """What was measured, for a message."""
    lines = [f"{it.name} {it.status}: {it.detail}" for it in judged(found, name).values()]
    checks = [str(check) for it in found.self_checks if it.arm == name for check in it.failures]
    return "\n".join([name, *lines, *checks])


def assert_passes(found: EvalReport, name: str) -> None:
    assert judge(found, GATE).passed_by(name), shown(found, name)


def assert_drifts(found: EvalReport, name: str) -> None:
    """The gate says that predictions have drifted, and the self-check that the cache is read."""
    assert judged(found, name)["kl_mean"].status == "failed", shown(found, name)
    assert judged(found, name)["kl_p99"].status == "failed", shown(found, name)
    assert not judge(found, GATE).passed_by(name)
    (checks,) = (it for it in found.self_checks if it.arm == name)
    assert failures(checks).keys() <= {"poison"}, shown(found, name)


@pytest.mark.parametrize("name", ["calibrated", "int8"])
def test_a_clean_int8_passes_gate_and_self_check(static_int8: EvalReport, name: str) -> None:
    assert_passes(static_int8, name)
    assert failures(next(it for it in static_int8.self_checks if it.arm == name)) == {}


@pytest.mark.parametrize("name", ["swapped", "frozen", "one"])
def test_wrong_scales_of_int8(static_int8: EvalReport, name: str) -> None:
    """Of values for keys and the other way round; of the first prompt alone; 1.0."""
    assert_drifts(static_int8, name)


def rescaled(model: Any) -> Any:
    """The same function: values 4,096 times smaller, and what reads them so much larger."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(2.0**-12)
            layer.self_attn.o_proj.weight.mul_(2.0**12)
    return model


@pytest.fixture(scope="module")
def rescaled_fp8(sharp: Callable[..., Any]) -> EvalReport:
    model = rescaled(sharp("llama"))
    scales = scales_of(model, documents(8, seed=2), "fp8")
    arms = arms_with(model, {"calibrated": scales, "one": all_one(scales)})
    return report(model, arms, documents(16, seed=1), PREFILL, BLOCK)


def test_fp8_at_scale_one_loses_small_values(rescaled_fp8: EvalReport) -> None:
    assert_drifts(rescaled_fp8, "one")
    assert_passes(rescaled_fp8, "calibrated")


def quiet(message: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load(make_local(resolve("smollm2"), quiet), device="cpu", notify=quiet)


@pytest.mark.real_model
def test_fp8_at_scale_one_on_rescaled_smollm2(smollm2: LoadedModel) -> None:
    model, rows = rescaled(smollm2.model), read_rows(None, notify=quiet)
    blocks = token_blocks(rows, smollm2.tokenizer, context_length=192, samples=8).blocks
    scales = scales_of(model, blocks[6:], "fp8")
    arms = arms_with(model, {"calibrated": scales, "one": all_one(scales)})
    found = report(model, arms, blocks[:6], prefill=128, block=63)
    assert_drifts(found, "one")
    assert_passes(found, "calibrated")
