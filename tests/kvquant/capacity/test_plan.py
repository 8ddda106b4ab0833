from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.capacity.ask import Question
from kvquant.capacity.format_names import Overrides, parse_formats
from kvquant.capacity.memory import Memory
from kvquant.capacity.parallel import Parallel
from kvquant.capacity.plan import FormatPlan, Request, plan
from kvquant.capacity.spec import ModelSpec
from kvquant.capacity.weights import Weights
from kvquant.capacity.workload import Workload
from kvquant.errors import InputError

Planned = Callable[..., FormatPlan]
GIB = 2**30
H100 = {"gpu": "h100-80gb"}


# --- published figures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "per_token", "gb_32k", "gb_128k"),
    [
        ("llama-2-7b", 524_288, "17.2", "68.7"),
        ("llama-3.1-8b", 131_072, "4.29", "17.2"),
        ("qwen2.5-7b", 57_344, "1.9", "7.5"),
        ("llama-3.1-70b", 327_680, "10.7", "42.9"),
    ],
)
def test_worked_values(
    planned: Planned, model: str, per_token: int, gb_32k: str, gb_128k: str
) -> None:
    assert planned(model).token_nbytes == per_token
    for tokens, gigabytes in ((32_768, gb_32k), (131_072, gb_128k)):
        nbytes = planned(model, context=tokens).sequence_nbytes
        assert nbytes == per_token * tokens
        digits = len(gigabytes.partition(".")[2])
        assert f"{nbytes / 1e9:.{digits}f}" == gigabytes


def test_llama_2_7b_in_gibibytes(planned: Planned) -> None:
    """One sequence of 4,096 tokens takes exactly 2 GiB, eight of them 16."""
    assert planned("llama-2-7b", "fp16", context=4096).sequence_nbytes == 2 * GIB
    assert planned("llama-2-7b", "fp16", context=4096, concurrency=8).total_nbytes == 16 * GIB


@pytest.mark.parametrize(("kv_heads", "gib"), [(8, 16), (32, 64)])
def test_sixteen_sequences_of_8192(kv_heads: int, gib: int) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": kv_heads,
        "hidden_size": 4096,
        "torch_dtype": "float16",
    }
    request = _request(ModelSpec.from_config(config, "m", ""), [8192], 16)
    assert plan(request, _form("fp16")).total_nbytes == gib * GIB


def test_llama_3_8b_on_an_h100(planned: Planned) -> None:
    """13 sequences of 32,768 tokens; 21.5 ms a step, 605 tokens/s, 47 each, 39 ns a token."""
    found = planned("llama-3-8b", context=32_768, **H100)
    assert found.max_sequences == found.sequences == 13
    decode = found.decode
    assert decode is not None
    assert decode.weights_nbytes == pytest.approx(16.1e9, rel=0.005)
    assert decode.cache_nbytes == 13 * 131_072 * 32_768
    assert round(decode.step_seconds * 1e3, 1) == 21.5
    assert int(decode.tokens_per_second) == 605
    assert round(1 / decode.step_seconds) == 47
    assert round(decode.token_seconds * 1e9) == 39
    assert found.outgrows_weights_tokens == 122_532


def test_about_60_gb_are_left_for_the_cache(question: Callable[..., Question]) -> None:
    request = question("llama-3-8b", **H100).request
    assert request.weights_nbytes == 16_060_522_496
    assert request.free_nbytes == 80_000_000_000 - 4_000_000_000 - 16_060_522_496


@pytest.mark.parametrize(
    ("name", "thousands"),
    [("bf16", 427), ("fp8-static", 854), ("int4-static:int4-g128", 1655), ("int2-g128", 3035)],
)
def test_longest_context_on_an_a100(planned: Planned, name: str, thousands: int) -> None:
    """72 GB usable, bf16 weights: 427K, 854K, 1.66M and 3.03M tokens."""
    found = planned("llama-3.1-8b", name, gpu="a100-80gb", overhead_gb=8)
    assert found.max_context is not None
    assert round(found.max_context / 1000) == thousands


@pytest.mark.parametrize(
    ("name", "bandwidth", "milliseconds"),
    [
        ("bf16", 3.35, 6.03),
        ("bf16", 4.8, 4.21),
        ("fp8-static", 3.35, 3.02),
        ("q8_0", 4.8, 2.24),
        ("int4-static:int4-g128", 3.35, 1.56),
        ("int2-g128", 4.8, 0.59),
    ],
)
def test_reading_128k_tokens_at_85_percent(
    planned: Planned, name: str, bandwidth: float, milliseconds: float
) -> None:
    found = planned(
        "llama-3.1-8b",
        name,
        context=131_072,
        concurrency=1,
        memory_gb=141,
        bandwidth_tbs=0.85 * bandwidth,
    )
    assert found.decode is not None
    seconds = found.decode.cache_nbytes / (0.85 * bandwidth * 1e12)
    assert round(seconds * 1e3, 2) == milliseconds
    assert round(found.decode.token_seconds * 131_072 * 1e3, 2) == milliseconds


def test_gpt_oss_120b_as_vllm_logs_it(planned: Planned) -> None:
    """36 layers x 2,048 bytes = 73,728 a token; 5.38 GiB hold 78,384 tokens at full length."""
    found = planned("gpt-oss-120b", context=78_384)
    assert found.token_nbytes == 36 * 2048 == 73_728
    assert round(found.full_length_nbytes / GIB, 2) == 5.38
    # Half of the layers see 128 tokens: what is needed is little more than half.
    assert found.sequence_nbytes == 18 * 2048 * (78_384 + 127)


@pytest.mark.parametrize(("name", "gb"), [("bf16", 9.66), ("fp8-static", 4.83)])
def test_gpt_oss_120b_with_131k_tokens(planned: Planned, name: str, gb: float) -> None:
    assert round(planned("gpt-oss-120b", name, context=131_072).full_length_nbytes / 1e9, 2) == gb


@pytest.mark.parametrize(("name", "kib"), [("bf16", 67.5), ("fp8_ds_mla", 38.4375)])
def test_deepseek_v2_keeps_a_latent(planned: Planned, name: str, kib: float) -> None:
    """67.5 KB to 38.4 KB a token: 60 layers of 1,152 or 656 bytes."""
    found = planned("deepseek-v2", name)
    assert found.token_nbytes / 1024 == kib
    assert found.token_nbytes == 60 * {"bf16": 1152, "fp8_ds_mla": 656}[name]


def test_work_that_a_cache_saves() -> None:
    """Prompt 64, 1,024 new tokens: 589,312 positions without a cache, 1,087 with one."""
    prompt, new = 64, 1024
    assert new * prompt + new * (new - 1) // 2 == sum(range(prompt, prompt + new)) == 589_312
    assert prompt + new - 1 == 1087


# --- what the other answers are ------------------------------------------------------------------


def test_pages_and_reservations(planned: Planned) -> None:
    """1,000 tokens take 63 pages of 16; a server that reserves 8,192 uses 12 % of them."""
    found = planned("llama-3-8b", context=1000, reserve=8192, **H100)
    assert found.pages.sequence_nbytes == 63 * 16 * 131_072
    assert found.pages.utilisation == 1000 / 1008
    assert found.reserved.sequence_nbytes == 8192 * 131_072
    assert found.reserved.utilisation == 1000 / 8192
    free = 80_000_000_000 - 4_000_000_000 - 16_060_522_496
    assert found.max_sequences == free // (1000 * 131_072) == 457
    assert found.pages.max_sequences == free // (1008 * 131_072) == 453
    assert found.reserved.max_sequences == free // (8192 * 131_072) == 55


def test_without_a_gpu_only_sizes_are_told(planned: Planned) -> None:
    found = planned("llama-3-8b", context=1000)
    assert (found.max_sequences, found.max_context, found.decode) == (None, None, None)
    assert found.pages.max_sequences is None
    assert found.outgrows_weights_tokens == 122_532


def test_without_a_bandwidth_no_speed_is_told(planned: Planned) -> None:
    found = planned("llama-3-8b", context=32_768, memory_gb=80)
    assert found.max_sequences == 13
    assert found.decode is None


def test_sequences_that_do_not_fit_are_still_planned(planned: Planned) -> None:
    found = planned("llama-3-8b", context=32_768, concurrency=20, **H100)
    assert (found.sequences, found.max_sequences) == (20, 13)
    assert found.max_context is not None
    assert found.max_context < 32_768


def test_no_sequence_fits(planned: Planned) -> None:
    found = planned("llama-3-8b", context=600_000, **H100)
    assert (found.max_sequences, found.sequences, found.decode) == (0, 0, None)


def test_weights_that_do_not_fit(planned: Planned) -> None:
    message = (
        "141.11 GB of weights and 4.00 GB of overhead do not fit into the 80.00 GB of h100-80gb"
    )
    with pytest.raises(InputError, match=message):
        planned("llama-3.1-70b", **H100)


def test_windows_bound_the_cache(planned: Planned) -> None:
    """All layers slide: no context is too long."""
    found = planned("mistral-7b-v0.1", context=32_768, **H100)
    assert found.sequence_nbytes == 131_072 * 4095
    assert found.max_context is None
    assert found.outgrows_weights_tokens == 14_483_464_192 * 32_768 // (131_072 * 4095)


def test_lists_of_lengths(planned: Planned) -> None:
    found = planned("llama-3-8b", contexts=(1000, 3000, 6000), **H100)
    assert found.sequences == 3
    assert found.total_nbytes == 10_000 * 131_072
    assert found.sequence_nbytes == 6000 * 131_072
    # 45 rounds of the three and one of 1,000 and 3,000: 454,000 tokens; free is for 457,301.
    assert found.max_sequences == 45 * 3 + 2


def test_template_and_reasoning_are_cache_too(planned: Planned) -> None:
    found = planned("llama-3-8b", context=1000, template_tokens=200, thinking_tokens=800, **H100)
    assert found.sequence_nbytes == 2000 * 131_072
    assert found.max_context == 457_301 - 1000


def test_a_shared_prefix_is_kept_once_for_each_adapter(planned: Planned) -> None:
    shared = {"context": 1000, "concurrency": 10, "prefix_tokens": 400}
    assert planned("llama-3-8b", **shared).total_nbytes == (400 + 10 * 600) * 131_072
    assert (
        planned("llama-3-8b", **shared, adapters=3).total_nbytes == (3 * 400 + 10 * 600) * 131_072
    )
    assert planned("llama-3-8b", context=1000, concurrency=10).total_nbytes == 10_000 * 131_072


def test_of_a_prefix_that_left_the_window_nothing_is_shared(planned: Planned) -> None:
    """A window of 4,096 after 8,192 tokens holds none of the first 1,000."""
    found = planned("mistral-7b-v0.1", context=8192, concurrency=2, prefix_tokens=1000)
    assert found.total_nbytes == (1000 + 2 * 4095) * 131_072


def test_experts_are_read_as_far_as_they_are_chosen(planned: Planned) -> None:
    one, many = (
        planned("gpt-oss-20b", memory_gb=80, bandwidth_tbs=1, concurrency=n, context=1000).decode
        for n in (1, 64)
    )
    assert one is not None and many is not None
    weights, experts = 13_761_264_768, 10_152_345_600
    assert one.weights_nbytes == pytest.approx(weights - experts * (1 - 4 / 32))
    assert many.weights_nbytes == pytest.approx(weights - experts * (1 - 4 / 32) ** 64)


def test_where_a_step_becomes_cache_bound(planned: Planned) -> None:
    """16.06 GB of weights are 3.7 sequences of 4.29 GB."""
    found = planned("llama-3-8b", context=32_768, concurrency=1, **H100)
    assert found.decode is not None
    assert found.decode.cache_bound_sequences == 4


# --- GPUs together -------------------------------------------------------------------------------


def test_tensor_parallelism_divides_heads_until_there_are_none_left(planned: Planned) -> None:
    sizes = {
        tp: planned("llama-3.1-8b", context=1000, tp=tp).gpu_sequence_nbytes
        for tp in (1, 2, 4, 8, 16, 32)
    }
    whole = 1000 * 131_072
    assert sizes == {
        1: whole,
        2: whole / 2,
        4: whole / 4,
        8: whole / 8,
        16: whole / 8,
        32: whole / 8,
    }
    assert planned("llama-3.1-8b", context=1000, tp=32, concurrency=1).total_nbytes == 4 * whole


def test_a_latent_is_held_whole_by_each_rank(planned: Planned) -> None:
    """Of 8 GPUs, data parallelism holds 8 times as many sequences as tensor parallelism would."""
    tensor = planned("deepseek-v2", gpu="mi300x", tp=8, weights_gb=400, context=1000)
    assert tensor.gpu_sequence_nbytes == tensor.sequence_nbytes == 1000 * 60 * 1152
    data = planned("deepseek-v2", gpu="mi300x", dp=8, weights_gb=50, context=1000)
    assert data.max_sequences == 8 * tensor.max_sequences  # type: ignore[operator]


def test_pipeline_stages_hold_their_layers(planned: Planned) -> None:
    found = planned("llama-3.1-8b", context=1000, concurrency=4, pp=3, **H100)
    assert found.gpu_nbytes == 4 * 1000 * 11 * 4096
    assert found.total_nbytes == 4 * 1000 * 32 * 4096
    decode = found.decode
    assert decode is not None
    # In three batches, each stage reads its weights for each, and its cache once in all.
    assert decode.weights_nbytes == 16_060_522_496
    assert decode.cache_nbytes == 4 * 1000 * 131_072 / 3


def test_data_parallelism_divides_sequences(planned: Planned) -> None:
    found = planned("llama-3-8b", context=32_768, dp=4, **H100)
    assert found.max_sequences == 4 * 13
    assert found.decode is not None
    assert int(found.decode.tokens_per_second) == int(4 * 13 / (71.8951e9 / 3.35e12))
    uneven = planned("llama-3-8b", context=1000, dp=4, concurrency=5, **H100)
    assert uneven.gpu_nbytes == 2 * 1000 * 131_072


# --- properties ----------------------------------------------------------------------------------

_MODELS = {
    "full": {"model_type": "llama", "num_key_value_heads": 2},
    "mixed": {"model_type": "gemma2", "num_key_value_heads": 2, "sliding_window": 40},
    "latent": {"model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 8},
}
_FORMATS = ("bf16", "fp8-static", "q8_0", "int8", "int4", "int4-kivi", "kivi2")


def _spec(name: str, **changes: Any) -> ModelSpec:
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "hidden_size": 256,
        "head_dim": 32,
        "max_position_embeddings": 1000,
        **_MODELS[name],
        **changes,
    }
    return ModelSpec.from_config(config, name, "")


def _form(name: str, **changes: Any) -> Any:
    return parse_formats([name], Overrides(**changes), 2)[0]


def _request(
    model: ModelSpec, lengths: list[int], concurrency: int | None, free: int | None = None
) -> Request:
    memory = None if free is None else Memory("gpu", "", free + 1000, 0, 1e12)
    return Request(
        model,
        Weights(1000),
        memory,
        Parallel(),
        Workload(tuple(lengths), concurrency),
        page_tokens=16,
        reserved_tokens=max(lengths),
    )


models = st.sampled_from(sorted(_MODELS))
latent_only = st.sampled_from(["bf16", "fp8-static", "int8", "int4"])
lengths = st.lists(st.integers(1, 2000), min_size=1, max_size=4)


@given(st.sampled_from(["full", "latent"]), latent_only, st.integers(4, 500), st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_linear_in_length_without_windows(name: str, kv: str, start: int, more: int) -> None:
    """Beyond the sinks, each token costs the same."""
    model, form = _spec(name), _form(kv)
    sizes = [plan(_request(model, [start + n * more], 1), form) for n in range(3)]
    steps = [b.sequence_nbytes - a.sequence_nbytes for a, b in pairwise(sizes)]
    assert steps[0] == steps[1] == more * sizes[0].token_nbytes


@given(models, latent_only, st.integers(1, 500), st.integers(0, 500))
@settings(max_examples=60, deadline=None)
def test_never_smaller_with_more(name: str, kv: str, tokens: int, more: int) -> None:
    form = _form(kv)
    small = plan(_request(_spec(name), [tokens], 2), form)
    longer = plan(_request(_spec(name), [tokens + more], 2), form)
    others = plan(_request(_spec(name), [tokens], 3), form)
    deeper = plan(_request(_spec(name, num_hidden_layers=6), [tokens], 2), form)
    assert longer.sequence_nbytes >= small.sequence_nbytes
    assert longer.pages.sequence_nbytes >= small.pages.sequence_nbytes
    assert others.total_nbytes > small.total_nbytes
    assert deeper.token_nbytes > small.token_nbytes
    if name != "latent":
        wider = plan(_request(_spec(name, num_key_value_heads=4), [tokens], 2), form)
        assert wider.sequence_nbytes == 2 * small.sequence_nbytes


@given(st.sampled_from(["full", "mixed"]), st.sampled_from(_FORMATS), st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_what_is_allocated_is_at_least_what_is_needed(name: str, kv: str, tokens: int) -> None:
    found = plan(_request(_spec(name), [tokens], 1), _form(kv))
    assert found.pages.sequence_nbytes >= found.sequence_nbytes
    assert found.full_length_nbytes >= found.sequence_nbytes
    assert 0 < found.pages.utilisation <= 1


@given(models, latent_only, lengths, st.integers(0, 20_000_000))
@settings(max_examples=60, deadline=None)
def test_max_sequences_is_the_largest_that_fits(
    name: str, kv: str, lengths: list[int], free: int
) -> None:
    model, form = _spec(name), _form(kv)
    found = plan(_request(model, lengths, None, free), form).max_sequences
    assert found is not None
    if found:
        assert plan(_request(model, lengths, found, free), form).gpu_nbytes <= free
    assert plan(_request(model, lengths, found + 1, free), form).gpu_nbytes > free


@given(st.sampled_from(["full", "latent"]), latent_only, st.integers(1, 5), st.integers(0, 10**7))
@settings(max_examples=60, deadline=None)
def test_max_context_is_the_longest_that_fits(name: str, kv: str, count: int, free: int) -> None:
    model, form = _spec(name), _form(kv)
    found = plan(_request(model, [1], count, free), form).max_context
    assert found is not None
    if found:
        assert plan(_request(model, [found], count, free), form).gpu_nbytes <= free
    assert plan(_request(model, [found + 1], count, free), form).gpu_nbytes > free


@given(models, latent_only, st.integers(1, 500), st.integers(1, 20), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_more_gpus_never_hold_more_each(
    name: str, kv: str, tokens: int, count: int, gpus: int
) -> None:
    model, form = _spec(name), _form(kv)
    alone = _request(model, [tokens], count)
    for parallel in (Parallel(tensor=gpus), Parallel(pipeline=min(gpus, 4)), Parallel(data=gpus)):
        together = Request(
            model, alone.weights, None, parallel, alone.workload, 16, alone.reserved_tokens
        )
        assert plan(together, form).gpu_nbytes <= plan(alone, form).gpu_nbytes
