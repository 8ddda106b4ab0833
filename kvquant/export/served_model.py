"""Which layers of a model that is to be served keep keys and values, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvquant.errors import ExportError, GeometryError
from kvquant.geometry import CacheGeometry, LayerKind

from .attention_names import AttentionModule, find_attention
from .served_files import CONFIG, ServedDirectory
from .verify_report import Finding, LayerVerdict


@dataclass(frozen=True)
class ServedModel:
    """The attention of a model.

    Attributes:
        geometry: Shape of its cache.
        modules: Attention of each layer that keeps tokens of its own, by layer.
    """

    geometry: CacheGeometry
    modules: Mapping[int, AttentionModule]

    @property
    def latent_layers(self) -> list[int]:
        """Layers with multi-head latent attention."""
        kinds = ((i, self.geometry.layers[i].kind) for i in self.modules)
        return [i for i, kind in kinds if kind is LayerKind.LATENT]

    def not_loaded(self) -> list[LayerVerdict]:
        """What to say of all layers where an engine takes no scales from the directory."""
        return [
            LayerVerdict(layer, None, None, (), (), "not loaded") for layer in sorted(self.modules)
        ]


def served_geometry(served: ServedDirectory) -> tuple[CacheGeometry | None, list[Finding]]:
    """Shape of the cache, or why it cannot be told."""
    if not served.config:
        return None, []  # that it is missing is said elsewhere
    try:
        return CacheGeometry.from_config(served.config), []
    except GeometryError as error:
        return None, [
            Finding(
                f"which layers keep keys and values cannot be told from {CONFIG}: {error}",
                "take config.json of the base model, and add the quantization_config again",
            )
        ]


def served_model(served: ServedDirectory) -> tuple[ServedModel | None, list[Finding]]:
    """The attention of the model, or why it cannot be told."""
    geometry, findings = served_geometry(served)
    names = served.names()
    if geometry is None or not names:
        return None, findings
    try:
        return ServedModel(geometry, find_attention(names, geometry.attention_layers)), []
    except ExportError as error:
        return None, [Finding(str(error), "complete the weights, or the index")]
