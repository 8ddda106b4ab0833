from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvquant.capacity.ask import DEFAULT_FORMATS, Question, skipped_layers
from kvquant.capacity.format_names import format_names
from kvquant.capacity.hardware import gpus
from kvquant.capacity.models import known_models
from kvquant.capacity.plan import plan
from kvquant.capacity.tables import gpu_table, plan_table
from kvquant.cli import run
from kvquant.errors import InputError

Run = Callable[[str], str]
KEYS = {
    "description",
    "bytes_per_token",
    "ratio",
    "bytes_per_sequence",
    "sequences",
    "total_bytes",
    "per_gpu",
    "max_sequences",
    "max_context",
    "outgrows_weights_tokens",
    "pages",
    "reserved",
    "full_length_bytes_per_sequence",
    "padding_layers",
    "decode_step_ms",
    "tokens_per_s",
    "tokens_per_s_per_sequence",
    "ns_per_cached_token",
    "cache_bound_sequences",
}


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Run:
    """What ``kvquant plan …`` prints."""

    def of(line: str) -> str:
        assert run(["plan", *line.split()]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return of


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Run:
    """The last line of what ``kvquant plan …`` complains of; exit code 2, nothing on stdout."""

    def of(line: str) -> str:
        assert run(["plan", *line.split()]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.splitlines()[-1]

    return of


def test_json_has_stable_keys(output: Run) -> None:
    answer = json.loads(
        output("-m llama-3-8b --gpu h100-80gb -c 32k --kv bf16 --kv int8:int4 --json")
    )
    assert set(answer) == {"model", "gpu", "parallel", "workload", "kv", "warnings"}
    assert list(answer["kv"]) == ["bf16", "int8:int4"]
    for values in answer["kv"].values():
        assert set(values) == KEYS
        assert set(values["pages"]) == {"bytes_per_sequence", "utilisation", "max_sequences"}
        assert set(values["per_gpu"]) == {"bytes_per_token", "bytes_per_sequence", "cache_bytes"}
    bf16 = answer["kv"]["bf16"]
    assert bf16["bytes_per_token"] == 131_072
    assert bf16["bytes_per_sequence"] == 4_294_967_296
    assert (bf16["max_sequences"], bf16["max_context"]) == (13, 457_301)
    assert round(bf16["decode_step_ms"], 1) == 21.5
    assert int(bf16["tokens_per_s"]) == 605
    assert round(answer["kv"]["int8:int4"]["ratio"], 2) == round(512 / 198, 2)
    assert answer["warnings"] == ["32,768 tokens are beyond the 8,192 positions of llama-3-8b"]


def test_default_formats_and_context(output: Run) -> None:
    answer = json.loads(output("-m llama-3.1-8b --json"))
    assert tuple(answer["kv"]) == DEFAULT_FORMATS
    assert answer["workload"]["sequence_tokens"] == 8192
    assert answer["gpu"] is None
    assert all(values["decode_step_ms"] is None for values in answer["kv"].values())
    assert json.loads(output("-m opt-13b --json"))["workload"]["sequence_tokens"] == 2048


def test_table_has_gigabytes_of_both_kinds_and_the_factors(output: Run) -> None:
    text = output("-m llama-3-8b --gpu h100-80gb -c 32k --kv bf16 --kv int4")
    for part in (
        "32 x 8 x 512",
        "32 x 8 x 136",
        "131,072",
        "4.29 GB (4.00 GiB)",
        "55.83 GB (52.00 GiB)",
        "16.06 GB (14.96 GiB), 8,030,261,248 parameters in bf16",
        "21.5",
        "606",
        "122,532",
        "457,301 (model: 8,192)",
        "note: 32,768 tokens are beyond the 8,192 positions",
    ):
        assert part in text, part


def test_explain_prints_the_sum(output: Run) -> None:
    text = output("-m gemma-3-27b --gpu h200 -c 64k -n 2 --kv int4 --explain")
    for part in (
        "layers 0-4,6-10",
        "2 sequences / 11.90 ms",
        "16 KV heads x 136 = 2,176 bytes a token",
        "1,023 tokens x 2,176 = 2,226,048 bytes a layer",
        "65,536 tokens x 2,176 + 24,064 for tokens kept exactly = 142,630,400 bytes a layer",
        "x 10 layers = 1,426,304,000 bytes",
        "sum: 1,542,058,496 bytes = 1.54 GB (1.44 GiB)",
        "141.00 GB - 7.05 kept free - 54.02 of weights = 79.93 GB",
        "a step reads 54.02 GB of weights + 3.08 GB of cache: / 4.8 TB/s = 11.90 ms",
    ):
        assert part in text, part
    assert 52 * 2_226_048 + 1_426_304_000 == 1_542_058_496


def test_explain_shows_states_and_experts(output: Run, tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = output(f"-m {tmp_path} --kv bf16 -c 10 --explain")
    assert "1,536 beside keys and values = 1,536 bytes a layer" in text
    mixture = output("-m gpt-oss-20b --gpu h100 -c 1k -n 1 --kv bf16 --explain")
    assert "4 of 32 experts a token are read" in mixture


def test_where_no_division_tells_how_many_fit(output: Run) -> None:
    """Sequences of several lengths, or with a shared prefix."""
    line = "-m llama-3-8b --gpu h100 --kv bf16"
    for asked in ("--contexts 1000,3000,6000", "-c 8k --prefix-tokens 4000"):
        text = output(f"{line} {asked} --explain")
        assert "sequences that fit: as many as take no more than 59.94 GB on the fullest" in text
    assert "sequences of 6,000 that fit" not in output(f"{line} --contexts 1000,3000,6000")
    assert "sequences of 6,000 that fit" in output(f"{line} --contexts 6000,6000")


def test_one_of_something_is_singular(output: Run, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("prompt,output\n30000,10\n")
    table = output(f"-m llama-3-8b --gpu h100 --traffic {path} --weights-gb 1 --kv bf16")
    assert "drawn from 1 request, at" in table
    assert "1 sequence " in table
    text = output("-m deepseek-v3 --gpu b200 --tp 8 -c 1k -n 1 --kv bf16 --explain")
    assert "1 KV head x 1,152 = 1,152 bytes a token" in text
    assert "1 sequence / " in text


@pytest.mark.parametrize("width", [40, 60, 200])
def test_narrow_terminals_lose_no_digit(question: Callable[..., Question], width: int) -> None:
    """Cells that are too long are folded, never cut."""
    asked = question("deepseek-v3", formats=("bf16", "fp8_ds_mla", "int4", "kivi2"))
    plans = [plan(asked.request, form) for form in asked.forms]
    file = io.StringIO()
    console = Console(width=width, file=file, color_system=None)
    console.print(plan_table(asked.request, plans, []), gpu_table(gpus()))
    assert "…" not in file.getvalue()
    assert width == 40 or "9,579,214" in file.getvalue()


def test_lists(output: Run) -> None:
    models = output("--list-models")
    assert all(model.name in models for model in known_models())
    assert "meta-llama/Llama-3.1-8B" in models
    assert all(gpu.name in output("--list-gpus") for gpu in gpus())
    formats = output("--list-kv")
    assert all(name in formats for name in format_names())
    assert "656 (MLA, 512 + 64)" in formats


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_plot(output: Run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan{suffix}"
    output(f"-m gemma-3-4b --gpu l4 -c 200k -n 4 --kv bf16 --kv int4 --plot {path}")
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)
    if suffix == ".svg":
        assert "gemma-3-4b" in path.read_text()


def test_a_plot_at_home(output: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    output("-m smollm2-135m --kv bf16 --plot ~/plan.svg")
    assert (tmp_path / "plan.svg").is_file()


def test_traffic(output: Run, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("prompt,output\n" + "".join(f"{n},10\n" for n in range(1, 101)))
    answer = json.loads(output(f"-m llama-3-8b --traffic {path} -n 1 --kv bf16 --json"))
    assert answer["workload"]["percentile"] == 95
    assert answer["kv"]["bf16"]["total_bytes"] == 105 * 131_072
    many = json.loads(output(f"-m llama-3-8b --traffic {path} --gpu l4 --kv bf16 --json"))
    fit = many["kv"]["bf16"]["max_sequences"]
    assert many["kv"]["bf16"]["total_bytes"] <= many["gpu"]["free_bytes"]
    assert fit * 60 * 131_072 < many["gpu"]["free_bytes"] < fit * 70 * 131_072
    assert "drawn from 100 requests, at the 95th percentile" in output(
        f"-m llama-3-8b --traffic {path} -n 5"
    )


def test_skipped_layers(output: Run) -> None:
    line = "-m llama-3-8b --kv turboquant_4bit_nc --json"
    advice = json.loads(output(line))["warnings"]
    answer = json.loads(output(f"{line} --skip-layers 0,1,-2,-1"))
    per_token = answer["kv"]["turboquant_4bit_nc"]["bytes_per_token"]
    assert per_token == 28 * 8 * 134 + 4 * 8 * 512
    assert "plan that with --skip-layers 0,1,-2,-1" in advice[0]
    assert answer["warnings"] == []
    assert skipped_layers(" 0, -1", 4) == {0, 3}
    assert skipped_layers("", 4) == frozenset()


@pytest.mark.parametrize("text", ["4", "-5", "x", "0,", "1-2", "²"])
def test_layers_that_there_are_not(text: str) -> None:
    with pytest.raises(InputError, match="is none of the layers 0 to 3"):
        skipped_layers(text, 4)


def test_warnings(output: Run) -> None:
    def warnings(line: str) -> list[str]:
        found: list[str] = json.loads(output(f"{line} --kv bf16 --json"))["warnings"]
        return found

    assert warnings("-m llama-3.1-8b -c 8k") == []
    assert warnings("-m mistral-7b-v0.1 -c 32k") == []
    (windows,) = warnings("-m gpt-oss-120b -c 128k")
    assert "keeps 18 windows at full length: 9.66 GB a sequence in bf16, not 4.84" in windows
    assert "adds 8 layers of padding" in warnings("-m gemma-3-27b -c 32k")[1]
    assert "each of 8 GPUs holds the whole latent" in warnings("-m deepseek-v2 --tp 8")[0]
    assert "--tp 16 is beyond the 8 KV heads" in warnings("-m llama-3.1-70b --tp 16")[0]
    assert warnings("-m llama-3-8b --gpu h100 -c 8k -n 1000") == ["bf16: 55 of 1,000 sequences fit"]


def test_calibrated_scales_of_another_model(
    error: Run,
    output: Run,
    tmp_path: Path,
    tiny: Callable[..., Any],
    save_tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tiny("llama"), tmp_path / "model")
    (tmp_path / "text.txt").write_text("words and more words " * 40)
    calibrate = "calibrate -m model -d text.txt -c 64 -n 2 -o scales"
    assert run(calibrate.split()) == 0
    capsys.readouterr()
    answer = json.loads(output("-m model --scales scales -c 100 --kv bf16 --json"))
    assert answer["kv"]["scales"]["bytes_per_token"] == 2 * 2 * 2 * 16
    assert "beyond position 64, up to which scales was calibrated" in answer["warnings"][0]
    assert "scales.safetensors is for a llama cache: 2 x full" in error(
        "-m opt-13b --scales scales"
    )
    (tmp_path / "scales.safetensors").rename("int4.safetensors")
    taken = json.loads(output("-m model --scales int4 --kv int4 --json"))
    assert list(taken["kv"]) == ["int4", "int4.safetensors"]
    assert "No such file" in error("-m model --scales none")
    assert "not one of kvquant's" in error("-m model --scales model/model")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "error: --model is missing"),
        ("-m gemma3-27b", "did you mean gemma-3-27b"),
        ("-m llama-3-8b --gpu h10", "unknown GPU 'h10': did you mean h200 or h100"),
        ("-m llama-3-8b --kv int5", "unknown cache format 'int5': did you mean"),
        ("-m llama-3-8b --tp 3", "--tp 3 does not divide the 32 query heads"),
        ("-m llama-3.1-70b --gpu h100", "141.11 GB of weights and 4.00 GB of overhead do not fit"),
        ("-m llama-3-8b -c 0", "at least 1 token is needed"),
        ("-m llama-3-8b --context=-5", "'-5' is no number of tokens"),
        ("-m llama-3-8b -c 32kb", "'32kb' is no number of tokens such as 32768 or 32k"),
        ("-m llama-3-8b --contexts 1,,2", "'' is no number of tokens"),
        ("-m llama-3-8b -n 0", "0 is not in the range x>=1"),
        ("-m llama-3-8b --tp 0", "0 is not in the range x>=1"),
        ("-m llama-3-8b --memory-gb 0", "0.0 is not in the range x>0"),
        ("-m llama-3-8b --memory-gb=-1", "-1.0 is not in the range x>0"),
        ("-m llama-3-8b --memory-gb nan", "nan is not between 0.000001 and 1,000,000,000"),
        ("-m llama-3-8b --memory-gb 1e300", "1e+300 is not between"),
        ("-m llama-3-8b --memory-gb 1e-12", "1e-12 is not between"),
        ("-m llama-3-8b --gpu h100 --bandwidth-tbs inf", "inf is not between"),
        ("-m llama-3-8b --gpu h100 --overhead-gb nan", "nan is not between"),
        ("-m llama-3-8b --gpu h100 --weights-gb=-inf", "-inf is not in the range x>0"),
        ("-m llama-3-8b --dp 2000000000", "2e+09 is not between"),
        ("-m llama-3-8b --adapters 4", "--adapters says how many copies there are of a shared"),
        ("-m llama-3-8b --reserve 4k", "--reserve 4,096 is less than the longest sequence, 8,192"),
        ("-m llama-3-8b --kv q8_0 --sink-tokens 4", "go with quantized formats of ours"),
        ("-m llama-3-8b -c 1k --contexts 1,2", "--context and --contexts both say"),
        ("-m llama-3-8b --bandwidth-tbs 3", "--bandwidth-tbs and --overhead-gb go with --gpu"),
        ("-m llama-3-8b --weights-dtype bf8", "unknown format of weights 'bf8': did you mean"),
        ("-m llama-3-8b --prefix-tokens 9k", "a sequence of 8,192 tokens has no prefix of 9,216"),
        ("-m llama-3-8b --group-size 4", "--group-size goes with --kv int4-kivi"),
        ("-m llama-3-8b --skip-layers 32", "--skip-layers 32: 32 is none of the layers 0 to 31"),
        ("-m llama-3-8b --traffic none.csv", "cannot read none.csv"),
        ("-m llama-3-8b --plot plan.bmp", "the name has to end in .png, .svg, .pdf"),
        ("-m smollm2-135m --kv fp8_ds_mla", "fp8_ds_mla is for MLA"),
        ("-m phi-3-mini-4k --kv q4_0:q8_0:q8_0", "unknown cache format 'q8_0:q8_0'"),
    ],
)
def test_one_clear_line(error: Run, line: str, message: str) -> None:
    assert message in error(line)


def test_experts_that_are_not_known(output: Run, tmp_path: Path) -> None:
    """A step is taken to read all weights, and the plan says so; a wrong config is no crash."""
    config = {"model_type": "qwen3_next", "num_hidden_layers": 4, "num_attention_heads": 4}
    for chosen, told in ((2, True), ("x", False), (9, False)):
        experts = {"num_experts": 8, "num_experts_per_tok": chosen}
        (tmp_path / "config.json").write_text(json.dumps({**config, **experts}))
        text = output(f"-m {tmp_path} --gpu l4 --weights-gb 3 --kv bf16")
        assert ("how much of the weights are experts is not known" in text) == told
    assert "not known" not in output("-m qwen3-30b-a3b --gpu h100 --kv bf16")


def test_weights_that_are_not_known(error: Run, output: Run, tmp_path: Path) -> None:
    config = {"model_type": "glm", "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "give --weights-gb" in error(f"-m {tmp_path} --gpu l4")
    assert "give --weights-gb" in error(f"-m {tmp_path} --weights-dtype fp8")
    assert output(f"-m {tmp_path}")
    assert output(f"-m {tmp_path} --gpu l4 --weights-gb 3")


def test_planning_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from kvquant.cli import run\n"
        "assert run('plan -m gemma-3-27b --gpu h200 -c 32k'.split()) == 0\n"
        "assert run('plan -m gemma-3-27b --gpu h200 -n 3 --explain'.split()) == 0\n"
        "assert run('plan --list-kv'.split()) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'huggingface_hub'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
