"""What processes there are, from Linux's ``/proc``."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that a process started, zombies left out."""
    return [child for child, (parent, state) in _table().items() if parent == pid and state != "Z"]


def state(pid: int) -> str:
    """The letter of a process's state, as in ps; Z where there is none."""
    return _table().get(pid, (0, "Z"))[1]


def gone(pids: Collection[int], seconds: float) -> bool:
    """Whether all of the processes end within that time; a zombie has ended."""
    deadline = time.monotonic() + seconds
    while True:
        if all(state(pid) == "Z" for pid in pids):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def _table() -> dict[int, tuple[int, str]]:
    """Parent and state by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        found[int(path.parent.name)] = (int(parent), state)
    return found
