"""A file of scales beside an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvquant
from kvquant.errors import ExportError, InputError
from kvquant.export.sidecar import write_sidecar
from kvquant.export.target import ExportJob
from kvquant.fingerprint import Fingerprint
from kvquant.geometry import LayerGeometry, LayerKind
from kvquant.provenance import Provenance


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "lora"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    return directory


def test_all_of_it(make_job: Callable[..., ExportJob], adapter: Path) -> None:
    job = make_job({0: (0.011, 0.0013), 1: (0.023, 0.0019)})
    known = Provenance(model="lora", fingerprints=(Fingerprint("ab", ("cd",)),))
    job = replace(job, scales=replace(job.scales, provenance=known))

    remarks = write_sidecar(job, adapter)

    assert sorted(path.name for path in adapter.iterdir()) == [
        "adapter_config.json",
        "kvquant_scales.json",
    ]
    assert json.loads((adapter / "kvquant_scales.json").read_text()) == {
        "kvquant": kvquant.__version__,
        "format": "fp8_e4m3",
        "meaning": "x = code * scale, one scale for the keys and one for the values of a layer",
        "layers": {
            "0": {"k_scale": 181 / 16384, "v_scale": 171 / 131072},
            "1": {"k_scale": 189 / 8192, "v_scale": 250 / 131072},
        },
        "method": "amax",
        "provenance": json.loads(json.dumps(known.to_dict())),
    }
    assert len(remarks) == 1 and "rounded up to the next bfloat16" in remarks[0]


def test_finer_scales_are_reduced_and_that_is_said(
    make_job: Callable[..., ExportJob], adapter: Path
) -> None:
    remarks = write_sidecar(make_job({0: ([0.5, 2.0], [0.25, 0.125])}), adapter)
    layers = json.loads((adapter / "kvquant_scales.json").read_text())["layers"]
    assert layers == {"0": {"k_scale": 2.0, "v_scale": 0.25}}
    assert "keys per-head and values per-head were reduced to per-tensor" in remarks[0]


def test_layers_have_the_numbers_of_the_whole_model(
    make_job: Callable[..., ExportJob], adapter: Path
) -> None:
    layers = [LayerGeometry(LayerKind.FULL, 2, 16, 16)] * 4
    write_sidecar(make_job({1: (0.5, 0.25), 3: (1.0, 0.125)}, layers=layers), adapter)
    values = json.loads((adapter / "kvquant_scales.json").read_text())
    assert values["layers"] == {
        "1": {"k_scale": 0.5, "v_scale": 0.25},
        "3": {"k_scale": 1.0, "v_scale": 0.125},
    }


@pytest.mark.parametrize("number", [1e-30, 0.1, 1 / 3, 448.0, 1e30])
def test_reading_back_gives_the_same_float32(
    make_job: Callable[..., ExportJob], adapter: Path, number: float
) -> None:
    write_sidecar(make_job({0: (number, number)}), adapter)
    values = json.loads((adapter / "kvquant_scales.json").read_text())["layers"]["0"]
    for found in values.values():
        assert torch.tensor(found).item() == found
        assert torch.tensor(number) <= found < number * (1 + 2**-7)


def test_an_older_one_is_replaced(make_job: Callable[..., ExportJob], adapter: Path) -> None:
    write_sidecar(make_job({0: (0.5, 0.25)}), adapter)
    write_sidecar(make_job({0: (1.0, 0.25)}), adapter)
    values = json.loads((adapter / "kvquant_scales.json").read_text())
    assert values["layers"]["0"]["k_scale"] == 1.0
    assert len(list(adapter.iterdir())) == 2


# What is refused


def test_a_directory_that_is_no_adapter(make_job: Callable[..., ExportJob], tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with pytest.raises(ExportError, match=r"plain is no adapter directory: it has no adapter_con"):
        write_sidecar(make_job({0: (0.5, 0.25)}), tmp_path / "plain")
    assert list((tmp_path / "plain").iterdir()) == []


@pytest.mark.parametrize("form", ["int8", "int4", "fp8_e5m2"])
def test_formats_that_no_engine_reads(
    make_job: Callable[..., ExportJob], adapter: Path, form: str
) -> None:
    job = make_job({0: (0.5, 0.25)}, key_format=form, value_format=form)
    with pytest.raises(ExportError) as refused:
        write_sidecar(job, adapter)
    assert str(refused.value) == (
        f"the scales are for keys as {form} per-tensor, but a sidecar reads calibrated scales of "
        "fp8_e4m3 only. No engine reads calibrated scales of other formats. For FP8 scales: "
        "kvquant solve STATS --format fp8 --output NAME"
    )
    assert [path.name for path in adapter.iterdir()] == ["adapter_config.json"]


def test_a_place_that_cannot_be_written(make_job: Callable[..., ExportJob], adapter: Path) -> None:
    (adapter / "kvquant_scales.json").mkdir()
    with pytest.raises(InputError, match=r"kvquant_scales\.json: it is a directory"):
        write_sidecar(make_job({0: (0.5, 0.25)}), adapter)
    assert sorted(path.name for path in adapter.iterdir()) == [
        "adapter_config.json",
        "kvquant_scales.json",
    ]


def test_nothing_about_it_needs_the_adapter_s_weights(
    make_job: Callable[..., ExportJob], adapter: Path
) -> None:
    """Tensors in adapter_model.safetensors would make vLLM refuse the adapter."""
    (adapter / "adapter_model.safetensors").write_bytes(b"as it was")
    write_sidecar(make_job({0: (0.5, 0.25)}), adapter)
    assert (adapter / "adapter_model.safetensors").read_bytes() == b"as it was"
