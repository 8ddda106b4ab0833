"""Each defect planted in a good export is found, in the right layer, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvquant.export.verify import verify

BASE = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
LLAMA = "model.layers.{}.self_attn"


class Expected(NamedTuple):
    """A finding that a defect leads to."""

    what: str
    layer: int | None = None
    serious: bool = True


K1, V1 = f"{LLAMA.format(1)}.k_scale", f"{LLAMA.format(1)}.v_scale"
KP1, VP1 = f"{LLAMA.format(1)}.k_proj.k_scale", f"{LLAMA.format(1)}.v_proj.v_scale"


def _pop(*names: str) -> Callable[[Any], None]:
    return lambda made: [made.scales.pop(name) for name in names] and None


def _set(name: str, value: Any, dtype: Any = np.float32) -> Callable[[Any], None]:
    return lambda made: made.scales.update({name: np.array(value, dtype)})


def _call(old: str, new: str) -> Callable[[Any], None]:
    return lambda made: made.rename(old, new)


def _block(**changes: Any) -> Callable[[Any], None]:
    return lambda made: made.config["quantization_config"].update(changes)


def _scheme(**changes: Any) -> Callable[[Any], None]:
    return lambda made: made.scheme.update(changes)


def _without(key: str) -> Callable[[Any], None]:
    return lambda made: made.config["quantization_config"].pop(key) and None


def _weights(made: Any, name: str) -> None:
    """A second copy of the weights, by another name."""
    shutil.copy(made.path / BASE, made.path / name)


def _adapter(made: Any) -> None:
    held = {"base_model.model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    save_file(held, made.path / "adapter_model.safetensors", metadata={"format": "pt"})


def _all(value: float) -> Callable[[Any], None]:
    return lambda made: made.scales.update(
        {name: np.array([value], np.float32) for name in made.scales}
    )


def _fused(made: Any) -> None:
    made.scales.pop(V1)
    made.rename(K1, f"{LLAMA.format(1)}.kv_scale")


NO_SCALE = r"^layer 1: {} finds no scale .*looks for model\.layers\.1\.self_attn"
ALL_NONE = r"^all 3 layers: {} finds no scale"
MUTATIONS: list[tuple[str, str, Callable[[Any], Any], list[Expected]]] = [
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
    ("vllm", "next to nothing", _set(K1, [2.0**-127]), [Expected(r"k_scale holds 5\.8", 1)]),
    ("vllm", "the smallest there is", _set(K1, [2.0**-126]), []),
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
     lambda made: made.declare("compressed-tensors"),
     [Expected("SGLang before 0.5.23 drops")]),
    *[("vllm", method, _block(quant_method=method), [Expected(f"quantized with {title}")])
      for method, title in (("gptq", "GPTQ"), ("awq", "AWQ"), ("mxfp4", "MXFP4"),
                            ("bitsandbytes", "bitsandbytes"))],
    ("sglang", "gptq", _block(quant_method="gptq"), [Expected("quantized with GPTQ")]),
    ("vllm", "a method that nobody knows", _block(quant_method="mine"),
     [Expected("quant_method 'mine'")]),
    ("vllm", "hf_quant_config.json says otherwise",
     lambda made: made.beside(quant_algo="FP8", kv_cache_quant_algo="FP8"),
     [Expected("config.json declares compressed-tensors, but hf_quant_config.json ModelOpt")]),
    ("vllm modelopt", "hf_quant_config.json says otherwise",
     lambda made: made.beside(quant_algo="FP8", kv_cache_quant_algo="NVFP4",
                          exclude_modules=["*"]),
     [Expected("cache in FP8, all but .*cache in NVFP4")]),
    ("vllm modelopt", "hf_quant_config.json says the same",
     lambda made: made.beside(quant_algo="FP8", kv_cache_quant_algo="FP8",
                          exclude_modules=["*"]), []),
    ("tensorrt-llm-nvfp4", "no hf_quant_config.json",
     lambda made: (made.path / "hf_quant_config.json").unlink(),
     [Expected("neither hf_quant_config.json nor a quantization_config")]),
    ("tensorrt-llm-nvfp4", "FP8",
     lambda made: made.beside(quant_algo=None, kv_cache_quant_algo="FP8"),
     [Expected("declares the cache as FP8, not NVFP4")]),
    ("tensorrt-llm-nvfp4", "the config of vLLM beside it",
     lambda made: made.declare("compressed-tensors"),
     [Expected("config.json declares compressed-tensors, but"),
      Expected("config_groups is empty")]),
    ("tensorrt-llm-nvfp4", "the flat form alone",
     lambda made: ((made.path / "hf_quant_config.json").unlink(), made.declare(
         "modelopt", kv_cache_scheme="NVFP4")),
     [Expected("in the flat form, in which TensorRT-LLM recognises FP8 only")]),
    ("tensorrt-llm", "NVFP4",
     lambda made: made.beside(quant_algo=None, kv_cache_quant_algo="NVFP4"),
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
    llama: Callable[..., Any],
    check_new: Callable[..., None],
    engine: str,
    what: str,
    change: Callable[[Any], Any],
    expected: list[Expected],
) -> None:
    made, name = llama(engine), engine.split()[0]
    before = verify(made.write(), name).findings
    (made.path / INDEX).unlink()
    change(made)
    report = verify(made.write(), name)
    check_new(report, before, expected)


def _nothing(made: Any) -> None:
    pass


SERVED: list[tuple[str, Callable[[Any], Any], tuple[Any, ...]]] = [
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
    llama: Callable[..., Any],
    engine: str,
    change: Callable[[Any], Any],
    expected: tuple[Any, ...],
) -> None:
    made = llama(engine)
    change(made)
    layer = verify(made.write(), engine.split()[0]).layers[1]
    scales = [None if not found else found[0] for found in (layer.key_scale, layer.value_scale)]
    rounded = [None if scale is None else round(scale, 6) for scale in scales]
    assert (layer.key, layer.value, *rounded, layer.source) == expected
