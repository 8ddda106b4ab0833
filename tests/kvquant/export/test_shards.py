"""Weight files of an export: their names, and those that are written anew."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvquant.export.checkpoint import read_checkpoint
from kvquant.export.shards import LinkMode, place, plan_shards, write_trimmed
from kvquant.tensor_files import read_header

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]


def random_tensors(kinds: list[tuple[str, int, int]]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(len(kinds))
    return {
        name: (torch.randn(rows, 3, generator=random) * 4).to(DTYPES[kind])
        for name, rows, kind in kinds
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


@settings(deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.text(min_size=1, max_size=9), st.integers(0, 5), st.integers(0, 4)),
        unique_by=lambda kind: kind[0],
        max_size=8,
    ),
    dropped=st.sets(st.integers(0, 7)),
    metadata=st.sampled_from([None, {"format": "pt"}, {"format": "np", "by": "hand"}]),
)
def test_what_is_not_dropped_stays_as_it_was(
    kinds: list[tuple[str, int, int]], dropped: set[int], metadata: dict[str, str] | None
) -> None:
    kinds = [kind for kind in kinds if kind[0] != "__metadata__"]
    tensors = random_tensors(kinds)
    gone = {kind[0] for number, kind in enumerate(kinds) if number in dropped}
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "source"), Path(directory, "target")
        save_file(tensors, source, metadata=metadata)
        before = source.read_bytes()
        write_trimmed(read_header(source), target, gone, "1.2.3")
        kept = {name: tensor for name, tensor in tensors.items() if name not in gone}
        assert_same(load_file(target), kept)
        with safe_open(target, "pt") as file:
            assert file.metadata() == {"format": "pt", **(metadata or {}), "kvquant": "1.2.3"}
        header = int.from_bytes(target.read_bytes()[:8], "little")
        assert header % 8 == 0
        assert target.stat().st_size == 8 + header + sum(t.nbytes for t in kept.values())
        assert source.read_bytes() == before


def test_a_file_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvquant.export.shards._CHUNK", 7)
    tensors = random_tensors([("a", 5, 0), ("b", 4, 1), ("c", 3, 3)])
    save_file(tensors, tmp_path / "source")
    write_trimmed(read_header(tmp_path / "source"), tmp_path / "target", {"b"}, "1")
    assert_same(load_file(tmp_path / "target"), {name: tensors[name] for name in "ac"})


def test_a_source_that_becomes_shorter_is_noticed(tmp_path: Path) -> None:
    save_file(random_tensors([("a", 5, 0), ("b", 5, 0)]), tmp_path / "source")
    header = read_header(tmp_path / "source")
    os.truncate(tmp_path / "source", (tmp_path / "source").stat().st_size - 1)
    with pytest.raises(OSError, match="became shorter while it was read"):
        write_trimmed(header, tmp_path / "target", {"a"}, "1")


@pytest.mark.parametrize(
    ("options", "mode"),
    [({}, LinkMode.HARD), ({"copy": True}, LinkMode.COPY), ({"symbolic": False}, LinkMode.HARD)],
)
def test_how_a_file_gets_somewhere(
    tmp_path: Path, options: dict[str, bool], mode: LinkMode
) -> None:
    (tmp_path / "source").write_bytes(b"weights")
    assert place(tmp_path / "source", tmp_path / "target", **options) is mode
    assert (tmp_path / "target").read_bytes() == b"weights"
    assert (tmp_path / "target").samefile(tmp_path / "source") == (mode is LinkMode.HARD)


def test_an_error_that_is_no_lack_of_links_is_one(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"weights")
    (tmp_path / "target").write_bytes(b"others")
    with pytest.raises(FileExistsError):
        place(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"others"


def test_a_plan(tiny_once: Callable[..., Any], tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_once("llama").save_pretrained(base)
    name = "model.norm.weight"
    save_file({name: torch.ones(64)}, tmp_path / "new.safetensors")
    checkpoint = read_checkpoint(base)
    first, second, third = (f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))

    nothing = plan_shards(checkpoint, (), {})
    assert nothing.linked == {"model.safetensors": base / "model.safetensors"}
    assert nothing.weight_map == checkpoint.shards
    assert not nothing.adds
    assert nothing.linked_nbytes() == (base / "model.safetensors").stat().st_size
    assert nothing.trimmed_nbytes() == 0

    plan = plan_shards(checkpoint, ["a.k_scale"], {name: tmp_path / "new.safetensors"})
    assert plan.linked == {}
    assert {name: file.path for name, file in plan.trimmed.items()} == {
        first: base / "model.safetensors"
    }
    assert plan.added == {second: tmp_path / "new.safetensors"}
    assert plan.scales == third
    assert plan.adds
    assert plan.weight_map == {
        **dict.fromkeys(checkpoint.shards, first),
        name: second,
        "a.k_scale": third,
    }
    total = sum(tensor.nbytes for tensor in tiny_once("llama").state_dict().values())
    assert plan.trimmed_nbytes() == total - 64 * 4
    assert plan.linked_nbytes() == 0
