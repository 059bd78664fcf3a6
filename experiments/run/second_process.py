"""A process that works for this one, while this one continues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from sarathi_sim.profiler.storage.child import Outcome, Told, Worker, outcome, silent

T = TypeVar("T")
_MODULES = ("sarathi_sim.experiments.figures.timeline", "sarathi_sim.experiments.run.uncertainty")
"""Modules that the second process imports at its start, while this process imports its own."""


class Errand(Generic[T]):
    """A call of ``function(*arguments, told)`` that another process makes."""

    def __init__(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self.call = function, arguments
        self.answers: deque[tuple[Outcome, Any]] = deque()


class SecondProcess:
    """Calls functions for this process, in the order given. It ends with the context."""

    def __init__(self) -> None:
        self._outcomes: SimpleQueue[tuple[Worker, Outcome, Any]] = SimpleQueue()
        self._worker = Worker(self._outcomes, _MODULES)
        self.process = self._worker.process
        self._left: deque[Errand[Any]] = deque()

    def __enter__(self) -> SecondProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.end()

    def begin(self, function: Callable[..., T], *arguments: Any) -> Errand[T]:
        """Have ``function(*arguments, told)`` called; ``told`` takes its progress."""
        work = Errand(function, arguments)
        self._left.append(work)
        self._worker.begin(function, *arguments)
        return work

    def result(self, work: Errand[T], told: Told = silent) -> T:
        """Wait for an errand's result. If the process was killed, compute it here.

        ``told`` gets its progress. Raises what the function raised.
        """
        while True:
            while not work.answers:
                self._receive()
            kind, value = work.answers.popleft()
            if kind == "told":
                told(*value)
            elif kind == "raised":
                raise value
            else:
                result: T = value
                return result

    def _receive(self) -> None:
        """Take one message, for the first unfinished errand."""
        _, kind, value = self._outcomes.get()
        if kind == "lost":
            kind, value = outcome(*self._left[0].call, silent)
        self._left[0].answers.append((kind, value))
        if kind != "told":
            self._left.popleft()
