"""The text that needles are hidden in: sentences, each tokenized once, cut out at any length."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvquant.errors import DataError
from kvquant.text.corpus import text_pieces
from kvquant.text.rows import Rows, read_rows

from .encoding import Encoding

Ids = NDArray[np.int64]

NOISE = "The tide comes in, the tide goes out, and the boats in the harbor rise and fall with it."
"""What the haystack that repeats itself repeats."""

_BATCH = 4096
"""Sentences that are tokenized in one call."""
_VARIETY = 4
"""So many times the longest prompt is read, that trials may begin in different places."""
_END = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["')\]])\s+|(?<=[。！？])|\n\s*\n""")
_PART = re.compile(r"\S.{0,299}(?!\S)|\S{1,300}")
"""A sentence of at most 300 characters, or as much of a longer one, to the end of a word."""


@dataclass(frozen=True, eq=False)
class Haystack:
    """Sentences as one row of tokens, thought to go on from its beginning after its end.

    Attributes:
        source: Where they come from, for the report.
        tokens: Token ids, int64.
        ends: Where each sentence ends in `tokens`.
        sha256: Hash of the text.
    """

    source: str
    tokens: Ids
    ends: Ids
    sha256: str

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Ids, Ids]:
        """The `count` tokens up to the end of some sentence, and where a needle may go in.

        So it is the first sentence that is cut, and never the one before the question::

            … one. Two thr[ee four. Five six. Seven.] Eight …
                           0        a         b      count

        Returns:
            Ids; and the places, ascending, with 0 and `count` among them.
        """
        size = len(self.tokens)
        stop = int(self.ends[generator.integers(len(self.ends))])
        start = stop - count
        rounds = np.arange(start // size, stop // size + 1)
        ends = (self.ends + rounds[:, None] * size).ravel()
        places = ends[(ends > start) & (ends <= stop)] - start
        ids = self.tokens[np.arange(start, stop) % size]
        return ids, np.concatenate([np.zeros(1, dtype=np.int64), places])


def read_haystack(
    data: tuple[str, ...],
    encoding: Encoding,
    *,
    longest: int,
    text_field: str | None = None,
    notify: Callable[[str], None],
) -> Haystack:
    """Reads text for prompts of up to `longest` tokens; no more of it than they can use.

    Args:
        data: Files, directories and data sets, as `read_rows` takes them; none: the default text.
        encoding: The model's tokenizer.
        longest: Tokens of the longest prompt.
        text_field: As `read_rows` takes it.
        notify: Told of the default text, of files that are not read, and of a text that is shorter
            than the longest prompt and hence repeated.

    Raises:
        DataError: Nothing there, or no text in it.
    """
    source, rows = _rows(data, text_field, notify)
    haystack = _tokenized(source, _sentences(rows), encoding, _VARIETY * longest)
    if len(haystack.tokens) < longest:
        notify(
            f"{source} has {len(haystack.tokens):,} tokens: it is repeated to fill prompts of "
            f"{longest:,} (--haystack takes more text)"
        )
    return haystack


def noise(encoding: Encoding) -> Haystack:
    """One sentence over and over, in which a needle stands out."""
    return _tokenized("one sentence, repeated", iter([NOISE]), encoding, 1)


def _rows(
    data: tuple[str, ...], text_field: str | None, notify: Callable[[str], None]
) -> tuple[str, Iterable[Rows]]:
    """A name for all of the data, and its rows."""
    if data:
        opened = [read_rows(it, text_field=text_field, notify=notify) for it in data]
        return ", ".join(rows.source for rows in opened), opened
    notify("needles are hidden in Python's help topics (--haystack takes other text)")
    try:
        default = read_rows(None, notify=lambda message: None)
    except DataError as error:
        raise DataError(
            "this Python comes without its help topics: give text with --haystack"
        ) from error
    return default.source, [default]


def _sentences(opened: Iterable[Rows]) -> Iterator[str]:
    """The sentences of all rows that are text."""
    for rows in opened:
        for row in rows:
            if row is not None and not isinstance(row, list):
                for piece in text_pieces(row):
                    yield from sentences(piece)


def sentences(text: str) -> Iterator[str]:
    r"""Cuts a text after full stops and at empty lines, and what is very long between two words.

    >>> list(sentences('One two. "Three?" Four\nfive 1.5\n\n* six'))
    ['One two.', '"Three?"', 'Four five 1.5', '* six']
    """
    for sentence in _END.split(text):
        yield from _PART.findall(" ".join(sentence.split()))


def _tokenized(source: str, sentences: Iterator[str], encoding: Encoding, wanted: int) -> Haystack:
    """Tokenizes until there are `wanted` tokens, or no more text."""
    pieces: list[list[int]] = []
    digest, total = hashlib.sha256(), 0
    while total < wanted and (batch := list(islice(sentences, _BATCH))):
        digest.update("\n".join([*batch, ""]).encode())
        found = [ids for ids in encoding.sentences(batch) if ids]
        total += sum(map(len, found))
        pieces += found
    if not pieces:
        raise DataError(f"no text in {source}: --haystack takes text, JSONL and Parquet files")
    tokens = np.fromiter((token for ids in pieces for token in ids), np.int64, total)
    return Haystack(source, tokens, np.cumsum([len(ids) for ids in pieces]), digest.hexdigest())
