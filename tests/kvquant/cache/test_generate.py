"""Everything that generate() does, on layers that see all, slide, mix, share a latent, or recur.

Where nothing is quantized, tokens are those of Transformers' own cache. A lossy cache on a random
model is held against itself: repeated, reordered, reset, or read back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, GenerationConfig

from kvquant.cache.cache import QuantizedCache
from kvquant.cache.transformers_compat import cache_argument

OLD = Version(transformers.__version__) < Version("5.24")
MODELS = [
    "llama",
    "mistral",
    "gemma2",
    "gpt_oss",
    "deepseek",
    "lfm2",
    "qwen3_next",
    "falcon_h1",
]
CROPPABLE = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek", "lfm2"]
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {},
    "fp8": {},
    "fp8_e5m2": {},
    "int8": {},
    "int4": {},
    "int3": {"residual_length": 6},
    "int4-kivi": {"residual_length": 6, "group_size": 4},
}
OPERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 3.0},
    "beams": {"num_beams": 3},
    "several beams returned": {"num_beams": 4, "num_return_sequences": 2},
    "several samples": {"do_sample": True, "temperature": 3.0, "num_return_sequences": 3},
    "prefill in chunks": {"prefill_chunk_size": 5},
    "prefill one by one": {"prefill_chunk_size": 1},
}


def prompt(batch: int = 1, tokens: int = 21, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, of 12 and 21 tokens, and their mask."""
    ids, mask = prompt(2), torch.ones(2, 21, dtype=torch.long)
    ids[0, :9] = mask[0, :9] = 0
    return ids, mask


def theirs(model: Any) -> DynamicCache:
    return DynamicCache(config=model.get_decoder().config)


def ours(model: Any, scheme: str = "none") -> QuantizedCache:
    return QuantizedCache.from_model(model, scheme=scheme, **PRESETS[scheme])


def held(cache: QuantizedCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first layer that the attention of a next token would read."""
    layer = cache.geometry.layers[0]
    new = [torch.zeros(1, layer.kv_heads, 1, d) for d in (layer.key_dim, layer.value_dim)]
    keys, values = copy.deepcopy(cache).update(new[0], new[1], 0)
    return keys[:, :, :-1], values[:, :, :-1]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_unquantized_tokens_are_those_of_transformers_cache(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], name: str, operation: str
) -> None:
    model, (ids, mask) = tiny_once(name), left_padded()
    found = []
    for cache in (theirs(model), ours(model)):
        torch.manual_seed(5)
        found.append(generate(model, ids, cache, attention_mask=mask, **OPERATIONS[operation]))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("scheme", "operation"),
    [
        *((scheme, operation) for scheme in ("int4", "int4-kivi") for operation in OPERATIONS),
        *((scheme, "beams") for scheme in PRESETS if scheme not in ("none", "int4", "int4-kivi")),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek"])
def test_quantized_a_cache_that_was_reset_gives_the_same_again(
    tiny_once: Callable[..., Any],
    generate: Callable[..., Any],
    name: str,
    scheme: str,
    operation: str,
) -> None:
    model, (ids, mask) = tiny_once(name), left_padded()
    cache, found = ours(model, scheme), []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(generate(model, ids, cache, attention_mask=mask, **OPERATIONS[operation]))
        cache.reset()
        assert cache.nbytes() == cache.live_nbytes() == cache.get_seq_length() == 0
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("scheme", PRESETS)
def test_prompts_shorter_than_sinks_groups_and_residual(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], scheme: str, tokens: int
) -> None:
    for name in ("llama", "gemma2"):
        model, cache = tiny_once(name), ours(tiny_once(name), scheme)
        found = generate(model, prompt(2, tokens), cache, 3)
        assert cache.get_seq_length() == tokens + 2
        if scheme == "none":
            assert torch.equal(found, generate(model, prompt(2, tokens), None, 3))


def test_the_literal_model_of_issue_3(
    tiny: Callable[..., Any], generate: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    """64 prompt tokens and 64 … 1,024 new ones: each continuation is the beginning of the next."""
    model = tiny(
        "llama",
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )
    cache = QuantizedCache.from_model(model, "none")
    found = generate(
        model, prompt(tokens=64), cache, 1024, output_logits=True, return_dict_in_generate=True
    )
    recomputed = forward(model, found.sequences)[:, 63:-1]
    assert torch.equal(recomputed.argmax(-1), found.sequences[:, 64:])
    assert float((torch.stack(found.logits, 1) - recomputed).abs().max()) < 1e-4
    assert cache.get_seq_length() == 1087
    assert cache.live_nbytes() == 4_452_352


# Assisted decoding


def drafting(model: Any, how: str) -> dict[str, Any]:
    if how == "prompt lookup":
        return {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
    if OLD and model.config.model_type in ("mistral", "gemma2", "gpt_oss"):
        pytest.skip("here the assistant's own sliding cache returns more than its mask covers")
    assistant, random = copy.deepcopy(model), torch.Generator().manual_seed(1)
    assistant.generation_config.update(
        num_assistant_tokens=5,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    with torch.no_grad():  # so that it is right now and then
        for parameter in assistant.parameters():
            parameter += 0.008 * torch.randn(parameter.shape, generator=random)
    return {"assistant_model": assistant}


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("name", CROPPABLE)
def test_unquantized_assisted_decoding_gives_the_greedy_tokens(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], name: str, how: str
) -> None:
    model, ids = tiny_once(name), prompt(tokens=12).repeat(1, 2)
    cache = ours(model)
    found = generate(model, ids, cache, 24, **drafting(model, how))
    assert torch.equal(found, generate(model, ids, None, 24))
    assert cache.get_seq_length() == found.shape[1] - 1
    assert cache.is_croppable


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-kivi"])
def test_quantized_assisted_decoding_leaves_nothing_of_wrong_drafts(
    tiny_once: Callable[..., Any],
    generate: Callable[..., Any],
    forward: Callable[..., Any],
    name: str,
    scheme: str,
    how: str,
) -> None:
    """The first layer's keys and values follow from the tokens alone."""
    model, ids = tiny_once(name), prompt(tokens=80).repeat(1, 2)
    cache, fresh = ours(model, scheme), ours(model, scheme)
    found = generate(model, ids, cache, 24, **drafting(model, how))
    forward(model, found[:, :-1], fresh)
    assert cache.get_seq_length() == fresh.get_seq_length() == ids.shape[1] + 23
    for mine, expected in zip(held(cache), held(fresh), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


@pytest.mark.xfail(
    raises=(RuntimeError, AssertionError),
    strict=True,
    reason="only the newest 128 tokens can be taken back",
)
@pytest.mark.parametrize(
    ("name", "scheme"), [("mistral", "none"), ("mistral", "int4"), ("llama", "int4-kivi")]
)
def test_drafts_may_be_longer_than_what_stays_as_it_was(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], name: str, scheme: str
) -> None:
    """DynamicCache keeps all that came since the last crop."""
    model, ids = tiny_once(name), prompt(tokens=160).repeat(1, 2)
    cache = ours(model, scheme)
    found = generate(model, ids, cache, 12, prompt_lookup_num_tokens=150, max_matching_ngram_size=2)
    if scheme == "none":
        assert torch.equal(found, generate(model, ids, None, 12))
    tail = cache.layers[0].stores[0][0].tail
    expected = {"none": 0, "int4": 0, "int4-kivi": 6}[scheme]
    assert len(tail) >= expected


@pytest.mark.parametrize("scheme", ["int4-kivi", "int8"])
def test_a_model_that_cannot_go_back_is_refused_as_with_any_cache(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], scheme: str
) -> None:
    model = tiny_once("qwen3_next")
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        generate(model, prompt(), ours(model, scheme), prompt_lookup_num_tokens=3)


# Turns


@pytest.mark.parametrize("name", MODELS)
def test_two_turns_are_those_of_transformers_cache(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], name: str
) -> None:
    """The second turn comes as the whole chat so far, then as its new tokens alone."""
    model, texts = tiny_once(name), []
    for cache in (theirs(model), ours(model)):
        text = generate(model, prompt(), cache, 6)
        text = generate(model, torch.cat([text, prompt(tokens=5, seed=2)], 1), cache, 6)
        new = torch.cat([text[:, -1:], prompt(tokens=3, seed=3)], 1)
        mask = torch.ones(1, text.shape[1] + 3, dtype=torch.long)
        texts.append(torch.cat([text, generate(model, new, cache, 6, attention_mask=mask)], 1))
        assert cache.get_seq_length() == 21 + 6 + 5 + 6 + 3 + 5
    assert torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("name", MODELS)
def test_what_was_generated_behind_a_rows_end_can_be_hidden_in_the_next_turn(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], name: str, padding: int
) -> None:
    """It was stored as real; a batch whose rows end at different times cannot do without."""
    model, ids, texts = tiny_once(name), prompt(2), []
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    for cache in (theirs(model), ours(model)):
        text = generate(model, ids, cache, 6, attention_mask=mask)
        whole = torch.cat([mask, torch.ones(2, 11, dtype=torch.long)], 1)
        whole[0, 23:27] = 0
        text = torch.cat([text, prompt(2, 5, seed=2)], 1)
        texts.append(generate(model, text, cache, 6, attention_mask=whole))
    assert torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek"])
def test_padding_anywhere_is_as_with_transformers_cache(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    """Three turns of a batch: padded on the left, the right, in the middle; one row at a time."""
    model = tiny_once(name)
    turns = [
        torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]),
        torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]),
        torch.tensor([[1], [0], [1]]),
        torch.tensor([[0, 1, 1], [1, 1, 0], [1, 1, 1]]),
    ]
    caches, mask = [theirs(model), ours(model)], torch.zeros(3, 0, dtype=torch.long)
    for number, turn in enumerate(turns):
        mask = torch.cat([mask, turn], dim=1)
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -turn.shape[1] :]
        ids = prompt(3, turn.shape[1], seed=number) * turn
        given = {"attention_mask": mask, "position_ids": places}
        found = [forward(model, ids, cache, **given)[turn.bool()] for cache in caches]
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
    real = mask.sum(1).tolist()
    if name == "llama":
        lengths = {
            row: stores[0].length
            for group, stores in zip(
                caches[1]._ledger.groups, caches[1].layers[0].stores, strict=True
            )
            for row in (group.rows if group.rows is not None else range(3))
        }
        assert [lengths[row] for row in range(3)] == real, "padding is not stored"


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek"])
@pytest.mark.parametrize("scheme", ["none", "int4"])
def test_embeddings_in_place_of_tokens(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], name: str, scheme: str
) -> None:
    model, (ids, mask) = tiny_once(name), left_padded()
    embedded = model.get_input_embeddings()(ids).detach()
    from_tokens = generate(model, ids, ours(model, scheme), attention_mask=mask)
    found = generate(model, None, ours(model, scheme), inputs_embeds=embedded, attention_mask=mask)
    assert torch.equal(found, from_tokens[:, ids.shape[1] :])


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek"])
def test_positions_may_begin_anywhere_and_jump(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    model, ids = tiny_once(name), prompt()
    calls = [(slice(0, 12), 100), (slice(12, 13), 112), (slice(13, 14), 1500), (slice(14, 21), 90)]
    caches = [theirs(model), ours(model)]
    for part, start in calls:
        places = torch.arange(start, start + part.stop - part.start)[None]
        found = [forward(model, ids[:, part], cache, position_ids=places) for cache in caches]
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


# Rows


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "deepseek"])
@pytest.mark.parametrize("scheme", ["none", "int8", "int4", "int4-kivi"])
@pytest.mark.parametrize("move", ["reorder", "select", "select by mask", "repeat"])
def test_rows_that_moved_are_as_if_they_had_been_there_from_the_start(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str, scheme: str, move: str
) -> None:
    model, ids = tiny_once(name), prompt(3, 24)
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[0, :5] = mask[1, :2] = 0
    rows = {
        "reorder": [2, 0, 0],
        "select": [1, 2],
        "select by mask": [0, 2],
        "repeat": [0, 0, 1, 1, 2, 2],
    }[move]
    moved, placed = ours(model, scheme), ours(model, scheme)

    def call(cache: QuantizedCache, part: slice, which: list[int]) -> torch.Tensor:
        given = mask[which, : part.stop]
        places = (given.cumsum(1) - 1).clamp(min=0)[:, part]
        logits: torch.Tensor = forward(
            model, ids[which, part], cache, attention_mask=given, position_ids=places
        )
        return logits

    call(moved, slice(0, 17), [0, 1, 2])
    call(placed, slice(0, 17), rows)
    if move == "reorder":
        moved.reorder_cache(torch.tensor(rows))
    elif move == "repeat":
        moved.batch_repeat_interleave(2)
    else:
        indices = torch.tensor(rows)
        if move == "select by mask":
            indices = torch.tensor([True, False, True])
        moved.batch_select_indices(indices)
    assert moved.live_nbytes() == placed.live_nbytes()
    for part in (slice(17, 18), slice(18, 24)):
        found, expected = call(moved, part, rows), call(placed, part, rows)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
def test_recurrent_states_move_with_their_rows(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    model, ids = tiny_once(name), prompt(2, 20)
    cache = ours(model, "int8")
    forward(model, ids[:, :16], cache)
    alone = [ours(model, "int8") for _ in range(2)]
    for row, own in enumerate(alone):
        forward(model, ids[row : row + 1, :16], own)
    cache.reorder_cache(torch.tensor([1, 0]))
    found = forward(model, ids[[1, 0], 16:], cache)
    for logits, row in zip(found, (1, 0), strict=True):
        (expected,) = forward(model, ids[row : row + 1, 16:], alone[row])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


# Gradients, configs


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek"])
def test_gradients_of_the_current_tokens_are_those_with_transformers_cache(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    model, ids = tiny_once(name), prompt()
    embedded = model.get_input_embeddings()(ids[:, 12:]).detach()
    found = []
    for cache in (theirs(model), ours(model)):
        forward(model, ids[:, :12], cache)
        new = embedded.clone().requires_grad_(True)
        given = {cache_argument(model.get_decoder()): cache}
        logits = model(inputs_embeds=new, **given).logits
        (gradient,) = torch.autograd.grad(logits.square().sum(), new)
        found.append(gradient)
        if isinstance(cache, QuantizedCache):
            stores = [s for layer in cache.layers for pair in layer.stores for s in pair]
            kept = [t for s in stores for b in s.buffers for t in b.tensors]
            assert kept and not any(t.requires_grad for t in kept)
    assert float(found[0].abs().max()) > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_generation_config_serves_again_and_again_and_stays_as_it_is(
    tiny_once: Callable[..., Any],
) -> None:
    models = [tiny_once("llama"), tiny_once("llama", num_hidden_layers=5)]
    config = GenerationConfig(
        max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, num_beams=2
    )
    before, ids = copy.deepcopy(config), prompt()
    texts: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for order in ((0, 1), (1, 0), (0, 1)):
        for which in order:
            model = models[which]
            cache = ours(model, "int4")
            assert len(cache) == (2, 5)[which]
            given = {cache_argument(model.get_decoder()): cache}
            texts[which].append(
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=config, **given
                )
            )
    assert config == before
    for found in texts.values():
        assert all(torch.equal(found[0], other) for other in found)


def test_inference_mode_and_its_absence_mix(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model, ids = tiny_once("gemma2"), prompt()
    plain = ours(model, "int4")
    forward(model, ids[:, :12], plain)
    expected = generate(model, ids, plain)
    cache = ours(model, "int4")
    with torch.inference_mode():
        forward(model, ids[:, :12], cache)
        cache.reorder_cache(torch.tensor([0]))
    assert torch.equal(generate(model, ids, cache), expected)
