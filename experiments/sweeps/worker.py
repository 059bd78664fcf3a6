"""A worker process of a local sweep: ``python -m experiments.sweeps.worker PARENT``.

Standard input is a socket that it shares only with its parent. Bundles of jobs come in through it,
and results go back. The worker ends when its parent ends in any way.
"""

from __future__ import annotations

import gc
import os
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue

from profiler.storage.child import channel_to_parent

READY = "ready"
"""What a worker sends first, once everything is imported."""


def main() -> None:
    """Answer bundles until the parent ends."""
    channel = channel_to_parent()
    from experiments.sweeps.jobs import Job, work

    gc.freeze()  # what was imported stays: a run's collections need not go through it
    bundles: SimpleQueue[list[Job]] = SimpleQueue()
    with suppress(OSError):  # the parent is gone
        channel.send(READY)
        # It also is the watch on the parent: while the main thread is at work, this one waits for
        # the next bundle, or for the end of the channel.
        threading.Thread(target=_take_in, args=(channel, bundles), daemon=True).start()
        while True:
            channel.send(work(bundles.get()))


def _take_in(channel: Connection, bundles: SimpleQueue[list[object]]) -> None:
    try:
        while True:
            bundles.put(channel.recv())
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:  # what was sent cannot be read: the parent sees that this process ends
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
