"""The commands as users run them: as processes, and in this process where only paths differ."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import load_scales
from kvquant.cli import run

KVQUANT = Path(sys.executable).with_name("kvquant")
SMALL = ["--context-length", "64", "--samples", "3", "--chunk", "48"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny: Any, save_tiny: Any) -> dict[str, Path]:
    """Directories: a tiny base, another model, two adapters of the base, text."""
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("models")
    found = {"base": save_tiny(tiny("llama"), root / "base")}
    found["other"] = save_tiny(tiny("llama", num_key_value_heads=4), root / "other")
    for name, seed in (("lora-a", 1), ("lora-b", 2)):
        config = LoraConfig(target_modules=["k_proj", "v_proj"], r=2, init_lora_weights=False)
        model = tiny("llama")
        model.name_or_path = str(found["base"])
        torch.manual_seed(seed)
        get_peft_model(model, config).save_pretrained(root / name)
        found[name] = root / name
    found["text"] = root / "text.txt"
    found["text"].write_text("The quick brown fox jumps over the lazy dog. " * 40)
    return found


def kvquant(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`kvquant` as a process."""
    return subprocess.run(
        [KVQUANT, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options
    )


def calibrate(model: Path, output: Path, *more: object) -> list[str]:
    """Arguments of a small calibration."""
    text = model.parent / "text.txt"
    command = ["calibrate", "--model", model, "--output", output, "--data", text, *SMALL, *more]
    return list(map(str, command))


def test_help_answers_without_torch() -> None:
    code = (
        "import sys; from kvquant.cli import run; code = run(['--help']);"
        "print('torch' in sys.modules, 'transformers' in sys.modules, code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False 0"
    for command in ("calibrate", "drift", "inspect", "merge", "solve"):
        assert command in done.stdout


def test_the_whole_way_as_processes(models: dict[str, Path], tmp_path: Path) -> None:
    done = kvquant(*calibrate(models["base"], tmp_path / "base"))
    assert done.returncode == 0, done.stderr
    assert "written" in done.stdout
    assert re.findall(r"^key mean: (?:fixed|turned with position) in .*", done.stdout, re.M)
    assert "1 row read" in done.stderr
    done = kvquant(*calibrate(models["base"], tmp_path / "ft", "--adapter", models["lora-a"]))
    assert done.returncode == 0, done.stderr

    files = [tmp_path / "base.stats", tmp_path / "ft.stats"]
    loose = kvquant("drift", *files, "--max-loss", 99, "--max-clipped", 1, "--json")
    assert loose.returncode == 0, loose.stderr
    assert json.loads(loose.stdout)["safe"] is True
    tight = kvquant("drift", *files, "--max-loss", 0, "--format", "int8")
    assert tight.returncode == 1, tight.stderr
    assert "recalibrate" in tight.stdout.lower()

    solved = kvquant(
        "solve", tmp_path / "ft", "--format", "int8", "--granularity", "per-channel",
        "--output", tmp_path / "int8", "--json",
    )  # fmt: skip
    assert solved.returncode == 0, solved.stderr
    scheme = json.loads(solved.stdout)["scales"]["scheme"]
    assert scheme["key"] == {"format": "int8", "granularity": "per-channel", "symmetric": True}

    merged = kvquant("merge", *files[:1] * 2, "--output", tmp_path / "twice")
    assert merged.returncode == 0, merged.stderr
    assert "384 tokens from 2 files" in merged.stdout

    shown = kvquant("inspect", tmp_path / "ft", "--plot", tmp_path / "ft.png")
    assert shown.returncode == 0, shown.stderr
    assert "fp8_e4m3 per-tensor" in shown.stdout
    assert re.findall(r"^key mean: (?:fixed|turned with position) in .*", shown.stdout, re.M)
    assert (tmp_path / "ft.png").read_bytes()[:4] == b"\x89PNG"


def test_json_is_the_only_thing_on_stdout(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*calibrate(models["base"], tmp_path / "out"), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["files"] == [str(tmp_path / "out.safetensors"), str(tmp_path / "out.stats")]
    provenance = result["scales"]["provenance"]
    assert provenance["tokens"] == 192
    assert provenance["longest_position"] == 64
    assert provenance["corpora"][0]["tokens_used"] == 192
    assert result["members"]["base"]["layers"].keys() == {"0", "1"}
    for index, layer in load_scales(tmp_path / "out").layers.items():
        shown = result["scales"]["layers"][str(index)]
        assert layer.key.turned is not None
        assert shown["key"]["turned_pairs"] == layer.key.turned.nonzero().flatten().tolist()
        assert shown["value"]["turned_pairs"] is None


@pytest.mark.parametrize("command", ["calibrate", "solve", "drift"])
def test_help_lists_what_calibration_finds_scales_for(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "fp8 or one of fp8_e4m3, fp8_e5m2, int8, int4." in text
    assert "What shares a scale: per-tensor, per-head, per-channel." in text
    assert not any(word in text for word in ("int3", "bf16", "per-token", "per-group"))


def test_scales_are_those_of_the_model_they_were_measured_on(
    models: dict[str, Path], tmp_path: Path, tiny: Any
) -> None:
    from kvquant.errors import FingerprintError

    assert run(calibrate(models["base"], tmp_path / "out")) == 0
    model = tiny("llama")
    scales = load_scales(tmp_path / "out", model)
    assert sorted(scales.layers) == [0, 1]
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.01)
    with pytest.raises(FingerprintError, match="weights differ"):
        load_scales(tmp_path / "out", model)
    with pytest.warns(UserWarning, match="forced"):
        load_scales(tmp_path / "out", model, force=True)


def test_shared_scales_cover_base_and_adapters(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapters = ["--adapter", models["lora-a"], "--adapter", models["lora-b"]]
    assert run([*calibrate(models["base"], tmp_path / "s", *adapters, "--shared"), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert list(result["members"]) == ["base", "lora-a", "lora-b"]
    assert [cost["name"] for cost in result["sharing"]] == ["base", "lora-a", "lora-b"]
    for layer in ("0", "1"):
        for slot in ("key", "value"):
            amax = max(m["layers"][layer][slot]["amax"] for m in result["members"].values())
            shared = result["scales"]["layers"][layer][slot]["scale"][0][0]
            assert shared == pytest.approx(amax / 448, rel=1e-6)
    assert len(result["scales"]["provenance"]["fingerprints"]) == 3
    named = [m["provenance"]["adapters"] for m in result["members"].values()]
    assert named == [[], [str(models["lora-a"])], [str(models["lora-b"])]]

    members = [tmp_path / f"s.{name}.stats" for name in ("base", "lora-a", "lora-b")]
    assert run(["solve", *map(str, members), "--output", str(tmp_path / "again")]) == 0
    again, shared = load_scales(tmp_path / "again"), load_scales(tmp_path / "s")
    assert again.layers == shared.layers


def test_several_adapters_without_shared_act_together(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapters = ["--adapter", models["lora-a"], "--adapter", models["lora-b"]]
    assert run([*calibrate(models["base"], tmp_path / "both", *adapters), "--json"]) == 0
    capture = capfd.readouterr()
    result = json.loads(capture.out)
    assert list(result["members"]) == ["lora-a+lora-b"]
    assert "active together" in capture.err
    fingerprints = result["scales"]["provenance"]["fingerprints"]
    assert [len(f["adapters"]) for f in fingerprints] == [2]


def bad_inputs(models: dict[str, Path], tmp_path: Path) -> dict[str, tuple[list[object], str]]:
    """Arguments that must be refused, and a part of the line that says why."""
    broken = tmp_path / "broken.stats"
    broken.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    empty = tmp_path / "empty.txt"
    empty.write_text("  \n ")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(bytes(range(256)) * 8)
    base, out = models["base"], tmp_path / "out"
    return {
        "no such model": (["calibrate", "-m", tmp_path / "nothing", "-o", out], "nothing"),
        "a directory that is no model": (["calibrate", "-m", tmp_path, "-o", out], "config.json"),
        "unknown format": (
            [*calibrate(base, out), "--format", "int5"],
            "unknown format 'int5': possible are fp8_e4m3, fp8_e5m2, int8, int4 (fp8 = fp8_e4m3)",
        ),
        "unknown format of the values": (
            ["solve", broken, "-o", out, "--value-format", "int5"],
            "unknown format 'int5': possible are fp8_e4m3, fp8_e5m2, int8, int4 (fp8 = fp8_e4m3)",
        ),
        "format without scales": (
            [*calibrate(base, out), "--key-format", "bf16"],
            "bf16 has no scales and needs no calibration; formats with calibrated scales are "
            "fp8_e4m3, fp8_e5m2, int8, int4",
        ),
        "format whose scales are not calibrated": (
            ["solve", broken, "-o", out, "--format", "int3"],
            "int3 scales are computed while serving, with the means that every scales file has; "
            "formats with calibrated scales are fp8_e4m3, fp8_e5m2, int8, int4",
        ),
        "granularity of serving": (
            [*calibrate(base, out), "--granularity", "token"],
            "per-token scales are computed while serving and need no calibration; calibrated "
            "scales are per-tensor, per-head, per-channel",
        ),
        "groups": (
            ["drift", broken, broken, "--value-granularity", "per-group"],
            "per-group scales are computed while serving",
        ),
        "unknown granularity": (
            [*calibrate(base, out), "--granularity", "per-row"],
            "unknown granularity 'per-row': possible are per-tensor, per-head, per-channel",
        ),
        "fp8 with zero point": ([*calibrate(base, out), "--asymmetric"], "int8, int4"),
        "context too long": ([*calibrate(base, out), "-c", "513"], "512"),
        "layer that is not there": ([*calibrate(base, out), "--skip-layers", "7"], "0 to 1"),
        "all layers skipped": ([*calibrate(base, out), "--skip-layers", "0-1"], "nothing"),
        "not a layer": ([*calibrate(base, out), "--skip-layers", "x"], "0,1,4-7"),
        "layers without end": ([*calibrate(base, out), "--skip-layers", "0-"], "0,1,4-7"),
        "layers backwards": ([*calibrate(base, out), "--skip-layers", "1-0"], "0,1,4-7"),
        "too many layers": ([*calibrate(base, out), "--skip-layers", "0-99999999999"], "0,1,4-7"),
        "unused percentile": ([*calibrate(base, out), "--percentile", "99"], "not with amax"),
        "output is a directory": ([*calibrate(base, out), "-o", f"{tmp_path}/"], "names no file"),
        "output without a name": ([*calibrate(base, out), "-o", ""], "names no file"),
        "output name too long": ([*calibrate(base, out), "-o", tmp_path / ("x" * 250)], "too long"),
        "neither scales nor statistics": (
            ["inspect", out], f"{out}.safetensors nor {out}.stats",
        ),
        "shared without adapter": ([*calibrate(base, out), "--shared"], "--adapter"),
        "adapter of another base": (
            [*calibrate(models["other"], out), "-a", models["lora-a"]], "lora-a",
        ),
        "mps": ([*calibrate(base, out), "--device", "mps"], "--device cpu"),
        "no such device": ([*calibrate(base, out), "--device", "cuda:9"], "cuda:9"),
        "no text": ([*calibrate(base, out), "-d", empty], "no usable tokens"),
        "binary text": ([*calibrate(base, out), "-d", binary], "binary"),
        "missing data": ([*calibrate(base, out), "-d", tmp_path / "gone.txt"], "gone.txt"),
        "no chat template": ([*calibrate(base, out), "--chat"], "chat template"),
        "broken statistics": (["inspect", broken], "broken.stats"),
        "missing statistics": (["drift", tmp_path / "a.stats", tmp_path / "b.stats"], "a.stats"),
        "no percentile": (["solve", broken, "-o", out, "--percentile", "3"], "percentile"),
        "output is no place": (
            ["calibrate", "-m", base, "-d", models["text"], *SMALL, "-o", models["text"] / "x"],
            "text.txt",
        ),
        "missing option": (["calibrate", "-o", out], "--model"),
        "unknown option": (["calibrate", "--modle", base], "--modle"),
    }  # fmt: skip


def test_bad_input_is_one_line_and_exit_code_2(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, (arguments, reason) in bad_inputs(models, tmp_path).items():
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        assert run(list(map(str, arguments))) == 2, name
        shown = capfd.readouterr()
        assert shown.out == "", name
        last = shown.err.strip().splitlines()[-1]
        assert last.lower().startswith("error: "), name
        assert reason in last, f"{name}: {last}"
        if reason.startswith("unknown "):
            assert last.endswith(reason), f"{name}: {last}"  # and nothing else is possible
        assert "Traceback" not in shown.err, name
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, name


@pytest.mark.parametrize(
    ("text", "samples", "warned"),
    [("hello", 2, True), ("x" * 63, 2, True), ("x" * 64, 2, False), ("x" * 500, 2, False)],
)
def test_a_text_that_is_far_too_short_is_worth_a_warning(
    models: dict[str, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    text: str,
    samples: int,
    warned: bool,
) -> None:
    (tmp_path / "short.txt").write_text(text)
    arguments = calibrate(models["base"], tmp_path / "out", "--data", tmp_path / "short.txt")
    assert run([*arguments, "--samples", str(samples), "--json"]) == 0
    shown = capfd.readouterr()
    json.loads(shown.out)
    lines = [line for line in shown.err.splitlines() if line.startswith("warning: ")]
    expected = (
        f"warning: the text has only {len(text)} of the 128 tokens asked for, and scales from so "
        "few may clip what you serve: give more text with --data"
    )
    assert lines == ([expected] if warned else [])


def test_inspect_shows_what_a_prefix_holds(
    models: dict[str, Path], tmp_path: Path, tiny: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    from kvquant import QuantizedCache
    from kvquant.cache.transformers_compat import cache_argument
    from kvquant.fingerprint import fingerprint

    assert run(calibrate(models["base"], tmp_path / "scales")) == 0
    model = tiny("llama")
    for name, scales, rows in (("plain", None, 1), ("calibrated", tmp_path / "scales", 2)):
        cache = QuantizedCache.from_model(model, "int4", scales, sink_tokens=0)
        ids = torch.arange(3, 26).expand(rows, -1)
        with torch.no_grad():
            model(ids, **{cache_argument(model.get_decoder()): cache})
        cache.save(tmp_path / name, model)
    capfd.readouterr()
    assert run(["inspect", str(tmp_path / "plain")]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    for words in (
        "a quantized prefix",
        f"fits {fingerprint(model)}",
        "cache llama cache: 2 x full",
        "dtype float32",
        "scheme K int4 per-token asymmetric centered rotated, V int4",
        "tokens 23 in 1 row │",
        # 2 layers, 2 heads, keys and values, of 16 channels.
        f"size {23 * 2 * 2 * 2 * (8 + 4):,} bytes",
    ):
        assert words in shown, shown
    assert "scales" not in shown
    assert run(["inspect", str(tmp_path / "calibrated.safetensors")]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "scales of base" in shown and "tokens 23 in each of 2 rows" in shown
    assert run(["inspect", str(tmp_path / "plain"), "--json"]) == 0
    values = json.loads(capfd.readouterr().out)
    assert (values["kind"], values["rows"], values["tokens"]) == ("prefix", 1, 23)
    assert values["fingerprint"] == {**fingerprint(model).to_dict(), "adapters": []}
    assert run(["inspect", str(tmp_path / "plain"), "--plot", str(tmp_path / "x.png")]) == 2
    assert capfd.readouterr().err == (
        f"error: {tmp_path}/plain.safetensors is a prefix: --plot draws scales and statistics\n"
    )
    assert not (tmp_path / "x.png").exists()


def test_a_damaged_prefix_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    for kvquant_entry in ('{"version": 2, "kind": "prefix"}', '{"version": 9, "kind": "prefix"}'):
        save_file({}, tmp_path / "p.safetensors", metadata={"kvquant": kvquant_entry})
        assert run(["inspect", str(tmp_path / "p")]) == 2
        shown = capfd.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        assert shown.err.startswith(f"error: {tmp_path}/p.safetensors ")


def test_a_full_disk_keeps_the_old_output(models: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run(calibrate(models["base"], output)) == 0
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    # A limit on the size of files is what a full disk looks like, and needs no file system.
    limited = ["bash", "-c", 'ulimit -f 8; trap "" XFSZ; exec "$0" "$@"', str(KVQUANT)]
    done = subprocess.run(
        [*limited, *calibrate(models["base"], output, "--format", "int8")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: cannot write")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old


def test_interrupted_runs_leave_the_old_output_and_go_on(
    models: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments = calibrate(models["base"], output, "--samples", "7", "--json")
    whole = json.loads(kvquant(*arguments).stdout)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    starter = (
        "import sys, os, signal; import calib.resume as resume; resume.CHECKPOINT_SECONDS = 0.0\n"
        "keep = resume.Resume.keep\n"
        "def interrupted(self, blocks, snapshot):\n"
        "    keep(self, blocks, snapshot)\n"
        "    if blocks == 4: os.kill(os.getpid(), signal.SIGINT)\n"
        "resume.Resume.keep = interrupted\n"
        "from kvquant.cli import run; sys.exit(run(sys.argv[1:]))\n"
    )
    stopped = subprocess.run(
        [sys.executable, "-c", starter, *arguments], capture_output=True, text=True, timeout=300
    )
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: left[name] for name in old} == old
    assert left.keys() - old.keys() == {"out.partial"}

    resumed = kvquant(*arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing after 4 blocks" in resumed.stderr
    again = json.loads(resumed.stdout)
    assert again["scales"] == whole["scales"]
    for result in (whole, again):
        for layer in result["members"]["base"]["layers"].values():
            for slot in layer.values():
                slot["rms"] = pytest.approx(slot["rms"])  # sums are added up in another order
    assert again["members"] == whole["members"]
    assert {path.name for path in tmp_path.iterdir()} == old.keys()


def test_an_unfinished_file_that_is_no_good_is_left_out(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(calibrate(models["base"], tmp_path / "out")) == 0
    stats = (tmp_path / "out.stats").read_bytes()
    for name, content in (("broken", stats[:5000]), ("foreign", stats)):
        (tmp_path / f"{name}.partial").write_bytes(content)
        assert run(calibrate(models["lora-a"], tmp_path / name)) == 0
        assert f"starting anew: {tmp_path / name}.partial" in capfd.readouterr().err
        assert not (tmp_path / f"{name}.partial").exists()


def test_a_calibration_that_cannot_be_saved_keeps_what_it_measured(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calib.resume.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("kvquant.storage.check_writable", lambda path: None)
    (tmp_path / "out.stats").mkdir()
    assert run(calibrate(models["base"], tmp_path / "out")) == 2
    assert (tmp_path / "out.partial").is_file()
    (tmp_path / "out.stats").rmdir()
    assert run(calibrate(models["base"], tmp_path / "out")) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out.stats", "out.safetensors"}


def test_merging_one_text_twice_is_worth_a_warning(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(calibrate(models["base"], tmp_path / "a")) == 0
    assert run([*calibrate(models["base"], tmp_path / "b"), "--samples", "2"]) == 0
    capfd.readouterr()
    for other, warned in (("a", True), ("b", False)):
        names = [str(tmp_path / name) for name in ("a", other)]
        assert run(["merge", *names, "-o", str(tmp_path / "whole")]) == 0
        assert ("warning: parts that read the same text" in capfd.readouterr().err) is warned


def test_the_home_directory_of_an_output_is_found(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(calibrate(models["base"], Path("~/out"))) == 0
    assert (tmp_path / "out.stats").is_file()
