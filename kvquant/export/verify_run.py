"""`kvquant verify --run`: loads an export in Transformers and shows that its scales are used.

compressed-tensors quantizes and dequantizes keys and values on their way into the cache, on any
machine. That a scale is used is seen by changing it: the logits must change too. The factor is no
power of two, by which scales of FP8 move exponents and next to nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant.errors import ExportError

from .verify import verify
from .verify_report import Finding, VerifyReport, examples, ranges, some

if TYPE_CHECKING:
    import torch

_FACTORS = (1.5, 1 / 64)
"""The second one cuts most values off; it is for models whose logits hardly depend on rounding."""

_PROMPT_LENGTH, _NEW_TOKENS = 32, 8
_PACKAGES = ("transformers", "compressed-tensors", "torch")
_SLOTS = ("k_scale", "v_scale")


@dataclass(frozen=True)
class Change:
    """What became of the logits when one scale was changed.

    Attributes:
        layer: The layer of the scale.
        slot: ``k_scale`` or ``v_scale``.
        factor: By which it was multiplied.
        logits: The largest change of a logit.
    """

    layer: int
    slot: str
    factor: float
    logits: float


@dataclass(frozen=True)
class RunReport:
    """What Transformers made of an export.

    Attributes:
        directory: The export.
        versions: Of the packages that took part.
        missing: Parameters that no tensor was found for.
        unexpected: Tensors that no parameter was found for.
        loaded: Layers whose attention holds scales.
        generated: Tokens generated after the prompt.
        spread: Standard deviation of the logits, to compare changes with.
        changes: One per scale that was changed.
        findings: What is wrong.
    """

    directory: str
    versions: Mapping[str, str]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    loaded: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    spread: float = 0.0
    changes: tuple[Change, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every scale was loaded and those tried were used."""
        return not any(finding.serious for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "ok": self.ok}


def run(directory: Path, engine: str = "transformers") -> RunReport:
    """Loads an export, runs a prompt, and changes scales of one layer.

    Args:
        directory: The export, for Transformers or for an engine that reads the same files.
        engine: Only ``transformers`` can be run here.

    Raises:
        ExportError: Another engine, compressed-tensors is not installed, or the export is not one
            that Transformers would take scales from.
        ModelError: There is no such directory.
    """
    if engine != "transformers":
        raise ExportError(
            f"only Transformers runs here, not {engine}: kvquant verify --engine transformers --run"
        )
    versions = _versions()
    expected = verify(directory, engine)
    if not expected.ok:
        wrong = [finding for finding in expected.findings if finding.serious]
        return RunReport(str(directory), versions, findings=tuple(wrong))
    report = RunReport(str(directory), versions)
    doing = "load"
    # Whatever goes wrong in there is what is to be found out; versions differ a lot.
    try:
        model, info = _loaded(directory)
        doing = "run"
        report = _observed(report, model, info)
    except Exception as error:
        return replace(report, findings=(_failed(doing, error, versions),))
    return _judged(report, model, expected)


def _failed(doing: str, error: Exception, versions: Mapping[str, str]) -> Finding:
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Finding(
        f"transformers {versions['transformers']} with compressed-tensors "
        f"{versions['compressed-tensors']} does not {doing} it ({why})",
        "pip install 'transformers==5.22.*', which loads most models with scales of a cache",
    )


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError as error:
            raise ExportError(
                f"{package} is not installed, without which scales are not used in Transformers: "
                f"pip install {package}"
            ) from error
    return found


def _loaded(directory: Path) -> tuple[Any, Mapping[str, Any]]:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True, local_files_only=True
    )
    return model.eval(), info


# --- what happens ---------------------------------------------------------------------------------


def _attention(model: Any) -> dict[int, Any]:
    """Attention modules that hold scales, by layer."""
    holding = (module for module in model.modules() if hasattr(module, "k_scale"))
    return {getattr(module, "layer_idx", place): module for place, module in enumerate(holding)}


def _observed(report: RunReport, model: Any, info: Mapping[str, Any]) -> RunReport:
    attention = _attention(model)
    prompt = _prompt(model)
    logits = _logits(model, prompt)
    changes = [
        _change(model, prompt, logits, layer, slot)
        for layer in sorted(attention)[:1]
        for slot in _SLOTS
    ]
    return replace(
        report,
        missing=tuple(sorted(info["missing_keys"])),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        loaded=tuple(sorted(attention)),
        generated=_generated(model, prompt),
        spread=float(logits.std()),
        changes=tuple(changes),
    )


def _prompt(model: Any) -> torch.Tensor:
    """Token ids ``[1, tokens]``, spread over the vocabulary."""
    import torch

    size: int = model.config.get_text_config().vocab_size
    return (torch.arange(_PROMPT_LENGTH) * 7919 + 11)[None] % size


def _logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.no_grad():
        found: torch.Tensor = model(prompt).logits.float()
    return found


def _generated(model: Any, prompt: torch.Tensor) -> tuple[int, ...]:
    settings = {"do_sample": False, "max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS}
    found = model.generate(prompt, pad_token_id=0, **settings)
    return tuple(found[0, prompt.shape[1] :].tolist())


def _change(
    model: Any, prompt: torch.Tensor, before: torch.Tensor, layer: int, slot: str
) -> Change:
    """Changes one scale, by less if that is seen already."""
    change = Change(layer, slot, 1.0, 0.0)
    for factor in _FACTORS:
        with _multiplied(getattr(_attention(model)[layer], slot), factor):
            moved = float((_logits(model, prompt) - before).abs().max())
        change = Change(layer, slot, factor, moved)
        if moved:
            break
    return change


@contextmanager
def _multiplied(scale: torch.Tensor, factor: float) -> Iterator[None]:
    kept = scale.data.clone()
    scale.data.mul_(factor)
    try:
        yield
    finally:
        scale.data.copy_(kept)


# --- what to think of it --------------------------------------------------------------------------


def _judged(report: RunReport, model: Any, expected: VerifyReport) -> RunReport:
    layers = {verdict.layer for verdict in expected.layers}
    if not report.loaded and layers:
        findings = [_skipped(report)]
    else:
        findings = [
            *_keys(report, expected),
            *_without_scales(report, layers),
            *_other_numbers(model, expected),
            *_unused(report),
        ]
    return replace(report, findings=tuple(findings))


def _skipped(report: RunReport) -> Finding:
    left = [name for name in report.unexpected if name.endswith(_SLOTS)]
    return Finding(
        f"transformers {report.versions['transformers']} skips the scheme of the cache: no "
        f"attention takes scales, and {some(len(left), 'scale tensor')} were passed over as "
        f"unexpected; nothing is quantized, and nothing is shown by running it",
        f"pip install 'transformers==5.22.*': compressed-tensors "
        f"{report.versions['compressed-tensors']} does not know the attention of 5.24",
    )


def _keys(report: RunReport, expected: VerifyReport) -> list[Finding]:
    """Keys without a counterpart; scales by another engine's names are there on purpose."""
    wanted = {name for verdict in expected.layers for name in (verdict.key, verdict.value)}
    lost = [name for name in report.unexpected if name in wanted]
    others = [name for name in report.unexpected if name not in wanted]
    look = "look at kvquant verify --engine transformers, and at what it warned of"
    return [
        Finding(f"Transformers found no {what} for {examples(names)}", fix, serious=serious)
        for names, what, fix, serious in (
            (report.missing, "tensor", look, True),
            (lost, "parameter", look, True),
            (others, "parameter", "nothing, if they are for another engine", False),
        )
        if names
    ]


def _without_scales(report: RunReport, layers: set[int]) -> list[Finding]:
    absent = layers - set(report.loaded)
    if not absent:
        return []
    return [
        Finding(
            f"the attention of layers {ranges(absent)} holds no scales",
            "compressed-tensors does not know this attention",
        )
    ]


def _other_numbers(model: Any, expected: VerifyReport) -> list[Finding]:
    """Scales in memory that are not those of the files, in the type that the model holds them."""
    import torch

    attention, wrong = _attention(model), []
    for verdict in expected.layers:
        module = attention.get(verdict.layer)
        for slot, scales in zip(_SLOTS, (verdict.key_scale, verdict.value_scale), strict=True):
            held = getattr(module, slot, None)
            if held is None:
                continue
            stored = torch.tensor(scales).to(held.dtype)
            if not torch.equal(held.detach().flatten(), stored):
                wrong.append(f"layer {verdict.layer} {slot}")
    if not wrong:
        return []
    return [
        Finding(
            f"other numbers are in memory than in the files: {examples(wrong)}",
            "look for two tensors of one name",
        )
    ]


def _unused(report: RunReport) -> list[Finding]:
    return [
        Finding(
            f"layer {change.layer}: multiplying {change.slot} by {change.factor:g} changes no "
            f"logit: it is not used",
            "use versions of transformers and compressed-tensors that know this attention",
            layer=change.layer,
        )
        for change in report.changes
        if not change.logits
    ]
