"""Which adapters of a PeftModel take part, and putting all of that back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import AdapterError


def base_model(model: Any) -> Any:
    """The Transformers model inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapter_names(model: Any) -> list[str]:
    """Names of the attached adapters, in the order in which they were attached."""
    return list(getattr(model, "peft_config", {}))


def adapted_layers(model: Any) -> list[Any]:
    """The layers that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def replaced_modules(model: Any) -> list[Any]:
    """The modules that an adapter replaces as a whole, PEFT's ``modules_to_save``."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)]


def set_active(model: Any, names: Sequence[str]) -> None:
    """Makes exactly `names` take part, with nothing merged and nothing trainable."""
    tuner = model.base_model
    with without_warnings():
        for layer in adapted_layers(model):
            if layer.merged:
                layer.unmerge()
        if not names:
            tuner.disable_adapter_layers()
            return
        tuner.enable_adapter_layers()
        try:
            tuner.set_adapter(list(names), inference_mode=True)
        except ValueError as error:
            raise AdapterError(
                f"{' and '.join(names)} replace the same module and cannot be active together: "
                "use one at a time"
            ) from error


def detach(model: Any) -> Any:
    """The base with all adapters taken off, and its own modules back in place."""
    with without_warnings():
        for module in replaced_modules(model):
            module.set_adapter([])
        return model.unload()


class AdapterState:
    """All that switching adapters changes, and the way back."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._trained = [(value, value.requires_grad) for value in model.parameters()]
        self._active = (model.active_adapter, model.base_model.active_adapter)
        modules = [*adapted_layers(model), *replaced_modules(model)]
        self._switches = [(it, list(it.active_adapters), it.disable_adapters) for it in modules]
        self._merged = [
            (layer, list(layer.merged_adapters), _copies(layer.get_base_layer()))
            for layer in adapted_layers(model)
            if layer.merged
        ]

    def restore(self) -> None:
        """Puts everything back."""
        with without_warnings():
            for module, active, disabled in self._switches:
                module.enable_adapters(not disabled)
                module.set_adapter(active)
            for layer, names, weights in self._merged:
                layer.merge(adapter_names=names)
                for value, saved in weights:
                    value.data.copy_(saved)  # merging again would round differently
        self._model.active_adapter, self._model.base_model.active_adapter = self._active
        for value, trained in self._trained:
            value.requires_grad_(trained)


def _copies(module: Any) -> list[tuple[Any, Any]]:
    return [(value, value.detach().clone()) for value in module.parameters()]


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keeps PEFT's own remarks away: what matters of them is checked here and raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
