"""`kvquant lm-eval` as users run it: as a process, on tasks that lie in a directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from evals.harness_command import lm_eval
from kvquant.errors import InputError

KVQUANT = Path(sys.executable).with_name("kvquant")
STORY = "The fox jumps over the dog, and then it sleeps under a tree. " * 3
ROWS = [
    {
        "text": STORY[: 90 + 10 * row],
        "ending": " It wakes.",
        "wrong": " It won't.",
        "label": row % 2,
    }
    for row in range(4)
]
_DATA = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
fewshot_split: test
"""
TASKS = {
    "fox_choices": """
task: fox_choices
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["{{{{ending}}}}", "{{{{wrong}}}}"]
doc_to_target: label
target_delimiter: ""
num_fewshot: 1
metric_list:
  - metric: acc
""",
    "fox_rolling": """
task: fox_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: byte_perplexity
""",
    "fox_answers": """
task: fox_answers
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: ending
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
""",
}


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(lm_eval, [*arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any, tiny: Any, save_tiny: Any) -> Path:
    """A directory with a model, with tasks, and with the data that those name."""
    root = tmp_path_factory.mktemp("lm-eval")
    save_tiny(tiny("llama"), root / "model")
    data = root / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (root / "tasks").mkdir()
    for name, task in TASKS.items():
        (root / "tasks" / f"{name}.yaml").write_text((task + _DATA).format(data=data))
    return root


def process(
    place: Path, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which cannot download and leaves its caches in `place`."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(place / "home"),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [*map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=place, env=environment
    )


def test_it_helps_without_torch() -> None:
    code = (
        "import sys; from evals.harness_command import lm_eval\n"
        "try: lm_eval(['--help'])\n"
        "finally: print({'torch', 'lm_eval'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "set()"
    assert "--model_args takes" in done.stdout


def test_nothing_asked_shows_the_help() -> None:
    result = invoke()

    assert result.exit_code == 2
    assert "--model_args takes" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "hf", "--tasks", "x"],
        ["run", "--tasks", "x", "--model=hf"],
        ["--tasks", "x", "-M", "vllm"],
        ["--model"],
    ],
)
def test_another_model_class_is_refused(arguments: list[str]) -> None:
    with pytest.raises(InputError, match=r"--model .*runs its own class, kvquant"):
        invoke(*arguments)


def test_tasks_are_run_and_their_results_written(place: Path) -> None:
    done = process(
        place,
        *(KVQUANT, "lm-eval", "--model_args", f"pretrained={place / 'model'},scheme=int8,block=16"),
        *("--include_path", place / "tasks", "--tasks", ",".join(TASKS), "--device", "cpu"),
        *("--batch_size", "2", "--output_path", place / "results.json", "--log_samples"),
    )
    assert done.returncode == 0, done.stderr
    assert "|fox_choices|" in done.stdout
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        assert f"\n{kind}: " in done.stderr
    assert "of the keys read were codes (int8; " in done.stderr

    [path] = place.glob("results_*.json")
    written = json.loads(path.read_text())
    results, own = written["results"], written["config"]["kvquant"]
    assert results["fox_choices"]["acc,none"] in {0, 0.25, 0.5, 0.75, 1}
    assert 1 < results["fox_rolling"]["byte_perplexity,none"] < 1000
    assert results["fox_answers"]["exact_match,none"] == 0
    assert written["config"]["model"] == "kvquant"
    assert own["scheme"] == "int8" and own["block"] == 16
    counts = {kind: it["requests"] for kind, it in own["requests"].items()}
    assert counts == {"loglikelihood": 8, "loglikelihood_rolling": 4, "generate_until": 4}
    assert all(0.5 < it["keys_read_from_codes"] < 1 for it in own["requests"].values())

    [samples] = place.glob("samples_fox_answers_*.jsonl")
    assert len(samples.read_text().splitlines()) == len(ROWS)


def test_what_is_wrong_is_said_in_a_line_and_the_rest_is_lm_eval_s(place: Path) -> None:
    """Several command lines in one process, as lm_eval takes its time to be imported."""
    model = f"pretrained={place / 'model'}"
    tasks = ["--include_path", str(place / "tasks"), "--tasks", "fox_answers"]
    lines = [
        ["--model_args", model, *tasks],
        ["--model_args", f"{model},scheme=int8", "--tasks", "no_such_task"],
        ["--model_args", f"{model},int8", *tasks],
        ["run", "--help"],
    ]
    code = (
        "import json, sys; from kvquant.cli import run\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    print('\\ncode', run(['lm-eval', *line]), sys.argv[0], file=sys.stderr, flush=True)"
    )
    done = process(place, sys.executable, "-c", code, json.dumps(lines))

    codes = [row for row in done.stderr.splitlines() if row.startswith("code ")]
    assert codes == [*["code 2 -c"] * 3, "code 0 -c"], done.stderr
    errors = [row for row in done.stderr.splitlines() if row.startswith("error: ")]
    assert [row[:40] for row in errors] == [
        "error: nothing to evaluate: give --model",
        "error: lm_eval: Tasks not found: no_such",
    ]
    assert "expected `key=value`, got 'int8'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "--include_path" in done.stdout
