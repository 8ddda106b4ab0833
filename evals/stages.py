"""What people see while an evaluation runs: a bar for each part, with the time left. On stderr."""

from __future__ import annotations

from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvquant.progress import messages


class Stages:
    """Bars, all of them to be seen from the beginning."""

    def __init__(self) -> None:
        """No bar yet."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[now]}"),
        )
        # A pass over a long prompt can take minutes: the speed is that of the whole run.
        self._progress = Progress(*columns, console=messages, speed_estimate_period=24 * 3600)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Stages:
        """Shows them."""
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the last state on the screen."""
        self._progress.stop()

    def add(self, name: str, total: int) -> None:
        """A bar that waits."""
        self._tasks[name] = self._progress.add_task(name, start=False, total=total, now="")

    def begin(self, name: str) -> bool:
        """Starts the clock of a bar; says whether it has not run before."""
        task = self._progress.tasks[self._tasks[name]]
        if task.started:
            return False
        self._progress.start_task(task.id)
        return True

    def advance(self, name: str, amount: int) -> None:
        """Moves a bar on."""
        self.begin(name)
        self._progress.advance(self._tasks[name], amount)

    def step(self, name: str, now: str) -> None:
        """Says what a part is doing now; all that it did before is done."""
        task = self._tasks[name]
        if self.begin(name):
            self._progress.update(task, now=now)
        else:
            self._progress.update(task, advance=1, now=now)

    def reach(self, name: str, amount: int) -> None:
        """Sets a bar to what is known to be done."""
        self.begin(name)
        self._progress.update(self._tasks[name], completed=amount)

    def finish(self, name: str) -> None:
        """All done."""
        self.begin(name)
        total = self._progress.tasks[self._tasks[name]].total
        self._progress.update(self._tasks[name], completed=total, now="")

    def done(self, name: str) -> float:
        """How far a bar is."""
        return self._progress.tasks[self._tasks[name]].completed
