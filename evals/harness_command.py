"""`kvquant lm-eval`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from kvquant.errors import InputError

_MODEL = "kvquant"
_WITHOUT_MODEL = ("ls", "validate")
"""Commands of lm-eval that run no model."""


@click.command(
    "lm-eval",
    no_args_is_help=True,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="LM-EVAL-OPTIONS...")
@click.pass_context
def lm_eval(context: click.Context, /, arguments: tuple[str, ...]) -> None:
    """Run tasks of EleutherAI's lm-evaluation-harness on a quantized cache that is really read.

    All options are those of lm_eval's own command line, to which they are handed on with the
    model class that kvquant brings; `kvquant lm-eval run --help` lists them. Scores are read in
    block decode, answers generated with the cache; docs/lm-eval.md says exactly what is scored.
    Scores mean something beside those of the same tasks with scheme=none.

    \b
    --model_args takes, with commas between:
      pretrained=MODEL     directory, hub id, .gguf file, PEFT adapter directory, or smollm2
      base=MODEL           base of an adapter, if not the one it names
      adapter=DIR          adapter on top; several: 'adapter=["one","two"]'
      scheme=NAME          preset, or a cache of Transformers: hf:quanto, hf:hqq, hf:fp8; none
      scales=FILE          calibrated scales, alone or with a preset
      force=true           take scales of another model of the same shape
      block=64             tokens scored in one call; 1 is true decoding
      chunk=TOKENS         cut prefills, each piece reading those before it through the codes
      stride=TOKENS        tokens that each rolling window scores [default: all]
      max_length=TOKENS    what the model sees at once [default: its positions]
      dtype=NAME           auto, float32, bfloat16, float16
    and of lm_eval's own class add_bos_token, prefix_token_id, think_end_token, enable_thinking,
    chat_template_args.

    \b
    Examples:
      kvquant lm-eval --model_args pretrained=ft-model,scales=ft-scales --tasks hellaswag
      kvquant lm-eval --model_args pretrained=ft-model,scheme=none --tasks hellaswag
      kvquant lm-eval --model_args pretrained=base,adapter=my-lora,scheme=int4 \\
          --tasks gsm8k --batch_size 8 --output_path results
      kvquant lm-eval --model_args pretrained=ft-model,scheme=int4,max_length=8192 \\
          --tasks niah_single_1 --metadata '{"max_seq_lengths": [4096, 8192]}'
      kvquant lm-eval ls tasks

    Exit code 2: wrong use or input; everything else is lm_eval's.
    """  # noqa: D301
    _refuse_other_models(arguments)
    with _usage_in_one_line():
        context.exit(_forward(_with_model(arguments)))


def _refuse_other_models(arguments: Sequence[str]) -> None:
    for place, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name not in ("--model", "-M"):
            continue
        asked = value or "".join(arguments[place + 1 : place + 2])
        if asked != _MODEL:
            raise InputError(
                f"--model {asked}: kvquant lm-eval runs its own class, {_MODEL}; others run with "
                "lm_eval itself"
            )


def _with_model(arguments: Sequence[str]) -> list[str]:
    """The last of several is the one that counts, whatever a file of --config says."""
    if arguments[0] in _WITHOUT_MODEL or {"-h", "--help"} & {*arguments}:
        return list(arguments)
    return [*arguments, "--model", _MODEL]


def _forward(arguments: list[str]) -> int:
    """Runs lm_eval's command line, and gives its exit code.

    Raises:
        InputError: There is no lm_eval.
    """
    try:
        import lm_eval.__main__ as harness
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("lm_eval"):
            raise
        raise InputError("the LM Evaluation Harness is missing: pip install lm-eval") from error
    from . import harness as _registers_the_class  # noqa: F401

    before, sys.argv = sys.argv, ["lm-eval", *arguments]
    try:
        harness.cli_evaluate()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return 0


@contextmanager
def _usage_in_one_line() -> Iterator[None]:
    """What lm_eval finds wrong with its options, it raises as ValueError."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        place = str(frames[-1].f_globals.get("__name__"))
        if place.startswith("lm_eval.config") or place == "lm_eval.evaluator":
            raise InputError(f"lm_eval: {error}") from error
        raise
