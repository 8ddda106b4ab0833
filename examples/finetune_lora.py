"""Fine-tunes SmolLM2 on Python source with LoRA: a few minutes on a CPU, no network, no data set.

    python examples/finetune_lora.py --output my-adapter
    kvquant calibrate --model smollm2 --adapter my-adapter --output my-scales

The text is the standard library of the Python that runs this, which the default calibration text
(English prose) is unlike. Same seed, Python, versions and number of threads: same adapter, bit for
bit. It is an ordinary PEFT training loop; take it as a start for your own.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvquant.errors import DataError, KVQuantError, ModelError
from kvquant.models.loading import load, resolve

HELD_OUT_BLOCKS = 4
LEARNING_RATE = 1e-3
console = Console()


def source_files(seed: int) -> list[Path]:
    """Top-level modules of the standard library, in an order that depends on the seed alone."""
    found = Path(sysconfig.get_path("stdlib")).glob("*.py")
    # `_sysconfigdata_*.py` and its like are generated: lists of one machine's paths.
    files = sorted(f for f in found if not f.name.startswith("_"))
    random.Random(seed).shuffle(files)
    return files


def token_blocks(files: Iterator[Path], tokenizer: Any, tokens: int, blocks: int) -> torch.Tensor:
    """Takes as many files as it needs and cuts their tokens into blocks.

    Args:
        files: Where to go on reading; a file taken for one set is never seen by another.
        tokenizer: Of the model.
        tokens: Tokens in a block.
        blocks: Blocks wanted.

    Returns:
        Token ids, ``[blocks, tokens]``. Files follow each other, an end-of-text token between.

    Raises:
        DataError: The files are at an end too early.
    """
    wanted, ids = tokens * blocks, list[int]()
    while len(ids) < wanted:
        file = next(files, None)
        if file is None:
            raise DataError(
                f"the standard library has {len(ids)} tokens left, {blocks} blocks of {tokens} "
                f"need {wanted}: use fewer --steps or --tokens"
            )
        with tokenize.open(file) as source:
            ids += tokenizer(source.read(), add_special_tokens=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids[:wanted]).view(blocks, tokens)


def add_lora(model: Any, name: str) -> PeftModel:
    """Wraps the model with fresh LoRA weights on the attention projections.

    Args:
        model: The base model; its own weights are frozen.
        name: What the adapter shall call its base.
    """
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    # PEFT copies the name from here; by default it is a directory of this machine.
    model.name_or_path = model.config._name_or_path = name
    return get_peft_model(model, config)


@torch.no_grad()
def mean_loss(model: PeftModel, blocks: torch.Tensor) -> float:
    """Mean negative log-likelihood in nats per token over ``[blocks, tokens]``."""
    model.eval()
    losses = [float(model(input_ids=block[None], labels=block[None]).loss) for block in blocks]
    return sum(losses) / len(losses)


def train(model: PeftModel, blocks: torch.Tensor) -> None:
    """One AdamW step per block of ``[blocks, tokens]``."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("training", total=len(blocks), loss="-")
        for block in blocks:
            loss = model(input_ids=block[None], labels=block[None]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.update(task, advance=1, loss=f"{loss.item():.3f}")


def save(model: PeftModel, output: Path) -> None:
    """Writes the adapter in bfloat16, half the size and precise enough to serve."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    # Told that no embedding was trained, PEFT need not look the base up on the network.
    model.save_pretrained(str(output), save_embedding_layers=False)
    size = (output / "adapter_model.safetensors").stat().st_size
    console.print(f"{output}: {size / 1e6:.2f} MB")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="LoRA fine-tune on Python source, on a CPU.")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a Llama-like directory")
    parser.add_argument("--output", type=Path, required=True, help="directory for the adapter")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, a block each")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per block")
    parser.add_argument("--seed", type=int, default=0, help="order of files and initial weights")
    return parser


def finetune(model_name: str, output: Path, steps: int, tokens: int, seed: int) -> None:
    """Load, train, save; prints the loss on files that training never saw, before and after.

    Raises:
        ModelError: The model cannot be loaded, or has fewer positions than a block has tokens.
        DataError: The standard library is too short for so many steps.
    """
    torch.manual_seed(seed)
    loaded = load(resolve(model_name), dtype="float32", device="cpu", notify=console.print)
    positions = loaded.model.config.max_position_embeddings
    if tokens > positions:
        raise ModelError(f"{model_name} has {positions} positions: --tokens {tokens} is too many")
    files = iter(source_files(seed))
    held_out = token_blocks(files, loaded.tokenizer, tokens, HELD_OUT_BLOCKS)
    blocks = token_blocks(files, loaded.tokenizer, tokens, steps)
    model = add_lora(loaded.model, model_name)
    console.print(f"held-out loss before: {mean_loss(model, held_out):.3f} nats per token")
    train(model, blocks)
    console.print(f"held-out loss after:  {mean_loss(model, held_out):.3f} nats per token")
    save(model, output)


def main() -> None:
    """Entry point; a mistake of the user's ends with one line and exit code 2."""
    parser = arguments()
    options = parser.parse_args()
    if options.steps < 1 or options.tokens < 2:
        parser.error("--steps takes 1 or more, --tokens 2 or more")
    try:
        finetune(options.model, options.output, options.steps, options.tokens, options.seed)
    except KVQuantError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
