"""What a token costs in a cache format: our presets, and what engines store.

Our own schemes are priced by `kvquant.cache.sizes`. What engines store is a `Block` for the keys
and one for the values: so many bytes for a head of `dim` numbers, whatever the layer. Examples of
a head of 128: ``bf16`` 256 bytes, ``fp8-static`` 128, ``q8_0`` 136, ``int4-g32`` 80, ``nvfp4`` 72.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from kvquant.cache.sizes import POSITION_BYTES, live_nbytes
from kvquant.errors import SchemeError
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.scheme import QuantScheme


class CacheFormat(Protocol):
    """How a cache is stored, priced layer by layer for one sequence."""

    @property
    def name(self) -> str:
        """As the user typed it."""

    @property
    def description(self) -> str:
        """In words."""

    @property
    def position_nbytes(self) -> int:
        """Bytes of a token that are kept once for all layers."""

    def variant(self, index: int) -> Hashable:
        """Equal for layers that are stored alike if they have the same shape."""

    def layer_nbytes(self, index: int, layer: LayerGeometry, tokens: int) -> int:
        """Bytes of a layer's keys and values after `tokens` tokens."""

    def token_nbytes(self, index: int, layer: LayerGeometry) -> Fraction:
        """Bytes that one more token costs in a layer while its window is not full."""


@dataclass(frozen=True)
class SchemeFormat:
    """A scheme of ours.

    Attributes:
        name: As the user typed it.
        scheme: The scheme.
        dtype_bytes: Bytes of a number in the model's own dtype.
        keeps_positions: Whether calibrated means turn with the position.
    """

    name: str
    scheme: QuantScheme
    dtype_bytes: int
    keeps_positions: bool = False

    @property
    def description(self) -> str:
        """In words."""
        key, value = self.scheme.key, self.scheme.value
        text = str(self.scheme)
        return text.removeprefix(f"K {key}, V ") if key == value else text

    @property
    def position_nbytes(self) -> int:
        """Bytes of a token that are kept once for all layers."""
        return POSITION_BYTES if self.keeps_positions else 0

    def variant(self, index: int) -> Hashable:
        """Equal for layers that are stored alike if they have the same shape."""
        return self.scheme.layer(index)

    def layer_nbytes(self, index: int, layer: LayerGeometry, tokens: int) -> int:
        """Bytes of a layer's keys and values after `tokens` tokens."""
        alone = CacheGeometry("", (layer,), None)
        return live_nbytes(alone, self.scheme.layer(index), tokens, self.dtype_bytes)

    def token_nbytes(self, index: int, layer: LayerGeometry) -> Fraction:
        """Bytes that one more token costs in a layer while its window is not full."""
        own, endless = self.scheme.layer(index), replace(layer, window=None)
        unit = math.lcm(own.key.unit, own.value.unit)
        start = own.sink_tokens + own.residual_length + unit
        spans = (self.layer_nbytes(index, endless, n) for n in (start + unit, start))
        return Fraction(next(spans) - next(spans), unit)


@dataclass(frozen=True)
class Block:
    """How an engine stores the keys, or the values, of one token and KV head.

    Attributes:
        words: What is stored, for people.
        nbytes: Bytes of a head of so many numbers.
        multiple: Numbers that a head must be a multiple of.
        exact: Number of tokens of so many that are kept in the model's own dtype.
    """

    words: str
    nbytes: Callable[[int], Fraction]
    multiple: int = 1
    exact: Callable[[int], int] = lambda tokens: 0


@dataclass(frozen=True)
class BlockFormat:
    """What an engine stores.

    Attributes:
        name: As the user typed it.
        key: Its keys (of an MLA layer, the latent).
        value: Its values (of an MLA layer, the rotary part).
        dtype_bytes: Bytes of a number in the model's own dtype.
        plain_layers: Layers that stay in that dtype.
        latent: Bytes of a token of an MLA layer from the widths of latent and rotary part, where
            they are stored together; None if each is a block.
    """

    name: str
    key: Block
    value: Block
    dtype_bytes: int
    plain_layers: frozenset[int] = frozenset()
    latent: Callable[[int, int], int] | None = None

    @property
    def description(self) -> str:
        """In words."""
        if self.key is self.value:
            return self.key.words
        return f"K {self.key.words}, V {self.value.words}"

    @property
    def position_nbytes(self) -> int:
        """Bytes of a token that are kept once for all layers."""
        return 0

    def variant(self, index: int) -> Hashable:
        """Equal for layers that are stored alike if they have the same shape."""
        return index in self.plain_layers

    def layer_nbytes(self, index: int, layer: LayerGeometry, tokens: int) -> int:
        """Bytes of a layer's keys and values after `tokens` tokens."""
        held = held_tokens(layer, tokens)
        total = held * self.token_nbytes(index, layer)
        if index not in self.plain_layers:
            for block, dim in ((self.key, layer.key_dim), (self.value, layer.value_dim)):
                exact = min(block.exact(tokens), held)
                more = dim * self.dtype_bytes - block.nbytes(dim)
                total += exact * layer.kv_heads * more
        return math.ceil(total)

    def token_nbytes(self, index: int, layer: LayerGeometry) -> Fraction:
        """Bytes that one more token costs in a layer while its window is not full."""
        key_dim, value_dim = layer.key_dim, layer.value_dim
        if index in self.plain_layers:
            return Fraction(layer.kv_heads * (key_dim + value_dim) * self.dtype_bytes)
        if self.latent is not None:
            if layer.kind is not LayerKind.LATENT:
                raise SchemeError(f"{self.name} is for MLA; layer {index} is {layer}")
            return Fraction(self.latent(key_dim, value_dim))
        for block, dim in ((self.key, key_dim), (self.value, value_dim)):
            if dim % block.multiple:
                raise SchemeError(
                    f"{block.words} stores {block.multiple} numbers together, and heads of layer "
                    f"{index} are {dim} wide: no engine has that"
                )
        return layer.kv_heads * (self.key.nbytes(key_dim) + self.value.nbytes(value_dim))


def held_tokens(layer: LayerGeometry, tokens: int) -> int:
    """Tokens that a layer keeps: of a window those that the next token can see, itself apart."""
    return tokens if layer.window is None else min(tokens, layer.window - 1)


def bits(count: float, words: str, *, metadata: int = 0) -> Block:
    """So many bits a number, and so many bytes of metadata for each head and token."""

    def nbytes(dim: int) -> Fraction:
        return Fraction(math.ceil(dim * count / 8) + metadata)

    return Block(words, nbytes)


def blocks(size: int, nbytes: int, words: str) -> Block:
    """`size` numbers along the channels in `nbytes` bytes, scales included."""
    return Block(words, lambda dim: Fraction(dim // size * nbytes), size)


def groups(count: int, size: int) -> Block:
    """Integers of `count` bits, each `size` channels with an fp16 scale and zero point."""

    def nbytes(dim: int) -> Fraction:
        return Fraction(math.ceil(dim * count / 8) + math.ceil(dim / size) * 4)

    return Block(f"int{count}, fp16 scale and zero point for {size} channels", nbytes)


def kivi(count: int, size: int) -> tuple[Block, Block]:
    """KIVI (arXiv 2402.02750), as its authors' code stores it.

    Keys: a scale and a minimum per channel for `size` tokens; up to 128 tokens wait exactly until
    they fill it. Values: for `size` channels of a token; the newest 128 are exact.
    """
    name, residual = f"int{count}", 128
    key = Block(
        f"{name} per channel in groups of {size} tokens, up to {residual} exact",
        lambda dim: Fraction(dim * count, 8) + Fraction(dim * 4, size),
        exact=lambda tokens: tokens % residual,
    )
    value = replace(
        groups(count, size),
        words=f"{name} per token in groups of {size} channels, newest {residual} exact",
        exact=lambda tokens: min(tokens, residual),
    )
    return key, value


_FP32 = bits(32, "fp32")
PLAIN: Mapping[str, Block] = {
    "fp32": _FP32,
    "f32": _FP32,
    "f16": bits(16, "fp16"),
    "bf16": bits(16, "bf16"),
    "fp16": bits(16, "fp16"),
}
"""Formats that are what they say wherever they are stored."""

_PER_HEAD = "with an fp32 scale per token and head (vLLM)"
BLOCKS: Mapping[str, Block] = {
    # Calibrated scales, which take no room per token: vLLM, SGLang, TensorRT-LLM, LightLLM.
    "fp8-static": bits(8, "fp8 with calibrated scales"),
    "int8-static": bits(8, "int8 with calibrated scales"),
    "int4-static": bits(4, "int4 with calibrated scales"),
    # ggml-common.h; GGML_QUANT_SIZES of the gguf package.
    "q8_0": blocks(32, 34, "llama.cpp q8_0"),
    "q5_1": blocks(32, 24, "llama.cpp q5_1"),
    "q5_0": blocks(32, 22, "llama.cpp q5_0"),
    "q4_1": blocks(32, 20, "llama.cpp q4_1"),
    "q4_0": blocks(32, 18, "llama.cpp q4_0"),
    "iq4_nl": blocks(32, 18, "llama.cpp iq4_nl"),
    # vllm/v1/kv_cache_interface.py; int4 hides its zero point in the scale's low bits.
    "int8_per_token_head": bits(8, f"int8 {_PER_HEAD}", metadata=4),
    "fp8_per_token_head": bits(8, f"fp8 {_PER_HEAD}", metadata=4),
    "int4_per_token_head": bits(4, f"int4 {_PER_HEAD}", metadata=4),
    "nvfp4": blocks(16, 9, "nvfp4: an fp8 scale for 16 numbers"),
    "mxfp4": blocks(32, 17, "mxfp4: an 8-bit exponent for 32 numbers"),
}
"""Formats that keys and values can each have."""

_TURBO_KEYS = {"8": bits(8, "fp8"), "4": bits(4, "4 bits and a norm", metadata=2)}
_TURBO_KEYS["3"] = bits(3, "3 bits and a norm", metadata=2)
_TURBO_VALUES = {
    count: bits(int(count), f"{count} bits, fp16 scale and zero point", metadata=4)
    for count in "34"
}
PAIRS: Mapping[str, tuple[Block, Block]] = {
    # vllm/model_executor/layers/quantization/turboquant/config.py.
    "turboquant_k8v4": (_TURBO_KEYS["8"], _TURBO_VALUES["4"]),
    "turboquant_4bit_nc": (_TURBO_KEYS["4"], _TURBO_VALUES["4"]),
    "turboquant_k3v4_nc": (_TURBO_KEYS["3"], _TURBO_VALUES["4"]),
    "turboquant_3bit_nc": (_TURBO_KEYS["3"], _TURBO_VALUES["3"]),
}
"""Formats whose keys and values belong together."""

_DS_MLA = Block(
    "fp8 latent, an fp32 scale for 128, bf16 rotary part (vLLM)", lambda dim: Fraction(0)
)


def ds_mla_nbytes(latent: int, rotary: int) -> int:
    """656 for 512 + 64 (vLLM, ``fp8_ds_mla``): fp8 latent, fp32 scales, bf16 rotary part."""
    return latent + latent // 128 * 4 + 2 * rotary


def ds_mla(name: str, dtype_bytes: int, plain_layers: frozenset[int]) -> BlockFormat:
    """The format ``fp8_ds_mla`` of vLLM, for MLA layers only."""
    return BlockFormat(name, _DS_MLA, _DS_MLA, dtype_bytes, plain_layers, ds_mla_nbytes)
