"""A worker of a sweep to which something happens, named by ``ODD_WORKER`` as ``WHAT:MARK``.

``kill`` and ``stop``: in the middle of writing its first answer. The first worker that creates the
file ``MARK`` is the odd one, and writes its process id there; all others are as they should be.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path

from sarathi_sim.profiler.storage.child import main

VARIABLE = "ODD_WORKER"


def chosen(mark: Path) -> bool:
    """Whether this is the first process that asks."""
    scratch = mark.with_name(f"{mark.name}.{os.getpid()}")
    scratch.write_text(str(os.getpid()))
    try:
        os.link(scratch, mark)
    except FileExistsError:
        return False
    return True


def half_an_answer(number: signal.Signals) -> None:
    """Have this process write half of its next answer, and then get the signal."""

    def send(self: Connection, content: bytes | memoryview) -> None:
        if len(content) < 100:  # only that it is ready
            return whole(self, content)
        data = struct.pack("!i", len(content)) + bytes(content[: len(content) // 2])
        while data:
            data = data[os.write(self.fileno(), data) :]
        os.kill(os.getpid(), number)
        return None

    whole = Connection._send_bytes  # type: ignore[attr-defined]
    Connection._send_bytes = send  # type: ignore[attr-defined]


def never_ends(told: object) -> None:
    time.sleep(1000)


if __name__ == "__main__":
    what, _, mark = os.environ[VARIABLE].partition(":")
    if chosen(Path(mark)):
        half_an_answer({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
    main()
