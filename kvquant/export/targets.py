"""The engines, by the names that ``--engine`` takes."""

from __future__ import annotations

from difflib import get_close_matches

from kvquant.errors import ExportError

from .lightllm import LightLlm
from .llama_cpp import LlamaCpp
from .lmdeploy import LmDeploy
from .sglang import Sglang, SglangModelopt
from .sglang_json import SglangJson
from .target import ExportTarget
from .tensorrt_llm import TensorRtLlm, TensorRtLlmNvfp4
from .tgi import Tgi
from .transformers import Transformers
from .vllm import Vllm

_TARGETS: tuple[ExportTarget, ...] = (
    Vllm(),
    Sglang(),
    SglangModelopt(),
    SglangJson(),
    TensorRtLlm(),
    TensorRtLlmNvfp4(),
    LightLlm(),
    Tgi(),
    Transformers(),
    LlamaCpp(),
    LmDeploy(),
)
_BY_NAME = {each.name: each for each in _TARGETS}


def target(name: str) -> ExportTarget:
    """The engine called `name`.

    Raises:
        ExportError: No such engine; the message names those that may have been meant, and all.
    """
    found = _BY_NAME.get(name)
    if found is None:
        close = get_close_matches(name.lower(), _BY_NAME, 3, 0.5)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        raise ExportError(f"unknown engine {name!r}: {meant}There are {', '.join(_BY_NAME)}")
    return found


def target_names() -> list[str]:
    """All names, as users type them."""
    return list(_BY_NAME)


def shared() -> list[ExportTarget]:
    """Engines that one directory serves together: those of ``--engine all``."""
    return [each for each in _TARGETS if each.facts.shares_directory]
