"""Drift: what the base's scales cost a fine-tune, and when that is too much."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from calib.collect import collect
from calib.drift import DriftReport, DriftThresholds, HeadDrift, drift
from calib.method import Method, RangeMethod
from calib.stats import CalibrationStats, ChannelStats, LayerStats
from kvquant.errors import FingerprintError, InputError, SchemeError
from kvquant.fingerprint import Fingerprint
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.provenance import Provenance
from kvquant.rotary import RotaryLayout
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

SCHEMES = [
    (name, granularity)
    for name in ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
    for granularity in ("per-tensor", "per-head", "per-channel")
]
LORA = Path(__file__).parents[1] / "assets" / "smollm2-python-lora"


def scheme(
    format_name: str, granularity: str = "per-tensor", symmetric: bool = True
) -> QuantScheme:
    slot = TensorScheme(tensor_format(format_name), Granularity.parse(granularity), symmetric)
    return QuantScheme(slot, slot)


def stats_of(
    *layers: tuple[torch.Tensor, torch.Tensor], provenance: Provenance | None = None
) -> CalibrationStats:
    """Statistics of layers given as keys and values ``[tokens, kv_heads, dim]``."""
    shapes, found = [], {}
    for index, (keys, values) in enumerate(layers):
        slots = []
        for states in (keys, values):
            slots.append(ChannelStats.empty(*states.shape[1:]))
            slots[-1].update(states)
        found[index] = LayerStats(*slots)
        heads, key_dim, value_dim = *keys.shape[1:], values.shape[2]
        shapes.append(LayerGeometry(LayerKind.FULL, heads, key_dim, value_dim))
    geometry = CacheGeometry("llama", tuple(shapes), 4096)
    return CalibrationStats(geometry, found, provenance or Provenance())


def normal(tokens: int = 4096, heads: int = 2, dim: int = 8, seed: int = 0) -> torch.Tensor:
    """Channels of one size, ``[tokens, kv_heads, dim]``."""
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed))


def keys_only(report: DriftReport, head: int = 0) -> HeadDrift:
    return next(h for h in report.heads if (h.layer, h.slot, h.head) == (0, "key", head))


@pytest.mark.parametrize(("format_name", "granularity"), SCHEMES)
def test_nothing_moved(format_name: str, granularity: str) -> None:
    stats = stats_of((normal(), normal(seed=1)), (normal(seed=2), normal(dim=4, seed=3)))
    report = drift(stats, stats, scheme(format_name, granularity))

    assert [(h.layer, h.slot, h.head) for h in report.heads] == [
        (layer, slot, head) for layer in (0, 1) for slot in ("key", "value") for head in (0, 1)
    ]
    assert report.safe and report.failing == []
    for head in report.heads:
        assert (head.loss_db, head.clipped, head.amax_ratio, head.mean_shift) == (0, 0, 1, 0)
        assert head.worst_channel_ratio == 1
        assert head.sqnr_base_db == head.sqnr_own_db > 5


@pytest.mark.parametrize("format_name", ["int8", "int4"])
def test_asymmetric_schemes_too(format_name: str) -> None:
    base, tuned = normal() + 3, normal(seed=1) + 3
    moved = drift(
        stats_of((base, base)), stats_of((tuned + 9, tuned)), scheme(format_name, symmetric=False)
    )
    assert not moved.safe
    assert {head.slot for head in moved.failing} == {"key"}


def test_clipped_values_and_what_they_cost() -> None:
    """Half of the fine-tune's values are 2, the others 0.9; the base reaches to 1."""
    base = torch.ones(1000, 1, 4)
    tuned = base * 0.9
    tuned[::2] = 2
    head = keys_only(drift(stats_of((base, base)), stats_of((tuned, base)), scheme("fp8_e4m3")))

    assert (head.amax_base, head.amax_tuned, head.amax_ratio) == (1, 2, 2)
    assert head.clipped == 0.5 and head.clipped_own == 0
    # Errors of 1 for all but the 8 rarest of each channel's 500 twos; rounding is nothing to them.
    energy = 500 * (2**2 + 0.9**2)
    assert head.sqnr_base_db == pytest.approx(10 * math.log10(energy / (500 - 8)), abs=0.05)
    assert head.loss_db == head.sqnr_own_db - head.sqnr_base_db > 20
    assert head.mean_shift == pytest.approx(0.45 / math.sqrt(energy / 1000), rel=1e-5)


def test_a_ruined_head_is_not_averaged_away() -> None:
    """One head of 64, its values 6 times as large."""
    base = normal(heads=64)
    tuned = normal(heads=64, seed=1)
    tuned[:, 37] *= 6
    report = drift(stats_of((base, base)), stats_of((base, tuned)), scheme("fp8_e4m3", "per-head"))

    assert [(h.slot, h.head) for h in report.failing] == [("value", 37)]
    assert report.worst_first()[0].head == 37
    assert not report.safe
    assert len(report.reasons) == 2
    assert all("in 1 of 128 heads" in line for line in report.reasons)
    assert all(line.endswith("layer 0, values, head 37") for line in report.reasons)


@pytest.mark.parametrize(("format_name", "granularity"), SCHEMES)
def test_a_single_stray_value_decides_nothing(format_name: str, granularity: str) -> None:
    base = normal(tokens=32768, heads=1, dim=16)
    tuned = base.clone()
    tuned[5, 0, 3] = 20
    report = drift(
        stats_of((base, base)), stats_of((tuned, base)), scheme(format_name, granularity)
    )
    assert report.safe
    # It is seen, though, and under a shared scale it makes the fine-tune's own scales the worse.
    assert keys_only(report).worst_channel == 3
    assert keys_only(report).amax_ratio > 4


@pytest.mark.parametrize(("format_name", "granularity"), SCHEMES)
def test_another_sample_of_the_same_is_no_drift(format_name: str, granularity: str) -> None:
    base, tuned = (normal(tokens=8192, dim=64, seed=seed) for seed in (0, 1))
    report = drift(
        stats_of((base, base)), stats_of((tuned, tuned)), scheme(format_name, granularity)
    )
    assert report.safe
    assert max(head.loss_db for head in report.heads) < 1.5


@pytest.mark.parametrize(("format_name", "granularity"), SCHEMES)
def test_large_channels_times_four(format_name: str, granularity: str) -> None:
    base = normal(heads=2, dim=32)
    base[:, :, [3, 19]] *= 4
    tuned = base.clone()
    tuned[:, 1, [3, 19]] *= 4
    report = drift(
        stats_of((base, base)), stats_of((tuned, base)), scheme(format_name, granularity)
    )
    assert [(h.slot, h.head) for h in report.failing] == [("key", 1)]
    assert keys_only(report, 1).worst_channel in (3, 19)
    assert keys_only(report, 1).worst_channel_ratio == 4


def test_small_channels_may_grow_within_the_range_of_all() -> None:
    base = normal(dim=32)
    base[:, :, 3] *= 100
    tuned = base.clone()
    tuned[:, :, 19] *= 4
    pair = stats_of((base, base)), stats_of((tuned, base))
    assert drift(*pair, scheme("fp8_e4m3", "per-tensor")).safe
    assert not drift(*pair, scheme("fp8_e4m3", "per-channel")).safe


def test_fp8_forgives_a_range_too_wide_and_int8_does_not() -> None:
    """A fine-tune of half the size, as per-channel scales of the base see it."""
    pair = stats_of((normal(), normal())), stats_of((normal() / 2, normal()))
    forgiving = drift(*pair, scheme("fp8_e4m3", "per-channel"))
    assert forgiving.safe and keys_only(forgiving).loss_db < 0.5
    strict = drift(*pair, scheme("int8", "per-channel"))
    assert not strict.safe
    assert keys_only(strict).loss_db == pytest.approx(20 * math.log10(2), abs=0.2)


def test_fp8_forgives_only_down_to_its_smallest_number() -> None:
    tiny_values = normal() * 2**-16
    report = drift(stats_of((normal(), normal())), stats_of((normal(), tiny_values)), scheme("fp8"))
    assert {head.slot for head in report.failing} == {"value"}
    assert keys_only(report).loss_db == 0


def test_the_limits_are_the_callers() -> None:
    pair = stats_of((normal(), normal())), stats_of((normal() * 2, normal()))
    how = scheme("fp8_e4m3", "per-channel")
    assert not drift(*pair, how).safe
    assert drift(*pair, how, thresholds=DriftThresholds(max_clipped=1, max_loss_db=math.inf)).safe
    only_clipped = drift(*pair, how, thresholds=DriftThresholds(0.001, math.inf))
    assert len(only_clipped.reasons) == 1 and "clipped" in only_clipped.reasons[0]
    only_loss = drift(*pair, how, thresholds=DriftThresholds(1, 0.1))
    assert len(only_loss.reasons) == 1 and "SQNR" in only_loss.reasons[0]
    same = drift(pair[0], pair[0], how, thresholds=DriftThresholds(0, 0))
    assert same.safe


@pytest.mark.parametrize("limits", [(-0.1, 3), (1.1, 3), (math.nan, 3), (0.1, -1), (0.1, math.nan)])
def test_limits_without_a_meaning(limits: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="must be"):
        DriftThresholds(*limits)


def test_clipping_that_is_intended_is_not_held_against_the_base() -> None:
    how, method = scheme("int8", "per-channel"), RangeMethod(Method.PERCENTILE, 90)
    report = drift(
        stats_of((normal(), normal())), stats_of((normal(seed=1), normal())), how, method
    )
    head = keys_only(report)
    assert head.clipped == pytest.approx(0.1, abs=0.01)
    assert head.clipped_own == pytest.approx(0.1, abs=0.01)
    assert head.extra_clipped < 0.01
    assert report.safe and report.method == "percentile 90"


@pytest.mark.parametrize(("format_name", "granularity"), SCHEMES)
@pytest.mark.parametrize(
    ("base_factor", "tuned_factor", "ratio", "safe"),
    [(0, 0, 1, True), (0, 1, math.inf, False), (1, 0, 0, True)],
)
def test_heads_of_nothing(
    format_name: str,
    granularity: str,
    base_factor: float,
    tuned_factor: float,
    ratio: float,
    safe: bool,
) -> None:
    report = drift(
        stats_of((normal() * base_factor, normal())),
        stats_of((normal() * tuned_factor, normal())),
        scheme(format_name, granularity),
    )
    assert report.safe == safe
    head = keys_only(report)
    assert head.amax_ratio == ratio
    assert not any(math.isnan(value) for value in vars(head).values() if isinstance(value, float))
    written = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert written["heads"][0]["amax_ratio"] == (None if math.isinf(ratio) else ratio)


def test_asymmetric_scales_of_an_offset_channel_do_not_hold_zeros() -> None:
    base = normal() * 0.1 + 5
    report = drift(
        stats_of((base, normal())),
        stats_of((base * 0, normal())),
        scheme("int8", "per-channel", symmetric=False),
    )
    assert not report.safe
    assert keys_only(report).sqnr_base_db == -math.inf
    assert report.to_dict()["heads"][0]["sqnr_base_db"] is None


def test_values_that_codes_hold_exactly_lose_nothing_that_counts() -> None:
    """Without any error of its own, a head still may have an error below that of bfloat16."""
    base, tuned = torch.full((100, 1, 4), 127.0), torch.full((100, 1, 4), 126.9)
    head = keys_only(
        drift(stats_of((base, base)), stats_of((tuned, base)), scheme("int8", "per-channel"))
    )
    assert head.sqnr_own_db > 100
    assert 60 < head.sqnr_base_db < 65
    assert head.loss_db == 0


def test_json() -> None:
    base = stats_of((normal(), normal()), provenance=Provenance(model="org/base"))
    tuned = stats_of(
        (normal() * 8, normal()),
        provenance=Provenance(model="org/base", adapters=("/somewhere/my-lora",)),
    )
    report = drift(base, tuned, scheme("int8"))
    written = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert written["safe"] is False and written["verdict"] == "recalibrate"
    assert (written["base"], written["tuned"]) == ("base", "base + my-lora")
    assert written["thresholds"] == {"max_clipped": 0.01, "max_loss_db": 3.0}
    assert written["scheme"] == scheme("int8").to_dict() and written["method"] == "amax"
    assert len(written["heads"]) == 4
    assert written["heads"][0].keys() == {
        *("layer", "slot", "head", "amax_base", "amax_tuned", "amax_ratio", "clipped"),
        *("clipped_own", "sqnr_base_db", "sqnr_own_db", "loss_db", "mean_shift"),
        *("worst_channel", "worst_channel_ratio"),
    }
    safe = drift(base, base, scheme("int8")).to_dict()
    assert safe["verdict"] == "safe"
    assert safe["reasons"] == [
        "the worst of 4 heads loses 0.0 dB of SQNR (limit 3 dB), and at most 0% of a head's "
        "values are clipped (limit 1%)"
    ]


def test_means_are_compared_before_rotation_where_both_know_it() -> None:
    layout = RotaryLayout(start=0, width=8, interleaved=False, angles="half")
    sides = []
    for unrotated in (0.0, 1.0):
        stats = stats_of((normal(), normal()))
        keys = replace(
            stats.layers[0].key,
            rotary=layout,
            total_unrotated=torch.full((2, 8), 4096 * unrotated, dtype=torch.float64),
        )
        stats.layers[0] = LayerStats(keys, stats.layers[0].value)
        sides.append(stats)
    report = drift(sides[0], sides[1], scheme("fp8"))
    assert keys_only(report).mean_shift == pytest.approx(1.0, abs=0.05)
    sides[0].layers[0].key.total_unrotated = None
    assert keys_only(drift(sides[0], sides[1], scheme("fp8"))).mean_shift == 0


def test_a_fine_tune_for_longer_texts_has_the_same_cache() -> None:
    base = stats_of((normal(), normal(seed=1)))
    longer = replace(base, geometry=replace(base.geometry, max_positions=8192))
    assert drift(base, longer, scheme("fp8_e4m3")).safe


def test_another_geometry() -> None:
    with pytest.raises(FingerprintError, match=r"2 KV heads of 8.*2 KV heads of 16"):
        drift(stats_of((normal(), normal())), stats_of((normal(dim=16),) * 2), scheme("fp8"))


def test_other_layers() -> None:
    base, tuned = (stats_of((normal(), normal()), (normal(), normal())) for _ in range(2))
    del tuned.layers[1]
    with pytest.raises(InputError, match=r"layers \[1\] were recorded on one side only"):
        drift(base, tuned, scheme("fp8"))
    skipping = replace(scheme("fp8"), skip_layers=frozenset({1}))
    assert {head.layer for head in drift(base, tuned, skipping).heads} == {0}
    with pytest.raises(SchemeError, match="nothing to quantize"):
        drift(base, base, replace(scheme("fp8"), skip_layers=frozenset({0, 1})))


def origin(weights: str, text: str = "a", tokens: int = 4096, adapter: str = "") -> Provenance:
    fingerprint = Fingerprint(weights=weights * 64, adapters=(adapter * 64,) if adapter else ())
    return Provenance(fingerprints=(fingerprint,), corpora=({"sha256": text},), tokens=tokens)


@pytest.mark.parametrize(
    ("base", "tuned", "expected"),
    [
        (origin("a"), origin("a", adapter="b"), []),
        (origin("a"), origin("b"), []),
        (origin("a"), origin("a"), ["same model"]),
        (origin("a", adapter="b"), origin("a", adapter="b"), ["same model"]),
        (Provenance(), Provenance(), []),
        (origin("a"), origin("b", text="c"), ["different text"]),
        (origin("a"), origin("b", tokens=8192), []),
        (origin("a"), origin("b", tokens=8193), ["4,096 tokens, the fine-tune on 8,193"]),
    ],
)
def test_notes(base: Provenance, tuned: Provenance, expected: list[str]) -> None:
    one, other = (stats_of((normal(), normal()), provenance=side) for side in (base, tuned))
    notes = drift(one, other, scheme("fp8")).notes
    assert len(notes) == len(expected)
    assert all(text in note for text, note in zip(expected, notes, strict=True))


def test_rescaled_projections_of_a_model(tiny: Callable[..., Any]) -> None:
    """v_proj by 2^-16 with o_proj times 2^16 leaves the model's function alone, not its scales."""
    ids = torch.randint(3, 128, (4, 100), generator=torch.Generator().manual_seed(0)).tolist()
    base = tiny("llama")
    geometry = CacheGeometry.from_config(base.config)
    before = collect(base, ids, geometry)
    with torch.no_grad():
        base.model.layers[1].self_attn.v_proj.weight *= 2**-16
        base.model.layers[1].self_attn.o_proj.weight *= 2**16
    report = drift(before, collect(base, ids, geometry), scheme("fp8"))
    assert {(head.layer, head.slot) for head in report.failing} == {(1, "value")}
    assert all(h.amax_ratio == pytest.approx(2**-16, rel=1e-3) for h in report.failing)


@pytest.fixture(scope="module")
def smollm2() -> dict[str, CalibrationStats]:
    """SmolLM2 on 2,048 tokens of prose and of Python, its adapter on the latter."""
    import inspect
    import pydoc
    from pydoc_data.topics import topics

    from kvquant.models.adapters import activate
    from kvquant.models.loading import load, resolve

    loaded = load(
        resolve("smollm2", adapters=[str(LORA)]), dtype="float32", device="cpu", notify=print
    )
    texts = {"prose": " ".join(topics.values())[:20000], "python": inspect.getsource(pydoc)[:20000]}
    blocks = {
        name: torch.tensor(loaded.tokenizer(text)["input_ids"][:2048]).view(4, 512).tolist()
        for name, text in texts.items()
    }
    geometry = CacheGeometry.from_config(loaded.model.config)
    found = {"lora": collect(loaded.model, blocks["python"], geometry)}
    with activate(loaded.model, []):
        found |= {name: collect(loaded.model, blocks[name], geometry) for name in texts}
    return found


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("format_name", "granularity", "safe"),
    [
        ("fp8", "per-tensor", True),
        ("fp8", "per-head", True),
        ("int8", "per-tensor", True),
        ("int8", "per-channel", False),
        ("int4", "per-channel", True),
    ],
)
def test_a_mild_adapter_on_text_of_its_own(
    smollm2: dict[str, CalibrationStats], format_name: str, granularity: str, safe: bool
) -> None:
    report = drift(smollm2["prose"], smollm2["lora"], scheme(format_name, granularity))
    assert report.safe == safe, report.reasons


@pytest.mark.real_model
def test_on_one_text_the_adapter_of_smollm2_moves_little(
    smollm2: dict[str, CalibrationStats],
) -> None:
    """What int8 per channel loses above is the text's doing."""
    report = drift(smollm2["python"], smollm2["lora"], scheme("int8", "per-channel"))
    assert report.safe, report.reasons


def test_swapped_files_are_refused() -> None:
    bare = stats_of((normal(), normal(seed=1)), provenance=origin("a"))
    tuned = replace(bare, provenance=origin("a", adapter="b"))
    assert drift(bare, tuned, scheme("fp8")).safe
    with pytest.raises(InputError, match="swapped"):
        drift(tuned, bare, scheme("fp8"))
