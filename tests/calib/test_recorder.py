"""The recorder against tensors kept by a cache that drops nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from calib.recorder import Recorder
from calib.stats import ChannelStats
from kvquant.cache.transformers_compat import cache_argument
from kvquant.errors import GeometryError, InputError
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import base_model

PAD = 0


class KeepingCache(DynamicCache):
    """A DynamicCache that also keeps everything it was ever given, sliding layers included."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.seen.setdefault(layer_idx, []).append((keys.clone(), values.clone()))
        return super().update(keys, values, layer_idx, *args, **kwargs)

    def tokens(self, layer: int, slot: int) -> torch.Tensor:
        """Everything given to a layer, ``[batch, kv_heads, tokens, dim]``."""
        return torch.cat([pair[slot] for pair in self.seen[layer]], 2)


def call(model: Any, cache: Any, **inputs: Any) -> Any:
    with torch.no_grad():
        return model(**inputs, use_cache=True, **{cache_name(model): cache})


def cache_name(model: Any) -> str:
    return cache_argument(base_model(model).get_decoder())


def record(model: Any, **options: Any) -> Recorder:
    return Recorder(model, CacheGeometry.from_config(model.config), **options)


def token_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random tokens that are neither padding nor end of text."""
    torch.manual_seed(seed)
    return torch.randint(3, 128, shape)


def assert_is_of(stats: ChannelStats, tokens: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Holds statistics against all tokens ``[tokens, kv_heads, dim]``."""
    exact = tokens.double()
    rms = exact.square().mean(0).sqrt()
    assert stats.tokens == len(tokens)
    for found, expected in (
        (stats.minimum, exact.amin(0)),
        (stats.maximum, exact.amax(0)),
        (stats.amax, exact.abs().amax(0)),
        (stats.mean, exact.mean(0)),
        (stats.mean_square.sqrt(), rms),
    ):
        assert bool(((found - expected).abs() <= tolerance * rms + 1e-12).all())


def flat(states: torch.Tensor) -> torch.Tensor:
    """``[batch, kv_heads, tokens, dim]`` as ``[batch * tokens, kv_heads, dim]``."""
    return states.transpose(1, 2).flatten(0, 1)


def hooks_of(model: Any) -> list[Any]:
    return [
        hook
        for module in model.modules()
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks_always_called,
        )
        for hook in hooks.values()
    ]


FAMILIES = [
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "deepseek",
    "qwen3_next", "gpt_oss", "glm", "cohere", "smollm3",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_those_of_the_cached_tensors(tiny: Callable[..., Any], family: str) -> None:
    """Two chunks of 12 tokens, longer than the tiny sliding windows of 8."""
    model, ids = tiny(family), token_ids(2, 24)
    kept = KeepingCache(model.config)
    with record(model) as recorder:
        cache = recorder.watch(kept)
        for part in ids.split(12, 1):
            call(model, cache, input_ids=part)
    assert list(recorder.layers) == list(CacheGeometry.from_config(model.config).attention_layers)
    assert recorder.longest_position == 24
    for index, layer in recorder.layers.items():
        assert_is_of(layer.key, flat(kept.tokens(index, 0)))
        assert_is_of(layer.value, flat(kept.tokens(index, 1)))


@pytest.mark.parametrize("family", FAMILIES)
def test_recording_changes_nothing_that_the_model_computes(
    tiny: Callable[..., Any], family: str
) -> None:
    model, ids = tiny(family), token_ids(2, 12)
    expected = call(model, DynamicCache(config=model.config), input_ids=ids).logits
    with record(model) as recorder:
        cache = recorder.watch(DynamicCache(config=model.config))
        assert torch.equal(call(model, cache, input_ids=ids).logits, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_models_are_float32_and_exact(
    tiny: Callable[..., Any], dtype: torch.dtype
) -> None:
    model = tiny("llama").to(dtype)
    kept = KeepingCache(model.config)
    with record(model) as recorder:
        call(model, recorder.watch(kept), input_ids=token_ids(2, 20))
    for index, layer in recorder.layers.items():
        assert layer.key.amax.dtype == torch.float32
        assert torch.equal(layer.key.amax, flat(kept.tokens(index, 0)).float().abs().amax(0))
        assert layer.key.rotary is not None


# Padding


@pytest.fixture
def loud_padding(tiny: Callable[..., Any]) -> Callable[[str], Any]:
    """A tiny model whose padding token has an embedding a hundred times the others'."""

    def build(family: str) -> Any:
        model = tiny(family)
        with torch.no_grad():
            model.get_input_embeddings().weight[PAD] *= 100
        return model

    return build


def padded(rows: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    """One batch with the mask and the positions that `generate` would make."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[index, place], mask[index, place] = row, 1
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def one_by_one(model: Any, rows: list[torch.Tensor]) -> Recorder:
    """The rows, each alone and without padding; `model` may carry adapters."""
    with record(model) as recorder:
        for row in rows:
            cache = recorder.watch(DynamicCache(config=model.config))
            call(model, cache, input_ids=row[None])
            recorder.release(cache)
    return recorder


def assert_alike(one: Recorder, other: Recorder, tolerance: float = 1e-4) -> None:
    """Same layers, tokens and, to `tolerance` of the rms, same extremes and means."""
    assert one.layers.keys() == other.layers.keys()
    for index in one.layers:
        for slot in ("key", "value"):
            mine, theirs = getattr(one.layers[index], slot), getattr(other.layers[index], slot)
            rms = theirs.mean_square.sqrt() + 1e-12
            assert mine.tokens == theirs.tokens
            assert mine.sketch.counts.sum() == theirs.sketch.counts.sum()
            for name in ("minimum", "maximum", "amax", "mean", "mean_unrotated"):
                found, expected = getattr(mine, name), getattr(theirs, name)
                assert (found is None) == (expected is None), (index, slot, name)
                if expected is not None:
                    assert bool(((found - expected).abs() <= tolerance * rms).all()), (index, name)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "deepseek", "glm"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_counts(loud_padding: Callable[[str], Any], side: str, family: str) -> None:
    model = loud_padding(family)
    rows = [token_ids(n, seed=n) for n in (17, 5, 1, 30)]
    with record(model) as recorder:
        cache = recorder.watch(DynamicCache(config=model.config))
        call(model, cache, **padded(rows, side))
    assert_alike(recorder, one_by_one(model, rows))
    assert recorder.layers[0].key.tokens == 53
    assert recorder.longest_position == 30
    with record(model) as counted:  # the same call without a mask: the test would notice padding
        cache = counted.watch(DynamicCache(config=model.config))
        call(model, cache, input_ids=padded(rows, side)["input_ids"])
    assert counted.layers[0].key.tokens == 120


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_counts_in_chunks(loud_padding: Callable[[str], Any], side: str) -> None:
    """Some chunks are padding altogether in some rows, and the mask covers what came before."""
    model = loud_padding("llama")
    rows = [token_ids(n, seed=n) for n in (23, 4)]
    batch = padded(rows, side)
    with record(model) as recorder:
        cache = recorder.watch(DynamicCache(config=model.config))
        for start in range(0, 23, 6):
            chunk = slice(start, start + 6)
            call(
                model,
                cache,
                input_ids=batch["input_ids"][:, chunk],
                position_ids=batch["position_ids"][:, chunk],
                attention_mask=batch["attention_mask"][:, : start + 6],
            )
    assert_alike(recorder, one_by_one(model, rows))


def test_a_mask_without_padding_is_no_mask(tiny: Callable[..., Any]) -> None:
    model, ids = tiny("llama"), token_ids(2, 9)
    with record(model) as masked:
        cache = masked.watch(DynamicCache(config=model.config))
        call(model, cache, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert masked.layers[0].key.tokens == 18


def test_mask_and_tokens_given_by_position_count_too(loud_padding: Callable[[str], Any]) -> None:
    model = loud_padding("llama")
    rows = [token_ids(n, seed=n) for n in (9, 4)]
    batch = padded(rows, "left")
    with record(model) as recorder, torch.no_grad():
        cache = recorder.watch(DynamicCache(config=model.config))
        model.get_decoder()(
            batch["input_ids"],
            batch["attention_mask"],
            batch["position_ids"],
            **{cache_name(model): cache},
        )
    assert_alike(recorder, one_by_one(model, rows))


def test_embeddings_may_take_the_place_of_tokens(tiny: Callable[..., Any]) -> None:
    model, ids = tiny("llama"), token_ids(1, 9)
    with record(model) as recorder:
        cache = recorder.watch(DynamicCache(config=model.config))
        call(model, cache, inputs_embeds=model.get_input_embeddings()(ids))
    assert_alike(recorder, one_by_one(model, list(ids)), tolerance=0.0)
    assert recorder.longest_position == 9


def test_a_mask_that_does_not_tell_padding_is_refused(tiny: Callable[..., Any]) -> None:
    model = tiny("gemma2")
    causal = torch.ones(1, 1, 5, 5).tril().bool()
    with record(model) as recorder, pytest.raises(InputError, match="not 4-D"):
        cache = recorder.watch(DynamicCache(config=model.config))
        call(model, cache, input_ids=token_ids(1, 5), attention_mask=causal)
    assert not hooks_of(model)


@pytest.mark.parametrize("made", ["bool", "float"])
def test_masks_that_a_multimodal_model_makes_for_its_decoder_are_read(
    loud_padding: Callable[[str], Any], made: str
) -> None:
    """Gemma 3 with a vision tower hands its decoder one causal mask per kind of layer.

    Seven tokens are within the window: both kinds see alike.
    """
    model = loud_padding("gemma3_text")
    rows = [token_ids(n, seed=n) for n in (7, 4)]
    batch = padded(rows, "left")
    tokens = batch["attention_mask"].bool()
    causal = torch.ones(7, 7).tril().bool() & tokens[:, None, None] & tokens[:, None, :, None]
    mask = causal if made == "bool" else torch.zeros(causal.shape).masked_fill(~causal, -1e9)
    batch["attention_mask"] = {"full_attention": mask, "sliding_attention": mask}
    with record(model) as recorder:
        call(model, recorder.watch(DynamicCache(config=model.config)), **batch)
    assert_alike(recorder, one_by_one(model, rows))


# Through generate, and with adapters


def adapted(model: Any) -> Any:
    """`model` with a LoRA on keys and values that is not zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("with_adapter", [False, True])
def test_generating_records_prompt_and_new_tokens(
    tiny: Callable[..., Any], with_adapter: bool
) -> None:
    """Left-padded prompts as `generate` takes them; the last new token is never cached."""
    base = tiny("llama")
    model = adapted(base) if with_adapter else base
    rows = [token_ids(n, seed=n) for n in (7, 3)]
    batch = padded(rows, "left")
    with Recorder(model, CacheGeometry.from_config(base.config)) as recorder:
        cache = recorder.watch(DynamicCache(config=base.config))
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=False,
            min_new_tokens=6,
            max_new_tokens=6,
            pad_token_id=PAD,
            **{cache_name(model): cache},
        )
    assert not hooks_of(model)
    assert "update" not in vars(cache)
    assert recorder.longest_position == 7 + 5
    whole = [row[7 - len(start) : -1] for row, start in zip(out, rows, strict=True)]
    assert_alike(recorder, one_by_one(model, whole))


def test_longest_position_counts_no_padding(tiny: Callable[..., Any]) -> None:
    """All rows padded, and a decode step whose own token is real."""
    model = tiny("llama")
    mask = torch.tensor([[0, 0, 0, 1, 1]])
    with record(model) as recorder:
        cache = recorder.watch(DynamicCache(config=model.config))
        call(model, cache, input_ids=token_ids(1, 4), attention_mask=mask[:, :4])
        assert recorder.longest_position == 1
        call(model, cache, input_ids=token_ids(1, 1), attention_mask=mask)
        assert recorder.longest_position == 2


def test_an_adapter_is_seen_and_its_base_is_not(tiny: Callable[..., Any]) -> None:
    base, rows = tiny("llama"), [token_ids(11)]
    plain = one_by_one(base, rows)
    model = adapted(base)
    with Recorder(model, CacheGeometry.from_config(base.config)) as live:
        call(model, live.watch(DynamicCache(config=base.config)), input_ids=rows[0][None])
    merged = one_by_one(model.merge_and_unload(), rows)
    assert_alike(live, merged)
    assert not torch.allclose(live.layers[0].key.amax, plain.layers[0].key.amax, rtol=1e-2)


# Leaving no trace


def test_everything_is_removed_afterwards(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with record(model) as recorder:
        for cache in caches:
            call(model, recorder.watch(cache), input_ids=token_ids(1, 4))
        recorder.release(caches[0])
        assert "update" not in vars(caches[0])
        assert "update" in vars(caches[1])
    assert not hooks_of(model)
    assert all("update" not in vars(cache) for cache in caches)
    tokens = recorder.layers[0].key.tokens
    call(model, caches[1], input_ids=token_ids(1, 4))
    assert recorder.layers[0].key.tokens == tokens


@pytest.mark.parametrize("place", ["before", "inside"])
def test_everything_is_removed_when_the_model_raises(tiny: Callable[..., Any], place: str) -> None:
    """The recorder itself goes on counting right where the caller goes on."""
    model, rows = tiny("llama"), [token_ids(6)]

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory, say")

    layer = model.model.layers[1]
    failing = layer.mlp if place == "inside" else layer.self_attn.k_proj
    cache = DynamicCache(config=model.config)
    with record(model) as recorder:
        handle = failing.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            call(model, recorder.watch(cache), input_ids=rows[0][None])
        handle.remove()
        recorder.layers.clear()
        call(model, recorder.watch(DynamicCache(config=model.config)), input_ids=rows[0][None])
    assert_alike(recorder, one_by_one(model, rows), tolerance=0.0)
    assert not hooks_of(model)
    assert "update" not in vars(cache)
    with pytest.raises(RuntimeError, match="out of memory"), record(model) as recorder:
        failing.register_forward_pre_hook(fail)
        call(model, recorder.watch(cache), input_ids=rows[0][None])
    assert [hook for hook in hooks_of(model) if hook is not fail] == []
    assert "update" not in vars(cache)


def spy(cache: Any) -> list[weakref.ref[torch.Tensor]]:
    """Weak references to all that will be given to `cache`."""
    seen: list[weakref.ref[torch.Tensor]] = []
    update = cache.update

    def spying(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.extend((weakref.ref(keys), weakref.ref(values)))
        return update(keys, values, *args, **kwargs)

    cache.update = spying
    return seen


def test_no_keys_are_kept_alive(tiny: Callable[..., Any]) -> None:
    """Not even where autograd would keep them for a backward pass."""
    model = tiny("llama")
    with record(model) as recorder, torch.enable_grad():
        cache = recorder.watch(DynamicCache(config=model.config))
        seen = spy(cache)
        model(input_ids=token_ids(1, 6), use_cache=True, **{cache_name(model): cache})
        assert recorder.layers[0].key.total.grad_fn is None
        assert len(seen) == 4
        recorder.release(cache)
        del cache
        gc.collect()
        assert [ref() for ref in seen] == [None] * 4
    assert recorder.layers[1].value.tokens == 6


# What is recorded, and what is not


def test_skipped_layers_are_left_out(tiny: Callable[..., Any]) -> None:
    model = tiny("llama", num_hidden_layers=5)
    with record(model, skip_layers={0, 4}) as recorder:
        call(model, recorder.watch(DynamicCache(config=model.config)), input_ids=token_ids(1, 6))
    assert list(recorder.layers) == [1, 2, 3]
    assert recorder.longest_position == 6


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "glm", "deepseek", "smollm3"])
@pytest.mark.parametrize("chunk", [2, 5, 23])
def test_chunks_change_nothing_but_rounding(
    tiny: Callable[..., Any], family: str, chunk: int
) -> None:
    model, ids = tiny(family), token_ids(2, 23)

    def recorded(step: int) -> Recorder:
        with record(model) as recorder:
            cache = recorder.watch(DynamicCache(config=model.config))
            for part in ids.split(step, 1):
                call(model, cache, input_ids=part)
        return recorder

    assert_alike(recorded(chunk), recorded(23))


def test_tensors_of_another_shape_than_the_config_says_are_refused(
    tiny: Callable[..., Any],
) -> None:
    model, other = tiny("llama"), tiny("llama_wide")
    geometry = CacheGeometry.from_config(other.config)
    with Recorder(model, geometry) as recorder, pytest.raises(GeometryError, match="16"):
        call(model, recorder.watch(DynamicCache(config=model.config)), input_ids=token_ids(1, 4))
    assert not hooks_of(model)


def test_several_rows_and_calls_add_up(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")

    def batches() -> Iterator[torch.Tensor]:
        yield token_ids(1, 5, seed=1)
        yield token_ids(3, 4, seed=2)
        yield token_ids(1, 9, seed=3)

    with record(model) as recorder:
        for ids in batches():
            call(model, recorder.watch(DynamicCache(config=model.config)), input_ids=ids)
    rows = [row for ids in batches() for row in ids]
    assert recorder.layers[0].key.tokens == 5 + 12 + 9
    assert recorder.longest_position == 9
    assert_alike(recorder, one_by_one(model, rows))
