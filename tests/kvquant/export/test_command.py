"""`kvquant export` and `kvquant verify` as users run them: as processes, and in this one."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvquant.cli import run
from kvquant.export.targets import target_names

KVQUANT = Path(sys.executable).with_name("kvquant")
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
SHORT = ["-c", "64", "-n", "2"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def models(tiny: Any, save_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models, an adapter, a text, and what `kvquant calibrate` makes of them."""
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("models")
    (root / "text.txt").write_text(TEXT)
    for name in ("llama", "gpt2", "deepseek"):
        save_tiny(tiny(name), root / name)
    model = tiny("llama")
    model.name_or_path = str(root / "llama")
    torch.manual_seed(1)
    config = LoraConfig(target_modules=["k_proj", "v_proj"], r=2, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(root / "lora")
    for name, arguments in {
        "llama-kv": ["llama"],
        "gpt2-kv": ["gpt2"],
        "deepseek-kv": ["deepseek"],
        "lora-kv": ["lora"],
        "shared-kv": ["llama", "-a", root / "lora", "--shared"],
        "int8-kv": ["llama", "--format", "int8"],
        "fine-kv": ["llama", "--granularity", "per-channel"],
    }.items():
        model_name, *more = arguments
        given = ["-m", root / str(model_name), "-o", root / name, "-d", root / "text.txt"]
        assert run(["calibrate", *map(str, (*given, *SHORT, *more))]) == 0, name
    return root


@pytest.fixture(autouse=True)
def inside(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own directory, with links to what there is: nothing may change in it."""
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def left(directory: Path) -> list[str]:
    """What a test has made."""
    return sorted(path.name for path in directory.iterdir() if not path.is_symlink())


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def process(line: str) -> subprocess.CompletedProcess[str]:
    command = [str(KVQUANT), *line.split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def typed(line: str) -> int:
    """The exit code of a command, run in this process."""
    return run(line.split())


# As processes


@pytest.mark.parametrize("command", ["export", "verify"])
def test_it_is_a_command_and_helps_without_torch(command: str) -> None:
    code = (
        f"import sys; from kvquant.cli import run; code = run(['{command}', '--help']);"
        "print('torch' in sys.modules, code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False 0"
    assert "Exit code 0: would be served as meant; 1: would not" in done.stdout


def test_list_and_verify_need_no_torch(inside: Path) -> None:
    assert run(["export", "-m", "llama", "-s", "llama-kv", "-e", "vllm", "-o", "out"]) == 0
    code = (
        "import sys; from kvquant.cli import run; first = run(['export', '--list']);"
        "second = run(['verify', 'out', '--engine', 'vllm']);"
        "print('torch' in sys.modules, first, second)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False 0 0"


def test_the_whole_way(inside: Path, models: Path) -> None:
    before = digests(models)
    done = process("export -m llama -s llama-kv --engine all -o out")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["linking 1 weight file (363.9 kB)"]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("out: 8 files, weights by hard link, 0.0")
    assert "vllm: would load scales of 2 layers" in lines
    assert "  vllm serve out --kv-cache-dtype fp8" in lines
    assert left(inside) == ["out"]

    done = process("verify out --engine vllm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "vllm: out: would be served as meant"
    shards = json.loads((inside / "out" / INDEX).read_text())["weight_map"]
    scales = inside / "out" / shards["model.layers.0.self_attn.k_scale"]
    held = load_file(scales)
    del held["model.layers.1.self_attn.v_scale"]
    save_file(held, scales, metadata={"format": "pt"})
    done = process("verify out --engine vllm")
    assert done.returncode == 1, done.stderr
    assert "✗" in done.stdout and "v_scale" in done.stdout
    assert "wrong" in done.stdout.splitlines()[-1]
    assert digests(models) == before


def test_a_terminated_export_leaves_nothing(inside: Path, models: Path) -> None:
    before = digests(models)
    line = "export -m lora -s lora-kv --merge-adapter -e vllm -o out"
    command = [str(KVQUANT), *line.split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert child.stderr.readline().startswith("merging ")
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=120)
    assert child.returncode == 143
    assert left(inside) == []
    assert digests(models) == before


# What is printed


def test_list(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "--list"]) == 0
    table = capfd.readouterr().out
    assert all(f" {name} " in table for name in target_names())
    assert run(["export", "--list", "--json"]) == 0
    values = json.loads(capfd.readouterr().out)
    assert [each["engine"] for each in values] == target_names()


def test_json_is_the_only_thing_on_stdout(inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("export -m llama -s llama-kv -e vllm -e sglang -o out --json") == 0
    values = json.loads(capfd.readouterr().out)
    assert (values["ok"], values["directory"], values["weights"]) == (True, "out", "hard link")
    assert values["files"] == sorted(path.name for path in (inside / "out").iterdir())
    assert values["new_bytes"] < 30_000
    assert [(each["name"], each["layers"], each["ok"]) for each in values["engines"]] == [
        ("vllm", 2, True),
        ("sglang", 2, True),
    ]
    assert len(values["tensors"]) == 4
    assert (values["folded"], values["sidecar"]) == (None, None)

    assert run(["verify", "out", "-e", "sglang", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["ok"], report["engine"], report["directory"]) == (True, "sglang", "out")
    assert [layer["layer"] for layer in report["layers"]] == [0, 1]

    assert run(["verify", "llama", "-e", "vllm", "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["ok"] is False
    assert any(finding["serious"] for finding in report["findings"])


def test_an_adapter_merged(inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("export -m lora -s lora-kv --merge-adapter -e vllm -o out --json") == 0
    values = json.loads(capfd.readouterr().out)
    assert (values["ok"], values["weights"], values["directory"]) == (True, "copy", "out")
    assert values["new_bytes"] > 363_000
    assert left(inside) == ["out"]


def test_an_engine_that_writes_nothing(inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("export -m llama -s int8-kv -e lmdeploy") == 0
    assert "  lmdeploy serve api_server MODEL --quant-policy 8" in capfd.readouterr().out
    assert left(inside) == []


def test_who_is_left_out_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("export -m gpt2 -s gpt2-kv -e all -o out") == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "vllm: would load scales of 2 layers" in shown
    assert "tgi: would load scales of 2 layers" in shown
    assert "transformers: left out, compressed-tensors knows a cache by k_proj" in shown
    assert "sglang: left out, it stops at names that other engines need" in shown
    assert typed("verify out -e vllm") == 0
    assert typed("verify out -e sglang") == 1


def test_a_directory_that_one_of_two_cannot_serve(capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("export -m gpt2 -s gpt2-kv -e sglang -e tgi -o out") == 1
    shown = capfd.readouterr().out
    assert "sglang: WOULD NOT serve as meant; scales of " in shown
    assert "tgi: would load scales of 2 layers" in shown


def test_shared_scales_and_per_head(inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("export -m llama -a lora -s shared-kv -e vllm -o shared") == 0
    assert typed("export -m llama -s fine-kv -e vllm --per-head -o heads") == 0
    shards = json.loads((inside / "heads" / INDEX).read_text())["weight_map"]
    name = "model.layers.1.self_attn.v_scale"
    assert load_file(inside / "heads" / shards[name])[name].shape == (2, 1, 1)
    capfd.readouterr()
    assert typed("export -m llama -s fine-kv -e all --per-head -o all") == 2
    assert "leave --per-head out" in capfd.readouterr().err
    assert left(inside) == ["heads", "shared"]


def test_folding(inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("export -m llama -e vllm -d text.txt --fold int8 -o int8") == 0
    shown = capfd.readouterr()
    assert "folded for int8: " in shown.out
    assert "vllm serve int8 --kv-cache-dtype int8_per_token_head" in shown.out
    assert "reading it back" in shown.err
    more = "--fold fp8 -s fine-kv -o fp8 --json"
    assert typed(f"export -m llama -e vllm -d text.txt {more}") == 0
    values = json.loads(capfd.readouterr().out)
    assert values["ok"] and len(values["tensors"]) == 4
    assert values["folded"]["quantizer"] == "fp8"
    assert run(["verify", "fp8", "-e", "vllm"]) == 0
    assert left(inside) == ["fp8", "int8"]


def test_a_sidecar(inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(inside / "lora", inside / "mine")
    assert typed("export -m mine -s lora-kv --sidecar") == 0
    assert capfd.readouterr().out.splitlines()[0] == "written: mine/kvquant_scales.json"
    assert sorted(json.loads((inside / "mine" / "kvquant_scales.json").read_text())["layers"]) == [
        "0",
        "1",
    ]
    assert typed("export -m mine -s llama-kv --sidecar --json") == 2
    assert capfd.readouterr().out == ""


def test_forced_scales(inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("export -m llama -s lora-kv -e vllm -o out") == 2
    assert typed("export -m llama -s lora-kv -e vllm -o out --force") == 0
    shown = capfd.readouterr()
    assert "forced: the scales belong to " in shown.err
    assert "  - forced: the scales belong to " in shown.out


def test_a_copy(inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("export -m llama -s llama-kv -e vllm -o out --copy --json") == 0
    values = json.loads(capfd.readouterr().out)
    assert values["weights"] == "copy"
    assert not (inside / "out" / "model-00001-of-00002.safetensors").samefile(
        inside / "llama" / "model.safetensors"
    )


def test_run_needs_transformers(capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("export -m llama -s llama-kv -e vllm -o out") == 0
    assert typed("verify out -e vllm --run") == 2
    assert "only Transformers runs here, not vllm" in capfd.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_run(capfd: pytest.CaptureFixture[str], as_json: bool) -> None:
    """Exit code 1 where Transformers passes the scales by, and 0 where it uses them."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import transformers

    used = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
    assert typed("export -m llama -s llama-kv -e transformers -o out") == 0
    capfd.readouterr()
    option = " --json" if as_json else ""
    assert typed(f"verify out -e transformers --run{option}") == (0 if used else 1)
    shown = capfd.readouterr().out
    if as_json:
        values = json.loads(shown)
        assert values["ok"] is True
        assert values["run"]["ok"] is used
    else:
        assert shown.splitlines()[-1].startswith("the scales are " + ("used" if used else "NOT"))


# Bad input: one line, code 2, nothing left behind

OUT = ["-o", "out"]
LLAMA = ["-m", "llama", "-s", "llama-kv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to export: name the model with --model (--list shows engines)"),
        (["-m", "llama", "-e", "vllm", *OUT], "name the scales with --scales: kvquant calibrate"),
        (["-m", "llama", "-e", "vllm", "--fold", "fp8", *OUT], "name the scales with --scales"),
        ([*LLAMA, *OUT], "name who is to read it with --engine: --list shows them, or all"),
        ([*LLAMA, "-e", "vllm"], "this export writes a directory: name it with --output"),
        ([*LLAMA, "-e", "vlm", *OUT], "unknown engine 'vlm': did you mean vllm"),
        ([*LLAMA, "-e", "all", "-e", "vlm", *OUT], "unknown engine 'vlm': did you mean vllm"),
        ([*LLAMA, "-e", "all", "-e", "sglang-json", *OUT], "export for sglang-json apart"),
        ([*LLAMA, "-e", "vllm", "-d", "text.txt", *OUT], "--data is text to fold by"),
        (
            [*LLAMA, "-e", "vllm", "--fold", "int4", *OUT],
            "an engine's own int4 computes its scales while serving: leave --scales out, or --fold "
            "fp8",
        ),
        ([*LLAMA, "-e", "vllm", "--fold", "int2", *OUT], "'int2' is not one of 'fp8', 'int8'"),
        ([*LLAMA, "-e", "sglang-json", "--tensor-parallel", "0", *OUT], "0 is not in the range"),
        (["-m", "llama", "-s", "nothing", "-e", "vllm", *OUT], "nothing.safetensors does not"),
        (["-m", "llama", "-s", "text.txt", "-e", "vllm", *OUT], "text.txt cannot be read"),
        (["-m", "llama", "-s", "llama-kv.stats", "-e", "vllm", *OUT], "is a stats file, a scales"),
        (["-m", "./nothing", "-s", "llama-kv", "-e", "vllm", *OUT], "./nothing"),
        (["-m", "gpt2", "-s", "llama-kv", "-e", "vllm", *OUT], "the scales belong to "),
        (["-m", "llama", "-s", "lora-kv", "-e", "vllm", *OUT], "adapters differ"),
        (["-m", "lora", "-s", "lora-kv", "-e", "vllm", *OUT], "Without --merge-adapter the base"),
        (["-m", "lora", "-s", "llama-kv", "-e", "vllm", *OUT], "which covers 0 of 1 adapter"),
        ([*LLAMA, "--merge-adapter", "-e", "vllm", *OUT], "llama has no adapter to merge"),
        ([*LLAMA, "-a", "gpt2", "-e", "vllm", *OUT], "gpt2 is no PEFT adapter"),
        ([*LLAMA, "--base", "gpt2", "-e", "vllm", *OUT], "--base goes with an adapter directory"),
        (["-m", "llama", "-s", "int8-kv", "-e", "vllm", *OUT], "int8_per_token_head"),
        (["-m", "llama", "-s", "int8-kv", "-e", "all", *OUT], "no engine can read this: vllm: "),
        ([*LLAMA, "-e", "llama.cpp"], "llama.cpp has nothing like keys as fp8_e4m3"),
        ([*LLAMA, "-e", "lmdeploy", *OUT], "nothing would be written to out for LMDeploy"),
        (["-m", "deepseek", "-s", "deepseek-kv", "-e", "tgi", *OUT], "caches a latent (MLA)"),
        ([*LLAMA, "-e", "vllm", "-o", "llama"], "is or lies in the model's own directory"),
        ([*LLAMA, "-e", "vllm", "-o", "llama/out"], "is or lies in the model's own directory"),
        ([*LLAMA, "-e", "vllm", "-o", "lora"], "lora is not empty (3 entries)"),
        ([*LLAMA, "-e", "vllm", "-o", "text.txt"], "text.txt is no directory to write to"),
        ([*LLAMA, "-e", "vllm", "-o", "text.txt/out"], "Not a directory"),
        ([*LLAMA, "-e", "vllm", "-o", "/proc/out"], "cannot write /proc/out: "),
        (["-m", "lora", "-s", "lora-kv", "--merge-adapter", "-e", "vllm", "-o", "/proc/out"],
         "cannot write /proc/out: "),
        (["-m", "lora", "-s", "lora-kv", "--sidecar", "-e", "vllm"], "leave --engine out"),
        (["-m", "lora", "-s", "lora-kv", "--sidecar", *OUT], "leave --output out"),
        (["-m", "lora", "-s", "lora-kv", "--sidecar", "--merge-adapter"], "leave --merge-adapter"),
        (["-m", "lora", "-s", "lora-kv", "--sidecar", "--fold", "int8"], "leave --fold out"),
        (["-m", "lora", "-s", "lora-kv", "--sidecar", "--copy"], "leave --copy out"),
        (["-m", "lora", "-s", "lora-kv", "--sidecar", "--per-head"], "leave --per-head out"),
        ([*LLAMA, "--sidecar"], "a sidecar belongs to one adapter, 0 are given"),
        (["-m", "lora", "-s", "llama-kv", "--sidecar"], "adapters differ"),
        (["-m", "lora", "--sidecar"], "name the scales with --scales"),
    ],
)  # fmt: skip
def test_bad_input_of_export(
    models: Path,
    inside: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    before = digests(models)
    assert run(["export", *arguments]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    errors = [line for line in shown.err.splitlines() if "rror: " in line]
    assert len(errors) == 1 and message in errors[0], shown.err
    assert left(inside) == []
    assert digests(models) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama"], "Missing option '--engine'"),
        (["llama", "-e", "vlm"], "no engine 'vlm': did you mean vllm"),
        (["llama", "-e", "all"], "no engine 'all'"),
        (["llama", "-e", "llama.cpp"], "llama.cpp computes scales itself"),
        (["llama", "-e", "lmdeploy"], "kvquant export --engine lmdeploy says what to launch"),
        (["nothing", "-e", "vllm"], "there is no directory nothing to verify"),
        (["text.txt", "-e", "vllm"], "there is no directory text.txt to verify"),
    ],
)
def test_bad_input_of_verify(
    capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(["verify", *arguments]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    errors = [line for line in shown.err.splitlines() if "rror: " in line]
    assert len(errors) == 1 and message in errors[0], shown.err


def quantized(inside: Path, block: dict[str, Any]) -> None:
    """The Llama again, with the config of one whose weights are quantized."""
    shutil.copytree(inside / "llama", inside / "quantized")
    config = json.loads((inside / "quantized" / "config.json").read_text())
    config["quantization_config"] = block
    (inside / "quantized" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "transformers"])
@pytest.mark.parametrize(
    "block",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "mxfp4"},
    ],
    ids=lambda block: str(block["quant_method"]),
)
def test_bases_beside_whose_weights_no_scales_are_read(
    inside: Path, capfd: pytest.CaptureFixture[str], block: dict[str, Any], engine: str
) -> None:
    quantized(inside, block)
    assert typed(f"export -m quantized -s llama-kv -e {engine} -o out") == 2
    shown = capfd.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith(f"error: quantized is quantized with {block['quant_method']}: ")
    assert "export the unquantized model" in line
    assert (shown.out, left(inside)) == ("", ["quantized"])


def test_a_base_that_cannot_be_loaded_here(inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """TGI reads scales beside any weights; whether they are those of the model is to be seen."""
    quantized(inside, {"quant_method": "gptq", "bits": 4})
    assert typed("export -m quantized -s llama-kv -e all -o out") == 2
    assert capfd.readouterr().err.rstrip().endswith("--force takes them unseen")
    assert left(inside) == ["quantized"]
    assert typed("export -m quantized -s llama-kv -e all -o out --force") == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "tgi: would load scales of 2 layers" in shown
    assert "vllm: left out, quantized is quantized with gptq" in shown
    assert "- forced: whether the scales belong to quantized was not looked at" in shown


def test_a_gguf_file(inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (inside / "model.gguf").write_bytes(b"GGUF" + bytes(64))
    assert typed("export -m model.gguf -s llama-kv -e vllm -o out") == 2
    assert "model.gguf is a GGUF file, which only llama.cpp serves" in capfd.readouterr().err
    assert left(inside) == ["model.gguf"]


def test_an_empty_directory_may_be_there(inside: Path) -> None:
    (inside / "out").mkdir()
    assert run(["export", *LLAMA, "-e", "vllm", *OUT]) == 0
    assert run(["export", *LLAMA, "-e", "vllm", *OUT]) == 2  # and now it is not empty


@pytest.mark.parametrize("merge", ["", "--merge-adapter"])
def test_a_disk_that_fills_up_half_way(
    inside: Path, models: Path, capfd: pytest.CaptureFixture[str], merge: str
) -> None:
    """A file size limit ends a write half-way, as a full disk does."""
    before, limits = digests(models), resource.getrlimit(resource.RLIMIT_FSIZE)
    name = "lora" if merge else "llama"
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        code = typed(f"export -m {name} -s {name}-kv -e vllm -o out --copy {merge}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    line = capfd.readouterr().err.splitlines()[-1]
    what = "the merged model beside the output" if merge else "out"
    assert line.startswith(f"error: cannot write {what}: ") and "File too large" in line
    assert left(inside) == []
    assert digests(models) == before
