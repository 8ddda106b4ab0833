"""What attention over codes costs beside attention in full precision.

    python benchmarks/attention.py              all of it: some 5 minutes on two quiet cores
    python benchmarks/attention.py --kernel     one layer, Llama-3-8B shape, one query token
    python benchmarks/attention.py --model      decode steps of SmolLM2

Everything that is held against something else is measured beside it, in one process. Rows are
appended to benchmarks/results/attention-*.csv. Exits with 1 if a limit is missed, and says which.
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
    parser.add_argument("--kernel", action="store_true", help="only one layer")
    parser.add_argument("--model", action="store_true", help="only decode steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536], help="for one layer"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[256, 512, 1024, 4096], help="for decode steps"
    )
    parser.add_argument("--rounds", type=int, default=9, help="calls of each kernel")
    parser.add_argument("--steps", type=int, default=24, help="decode steps of each cache")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where CSV files go")
    args = parser.parse_args()
    if run(args):
        sys.exit(1)


def run(args: argparse.Namespace) -> int:
    """Measures, prints, saves; the number of limits missed."""
    # Here, so that --help answers at once.
    from attending import kernel
    from caches import report, setting, steps

    limits: list[report.Limit] = []
    if args.kernel or not args.model:
        rows, new = kernel.run(args.tokens, args.threads, args.rounds, notify)
        report.show("One layer, 32 query heads on 8 KV heads of 128, one query token", rows)
        report.save(args.results / "attention-kernel.csv", rows)
        limits += new
        rows, new = kernel.run_groups(args.threads, args.rounds)
        report.show("4,096 tokens, 8 KV heads of 128: query heads that share one", rows)
        report.save(args.results / "attention-groups.csv", rows)
        limits += new
    if args.model or not args.kernel:
        prepared = setting.prepare("smollm2", args.threads)
        rows, new = steps.run(prepared, args.contexts, args.steps, notify)
        report.show("Decode step of SmolLM2", rows)
        report.save(args.results / "attention-steps.csv", rows)
        limits += new
    return report.judge(limits)


def notify(message: str) -> None:
    """Says what is going on."""
    print(f"{time.strftime('%T')} {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
