"""Folding a real model: exact in every weight, the same logits, and better int4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvquant.export.checkpoint import Checkpoint, attention_modules, read_checkpoint
from kvquant.export.fold import LayerFold, choose
from kvquant.export.fold_error import FoldError, fold_report
from kvquant.export.fold_observe import ObservedLayer, observe
from kvquant.export.fold_weights import check_folded, folded_tensors
from kvquant.geometry import CacheGeometry
from kvquant.models.loading import LoadedModel, load, make_local, resolve
from kvquant.text.corpus import read_rows, token_blocks

pytestmark = pytest.mark.real_model


def quiet(message: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(make_local(resolve("smollm2"), quiet), device="cpu", notify=quiet)


@pytest.fixture(scope="module")
def blocks(loaded: LoadedModel) -> list[torch.Tensor]:
    rows = read_rows(None, notify=quiet)
    found = token_blocks(rows, loaded.tokenizer, context_length=512, samples=3).blocks
    return [torch.as_tensor(block) for block in found]


@pytest.fixture(scope="module")
def observed(loaded: LoadedModel, blocks: list[torch.Tensor]) -> dict[int, ObservedLayer]:
    return observe(loaded.model, blocks[:2])


@pytest.fixture(scope="module")
def folds(observed: dict[int, ObservedLayer]) -> dict[int, LayerFold]:
    return choose(observed, "int4")


def with_new_shard(base: Checkpoint, new: dict[str, torch.Tensor], directory: Path) -> Checkpoint:
    """A directory with the base's file under a shard's name, and what changed in another one."""
    directory.mkdir()
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    (directory / first).symlink_to((base.directory / "model.safetensors").resolve())
    save_file(new, directory / second, {"format": "pt"})
    names = {name: second if name in new else first for name in base.tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (directory / "config.json").write_text(json.dumps(base.config))
    return read_checkpoint(directory)


def test_the_folded_model_is_the_same(
    loaded: LoadedModel,
    blocks: list[torch.Tensor],
    observed: dict[int, ObservedLayer],
    folds: dict[int, LayerFold],
    tmp_path: Path,
) -> None:
    base = read_checkpoint(Path(loaded.source.model))
    modules = attention_modules(base, CacheGeometry.from_config(base.config))
    new = dict(folded_tensors(base, modules, folds))
    assert {tensor.dtype for tensor in new.values()} == {torch.float32}
    folded = with_new_shard(base, new, tmp_path / "folded")
    found = check_folded(base, folded, modules, folds, loaded.model, blocks[2][:128])
    assert found.tensors == len(new) > 100
    assert found.logits < 1e-4
    report = list(fold_report(observed, folds))
    print(f"{found.tensors} tensors, logits differ by {found.logits:.2g}")
    for line in means(report):
        print(line)
    for each in report:
        if each.quantizer == "int4":
            assert each.key[1] <= each.key[0]
            assert each.value[1] <= each.value[0]
    gain = {line["quantizer"]: line for line in means(report)}["int4"]
    assert gain["value"][1] < 0.92 * gain["value"][0]
    assert gain["key"][1] < 0.97 * gain["key"][0]


def means(report: list[FoldError]) -> list[dict[str, Any]]:
    """Mean errors over the layers, by quantizer, without folding and with."""
    return [
        {
            "quantizer": name,
            **{
                slot: tuple(
                    sum(getattr(each, slot)[late] for each in lines) / len(lines) for late in (0, 1)
                )
                for slot in ("key", "value")
            },
        }
        for name in dict.fromkeys(each.quantizer for each in report)
        if (lines := [each for each in report if each.quantizer == name])
    ]


def test_gains_hold_on_other_text(
    loaded: LoadedModel, blocks: list[torch.Tensor], folds: dict[int, LayerFold]
) -> None:
    for line in means(list(fold_report(observe(loaded.model, blocks[2:]), folds))):
        if line["quantizer"] == "int4":
            assert line["key"][1] < 0.98 * line["key"][0]
            assert line["value"][1] < 0.92 * line["value"][0]
