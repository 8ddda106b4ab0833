"""What an export costs in time and bytes, beside the size of the weights, and what verify does.

    python benchmarks/export.py              SmolLM2, and a Llama of 70 billion parameters
    python benchmarks/export.py --model DIR  another model in the place of SmolLM2

The large one consists of files with a header, and holes where the weights would be: 141 GB that
take no room. A third checkpoint has as many tensors in as many files with a thousandth of the
bytes, so that what depends on the size is seen.

Rows are appended to benchmarks/results/export.csv. Exits with 1 if a limit is missed, and says
which. Limits are for the export itself, in a process that has imported what it needs; the table has
the whole command too, and the start of Python with PyTorch and Transformers that is part of it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
INDEX = "model.safetensors.index.json"
SHARDS = 30
REPEATS = 5

MOST_SECONDS = 5.0
MOST_MB = 1.0
MOST_GROWTH = 1.5
"""Of verify, from the small checkpoint to one of a thousand times the bytes."""

START = """
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
"""


@dataclass(frozen=True)
class Shape:
    """A Llama, by the names of its config."""

    hidden_size: int = 8192
    intermediate_size: int = 28672
    num_hidden_layers: int = 80
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    vocab_size: int = 128256

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of its weights, in the order of its layers."""
        hidden, inner = self.hidden_size, self.intermediate_size
        cached = hidden // self.num_attention_heads * self.num_key_value_heads
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_hidden_layers):
            path = f"model.layers.{layer}"
            for name, rows, columns in (
                ("self_attn.q_proj", hidden, hidden),
                ("self_attn.k_proj", cached, hidden),
                ("self_attn.v_proj", cached, hidden),
                ("self_attn.o_proj", hidden, hidden),
                ("mlp.gate_proj", inner, hidden),
                ("mlp.up_proj", inner, hidden),
                ("mlp.down_proj", hidden, inner),
            ):
                yield f"{path}.{name}.weight", (rows, columns)
            yield f"{path}.input_layernorm.weight", (hidden,)
            yield f"{path}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab_size, hidden)

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **asdict(self),
        }


LARGE = Shape()
SMALL = Shape(hidden_size=256, intermediate_size=896, vocab_size=4008)


def nbytes_of(shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in bfloat16."""
    return 2 * math.prod(shape)


def write_sparse(directory: Path, shape: Shape, count: int = SHARDS) -> int:
    """A checkpoint of zeros that takes no room; returns how many bytes its weights have.

    Args:
        directory: Is made.
        shape: The model.
        count: Files to divide it into, by the number of tensors.
    """
    directory.mkdir(parents=True)
    tensors = list(shape.tensors())
    bounds = [len(tensors) * number // count for number in range(count + 1)]
    shards = [dict(tensors[start:stop]) for start, stop in pairwise(bounds)]
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{count:05}.safetensors"
        write_holes(directory / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(nbytes_of(size) for _, size in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=2))
    (directory / "tokenizer.json").write_text(json.dumps({"vocab": ["token"] * 1_000_000}))
    return total


def write_holes(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file: its header, and then nothing as long as the tensors are."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors.items():
        start, end = end, end + nbytes_of(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def write_scales(base: Path, path: Path) -> None:
    """FP8 scales that fit a checkpoint; their numbers do not matter here."""
    import torch

    from kvquant.fingerprint import checkpoint_fingerprint
    from kvquant.geometry import CacheGeometry
    from kvquant.provenance import Provenance
    from kvquant.scales import KVScales, LayerScales, TensorScales
    from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
    from kvquant.storage import save_scales

    geometry = CacheGeometry.from_config(json.loads((base / "config.json").read_text()))
    found = checkpoint_fingerprint(base)
    assert found is not None
    slot = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    layers = {
        index: LayerScales(*(TensorScales(torch.tensor([[n / (index + 2)]])) for n in (0.1, 0.01)))
        for index in geometry.attention_layers
    }
    known = Provenance(fingerprints=(found,))
    save_scales(KVScales(geometry, QuantScheme(slot, slot), layers, known), path)


def weights_nbytes(base: Path) -> int:
    """Bytes of a checkpoint's weight files: what is written by those who write all of it."""
    return sum(path.stat().st_size for path in base.glob("*.safetensors"))


def new_nbytes(export: Path, base: Path) -> int:
    """Bytes of an export's files that are none of the base's, besides config and index."""
    known = {(path.stat().st_dev, path.stat().st_ino) for path in base.iterdir()}
    return sum(
        path.stat().st_size
        for path in export.iterdir()
        if path.name not in ("config.json", INDEX)
        and (path.stat().st_dev, path.stat().st_ino) not in known
    )


def best(work: Callable[[], object], repeats: int) -> float:
    """Fewest seconds that it took."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Runs all of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--place", type=Path, help="directory with room [default: temporary one]")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--quick", action="store_true", help="leave the whole commands out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the CSV file goes")
    if run(parser.parse_args()):
        sys.exit(1)


def run(args: argparse.Namespace, large: Shape = LARGE, small: Shape = SMALL) -> int:
    """Measures, prints, saves; the number of limits missed."""
    from caches import report

    from kvquant.models.loading import make_local
    from kvquant.models.source import resolve

    with tempfile.TemporaryDirectory(dir=args.place) as directory:
        root = Path(directory)
        bases = {args.model: Path(make_local(resolve(args.model), notify).model)}
        for name, shape in (("sparse, small", small), ("sparse, large", large)):
            bases[name] = root / name.replace(", ", "-")
            notify(f"{name}: {write_sparse(bases[name], shape) / 1e9:,.3f} GB of weights")
        rows = [measure(name, base, root, args) for name, base in bases.items()]
    report.show("Export for vLLM, then verify", rows)
    if not args.quick:
        start = best(lambda: subprocess.run([sys.executable, "-c", START], check=True), 1)
        print(f"\nPython with PyTorch and Transformers alone: {start:.1f} s of each command")
    report.save(args.results / "export.csv", rows)
    return report.judge(limits(rows))


def measure(name: str, base: Path, root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    from kvquant.export.export import ExportRequest, export
    from kvquant.export.verify import verify
    from kvquant.models.source import resolve

    scales, outputs = root / f"{base.name}.safetensors", iter(range(1000))
    write_scales(base, scales)
    source = resolve(str(base))
    made: list[Path] = []

    def once() -> None:
        made.append(root / f"{base.name}-{next(outputs)}")
        result = export(
            ExportRequest(source, str(scales), ("vllm",), made[-1]), lambda message: None
        )
        assert result.ok, result.engines

    notify(f"{name}: exporting")
    seconds = best(once, args.repeats)
    output = root / f"{base.name}-command"
    command = "" if args.quick else f"{whole_command(base, scales, output):.1f}"
    weights = weights_nbytes(base)
    new = new_nbytes(made[-1], base)
    return {
        "checkpoint": name,
        "weights MB": f"{weights / 1e6:.1f}",
        "export s": f"{seconds:.3f}",
        "command s": command,
        "new MB": f"{new / 1e6:.4f}",
        "of weights": f"1/{weights // new:,}",
        "verify s": f"{best(lambda: verify(made[-1], 'vllm'), 4 * args.repeats):.4f}",
    }


def whole_command(base: Path, scales: Path, output: Path) -> float:
    """Seconds of the same as users type it."""
    command = [sys.executable, "-c", "from kvquant.cli import main; main()", "export"]
    command += ["-m", str(base), "-s", str(scales), "-e", "vllm", "-o", str(output)]
    return best(lambda: subprocess.run(command, check=True, capture_output=True), 1)


def limits(rows: list[dict[str, Any]]) -> list[Any]:
    """What may not be exceeded, of the rows of a model, a small and a large checkpoint."""
    from caches.report import Limit

    model, small, large = rows
    return [
        *(
            Limit(f"seconds to export {row['checkpoint']}", float(row["export s"]), MOST_SECONDS)
            for row in (model, large)
        ),
        *(
            Limit(
                f"MB of new data in {row['checkpoint']}, besides config and index",
                float(row["new MB"]),
                MOST_MB,
            )
            for row in (model, large)
        ),
        Limit(
            "verify of the large / of the small checkpoint, as many tensors",
            float(large["verify s"]) / float(small["verify s"]),
            MOST_GROWTH,
        ),
    ]


def notify(message: str) -> None:
    """Says what is going on."""
    print(f"{time.strftime('%T')} {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
