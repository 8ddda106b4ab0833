"""The table of defaults against the config classes and caches of Transformers itself."""

from __future__ import annotations

from typing import Any

import pytest

from kvquant.geometry import CacheGeometry, LayerKind
from kvquant.geometry_defaults import FAMILIES, REFUSED, TEXT_PARTS

FULL, SLIDING, CHUNKED = LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED
LATENT, SHARED = LayerKind.LATENT, LayerKind.SHARED

CHANGED_SINCE_5_17 = {"mimo_v2_flash", "granite4_vision"}


def older_than_5_24() -> bool:
    import transformers

    major, minor = transformers.__version__.split(".")[:2]
    return (int(major), int(minor)) < (5, 24)


def skip_where_it_changed(model_type: str) -> None:
    if model_type in CHANGED_SINCE_5_17 and older_than_5_24():
        pytest.skip(f"the defaults of {model_type} changed after 5.17")


def config_class(model_type: str) -> Any:
    """The config class of a text model; a few can only be reached through their composite."""
    from transformers import CONFIG_MAPPING

    skip_where_it_changed(model_type)
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    for composite, text in TEXT_PARTS.items():
        if text == model_type and composite in CONFIG_MAPPING:
            return type(CONFIG_MAPPING[composite]().get_text_config(decoder=True))
    return pytest.skip(f"this version of Transformers has no {model_type}")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_the_config_class(model_type: str) -> None:
    default = config_class(model_type)()
    assert CacheGeometry.from_config({"model_type": model_type}) == CacheGeometry.from_config(
        default
    )


SHAPE_IS_FIXED = {"zamba2", "nemotron_h", "gpt_neo", "longcat_flash", "jetmoe"}
ALSO_NEEDED = {
    "gemma3n_text": {"num_kv_shared_layers": 3},
    "glm5_next_text": {"num_key_value_heads": 32},
    "mllama_text_model": {"cross_attention_layers": [3, 8]},
}


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - SHAPE_IS_FIXED))
def test_what_the_class_derives_from_another_size(model_type: str) -> None:
    """A small config.json, and the class that Transformers makes of it."""
    cls = config_class(model_type)
    sizes = {"num_hidden_layers": 9, "num_attention_heads": 32, "hidden_size": 2048}
    raw = {cls.attribute_map.get(key, key): value for key, value in sizes.items()}
    raw.update(ALSO_NEEDED.get(model_type, {}))
    from_raw = CacheGeometry.from_config({"model_type": model_type, **raw})
    assert from_raw == CacheGeometry.from_config(cls(**raw))
    assert len(from_raw.layers) == 9


CACHE_LAYERS = {
    "DynamicLayer": (FULL, LATENT),
    "DynamicIndexedLayer": (FULL, LATENT),
    "DynamicSlidingWindowLayer": (SLIDING, CHUNKED),
    "LinearAttentionLayer": (LayerKind.LINEAR,),
    "LinearAttentionAndFullAttentionLayer": (FULL,),
    "DummyLayer": (LayerKind.NONE, SHARED),
}


def dynamic_layers(config: Any) -> list[Any]:
    import transformers

    if older_than_5_24():
        pytest.skip("older versions make a layer for each model layer, used or not")
    layers: list[Any] = transformers.DynamicCache(config=config).layers
    return layers


# Its cross-attention layers get a cache layer each, for the keys and values of an image.
@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"mllama_text_model"}))
def test_kinds_and_windows_are_those_of_the_dynamic_cache(model_type: str) -> None:
    config = config_class(model_type)()
    made = dynamic_layers(config)
    layers = CacheGeometry.from_config(config).layers
    assert len(made) == len(layers)
    for cache_layer, layer in zip(made, layers, strict=True):
        assert layer.kind in CACHE_LAYERS[type(cache_layer).__name__]
        assert layer.window == getattr(cache_layer, "sliding_window", None)


@pytest.mark.parametrize("composite", TEXT_PARTS)
def test_text_parts_are_those_of_the_config_class(composite: str) -> None:
    from transformers import CONFIG_MAPPING

    skip_where_it_changed(composite)
    if composite not in CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {composite}")
    text = CONFIG_MAPPING[composite]().get_text_config(decoder=True)
    assert TEXT_PARTS[composite] == text.model_type
    assert text.model_type in FAMILIES or text.model_type in REFUSED
