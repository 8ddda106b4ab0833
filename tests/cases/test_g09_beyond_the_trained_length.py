"""G9, huggingface/transformers PR#27227 with #25104: keys beyond the length a model was made for.

Dynamic NTK changes the base of the rotation once a text passes the trained length, and keys that
are cached keep the old one. What scales are known to hold for, and what the model itself is made
for, is looked at before anything is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from calib.collect import collect
from calib.solve import solve
from evals.arms import ArmRequest, EvalArm
from evals.command import evaluate
from evals.request import choose_lengths
from kvquant import KVScales
from kvquant.errors import InputError
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.provenance import Provenance
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}


def model_of_32_positions(tiny: Callable[..., Any], dynamic: bool) -> Any:
    return tiny("llama", max_position_embeddings=32, **(DYNAMIC if dynamic else {}))


def calibrated(model: Any, tokens: int) -> KVScales:
    ids = torch.randint(3, 128, (tokens,), generator=torch.Generator().manual_seed(1))
    stats = collect(model, [ids.tolist()], CacheGeometry.from_config(model.config))
    scales = solve(stats, QuantScheme(FP8, FP8))
    provenance = replace(
        scales.provenance, fingerprints=(fingerprint(model),), context_length=tokens
    )
    return replace(scales, provenance=provenance)


def chosen(model: Any, scales: KVScales | None, asked: str | None) -> tuple[Any, list[str]]:
    told: list[str] = []
    arms = () if scales is None else (EvalArm(ArmRequest("ft", scales="ft"), scales, FP8_BOTH),)
    geometry = CacheGeometry.from_config(model.config)
    return choose_lengths(asked, None, arms, geometry, told.append), told


FP8_BOTH = QuantScheme(FP8, FP8)


@pytest.mark.parametrize("tokens", [24, 60])
def test_calibration_knows_how_far_it_went(tiny: Callable[..., Any], tokens: int) -> None:
    scales = calibrated(model_of_32_positions(tiny, dynamic=True), tokens)
    assert scales.provenance.longest_position == tokens


def test_an_evaluation_beyond_what_was_calibrated_warns(tiny: Callable[..., Any]) -> None:
    model = model_of_32_positions(tiny, dynamic=True)
    short, long = (calibrated(model, tokens) for tokens in (24, 60))
    lengths, told = chosen(model, short, "60")
    assert lengths == (60,)
    assert told == [
        "warning: the scales of ft were calibrated up to 24 tokens, and 60 are evaluated: they may "
        "clip; calibrate with --context-length 60"
    ]
    assert chosen(model, short, "16,24") == ((16, 24), [])
    assert chosen(model, long, "60") == ((60,), [])
    assert len(chosen(model, long, "61")[1]) == 1


def test_scales_that_do_not_say_warn_of_nothing(tiny: Callable[..., Any]) -> None:
    model = model_of_32_positions(tiny, dynamic=True)
    unknown = replace(calibrated(model, 24), provenance=Provenance())
    assert chosen(model, unknown, "60") == ((60,), [])


def test_beyond_the_positions_is_refused(tiny: Callable[..., Any]) -> None:
    """Twice 32 with the factor, 32 without."""
    scaled, plain = (model_of_32_positions(tiny, dynamic) for dynamic in (True, False))
    assert chosen(scaled, None, "64")[0] == (64,)
    assert chosen(plain, None, "32")[0] == (32,)
    for model, length, limit in ((plain, 64, 32), (plain, 33, 32), (scaled, 65, 64)):
        complaint = (
            f"a length of {length} is beyond the model's {limit} positions.* at most {limit}"
        )
        with pytest.raises(InputError, match=complaint):
            chosen(model, None, f"16,{length}")


def test_lengths_that_were_not_asked_for_stay_within_them(tiny: Callable[..., Any]) -> None:
    scaled, plain = (model_of_32_positions(tiny, dynamic) for dynamic in (True, False))
    assert chosen(scaled, None, None)[0] == (64,)
    assert chosen(plain, None, None)[0] == (32,)
    assert chosen(scaled, calibrated(scaled, 24), None)[0] == (24,)
    # Scales of a context that the model has no positions for.
    with pytest.raises(InputError, match=r"a length of 60 is beyond the model's 32 positions"):
        chosen(plain, calibrated(scaled, 60), "served")


def run(*arguments: object) -> str:
    """What the command prints, both streams."""
    result = CliRunner().invoke(evaluate, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_refuses_before_it_reads_weights(
    tiny: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    directory = save_tiny(model_of_32_positions(tiny, dynamic=False), tmp_path / "model")
    (directory / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(InputError, match=r"a length of 64 is beyond the model's 32 positions"):
        run("--model", directory, "--scheme", "int8", "--lengths", 64)


def test_the_command_warns(
    tiny: Callable[..., Any],
    save_tiny: Callable[..., Path],
    tmp_path: Path,
) -> None:
    model = model_of_32_positions(tiny, dynamic=True)
    directory = save_tiny(model, tmp_path / "model")
    save_scales(calibrated(model, 24), tmp_path / "ft.safetensors")
    text = tmp_path / "text.txt"
    text.write_text("Twelve boxes of lazy dogs. " * 20)
    settings = {
        "model": directory,
        "scales": tmp_path / "ft.safetensors",
        "data": text,
        "lengths": 60,
        "prefill": 24,
        "block": 8,
        "documents": 1,
        "trials": 0,
        "continuations": 0,
        "report": tmp_path / "out.json",
    }
    shown = run(*(it for name, value in settings.items() for it in (f"--{name}", value)))
    shown = " ".join(shown.split())
    assert "scales of ft were calibrated up to 24 tokens, and 60 are evaluated" in shown
