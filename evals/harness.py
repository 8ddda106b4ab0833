"""The model class `kvquant` of the LM Evaluation Harness: its tasks, read from a quantized cache.

Importing this module registers it. The harness's own class for Transformers scores a request with
one forward pass, which attends to the keys of that pass: any cache would get the score of the
unquantized one. This one reads in block decode (`harness_scoring`), and generates with the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kvquant.cache.cache import QuantizedCache
from kvquant.cache.summary import attention
from kvquant.cache.transformers_compat import cache_argument
from kvquant.errors import InputError
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.loading import load, read_config, resolve
from kvquant.progress import notify, token_progress
from kvquant.provenance import title

from .arms import bind, prepare_arms
from .harness_account import Account, Reads
from .harness_arguments import arm_request, check_lengths, directories, whole_number
from .harness_scoring import Answer, Request, Scorer, tokens_to_read
from .reading import Reader

NAME = "kvquant"

COUNT_EVERY = 16
"""Of the tokens of an answer, so many and then one in so many are counted: to count costs time."""

_ARGUMENTS = (
    "pretrained, base, adapter, scheme, scales, force, block, chunk, stride, max_length, dtype, "
    "add_bos_token, prefix_token_id, think_end_token, enable_thinking, chat_template_args; device "
    "and batch size are options: --device, --batch_size"
)
_DEFAULT_DEVICE = "cuda:0"
"""What lm-eval asks for where nobody said anything."""


@register_model(NAME)
class KVQuantLM(HFLM):  # type: ignore[misc]
    """A language model that reads what it answers from a quantized cache."""

    def __init__(
        self,
        pretrained: str | None = None,
        scheme: str | None = None,
        scales: str | None = None,
        *,
        base: str | None = None,
        adapter: str | Sequence[str] | None = None,
        force: bool = False,
        block: int = 64,
        chunk: int | None = None,
        stride: int | None = None,
        max_length: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        **others: Any,
    ) -> None:
        """Loads the model, after everything else was found possible.

        Args:
            pretrained: Model directory, hub id, GGUF file, PEFT adapter directory, or ``smollm2``.
            scheme: Preset, ``preset@scales``, or ``hf:quanto``, ``hf:hqq``, ``hf:fp8``.
            scales: Calibrated scales: in the format they were made for, or for `scheme`.
            base: Base model of an adapter directory, in place of the one it names.
            adapter: Adapter directory on top, or a list of several.
            force: Take scales of another model of the same shape.
            block: Tokens that are scored in one call; 1 is true decoding.
            chunk: Tokens of a call of a prefill; None for all in one call.
            stride: Tokens that rolling windows after the first one score; None for `max_length`,
                as the harness has it.
            max_length: Tokens that the model sees at once; None for its positions.
            dtype: As `load` takes it; so is `device`.
            device: lm-eval's default means a GPU if there is one.
            batch_size: Continuations of one context, or prompts to continue, read together.
            max_batch_size: For ``batch_size=auto``, which there is not.
            add_bos_token: As HFLM takes it; so are all those that follow.
            prefix_token_id: What stands before a text without context.
            think_end_token: End of a chain of thought, which is taken off answers.
            enable_thinking: For the chat template.
            chat_template_args: Likewise.
            trust_remote_code: For data sets; no model's code is run.
            **others: Refused.

        Raises:
            KVQuantError: Something that cannot be used; the message says what to do.
        """
        if others:
            raise InputError(f"model_args {', '.join(others)}: possible are {_ARGUMENTS}")
        if not pretrained:
            raise InputError("no model: give --model_args pretrained=MODEL,scheme=int8")
        block, rows = whole_number("block", block), whole_number("batch_size", batch_size)
        chunk, stride, max_length = (
            None if value is None else whole_number(name, value)
            for name, value in (("chunk", chunk), ("stride", stride), ("max_length", max_length))
        )
        if not isinstance(force, bool):  # any other text would count as yes
            raise InputError(f"force={force}: true or false is wanted")
        request = arm_request(scheme, scales)
        source = resolve(str(pretrained), base=base, adapters=directories(adapter))
        geometry = CacheGeometry.from_config(read_config(source))
        [arm] = prepare_arms([request], geometry)
        check_lengths(max_length, stride, geometry)
        loaded = load(source, dtype=str(dtype), device=_device(device), notify=notify)
        # Before HFLM gives the tokenizer a padding token.
        self._served = fingerprint(loaded.model, loaded.tokenizer)
        self._arm = bind(arm, loaded.model, loaded.tokenizer, force, "force=true")
        with _without_remarks():
            super().__init__(
                pretrained=loaded.model,
                backend="causal",
                tokenizer=loaded.tokenizer,
                max_length=max_length,
                batch_size=rows,
                add_bos_token=add_bos_token,
                prefix_token_id=prefix_token_id,
                think_end_token=think_end_token,
                enable_thinking=enable_thinking,
                chat_template_args=chat_template_args,
            )
        if self.prefix_token_id is None:
            raise InputError(
                "the tokenizer has neither a BOS nor an EOS token, and the harness wants one "
                "before texts without context: give prefix_token_id=N in --model_args"
            )
        self._title = title(source.base, source.adapters)
        self._reader = Reader(loaded.model)
        self._scorer = Scorer(self._reader, self._arm, block=block, chunk=chunk, rows=rows)
        self._settings = {"block": block, "chunk": chunk}
        self._stride = min(stride or self.max_length, self.max_length)
        self._kernel = _kernel(self._arm.make())
        self._accounts: dict[str, Account] = {}
        self._account = self._account_of("")
        if arm.scheme_class == "exact":
            notify(f"{arm.name}: nothing is quantized; such scores are for others to compare with")
        if self._arm.foreign:
            notify(f"warning: the scales of {arm.name} are of another model, as asked for")

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> KVQuantLM:
        """As the harness makes models; its own options come second to model_args."""
        options = {key: it for key, it in (additional_config or {}).items() if it is not None}
        return cls(**{**options, **arg_dict})

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Answer]:
        """Log-probability of each continuation after its context, and whether it is greedy."""
        with self._accounting("loglikelihood", len(requests)):
            found: list[Answer] = super().loglikelihood(requests, disable_tqdm)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, in windows where it is longer than the model sees."""
        texts = [request.args[0] for request in requests]
        windows = [
            (number, window) for number, text in enumerate(texts) for window in self._windows(text)
        ]
        with self._accounting("loglikelihood_rolling", len(requests)):
            scores = self._loglikelihood_tokens([(None, *it) for _, it in windows], disable_tqdm)
        notify(f"rolling windows are of {self.max_length} tokens, a new one every {self._stride}")
        totals = [0.0] * len(texts)
        for (number, _), (score, _) in zip(windows, scores, strict=True):
            totals[number] += score
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues each prompt until one of its stop strings, or for ``max_gen_toks`` tokens."""
        for settings in (request.args[1] for request in requests):
            self._check_generation(settings)
        with self._accounting("generate_until", len(requests)):
            found: list[str] = super().generate_until(requests, disable_tqdm)
        return found

    def get_model_info(self) -> dict[str, Any]:
        """For the ``config`` of the results; what the cache was is under ``kvquant``."""
        arm = self._arm.arm
        own = {
            "model": self._title,
            "fingerprint": str(self._served),
            "scheme": arm.name,
            "formats": arm.description,
            "scales_of_another_model": self._arm.foreign,
            "attention": self._kernel,
            **self._settings,
            "max_length": self.max_length,
            "stride": self._stride,
            "requests": {kind: account.summary() for kind, account in self._accounts.items()},
        }
        return {**super().get_model_info(), NAME: own}

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts as tokens and mask ``[batch, tokens]``; those that are cut are counted.

        Raises:
            InputError: A prompt without any token.
        """
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        lengths = mask.sum(1).int().tolist()
        if not min(lengths, default=0):
            raise InputError(
                "a task has an empty prompt, and nothing stands before it: nothing to read"
            )
        if left_truncate_len:
            for tokens in lengths:
                self._account.note(tokens + self.max_length - left_truncate_len)
            ids, mask = ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        return ids, mask

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """Context and tokens to score of each window of a text."""
        context = self.max_length - self._stride + 1
        tokens = self.tok_encode(text)
        cut = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context)
        return map(make_disjoint_window, cut)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Answer]:
        """Answers to ``(key, context, continuation)``, in their order."""
        fitting = [self._fitted(context, targets) for _, context, targets in requests]
        found: list[Answer] = [(0.0, False)] * len(requests)
        with _bar(tokens_to_read(fitting), disable_tqdm) as advance:
            for number, answer in self._scorer.answers(fitting, self._account, advance):
                found[number] = answer
                self._account.answered(answer[0])
                key = requests[number][0]
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answer)
        return found

    def _fitted(self, context: list[int], targets: list[int]) -> Request:
        """A request within what the model sees: it is its beginning that goes."""
        if not 0 < len(targets) <= self.max_length:
            raise InputError(
                f"a continuation of {len(targets)} tokens cannot be scored: 1 to {self.max_length} "
                "can, which is what the model sees at once"
            )
        # The last target is not read.
        lost = self._account.note(len(context) + len(targets) - 1)
        return Request.of(context, targets, lost)

    def _check_generation(self, settings: dict[str, Any]) -> None:
        wanted = normalize_gen_kwargs(settings, self.max_gen_toks)
        tokens = wanted["max_gen_toks"]
        if tokens >= self.max_length:
            raise InputError(
                f"{tokens} tokens to generate leave no room for a prompt in the {self.max_length} "
                "that the model sees; give fewer with --gen_kwargs max_gen_toks=N"
            )
        if int(wanted.get("num_beams") or 1) > 1:
            raise InputError("num_beams: beams are not evaluated; greedy decoding and sampling are")

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation: Any
    ) -> torch.Tensor:
        """Prompts ``[batch, tokens]`` and what follows; all but their last tokens are prefilled."""
        cache = self._arm.make()
        self._scorer.prefill(context[:, :-1], cache, generation["attention_mask"][:, :-1])
        generation[cache_argument(self._reader.decoder)] = cache
        with self._counting(cache):
            made: torch.Tensor = super()._model_generate(context, max_length, stop, **generation)
        return made

    @contextmanager
    def _counting(self, cache: Any) -> Iterator[None]:
        """Counts reads, within the block, at some of the calls; each is of one token.

        As long as no code was read, at all of them: that none was is nothing to say lightly.
        """
        reads, calls = self._account.reads, 0

        def count(*_: Any) -> None:
            nonlocal calls
            if calls < COUNT_EVERY or calls % COUNT_EVERY == 0 or not reads.share:
                reads.of(cache, 1)
            calls += 1

        # Before the cache's own hook, which stores what is pending.
        handle = self._reader.decoder.register_forward_pre_hook(count, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _accounting(self, kind: str, requests: int) -> Iterator[None]:
        """Keeps the account of requests, and says in the end what is to be known of them."""
        self._account = self._accounts.setdefault(kind, self._account_of(kind))
        self._account.requests += requests
        yield
        for remark in self._account.remarks(self._arm.arm, self._kernel):
            notify(remark)

    def _account_of(self, kind: str) -> Account:
        return Account(kind, Reads(self._reader, None), self.max_length)


def _device(name: str | None) -> str | None:
    return None if name == _DEFAULT_DEVICE and not torch.cuda.is_available() else name


def _kernel(cache: Any) -> str:
    if isinstance(cache, QuantizedCache):
        return attention(cache)
    return "Transformers' attention, on dequantized tokens"


@contextmanager
def _bar(tokens: int, is_hidden: bool) -> Iterator[Callable[[int], None]]:
    if is_hidden:
        yield lambda tokens: None
        return
    with token_progress("reading", tokens) as advance:
        yield advance


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Keeps HFLM from warning that it was given a model and not a name."""
    logger = logging.getLogger(HFLM.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
