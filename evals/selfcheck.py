"""Is what is measured of an arm really the arm? Checks that a harness owes its readers.

==========  ====================================================================
reads       keys that are read come from codes
poison      codes overwritten with noise wreck the predictions: they are read
floor       the unquantized cache read twice: below it nothing can be told apart
bytes       bytes held are those of the scheme's formula
window      sliding layers see what Transformers' own cache would see
padding     a padded row says what it says alone
scales      the scales belong to this model
numbers     what is read back is finite
==========  ====================================================================

All on the beginning of one document; docs/evaluation.md has the limits and why they are such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from kvquant.cache.cache import QuantizedCache
from kvquant.cache.check import tokens_nbytes
from kvquant.cache.readback import Readback
from kvquant.cache.sizes import live_nbytes as expected_nbytes
from kvquant.cache.summary import attention
from kvquant.errors import FingerprintError
from kvquant.fingerprint import Fingerprint
from kvquant.presets import preset

from .arms import BoundArm
from .held import live_nbytes, poison
from .padding_check import Makers, padding_divergences, padding_fault
from .perplexity import score_document
from .reading import Reader
from .results import Arm, Check, SelfCheck
from .shares import ReadCount, attention_shares
from .window_check import window_faults
from .windows import Span

POISON_FACTOR = 3.0
"""How many times the divergence with clean codes that with noise has to be, …"""
POISON_NATS = 1.0
"""… unless it is a nat per token, which is as bad for every text."""
PADDING_SHARE = 2.0
"""How many times its divergence an arm may owe to padding: that of codes which differ throughout,
as those of 8 bit do in bfloat16; …"""
PADDING_FACTOR = 10.0
"""… beside so many times what rounding makes of padding with the unquantized cache."""

FLOOR_SHARE = 0.5
"""Share of its divergence that an arm may owe to the model's own noise."""

STEPS = 5
"""Steps that the progress is told of."""

_REFERENCE = ""
"""The unquantized cache, where it stands among arms."""
_NO_NUMBERS = (
    "the model itself, with the unquantized cache, gives NaN or infinite logits, which nothing can "
    "be held against: its weights are damaged, or its dtype overflows (try --dtype float32)"
)
_TINY = 1e-7
"""KL that float32 cannot tell from 0, nats."""


@dataclass(frozen=True)
class Checked:
    """What a self-check leaves: its lines, and what the arm is and holds."""

    result: SelfCheck
    record: Arm


@dataclass(frozen=True)
class Sample:
    """What is read: one document's beginning, by the model that all arms share.

    Attributes:
        reader: Of the model.
        ids: ``[tokens]``.
        spans: Prefill and blocks.
        served: Fingerprint of the model.
        seed: Of the noise.
    """

    reader: Reader
    ids: NDArray[Any]
    spans: Sequence[Span]
    served: Fingerprint
    seed: int

    def divergences(
        self, caches: Mapping[str, Any], before: Callable[[Span], None]
    ) -> dict[str, float]:
        """Mean KL of what follows the prefill, with empty caches."""
        reference = self.reader.reference()
        scores = score_document(self.reader, self.ids, self.spans, reference, caches, before=before)
        return {name: float(it.kl.mean()) for name, it in scores.items()}

    def poisoned(self, arms: Makers) -> dict[str, float]:
        """The same with noise for what the prefill has stored."""
        first = self.spans[1]
        caches = {name: make() for name, make in arms.items()}

        def before(span: Span) -> None:
            if span == first:
                for cache in caches.values():
                    poison(cache, self.seed)

        return self.divergences(caches, before)


def self_check(
    reader: Reader,
    arms: Sequence[BoundArm],
    ids: NDArray[Any],
    spans: Sequence[Span],
    *,
    served: Fingerprint,
    seed: int = 0,
    progress: Callable[[str], None] = lambda step: None,
) -> tuple[Checked, ...]:
    """Checks all arms on the beginning of a document.

    Args:
        reader: Of the model.
        arms: To check.
        ids: The document, ``[tokens]``.
        spans: Prefill and blocks to read of it.
        served: Fingerprint of the model.
        seed: Of the noise.
        progress: Told of each of the `STEPS` as it begins.
    """
    sample = Sample(reader, ids, spans, served, seed)
    makers = {arm.name: arm.make for arm in arms}
    with_reference = {_REFERENCE: reader.reference, **makers}
    progress("reading")
    clean, shares, records = _read(sample, arms)
    progress("poison")
    poisoned = sample.poisoned(makers)
    progress("attention")
    masses = attention_shares(reader, ids, spans, makers)
    progress("padding")
    padded = padding_divergences(reader, ids, spans, with_reference)
    progress("windows")
    floor, padding_floor = clean[_REFERENCE], padded[_REFERENCE]
    found = []
    for arm, record in zip(arms, records, strict=True):
        name = arm.name
        is_exact = record.scheme_class == "exact"
        checks = (
            _reads(shares[name], masses[name], is_exact),
            _poison(poisoned[name], clean[name], is_exact or not shares[name]),
            _floor(floor, clean[name], is_exact),
            _bytes(record),
            _window(sample, arm),
            _padding(sample, arm, padded[name], padding_floor, clean[name]),
            _scales(sample, arm),
            _numbers(record),
        )
        lines = tuple(check for check in checks if check is not None)
        result = SelfCheck(
            name, lines, shares[name], masses[name], floor, poisoned[name], clean[name]
        )
        found.append(Checked(result, record))
    return tuple(found)


def _read(
    sample: Sample, arms: Sequence[BoundArm]
) -> tuple[dict[str, float], dict[str, float], list[Arm]]:
    """Divergences, shares of keys read from codes, and what each arm is and holds."""
    caches = {arm.name: arm.make() for arm in arms}
    counts = {name: ReadCount(sample.reader, cache) for name, cache in caches.items()}

    def before(span: Span) -> None:
        for count in counts.values():
            count.before(span)

    with ExitStack() as stack:
        readbacks = {
            name: stack.enter_context(Readback(cache, compares=True))
            for name, cache in caches.items()
        }
        again = {_REFERENCE: sample.reader.reference()}
        clean = sample.divergences({**again, **caches}, before)
    records = [_record(sample, it, caches[it.name], readbacks[it.name].errors) for it in arms]
    return clean, {name: count.share for name, count in counts.items()}, records


def _record(
    sample: Sample, arm: BoundArm, cache: Any, errors: Mapping[int, tuple[float, float]]
) -> Arm:
    scales = arm.arm.scales
    record = Arm(
        name=arm.name,
        scheme=arm.arm.description,
        scheme_class=arm.arm.scheme_class,
        scales=arm.arm.request.scales,
        scales_origin=None if scales is None else scales.provenance.origin,
        foreign=arm.foreign,
        kernel=_kernel(cache),
        layer_errors={str(index): error for index, error in sorted(errors.items())},
    )
    return with_bytes(record, sample.reader, cache)


def _kernel(cache: Any) -> str:
    """``numba, all 30 layers``."""
    if not isinstance(cache, QuantizedCache):
        return "Transformers' attention, on dequantized tokens"
    return attention(cache).removeprefix("over the codes by ").replace(" in ", ", ", 1)


def with_bytes(record: Arm, reader: Reader, cache: Any) -> Arm:
    """`record` with what its cache holds now."""
    geometry, tokens = reader.geometry, cache.get_seq_length()
    live, expected = live_nbytes(cache), None
    if isinstance(cache, QuantizedCache):
        live = tokens_nbytes(cache)
        expected = expected_nbytes(
            geometry,
            cache.scheme,
            tokens,
            reader.decoder.dtype.itemsize,
            keeps_positions=cache.plan.turns_means,
        )
    reference = expected_nbytes(geometry, preset("bf16"), tokens, 2)
    return replace(
        record,
        tokens=tokens,
        live_nbytes=live,
        expected_nbytes=expected,
        reference_nbytes=reference,
        bits_per_value=16 * live / reference,
    )


def _reads(share: float, mass: float | None, is_exact: bool) -> Check:
    by_mass = "" if mass is None or math.isnan(mass) else f", {mass:.1%} of attention"
    detail = f"{share:.1%} of the keys read are codes{by_mass}"
    if share > 0:
        return Check("reads", "passed", detail)
    if is_exact:
        return Check("reads", "noted", "nothing is quantized by this scheme")
    return Check(
        "reads",
        "failed",
        f"{detail}: nothing that is measured here tells anything about the scheme. Read longer "
        "documents, or keep fewer exact tokens; this check reads --prefill and two blocks, so that "
        "--prefill may be what is too small",
    )


def _poison(poisoned: float, clean: float, has_no_codes: bool) -> Check:
    detail = f"KL {poisoned:.3g} with noise for codes, {clean:.3g} without"
    if has_no_codes:
        status = "noted" if poisoned <= _TINY + clean else "failed"
        return Check("poison", status, f"{detail}; there are no codes")
    if math.isnan(clean):
        return Check("poison", "noted", f"{detail}: nothing to compare")
    if math.isnan(poisoned) or poisoned >= min(POISON_FACTOR * (clean + _TINY), POISON_NATS):
        return Check("poison", "passed", detail)
    return Check(
        "poison", "failed", f"{detail}: the codes are not what the model reads, or no better"
    )


def _floor(floor: float, clean: float, is_exact: bool) -> Check:
    if math.isnan(floor):
        return Check("floor", "failed", _NO_NUMBERS)
    detail = f"KL {floor:.2g} of the unquantized cache against itself"
    if math.isnan(clean):
        return Check("floor", "failed", f"{detail}, and this arm makes the logits NaN or infinite")
    if is_exact or floor <= max(FLOOR_SHARE * clean, _TINY):
        return Check("floor", "passed", detail)
    return Check(
        "floor",
        "failed",
        f"{detail}, {clean:.2g} of this arm: the model's own noise hides the difference; evaluate "
        "in float32",
    )


def _bytes(record: Arm) -> Check:
    if record.expected_nbytes is None:
        return Check("bytes", "noted", f"{record.live_nbytes:,} bytes; there is no formula")
    if record.live_nbytes == record.expected_nbytes:
        return Check("bytes", "passed", f"{record.live_nbytes:,} bytes, as by the formula")
    return Check(
        "bytes",
        "failed",
        f"{record.live_nbytes:,} bytes held, {record.expected_nbytes:,} by the formula: the cache "
        "does not keep what its scheme says",
    )


def _window(sample: Sample, arm: BoundArm) -> Check | None:
    faults = window_faults(sample.reader, arm.make)
    if faults is None:
        return None
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        return Check("window", "failed", f"{faults[0]}{more}")
    return Check("window", "passed", "sliding layers see what they see in Transformers' cache")


def _padding(
    sample: Sample, arm: BoundArm, found: float | str, floor: float | str, clean: float
) -> Check:
    is_ours = arm.arm.request.stock is None
    if isinstance(floor, str):
        return Check("padding", "noted", f"the model takes no padded batch ({floor})")
    if isinstance(found, str):
        status = "failed" if is_ours else "noted"
        return Check("padding", status, f"a padded batch is refused ({found})")
    fault = padding_fault(sample.reader, arm.make)
    if fault is not None:
        return Check("padding", "failed", fault)
    if math.isnan(floor):
        return Check("padding", "noted", "the model itself gives no numbers")
    detail = f"KL {found:.2g} of a padded row against the same alone"
    if found <= PADDING_SHARE * clean + PADDING_FACTOR * floor + _TINY:
        return Check("padding", "passed", detail)
    if not is_ours:
        return Check("padding", "noted", f"{detail}: this cache quantizes padding with the text")
    return Check(
        "padding", "failed", f"{detail}: padding changes what is stored of the tokens beside it"
    )


def _scales(sample: Sample, arm: BoundArm) -> Check | None:
    scales = getattr(arm.make(), "scales", None)
    if scales is None:
        return None
    try:
        scales.check_model(sample.served, sample.reader.geometry)
    except FingerprintError as error:
        if arm.foreign:
            return Check("scales", "noted", f"as asked for: {error}")
        return Check("scales", "failed", str(error))
    return Check("scales", "passed", f"measured on {scales.provenance.origin}")


def _numbers(record: Arm) -> Check:
    broken = [
        index for index, pair in record.layer_errors.items() if not all(map(math.isfinite, pair))
    ]
    if broken:
        return Check("numbers", "failed", f"layers {', '.join(broken)} read back no numbers")
    worst = max((max(pair) for pair in record.layer_errors.values()), default=0.0)
    return Check("numbers", "passed", f"read back within {worst:.2%} in the worst layer")
