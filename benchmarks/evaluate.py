"""What an evaluation costs beside the forward passes it needs anyway.

    python benchmarks/evaluate.py            8 documents of 2,048 tokens, int8 and int4:
                                             some 10 minutes on two cores
    python benchmarks/evaluate.py --documents 2

Per document, the same passes with and without scores are timed one after the other, in one process
on SmolLM2 in float32. Memory is the peak of the process above what it holds with the model loaded
and one document read, against what one context's caches and a block of logits for each arm take.
Rows are appended to benchmarks/results/evaluate.csv. Exits with 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SCHEMES = ("int8", "int4")
PREFILL, BLOCK = 256, 64
TIME_LIMIT = 1.2


def main() -> None:
    """Measures, prints, saves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the CSV file goes")
    if run(parser.parse_args()):
        sys.exit(1)


def run(args: argparse.Namespace) -> int:
    """The number of limits missed."""
    # Here, so that --help answers at once.
    from caches import report
    from caches.setting import prepare
    from calibrate import peak_mb

    from evals.reading import Reader
    from evals.windows import spans

    setting = prepare(args.model, args.threads)
    reader = Reader(setting.model)
    documents = setting.tokens[: args.documents * args.tokens].view(args.documents, args.tokens)
    calls = spans(args.tokens, PREFILL, BLOCK)
    plain(reader, documents[0], calls)
    scored(reader, documents[0], calls)  # both once: kernels are compiled, memory is mapped
    seconds = {"plain": 0.0, "scored": 0.0}
    for number, document in enumerate(documents):
        print(f"document {number + 1} of {len(documents)}", file=sys.stderr, flush=True)
        for name, passes in (("plain", plain), ("scored", scored)):
            started = time.perf_counter()
            passes(reader, document, calls)
            seconds[name] += time.perf_counter() - started
    peaks = {
        "plain": peak_mb(lambda: plain(reader, documents[0], calls)),
        "scored": peak_mb(lambda: scored(reader, documents[0], calls)),
    }
    ratio = seconds["scored"] / seconds["plain"]
    # Logits, log-probabilities, their differences: float32 of one block, reference and arm.
    logits = 4 * BLOCK * setting.model.config.vocab_size * (len(SCHEMES) + 1) / 1e6
    added = peaks["scored"] - peaks["plain"]
    rows = [
        {
            "documents": args.documents,
            "tokens": args.tokens,
            "plain, s": f"{seconds['plain']:.1f}",
            "scored, s": f"{seconds['scored']:.1f}",
            "ratio": f"{ratio:.3f}",
            "memory added, MB": f"{added:.0f}",
            "logits of a block for each, MB": f"{logits:.0f}",
        }
    ]
    report.show(f"Perplexity arm with {' and '.join(SCHEMES)}", rows)
    report.save(args.results / "evaluate.csv", rows)
    return report.judge(
        [
            report.Limit("time with scores / without", ratio, TIME_LIMIT),
            report.Limit("memory added / a block of logits for each cache", added / logits, 1.0),
        ]
    )


def caches(reader: Any) -> dict[str, Any]:
    """An empty cache of each scheme."""
    from kvquant import QuantizedCache

    return {name: QuantizedCache.from_model(reader.model, name) for name in SCHEMES}


def plain(reader: Any, document: Any, calls: Any) -> None:
    """The forward passes alone."""
    reference, arms = reader.reference(), caches(reader)
    first, *blocks = calls
    reader.fill(document[None, : first.stop], reference, arms)
    for span in blocks:
        for cache in (reference, *arms.values()):
            reader.read(document[None, span.start : span.stop], cache)


def scored(reader: Any, document: Any, calls: Any) -> None:
    """The same with everything that is measured of them."""
    from evals.perplexity import score_document

    score_document(reader, document.numpy(), calls, reader.reference(), caches(reader))


if __name__ == "__main__":
    main()
