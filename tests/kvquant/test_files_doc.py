"""docs/files.md defines exactly what real files hold, no more and no less."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from calib.collect import collect
from calib.solve import solve
from calib.stats_file import save_stats
from kvquant import QuantizedCache
from kvquant.cache.transformers_compat import cache_argument
from kvquant.fingerprint import LINEAGE_KEY, fingerprint, record_lineage
from kvquant.geometry import CacheGeometry
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales
from kvquant.text.corpus import read_rows, token_blocks

DOCUMENT = Path(__file__).parents[2] / "docs" / "files.md"


def documented(heading: str) -> set[str]:
    """Names in the first column of the tables below a heading, up to the next one."""
    section = re.split(rf"^#+ {heading}$", DOCUMENT.read_text(), flags=re.M)[1]
    section = re.split(r"^#", section, flags=re.M)[0]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.M)
    return {name for row in rows for name in re.findall(r"`([^`]*)`", row)}


def fields(value: Any, inside: str = "") -> Iterator[str]:
    """Names of all fields of a JSON value, however deep, but for those of slots and libraries."""
    if isinstance(value, dict) and inside not in ("versions", "config"):
        yield from (name for name in value if not name.startswith("layers."))
        for name, part in value.items():
            yield from fields(part, name)
    if isinstance(value, list):
        for part in value:
            yield from fields(part)


@pytest.fixture
def written(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Tensors and header of a real scales file and of a real statistics file."""
    model = tiny("qwen2")
    (tmp_path / "text.txt").write_text("Every header field is documented. " * 20)
    geometry = CacheGeometry.from_config(model.config)
    rows = read_rows(str(tmp_path / "text.txt"), notify=lambda message: None)
    blocks = token_blocks(rows, byte_tokenizer, context_length=64, samples=4)
    stats = collect(model, blocks.blocks, geometry)
    origin = replace(
        stats.provenance,
        fingerprints=(fingerprint(model, byte_tokenizer),),
        corpora=(asdict(blocks.report),),
    )
    stats = replace(stats, provenance=origin)
    how = TensorScheme(tensor_format("int8"), Granularity.PER_CHANNEL, symmetric=False)
    save_stats(stats, tmp_path / "x.stats")
    save_scales(solve(stats, QuantScheme(how, how)), tmp_path / "x.safetensors")
    return {"stats": opened(tmp_path / "x.stats"), "scales": opened(tmp_path / "x.safetensors")}


def opened(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["kvquant"])


SHARED = ("What all have", "Fingerprints")


@pytest.mark.parametrize(("kind", "title"), [("scales", "scales"), ("stats", "statistics")])
def test_header_fields_are_the_documented_ones(written: Any, kind: str, title: str) -> None:
    _, header = written[kind]
    expected = documented(f"Header of a {title} file").union(*map(documented, SHARED))
    assert set(fields(header)) == expected - {LINEAGE_KEY, "merged"}


def test_the_page_defines_the_version_that_is_written(written: Any) -> None:
    (version,) = re.findall(r"This page defines version (\d+)", DOCUMENT.read_text())
    assert {header["version"] for _, header in written.values()} == {int(version)}


@pytest.mark.parametrize(("kind", "title"), [("scales", "scales"), ("stats", "statistics")])
def test_tensor_names_are_the_documented_ones(written: Any, kind: str, title: str) -> None:
    tensors, _ = written[kind]
    found = {re.sub(r"\d+", "N", name) for name in tensors}
    expected = documented(f"Tensors of a {title} file")
    # Values are not rotated in this model.
    absent = {name for name in expected if re.search(r"value.*(unrotated|turned)", name)}
    assert found | absent == expected
    assert not found & absent


def test_shapes_and_dtypes_are_the_documented_ones(written: Any) -> None:
    tensors, header = written["stats"]
    layer = header["geometry"]["layers"][0]
    heads, dim, bins = layer["kv_heads"], layer["key_dim"], header["bins"]
    assert (heads, dim, bins) == (2, 16, 321)
    for name, dtype, shape in (
        ("minimum", torch.float32, (heads, dim)),
        ("maximum", torch.float32, (heads, dim)),
        ("total", torch.float64, (heads, dim)),
        ("total_squares", torch.float64, (heads, dim)),
        ("total_unrotated", torch.float64, (heads, dim)),
        ("sketch.counts", torch.int32, (heads * dim, bins)),
        ("sketch.exponent", torch.int32, (heads * dim,)),
        ("token_amax.counts", torch.int32, (heads, bins)),
        ("token_amax.exponent", torch.int32, (heads,)),
    ):
        tensor = tensors[f"layers.0.key.{name}"]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
    scales, _ = written["scales"]
    turned = [scales.pop(name) for name in list(scales) if name.endswith(".turned")]
    assert {(mask.dtype, tuple(mask.shape)) for mask in turned} == {(torch.uint8, (dim // 2,))}
    assert {tensor.dtype for tensor in scales.values()} == {torch.float32}
    assert {tuple(tensor.shape) for tensor in scales.values()} == {(heads, dim)}


def test_a_reader_written_from_the_document_quantizes_alike(written: Any) -> None:
    from kvquant.quantize.reference import dequantize, quantize
    from kvquant.scales import TensorScales

    tensors, header = written["scales"]
    how = TensorScheme.from_dict(header["scheme"]["key"])
    scale, point = (tensors[f"layers.0.key.{name}"] for name in ("scale", "zero_point"))
    states = torch.randn(1, 2, 5, 16) * 3
    codes = torch.clamp(torch.round(states / scale[:, None] + point[:, None]), 0, 255)
    scales = TensorScales(scale, point)
    assert torch.equal(quantize(states, scales, how).float(), codes)
    expected = (codes - point[:, None]) * scale[:, None]
    assert torch.equal(dequantize(codes.to(torch.uint8), scales), expected)


def test_bins_lie_where_the_document_says(written: Any) -> None:
    from calib.sketch import QuantileSketch

    sketch = QuantileSketch.empty(1)
    values = torch.tensor([1.5, 1.0 / 512, 1.0 / 512 - 1e-6, -1.999, 1.999])
    sketch.update(values[:, None], torch.tensor([1.999]))
    assert sketch.exponent.item() == 1
    filled = {index: int(count) for index, count in enumerate(sketch.counts[0]) if count}
    assert filled == {0: 1, 160: 1, 161: 1, 160 + 9 * 16 + 9: 1, 320: 1}


def test_the_weights_hash_can_be_computed_from_the_document(tiny: Callable[..., Any]) -> None:
    import hashlib

    model = tiny("llama")
    digest = hashlib.sha256(b"[]")
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.flatten().tolist()
        numbers = range(256) if len(flat) > 256 else range(len(flat))
        last = 255 if len(flat) > 256 else max(len(flat) - 1, 1)
        sample = [flat[i * (len(flat) - 1) // last] for i in numbers]
        digest.update(json.dumps([name, list(tensor.shape)]).encode())
        digest.update(torch.tensor(sample, dtype=torch.float32).numpy().tobytes())
    assert fingerprint(model).weights == digest.hexdigest()


def test_lineage_is_documented(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    record_lineage(model, fingerprint(model))
    lineage = vars(model.config)[LINEAGE_KEY]
    assert {LINEAGE_KEY, *lineage} <= documented("Fingerprints")


@pytest.fixture
def prefixes(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Tensors and headers of prefixes that have all that a prefix can have, but for indexers."""
    model = tiny("qwen2")
    stats = collect(model, [list(range(3, 67))], CacheGeometry.from_config(model.config))
    origin = replace(stats.provenance, fingerprints=(fingerprint(model, byte_tokenizer),))
    how = TensorScheme(tensor_format("int8"), Granularity.PER_HEAD)
    scales = solve(replace(stats, provenance=origin), QuantScheme(how, how))
    groups = {"group_size": 4, "rotary_format": "int8", "layers": {0: "int8"}}
    made = [
        (model, {"scheme": "int4", "scales": scales, "residual_length": 3}),
        (tiny("deepseek"), {"scheme": "int4-kivi", "residual_length": 5, **groups}),
        (tiny("qwen3_next"), {"scheme": "none"}),
    ]
    ids = torch.arange(3, 26)[None]
    found = []
    for model, options in made:
        cache = QuantizedCache.from_model(model, **options)
        with torch.no_grad():
            model(ids, **{cache_argument(model.get_decoder()): cache})
        cache.save(tmp_path / "p.safetensors", model, byte_tokenizer)
        found.append(opened(tmp_path / "p.safetensors"))
    return found


def test_header_fields_of_prefixes_are_the_documented_ones(prefixes: Any) -> None:
    found = {name for _, header in prefixes for name in fields(header) if not name.isdigit()}
    sections = ("Header of a prefix file", "Header of a scales file", *SHARED)
    corpus = {name for name in documented("What all have") if name not in found}
    expected = set().union(*map(documented, sections)) - {LINEAGE_KEY, "merged"}
    assert found == expected - corpus
    assert "sha256" in found and "sink_tokens" in found
    # Nothing was read from a corpus; all else is there.
    assert corpus < {"source", "rows_read", "rows_empty", "rows_unusable", "last_block",
                     "tokens_available", "tokens_used", "blocks", "stopped_early", "bos",
                     "separator", "separators", "context_length"}  # fmt: skip


def test_tensor_names_of_prefixes_are_the_documented_ones(prefixes: Any) -> None:
    names = {name for tensors, _ in prefixes for name in tensors}
    found = {re.sub(r"\d+", "N", name) for name in names if not name.startswith("scales.")}
    documents = documented("Tensors of a prefix file")
    indexers = {name for name in documents if "indexer" in name}
    own = documents - indexers - {"scales.layers.N.…"}
    assert found == {re.sub(r"\b[GI]\b", "N", name) for name in own}
    scales = {re.sub(r"\d+", "N", name[7:]) for name in names if name.startswith("scales.")}
    assert scales <= documented("Tensors of a scales file")
    assert len(indexers) == 2 and len(scales) > 4


def test_shapes_of_prefixes_are_the_documented_ones(prefixes: Any) -> None:
    (plain, _), (groups, _), _ = prefixes
    for name, shape, dtype in (
        ("sinks.exact", (1, 2, 4, 16), torch.float32),
        ("coded.codes", (1, 2, 16, 8), torch.uint8),
        ("coded.scale", (1, 2, 16), torch.bfloat16),
        ("tail.exact", (1, 2, 3, 16), torch.float32),
    ):
        tensor = plain[f"layers.1.key.0.{name}"]
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
    assert (plain["ledger.position"].flatten().tolist()) == list(range(23))
    # 23 tokens, of which 18 are older than the newest 5: four groups of 4.
    assert tuple(groups["layers.1.key.0.coded.codes"].shape) == (1, 1, 4, 4, 8)
    assert tuple(groups["layers.1.key.0.coded.middle"].shape) == (1, 1, 4, 16)


def test_the_hash_of_a_prefix_can_be_computed_from_the_document(prefixes: Any) -> None:
    import hashlib

    for tensors, header in prefixes:
        noted = {k: v for k, v in header.items() if k not in ("version", "kind", "sha256")}
        digest = hashlib.sha256(json.dumps(noted, sort_keys=True).encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()))
        assert digest.hexdigest() == header["sha256"]
