"""Processes of ours: each ends with its parent, and has a channel of its own to it; the reports of
progress; their threads, and the memory of this machine.

In the common executors (joblib, loky, ``concurrent.futures``) all workers answer through one pipe,
and the executor keeps its writing end open. If a worker is killed while it answers, the reader
waits for ever. Here only the child holds the other end, so its end closes the channel at any time.

``python -m sarathi_sim.profiler.storage.child PARENT MODULE...`` is a :class:`Worker`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from math import inf
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Literal, TypeVar

from .files import PACKAGE
from .strict import UserError

_OPENMP = "OMP_NUM_THREADS"
_BLAS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def default_to_one_thread(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give this process and its children one thread per library of linear algebra and fits.

    All matrices are small. If another program keeps a processor busy, each call would wait
    milliseconds for its second thread (docs/lab/performance.md).

    ``environment`` is that of a process to be started instead. The user's own variables have
    priority, and ``OMP_NUM_THREADS`` holds for every library. A library reads them when it is
    imported; the limit is also set on libraries that are imported already.
    """
    if environment is os.environ and "numpy" in sys.modules:
        _limit(environment)
    if _OPENMP not in environment:
        for variable in (_OPENMP, *_BLAS):
            environment.setdefault(variable, "1")


def one_thread() -> AbstractContextManager[Any]:
    """As :func:`default_to_one_thread`, within this context, for a foreign process."""
    return _limit(os.environ)


def _limit(environment: Mapping[str, str]) -> AbstractContextManager[Any]:
    """Limit the imported libraries until the returned context ends."""
    if _OPENMP in environment:
        return nullcontext()
    from threadpoolctl import threadpool_limits

    kept = any(variable in environment for variable in _BLAS)
    limited: AbstractContextManager[Any] = threadpool_limits(
        {"openmp": 1} if kept else {"openmp": 1, "blas": 1}
    )
    return limited


_SOURCE = PACKAGE if (PACKAGE / "sarathi_sim").is_dir() else PACKAGE.parent  # a checkout, a wheel

Progress = Callable[[str, int, int], None]
"""Called with the name of the work, the finished amount, and the total."""
Say = Callable[[str], object]
"""Called with a line for the user."""


def silent(*_: object) -> None:
    """Ignore the progress."""


T = TypeVar("T")
Told = Callable[[int, int], object]
"""Called with how much of a work is done, and how much there is to do."""
Outcome = Literal["told", "returned", "raised", "lost", "waiting"]

MODULE = "sarathi_sim.profiler.storage.child"
READY = "ready"
"""A worker's first message, sent when everything is imported."""
STARTS = 3
"""Workers that may die one after the other before they are ready."""
_PR_SET_PDEATHSIG = 1
# glibc's: freed memory is kept for the next arrays. Pages given back and mapped again took a tenth
# of a short run's time.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}


def start_child(
    module: str,
    *arguments: str,
    stdout: IO[bytes] | int = subprocess.DEVNULL,
    stderr: IO[bytes] | None = None,
    environment: Mapping[str, str] = _ALLOCATOR,
    start_new_session: bool = False,
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start ``python -m module PARENT *arguments``, which calls :func:`channel_to_parent` or
    :func:`end_with`; the process and a channel. ``environment`` has further variables. Only the
    child holds the other end, so its end closes the channel at any time. Raises OSError."""
    path = os.pathsep.join(filter(None, (str(_SOURCE), os.environ.get("PYTHONPATH"))))
    variables = dict(os.environ, **environment, PYTHONPATH=path)
    default_to_one_thread(variables)
    channel, theirs = Pipe()
    with theirs, _ctrl_c_blocked():
        process = subprocess.Popen(
            # -P: a user's folder may hold a module with the name of one of ours.
            [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments],
            stdin=theirs.fileno(),
            stdout=stdout,
            stderr=stderr,
            env=variables,
            start_new_session=start_new_session,
        )
    return process, channel


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Have processes started here never see Ctrl-C, which reaches all that belong to a terminal.
    The parent handles it. A blocked signal is inherited, from the start of the child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


# In the child ------------------------------------------------------------------------------------


def end_with(parent: int) -> None:
    """Let Linux end this process as soon as its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        os._exit(0)


def channel_to_parent() -> Connection:
    """The child's end of the channel. The child ends with its parent (:func:`end_with`)."""
    end_with(int(sys.argv[1]))
    return Connection(os.dup(0))


def inbox(channel: Connection, scratch: Path | None = None) -> SimpleQueue[Any]:
    """The parent's messages, received by a thread while this process works. The thread also is the
    watch on the parent: this process ends when the channel does, or when what was sent cannot be
    read. First it removes the folder ``scratch``."""
    sent: SimpleQueue[Any] = SimpleQueue()

    def take_in() -> None:
        code = 0
        try:
            while True:
                sent.put(channel.recv())
        except (EOFError, OSError):
            pass
        except BaseException:  # the parent sees that this process ends
            traceback.print_exc()
            code = 1
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(code)

    threading.Thread(target=take_in, daemon=True).start()
    return sent


def main() -> None:
    """Import modules, then make the calls that the parent sends, until it ends."""
    channel = channel_to_parent()
    for name in sys.argv[2:]:
        import_module(name)
    gc.freeze()  # imported objects stay: a run's collections need not visit them

    def told(done: int, total: int) -> None:
        channel.send(("told", (done, total)))

    with suppress(OSError):  # the parent is gone
        channel.send(READY)
        calls = inbox(channel)
        while True:
            function, arguments = calls.get()
            channel.send(outcome(function, arguments, told))


def outcome(
    function: Callable[..., object], arguments: tuple[Any, ...], told: Told
) -> tuple[Outcome, Any]:
    """The outcome of ``function(*arguments, told)``: its value or its exception."""
    try:
        return "returned", function(*arguments, told)
    except Exception as error:
        return "raised", error


# In the parent -----------------------------------------------------------------------------------


class Worker:
    """A process that makes calls for this one, and the thread that talks with it.

    It imports ``modules`` first. Every call leads to one "returned", "raised" or "lost" in
    ``outcomes``, after any number of "told". If a process stops in the middle of an answer, the
    thread waits, not the caller. ``since`` is when it got its last call, ``ready`` whether it has
    shown that it can work.
    """

    def __init__(
        self, outcomes: SimpleQueue[tuple[Worker, Outcome, Any]], modules: Iterable[str] = ()
    ) -> None:
        self.ready = False
        self.since = time.monotonic()
        self._outcomes = outcomes
        self._calls: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self.process, self._channel = start_child(MODULE, *modules)
        threading.Thread(target=self._talk, daemon=True).start()

    def begin(self, function: Callable[..., object], *arguments: Any) -> None:
        """Queue a call of ``function(*arguments, told)``."""
        self.since = time.monotonic()
        self._calls.put((function, arguments))

    def _talk(self) -> None:
        while call := self._calls.get():
            kind, value = "told", None
            try:
                self.ready = self.ready or self._channel.recv() == READY
                self._channel.send(call)
                while kind == "told":
                    kind, value = self._channel.recv()
                    self._outcomes.put((self, kind, value))
            except Exception:  # after any error there will be no answer
                self._outcomes.put((self, "lost", None))
        self._channel.close()

    def end(self) -> int:
        """Kill the process; returns its exit code."""
        self.process.kill()
        self._calls.put(None)
        return self.process.wait()


class Workers:
    """Up to ``count`` processes that import ``modules``, started when needed."""

    def __init__(self, count: int, *modules: str) -> None:
        self._count, self._modules = count, modules
        self._idle: list[Worker] = []
        self._busy: dict[Worker, Any] = {}
        self._outcomes: SimpleQueue[tuple[Worker, Outcome, Any]] = SimpleQueue()
        self._dead_at_start = 0

    @property
    def processes(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in (*self._busy, *self._idle)]

    def calls(
        self,
        function: Callable[..., object],
        items: Iterable[object],
        ahead: int | None = None,
        look_s: float = inf,
    ) -> Generator[tuple[Outcome, Any, Any], None, None]:
        """Call ``function(item, told)`` for each item, at most ``ahead`` (all workers) at a time.

        Yields ("returned", item, value) as they come, or ("raised", item, error); ("lost", item,
        None) where the worker died; and every ``look_s`` in which nothing has come ("waiting", the
        items under way by worker, the seconds since the last came).
        Raises UserError where workers cannot be started.
        """
        left, at_once = iter(items), min(ahead or self._count, self._count)
        last = time.monotonic()
        while True:
            while len(self._busy) < at_once and (item := next(left, None)) is not None:
                worker = self._idle.pop() if self._idle else Worker(self._outcomes, self._modules)
                self._busy[worker] = item
                worker.begin(function, item)
            if not self._busy:
                return
            try:
                worker, kind, value = self._outcomes.get(timeout=None if look_s == inf else look_s)
            except Empty:
                now = time.monotonic()
                under_way = {
                    f"process {worker.process.pid} for {now - worker.since:.0f} s": item
                    for worker, item in self._busy.items()
                }
                yield "waiting", under_way, now - last
                continue
            if kind == "told" or worker not in self._busy:  # it was ended earlier
                continue
            done = self._busy.pop(worker)
            last = time.monotonic()
            if kind == "lost":
                self._check_start(worker)
            else:
                self._idle.append(worker)
                self._dead_at_start = 0
            yield kind, done, value

    def _check_start(self, worker: Worker) -> None:
        code = worker.end()
        self._dead_at_start = 0 if worker.ready else self._dead_at_start + 1
        if self._dead_at_start == STARTS:
            raise UserError(
                f"worker processes cannot be started: {STARTS} in a row ended (the last with code "
                f"{code}) before they could begin"
            )

    def close(self) -> None:
        """End all workers."""
        for worker in (*self._busy, *self._idle):
            worker.end()
        self._busy.clear()
        self._idle.clear()


def mapped(
    function: Callable[[Any], T],
    items: Iterable[object],
    workers: int,
    progress: Callable[[int], object] = lambda done: None,
) -> list[T]:
    """``function(item)`` of every item, in order, on ``workers`` processes. ``progress`` is called
    with the number of finished calls. Raises what the function raises, and UserError where a
    process dies."""
    found: dict[int, T] = {}
    with closing(Workers(workers)) as pool:
        for kind, (place, _), value in pool.calls(partial(_of_pair, function), enumerate(items)):
            if kind != "returned":
                raise value or UserError("a worker process was killed: is there enough memory?")
            found[place] = value
            progress(len(found))
    return [found[place] for place in sorted(found)]


def _of_pair(function: Callable[[Any], T], pair: tuple[int, Any], told: Told) -> T:
    return function(pair[1])


GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_memory() -> tuple[int, int]:
    """(total, free) bytes that this process may have without swapping. These are the machine's
    (free: ``MemAvailable``), or less if a control group or ``ulimit -v`` allows less."""
    import psutil  # a GPU node does not need it

    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in _limits():
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def available_bytes() -> int:
    """Bytes that this process may still allocate without swapping."""
    return host_memory()[1]


def size_text(num_bytes: float) -> str:
    """Bytes for a message: ``12.3 GB``, or ``12 MB`` below a gigabyte."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _limits() -> Iterator[tuple[int, int]]:
    """Each limit on this process, and the used part of it: ulimit's, and those of its control
    groups (versions 1 and 2) and of all groups above."""
    import psutil

    if hasattr(psutil, "RLIMIT_AS"):  # Linux only
        process = psutil.Process()
        soft = process.rlimit(psutil.RLIMIT_AS)[0]
        if soft != psutil.RLIM_INFINITY:
            yield soft, process.memory_info().vms
    lines: list[str] = []
    with suppress(OSError):
        lines = MEMBERSHIP.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, limit, usage, cache = GROUPS, "memory.max", "memory.current", "inactive_file"
        if controllers:
            root, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):  # within a container its own group is the root
            with suppress(OSError, ValueError):  # "max": no limit
                most = int((folder / limit).read_text())
                taken = int((folder / usage).read_text()) - _field(folder / "memory.stat", cache)
                yield most, max(0, taken)
            if folder == root:
                break


def _field(path: Path, name: str) -> int:
    """A number of a ``name value`` file; 0 without. File cache counts as used, but can be
    dropped."""
    rows = (line.split() for line in path.read_text().splitlines())
    return next((int(row[1]) for row in rows if row[0] == name), 0)


if __name__ == "__main__":
    main()
