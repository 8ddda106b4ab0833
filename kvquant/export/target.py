"""What an engine's exporter is asked for, and what it answers.

An exporter writes nothing itself. It is given an `ExportJob` and returns a `Contribution`: tensors
for the scales shard, keys of config.json, small files, what to launch. `kvquant.export.directory`
puts one or several of them into one directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from kvquant.geometry import CacheGeometry
    from kvquant.scales import KVScales

    from .checkpoint import AttentionModule, Checkpoint


@dataclass(frozen=True)
class ExportJob:
    """What is to be exported.

    Attributes:
        checkpoint: The model's files as they are.
        geometry: Shape of its cache.
        modules: The attention module of each layer that keeps tokens of its own, by layer index,
            named as in the checkpoint.
        scales: What calibration found.
        per_head: Whether one scale per KV head is wanted where the engine takes it.
        tensor_parallel: GPUs that share a layer, for formats with one entry per rank.
    """

    checkpoint: Checkpoint
    geometry: CacheGeometry
    modules: Mapping[int, AttentionModule]
    scales: KVScales
    per_head: bool = False
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Contribution:
    """What one engine wants in the exported directory.

    Attributes:
        tensors: For the scales shard, by their name in the checkpoint; float32.
        config: Keys of config.json that are set; keys of the base's config stay otherwise.
        files: Further files by name, complete.
        launch: Command lines that serve the export, one per way to serve it. They may say
            ``{model}`` where the exported directory goes; in quotation marks it is a string of
            Python.
        remarks: What was reduced, rounded, left out or is ignored by the engine, and why; one
            sentence each.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    launch: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What is known about an engine; `kvquant export --list` prints it.

    Attributes:
        title: The engine's own name.
        formats: Cache formats that use what is exported: ``fp8_e4m3`` …
        granularity: ``per tensor``, ``per tensor or per head``, or ``computed by the engine``.
        files: What is written, in a few words.
        versions: Versions whose sources the facts were read from.
        needs_weights: Whether the export holds the model's weights too (as links).
        shares_directory: Whether one directory can serve this engine along with the others that
            say so.
    """

    title: str
    formats: tuple[str, ...]
    granularity: str
    files: str
    versions: str
    needs_weights: bool
    shares_directory: bool


class ExportTarget(Protocol):
    """One engine.

    Attributes:
        name: As ``--engine`` takes it.
        facts: What is known about it.
    """

    name: str
    facts: Facts

    def contribute(self, job: ExportJob) -> Contribution:
        """What this engine wants.

        Raises:
            ExportError: Nothing that it would read can be made of this job; the message says why,
                and what to do or launch instead.
        """
        ...
