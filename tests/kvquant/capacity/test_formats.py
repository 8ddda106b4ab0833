from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from kvquant.capacity.format_names import Overrides, format_names, parse_formats
from kvquant.capacity.formats import CacheFormat, held_tokens
from kvquant.capacity.plan import FormatPlan
from kvquant.errors import SchemeError
from kvquant.geometry import LayerGeometry, LayerKind

HEAD = LayerGeometry(LayerKind.FULL, 1, 128, 128)
LATENT = LayerGeometry(LayerKind.LATENT, 1, 512, 64)


def form(name: str, **changes: object) -> CacheFormat:
    return parse_formats([name], Overrides(**changes), 2)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("fp32", 4),
        ("fp16", 2),
        ("bf16", 2),
        ("f16", 2),
        ("f32", 4),
        ("none", 2),
        ("fp8-static", 1),
        ("int8-static", 1),
        ("int4-static", 0.5),
        # One scale and zero point in fp16 for a group.
        ("int4-g32", 5 / 8),
        ("int4-g64", 4.5 / 8),
        ("int4-g128", 4.25 / 8),
        # llama.cpp: bytes of a block of 32.
        ("q8_0", 34 / 32),
        ("q4_0", 18 / 32),
        ("q4_1", 20 / 32),
        ("q5_0", 22 / 32),
        ("q5_1", 24 / 32),
        ("iq4_nl", 18 / 32),
        ("nvfp4", 4.5 / 8),
        ("mxfp4", 4.25 / 8),
        ("int8_per_token_head", 8.25 / 8),
        ("kivi2", 3 / 8),
        # Ours: bf16 scales per token and head, and a middle for int4 and int3.
        ("int8", 130 / 128),
        ("fp8", 130 / 128),
        ("fp8_e4m3", 130 / 128),
        ("int4", 68 / 128),
        ("int3", 52 / 128),
        # A scale and a middle in fp16 per channel for 64 tokens; for V per token in bf16.
        ("int4-kivi", (4 + 32 / 64 + 4 + 32 / 128) / 2 / 8),
    ],
)
def test_bytes_of_a_value(name: str, nbytes: float) -> None:
    assert form(name).token_nbytes(0, HEAD) == 256 * Fraction(nbytes)


@pytest.mark.parametrize(
    ("name", "bits", "per_token", "ratio", "context_128k_gb"),
    [
        ("bf16", 16, 131_072, 1.00, 17.18),
        ("fp8-static", 8, 65_536, 2.00, 8.59),
        ("fp8_per_token_head", 8.25, 67_584, 1.94, 8.86),
        ("q8_0", 8.5, 69_632, 1.88, 9.13),
        ("turboquant_k8v4", 6.125, 50_176, 2.61, 6.58),
        ("int4-g32", 5.0, 40_960, 3.20, 5.37),
        ("int4-g64", 4.5, 36_864, 3.56, 4.83),
        ("nvfp4", 4.5, 36_864, 3.56, 4.83),
        ("q4_0", 4.5, 36_864, 3.56, 4.83),
        ("int4-g128", 4.25, 34_816, 3.76, 4.56),
        ("int4_per_token_head", 4.25, 34_816, 3.76, 4.56),
        ("mxfp4", 4.25, 34_816, 3.76, 4.56),
        ("turboquant_4bit_nc", 4.1875, 34_304, 3.82, 4.50),
        ("int4-static:int4-g128", 4.125, 33_792, 3.88, 4.43),
        ("int4-static", 4.0, 32_768, 4.00, 4.29),
        ("turboquant_3bit_nc", 3.1875, 26_112, 5.02, 3.42),
        ("int4-static:int2-g128", 3.125, 25_600, 5.12, 3.36),
        ("kivi2-g32", 3.0, 24_576, 5.33, 3.22),
        ("int2-g128", 2.25, 18_432, 7.11, 2.42),
    ],
)
def test_llama_3_1_8b_in_every_format(
    planned: Callable[..., FormatPlan],
    name: str,
    bits: float,
    per_token: int,
    ratio: float,
    context_128k_gb: float,
) -> None:
    """The table of Llama-3.1-8B, 32 layers x 8 KV heads x 128."""
    plan = planned("llama-3.1-8b", name)
    assert plan.token_nbytes == per_token == 32 * 8 * 256 * bits / 8
    assert round(131_072 / per_token, 2) == ratio
    assert round(per_token * 131_072 / 1e9, 2) == context_128k_gb


def test_fp8_ds_mla_takes_656_bytes() -> None:
    assert form("fp8_ds_mla").token_nbytes(0, LATENT) == 656
    assert form("bf16").token_nbytes(0, LATENT) == 1152
    assert form("fp8-static").token_nbytes(0, LATENT) == 576
    # Ours keeps the rotary part: 64 numbers in the model's own dtype.
    assert form("int8").token_nbytes(0, LATENT) == 512 + 2 + 64 * 2


def test_pairs() -> None:
    assert form("int8:int4").token_nbytes(0, HEAD) == 130 + 68
    assert form("q8_0:q4_0").token_nbytes(0, HEAD) == 136 + 72
    assert form("bf16:q4_0").token_nbytes(0, HEAD) == 256 + 72
    assert form("int8:int4").description == (
        "K int8 per-token, V int4 per-token asymmetric centered rotated, first 4 tokens exact"
    )
    assert form("q8_0:q4_0").description == "K llama.cpp q8_0, V llama.cpp q4_0"
    assert form("q8_0:q8_0").description == form("q8_0").description == "llama.cpp q8_0"


def test_sinks_and_residual_are_exact() -> None:
    """100 tokens of 512 bytes each; the others of 136."""
    assert form("int4").layer_nbytes(0, HEAD, 1000) == 4 * 512 + 996 * 136
    assert form("int4", sink_tokens=0).layer_nbytes(0, HEAD, 1000) == 1000 * 136
    changed = form("int4", sink_tokens=10, residual_length=90)
    assert changed.layer_nbytes(0, HEAD, 1000) == 100 * 512 + 900 * 136
    assert changed.layer_nbytes(0, HEAD, 60) == 60 * 512
    assert changed.token_nbytes(0, HEAD) == 136


def test_overrides_leave_exact_formats_alone() -> None:
    exact, _ = parse_formats(["bf16", "int4"], Overrides(sink_tokens=10), 2)
    assert exact.layer_nbytes(0, HEAD, 100) == 51_200
    kivi, plain = parse_formats(["int4-kivi", "int8"], Overrides(group_size=32), 2)
    assert kivi.token_nbytes(0, HEAD) == 64 + Fraction(128 * 4, 32) + 68
    assert plain.token_nbytes(0, HEAD) == 260


@pytest.mark.parametrize(
    ("tokens", "key_exact", "value_exact"),
    [(0, 0, 0), (5, 5, 5), (127, 127, 127), (128, 0, 128), (200, 72, 128), (1024, 0, 128)],
)
def test_kivi_keeps_what_its_authors_keep(tokens: int, key_exact: int, value_exact: int) -> None:
    """Keys wait until 128 are together; of the values the newest 128 are exact."""
    per_vector = 128 * 2 // 8 + 128 * 4 // 32
    exact = (key_exact + value_exact) * 256
    coded = (2 * tokens - key_exact - value_exact) * per_vector
    assert form("kivi2").layer_nbytes(0, HEAD, tokens) == exact + coded


@pytest.mark.parametrize("name", ["int4", "q8_0", "kivi4"])
def test_skipped_layers_stay_as_they_are(name: str) -> None:
    skipping = form(name, skip_layers=frozenset({1}))
    assert skipping.layer_nbytes(1, HEAD, 1000) == 512_000
    assert skipping.token_nbytes(1, HEAD) == 512
    assert skipping.layer_nbytes(0, HEAD, 1000) == form(name).layer_nbytes(0, HEAD, 1000)
    assert skipping.variant(0) != skipping.variant(1)


@pytest.mark.parametrize(("tokens", "held"), [(0, 0), (7, 7), (8, 7), (100, 7)])
def test_a_window_keeps_what_the_next_token_can_see(tokens: int, held: int) -> None:
    window = LayerGeometry(LayerKind.SLIDING, 1, 128, 128, window=8)
    assert held_tokens(window, tokens) == held
    for name in ("bf16", "q8_0", "fp8-static"):
        per_token = form(name).token_nbytes(0, window)
        assert form(name).layer_nbytes(0, window, tokens) == held * per_token


def test_every_name_parses_and_says_what_it_is() -> None:
    for name in format_names():
        layer = LATENT if name == "fp8_ds_mla" else HEAD
        found = form(name)
        assert found.name == name
        assert found.description
        assert found.token_nbytes(0, layer) > 0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["int5"], "unknown cache format 'int5': did you mean int8 or int4 or int3; --list-kv"),
        (["q8-0"], "did you mean q8_0"),
        (["zzzzzz"], "unknown cache format 'zzzzzz'; --list-kv shows all"),
        (["int8:q4_0"], "int8:q4_0: int8 is a preset of ours and the other one is not"),
        (["q4_0:fp8"], "fp8 is a preset of ours"),
        (["int8:"], "--kv int8: names half of a pair: write K:V"),
        ([":int8"], "--kv :int8 names half of a pair"),
        (["int4-g0"], "unknown cache format 'int4-g0'"),
        (["q4_0:turboquant_k8v4"], "turboquant_k8v4 is a format of keys and values together"),
        (["kivi2:kivi4"], "kivi2:kivi4: kivi2 is a format of keys and values together"),
        (["fp8_ds_mla:bf16"], "fp8_ds_mla is a format of keys and values together"),
        (["bf16", "int8", "bf16"], "--kv bf16 is there twice"),
    ],
)
def test_names_that_are_none(names: list[str], message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        parse_formats(names, Overrides(), 2)


@pytest.mark.parametrize("overrides", [Overrides(sink_tokens=4), Overrides(residual_length=0)])
def test_exact_tokens_need_a_quantized_format_of_ours(overrides: Overrides) -> None:
    for names in (["q8_0"], ["bf16"], ["kivi2", "none"]):
        with pytest.raises(SchemeError, match="go with quantized formats of ours"):
            parse_formats(names, overrides, 2)
    assert len(parse_formats(["q8_0", "int4"], overrides, 2)) == 2


def test_a_group_size_needs_groups() -> None:
    with pytest.raises(SchemeError, match="--group-size goes with --kv int4-kivi"):
        parse_formats(["int4", "bf16"], Overrides(group_size=32), 2)


@pytest.mark.parametrize("name", ["q8_0", "nvfp4", "mxfp4"])
def test_heads_that_blocks_do_not_fill(name: str) -> None:
    odd = LayerGeometry(LayerKind.FULL, 1, 100, 100)
    with pytest.raises(SchemeError, match="heads of layer 3 are 100 wide"):
        form(name).token_nbytes(3, odd)


def test_ds_mla_is_for_latents() -> None:
    with pytest.raises(SchemeError, match="fp8_ds_mla is for MLA; layer 0 is full"):
        form("fp8_ds_mla").layer_nbytes(0, HEAD, 5)
