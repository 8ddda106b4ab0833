"""What an export holds, to the letter: each engine, nine families, one file and several.

Each layer has numbers of its own and keys have others than values, so that a layer or a slot in the
wrong place is seen. They are no bfloat16 numbers: what is expected are the next ones above them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)

from calib.collect import collect
from calib.solve import solve
from kvquant import __version__
from kvquant.errors import ExportError
from kvquant.export.export import ExportRequest, ExportResult, export
from kvquant.export.verify import verifiable, verify
from kvquant.export.verify_run import run
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.source import resolve
from kvquant.provenance import Provenance
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales

INDEX = "model.safetensors.index.json"
PER_TENSOR, PER_HEAD = (
    TensorScheme(tensor_format("fp8"), granularity)
    for granularity in (Granularity.PER_TENSOR, Granularity.PER_HEAD)
)

# What calibration found for the last head of each layer; the others need half of it.
KEYS = [0.011, 0.023, 0.031, 0.043, 0.053, 0.061]
VALUES = [0.0013, 0.0019, 0.0027, 0.0033, 0.0041, 0.0047]
# The same as bfloat16 has it, not below: 181 / 16384 = 0.01105.
K = [181 / 16384, 189 / 8192, 254 / 8192, 177 / 4096, 218 / 4096, 250 / 4096]
V = [171 / 131072, 250 / 131072, 177 / 65536, 217 / 65536, 135 / 32768, 155 / 32768]

PLAIN, INNER = ("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale")
PROJECTIONS = ("k_proj.k_scale", "v_proj.v_scale")

COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "frozen",
    "global_compression_ratio": None,
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    },
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}


class Family(NamedTuple):
    """A model, and what its export is to hold.

    Attributes:
        path: Of an attention module in the checkpoint, by layer.
        layers: Those that keep tokens.
        architecture: Class name in its config.
        model_type: Likewise.
        names: By engine, what the two scales of a layer are called after the path, a reason why
            there is no export, or None where a file has them.
        sglang_stops: Whether it is left out of an export for all.
    """

    path: str
    layers: list[int]
    architecture: str
    model_type: str
    names: Mapping[str, tuple[str, str] | str | None]
    sglang_stops: bool = False


NO_JSON = "SGLang takes no JSON of KV scales for {}: export with --engine sglang"
NO_CACHE = (
    "compressed-tensors knows a cache by k_proj, v_proj or qkv_proj beside it, and "
    "transformer.h.0.attn has none: Transformers would pass its scales by without a word. "
    "kvquant's own cache runs fp8 there: QuantizedCache.from_model(model, scheme=..., scales=...)."
)
MLA = "deepseek_v3 caches a latent (MLA): "
SAME: dict[str, tuple[str, str] | str | None] = {
    "vllm": PLAIN,
    "sglang": PLAIN,
    "sglang-modelopt": PLAIN,
    "sglang-json": None,
    "tensorrt-llm": PROJECTIONS,
    "tensorrt-llm-nvfp4": PROJECTIONS,
    "lightllm": None,
    "tgi": PLAIN,
    "transformers": PLAIN,
}
LITERAL = {**SAME, "sglang": INNER, "sglang-modelopt": INNER}
SELF = "model.layers.{}.self_attn"

FAMILIES = {
    "llama": Family(SELF, [0, 1], "LlamaForCausalLM", "llama", SAME),
    "qwen2": Family(SELF, [0, 1], "Qwen2ForCausalLM", "qwen2", LITERAL),
    "qwen3_moe": Family(
        SELF,
        [0, 1],
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            **LITERAL,
            "sglang-json": NO_JSON.format("Qwen3MoeForCausalLM"),
        },
    ),
    "phi3": Family(SELF, [0, 1], "Phi3ForCausalLM", "phi3", SAME),
    "gpt2": Family(
        "transformer.h.{}.attn",
        [0, 1],
        "GPT2LMHeadModel",
        "gpt2",
        {
            **LITERAL,
            "vllm": INNER,
            "sglang-json": NO_JSON.format("GPT2LMHeadModel"),
            "transformers": NO_CACHE,
        },
        sglang_stops=True,
    ),
    "gemma3": Family(
        "language_model.model.layers.{}.self_attn",
        [0, 1, 2, 3, 4, 5],
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {**SAME, "sglang-json": NO_JSON.format("Gemma3ForConditionalGeneration")},
    ),
    "deepseek": Family(
        SELF,
        [0, 1],
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {
            **dict.fromkeys(SAME, PROJECTIONS),
            "sglang-json": NO_JSON.format("DeepseekV3ForCausalLM"),
            "tensorrt-llm-nvfp4": MLA + "TensorRT-LLM takes NVFP4 scales with k_proj and v_proj, "
            "which such layers do not have",
            "lightllm": MLA + "LightLLM computes scales for it while serving (--llm_kv_type "
            "fp8kv_dsa on the model itself)",
            "tgi": MLA + "TGI is not known to load scales for it: see --engine vllm",
            "transformers": MLA + "Transformers is not known to load scales for it: see --engine "
            "vllm",
        },
    ),
    "falcon_h1": Family(
        SELF,
        [0, 1],
        "FalconH1ForCausalLM",
        "falcon_h1",
        {**LITERAL, "sglang-json": NO_JSON.format("FalconH1ForCausalLM")},
    ),
    "lfm2": Family(
        SELF,
        [1, 3],
        "Lfm2ForCausalLM",
        "lfm2",
        {**LITERAL, "sglang-json": NO_JSON.format("Lfm2ForCausalLM")},
    ),
}
ENGINES = [*SAME]
TOGETHER = ["vllm", "sglang", "tgi", "transformers"]

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "max_position_embeddings": 512,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
NO_TOKENS = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": 2}


def with_pictures() -> Any:
    """Gemma 3 as it is published: the decoder inside a model that has a vision tower too."""
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**TEXT, **NO_TOKENS},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=127,
        boi_token_index=126,
        eoi_token_index=125,
        **NO_TOKENS,
    )
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def with_experts() -> Any:
    """Qwen3-MoE, all layers with experts."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{key: value for key, value in TEXT.items() if key != "sliding_window"},
        **NO_TOKENS,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def golden_model(tiny_once: Callable[..., Any]) -> Callable[[str], Any]:
    """A family's model, not to be changed."""
    made: dict[str, Any] = {}

    def build(family: str) -> Any:
        own = {"gemma3": with_pictures, "qwen3_moe": with_experts}
        if family in own and family not in made:
            made[family] = own[family]()
        return made[family] if family in own else tiny_once(family)

    return build


def by_hand(geometry: CacheGeometry) -> KVScales:
    """`KEYS` and `VALUES` for the last head of a layer, half of that for the others."""

    def slot(number: float, heads: int) -> TensorScales:
        scale = torch.full((heads, 1), number / 2)
        scale[-1] = number
        return TensorScales(scale)

    heads = {index: geometry.layers[index].kv_heads for index in geometry.attention_layers}
    layers = {
        index: LayerScales(slot(KEYS[index], count), slot(VALUES[index], count))
        for index, count in heads.items()
    }
    return KVScales(geometry, QuantScheme(PER_HEAD, PER_HEAD), layers)


Place = tuple[Path, Path]


@pytest.fixture(scope="session")
def bases(
    golden_model: Callable[[str], Any],
    save_tiny: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Place]:
    """``bases(family, is_sharded)``: the directory of a model, and the file with its scales."""
    made: dict[tuple[str, bool], Place] = {}

    def build(family: str, is_sharded: bool = False) -> Place:
        place = (family, is_sharded)
        if place not in made:
            root, model = tmp_path_factory.mktemp("golden"), golden_model(family)
            save_tiny(model, root / "base")
            if is_sharded:
                (root / "base" / "model.safetensors").unlink()
                model.save_pretrained(root / "base", max_shard_size="60KB")
            scales = by_hand(CacheGeometry.from_config(model.config))
            known = Provenance(model=family, fingerprints=(fingerprint(model),))
            save_scales(replace(scales, provenance=known), root / "scales.safetensors")
            made[place] = root / "base", root / "scales.safetensors"
        return made[place]

    return build


def quiet(message: str) -> None:
    """Nobody listens."""


def exported(place: Place, output: Path | None, *engines: str, **options: Any) -> ExportResult:
    base, scales = place
    source = resolve(str(base))
    return export(
        ExportRequest(source, str(scales), tuple(engines), output, **options), notify=quiet
    )


def read_back(directory: Path) -> dict[str, tuple[str, tuple[int, ...], list[float]]]:
    """Dtype, shape and numbers of all scales, each from the file that the index names for it."""
    shards = json.loads((directory / INDEX).read_text())["weight_map"]
    found = {}
    for name in shards:
        if name.endswith(("k_scale", "v_scale")):
            with safe_open(directory / shards[name], "pt") as file:
                tensor = file.get_tensor(name)
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[name] = dtype, tuple(tensor.shape), tensor.flatten().tolist()
    return found


def meant(
    family: Family, names: tuple[str, str]
) -> dict[str, tuple[str, tuple[int, ...], list[float]]]:
    """What `read_back` is to give where an engine takes one scale a layer."""
    latent = family.model_type == "deepseek_v3"  # one cache, one scale: that of the keys is larger
    return {
        f"{family.path.format(layer)}.{name}": ("float32", (1,), [numbers[layer]])
        for layer in family.layers
        for name, numbers in zip(names, (K, K if latent else V), strict=True)
    }


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def cases(is_refused: bool, *engines: str) -> list[tuple[str, str]]:
    return [
        (family, engine)
        for family, expected in FAMILIES.items()
        for engine in engines or ENGINES
        if isinstance(expected.names[engine], str) == is_refused
    ]


def config_of(engine: str, family: Family) -> dict[str, Any] | None:
    """``quantization_config`` of an export."""
    latent = family.model_type == "deepseek_v3"
    if engine == "sglang-modelopt" or (latent and engine in ("vllm", "sglang")):
        return MODELOPT
    return COMPRESSED_TENSORS if engine in ("vllm", "sglang", "transformers") else None


def files_of(engine: str, family: Family) -> dict[str, Any]:
    """Further files of an export, parsed."""
    hf_quant_config = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "calibrated_by": f"kvquant {__version__}",
        "quantization": {
            "quant_algo": None,
            "kv_cache_quant_algo": "NVFP4" if engine == "tensorrt-llm-nvfp4" else "FP8",
            "exclude_modules": [],
        },
    }
    larger = {str(layer): K[layer] for layer in family.layers}
    return {
        "tensorrt-llm": {"hf_quant_config.json": hf_quant_config},
        "tensorrt-llm-nvfp4": {"hf_quant_config.json": hf_quant_config},
        "sglang-json": {
            "kv_cache_scales_tp1.json": {
                "model_type": family.model_type,
                "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": larger}},
            }
        },
        "lightllm": {
            "kv_cache_calib.json": {
                "version": "1.0",
                "architectures": family.architecture,
                "quant_type": "per_tensor",
                "qmin": -448.0,
                "qmax": 448.0,
                "num_layers": len(family.layers),
                "num_head": 4 if family.model_type == "gpt2" else 2,
                "scales_shape": [len(family.layers), 2],
                "scales": [[K[layer], V[layer]] for layer in family.layers],
            }
        },
    }.get(engine, {})


COMPANIONS = ["config.json", "generation_config.json", "kvquant_export.json"]
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]
SINGLE = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]


@pytest.mark.parametrize(("name", "engine"), cases(False))
def test_one_engine_and_one_file(
    bases: Callable[..., Place], tmp_path: Path, name: str, engine: str
) -> None:
    family, place, output = FAMILIES[name], bases(name), tmp_path / "out"
    names, before = family.names[engine], digests(place[0])

    result = exported(place, output, engine)

    assert result.ok, result.engines
    assert digests(place[0]) == before
    assert not isinstance(names, str)
    expected = {} if names is None else meant(family, names)
    assert set(result.tensors) == expected.keys()
    weights = SINGLE if expected else ["model.safetensors"]
    others = files_of(engine, family)
    assert sorted(path.name for path in output.iterdir()) == sorted(
        [*COMPANIONS, *TOKENIZER, *weights, *others]
    )
    assert (output / weights[0]).samefile(place[0] / "model.safetensors")
    assert {file: json.loads((output / file).read_text()) for file in others} == others
    old = json.loads((place[0] / "config.json").read_text())
    block = config_of(engine, family)
    declared = {} if block is None else {"quantization_config": block}
    assert json.loads((output / "config.json").read_text()) == {**old, **declared}
    if expected:
        check_index(output, place[0], SINGLE[1])
        assert read_back(output) == expected
    check_report(output, family, engine)


def check_report(output: Path, family: Family, engine: str) -> None:
    """The engine finds the numbers that were meant, to the last bit."""
    report = verify(output, engine)
    assert report.ok, report.findings
    assert [layer.layer for layer in report.layers] == family.layers
    for layer in report.layers:
        key, value = K[layer.layer], V[layer.layer]
        if engine == "tensorrt-llm":
            key = value = 1.0  # whatever is written
        elif engine == "sglang-json" or family.model_type == "deepseek_v3":
            value = key
        assert (layer.key_scale, layer.value_scale) == ((key,), (value,))
        # No step of bfloat16 and none of float32 is lost on the way.
        assert float(np.float32(key)) == key
        assert torch.tensor(key).bfloat16().item() == key


def check_index(output: Path, base: Path, scales: str) -> None:
    """All tensors of the base, all scales, and nothing else; the size of both."""
    index = json.loads((output / INDEX).read_text())
    held: dict[str, str] = {}
    nbytes = 0
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(output / file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                held[key] = file
                nbytes += opened.get_tensor(key).nbytes
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == nbytes
    with safe_open(output / scales, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "kvquant": __version__}
        added = set(opened.keys())
    of_base: set[str] = set()
    for path in base.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            of_base |= set(opened.keys())
    assert held.keys() - added == of_base


@pytest.mark.parametrize(
    ("name", "engine"), cases(False, "vllm", "tensorrt-llm-nvfp4", "tgi", "lightllm")
)
def test_several_files(bases: Callable[..., Place], tmp_path: Path, name: str, engine: str) -> None:
    family, place, output = FAMILIES[name], bases(name, True), tmp_path / "out"
    names, before = family.names[engine], digests(place[0])

    result = exported(place, output, engine)

    assert result.ok, result.engines
    assert digests(place[0]) == before
    shards = sorted(path.name for path in place[0].glob("*.safetensors"))
    assert len(shards) > 2
    assert all((output / shard).samefile(place[0] / shard) for shard in shards)
    scales = [] if names is None else ["model-kvquant-scales.safetensors"]
    assert sorted(path.name for path in output.glob("*.safetensors")) == shards + scales
    if names is None:
        assert (output / INDEX).read_bytes() == (place[0] / INDEX).read_bytes()
    else:
        assert not isinstance(names, str)
        check_index(output, place[0], scales[0])
        assert read_back(output) == meant(family, names)


@pytest.mark.parametrize(("name", "engine"), cases(True))
def test_refusals(bases: Callable[..., Place], tmp_path: Path, name: str, engine: str) -> None:
    with pytest.raises(ExportError) as refused:
        exported(bases(name), tmp_path / "out", engine)
    assert str(refused.value) == FAMILIES[name].names[engine]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_directory_for_all_that_can_share_it(
    bases: Callable[..., Place], tmp_path: Path, name: str, is_sharded: bool
) -> None:
    family, output = FAMILIES[name], tmp_path / "out"

    result = exported(bases(name, is_sharded), output, "all")

    out = {engine for engine in TOGETHER if isinstance(family.names[engine], str)}
    out |= {"sglang"} if family.sglang_stops else set()
    assert {engine.name for engine in result.engines if engine.refusal} == out
    assert {engine.name for engine in result.engines} == set(TOGETHER)
    assert result.ok, result.engines
    expected: dict[str, Any] = {}
    for engine in TOGETHER:
        if engine not in out:
            names = family.names[engine]
            assert isinstance(names, tuple)
            expected |= meant(family, names)
            assert verify(output, engine).ok
    assert read_back(output) == expected
    block = json.loads((output / "config.json").read_text())["quantization_config"]
    assert block == (MODELOPT if name == "deepseek" else COMPRESSED_TENSORS)


# Scales per head


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gemma3", "lfm2"])
def test_a_scale_for_each_head(
    bases: Callable[..., Place], tmp_path: Path, name: str, engine: str
) -> None:
    family, output = FAMILIES[name], tmp_path / "out"

    result = exported(bases(name), output, engine, per_head=True)

    assert result.ok, result.engines
    assert read_back(output) == {
        f"{family.path.format(layer)}.{slot}": (
            "float32",
            (2, 1, 1),
            [numbers[layer] / 2, numbers[layer]],
        )
        for layer in family.layers
        for slot, numbers in zip(PLAIN, (K, V), strict=True)
    }
    block = json.loads((output / "config.json").read_text())["quantization_config"]
    scheme = {**COMPRESSED_TENSORS["kv_cache_scheme"], "strategy": "attn_head"}  # type: ignore[dict-item]
    assert block == {**COMPRESSED_TENSORS, "kv_cache_scheme": scheme}
    for layer in verify(output, engine).layers:
        assert layer.key_scale == (K[layer.layer] / 2, K[layer.layer])
        assert layer.value_scale == (V[layer.layer] / 2, V[layer.layer])


def test_lightllm_has_a_row_of_heads(bases: Callable[..., Place], tmp_path: Path) -> None:
    exported(bases("lfm2"), tmp_path / "out", "lightllm", per_head=True)
    values = json.loads((tmp_path / "out" / "kv_cache_calib.json").read_text())
    assert (values["quant_type"], values["num_head"], values["scales_shape"]) == (
        "per_head",
        2,
        [2, 4],
    )
    assert values["scales"] == [
        [K[layer] / 2, K[layer], V[layer] / 2, V[layer]] for layer in (1, 3)
    ]
    for layer in verify(tmp_path / "out", "lightllm").layers:
        assert layer.key_scale == (K[layer.layer] / 2, K[layer.layer])


def test_sglang_has_an_entry_for_each_gpu(bases: Callable[..., Place], tmp_path: Path) -> None:
    result = exported(bases("qwen2"), tmp_path / "out", "sglang-json", tensor_parallel=2)
    values = json.loads((tmp_path / "out" / "kv_cache_scales_tp2.json").read_text())
    one = {"0": K[0], "1": K[1]}
    assert values["kv_cache"]["scaling_factor"] == {"0": one, "1": one}
    assert result.engines[0].launch[0].endswith("kv_cache_scales_tp2.json --tp-size 2")
    assert result.ok


# Engines that only want a command line


@pytest.mark.parametrize(
    ("engine", "form", "line"),
    [
        ("llama.cpp", "int8", "llama-server -m MODEL.gguf -ctk q8_0 -ctv q8_0 -fa on"),
        ("llama.cpp", "int4", "llama-server -m MODEL.gguf -ctk q4_0 -ctv q4_0 -fa on"),
        ("lmdeploy", "int8", "lmdeploy serve api_server MODEL --quant-policy 8"),
        ("lmdeploy", "int4", "lmdeploy serve api_server MODEL --quant-policy 4"),
        (
            "lmdeploy",
            "fp8",
            "lmdeploy serve api_server MODEL --quant-policy fp8 --backend pytorch",
        ),
    ],
)
def test_command_lines(
    tiny: Callable[..., Any],
    save_tiny: Callable[..., Path],
    tmp_path: Path,
    engine: str,
    form: str,
    line: str,
) -> None:
    model = tiny("llama", head_dim=32)
    base = save_tiny(model, tmp_path / "base")
    geometry = CacheGeometry.from_config(model.config)
    slot = TensorScheme(tensor_format(form), Granularity.PER_TENSOR)
    scales = solve(collect(model, [list(range(3, 23))], geometry), QuantScheme(slot, slot))
    known = Provenance(fingerprints=(fingerprint(model),))
    save_scales(replace(scales, provenance=known), tmp_path / "scales.safetensors")
    before = sorted(tmp_path.iterdir())

    result = exported((base, tmp_path / "scales.safetensors"), None, engine)

    assert [outcome.launch for outcome in result.engines] == [(line,)]
    assert (result.written, result.tensors, result.ok) == (None, (), True)
    assert sorted(tmp_path.iterdir()) == before


# Calibrated scales


@pytest.mark.parametrize("name", [*FAMILIES, "gemma3n_text"])
def test_what_is_exported_is_what_the_model_caches(
    golden_model: Callable[[str], Any],
    save_tiny: Callable[..., Path],
    forward: Callable[..., Any],
    tmp_path: Path,
    name: str,
) -> None:
    """Against the keys and values in a cache of Transformers, layer by layer."""
    model = golden_model(name)
    geometry = CacheGeometry.from_config(model.config)
    torch.manual_seed(1)
    ids = torch.randint(3, 120, (16, 6))  # as long as the narrowest window keeps all of them
    scales = solve(collect(model, ids.tolist(), geometry), QuantScheme(PER_TENSOR, PER_TENSOR))
    known = Provenance(fingerprints=(fingerprint(model),))
    save_scales(replace(scales, provenance=known), tmp_path / "scales.safetensors")
    place = save_tiny(model, tmp_path / "base"), tmp_path / "scales.safetensors"

    exported(place, tmp_path / "out", "vllm")

    cache = DynamicCache(config=model.config)
    forward(model, ids, cache)
    report = verify(tmp_path / "out", "vllm")
    assert [layer.layer for layer in report.layers] == list(geometry.attention_layers)
    for layer in report.layers:
        needed = [
            float(getattr(cache.layers[layer.layer], slot).abs().amax()) / 448
            for slot in ("keys", "values")
        ]
        if name == "deepseek":
            needed = [max(needed)] * 2
        for need, scales_found in zip(needed, (layer.key_scale, layer.value_scale), strict=True):
            assert need * (1 - 1e-5) <= scales_found[0] <= need * (1 + 2**-7)


VERSION = tuple(map(int, version("transformers").split(".")[:2]))
LOADS = VERSION < (5, 24)
only = pytest.mark.skipif(VERSION != (5, 22), reason="only Transformers 5.22 takes such experts")


@pytest.mark.skipif(not LOADS, reason="Transformers 5.24 skips the scheme of a cache")
@pytest.mark.parametrize(
    "name",
    ["llama", "phi3", "gemma3", "falcon_h1", "lfm2", pytest.param("qwen3_moe", marks=only)],
)
def test_transformers_loads_them_and_uses_them(
    bases: Callable[..., Place], tmp_path: Path, name: str
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    exported(bases(name), tmp_path / "out", "transformers")
    report = run(tmp_path / "out")
    assert report.ok, report.findings
    assert (report.missing, report.unexpected) == ((), ())
    assert report.loaded == tuple(FAMILIES[name].layers)
    assert all(change.logits > 0 for change in report.changes)


def test_every_engine_that_can_be_verified_is_here() -> None:
    assert set(verifiable()) == set(ENGINES)
