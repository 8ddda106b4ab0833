"""G22, ggml-org/llama.cpp#10378 and PR#4312: "V cache quantization requires flash_attn".

Its command line wants flash attention for quantized values, and heads that blocks of 32 divide.
The export gives the line, or the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calib.collect import collect
from calib.solve import solve
from kvquant.errors import ExportError
from kvquant.export.checkpoint import attention_modules, read_checkpoint
from kvquant.export.target import ExportJob
from kvquant.export.targets import target
from kvquant.geometry import CacheGeometry
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format


@pytest.fixture
def launch(
    tiny: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path: Path
) -> Callable[..., str]:
    """The command line for a model with such heads, its cache calibrated for such formats."""

    def run(
        head_dim: int,
        key: str,
        value: str,
        granularity: Granularity = Granularity.PER_TENSOR,
    ) -> str:
        model = tiny("llama", head_dim=head_dim)
        geometry = CacheGeometry.from_config(model.config)
        slots = (TensorScheme(tensor_format(name), granularity) for name in (key, value))
        stats = collect(model, [list(range(3, 23))], geometry)
        checkpoint = read_checkpoint(save_tiny(model, tmp_path))
        modules = attention_modules(checkpoint, geometry)
        job = ExportJob(checkpoint, geometry, modules, solve(stats, QuantScheme(*slots)))
        (line,) = target("llama.cpp").contribute(job).launch
        return line

    return run


@pytest.mark.parametrize(
    ("key", "value", "types"),
    [
        ("int8", "int8", "-ctk q8_0 -ctv q8_0"),
        ("int8", "int4", "-ctk q8_0 -ctv q4_0"),
        ("int4", "int4", "-ctk q4_0 -ctv q4_0"),
    ],
)
def test_quantized_values_come_with_flash_attention(
    launch: Callable[..., str], key: str, value: str, types: str
) -> None:
    assert launch(96, key, value) == f"llama-server -m MODEL.gguf {types} -fa on"


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_heads_of_80_are_refused(launch: Callable[..., str], form: str) -> None:
    with pytest.raises(ExportError, match=r"blocks of 32 values, which do not divide a head of 80"):
        launch(80, form, form)


def test_nothing_becomes_something_else(launch: Callable[..., str]) -> None:
    with pytest.raises(ExportError, match="nothing like keys as fp8_e4m3"):
        launch(96, "fp8", "fp8")
    with pytest.raises(ExportError, match="nothing like values as fp8_e5m2"):
        launch(96, "int8", "fp8_e5m2")
    with pytest.raises(ExportError, match="nothing like keys as int8 per-channel"):
        launch(96, "int8", "int8", Granularity.PER_CHANNEL)
