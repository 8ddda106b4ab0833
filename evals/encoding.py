"""How text becomes token ids that can be joined: each piece is tokenized once and by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvquant.errors import InputError
from kvquant.text.corpus import bos_token

_CONTENT = "KVQUANTCONTENT"
"""Stands for a message while the chat template is written around it."""


@dataclass(frozen=True)
class Frame:
    """What comes before and after a prompt's own text.

    Attributes:
        before: A BOS token, if the tokenizer puts one by itself, and the chat template's beginning.
        after: The chat template's end, up to where the answer begins.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]


class Encoding:
    """A tokenizer, and what it does where two pieces meet.

    Attributes:
        tokenizer: A Transformers tokenizer; whatever it adds to a text by itself is left away.
        space: Between two sentences: a blank in front of the second one, or nothing where the
            tokenizer puts one in front of every text.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Looks what the tokenizer makes of two words that are joined as tokens."""
        self.tokenizer = tokenizer
        first, second = self._ids(["apple", "table"])
        is_apart = len(str(tokenizer.decode([*first, *second])).split()) > 1
        self.space = "" if is_apart else " "

    def sentences(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as it is spelled after another one; tokenized in one call."""
        return self._ids([self.space + text for text in texts])

    def text(self, text: str) -> list[int]:
        """Ids of a text that begins a prompt or a line."""
        return self._ids([text])[0] if text else []

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        found = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return [list(ids) for ids in found["input_ids"]]

    def frame(self, chat: bool) -> Frame:
        """What goes around a prompt; with `chat`, the chat template with it as only message.

        Raises:
            InputError: There is no chat template, or one that does not repeat the message as it is.
        """
        before, after = self._template() if chat else ("", "")
        bos = bos_token(self.tokenizer)
        ids = self.text(before)
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return Frame(tuple(ids), tuple(self.text(after)))

    def _template(self) -> tuple[str, str]:
        """The chat template's text before and after the message."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError("the tokenizer has no chat template: leave out --chat")
        message = {"role": "user", "content": _CONTENT}
        try:
            text = self.tokenizer.apply_chat_template(
                [message], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever the template raises
            raise InputError(f"the chat template refuses a single message: {error}") from error
        before, *after = str(text).split(_CONTENT)
        if len(after) != 1:
            raise InputError(
                f"the chat template writes the message {len(after)} times, not once: "
                "leave out --chat"
            )
        return before, after[0]
