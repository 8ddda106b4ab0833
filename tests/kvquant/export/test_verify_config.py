from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvquant.export.served_files import ServedDirectory
from kvquant.export.verify_config import (
    ModelOpt,
    SchemeRules,
    contradiction,
    declared,
    group_findings,
    model_dtype,
    quant_method,
    read_modelopt,
    scheme_findings,
)

GOOD = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
TRANSFORMERS = SchemeRules("it", ("tensor", "attn_head"), "stops", integers=True, forbids=True)


def _served(config: Any, beside: Any = None) -> ServedDirectory:
    return ServedDirectory(Path("d"), config, beside, None, None, {}, None)


def test_where_a_quantization_config_may_be() -> None:
    block = {"quant_method": "fp8"}
    assert declared(_served({"quantization_config": block})) == block
    assert declared(_served({"text_config": {"quantization_config": block}})) == block
    assert declared(_served({"text_config": None, "quantization_config": {}})) is None
    assert declared(_served({"quantization_config": "fp8"})) is None


def test_methods() -> None:
    assert quant_method({"quant_method": "compressed_tensors"}) == "compressed-tensors"
    assert quant_method({"quant_method": "GPTQ"}) == "gptq"
    assert quant_method({"quantization": {}}) == "modelopt"
    assert quant_method({}) == ""


def test_the_two_forms_of_modelopt() -> None:
    nested = {"quantization": {"quant_algo": "fp8", "kv_cache_quant_algo": "NVFP4"}}
    assert read_modelopt(nested) == ModelOpt("FP8", "NVFP4", (), False)
    excluded = {"quantization": {"quant_algo": None, "exclude_modules": ["lm_head"]}}
    assert read_modelopt(excluded) == ModelOpt(None, None, ("lm_head",), False)
    flat = {"quant_algo": "FP8", "ignore": ["*"], "kv_cache_scheme": GOOD}
    assert read_modelopt(flat) == ModelOpt("FP8", "FP8", ("*",), True)
    assert read_modelopt({"kv_cache_scheme": "NVFP4"}) == ModelOpt(None, "NVFP4", (), True)
    assert read_modelopt({"kv_cache_quant_algo": "FP8"}) == ModelOpt(None, "FP8", (), True)
    odd = {"kv_cache_scheme": {"type": "int", "num_bits": 8}}
    assert read_modelopt(odd).kv_algo == "int of 8 bits"


def test_two_files_that_agree() -> None:
    flat = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["b", "a"],
        "kv_cache_scheme": GOOD,
    }
    nested: dict[str, Any] = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["a", "b"],
    }
    served = _served({"quantization_config": flat}, {"quantization": nested})
    assert contradiction(served) == []
    for key, value in (("quant_algo", "NVFP4"), ("kv_cache_quant_algo", None)):
        changed = {"quantization": {**nested, key: value}}
        (found,) = contradiction(_served({"quantization_config": flat}, changed))
        assert found.serious
    assert contradiction(_served({}, {"quantization": nested})) == []


def test_types_of_models() -> None:
    assert model_dtype({"dtype": "float16"}) == "float16"
    assert model_dtype({"torch_dtype": "float32"}) == "float32"
    assert model_dtype({"text_config": {"dtype": "float32"}}) == "float32"
    assert model_dtype({"dtype": None}) == "bfloat16"


SCHEMES: list[dict[str, Any]] = [
    GOOD,
    {**GOOD, "type": "int"},
    {**GOOD, "strategy": "attn_head"},
    {**GOOD, "observer": "minmax", "observer_kwargs": {}, "group_size": None, "actorder": None},
    {**GOOD, "block_structure": None, "scale_dtype": None, "zp_dtype": None},
    {**GOOD, "calibrated_by": "us"},
    {**GOOD, "strategy": "token"},
    {**GOOD, "type": "complex"},
    {**GOOD, "strategy": "everything"},
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_these_rules_pass_compressed_tensors_passes_too(scheme: dict[str, Any]) -> None:
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="compressed-tensors is not installed"
    )
    block = {"config_groups": {}, "kv_cache_scheme": scheme}
    try:
        quantization.QuantizationConfig.model_validate(block)
        parses = True
    except ValueError:
        parses = False
    found = scheme_findings({"kv_cache_scheme": scheme}, TRANSFORMERS)
    assert parses is not any(finding.serious for finding in found)


def test_rules_of_engines_differ() -> None:
    strict = SchemeRules("it", ("tensor",), "stops", symmetric=True)
    lax = SchemeRules("it", ("tensor",), "stops")
    silent = {key: value for key, value in GOOD.items() if key not in ("symmetric", "dynamic")}
    assert scheme_findings({"kv_cache_scheme": silent}, lax) == []
    (found,) = scheme_findings({"kv_cache_scheme": silent}, strict)
    assert "symmetric None" in found.what
    (found,) = scheme_findings({"kv_cache_scheme": {**GOOD, "note": 1}}, lax)
    assert not found.serious


def test_groups_of_weights() -> None:
    weights = {"num_bits": 8, "type": "float"}
    good = {"g": {"targets": ["Linear"], "weights": weights}}
    assert group_findings({"config_groups": good}, "it", required=True) == []
    assert group_findings({"config_groups": {}}, "it", required=True) == []
    assert group_findings({}, "it", required=True)[0].serious
    assert not group_findings({}, "it", required=False)[0].serious
    assert group_findings({"config_groups": None}, "it", required=False)[0].serious
    assert group_findings({"config_groups": []}, "it", required=False)[0].serious
