"""`kvquant check` as users run it: as a process, and in this process where only paths differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant.cache.layer import QuantizedLayer
from kvquant.cli import run

KVQUANT = Path(sys.executable).with_name("kvquant")
SMALL = ["--tokens", "3", "--prompt-tokens", "24"]
NAMES = ("gemma2", "deepseek", "qwen3_next")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny: Any, save_tiny: Any) -> Path:
    """A directory of models, one with sliding windows, one with MLA, one hybrid, and an adapter."""
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("models")
    for name in (*NAMES, "llama"):
        save_tiny(tiny(name), root / name)
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 1
    save_tiny(model, root / "tuned")
    model = tiny("llama")
    model.name_or_path = str(root / "llama")
    torch.manual_seed(1)
    config = LoraConfig(target_modules=["k_proj", "v_proj"], r=2, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(root / "lora")
    return root


def test_it_is_a_command_and_helps_without_torch() -> None:
    code = (
        "import sys; from kvquant.cli import run; code = run(['check', '--help']);"
        "print('torch' in sys.modules, code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False 0"
    assert "Exit code 0" in done.stdout


def test_the_whole_way_as_a_process(models: Path) -> None:
    command = [KVQUANT, "check", models / "gemma2", *SMALL, "-s", "int8", "-s", "int4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "one text" in done.stdout and "same tokens" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("exact: ")
    assert [row.split()[0] for row in done.stdout.splitlines() if " x " in row][-2:] == [
        "int8", "int4",
    ]  # fmt: skip
    assert "6/6" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_json_is_the_only_thing_on_stdout(
    models: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", str(models / name), *SMALL, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["model"] == str(models / name)
    assert result["findings"] == []
    assert (result["prompt_tokens"], result["tokens"], result["dtype"]) == (24, 3, "float32")
    assert [case["quantized"]["first_difference"] for case in result["cases"]] == [None] * 4
    sizes = [(scheme["live_nbytes"], scheme["expected_nbytes"]) for scheme in result["schemes"]]
    assert len(sizes) == 9 and all(live == expected for live, expected in sizes)


def test_an_adapter_takes_part(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = [*SMALL, "-s", "int4", "--json"]
    differences = []
    base, lora = str(models / "llama"), str(models / "lora")
    for chosen in (
        [base],
        [base, "--adapter", lora],
        [lora],
        [lora, "--base", base, "--dtype", "float32", "--device", "cpu"],
    ):
        assert run(["check", *chosen, *small]) == 0
        result = json.loads(capfd.readouterr().out)
        assert (result["model"], result["adapters"]) == (base, [lora] if lora in chosen else [])
        differences.append(result["schemes"][0]["key_difference"])
        assert run(["check", *chosen, *small[:-1]]) == 0
        title = "llama + lora: llama cache" if lora in chosen else "llama: llama cache"
        assert capfd.readouterr().out.startswith(title)
    assert differences[0] != differences[1] == differences[2] == differences[3]


def test_scales_of_a_calibration(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    scales = tmp_path / "scales"
    calibrate = ["calibrate", "-m", models / "llama", "-o", scales, "-d", tmp_path / "text.txt"]
    more = ["-c", "64", "-n", "2", "--format", "int8", "--granularity", "per-channel"]
    assert run([*map(str, calibrate), *more]) == 0
    capfd.readouterr()
    chosen = [*SMALL, "-s", "int8", "-s", "int4", "--scales", str(scales)]
    assert run(["check", str(models / "llama"), *chosen, "--json"]) == 0
    int8, int4 = json.loads(capfd.readouterr().out)["schemes"]
    assert "int8 per-channel" in int8["description"]
    assert int4["live_nbytes"] == int4["expected_nbytes"]
    for other, weights_are_read in (("gemma2", False), ("tuned", True)):
        assert run(["check", str(models / other), *chosen]) == 2
        shown = capfd.readouterr().err
        assert "error: the scales belong to" in shown
        assert shown.count("\n") == 1, "no bar, nor anything else"
        assert ("the model is" in shown) == weights_are_read


def test_scales_are_looked_at_before_weights_are(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((models / "llama/config.json").read_bytes())
    missing = str(tmp_path / "nope")
    assert run(["check", str(tmp_path / "model"), "--scales", missing]) == 2
    assert capfd.readouterr().err == (
        f"error: {missing}.safetensors does not exist or is no file; a scales file from `kvquant "
        "calibrate` is needed\n"
    )


def test_a_defect_gives_exit_code_1(
    models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    update = QuantizedLayer.update

    def without_the_third_token(self: Any, keys: Any, values: Any, *args: Any, **more: Any) -> Any:
        if keys.shape[2] > 3:
            keys = keys.clone()
            keys[:, :, 2] = 0
        return update(self, keys, values, *args, **more)

    monkeypatch.setattr(QuantizedLayer, "update", without_the_third_token)
    assert run(["check", str(models / "gemma2"), *SMALL, "-s", "int8"]) == 1
    shown = capfd.readouterr().out
    assert "differs: one text: logits are" in shown
    assert "exact: " not in shown
    assert run(["check", str(models / "gemma2"), *SMALL, "-s", "int8", "--json"]) == 1
    assert len(json.loads(capfd.readouterr().out)["findings"]) >= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-here"], "nothing-here"),
        (["llama", "--scheme", "int5"], "unknown scheme 'int5': possible are none, "),
        (["llama", "--prompt-tokens", "500"], "a prompt of 500, 32 to decode and one more"),
        (
            ["llama", "--tokens", "600"],
            "600 to decode and one more that reads them need 602 positions",
        ),
        (["llama", "--tokens", "0"], "0 is not in the range x>=1"),
        (["llama", "--device", "abacus"], "no device 'abacus' on this machine"),
        (["llama", "--scales", "nothing"], "nothing.safetensors does not exist"),
        (["llama", "--adapter", "llama"], "adapter"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(models)
    assert run(["check", *arguments]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if "rror: " in line]
    assert len(lines) == 1 and message in lines[0]
