"""How a layer's keys are rotated, found out by asking the layer itself.

Keys reach the cache after rotary position embedding. Their mean *before* it is worth knowing (a key
bias turns with the position), and transformers has dozens of ways to rotate: half-split or
interleaved pairs, partial, leading or trailing, with or without scaling, some layers not at all.
Instead of a list of model classes, `find_layouts` runs a layer's attention a second time on what it
is reading, with the identity in place of its cosines and sines, stops it when it writes to its
cache, and looks which layout turns the one result into the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

_TOKENS = 8


@dataclass(frozen=True)
class RotaryLayout:
    """Where the rotary pairs of a cached tensor lie.

    Attributes:
        start: First rotary channel.
        width: Number of rotary channels, two per pair.
        interleaved: Pairs are channels (2i, 2i+1); otherwise (i, i + width/2).
        angles: How the layer's cosine table holds one value per pair: ``half`` (the first half),
            ``even`` (every other) or ``all``.
    """

    start: int
    width: int
    interleaved: bool
    angles: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def split(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second members of the pairs, each ``[..., width / 2]``, as views."""
        part = states[..., self.start : self.start + self.width]
        if self.interleaved:
            return part[..., 0::2], part[..., 1::2]
        return part[..., : self.width // 2], part[..., self.width // 2 :]

    def table(self, embeddings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each pair, float32 ``[batch, tokens, width / 2]``."""
        cos, sin = cosine_and_sine(embeddings)
        if self.angles == "half":
            return cos[..., : self.width // 2], sin[..., : self.width // 2]
        if self.angles == "even":
            return cos[..., 0::2], sin[..., 0::2]
        return cos, sin

    def rotate(self, states: torch.Tensor, embeddings: Any) -> torch.Tensor:
        """`states` ``[batch, kv_heads, tokens, dim]`` rotated as the model does."""
        cos, sin = (table[:, None].to(states.device) for table in self.table(embeddings))
        turned = states.clone()
        first, second = self.split(states)
        to_first, to_second = self.split(turned)
        to_first.copy_(first * cos - second * sin)
        to_second.copy_(second * cos + first * sin)
        return turned

    def unrotate(self, states: torch.Tensor, embeddings: Any) -> torch.Tensor:
        """Inverse of `rotate`; the attention factor of yarn and longrope is divided out too."""
        cos, sin = (table[:, None].to(states.device) for table in self.table(embeddings))
        norm = cos.square() + sin.square()
        restored = states.clone()
        first, second = self.split(states)
        to_first, to_second = self.split(restored)
        to_first.copy_((first * cos + second * sin) / norm)
        to_second.copy_((second * cos - first * sin) / norm)
        return restored


def cosine_and_sine(embeddings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Position embeddings as a layer gets them, as two float32 ``[batch, tokens, width]``.

    Complex tables (Llama 4, DeepSeek-V2) hold both in one; multimodal ones have a leading axis of
    three that are alike on text.
    """
    if isinstance(embeddings, torch.Tensor):
        return embeddings.real.float(), embeddings.imag.float()
    cos, sin = (table.float() for table in embeddings)
    while cos.dim() > 3:
        cos, sin = cos[0], sin[0]
    return cos, sin


class _Captured(Exception):
    """Carries what a layer was about to cache."""

    def __init__(self, states: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.states = states


class _StandIn:
    """Answers like the cache it stands for, but stops the layer when it writes to it."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        if name.startswith("update_"):  # an index or a recurrent state, which must not advance
            raise _WritesElsewhere
        return getattr(self._cache, name)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> None:
        raise _Captured((keys, values))


class _WritesElsewhere(Exception):
    """The layer cannot be asked without leaving traces in the cache."""


def find_layouts(
    attention: torch.nn.Module,
    kwargs: dict[str, Any],
    cache: Any,
    cached: tuple[torch.Tensor, torch.Tensor],
) -> tuple[RotaryLayout | None, RotaryLayout | None]:
    """Layouts of what an attention layer puts into the key slot and the value slot.

    Args:
        attention: The layer.
        kwargs: Arguments of the call it is in, ``hidden_states`` and ``position_embeddings`` among
            them.
        cache: The cache among them.
        cached: Keys and values that it is writing to the cache,
            ``[batch, kv_heads, tokens, dim]``.

    Returns:
        For each slot its layout, or None if it is not rotated, or in no way known here.
    """
    embeddings = _first_row(kwargs["position_embeddings"])
    if embeddings is None:
        return None, None
    probe = {name: _StandIn(cache) if value is cache else value for name, value in kwargs.items()}
    probe["hidden_states"] = kwargs["hidden_states"][:1]
    probe["position_embeddings"] = _identity(embeddings)
    try:
        attention.forward(**probe)
    except _Captured as captured:
        plain = captured.states
    except _WritesElsewhere:
        return None, None
    else:
        return None, None
    key, value = (_match(*pair, embeddings) for pair in zip(plain, cached, strict=True))
    return key, value


def _first_row(embeddings: Any) -> Any:
    """Position embeddings of the first sequence, or None where they are not as known here."""
    if isinstance(embeddings, torch.Tensor) and embeddings.is_complex():
        return embeddings[:1]
    if isinstance(embeddings, tuple) and len(embeddings) == 2:
        return tuple(table[..., :1, :, :] for table in embeddings)
    return None


def _identity(embeddings: Any) -> Any:
    """Position embeddings that turn nothing."""
    if isinstance(embeddings, torch.Tensor):
        return torch.ones_like(embeddings)
    cos, sin = embeddings
    return torch.ones_like(cos), torch.zeros_like(sin)


def _match(plain: torch.Tensor, turned: torch.Tensor, embeddings: Any) -> RotaryLayout | None:
    """The layout that turns `plain` into `turned`, if they differ and there is one."""
    # A few tokens of the first row tell enough; all but the first, since position 0 is not turned.
    last, device = plain.shape[2] - 1, plain.device
    some = torch.linspace(1, last, _TOKENS, dtype=torch.float32, device=device).long()
    plain, turned = (states[:1, :, some].float() for states in (plain, turned))
    embeddings = tuple(table[:, some.to(table.device)] for table in cosine_and_sine(embeddings))
    tolerance = 2e-2 * float(plain.abs().amax())
    if float((plain - turned).abs().amax()) <= tolerance * 1e-3:
        return None
    errors = {
        layout: float((layout.rotate(plain, embeddings) - turned).abs().amax())
        for layout in _candidates(plain.shape[-1], embeddings[0].shape[-1])
    }
    best = min(errors, key=errors.__getitem__, default=None)
    return best if best is not None and errors[best] <= tolerance else None


def _candidates(dim: int, columns: int) -> Iterator[RotaryLayout]:
    """Layouts that a head of `dim` channels and a table of `columns` allow."""
    for angles, width in (("half", columns), ("even", columns), ("all", 2 * columns)):
        if width > dim or width % 2:
            continue
        for start in dict.fromkeys((0, dim - width)):
            for interleaved in (False, True):
                yield RotaryLayout(start, width, interleaved, angles)
