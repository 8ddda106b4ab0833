from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvquant.errors import AdapterError, ModelError
from kvquant.models.source import (
    ModelSource,
    has_weights,
    read_adapter_config,
    read_config,
    resolve,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """The hub out of reach and its cache empty, whatever this machine has."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def write(tmp_path):
    """``write(path, content="", **config)``: a file below the temporary directory."""

    def file(path, content="", **config):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(config) if config else content)
        return target

    return file


@pytest.fixture
def adapter(write, tmp_path):
    """``adapter(name, **config)``: an adapter directory whose weights nobody reads here."""

    def directory(name, **config):
        write(f"{name}/adapter_model.safetensors")
        write(f"{name}/adapter_config.json", **{"peft_type": "LORA", **config})
        return str(tmp_path / name)

    return directory


@pytest.fixture
def model(write, tmp_path):
    write("base/config.json", model_type="llama", hidden_size=64)
    return str(tmp_path / "base")


def test_directory(model):
    source = resolve(model)
    assert source == ModelSource(model=model, requested=model, base=model)
    assert source.is_local
    assert read_config(source) == {"model_type": "llama", "hidden_size": 64}


def test_directory_in_the_home_directory(model, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/base") == ModelSource(model=model, requested="~/base", base="~/base")


def test_hub_id_is_taken_on_trust():
    source = resolve("org/some-model_1.5")
    name = "org/some-model_1.5"
    assert source == ModelSource(model=name, requested=name, base=name)
    assert not source.is_local


def test_gguf_file(tmp_path):
    (tmp_path / "weights.gguf").write_bytes(b"GGUF rest")
    source = resolve(str(tmp_path / "weights.gguf"))
    assert (source.model, source.gguf_file) == (str(tmp_path), "weights.gguf")


def test_broken_gguf_file(tmp_path):
    (tmp_path / "weights.gguf").write_bytes(b"GGUF rest")
    with pytest.raises(ModelError, match=r"cannot read weights\.gguf: ."):
        read_config(resolve(str(tmp_path / "weights.gguf")))


@pytest.mark.parametrize(
    "name",
    ["no/such/model", "./model", "/model", "~/model", "model.gguf", "a b", "", "a//b", "modèle"],
)
def test_neither_path_nor_hub_id(name):
    with pytest.raises(ModelError, match=f"there is no file or directory {name or repr(name)}"):
        resolve(name)


@pytest.mark.parametrize("name", ["some--model", "a..b", "x" * 97, "ends-"])
def test_name_that_the_hub_forbids(name):
    with pytest.raises(ModelError, match=f"directory {name}, and no model on the hub can be"):
        read_config(resolve(name))


def test_empty_names_are_not_the_current_directory(adapter, model, monkeypatch):
    monkeypatch.chdir(adapter("lora"))
    with pytest.raises(ModelError, match="there is no file or directory ''"):
        resolve("")
    with pytest.raises(AdapterError, match="no adapter directory at ''"):
        resolve(model, adapters=[""])


def test_file_of_another_kind(write):
    path = write("model.safetensors", "weights")
    with pytest.raises(ModelError, match="is no GGUF file: give the directory"):
        resolve(str(path))


def test_directory_without_config(write, tmp_path):
    write("empty/readme.md")
    with pytest.raises(ModelError, match=r"is no model: it has no config\.json$"):
        resolve(str(tmp_path / "empty"))
    path = write("empty/q4.gguf")
    with pytest.raises(ModelError, match=rf"no config\.json; to use its GGUF file, name {path}"):
        resolve(str(tmp_path / "empty"))


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_config_that_is_no_object(write, tmp_path, content):
    write("broken/config.json", content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(resolve(str(tmp_path / "broken")))


def test_hub_out_of_reach():
    with pytest.raises(
        ModelError, match=r"no file or directory org/name, and the .* hub could not"
    ):
        read_config(resolve("org/name"))


def test_hub_model_in_the_local_cache_needs_no_hub(write, tmp_path):
    write("hub/models--org--name/refs/main", "0123")
    write("hub/models--org--name/snapshots/0123/config.json", model_type="qwen2")
    assert read_config(resolve("org/name")) == {"model_type": "qwen2"}


def test_hub_adapter_is_told_from_a_model(write, tmp_path):
    write("hub/models--org--name/refs/main", "0123")
    write("hub/models--org--name/snapshots/0123/adapter_config.json", peft_type="LORA")
    with pytest.raises(
        ModelError, match="org/name is an adapter: hf download org/name --local-dir"
    ):
        read_config(resolve("org/name"))


def test_hub_repository_without_config(write, tmp_path):
    write("hub/models--org--name/refs/main", "0123")
    write("hub/models--org--name/snapshots/0123/model.gguf", "GGUF")
    with pytest.raises(ModelError, match=r"org/name has no config\.json"):
        read_config(resolve("org/name"))


def test_adapter_finds_its_base(adapter, model):
    path = adapter("fine", base_model_name_or_path=model)
    assert resolve(path) == ModelSource(model=model, adapters=(path,), requested=path, base=model)
    assert read_config(resolve(path))["hidden_size"] == 64


def test_base_replaces_the_one_that_the_adapter_names(adapter, model):
    path = adapter("fine", base_model_name_or_path="/gone")
    assert resolve(path, base=model).model == model
    assert resolve(path, base="org/name").model == "org/name"
    with pytest.raises(
        ModelError, match=r"base of .*fine: .*directory /gone; --base names another"
    ):
        resolve(path)


def test_relative_base_is_looked_up_here_and_beside_the_adapter(
    adapter, model, tmp_path, monkeypatch, write
):
    path = adapter("fine", base_model_name_or_path="../base")
    # What lies beside the checkout is nobody's business.
    monkeypatch.chdir(write("nowhere/deep/nothing").parent)
    assert read_config(resolve(path))["hidden_size"] == 64
    monkeypatch.chdir(write("elsewhere/deep/nothing").parent)
    write("elsewhere/base/config.json", model_type="here")
    assert resolve(path).model == "../base"
    assert read_config(resolve(path)) == {"model_type": "here"}


@pytest.mark.parametrize("name", [None, ""])
def test_adapter_that_names_no_base(adapter, name):
    with pytest.raises(AdapterError, match="names no base model: give it with --base"):
        resolve(adapter("fine", base_model_name_or_path=name))


def test_further_adapters(adapter, model):
    one, two = adapter("one", base_model_name_or_path=model), adapter("two")
    assert resolve(model, adapters=[one, two]).adapters == (one, two)
    assert resolve(one, adapters=[two]).adapters == (one, two)
    with pytest.raises(AdapterError, match=f"{model} is no PEFT adapter: it has no adapter_config"):
        resolve(model, adapters=[model])
    with pytest.raises(AdapterError, match="no adapter directory at /gone"):
        resolve(one, adapters=["/gone"])


def test_adapter_on_an_adapter(adapter, model):
    first = adapter("first", base_model_name_or_path=model)
    second = adapter("second", base_model_name_or_path=first)
    with pytest.raises(AdapterError, match=r"first, the base of .*second, is an adapter itself"):
        resolve(second)


def test_base_beside_a_full_model(model):
    with pytest.raises(
        ModelError, match=r"--base goes with an adapter directory, and .*base has no"
    ):
        resolve(model, base="org/name")


def test_adapter_without_weights(write, tmp_path):
    write("fine/adapter_config.json", peft_type="LORA")
    with pytest.raises(AdapterError, match=r"has adapter_config\.json but no adapter_model\.safet"):
        read_adapter_config(tmp_path / "fine")


def test_broken_adapter_config(write, adapter):
    path = adapter("fine")
    write("fine/adapter_config.json", "{")
    with pytest.raises(AdapterError, match=r"cannot read .*adapter_config\.json"):
        read_adapter_config(path)


def test_all_prompt_learning_types_are_refused(adapter):
    from peft.config import PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    refused = set()
    for peft_type in PEFT_TYPE_TO_CONFIG_MAPPING:
        path = adapter(peft_type.value, peft_type=peft_type.value, base_model_name_or_path="a/b")
        try:
            resolve(path)
        except AdapterError as error:
            assert f"is of type {peft_type.value}: its learned prompt fills cache" in str(error)
            refused.add(peft_type)
    learn_prompts = {
        peft_type
        for peft_type, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
        if issubclass(config, PromptLearningConfig)
    }
    assert refused == learn_prompts
    assert len(refused) >= 5


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["model.safetensors"], True),
        (["pytorch_model.bin"], True),
        (["config.json"], False),
        (["adapter_model.safetensors"], False),
    ],
)
def test_weights(write, tmp_path, files, expected):
    for name in files:
        write(f"model/{name}")
    assert has_weights(tmp_path / "model") is expected


def test_weights_are_complete_when_all_shards_are_there(write, tmp_path):
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write("model/model.safetensors.index.json", weight_map=names)
    write(f"model/{names['a']}")
    assert not has_weights(tmp_path / "model")
    write(f"model/{names['b']}")
    assert has_weights(tmp_path / "model")


def test_finding_a_model_imports_no_torch(model, adapter):
    path = adapter("fine", base_model_name_or_path=model)
    code = (
        "import sys\n"
        "from kvquant.models.source import read_config, resolve\n"
        f"assert read_config(resolve({path!r}))['hidden_size'] == 64\n"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
