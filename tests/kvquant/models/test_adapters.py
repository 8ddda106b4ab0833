from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch

from kvquant.errors import AdapterError
from kvquant.models.adapters import (
    AdapterWarning,
    activate,
    adapter_names,
    attach,
    base_model,
    describe,
    merge,
)

KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True, "r": 8},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"layers.0.*": 8}, "alpha_pattern": {"layers.0.*": 64}},
    "embedding": {"target_modules": ["embed_tokens", "k_proj"]},
    "saved-embedding": {"modules_to_save": ["embed_tokens"]},
}
RESIZED = {"modules_to_save": ["embed_tokens"], "vocabulary": 136}


@pytest.fixture
def pair(tiny, make_adapter, tmp_path):
    """``pair(tied=False, **lora_options)``: a PeftModel with one adapter named ``fine``."""

    def build(tied=False, **options):
        base = tiny("llama", tie_word_embeddings=tied)
        make_adapter(base, tmp_path / "fine", **options)
        return attach(tiny("llama", tie_word_embeddings=tied), [tmp_path / "fine"])

    return build


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_computes_what_the_live_adapter_does(pair, tiny, logits, kind, tied):
    model = pair(tied, **KINDS[kind])
    merged = merge(model, ["fine"])
    assert not hasattr(merged, "peft_config")
    live = logits(model)
    torch.testing.assert_close(logits(merged), live, rtol=1e-4, atol=1e-4)
    assert (live - logits(tiny("llama", tie_word_embeddings=tied))).abs().max() > 0.01


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_base_and_adapters_survive_switching_and_merging(
    pair, tiny, logits, weights_hash, kind, tied
):
    model = pair(tied, **KINDS[kind])
    before, live = weights_hash(model), logits(model)
    with activate(model, []):
        base = logits(model)
    merge(model, ["fine"])
    assert torch.equal(logits(merge(model, [])), base)
    assert weights_hash(model) == before
    assert torch.equal(logits(model), live)
    assert torch.equal(base, logits(tiny("llama", tie_word_embeddings=tied)))


@pytest.mark.parametrize("tied", [False, True])
def test_resized_vocabulary(pair, tiny, logits, tied):
    model = pair(tied, **RESIZED)
    assert base_model(model).config.vocab_size == 136
    assert logits(model).shape[-1] == 136
    torch.testing.assert_close(logits(merge(model, ["fine"])), logits(model), rtol=1e-4, atol=1e-4)
    with activate(model, []):
        base = logits(model)
    assert torch.equal(base[..., :128], logits(tiny("llama", tie_word_embeddings=tied)))
    assert torch.equal(base[..., 128:], torch.zeros_like(base[..., 128:]))


def test_resized_vocabulary_with_the_embeddings_that_peft_saves(
    tiny, save_tiny, make_adapter, logits, tmp_path
):
    """PEFT adds the base's own embeddings to the file where it sees that they were resized."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    save_tiny(tiny("llama"), tmp_path / "base")
    trained_on = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    make_adapter(trained_on, tmp_path / "fine", **RESIZED)
    saved = load_file(tmp_path / "fine" / "adapter_model.safetensors")
    head = saved["base_model.model.lm_head.weight"]
    assert head.shape[0] == 136

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = attach(base, [tmp_path / "fine"])
    assert torch.equal(base_model(model).lm_head.weight, head)
    assert torch.equal(logits(model), logits(trained_on))


def test_embeddings_that_peft_saves_in_half_precision_do_not_round_the_base(
    tiny, make_adapter, tmp_path
):
    from safetensors.torch import load_file, save_file

    path = make_adapter(tiny("llama"), tmp_path / "fine", **RESIZED)
    file = path / "adapter_model.safetensors"
    head = torch.cat([tiny("llama").lm_head.weight.detach(), torch.ones(8, 64)])
    tensors = {**load_file(file), "base_model.model.lm_head.weight": head}
    save_file({key: value.to(torch.bfloat16) for key, value in tensors.items()}, file)
    model = attach(tiny("llama"), [path])
    assert torch.equal(base_model(model).lm_head.weight, head)


def test_adapter_that_overwrites_the_base_is_refused(tiny, make_adapter, tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_adapter(tiny("llama"), tmp_path / "fine")
    file = path / "adapter_model.safetensors"
    norm = {"base_model.model.model.norm.weight": torch.full((64,), 3.0)}
    save_file({**load_file(file), **norm}, file)
    with pytest.raises(AdapterError, match=r"changes model\.norm\.weight of the base itself"):
        attach(tiny("llama"), [path])


@pytest.mark.parametrize("initialisation", ["pissa", "pissa_niter_4", "olora"])
def test_initialisation_that_changes_the_base_is_refused(
    tiny, make_adapter, tmp_path, initialisation
):
    path = make_adapter(tiny("llama"), tmp_path / "fine")
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(
        json.dumps({**config, "init_lora_weights": initialisation})
    )
    with pytest.raises(AdapterError, match="changes the base"):
        attach(tiny("llama"), [path])


@pytest.fixture
def three(tiny, make_adapter, tmp_path):
    """A PeftModel with adapters ``a`` and ``b``, and ``c`` with an embedding of its own."""
    for name, options in {
        "a": {},
        "b": {"r": 2, "target_modules": ["q_proj", "k_proj"]},
        "c": {"modules_to_save": ["embed_tokens"]},
    }.items():
        make_adapter(tiny("llama"), tmp_path / name, **options)
        torch.manual_seed(len(name))
    return attach(tiny("llama"), [tmp_path / name for name in "abc"])


def test_adapters_are_active_together_after_attaching(three, tiny, make_adapter, logits, tmp_path):
    assert adapter_names(three) == ["a-1", "b", "c"]
    assert three.active_adapters == ["a-1", "b", "c"]
    live = logits(three)
    torch.testing.assert_close(logits(merge(three, ["a-1", "b", "c"])), live, rtol=1e-4, atol=1e-4)
    for one in adapter_names(three):
        with activate(three, [one]):
            assert (logits(three) - live).abs().max() > 0.01


def test_one_of_several_computes_what_it_does_alone(three, tiny, logits, tmp_path):
    for name, attached in (("a", "a-1"), ("b", "b"), ("c", "c")):
        alone = attach(tiny("llama"), [tmp_path / name])
        with activate(three, [attached]):
            assert torch.equal(logits(three), logits(alone))
        torch.testing.assert_close(
            logits(merge(three, [attached])), logits(alone), rtol=1e-4, atol=1e-4
        )


def _state(model):
    """Everything about adapters that switching could leave changed."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    modules = [
        (path, list(it.active_adapters), it.disable_adapters, list(it.merged_adapters))
        for path, it in model.named_modules()
        if isinstance(it, BaseTunerLayer | AuxiliaryTrainingWrapper)
    ]
    trained = {name: value.requires_grad for name, value in model.named_parameters()}
    return model.active_adapter, list(model.active_adapters), modules, trained, model.training


def _as_attached(model):
    pass


def _training_b(model):
    model.set_adapter("b")
    model.train()


def _disabled(model):
    model.base_model.disable_adapter_layers()


def _merged(model):
    model.set_adapter("b")
    model.merge_adapter(["b"])


@pytest.mark.parametrize("found", [_as_attached, _training_b, _disabled, _merged])
@pytest.mark.parametrize("names", [[], ["b"], ["a-1", "c"]])
def test_switching_leaves_everything_as_found(three, weights_hash, found, names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found(three)
    state, weights = _state(three), weights_hash(three)
    with activate(three, names):
        inside = {name for entry in _state(three)[2] if not entry[2] for name in entry[1]}
        assert inside == set(names)
    assert _state(three) == state
    assert weights_hash(three) == weights
    with pytest.raises(ZeroDivisionError), activate(three, names):
        raise ZeroDivisionError
    assert _state(three) == state
    assert weights_hash(three) == weights


def test_switching_leaves_merged_weights_as_found_to_the_bit(pair, weights_hash):
    model = pair(use_dora=True)
    model.merge_adapter()
    weights = weights_hash(model)
    for names in ([], ["fine"]):
        with activate(model, names):
            assert weights_hash(model) != weights
        assert weights_hash(model) == weights


def test_switching_a_model_without_adapters(tiny, logits):
    model = tiny("llama")
    with activate(model, []):
        assert logits(model).shape == (1, 24, 128)
    with (
        pytest.raises(AdapterError, match="no adapter 'a' is attached: there are none"),
        activate(model, ["a"]),
    ):
        pass
    assert merge(model, []) is not model
    assert base_model(model) is model
    assert describe(model) == []


def test_unknown_adapter_is_named(three):
    for use in (lambda: activate(three, ["z"]).__enter__(), lambda: merge(three, ["z"])):
        with pytest.raises(AdapterError, match="no adapter 'z' is attached: there are a-1, b, c"):
            use()


def test_two_that_replace_one_module_cannot_go_together(tiny, make_adapter, tmp_path):
    for name in ("one", "two"):
        make_adapter(tiny("llama"), tmp_path / name, modules_to_save=["embed_tokens"])
    base = tiny("llama")
    with pytest.raises(AdapterError, match="one and two replace the same module"):
        attach(base, [tmp_path / "one", tmp_path / "two"])
    assert not any("lora" in name or "saved" in name for name in base.state_dict())


def test_merging_dora_over_another_adapter_is_refused(tiny, make_adapter, tmp_path, logits):
    make_adapter(tiny("llama"), tmp_path / "weights", use_dora=True)
    make_adapter(tiny("llama"), tmp_path / "plain", target_modules=["k_proj"])
    make_adapter(tiny("llama"), tmp_path / "other", target_modules=["q_proj"])
    model = attach(tiny("llama"), [tmp_path / name for name in ("weights", "plain", "other")])
    with pytest.raises(AdapterError, match=r"weights \(DoRA\) and plain both change .*k_proj"):
        merge(model, ["weights", "plain"])
    with activate(model, ["weights", "other"]):
        live = logits(model)
    torch.testing.assert_close(
        logits(merge(model, ["weights", "other"])), live, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("directories", "expected"),
    [
        (["fine"], ["fine"]),
        (["a/fine", "b/fine"], ["fine-1", "fine-2"]),
        (["v1.5"], ["v1_5"]),
        (["lora"], ["lora-1"]),  # part of PEFT's prefix lora_
        (["model"], ["model-1"]),  # a part of every parameter's name
        (["keys"], ["keys-1"]),  # a method of ModuleDict
        (["lora_A", "lora_B"], ["lora_A-1", "lora_B-1"]),  # parts of the adapters' own tensors
        (["base"], ["base-1"]),  # the model without adapters
        (["fine-1", "a/fine", "b/fine"], ["fine-1", "fine-2", "fine-3"]),
    ],
)
def test_names(tiny, make_adapter, tmp_path, logits, directories, expected):
    paths = [make_adapter(tiny("llama"), tmp_path / name) for name in directories]
    model = attach(tiny("llama"), paths)
    assert adapter_names(model) == expected
    with activate(model, expected[:1]):
        first = logits(model)
    torch.testing.assert_close(first, logits(attach(tiny("llama"), paths[:1])))


def test_description(tiny, make_adapter, tmp_path):
    make_adapter(tiny("llama"), tmp_path / "one", use_dora=True, target_modules=r".*\.[kv]_proj")
    make_adapter(
        tiny("llama"),
        tmp_path / "two",
        r=2,
        lora_alpha=3,
        use_rslora=True,
        target_modules=["q_proj", "up_proj"],
    )
    make_adapter(
        tiny("llama"),
        tmp_path / "three",
        target_modules=["o_proj"],
        modules_to_save=["embed_tokens"],
    )
    model = attach(tiny("llama"), [tmp_path / name for name in ("one", "two", "three")])
    one, two, three = describe(model)
    assert (one.name, one.path, one.peft_type) == ("one", str(tmp_path / "one"), "LORA")
    assert (one.rank, one.alpha, one.use_rslora, one.use_dora) == (4, 8, False, True)
    assert (one.target_modules, one.modules_to_save) == (("k_proj", "v_proj"), ())
    assert (two.rank, two.alpha, two.use_rslora, two.use_dora) == (2, 3, True, False)
    assert two.target_modules == ("q_proj", "up_proj")
    assert (three.target_modules, three.modules_to_save) == (("o_proj",), ("embed_tokens",))
    assert [info.touches_kv for info in (one, two, three)] == [True, False, True]


@pytest.mark.parametrize(
    ("name", "target", "touches"),
    [
        ("phi3", "qkv_proj", True),
        ("gpt2", "c_attn", True),
        ("deepseek", "kv_b_proj", True),
        ("deepseek", "kv_a_proj_with_mqa", True),
        ("deepseek", "q_a_proj", False),
        ("llama", "o_proj", False),
    ],
)
def test_which_projections_touch_keys_and_values(
    tiny, make_adapter, tmp_path, name, target, touches
):
    make_adapter(tiny(name), tmp_path / "fine", target_modules=[target])
    (info,) = describe(attach(tiny(name), [tmp_path / "fine"]))
    assert info.touches_kv is touches


def test_ia3_is_an_adapter_too(tiny, tmp_path, logits):
    from peft import IA3Config, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = get_peft_model(
            tiny("llama"),
            IA3Config(
                target_modules=["k_proj", "v_proj"], feedforward_modules=[], init_ia3_weights=False
            ),
        ).eval()
        trained.save_pretrained(tmp_path / "fine")
    model = attach(tiny("llama"), [tmp_path / "fine"])
    assert torch.equal(logits(model), logits(trained))
    torch.testing.assert_close(logits(merge(model, ["fine"])), logits(model), rtol=1e-4, atol=1e-4)
    (info,) = describe(model)
    assert (info.peft_type, info.rank, info.touches_kv) == ("IA3", None, True)


def test_types_that_do_not_mix_are_refused(tiny, make_adapter, tmp_path):
    from peft import IA3Config, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(
            tiny("llama"), IA3Config(target_modules=["k_proj"], feedforward_modules=[])
        ).save_pretrained(tmp_path / "ia3")
    make_adapter(tiny("llama"), tmp_path / "fine")
    with pytest.raises(AdapterError, match="different peft types"):
        attach(tiny("llama"), [tmp_path / "fine", tmp_path / "ia3"])


@pytest.mark.parametrize(
    ("trained_on", "message"),
    [
        ({"hidden_size": 96}, r"is for another base: .*shape torch.Size"),
        ({"num_key_value_heads": 4}, r"is for another base: .*shape torch.Size"),
        (
            {"num_hidden_layers": 4},
            r"has 8 tensors that the base lacks, such as model\.layers\.[23]",
        ),
        (
            {"num_hidden_layers": 1},
            r"lacks 4 tensors that the base needs, such as model\.layers\.1",
        ),
    ],
)
def test_adapter_of_another_base_is_refused(
    tiny, make_adapter, tmp_path, weights_hash, trained_on, message
):
    make_adapter(tiny("llama", **trained_on), tmp_path / "fine")
    base = tiny("llama")
    with pytest.raises(AdapterError, match=message):
        attach(base, [tmp_path / "fine"])
    assert weights_hash(base) == weights_hash(tiny("llama"))


def test_adapter_for_modules_that_the_base_lacks_is_refused(tiny, make_adapter, tmp_path):
    make_adapter(tiny("gpt2"), tmp_path / "fine", target_modules=["c_attn"])
    with pytest.raises(AdapterError, match=r"does not fit its base: Target modules.*c_attn"):
        attach(tiny("llama"), [tmp_path / "fine"])


def test_missing_replaced_module_is_named(tiny, make_adapter, tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_adapter(tiny("llama"), tmp_path / "fine", modules_to_save=["embed_tokens"])
    file = path / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "embed_tokens" not in k}, file)
    with pytest.raises(AdapterError, match=r"lacks the tensor .*embed_tokens\.weight"):
        attach(tiny("llama"), [path])


def test_different_vocabularies_cannot_go_together(tiny, make_adapter, tmp_path):
    make_adapter(tiny("llama"), tmp_path / "one", **RESIZED)
    make_adapter(tiny("llama"), tmp_path / "two", **{**RESIZED, "vocabulary": 130})
    with pytest.raises(AdapterError, match=r"different vocabularies .*one 136, .*two 130"):
        attach(tiny("llama"), [tmp_path / "one", tmp_path / "two"])


def test_corrupt_adapter_is_refused(tiny, make_adapter, tmp_path):
    path = make_adapter(tiny("llama"), tmp_path / "fine")
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="cannot read the adapter"):
        attach(tiny("llama"), [path])
    shutil.rmtree(path)
    with pytest.raises(AdapterError, match="no adapter directory"):
        attach(tiny("llama"), [path])


def test_attaching_twice_or_nothing_is_refused(pair, tmp_path, tiny):
    with pytest.raises(AdapterError, match="has adapters already"):
        attach(pair(), [tmp_path / "fine"])
    with pytest.raises(AdapterError, match="no adapter given"):
        attach(tiny("llama"), [])


@pytest.mark.parametrize(
    ("trained_on", "given", "warns"),
    [
        ("org/Llama-9", "/models/llama-9", False),
        ("org/Llama-9", "/hub/models--org--Llama-9/snapshots/0123abcd", False),
        ("org/Llama-9", "org/Llama-8", True),
        (None, "org/Llama-8", False),
        ("org/Llama-9", "", False),
    ],
)
def test_other_base_name_is_only_a_warning(
    tiny, make_adapter, tmp_path, recwarn, trained_on, given, warns
):
    path = make_adapter(tiny("llama"), tmp_path / "fine")
    config = json.loads((path / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = trained_on
    (path / "adapter_config.json").write_text(json.dumps(config))
    base = tiny("llama")
    base.name_or_path = given
    attach(base, [path])
    messages = [str(it.message) for it in recwarn if it.category is AdapterWarning]
    assert len(messages) == warns
    if warns:
        assert "trained on org/Llama-9, the base given is org/Llama-8" in messages[0]


def test_all_is_frozen_and_in_eval_mode(pair):
    model = pair(lora_dropout=0.5)
    assert not model.training
    assert not any(value.requires_grad for value in model.parameters())
