"""What one sequence's cache costs on one GPU, by its length: the sum over layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from kvquant.geometry import LayerGeometry

from .companions import Companion
from .formats import CacheFormat, held_tokens
from .parallel import Parallel
from .spec import ModelSpec


@dataclass(frozen=True)
class AlikeLayers:
    """Layers that cost the same.

    Attributes:
        indices: Their numbers in the model.
        layer: What one of them keeps on this GPU.
        companion: What one of them keeps beside keys and values.
        token_nbytes: What one more token costs while its window is not full, keys and values.
    """

    indices: tuple[int, ...]
    layer: LayerGeometry
    companion: Companion
    token_nbytes: Fraction


class SequencePrice:
    """Bytes of one sequence in one format, on one GPU."""

    def __init__(
        self, model: ModelSpec, form: CacheFormat, parallel: Parallel, layers: range
    ) -> None:
        """Prices the layers of one rank.

        Args:
            model: The model.
            form: How its cache is stored.
            parallel: How it is spread.
            layers: Those of this rank's stage.
        """
        self.form = form
        found: dict[object, list[int]] = {}
        shapes = {
            index: (
                parallel.layer(model.geometry.layers[index]),
                parallel.companion(model.companions[index]),
            )
            for index in layers
        }
        for index, shape in shapes.items():
            found.setdefault((*shape, form.variant(index)), []).append(index)
        self.alike = [
            AlikeLayers(
                tuple(indices),
                *shapes[indices[0]],
                self._token_nbytes(indices[0], shapes[indices[0]][0]),
            )
            for indices in found.values()
        ]

    def _token_nbytes(self, index: int, layer: LayerGeometry) -> Fraction:
        return self.form.token_nbytes(index, layer) if layer.keeps_tokens else Fraction(0)

    @property
    def token_nbytes(self) -> Fraction:
        """Bytes that one more token costs while no window is full."""
        per_layer = sum(
            len(alike.indices) * (alike.token_nbytes + alike.companion.per_token)
            for alike in self.alike
        )
        return per_layer + Fraction(self.form.position_nbytes)

    def nbytes(self, tokens: int) -> int:
        """Bytes of a sequence of `tokens` tokens."""
        layers = sum(len(a.indices) * self.layer_nbytes(a, tokens) for a in self.alike)
        return layers + self.form.position_nbytes * tokens

    def layer_nbytes(self, alike: AlikeLayers, tokens: int) -> int:
        """Bytes of one of some layers."""
        beside = alike.companion.constant + alike.companion.per_token * tokens
        return beside + self._kv_nbytes(alike, tokens)

    def _kv_nbytes(self, alike: AlikeLayers, tokens: int) -> int:
        if not alike.layer.keeps_tokens:
            return 0
        return self.form.layer_nbytes(alike.indices[0], alike.layer, tokens)

    def own_nbytes(self, tokens: int, prefix: int) -> int:
        """Bytes of a sequence, apart from what it shares with others.

        Args:
            tokens: Its length, the prefix included.
            prefix: First tokens that others have too; of those a window has moved beyond, nothing
                is shared any more.
        """
        total = self.form.position_nbytes * (tokens - prefix)
        for alike in self.alike:
            gone = tokens - held_tokens(alike.layer, tokens)
            seen = max(0, prefix - gone)
            own = alike.companion.constant + alike.companion.per_token * (tokens - prefix)
            own += max(0, self._kv_nbytes(alike, tokens) - self._kv_nbytes(alike, seen))
            total += len(alike.indices) * own
        return total

    def paged_nbytes(self, tokens: int, page: int) -> int:
        """Bytes that a sequence takes of a memory that is given out in pages of `page` tokens.

        A window that is full touches a page more than its tokens fill, where it begins inside one:
        pages are held from the one with the oldest token that can be seen to the newest.
        """
        total = Fraction(self.nbytes(tokens))
        for alike in self.alike:
            if alike.layer.keeps_tokens:
                unused = paged_tokens(alike.layer, tokens, page) - held_tokens(alike.layer, tokens)
                per_token = alike.token_nbytes + alike.companion.per_token
                total += len(alike.indices) * unused * per_token
        return -(-total.numerator // total.denominator)

    def full_length_nbytes(self, tokens: int) -> int:
        """Bytes of a sequence where windows are kept at full length.

        So do engines without an allocator for layers of different kinds.
        """
        total = Fraction(self.nbytes(tokens))
        for alike in self.alike:
            unseen = tokens - held_tokens(alike.layer, tokens)
            total += len(alike.indices) * unseen * alike.token_nbytes
        return int(total)

    def kinds(self) -> Iterator[int]:
        """Number of layers of each kind that keeps tokens, windows of a length being one kind."""
        counts: dict[int | None, int] = {}
        for alike in self.alike:
            if alike.layer.keeps_tokens:
                window = alike.layer.window
                counts[window] = counts.get(window, 0) + len(alike.indices)
        yield from counts.values()


def paged_tokens(layer: LayerGeometry, tokens: int, page: int) -> int:
    """Tokens for which a layer's pages have room.

    An example, a window of 6 in pages of 4 after 10 tokens, of which the last 5 can be seen::

        0 1 2 3 | 4 5 6 7 | 8 9 . .        pages 1 and 2 are held: room for 8
    """
    gone = tokens - held_tokens(layer, tokens)
    return (-(-tokens // page) - gone // page) * page


def padding_layers(kinds: list[int]) -> int:
    """Layers that vLLM adds so that all kinds come in groups of one size; 0 for a single kind.

    The size is the smallest number of layers of a kind, or the largest where it is less than 1.5
    times that (``_get_kv_cache_groups_uniform_page_size``).
    """
    if len(kinds) < 2:
        return 0
    size = min(kinds)
    if max(kinds) < 1.5 * size:
        size = max(kinds)
    return sum(-count % size for count in kinds)
