from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evals.encoding import Encoding
from evals.words import ADJECTIVES, NOUNS, Vocabulary
from kvquant.errors import InputError


@pytest.fixture
def vocabulary(byte_tokenizer):
    return Vocabulary.of(Encoding(byte_tokenizer))


def test_words_of_the_most_frequent_length_are_used(vocabulary):
    assert vocabulary.adjectives == tuple(word for word in ADJECTIVES if len(word) == 6)
    assert vocabulary.nouns == tuple(word for word in NOUNS if len(word) == 6)
    assert len(set(vocabulary.numbers)) == len(vocabulary.numbers) > 4000
    assert all(len(it) == 7 and it.isdigit() and it[0] != "0" for it in vocabulary.numbers)
    assert len(set(vocabulary.variables)) == len(vocabulary.variables) > 1000
    assert all(len(it) == 5 and it.isupper() for it in vocabulary.variables)
    assert not set("AEIOUY") & set("".join(vocabulary.variables))


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_nothing_is_drawn_twice(seed, count):
    vocabulary = Vocabulary(("a", "b"), ("x", "y", "z"), tuple("123456"), tuple("BCDFGH"))
    generator = np.random.default_rng(seed)
    keys = vocabulary.keys(generator, count)
    assert len(set(keys)) == count
    assert {key.split()[0] for key in keys} <= {"a", "b"}
    assert {key.split()[1] for key in keys} <= {"x", "y", "z"}
    for drawn, among in (
        (vocabulary.values(generator, count), vocabulary.numbers),
        (vocabulary.names(generator, count), vocabulary.variables),
    ):
        assert len(set(drawn)) == count
        assert set(drawn) <= set(among)


def _words_only(*words):
    vocab = {word: number for number, word in enumerate(["<unk>", *dict.fromkeys(words)])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize(
    ("known", "kind"),
    [
        ((), "adjectives .*'able'"),
        (ADJECTIVES, "nouns .*'acorn'"),
        ((*ADJECTIVES, *NOUNS), "numbers "),
        ((*ADJECTIVES, *NOUNS, *"0123456789"), "names of variables "),
    ],
)
def test_a_tokenizer_that_cannot_write_needles_is_refused(known, kind):
    with pytest.raises(InputError, match=f"no tokens for most {kind}"):
        Vocabulary.of(Encoding(_words_only(*known)))


def test_words_that_the_tokenizer_does_not_know_are_not_used(vocabulary):
    known = _words_only(*ADJECTIVES[:150], *NOUNS, *"0123456789", *vocabulary.variables)
    found = Vocabulary.of(Encoding(known))
    assert found.adjectives == ADJECTIVES[:150]
    assert found.nouns == NOUNS
    assert found.variables == vocabulary.variables
