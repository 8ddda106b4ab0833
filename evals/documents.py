"""Documents to score: the text cut into contexts of the length that is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvquant.errors import DataError, InputError
from kvquant.text.corpus import read_rows, token_blocks


def read_documents(
    data: str | None,
    tokenizer: Any,
    *,
    length: int,
    count: int,
    least: int,
    text_field: str | None = None,
    chat: bool = False,
    notify: Callable[[str], None],
) -> tuple[tuple[NDArray[np.int64], ...], dict[str, Any]]:
    """Documents of `length` tokens, each read with a cache of its own; and what they are from.

    Rows are packed and cut as for calibration (`kvquant.text.corpus`): a tokenizer that puts a BOS
    token in front of a text by itself gets one in front of each document, any other none.

    Args:
        data: Text, as `read_rows` takes it.
        tokenizer: The model's.
        length: Tokens of a document.
        count: Documents wanted.
        least: Tokens that a document needs to be of use; a shorter last one is left out.
        text_field: As `read_rows` takes it.
        chat: Likewise.
        notify: Told what was read, and of what there is too little.

    Raises:
        InputError: A length of fewer than `least` tokens.
        DataError: Not one document of so many.
    """
    if length < least:
        raise InputError(
            f"a length of {length:,} tokens is too short: prefill and one block to be scored take "
            f"{least:,}; give longer --lengths, or a smaller --prefill or --block"
        )
    rows = read_rows(data, text_field=text_field, chat=chat, notify=notify)
    found = token_blocks(rows, tokenizer, context_length=length, samples=count, chat=chat)
    documents = tuple(block for block in found.blocks if len(block) >= least)
    if not documents:
        raise DataError(
            f"{rows.source} has {found.report.tokens_used:,} tokens, and a document needs "
            f"{least:,} for one block to be scored: give more text with --data, or a smaller "
            "--prefill"
        )
    notify(str(found.report))
    if len(documents) < count:
        notify(
            f"warning: the text makes {len(documents)} of the {count} documents of {length:,} "
            "tokens asked for, so that intervals are wide: give more text with --data"
        )
    return documents, asdict(found.report)
