"""What people see while a model is being read: bar, tokens per second, time left. On stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

messages = Console(stderr=True, highlight=False)
"""Everything that is no result goes here, so that stdout can be piped."""


def notify(message: str) -> None:
    """One line for people, on stderr."""
    messages.print(message, markup=False, soft_wrap=True)


@contextmanager
def token_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar of `total` tokens; the function it gives moves it on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        _Rate(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
    )
    # A pass over a long chunk can take minutes: the speed is that of the whole run.
    with Progress(*columns, console=messages, speed_estimate_period=24 * 3600) as progress:
        task = progress.add_task(description, total=total)
        yield lambda tokens: progress.advance(task, tokens)


class _Rate(TextColumn):
    """Tokens per second."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        """``412 tok/s``."""
        if not task.completed or not task.elapsed:
            return Text("… tok/s")
        return Text(f"{task.completed / task.elapsed:,.0f} tok/s")
