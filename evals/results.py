"""What an evaluation found, as plain frozen records: the report's content, and its JSON.

    EvalReport
    ├── Origin        model, adapters, versions, seeds: what produced it
    ├── Arm           one way of keeping the cache, and what it holds
    ├── SelfCheck     is the harness reading that cache at all
    ├── Perplexity    token by token against the unquantized cache, with a Divergence for each arm
    ├── Retrieval     needles: a Cell for each prompt, with everybody's answer
    ├── Continuation  greedy texts side by side
    └── Verdict       what the gate made of it, line by line

docs/evaluation.md says how each number comes about. Arms are named as the user named them; the
unquantized cache, which all of them are held against, is none of them.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from kvquant.errors import FileFormatError

FORMAT = "kvquant-evaluation"
VERSION = 1


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Origin:
    """What produced the numbers.

    Attributes:
        model: Model as the user named it; `title` is for people.
        title: Model and adapters without directories.
        adapters: Adapter directories as the user named them.
        fingerprint: Of model, adapters and tokenizer, in one line.
        parameters: Parameters of the model.
        dtype: Of model and unquantized cache.
        device: Where it ran.
        seed: Of needles and bootstrap.
        lengths: Contexts evaluated, tokens.
        settings: Other settings that numbers depend on, by their option's name.
        versions: Library versions.
        command: The command line.
        created: UTC, ISO 8601.
    """

    model: str
    title: str
    adapters: tuple[str, ...]
    fingerprint: str
    parameters: int
    dtype: str
    device: str
    seed: int
    lengths: tuple[int, ...]
    settings: dict[str, Any]
    versions: dict[str, str]
    command: str
    created: str


@dataclass(frozen=True)
class Arm:
    """One way of keeping the cache.

    Attributes:
        name: As asked for: ``int4``, ``int4@ft-scales``, ``ft-scales``, ``hf:quanto``.
        scheme: Its formats in words.
        scheme_class: What the gate's thresholds go by: ``exact``, ``8-bit``, ``4-bit``, ``3-bit``.
        scales: File of its scales, if it has any.
        scales_origin: Model that they were measured on, and their fingerprint.
        foreign: Whether that is another model or adapter set than the one evaluated.
        kernel: What attended to the cache.
        tokens: Tokens held when the bytes were counted.
        live_nbytes: Bytes that those need.
        expected_nbytes: The same by the scheme's formula; None where there is none.
        reference_nbytes: Bytes of the unquantized cache in 16 bit.
        bits_per_value: Bits per number held, metadata and exact tokens included.
        layer_errors: For each layer that caches anything: relative error of keys and of values as
            read back, norm of the difference by norm.
    """

    name: str
    scheme: str
    scheme_class: str
    scales: str | None = None
    scales_origin: str | None = None
    foreign: bool = False
    kernel: str = ""
    tokens: int = 0
    live_nbytes: int = 0
    expected_nbytes: int | None = None
    reference_nbytes: int = 0
    bits_per_value: float = 0.0
    layer_errors: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times smaller than the unquantized cache in 16 bit."""
        return self.reference_nbytes / self.live_nbytes if self.live_nbytes else math.nan


@dataclass(frozen=True)
class Check:
    """One line of a self-check: its name, whether it ``passed``, ``failed`` or is ``noted``."""

    name: str
    status: str
    detail: str


@dataclass(frozen=True)
class SelfCheck:
    """Whether what is measured of an arm is the arm.

    Attributes:
        arm: Its name.
        checks: Line by line.
        quantized_reads: Share of the keys read that were read from codes, by count.
        quantized_mass: The same weighted by attention; None where eager attention is not to be had.
        floor: Mean KL of the unquantized cache against itself, nats per token.
        poison: Mean KL when the codes are overwritten with noise.
        clean: Mean KL of the same tokens when they are not.
    """

    arm: str
    checks: tuple[Check, ...]
    quantized_reads: float
    quantized_mass: float | None
    floor: float
    poison: float
    clean: float

    @property
    def failures(self) -> tuple[Check, ...]:
        """What must not be."""
        return tuple(check for check in self.checks if check.status == "failed")


@dataclass(frozen=True)
class Bucket:
    """Tokens with ``past_from`` to ``past_to - 1`` tokens before them, and their mean KL."""

    past_from: int
    past_to: int
    tokens: int
    kl_mean: float


@dataclass(frozen=True)
class Divergence:
    """How far an arm takes the model's predictions.

    Attributes:
        nll: Mean negative log-likelihood of the text, nats per token; `ppl` is its exponential.
        delta_ln_ppl: Paired difference of `nll` to the unquantized cache; interval from a bootstrap
            over documents, as of every mean here.
        kl_mean: KL(unquantized || arm), nats per token.
        kl_median: Of single tokens; so are the percentile and the maximum.
        buckets: Mean KL by the number of tokens before, in powers of two.
        kl_slope: Change of the mean KL per doubling of the context, least squares within documents;
            None with fewer than two buckets.
        top1: Share of tokens after which the likeliest next token is the same; Wilson interval for
            as many tokens as count, since those of a document are not independent.
        top1_confident: The same where the unquantized cache gives its favourite more than half;
            None where it never does.
        confident_tokens: How many those are.
        delta_p_rms: Root mean square of the difference in probability of the true token.
    """

    nll: float
    delta_ln_ppl: Interval
    kl_mean: Interval
    kl_median: float
    kl_p99: float
    kl_max: float
    buckets: tuple[Bucket, ...]
    kl_slope: Interval | None
    top1: Interval
    top1_confident: Interval | None
    confident_tokens: int
    delta_p_rms: float

    @property
    def ppl(self) -> float:
        """Perplexity."""
        return math.exp(min(self.nll, 700.0))


@dataclass(frozen=True)
class Perplexity:
    """Block decode over a text.

    Attributes:
        documents: Documents read, each with a cache of its own.
        document_tokens: Tokens of the longest one.
        prefill: Tokens read before the first block.
        block: Tokens of a block; 1 is true decoding.
        scored_tokens: Tokens scored, over all documents.
        reference_nll: Mean negative log-likelihood with the unquantized cache.
        corpus: What the text is: source, rows, tokens, SHA-256 of the token ids.
        arms: By name.
    """

    documents: int
    document_tokens: int
    prefill: int
    block: int
    scored_tokens: int
    reference_nll: float
    corpus: dict[str, Any]
    arms: dict[str, Divergence]

    @property
    def reference_ppl(self) -> float:
        """Perplexity with the unquantized cache."""
        return math.exp(min(self.reference_nll, 700.0))


@dataclass(frozen=True)
class Answer:
    """What was said, and which share of what was asked for is in it, 0 to 1."""

    text: str
    score: float

    @property
    def is_right(self) -> bool:
        """Whether all of it is."""
        return self.score == 1.0


@dataclass(frozen=True)
class Cell:
    """One prompt.

    Attributes:
        task: ``single``, ``repeat``, ``multikey``, ``multivalue``, ``tracking``.
        length: Tokens of prompt and answer together.
        depth: Where the needle is, 0 (beginning) to 100 (just before the question).
        trial: Number among those of the same task, length and depth.
        expected: What the answer has to contain.
        reference: Answer with the unquantized cache.
        arms: Answers by arm.
    """

    task: str
    length: int
    depth: int
    trial: int
    expected: tuple[str, ...]
    reference: Answer
    arms: dict[str, Answer]


@dataclass(frozen=True)
class Losses:
    """Answers of one arm to one task at one length, against those with the unquantized cache.

    Attributes:
        arm: Its name.
        task: Of the cells counted.
        length: Of the cells counted.
        cells: How many.
        trials: Of these, how many the unquantized cache got right: what can be lost.
        losses: Of these, how many the arm gets wrong.
        gains: What the arm gets right and the unquantized cache wrong.
        loss_rate_upper: Upper 95 % bound on the rate of losses.
        p_value: Exact McNemar test, one-sided: losses no more likely than gains.
    """

    arm: str
    task: str
    length: int
    cells: int
    trials: int
    losses: int
    gains: int
    loss_rate_upper: float
    p_value: float


@dataclass(frozen=True)
class Retrieval:
    """Needles in haystacks.

    Attributes:
        haystack: Where its text comes from.
        sha256: Hash of that text.
        chat: Whether prompts went through the chat template.
        answer_tokens: Tokens that an answer has room for.
        cells: One for each prompt.
        losses: For each arm, task and length.
    """

    haystack: str
    sha256: str
    chat: bool
    answer_tokens: int
    cells: tuple[Cell, ...]
    losses: tuple[Losses, ...]


@dataclass(frozen=True)
class Continuation:
    """How one text goes on, greedily, with the unquantized cache and with each arm.

    Attributes:
        prompt_tokens: Tokens before.
        tokens: Tokens decoded.
        reference: The text with the unquantized cache.
        texts: With each arm.
        first_difference: For each arm the first token that differs; None: none does.
        agreement: For each arm the share of tokens that are the same in the same place.
    """

    prompt_tokens: int
    tokens: int
    reference: str
    texts: dict[str, str]
    first_difference: dict[str, int | None]
    agreement: dict[str, float]


@dataclass(frozen=True)
class GateLine:
    """One threshold held against one number.

    Attributes:
        arm: Whose number.
        name: Which: ``kl_mean``, ``loss_rate`` …, with the length where there is one.
        value: As measured; None if it was not.
        limit: What it may be at most (at least, of an agreement or a p-value).
        status: ``passed``, ``failed``, or ``undecided``: too few trials, which is no pass.
        detail: In words, with what to do.
    """

    arm: str
    name: str
    value: float | None
    limit: float
    status: str
    detail: str


@dataclass(frozen=True)
class Verdict:
    """What the gate says.

    Attributes:
        gate: Where the thresholds come from: a file, or ``defaults``.
        lines: All of them.
        failed_checks: Arms whose self-check failed; nothing measured of them counts.
    """

    gate: str
    lines: tuple[GateLine, ...]
    failed_checks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every line did, of every arm."""
        return not self.failed_checks and all(line.status == "passed" for line in self.lines)

    def passed_by(self, arm: str) -> bool:
        """Whether every line of one arm did."""
        lines = (line.status == "passed" for line in self.lines if line.arm == arm)
        return arm not in self.failed_checks and all(lines)


@dataclass(frozen=True)
class EvalReport:
    """Everything that one run found; parts that were not asked for are None or empty."""

    origin: Origin
    arms: tuple[Arm, ...]
    self_checks: tuple[SelfCheck, ...] = ()
    perplexity: Perplexity | None = None
    retrieval: Retrieval | None = None
    continuations: tuple[Continuation, ...] = ()
    verdict: Verdict | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; numbers that JSON has no word for become null."""
        values = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return {name: _plain(value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any], path: str = "the report") -> EvalReport:
        """Inverse of `to_dict`.

        Raises:
            FileFormatError: Something else, a damaged one, or one of a newer version.
        """
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise FileFormatError(f"{path} is no evaluation: kvquant evaluate writes one")
        if values.get("version") != VERSION:
            raise FileFormatError(
                f"{path} has version {values.get('version')}, this kvquant reads {VERSION}: "
                "upgrade kvquant, or evaluate again"
            )
        content = {name: it for name, it in values.items() if name not in ("format", "version")}
        try:
            report: EvalReport = build(cls, content)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise FileFormatError(f"{path} is damaged: {error!r}") from error
        return report


def build(kind: Any, value: Any) -> Any:
    """A value of the annotated type `kind` from plain JSON values.

    Raises:
        TypeError: It is none.
        ValueError: A tuple of another length.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return build(next(it for it in arguments if it is not type(None)), value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        assert isinstance(kind, type)
        return kind(**{name: build(hints[name], it) for name, it in _of(dict, value).items()})
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(build(arguments[0], it) for it in _of(list, value))
        return tuple(build(one, it) for one, it in zip(arguments, _of(list, value), strict=True))
    if origin is dict:
        return {name: build(arguments[1], it) for name, it in _of(dict, value).items()}
    if kind is float:
        # What is no number in JSON has become null.
        return math.nan if value is None else float(_of((int, float), value))
    return _of(kind, value)


def _of(kind: Any, value: Any) -> Any:
    """`value`, made sure to be of a type; True is no number."""
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise TypeError(f"{value!r} where {kind} is wanted")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(it) for name, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(it) for it in value]
    return value
