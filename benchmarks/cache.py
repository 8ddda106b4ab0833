"""What a quantized cache costs in time, memory and quality, beside those of Transformers.

    python benchmarks/cache.py                  all of it: some 10 minutes on two quiet cores
    python benchmarks/cache.py --speed          decode step, prefill, bytes
    python benchmarks/cache.py --quality        KL divergence, perplexity, top-1 agreement

Everything that is held against something else is measured beside it, in one process on SmolLM2 in
float32. Rows are appended to benchmarks/results/cache-*.csv. Exits with 1 if a limit is missed, and
says which.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--speed", action="store_true", help="only time and bytes")
    parser.add_argument("--quality", action="store_true", help="only quality")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096], help="for speed")
    parser.add_argument("--steps", type=int, default=24, help="decode steps of each cache")
    parser.add_argument("--prefills", type=int, default=3, help="prefills of each cache")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where CSV files go")
    args = parser.parse_args()
    if run(args):
        sys.exit(1)


def run(args: argparse.Namespace) -> int:
    """Measures, prints, saves; the number of limits missed."""
    # Here, so that --help answers at once.
    from caches import quality, report, setting, size, speed

    prepared = setting.prepare(args.model, args.threads)
    limits: list[report.Limit] = []
    if args.quality or not args.speed:
        rows, new = quality.run(prepared, notify)
        report.show("Quality, 2,048 tokens in blocks of 64", rows)
        report.save(args.results / "cache-quality.csv", rows)
        limits += new
    if args.speed or not args.quality:
        rows, new = speed.run(prepared, args.contexts, args.steps, args.prefills, notify)
        report.show("Speed and bytes", rows)
        report.save(args.results / "cache-speed.csv", rows)
        limits += new
        rows, new = size.run()
        report.show("Bytes of one layer, 8 KV heads of 128, 4,096 tokens", rows)
        report.save(args.results / "cache-size.csv", rows)
        limits += new
    return report.judge(limits)


def notify(message: str) -> None:
    """Says what is going on."""
    print(f"{time.strftime('%T')} {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
