"""Calibrated scales as engines read them: FP8, few, and the same number in every dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvquant.errors import ExportError
from kvquant.geometry import LayerKind
from kvquant.scheme import Granularity

from .refusals import refuse_other_formats

if TYPE_CHECKING:
    import torch

    from kvquant.scales import KVScales, TensorScales
    from kvquant.scheme import QuantScheme

    from .target import ExportJob

_ROUNDED = (
    "each scale is rounded up to the next bfloat16 number, by less than 0.8 %, so that engines "
    "that keep it in bfloat16 and those that keep it in float32 use the same one"
)

LORA = (
    "the scales belong to the server: LoRA adapters served beside the base use them too, so "
    "calibrate with the adapters that will be served"
)


def up_to_bfloat16(scale: torch.Tensor) -> torch.Tensor:
    """The smallest numbers that bfloat16 holds and that are not below `scale`.

    Args:
        scale: float32 of any shape, positive, at most the largest bfloat16 (3.39e38).

    Returns:
        float32 of the same shape.
    """
    import torch

    # A bfloat16 is the upper half of a float32, and positive floats are ordered like their bits.
    return ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def tensor_scales(
    job: ExportJob,
    per_head: bool,
    engine: str = "the engine",
    instead: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[int, tuple[torch.Tensor, torch.Tensor]], tuple[str, ...]]:
    """Scales of keys and values by layer, as FP8 engines take them: ``amax / 448``.

    Finer scales are reduced by their maximum. A latent layer (MLA) keeps in one cache what the
    geometry has in two slots, so its two scales are the larger of both. There is no floor: a scale
    below 1 is what nearly every model needs.

    Args:
        job: What is to be exported.
        per_head: Whether one scale per KV head is wanted, rather than one.
        engine: The engine's own name.
        instead: What to launch there for other formats, a sentence each, by the format's name.

    Returns:
        For each layer the scales of keys and of values, float32 ``[1]`` or ``[kv_heads]``, rounded
        up to bfloat16; and remarks on what was done to them.

    Raises:
        ExportError: The scales are not those of fp8_e4m3, or too coarse.
    """
    refuse_other_formats(job.scales.scheme, engine, instead)
    wanted = Granularity.PER_HEAD if per_head else Granularity.PER_TENSOR
    reduced = _reduce(job.scales, wanted)
    pairs = {
        index: (layer.key.scale.flatten(), layer.value.scale.flatten())
        for index, layer in sorted(reduced.layers.items())
    }
    latent = [index for index in pairs if job.geometry.layers[index].kind is LayerKind.LATENT]
    remarks = [
        *_per_layer(job, per_head, engine),
        *_reduction(job.scales, reduced),
        *_joining(pairs, latent),
        *exact_tokens(job.scales.scheme),
    ]
    for index in latent:
        larger = pairs[index][0].maximum(pairs[index][1])
        pairs[index] = larger, larger
    rounded = {i: (up_to_bfloat16(key), up_to_bfloat16(value)) for i, (key, value) in pairs.items()}
    return rounded, (*remarks, _ROUNDED)


def times(ratio: float) -> str:
    """``1.25 times``, ``40 times``."""
    return f"{ratio:.3g} times" if ratio < 1000 else f"{ratio:,.0f} times"


def exact_tokens(scheme: QuantScheme) -> list[str]:
    """What serving engines do with tokens that the scheme keeps exactly."""
    if not scheme.sink_tokens and not scheme.residual_length:
        return []
    return [
        f"the scheme keeps the first {scheme.sink_tokens} and the newest {scheme.residual_length} "
        "tokens exactly; serving engines quantize all tokens"
    ]


def _reduce(scales: KVScales, wanted: Granularity) -> KVScales:
    for slot, what in ((scales.scheme.key, "keys"), (scales.scheme.value, "values")):
        if slot.granularity.fineness < wanted.fineness:
            raise ExportError(
                f"{what} are calibrated {slot.granularity.value}, which gives no scale for each "
                f"KV head: kvquant solve STATS --format fp8 --granularity {wanted.value} --output "
                "NAME"
            )
    return scales.reduce(wanted)


def _per_layer(job: ExportJob, per_head: bool, engine: str) -> list[str]:
    if per_head or not job.per_head:
        return []
    return [f"{engine} takes no scales per head from such a checkpoint: they are per layer"]


def _slots(scales: KVScales) -> Iterator[tuple[int, str, TensorScales]]:
    for index, layer in sorted(scales.layers.items()):
        yield index, "keys", layer.key
        yield index, "values", layer.value


def _reduction(fine: KVScales, coarse: KVScales) -> list[str]:
    """What became of finer scales, with the one that is farthest from its own need."""
    if (fine.scheme.key, fine.scheme.value) == (coarse.scheme.key, coarse.scheme.value):
        return []
    steps = []
    for (index, what, before), (_, _, after) in zip(_slots(fine), _slots(coarse), strict=True):
        ratios = (after.scale / before.scale).flatten()
        needed = float(before.scale.flatten()[ratios.argmax()])
        steps.append((float(ratios.max()), needed, f"{what} of layer {index}"))
    ratio, needed, where = max(steps)
    return [
        f"keys {fine.scheme.key.granularity.value} and values "
        f"{fine.scheme.value.granularity.value} were reduced to "
        f"{coarse.scheme.key.granularity.value} by the maximum; most in the {where}, where a scale "
        f"of {needed:.3g} would have done and {needed * ratio:.3g} is used ({times(ratio)})"
    ]


def _joining(
    pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]], latent: list[int]
) -> list[str]:
    """What latent layers pay for one scale, with the layer that pays most."""
    if not latent:
        return []
    ratios = {i: max(float(k / v), float(v / k)) for i in latent for k, v in [pairs[i]]}
    most = max(ratios, key=ratios.__getitem__)
    key, value = pairs[most]
    return [
        "latent and rotary part of an MLA layer are one cache with one scale, the larger of both; "
        f"most apart in layer {most}: latent {float(key):.3g}, rotary part {float(value):.3g} "
        f"({times(ratios[most])})"
    ]
