"""The whole of an evaluation: arms, documents, needles, side by side; the report in the end.

Everything that can be wrong is looked at before weights are read. What was found is kept on disk
as it is found, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kvquant.errors import InputError
from kvquant.fingerprint import Fingerprint, fingerprint
from kvquant.models.loading import LoadedModel, load, load_tokenizer, make_local
from kvquant.progress import notify
from kvquant.provenance import title

from .arms import BoundArm, bind
from .continuation import continue_text
from .documents import read_documents
from .haystack import Haystack, read_haystack
from .memory import naming_length
from .needle import Needles, Prompt
from .perplexity import score_document
from .reading import Reader
from .request import Request
from .results import (
    Arm,
    Cell,
    Continuation,
    EvalReport,
    Origin,
    Perplexity,
    Retrieval,
    SelfCheck,
)
from .retrieval import answer_prompts, batches
from .selfcheck import STEPS, self_check, with_bytes
from .stages import Stages
from .statistics import Scores, divergence, losses
from .store import Store, claimed, key_of
from .windows import spans

SELF_CHECK_BLOCKS = 2


@dataclass(frozen=True)
class Text:
    """What is read, as token ids.

    Attributes:
        documents: To score, int64 ``[tokens]`` each; the first one is what self-checks read.
        corpus: Where they come from.
        prompts: Of needles.
        haystack: What those are hidden in; None where there are no needles.
    """

    documents: tuple[NDArray[Any], ...]
    corpus: dict[str, Any]
    prompts: tuple[Prompt, ...]
    haystack: Haystack | None


def evaluate(request: Request, partial: Path, *, resume: bool = True) -> EvalReport:
    """Runs an evaluation.

    Args:
        request: What to do.
        partial: Directory for what was found so far.
        resume: Whether to take up what an interrupted run left there.

    Raises:
        KVQuantError: Something that cannot be evaluated; the message says what to do.
    """
    source = make_local(request.source, notify)
    text = read_text(request, load_tokenizer(source))
    loaded = load(source, dtype=request.dtype, device=request.device, notify=notify)
    run = Run(request, loaded, text)
    with claimed(partial):
        store = Store(partial, run.identity(), resume=resume, notify=notify)
        with Stages() as stages:
            report = run.everything(store, stages)
    return report


def read_text(request: Request, tokenizer: Any) -> Text:
    """Documents and prompts.

    Raises:
        InputError: A length that is too short for what is asked.
        DataError: No text.
    """
    limit = request.limit
    if request.continuations and request.tokens > request.longest - 2:
        raise InputError(
            f"a text of {request.longest:,} tokens cannot be continued by {request.tokens:,} of "
            "them: give fewer --tokens, or longer --lengths"
        )
    wanted = request.documents if limit is None else min(request.documents, limit)
    documents, corpus = read_documents(
        request.data,
        tokenizer,
        length=request.longest,
        count=max(wanted, request.continuations, 1),
        least=request.prefill + request.block + 1,
        text_field=request.text_field,
        chat=request.chat and request.data is not None,
        notify=notify,
    )
    if request.only_self_check or not (request.trials and request.tasks):
        return Text(documents, corpus, (), None)
    needles = Needles(
        tokenizer, chat=request.chat, answer_tokens=request.answer_tokens, seed=request.seed
    )
    needles.check_lengths(request.tasks, request.lengths)
    haystack = read_haystack(
        request.haystack, needles.encoding, longest=request.longest, notify=notify
    )
    prompts = needles.cells(
        haystack, request.tasks, request.lengths, request.depths, request.trials
    )
    return Text(documents, corpus, tuple(_limited(prompts, limit)), haystack)


def _limited(prompts: Iterator[Prompt], limit: int | None) -> Iterator[Prompt]:
    """At most `limit` prompts of each task and length."""
    seen: dict[tuple[str, int], int] = {}
    for prompt in prompts:
        place = prompt.task, prompt.length
        seen[place] = seen.get(place, 0) + 1
        if limit is None or seen[place] <= limit:
            yield prompt


class Run:
    """One evaluation of a loaded model."""

    def __init__(self, request: Request, loaded: LoadedModel, text: Text) -> None:
        """Ties the arms to the model.

        Raises:
            FingerprintError: Scales of another model.
        """
        self.request = request
        self.text = text
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.reader = Reader(loaded.model)
        self.arms: tuple[BoundArm, ...] = tuple(
            bind(arm, loaded.model, loaded.tokenizer, request.force) for arm in request.arms
        )

    @cached_property
    def served(self) -> Fingerprint:
        """Of the model."""
        return fingerprint(self.model, self.tokenizer)

    def identity(self) -> dict[str, Any]:
        """What every number depends on."""
        request = self.request
        return {
            "model": self.served.to_dict(),
            "arms": [
                [it.name, it.arm.description, _file_hash(it.arm.request.scales)] for it in self.arms
            ],
            "lengths": request.lengths,
            "settings": request.settings(),
            "answer_tokens": request.answer_tokens,
            "seed": request.seed,
            "corpus": self.text.corpus["sha256"],
            "haystack": self.text.haystack.sha256 if self.text.haystack else None,
            "dtype": str(self.reader.decoder.dtype),
            "device": self.reader.decoder.device.type,
            "only_self_check": request.only_self_check,
            "versions": _versions(),
        }

    def everything(self, store: Store, stages: Stages) -> EvalReport:
        """All parts that were asked for."""
        origin = self._origin()
        self._announce(stages, store)
        checks, records = self._self_checks(store, stages)
        if self.request.only_self_check:
            return EvalReport(origin, records, checks)
        perplexity = self._perplexity(store, stages)
        return EvalReport(
            origin=origin,
            arms=store.records("arms", tuple[Arm, ...]) or records,
            self_checks=checks,
            perplexity=perplexity,
            retrieval=self._retrieval(store, stages),
            continuations=self._continuations(store, stages),
        )

    def _announce(self, stages: Stages, store: Store) -> None:
        """All bars, so that it can be seen from the beginning how much there is."""
        caches = len(self.arms) + 1
        stages.add("self-check", STEPS)
        if self.request.only_self_check:
            return
        scored = self._scored()
        if scored:
            stages.add("perplexity", sum(map(len, scored)) * caches)
        if self.text.prompts:
            stages.add("needles", sum(prompt.length for prompt in self.text.prompts))
        if self.request.continuations:
            stages.add("continuations", min(self.request.continuations, len(self.text.documents)))

    def _scored(self) -> tuple[NDArray[Any], ...]:
        limit = self.request.limit
        count = self.request.documents if limit is None else min(self.request.documents, limit)
        return self.text.documents[:count]

    def _make(self) -> dict[str, Any]:
        return {arm.name: arm.make() for arm in self.arms}

    def _self_checks(
        self, store: Store, stages: Stages
    ) -> tuple[tuple[SelfCheck, ...], tuple[Arm, ...]]:
        checks = store.records("checks", tuple[SelfCheck, ...])
        records = store.records("arms", tuple[Arm, ...])
        if checks is None or records is None:
            request = self.request
            ids = self.text.documents[0]
            ids = ids[: request.prefill + SELF_CHECK_BLOCKS * request.block + 1]
            found = self_check(
                self.reader,
                self.arms,
                ids,
                spans(len(ids), request.prefill, request.block),
                served=self.served,
                seed=request.seed,
                progress=lambda name: stages.step("self-check", name),
            )
            checks = tuple(it.result for it in found)
            records = tuple(it.record for it in found)
            store.keep_records("checks", checks)
            store.keep_records("arms", records)
        stages.finish("self-check")
        return checks, records

    def _perplexity(self, store: Store, stages: Stages) -> Perplexity | None:
        request, documents = self.request, self._scored()
        if not documents:
            return None
        stages.begin("perplexity")
        parts: dict[str, list[Scores]] = {arm.name: [] for arm in self.arms}
        for number, ids in enumerate(documents):
            scores = store.scores(number)
            if scores is None:
                caches = self._make()
                with naming_length(self.reader, self.arms, len(ids)):
                    scores = score_document(
                        self.reader,
                        ids,
                        spans(len(ids), request.prefill, request.block),
                        self.reader.reference(),
                        caches,
                        document=number,
                        chunk=request.chunk,
                        advance=lambda tokens: stages.advance("perplexity", tokens),
                    )
                if number == 0:
                    self._count_bytes(store, caches)
                store.keep_scores(number, scores)
            for name, found in scores.items():
                parts[name].append(found)
            stages.reach("perplexity", sum(map(len, documents[: number + 1])) * (len(parts) + 1))
        joined = {name: Scores.join(found) for name, found in parts.items()}
        first = next(iter(joined.values()))
        return Perplexity(
            documents=len(documents),
            document_tokens=max(map(len, documents)),
            prefill=request.prefill,
            block=request.block,
            scored_tokens=len(first.kl),
            reference_nll=float(first.nll_reference.mean(dtype="float64")),
            corpus=self.text.corpus,
            arms={name: divergence(it, seed=request.seed) for name, it in joined.items()},
        )

    def _count_bytes(self, store: Store, caches: Mapping[str, Any]) -> None:
        """What arms hold at the length served, instead of that of the self-check."""
        records: tuple[Arm, ...] = store.records("arms", tuple[Arm, ...])
        store.keep_records("arms", (with_bytes(it, self.reader, caches[it.name]) for it in records))

    def _retrieval(self, store: Store, stages: Stages) -> Retrieval | None:
        if self.text.haystack is None:
            return None
        stages.begin("needles")
        request = self.request
        for batch in batches(self.text.prompts, request.batch_size):
            if not all(key_of(prompt) in store.cells for prompt in batch):
                with naming_length(self.reader, self.arms, batch[0].length, len(batch)):
                    store.keep_cells(
                        answer_prompts(
                            self.reader,
                            self.tokenizer,
                            batch,
                            self._make(),
                            chunk=request.chunk,
                        )
                    )
            stages.advance("needles", sum(prompt.length for prompt in batch))
        cells: tuple[Cell, ...] = tuple(store.cells[key_of(it)] for it in self.text.prompts)
        return Retrieval(
            haystack=self.text.haystack.source,
            sha256=self.text.haystack.sha256,
            chat=request.chat,
            answer_tokens=max(prompt.answer_tokens for prompt in self.text.prompts),
            cells=cells,
            losses=losses(cells),
        )

    def _continuations(self, store: Store, stages: Stages) -> tuple[Continuation, ...]:
        request = self.request
        kept = store.records("continuations", tuple[Continuation, ...]) or ()
        found = list(kept[: request.continuations])  # the earlier run may have wanted more
        if request.continuations:
            stages.begin("continuations")
        for ids in self.text.documents[: request.continuations]:
            prompt = ids[: max(len(ids) - request.tokens, 2)]
            if len(found) <= stages.done("continuations"):
                with naming_length(self.reader, self.arms, len(ids)):
                    found.append(
                        continue_text(
                            self.reader,
                            self.tokenizer,
                            prompt,
                            request.tokens,
                            self._make(),
                            chunk=request.chunk,
                        )
                    )
                store.keep_records("continuations", found)
            stages.advance("continuations", 1)
        return tuple(found)

    def _origin(self) -> Origin:
        source = self.request.source
        return Origin(
            model=source.base,
            title=title(source.base, source.adapters),
            adapters=tuple(map(str, source.adapters)),
            fingerprint=str(self.served),
            parameters=sum(it.numel() for it in self.model.parameters()),
            dtype=str(self.reader.decoder.dtype).removeprefix("torch."),
            device=str(self.reader.decoder.device),
            seed=self.request.seed,
            lengths=self.request.lengths,
            settings=self.request.settings(),
            versions=_versions(),
            command=shlex.join(["kvquant", *sys.argv[1:]]),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


def _file_hash(path: str | None) -> str | None:
    from kvquant.storage import find

    if path is None:
        return None
    return hashlib.sha256(find(path, ".safetensors").read_bytes()).hexdigest()


def _versions() -> dict[str, str]:
    names: Sequence[str] = ("kvquant-toolkit", "torch", "transformers", "peft", "numba")
    return {name: version(name) for name in names} | {"python": platform.python_version()}
