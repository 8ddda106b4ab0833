"""Arms: the ways of keeping the cache that are held against the unquantized one.

--scheme int4              a preset, computing its own scales
--scheme int4@ft-scales    a preset with calibrated scales or means
--scales ft-scales         calibrated scales, in the format they were made for
--scheme hf:quanto         a cache of Transformers: quanto, hqq (int4, 128 exact tokens), fp8
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant.errors import FingerprintError, InputError, SchemeError
from kvquant.geometry import CacheGeometry, LayerKind
from kvquant.presets import preset, preset_names

if TYPE_CHECKING:
    from kvquant.scales import KVScales
    from kvquant.scheme import QuantScheme

STOCK = {
    "quanto": ("quanto int4, groups of 64, 128 exact tokens", "4-bit", {"nbits": 4}),
    "hqq": (
        "hqq int4, groups of 64, 128 exact tokens",
        "4-bit",
        {"nbits": 4, "axis_key": 1, "axis_value": 1},
    ),
    "fp8": ("fp8 per tensor, scale of the first call", "8-bit", {}),
}
"""Caches of Transformers: what they are, their class, their arguments."""

_STOCK_NEEDS = {"quanto": "optimum-quanto", "hqq": "hqq"}


@dataclass(frozen=True)
class ArmRequest:
    """One arm as asked for.

    Attributes:
        name: How it is called in all results.
        scheme: Preset, or None for that of the scales.
        scales: Scales file, or None.
        stock: Cache of Transformers, or None.
    """

    name: str
    scheme: str | None = None
    scales: str | None = None
    stock: str | None = None


def parse_arms(schemes: Sequence[str], scales: Sequence[str]) -> tuple[ArmRequest, ...]:
    """What ``--scheme`` and ``--scales`` ask for, in that order.

    Raises:
        InputError: Nothing, the same twice, or no such cache of Transformers.
        SchemeError: No such preset.
    """
    arms = [*map(_scheme_arm, schemes), *(ArmRequest(_stem(path), scales=path) for path in scales)]
    if not arms:
        raise InputError(
            "nothing to evaluate: give --scales FILE of kvquant calibrate, or --scheme NAME "
            f"({', '.join(preset_names())}, hf:quanto, hf:hqq, hf:fp8)"
        )
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two arms are called {name}: rename a scales file, or drop one")
    return tuple(arms)


def _scheme_arm(text: str) -> ArmRequest:
    kind, _, backend = text.partition(":")
    if kind == "hf":
        if backend not in STOCK:
            raise InputError(f"{text}: caches of Transformers are hf:{', hf:'.join(STOCK)}")
        return ArmRequest(text, stock=backend)
    name, _, path = text.partition("@")
    preset(name)
    if "@" in text and not path:
        raise InputError(f"{text}: a scales file is to follow the @")
    return ArmRequest(f"{name}@{_stem(path)}" if path else name, scheme=name, scales=path or None)


def _stem(path: str) -> str:
    return Path(path).name.removesuffix(".safetensors") or path


@dataclass(frozen=True)
class EvalArm:
    """An arm that fits a model's geometry; `bind` ties it to the model.

    Attributes:
        request: As asked for.
        scales: Its scales, read.
        scheme: What it is quantized to; None for a cache of Transformers.
    """

    request: ArmRequest
    scales: KVScales | None
    scheme: QuantScheme | None

    @property
    def name(self) -> str:
        """As in all results."""
        return self.request.name

    @property
    def scheme_class(self) -> str:
        """``8-bit``, ``4-bit``, ``3-bit`` or ``exact``: what the gate's thresholds go by."""
        if self.request.stock is not None:
            return STOCK[self.request.stock][1]
        assert self.scheme is not None
        slots = [self.scheme, *(own for _, own in self.scheme.layers)]
        bits = [
            slot.format.bits
            for scheme in slots
            for slot in (scheme.key, scheme.value)
            if slot.format.is_scaled
        ]
        return f"{min(bits)}-bit" if bits else "exact"

    @property
    def description(self) -> str:
        """Its formats in words."""
        return STOCK[self.request.stock][0] if self.request.stock else str(self.scheme)


def prepare_arms(requests: Iterable[ArmRequest], geometry: CacheGeometry) -> tuple[EvalArm, ...]:
    """Reads scales and checks that everything fits the model's cache, before weights are read.

    Raises:
        FileFormatError: No such scales file, or a damaged one.
        FingerprintError: Scales of a cache of another shape.
        SchemeError: A scheme that does not fit.
        InputError: A cache of Transformers whose package is missing.
    """
    return tuple(_prepare(request, geometry) for request in requests)


def _prepare(request: ArmRequest, geometry: CacheGeometry) -> EvalArm:
    if request.stock is not None:
        _check_stock(request, geometry)
        return EvalArm(request, None, None)
    scales = None
    if request.scales is not None:
        from kvquant.storage import load_scales

        scales = load_scales(request.scales)
        if scales.geometry != geometry:
            from kvquant.fingerprint import Fingerprint

            scales.check_model(Fingerprint(), geometry)  # says what differs
    from kvquant.cache.choose import choose_scheme

    scheme = choose_scheme(request.scheme, scales, {}, {}, geometry)
    scheme.check(geometry)
    return EvalArm(request, scales, scheme)


def _check_stock(request: ArmRequest, geometry: CacheGeometry) -> None:
    import importlib.util

    backend = request.stock or ""
    package = _STOCK_NEEDS.get(backend)
    modules = {"optimum-quanto": "optimum", "hqq": "hqq"}
    if package is not None and importlib.util.find_spec(modules[package]) is None:
        raise InputError(f"{request.name} needs {package}: pip install 'kvquant-toolkit[compare]'")
    if backend == "fp8" and not _has_fp8_cache():
        raise InputError(f"{request.name} needs Transformers 5.21 or newer: upgrade it")
    others = {layer.kind for layer in geometry.layers} - {LayerKind.FULL}
    if others:
        kinds = ", ".join(sorted(kind.value for kind in others))
        raise SchemeError(
            f"{request.name}: Transformers' quantized cache takes models with full attention in "
            f"every layer; this one has {kinds} layers"
        )


def _has_fp8_cache() -> bool:
    from transformers import cache_utils

    return hasattr(cache_utils, "Fp8QuantizedLayer")


@dataclass(frozen=True)
class BoundArm:
    """An arm of a loaded model.

    Attributes:
        arm: What it is.
        make: Makes an empty cache.
        foreign: Whether its scales were measured on another model or adapter set.
    """

    arm: EvalArm
    make: Callable[[], Any]
    foreign: bool = False

    @property
    def name(self) -> str:
        """As in all results."""
        return self.arm.name


def bind(
    arm: EvalArm, model: Any, tokenizer: Any, force: bool = False, option: str = "--force"
) -> BoundArm:
    """Ties an arm to the model that it is measured on.

    Args:
        arm: The arm.
        model: A Transformers model or a PeftModel, with its adapters active.
        tokenizer: Its tokenizer.
        force: Take scales of another model of the same shape: the question may be what they cost.
        option: How users ask for that.

    Raises:
        FingerprintError: They are another model's, and nobody said that they may be.
    """
    from kvquant.cache.cache import QuantizedCache

    if arm.request.stock is not None:
        return BoundArm(arm, lambda: _stock_cache(arm.request.stock or "", model))
    foreign = False
    if arm.scales is not None:
        from kvquant.fingerprint import fingerprint

        served = fingerprint(model, tokenizer)
        try:
            arm.scales.check_model(served, CacheGeometry.from_config(model.config))
        except FingerprintError as error:
            if not force:
                raise FingerprintError(
                    f"{arm.name}: {error}; or ask on purpose what they cost with {option}"
                ) from error
            foreign = True

    def make() -> Any:
        # Looked at above, once: `force` only keeps each cache from doing it again.
        return QuantizedCache.from_model(model, arm.scheme, arm.scales, force=True)

    return BoundArm(arm, make, foreign)


def _stock_cache(backend: str, model: Any) -> Any:
    from kvquant.models.adapters import base_model

    from .stock import StockCache

    config = base_model(model).get_decoder().config
    return StockCache(backend, config, **STOCK[backend][2])
