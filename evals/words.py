"""What needles are named with: words, numbers and names of variables, drawn from a generator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvquant.errors import InputError

from .encoding import Encoding

_ADJECTIVES = """
able amber ancient autumn basic better bitter blue bold brave brief bright bronze brown calm
careful central cheap civil classic clean clear clever coastal cold common crimson curious dark
deep dense direct double dry eager early eastern easy elegant empty exact faint famous fancy fast
fierce final flat foreign formal fresh frozen gentle giant global golden grand gray great green
half happy hard heavy hidden hollow honest humble idle inner iron joyful kind large late lazy
lesser light little local lonely long loose loud lovely lower lucky marble mellow middle mighty
minor mobile modern modest narrow native nearby neutral new noble normal northern odd old open
orange outer pale patient plain polite proper proud public purple quick quiet rapid rare red
remote rich robust round royal rural rustic sacred safe scarlet secure serene severe shallow sharp
short silent simple single slow small smooth soft solid sour southern static steady steep strict
strong subtle sudden summer sunny sweet swift tall tender thick thin tidy tiny tough tropical
unique upper urban useful vague vast violet vital vivid warm western white wild wise wooden yellow
young
"""
_NOUNS = """
acorn anchor apple arrow badge bakery barrel basket beacon bell blanket boat bottle bowl branch
bridge brush bucket butter button cabin camera canal candle canyon carpet castle cellar chair
cherry circle clock closet cloud coast coffee column copper cottage cotton desert desk dinner door
dragon drum eagle engine fabric falcon farmer feather ferry field flag flower forest fossil
fountain garage garden garlic gate ginger glacier glass goat guitar hammer harbor hill honey horse
hotel island jacket jewel jungle kettle kitchen ladder lake lamp lantern laptop leaf lemon letter
library lion lizard maple market meadow mirror monkey moon motor mountain museum nest ocean office
onion orchard oven owl oyster palace panel paper parrot pearl pencil pepper piano pillow pilot
pine planet plate pocket potato prairie rabbit radio river road robot rocket rope salmon school
shadow sheep shelf ship shore silver soldier spider spoon spring square stable station statue
stone stove stream sugar sunset table tailor temple tiger timber tower town train tree tunnel
turtle valley vessel village violin wagon walnut wheel whistle willow window winter wolf writer
yard
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
_DIGITS = 7
_NUMBERS, _VARIABLES = 4096, 1024
"""So many are made up, of which those that take equally many tokens are used."""
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
"""No vowels: five of these make no word."""


@dataclass(frozen=True)
class Vocabulary:
    """Words of each kind that all take the same number of tokens.

    Thereby prompts of a task are alike in all lengths, and can be batched without padding.

    Attributes:
        adjectives: First words of keys.
        nouns: Second words.
        numbers: Of seven digits.
        variables: Of five letters.
    """

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    numbers: tuple[str, ...]
    variables: tuple[str, ...]

    @classmethod
    def of(cls, encoding: Encoding) -> Vocabulary:
        """The words to use with a tokenizer.

        Raises:
            InputError: It has no tokens to write them with.
        """
        generator = np.random.default_rng(0)
        values = generator.integers(10 ** (_DIGITS - 1), 10**_DIGITS, _NUMBERS)
        names = generator.choice(list(_LETTERS), (_VARIABLES, 5))
        return cls(
            adjectives=_alike("adjectives", ADJECTIVES, encoding),
            nouns=_alike("nouns", NOUNS, encoding),
            numbers=_alike("numbers", [str(it) for it in values], encoding),
            variables=_alike("names of variables", ["".join(it) for it in names], encoding),
        )

    def keys(self, generator: np.random.Generator, count: int) -> list[str]:
        """Different two-word names."""
        pairs = _places(generator, len(self.adjectives) * len(self.nouns), count)
        places = (divmod(pair, len(self.nouns)) for pair in pairs)
        return [f"{self.adjectives[first]} {self.nouns[second]}" for first, second in places]

    def values(self, generator: np.random.Generator, count: int) -> list[str]:
        """Different numbers."""
        return [self.numbers[it] for it in _places(generator, len(self.numbers), count)]

    def names(self, generator: np.random.Generator, count: int) -> list[str]:
        """Different names of variables."""
        return [self.variables[it] for it in _places(generator, len(self.variables), count)]


def _places(generator: np.random.Generator, size: int, count: int) -> list[int]:
    """Different ones below `size`."""
    return [int(it) for it in generator.choice(size, count, replace=False)]


def _alike(kind: str, words: Sequence[str], encoding: Encoding) -> tuple[str, ...]:
    """The words of the most frequent number of tokens, none of them unknown, each once."""
    unknown: Any = encoding.tokenizer.unk_token_id
    pairs = zip(words, encoding.sentences(words), strict=True)
    lengths = {word: len(ids) for word, ids in pairs if ids and unknown not in ids}
    if len(lengths) < len(set(words)) // 2:
        raise InputError(
            f"the tokenizer has no tokens for most {kind} that needles are made of "
            f"(such as {words[0]!r}): needles need one that can write English and digits"
        )
    [(most, _)] = Counter(lengths.values()).most_common(1)
    return tuple(word for word, length in lengths.items() if length == most)
