"""The `kvquant` command: finds commands through entry points, reports errors in one line."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from . import __version__
from .errors import KVQuantError

COMMAND_GROUP = "kvquant.commands"
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
EXIT_TERMINATED = 143


class EntryPointGroup(click.Group):
    """A group whose commands are entry points; each module is imported when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in alphabetical order."""
        return sorted(entry.name for entry in _commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Loads one command."""
        for entry in _commands():
            if entry.name == cmd_name:
                command: click.Command = entry.load()
                return command
        return None

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; a closed pipe is not 1, the answer of click and rich.

        That is a verdict of `kvquant drift`.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            ctx.exit(EXIT_PIPE)
        except SystemExit as stop:
            if isinstance(stop.__context__, BrokenPipeError):
                ctx.exit(EXIT_PIPE)
            raise


@click.group(
    cls=EntryPointGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="kvquant")
def kvquant() -> None:
    """Calibrate quantized KV caches on the model you serve, and prove that they work.

    \b
    Start here:
      kvquant check ft-model
      kvquant calibrate --model ft-model --output ft-scales
      kvquant inspect ft-scales --plot ft-scales.png
      kvquant drift base-scales.stats ft-scales.stats
      kvquant plan --model ft-model --gpu h100-80gb --context 32k

    Exit codes: 0 done, 1 a check said no (drift: recalibrate), 2 wrong use or input,
    130 interrupted, 141 nobody reads the output, 143 terminated.
    """


def main() -> None:
    """Console entry point."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has no ± shows ?
    # Unwinds, so that temporary files go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    code = run(sys.argv[1:])
    _drop_unwritten()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs the command line and returns its exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    try:
        code = _invoke(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except KVQuantError as error:
        click.echo(f"error: {error}", err=True)
        return EXIT_USAGE
    except (KeyboardInterrupt, click.Abort):
        goes_on = " (a long run goes on where it was when the same command is given again)"
        is_long = arguments[:1] in (["calibrate"], ["evaluate"])
        click.echo(
            f"interrupted; existing files are as they were{goes_on if is_long else ''}", err=True
        )
        return EXIT_INTERRUPTED
    except RuntimeError as error:
        if "home directory" not in str(error):  # what pathlib raises for ~nobody
            raise
        click.echo(f"error: {error}", err=True)
        return EXIT_USAGE
    except BrokenPipeError:
        return EXIT_PIPE
    except OSError as error:
        where = error.filename or "the output"
        click.echo(f"error: cannot read or write {where}: {error.strerror or error}", err=True)
        return EXIT_USAGE


def _invoke(arguments: list[str]) -> int:
    try:
        code = kvquant.main(args=arguments, prog_name="kvquant", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    return code if isinstance(code, int) else 0


def _drop_unwritten() -> None:
    """Lets the interpreter end without one more try to write what nobody takes."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Ours in one line; those of libraries are for their developers."""
    if category.__module__.startswith(("kvquant", "calib", "evals")):
        click.echo(f"warning: {message}", err=True)


def _commands() -> list[EntryPoint]:
    return list(entry_points(group=COMMAND_GROUP))
