"""How a model is spread over GPUs, and what of its cache each of them holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from kvquant.errors import InputError
from kvquant.geometry import LayerGeometry, LayerKind

from .companions import Companion
from .spec import ModelSpec


@dataclass(frozen=True)
class Parallel:
    """GPUs that share a model.

    Attributes:
        tensor: GPUs among which the heads of each layer are divided.
        pipeline: Stages, one after the other, among which the layers are divided.
        data: Copies of all that, among which the sequences are divided.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def gpus(self) -> int:
        """How many there are in all."""
        return self.tensor * self.pipeline * self.data

    def check(self, model: ModelSpec) -> None:
        """Makes sure that the model can be divided so.

        Raises:
            InputError: Query heads that the tensor parallelism does not divide, or more stages
                than layers.
        """
        if model.query_heads % self.tensor:
            raise InputError(
                f"--tp {self.tensor} does not divide the {model.query_heads} query heads of "
                f"{model.name}"
            )
        if self.pipeline > len(model.geometry.layers):
            raise InputError(
                f"--pp {self.pipeline} is more than the {len(model.geometry.layers)} layers of "
                f"{model.name}"
            )

    def layer(self, layer: LayerGeometry) -> LayerGeometry:
        """What one rank holds of a layer.

        KV heads are divided, rounded up: beyond one head a rank they are copied. A latent is
        needed whole by every rank.
        """
        if layer.kind is LayerKind.LATENT:
            return layer
        return replace(layer, kv_heads=-(-layer.kv_heads // self.tensor))

    def companion(self, companion: Companion) -> Companion:
        """What one rank holds beside: states are divided by heads, the indexer's keys are not."""
        return replace(companion, constant=-(-companion.constant // self.tensor))

    def stages(self, layers: int) -> list[range]:
        """Layers of each stage, as evenly as can be, longer ones first."""
        base, more = divmod(layers, self.pipeline)
        bounds = [stage * base + min(stage, more) for stage in range(self.pipeline + 1)]
        return [range(a, b) for a, b in pairwise(bounds)]
