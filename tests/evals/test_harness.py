"""The model class of lm-eval, beside the harness's own class for Transformers."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import handle_non_serializable

from evals.harness import KVQuantLM
from evals.harness_scoring import Request, Scorer
from evals.held import poison
from kvquant.errors import FingerprintError, InputError, SchemeError
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.provenance import Provenance
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps under a tree. " * 4
CHOICES = [" a", " b", " seven", " seventeen times", " a"]
PAIRS = [
    *((TEXT, choice) for choice in CHOICES),
    *((TEXT[:40], choice) for choice in CHOICES[:2]),
    ("", "no context"),
    ("x", "yz"),
    ("short", TEXT[:150]),
    (TEXT * 2, " end"),  # longer than the model's positions
]
PROMPTS = [(TEXT[:150], {}), ("Once", {}), (TEXT[:90], {"until": ["e"]}), ("abc", {})]


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, it, number) for number, it in enumerate(arguments)]


def likelihoods(lm: Any, pairs: Sequence[tuple[str, str]] = PAIRS) -> list[tuple[float, bool]]:
    return lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)


def rolling(lm: Any, *texts: str) -> list[float]:
    return lm.loglikelihood_rolling(
        requests("loglikelihood_rolling", [(it,) for it in texts]), disable_tqdm=True
    )


def answers(lm: Any, prompts: Sequence[tuple[str, dict[str, Any]]], **settings: Any) -> list[str]:
    arguments = [(text, {"max_gen_toks": 24, **own, **settings}) for text, own in prompts]
    return lm.generate_until(requests("generate_until", arguments), disable_tqdm=True)


def values(found: list[tuple[float, bool]]) -> list[float]:
    return [it for it, _ in found]


def largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def sharpened(model: Any) -> Any:
    """With attention that depends on what it reads: random weights alone make it an average."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name and "attn" in name:
                weight *= 5
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any, tiny: Any, save_tiny: Any) -> Callable[..., Path]:
    """``saved(name)``: directory of a model, the same each time."""
    root = tmp_path_factory.mktemp("models")

    def get(name: str = "llama") -> Path:
        if not (root / name).exists():
            save_tiny(sharpened(tiny(name)), root / name)
        return root / name

    return get


@pytest.fixture(scope="module")
def ours(saved: Any) -> Callable[..., KVQuantLM]:
    """``ours(scheme, **model_args)``: the class of kvquant, on a tiny llama."""

    def make(scheme: str | None = "none", name: str = "llama", **model_args: Any) -> KVQuantLM:
        model_args.setdefault("pretrained", str(saved(name)))
        return KVQuantLM(scheme=scheme, device="cpu", **model_args)

    return make


@pytest.fixture(scope="module")
def theirs(saved: Any) -> Callable[..., Any]:
    """``theirs(**arguments)``: the harness's own class, on the same."""

    def make(name: str = "llama", **arguments: Any) -> Any:
        return HFLM(pretrained=str(saved(name)), dtype="float32", device="cpu", **arguments)

    return make


def test_it_is_registered() -> None:
    assert get_model("kvquant") is KVQuantLM


def test_what_is_read_for_a_continuation() -> None:
    assert Request.of([1, 2, 3], [4, 5]) == Request((1, 2), (3, 4), (4, 5))
    assert Request.of([1], [4]) == Request((), (1,), (4,))
    assert Request.of([1, 2, 3], [4, 5], lost=2) == Request((), (3, 4), (4, 5))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_next"])
def test_exact_scores_are_those_of_the_harness(name: str, ours: Any, theirs: Any) -> None:
    expected = likelihoods(theirs(name))
    found = likelihoods(ours(name=name))

    assert values(found) == pytest.approx(values(expected), abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("options", [{"block": 1}, {"block": 7}, {"batch_size": "3", "chunk": 50}])
def test_exact_scores_do_not_depend_on_how_they_are_read(
    options: dict[str, Any], ours: Any, theirs: Any
) -> None:
    pairs = [*PAIRS[:9], ("short", TEXT[:40])]
    found = likelihoods(ours(**options), pairs)

    assert values(found) == pytest.approx(values(likelihoods(theirs(), pairs)), abs=1e-4)


def test_a_greedy_continuation_is_called_greedy(ours: Any) -> None:
    lm = ours()
    [continuation] = answers(lm, [(TEXT[:60], {"until": []})])
    assert len(continuation) > 5
    wrong = continuation[:-1] + ("a" if continuation[-1] != "a" else "b")
    pairs = [(TEXT[:60], it) for it in (continuation, continuation[:3], wrong)]

    assert [greedy for _, greedy in likelihoods(lm, pairs)] == [True, True, False]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rolling_scores_are_those_of_the_harness(batch_size: int, ours: Any, theirs: Any) -> None:
    texts = ["", "a", TEXT[:63], TEXT[:64], TEXT[:65], TEXT]
    expected = rolling(theirs(max_length=64), *texts)
    found = rolling(ours(max_length=64, batch_size=batch_size, block=16), *texts)

    assert found == pytest.approx(expected, abs=1e-3)


def test_with_a_stride_each_token_sees_what_a_window_less_a_stride_has(
    ours: Any, forward: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lm, text = ours(max_length=64, stride=16), TEXT[:101]
    [found] = rolling(lm, text)

    ids = [lm.prefix_token_id, *lm.tok_encode(text)]  # 102 tokens, of which 101 are predicted
    expected = 0.0
    # Where each window begins, and what it predicts: the last one ends at the text's end.
    for start, targets in ((0, range(1, 65)), (16, range(65, 81)), (32, range(81, 97))):
        expected += by_hand(lm, forward, ids, start, targets)
    expected += by_hand(lm, forward, ids, 102 - 65, range(97, 102))
    assert found == pytest.approx(expected, abs=1e-3)
    assert abs(found - rolling(ours(max_length=64), text)[0]) > 0.01
    assert "windows are of 64 tokens, a new one every 16" in capsys.readouterr().err


def by_hand(lm: Any, forward: Any, ids: list[int], start: int, targets: range) -> float:
    logits = forward(lm.model, torch.tensor([ids[start : targets.stop - 1]]))[0]
    scores = logits.log_softmax(-1)
    return sum(float(scores[it - start - 1, ids[it]]) for it in targets)


def test_scores_come_from_codes(ours: Any) -> None:
    class Poisoned(KVQuantLM):
        """Finds noise where its prefill has stored codes."""

        def __init__(self, **model_args: Any) -> None:
            super().__init__(**model_args)
            scorer = self._scorer
            prefill = scorer.prefill

            def and_poison(ids: Any, cache: Any, mask: Any = None) -> None:
                prefill(ids, cache, mask)
                poison(cache, 0)

            scorer.prefill = and_poison  # type: ignore[method-assign]

    path = str(ours().pretrained.name_or_path)
    noise = Poisoned(pretrained=path, scheme="int4", device="cpu")
    pairs = [(TEXT, choice) for choice in CHOICES]
    exact = values(likelihoods(ours(), pairs))
    drift = largest(values(likelihoods(ours("int4"), pairs)), exact)
    wrecked = largest(values(likelihoods(noise, pairs)), exact)

    assert 1e-3 < drift < 1
    assert wrecked > 5 * drift
    assert answers(noise, PROMPTS[:1]) != answers(ours("int4"), PROMPTS[:1])


@pytest.mark.parametrize("scheme", ["int4", "int4-kivi", "hf:fp8", "hf:quanto"])
def test_a_shared_context_is_what_each_choice_would_have_read(scheme: str, ours: Any) -> None:
    """Not so if tokens were taken back: the longer choice pushes exact ones into codes."""
    pairs = [(TEXT[:250], " a"), (TEXT[:250], TEXT[:120]), (TEXT[:250], " bc")]
    lm = ours(scheme)
    alone = [likelihoods(lm, [it])[0] for it in pairs]

    assert likelihoods(lm, pairs) == alone
    batch = likelihoods(ours(scheme, batch_size=3), pairs)
    assert values(batch) == pytest.approx(values(alone), abs=1e-4)


def test_true_decoding_reads_more_codes_than_blocks(ours: Any) -> None:
    pairs = [("ab", TEXT[:65])]
    shares = []
    for block in (1, 8, 64):
        lm = ours("int8", block=block)
        likelihoods(lm, pairs)
        shares.append(share_of(lm, "loglikelihood"))

    # Query i of 65 (the first behind 1 token) sees i + 2 keys; those before its block are codes.
    seen = sum(range(2, 67))
    ones = sum(range(1, 66)) / seen
    eights = sum(1 + 8 * (query // 8) for query in range(65)) / seen
    sixty_fours = (64 * 1 + 65) / seen
    assert shares == pytest.approx([ones, eights, sixty_fours])


def share_of(lm: KVQuantLM, kind: str) -> float | None:
    share: float | None = lm.get_model_info()["kvquant"]["requests"][kind]["keys_read_from_codes"]
    return share


@pytest.mark.parametrize("batch_size", [1, 4])
def test_exact_answers_are_those_of_the_harness(batch_size: int, ours: Any, theirs: Any) -> None:
    expected = answers(theirs(batch_size=batch_size), PROMPTS)
    assert len(set(expected)) > 2

    assert answers(ours(batch_size=batch_size), PROMPTS) == expected


def test_answers_of_a_batch_are_those_of_its_rows(ours: Any) -> None:
    prompts = [*PROMPTS, ("x", {})]

    assert answers(ours("int8", batch_size=5), prompts) == answers(ours("int8"), prompts)


def test_samples_are_those_of_the_harness(ours: Any, theirs: Any) -> None:
    found = []
    for lm in (ours(), theirs()):
        torch.manual_seed(3)
        found.append(answers(lm, PROMPTS[:1], do_sample=True, temperature=0.8, top_k=20))

    assert found[0] == found[1]
    assert found[0] != answers(theirs(), PROMPTS[:1])


def test_answers_read_codes(ours: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lm = ours("int8")
    answers(lm, [(TEXT[:100], {"until": []})], max_gen_toks=20, min_new_tokens=20)

    # 20 calls, of which the first 16 and the 17th are counted: the first finds 99 codes.
    counted = range(99, 116)
    share = sum(counted) / sum(it + 1 for it in counted)
    assert share_of(lm, "generate_until") == pytest.approx(share)
    assert "generate_until: 99.1% of the keys read were codes (int8; " in capsys.readouterr().err


def test_codes_that_only_the_end_of_an_answer_reads_are_seen(
    ours: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """int4-kivi keeps 128 tokens exact, and stores 64 of them at a time."""
    lm = ours("int4-kivi", max_length=300)
    for tokens, is_read in ((70, False), (95, True)):
        answers(lm, [(TEXT[:100], {"until": []})], max_gen_toks=tokens, min_new_tokens=tokens)
        assert ("never read a code" not in capsys.readouterr().err) == is_read


def test_tokens_that_a_scheme_keeps_exact_are_no_codes(
    ours: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = ours("int4-kivi")
    likelihoods(lm, [("short", " text")])

    assert share_of(lm, "loglikelihood") == 0
    assert "warning: loglikelihood never read a code: int4-kivi" in capsys.readouterr().err


def test_an_exact_scheme_says_what_it_is(ours: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lm = ours("none")
    assert "none: nothing is quantized" in capsys.readouterr().err

    likelihoods(lm, [("short", " text")])
    assert "warning" not in capsys.readouterr().err


def test_nothing_asked_is_nothing_read(ours: Any) -> None:
    lm = ours("int8")

    assert likelihoods(lm, []) == []
    assert share_of(lm, "loglikelihood") is None


def test_what_is_cut_is_said(ours: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lm = ours("int8", max_length=64)
    likelihoods(lm, [(TEXT[:63], "ab"), (TEXT[:64], "ab"), (TEXT[:90], "ab"), ("a", TEXT[:64])])
    told = capsys.readouterr().err
    assert "warning: 2 of 4 requests of loglikelihood did not fit 64 tokens" in told
    assert "lost up to 27 at their beginning" in told

    answers(lm, [(TEXT[:40], {}), (TEXT[:41], {})])  # 24 to generate
    told = capsys.readouterr().err
    assert (
        "warning: 1 of 2 requests of generate_until did not fit 64 tokens and lost up to 1" in told
    )


def test_what_fits_is_not_cut(ours: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lm = ours("int8", max_length=64)
    likelihoods(lm, [(TEXT[:63], "ab"), ("a", TEXT[:64])])
    answers(lm, [(TEXT[:40], {})])
    rolling(lm, TEXT[:200])

    assert "warning" not in capsys.readouterr().err


def test_no_room_for_a_prompt_is_an_error(ours: Any) -> None:
    lm = ours("int8", max_length=64)
    with pytest.raises(InputError, match=r"64 tokens to generate leave no room .* the 64 that"):
        answers(lm, PROMPTS[:1], max_gen_toks=64)
    with pytest.raises(InputError, match="256 tokens to generate"):
        lm.generate_until(requests("generate_until", [("a", {"until": []})]))


def test_what_cannot_be_read_is_an_error(ours: Any) -> None:
    lm = ours("int8", max_length=64)
    with pytest.raises(InputError, match=r"continuation of 65 tokens .* 1 to 64 can"):
        likelihoods(lm, [("a", TEXT[:65])])
    with pytest.raises(InputError, match="a continuation of 0 tokens"):
        likelihoods(lm, [("a", "")])
    with pytest.raises(InputError, match="an empty prompt"):
        answers(lm, [("", {})])
    with pytest.raises(InputError, match="num_beams"):
        answers(lm, PROMPTS[:1], num_beams=2)


@pytest.mark.parametrize(
    ("model_args", "message"),
    [
        ({"scheme": None}, "nothing to evaluate: .*scheme=NAME .*int4.* scales=FILE"),
        ({"force": "no"}, "force=no: true or false"),
        ({"force": 1}, "force=1: true or false"),
        ({"pretrained": ""}, "no model: give --model_args pretrained=MODEL"),
        ({"pretrained": "nowhere/at/all"}, "no file or directory nowhere/at/all"),
        ({"peft": "dir", "parallelize": True}, "peft, parallelize: possible are pretrained, base"),
        ({"block": 0}, "block=0: a whole number of 1 or more"),
        ({"block": 2.5}, r"block=2.5: a whole number"),
        ({"chunk": "x"}, "chunk=x: a whole number"),
        ({"batch_size": "auto"}, "batch_size=auto: a whole number"),
        ({"max_length": 513}, "max_length=513 is beyond the model's 512 positions"),
        ({"stride": 65, "max_length": 64}, "stride=65: tokens between windows of 64"),
        ({"stride": 513}, "stride=513"),
        ({"scheme": "int4@one", "scales": "two"}, "scheme=int4@one,scales=two: scales go with"),
        ({"scheme": "hf:quanto", "scales": "two"}, "scheme=hf:quanto,scales=two"),
        ({"scheme": "hf:other"}, "hf:quanto, hf:hqq, hf:fp8"),
        ({"scales": "nowhere"}, "nowhere"),
        ({"dtype": "float64"}, "unknown dtype 'float64'"),
        ({"base": "other"}, "--base goes with an adapter directory"),
        ({"adapter": ["one", "two"]}, "no adapter directory at one"),
    ],
)
def test_what_cannot_be_used_is_refused(model_args: Any, message: str, ours: Any) -> None:
    with pytest.raises(InputError, match=message):
        ours(**{"scheme": "int8", **model_args})


def test_an_unknown_scheme_is_refused(ours: Any) -> None:
    with pytest.raises(SchemeError, match="int5"):
        ours("int5")
    with pytest.raises(SchemeError, match="unknown scheme '8'"):  # the harness reads numbers
        ours(8, scales="missing")


def test_the_harness_makes_it_without_a_gpu(saved: Any) -> None:
    """Its own options are a GPU where nobody said anything, and a batch size as text."""
    options = {"batch_size": "2", "device": "cuda:0", "max_batch_size": None}
    given = {"pretrained": str(saved()), "scheme": "int8", "batch_size": 3}
    lm = KVQuantLM.create_from_arg_obj(given, options)

    assert lm.batch_size == 3
    assert lm.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def scales(saved: Any, tmp_path: Path) -> Callable[..., str]:
    """``scales(model)``: a file of static int8 scales that belong to it."""

    def make(lm: Any, tokenizer: Any) -> str:
        geometry = CacheGeometry.from_config(lm.model.config)
        slot = TensorScheme(tensor_format("int8"), Granularity.PER_TENSOR)
        layers = {
            index: LayerScales(*(TensorScales(torch.tensor([[0.05]])) for _ in range(2)))
            for index in geometry.attention_layers
        }
        origin = Provenance(
            model="calibrated",
            fingerprints=(fingerprint(lm.model, tokenizer),),
            longest_position=80,
        )
        save_scales(KVScales(geometry, QuantScheme(slot, slot), layers, origin), tmp_path / "kv")
        return str(tmp_path / "kv")

    return make


def test_scales_are_used_and_know_how_far_they_reach(
    ours: Any, scales: Any, byte_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = scales(ours(), byte_tokenizer)
    lm = ours(None, scales=path)
    found = likelihoods(lm, [(TEXT[:60], " a")])
    assert 1e-3 < abs(found[0][0] - likelihoods(ours(), [(TEXT[:60], " a")])[0][0]) < 5
    assert "calibrated" not in capsys.readouterr().err

    likelihoods(lm, [(TEXT[:80], " a")])
    told = capsys.readouterr().err
    assert "warning: the scales of kv were calibrated up to 80 tokens, and 81 were read" in told
    info = lm.get_model_info()["kvquant"]
    assert (info["scheme"], info["scales_of_another_model"]) == ("kv", False)
    assert ours("int4", scales=path).get_model_info()["kvquant"]["scheme"] == "int4@kv"


def test_scales_of_another_model_are_refused(
    ours: Any,
    scales: Any,
    byte_tokenizer: Any,
    tiny: Any,
    save_tiny: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = scales(ours(), byte_tokenizer)
    other = str(save_tiny(tiny("llama"), tmp_path / "other"))

    with pytest.raises(FingerprintError, match=r"kv: .* with force=true$"):
        ours(None, scales=path, pretrained=other)
    capsys.readouterr()
    lm = ours(None, scales=path, pretrained=other, force=True)
    assert "warning: the scales of kv are of another model" in capsys.readouterr().err
    assert lm.get_model_info()["kvquant"]["scales_of_another_model"] is True


def test_scores_that_are_no_numbers_are_told(
    ours: Any, tiny: Any, save_tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tiny("llama")
    with torch.no_grad():
        broken.lm_head.weight[5] = math.nan
    lm = ours("int8", pretrained=str(save_tiny(broken, tmp_path / "broken")))
    assert all(math.isnan(score) for score, _ in likelihoods(lm, PAIRS[:3]))
    assert "warning: 3 scores of loglikelihood are NaN" in capsys.readouterr().err
    counted = lm.get_model_info()["kvquant"]["requests"]["loglikelihood"]
    assert counted["scores_without_numbers"] == 3


def test_a_tokenizer_with_nothing_to_begin_with_is_refused(
    ours: Any, tiny: Any, byte_tokenizer: Any, tmp_path: Path
) -> None:
    tiny("llama").save_pretrained(tmp_path)
    byte_tokenizer.eos_token = None
    byte_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"neither a BOS nor an EOS token.*prefix_token_id=N"):
        ours("int8", pretrained=str(tmp_path))
    lm = ours("int8", pretrained=str(tmp_path), prefix_token_id=3)
    assert len(likelihoods(lm, PAIRS[5:9])) == 4


def test_adapters_are_part_of_the_model(ours: Any, saved: Any, tiny: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    base = sharpened(tiny("llama"))
    base.name_or_path = str(saved())
    config = LoraConfig(target_modules=["k_proj", "v_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(1)
    get_peft_model(base, config).save_pretrained(tmp_path / "lora")
    adapter, plain = str(tmp_path / "lora"), ours()
    model = PeftModel.from_pretrained(sharpened(tiny("llama")), adapter)
    expected = HFLM(pretrained=model, tokenizer=plain.tokenizer)
    lm = ours(adapter=adapter)

    assert values(likelihoods(lm)) == pytest.approx(values(likelihoods(expected)), abs=1e-4)
    assert largest(values(likelihoods(lm)), values(likelihoods(plain))) > 0.01
    assert answers(lm, PROMPTS) == answers(expected, PROMPTS)
    assert answers(ours(pretrained=adapter), PROMPTS) == answers(expected, PROMPTS)
    assert "lora" in lm.get_model_info()["kvquant"]["model"]
    json.dumps(lm.get_model_info(), default=handle_non_serializable)


def test_chat_templates_and_names_are_those_of_the_tokenizer(ours: Any, saved: Any) -> None:
    lm = ours("int8")
    lm.tokenizer.chat_template = (
        "{% for it in messages %}<{{ it.role }}>{{ it.content }}{% endfor %}"
    )

    assert lm.apply_chat_template([{"role": "user", "content": "hi"}]) == "<user>hi"
    assert lm.tokenizer_name == str(saved()).replace("/", "__")


def test_the_results_say_what_was_evaluated(ours: Any) -> None:
    lm = ours("int4", block=16, chunk=32, max_length=100, stride=50)
    likelihoods(lm, [(TEXT[:80], " a"), (TEXT, " b")])
    info = json.loads(json.dumps(lm.get_model_info(), default=handle_non_serializable))
    own = info["kvquant"]
    share = own["requests"]["loglikelihood"].pop("keys_read_from_codes")

    assert info["model_dtype"] == "torch.float32"
    counted = {"requests": 2, "requests_cut": 1, "longest": 100, "scores_without_numbers": 0}
    assert own["requests"] == {"loglikelihood": counted}
    assert 0.9 < share < 1
    assert own["scheme"] == "int4" and "int4" in own["formats"]
    settings = ("block", "chunk", "max_length", "stride")
    assert [own[it] for it in settings] == [16, 32, 100, 50]
    assert own["attention"]


def test_the_documentation_knows_all_arguments() -> None:
    document = (Path(__file__).parents[2] / "docs" / "lm-eval.md").read_text()
    names = {*inspect.signature(KVQuantLM.__init__).parameters} - {"self", "others"}

    assert [name for name in sorted(names) if f"`{name}`" not in document] == []


def test_prefills_are_shared(ours: Any) -> None:
    """Each context is read once, whatever comes after it."""
    lm = ours("int8")
    read: list[int] = []
    scorer: Scorer = lm._scorer
    prefill = scorer.prefill

    def counted(ids: torch.Tensor, cache: Any, mask: Any = None) -> None:
        read.append(ids.shape[1])
        prefill(ids, cache, mask)

    scorer.prefill = counted  # type: ignore[method-assign]
    likelihoods(lm, [(TEXT[:50], " a"), (TEXT[:90], " a"), (TEXT[:50], " b"), (TEXT[:50], " cde")])

    assert read == [89, 49]


def test_log_probabilities_are_no_more_than_certain(ours: Any) -> None:
    assert all(value < 0 and math.isfinite(value) for value, _ in likelihoods(ours("int3")))
