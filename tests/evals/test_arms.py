"""Which arms are asked for, whether they fit the model, and whether their scales are its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import cache_utils
from transformers.cache_utils import QuantizedCache as StockCache

from calib.collect import collect
from calib.solve import solve
from evals.arms import ArmRequest, bind, parse_arms, prepare_arms
from evals.reading import Reader
from kvquant import KVScales, QuantizedCache
from kvquant.errors import FileFormatError, FingerprintError, InputError, SchemeError
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.provenance import Provenance
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales

needs_fp8 = pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="Transformers 5.21 and newer have it"
)


def geometry_of(model: Any) -> CacheGeometry:
    return CacheGeometry.from_config(model.config)


def scales_of(model: Any, format_name: str = "fp8") -> KVScales:
    slot = TensorScheme(tensor_format(format_name), Granularity.PER_TENSOR)
    block = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    found = solve(collect(model, [block], geometry_of(model)), QuantScheme(slot, slot))
    return replace(found, provenance=Provenance(fingerprints=(fingerprint(model),)))


@pytest.fixture
def saved(tiny_once: Callable[..., Any], tmp_path: Path) -> str:
    """A scales file of the tiny llama."""
    path = tmp_path / "ft-scales.safetensors"
    save_scales(scales_of(tiny_once("llama")), path)
    return str(path)


# ------------------------------------------------------------------------------------- asked for


def test_what_options_ask_for() -> None:
    assert parse_arms(["int8", "int4@runs/ft.safetensors", "hf:quanto"], ["a/base"]) == (
        ArmRequest("int8", scheme="int8"),
        ArmRequest("int4@ft", scheme="int4", scales="runs/ft.safetensors"),
        ArmRequest("hf:quanto", stock="quanto"),
        ArmRequest("base", scales="a/base"),
    )


@pytest.mark.parametrize(
    ("schemes", "scales", "kind", "complaint"),
    [
        ([], [], InputError, "nothing to evaluate: give --scales FILE .*int4-kivi.*hf:fp8"),
        (["int8", "int8"], [], InputError, "two arms are called int8"),
        ([], ["a/ft", "b/ft.safetensors"], InputError, "two arms are called ft"),
        (["int4@a/ft", "int4@b/ft"], [], InputError, "two arms are called int4@ft"),
        (["int5"], [], SchemeError, "unknown scheme 'int5'"),
        (["int5@ft"], [], SchemeError, "unknown scheme 'int5'"),
        (["int4@"], [], InputError, "int4@: a scales file is to follow the @"),
        (["hf:int4"], [], InputError, "hf:int4: caches of Transformers are hf:quanto, hf:hqq, hf:"),
        (["hf:"], [], InputError, "caches of Transformers are"),
    ],
)
def test_what_cannot_be_asked_for(
    schemes: list[str], scales: list[str], kind: type[Exception], complaint: str
) -> None:
    with pytest.raises(kind, match=complaint):
        parse_arms(schemes, scales)


def test_names_may_repeat_across_kinds() -> None:
    assert [it.name for it in parse_arms(["int4", "int4@ft"], ["ft"])] == ["int4", "int4@ft", "ft"]


# ------------------------------------------------------------------------------- fit the geometry


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("none", "exact"),
        ("bf16", "exact"),
        ("fp8", "8-bit"),
        ("int8", "8-bit"),
        ("int4", "4-bit"),
        ("int4-kivi", "4-bit"),
        ("int3", "3-bit"),
        pytest.param("hf:fp8", "8-bit", marks=needs_fp8),
        ("hf:hqq", "4-bit"),
        ("hf:quanto", "4-bit"),
    ],
)
def test_classes_that_thresholds_go_by(
    tiny_once: Callable[..., Any], scheme: str, expected: str
) -> None:
    (arm,) = prepare_arms(parse_arms([scheme], []), geometry_of(tiny_once("llama")))
    assert arm.scheme_class == expected
    assert arm.name == scheme
    assert arm.description


def test_the_coarsest_layer_is_the_class(tiny_once: Callable[..., Any]) -> None:
    (arm,) = prepare_arms(parse_arms(["int8"], []), geometry_of(tiny_once("llama")))
    assert arm.scheme is not None
    coarse = replace(arm.scheme, layers=((1, replace(arm.scheme, key=_int4())),))
    assert replace(arm, scheme=coarse).scheme_class == "4-bit"


def _int4() -> TensorScheme:
    return TensorScheme(tensor_format("int4"), Granularity.PER_TOKEN, scale_format="bf16")


def test_scales_come_in_their_own_format(tiny_once: Callable[..., Any], saved: str) -> None:
    (arm,) = prepare_arms(parse_arms([], [saved]), geometry_of(tiny_once("llama")))
    assert arm.scales is not None
    assert arm.scheme == arm.scales.scheme
    assert (arm.name, arm.scheme_class) == ("ft-scales", "8-bit")


def test_a_preset_with_scales(tiny_once: Callable[..., Any], saved: str) -> None:
    geometry = geometry_of(tiny_once("llama"))
    int4, fp8, int8 = prepare_arms(
        parse_arms([f"{it}@{saved}" for it in ("int4", "fp8", "int8")], []), geometry
    )
    assert all(it.scales is not None and it.scheme is not None for it in (int4, fp8, int8))
    assert int4.scheme is not None and int4.scheme.key.center  # by the means
    # fp8 takes the calibrated scales, int8 none of an fp8 file.
    assert fp8.scheme is not None and fp8.scheme.key.granularity is Granularity.PER_TENSOR
    assert int8.scheme is not None and int8.scheme.key.granularity is Granularity.PER_TOKEN


def test_scales_of_another_shape(tiny_once: Callable[..., Any], saved: str) -> None:
    with pytest.raises(FingerprintError, match="2 layers in the scales, 4 in the"):
        prepare_arms(parse_arms([], [saved]), geometry_of(tiny_once("gemma2")))


def test_no_such_scales(tiny_once: Callable[..., Any], tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    for arms in (parse_arms([], [missing]), parse_arms([f"int4@{missing}"], [])):
        with pytest.raises(FileFormatError, match="nowhere"):
            prepare_arms(arms, geometry_of(tiny_once("llama")))


@pytest.mark.parametrize(
    ("model", "kinds"), [("gemma2", "sliding"), ("deepseek", "latent"), ("qwen3_next", "linear")]
)
def test_transformers_caches_want_full_attention(
    tiny_once: Callable[..., Any], model: str, kinds: str
) -> None:
    with pytest.raises(SchemeError, match=f"full attention .*; this one has {kinds} layers"):
        prepare_arms(parse_arms(["hf:quanto"], []), geometry_of(tiny_once(model)))


def test_a_package_that_is_missing(
    tiny_once: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"hf:hqq needs hqq: pip install .*\[compare\]"):
        prepare_arms(parse_arms(["hf:hqq"], []), geometry_of(tiny_once("llama")))


def test_a_version_of_transformers_without_fp8(
    tiny_once: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cache_utils, "Fp8QuantizedLayer", raising=False)
    with pytest.raises(InputError, match=r"hf:fp8 needs Transformers 5\.21"):
        prepare_arms(parse_arms(["hf:fp8"], []), geometry_of(tiny_once("llama")))


# ------------------------------------------------------------------------------- tied to a model


def bound(model: Any, *schemes: str, scales: list[str] | None = None, force: bool = False) -> Any:
    arms = prepare_arms(parse_arms(schemes, scales or []), geometry_of(model))
    return [bind(arm, model, None, force) for arm in arms]


def test_each_cache_is_a_new_one(tiny_once: Callable[..., Any]) -> None:
    model, reader = tiny_once("llama"), Reader(tiny_once("llama"))
    int8, quanto = bound(model, "int8", "hf:quanto")
    assert isinstance(int8.make(), QuantizedCache)
    assert isinstance(quanto.make(), StockCache)
    for arm in (int8, quanto):
        cache = arm.make()
        reader.read(torch.arange(3, 35)[None], cache)
        assert cache.get_seq_length() == 32
        assert arm.make().get_seq_length() == 0
        assert not arm.foreign


@pytest.mark.parametrize(
    ("name", "bits"), [pytest.param("hf:fp8", 8, marks=needs_fp8), ("hf:hqq", 4), ("hf:quanto", 4)]
)
def test_transformers_caches_are_what_they_are_called(
    tiny_once: Callable[..., Any], name: str, bits: int
) -> None:
    (arm,) = bound(tiny_once("llama"), name)
    layer = arm.make().layers[0]
    assert type(layer).__name__.lower().startswith(name.removeprefix("hf:"))
    if bits == 4:
        assert (layer.nbits, layer.q_group_size, layer.residual_length) == (4, 64, 128)


def test_own_scales(tiny_once: Callable[..., Any], saved: str) -> None:
    model = tiny_once("llama")
    file, int4 = bound(model, f"int4@{saved}", scales=[saved])[::-1]
    assert not file.foreign and not int4.foreign
    known = file.make().scales
    assert known is not None and known.layers[0].key == scales_of(model).layers[0].key
    assert int4.make().scales is not None


def retrained(model: Any) -> Any:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    return model


def test_scales_of_another_model(tiny: Callable[..., Any], saved: str) -> None:
    model = retrained(tiny("llama"))
    with pytest.raises(FingerprintError, match=r"ft-scales: .*weights differ.*--force"):
        bound(model, scales=[saved])
    with pytest.raises(FingerprintError, match=r"int4@ft-scales: .*--force"):
        bound(model, f"int4@{saved}")
    (arm,) = bound(model, scales=[saved], force=True)
    assert arm.foreign
    assert arm.make().scales is not None


def test_scales_of_an_adapter_set(tiny: Callable[..., Any], saved: str) -> None:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False)
    model = get_peft_model(tiny("llama"), settings).eval()
    arms = prepare_arms(parse_arms([], [saved]), geometry_of(model))
    with pytest.raises(FingerprintError, match="adapters differ"):
        bind(arms[0], model, None)
    assert bind(arms[0], model, None, force=True).foreign
