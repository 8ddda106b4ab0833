"""G2, huggingface/transformers#35185 and ggml-org/llama.cpp#21385: the evaluation's half.

The stock int4 cache took Qwen2.5 from 98 right answers of 120 to none, and left Mistral as it was:
nobody had measured. The gate tells a scheme that minds the outlier from one that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from calib.collect import collect
from calib.solve import solve
from evals.arms import ArmRequest, BoundArm, EvalArm
from evals.gate import judge
from evals.gate_file import Gate
from evals.perplexity import score_document
from evals.reading import Reader
from evals.results import Arm, EvalReport, GateLine, Origin, Perplexity
from evals.selfcheck import self_check
from evals.statistics import Scores, divergence
from evals.windows import spans
from kvquant import QuantizedCache
from kvquant.fingerprint import fingerprint
from kvquant.presets import preset
from kvquant.provenance import Provenance
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

LENGTH, PREFILL, BLOCK, DOCUMENTS = 128, 64, 32, 8
PLAIN = preset("int4-kivi").value
"""int4, a scale and a middle for each token, and nothing that sees the outlier coming."""
GATE = Gate(
    "the case's gate",
    classes={"4-bit": {"top1": 0.9, "top1_confident": 0.9, "delta_ln_ppl": None}},
)
"""KL as by default. To a model with random weights random text is equally unlikely whatever it
attends to, and its favourites are close to ties."""


def texts(count: int, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (LENGTH,), generator=generator).numpy() for _ in range(count)]


def with_outlier(model: Any, pair: int | None) -> Any:
    """A key bias from N(0, 0.1), with one rotary pair at 100 times its RMS or as drawn."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias.copy_(0.1 * torch.randn(bias.shape, generator=generator))
            if pair is not None:
                both = [pair, pair + model.config.head_dim // 2]
                bias[both] *= 100 * bias.square().mean().sqrt() / bias[both].square().mean().sqrt()
            # A random model attends almost evenly, whatever its keys are, and favours no token.
            layer.self_attn.q_proj.weight.mul_(8)
        model.lm_head.weight.mul_(40)
    return model


def arms_of(model: Any) -> list[BoundArm]:
    fp8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    stats = collect(model, [it.tolist() for it in texts(8, seed=2)], Reader(model).geometry)
    provenance = Provenance(fingerprints=(fingerprint(model),))
    scales = replace(solve(stats, QuantScheme(fp8, fp8)), provenance=provenance)
    makers: dict[str, tuple[QuantScheme, Callable[[], Any]]] = {
        "int4@scales": (
            preset("int4"),
            lambda: QuantizedCache.from_model(model, "int4", scales, force=True),
        ),
        "plain int4": (
            QuantScheme(PLAIN, PLAIN),
            lambda: QuantizedCache.from_model(model, QuantScheme(PLAIN, PLAIN)),
        ),
    }
    return [
        BoundArm(EvalArm(ArmRequest(name), None, scheme), make)
        for name, (scheme, make) in makers.items()
    ]


def judged(model: Any) -> dict[str, dict[str, GateLine]]:
    """Lines of the gate by arm and name."""
    reader, arms = Reader(model), arms_of(model)
    parts: dict[str, list[Scores]] = {it.name: [] for it in arms}
    for number, ids in enumerate(texts(DOCUMENTS, seed=1)):
        caches = {it.name: it.make() for it in arms}
        read = spans(LENGTH, PREFILL, BLOCK)
        found = score_document(reader, ids, read, reader.reference(), caches, document=number)
        for name, scores in found.items():
            parts[name].append(scores)
    report = EvalReport(
        origin=Origin("m", "m", (), "", 0, "float32", "cpu", 0, (LENGTH,), {}, {}, "", ""),
        arms=tuple(Arm(it.name, it.arm.description, it.arm.scheme_class) for it in arms),
        perplexity=Perplexity(
            documents=DOCUMENTS,
            document_tokens=LENGTH,
            prefill=PREFILL,
            block=BLOCK,
            scored_tokens=DOCUMENTS * (LENGTH - PREFILL - 1),
            reference_nll=0.0,
            corpus={},
            arms={name: divergence(Scores.join(it), seed=0) for name, it in parts.items()},
        ),
    )
    lines = judge(report, GATE).lines
    return {arm.name: {it.name: it for it in lines if it.arm == arm.name} for arm in arms}


@pytest.mark.parametrize("pair", [0, 3, 7])
def test_the_gate_flags_what_minds_the_outlier(tiny: Callable[..., Any], pair: int) -> None:
    """Whether its pair turns by 1, 0.03 or 0.0003 rad a token."""
    found = judged(with_outlier(tiny("qwen2"), pair))
    shown = {
        arm: [f"{it.name}: {it.detail}" for it in lines.values()] for arm, lines in found.items()
    }
    assert {it.status for it in found["int4@scales"].values()} == {"passed"}, shown
    assert found["plain int4"]["kl_mean"].status == "failed", shown
    assert found["plain int4"]["kl_p99"].status == "failed", shown


def test_without_it_both_pass(tiny: Callable[..., Any]) -> None:
    """So that it is the outlier that is flagged."""
    found = judged(with_outlier(tiny("qwen2"), None))
    for lines in found.values():
        assert {it.status for it in lines.values()} == {"passed"}, lines


def test_it_is_no_fault_of_the_cache(tiny: Callable[..., Any]) -> None:
    """The self-check has nothing against either: both are what they say they are."""
    model = with_outlier(tiny("qwen2"), 0)
    arms, (ids,) = arms_of(model), texts(1, seed=1)
    read = spans(LENGTH, PREFILL, BLOCK)
    for it in self_check(Reader(model), arms, ids, read, served=fingerprint(model)):
        assert it.result.failures == ()
