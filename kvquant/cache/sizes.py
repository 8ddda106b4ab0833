"""Bytes that a cache needs for a number of tokens: arithmetic, without torch or a cache.

It says a second time, on its own, what the cache does, so that one can be held against the other.
A text of 20 tokens with 4 sinks, a residual of 5 and keys in groups of 4::

    keys     4 exact sinks, 2 groups of 4 with a scale and a middle per channel, 8 exact tokens
    values   4 exact sinks, 11 tokens with a scale and a middle each, 5 exact tokens
"""

from __future__ import annotations

from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.scheme import SCALE_BITS, Granularity, QuantScheme, TensorScheme

POSITION_BYTES = 4
"""Of a token's position, which is kept once for all layers if some mean turns with it."""

_CHANNELS_TOGETHER = {8: 1, 4: 2, 3: 8}
"""Channels whose codes fill whole bytes, by their bits."""


def live_nbytes(
    geometry: CacheGeometry,
    scheme: QuantScheme,
    tokens: int,
    dtype_bytes: int,
    *,
    keeps_positions: bool = False,
) -> int:
    """Bytes that the cache of one text needs: codes, scales and exact tokens of all layers.

    Recurrent states, which do not grow with the text, are not counted.

    Args:
        geometry: Shape of the cache.
        scheme: What it is quantized to.
        tokens: Length of the text.
        dtype_bytes: Bytes of a number in the model's own dtype.
        keeps_positions: Whether some layer's mean turns with the position.
    """
    slots = (
        layer.kv_heads * _slot_nbytes(layer, own, slot, tokens, dtype_bytes)
        for layer, own in (
            (geometry.layers[index], scheme.layer(index)) for index in geometry.attention_layers
        )
        for slot in ("key", "value")
    )
    return sum(slots) + (POSITION_BYTES * tokens if keeps_positions else 0)


def _slot_nbytes(
    layer: LayerGeometry, scheme: QuantScheme, slot: str, tokens: int, dtype_bytes: int
) -> int:
    """Bytes of the keys or the values of one KV head."""
    own, dim = scheme.key, layer.key_dim
    if slot == "value":
        own, dim = scheme.value, layer.value_dim
        if layer.kind is LayerKind.LATENT:
            own = scheme.rotary_part
    exact, units = _exact_and_units(layer.window, scheme, own.unit, tokens)
    return exact * dim * dtype_bytes + units * _unit_nbytes(own, dim, dtype_bytes)


def _exact_and_units(
    window: int | None, scheme: QuantScheme, unit: int, tokens: int
) -> tuple[int, int]:
    """Tokens kept exactly, and units of tokens kept as codes.

    A sliding layer keeps what the next token can see, the window without that token; of codes
    whole units.
    """
    sinks, residual = min(scheme.sink_tokens, tokens), scheme.residual_length
    oldest = 0 if window is None else max(0, tokens - (window - 1))
    seen_sinks = max(0, sinks - oldest)
    if window is not None and residual >= window - 1:
        return seen_sinks + tokens - max(sinks, oldest), 0
    made = max(0, tokens - residual - sinks) // unit
    gone = min(max(0, oldest - sinks) // unit, made)
    return seen_sinks + tokens - sinks - made * unit, made - gone


def _unit_nbytes(scheme: TensorScheme, dim: int, dtype_bytes: int) -> int:
    """Bytes of what is encoded together: one token, or a group of them."""
    form = scheme.format
    if not form.is_scaled:
        return dim * (dtype_bytes if scheme.is_exact else form.bits // 8)
    together = _CHANNELS_TOGETHER[form.bits]
    codes = -(-dim // together) * together * form.bits // 8
    if scheme.granularity.is_static:
        return codes
    ranges = dim if scheme.granularity is Granularity.PER_GROUP else 1
    numbers = 1 if scheme.symmetric else 2
    return scheme.unit * codes + ranges * numbers * SCALE_BITS[scheme.scale_format] // 8
