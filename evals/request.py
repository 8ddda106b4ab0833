"""What an evaluation was asked for, made sure to be possible before weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvquant.errors import InputError
from kvquant.geometry import CacheGeometry
from kvquant.models.source import ModelSource

from .arms import EvalArm
from .gate_file import Gate
from .windows import parse_lengths

SERVED = "served"
DEFAULT_LENGTH = 4096
DEPTHS = (0, 25, 50, 75, 100)


@dataclass(frozen=True)
class Request:
    """One evaluation.

    Attributes:
        source: Model and adapters.
        arms: What is held against the unquantized cache.
        lengths: Contexts, tokens, ascending.
        data: Text to score, or None for the default text; `text_field` and `chat` as for it.
        text_field: Field of its rows that holds the text.
        chat: Needles and rows go through the chat template.
        documents: Documents to score; 0 for none.
        prefill: Tokens of a document that are read before the first block.
        block: Tokens of a block.
        chunk: Tokens of a call of a prefill; None for all in one call.
        tasks: Retrieval tasks.
        depths: Percent.
        trials: Prompts for each task, length and depth; 0 for none.
        haystack: Text for needles; empty for the default text.
        answer_tokens: Room for an answer, or None for what the task takes.
        batch_size: Prompts read together.
        continuations: Texts to continue; 0 for none.
        tokens: Tokens to continue them by.
        seed: Of needles, noise and bootstrap.
        limit: At most so many documents, and prompts for each task and length.
        only_self_check: Whether that is all.
        dtype: As `load` takes it; so is `device`.
        force: Take scales of another model: what they cost is the question.
    """

    source: ModelSource
    arms: tuple[EvalArm, ...]
    lengths: tuple[int, ...]
    data: str | None = None
    text_field: str | None = None
    chat: bool = False
    documents: int = 8
    prefill: int = 256
    block: int = 64
    chunk: int | None = None
    tasks: tuple[str, ...] = ("single",)
    depths: tuple[int, ...] = DEPTHS
    trials: int = 1
    haystack: tuple[str, ...] = ()
    answer_tokens: int | None = None
    batch_size: int = 1
    continuations: int = 2
    tokens: int = 64
    seed: int = 0
    limit: int | None = None
    only_self_check: bool = False
    dtype: str = "auto"
    device: str | None = None
    force: bool = False

    @property
    def longest(self) -> int:
        """The longest context."""
        return self.lengths[-1]

    def settings(self) -> dict[str, Any]:
        """What numbers depend on beside model, arms, lengths and seed; for the report."""
        names = ("prefill", "block", "chunk", "chat", "tokens", "batch_size", "limit")
        values = {name: getattr(self, name) for name in names}
        return {
            **values,
            "documents": self.documents,
            "tasks": list(self.tasks),
            "depths": list(self.depths),
            "trials": self.trials,
        }


def choose_lengths(
    asked: str | None,
    max_model_len: int | None,
    arms: Iterable[EvalArm],
    geometry: CacheGeometry,
    notify: Callable[[str], None],
) -> tuple[int, ...]:
    """The contexts to evaluate, ascending.

    Args:
        asked: ``1k,4k``, ``served``, or None for ``served`` where that is known.
        max_model_len: Length served, as engines call it.
        arms: Their scales know for which length they were made.
        geometry: The model's positions.
        notify: Told what was chosen, and what scales were not made for.

    Raises:
        InputError: Beyond the model's positions, or the length served is not known.
    """
    served = max_model_len or max((_context(arm) for arm in arms), default=0)
    if asked == SERVED and not served:
        raise InputError(
            "--lengths served: no scales say for which length they were made; give it with "
            "--max-model-len"
        )
    limit = geometry.max_positions
    if asked in (None, SERVED):
        lengths: Sequence[int] = (served or min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH),)
        notify(f"length {lengths[0]:,}; give others with --lengths 1k,4k,16k")
    else:
        lengths = parse_lengths(str(asked))
    if limit is not None and lengths[-1] > limit:
        raise InputError(
            f"a length of {lengths[-1]:,} is beyond the model's {limit:,} positions: what lies "
            f"there is noise; use at most {limit:,}"
        )
    for arm in arms:
        # Ranges that are computed from what is stored fit any length.
        is_static = arm.scheme is not None and arm.scheme.is_static
        known = arm.scales.provenance.longest_position if arm.scales and is_static else 0
        if 0 < known < lengths[-1]:
            notify(
                f"warning: the scales of {arm.name} were calibrated up to {known:,} tokens, and "
                f"{lengths[-1]:,} are evaluated: they may clip; calibrate with --context-length "
                f"{lengths[-1]}"
            )
    return tuple(lengths)


def check_judges(gate: Gate, request: Request) -> None:
    """Whether a gate has something to judge: with nothing, it would let everything pass.

    Raises:
        InputError: It has not.
    """
    named = {name for arm in request.arms for name in gate.limits(arm.name, arm.scheme_class)}
    judged = (
        request.documents
        or (request.trials and request.tasks)
        or (request.continuations and "agreement" in named)
    )
    if request.only_self_check or not judged:
        raise InputError(
            "--gate has nothing to judge: leave out --self-check, and evaluate --documents or "
            "--trials; a failed self-check is exit code 1 without a gate as well"
        )


def _context(arm: EvalArm) -> int:
    return arm.scales.provenance.context_length if arm.scales is not None else 0
