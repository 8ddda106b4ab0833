from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvquant.errors import DataError, InputError
from kvquant.text import corpus
from kvquant.text.corpus import Rows, block_spans, read_rows, token_blocks


@pytest.mark.parametrize(
    ("tokens", "length", "samples", "expected"),
    [
        (10, 4, 3, [(0, 4), (4, 8), (8, 10)]),
        (10, 4, 9, [(0, 4), (4, 8), (8, 10)]),
        (10, 4, 2, [(0, 4), (4, 8)]),
        (8, 4, 3, [(0, 4), (4, 8)]),
        (3, 4, 1, [(0, 3)]),
        (3, 1, 2, [(0, 1), (1, 2)]),
        (1, 1, 1, [(0, 1)]),
        (0, 4, 2, []),
    ],
)
def test_block_spans(tokens, length, samples, expected):
    assert block_spans(tokens, length, samples) == expected


@given(st.integers(0, 500), st.integers(1, 60), st.integers(1, 20))
def test_every_token_is_used_once_and_in_order_until_the_budget_is_used_up(tokens, length, samples):
    spans = block_spans(tokens, length, samples)
    covered = [position for start, stop in spans for position in range(start, stop)]
    assert covered == list(range(min(tokens, length * samples)))
    assert all(stop - start == length for start, stop in spans[:-1])


def _ids(result):
    return [block.tolist() for block in result.blocks]


def test_rows_are_packed_with_an_end_of_text_token_between(byte_tokenizer):
    rows = Rows("test", ["abc", "", "de"])
    result = token_blocks(rows, byte_tokenizer, context_length=4, samples=5)
    assert _ids(result) == [[97, 98, 99, 2], [100, 101]]
    assert all(block.dtype == np.int64 for block in result.blocks)
    report = result.report
    assert (report.source, report.rows_read, report.rows_empty, report.rows_unusable) == (
        "test",
        3,
        1,
        0,
    )
    assert (report.tokens_available, report.tokens_used, report.blocks) == (6, 6, 2)
    assert (report.context_length, report.last_block, report.stopped_early) == (4, 2, False)
    assert (report.bos, report.separator, report.separators) == (None, 2, 1)


def test_row_that_ends_with_the_end_of_text_token_gets_no_second_one(byte_tokenizer):
    rows = Rows("test", ["a<eos>", "b"])
    assert _ids(token_blocks(rows, byte_tokenizer, context_length=9, samples=1)) == [[97, 2, 98]]


def test_without_end_of_text_token_rows_follow_each_other(byte_tokenizer):
    byte_tokenizer.eos_token = None
    result = token_blocks(Rows("test", ["ab", "cd"]), byte_tokenizer, context_length=9, samples=1)
    assert _ids(result) == [[97, 98, 99, 100]]
    assert (result.report.separator, result.report.separators) == (None, 0)


@pytest.fixture
def bos_tokenizer(byte_tokenizer):
    """As Llama's: puts ``<bos>`` = 128 in front of every text by itself."""
    from tokenizers.processors import TemplateProcessing

    byte_tokenizer.add_special_tokens({"bos_token": "<bos>"})
    byte_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 128)]
    )
    assert byte_tokenizer.encode("a") == [128, 97]
    return byte_tokenizer


def test_every_block_begins_with_exactly_one_bos(bos_tokenizer):
    rows = Rows("test", ["abc", "<bos>de", "f"])
    result = token_blocks(rows, bos_tokenizer, context_length=4, samples=9)
    assert _ids(result) == [[128, 97, 98, 99], [128, 2, 100, 101], [128, 2, 102]]
    report = result.report
    assert (report.bos, report.tokens_available, report.tokens_used) == (128, 8, 8)
    assert report.last_block == 3


def test_bos_that_the_tokenizer_does_not_add_is_not_added(bos_tokenizer):
    from tokenizers.processors import ByteLevel

    bos_tokenizer.backend_tokenizer.post_processor = ByteLevel()
    result = token_blocks(Rows("test", ["abc"]), bos_tokenizer, context_length=4, samples=1)
    assert _ids(result) == [[97, 98, 99]]
    assert result.report.bos is None


def test_smallest_contexts_beside_a_bos(bos_tokenizer):
    result = token_blocks(Rows("test", ["abc"]), bos_tokenizer, context_length=2, samples=9)
    assert _ids(result) == [[128, 97], [128, 98], [128, 99]]
    with pytest.raises(InputError, match="holds the BOS token and no text: give at least 2"):
        token_blocks(Rows("test", ["abc"]), bos_tokenizer, context_length=1, samples=9)


def test_context_of_one_token_without_bos(byte_tokenizer):
    result = token_blocks(Rows("test", ["abc"]), byte_tokenizer, context_length=1, samples=2)
    assert _ids(result) == [[97], [98]]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
@pytest.mark.parametrize("name", ["context_length", "samples"])
def test_impossible_sizes(byte_tokenizer, name, value):
    sizes = {"context_length": 4, "samples": 1, name: value}
    with pytest.raises(InputError, match=f"whole number of at least 1, not {value!r}"):
        token_blocks(Rows("test", ["abc"]), byte_tokenizer, **sizes)


def test_reading_stops_when_there_is_enough(byte_tokenizer):
    def endless():
        for number in range(10**9):
            taken.append(number)
            yield "abcd"

    taken = []
    result = token_blocks(Rows("test", endless()), byte_tokenizer, context_length=4, samples=3)
    assert len(taken) == 4  # the fourth to know that there is more
    assert result.report.rows_read == 3
    assert result.report.stopped_early
    assert _ids(result) == [[97, 98, 99, 100], [2, 97, 98, 99], [100, 2, 97, 98]]
    assert (result.report.tokens_available, result.report.tokens_used) == (14, 12)


def test_enough_at_the_very_end_is_not_early(byte_tokenizer):
    result = token_blocks(Rows("test", ["abcd"]), byte_tokenizer, context_length=4, samples=1)
    assert not result.report.stopped_early
    assert result.report.tokens_available == 4


def test_long_file_is_read_piece_by_piece(byte_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_PIECE", 16)
    text = " ".join(f"word{number}" for number in range(40)) + "\n" + "x" * 50
    path = tmp_path / "long.txt"
    path.write_text(text)
    whole = token_blocks(Rows("t", [path]), byte_tokenizer, context_length=1000, samples=1)
    assert _ids(whole) == [list(text.encode())]
    assert (whole.report.rows_read, whole.report.separators) == (1, 0)
    start = token_blocks(Rows("t", [path]), byte_tokenizer, context_length=10, samples=1)
    assert start.report.stopped_early
    assert start.report.tokens_available <= 32
    assert _ids(start) == [list(text.encode()[:10])]


def test_pieces_are_cut_before_blanks(monkeypatch):
    monkeypatch.setattr(corpus, "_PIECE", 8)
    assert list(corpus.text_pieces("one two three four")) == ["one two", " three", " four"]
    assert list(corpus.text_pieces("x" * 20)) == ["x" * 8, "x" * 8, "x" * 4]
    assert list(corpus.text_pieces(" " * 20)) == []
    assert list(corpus.text_pieces(" " * 20 + "a")) == [" " * 19, " a"]


@given(st.text(max_size=60), st.integers(1, 9))
def test_pieces_are_the_text(text, piece):
    original = corpus._PIECE
    corpus._PIECE = piece
    try:
        joined = "".join(corpus.text_pieces(text))
    finally:
        corpus._PIECE = original
    assert joined == ("" if text.isspace() else text)


def test_lone_surrogates_become_replacement_characters(byte_tokenizer):
    assert list(corpus.text_pieces("a\ud800b\U0001f600")) == ["a\ufffdb\U0001f600"]
    result = token_blocks(Rows("t", ["a\ud800b"]), byte_tokenizer, context_length=9, samples=1)
    assert _ids(result)[0][0] == 97
    assert _ids(result)[0][-1] == 98


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", r"data\.txt is not UTF-8 text: byte 0x89"),
        (b"abc\x00def", r"data\.txt is binary: it has null bytes"),
        ("naïve".encode("latin-1"), r"data\.txt is not UTF-8 text: byte 0xef"),
        (b"", r"no usable tokens in data: 1 row read, 1 empty, 0 unusable"),
        (b" \n\t ", r"no usable tokens in data: 1 row read, 1 empty, 0 unusable"),
    ],
)
def test_text_file_without_text(byte_tokenizer, tmp_path, content, message):
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        token_blocks(Rows("data", [path]), byte_tokenizer, context_length=4, samples=1)


def test_no_rows_at_all(byte_tokenizer):
    with pytest.raises(DataError, match="no usable tokens in test: 0 rows read"):
        token_blocks(Rows("test", []), byte_tokenizer, context_length=4, samples=1)


MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}{% if not m.content %}{{ raise_exception('no content') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)


def test_chat_template(byte_tokenizer):
    byte_tokenizer.chat_template = TEMPLATE
    rows = Rows("test", [MESSAGES, None, [{"role": "user", "content": ""}], "text"])
    result = token_blocks(rows, byte_tokenizer, context_length=9, samples=1, chat=True)
    assert _ids(result) == [list(b"u:hi;")]
    assert (result.report.rows_read, result.report.rows_unusable) == (4, 3)


def test_chat_template_that_writes_the_bos_itself(bos_tokenizer):
    bos_tokenizer.chat_template = "<bos>" + TEMPLATE
    rows = Rows("test", [MESSAGES, MESSAGES])
    result = token_blocks(rows, bos_tokenizer, context_length=20, samples=1, chat=True)
    assert _ids(result) == [[128, *b"u:hi;", 2, *b"u:hi;"]]


def test_chat_without_a_template(byte_tokenizer):
    with pytest.raises(DataError, match="has no chat template"):
        token_blocks(Rows("t", [MESSAGES]), byte_tokenizer, context_length=9, samples=1, chat=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[{"role": "user", "content": ""}]], "1 unusable; the chat template says: no content"),
        (["text"], "1 unusable; --chat takes message lists, not text"),
    ],
)
def test_chat_without_usable_rows_says_why(byte_tokenizer, rows, message):
    byte_tokenizer.chat_template = TEMPLATE
    with pytest.raises(DataError, match=message):
        token_blocks(Rows("t", rows), byte_tokenizer, context_length=9, samples=1, chat=True)


def test_message_lists_without_chat(byte_tokenizer):
    with pytest.raises(DataError, match="rows are message lists, not text: use --chat"):
        token_blocks(Rows("t", [MESSAGES]), byte_tokenizer, context_length=9, samples=1)


def test_same_rows_same_hash(byte_tokenizer):
    def report(*rows, **sizes):
        sizes = {"context_length": 4, "samples": 2, **sizes}
        return token_blocks(Rows("t", rows), byte_tokenizer, **sizes).report

    assert report("abcd", "ef").sha256 == report("abcd", "", "ef").sha256
    assert report("abcd", "ef").sha256 != report("abcd", "eg").sha256
    assert report("abcdefgh").sha256 != report("abcdefgh", context_length=8).sha256
    expected = hashlib.sha256((2).to_bytes(8, "little") + np.array([97, 98], "<i8").tobytes())
    assert report("ab").sha256 == expected.hexdigest()


def test_summary(byte_tokenizer):
    rows = Rows("mine.jsonl", ["abcdef", "", None, "gh", "ij"])
    report = token_blocks(rows, byte_tokenizer, context_length=4, samples=2).report
    assert report.lines() == [
        "mine.jsonl: 4 rows read, 1 empty, 1 unusable",
        "8 of 9 tokens used (1 past the last block, and reading stopped there)",
        "2 blocks of 4 tokens, one after the other from the beginning",
    ]
    rows = Rows("mine.jsonl", ["abcdef"])
    report = token_blocks(rows, byte_tokenizer, context_length=4, samples=2).report
    assert str(report) == (
        "mine.jsonl: 1 row read\n"
        "6 of 6 tokens used\n"
        "2 blocks of 4 tokens, the last of 2, one after the other from the beginning"
    )


def test_long_default_text_makes_no_noise(byte_tokenizer, caplog, capfd):
    byte_tokenizer.model_max_length = 512
    rows = read_rows(None, notify=lambda _: None)
    report = token_blocks(rows, byte_tokenizer, context_length=512, samples=4).report
    assert report.source == "pydoc_data.topics"
    assert (report.blocks, report.tokens_used, report.rows_read) == (4, 2048, 1)
    assert report.tokens_available > 300_000
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@given(
    st.lists(st.one_of(st.none(), st.text("ab \n", max_size=20)), max_size=8),
    st.integers(1, 12),
    st.integers(1, 5),
)
def test_blocks_hold_all_the_text_in_order(rows, context_length, samples):
    tokenizer = _tokenizer()
    texts = [row for row in rows if row and not row.isspace()]
    stream = "\x02".join(texts).encode()
    if not stream:
        with pytest.raises(DataError):
            token_blocks(Rows("t", rows), tokenizer, context_length=context_length, samples=samples)
        return
    result = token_blocks(
        Rows("t", rows), tokenizer, context_length=context_length, samples=samples
    )
    assert b"".join(map(bytes, _ids(result))) == stream[: context_length * samples]
    report = result.report
    assert report.tokens_used == min(len(stream), context_length * samples)
    if not report.stopped_early:
        assert report.rows_read == len(rows)
        assert report.rows_unusable == rows.count(None)
        assert report.rows_read - report.rows_empty - report.rows_unusable == len(texts)


_CACHE = []


def _tokenizer():
    """The byte tokenizer without a fixture, which hypothesis would complain about."""
    if not _CACHE:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        shown = {byte: chr(byte) if 33 <= byte <= 126 else chr(256 + byte) for byte in range(127)}
        vocab = {char: byte for byte, char in shown.items() if byte != 2}
        backend = Tokenizer(models.BPE({**vocab, "<eos>": 2}, [], unk_token="?"))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        _CACHE.append(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))
    return _CACHE[0]
