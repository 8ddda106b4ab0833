"""Rows of text or of chat messages, from whatever the user has: read one by one, never all at once.

What a file holds and what a row is:

    notes.txt         the whole file is one row
    data.jsonl        one JSON object a line, the text in one of its fields
    data.json         one list of such objects; read whole, and only where it is named itself
    data.parquet      one row a record, likewise
    directory         all such files below it, sorted by path
    NAME, NAME:CONFIG a data set for the `datasets` library
    nothing           the standard library's help topics, about 100,000 tokens of English
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import DataError

Messages: TypeAlias = list[dict[str, Any]]
Row: TypeAlias = "str | Path | Messages | None"
"""Text, a text file, chat messages, or None for a row with nothing usable in it."""

_SUFFIXES = (".txt", ".jsonl", ".parquet")
"""What a directory is searched for: a `.json` file in it is as often a config as data."""
_CHAT_FIELDS = ("messages", "conversations")
_ROWS_TO_LOOK_AT = 100
# ShareGPT's names for OpenAI's.
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Rows:
    """Rows and where they come from.

    Attributes:
        source: For the report.
        rows: Read once, lazily; a broken line is found when its turn comes.
    """

    source: str
    rows: Iterable[Row]

    def __iter__(self) -> Iterator[Row]:
        """The rows."""
        return iter(self.rows)


def read_rows(
    data: str | None,
    *,
    text_field: str | None = None,
    chat: bool = False,
    split: str = "train",
    notify: Callable[[str], None],
) -> Rows:
    """Opens calibration text.

    Args:
        data: See the module's docstring.
        text_field: Field with the text, or with the message list. Else it is ``text`` (with `chat`
            ``messages`` or ``conversations``), or the only field that holds strings.
        chat: Look for message lists.
        split: Split of a data set that has several.
        notify: Told of the default text, of files that are left out, and of a field that was
            chosen.

    Raises:
        DataError: Nothing there, or nothing that can be read. What is wrong inside a file is
            raised when its rows are read: undecodable text, a broken line, no such field.
    """
    if data is None:
        notify(
            "no data given: reading Python's help topics; text like your own traffic is "
            "better (--data)"
        )
        return Rows("pydoc_data.topics", [_help_topics()])
    if not data:
        raise DataError("the name of the data is empty: give a file, a directory or a data set")
    path = Path(data).expanduser()
    if path.is_dir():
        return Rows(data, _directory_rows(path, text_field, chat, notify))
    if path.is_file():
        return Rows(data, _file_rows(path, text_field, chat, notify))
    if (
        _kind(path) in (*_SUFFIXES, ".json")
        or data.startswith(("/", ".", "~"))
        or data.count("/") > 1
    ):
        raise DataError(f"there is no file or directory {data}")
    records = _dataset_records(data, split)
    return Rows(f"{data} ({split})", _pick(records, data, text_field, chat, notify))


def _help_topics() -> str:
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise DataError(
            "this Python comes without its help topics: give text with --data"
        ) from error
    values: dict[str, str] = topics.topics
    return " ".join(values.values())


def _directory_rows(
    directory: Path, text_field: str | None, chat: bool, notify: Callable[[str], None]
) -> Iterator[Row]:
    """Rows of all files below `directory`, file by file; hidden ones are others' caches."""
    files = sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(directory).parts)
    )
    readable = [path for path in files if _kind(path) in _SUFFIXES]
    if not readable:
        raise DataError(f"{directory} has no {', '.join(_SUFFIXES)} file ({len(files)} others)")
    if len(readable) < len(files):
        notify(f"{directory}: {len(files) - len(readable)} files of other kinds are not read")
    return itertools.chain.from_iterable(
        _file_rows(path, text_field, chat, notify) for path in readable
    )


def _file_rows(
    path: Path, text_field: str | None, chat: bool, notify: Callable[[str], None]
) -> Iterable[Row]:
    kind = _kind(path)
    if kind == ".txt":
        return [path]
    readers = {".jsonl": _json_lines, ".json": _json_list, ".parquet": _parquet_records}
    if kind not in readers:
        raise DataError(f"{path} is of no known kind: possible are .txt, {', '.join(readers)}")
    return _pick(readers[kind](path), str(path), text_field, chat, notify)


def _kind(path: Path) -> str:
    """Its suffix, ``.txt`` for ``NOTES.TXT`` too."""
    return path.suffix.lower()


def _json_lines(path: Path) -> Iterator[Any]:
    """The values in a JSONL file; lines without anything in them are none."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _json_value(line, f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _json_list(path: Path) -> Iterator[Any]:
    """The entries of a file that is one JSON list."""
    try:
        entries = _json_value(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(entries, list):
        raise DataError(
            f"{path} is no list of rows: give a list of objects, or one a line (.jsonl)"
        )
    yield from entries


def _json_value(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error


def _parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _dataset_records(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Records of a data set, streamed."""
    from datasets import load_dataset

    dataset, _, config = name.partition(":")
    try:
        yield from load_dataset(dataset, config or None, split=split, streaming=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"there is no file or directory {name}, and no data set of that name with a split "
            f"{split!r} could be read ({reason})"
        ) from error


def _pick(
    records: Iterator[Any],
    source: str,
    text_field: str | None,
    chat: bool,
    notify: Callable[[str], None],
) -> Iterator[Row]:
    """The text or the messages of each record.

    Raises:
        DataError: No record has the field; the message lists the fields that there are.
    """
    ahead = list(itertools.islice(records, _ROWS_TO_LOOK_AT))
    field = text_field or _find_field(ahead, source, chat)
    if text_field is None and field not in ("text", *_CHAT_FIELDS):
        notify(f"{source}: reading the field {field!r} (--text-field names another)")
    seen: dict[str, None] = {}
    found = False
    for record in itertools.chain(ahead, records):
        if isinstance(record, Mapping):
            found = found or field in record
            seen.update(dict.fromkeys(record))
            yield _row(record.get(field))
        else:
            yield _row(record)
    if seen and not found:
        raise DataError(f"no row of {source} has a field {field!r}: there are {', '.join(seen)}")


def _find_field(records: list[Any], source: str, chat: bool) -> str:
    """The field that holds the text, judged by the first rows."""
    mappings = [record for record in records if isinstance(record, Mapping)]
    fields: dict[str, None] = dict.fromkeys(field for record in mappings for field in record)
    for field in _CHAT_FIELDS if chat else ("text",):
        if field in fields or not mappings:
            return field
    kind = list if chat else str
    fitting = [name for name in fields if any(isinstance(it.get(name), kind) for it in mappings)]
    if len(fitting) == 1:
        return fitting[0]
    what = "message lists" if chat else "text"
    hint = "" if chat or not fields.keys() & set(_CHAT_FIELDS) else "; for message lists add --chat"
    raise DataError(
        f"which field of {source} holds the {what}? Name it with --text-field: "
        f"there are {', '.join(fields)}{hint}"
    )


def _row(value: Any) -> Row:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(it, Mapping) for it in value):
        return [_message(it) for it in value]
    return None


def _message(values: Mapping[str, Any]) -> dict[str, Any]:
    """One message in OpenAI's form, from there or from ShareGPT's ``from`` and ``value``."""
    if "from" not in values or "role" in values:
        return dict(values)
    role = str(values["from"])
    return {"role": _ROLES.get(role, role), "content": values.get("value")}
