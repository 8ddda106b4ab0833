"""Which engines are meant, what each wants, and what fits into one directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.errors import ExportError
from kvquant.export.combine import asked, combined, contribute
from kvquant.export.target import Contribution, ExportJob
from kvquant.export.targets import shared, target

TWO = {0: (0.5, 0.25), 1: (0.75, 0.125)}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architecture": "GPT2LMHeadModel",
    "path": "transformer.h.{}.attn",
    "projections": ("c_attn",),
}


def names(engines: Any) -> list[str]:
    return [each.name for each in engines]


# Which engines are meant


def test_engines_come_as_they_were_named_and_once() -> None:
    assert names(asked(["tgi", "vllm", "tgi"])) == ["tgi", "vllm"]
    assert asked([]) == []


@pytest.mark.parametrize("more", [[], ["vllm"], ["tgi", "sglang"]])
def test_all_are_those_that_share_a_directory(more: list[str]) -> None:
    assert names(asked(["all", *more])) == ["vllm", "sglang", "tgi", "transformers"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["lightllm"], "lightllm"),
        (["vllm", "llama.cpp", "tensorrt-llm"], "llama.cpp and tensorrt-llm"),
    ],
)
def test_nobody_is_dropped_without_a_word(more: list[str], told: str) -> None:
    with pytest.raises(ExportError) as refused:
        asked(["all", *more])
    assert str(refused.value) == (
        "--engine all is vllm, sglang, tgi, transformers, which one directory serves; export for "
        f"{told} apart"
    )


@pytest.mark.parametrize("engines", [["vlm"], ["all", "vlm"], ["vllm", "vlm"]])
def test_unknown_engines(engines: list[str]) -> None:
    with pytest.raises(ExportError, match=r"unknown engine 'vlm': did you mean vllm"):
        asked(engines)


# What each wants


def test_each_contributes(make_job: Callable[..., ExportJob]) -> None:
    wanted, refused = contribute(shared(), make_job(TWO), lenient=False)
    assert list(wanted) == ["vllm", "sglang", "tgi", "transformers"]
    assert refused == {}


def test_one_that_refuses_stops_all(make_job: Callable[..., ExportJob]) -> None:
    engines = [target("vllm"), target("transformers")]
    with pytest.raises(ExportError, match="compressed-tensors knows a cache by k_proj"):
        contribute(engines, make_job(TWO, **GPT2), lenient=False)


def test_or_is_left_out_with_its_reason(make_job: Callable[..., ExportJob]) -> None:
    job = make_job({0: (0.5, 0.25)}, layers=make_job(TWO).geometry.layers)
    wanted, refused = contribute(shared(), job, lenient=True)
    assert list(wanted) == ["vllm"]
    assert list(refused) == ["sglang", "tgi", "transformers"]
    assert refused["tgi"] == (
        "the scales leave layer 1 exact, but TGI quantizes the cache of all layers or of none: "
        "kvquant solve STATS --output NAME, without --skip-layers"
    )


def test_but_not_all_of_them(make_job: Callable[..., ExportJob]) -> None:
    job = make_job(TWO, key_format="int8", value_format="int8")
    with pytest.raises(ExportError) as refused:
        contribute(shared(), job, lenient=True)
    message = str(refused.value)
    assert message.startswith("no engine can read this: vllm: the scales are for keys as int8")
    assert "; sglang: the scales are for keys as int8" in message
    assert "; tgi: " in message and "; transformers: " in message
    assert "\n" not in message
    advice = "For FP8 scales: kvquant solve STATS --format fp8 --output NAME"
    assert message.endswith(advice) and message.count(advice) == 1


# Names at which SGLang stops


def test_sglang_is_left_out_where_names_of_others_stop_it(
    make_job: Callable[..., ExportJob],
) -> None:
    wanted, refused = contribute(shared(), make_job(TWO, **GPT2), lenient=True)
    assert list(wanted) == ["vllm", "tgi"]
    assert refused["sglang"] == (
        "it stops at names that other engines need, such as transformer.h.0.attn.k_scale: export "
        "for it into a directory of its own"
    )


@pytest.mark.parametrize(
    ("architecture", "stays"),
    [
        ("LlamaForCausalLM", True),
        ("Qwen2ForCausalLM", True),
        ("GemmaForCausalLM", False),
        ("GraniteForCausalLM", False),
        ("SomethingNewForCausalLM", True),
    ],
)
def test_not_where_it_only_drops_them(
    make_job: Callable[..., ExportJob], architecture: str, stays: bool
) -> None:
    wanted, _ = contribute(shared(), make_job(TWO, architecture=architecture), lenient=True)
    assert ("sglang" in wanted) == stays
    assert {"vllm", "tgi", "transformers"} <= wanted.keys()


def test_nor_where_it_is_asked_for_by_name(make_job: Callable[..., ExportJob]) -> None:
    """Then it is written, and verified: the user sees what SGLang would make of it."""
    engines = [target("sglang"), target("tgi")]
    wanted, refused = contribute(engines, make_job(TWO, **GPT2), lenient=False)
    assert (list(wanted), refused) == (["sglang", "tgi"], {})


# One directory


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


def test_what_several_want_alike_is_there_once() -> None:
    whole = combined(
        {
            "one": Contribution(
                {"a": tensor(1.0)}, {"x": {"y": 1}}, {"f": b"f"}, ("go {model}",), ("r", "s")
            ),
            "two": Contribution(
                {"a": tensor(1.0), "b": tensor(2.0)},
                {"x": {"y": 1}, "z": 2},
                {"f": b"f", "g": b"g"},
                ("run", "go {model}"),
                ("s", "t"),
            ),
        },
        ["forced: why"],
    )
    assert {name: value.tolist() for name, value in whole.tensors.items()} == {"a": [1], "b": [2]}
    assert whole.config == {"x": {"y": 1}, "z": 2}
    assert whole.files == {"f": b"f", "g": b"g"}
    assert whole.launch == ("go {model}", "run")
    assert whole.remarks == ("forced: why", "r", "s", "t")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Contribution({"a": tensor(1.0, 1.0)}), "two wants a as [2], another engine as [1]"),
        (Contribution({"a": tensor(2.0)}), "two wants a as [1], another engine as [1]"),
        (
            Contribution(config={"x": 2}),
            "two wants x as its own, another engine as other content",
        ),
        (
            Contribution(files={"f": b"other"}),
            "two wants f as its own, another engine as other content",
        ),
    ],
)
def test_what_they_want_otherwise_is_refused(other: Contribution, told: str) -> None:
    one = Contribution({"a": tensor(1.0)}, {"x": 1}, {"f": b"f"})
    with pytest.raises(ExportError) as refused:
        combined({"one": one, "two": other})
    assert str(refused.value) == (
        f"{told}: export them into a directory each, or leave --per-head out"
    )


def test_heads_for_one_and_layers_for_another_do_not_fit(
    make_job: Callable[..., ExportJob],
) -> None:
    wanted, _ = contribute(shared(), make_job({0: ([0.5, 1.0],) * 2}, per_head=True), lenient=True)
    with pytest.raises(ExportError, match=r"or leave --per-head out"):
        combined(wanted)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers(0, 2)), max_size=4))
def test_all_of_it_or_an_error(configs: list[dict[str, int]]) -> None:
    wanted = {str(place): Contribution(config=config) for place, config in enumerate(configs)}
    merged = {key: value for config in configs for key, value in config.items()}
    if all(merged[key] == value for config in configs for key, value in config.items()):
        assert combined(wanted).config == merged
    else:
        with pytest.raises(ExportError):
            combined(wanted)
