"""`kvquant verify`: what an engine would make of a finished directory, before anybody rents a GPU.

Scales whose names do not match what a loader looks for are served at 1.0 without a word. Here each
loader's rules are followed on headers and JSON alone, whoever wrote the directory. No weight is
read, and no torch imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from kvquant.errors import ExportError, ModelError
from kvquant.geometry import CacheGeometry

from .served_files import Reading, ServedDirectory, read_served
from .served_model import ServedModel, served_geometry, served_model
from .verify_files import file_findings
from .verify_lightllm import check_lightllm
from .verify_report import Finding, LayerVerdict, VerifyReport
from .verify_sglang import check_sglang
from .verify_sglang_json import check_sglang_json
from .verify_tensorrt_llm import check_tensorrt_llm
from .verify_tgi import check_tgi
from .verify_transformers import check_transformers
from .verify_vllm import check_vllm

_Outcome = tuple[list[LayerVerdict], list[Finding]]

_IN_WEIGHTS: dict[str, Callable[[ServedDirectory, ServedModel], _Outcome]] = {
    "vllm": check_vllm,
    "sglang": check_sglang,
    "sglang-modelopt": partial(check_sglang, older=True),
    "tensorrt-llm": check_tensorrt_llm,
    "tensorrt-llm-nvfp4": partial(check_tensorrt_llm, nvfp4=True),
    "tgi": check_tgi,
    "transformers": check_transformers,
}
"""Engines that read scales among the weights."""

_IN_JSON: dict[str, Callable[[ServedDirectory, CacheGeometry | None], _Outcome]] = {
    "sglang-json": check_sglang_json,
    "lightllm": check_lightllm,
}
"""Engines that read scales from a file of their own."""

_READINGS = {
    "tensorrt-llm": Reading.NOT_CONSOLIDATED,
    "tensorrt-llm-nvfp4": Reading.NOT_CONSOLIDATED,
    "tgi": Reading.EVERY,
    "transformers": Reading.SINGLE_FIRST,
}

_NOTHING_TO_VERIFY = {
    "llama.cpp": "llama.cpp computes scales itself, block by block",
    "lmdeploy": "LMDeploy computes scales itself, or uses 1.0",
}


def verifiable() -> list[str]:
    """Names that `verify` takes as an engine."""
    return [*_IN_WEIGHTS, *_IN_JSON]


def verify(directory: Path, engine: str) -> VerifyReport:
    """Follows an engine's loader through a directory.

    A broken directory gives findings, not an error.

    Args:
        directory: What is to be served.
        engine: One of `verifiable`.

    Raises:
        ExportError: An engine that reads no scales, or that is not known.
        ModelError: There is no such directory.
    """
    if engine not in verifiable():
        raise ExportError(_unknown(engine))
    if not directory.is_dir():
        raise ModelError(f"there is no directory {directory} to verify")
    served = read_served(directory)
    layers, findings = _check(served, engine)
    serious_first = sorted(findings, key=lambda finding: not finding.serious)
    return VerifyReport(engine, str(directory), tuple(layers), tuple(serious_first))


def _check(served: ServedDirectory, engine: str) -> _Outcome:
    if engine in _IN_JSON:
        geometry, findings = served_geometry(served)
        layers, found = _IN_JSON[engine](served, geometry)
        return layers, [*_model_files(served, engine), *findings, *found]
    model, findings = served_model(served)
    if model is None:
        reading = _READINGS.get(engine, Reading.INDEXED)
        return [], [*file_findings(served, engine, reading), *findings]
    layers, found = _IN_WEIGHTS[engine](served, model)
    return layers, [*findings, *found]


def _model_files(served: ServedDirectory, engine: str) -> list[Finding]:
    """What is wrong with the model beside a file of scales, which may also lie alone."""
    if not served.config and not served.unreadable and not served.names():
        return []
    return file_findings(served, engine, Reading.INDEXED)


def _unknown(engine: str) -> str:
    if engine in _NOTHING_TO_VERIFY:
        return (
            f"{_NOTHING_TO_VERIFY[engine]}: there is nothing to verify; "
            f"kvquant export --engine {engine} says what to launch"
        )
    close: Sequence[str] = get_close_matches(engine.lower(), verifiable(), 2, 0.5)
    meant = f": did you mean {' or '.join(close)}" if close else ""
    return f"no engine {engine!r}{meant}; known are {', '.join(verifiable())}"
