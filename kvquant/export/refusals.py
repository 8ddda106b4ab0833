"""What an engine cannot be given: each function raises one line that says why, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from kvquant.errors import ExportError
from kvquant.geometry import LayerKind

from .loader_rules import is_kv_scale
from .verify_report import some

if TYPE_CHECKING:
    from kvquant.scheme import QuantScheme

    from .checkpoint import Checkpoint
    from .target import ExportJob

FP8_SCALES = "For FP8 scales: kvquant solve STATS --format fp8 --output NAME"


def is_latent(job: ExportJob) -> bool:
    """Whether a layer that is to be quantized keeps a latent (MLA)."""
    return any(job.geometry.layers[i].kind is LayerKind.LATENT for i in job.scales.layers)


def architecture(checkpoint: Checkpoint) -> str:
    """The model class that config.json names, by which engines choose their own.

    Raises:
        ExportError: It names none.
    """
    names = checkpoint.config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ExportError(
            f"config.json of {checkpoint.directory} has no architectures, by which the engine "
            "finds its model class: add the name of the class"
        )
    return str(names[0])


def refuse_latent(job: ExportJob, engine: str, why: str) -> None:
    """Refuses models with multi-head latent attention.

    Raises:
        ExportError: A layer keeps a latent.
    """
    if is_latent(job):
        raise ExportError(f"{job.geometry.model_type} caches a latent (MLA): {engine} {why}")


def refuse_skipped_layers(job: ExportJob, engine: str) -> None:
    """Refuses scales that leave layers exact, where an engine quantizes all or none.

    Raises:
        ExportError: The scales lack a layer that keeps tokens.
    """
    skipped = skipped_layers(job)
    if skipped:
        raise ExportError(
            f"the scales leave {_layers(skipped)} exact, but {engine} quantizes "
            "the cache of all layers or of none: kvquant solve STATS --output NAME, without "
            "--skip-layers"
        )


def _layers(numbers: list[int]) -> str:
    """``layer 3``, ``layers 0,3``."""
    return f"layer{'s' if len(numbers) > 1 else ''} {','.join(map(str, numbers))}"


def skipped_layers(job: ExportJob) -> list[int]:
    """Layers that keep tokens and stay in the model's own dtype."""
    return [i for i in job.geometry.attention_layers if i not in job.scales.layers]


def same_kv_heads(job: ExportJob, engine: str, advice: str) -> int:
    """KV heads of the layers, where a format has one number for all.

    Raises:
        ExportError: Layers differ.
    """
    counts = sorted({job.geometry.layers[index].kv_heads for index in job.scales.layers})
    if len(counts) > 1:
        many = " and ".join(map(str, counts))
        raise ExportError(
            f"layers have {many} KV heads, but {engine} takes one number for all layers: {advice}"
        )
    return counts[0]


def refuse_other_formats(scheme: QuantScheme, engine: str, instead: Mapping[str, str]) -> None:
    """Refuses scales that are not those of FP8.

    Args:
        scheme: What the scales are for.
        engine: Its own name.
        instead: What to launch there for a format, a sentence each, by the format's name.

    Raises:
        ExportError: Keys or values are calibrated for another format.
    """
    for slot, what in ((scheme.key, "keys"), (scheme.value, "values")):
        name = slot.format.name
        if name != "fp8_e4m3":
            offer = instead.get(name, f"{engine} has no {name} cache.")
            raise ExportError(
                f"the scales are for {what} as {slot}, but {engine} reads calibrated scales of "
                f"fp8_e4m3 only. {offer} {FP8_SCALES}"
            )


def refuse_bases(checkpoint: Checkpoint, engine: str, readable: Collection[str]) -> None:
    """Refuses bases beside whose weights an engine reads no scales of ours.

    Args:
        checkpoint: The base.
        engine: Its own name.
        readable: Methods of quantized weights that are fine.

    Raises:
        ExportError: The weights are quantized in another way, or the base has scales of its own.
    """
    method = checkpoint.quant_method
    if method is not None and method not in readable:
        beside = f"only beside weights in {' or '.join(readable)}, or unquantized ones"
        raise ExportError(
            f"{checkpoint.directory} is quantized with {method}: {engine} reads KV scales {beside},"
            " and would serve this one at scale 1.0 without a word: export the unquantized model"
        )
    refuse_stale_scales(checkpoint)


def refuse_stale_scales(checkpoint: Checkpoint) -> None:
    """Refuses bases that hold KV scales already: a loader would read both, in any order.

    Raises:
        ExportError: There are such tensors.
    """
    stale = [name for name in checkpoint.tensors if is_kv_scale(name)]
    if stale:
        raise ExportError(
            f"{checkpoint.directory} has KV scales already ({some(len(stale), 'tensor')}, such as "
            f"{min(stale)}): export the checkpoint that they were added to"
        )
