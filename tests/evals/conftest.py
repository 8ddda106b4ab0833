"""A report as a real run leaves it: good arms, a bad one, another model's scales, hostile text."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from evals.results import (
    Answer,
    Arm,
    Bucket,
    Cell,
    Check,
    Continuation,
    Divergence,
    EvalReport,
    GateLine,
    Interval,
    Losses,
    Origin,
    Perplexity,
    Retrieval,
    SelfCheck,
    Verdict,
)

ARMS = ("int8", "int4@ft-scales", "int4@base-scales", "int3", "hf:quanto")
HOSTILE = (
    "<script>alert('no')</script>",
    "**bold** _md_ | `code` | [link](http://example.com/x)",
    "\x1b[31mred\x1b[0m\x00\x07",
    "abc\u202etxt.exe",
    "Zürich 東京 🚀 שלום",
    "half a pair \ud83d",
    "</td></table><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }} {% raw %}",
)
_LENGTHS, _DEPTHS, _TRIALS = (512, 1024, 2048), (0, 25, 50, 75, 100), 4
_KL = dict(zip(ARMS, (0.00041, 0.0083, 0.0241, 0.193, 0.0122), strict=True))
_LOSS = dict(zip(ARMS, (0.0, 0.0, 0.06, 0.45, 0.0), strict=True))
_BITS = dict(zip(ARMS, (8.25, 4.62, 4.62, 3.63, 5.91), strict=True))
_LAYERS = 30


def _origin() -> Origin:
    return Origin(
        model="/models/ft-model",
        title="SmolLM2-135M-Instruct + support-lora",
        adapters=("/models/ft-model",),
        fingerprint="weights 7f3a91c2d4e5, adapter support-lora 19c0de77, tokenizer 5be1",
        parameters=134_515_008,
        dtype="float32",
        device="cpu",
        seed=0,
        lengths=_LENGTHS,
        settings={"block": 64, "documents": 8, "tasks": ["single", "multikey"], "chunk": None},
        versions={"kvquant": "0.4.0", "torch": "2.13.0", "transformers": "5.24.0"},
        command="kvquant evaluate --model ft-model --scheme int8 --lengths 512,1k,2k --force",
        created="2026-03-14T09:26:53Z",
    )


def _arms() -> Iterator[Arm]:
    wording = "K {0} per-token asymmetric, V {0} per-token asymmetric, first 4 tokens exact"
    reference = 2048 * 30 * 2 * 3 * 64 * 2
    for name in ARMS:
        live = round(reference * _BITS[name] / 16)
        file = name.partition("@")[2] or None
        base = name == "int4@base-scales"
        yield Arm(
            name=name,
            scheme="quanto int4, groups of 64" if name == "hf:quanto" else wording.format(name[:4]),
            scheme_class={"int8": "8-bit", "int3": "3-bit"}.get(name, "4-bit"),
            scales=file and f"scales/{file}.safetensors",
            scales_origin=file
            and ("SmolLM2-135M-Instruct, 7f3a91c2d4e5" if base else "support-lora, 19c0de77"),
            foreign=base,
            kernel="dequantized, then SDPA" if name == "hf:quanto" else "numba, 8 lanes",
            tokens=2048,
            live_nbytes=live,
            expected_nbytes=None if name == "hf:quanto" else live,
            reference_nbytes=reference,
            bits_per_value=_BITS[name],
            layer_errors=_layer_errors(name),
        )


def _layer_errors(name: str) -> dict[str, tuple[float, float]]:
    chance = random.Random(name)
    level = 2.0 ** (7 - _BITS[name]) * 0.05
    return {
        str(layer): (
            level * chance.uniform(0.5, 1.0) * (4.0 if layer in (0, 29) else 1.0),
            level * chance.uniform(0.4, 0.6),
        )
        for layer in range(_LAYERS)
    }


def _self_check(arm: str) -> SelfCheck:
    read = Check("reads", "passed", "97.3 % of the key reads were of codes")
    size = Check("bytes", "passed", "as many as the formula says")
    if arm == "hf:quanto":
        size = Check("bytes", "noted", "there is no formula for a cache of Transformers")
    poison = Check("poison", "passed", "noise in place of codes wrecks the score")
    return SelfCheck(arm, (read, size, poison), 0.973, 0.814, 1.1e-9, 6.31, _KL[arm])


def _divergence(arm: str) -> Divergence:
    kl = _KL[arm]
    edges = [(64, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048)]
    growth = 0.35 if arm == "int3" else 0.04
    agreement = 1 - 0.42 * math.sqrt(kl)
    return Divergence(
        nll=2.8134 + 0.9 * kl,
        delta_ln_ppl=Interval(0.9 * kl, 0.7 * kl, 1.15 * kl),
        kl_mean=Interval(kl, 0.87 * kl, 1.16 * kl),
        kl_median=0.31 * kl,
        kl_p99=9.4 * kl,
        kl_max=77 * kl,
        buckets=tuple(
            Bucket(low, high, (high - low) * 8, kl * (1 + growth * step) * 0.8)
            for step, (low, high) in enumerate(edges)
        ),
        kl_slope=Interval(kl * growth * 0.8, kl * growth * 0.3, kl * growth * 1.4),
        top1=Interval(agreement, agreement - 0.004, agreement + 0.003),
        top1_confident=Interval(1 - 0.1 * kl, 1 - 0.3 * kl, 1 - 0.02 * kl),
        confident_tokens=6021,
        delta_p_rms=0.18 * math.sqrt(kl),
    )


def _perplexity() -> Perplexity:
    corpus = {
        "source": "default text",
        "rows": 8,
        "tokens": 16384,
        "sha256": "c0ffee" * 10 + "c0ff",
    }
    arms = {arm: _divergence(arm) for arm in ARMS}
    return Perplexity(8, 2048, 64, 64, 15872, 2.8134, corpus, arms)


def _cells() -> Iterator[Cell]:
    chance = random.Random(0)
    for task, share in (("single", 1.0), ("multikey", 0.7)):
        for length in _LENGTHS:
            for depth in _DEPTHS:
                for trial in range(_TRIALS):
                    secret = str(chance.randrange(10**6, 10**7))
                    # One corner is beyond the model itself.
                    able = (length, depth) != (2048, 25) or task == "single"
                    found = able and chance.random() < 0.9 + 0.1 * share
                    right = f"The special number is {secret}."
                    wrong = f"It is {chance.choice(HOSTILE)} {secret[:3]}"
                    reference = Answer(right, 1.0) if found else Answer("I do not know.", 0.0)
                    arms = {}
                    for arm in ARMS:
                        lost = found and chance.random() < _LOSS[arm] * length / 1024
                        arms[arm] = Answer(wrong, 0.0) if lost else reference
                    yield Cell(task, length, depth, trial, (secret,), reference, arms)


def _losses(cells: tuple[Cell, ...]) -> Iterator[Losses]:
    for arm in ARMS:
        for task in ("single", "multikey"):
            for length in _LENGTHS:
                chosen = [it for it in cells if it.task == task and it.length == length]
                trials = [it for it in chosen if it.reference.is_right]
                lost = sum(not it.arms[arm].is_right for it in trials)
                upper = 1 - 0.05 ** (1 / max(len(trials), 1)) if not lost else 0.6
                p_value = 0.5**lost
                yield Losses(arm, task, length, len(chosen), len(trials), lost, 0, upper, p_value)


def _continuations() -> tuple[Continuation, ...]:
    text = (
        "The customer wrote twice about the invoice.\n\n1. Check the order.\n2. Reply <politely>."
    )
    texts = {
        "int8": text,
        "int4@ft-scales": text.replace("2. Reply", "2. Answer"),
        "int4@base-scales": text.replace("invoice", "receipt, \x1b[1mand") + " 東京",
        "int3": "The the the the & the <b>the</b> the the the the the",
        "hf:quanto": text.replace("twice", "two times"),
    }
    first = dict(zip(ARMS, (None, 14, 7, 1, 3), strict=True))
    agreement = dict(zip(ARMS, (1.0, 0.81, 0.42, 0.06, 0.34), strict=True))
    return (Continuation(512, 32, text, texts, first, agreement),)


_REMEDY = "scales of this very model, more exact tokens or more bits help"


def _verdict(losses: tuple[Losses, ...]) -> Verdict:
    lines = []
    for arm in ARMS:
        lines.append(_line(arm, "delta_ln_ppl", 0.9 * _KL[arm], 0.0198))
        lines.append(_line(arm, "kl_mean", _KL[arm], 0.02))
        lines.append(_line(arm, "kl_p99", _KL[arm] * 9.4, 0.2))
        lines.extend(_loss_line(arm, length, losses) for length in _LENGTHS)
    return Verdict("defaults", tuple(lines))


def _line(arm: str, name: str, value: float, limit: float) -> GateLine:
    failed = value > limit
    detail = f"{value:.3g}, at most {limit:.3g}" + (f": {_REMEDY}" if failed else "")
    return GateLine(arm, name, value, limit, "failed" if failed else "passed", detail)


def _loss_line(arm: str, length: int, losses: tuple[Losses, ...]) -> GateLine:
    here = [it for it in losses if (it.arm, it.length) == (arm, length)]
    lost, trials = sum(it.losses for it in here), sum(it.trials for it in here)
    name, seen = f"loss_rate {length}", f"{lost} of {trials} right answers lost"
    if arm == "hf:quanto":
        detail = (
            f"not enough trials: {trials} of 59 needed to show at most 5.00 % ({seen}; those "
            "count that the unquantized cache gets right)"
        )
        return GateLine(arm, name, 0.0802, 0.05, "undecided", detail)
    if lost:
        detail = f"{seen}, {lost / trials:.2%}, at most 5.00 %: {_REMEDY}"
        return GateLine(arm, name, 0.6, 0.05, "failed", detail)
    return GateLine(arm, name, 0.048, 0.05, "passed", f"{seen}, so at most 4.80 % are (95 %)")


@pytest.fixture(scope="session")
def eval_report() -> EvalReport:
    """Five arms: one good, one fair, one with the base's scales, one bad, one undecided."""
    cells = tuple(_cells())
    losses = tuple(_losses(cells))
    return EvalReport(
        origin=_origin(),
        arms=tuple(_arms()),
        self_checks=tuple(map(_self_check, ARMS)),
        perplexity=_perplexity(),
        retrieval=Retrieval("default text", "beef" * 16, False, 16, cells, losses),
        continuations=_continuations(),
        verdict=_verdict(losses),
    )
