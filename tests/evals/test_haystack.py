from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.encoding import Encoding
from evals.haystack import NOISE, Haystack, noise, read_haystack, sentences
from kvquant.errors import DataError


@pytest.fixture
def encoding(byte_tokenizer):
    return Encoding(byte_tokenizer)


@pytest.fixture
def read(tmp_path, encoding):
    """``read(content, longest)``: what was read of a file, and what was said about it."""

    def run(content, longest=10, name="text.txt"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        said: list[str] = []
        found = read_haystack((str(path),), encoding, longest=longest, notify=said.append)
        return found, said

    return run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\n ", []),
        ("One", ["One"]),
        ("One two. Three! Four? Five", ["One two.", "Three!", "Four?", "Five"]),
        ('He said "no." (Really.) Yes.', ['He said "no."', "(Really.)", "Yes."]),
        ("3.14 is\nno end.ing", ["3.14 is no end.ing"]),
        ("One\n\nTwo\n \n\nThree  four", ["One", "Two", "Three four"]),
        ("你好。再见！", ["你好。", "再见！"]),
        ("a" * 650, ["a" * 300, "a" * 300, "a" * 50]),
        ("a" * 200 + " " + "b" * 99 + " c", ["a" * 200 + " " + "b" * 99, "c"]),
        ("a" * 200 + " " + "b" * 100 + " c", ["a" * 200, "b" * 100 + " c"]),
    ],
)
def test_where_a_text_is_cut(text, expected):
    assert list(sentences(text)) == expected


@given(st.text(alphabet="ab.?! \n\t。", max_size=2000))
def test_no_character_gets_lost_but_white_space(text):
    found = list(sentences(text))
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(0 < len(it) <= 300 and it == it.strip() for it in found)


def test_each_sentence_is_tokenized_by_itself(read):
    found, said = read("One two. Three.\n\nFour", longest=19)
    assert found.tokens.tolist() == [*b" One two. Three. Four"]
    assert found.tokens.dtype == np.int64
    assert found.ends.tolist() == [9, 16, 21]
    assert found.sha256 == hashlib.sha256(b"One two.\nThree.\nFour\n").hexdigest()
    assert found.source.endswith("text.txt")
    assert said == []


def test_a_text_that_is_too_short_is_announced_once(read):
    found, said = read("One two.", longest=100)
    assert len(found.tokens) == 9
    [message] = said
    assert "has 9 tokens: it is repeated to fill prompts of 100 " in message


def test_no_more_is_read_than_prompts_can_use(read):
    lines = (
        json.dumps({"text": f"Sentence {number:06} of this text."}) for number in range(20_000)
    )
    content = "\n".join(lines) + "\n{broken"
    found, said = read(content, longest=1000, name="rows.jsonl")
    # one batch of 4,096 sentences of 32 tokens is more than four prompts of 1,000
    assert len(found.ends) == 4096
    assert said == []
    with pytest.raises(DataError, match=r"line 20001: not JSON"):
        read(content, longest=200_000, name="rows.jsonl")


def test_rows_of_all_files_in_the_order_given(tmp_path, encoding):
    (tmp_path / "b.txt").write_text("Bee.")
    (tmp_path / "more").mkdir()
    rows = [{"text": "Row."}, {"text": None}, {"text": "  "}, {"text": [{"role": "user"}]}]
    (tmp_path / "more" / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "more" / "c.txt").write_text("Sea.")
    data = (str(tmp_path / "b.txt"), str(tmp_path / "more"))
    found = read_haystack(data, encoding, longest=3, notify=print)
    assert bytes(found.tokens.tolist()) == b" Bee. Row. Sea."
    assert found.source == ", ".join(data)


def test_the_field_of_the_rows(tmp_path, encoding):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "No.", "body": "Yes."}))
    found = read_haystack((str(path),), encoding, longest=3, text_field="body", notify=print)
    assert bytes(found.tokens.tolist()) == b" Yes."


@pytest.mark.parametrize("content", ["", " \n \n"])
def test_no_text_is_an_error(read, content):
    with pytest.raises(DataError, match=r"no text in .*text\.txt: --haystack takes"):
        read(content)


def test_message_lists_are_no_text(read):
    rows = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(DataError, match="--text-field"):
        read(rows, name="rows.jsonl")


def test_nothing_there_is_an_error(encoding):
    with pytest.raises(DataError, match=r"no file or directory \./nowhere"):
        read_haystack(("./nowhere",), encoding, longest=3, notify=print)


def test_the_default_text_is_english_and_is_announced(encoding):
    said: list[str] = []
    found = read_haystack((), encoding, longest=1000, notify=said.append)
    assert said == ["needles are hidden in Python's help topics (--haystack takes other text)"]
    assert len(found.tokens) >= 4000
    assert b"statement" in bytes(found.tokens[:2000].tolist())
    assert found.source == "pydoc_data.topics"


def test_noise_is_one_sentence(encoding):
    assert bytes(noise(encoding).tokens.tolist()).decode() == f" {NOISE}"
    assert noise(encoding).ends.tolist() == [len(NOISE) + 1]


TEN = Haystack("test", np.arange(10), np.array([3, 5, 10]), "")


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, {(): [0]}),
        (2, {(1, 2): [0, 2], (3, 4): [0, 2], (8, 9): [0, 2]}),
        (4, {(9, 0, 1, 2): [0, 1, 4], (1, 2, 3, 4): [0, 2, 4], (6, 7, 8, 9): [0, 4]}),
        (
            12,
            {
                (1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2): [0, 2, 4, 9, 12],
                (3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4): [0, 2, 7, 10, 12],
                (8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9): [0, 2, 5, 7, 12],
            },
        ),
    ],
)
def test_what_is_cut_out_ends_with_a_sentence_and_goes_round(count, expected):
    drawn = {}
    for seed in range(40):
        ids, places = TEN.draw(np.random.default_rng(seed), count)
        drawn[tuple(ids.tolist())] = places.tolist()
    assert drawn == expected


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    count=st.integers(0, 100),
    seed=st.integers(0, 2**32),
)
def test_places_are_where_sentences_end(lengths, count, seed):
    size = sum(lengths)
    haystack = Haystack("test", np.arange(size), np.cumsum(lengths), "")
    ids, places = haystack.draw(np.random.default_rng(seed), count)
    assert len(ids) == count
    assert places[0] == 0
    assert places[-1] == count
    assert (np.diff(places) > 0).all()
    ends = set(haystack.ends.tolist())
    follows = [int(ids[place - 1]) + 1 for place in places[1:]]
    assert set(follows) <= ends
    assert [int(it) + 1 for it in ids if int(it) + 1 in ends] == follows
    assert ((np.diff(ids) - 1) % size == 0).all()
