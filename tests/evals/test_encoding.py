from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from evals.encoding import Encoding
from kvquant.errors import InputError

TEMPLATE = (
    "{{ bos_token }}{% for it in messages %}[{{ it.role }}]{{ it.content }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _with_specials(tokenizer, single, **tokens):
    """The byte tokenizer, which by itself adds ``<s>``, ``</s>`` or both to a text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[(it, backend.token_to_id(it)) for it in ("<s>", "</s>")],
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def _metaspace(prepend):
    """Letters as tokens, a blank as ``▁``; `prepend`: whether every text gets one in front."""
    letters = ["<unk>", "▁", *map(chr, range(33, 127))]
    backend = Tokenizer(
        models.BPE({it: number for number, it in enumerate(letters)}, [], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_a_blank_is_put_between_sentences_where_the_tokenizer_puts_none(byte_tokenizer):
    encoding = Encoding(byte_tokenizer)
    assert encoding.space == " "
    assert encoding.sentences(["One.", "Two."]) == [[*b" One."], [*b" Two."]]
    assert encoding.text("One.") == [*b"One."]
    assert encoding.text("") == encoding.sentences([]) == []


@pytest.mark.parametrize(("prepend", "space"), [("always", ""), ("never", " ")])
def test_there_is_one_blank_between_sentences_whatever_the_tokenizer_does(prepend, space):
    encoding = Encoding(_metaspace(prepend))
    assert encoding.space == space
    ids = [encoding.tokenizer.convert_ids_to_tokens(it) for it in encoding.sentences(["a", "bc"])]
    assert ids == [["▁", "a"], ["▁", "b", "c"]]


@pytest.mark.parametrize(
    ("single", "tokens", "before"),
    [
        ("$A", {}, []),
        ("$A", {"bos_token": "<s>"}, []),
        ("<s> $A", {"bos_token": "<s>"}, ["<s>"]),
        ("<s> $A </s>", {"bos_token": "<s>", "eos_token": "</s>"}, ["<s>"]),
        ("$A </s>", {"eos_token": "</s>"}, []),
    ],
)
def test_a_bos_token_only_where_the_tokenizer_puts_one_and_never_an_eos(
    byte_tokenizer, single, tokens, before
):
    encoding = Encoding(_with_specials(byte_tokenizer, single, **tokens))
    frame = encoding.frame(chat=False)
    assert encoding.tokenizer.convert_ids_to_tokens(frame.before) == before
    assert frame.after == ()
    assert encoding.text("a") == [97]
    assert encoding.sentences(["a", "b"]) == [[32, 97], [32, 98]]


@pytest.mark.parametrize("single", ["$A", "<s> $A"])
def test_the_chat_template_is_split_around_the_message_with_one_bos(byte_tokenizer, single):
    tokenizer = _with_specials(byte_tokenizer, single, bos_token="<s>")
    tokenizer.chat_template = TEMPLATE
    frame = Encoding(tokenizer).frame(chat=True)
    assert frame.before == (tokenizer.bos_token_id, *b"[user]")
    assert frame.after == (*b"[/][assistant]",)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert whole == [*frame.before, *b"Hi", *frame.after]


def test_a_bos_token_that_the_template_leaves_out_is_put_where_the_tokenizer_puts_one(
    byte_tokenizer,
):
    tokenizer = _with_specials(byte_tokenizer, "<s> $A", bos_token="<s>")
    tokenizer.chat_template = "[{{ messages[0].content }}]"
    assert Encoding(tokenizer).frame(chat=True).before == (tokenizer.bos_token_id, *b"[")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template: leave out --chat"),
        ("nothing", "writes the message 0 times, not once"),
        ("{{ messages[0].content }} {{ messages[0].content }}", "writes the message 2 times"),
        ("{{ raise_exception('no users') }}", "refuses a single message: no users"),
    ],
)
def test_a_template_that_does_not_write_the_message_once_is_refused(
    byte_tokenizer, template, message
):
    byte_tokenizer.chat_template = template
    with pytest.raises(InputError, match=message):
        Encoding(byte_tokenizer).frame(chat=True)
    assert Encoding(byte_tokenizer).frame(chat=False).before == ()
