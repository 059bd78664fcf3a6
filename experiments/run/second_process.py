"""A process that works for this one, while this one continues.

``python -m sarathi_sim.experiments.run.second_process PARENT`` imports the libraries of its work at
once. It then calls what its parent sends, in that order, and answers with progress and results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from sarathi_sim.profiler.storage.child import channel_to_parent, inbox, start_child
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.simulation import SimulationError

T = TypeVar("T")
Told = Callable[[int, int], object]
"""Called with how much of a work is done, and how much there is to do."""


class Errand(Generic[T]):
    """A call of ``function(*arguments, told)`` that another process makes."""

    def __init__(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self.call = function, arguments
        self.answers: deque[Any] = deque()


class SecondProcess:
    """Calls functions for this process, in the order given. It is gone when the context ends."""

    def __init__(self) -> None:
        self.process, self._channel = start_child("sarathi_sim.experiments.run.second_process")
        self._left: deque[Errand[Any]] = deque()

    def __enter__(self) -> SecondProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()

    def begin(self, function: Callable[..., T], *arguments: Any) -> Errand[T]:
        """Have ``function(*arguments, told)`` called; ``told`` takes its progress."""
        work = Errand(function, arguments)
        self._left.append(work)
        with suppress(OSError):  # it was killed, which `result` finds out
            self._channel.send(work.call)
        return work

    def result(self, work: Errand[T], told: Told = lambda done, total: None) -> T:
        """Wait for the value of a work. If the process was killed, it is computed here.

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
        """Take one answer, of the first work that is not done; or all of them from here."""
        try:
            answer = self._channel.recv()
        except (EOFError, OSError):
            while self._left:
                work = self._left.popleft()
                work.answers.append(_answer(*work.call, lambda done, total: None))
            return
        self._left[0].answers.append(answer)
        if answer[0] != "told":
            self._left.popleft()


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...], told: Told) -> Any:
    try:
        return "returned", function(*arguments, told)
    except (OSError, UserError, SimulationError, MemoryError) as error:  # the user's to mend
        return "raised", error
    except Exception as error:
        return "raised", RuntimeError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Call what the parent sends, until it ends."""
    channel: Connection = channel_to_parent()
    calls = inbox(channel)
    import sarathi_sim.experiments.figures.drawn
    import sarathi_sim.experiments.run.uncertainty  # noqa: F401

    def told(done: int, total: int) -> None:
        channel.send(("told", (done, total)))

    with suppress(OSError):  # the parent is gone
        while True:
            function, arguments = calls.get()
            channel.send(_answer(function, arguments, told))


if __name__ == "__main__":
    main()
