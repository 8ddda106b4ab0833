from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvquant.errors import ExportError
from kvquant.export.transformers import Transformers
from kvquant.export.vllm import Vllm
from kvquant.geometry import LayerGeometry, LayerKind

CT = "compressed-tensors"
FULL = LayerGeometry(LayerKind.FULL, 2, 16, 16)
LATENT = LayerGeometry(LayerKind.LATENT, 1, 16, 4)


@pytest.mark.parametrize("per_head", [False, True])
def test_it_is_what_vllm_reads(
    make_job: Callable[..., Any], plain: Callable[..., Any], per_head: bool
) -> None:
    job = make_job({0: ([0.5, 0.25], [1.0, 2.0])}, per_head=per_head)
    made, theirs = Transformers().contribute(job), Vllm().contribute(job)
    assert plain(made.tensors) == plain(theirs.tensors)
    assert made.config == theirs.config
    assert any("5.24 loads the model, but passes" in remark for remark in made.remarks)


def test_names_are_those_of_the_modules(make_job: Callable[..., Any]) -> None:
    job = make_job({0: (0.5, 0.25)}, path="transformer.h.{}.attn", projections=["qkv_proj"])
    made = Transformers().contribute(job)
    assert list(made.tensors) == ["transformer.h.0.attn.k_scale", "transformer.h.0.attn.v_scale"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key_format": "int8"}, "own cache runs int8 there: QuantizedCache.from_model"),
        ({"layers": [LATENT]}, "Transformers is not known to load scales"),
        ({"layers": [FULL, FULL]}, "leave layer 1 exact"),
        ({"quantization": {"quant_method": "fp8"}}, "only beside weights in compressed-tensors"),
        ({"quantization": {"quant_method": "gptq"}}, "quantized with gptq: Transformers"),
        ({"tensors": ["model.layers.0.self_attn.k_scale"]}, "has KV scales already"),
        ({"projections": ["c_attn"]}, "model.layers.0.self_attn has none"),
    ],
)
def test_refused(make_job: Callable[..., Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ExportError, match=said):
        Transformers().contribute(make_job({0: (1.0, 1.0)}, **changes))


def test_per_head_with_layers_of_different_heads(make_job: Callable[..., Any]) -> None:
    layers = [FULL, LayerGeometry(LayerKind.FULL, 1, 16, 16)]
    job = make_job({0: ([1.0, 1.0], [1.0, 1.0]), 1: ([1.0], [1.0])}, layers=layers, per_head=True)
    with pytest.raises(ExportError, match="1 and 2 KV heads, but Transformers per head"):
        Transformers().contribute(job)


def test_heads_of_different_sizes(make_job: Callable[..., Any]) -> None:
    layers = [FULL, LayerGeometry(LayerKind.FULL, 2, 32, 32)]
    with pytest.raises(ExportError, match="heads of 16 and 32: compressed-tensors takes one size"):
        Transformers().contribute(make_job({0: (1.0, 1.0), 1: (1.0, 1.0)}, layers=layers))


@pytest.mark.parametrize(
    ("tensor", "quantization", "only"),
    [
        ("model.layers.0.mlp.experts.7.up_proj.weight", None, True),
        ("model.layers.0.mlp.experts.7.up_proj.weight", {"quant_method": CT}, False),
        ("model.layers.0.mlp.experts.gate_up_proj", None, False),
    ],
)
def test_experts_need_one_version(
    make_job: Callable[..., Any], tensor: str, quantization: dict[str, str] | None, only: bool
) -> None:
    job = make_job({0: (1.0, 1.0)}, quantization=quantization, tensors=[tensor])
    made = Transformers().contribute(job)
    assert len(made.tensors) == 2
    named = [remark for remark in made.remarks if "5.17 to 5.21 and 5.23 stop at experts" in remark]
    assert len(named) == only
