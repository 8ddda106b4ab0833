"""Broken directories lead to findings, whatever is broken, and never to an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvquant.export.verify import verifiable, verify

SCALES = "model-00002-of-00002.safetensors"
BASE = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
LLAMA = "model.layers.{}.self_attn"
K1 = f"{LLAMA.format(1)}.k_scale"
ALL_NONE = r"^all 3 layers: {} finds no scale"


class Expected(NamedTuple):
    """A finding that a defect leads to."""

    what: str
    layer: int | None = None
    serious: bool = True


def _rewrite_index(made: Any, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((made.path / INDEX).read_text())
    change(index["weight_map"])
    (made.path / INDEX).write_text(json.dumps(index))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


BROKEN: list[tuple[str, Callable[[Any], Any], list[Expected]]] = [
    ("the shard of scales is gone", lambda made: (made.path / SCALES).unlink(),
     [Expected(r"places 6 tensors in model-00002\S+, which is not there"),
      Expected(ALL_NONE.format("vLLM"))]),
    ("the weights are gone", lambda made: (made.path / BASE).unlink(),
     [Expected(r"places \d+ tensors in model-00001\S+, which is not there")]),
    ("the shard of scales is cut short", lambda made: _cut(made.path / SCALES),
     [Expected(r"model-00002\S+ cannot be read"), Expected(ALL_NONE.format("vLLM"))]),
    ("a key is in another shard", lambda made: _rewrite_index(
        made, lambda names: names.update({K1: BASE})),
     [Expected(r"places model\.layers\.1\.self_attn\.k_scale in model-00001\S+, which does not")]),
    ("the shard of scales is not in the index", lambda made: _rewrite_index(
        made, lambda names: [names.pop(name) for name in list(names) if name.endswith("_scale")]),
     [Expected(r"passes over model-00002\S+ and its 6 scale tensors: \S+ does not name it"),
      Expected(r"says that all tensors", None, False), Expected(ALL_NONE.format("vLLM"))]),
    ("the index is no JSON", lambda made: (made.path / INDEX).write_text("{"),
     [Expected(r"^model\.safetensors\.index\.json cannot be read")]),
    ("the index has no weight map", lambda made: (made.path / INDEX).write_text("{}"),
     [Expected(r"^model\.safetensors\.index\.json cannot be read: it has no weight_map")]),
    ("config.json is no JSON", lambda made: (made.path / "config.json").write_text("{"),
     [Expected(r"^config\.json cannot be read")]),
    ("config.json nests too deep", lambda made: (made.path / "config.json").write_text("[" * 99999),
     [Expected(r"^config\.json cannot be read")]),
    ("a header nests too deep", lambda made: (made.path / SCALES).write_bytes(
        (99999).to_bytes(8, "little") + b"[" * 99999),
     [Expected(r"model-00002\S+ cannot be read"), Expected(ALL_NONE.format("vLLM"))]),
    ("config.json is a list", lambda made: (made.path / "config.json").write_text("[]"),
     [Expected(r"^config\.json cannot be read: it holds list")]),
    ("config.json is gone", lambda made: (made.path / "config.json").unlink(),
     [Expected(r"^there is no config\.json")]),
    ("a shard that nobody names", lambda made: os.link(
        made.path / BASE, made.path / "old.safetensors"),
     [Expected(r"passes over old\.safetensors: ", None, False)]),
    ("config.json does not say how many layers there are",
     lambda made: (made.path / "config.json").write_text('{"model_type": "unheard_of"}'),
     [Expected(r"which layers keep keys and values cannot be told from config\.json")]),
    ("keys of a layer are gone", lambda made: (_rewrite_index(
        made, lambda names: names.pop(f"{LLAMA.format(1)}.k_proj.weight")),
        _drop_key(made, f"{LLAMA.format(1)}.k_proj.weight")),
     [Expected(r"no weight that is known to make the keys of layer 1"),
      Expected(r"says that all tensors", None, False)]),
]  # fmt: skip


def _drop_key(made: Any, name: str) -> None:
    from safetensors.numpy import load_file

    held = load_file(made.path / BASE)
    held.pop(name)
    save_file(held, made.path / BASE, metadata={"format": "pt"})


@pytest.mark.parametrize(("what", "change", "expected"), BROKEN, ids=[row[0] for row in BROKEN])
def test_a_broken_directory_leads_to_findings(
    llama: Callable[..., Any],
    check_new: Callable[..., None],
    what: str,
    change: Callable[[Any], Any],
    expected: list[Expected],
) -> None:
    made = llama("vllm")
    before = verify(made.write(), "vllm").findings
    change(made)
    check_new(verify(made.path, "vllm"), before, expected)
    for engine in verifiable():
        verify(made.path, engine)


def _places(values: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if isinstance(values, (dict, list)):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        below = [found for key, value in items for found in _places(value, (*place, key))]
        return [place, *below]
    return [place]


def _replaced(values: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copied = json.loads(json.dumps(values))
    inner = copied
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copied


@pytest.fixture(scope="session")
def everything(export_at: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with each file that some engine reads."""
    made = export_at(tmp_path_factory.mktemp("all") / "all", "compressed-tensors")
    path: Path = made.add(LLAMA, [0, 1]).write()
    made.beside(quant_algo=None, kv_cache_quant_algo="NVFP4", exclude_modules=[])
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 0.5}}}
    (path / "kv.json").write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    lightllm = {
        "architectures": "LlamaForCausalLM",
        "quant_type": "per_head",
        "qmin": -448.0,
        "qmax": 448.0,
        "num_layers": 2,
        "num_head": 2,
        "scales": [[0.5] * 4] * 2,
        "q_calibration": {"num_head": 2, "scales": [[0.5] * 2] * 2},
    }
    (path / "kv_cache_calib.json").write_text(json.dumps(lightllm))
    return path


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(
        ["config.json", "hf_quant_config.json", "kv.json", "kv_cache_calib.json", INDEX]
    ),
    st.sampled_from([None, 3, -1.5, True, "x", "1", [], {}, [3], [[]], {"a": {"b": [1]}}, 10**400]),
    st.data(),
)
def test_json_of_any_kind_leads_to_a_report(
    everything: Path, name: str, value: Any, data: st.DataObject
) -> None:
    text = (everything / name).read_text()
    values = json.loads(text)
    place = data.draw(st.sampled_from(_places(values)))
    (everything / name).write_text(json.dumps(_replaced(values, place, value)))
    try:
        for engine in verifiable():
            report = verify(everything, engine)
            json.dumps(report.to_dict(), allow_nan=False)
    finally:
        (everything / name).write_text(text)


def test_an_empty_directory_leads_to_findings(tmp_path: Path) -> None:
    for engine in verifiable():
        report = verify(tmp_path, engine)
        assert not report.ok
        assert report.layers == ()
