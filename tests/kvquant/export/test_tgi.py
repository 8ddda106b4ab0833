from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvquant.errors import ExportError
from kvquant.export.tgi import Tgi
from kvquant.geometry import LayerGeometry, LayerKind

FULL = LayerGeometry(LayerKind.FULL, 2, 16, 16)
LATENT = LayerGeometry(LayerKind.LATENT, 1, 16, 4)


@pytest.mark.parametrize("method", [None, "gptq", "awq", "compressed-tensors"])
def test_what_is_written_beside_any_weights(
    make_job: Callable[..., Any], plain: Callable[..., Any], method: str | None
) -> None:
    quantization = None if method is None else {"quant_method": method}
    made = Tgi().contribute(make_job({0: (0.5, [0.25, 1.0])}, quantization=quantization))
    assert plain(made.tensors) == {
        "model.layers.0.self_attn.k_scale": ("float32", [0.5]),
        "model.layers.0.self_attn.v_scale": ("float32", [1.0]),
    }
    assert (made.config, made.files) == ({}, {})
    assert made.launch == (
        "text-generation-launcher --model-id {model} --kv-cache-dtype fp8_e4m3fn",
    )
    assert any("flashinfer and paged attention only" in remark for remark in made.remarks)
    assert any("LoRA" in remark for remark in made.remarks)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key_format": "int8"}, "no int8 cache"),
        ({"value_format": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
        ({"layers": [LATENT]}, "TGI is not known to load scales"),
        ({"layers": [FULL, FULL]}, "leave layer 1 exact"),
        ({"tensors": ["model.layers.0.self_attn.kv_scale"]}, "has KV scales already"),
    ],
)
def test_refused(make_job: Callable[..., Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ExportError, match=said):
        Tgi().contribute(make_job({0: (1.0, 1.0)}, **changes))
