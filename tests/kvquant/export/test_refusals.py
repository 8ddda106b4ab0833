from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvquant.errors import ExportError
from kvquant.export.refusals import (
    architecture,
    is_latent,
    refuse_bases,
    refuse_latent,
    refuse_skipped_layers,
    refuse_stale_scales,
    same_kv_heads,
    skipped_layers,
)
from kvquant.geometry import LayerGeometry, LayerKind

FULL = LayerGeometry(LayerKind.FULL, 2, 16, 16)
LATENT = LayerGeometry(LayerKind.LATENT, 1, 16, 4)
LINEAR = LayerGeometry(LayerKind.LINEAR)


def test_skipped_layers_are_those_that_keep_tokens(make_job: Callable[..., Any]) -> None:
    job = make_job({1: (1.0, 1.0)}, layers=[FULL, FULL, LINEAR, FULL])
    assert skipped_layers(job) == [0, 3]
    with pytest.raises(ExportError, match=r"leave layers 0,3 exact, but X quantizes .* all layers"):
        refuse_skipped_layers(job, "X")
    refuse_skipped_layers(make_job({0: (1.0, 1.0)}, layers=[FULL, LINEAR]), "X")


def test_latent(make_job: Callable[..., Any]) -> None:
    job = make_job({0: (1.0, 1.0)}, layers=[LATENT], model_type="deepseek_v3")
    assert is_latent(job)
    with pytest.raises(ExportError, match=r"deepseek_v3 caches a latent \(MLA\): X does not"):
        refuse_latent(job, "X", "does not")
    plain = make_job({0: (1.0, 1.0)})
    assert not is_latent(plain)
    refuse_latent(plain, "X", "does not")


def test_bases(make_job: Callable[..., Any]) -> None:
    def base(method: str) -> Any:
        return make_job({0: (1.0, 1.0)}, quantization={"quant_method": method}).checkpoint

    refuse_bases(make_job({0: (1.0, 1.0)}).checkpoint, "X", ())
    refuse_bases(base("fp8"), "X", ("fp8", "modelopt"))
    with pytest.raises(
        ExportError,
        match=r"is quantized with gptq: X reads KV scales only beside weights in fp8 or modelopt, "
        r"or unquantized ones, and would serve this one at scale 1\.0 without a word: export the "
        r"unquantized model",
    ):
        refuse_bases(base("gptq"), "X", ("fp8", "modelopt"))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.attn.v_scale",
        "model.layers.0.self_attn.k_proj.k_scale",
        "model.layers.0.self_attn.k_proj.output_scale",
        "transformer.h.0.attn.kv_scale",
    ],
)
def test_scales_from_before(make_job: Callable[..., Any], name: str) -> None:
    names = ["model.layers.0.self_attn.k_proj.weight", name]
    job = make_job({0: (1.0, 1.0)}, tensors=names)
    with pytest.raises(ExportError, match="has KV scales already"):
        refuse_stale_scales(job.checkpoint)
    with pytest.raises(ExportError, match=f"1 tensor, such as {name}"):
        refuse_bases(job.checkpoint, "X", ())


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "input_scale", "weight"])
def test_scales_of_weights_are_no_kv_scales(make_job: Callable[..., Any], name: str) -> None:
    names = [f"model.layers.0.self_attn.k_proj.{name}"]
    refuse_stale_scales(make_job({0: (1.0, 1.0)}, tensors=names).checkpoint)


def test_kv_heads(make_job: Callable[..., Any]) -> None:
    wide = LayerGeometry(LayerKind.FULL, 4, 16, 16)
    assert same_kv_heads(make_job({0: (1.0, 1.0)}, layers=[wide]), "X", "leave it") == 4
    mixed = make_job({0: (1.0, 1.0), 1: (1.0, 1.0)}, layers=[wide, FULL])
    with pytest.raises(
        ExportError, match=r"layers have 2 and 4 KV heads, but X takes .*: leave it"
    ):
        same_kv_heads(mixed, "X", "leave it")


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM"])
def test_a_config_without_a_model_class(make_job: Callable[..., Any], names: Any) -> None:
    job = make_job({0: (1.0, 1.0)}, config={"architectures": names})
    with pytest.raises(ExportError, match="has no architectures"):
        architecture(job.checkpoint)
