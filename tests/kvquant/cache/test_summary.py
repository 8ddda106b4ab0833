from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvquant.cache.cache import QuantizedCache
from kvquant.cache.summary import covered_windows, size
from kvquant.cache.transformers_compat import cache_argument
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.presets import preset
from kvquant.provenance import Provenance
from kvquant.rotary import RotaryLayout
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format


def fill(model: Any, cache: QuantizedCache, tokens: int, batch: int = 1) -> str:
    """Runs a model once; the summary afterwards."""
    ids = torch.arange(3, 3 + tokens).expand(batch, -1) % 120 + 3
    with torch.no_grad():
        model(ids, **{cache_argument(model.get_decoder()): cache})
    return cache.summary()


def rows(summary: str) -> dict[str, str]:
    """First lines of the table's rows by their first word, blanks made one."""
    table = summary.split("scheme:")[0]
    lines = [re.sub(r"\s+", " ", line).strip() for line in table.splitlines()]
    return {
        line.split(" ")[0]: line for line in lines if re.match(r"(layers|all|\d[\d,-]*) ", line)
    }


# Sizes


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (4608, "4.61 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (12_345_678, "12.3 MB"),
        (999_600_000, "1 GB"),
        (1_234_000_000, "1.23 GB"),
        (1_234_000_000_000, "1,234 GB"),
    ],
)
def test_sizes_for_people(count: int, shown: str) -> None:
    assert size(count) == shown


# The table


def test_an_empty_cache_has_a_table_of_zeros(tiny: Callable[..., Any]) -> None:
    cache = QuantizedCache.from_model(tiny("llama"), scheme="int8")
    found = rows(cache.summary())
    assert found["layers"] == "layers kind keys values tokens live held bf16 ratio"
    assert re.search(r"int8 per-token int8 per-token 0 0 B 0 B 0 B$", found["0-1"])
    assert found["all"] == "all 0 B 0 B 0 B"
    assert "beside it" not in cache.summary()


def test_layers_that_are_alike_share_a_row(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    cache = QuantizedCache.from_model(model, scheme="int8")
    found = rows(fill(model, cache, 32, batch=3))
    # 2 layers x 3 rows x 2 heads x 32 tokens x 2 slots x (16 + 2) bytes; held are 64 tokens.
    assert re.search(r"32 13\.8 kB 27\.6 kB 24\.6 kB 1\.78 x$", found["0-1"])
    assert found["0-1"].startswith("0-1 full, 2 KV heads")
    assert found["all"] == "all 13.8 kB 27.6 kB 24.6 kB 1.78 x"
    assert cache.live_nbytes() == 13_824
    assert cache.nbytes() == 27_648


def test_layers_that_differ_have_rows_of_their_own(tiny: Callable[..., Any]) -> None:
    model = tiny("gemma2")
    cache = QuantizedCache.from_model(model, scheme="int8", layers={0: "none", -1: "fp8"})
    found = rows(fill(model, cache, 30))
    assert set(found) == {"layers", "0", "1", "2", "3", "all"}
    # Sliding layers hold 7 tokens: 7 x 2 heads x 2 slots x 16 x 4 bytes.
    assert re.search(r"^0 sliding \(8\), 2.* none none 30 1\.79 kB .* 896 B 0\.50 x$", found["0"])
    assert re.search(
        r"^1 full, 2.* int8 per-token int8 per-token 30 2\.16 kB .* 1\.78 x$", found["1"]
    )
    assert re.search(r"^2 sliding .* int8 per-token int8 per-token 30 504 B .* 896 B", found["2"])
    assert "fp8_e4m3 per-token" in cache.summary()
    assert "layer 0: K none, V none" in cache.summary()


@pytest.mark.parametrize(
    ("layers", "shown"),
    [
        ({}, {"0-5"}),
        ({0: "none"}, {"0", "1-5"}),
        ({2: "none", 3: "none"}, {"0-1,4-5", "2-3"}),
        ({1: "none", 3: "none", 5: "none"}, {"0,2,4", "1,3,5"}),
        ({0: "none", 1: "none", 4: "none"}, {"0-1,4", "2-3,5"}),
    ],
)
def test_ranges_of_layers(
    tiny: Callable[..., Any], layers: dict[int, str], shown: set[str]
) -> None:
    model = tiny("llama", num_hidden_layers=6)
    cache = QuantizedCache.from_model(model, scheme="int8", layers=layers)
    assert set(rows(cache.summary())) - {"layers", "all"} == shown


def test_states_beside_keys_and_values_are_counted(tiny: Callable[..., Any]) -> None:
    model = tiny("qwen3_next")
    cache = QuantizedCache.from_model(model, scheme="int8")
    found = rows(fill(model, cache, 30))
    assert re.search(r"^0-2 linear 6\.14 kB 6\.14 kB 6\.14 kB 1\.00 x$", found["0-2"])
    assert re.search(r"^3 full.* 30 2\.16 kB 4\.61 kB 3\.84 kB 1\.78 x$", found["3"])
    assert found["all"] == "all 8.3 kB 10.8 kB 9.98 kB 1.20 x"


def test_a_latent_layer_shows_both_of_its_parts(tiny: Callable[..., Any]) -> None:
    model = tiny("deepseek")
    cache = QuantizedCache.from_model(model, scheme="int8", rotary_format="bf16")
    found = rows(fill(model, cache, 30))
    # 2 layers x 30 tokens x (16 + 2 + 4 x 2) bytes, against 2 x 30 x 20 x 2.
    assert found["0-1"] == (
        "0-1 latent, 1 KV head of 16+4 int8 per-token bf16 30 1.56 kB 3.33 kB 2.4 kB 1.54 x"
    )


def test_many_tokens_are_readable(tiny: Callable[..., Any]) -> None:
    model = tiny("llama", max_position_embeddings=2048)
    cache = QuantizedCache.from_model(model, scheme="int8")
    assert " 1,500 " in rows(fill(model, cache, 1500))["0-1"]


# Remarks


def test_it_says_which_scheme_ran_and_what_is_shared(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    cache = QuantizedCache.from_model(
        model, scheme="int8", sink_tokens=2, residual_length=9, attention="dequantize"
    )
    fill(model, cache, 30)
    found = fill(model, cache, 1)
    assert (
        "scheme: K int8 per-token, V int8 per-token, first 2 tokens exact, newest 9 tokens exact"
    ) in found
    # 31 tokens of one layer, 2 heads x (16 + 16) x 4 bytes, and an eighth more.
    assert "beside it: 8.93 kB that all layers share to read into" in found
    assert cache.workspace_nbytes() == 2 * (31 * 32 + 31 * 32 // 8) * 4
    assert "means" not in found


def test_it_says_what_attends_to_the_codes(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    lines = QuantizedCache.from_model(model, "int8").summary().splitlines()
    assert "attention: over the codes by numba in all 2 layers" in lines
    lines = QuantizedCache.from_model(model, "int8", attention="dequantize").summary().splitlines()
    assert "attention: the model's own, on dequantized tokens (as asked)" in lines
    lines = QuantizedCache.from_model(model, "int8", layers={0: "none"}).summary().splitlines()
    assert (
        "attention: over the codes by numba in layers 1; "
        "the model's own in 0 (nothing is quantized)"
    ) in lines
    lines = QuantizedCache.from_model(tiny("deepseek"), "int8").summary().splitlines()
    assert "attention: the model's own, on dequantized tokens (latent attention)" in lines


def test_it_says_what_its_columns_are_and_what_the_model_is_in(
    tiny: Callable[..., Any],
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = QuantizedCache.from_model(tiny("llama").to(dtype), scheme="none")
        shown = str(dtype).removeprefix("torch.")
        assert (
            f"sizes: the model is in {shown}; live is what the tokens need, held includes room for "
            "more; bf16 is what the same tokens need in bf16, ratio is bf16 / live"
        ) in cache.summary().splitlines()


COVERED = (
    "the residual of {} tokens covers the window of 8: nothing is ever quantized there; a "
    "residual_length below 7 changes that"
)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"scheme": "int4-kivi"}, [COVERED.format(128)]),
        ({"scheme": "int8", "residual_length": 7}, [COVERED.format(7)]),
        ({"scheme": "int8", "residual_length": 6}, []),
        ({"scheme": "none", "residual_length": 128}, []),
        ({"scheme": "int8", "layers": {0: "int4-kivi", 2: "int8"}}, [COVERED.format(128)]),
        ({"scheme": "int8", "layers": {1: "int4-kivi"}}, []),  # sees all
        (
            {"scheme": "int4-kivi", "layers": {0: preset("int8", residual_length=9)}},
            [COVERED.format(9), COVERED.format(128)],
        ),
    ],
)
def test_it_says_where_nothing_is_ever_quantized(
    tiny: Callable[..., Any], asked: dict[str, Any], expected: list[str]
) -> None:
    """Layers 0 and 2 have a window of 8 tokens."""
    model = tiny("gemma2")
    cache = QuantizedCache.from_model(model, **asked)
    found = fill(model, cache, 40).splitlines()
    assert [line for line in found if line.startswith("the residual")] == expected
    quantized = [len(cache.layers[index].stores[0][1].coded) > 0 for index in (0, 2)]
    assert all(quantized) == (not expected and asked["scheme"] != "none")


def test_a_window_without_a_past_is_not_worth_a_line() -> None:
    layer = LayerGeometry(LayerKind.SLIDING, 2, 16, 16, 1)
    geometry = CacheGeometry("test", (layer,), 64)
    assert covered_windows(preset("int4-kivi"), geometry) == []


def test_it_says_what_the_slots_of_a_latent_layer_hold(tiny: Callable[..., Any]) -> None:
    model = tiny("deepseek")
    line = "latent layers: keys are the latent, values its rotary part"
    found = QuantizedCache.from_model(model, "int4").summary().splitlines()
    assert f"{line}, kept exact unless rotary_format is given" in found
    found = QuantizedCache.from_model(model, "int4", rotary_format="fp8").summary().splitlines()
    assert line in found
    assert "latent layers" not in QuantizedCache.from_model(tiny("llama"), "int4").summary()


def test_it_says_that_there_are_no_means(tiny: Callable[..., Any]) -> None:
    cache = QuantizedCache.from_model(tiny("llama"), scheme="int4")
    assert "means: none, the cache is not calibrated; give scales=" in cache.summary()


def calibrated(model: Any, turned: list[int] | None, *, value_mean: bool = True) -> QuantizedCache:
    """An int4 cache with means; those of layer 0's keys turn in the pairs `turned`."""
    geometry = CacheGeometry.from_config(model.config)
    slot = TensorScheme(tensor_format("int8"), Granularity.PER_TENSOR)
    scale, mean = torch.ones(1, 1), torch.ones(2, 16)
    still = TensorScales(scale, None, mean)
    pairs = torch.zeros(8, dtype=torch.bool)
    pairs[turned or []] = True
    turning = TensorScales(scale, None, mean, mean, RotaryLayout(0, 16, False, "half"), pairs)
    without = still if value_mean else TensorScales(scale)
    layers = {0: LayerScales(turning, still), 1: LayerScales(still, without)}
    provenance = Provenance(fingerprints=(fingerprint(model),))
    scales = KVScales(geometry, QuantScheme(slot, slot), layers, provenance)
    return QuantizedCache.from_model(model, scheme="int4", scales=scales)


def test_it_says_how_many_means_turn(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    assert (
        "means: calibrated for 4 of 4 slots; turned with the position in 1 "
        "(3 of 8 rotary pairs on average), fixed in the others"
    ) in calibrated(model, [1, 2, 7]).summary()


def test_a_slot_without_a_mean_is_not_called_calibrated(tiny: Callable[..., Any]) -> None:
    found = calibrated(tiny("llama"), None, value_mean=False).summary()
    assert "means: calibrated for 3 of 4 slots\n" in found + "\n"


COMPUTES = "this scheme computes its ranges from what it stores, so that"
INSTEAD = "are computed from what is stored instead"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"scheme": None}, ""),
        ({"scheme": "int8"}, ""),
        ({"scheme": "int8", "layers": {0: "none"}}, ""),
        ({"scheme": "fp8"}, f"{COMPUTES} nothing of them is used"),
        ({"scheme": "int4-kivi"}, f"{COMPUTES} nothing of them is used"),
        ({"scheme": "int4"}, f"{COMPUTES} only their means are used"),
        ({"scheme": "bf16"}, "this scheme has no ranges, so that nothing of them is used"),
        (
            {"scheme": "int8", "value_format": "int4"},
            f"the ranges of the values in layers 0-1 {INSTEAD}",
        ),
        (
            {"scheme": "int8", "layers": {1: "fp8"}},
            f"the ranges of the keys and values in layers 1 {INSTEAD}",
        ),
    ],
)
def test_it_says_which_ranges_of_the_scales_are_not_used(
    tiny: Callable[..., Any], asked: dict[str, Any], expected: str
) -> None:
    model = tiny("llama")
    scales = calibrated(model, None).scales
    found = QuantizedCache.from_model(model, scales=scales, **asked).summary().splitlines()
    lines = [line for line in found if line.startswith("scales:")]
    made = "scales: made for K int8 per-tensor, V int8 per-tensor; "
    assert lines == ([f"{made}{expected}"] if expected else [])
    assert "scales:" not in QuantizedCache.from_model(model, asked["scheme"] or "int8").summary()


def test_lines_end_where_their_text_does(tiny: Callable[..., Any]) -> None:
    model = tiny("gemma2")
    found = fill(model, QuantizedCache.from_model(model, scheme="int4-kivi"), 30)
    assert all(line == line.rstrip() for line in found.splitlines())
    assert found == found.replace("\x1b", "")  # no colours in a string
