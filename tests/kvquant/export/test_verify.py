"""Good exports pass, and each defect planted in one is found, in the right layer, and only then.

The directories are built by hand from the names that each engine's documentation gives, not by the
exporters.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvquant.errors import ExportError, ModelError
from kvquant.export.verify import verifiable, verify
from kvquant.export.verify_report import Finding, VerifyReport
from kvquant.tensor_files import read_header

SCALES = "model-00002-of-00002.safetensors"
BASE = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
COMPRESSED_TENSORS: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "frozen",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    },
}
MODELOPT: Mapping[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["*"],
    "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
}
FP8: Mapping[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NVFP4: Mapping[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": "NVFP4", "exclude_modules": []},
}
PLAIN, INNER = ("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale")
PROJECTIONS = ("k_proj.k_scale", "v_proj.v_scale")
LLAMA = "model.layers.{}.self_attn"


class Export:
    """A directory with a model's weights and a shard of scales, to be changed and written."""

    def __init__(self, base: Path, path: Path, block: Mapping[str, Any] | None) -> None:
        self.path = Path(shutil.copytree(base, path))
        (path / "model.safetensors").rename(path / BASE)
        self.config = json.loads((path / "config.json").read_text())
        if block is not None:
            self.config["quantization_config"] = json.loads(json.dumps(block))
        self.scales: dict[str, Any] = {}
        self.metadata: dict[str, str] | None = {"format": "pt"}
        self.index: dict[str, Any] | None = {}

    @property
    def scheme(self) -> dict[str, Any]:
        """The KV part of the config."""
        found: dict[str, Any] = self.config["quantization_config"]["kv_cache_scheme"]
        return found

    def add(self, path: str, layers: range | list[int], names: tuple[str, str] = PLAIN) -> Export:
        """Scales 0.25, 0.26 … of keys and 0.125, 0.135 … of values."""
        for layer in layers:
            for name, first in zip(names, (0.25, 0.125), strict=True):
                scale = np.array([first + layer / 100], np.float32)
                self.scales[f"{path.format(layer)}.{name}"] = scale
        return self

    def rename(self, old: str, new: str) -> None:
        """A scale by another name."""
        self.scales[new] = self.scales.pop(old)

    def write(self) -> Path:
        """Puts it all on disk."""
        save_file(self.scales, self.path / SCALES, metadata=self.metadata)
        (self.path / "config.json").write_text(json.dumps(self.config))
        if self.index is not None:
            files = {name: read_header(self.path / name) for name in (BASE, SCALES)}
            listed = {key: name for name, file in files.items() for key in file.tensors}
            size = sum(files[name].nbytes(key) for key, name in listed.items())
            index = {"metadata": {"total_size": size}, "weight_map": listed, **self.index}
            (self.path / INDEX).write_text(json.dumps(index))
        return self.path


@pytest.fixture(scope="session")
def bases(
    tiny_once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """``bases(family)``: a tiny model on disk, saved once."""
    made: dict[str, Path] = {}

    def build(family: str, **overrides: Any) -> Path:
        place = f"{family} {sorted(overrides.items())}"
        if place not in made:
            made[place] = tmp_path_factory.mktemp("base") / "model"
            tiny_once(family, **overrides).save_pretrained(made[place])
        return made[place]

    return build


@pytest.fixture
def export(bases: Callable[..., Path], tmp_path: Path) -> Callable[..., Export]:
    """``export(block, family, **overrides)``: an `Export` without scales yet, in `path`."""

    def build(
        block: Mapping[str, Any] | None, family: str = "llama", path: str = "export", **other: Any
    ) -> Export:
        return Export(bases(family, **other), tmp_path / path, block)

    return build


@pytest.fixture
def llama(export: Callable[..., Export]) -> Callable[[str], Export]:
    """``llama(engine)``: a good export of a Llama with 3 layers, not written yet."""

    def build(engine: str) -> Export:
        block, names = {
            "vllm": (COMPRESSED_TENSORS, PLAIN),
            "vllm fp8": (FP8, PLAIN),
            "vllm modelopt": (MODELOPT, PROJECTIONS),
            "sglang": (COMPRESSED_TENSORS, PLAIN),
            "sglang-modelopt": (MODELOPT, PLAIN),
            "tensorrt-llm": (None, PROJECTIONS),
            "tensorrt-llm-nvfp4": (None, PROJECTIONS),
            "tgi": (None, PLAIN),
            "transformers": (COMPRESSED_TENSORS, PLAIN),
        }[engine]
        made = export(block, num_hidden_layers=3).add(LLAMA, range(3), names)
        if engine.startswith("tensorrt"):
            values = json.loads(json.dumps(NVFP4))
            if engine == "tensorrt-llm":
                values["quantization"]["kv_cache_quant_algo"] = "FP8"
            (made.path / "hf_quant_config.json").write_text(json.dumps(values))
        return made

    return build


def serious(report: VerifyReport) -> list[str]:
    return [finding.what for finding in report.findings if finding.serious]


# --- good exports ---------------------------------------------------------------------------------

GOOD = [
    ("vllm", COMPRESSED_TENSORS, "llama", LLAMA, [0, 1], PLAIN),
    ("vllm", FP8, "llama", LLAMA, [0, 1], PLAIN),
    ("vllm", MODELOPT, "llama", LLAMA, [0, 1], PROJECTIONS),
    ("vllm", COMPRESSED_TENSORS, "qwen2", LLAMA, [0, 1], INNER),
    ("vllm", COMPRESSED_TENSORS, "phi3", LLAMA, [0, 1], PLAIN),
    ("vllm", COMPRESSED_TENSORS, "phi3", LLAMA, [0, 1], ("qkv_proj.k_scale", "qkv_proj.v_scale")),
    ("vllm", COMPRESSED_TENSORS, "gpt2", "transformer.h.{}.attn", [0, 1], INNER),
    ("vllm", MODELOPT, "deepseek", LLAMA, [0, 1], PROJECTIONS),
    ("vllm", COMPRESSED_TENSORS, "qwen3_next", LLAMA, [3], PLAIN),
    ("vllm", COMPRESSED_TENSORS, "gemma3n_text", LLAMA, range(4), PLAIN),
    ("vllm", {"quant_method": "quark"}, "llama", LLAMA, [0, 1],
     ("k_proj.output_scale", "v_proj.output_scale")),
    ("sglang", COMPRESSED_TENSORS, "llama", LLAMA, [0, 1], PLAIN),
    ("sglang", FP8, "llama", LLAMA, [0, 1], PROJECTIONS),
    ("sglang", COMPRESSED_TENSORS, "phi3", LLAMA, [0, 1], PLAIN),
    ("sglang", COMPRESSED_TENSORS, "qwen2", LLAMA, [0, 1], INNER),
    ("sglang", COMPRESSED_TENSORS, "gpt2", "transformer.h.{}.attn", [0, 1], INNER),
    ("sglang", MODELOPT, "deepseek", LLAMA, [0, 1], PROJECTIONS),
    ("sglang", MODELOPT, "qwen3_next", LLAMA, [3], PROJECTIONS),
    ("sglang-modelopt", MODELOPT, "llama", LLAMA, [0, 1], PROJECTIONS),
    ("tgi", None, "llama", LLAMA, [0, 1], PLAIN),
    ("tgi", COMPRESSED_TENSORS, "gpt2", "transformer.h.{}.attn", [0, 1], PLAIN),
    ("transformers", COMPRESSED_TENSORS, "llama", LLAMA, [0, 1], PLAIN),
    ("transformers", COMPRESSED_TENSORS, "qwen3_next", LLAMA, [3], PLAIN),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "block", "family", "path", "layers", "names"), GOOD)
def test_a_good_export_passes(
    export: Callable[..., Export],
    engine: str,
    block: Mapping[str, Any] | None,
    family: str,
    path: str,
    layers: list[int],
    names: tuple[str, str],
) -> None:
    report = verify(export(block, family).add(path, layers, names).write(), engine)
    assert serious(report) == []
    assert report.ok
    assert [layer.layer for layer in report.layers] == list(layers)
    for layer in report.layers:
        assert (layer.key, layer.value) == tuple(f"{path.format(layer.layer)}.{n}" for n in names)
        assert layer.key_scale == (np.float32(0.25 + layer.layer / 100),)
        assert layer.value_scale == (np.float32(0.125 + layer.layer / 100),)
        assert layer.source == "checkpoint"


ENGINES = [
    "vllm",
    "vllm fp8",
    "vllm modelopt",
    "sglang",
    "sglang-modelopt",
    "tensorrt-llm",
    "tensorrt-llm-nvfp4",
    "tgi",
    "transformers",
]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_base_of_all_mutations_is_good(llama: Callable[..., Export], engine: str) -> None:
    report = verify(llama(engine).write(), engine.split()[0])
    assert report.ok
    # What is to be launched, how, and with which versions: nothing about scales.
    assert not any(finding.layer is not None for finding in report.findings)
    assert len(report.findings) <= 2


def test_tensorrt_llm_ignores_fp8_scales(llama: Callable[..., Export]) -> None:
    report = verify(llama("tensorrt-llm").write(), "tensorrt-llm")
    assert report.ok
    assert "ignores calibrated scales, the 6 scale tensors here" in report.findings[0].what
    assert [layer.key_scale for layer in report.layers] == [(1.0,)] * 3


def test_scales_that_are_needed_under_two_names_serve_two_engines(
    export: Callable[..., Export],
) -> None:
    made = export(COMPRESSED_TENSORS, "qwen2").add(LLAMA, [0, 1]).add(LLAMA, [0, 1], INNER)
    made.write()
    for engine in ("vllm", "sglang", "tgi", "transformers"):
        assert verify(made.path, engine).ok


def test_per_head_scales(export: Callable[..., Export]) -> None:
    made = export(COMPRESSED_TENSORS).add(LLAMA, [0, 1])
    made.scheme["strategy"] = "attn_head"
    for name in made.scales:
        made.scales[name] = np.array([[[0.5]], [[0.25]]], np.float32)
    made.write()
    for engine in ("vllm", "transformers"):
        report = verify(made.path, engine)
        assert report.ok
        assert report.layers[0].key_scale == (0.5, 0.25)
    assert "strategy 'attn_head', not 'tensor'" in serious(verify(made.path, "sglang"))[0]
    for name in made.scales:
        made.scales[name] = np.array([0.5, 0.25], np.float32)
    made.write()
    assert verify(made.path, "vllm").ok
    assert "wants [2, 1, 1]" in serious(verify(made.path, "transformers"))[0]


def test_layers_that_the_record_leaves_exact_need_no_scales(
    export: Callable[..., Export],
) -> None:
    made = export(COMPRESSED_TENSORS, "gemma3_text").add(LLAMA, [0, 5])
    made.scales.pop(f"{LLAMA.format(0)}.k_scale")
    assert "layer 0: vLLM finds" in serious(verify(made.write(), "vllm"))[0]
    made.add(LLAMA, [0])
    record = {"launch": ["vllm serve DIR --kv-cache-dtype-skip-layers 1 2 3 4"]}
    assert "layer 1" in serious(verify(made.write(), "vllm"))[0]
    (made.path / "kvquant_export.json").write_text(json.dumps(record))
    report = verify(made.path, "vllm")
    assert report.ok
    assert [layer.source for layer in report.layers[:2]] == ["checkpoint", "not quantized"]
    assert report.layers[1].key_scale == report.layers[1].value_scale == ()
    made.add(LLAMA, [2])
    made.scales.pop(f"{LLAMA.format(2)}.v_scale")
    assert verify(made.write(), "vllm").layers[2].source == "not quantized"
    record = {"launch": ["vllm serve DIR --kv-cache-dtype-skip-layers sliding_window"]}
    (made.path / "kvquant_export.json").write_text(json.dumps(record))
    assert verify(made.path, "vllm").ok


# --- mutations ------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """A finding that a defect leads to."""

    what: str
    layer: int | None = None
    serious: bool = True


K1, V1 = f"{LLAMA.format(1)}.k_scale", f"{LLAMA.format(1)}.v_scale"
KP1, VP1 = f"{LLAMA.format(1)}.k_proj.k_scale", f"{LLAMA.format(1)}.v_proj.v_scale"


def _pop(*names: str) -> Callable[[Export], None]:
    return lambda made: [made.scales.pop(name) for name in names] and None


def _set(name: str, value: Any, dtype: Any = np.float32) -> Callable[[Export], None]:
    return lambda made: made.scales.update({name: np.array(value, dtype)})


def _call(old: str, new: str) -> Callable[[Export], None]:
    return lambda made: made.rename(old, new)


def _block(**changes: Any) -> Callable[[Export], None]:
    return lambda made: made.config["quantization_config"].update(changes)


def _scheme(**changes: Any) -> Callable[[Export], None]:
    return lambda made: made.scheme.update(changes)


def _without(key: str) -> Callable[[Export], None]:
    return lambda made: made.config["quantization_config"].pop(key) and None


def _weights(made: Export, name: str) -> None:
    """A second copy of the weights, by another name."""
    shutil.copy(made.path / BASE, made.path / name)


def _adapter(made: Export) -> None:
    held = {"base_model.model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    save_file(held, made.path / "adapter_model.safetensors", metadata={"format": "pt"})


def _beside(made: Export, **values: Any) -> None:
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": values})
    (made.path / "hf_quant_config.json").write_text(text)


def _all(value: float) -> Callable[[Export], None]:
    return lambda made: made.scales.update(
        {name: np.array([value], np.float32) for name in made.scales}
    )


def _fused(made: Export) -> None:
    made.scales.pop(V1)
    made.rename(K1, f"{LLAMA.format(1)}.kv_scale")


NO_SCALE = r"^layer 1: {} finds no scale .*looks for model\.layers\.1\.self_attn"
ALL_NONE = r"^all 3 layers: {} finds no scale"
MUTATIONS: list[tuple[str, str, Callable[[Export], Any], list[Expected]]] = [
    # Names that do not match what a loader looks for.
    ("vllm", "both scales of a layer are gone", _pop(K1, V1),
     [Expected(NO_SCALE.format("vLLM") + r"\.k_scale", 1)]),
    ("vllm", "a doubled attn", _call(K1, f"{LLAMA.format(1)}.attn.attn.k_scale"),
     [Expected(r"finds \S+1\.self_attn\.v_scale, but no scale of the keys.*1\.0 without a word, "
               r"and drops model\.layers\.1\.self_attn\.attn\.attn\.k_scale", 1)]),
    ("vllm", "an old llm-compressor name", _call(V1, f"{LLAMA.format(1)}.v_proj.output_scale"),
     [Expected(r"no scale of the values.*drops \S+v_proj\.output_scale", 1)]),
    ("vllm", "a prefix that the checkpoint does not have",
     _call(K1, f"language_model.{K1}"),
     [Expected(r"no scale of the keys.*drops language_model\.model\.layers\.1", 1)]),
    ("vllm", "a typo", _call(K1, f"{LLAMA.format(1)}.key_scale"),
     [Expected(r"no scale of the keys.*drops \S+\.key_scale", 1)]),
    ("vllm", "scales of a layer that is not there",
     lambda made: made.add(LLAMA, [7]),
     [Expected(r"^2 scale tensors of layer 7, where no attention keeps", 7, False)]),
    ("vllm", "a name of old versions",
     lambda made: (made.rename(K1, f"{LLAMA.format(1)}.attn.k_scale"),
                   made.rename(V1, f"{LLAMA.format(1)}.attn.v_scale")),
     [Expected(r"^vLLM before June 2026 drops .*, and serves layers 1 at 1\.0", None, False)]),
    ("vllm", "a name of old versions for the keys",
     _call(K1, f"{LLAMA.format(1)}.attn.k_scale"),
     [Expected(r"^vLLM before June 2026 drops names such as \S+attn\.k_scale, and serves layers 1 ",
               None, False)]),
    ("sglang", "a name that only vLLM renames", _call(K1, f"{LLAMA.format(1)}.qkv_proj.k_scale"),
     [Expected(r"no scale of the keys, and stops.*drops \S+qkv_proj\.k_scale", 1)]),
    ("sglang", "attn is in the name already",
     lambda made: (made.rename(K1, f"{LLAMA.format(1)}.attn.k_scale"),
                   made.rename(V1, f"{LLAMA.format(1)}.attn.v_scale")),
     [Expected(NO_SCALE.format("SGLang") + r".*drops \S+attn\.k_scale, \S+attn\.v_scale", 1)]),
    ("sglang", "scales of queries", lambda made: _set(f"{LLAMA.format(1)}.q_scale", [0.5])(made),
     [Expected(r"drops 1 further scale tensor .*q_scale", None, False)]),
    ("tensorrt-llm-nvfp4", "the names of vLLM",
     lambda made: (made.rename(KP1, K1), made.rename(VP1, V1)),
     [Expected(NO_SCALE.format("TensorRT-LLM") + r"\.k_proj\.k_scale, and drops", 1)]),
    ("transformers", "the names of ModelOpt",
     lambda made: (made.rename(K1, KP1), made.rename(V1, VP1)),
     [Expected(NO_SCALE.format("Transformers").replace(" .*", " and leaves both uninitialised.*")
               + r"\.k_scale, and drops", 1)]),
    ("tgi", "the names of ModelOpt",
     lambda made: (made.rename(K1, KP1), made.rename(V1, VP1)),
     [Expected(NO_SCALE.format("TGI"), 1)]),
    # One of two.
    ("vllm", "no scale of the values", _pop(V1),
     [Expected(r"finds \S+k_scale, but no scale of the values, and serves values at scale 1\.0 "
               r"without a word$", 1)]),
    ("vllm fp8", "no scale of the values", _pop(V1),
     [Expected(r"serves values with the keys' scale 0\.26$", 1)]),
    ("vllm fp8", "no scale of the keys", _pop(K1),
     [Expected(r"no scale of the keys, and stops with an error", 1)]),
    ("sglang", "no scale of the values", _pop(V1),
     [Expected(r"serves values with the keys' scale 0\.26$", 1)]),
    ("tensorrt-llm-nvfp4", "no scale of the values", _pop(VP1),
     [Expected(r"no scale of the values, and stops with an error", 1)]),
    ("tgi", "no scale of the values", _pop(V1),
     [Expected(r"uses neither: both are served at 1\.0", 1)]),
    ("transformers", "no scale of the values", _pop(V1),
     [Expected(r"leaves that of the values uninitialised", 1)]),
    ("vllm", "one scale for both", _fused,
     [Expected(r"finds \S+kv_scale, but no scale of the values", 1)]),
    ("vllm fp8", "one scale for both", _fused,
     [Expected(r"^layer 1: \S+kv_scale gives keys and values one scale, 0\.26", 1, False)]),
    ("sglang", "one scale for both", _fused,
     [Expected(r"^layer 1: \S+kv_scale gives keys and values one scale, 0\.26", 1, False)]),
    ("tgi", "one scale for both", _fused, []),
    # Numbers.
    ("vllm", "zero", _set(K1, [0.0]), [Expected(r"^layer 1: \S+ holds 0: vLLM uses it", 1)]),
    ("vllm fp8", "zero", _set(K1, [0.0]), [Expected(r"holds 0: vLLM .*AssertionError", 1)]),
    ("sglang", "negative", _set(V1, [-0.5]), [Expected(r"v_scale holds -0\.5: SGLang", 1)]),
    ("vllm", "not a number", _set(K1, [np.nan]), [Expected(r"holds nan", 1)]),
    ("tgi", "infinite", _set(V1, [np.inf]), [Expected(r"v_scale holds inf", 1)]),
    ("vllm", "1.0 everywhere", _all(1.0),
     [Expected(r"^all 6 scales are exactly 1\.0", None, False)]),
    ("transformers", "1.0 everywhere", _all(1.0),
     [Expected(r"^all 6 scales are exactly 1\.0", None, False)]),
    ("vllm", "two values for one parameter",
     lambda made: _set(f"{LLAMA.format(1)}.attn.k_scale", [0.5])(made),
     [Expected(r"^layer 1: vLLM loads different scales into one parameter.*0\.5\).*0\.26\)", 1)]),
    ("vllm fp8", "bits that bfloat16 does not have",
     lambda made: (made.config.update(dtype="bfloat16"), _set(K1, [0.2601])(made)),
     [Expected(r"^vLLM holds scales in bfloat16: 4 of 6 change by up to 0\.32%", None, False)]),
    ("transformers", "bits that bfloat16 does not have",
     lambda made: made.config.update(dtype="bfloat16"),
     [Expected(r"^Transformers holds scales in bfloat16: 4 of 6", None, False)]),
    # Shapes and types.
    ("vllm", "per head without saying so", _set(K1, [0.5, 0.25]),
     [Expected(r"^layer 1: \S+ has the shape \[2\], but vLLM wants \[1\]", 1)]),
    ("sglang", "a scale per channel", _set(V1, np.ones(32)),
     [Expected(r"has the shape \[32\], but SGLang wants \[1\]", 1)]),
    ("transformers", "too many axes", _set(K1, [[0.5]]),
     [Expected(r"has the shape \[1, 1\], but Transformers wants \[1\]", 1)]),
    ("transformers", "no axis", _set(K1, 0.5), []),
    ("vllm", "no axis", _set(K1, 0.5), []),
    ("vllm", "an integer", _set(K1, [1], np.int32),
     [Expected(r"k_scale is of type I32", 1)]),
    ("vllm", "half precision", _set(K1, [0.25], np.float16), []),
    # How the cache is declared.
    ("vllm", "no quantization config", lambda made: made.config.pop("quantization_config"),
     [Expected(r"no quantization_config, but there are 6 scale tensors: vLLM stops at the first "
               r"\(no parameter named model\.layers\.0\.self_attn\.k_scale\)")]),
    ("sglang", "no quantization config", lambda made: made.config.pop("quantization_config"),
     [Expected(r"drops the 6 scale tensors without a word")]),
    ("transformers", "no quantization config", lambda made: made.config.pop("quantization_config"),
     [Expected(r"ignores 6 scale tensors as unexpected")]),
    ("vllm", "no kv_cache_scheme", _without("kv_cache_scheme"), [Expected("no kv_cache_scheme")]),
    ("vllm", "kv_cache_scheme null", _block(kv_cache_scheme=None),
     [Expected("no kv_cache_scheme")]),
    ("vllm", "kv_cache_scheme is a text", _block(kv_cache_scheme="FP8"),
     [Expected("is 'FP8', no JSON object")]),
    ("vllm", "integers", _scheme(type="int"), [Expected("type 'int' with 8 bits")]),
    ("vllm", "4 bits", _scheme(num_bits=4), [Expected("type 'float' with 4 bits")]),
    ("vllm", "asymmetric", _scheme(symmetric=False), [Expected("symmetric False")]),
    ("vllm", "symmetric is not said", lambda made: made.scheme.pop("symmetric"),
     [Expected("symmetric None")]),
    ("vllm", "per token", _scheme(strategy="token"),
     [Expected("strategy 'token', not 'tensor' or 'attn_head'")]),
    ("vllm", "dynamic", _scheme(dynamic=True), [Expected("dynamic True")]),
    ("vllm", "a key of our own", _scheme(calibrated_by="us"),
     [Expected("unknown key calibrated_by: compressed-tensors refuses", None, False)]),
    ("vllm", "no config_groups", _without("config_groups"),
     [Expected("no config_groups: Transformers stops", None, False)]),
    ("vllm", "config_groups null", _block(config_groups=None),
     [Expected("config_groups is None: vLLM stops")]),
    ("vllm", "a group without weights",
     _block(config_groups={"g": {"targets": ["Linear"], "weights": None}}),
     [Expected("'g' without weights")]),
    ("vllm", "a group for attention", _block(
        config_groups={"g": {"targets": ["LlamaAttention"], "weights": None}}), []),
    ("vllm modelopt", "NVFP4", _block(kv_cache_scheme="NVFP4"),
     [Expected("^config.json declares the cache as NVFP4: vLLM keeps it in 16", None, False)]),
    ("sglang", "no config_groups", _without("config_groups"),
     [Expected("no config_groups: Transformers stops", None, False)]),
    ("sglang", "integers", _scheme(type="int"), [Expected("SGLang ignores it")]),
    ("sglang", "dynamic", _scheme(dynamic=True), [Expected("dynamic True.*SGLang ignores it")]),
    ("transformers", "integers", _scheme(type="int"),
     [Expected("no serving engine has a static integer", None, False)]),
    ("transformers", "a key of our own", _scheme(calibrated_by="us"),
     [Expected("unknown key calibrated_by: Transformers refuses")]),
    ("transformers", "no config_groups", _without("config_groups"),
     [Expected("no config_groups: Transformers stops")]),
    ("transformers", "a status that is none", _block(quantization_status="done"),
     [Expected("compressed-tensors refuses quantization_config")]),
    ("vllm modelopt", "quant_algo null", _block(quant_algo=None), [Expected("no quant_algo")]),
    ("vllm modelopt", "an algorithm that it lacks", _block(quant_algo="W4A8_AWQ"),
     [Expected("quant_algo W4A8_AWQ: vLLM stops")]),
    ("vllm modelopt", "weights are not quantized", _block(ignore=["lm_head"]),
     [Expected("declared as FP8, but no weight_scale")]),
    ("vllm modelopt", "no scheme for the cache", _without("kv_cache_scheme"),
     [Expected("does not say how the cache", None, False)]),
    ("sglang-modelopt", "quant_algo null", _block(quant_algo=None), [Expected("no quant_algo")]),
    ("sglang-modelopt", "no scheme for the cache", _without("kv_cache_scheme"),
     [Expected("does not say how the cache is quantized: SGLang")]),
    ("sglang-modelopt", "NVFP4", _block(kv_cache_scheme="NVFP4"),
     [Expected("multiplies such scales by 6")]),
    ("sglang-modelopt", "compressed-tensors",
     lambda made: made.config.update(quantization_config=COMPRESSED_TENSORS),
     [Expected("SGLang before 0.5.23 drops")]),
    *[("vllm", method, _block(quant_method=method), [Expected(f"quantized with {title}")])
      for method, title in (("gptq", "GPTQ"), ("awq", "AWQ"), ("mxfp4", "MXFP4"),
                            ("bitsandbytes", "bitsandbytes"))],
    ("sglang", "gptq", _block(quant_method="gptq"), [Expected("quantized with GPTQ")]),
    ("vllm", "a method that nobody knows", _block(quant_method="mine"),
     [Expected("quant_method 'mine'")]),
    ("vllm", "hf_quant_config.json says otherwise",
     lambda made: _beside(made, quant_algo="FP8", kv_cache_quant_algo="FP8"),
     [Expected("config.json declares compressed-tensors, but hf_quant_config.json ModelOpt")]),
    ("vllm modelopt", "hf_quant_config.json says otherwise",
     lambda made: _beside(made, quant_algo="FP8", kv_cache_quant_algo="NVFP4",
                          exclude_modules=["*"]),
     [Expected("cache in FP8, all but .*cache in NVFP4")]),
    ("vllm modelopt", "hf_quant_config.json says the same",
     lambda made: _beside(made, quant_algo="FP8", kv_cache_quant_algo="FP8",
                          exclude_modules=["*"]), []),
    ("tensorrt-llm-nvfp4", "no hf_quant_config.json",
     lambda made: (made.path / "hf_quant_config.json").unlink(),
     [Expected("neither hf_quant_config.json nor a quantization_config")]),
    ("tensorrt-llm-nvfp4", "FP8",
     lambda made: _beside(made, quant_algo=None, kv_cache_quant_algo="FP8"),
     [Expected("declares the cache as FP8, not NVFP4")]),
    ("tensorrt-llm-nvfp4", "the config of vLLM beside it",
     lambda made: made.config.update(quantization_config=COMPRESSED_TENSORS),
     [Expected("config.json declares compressed-tensors, but"),
      Expected("config_groups is empty")]),
    ("tensorrt-llm-nvfp4", "the flat form alone",
     lambda made: ((made.path / "hf_quant_config.json").unlink(), made.config.update(
         quantization_config={**MODELOPT, "kv_cache_scheme": "NVFP4"})),
     [Expected("in the flat form, in which TensorRT-LLM recognises FP8 only")]),
    ("tensorrt-llm", "NVFP4",
     lambda made: _beside(made, quant_algo=None, kv_cache_quant_algo="NVFP4"),
     [Expected("declares the cache as NVFP4, not FP8")]),
    # Files.
    ("vllm", "scales in an adapter", _adapter,
     [Expected(r"adapter_model\.safetensors holds 1 scale tensor .*unsupported LoRA weight")]),
    ("sglang", "scales in an adapter", _adapter,
     [Expected(r"adapter_model\.safetensors holds 1 scale tensor")]),
    ("vllm", "a single file beside the index", lambda made: _weights(made, "model.safetensors"),
     [Expected("model.safetensors beside .*: Transformers loads that", None, False)]),
    ("transformers", "a single file beside the index",
     lambda made: _weights(made, "model.safetensors"),
     [Expected("Transformers loads that and nothing of the other files"),
      Expected(r"passes over model-00001\S+: Transformers reads only", None, False),
      Expected(r"passes over model-00002\S+ and its 6 scale tensors"),
      Expected(ALL_NONE.format("Transformers") + ".*uninitialised")]),
    ("tgi", "a tensor in two files", lambda made: save_file(
        {K1: np.ones(1, np.float32)}, made.path / "more.safetensors", metadata={"format": "pt"}),
     [Expected(r"^in more than one file: 1 tensor \(\S+1\.self_attn\.k_scale\), .* in "
               r"model-00002\S+ and more\.safetensors; TGI stops"),
      Expected("loads different scales into one parameter", 1)]),
    ("tgi", "a single file beside the index", lambda made: _weights(made, "model.safetensors"),
     [Expected("TGI reads both")]),
    ("vllm", "weights in Mistral's own format",
     lambda made: _weights(made, "consolidated.safetensors"),
     [Expected("consolidated.safetensors: vLLM loads the model in Mistral's own format")]),
    ("sglang", "weights in Mistral's own format",
     lambda made: _weights(made, "consolidated.safetensors"),
     [Expected("SGLang passes over it", None, False)]),
    ("tgi", "weights in Mistral's own format",
     lambda made: _weights(made, "consolidated.safetensors"),
     [Expected("consolidated.safetensors: TGI reads it too, and the same weights twice")]),
    ("tensorrt-llm-nvfp4", "weights in Mistral's own format",
     lambda made: _weights(made, "consolidated.safetensors"),
     [Expected("TensorRT-LLM passes over it", None, False)]),
    ("vllm", "a total size that is wrong", lambda made: setattr(
        made, "index", {"metadata": {"total_size": 1}}),
     [Expected("says that all tensors have 1 bytes, but they have [0-9,]+", None, False)]),
    ("vllm", "no total size", lambda made: setattr(made, "index", {"metadata": {}}), []),
    ("vllm", "a shard without a format", lambda made: setattr(made, "metadata", None),
     [Expected(r"model-00002\S+ has no format", None, False)]),
    ("vllm", "no index at all", lambda made: setattr(made, "index", None), []),
    ("transformers", "no index at all", lambda made: setattr(made, "index", None),
     [Expected("neither model.safetensors nor"), Expected(r"passes over model-00001", None, False),
      Expected(r"passes over model-00002\S+ and its 6 scale tensors"),
      Expected(ALL_NONE.format("Transformers"))]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "what", "change", "expected"),
    MUTATIONS,
    ids=[f"{engine}: {what}" for engine, what, _, _ in MUTATIONS],
)
def test_a_planted_defect_is_found_and_nothing_else(
    llama: Callable[..., Export],
    engine: str,
    what: str,
    change: Callable[[Export], Any],
    expected: list[Expected],
) -> None:
    made, name = llama(engine), engine.split()[0]
    before = verify(made.write(), name).findings
    (made.path / INDEX).unlink()
    change(made)
    report = verify(made.write(), name)
    check_new(report, before, expected)


def check_new(report: VerifyReport, before: tuple[Finding, ...], expected: list[Expected]) -> None:
    new = [finding for finding in report.findings if finding not in before]
    left = list(new)
    for wanted in expected:
        found = [finding for finding in left if re.search(wanted.what, finding.what)]
        assert found, (wanted.what, [finding.what for finding in new])
        assert (found[0].layer, found[0].serious) == (wanted.layer, wanted.serious)
        assert found[0].fix
        left.remove(found[0])
    assert [finding.what for finding in left] == []
    assert report.ok is not any(wanted.serious for wanted in expected)


def _nothing(made: Export) -> None:
    pass


SERVED: list[tuple[str, Callable[[Export], Any], tuple[Any, ...]]] = [
    ("vllm", _nothing, (K1, V1, 0.26, 0.135, "checkpoint")),
    ("vllm", _pop(K1, V1), (None, None, 1.0, 1.0, "default 1.0")),
    ("vllm", _pop(V1), (K1, None, 0.26, 1.0, "checkpoint and 1.0")),
    ("vllm", _pop(K1), (None, V1, 1.0, 0.135, "checkpoint and 1.0")),
    ("vllm", _scheme(type="int"), (None, None, None, None, "not loaded")),
    ("vllm fp8", _pop(K1, V1), (None, None, 1.0, 1.0, "default 1.0")),
    ("vllm fp8", _pop(V1), (K1, None, 0.26, 0.26, "checkpoint, one for both")),
    ("vllm fp8", _pop(K1), (None, V1, None, None, "does not load")),
    ("sglang", _pop(V1), (K1, None, 0.26, 0.26, "checkpoint, one for both")),
    ("sglang", _pop(K1), (None, V1, None, None, "does not load")),
    ("tensorrt-llm", _nothing, (None, None, 1.0, 1.0, "1.0 by design")),
    ("tensorrt-llm-nvfp4", _pop(KP1, VP1), (None, None, 1.0, 1.0, "default 1.0")),
    ("tensorrt-llm-nvfp4", _pop(VP1), (KP1, None, None, None, "does not load")),
    ("tensorrt-llm-nvfp4", _pop(KP1), (None, VP1, None, None, "does not load")),
    ("tgi", _pop(V1), (K1, None, 1.0, 1.0, "default 1.0")),
    ("tgi", _fused, (f"{LLAMA.format(1)}.kv_scale",) * 2 + (0.26, 0.26, "checkpoint")),
    ("tgi", lambda made: made.rename(V1, f"{LLAMA.format(1)}.kv_scale"),
     (f"{LLAMA.format(1)}.kv_scale",) * 2 + (0.135, 0.135, "checkpoint")),
    ("transformers", _pop(V1), (K1, None, 0.26, None, "uninitialised memory")),
    ("transformers", _pop(K1, V1), (None, None, None, None, "uninitialised memory")),
    ("transformers", _set(K1, [3], np.int32), (K1, V1, None, 0.135, "checkpoint")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "change", "expected"),
    SERVED,
    ids=[f"{engine}-{number}" for number, (engine, _, _) in enumerate(SERVED)],
)
def test_what_a_layer_is_served_with(
    llama: Callable[..., Export],
    engine: str,
    change: Callable[[Export], Any],
    expected: tuple[Any, ...],
) -> None:
    made = llama(engine)
    change(made)
    layer = verify(made.write(), engine.split()[0]).layers[1]
    scales = [None if not found else found[0] for found in (layer.key_scale, layer.value_scale)]
    rounded = [None if scale is None else round(scale, 6) for scale in scales]
    assert (layer.key, layer.value, *rounded, layer.source) == expected


def test_a_class_that_stops_loads_nothing(export: Callable[..., Export]) -> None:
    made = export(COMPRESSED_TENSORS, "gpt2").add("transformer.h.{}.attn", [0, 1], INNER)
    made.add("transformer.h.{}.attn", [0])
    report = verify(made.write(), "sglang")
    assert [layer.source for layer in report.layers] == ["does not load"] * 2
    (found,) = serious(report)
    assert "transformer.h.0.attn.k_scale, transformer.h.0.attn.v_scale" in found


def _rewrite_index(made: Export, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((made.path / INDEX).read_text())
    change(index["weight_map"])
    (made.path / INDEX).write_text(json.dumps(index))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


BROKEN: list[tuple[str, Callable[[Export], Any], list[Expected]]] = [
    ("the shard of scales is gone", lambda made: (made.path / SCALES).unlink(),
     [Expected(r"places 6 tensors in model-00002\S+, which is not there"),
      Expected(ALL_NONE.format("vLLM"))]),
    ("the weights are gone", lambda made: (made.path / BASE).unlink(),
     [Expected(r"places \d+ tensors in model-00001\S+, which is not there")]),
    ("the shard of scales is cut short", lambda made: _cut(made.path / SCALES),
     [Expected(r"model-00002\S+ cannot be read"), Expected(ALL_NONE.format("vLLM"))]),
    ("a key is in another shard", lambda made: _rewrite_index(
        made, lambda names: names.update({K1: BASE})),
     [Expected(r"places model\.layers\.1\.self_attn\.k_scale in model-00001\S+, which does not")]),
    ("the shard of scales is not in the index", lambda made: _rewrite_index(
        made, lambda names: [names.pop(name) for name in list(names) if name.endswith("_scale")]),
     [Expected(r"passes over model-00002\S+ and its 6 scale tensors: \S+ does not name it"),
      Expected(r"says that all tensors", None, False), Expected(ALL_NONE.format("vLLM"))]),
    ("the index is no JSON", lambda made: (made.path / INDEX).write_text("{"),
     [Expected(r"^model\.safetensors\.index\.json cannot be read")]),
    ("the index has no weight map", lambda made: (made.path / INDEX).write_text("{}"),
     [Expected(r"^model\.safetensors\.index\.json cannot be read: it has no weight_map")]),
    ("config.json is no JSON", lambda made: (made.path / "config.json").write_text("{"),
     [Expected(r"^config\.json cannot be read")]),
    ("config.json is a list", lambda made: (made.path / "config.json").write_text("[]"),
     [Expected(r"^config\.json cannot be read: it holds list")]),
    ("config.json is gone", lambda made: (made.path / "config.json").unlink(),
     [Expected(r"^there is no config\.json")]),
    ("a shard that nobody names", lambda made: _weights(made, "old.safetensors"),
     [Expected(r"passes over old\.safetensors: ", None, False)]),
    ("config.json does not say how many layers there are",
     lambda made: (made.path / "config.json").write_text('{"model_type": "unheard_of"}'),
     [Expected(r"which layers keep keys and values cannot be told from config\.json")]),
    ("keys of a layer are gone", lambda made: (_rewrite_index(
        made, lambda names: names.pop(f"{LLAMA.format(1)}.k_proj.weight")),
        _drop_key(made, f"{LLAMA.format(1)}.k_proj.weight")),
     [Expected(r"no weight that is known to make the keys of layer 1"),
      Expected(r"says that all tensors", None, False)]),
]  # fmt: skip


def _drop_key(made: Export, name: str) -> None:
    from safetensors.numpy import load_file

    held = load_file(made.path / BASE)
    held.pop(name)
    save_file(held, made.path / BASE, metadata={"format": "pt"})


@pytest.mark.parametrize(("what", "change", "expected"), BROKEN, ids=[row[0] for row in BROKEN])
def test_a_broken_directory_leads_to_findings(
    llama: Callable[..., Export],
    what: str,
    change: Callable[[Export], Any],
    expected: list[Expected],
) -> None:
    made = llama("vllm")
    before = verify(made.write(), "vllm").findings
    change(made)
    check_new(verify(made.path, "vllm"), before, expected)
    for engine in verifiable():
        verify(made.path, engine)


def _places(values: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if isinstance(values, (dict, list)):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        below = [found for key, value in items for found in _places(value, (*place, key))]
        return [place, *below]
    return [place]


def _replaced(values: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copied = json.loads(json.dumps(values))
    inner = copied
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copied


@pytest.fixture(scope="session")
def everything(bases: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with each file that some engine reads."""
    made = Export(bases("llama"), tmp_path_factory.mktemp("all") / "all", COMPRESSED_TENSORS)
    path = made.add(LLAMA, [0, 1]).write()
    (path / "hf_quant_config.json").write_text(json.dumps(NVFP4))
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 0.5}}}
    (path / "kv.json").write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    lightllm = {
        "architectures": "LlamaForCausalLM",
        "quant_type": "per_head",
        "qmin": -448.0,
        "qmax": 448.0,
        "num_layers": 2,
        "num_head": 2,
        "scales": [[0.5] * 4] * 2,
        "q_calibration": {"num_head": 2, "scales": [[0.5] * 2] * 2},
    }
    (path / "kv_cache_calib.json").write_text(json.dumps(lightllm))
    return path


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(
        ["config.json", "hf_quant_config.json", "kv.json", "kv_cache_calib.json", INDEX]
    ),
    st.sampled_from([None, 3, -1.5, True, "x", "1", [], {}, [3], [[]], {"a": {"b": [1]}}, 10**400]),
    st.data(),
)
def test_json_of_any_kind_leads_to_a_report(
    everything: Path, name: str, value: Any, data: st.DataObject
) -> None:
    text = (everything / name).read_text()
    values = json.loads(text)
    place = data.draw(st.sampled_from(_places(values)))
    (everything / name).write_text(json.dumps(_replaced(values, place, value)))
    try:
        for engine in verifiable():
            report = verify(everything, engine)
            json.dumps(report.to_dict(), allow_nan=False)
    finally:
        (everything / name).write_text(text)


def test_an_empty_directory_leads_to_findings(tmp_path: Path) -> None:
    for engine in verifiable():
        report = verify(tmp_path, engine)
        assert not report.ok
        assert report.layers == ()


# --- architectures --------------------------------------------------------------------------------


def test_gpt2_needs_attn_twice_in_vllm(export: Callable[..., Export]) -> None:
    made = export(COMPRESSED_TENSORS, "gpt2").add("transformer.h.{}.attn", [0, 1])
    (found,) = serious(verify(made.write(), "vllm"))
    assert found == (
        "all 2 layers: vLLM finds no scale and serves keys and values at scale 1.0; it looks for "
        "transformer.h.0.attn.attn.k_scale, and drops transformer.h.0.attn.k_scale, "
        "transformer.h.0.attn.v_scale"
    )
    assert "stops at transformer.h.0.attn.k_scale" in serious(verify(made.path, "sglang"))[0]


def test_latent_attention_needs_modelopt_in_vllm(export: Callable[..., Export]) -> None:
    made = export(COMPRESSED_TENSORS, "deepseek").add(LLAMA, [0, 1])
    (found,) = serious(verify(made.write(), "vllm"))
    assert found.startswith("layers 0-1 keep a latent (MLA)")
    made.config["quantization_config"] = dict(MODELOPT)
    (found,) = serious(verify(made.write(), "vllm"))
    assert "looks for model.layers.0.self_attn.k_proj.k_scale" in found
    made.config["quantization_config"] = {**MODELOPT, "quant_algo": "MIXED_PRECISION"}
    assert "mixed ones" in serious(verify(made.write(), "vllm"))[0]


def test_latent_attention_in_other_engines(export: Callable[..., Export]) -> None:
    made = export(None, "deepseek").add(LLAMA, [0, 1], PROJECTIONS).add(LLAMA, [0, 1])
    (made.path / "hf_quant_config.json").write_text(json.dumps(NVFP4))
    (found,) = serious(verify(made.write(), "tensorrt-llm-nvfp4"))
    assert found.startswith("layers 0-1 keep a latent (MLA): TensorRT-LLM takes NVFP4 scales with")
    report = verify(made.path, "tgi")
    assert report.ok
    assert any("for which TGI is not known to load" in f.what for f in report.findings)
    made.config["quantization_config"] = dict(MODELOPT)
    (made.path / "hf_quant_config.json").unlink()
    report = verify(made.write(), "vllm")
    assert report.ok
    assert any("fp8_ds_mla uses scales of its own" in f.what for f in report.findings)


def test_scales_of_layers_without_keys_are_not_used(export: Callable[..., Export]) -> None:
    made = export(COMPRESSED_TENSORS, "gemma3n_text").add(LLAMA, range(5))
    report = verify(made.write(), "vllm")
    assert report.ok
    (found,) = [finding for finding in report.findings if finding.layer == 4]
    assert "2 scale tensors of layer 4, where no attention keeps" in found.what
    assert [layer.layer for layer in report.layers] == [0, 1, 2, 3]


def test_a_model_class_that_renames_nothing(export: Callable[..., Export]) -> None:
    made = export(COMPRESSED_TENSORS, "qwen2").add(LLAMA, [0, 1])
    (found,) = serious(verify(made.write(), "sglang"))
    assert found.startswith("all 2 layers: SGLang finds no scale and serves")
    assert "looks for model.layers.0.self_attn.attn.k_scale, and drops" in found


def test_a_model_class_that_is_not_known(export: Callable[..., Export]) -> None:
    made = export(COMPRESSED_TENSORS).add(LLAMA, [0, 1])
    made.config["architectures"] = ["SomebodysForCausalLM"]
    report = verify(made.write(), "sglang")
    assert not report.ok
    assert any("SomebodysForCausalLM is not known here" in text for text in remarks(report))


def test_a_config_in_the_text_part_counts(export: Callable[..., Export]) -> None:
    made = export(None).add(LLAMA, [0, 1])
    made.config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {**made.config, "quantization_config": dict(COMPRESSED_TENSORS)},
    }
    assert verify(made.write(), "vllm").ok


def test_weights_that_are_quantized_need_no_exception(export: Callable[..., Export]) -> None:
    made = export({**MODELOPT, "ignore": ["lm_head"]}).add(LLAMA, [0, 1], PROJECTIONS)
    assert not verify(made.write(), "vllm").ok
    made.scales["model.layers.0.mlp.up_proj.weight_scale"] = np.ones(1, np.float32)
    assert verify(made.write(), "vllm").ok
    assert verify(made.path, "sglang").ok


def test_hf_quant_config_alone(export: Callable[..., Export]) -> None:
    """What ModelOpt writes beside the config: vLLM falls back on it."""
    made = export(None).add(LLAMA, [0, 1], PROJECTIONS)
    _beside(made, quant_algo="FP8", kv_cache_quant_algo="FP8", exclude_modules=["*"])
    assert verify(made.write(), "vllm").ok
    _beside(made, quant_algo="MXFP8", kv_cache_quant_algo="FP8", exclude_modules=["*"])
    assert "quant_algo MXFP8" in serious(verify(made.path, "vllm"))[0]
    _beside(made, quant_algo=None, kv_cache_quant_algo="FP8")
    (found,) = serious(verify(made.path, "vllm"))
    assert "no quant_algo" in found
    text = json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["*"]}})
    (made.path / "hf_quant_config.json").write_text(text)
    assert "does not name modelopt" in serious(verify(made.path, "vllm"))[0]


def remarks(report: VerifyReport) -> list[str]:
    """What is said without being serious."""
    return [finding.what for finding in report.findings if not finding.serious]


def test_beside_compressed_tensors_queries_are_not_spoken_of(
    llama: Callable[..., Export],
) -> None:
    said = "there are no scales of queries: vLLM takes the keys'"
    assert not any(said in text for text in remarks(verify(llama("vllm").write(), "vllm")))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_nothing, True),
        (_set(f"{LLAMA.format(1)}.q_scale", [0.5]), False),
        (_set(f"{LLAMA.format(1)}.q_proj.output_scale", [0.5]), False),
        (_pop(K1, V1), False),
    ],
)
def test_queries_beside_fp8(
    llama: Callable[..., Export], change: Callable[[Export], Any], told: bool
) -> None:
    made = llama("vllm fp8")
    change(made)
    found = remarks(verify(made.write(), "vllm"))
    assert any("there are no scales of queries" in text for text in found) is told
    assert len(found) == 1 + told


def test_heads_that_few_backends_take(export: Callable[..., Export]) -> None:
    report = verify(export(COMPRESSED_TENSORS, "llama_wide").add(LLAMA, [0, 1]).write(), "vllm")
    assert report.ok
    assert any("layers 0-1 have heads of 24, no multiple of 16" in t for t in remarks(report))
    made = export(MODELOPT, "deepseek", kv_lora_rank=20, path="latent")
    report = verify(made.add(LLAMA, [0, 1], PROJECTIONS).write(), "vllm")
    assert report.ok
    assert not any("no multiple" in text for text in remarks(report))


def test_per_head_scales_need_a_backend(export: Callable[..., Export]) -> None:
    made = export(COMPRESSED_TENSORS).add(LLAMA, [0, 1])
    made.scheme["strategy"] = "attn_head"
    for name in made.scales:
        made.scales[name] = np.full((2, 1, 1), 0.5, np.float32)
    report = verify(made.write(), "vllm")
    assert report.ok
    assert any("need the backend FlashAttention 3" in text for text in remarks(report))


def test_the_flat_form_declares_fp8_to_tensorrt_llm(export: Callable[..., Export]) -> None:
    made = export({**MODELOPT, "quant_algo": None}).add(LLAMA, [0, 1], PROJECTIONS)
    assert verify(made.write(), "tensorrt-llm").ok
    (found,) = serious(verify(made.path, "tensorrt-llm-nvfp4"))
    assert found == "config.json declares the cache as FP8, not NVFP4"
    (made.path / "hf_quant_config.json").write_text(json.dumps(NVFP4))
    found = serious(verify(made.path, "tensorrt-llm"))[1]
    assert found == "hf_quant_config.json declares the cache as NVFP4, not FP8"


# --- the report -----------------------------------------------------------------------------------


def test_an_engine_without_scales_has_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"llama\.cpp computes scales itself.*nothing to verify"):
        verify(tmp_path, "llama.cpp")
    with pytest.raises(ExportError, match="LMDeploy computes scales itself"):
        verify(tmp_path, "lmdeploy")
    with pytest.raises(ExportError, match="no engine 'vlm': did you mean vllm"):
        verify(tmp_path, "vlm")
    with pytest.raises(ModelError, match="there is no directory"):
        verify(tmp_path / "nowhere", "vllm")


def test_the_report_is_plain_json(llama: Callable[..., Export]) -> None:
    made = llama("vllm")
    made.scales[K1] = np.array([np.nan], np.float32)
    values = verify(made.write(), "vllm").to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert (values["engine"], values["ok"], values["directory"]) == ("vllm", False, str(made.path))
    assert values["layers"][1]["key_scale"] == ["nan"]
    assert values["layers"][1]["key"] == K1
    assert set(values["findings"][0]) == {"what", "fix", "layer", "serious"}


def test_no_torch_is_imported(llama: Callable[..., Export]) -> None:
    directory = llama("vllm").write()
    code = (
        "import sys; from pathlib import Path;"
        "from kvquant.export.verify import verifiable, verify;"
        f"ok = [verify(Path({str(directory)!r}), name).ok for name in verifiable()"
        " if name != 'transformers'];"
        "assert ok[0]; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_are_not_read(llama: Callable[..., Export]) -> None:
    """The bytes of weights may be anything, here a hole in the file."""
    made = llama("vllm")
    made.write()
    before = verify(made.path, "vllm")
    header = 8 + int.from_bytes((made.path / BASE).read_bytes()[:8], "little")
    data = (made.path / BASE).read_bytes()
    with (made.path / BASE).open("wb") as file:
        file.write(data[:header])
        file.truncate(len(data))
    assert verify(made.path, "vllm") == before
