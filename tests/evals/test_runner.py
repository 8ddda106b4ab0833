"""A whole evaluation of tiny models: what is in the report, and runs that stop half way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from evals.arms import parse_arms, prepare_arms
from evals.request import Request
from evals.results import EvalReport
from evals.runner import evaluate
from kvquant.errors import DataError, InputError, SchemeError
from kvquant.geometry import CacheGeometry
from kvquant.models.source import read_config, resolve

TEXT = "The quick brown fox jumps over the lazy dog. It does so every day, and twice on Sundays. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny: Any, save_tiny: Any) -> Path:
    """A directory with a model, and a text beside it."""
    root = tmp_path_factory.mktemp("models")
    (root / "text.txt").write_text(TEXT * 20)
    return save_tiny(tiny("llama"), root / "llama")


@pytest.fixture(scope="module")
def request_of(model: Path) -> Callable[..., Request]:
    """A small evaluation; changes by name."""

    def make(*schemes: str, **changes: Any) -> Request:
        source = resolve(str(model))
        geometry = CacheGeometry.from_config(read_config(source))
        text = str(model.parent / "text.txt")
        small: dict[str, Any] = {
            "lengths": (256,), "data": text, "haystack": (text,), "documents": 2, "prefill": 40,
            "block": 48, "depths": (0, 100), "continuations": 1, "tokens": 4, "answer_tokens": 10,
            "dtype": "float32", "device": "cpu",
        }  # fmt: skip
        arms = prepare_arms(parse_arms(schemes or ("none",), ()), geometry)
        return Request(source, arms, **{**small, **changes})

    return make


def timeless(report: EvalReport) -> dict[str, Any]:
    """All but when and by which command it was made."""
    origin = replace(report.origin, created="", command="")
    return dataclasses.asdict(replace(report, origin=origin))


@contextmanager
def on_call(number: int, do: Callable[[], None]) -> Iterator[list[int]]:
    """Does something before the call of that number of any causal model; counts calls."""
    calls = [0]

    def hook(module: Any, args: Any) -> None:
        if type(module).__name__ == "LlamaForCausalLM":
            calls[0] += 1
            if calls[0] == number:
                do()

    handle = register_module_forward_pre_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_everything_that_was_asked_for_is_there(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    request = request_of("none", "int4", lengths=(224, 256), tasks=("single", "repeat"), trials=2)
    report = evaluate(request, tmp_path / "p")
    assert [arm.name for arm in report.arms] == ["none", "int4"]
    assert [check.arm for check in report.self_checks] == ["none", "int4"]
    assert [check.failures for check in report.self_checks] == [(), ()]
    perplexity = report.perplexity
    assert perplexity is not None and list(perplexity.arms) == ["none", "int4"]
    assert (perplexity.documents, perplexity.document_tokens) == (2, 256)
    assert (perplexity.prefill, perplexity.block) == (40, 48)
    # Positions 40 to 254 of each document predict the token after them.
    assert perplexity.scored_tokens == 2 * (256 - 40 - 1)
    assert perplexity.arms["none"].kl_max == 0.0 < perplexity.arms["int4"].kl_mean.value
    assert perplexity.arms["none"].nll == perplexity.reference_nll
    retrieval = report.retrieval
    assert retrieval is not None and retrieval.answer_tokens == 10
    assert [(it.task, it.length, it.depth, it.trial) for it in retrieval.cells] == [
        (task, length, depth, trial)
        for task in ("single", "repeat")
        for length in (224, 256)
        for depth in (0, 100)
        for trial in (0, 1)
    ]
    assert all(cell.arms["none"] == cell.reference for cell in retrieval.cells)
    assert [(it.arm, it.task, it.length, it.cells) for it in retrieval.losses] == [
        (arm, task, length, 4)
        for arm in ("none", "int4")
        for task in ("single", "repeat")
        for length in (224, 256)
    ]
    [continuation] = report.continuations
    assert (continuation.prompt_tokens, continuation.tokens) == (252, 4)
    assert continuation.first_difference["none"] is None
    origin = report.origin
    assert (origin.lengths, origin.seed, origin.dtype) == ((224, 256), 0, "float32")
    assert origin.settings == request.settings()
    assert report.verdict is None, "a gate judges, not the runner"
    assert EvalReport.from_dict(report.to_dict()) == report


@pytest.mark.parametrize("asked", ["documents", "trials", "continuations", "only_self_check"])
def test_parts_that_were_not_asked_for_are_not_there(
    request_of: Callable[..., Request], tmp_path: Path, asked: str
) -> None:
    nothing: dict[str, Any] = {"documents": 0, "trials": 0, "continuations": 0}
    options = {"only_self_check": True} if asked == "only_self_check" else {**nothing, asked: 1}
    report = evaluate(request_of("none", **options), tmp_path / "p")
    assert [check.arm for check in report.self_checks] == ["none"]
    assert (report.perplexity is not None) == (asked == "documents")
    assert (report.retrieval is not None) == (asked == "trials")
    assert (report.continuations != ()) == (asked == "continuations")


def test_a_limit_is_for_documents_and_for_each_task_and_length(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    request = request_of("none", lengths=(224, 256), trials=3, depths=(0, 50, 100), limit=1)
    report = evaluate(request, tmp_path / "p")
    assert report.perplexity is not None and report.perplexity.documents == 1
    assert report.retrieval is not None
    assert [(it.length, it.depth, it.trial) for it in report.retrieval.cells] == [
        (224, 0, 0), (256, 0, 0),
    ]  # fmt: skip


def test_needles_read_together_give_what_they_give_alone(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    only = {"documents": 0, "continuations": 0, "trials": 4, "depths": (50,)}
    alone, together = (
        evaluate(request_of("none", **only, batch_size=size), tmp_path / str(size)).retrieval
        for size in (1, 3)
    )
    assert alone is not None and together is not None
    assert len(alone.cells) == 4 and alone.cells == together.cells
    assert len({cell.expected for cell in alone.cells}) == 4
    assert all(cell.reference.text for cell in alone.cells)


def stages_of(calls: int) -> list[int]:
    """Calls in the midst of each part, given how many a whole run takes."""
    return [3, *(calls * part // 10 for part in (3, 5, 7, 8, 9)), calls]


def test_an_interrupted_run_goes_on_and_finds_the_same(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    request = request_of("int4", trials=2, continuations=2)
    with on_call(0, interrupt) as calls:
        whole = evaluate(request, tmp_path / "whole")
    total = calls[0]
    repeated = []
    for number in stages_of(total):
        place = tmp_path / str(number)
        with on_call(number, interrupt), pytest.raises(KeyboardInterrupt):
            evaluate(request, place)
        with on_call(0, interrupt) as calls:
            resumed = evaluate(request, place)
        assert timeless(resumed) == timeless(whole)
        repeated.append(number - 1 + calls[0] - total)
    # What was begun and not finished is done again, and nothing else.
    assert repeated[0] == 2 and all(0 <= it < total // 3 for it in repeated)
    with on_call(0, interrupt) as calls:
        assert timeless(evaluate(request, tmp_path / "whole")) == timeless(whole)
    assert calls[0] == 0, "everything is there"


def test_fewer_continuations_than_the_interrupted_run_wanted(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    two, one = (request_of("int4", trials=0, continuations=number) for number in (2, 1))
    assert len(evaluate(two, tmp_path / "p").continuations) == 2
    assert timeless(evaluate(one, tmp_path / "p")) == timeless(evaluate(one, tmp_path / "q"))


def test_a_cache_of_transformers_that_cannot_group_its_keys(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    # 2 KV heads of 16: 41 tokens are no multiple of 64 numbers.
    request = request_of("hf:quanto", prefill=41, only_self_check=True)
    with pytest.raises(SchemeError, match=r"41 tokens of 2 KV heads of 16 \(Group size"):
        evaluate(request, tmp_path / "p")


def test_a_model_without_numbers_is_to_blame_itself(
    request_of: Callable[..., Request],
    tiny: Callable[..., Any],
    save_tiny: Callable[..., Path],
    tmp_path: Path,
) -> None:
    broken = tiny("llama")
    with torch.no_grad():
        broken.lm_head.weight[5] = float("inf")
    source = resolve(str(save_tiny(broken, tmp_path / "broken")))
    request = replace(request_of("int8", only_self_check=True), source=source)
    [found] = evaluate(request, tmp_path / "p").self_checks
    statuses = {check.name: check.status for check in found.checks}
    assert statuses["floor"] == "failed"
    assert (statuses["poison"], statuses["padding"]) == ("noted", "noted")
    [check] = found.failures
    assert check.detail.startswith("the model itself, with the unquantized cache, gives NaN")


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1}, {"block": 47}, {"prefill": 41}, {"lengths": (255,)}, {"trials": 2},
        {"answer_tokens": 11}, {"batch_size": 2}, {"chunk": 16}, {"depths": (0, 50)},
        {"tasks": ("repeat",)}, {"limit": 1}, {"documents": 1}, {"tokens": 5},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_changed_setting_is_another_run(
    request_of: Callable[..., Request], tmp_path: Path, capfd: pytest.CaptureFixture[str],
    change: dict[str, Any],
) -> None:  # fmt: skip
    only = {"continuations": 0}
    with on_call(1, interrupt), pytest.raises(KeyboardInterrupt):
        evaluate(request_of("none", **only), tmp_path / "p")
    assert "starting anew" not in capfd.readouterr().err
    with on_call(1, interrupt), pytest.raises(KeyboardInterrupt):
        evaluate(request_of("none", **only), tmp_path / "p")
    assert "starting anew" not in capfd.readouterr().err
    with on_call(1, interrupt), pytest.raises(KeyboardInterrupt):
        evaluate(request_of("none", **{**only, **change}), tmp_path / "p")
    assert "starting anew: " in capfd.readouterr().err


def test_another_text_or_arm_is_another_run(
    request_of: Callable[..., Request], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1] * 20)
    for request in (
        request_of("none"),
        request_of("int8"),
        request_of("int8", data=str(other)),
        request_of("int8", data=str(other), haystack=(str(other),)),
        request_of("int8", "none", data=str(other), haystack=(str(other),)),
    ):
        with on_call(1, interrupt), pytest.raises(KeyboardInterrupt):
            evaluate(request, tmp_path / "p")
    assert capfd.readouterr().err.count("starting anew: ") == 4


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize("place", ["documents", "trials", "continuations"])
def test_out_of_memory_names_the_length(
    request_of: Callable[..., Request], tmp_path: Path, place: str
) -> None:
    nothing: dict[str, Any] = {"documents": 0, "trials": 0, "continuations": 0}
    check_only = request_of("int8", only_self_check=True)
    with on_call(0, out_of_memory) as calls:
        evaluate(check_only, tmp_path / "check")
    asked = {**nothing, place: 3, "batch_size": 3, "lengths": (224,), "depths": (50,)}
    request = request_of("int8", **asked)
    in_a_batch = " in a batch of 3" if place == "trials" else ""
    with (
        on_call(calls[0] + 2, out_of_memory),
        pytest.raises(InputError, match=rf"^out of memory at 224 tokens{in_a_batch}: 1 arm") as it,
    ):
        evaluate(request, tmp_path / "p")
    assert ("--batch-size 1" in str(it.value)) == bool(in_a_batch)
    assert "the same command goes on there" in str(it.value)
    assert evaluate(request, tmp_path / "p").arms, "and it does"


def test_other_errors_of_torch_are_not_taken_for_it(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    def broken() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with on_call(1, broken), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        evaluate(request_of("none"), tmp_path / "p")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lengths": (88,)}, InputError, "88 tokens is too short: .* take 89; .*--prefill"),
        ({"lengths": (128,), "prefill": 8}, InputError, "128 tokens are too few for the task"),
        ({"tasks": ("singel",)}, InputError, "no task 'singel': possible are single, repeat"),
        ({"tokens": 255}, InputError, "256 tokens cannot be continued by 255 .*--tokens"),
        ({"answer_tokens": 1}, InputError, "give --answer-tokens 9 or more"),
        ({"chat": True, "trials": 0}, DataError, "--chat takes message lists|no chat template"),
    ],
)
def test_what_cannot_be_is_said_before_weights_are_read(
    request_of: Callable[..., Request], model: Path, tmp_path: Path,
    changes: dict[str, Any], error: type[Exception], message: str,
) -> None:  # fmt: skip
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    request = replace(request_of("none", **changes), source=resolve(str(tmp_path)))
    with pytest.raises(error, match=message):
        evaluate(request, tmp_path / "p")
    assert not (tmp_path / "p").exists()
