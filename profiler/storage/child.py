"""A process of ours that ends with its parent, and a channel between the two."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import Any

from sarathi_sim.profiler.storage.paths import PACKAGE
from sarathi_sim.profiler.storage.threads import default_to_one_thread

_PR_SET_PDEATHSIG = 1
# glibc's: freed memory is kept for the next arrays. Pages given back and mapped again took a tenth
# of a short run's time.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}


def start_child(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start ``python -m module``, which calls :func:`channel_to_parent`; the process and a channel.

    Only the child holds the other end, so its end closes the channel at any time.
    Raises OSError.
    """
    channel, theirs = Pipe()
    environment = _ALLOCATOR | environment_of_child()
    with theirs, _ctrl_c_blocked():
        process = subprocess.Popen(
            # -P: a user's folder may hold a module with the name of one of ours.
            [sys.executable, "-P", "-m", module, str(os.getpid())],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env=environment,
        )
    return process, channel


def environment_of_child() -> dict[str, str]:
    """The environment of a Python process that finds our modules where this process did."""
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    environment = dict(os.environ, PYTHONPATH=path)
    default_to_one_thread(environment)
    return environment


def end_with(parent: int) -> None:
    """From now on Linux ends this process at once when its parent, that process, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        os._exit(0)


def channel_to_parent() -> Connection:
    """The child's end of the channel. The child ends with its parent (:func:`end_with`)."""
    end_with(int(sys.argv[1]))
    return Connection(os.dup(0))


def inbox(channel: Connection) -> SimpleQueue[Any]:
    """What the parent sends, taken in by a thread while this process works or imports.

    The thread also is the watch on the parent: this process ends when the channel does, or when
    what was sent cannot be read.
    """
    sent: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_take_in, args=(channel, sent), daemon=True).start()
    return sent


def _take_in(channel: Connection, sent: SimpleQueue[Any]) -> None:
    try:
        while True:
            sent.put(channel.recv())
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:  # the parent sees that this process ends
        traceback.print_exc()
        os._exit(1)


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Have processes started here never see Ctrl-C, which reaches all that belong to a terminal.

    The parent handles it. A blocked signal is inherited, from the start of the child.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
