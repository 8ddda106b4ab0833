from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvquant.errors import ExportError
from kvquant.export.sglang_json import SglangJson
from kvquant.geometry import LayerGeometry, LayerKind

FULL = LayerGeometry(LayerKind.FULL, 2, 16, 16)
LINEAR = LayerGeometry(LayerKind.LINEAR)
SERVE = "python -m sglang.launch_server --model-path {model} --kv-cache-dtype fp8_e4m3"


def test_what_is_written(make_job: Callable[..., Any]) -> None:
    made = SglangJson().contribute(make_job({0: (0.5, 0.25), 1: (0.25, 4.0)}))
    assert (made.tensors, made.config) == ({}, {})
    assert made.files["kv_cache_scales_tp1.json"].decode() == (
        "{\n"
        '  "model_type": "llama",\n'
        '  "kv_cache": {\n'
        '    "dtype": "float8_e4m3fn",\n'
        '    "scaling_factor": {\n'
        '      "0": {\n'
        '        "0": 0.5,\n'
        '        "1": 4.0\n'
        "      }\n"
        "    }\n"
        "  }\n"
        "}\n"
    )
    assert made.launch == (f"{SERVE} --quantization-param-path {{model}}/kv_cache_scales_tp1.json",)


def test_each_rank_has_the_same_numbers(make_job: Callable[..., Any]) -> None:
    made = SglangJson().contribute(make_job({0: (0.5, 0.25)}, tensor_parallel=2))
    values = json.loads(made.files["kv_cache_scales_tp2.json"])
    assert values["kv_cache"]["scaling_factor"] == {"0": {"0": 0.5}, "1": {"0": 0.5}}
    assert made.launch == (
        f"{SERVE} --quantization-param-path {{model}}/kv_cache_scales_tp2.json --tp-size 2",
    )
    assert any("for layers on 2 GPUs each" in remark for remark in made.remarks)


def test_the_layer_that_pays_most_for_one_number_is_told(make_job: Callable[..., Any]) -> None:
    remarks = SglangJson().contribute(make_job({0: (0.5, 0.25), 1: (0.25, 4.0)})).remarks
    assert (
        "keys and values of a layer share one number here, the larger scale; most apart in layer "
        "1: keys 0.25, values 4 (16 times)"
    ) in remarks
    assert any("sgl-project/sglang#18818" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "MixtralForCausalLM"}, "no JSON of KV scales for MixtralForCausalLM"),
        ({"tensor_parallel": 0}, "--tensor-parallel is at least 1, not 0"),
        ({"quantization": {"quant_method": "fp8"}}, "quantized with fp8: there SGLang fails"),
        ({"tensors": ["model.layers.0.self_attn.k_scale"]}, "has KV scales already"),
        ({"layers": [FULL, LINEAR]}, "1 of 2 layers keeps no tokens"),
        ({"layers": [FULL, FULL]}, "leave layer 1 exact"),
        ({"value_format": "int8"}, "It has no int8 cache at all"),
    ],
)
def test_refused(make_job: Callable[..., Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ExportError, match=said.replace("(", r"\(")):
        SglangJson().contribute(make_job({0: (1.0, 1.0)}, **changes))
