"""How many parameters a model has, counted from the shapes in its config.

Families whose layers are known only; docs/capacity.md has the formulas. A test builds each of them
without memory and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvquant.geometry_rules import Settings


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model, parted by what quantizing its weights does to them.

    Attributes:
        matrices: Weights of the linear layers, the shared experts among them.
        experts: Weights of the experts that a router chooses among.
        rest: Embedding, output head, norms, biases and routers, which stay as they are.
    """

    matrices: int
    experts: int
    rest: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.experts + self.rest


def count_parameters(model_type: str, settings: Settings) -> Parameters | None:
    """Parameters of a model, or None if its family is not known or its config says too little.

    Args:
        model_type: Of the text part.
        settings: Its config under canonical names, defaults filled in.
    """
    count = _FAMILIES.get(model_type)
    if count is None:
        return None
    try:
        return count(_Shape(model_type, settings))
    except (KeyError, TypeError):
        return None


class _Shape:
    """The numbers that all counts share, by short names."""

    def __init__(self, model_type: str, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.layers: int = settings["num_hidden_layers"]
        self.hidden: int = settings["hidden_size"]
        self.vocab: int = settings["vocab_size"]
        self.heads: int = settings["num_attention_heads"]
        self.kv_heads: int = settings["num_key_value_heads"] or self.heads
        self.head_dim: int = settings.get("head_dim") or self.hidden // self.heads
        self.tied: bool = settings.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT)

    @property
    def embeddings(self) -> int:
        """Embedding, and the output head if it is another matrix."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def attention(self) -> int:
        """The four projections of one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def qkv_biases(self) -> int:
        """Biases of the first three of them."""
        return self.head_dim * (self.heads + 2 * self.kv_heads)

    def mlp(self, width: int) -> int:
        """Gate, up and down."""
        return 3 * self.hidden * width


_TIED_BY_DEFAULT = frozenset({"gemma", "gemma2", "gemma3_text", "opt"})


def _decoder(
    *, norms: int = 2, qk_norm: bool = False, qkv_bias: bool = False
) -> Callable[[_Shape], Parameters]:
    """Attention and a gated MLP, as in Llama.

    Args:
        norms: Norms of a layer.
        qk_norm: Whether queries and keys have a norm over a head each.
        qkv_bias: Whether the first three projections have biases, whatever the config says.
    """

    def count(shape: _Shape) -> Parameters:
        matrices = shape.attention + shape.mlp(shape.settings["intermediate_size"])
        rest = norms * shape.hidden + (2 * shape.head_dim if qk_norm else 0)
        if qkv_bias:
            rest += shape.qkv_biases
        elif shape.settings.get("attention_bias"):
            rest += shape.qkv_biases + shape.hidden
        if shape.settings.get("mlp_bias"):
            rest += 2 * shape.settings["intermediate_size"] + shape.hidden
        return Parameters(
            shape.layers * matrices, 0, shape.layers * rest + shape.hidden + shape.embeddings
        )

    return count


def _mixtral(shape: _Shape) -> Parameters:
    experts = shape.settings["num_local_experts"]
    rest = 2 * shape.hidden + experts * shape.hidden
    return Parameters(
        shape.layers * shape.attention,
        shape.layers * experts * shape.mlp(shape.settings["intermediate_size"]),
        shape.layers * rest + shape.hidden + shape.embeddings,
    )


def _qwen3_moe(shape: _Shape) -> Parameters:
    dense = len(shape.settings.get("mlp_only_layers") or ())
    sparse = shape.layers - dense
    experts = shape.settings["num_experts"]
    rest = shape.layers * (2 * shape.hidden + 2 * shape.head_dim) + sparse * experts * shape.hidden
    return Parameters(
        shape.layers * shape.attention + dense * shape.mlp(shape.settings["intermediate_size"]),
        sparse * experts * shape.mlp(shape.settings["moe_intermediate_size"]),
        rest + shape.hidden + shape.embeddings,
    )


def _gpt_oss(shape: _Shape) -> Parameters:
    experts, width = shape.settings["num_local_experts"], shape.settings["intermediate_size"]
    biases = shape.qkv_biases + shape.hidden + experts * (2 * width + shape.hidden)
    router = experts * (shape.hidden + 1)
    rest = 2 * shape.hidden + shape.heads + router + biases
    return Parameters(
        shape.layers * shape.attention,
        shape.layers * experts * shape.mlp(width),
        shape.layers * rest + shape.hidden + shape.embeddings,
    )


def _deepseek(shape: _Shape) -> Parameters:
    settings = shape.settings
    rank, rope = settings["kv_lora_rank"], settings["qk_rope_head_dim"]
    query_dim = settings["qk_nope_head_dim"] + rope
    value_dim = settings["v_head_dim"]
    query_rank = settings["q_lora_rank"]
    query = shape.hidden * shape.heads * query_dim
    norms = 2 * shape.hidden + rank
    if query_rank is not None:
        query = query_rank * (shape.hidden + shape.heads * query_dim)
        norms += query_rank
    attention = (
        query
        + shape.hidden * (rank + rope)
        + rank * shape.heads * (settings["qk_nope_head_dim"] + value_dim)
        + shape.heads * value_dim * shape.hidden
    )
    dense = settings["first_k_dense_replace"]
    sparse, width = shape.layers - dense, settings["moe_intermediate_size"]
    experts = settings["n_routed_experts"]
    matrices = shape.layers * attention + dense * shape.mlp(settings["intermediate_size"])
    matrices += sparse * shape.mlp(width * settings["n_shared_experts"])
    rest = shape.layers * norms + sparse * experts * shape.hidden + shape.hidden
    return Parameters(matrices, sparse * experts * shape.mlp(width), rest + shape.embeddings)


def _opt(shape: _Shape) -> Parameters:
    hidden, width = shape.hidden, shape.settings["ffn_dim"]
    matrices = 4 * hidden * hidden + 2 * hidden * width
    rest = 4 * hidden + width + hidden + 2 * (2 * hidden)
    # Two positions in front are for padding.
    positions = (shape.settings["max_position_embeddings"] + 2) * hidden
    return Parameters(
        shape.layers * matrices,
        0,
        shape.layers * rest + 2 * hidden + shape.embeddings + positions,
    )


_LLAMA = _decoder()
_FAMILIES: Mapping[str, Callable[[_Shape], Parameters]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "phi3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _decoder(norms=4),
    "gemma3_text": _decoder(norms=4, qk_norm=True),
    "qwen2": _decoder(qkv_bias=True),
    "qwen3": _decoder(qk_norm=True),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "opt": _opt,
}


def experts_of(settings: Settings) -> tuple[int, int] | None:
    """Experts of a layer that a router chooses among, and how many it chooses; None if none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((settings[name] for name in names if settings.get(name)), None)
    chosen = settings.get("num_experts_per_tok")
    if not isinstance(experts, int) or not isinstance(chosen, int) or not 0 < chosen <= experts:
        return None
    return experts, chosen
