"""Token by token: what an arm makes of a text, beside what the unquantized cache makes of it.

A document is prefilled, then read on in blocks, teacher-forced: a block's own tokens are read
exactly, everything before it through the cache. (One forward pass over a text would attend to the
pass's own keys and never read a cache: any scheme would look perfect.)

Arms read each block one after the other, right after the unquantized cache: logits of one block,
for it and for one arm, are all that is ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .reading import Reader
from .statistics import Scores
from .windows import Span

Array = NDArray[Any]

_ROWS = 2
"""Tokens whose probabilities are held at once."""


def score_document(
    reader: Reader,
    ids: Array,
    spans: Sequence[Span],
    reference: Any,
    arms: Mapping[str, Any],
    *,
    document: int = 0,
    chunk: int | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
    before: Callable[[Span], None] = lambda span: None,
) -> dict[str, Scores]:
    """Reads one document through the unquantized cache and all arms, which are empty.

    Args:
        reader: Of the model.
        ids: The document, ``[tokens]``.
        spans: From `windows.spans`: the prefill, then blocks.
        reference: The unquantized cache.
        arms: The others, by name.
        document: Its number.
        chunk: Tokens of a call of the prefill; see `Reader.fill`.
        advance: Told of tokens read, in each cache.
        before: Told of each block before anybody reads it.

    Returns:
        Scores of all tokens of the blocks, for each arm.
    """
    tokens = torch.from_numpy(ids)[None]
    first, *blocks = spans
    reader.fill(tokens[:, : first.stop], reference, arms, chunk)
    advance(first.stop * (len(arms) + 1))
    parts: dict[str, list[Scores]] = {name: [] for name in arms}
    for span in blocks:
        before(span)
        block = tokens[:, span.start : span.stop]
        target = tokens[0, span.targets.start : span.targets.stop].to(reader.decoder.device)
        expected = reader.read(block, reference)[0]
        place = np.full(len(target), document), np.full(len(target), span.past)
        advance(len(target))
        for name, cache in arms.items():
            found = compare_logits(expected, reader.read(block, cache)[0], target)
            parts[name].append(Scores(*place, **found))
            advance(len(target))
    return {name: Scores.join(it) for name, it in parts.items()}


def compare_logits(
    reference: torch.Tensor, logits: torch.Tensor, target: torch.Tensor
) -> dict[str, Array]:
    """What `Scores` wants to know of a block, beside place and position.

    Args:
        reference: With the unquantized cache, ``[tokens, vocabulary]``, any dtype.
        logits: With the arm, likewise.
        target: The tokens that follow, ``[tokens]``.
    """
    # Some rows at a time: probabilities of a large vocabulary are wider than all else.
    rows = zip(*(torch.split(it, _ROWS) for it in (reference, logits, target)), strict=True)
    parts = [_compare_rows(*row) for row in rows]
    return {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}


def _compare_rows(
    reference: torch.Tensor, logits: torch.Tensor, target: torch.Tensor
) -> dict[str, torch.Tensor]:
    theirs, ours = (it.float().log_softmax(-1) for it in (reference, logits))
    weights = theirs.exp()
    # Tokens that are impossible to both would be 0 x (inf - inf). NaN stays NaN.
    terms = torch.where(weights == 0, 0, weights * (theirs - ours))
    kl = terms.sum(-1).clamp(min=0)
    return {
        "nll_reference": -theirs.gather(1, target[:, None])[:, 0],
        "nll": -ours.gather(1, target[:, None])[:, 0],
        "kl": kl,
        # The likeliest of none is the first, in both.
        "agrees": (ours.argmax(-1) == theirs.argmax(-1)) & ~kl.isnan(),
        "confidence": weights.max(-1).values,
    }
