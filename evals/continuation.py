"""How texts go on greedily, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from .reading import Reader
from .results import Continuation


def continue_text(
    reader: Reader,
    tokenizer: Any,
    ids: NDArray[Any],
    tokens: int,
    arms: Mapping[str, Any],
    *,
    chunk: int | None = None,
) -> Continuation:
    """Continues one prompt with the unquantized cache and with every arm.

    All but the last token of the prompt are read in one call, so that the first new token is
    already decided by what the caches hold.

    Args:
        reader: Of the model.
        tokenizer: Its tokenizer.
        ids: The prompt, two tokens or more, ``[tokens]``.
        tokens: How many to add.
        arms: Empty caches, by name.
        chunk: As `Reader.fill` takes it.
    """
    prompt = torch.from_numpy(ids)[None]
    reference = reader.reference()
    reader.fill(prompt[:, :-1], reference, arms, chunk)
    expected = reader.answer(prompt[:, -1:], reference, tokens)[0]
    texts, first, agreement = {}, {}, {}
    for name, cache in arms.items():
        found = reader.answer(prompt[:, -1:], cache, tokens)[0]
        same = found == expected
        texts[name] = str(tokenizer.decode(found.tolist()))
        first[name] = None if bool(same.all()) else int((~same).nonzero()[0])
        agreement[name] = float(same.float().mean())
    return Continuation(
        prompt_tokens=len(ids),
        tokens=tokens,
        reference=str(tokenizer.decode(expected.tolist())),
        texts=texts,
        first_difference=first,
        agreement=agreement,
    )
