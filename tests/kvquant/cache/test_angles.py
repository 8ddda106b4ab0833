from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvquant.cache.angles import RotaryAngles, embedding_of
from kvquant.rotary import RotaryLayout, cosine_and_sine

CPU = torch.device("cpu")

# What a layer's table of cosines looks like, per family.
FAMILIES = {
    "llama": RotaryLayout(0, 16, False, "half"),
    "llama_wide": RotaryLayout(0, 24, False, "half"),
    "llama_linear": RotaryLayout(0, 16, False, "half"),
    "llama_yarn": RotaryLayout(0, 16, False, "half"),
    "llama_llama3": RotaryLayout(0, 16, False, "half"),
    "qwen2": RotaryLayout(0, 16, False, "half"),
    "gemma2": RotaryLayout(0, 16, False, "half"),
    "glm": RotaryLayout(0, 8, True, "half"),
    "cohere": RotaryLayout(0, 16, True, "even"),
    "gpt_oss": RotaryLayout(0, 16, False, "all"),
    "deepseek": RotaryLayout(0, 4, True, "half"),
    "qwen3_next": RotaryLayout(0, 4, False, "half"),
}


def in_a_call(model: Any, positions: torch.Tensor) -> list[tuple[str | None, Any]]:
    """Position embeddings that a model computes in a call, each with the layer type it is for."""
    seen: list[tuple[str | None, Any]] = []

    def note(module: Any, args: Any, kwargs: Any, embeddings: Any) -> None:
        kind = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        seen.append((kind, embeddings))

    handle = model.get_decoder().rotary_emb.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(3, 3 + positions.shape[1])[None], position_ids=positions)
    handle.remove()
    return seen


def table_of(model: Any, layer_idx: int, layout: RotaryLayout) -> RotaryAngles:
    embed = embedding_of(model.get_decoder(), layer_idx)
    assert embed is not None
    return RotaryAngles(embed, layout, CPU)


POSITIONS = torch.tensor([[0, 1, 2, 5, 9, 100, 1023, 1024, 3000]])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_what_the_model_computes(tiny: Callable[..., Any], family: str) -> None:
    model, layout = tiny(family), FAMILIES[family]
    ((_, embeddings),) = in_a_call(model, POSITIONS)
    last = len(model.get_decoder().layers) - 1
    for table, wanted in zip(
        table_of(model, last, layout)(3001), layout.table(embeddings), strict=True
    ):
        assert table.dtype == torch.float32
        assert table.shape[1] == layout.width // 2
        assert torch.equal(table[POSITIONS], wanted)
    assert not torch.equal(table[1], table[2])


def test_each_kind_of_layer_has_its_own_frequencies(tiny: Callable[..., Any]) -> None:
    model, layout = tiny("gemma3_text"), RotaryLayout(0, 16, False, "half")
    kinds = model.config.layer_types
    wanted = {kind: layout.table(embeddings) for kind, embeddings in in_a_call(model, POSITIONS)}
    assert set(wanted) == {"sliding_attention", "full_attention"}
    assert not torch.equal(wanted["sliding_attention"][0], wanted["full_attention"][0])
    for layer_idx, kind in enumerate(kinds):
        found = table_of(model, layer_idx, layout)(3001)
        for table, expected in zip(found, wanted[kind], strict=True):
            assert torch.equal(table[POSITIONS], expected)


def test_a_bf16_model_rounds_the_same_numbers(tiny: Callable[..., Any]) -> None:
    model, layout = tiny("llama").bfloat16(), FAMILIES["llama"]
    ((_, embeddings),) = in_a_call(model, POSITIONS)
    assert embeddings[0].dtype == torch.bfloat16
    for table, wanted in zip(
        table_of(model, 0, layout)(3001), layout.table(embeddings), strict=True
    ):
        assert torch.equal(table[POSITIONS].bfloat16().float(), wanted)


class Counted:
    """An embedding that notes which positions it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, positions: torch.Tensor) -> Any:
        assert torch.equal(positions[0].diff(), torch.ones(positions.shape[1] - 1))
        self.asked.append((int(positions[0, 0]), positions.shape[1]))
        turns = positions[..., None] * torch.tensor([1.0, 0.01, 1.0, 0.01])
        return turns.cos(), turns.sin()


LAYOUT = RotaryLayout(0, 4, False, "half")


@pytest.mark.parametrize(
    ("counts", "held", "starts"),
    [
        ([0], [0], []),
        ([1], [1024], [0]),
        ([1024], [1024], [0]),
        ([1025], [2048], [0, 1024]),
        ([5, 7, 1024, 3], [1024, 1024, 1024, 1024], [0]),
        # It doubles, so that it is copied a few times only.
        ([1, 1025, 2049], [1024, 2048, 4096], [0, 1024, 2048, 3072]),
        ([1, 4500], [1024, 5120], [0, 1024, 2048, 3072, 4096]),
        ([3000, 3073], [3072, 6144], [0, 1024, 2048, 3072, 4096, 5120]),
    ],
)
def test_pages_are_computed_whole_and_once(
    counts: list[int], held: list[int], starts: list[int]
) -> None:
    embed = Counted()
    angles = RotaryAngles(embed, LAYOUT, CPU)
    assert [angles(count)[0].shape[0] for count in counts] == held
    assert embed.asked == [(start, 1024) for start in starts]
    assert angles.nbytes() == held[-1] * 2 * 2 * 4


def test_threads_may_let_it_grow_at_once() -> None:
    """Here the second one comes while the first one computes its page."""
    expected = RotaryAngles(Counted(), LAYOUT, CPU)(3072)
    plain, more = Counted(), [2500, 1500]

    def embed(positions: torch.Tensor) -> Any:
        if more:
            assert len(angles(more.pop())[0]) >= 1500
        return plain(positions)

    angles = RotaryAngles(embed, LAYOUT, CPU)
    for found in (angles(10), angles(3072)):
        for part, wanted in zip(found, expected, strict=True):
            assert torch.equal(part, wanted[: len(part)])


@pytest.mark.parametrize("family", ["llama", "llama_yarn", "cohere", "gpt_oss"])
def test_a_position_has_the_same_numbers_however_they_were_asked_for(
    tiny: Callable[..., Any], family: str
) -> None:
    model = tiny(family)
    whole = table_of(model, 0, FAMILIES[family])(4096)
    steps = table_of(model, 0, FAMILIES[family])
    for count in (1, 1000, 1025, 2000, 2049, 4096):
        for table, wanted in zip(steps(count), whole, strict=True):
            size = min(len(table), 4096)
            assert size >= count
            assert torch.equal(table[:size], wanted[:size])


def test_tables_are_kept_without_a_graph(tiny: Callable[..., Any]) -> None:
    with torch.enable_grad():
        cos, sin = table_of(tiny("llama"), 0, LAYOUT)(10)
    assert not cos.requires_grad
    assert not sin.requires_grad


# Where a table would not hold


def dynamic(tiny: Callable[..., Any]) -> Any:
    return tiny("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})


@pytest.mark.parametrize("family", ["gpt2", "phi3_longrope", "dynamic"])
def test_there_is_none_where_rotation_depends_on_the_length_or_is_absent(
    tiny: Callable[..., Any], family: str
) -> None:
    model = dynamic(tiny) if family == "dynamic" else tiny(family)
    assert embedding_of(model.get_decoder(), 0) is None


def test_there_is_none_for_positions_of_several_dimensions() -> None:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

    rope = {"rope_type": "default", "rope_theta": 1e4}
    settings = {
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = Qwen2VLTextConfig(**settings, rope_parameters={**rope, "mrope_section": [2, 3, 3]})
    assert embedding_of(Qwen2VLTextModel(config), 0) is None


def test_there_is_none_where_one_kind_of_layer_is_unsteady(tiny: Callable[..., Any]) -> None:
    model = tiny("gemma3_text")
    decoder = model.get_decoder()
    decoder.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    kinds = decoder.config.layer_types
    found = [embedding_of(decoder, index) is None for index in range(len(kinds))]
    assert found == [kind == "full_attention" for kind in kinds]


@pytest.mark.parametrize(
    "decoder",
    [
        SimpleNamespace(),
        SimpleNamespace(rotary_emb=torch.nn.Identity()),
        SimpleNamespace(rotary_emb="not a module", config=SimpleNamespace()),
    ],
)
def test_a_decoder_of_another_make_has_none(decoder: Any) -> None:
    assert embedding_of(decoder, 0) is None


def test_the_layouts_here_are_those_of_the_tables(tiny: Callable[..., Any]) -> None:
    # 'half' and 'even' tables hold each angle twice, 'all' tables once.
    for family, layout in FAMILIES.items():
        ((_, embeddings),) = in_a_call(tiny(family), POSITIONS)
        cos, _ = cosine_and_sine(embeddings)
        pairs = layout.width // 2
        assert cos.shape[-1] == (pairs if layout.angles == "all" else 2 * pairs)
        if layout.angles == "half":
            assert torch.equal(cos[..., :pairs], cos[..., pairs:])
        if layout.angles == "even":
            assert torch.equal(cos[..., 0::2], cos[..., 1::2])
