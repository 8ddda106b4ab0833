"""What is printed, to the letter, and the same as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvquant.export import show
from kvquant.export.directory import LinkMode, Written
from kvquant.export.export import EngineOutcome, ExportResult
from kvquant.export.fold_error import FoldError
from kvquant.export.fold_weights import FoldCheck
from kvquant.export.folded import Folded
from kvquant.export.targets import target_names
from kvquant.export.verify_report import Finding, LayerVerdict, VerifyReport
from kvquant.export.verify_run import Change, RunReport

WRITTEN = Written(Path("out"), ("config.json", "a.safetensors"), LinkMode.HARD, 12_345, ("w",))
BAD = Finding("layer 3: there is no scale of the values", "write both", layer=3)
FINE = Finding("launch with --kv-cache-dtype fp8", serious=False)


def folded() -> Folded:
    errors = (
        FoldError(0, "int8", (0.02, 0.01), (0.03, 0.02)),
        FoldError(1, "int8", (0.04, 0.01), (0.01, 0.01)),
        FoldError(0, "int4", (0.5, 0.25), (0.1, 0.1)),
        FoldError(1, "int4", (0.7, 0.35), (0.1, 0.1)),
    )
    return Folded("int8", 2, FoldCheck(8, 1.5e-6), errors)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


# kvquant export --list


def test_every_engine_is_named_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    show.show_engines()
    lines = shown(capsys)
    assert max(map(len, lines)) <= 100
    assert "…" not in "".join(lines)
    # Names stand at the left; what is folded under them does not.
    found = [match[1] for line in lines if (match := re.match(r" (\S+) ", line))]
    assert [name for name in found if name != "--engine" and "─" not in name] == target_names()
    assert re.split(r"\s{2,}", lines[1].strip()) == [
        "--engine",
        "formats",
        "one scale for",
        "written",
        "facts from",
        "in all",
    ]
    assert [line.split()[0] for line in lines if line.endswith(" yes")] == [
        "vllm",
        "sglang",
        "tgi",
        "transformers",
    ]


def test_engines_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    show.print_json(show.engines_values())
    values = json.loads(capsys.readouterr().out)
    assert [each["engine"] for each in values] == target_names()
    vllm = values[0]
    assert vllm["formats"] == ["fp8_e4m3"]
    assert vllm["granularity"] == "per tensor or per head"
    assert (vllm["needs_weights"], vllm["shares_directory"]) == (True, True)
    assert all(each["versions"] and each["files"] and each["title"] for each in values)


# kvquant export


def test_an_export(capsys: pytest.CaptureFixture[str]) -> None:
    engines = (
        EngineOutcome("vllm", ("vllm serve out",), 32, (FINE,)),
        EngineOutcome("sglang", ("sglang out",), 31, (BAD, FINE)),
        EngineOutcome("tensorrt-llm", (), 0),
        EngineOutcome("lmdeploy", ("lmdeploy out",)),
        EngineOutcome("tgi", refusal="it has no such cache"),
    )
    show.show_export(ExportResult(engines, WRITTEN, ("k", "v"), ("K and V share a number",)))
    assert shown(capsys) == [
        "out: 2 files, weights by hard link, 0.01 MB new, 2 scale tensors",
        "",
        "vllm: would load scales of 32 layers",
        "  vllm serve out",
        "  · launch with --kv-cache-dtype fp8",
        "",
        "sglang: WOULD NOT serve as meant; scales of 31 layers",
        "  sglang out",
        "  ✗ layer 3: there is no scale of the values; write both",
        "  · launch with --kv-cache-dtype fp8",
        "",
        "tensorrt-llm: would load no scales, and uses none",
        "",
        "lmdeploy:",
        "  lmdeploy out",
        "",
        "tgi: left out, it has no such cache",
        "",
        "to know:",
        "  - K and V share a number",
    ]


def test_a_sidecar(capsys: pytest.CaptureFixture[str]) -> None:
    show.show_export(ExportResult((), None, (), (), sidecar=Path("lora/kvquant_scales.json")))
    assert shown(capsys) == ["written: lora/kvquant_scales.json"]


@pytest.mark.parametrize("name", ["my[fp8]", "my[/fp8]", "a:100:b", "[red]x"])
def test_names_are_not_taken_for_styles(capsys: pytest.CaptureFixture[str], name: str) -> None:
    written = Written(Path(name), (), LinkMode.COPY, 0, ())
    engine = EngineOutcome(name, (f"serve {name}",), 1, (Finding(name, name),))
    show.show_export(ExportResult((engine,), written, (), (name,), sidecar=Path(name)))
    report = VerifyReport("vllm", name, (), (Finding(name),))
    run = RunReport(name, {"torch": name}, findings=(Finding(name),))
    show.show_verify(report, run)
    assert capsys.readouterr().out.count(name) == 11


def test_long_command_lines_stay_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = "serve " + "x" * 200
    written = Written(Path("d" * 200), (), LinkMode.COPY, 0, ())
    show.show_export(ExportResult((EngineOutcome("vllm", (line,), 1),), written, (), ()))
    lines = shown(capsys)
    assert f"  {line}" in lines
    assert lines[0].startswith("d" * 200 + ": 0 files")


def test_what_folding_did(capsys: pytest.CaptureFixture[str]) -> None:
    show.show_export(ExportResult((), None, (), (), folded=folded()))
    lines = [line for line in shown(capsys) if line]
    assert lines[0] == (
        "folded for int8: 2 layers, 8 tensors exactly, logits differ by 1.5e-06 at most"
    )
    # Means over the layers, scores before and after, then values.
    assert lines[3].split() == ["int8", "3", "%", "1", "%", "2", "%", "1.5", "%"]
    assert lines[4].split() == ["int4", "60", "%", "30", "%", "10", "%", "10", "%"]


def test_an_export_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    engines = (
        EngineOutcome("vllm", ("vllm serve out",), 31, (BAD,)),
        EngineOutcome("tgi", refusal="no"),
    )
    result = ExportResult(engines, WRITTEN, ("k", "v"), ("r",), folded(), Path("s.json"))
    show.print_json(show.export_values(result))
    values = json.loads(capsys.readouterr().out)
    assert {name: values[name] for name in values if name not in ("engines", "folded")} == {
        "ok": False,
        "directory": "out",
        "files": ["config.json", "a.safetensors"],
        "weights": "hard link",
        "new_bytes": 12_345,
        "sidecar": "s.json",
        "tensors": ["k", "v"],
        "remarks": ["r"],
    }
    assert values["engines"] == [
        {
            "name": "vllm",
            "launch": ["vllm serve out"],
            "layers": 31,
            "findings": [
                {
                    "what": "layer 3: there is no scale of the values",
                    "fix": "write both",
                    "layer": 3,
                    "serious": True,
                }
            ],
            "refusal": "",
            "ok": False,
        },
        {"name": "tgi", "launch": [], "layers": None, "findings": [], "refusal": "no", "ok": False},
    ]
    assert values["folded"]["quantizer"] == "int8"
    assert values["folded"]["check"] == {"tensors": 8, "logits": 1.5e-6}
    assert values["folded"]["errors"][1] == {
        "layer": 1,
        "quantizer": "int8",
        "key": [0.04, 0.01],
        "value": [0.01, 0.01],
    }


def test_nothing_written_as_json() -> None:
    values = show.export_values(ExportResult((EngineOutcome("lmdeploy"),), None, (), ()))
    assert values["ok"] is True
    assert (values["directory"], values["files"], values["weights"]) == (None, [], None)
    assert (values["new_bytes"], values["sidecar"], values["folded"]) == (0, None, None)


@pytest.mark.parametrize(
    ("findings", "refusal", "alone", "beside"),
    [
        ((), "", True, True),
        ((FINE,), "", True, True),
        ((FINE, BAD), "", False, False),
        ((), "why", False, True),
    ],
)
def test_who_is_left_out_does_not_count(
    findings: tuple[Finding, ...], refusal: str, alone: bool, beside: bool
) -> None:
    outcome = EngineOutcome("vllm", findings=findings, refusal=refusal)
    assert outcome.ok == alone
    assert ExportResult((EngineOutcome("tgi"), outcome), None, (), ()).ok == beside


# kvquant verify


def verdict(layer: int, *scales: tuple[float, ...], source: str = "checkpoint") -> LayerVerdict:
    key, value = scales or ((), ())
    return LayerVerdict(layer, "k", "v", key, value, source)


def test_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    layers = (
        verdict(0, (0.0312345678,), (0.5, 0.25)),
        verdict(1, (1.0,), (1.0,), source="1.0"),
        verdict(2, (1.0,), (1.0,), source="1.0"),
        verdict(4, (1.0,), (1.0,), source="1.0"),
        verdict(5),
    )
    show.show_verify(VerifyReport("vllm", "out", layers, (BAD, FINE)), None)
    lines = [line for line in shown(capsys) if line and "─" not in line]
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[:4]] == [
        ["layers", "K scale", "V scale", "from"],
        ["0", "0.031235", "0.25 … 0.5 (2 heads)", "checkpoint"],
        ["1-2, 4", "1", "1", "1.0"],
        ["5", "?", "?", "checkpoint"],
    ]
    assert lines[4:] == [
        "  ✗ layer 3: there is no scale of the values; write both",
        "  · launch with --kv-cache-dtype fp8",
        "vllm: out: 1 thing is wrong",
    ]


@pytest.mark.parametrize(
    ("findings", "judged"),
    [
        ((), "would be served as meant"),
        ((FINE,), "would be served as meant"),
        ((BAD, BAD), "2 things are wrong"),
    ],
)
def test_the_last_line_is_the_verdict(
    capsys: pytest.CaptureFixture[str], findings: tuple[Finding, ...], judged: str
) -> None:
    show.show_verify(VerifyReport("vllm", "out", (verdict(0, (1.0,), (1.0,)),), findings), None)
    assert shown(capsys)[-1] == f"vllm: out: {judged}"


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunReport(
        "out",
        {"transformers": "5.17.0", "torch": "2.13.0"},
        generated=(1, 2, 3),
        changes=(Change(0, "k_scale", 1.5, 0.031), Change(0, "v_scale", 1 / 64, 0.25)),
    )
    report = VerifyReport("transformers", "out", (), ())
    show.show_verify(report, run)
    assert shown(capsys)[-5:] == [
        "",
        "run with transformers 5.17.0, torch 2.13.0: 3 tokens generated",
        "  k_scale of layer 0 times 1.5: logits change by 0.031",
        "  v_scale of layer 0 times 0.0156: logits change by 0.25",
        "the scales are used",
    ]
    unused: dict[str, Any] = {"findings": (Finding("changes no logit", "update"),)}
    show.show_verify(report, RunReport("out", {}, **unused))
    assert shown(capsys)[-2:] == [
        "  ✗ changes no logit; update",
        "the scales are NOT used as meant",
    ]
