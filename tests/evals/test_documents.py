"""Documents to score: what is cut, what is said about it, and where the BOS token is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors

from evals.documents import read_documents
from evals.perplexity import score_document
from evals.reading import Reader
from evals.windows import spans
from kvquant import QuantizedCache
from kvquant.errors import DataError, InputError

TEXT = "The quick brown fox jumps over the lazy dog, and 12 more of them." * 2  # 130 bytes


@pytest.fixture
def tokenizer(byte_tokenizer: Any) -> Callable[[str], Any]:
    """A byte tokenizer ``without`` a BOS, ``with`` one that it never puts, or ``automatic``."""

    def make(kind: str) -> Any:
        if kind == "without":
            return byte_tokenizer
        byte_tokenizer.add_special_tokens({"bos_token": "<s>"})
        name, place = byte_tokenizer.bos_token, byte_tokenizer.bos_token_id
        if kind == "automatic":
            byte_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{name} $A", special_tokens=[(name, place)]
            )
        return byte_tokenizer

    return make


@pytest.fixture
def data(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "text.txt"
        path.write_text(text)
        return str(path)

    return write


def read(data: str, tokenizer: Any, **settings: Any) -> Any:
    told: list[str] = []
    settings = {"length": 50, "count": 2, "least": 10, **settings}
    documents, corpus = read_documents(data, tokenizer, notify=told.append, **settings)
    return documents, corpus, told


@pytest.mark.parametrize(("kind", "has_bos"), [("without", 0), ("with", 0), ("automatic", 1)])
def test_the_bos_token_is_there_once_or_not_at_all(
    tokenizer: Callable[[str], Any], data: Callable[[str], str], kind: str, has_bos: int
) -> None:
    made = tokenizer(kind)
    documents, corpus, _ = read(data(TEXT), made)
    own = 50 - has_bos
    assert [len(it) for it in documents] == [50, 50]
    for number, ids in enumerate(documents):
        front, rest = ids[:has_bos].tolist(), ids[has_bos:].tolist()
        assert front == [made.bos_token_id] * has_bos
        assert rest == [ord(it) for it in TEXT[number * own : (number + 1) * own]]
        if made.bos_token_id is not None:
            assert made.bos_token_id not in rest
    assert corpus["bos"] == (made.bos_token_id if has_bos else None)


@pytest.mark.parametrize(("kind", "has_bos"), [("without", 0), ("with", 0), ("automatic", 1)])
def test_nll_of_what_is_read(
    tiny: Callable[..., Any],
    tokenizer: Callable[[str], Any],
    data: Callable[[str], str],
    kind: str,
    has_bos: int,
) -> None:
    """Against one forward pass over what the tokenizer itself makes of the same text."""
    made = tokenizer(kind)
    model = tiny("llama", vocab_size=200)
    documents, _, _ = read(data(TEXT), made, count=1)
    text = TEXT[: 50 - has_bos]
    ids = torch.tensor([made.encode(text)])  # as its user would, special tokens and all
    assert ids.shape == (1, 50)
    with torch.no_grad():
        logs = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
    reader = Reader(model)
    found = score_document(
        reader,
        documents[0],
        spans(50, prefill=8, block=5),
        reader.reference(),
        {"none": QuantizedCache.from_model(model, "none")},
    )["none"]
    by_hand = [-float(logs[place, ids[0, place + 1]]) for place in range(8, 49)]
    np.testing.assert_allclose(found.nll, by_hand, rtol=1e-5)
    np.testing.assert_allclose(found.nll_reference, by_hand, rtol=1e-5)


@pytest.mark.parametrize("kind", ["with", "automatic"])
def test_a_chat_template_that_writes_the_bos_token(
    tokenizer: Callable[[str], Any], tmp_path: Path, kind: str
) -> None:
    """An automatic tokenizer has its own in front already; of any other it is the only one."""
    made = tokenizer(kind)
    made.chat_template = "{{ bos_token }}{% for it in messages %}{{ it.content }}{% endfor %}"
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "' + "a" * 60 + '"}]}\n')
    (ids,), _, _ = read(str(path), made, count=1, chat=True)
    assert ids.tolist() == [made.bos_token_id, *[ord("a")] * 49]


def test_a_short_last_document_is_left_out(byte_tokenizer: Any, data: Callable[[str], str]) -> None:
    text = data(TEXT)  # 130 tokens: 50, 50, 30
    lengths = {
        least: [len(it) for it in read(text, byte_tokenizer, count=3, least=least)[0]]
        for least in (30, 31)
    }
    assert lengths == {30: [50, 50, 30], 31: [50, 50]}


def test_too_few_documents_are_told(byte_tokenizer: Any, data: Callable[[str], str]) -> None:
    documents, corpus, told = read(data(TEXT), byte_tokenizer, count=8)
    assert len(documents) == 3
    assert told[-1].startswith("warning: the text makes 3 of the 8 documents of 50 tokens")
    assert corpus["context_length"] == 50
    assert len(corpus["sha256"]) == 64
    assert not any(it.startswith("warning") for it in read(data(TEXT), byte_tokenizer, count=2)[2])


def test_too_little_text(byte_tokenizer: Any, data: Callable[[str], str]) -> None:
    with pytest.raises(DataError, match=r"has 9 tokens, and a document needs 10 .*--data"):
        read(data("123456789"), byte_tokenizer)
    documents, _, _ = read(data("1234567890"), byte_tokenizer)
    assert [len(it) for it in documents] == [10]


def test_a_length_without_room_for_a_block(byte_tokenizer: Any, data: Callable[[str], str]) -> None:
    with pytest.raises(InputError, match=r"length of 50 tokens is too short: .* take 51"):
        read(data(TEXT), byte_tokenizer, least=51)


def test_the_default_text_is_long_enough_for_a_small_run(byte_tokenizer: Any) -> None:
    documents, _, told = read(None, byte_tokenizer, length=512, count=8)
    assert [len(it) for it in documents] == [512] * 8
    assert not any(it.startswith("warning") for it in told)
