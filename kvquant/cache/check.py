"""Is the cache exact on this model? Decoding three ways, and each scheme's bytes by the formula.

What somebody runs first on a new model family. With the scheme ``none`` the quantized cache does
all that it ever does (padding, windows, pieces, positions) but does not round, so that any
difference is a defect.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kvquant.errors import InputError
from kvquant.fingerprint import check_model
from kvquant.geometry import CacheGeometry
from kvquant.models.source import first_line
from kvquant.presets import preset, preset_names
from kvquant.scales import KVScales

from .cache import QuantizedCache
from .check_report import Case, CheckReport, Stored, Way
from .companions import state_nbytes
from .decoding import Decoding, Prompt
from .layer import QuantizedLayer
from .readback import Readback
from .sizes import live_nbytes
from .summary import covered_windows

PROMPT_TOKENS = 192
TOKENS = 32
CASES = 4
"""Ways of feeding text: steps of the progress beside one for each scheme."""

_TEXT = (
    "A cache keeps the keys and values of all tokens that a model has read, so that the next one "
    "costs no more than itself. It grows by the same number of bytes with every token, and for a "
    "long document it is larger than the model. Quantizing it makes room for more users, or for "
    "longer texts; but only as long as nobody can tell the difference. "
)
_PIECES = (1, 3, 5, 7, 48)
# Share of the largest logit that rounding explains. SmolLM2 (30 layers) shows a tenth of it in
# float32, and half of it in bfloat16.
_ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(
    model: Any,
    tokenizer: Any,
    *,
    name: str = "",
    adapters: Sequence[str] = (),
    schemes: Sequence[str] = (),
    scales: KVScales | Path | str | None = None,
    prompt_tokens: int | None = None,
    tokens: int = TOKENS,
    progress: Callable[[str], None] = lambda step: None,
) -> CheckReport:
    """Compares decoding without a cache, with Transformers' and with ours, and measures schemes.

    Args:
        model: A Transformers model or a PeftModel, with the adapters active that it serves.
        tokenizer: Its tokenizer.
        name: Its name, or that of its base, for the report.
        adapters: Names of its adapters, likewise.
        schemes: Presets to measure; by default all.
        scales: Calibrated scales, or a file of them.
        prompt_tokens: Length of the text to begin with.
        tokens: New tokens.
        progress: Told of each step as it begins: `CASES`, and one for each scheme.

    Raises:
        InputError: Lengths that the model has no positions for, or no text.
        KVQuantError: A scheme or scales that do not fit the model.
    """
    check_model(model)
    geometry = CacheGeometry.from_config(model.config)
    length = prompt_length(geometry, prompt_tokens, tokens)
    names = schemes or preset_names()
    # All before anything takes long: what does not fit is found out here.
    caches = [
        QuantizedCache.from_model(model, scheme, scales, tokenizer=tokenizer) for scheme in names
    ]
    decoding = Decoding(model)
    prompt = Prompt.of(_ids(tokenizer, length).to(model.device))
    batch, pieces = _padded(prompt), list(_pieces(length))
    progress("one text")
    reference = decoding.without_cache(prompt, tokens)
    cases = [_case("one text", decoding, prompt, reference, [length])]
    progress("a text in pieces")
    name_of = f"a text in {len(pieces)} pieces"
    cases.append(_case(name_of, decoding, prompt, reference, pieces))
    progress("a padded batch")
    expected = decoding.without_cache(batch, tokens)
    cases.append(_case("a padded batch", decoding, batch, expected, [batch.ids.shape[1]]))
    progress("generate()")
    cases.append(_generate_case(decoding, batch, tokens))
    stored = []
    for scheme, cache in zip(names, caches, strict=True):
        progress(scheme)
        stored.append(_stored(scheme, decoding, cache, prompt, reference[0]))
        cache.reset()
    dtype = str(model.dtype).removeprefix("torch.")
    parts = tuple(cases), tuple(stored)
    return CheckReport(name, tuple(adapters), geometry, dtype, length, tokens, *parts)


def prompt_length(geometry: CacheGeometry, asked: int | None, tokens: int) -> int:
    """Tokens to begin with: what was asked for, at most what the model has positions for.

    Raises:
        InputError: More than the model's positions.
    """
    limit = geometry.max_positions
    if limit is None:
        return asked or PROMPT_TOKENS
    room = limit - tokens - 1  # one more reads back what is stored
    if room < 1:
        raise InputError(
            f"{tokens:,} to decode and one more that reads them need {tokens + 2:,} positions with "
            f"the shortest prompt, the model has {limit:,}: decode at most {max(limit - 2, 0):,}"
        )
    if asked is not None and not 1 <= asked <= room:
        raise InputError(
            f"a prompt of {asked:,}, {tokens:,} to decode and one more that reads them need "
            f"{asked + tokens + 1:,} positions, the model has {limit:,}: use a prompt of 1 to "
            f"{room:,}"
        )
    return min(PROMPT_TOKENS, room) if asked is None else asked


def _ids(tokenizer: Any, count: int) -> torch.Tensor:
    """`count` token ids ``[1, count]`` of the default text, over and over."""
    once = len(tokenizer(_TEXT)["input_ids"])
    if not once:
        raise InputError("the tokenizer makes no tokens of an English text")
    ids = tokenizer(_TEXT * (count // once + 2))["input_ids"]
    return torch.tensor(ids[:count])[None]


def _pieces(length: int) -> Iterator[int]:
    """Sizes of pieces that add up to `length`."""
    for size in itertools.cycle(_PIECES):
        if length <= 0:
            return
        yield min(size, length)
        length -= size


def _padded(prompt: Prompt) -> Prompt:
    """Two texts half as long as `prompt`, a third of the first one padding."""
    size = (prompt.ids.shape[1] + 1) // 2
    padding = size // 3
    ids = prompt.ids[:, :size].repeat(2, 1)
    mask = torch.ones_like(ids)
    ids[0, padding:] = prompt.ids[0, : size - padding]
    mask[0, :padding] = 0
    return Prompt(ids, mask)


def _case(
    name: str,
    decoding: Decoding,
    prompt: Prompt,
    reference: tuple[torch.Tensor, torch.Tensor],
    pieces: Sequence[int],
) -> Case:
    """Feeds the tokens that were decoded without a cache through either cache."""
    tokens, logits = reference
    found: list[torch.Tensor] = []
    ways: list[Way] = []
    for make_cache in _CACHES:
        try:
            found.append(decoding.with_cache(prompt, tokens, make_cache(decoding), pieces))
        except Exception as error:
            ways.append(Way(error=_words(error)))
            continue
        first = _first_difference(tokens, found[-1].argmax(-1))
        ways.append(Way(first, _largest_difference(logits, found[-1])))
    rounding = _ROUNDING.get(decoding.model.dtype, _ROUNDING[torch.bfloat16])
    apart = _largest_difference(*found) if len(found) == len(_CACHES) else None
    return Case(name, ways[0], ways[1], apart, rounding * float(logits.abs().max()))


def _generate_case(decoding: Decoding, prompt: Prompt, count: int) -> Case:
    """What users call, settings of the model included."""
    made: list[torch.Tensor] = []
    ways: list[Way] = []
    for make_cache in _CACHES:
        try:
            made.append(decoding.generate(prompt, count, make_cache(decoding)))
            ways.append(Way(_first_difference(made[0], made[-1])))
        except Exception as error:
            ways.append(Way(error=_words(error)))
    return Case("generate()", ways[0], ways[1])


def _dynamic_cache(decoding: Decoding) -> Any:
    return DynamicCache(config=decoding.decoder.config)


def _exact_cache(decoding: Decoding) -> Any:
    return QuantizedCache.from_model(decoding.model, "none")


_CACHES: tuple[Callable[[Decoding], Any], ...] = (_dynamic_cache, _exact_cache)


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """The first token ``[batch, tokens]`` that differs in any row."""
    different = (one != other).any(0).nonzero()
    return int(different[0]) if len(different) else None


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _stored(
    name: str, decoding: Decoding, cache: QuantizedCache, prompt: Prompt, tokens: torch.Tensor
) -> Stored:
    """Feeds prompt and tokens, looks at the bytes, and at what one more token reads."""
    text = prompt.extended(tokens)
    try:
        with Readback(cache) as readback:
            decoding.feed(text, prompt.ids.shape[1], cache)
            decoding.feed(text, tokens.shape[1], cache)
            live, has_codes, remarks = tokens_nbytes(cache), *_quantized(cache)
            readback.compares = True
            decoding.feed(text.extended(tokens[:, -1:]), 1, cache)
    except Exception as error:
        return Stored(name, str(cache.scheme), error=_words(error))
    count, plan = text.ids.shape[1], cache.plan
    sizes = cache.geometry, cache.scheme, count, readback.dtype.itemsize
    bf16 = live_nbytes(cache.geometry, preset("bf16"), count, 2)
    slots = itertools.product(cache.geometry.attention_layers, ("key", "value"))
    return Stored(
        scheme=name,
        description=str(cache.scheme),
        live_nbytes=live,
        expected_nbytes=live_nbytes(*sizes, keeps_positions=plan.turns_means),
        bits_per_value=16 * live / bf16,
        ratio=bf16 / live,
        key_difference=readback.worst[0],
        value_difference=readback.worst[1],
        rounds=not all(plan.slot_scheme(*place).is_exact for place in slots),
        has_codes=has_codes,
        remarks=tuple(remarks),
    )


def tokens_nbytes(cache: QuantizedCache) -> int:
    """Live bytes that grow with the text: without recurrent states and the keys of indexers."""
    beside = sum(
        layer.live_nbytes() - QuantizedLayer.live_nbytes(layer)
        if isinstance(layer, QuantizedLayer)
        else state_nbytes(layer)
        for layer in cache.layers
    )
    return cache.live_nbytes() - beside


def _quantized(cache: QuantizedCache) -> tuple[bool, list[str]]:
    """Whether there are codes wherever there ever can be; and where there never can be."""
    remarks = covered_windows(cache.scheme, cache.geometry)
    stores = [
        store
        for layer in cache.layers
        if isinstance(layer, QuantizedLayer)
        for pair in layer.stores
        for store in pair
        if not store.window.never_codes
    ]
    if not stores or any(len(store.coded) for store in stores):
        return True, remarks
    limit = cache.geometry.max_positions
    windows = [store.window for store in stores]
    first = min(window.sinks + window.residual + window.unit for window in windows)
    if limit is None or first < limit:
        return False, remarks
    line = f"the first tokens are quantized after {first:,}, and the model has {limit:,} positions"
    return True, [*remarks, line]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
