from __future__ import annotations

import json

import pytest

from kvquant.errors import DataError
from kvquant.text.rows import read_rows


@pytest.fixture
def read():
    """``read(data, **options)``: all rows at once."""

    def all_rows(data, **options):
        said = []
        rows = list(read_rows(None if data is None else str(data), notify=said.append, **options))
        all_rows.said = said
        return rows

    return all_rows


@pytest.fixture
def jsonl(tmp_path):
    """``jsonl(*values)``: a file with a JSON value a line."""

    def write(*values, name="data.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
        return path

    return write


def test_no_data_means_the_help_topics_and_says_so(read):
    from pydoc_data.topics import topics

    (text,) = read(None)
    assert text == " ".join(topics.values())
    assert len(text) > 300_000
    assert read.said == [
        "no data given: reading Python's help topics; text like your own traffic is better (--data)"
    ]


def test_a_text_file_is_one_row(read, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("one\n\ntwo", encoding="utf-8")
    assert read(path) == [path]


def test_source_is_what_the_user_typed(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("one")
    assert read_rows(str(path), notify=print).source == str(path)


@pytest.mark.parametrize(
    ("records", "options", "expected"),
    [
        ([{"text": "a", "id": "x"}, {"text": "b"}], {}, ["a", "b"]),
        ([{"id": 1, "body": "a"}, {"id": 2, "body": "b"}], {}, ["a", "b"]),
        ([{"id": "x"}, {"text": "b"}], {}, [None, "b"]),
        ([{"id": "x", "body": "a"}], {"text_field": "body"}, ["a"]),
        ([{"text": None}, {"text": 7}, {"text": ["a"]}, {"text": ""}], {}, [None, None, None, ""]),
        (["a", None, 7], {}, ["a", None, None]),
        ([{"body": "a"}, {"other": 1}], {"text_field": "body"}, ["a", None]),
    ],
)
def test_the_field_with_the_text(read, jsonl, records, options, expected):
    assert read(jsonl(*records), **options) == expected


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("record", "options", "expected"),
    [
        ({"messages": MESSAGES, "text": "t"}, {}, MESSAGES),
        ({"conversations": MESSAGES}, {}, MESSAGES),
        ({"dialog": MESSAGES, "id": 1}, {}, MESSAGES),
        ({"a": MESSAGES, "b": MESSAGES}, {"text_field": "b"}, MESSAGES),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "h"},
                    {"from": "gpt", "value": "g"},
                ]
            },
            {},
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "h"},
                {"role": "assistant", "content": "g"},
            ],
        ),
        ({"messages": []}, {}, None),
        ({"messages": ["hi"]}, {}, None),
    ],
)
def test_message_lists(read, jsonl, record, options, expected):
    assert read(jsonl(record), chat=True, **options) == [expected]


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"id": "x", "body": "a"}], {}, r"which field .* holds the text\?.*: there are id, body$"),
        ([{"messages": MESSAGES}], {}, r"there are messages; for message lists add --chat"),
        ([{"id": 1}], {}, r"which field .*there are id$"),
        (
            [{"id": 1, "text": "t"}],
            {"chat": True},
            r"holds the message lists\?.*there are id, text$",
        ),
        (
            [{"id": 1, "text": "t"}, {"more": 2}],
            {"text_field": "body"},
            r"no row of .*data\.jsonl has a field 'body': there are id, text, more",
        ),
    ],
)
def test_no_such_field(read, jsonl, records, options, message):
    with pytest.raises(DataError, match=message):
        read(jsonl(*records), **options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "b"', r"data\.jsonl, line 3: not JSON"),
        (b'{"text": "\xff"}', r"data\.jsonl, line 3: not UTF-8"),
        (b"[" * 100_000, r"data\.jsonl, line 3: not JSON"),
    ],
)
def test_broken_line_is_numbered(read, tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "c"}\n')
    with pytest.raises(DataError, match=message):
        read(path)


def test_lines_are_read_only_when_their_turn_comes(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n' * 200 + "broken\n")
    rows = iter(read_rows(str(path), notify=print))
    assert [next(rows) for _ in range(200)] == ["a"] * 200
    with pytest.raises(DataError, match="line 201: not JSON"):
        next(rows)


def test_byte_order_mark_is_no_text(read, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert read(path) == ["a"]


def test_parquet(read, tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "data.parquet"
    table = pyarrow.table({"text": ["a", None, ""], "id": [1, 2, 3]})
    pyarrow.parquet.write_table(table, path)
    assert read(path) == ["a", None, ""]
    chats = pyarrow.table({"messages": [MESSAGES, None]})
    pyarrow.parquet.write_table(chats, path)
    assert read(path, chat=True) == [MESSAGES, None]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cannot read .*data\.parquet"):
        read(path)


def test_directory_is_read_in_order_and_says_what_it_leaves_out(read, jsonl, tmp_path):
    jsonl({"text": "b"}, name="all/b.jsonl")
    jsonl({"body": "c"}, name="all/deep/c.jsonl")
    (tmp_path / "all" / "a.txt").write_text("a")
    (tmp_path / "all" / "readme.md").write_text("no")
    assert read(tmp_path / "all") == [tmp_path / "all" / "a.txt", "b", "c"]
    assert read.said == [
        f"{tmp_path / 'all'}: 1 files of other kinds are not read",
        f"{tmp_path / 'all/deep/c.jsonl'}: reading the field 'body' (--text-field names another)",
    ]


def test_directory_without_text(read, tmp_path):
    (tmp_path / "readme.md").write_text("no")
    with pytest.raises(DataError, match=r"has no \.txt, \.jsonl, \.parquet file \(1 others\)"):
        read(tmp_path)


@pytest.mark.parametrize(
    "data", ["nothing.jsonl", "nothing.json", "./nothing", "/no/where", "~/no-where", "a/b/c"]
)
def test_missing_file(read, data):
    with pytest.raises(DataError, match=f"there is no file or directory {data}"):
        read(data)


def test_unknown_kind_of_file(read, tmp_path):
    path = tmp_path / "data.docx"
    path.write_text("a")
    with pytest.raises(
        DataError, match=r"of no known kind: possible are \.txt, \.jsonl, \.json, \.parquet"
    ):
        read(path)


def test_data_set_that_cannot_be_had(read, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"no data set of that name with a split 'test'.*\(.+\)$"):
        read("somebody/some-data", split="test")


def test_empty_name_is_not_the_current_directory(read, jsonl, monkeypatch):
    monkeypatch.chdir(jsonl({"text": "a"}).parent)
    with pytest.raises(DataError, match="the name of the data is empty"):
        read("")


def test_hidden_files_of_a_directory_are_not_text(read, tmp_path):
    for name in ("a.txt", ".b.txt", ".cache/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text", encoding="utf-8")
    assert read(tmp_path) == [tmp_path / "a.txt"]
    assert read.said == []


def test_suffixes_in_capitals(read, jsonl):
    assert read(jsonl({"text": "a"}, name="DATA.JSONL")) == ["a"]


def test_field_that_no_record_has_is_an_error_beside_bare_texts(read, jsonl):
    with pytest.raises(DataError, match=r"no row of .* has a field 'body': there are text"):
        read(jsonl("bare", {"text": "a"}), text_field="body")


def test_json_list(read, tmp_path):
    path = tmp_path / "data.json"
    path.write_text('[{"text": "a"}, {"text": "b"}, {"other": 1}]')
    assert read(path) == ["a", "b", None]


@pytest.mark.parametrize(
    ("content", "reason"),
    [('{"text": "a"}', "is no list of rows"), ("[1,", "not JSON"), ("", "not JSON")],
)
def test_json_that_is_no_list(read, tmp_path, content, reason):
    path = tmp_path / "data.json"
    path.write_text(content)
    with pytest.raises(DataError, match=reason):
        read(path)


def test_json_in_a_directory_may_be_a_config(read, jsonl, tmp_path):
    jsonl({"text": "a"}, name="all/a.jsonl")
    (tmp_path / "all" / "dataset_info.json").write_text("{}")
    assert read(tmp_path / "all") == ["a"]
