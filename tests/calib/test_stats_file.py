"""Statistics on disk: the same bits back, and one clear line for everything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from calib.collect import collect
from calib.solve import solve
from calib.stats import CalibrationStats, ChannelStats
from calib.stats_file import load_stats, save_stats
from kvquant import storage
from kvquant.errors import FileFormatError, InputError
from kvquant.geometry import CacheGeometry
from kvquant.provenance import Provenance
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

INT8 = TensorScheme(tensor_format("int8"), Granularity.PER_CHANNEL, symmetric=False)


@pytest.fixture(scope="module")
def stats(tiny: Callable[..., Any]) -> CalibrationStats:
    """Of a model with rotated, unrotated and linear-attention layers of its own."""
    model = tiny("smollm3")
    torch.manual_seed(0)
    blocks = torch.randint(3, 128, (3, 20)).tolist()
    found = collect(model, blocks, CacheGeometry.from_config(model.config), skip_layers=[1])
    provenance = Provenance(
        model="tiny",
        adapters=("lora",),
        corpora=({"source": "a.txt", "tokens": 60},),
        tokens=60,
        longest_position=20,
        command=("kvquant calibrate",),
    )
    return CalibrationStats(found.geometry, found.layers, provenance)


@pytest.fixture
def path(stats: CalibrationStats, tmp_path: Path) -> Path:
    save_stats(stats, tmp_path / "model.stats")
    return tmp_path / "model.stats"


def assert_identical(one: ChannelStats, other: ChannelStats) -> None:
    for name in ("minimum", "maximum", "total", "total_squares", "total_unrotated"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.dtype == theirs.dtype and torch.equal(mine, theirs)), name
    for name in ("sketch", "token_amax"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.counts.dtype == theirs.counts.dtype
        assert torch.equal(mine.counts, theirs.counts)
        assert torch.equal(mine.exponent, theirs.exponent)
    assert (one.tokens, one.rotary) == (other.tokens, other.rotary)


def test_what_was_saved_comes_back_bit_for_bit(stats: CalibrationStats, path: Path) -> None:
    loaded = load_stats(path)
    assert loaded.geometry == stats.geometry
    assert loaded.provenance == stats.provenance
    assert list(loaded.layers) == list(stats.layers) == [0, 2, 3]
    assert stats.layers[0].key.rotary is not None
    assert stats.layers[3].key.rotary is None
    for index, layer in stats.layers.items():
        assert_identical(loaded.layers[index].key, layer.key)
        assert_identical(loaded.layers[index].value, layer.value)


def test_loaded_statistics_solve_and_merge_like_fresh_ones(
    stats: CalibrationStats, path: Path
) -> None:
    loaded = load_stats(path)
    scheme = QuantScheme(INT8, INT8, frozenset({1}))
    fresh, again = solve(stats, scheme), solve(loaded, scheme)
    for index, layer in fresh.layers.items():
        assert torch.equal(layer.key.scale, again.layers[index].key.scale)
    assert loaded.merge(stats).tokens == 120


def test_more_than_nine_layers_keep_their_order(stats: CalibrationStats, tmp_path: Path) -> None:
    layer = stats.layers[0]
    geometry = replace(stats.geometry, layers=stats.geometry.layers[:1] * 12)
    many = CalibrationStats(geometry, {index: layer for index in (0, 2, 10, 11)})
    save_stats(many, tmp_path / "many")
    assert list(load_stats(tmp_path / "many").layers) == [0, 2, 10, 11]


def test_the_file_is_safetensors_with_a_version(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    header = json.loads(metadata["kvquant"])
    assert (header["version"], header["kind"]) == (storage.FORMAT_VERSION, "stats")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_cut_short(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(FileFormatError, match=r"model\.stats"):
        load_stats(path)


def test_foreign_files(tmp_path: Path) -> None:
    text, tensors = tmp_path / "notes.txt", tmp_path / "model.safetensors"
    text.write_text("not a model")
    save_file({"weight": torch.zeros(2)}, tensors)
    for path, message in ((text, "notes"), (tensors, "kvquant"), (tmp_path, "directory")):
        with pytest.raises(FileFormatError, match=message):
            load_stats(path)
    with pytest.raises(FileFormatError, match="does not exist"):
        load_stats(tmp_path / "missing")


def test_scales_are_no_statistics(stats: CalibrationStats, tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    storage.save_scales(solve(stats, QuantScheme(INT8, INT8, frozenset({1}))), path)
    with pytest.raises(FileFormatError, match="scales file, a stats file"):
        load_stats(path)


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def _cut(name: str, dim: int) -> Change:
    """Takes the last entry off a tensor."""

    def change(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].narrow(dim, 0, tensors[name].shape[dim] - 1).clone()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header, _: header.update(version=99), "version 99"),
        (lambda header, _: header.update(bins=7), "7 bins"),
        (lambda header, _: header.pop("bins"), "bins"),
        (lambda header, _: header.pop("geometry"), "geometry"),
        (lambda header, _: header.pop("slots"), "slots"),
        (lambda header, _: header["slots"].pop("layers.0.value"), "value"),
        (lambda header, _: header["slots"].update({"layers.0.query": {}}), "model.stats"),
        (lambda header, _: header["slots"].update(nonsense={}), "model.stats"),
        (lambda header, _: header["slots"]["layers.0.key"].pop("tokens"), "tokens"),
        (lambda header, _: header["slots"]["layers.0.key"]["rotary"].pop("width"), "width"),
        (lambda _, tensors: tensors.pop("layers.2.key.sketch.counts"), "layers.2.key.sketch"),
        (_cut("layers.0.key.minimum", 0), r"key.minimum is float32 \[1, 16\], not float32 \[2, 16"),
        (
            _cut("layers.0.value.sketch.counts", 1),
            r"counts is int32 \[32, 320\], not int32 \[32, 321",
        ),
        (_cut("layers.0.key.total", 0), "key.total is float64"),
        (lambda _, tensors: tensors["layers.0.key.minimum"].fill_(float("nan")), "NaN"),
        (lambda header, _: header["slots"]["layers.0.key"].update(tokens="7"), "'7' tokens"),
        (lambda header, _: header["geometry"]["layers"].pop(), "layer 3"),
        (lambda header, _: header["provenance"].update(corpora=["x"]), "model.stats is damaged"),
        (lambda _, tensors: tensors.pop("layers.0.key.total_unrotated"), "total_unrotated"),
    ],
)
def test_a_damaged_header_or_tensor_is_named(path: Path, change: Change, message: str) -> None:
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["kvquant"])
    tensors = load_file(path)
    change(header, tensors)
    save_file(tensors, path, {"format": "pt", "kvquant": json.dumps(header)})
    with pytest.raises(FileFormatError, match=message) as caught:
        load_stats(path)
    assert "model.stats" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_place_that_cannot_be_written_is_named(stats: CalibrationStats, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot write"):
        save_stats(stats, tmp_path / "file" / "model.stats")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"]
