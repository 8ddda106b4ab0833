"""How many sequences fit, how long they may be, and how fast a step can be: pure arithmetic.

docs/capacity.md derives the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from .formats import CacheFormat
from .memory import Memory
from .parallel import Parallel
from .sequence import SequencePrice, padding_layers
from .spec import ModelSpec
from .weights import Weights
from .workload import Workload

_ENDLESS = 2**40
"""Tokens or sequences: where so many fit, there is no limit."""


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        model: The model.
        weights: Its weights, or None if their size is not known.
        memory: One GPU's, or None if only sizes are asked for.
        parallel: How the model is spread.
        workload: Sequences that are alive at once.
        page_tokens: Tokens of a page of the engine's cache memory.
        reserved_tokens: Tokens that a server reserves for each sequence which does not page.
    """

    model: ModelSpec
    weights: Weights | None
    memory: Memory | None
    parallel: Parallel
    workload: Workload
    page_tokens: int
    reserved_tokens: int

    @property
    def weights_nbytes(self) -> int | None:
        """Bytes of weights on one GPU."""
        if self.weights is None:
            return None
        return -(-self.weights.nbytes // (self.parallel.tensor * self.parallel.pipeline))

    @property
    def free_nbytes(self) -> int | None:
        """Bytes for the cache on one GPU.

        Raises:
            InputError: The weights do not fit.
        """
        if self.memory is None or self.weights_nbytes is None:
            return None
        return self.memory.free_nbytes(self.weights_nbytes)


@dataclass(frozen=True)
class Allocated:
    """What an engine takes for the sequences, beside what they need.

    Attributes:
        sequence_nbytes: Bytes of one sequence of the longest length, the whole model's.
        utilisation: Share of that which is needed.
        max_sequences: Sequences that fit in all; None if that is not known or has no limit.
    """

    sequence_nbytes: int
    utilisation: float
    max_sequences: int | None


@dataclass(frozen=True)
class Decode:
    """A lower bound of one decode step: weights and cache are read once.

    Attributes:
        sequences: Sequences alive, on all GPUs.
        weights_nbytes: Read of the weights, by one GPU in a whole step.
        cache_nbytes: Read of the cache, by one GPU in a whole step.
        step_seconds: How long that takes.
        token_seconds: Part of it that one cached token costs.
        cache_bound_sequences: Sequences from which on more cache is read than weights.
    """

    sequences: int
    weights_nbytes: float
    cache_nbytes: float
    step_seconds: float
    token_seconds: float
    cache_bound_sequences: int | None

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences."""
        return self.sequences / self.step_seconds


@dataclass(frozen=True)
class FormatPlan:
    """The answers for one cache format.

    Attributes:
        form: The format.
        token_nbytes: Bytes that one more token costs while no window is full, the whole model's.
        sequence_nbytes: Bytes of one sequence of the longest length, the whole model's.
        sequences: How many are planned.
        total_nbytes: Bytes of all of them, on all GPUs of one copy of the model; copies that
            tensor parallelism makes count.
        gpu_token_nbytes: `token_nbytes` on the GPU that holds most.
        gpu_sequence_nbytes: `sequence_nbytes` on the GPU that holds most.
        gpu_nbytes: All sequences of one copy of the model on the GPU that holds most.
        max_sequences: Sequences that fit, on all GPUs; None if that is not known or has no limit.
        max_context: Longest sequences of which so many fit as are asked for (one, if none are),
            without the tokens that are added to each; None if that is not known or has no limit.
        outgrows_weights_tokens: Cached tokens from which on the cache has more bytes than the
            weights, in sequences of the longest length; None if that is not known.
        pages: With pages.
        reserved: With the longest possible sequence reserved.
        full_length_nbytes: Of `sequence_nbytes`, where windows are kept at full length.
        padding_layers: Layers that vLLM adds to make groups of one size.
        decode: The bound for a step, where the bandwidth is known and a sequence fits.
    """

    form: CacheFormat
    token_nbytes: Fraction
    sequence_nbytes: int
    sequences: int
    total_nbytes: int
    gpu_token_nbytes: Fraction
    gpu_sequence_nbytes: int
    gpu_nbytes: int
    max_sequences: int | None
    max_context: int | None
    outgrows_weights_tokens: int | None
    pages: Allocated
    reserved: Allocated
    full_length_nbytes: int
    padding_layers: int
    decode: Decode | None


def plan(request: Request, form: CacheFormat) -> FormatPlan:
    """Plans one format.

    Raises:
        InputError: The weights do not fit.
        SchemeError: The model has layers that cannot be stored in this format.
    """
    return _Planner(request, form).plan()


class _Planner:
    """The prices of one format on the whole model and on each stage's GPUs."""

    def __init__(self, request: Request, form: CacheFormat) -> None:
        self.request, self.form = request, form
        layers = len(request.model.geometry.layers)
        self.whole = SequencePrice(request.model, form, Parallel(), range(layers))
        self.stages = [
            SequencePrice(request.model, form, request.parallel, stage)
            for stage in request.parallel.stages(layers)
        ]
        self.free = request.free_nbytes

    def plan(self) -> FormatPlan:
        workload, longest = self.request.workload, self.request.workload.longest
        most = self._max_sequences(self._live)
        count = workload.concurrency
        planned = count if count is not None else (1 if most is None else most)
        here = self._per_copy(planned)
        weights, sequence = self.request.weights, self.whole.nbytes(longest)
        kinds = list(self.whole.kinds())
        gpu_sequence = max(stage.nbytes(longest) for stage in self.stages)
        return FormatPlan(
            form=self.form,
            token_nbytes=self.whole.token_nbytes,
            sequence_nbytes=sequence,
            sequences=planned,
            total_nbytes=sum(self._stage_nbytes(here)) * self.request.parallel.tensor,
            gpu_token_nbytes=max(stage.token_nbytes for stage in self.stages),
            gpu_sequence_nbytes=gpu_sequence,
            gpu_nbytes=max(self._stage_nbytes(here)),
            max_sequences=most,
            max_context=self._max_context(1 if count is None else count),
            outgrows_weights_tokens=(
                weights.nbytes * longest // sequence if weights and sequence else None
            ),
            pages=self._allocated(
                self.whole.paged_nbytes(longest, self.request.page_tokens), self._paged
            ),
            reserved=self._allocated(
                self.whole.nbytes(self.request.reserved_tokens), self._reserved
            ),
            full_length_nbytes=self.whole.full_length_nbytes(longest),
            padding_layers=padding_layers(kinds),
            decode=self._decode(planned),
        )

    def _per_copy(self, sequences: int) -> int:
        """Sequences on one copy of the model, where it has most."""
        return -(-sequences // self.request.parallel.data)

    # --- what a number of sequences takes on each stage -------------------------------------------

    def _stage_nbytes(self, count: int) -> list[int]:
        """Bytes needed by `count` sequences on a GPU of each stage."""
        return self._totals(self.request.workload.sequences(count))

    def _totals(self, sequences: Mapping[int, int]) -> list[int]:
        workload = self.request.workload
        if not workload.prefix_tokens:
            return [
                sum(times * stage.nbytes(length) for length, times in sequences.items())
                for stage in self.stages
            ]
        return [
            workload.adapters * stage.nbytes(workload.prefix_tokens)
            + sum(
                times * stage.own_nbytes(length, min(workload.prefix_tokens, length))
                for length, times in sequences.items()
            )
            for stage in self.stages
        ]

    def _live(self, count: int) -> int:
        return max(self._stage_nbytes(count))

    def _paged(self, count: int) -> int:
        """Bytes of pages: what is needed, and the unused room of each sequence."""
        sequences, page = self.request.workload.sequences(count), self.request.page_tokens
        return max(
            needed
            + sum(
                times * (stage.paged_nbytes(length, page) - stage.nbytes(length))
                for length, times in sequences.items()
            )
            for stage, needed in zip(self.stages, self._totals(sequences), strict=True)
        )

    def _reserved(self, count: int) -> int:
        reserved = self.request.reserved_tokens
        return count * max(stage.nbytes(reserved) for stage in self.stages)

    # --- the inverse questions --------------------------------------------------------------------

    def _max_sequences(self, nbytes: Callable[[int], int]) -> int | None:
        """Sequences that fit on all GPUs, if each copy of the model takes `nbytes` for its own."""
        free = self.free
        if free is None:
            return None
        found = _largest(lambda count: nbytes(count) <= free)
        return None if found is None else found * self.request.parallel.data

    def _max_context(self, sequences: int) -> int | None:
        free = self.free
        if free is None:
            return None
        workload, count = self.request.workload, self._per_copy(sequences)

        def fits(context: int) -> bool:
            return max(self._totals({context + workload.added_tokens: count})) <= free

        return _largest(fits)

    def _allocated(self, sequence: int, nbytes: Callable[[int], int]) -> Allocated:
        needed = self.whole.nbytes(self.request.workload.longest)
        share = needed / sequence if sequence else 1.0
        return Allocated(sequence, share, self._max_sequences(nbytes))

    # --- speed ------------------------------------------------------------------------------------

    def _decode(self, sequences: int) -> Decode | None:
        memory, weights, parallel = self.request.memory, self.request.weights, self.request.parallel
        if memory is None or memory.bandwidth is None or weights is None or not sequences:
            return None
        count = self._per_copy(sequences)
        batches = min(parallel.pipeline, count)
        cache = sum(self._stage_nbytes(count)) / batches
        read = self._weights_read(weights, count)
        return Decode(
            sequences=sequences,
            weights_nbytes=read,
            cache_nbytes=cache,
            step_seconds=(read + cache) / memory.bandwidth,
            token_seconds=float(sum(stage.token_nbytes for stage in self.stages))
            / batches
            / memory.bandwidth,
            cache_bound_sequences=self._cache_bound(weights),
        )

    def _weights_read(self, weights: Weights, count: int) -> float:
        """Bytes of weights that one GPU of each stage reads, together, in one step."""
        batches = min(self.request.parallel.pipeline, count)
        return weights.read_nbytes(-(-count // batches)) / self.request.parallel.tensor

    def _cache_bound(self, weights: Weights) -> int | None:
        """Sequences on all GPUs from which on a step reads more cache than weights."""
        stages = len(self.stages)

        def reads_less(count: int) -> bool:
            cache = sum(self._stage_nbytes(count)) / min(stages, count)
            return cache <= self._weights_read(weights, count)

        below = _largest(reads_less, 2**20)
        return None if below is None else (below + 1) * self.request.parallel.data


def _largest(fits: Callable[[int], bool], endless: int = _ENDLESS) -> int | None:
    """The largest number that fits, found by doubling and halving; 0 if not even 1 does.

    None if all up to `endless` fit.
    """
    if not fits(1):
        return 0
    low = 1
    while fits(2 * low):
        low *= 2
        if low >= endless:
            return None
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
