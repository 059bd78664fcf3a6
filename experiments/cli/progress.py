"""The progress of a command while it lasts. Needs nothing of the simulator."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """Shows the current step and its expected time, after the first second.

    Use as a context manager, and call it with the step, its progress and its length.
    """

    def __init__(self, console: Console, enabled: bool) -> None:
        # A log file needs no escape sequences.
        self._enabled = enabled and console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._began = time.monotonic()
        self._shown = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._enabled:
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done)
        if not self._shown and time.monotonic() - self._began > 1:
            self._shown = True
            self._progress.start()
