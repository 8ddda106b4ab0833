"""`kvquant evaluate` and `kvquant report` as users run them: as a process, and in this one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from evals.gate_file import Gate, load_gate
from evals.results import EvalReport
from kvquant.cache.layer import QuantizedLayer
from kvquant.cli import run

KVQUANT = Path(sys.executable).with_name("kvquant")
TEXT = "The quick brown fox jumps over the lazy dog. It does so every day, and twice on Sundays. "
NOTHING = ["--documents", "0", "--trials", "0", "--continuations", "0"]
CHEAP = [*NOTHING, "--self-check"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny: Any, save_tiny: Any) -> Path:
    """Models, another one of the same shape, calibrated scales of the first, a text."""
    root = tmp_path_factory.mktemp("models")
    (root / "text.txt").write_text(TEXT * 20)
    save_tiny(tiny("llama"), root / "llama")
    other = tiny("llama")
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight += 1
    save_tiny(other, root / "other")
    save_tiny(tiny("gemma2"), root / "gemma2")
    calibrate = ["calibrate", "-m", root / "llama", "-o", root / "own", "-d", root / "text.txt"]
    assert run([*map(str, calibrate), "-c", "256", "-n", "2", "--format", "int8"]) == 0
    return root


@pytest.fixture
def there(models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory to be in, beside the models."""
    monkeypatch.chdir(tmp_path)
    for name in ("llama", "other", "gemma2", "text.txt", "own.safetensors"):
        (tmp_path / name).symlink_to(models / name)
    return tmp_path


def small(*more: object, lengths: object = 256) -> list[str]:
    """Arguments of an evaluation of a second or less."""
    return list(
        map(
            str,
            [
                "evaluate", "--model", "llama", "--lengths", lengths, "--data", "text.txt",
                "--haystack", "text.txt", "--documents", 2, "--prefill", 40, "--block", 48,
                "--depths", 50, "--continuations", 1, "--tokens", 4, "--answer-tokens", 10, *more,
            ],
        )
    )  # fmt: skip


def kvquant(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`kvquant` as a process."""
    return subprocess.run(
        [KVQUANT, *map(str, arguments)], capture_output=True, text=True, timeout=600, cwd=cwd
    )


def test_it_is_a_command_and_helps_without_torch() -> None:
    code = (
        "import sys; from kvquant.cli import run; code = run(['evaluate', '--help']);"
        "print('torch' in sys.modules, 'transformers' in sys.modules, code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False 0"
    assert "Exit code 0" in done.stdout


def test_the_whole_way_as_processes(there: Path) -> None:
    arguments = small("--scheme", "int8", "--scales", "own", "-r", "out/eval.html", "--json")
    done = kvquant(*arguments, cwd=there)
    assert done.returncode == 0, done.stderr
    assert sorted(it.name for it in (there / "out").iterdir()) == ["eval.html", "eval.json"]
    page = (there / "out" / "eval.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert (there / "out" / "eval.json").read_text() == done.stdout
    report = EvalReport.from_dict(json.loads(done.stdout))
    assert [(arm.name, arm.foreign) for arm in report.arms] == [("int8", False), ("own", False)]
    assert report.perplexity and report.retrieval and report.continuations
    assert report.verdict is not None and report.verdict.gate == "defaults"
    assert report.origin.command == " ".join(["kvquant", *arguments])
    # Nothing but bars and what was read.
    bars = [line for line in done.stderr.splitlines() if line.strip() and "━" in line]
    assert [it.split()[0] for it in bars] == [
        "self-check", "perplexity", "needles", "continuations",
    ]  # fmt: skip
    assert all("100%" in it for it in bars)
    assert "Traceback" not in done.stderr and "arning" not in done.stderr

    shown = kvquant("report", "out/eval.json", "--html", "again.html", cwd=there)
    assert shown.returncode == 0, shown.stderr
    assert "int8" in shown.stdout and "written: again.html" in shown.stdout
    assert (there / "again.html").is_file()
    compared = kvquant("report", "out/eval.json", "out/eval.json", "--json", cwd=there)
    assert compared.returncode == 0, compared.stderr
    assert json.loads(compared.stdout)["differences"] == []


def test_a_table_and_one_file_by_default(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(small("-s", "none")) == 0
    shown = capfd.readouterr()
    assert "written: llama-eval.json" in shown.out
    assert {"none", "ppl"} <= set(shown.out.split())
    assert not list(there.glob("*.html")) and not list(there.glob("*.partial"))
    report = EvalReport.from_dict(json.loads((there / "llama-eval.json").read_text()))
    assert report.origin.seed == 0


@pytest.mark.parametrize(
    ("asked", "files"),
    [("a", ["a.html", "a.json"]), ("a.json", ["a.json"]), ("b/c.html", ["c.html", "c.json"])],
)
def test_files_are_named_by_report(there: Path, asked: str, files: list[str]) -> None:
    assert run(small("-s", "none", *CHEAP, "-r", asked)) == 0
    found = [
        it.name for it in (there / asked).parent.iterdir() if it.suffix[1:] in ("html", "json")
    ]
    assert sorted(found) == files


def test_only_the_self_check(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(small("-s", "int8", "--self-check", "--json")) == 0
    shown = capfd.readouterr()
    report = EvalReport.from_dict(json.loads(shown.out))
    assert report.perplexity is None and report.retrieval is None and report.continuations == ()
    assert [it.arm for it in report.self_checks] == ["int8"]
    assert "self-check" in shown.err and "needles" not in shown.err.replace("needles are", "")


def test_a_failed_self_check_is_exit_code_1_without_a_gate(
    there: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    update = QuantizedLayer.update

    def never_read(self: Any, keys: Any, values: Any, *args: Any, **more: Any) -> Any:
        update(self, keys, values, *args, **more)
        held = [getattr(self, "all_of_it", None), (keys, values)]
        pairs = zip(*filter(None, held), strict=True)
        self.all_of_it = tuple(torch.cat(pair, 2) for pair in pairs)
        return self.all_of_it

    monkeypatch.setattr(QuantizedLayer, "update", never_read)
    assert run(small("-s", "int8", "--self-check")) == 1
    shown = capfd.readouterr().out
    assert "self-check" in shown and "int8" in shown


def test_the_default_gate_as_a_file_is_the_default_gate(
    there: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", "--print-gate"]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    (there / "gate.toml").write_text(printed.out)
    gate = load_gate(there / "gate.toml")
    for name in ("exact", "8-bit", "4-bit", "3-bit"):
        assert gate.limits("x", name) == Gate().limits("x", name)
    assert gate.significance == Gate().significance


def gate_file(there: Path, text: str) -> str:
    (there / "gate.toml").write_text(text)
    return "gate.toml"


def test_exit_codes_of_a_gate(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    only = [*NOTHING, "--documents", "2"]
    switched_off = "\n".join(
        f"{name} = false" for name in Gate().limits("int8", "8-bit") if name != "kl_mean"
    )
    for limit, code in (("9.0", 0), ("1e-9", 1)):
        gate = gate_file(there, f'["8-bit"]\n{switched_off}\nkl_mean = {limit}\n')
        assert run(small("-s", "int8", *only, "--gate", gate, "--json")) == code
        verdict = EvalReport.from_dict(json.loads(capfd.readouterr().out)).verdict
        assert verdict is not None and verdict.gate == "gate.toml"
        [line] = verdict.lines
        assert (line.name, line.status) == ("kl_mean", "passed" if code == 0 else "failed")


def test_too_few_trials_are_no_pass(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    only = [*NOTHING, "--trials", "2"]
    assert run(small("-s", "none", *only, "--json")) == 0, "without a gate"
    lines = json.loads(capfd.readouterr().out)["verdict"]["lines"]
    assert [it["status"] for it in lines if it["name"] == "loss_rate 256"] == ["undecided"]
    assert run(small("-s", "none", *only, "--gate", "defaults")) == 1


def test_a_limit_makes_it_short(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(small("-s", "none", "--trials", "5", "--limit", "1", "--json")) == 0
    report = EvalReport.from_dict(json.loads(capfd.readouterr().out))
    assert report.perplexity is not None and report.perplexity.documents == 1
    assert report.retrieval is not None and len(report.retrieval.cells) == 1


def test_scales_of_another_model(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = [*small("--scales", "own"), "--model", "other"]
    assert run(other) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    [line] = [it for it in shown.err.splitlines() if it.startswith("error: ")]
    assert line.startswith("error: own: the scales belong to ") and "--force" in line
    assert not list(there.glob("*-eval*"))
    assert run([*other, "--force", "--json"]) == 0
    report = EvalReport.from_dict(json.loads(capfd.readouterr().out))
    assert report.arms[0].foreign
    [scales] = [it for it in report.self_checks[0].checks if it.name == "scales"]
    assert scales.status == "noted" and scales.detail.startswith("as asked for: ")


def test_scales_of_another_shape_are_refused_even_so(
    there: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*small("--scales", "own"), "--model", "gemma2", "--force"]) == 2
    assert capfd.readouterr().err.count("\n") == 1, "no bar, nor anything else"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to evaluate: give --scales FILE of kvquant calibrate, or --scheme NAME"),
        (["-s", "int8", "-s", "int8"], "two arms are called int8"),
        (["--scales", "own", "--scales", "./own"], "two arms are called own"),
        (["-s", "int5"], "unknown scheme 'int5'"),
        (["-s", "hf:int8"], "hf:int8: caches of Transformers are hf:quanto, hf:hqq, hf:fp8"),
        (["-s", "int4@"], "int4@: a scales file is to follow the @"),
        (["-s", "int4@nothing"], "nothing.safetensors does not exist"),
        (["-s", "none", "-t", "singel"], "there is no task 'singel': possible are single, "),
        (
            ["-s", "none", "-t", "single,repeat,single"],
            "single,repeat,single names something twice",
        ),
        (["-s", "none", "-l", "1k"], "a length of 1,024 is beyond the model's 512 positions"),
        (["-s", "none", "-l", "12x"], "'12x' in '12x' is no length"),
        (["-s", "none", "-l", "served"], "no scales say for which length they were made"),
        (["-s", "none", "-l", "88"], "a length of 88 tokens is too short"),
        (["-s", "none", "-l", "128"], "128 tokens are too few for the task 'single'"),
        (["-s", "none", "--answer-tokens", "1"], "there is room for 1: give --answer-tokens"),
        (["-s", "none", "--depths", "0,101"], "different percentages from 0 to 100"),
        (["-s", "none", "--depths", "5,5"], "different percentages from 0 to 100"),
        (["-s", "none", "--depths", "half"], "'half' is not a list such as 0,50,100"),
        (["-s", "none", "--block", "0"], "0 is not in the range x>=1"),
        (["-s", "none", "--documents", "-1"], "-1 is not in the range x>=0"),
        (["-s", "none", "--tokens", "255"], "256 tokens cannot be continued by 255"),
        (["-s", "none", "--data", "nothing.txt"], "nothing.txt"),
        (["-s", "none", "--haystack", "nothing.txt"], "nothing.txt"),
        (["-s", "none", "--chat"], "--chat"),
        (["-s", "none", "-r", "report.pdf"], "--report report.pdf: a name that ends in .html"),
        (["-s", "none", "-r", ""], "a name that ends in .html or .json is wanted"),
        (["-s", "none", "-r", "text.txt/report.json"], "cannot write text.txt/report.json"),
        (["-s", "none", "--gate", "nothing.toml"], "cannot read the gate nothing.toml"),
        (["-s", "none", "--gate", "text.txt"], "text.txt is no TOML file"),
        (["-s", "none", "--gate", "defaults", *NOTHING], "--gate has nothing to judge"),
        (["-s", "none", "--gate", "defaults", "--self-check"], "--gate has nothing to judge"),
        (["-s", "none", "--model", "nowhere"], "nowhere"),
        (["-s", "none", "--device", "abacus"], "no device 'abacus' on this machine"),
        (["-s", "none", "--adapter", "llama"], "adapter"),
    ],
    ids=lambda it: "_".join(it)[-40:] if isinstance(it, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    there: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(small(*arguments)) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if "rror: " in line]
    assert len(lines) == 1 and message in lines[0]
    assert not list(there.glob("*eval*")), "nothing is left behind"


def test_a_gate_for_an_arm_that_is_none(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gate = gate_file(there, '[arms."int4@own"]\nkl_mean = 0.1\n')
    assert run(small("-s", "int4", "--gate", gate)) == 2
    assert capfd.readouterr().err == (
        "error: gate.toml has thresholds for int4@own, which would not be evaluated: the arms are "
        "int4\n"
    )


def test_an_arm_with_scales_is_called_by_both(
    there: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(small("-s", "int4@own", "-s", "int4", *CHEAP, "--json")) == 0
    arms = EvalReport.from_dict(json.loads(capfd.readouterr().out)).arms
    assert [(it.name, it.scheme_class, it.scales) for it in arms] == [
        ("int4@own", "4-bit", "own"), ("int4", "4-bit", None),
    ]  # fmt: skip


def test_the_length_served_is_that_of_the_scales(
    there: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(small("--scales", "own", *CHEAP, "--json", lengths="served")) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["origin"]["lengths"] == [256]
    assert "length 256; give others with --lengths" in shown.err


@pytest.fixture
def interrupted() -> Any:
    """``interrupted(number)``: Ctrl-C at that call of the model, from now on."""
    handles: list[Any] = []

    def arm(number: int) -> None:
        calls = [0]

        def hook(module: Any, args: Any) -> None:
            calls[0] += type(module).__name__ == "LlamaForCausalLM"
            if calls[0] == number:
                raise KeyboardInterrupt

        handles.append(register_module_forward_pre_hook(hook))

    yield arm
    for handle in handles:
        handle.remove()


def test_an_interrupted_run_leaves_a_report_as_it_was_and_goes_on(
    there: Path, capfd: pytest.CaptureFixture[str], interrupted: Callable[[int], None]
) -> None:
    (there / "eval.json").write_text("older")
    arguments = small("-s", "none", "--trials", "4", "--report", "eval.json")
    interrupted(90)
    assert run(arguments) == 130
    assert (there / "eval.json").read_text() == "older"
    assert (there / "eval.partial" / "identity.json").is_file()
    assert "Traceback" not in capfd.readouterr().err
    assert run(arguments) == 0
    assert "continuing after 2 documents and " in capfd.readouterr().err
    assert not (there / "eval.partial").exists()
    first = json.loads((there / "eval.json").read_text())
    shutil.copy(there / "eval.json", there / "first.json")
    assert run([*arguments, "--no-resume"]) == 0
    second = json.loads((there / "eval.json").read_text())
    for report in (first, second):
        report["origin"] |= {"created": "", "command": ""}
    assert first == second
    assert run(["report", "first.json", "eval.json", "--json"]) == 0
