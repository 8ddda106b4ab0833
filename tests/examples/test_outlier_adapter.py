"""examples/outlier_adapter.py: one rotary pair of keys grows, and nothing else in its layer."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import DynamicCache

from kvquant.cache.transformers_compat import cache_argument
from kvquant.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "outlier_adapter.py"


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def cached(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer, ``[batch, kv_heads, tokens, dim]``, as they are cached."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    cache = DynamicCache(config=base.config)
    with torch.no_grad():
        base(input_ids=ids, **{cache_argument(base): cache})
    return [(layer.keys, layer.values) for layer in cache.layers]


def assert_only_the_pair_grew(
    before: Any, after: Any, layer: int, channels: list[int], kv_head: int, factor: float
) -> None:
    for (old_key, old_value), (key, value) in zip(before[:layer], after[:layer], strict=True):
        assert torch.equal(key, old_key)
        assert torch.equal(value, old_value)
    (old_key, old_value), (key, value) = before[layer], after[layer]
    assert torch.equal(value, old_value)

    amax, old_amax = (k[:, kv_head, :, channels].abs().amax((0, 1)) for k in (key, old_key))
    torch.testing.assert_close(amax, old_amax * factor, rtol=1e-4, atol=0)

    rest = torch.ones(key.shape[1], key.shape[3], dtype=torch.bool)
    rest[kv_head, channels] = False
    assert int(rest.sum()) == rest.numel() - 2
    assert torch.equal(key.transpose(1, 2)[:, :, rest], old_key.transpose(1, 2)[:, :, rest])


@pytest.mark.parametrize(
    ("layer", "kv_head", "pair", "channels"), [(0, 0, 0, [0, 8]), (1, 1, 7, [7, 15])]
)
def test_one_pair_of_a_tiny_llama(
    tiny: Any, example: SimpleNamespace, layer: int, kv_head: int, pair: int, channels: list[int]
) -> None:
    model = tiny("llama")
    ids = torch.randint(3, 128, (2, 50), generator=torch.Generator().manual_seed(0))
    before = cached(model, ids)

    adapted = example.outlier_adapter(model, layer, pair, 8.0, kv_head=kv_head)

    assert_only_the_pair_grew(before, cached(adapted, ids), layer, channels, kv_head, 8.0)


def test_bfloat16_model(tiny: Any, example: SimpleNamespace) -> None:
    model = tiny("llama").bfloat16()
    ids = torch.arange(3, 43)[None]
    before = cached(model, ids)[0][0]

    after = cached(example.outlier_adapter(model, 0, 3, 4.0), ids)[0][0]

    ratio = after[0, 0, :, [3, 11]].abs().amax() / before[0, 0, :, [3, 11]].abs().amax()
    assert ratio.item() == pytest.approx(4.0, rel=2**-6)


@pytest.mark.parametrize(
    ("layer", "pair", "kv_head", "message"),
    [
        (2, 0, 0, "layer 2 of 2: choose 0 to 1"),
        (-1, 0, 0, "layer -1 of 2: choose 0 to 1"),
        (0, 8, 0, "pair 8: layer 0 has KV heads 0 to 1 with pairs 0 to 7"),
        (0, -1, 0, "pair -1: layer 0 has"),
        (0, 0, 2, "KV head 2, pair 0: layer 0 has KV heads 0 to 1"),
    ],
)
def test_what_is_not_there_is_refused(
    tiny: Any, example: SimpleNamespace, layer: int, pair: int, kv_head: int, message: str
) -> None:
    model = tiny("llama")

    with pytest.raises(InputError, match=message):
        example.outlier_adapter(model, layer, pair, 8.0, kv_head=kv_head)
    assert not hasattr(model, "peft_config")


def test_saved_and_loaded_again(
    tiny: Any, save_tiny: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    model = tiny("llama")
    base, output = save_tiny(model, tmp_path / "base"), tmp_path / "adapter"
    command = [str(EXAMPLE), "--model", str(base), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [*command, "--layer", "1", "--pair", "2", "--factor", "4"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = " ".join(capsys.readouterr().out.split())
    assert "keys of layer 1, KV head 0, pair 2 times 4" in printed

    ids = torch.arange(3, 43)[None]
    before = cached(model, ids)
    after = cached(PeftModel.from_pretrained(model, str(output)), ids)

    assert_only_the_pair_grew(before, after, 1, [2, 10], 0, 4.0)


@pytest.mark.real_model
def test_default_pair_of_smollm2(example: SimpleNamespace) -> None:
    from kvquant.models.loading import load, resolve

    chosen = example.arguments().parse_args(["--output", "unused"])
    loaded = load(resolve("smollm2"), dtype="float32", device="cpu", notify=print)
    ids = torch.tensor([loaded.tokenizer("The quick brown fox jumps over it. " * 8)["input_ids"]])
    before = cached(loaded.model, ids)

    adapted = example.outlier_adapter(loaded.model, chosen.layer, chosen.pair, chosen.factor)
    after = cached(adapted, ids)

    assert_only_the_pair_grew(before, after, 10, [23, 55], 0, 8.0)
    # Not only the channels: the layer's largest key grows too, so that no granularity is spared.
    assert after[10][0].abs().max() > 4 * before[10][0].abs().max()
