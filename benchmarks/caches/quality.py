"""How far each cache takes the model's predictions from those with an unquantized cache.

Teacher-forced in blocks of 64 tokens: a block is read exactly, everything before it through the
cache. Positions from 256 on are scored::

    block     0 … 63   64 … 127   …   256 … 319   …   1984 … 2047
    read      exact    from the cache: all blocks before
    scored                            x       x   …   x         x

The unquantized cache reads each block beside the others, so that no logits have to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from evals.held import live_nbytes

from .arms import REFERENCE, STOCK_FP8, STOCK_INT4, quality_arms
from .report import Limit, Row
from .setting import Setting, calibrate, read

TOKENS, BLOCK, SCORED_FROM = 2048, 64, 256


@dataclass
class Contestant:
    """A cache that takes part, and sums over the tokens scored so far.

    Attributes:
        cache: The cache.
        tokens: How many were scored.
        nll: Negative log-likelihood of the text, nats.
        divergence: KL(unquantized || this), nats.
        agreed: Tokens after which the likeliest one is that of the unquantized cache.
    """

    cache: Any
    tokens: int = 0
    nll: float = 0.0
    divergence: float = 0.0
    agreed: int = 0

    def score(self, logits: torch.Tensor, reference: torch.Tensor, target: torch.Tensor) -> None:
        """Adds a block.

        Args:
            logits: ``[tokens, vocabulary]``.
            reference: Log-probabilities with the unquantized cache, float64, likewise.
            target: What the text goes on with, ``[tokens]``.
        """
        found = logits.double().log_softmax(-1)
        self.tokens += len(target)
        self.nll -= float(found.gather(1, target[:, None]).sum())
        self.divergence += float((reference.exp() * (reference - found)).sum())
        self.agreed += int((found.argmax(-1) == reference.argmax(-1)).sum())

    @property
    def mean_divergence(self) -> float:
        """KL(unquantized || this), nats per token."""
        return self.divergence / self.tokens

    def bits(self, setting: Setting) -> float:
        """Bits per value that the tokens held need."""
        return 8 * live_nbytes(self.cache) / (TOKENS * setting.values_per_token)


Contestants = dict[str, Contestant]


def run(setting: Setting, notify: Callable[[str], None]) -> tuple[list[Row], list[Limit]]:
    """Calibrates on other tokens of the same text, then measures all caches."""
    notify("calibrating on 16,384 other tokens")
    scales = calibrate(setting, first=TOKENS + 1)
    made = quality_arms(setting.model, scales)
    everyone = measure(setting, {name: make() for name, make in made.items()}, notify)
    bits = {name: it.bits(setting) for name, it in everyone.items()}
    rows = [
        {
            "cache": name,
            "bits/value": f"{bits[name]:.3f}",
            "ppl": f"{math.exp(it.nll / it.tokens):.3f}",
            "KL, nats/token": f"{abs(it.mean_divergence):.5f}",
            "top-1, %": f"{100 * it.agreed / it.tokens:.2f}",
        }
        for name, it in everyone.items()
    ]
    return rows, limits({name: it.mean_divergence for name, it in everyone.items()}, bits)


def measure(
    setting: Setting, caches: Mapping[str, Any], notify: Callable[[str], None]
) -> Contestants:
    """Scores of all caches, empty when they come, and of an unquantized one."""
    everyone = {REFERENCE: Contestant(DynamicCache(config=setting.model.config))}
    everyone |= {name: Contestant(cache) for name, cache in caches.items()}
    for start in range(0, TOKENS, BLOCK):
        notify(
            f"tokens {start:,} to {start + BLOCK:,} of {TOKENS:,} through {len(everyone)} caches"
        )
        _read_block(setting, start, everyone)
    return everyone


def _read_block(setting: Setting, start: int, everyone: Contestants) -> None:
    block = setting.tokens[start : start + BLOCK]
    target = setting.tokens[start + 1 : start + BLOCK + 1]
    reference = None
    for it in everyone.values():  # the unquantized one is the first
        logits = read(setting.model, block, it.cache, logits=0)
        if start >= SCORED_FROM:
            reference = logits.double().log_softmax(-1) if reference is None else reference
            it.score(logits, reference, target)


def limits(divergence: Mapping[str, float], bits: Mapping[str, float]) -> list[Limit]:
    """What is held against what; both by the caches' names."""
    quanto, hqq = (divergence[name] for name in STOCK_INT4)
    int4, kivi, int3 = (divergence[name] for name in ("int4", "int4-kivi", "int3, 128 exact"))
    return [
        Limit("KL of int4 / a third of stock quanto int4", int4, quanto / 3),
        Limit("KL of int4 / a third of stock hqq int4", int4, hqq / 3),
        Limit("KL of int4 / int4-kivi", int4, kivi),
        Limit("bits per value of int4 / int4-kivi", bits["int4"], bits["int4-kivi"]),
        Limit("KL of int3 with 128 exact / the better stock int4", int3, min(quanto, hqq)),
        Limit("KL of int8", divergence["int8"], 0.001),
        Limit("KL of calibrated fp8 / stock fp8", divergence["fp8"], divergence[STOCK_FP8]),
    ]
