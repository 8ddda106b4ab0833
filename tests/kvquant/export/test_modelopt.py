from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import __version__
from kvquant.errors import ExportError
from kvquant.export.modelopt import cache_alone, extended, file_alone, is_mixed, scale_tensors

FLAT_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
FLAT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
WHOLE = {
    "producer": {"name": "modelopt", "version": "0.40.0"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"],
    },
}


def test_names(plain: Callable[..., Any]) -> None:
    key = torch.tensor([0.5])
    tensors = scale_tensors("model.layers.0.self_attn", key, key)
    assert plain(tensors) == {
        "model.layers.0.self_attn.k_proj.k_scale": ("float32", [0.5]),
        "model.layers.0.self_attn.v_proj.v_scale": ("float32", [0.5]),
    }
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == 2


def test_a_config_for_the_cache_alone() -> None:
    assert cache_alone() == {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["*"],
            "kv_cache_scheme": FLAT_FP8,
        }
    }


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_a_file_for_the_cache_alone(algorithm: str) -> None:
    (name, content), *more = file_alone(algorithm).items()
    assert not more
    assert name == "hf_quant_config.json"
    assert json.loads(content) == {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "calibrated_by": f"kvquant {__version__}",
        "quantization": {
            "quant_algo": None,
            "kv_cache_quant_algo": algorithm,
            "exclude_modules": [],
        },
    }


@pytest.mark.parametrize(("algorithm", "scheme"), [("FP8", FLAT_FP8), ("NVFP4", "NVFP4")])
def test_both_places_of_a_base_say_the_same(
    make_job: Callable[..., Any], tmp_path: Path, algorithm: str, scheme: Any
) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(WHOLE))
    job = make_job({0: (1.0, 1.0)}, config={"quantization_config": FLAT}, quantization=FLAT)
    config, files = extended(job.checkpoint, algorithm)
    assert config == {"quantization_config": {**FLAT, "kv_cache_scheme": scheme}}
    assert json.loads(files["hf_quant_config.json"]) == {
        "producer": {"name": "modelopt", "version": "0.40.0"},
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": algorithm,
            "exclude_modules": ["lm_head"],
        },
    }


def test_a_base_with_config_json_alone(make_job: Callable[..., Any]) -> None:
    flat = {**FLAT, "kv_cache_quant_algo": None}
    job = make_job({0: (1.0, 1.0)}, config={"quantization_config": flat}, quantization=flat)
    assert extended(job.checkpoint, "FP8") == (
        {
            "quantization_config": {
                **FLAT,
                "kv_cache_quant_algo": "FP8",
                "kv_cache_scheme": FLAT_FP8,
            }
        },
        {},
    )


def test_the_older_form_inside_config_json(make_job: Callable[..., Any]) -> None:
    base = {"quantization_config": WHOLE}
    job = make_job({0: (1.0, 1.0)}, config=base, quantization=WHOLE)
    config, _ = extended(job.checkpoint, "FP8")
    inner = config["quantization_config"]["quantization"]
    assert inner == {**WHOLE["quantization"], "kv_cache_quant_algo": "FP8"}


def test_a_base_with_hf_quant_config_alone(make_job: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(WHOLE))
    config, files = extended(make_job({0: (1.0, 1.0)}, quantization=WHOLE).checkpoint, "FP8")
    assert config == {}
    assert list(files) == ["hf_quant_config.json"]


@pytest.mark.parametrize("content", ["{", "[]", '{"quantization": 3}'])
def test_a_file_that_cannot_be_read(
    make_job: Callable[..., Any], tmp_path: Path, content: str
) -> None:
    (tmp_path / "hf_quant_config.json").write_text(content)
    with pytest.raises(ExportError, match=r"hf_quant_config\.json cannot be read"):
        extended(make_job({0: (1.0, 1.0)}, quantization=FLAT).checkpoint, "FP8")


def test_mixed_precision(make_job: Callable[..., Any]) -> None:
    def base(quantization: Any) -> bool:
        return is_mixed(make_job({0: (1.0, 1.0)}, quantization=quantization).checkpoint)

    assert base({**FLAT, "quant_algo": "MIXED_PRECISION"})
    assert base({"quantization": {"quant_algo": "MIXED_PRECISION"}})
    assert not base(FLAT)
    assert not base(WHOLE)
    assert not base(None)
