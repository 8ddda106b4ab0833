"""llm-compressor's KV-only FP8 recipe on given tokens; runs in the peer's own environment.

    python peer_llmcompressor.py MODEL TOKENS.json OUTPUT

Prints one JSON line: seconds for calibration and saving, after loading, and megabytes written.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPE = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      kv_cache_scheme: {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}
"""


def main() -> None:
    """Runs the recipe."""
    directory, tokens, output = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    blocks = json.loads(Path(tokens).read_text())
    data = Dataset.from_dict(
        {"input_ids": blocks, "attention_mask": [[1] * len(b) for b in blocks]}
    )
    started = time.perf_counter()
    oneshot(
        model=model,
        processor=tokenizer,
        dataset=data,
        recipe=RECIPE,
        max_seq_length=max(map(len, blocks)),
        num_calibration_samples=len(blocks),
    )
    model.save_pretrained(output)
    seconds = time.perf_counter() - started
    written = sum(file.stat().st_size for file in Path(output).rglob("*") if file.is_file()) / 1e6
    print(json.dumps({"seconds": seconds, "written_mb": written}))


if __name__ == "__main__":
    main()
