"""Blocks of tokens for calibration, with an account of every row that went into them.

Rows are packed into one stream of tokens, and the stream is cut into blocks of the context length:

    rows      aaaaaaa   bbb   ccccccccc
    stream    aaaaaaa|bbb|ccccccccc            | = end-of-text token, where there is one
    blocks    [aaaaaa][a|bbb|][cccccc][ccc]

A row that is longer than a block goes into several, a short one shares a block, and the last block
may be shorter: nothing is dropped. A tokenizer that puts a BOS token in front of everything gets
one in front of every block, as each context that is served has one; its keys are unlike any others.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import DataError, InputError
from .rows import Messages, Row, Rows, read_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "CorpusReport",
    "Row",
    "Rows",
    "TokenBlocks",
    "block_spans",
    "bos_token",
    "read_rows",
    "text_pieces",
    "token_blocks",
]

_PIECE = 1 << 20
"""Characters that are tokenized at once; a longer text is cut before a blank."""


@dataclass(frozen=True)
class CorpusReport:
    """What was read, what was used, what was not.

    Attributes:
        source: Where the rows come from.
        rows_read: Rows looked at.
        rows_empty: Rows without anything but white space.
        rows_unusable: Rows without text: null, a missing field, a number, messages that the chat
            template refuses.
        tokens_available: Tokens in the stream, separators included.
        tokens_used: Tokens of the stream that are in the blocks.
        blocks: Number of blocks.
        context_length: Tokens of a full block, BOS included.
        last_block: Tokens of the last block, BOS included.
        stopped_early: Whether reading stopped because there was enough, with more to read.
        bos: Token in front of every block, or None.
        separator: Token between rows, or None.
        separators: How many of those are in the stream.
        sha256: Hash of the blocks' token ids.
    """

    source: str
    rows_read: int
    rows_empty: int
    rows_unusable: int
    tokens_available: int
    tokens_used: int
    blocks: int
    context_length: int
    last_block: int
    stopped_early: bool
    bos: int | None
    separator: int | None
    separators: int
    sha256: str

    def lines(self) -> list[str]:
        """Summary for people."""
        left_out = self.rows_empty + self.rows_unusable
        dropped = f", {self.rows_empty} empty, {self.rows_unusable} unusable" if left_out else ""
        rows = f"{self.source}: {_count(self.rows_read, 'row')} read{dropped}"
        unused = self.tokens_available - self.tokens_used
        more = ", and reading stopped there" if self.stopped_early else ""
        tokens = f"{self.tokens_used:,} of {self.tokens_available:,} tokens used" + (
            f" ({unused:,} past the last block{more})" if unused or more else ""
        )
        short = f", the last of {self.last_block:,}"
        blocks = (
            f"{_count(self.blocks, 'block')} of {self.context_length:,} tokens"
            + (short if self.last_block < self.context_length else "")
            + ", one after the other from the beginning"
            + (", each after a BOS token" if self.bos is not None else "")
        )
        return [rows, tokens, blocks]

    def __str__(self) -> str:
        """The summary, a fact a line."""
        return "\n".join(self.lines())


@dataclass(frozen=True)
class TokenBlocks:
    """Token ids, ready for the model.

    Attributes:
        blocks: int64 arrays of shape ``[tokens]``, all of the context length but perhaps the last.
        report: Where they come from.
    """

    blocks: tuple[NDArray[np.int64], ...]
    report: CorpusReport


def token_blocks(
    rows: Rows, tokenizer: Any, *, context_length: int, samples: int, chat: bool = False
) -> TokenBlocks:
    """Tokenizes rows and cuts them into at most `samples` blocks of `context_length` tokens.

    Reads no further than it has to. The same rows give the same blocks: nothing is shuffled.

    Args:
        rows: From `read_rows`.
        tokenizer: A Transformers tokenizer; BOS, EOS and padding tokens may all be missing.
        context_length: Tokens a block, a BOS token included.
        samples: Blocks wanted.
        chat: Rows are message lists and go through the tokenizer's chat template.

    Raises:
        InputError: A length or number below 1, or no room beside the BOS token.
        DataError: Not one usable token; or message lists without `chat`, or `chat` without a
            template.
    """
    bos = bos_token(tokenizer)
    room = _room(context_length, samples, bos)
    if chat and not getattr(tokenizer, "chat_template", None):
        raise DataError("the tokenizer has no chat template: leave out --chat, or give plain text")
    stream = _Stream(tokenizer, bos, chat, wanted=room * samples)
    stopped_early = stream.fill(iter(rows))
    if not stream.ids:
        raise DataError(
            f"no usable tokens in {rows.source}: {_count(stream.rows_read, 'row')} read, "
            f"{stream.rows_empty} empty, {stream.rows_unusable} unusable{stream.reason}"
        )
    blocks = _cut(stream.ids, room, samples, bos)
    used = sum(len(block) for block in blocks) - (0 if bos is None else len(blocks))
    report = CorpusReport(
        source=rows.source,
        rows_read=stream.rows_read,
        rows_empty=stream.rows_empty,
        rows_unusable=stream.rows_unusable,
        tokens_available=len(stream.ids),
        tokens_used=used,
        blocks=len(blocks),
        context_length=context_length,
        last_block=len(blocks[-1]),
        stopped_early=stopped_early,
        bos=bos,
        separator=stream.separator,
        separators=stream.separators,
        sha256=_hash(blocks),
    )
    return TokenBlocks(blocks, report)


def block_spans(tokens: int, length: int, samples: int) -> list[tuple[int, int]]:
    """Where the blocks of a stream begin and end.

    >>> block_spans(tokens=10, length=4, samples=3)
    [(0, 4), (4, 8), (8, 10)]
    >>> block_spans(tokens=10, length=4, samples=2)
    [(0, 4), (4, 8)]
    """
    starts = range(0, tokens, length)[:samples]
    return [(start, min(start + length, tokens)) for start in starts]


def _room(context_length: int, samples: int, bos: int | None) -> int:
    """Tokens of the stream in a full block."""
    for name, value in (("context length", context_length), ("number of samples", samples)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"the {name} must be a whole number of at least 1, not {value!r}")
    if bos is not None and context_length == 1:
        raise InputError("a context of 1 token holds the BOS token and no text: give at least 2")
    return context_length if bos is None else context_length - 1


def bos_token(tokenizer: Any) -> int | None:
    """The token that the tokenizer puts in front of a text by itself, or None."""
    ids = tokenizer.encode("a")
    bos = tokenizer.bos_token_id
    return bos if bos is not None and ids[:1] == [bos] else None


def _cut(ids: list[int], room: int, samples: int, bos: int | None) -> tuple[NDArray[np.int64], ...]:
    import numpy as np

    front = [] if bos is None else [bos]
    return tuple(
        np.array(front + ids[start:stop], dtype=np.int64)
        for start, stop in block_spans(len(ids), room, samples)
    )


def _hash(blocks: tuple[NDArray[np.int64], ...]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(len(block).to_bytes(8, "little"))
        digest.update(block.astype("<i8").tobytes())
    return digest.hexdigest()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


@dataclass
class _Stream:
    """The token stream while it grows, and the counts of what went in."""

    tokenizer: Any
    bos: int | None
    chat: bool
    wanted: int
    ids: list[int] = field(default_factory=list)
    rows_read: int = 0
    rows_empty: int = 0
    rows_unusable: int = 0
    separators: int = 0
    reason: str = ""

    @property
    def separator(self) -> int | None:
        """The end-of-text token, if the tokenizer has one."""
        separator: int | None = self.tokenizer.eos_token_id
        return separator

    def fill(self, rows: Iterator[Row]) -> bool:
        """Adds rows until there are `wanted` tokens; returns whether anything is left unread."""
        for row in rows:
            self.rows_read += 1
            pieces = self._pieces(row)
            if pieces is None:
                self.rows_unusable += 1
                continue
            before = len(self.ids)
            for piece in pieces:
                self._add(piece, first=len(self.ids) == before)
                if len(self.ids) >= self.wanted:
                    return next(pieces, None) is not None or next(rows, self) is not self
            self.rows_empty += len(self.ids) == before
        return False

    def _add(self, text: str, first: bool) -> None:
        """Adds one piece, a separator in front if it is the first of a row but not of all."""
        ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if first and self.bos is not None and ids[:1] == [self.bos]:
            ids = ids[1:]  # from a chat template: the block has one already
        if first and ids and self.ids and self.separator not in (None, self.ids[-1]):
            ids = [self.separator, *ids]
            self.separators += 1
        self.ids += ids

    def _pieces(self, row: Row) -> Iterator[str] | None:
        """The text of a row, piece by piece, or None if there is none in it."""
        if isinstance(row, list):
            row = self._rendered(row)
        elif row is not None and self.chat:
            self.reason = self.reason or "; --chat takes message lists, not text"
            row = None
        return None if row is None else text_pieces(row)

    def _rendered(self, messages: Messages) -> str | None:
        """The messages as the chat template writes them, or None if it refuses them."""
        if not self.chat:
            raise DataError("rows are message lists, not text: use --chat, or name a --text-field")
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # whatever the template raises
            self.reason = self.reason or f"; the chat template says: {error}"
            return None


def text_pieces(text: str | Path) -> Iterator[str]:
    """A text or text file in pieces of `_PIECE` characters or a little more; none if it is blank.

    Cut before a blank, or where there is none for so long, anywhere.
    """
    with ExitStack() as stack:
        if isinstance(text, str):
            file: TextIO = io.StringIO(_without_surrogates(text))
        else:
            file = stack.enter_context(_open(text))
        rest, blank = "", True
        while chunk := _read(file, text):
            rest += chunk
            blank = blank and rest.isspace()
            if len(rest) >= _PIECE and not blank:
                cut = max(rest.rfind(" ", 1), rest.rfind("\n", 1))
                cut = len(rest) if cut == -1 else cut
                yield rest[:cut]
                rest = rest[cut:]
        if rest and not blank:
            yield rest


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _read(file: TextIO, source: str | Path) -> str:
    """The next characters of a text.

    Raises:
        DataError: They are no text.
    """
    try:
        chunk = file.read(_PIECE)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8 text: byte {error.object[error.start]:#04x}"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {source}: {error}") from error
    if isinstance(source, Path) and "\0" in chunk:
        raise DataError(f"{source} is binary: it has null bytes")
    return chunk


def _without_surrogates(text: str) -> str:
    """Lone halves of UTF-16 pairs, which JSON can hold and tokenizers cannot, become ``�``."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
