"""Figures drawn in a second process, while this one continues."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.figures.slices import Drawing
from profiler.storage.child import start_child

if TYPE_CHECKING:
    from experiments.figures.drawing_process import Drawn

_MODULE = "experiments.figures.drawing_process"


class Artist:
    """A process that draws a run's figures. It imports its libraries at once.

    It is gone when the context ends.
    """

    def __init__(self) -> None:
        self.process, self._channel = start_child(_MODULE)

    def __enter__(self) -> Artist:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()

    def begin(self, drawing: Drawing, folder: Path) -> None:
        """Start drawing into ``folder``."""
        self._work = drawing, folder
        with suppress(OSError):  # it was killed, which finish() finds out
            self._channel.send(self._work)

    def finish(self, drawn: Drawn) -> None:
        """Wait until all is drawn. If the process was killed, draw the rest here.

        Raises what drawing raised.
        """
        while (said := self._said()) is not None:
            if isinstance(said, Exception):
                raise said
            drawn(*said)

    def _said(self) -> tuple[int, int] | Exception | None:
        try:
            said: tuple[int, int] | Exception | None = self._channel.recv()
        except (EOFError, OSError):
            from experiments.figures.drawing_process import draw

            draw(*self._work, lambda done, total: None)
            return None
        return said
