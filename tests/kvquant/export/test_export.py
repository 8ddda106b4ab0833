"""The whole of an export: whose scales they are, what is written, what is told, what is refused."""

from __future__ import annotations

import ast
import hashlib
import json
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from calib.collect import collect
from calib.solve import solve
from kvquant import __version__
from kvquant.errors import ExportError, FileFormatError, FingerprintError, InputError, ModelError
from kvquant.export.directory import LinkMode
from kvquant.export.export import ExportRequest, ExportResult, export
from kvquant.export.verify import verify
from kvquant.fingerprint import checkpoint_fingerprint, fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.loading import load
from kvquant.models.source import resolve
from kvquant.provenance import Provenance
from kvquant.scales import KVScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
INT8 = TensorScheme(tensor_format("int8"), Granularity.PER_TENSOR)
SELF = "model.layers.{}.self_attn"


def calibrated(
    model: Any, slot: TensorScheme = FP8, skip: frozenset[int] = frozenset()
) -> KVScales:
    geometry = CacheGeometry.from_config(
        (model.get_base_model() if hasattr(model, "peft_config") else model).config
    )
    torch.manual_seed(1)
    stats = collect(model, torch.randint(3, 128, (4, 30)).tolist(), geometry)
    known = Provenance(model="m", fingerprints=(fingerprint(model),), notes=("short text",))
    return replace(solve(stats, QuantScheme(slot, slot, skip)), provenance=known)


class Place(NamedTuple):
    """Models and scales on disk.

    Attributes:
        root: Has ``base``, ``other`` (same shape), ``deep`` (three layers), two adapters of
            ``base`` called ``lora`` and ``lora2``, and scales ``<name>.safetensors`` of each;
            ``shared`` fits base and lora, ``int8`` is of base.
        scales: The scales by name.
    """

    root: Path
    scales: dict[str, KVScales]


@pytest.fixture(scope="module")
def place(tiny: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path_factory: Any) -> Place:
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("export")
    other = tiny("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight *= 2
    models = {"base": tiny("llama"), "other": other, "deep": tiny("llama", num_hidden_layers=3)}
    scales = {}
    for name, model in models.items():
        save_tiny(model, root / name)
        scales[name] = calibrated(model)
    scales["int8"] = calibrated(models["base"], INT8)
    for seed, name in enumerate(("lora", "lora2"), 1):
        model = tiny("llama")
        model.name_or_path = str(root / "base")
        torch.manual_seed(seed)
        config = LoraConfig(target_modules=["k_proj", "v_proj"], r=2, init_lora_weights=False)
        get_peft_model(model, config).save_pretrained(root / name)
        loaded = load(resolve(str(root / name)), device="cpu", notify=quiet).model
        scales[name] = calibrated(loaded)
    scales["shared"] = scales["base"].union(scales["lora"])
    for name, each in scales.items():
        save_scales(each, root / f"{name}.safetensors")
    return Place(root, scales)


def quiet(message: str) -> None:
    """Nobody listens."""


@pytest.fixture
def run(place: Place) -> Callable[..., ExportResult]:
    """``run(model, scales, *engines, output=..., said=..., adapters=..., **options)``."""

    def call(
        model: str | Path,
        scales: str,
        *engines: str,
        adapters: tuple[str, ...] = (),
        said: list[str] | None = None,
        **options: Any,
    ) -> ExportResult:
        source = resolve(
            str(place.root / model), adapters=[str(place.root / name) for name in adapters]
        )
        request = ExportRequest(source, str(place.root / scales), engines, **options)
        return export(request, quiet if said is None else said.append)

    return call


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def numbers(scales: KVScales) -> list[tuple[float, float]]:
    """What calibration found, as one engine takes it: not below, and not a step above."""
    return [(layer.key.scale.item(), layer.value.scale.item()) for layer in scales.layers.values()]


def assert_serves(directory: Path, scales: KVScales, engine: str = "vllm") -> None:
    report = verify(directory, engine)
    assert report.ok, report.findings
    assert [layer.layer for layer in report.layers if layer.key_scale] == sorted(scales.layers)
    found = [layer for layer in report.layers if layer.key_scale]
    for layer, needed in zip(found, numbers(scales), strict=True):
        for held, least in zip((*layer.key_scale, *layer.value_scale), needed, strict=True):
            assert least <= held < least * (1 + 2**-7)


# What is written and told


def test_the_record(run: Callable[..., ExportResult], place: Place, tmp_path: Path) -> None:
    said: list[str] = []
    result = run("base", "base", "vllm", "sglang", output=tmp_path / "out", said=said)

    assert said == ["linking 1 weight file (363.9 kB)"], "nothing is loaded"
    tensors = {
        name: load_file(tmp_path / "out" / "model-00002-of-00002.safetensors")[name].tolist()
        for name in result.tensors
    }
    assert set(tensors) == {
        f"{SELF.format(layer)}.{slot}_scale" for layer in (0, 1) for slot in "kv"
    }
    record = json.loads((tmp_path / "out" / "kvquant_export.json").read_text())
    known = place.scales["base"].provenance
    assert record == {
        "kvquant": __version__,
        "model": str(place.root / "base"),
        "base": str(place.root / "base"),
        "adapters": [],
        "merged": False,
        "engines": ["vllm", "sglang"],
        "scales": {
            "file": str(place.root / "base"),
            "scheme": QuantScheme(FP8, FP8).to_dict(),
            "method": "amax",
            "provenance": json.loads(json.dumps(known.to_dict())),
        },
        "tensors": tensors,
        "launch": [
            "vllm serve {model} --kv-cache-dtype fp8",
            "python -m sglang.launch_server --model-path {model} --kv-cache-dtype fp8_e4m3",
        ],
        "remarks": list(result.remarks),
    }
    assert record["scales"]["provenance"]["fingerprints"][0]["weights"] == (
        known.fingerprints[0].weights
    )
    assert not any("short text" in remark for remark in result.remarks)
    assert_serves(tmp_path / "out", place.scales["base"])


def test_the_result(run: Callable[..., ExportResult], tmp_path: Path) -> None:
    result = run("base", "base", "vllm", "lmdeploy", output=tmp_path / "out")
    vllm, lmdeploy = result.engines
    assert (vllm.name, vllm.layers, vllm.ok, vllm.refusal) == ("vllm", 2, True, "")
    assert vllm.launch == (f"vllm serve {tmp_path / 'out'} --kv-cache-dtype fp8",)
    assert (lmdeploy.name, lmdeploy.layers, lmdeploy.findings) == ("lmdeploy", None, ())
    assert result.written is not None
    assert result.written.weights is LinkMode.HARD
    assert result.written.new_bytes == sum(
        path.stat().st_size
        for path in (tmp_path / "out").iterdir()
        if path.name != "model-00001-of-00002.safetensors"
    )
    assert result.written.new_bytes < 30_000
    assert any("rounded up to the next bfloat16" in remark for remark in result.remarks)
    assert len(set(result.remarks)) == len(result.remarks)


@pytest.mark.parametrize("name", ["plain", "my model; rm", 'it\'s "$HOME" `id` \\ {0} {model}'])
def test_a_name_that_a_shell_would_take_apart(
    run: Callable[..., ExportResult], tmp_path: Path, name: str
) -> None:
    output = tmp_path / name
    for engine, option in (
        ("vllm", "serve"),
        ("sglang", "--model-path"),
        ("sglang-json", "--model-path"),
        ("lightllm", "--model_dir"),
        ("tgi", "--model-id"),
        ("tensorrt-llm", "trtllm-serve"),
    ):
        (line,) = run("base", "base", engine, output=output / engine).engines[0].launch
        words = shlex.split(line)
        assert words[words.index(option) + 1] == str(output / engine)
        beside = [word for word in words if word.endswith(".json")]
        assert all(Path(word).is_file() for word in beside)
        assert len(beside) == (engine in ("lightllm", "sglang-json"))
    (line,) = run("base", "base", "transformers", output=output / "t").engines[0].launch
    python, option, code = shlex.split(line)
    assert (python, option) == ("python", "-c")
    before, path = code.split("Auto.from_pretrained(")
    assert before.endswith("model = ")
    assert ast.literal_eval(path.removesuffix(")")) == str(output / "t")
    compile(code, "launch", "exec")


def test_layers_that_stay_exact(
    tiny: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny("llama", num_hidden_layers=5)
    save_tiny(model, tmp_path / "base")
    scales = calibrated(model, skip=frozenset({0, 4}))
    save_scales(scales, tmp_path / "scales.safetensors")
    source = resolve(str(tmp_path / "base"))
    request = ExportRequest(source, str(tmp_path / "scales"), ("all",), tmp_path / "out")
    result = export(request, quiet)
    vllm, *others = result.engines
    assert [each.name for each in others] == ["sglang", "tgi", "transformers"]
    assert all("leave layers 0,4 exact" in each.refusal for each in others)
    assert vllm.launch[0].endswith(" --kv-cache-dtype-skip-layers 0 4")
    assert (vllm.layers, vllm.ok, result.ok) == (3, True, True)
    assert {name.split(".")[2] for name in result.tensors} == {"1", "2", "3"}
    assert_serves(tmp_path / "out", scales)


def test_engines_that_do_not_fit_together_are_told(
    run: Callable[..., ExportResult], tmp_path: Path
) -> None:
    """It is written as asked for, and the verdict is no."""
    result = run("base", "base", "vllm", "tensorrt-llm", output=tmp_path / "out")
    assert not result.ok
    tensorrt = next(each for each in result.engines if each.name == "tensorrt-llm")
    assert not tensorrt.ok
    assert any("config_groups" in finding.what for finding in tensorrt.findings)


@pytest.mark.parametrize("engine", ["vllm", "lightllm"])
def test_links_are_symbolic_to_another_filesystem(
    run: Callable[..., ExportResult], place: Place, engine: str
) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == place.root.stat().st_dev:
        pytest.skip("there is no other filesystem")
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        result = run("base", "base", engine, output=Path(directory) / "out")
        assert result.ok and result.written is not None
        assert result.written.weights is LinkMode.SYMBOLIC
        assert "--copy makes it independent" in result.remarks[-1]
        assert result.written.new_bytes < 30_000
        copied = run("base", "base", engine, output=Path(directory) / "copy", copy=True)
        assert copied.written is not None
        assert copied.written.weights is LinkMode.COPY
        assert copied.written.new_bytes > 300_000
        assert not any(path.is_symlink() for path in (Path(directory) / "copy").iterdir())


# Adapters


def test_a_merged_adapter_has_its_own_scales(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path
) -> None:
    before, said = digests(place.root), []
    result = run("lora", "lora", "vllm", output=tmp_path / "out", merge_adapter=True, said=said)

    assert result.ok
    assert digests(place.root) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert said[0] == f"merging {place.root / 'lora'} into {place.root / 'base'}"
    assert_serves(tmp_path / "out", place.scales["lora"])
    weights = load_file(tmp_path / "out" / "model-00001-of-00002.safetensors")
    old = load_file(place.root / "base" / "model.safetensors")
    assert {name for name in old if not torch.equal(old[name], weights[name])} == {
        f"{SELF.format(layer)}.{slot}_proj.weight" for layer in (0, 1) for slot in "kv"
    }
    assert result.written is not None
    assert result.written.weights is LinkMode.COPY
    assert result.written.new_bytes == sum(
        path.stat().st_size for path in (tmp_path / "out").iterdir()
    )
    record = json.loads((tmp_path / "out" / "kvquant_export.json").read_text())
    assert (record["merged"], record["adapters"]) == (True, [str(place.root / "lora")])
    assert (record["model"], record["base"]) == (str(place.root / "lora"), str(place.root / "base"))
    # What was merged is known to be what was calibrated.
    found = checkpoint_fingerprint(merged_alone(tmp_path))
    assert found is not None
    assert found.differences(place.scales["lora"].provenance.fingerprints[0]) == []


def merged_alone(tmp_path: Path) -> Path:
    """The exported weights without the scheme of the cache, which nobody but an engine reads."""
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    return tmp_path / "out"


def test_two_adapters_merged_and_an_engine_without_files(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path
) -> None:
    """The scales are checked against the live adapters; nothing is merged for a command line."""
    said: list[str] = []
    with pytest.raises(FingerprintError, match="adapters differ"):
        run("lora2", "lora", "lmdeploy", merge_adapter=True, said=said)
    assert run("lora", "lora", "lmdeploy", merge_adapter=True).ok
    assert said == [f"loading {place.root / 'lora2'} to see that the scales belong to it"]
    with pytest.raises(FingerprintError, match="adapters differ"):
        run(
            "lora", "lora", "vllm",
            adapters=("lora2",), merge_adapter=True, output=tmp_path / "out",
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


SHARED = (
    ". Without --merge-adapter the base is served, with scales that are safe for it and the "
    "adapters: kvquant calibrate --shared"
)


def test_scales_of_an_adapter_for_its_base(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path
) -> None:
    base, lora = (place.scales[name].provenance.fingerprints[0] for name in ("base", "lora"))
    with pytest.raises(FingerprintError) as refused:
        run("lora", "lora", "vllm", output=tmp_path / "out")
    assert str(refused.value) == (
        f"the scales belong to {lora}, the model is {base}: adapters differ; calibrate this model"
        + SHARED
    )
    with pytest.raises(FingerprintError, match=r"calibrate this model$"):
        run("base", "lora", "vllm", output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["adapter directory", "option"])
def test_scales_of_a_base_for_its_adapter(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path, how: str
) -> None:
    model, adapters = ("lora", ()) if how == "adapter directory" else ("base", ("lora",))
    with pytest.raises(FingerprintError) as refused:
        run(model, "base", "vllm", output=tmp_path / "out", adapters=adapters)
    base = place.scales["base"].provenance.fingerprints[0]
    assert str(refused.value) == (
        f"the scales belong to {base}, which covers 0 of 1 adapter" + SHARED
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FingerprintError, match=r"adapters differ; calibrate this model$"):
        run("lora", "base", "vllm", output=tmp_path / "out", merge_adapter=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["base", "lora"])
def test_shared_scales_serve_a_base_with_its_adapter(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path, model: str
) -> None:
    result = run(model, "shared", "vllm", output=tmp_path / "out")
    assert result.ok
    assert (tmp_path / "out" / "model-00001-of-00002.safetensors").samefile(
        place.root / "base" / "model.safetensors"
    )
    assert not any(path.name.startswith("adapter") for path in (tmp_path / "out").iterdir())
    assert_serves(tmp_path / "out", place.scales["shared"])
    record = json.loads((tmp_path / "out" / "kvquant_export.json").read_text())
    assert len(record["scales"]["provenance"]["fingerprints"]) == 2


def test_shared_scales_cover_the_adapters_that_are_named(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path
) -> None:
    said: list[str] = []
    assert run("base", "shared", "vllm", output=tmp_path / "a", adapters=("lora",), said=said).ok
    assert said[0] == f"loading {place.root / 'base'} to see that the scales belong to it"
    lora2 = place.scales["lora2"].provenance.fingerprints[0]
    origin = place.scales["shared"].provenance.origin
    with pytest.raises(FingerprintError) as refused:
        run("base", "shared", "vllm", output=tmp_path / "b", adapters=("lora2",))
    assert str(refused.value) == (
        f"the scales belong to {origin}, which does not cover the adapter {place.root / 'lora2'}: "
        f"{lora2}" + SHARED
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_adapters_that_were_measured_together_are_not_covered_apart(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path
) -> None:
    """A server runs one of them per request."""
    adapters = [str(place.root / name) for name in ("lora", "lora2")]
    both = resolve(str(place.root / "base"), adapters=adapters)
    sum_of_both = calibrated(load(both, device="cpu", notify=quiet).model)
    known = place.scales["base"].union(sum_of_both).union(place.scales["lora"])
    save_scales(known, tmp_path / "sum.safetensors")
    with pytest.raises(FingerprintError, match=r"which does not cover the adapter .*lora2: "):
        run(
            "base",
            str(tmp_path / "sum"),
            "vllm",
            output=tmp_path / "out",
            adapters=("lora", "lora2"),
        )


def test_adapters_are_not_looked_at_if_they_do_not_matter(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path
) -> None:
    said: list[str] = []
    asked = {"output": tmp_path / "out", "adapters": ("lora2",), "force": True, "said": said}
    result = run("base", "shared", "vllm", **asked)
    note = "forced: which adapters the scales are of was not looked at"
    assert result.remarks[0] == said[0] == note
    assert not any(line.startswith("loading") for line in said)


def test_shared_scales_cover_as_many_adapters_as_are_named(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path
) -> None:
    with pytest.raises(FingerprintError, match=r", which covers 1 of 2 adapters\. Without --merge"):
        run("lora", "shared", "vllm", output=tmp_path / "out", adapters=("lora2",))
    both = place.scales["shared"].union(place.scales["lora2"])
    save_scales(both, tmp_path / "both.safetensors")
    scales = str(tmp_path / "both")
    assert run("base", scales, "vllm", output=tmp_path / "out", adapters=("lora", "lora2")).ok


# Beside an adapter


@pytest.fixture
def adapter(place: Place, tmp_path: Path) -> Path:
    """The adapter, at a place where something may be added."""
    (tmp_path / "lora").mkdir()
    for path in (place.root / "lora").iterdir():
        (tmp_path / "lora" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "lora"


def test_a_sidecar(run: Callable[..., ExportResult], place: Place, adapter: Path) -> None:
    before, base = digests(adapter), digests(place.root)
    result = run(adapter, "lora", sidecar=True)
    assert result.sidecar == adapter / "kvquant_scales.json"
    assert (result.ok, result.written, result.engines, result.tensors) == (True, None, (), ())
    after = digests(adapter)
    assert after.keys() - before.keys() == {"kvquant_scales.json"}
    assert {name: after[name] for name in before} == before
    assert digests(place.root) == base
    layers = json.loads(result.sidecar.read_text())["layers"]
    for layer, needed in zip(layers.values(), numbers(place.scales["lora"]), strict=True):
        for held, least in zip(layer.values(), needed, strict=True):
            assert least <= held < least * (1 + 2**-7)


@pytest.mark.parametrize("scales", ["base", "lora2", "shared"])
def test_a_sidecar_with_scales_of_others(
    run: Callable[..., ExportResult], adapter: Path, scales: str
) -> None:
    """Shared ones fit the adapter too."""
    if scales == "shared":
        assert run(adapter, scales, sidecar=True).sidecar is not None
        return
    with pytest.raises(FingerprintError, match=r"adapters differ; calibrate this model$"):
        run(adapter, scales, sidecar=True)
    assert not (adapter / "kvquant_scales.json").exists()
    result = run(adapter, scales, sidecar=True, force=True)
    assert result.remarks[0].startswith("forced: ")


def test_a_sidecar_belongs_to_one_adapter(run: Callable[..., ExportResult], adapter: Path) -> None:
    with pytest.raises(ExportError, match=r"one adapter, 2 are given: name its directory as the m"):
        run(adapter, "lora", sidecar=True, adapters=("lora2",))
    with pytest.raises(ExportError, match="one adapter, 0 are given"):
        run("base", "base", sidecar=True)
    assert not (adapter / "kvquant_scales.json").exists()


# Scales of another model


def test_scales_of_other_weights(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path
) -> None:
    with pytest.raises(FingerprintError, match="weights differ; calibrate this model"):
        run("base", "other", "vllm", output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    said: list[str] = []
    result = run("base", "other", "vllm", output=tmp_path / "out", force=True, said=said)
    forced = [line for line in said if line.startswith("forced: ")]
    assert len(forced) == 1 and "weights differ" in forced[0]
    assert result.remarks[0] == forced[0]
    record = json.loads((tmp_path / "out" / "kvquant_export.json").read_text())
    assert record["remarks"][0] == forced[0]
    assert record["scales"]["provenance"]["notes"] == ["short text", forced[0]]
    assert_serves(tmp_path / "out", place.scales["other"])


@pytest.mark.parametrize("force", [False, True])
def test_scales_of_another_shape(
    run: Callable[..., ExportResult], tmp_path: Path, force: bool
) -> None:
    with pytest.raises(FingerprintError, match="3 layers in the scales, 2 in the model"):
        run("base", "deep", "vllm", output=tmp_path / "out", force=force)
    assert list(tmp_path.iterdir()) == []


def test_scales_that_are_no_scales(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path
) -> None:
    with pytest.raises(FileFormatError, match=r"nothing\.safetensors does not exist"):
        run("base", "nothing", "vllm", output=tmp_path / "out")
    with pytest.raises(FileFormatError, match="not one of kvquant's"):
        run("base", "base/model.safetensors", "vllm", output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_scales_are_looked_at_before_a_model_is_fetched(tmp_path: Path) -> None:
    """Nobody wants to download 140 GB to be told of a name that was mistyped."""
    request = ExportRequest(
        resolve("someone/some-model"), str(tmp_path / "scales"), ("vllm",), tmp_path / "out"
    )
    said: list[str] = []
    with pytest.raises(FileFormatError, match=r"scales\.safetensors does not exist"):
        export(request, said.append)
    assert said == []


# Quantized bases


QUANTIZED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4"},
}


@pytest.fixture
def quantized(place: Place, tmp_path: Path) -> Callable[[str], Path]:
    """``quantized(method)``: the base with the config of a quantized one."""

    def make(method: str) -> Path:
        base = tmp_path / method
        base.mkdir()
        for path in (place.root / "base").iterdir():
            (base / path.name).write_bytes(path.read_bytes())
        config = json.loads((base / "config.json").read_text())
        config["quantization_config"] = QUANTIZED[method]
        (base / "config.json").write_text(json.dumps(config))
        return base

    return make


@pytest.mark.parametrize("engine", ["vllm", "sglang", "sglang-modelopt", "transformers"])
@pytest.mark.parametrize("method", QUANTIZED)
def test_beside_whose_weights_an_engine_reads_no_scales(
    run: Callable[..., ExportResult],
    quantized: Callable[[str], Path],
    tmp_path: Path,
    method: str,
    engine: str,
) -> None:
    base, said = quantized(method), []
    with pytest.raises(ExportError) as refused:
        run(base, "base", engine, output=tmp_path / "out", said=said)
    message = str(refused.value)
    assert message.startswith(f"{base} is quantized with {method}: ")
    assert message.endswith("export the unquantized model")
    assert "\n" not in message
    assert said == []
    assert [path.name for path in tmp_path.iterdir()] == [method]


@pytest.mark.parametrize("engine", ["tgi", "lightllm"])
def test_a_base_that_cannot_be_loaded_here(
    run: Callable[..., ExportResult],
    quantized: Callable[[str], Path],
    place: Place,
    tmp_path: Path,
    engine: str,
) -> None:
    """TGI and LightLLM read scales beside any weights, but GPTQ's need a GPU to be loaded."""
    base, said = quantized("gptq"), []
    with pytest.raises(ModelError, match=r"--force takes them unseen$"):
        run(base, "base", engine, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = run(base, "base", engine, output=tmp_path / "out", force=True, said=said)
    assert result.ok
    assert said[0] == f"forced: whether the scales belong to {base} was not looked at"
    assert result.remarks[0] == said[0]
    assert_serves(tmp_path / "out", place.scales["base"], engine)
    with pytest.raises(FingerprintError, match="3 layers in the scales, 2 in the model"):
        run(base, "deep", engine, output=tmp_path / "other", force=True)


def test_a_base_that_has_scales_already(run: Callable[..., ExportResult], tmp_path: Path) -> None:
    run("base", "base", "tgi", output=tmp_path / "one")
    with pytest.raises(ExportError, match=r"one has KV scales already \(4 tensors, such as model"):
        run(tmp_path / "one", "base", "vllm", output=tmp_path / "two")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


# What cannot be meant, or not be written


@pytest.mark.parametrize(
    ("model", "engines", "options", "message"),
    [
        ("base", ["vllm"], {}, "this export writes a directory: name it with --output"),
        (
            "lora",
            ["vllm"],
            {"merge_adapter": True},
            "this export writes a directory: name it with --output",
        ),
        (
            "base",
            ["lmdeploy", "llama.cpp"],
            {"output": Path("out")},
            "nothing would be written to out for LMDeploy and llama.cpp: leave it out",
        ),
        (
            "lora",
            [],
            {"output": Path("out"), "sidecar": True},
            "nothing would be written to out for a sidecar: leave it out",
        ),
        (
            "base",
            ["vllm"],
            {"output": Path("out"), "merge_adapter": True},
            "{root}/base has no adapter to merge: name one with --adapter, or leave "
            "--merge-adapter out",
        ),
        (
            "lora",
            ["vllm"],
            {"output": Path("out"), "fold": "int8"},
            "adapters do not fit weights that were folded without them: fold the merged model, "
            "with --merge-adapter",
        ),
        (
            "base",
            ["all", "lightllm"],
            {"output": Path("out")},
            "--engine all is vllm, sglang, tgi, transformers, which one directory serves; export "
            "for lightllm apart",
        ),
    ],
)
def test_what_cannot_be_meant(
    run: Callable[..., ExportResult],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    engines: list[str],
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    with pytest.raises(ExportError) as refused:
        run(model, "base", *engines, said=said, **options)
    assert str(refused.value) == message.format(root=place.root)
    assert (said, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("merge_adapter", [False, True])
def test_an_output_that_will_not_do_is_seen_before_anything_is_loaded(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path, merge_adapter: bool
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    before, said = digests(place.root), []
    for output, message in (
        (tmp_path / "full", "is not empty"),
        (place.root / "base" / "out", "lies in the model's own directory"),
        (place.root / "base", "is or lies in the model's own directory"),
        (tmp_path / "full" / "mine", "Not a directory"),
    ):
        with pytest.raises(ExportError, match=message):
            run(
                "lora", "lora" if merge_adapter else "shared", "vllm",
                output=output, merge_adapter=merge_adapter, said=said,
            )  # fmt: skip
    assert said == []
    assert digests(place.root) == before
    assert digests(tmp_path) == {"full/mine": hashlib.sha256(b"mine").hexdigest()}


@pytest.mark.parametrize("moment", ["merging", "linking"])
def test_an_interrupt_leaves_nothing(
    run: Callable[..., ExportResult], place: Place, tmp_path: Path, moment: str
) -> None:
    class Interrupting(list[str]):
        def append(self, message: str) -> None:
            if message.startswith(moment):
                raise KeyboardInterrupt

    before = digests(place.root)
    with pytest.raises(KeyboardInterrupt):
        run(
            "lora", "lora", "vllm",
            output=tmp_path / "out", merge_adapter=True, said=Interrupting(),
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    assert digests(place.root) == before


def test_a_gguf_file(place: Place, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    request = ExportRequest(
        resolve(str(tmp_path / "model.gguf")), str(place.root / "base"), ("vllm",), tmp_path / "out"
    )
    with pytest.raises(ExportError) as refused:
        export(request, quiet)
    assert str(refused.value) == (
        f"{tmp_path / 'model.gguf'} is a GGUF file, which only llama.cpp serves, with scales of "
        "its own: export the checkpoint that it was made from"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_weights_that_are_not_safetensors(place: Place, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for path in (place.root / "base").iterdir():
        if path.suffix != ".safetensors":
            (base / path.name).write_bytes(path.read_bytes())
    (base / "pytorch_model.bin").write_bytes(b"weights")
    request = ExportRequest(
        resolve(str(base)), str(place.root / "base"), ("vllm",), tmp_path / "out"
    )
    with pytest.raises(InputError, match="convert them to safetensors"):
        export(request, quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
