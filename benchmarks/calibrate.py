"""What calibration costs beside the plain forward passes it needs anyway.

    python benchmarks/calibrate.py                  time and added memory, 16 x 512 tokens
    python benchmarks/calibrate.py --long           peak memory with samples of 8,192 tokens
    python benchmarks/calibrate.py --peer           the same tokens through llm-compressor as well

Everything is measured in one run on SmolLM2 and printed as ratios; machines differ, ratios less.
Rows are appended to benchmarks/results/calibrate.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PEER = "llmcompressor==0.14.0.1"


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--long", action="store_true", help="peak memory with 8,192-token samples")
    parser.add_argument("--peer", action="store_true", help="compare with llm-compressor")
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](args)))
        return
    rows = long_rows(args) if args.long else short_rows(args)
    if args.peer:
        rows += peer_rows(args)
    report(rows)


def short_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time and memory against the plain passes, each in one process; the command in another."""
    both, memory = run_part("both", args), run_part("memory", args)
    return [
        row("calibration / plain passes", both["recorded"], both["plain"], "s", 1.25),
        row(
            "memory added by recording and solving",
            memory["recorded"] - memory["plain"], None, "MB", 100,
        ),
        row(
            "whole command / (load + plain passes)",
            run_command(args), both["load"] + both["plain"], "s", 1.7,
        ),
    ]  # fmt: skip


def long_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak memory of long samples, streamed in chunks."""
    args.samples, args.context_length = 1, 8192
    memory = run_part("memory", args)
    return [row("peak memory at 8,192 tokens", memory["recorded"], memory["plain"], "MB", 1.1)]


def part_both(args: argparse.Namespace) -> dict[str, float]:
    """Load, plain passes and calibration one after the other in one process, twice each."""
    started = time.perf_counter()
    loaded, blocks, geometry = prepare(args)
    load = time.perf_counter() - started
    plain_pass(loaded.model, blocks[:1])
    times: dict[str, list[float]] = {"plain": [], "recorded": []}
    for _ in range(2):
        times["plain"].append(timed(lambda: plain_pass(loaded.model, blocks)))
        times["recorded"].append(timed(lambda: recorded_pass(loaded.model, blocks, geometry)))
    return {"load": load, **{name: min(values) for name, values in times.items()}}


def part_memory(args: argparse.Namespace) -> dict[str, float]:
    """Peak resident memory of the plain passes and of calibration, each from a fresh mark."""
    loaded, blocks, geometry = prepare(args)
    plain_pass(loaded.model, blocks)  # weights are mapped into memory when they are first read
    plain = peak_mb(lambda: plain_pass(loaded.model, blocks))
    return {
        "plain": plain,
        "recorded": peak_mb(lambda: recorded_pass(loaded.model, blocks, geometry)),
    }


PARTS = {"both": part_both, "memory": part_memory}


def prepare(args: argparse.Namespace) -> Any:
    """Model, blocks and geometry."""
    from kvquant.geometry import CacheGeometry
    from kvquant.models.loading import load, load_tokenizer, read_config, resolve
    from kvquant.text.corpus import read_rows, token_blocks

    source = resolve(args.model)
    loaded = load(source, notify=lambda message: None)
    rows = read_rows(None, notify=lambda message: None)
    blocks = token_blocks(
        rows,
        load_tokenizer(source),
        context_length=args.context_length,
        samples=args.samples,
        chat=False,
    ).blocks
    return loaded, blocks, CacheGeometry.from_config(read_config(source))


def plain_pass(model: Any, blocks: Any) -> None:
    """The forward passes alone: same batches, same chunks, no lm_head either."""
    import numpy as np
    import torch
    from transformers import DynamicCache

    from calib.collect import DEFAULT_CHUNK, batches

    decoder = model.get_decoder()
    with torch.no_grad():
        for batch in batches(blocks, DEFAULT_CHUNK):
            cache = DynamicCache(config=model.config)
            for part in torch.tensor(np.array(batch)).split(DEFAULT_CHUNK // len(batch), dim=1):
                decoder(input_ids=part, cache=cache, use_cache=True)


def recorded_pass(model: Any, blocks: Any, geometry: Any) -> None:
    """Calibration: recording and solving fp8 per tensor."""
    from calib.collect import collect
    from calib.solve import solve
    from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

    tensor = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    solve(collect(model, blocks, geometry), QuantScheme(tensor, tensor))


def run_part(part: str, args: argparse.Namespace) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--model", args.model]
    command += ["--samples", str(args.samples), "--context-length", str(args.context_length)]
    print(f"measuring: {part} …", file=sys.stderr, flush=True)
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    values: dict[str, float] = json.loads(output.splitlines()[-1])
    return values


def run_command(args: argparse.Namespace) -> float:
    """Seconds that `kvquant calibrate` takes from start to files written."""
    with tempfile.TemporaryDirectory() as directory:
        command = [str(Path(sys.executable).with_name("kvquant")), "calibrate"]
        command += ["--model", args.model, "-o", f"{directory}/scales", "--json"]
        command += ["-n", str(args.samples), "-c", str(args.context_length)]
        return timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))


def peer_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """llm-compressor's KV-only recipe on the same tokens, in its own virtual environment."""
    from kvquant.models.loading import resolve

    environment = RESULTS / "peer-venv"
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-q", "torch==2.13.0", PEER]
        subprocess.run(install, check=True)
    loaded, blocks, _ = prepare(args)
    own = run_part("both", args)
    with tempfile.TemporaryDirectory() as directory:
        tokens = Path(directory) / "tokens.json"
        tokens.write_text(json.dumps([list(map(int, block)) for block in blocks]))
        command = [str(python), str(HERE / "peers" / "llmcompressor_kv.py")]
        command += [str(resolve(args.model).model), str(tokens), f"{directory}/out"]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    peer = json.loads(output.splitlines()[-1])
    del loaded
    return [
        row("llm-compressor / calibration", peer["seconds"], own["recorded"], "s", None),
        row("llm-compressor: written", peer["written_mb"], None, "MB", None),
    ]


def row(
    name: str, value: float, against: float | None, unit: str, limit: float | None
) -> dict[str, Any]:
    """One line of the report: a figure, what it is held against, their ratio, the limit."""
    ratio = None if against is None else value / against
    figure = value if ratio is None else ratio
    verdict = "" if limit is None else ("ok" if figure <= limit else "OVER")
    return {
        "what": name, "value": round(value, 2), "unit": unit,
        "against": None if against is None else round(against, 2),
        "ratio": None if ratio is None else round(ratio, 3), "limit": limit, "verdict": verdict,
    }  # fmt: skip


def report(rows: list[dict[str, Any]]) -> None:
    """Prints rows and appends them to the CSV."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "calibrate.csv"
    fresh = not path.exists()
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, ["date", "cpus", *rows[0]])
        if fresh:
            writer.writeheader()
        for entry in rows:
            writer.writerow({"date": time.strftime("%F"), "cpus": os.cpu_count(), **entry})
    for entry in rows:
        against = "" if entry["against"] is None else f" / {entry['against']} {entry['unit']}"
        ratio = "" if entry["ratio"] is None else f" = {entry['ratio']}"
        limit = "" if entry["limit"] is None else f"  (limit {entry['limit']}: {entry['verdict']})"
        print(f"{entry['what']}: {entry['value']} {entry['unit']}{against}{ratio}{limit}")


def timed(action: Any) -> float:
    """Seconds that `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def peak_mb(action: Callable[[], None]) -> float:
    """Largest resident memory of this process while `action` runs, in MB (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # puts the high-water mark back to now
    action()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    main()
