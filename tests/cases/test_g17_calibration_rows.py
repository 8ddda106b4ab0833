"""casper-hansen/AutoAWQ#297, InternLM/lmdeploy PR#4256: calibration rows dropped silently."""

from __future__ import annotations

import json

import pytest

from kvquant.errors import DataError
from kvquant.text.corpus import read_rows, token_blocks

LONG = "".join(chr(97 + number % 26) for number in range(5000))
ROWS = [
    {"text": ""},
    {"text": "   "},
    {"text": None},
    {"id": 7},
    {"text": "x"},
    {"text": "\N{GRINNING FACE}"},
    {"text": LONG},
]


@pytest.fixture
def blocks(tmp_path, byte_tokenizer):
    """``blocks(rows, **options)``: through a JSONL file and a tokenizer without pad or BOS."""
    assert byte_tokenizer.pad_token is None
    assert byte_tokenizer.bos_token is None

    def build(rows, context_length=512, samples=100):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        read = read_rows(str(path), notify=print)
        return token_blocks(read, byte_tokenizer, context_length=context_length, samples=samples)

    return build


def test_rows_of_all_kinds_are_counted_and_long_ones_cut(blocks):
    result = blocks(ROWS)
    report = result.report
    assert (report.rows_read, report.rows_empty, report.rows_unusable) == (7, 2, 2)
    # one token, the emoji's four bytes, the long row, and an end-of-text token between
    assert report.tokens_available == report.tokens_used == 1 + 1 + 4 + 1 + 5000
    assert [len(block) for block in result.blocks] == [512] * 9 + [5007 - 9 * 512]
    stream = [token for block in result.blocks for token in block]
    assert stream == [*b"x", 2, *b"????", 2, *LONG.encode()]
    assert report.lines()[0].endswith("rows.jsonl: 7 rows read, 2 empty, 2 unusable")


def test_only_long_rows_still_give_blocks(blocks):
    assert [len(block) for block in blocks([{"text": LONG}], samples=3).blocks] == [512, 512, 512]


def test_zero_usable_tokens_is_an_error_with_the_counts(blocks):
    with pytest.raises(
        DataError, match=r"no usable tokens in .*: 4 rows read, 2 empty, 2 unusable"
    ):
        blocks(ROWS[:4])
