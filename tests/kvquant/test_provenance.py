from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from kvquant.errors import FingerprintError
from kvquant.fingerprint import Fingerprint
from kvquant.provenance import Provenance, title

MODEL = Fingerprint("w" * 64, ("a" * 64,), "tokenizer", "template")
FIRST = Provenance(
    model="my-model",
    adapters=("out/adapter",),
    fingerprints=(MODEL,),
    corpora=({"source": "a.txt", "rows": 3, "tokens": 100},),
    tokens=100,
    longest_position=64,
    context_length=64,
    versions={"torch": "2.13", "transformers": "5.24"},
    command=("kvquant calibrate --data a.txt",),
    notes=("chunks of 2048",),
)
SECOND = replace(
    FIRST,
    corpora=({"source": "b.txt", "rows": 1, "tokens": 50},),
    tokens=50,
    longest_position=32,
    versions={"torch": "2.12", "peft": "0.21"},
    command=("kvquant calibrate --data b.txt",),
)


def test_merged_statistics_come_from_both_texts() -> None:
    assert FIRST.merge(SECOND) == Provenance(
        model="my-model",
        adapters=("out/adapter",),
        fingerprints=(MODEL,),
        corpora=FIRST.corpora + SECOND.corpora,
        tokens=150,
        longest_position=64,
        context_length=64,
        versions={"torch": "2.13", "transformers": "5.24", "peft": "0.21"},
        command=FIRST.command + SECOND.command,
        notes=("chunks of 2048",),
    )


def test_merging_is_associative() -> None:
    third = replace(SECOND, tokens=7, longest_position=99, command=("kvquant merge",))
    assert FIRST.merge(SECOND).merge(third) == FIRST.merge(SECOND.merge(third))


def test_another_template_does_not_keep_statistics_from_merging() -> None:
    other = replace(SECOND, fingerprints=(replace(MODEL, chat_template="", tokenizer="t"),))
    assert FIRST.merge(other).fingerprints == (MODEL,)


@pytest.mark.parametrize(
    "theirs",
    [
        (replace(MODEL, weights="v" * 64),),
        (replace(MODEL, adapters=()),),
        (replace(MODEL, adapters=("a" * 64, "b" * 64)),),
        (),
        (MODEL, MODEL),
    ],
)
def test_statistics_of_different_models_do_not_merge(theirs: tuple[Fingerprint, ...]) -> None:
    other = replace(SECOND, fingerprints=theirs)
    for one, two in ((FIRST, other), (other, FIRST)):
        with pytest.raises(
            FingerprintError, match=r"the first statistics belong to .*, the second"
        ):
            one.merge(two)


def test_what_is_shared_holds_for_both() -> None:
    base = replace(MODEL, adapters=())
    other = replace(SECOND, fingerprints=(base,), adapters=(), notes=("another",))
    shared = FIRST.union(other)
    assert shared.fingerprints == (MODEL, base)
    assert shared.adapters == ("out/adapter",)
    assert (shared.tokens, shared.longest_position) == (50, 32)
    assert shared.corpora == FIRST.corpora + SECOND.corpora
    assert shared.notes == ("chunks of 2048", "another")
    assert shared.command == FIRST.command + SECOND.command
    assert shared.union(other) == shared


@pytest.mark.parametrize(
    ("model", "adapters", "expected"),
    [
        ("", (), "unnamed model"),
        ("smollm2", (), "smollm2"),
        ("/models/tiny-llama/", ("out/tiny-lora",), "tiny-llama + tiny-lora"),
        ("org/name", ("/a/b/lora", "c/"), "name + lora + c"),
        ("", ("c",), "c"),
    ],
)
def test_titles_do_without_directories(
    model: str, adapters: tuple[str, ...], expected: str
) -> None:
    assert title(model, adapters) == expected


def test_it_survives_json() -> None:
    stored = json.loads(json.dumps(FIRST.to_dict()))
    assert Provenance.from_dict(stored) == FIRST
    assert set(stored) == {field.name for field in fields(Provenance)}
    assert Provenance.from_dict(json.loads(json.dumps(Provenance().to_dict()))) == Provenance()


@pytest.mark.parametrize(
    ("served", "known"),
    [
        (MODEL, True),
        (replace(MODEL, tokenizer="other"), False),
        (replace(MODEL, tokenizer=""), True),
        (replace(MODEL, chat_template="other"), True),
    ],
)
def test_it_knows_which_tokenizer_cut_the_text(served: Fingerprint, known: bool) -> None:
    assert FIRST.knows_tokenizer(served) is known
    assert Provenance(fingerprints=(Fingerprint("w"),)).knows_tokenizer(served)
