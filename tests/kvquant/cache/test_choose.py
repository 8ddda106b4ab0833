from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

from kvquant import QuantizedCache
from kvquant.cache.choose import choose_scheme
from kvquant.errors import AdapterError, SchemeError
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.presets import preset

GEOMETRY = CacheGeometry("llama", (LayerGeometry(LayerKind.FULL, 2, 16, 16),) * 2, 64)


@pytest.mark.parametrize(
    ("scheme", "changes", "layers", "message"),
    [
        ("int8", {}, {"0": "int4"}, "layers are named by their numbers, not '0'"),
        ("int8", {}, {1.0: "int4"}, "layers are named by their numbers, not 1.0"),
        ("int8", {}, {0: None}, "layer 0: give a preset's name or a scheme, not None"),
        ("int8", {}, {-1: 8}, "layer -1: give a preset's name or a scheme, not 8"),
        (8, {}, {}, "scheme must be a preset's name or a QuantScheme, not 8"),
        ("int4", {"sink_tokens": "4"}, {}, "sink_tokens is a number of tokens, not '4'"),
        ("int4", {"sink_tokens": 4.5}, {}, "sink_tokens is a number of tokens, not 4.5"),
        ("int8", {"residual_length": 1.0}, {}, "residual_length is a number of tokens, not 1.0"),
        ("int4-kivi", {"group_size": 1.5}, {}, "a group size is a number of tokens, not 1.5"),
    ],
)
def test_what_is_no_number_or_no_scheme_is_refused(
    scheme: Any, changes: dict[str, Any], layers: dict[Any, Any], message: str
) -> None:
    with pytest.raises(SchemeError) as caught:
        choose_scheme(scheme, None, changes, layers, GEOMETRY)
    assert str(caught.value) == message


def test_layers_are_counted_from_either_end() -> None:
    chosen = choose_scheme("int8", None, {}, {-1: "int4", 0: preset("none")}, GEOMETRY)
    assert dict(chosen.layers) == {0: preset("none"), 1: preset("int4")}


def test_an_adapter_with_a_cache_of_its_own_is_refused(tiny: Callable[..., Any]) -> None:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(tiny("llama"), config)
    with pytest.raises(AdapterError, match=r"default \(PREFIX_TUNING\) keeps keys and values"):
        QuantizedCache.from_model(model, "int8")


def test_an_adapter_whose_virtual_tokens_are_read_is_not(tiny: Callable[..., Any]) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(tiny("llama"), config)
    assert QuantizedCache.from_model(model, "int8").get_seq_length() == 0
