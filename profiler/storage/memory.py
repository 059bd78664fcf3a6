"""The memory of this machine, so that larger needs can be refused before allocation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_memory() -> tuple[int, int]:
    """(total, free) bytes that this process may have without swapping.

    These are the machine's (free: ``MemAvailable``), or less if a control group or ``ulimit -v``
    allows less.
    """
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
    if hasattr(psutil, "RLIMIT_AS"):  # Linux only
        process = psutil.Process()
        soft = process.rlimit(psutil.RLIMIT_AS)[0]
        if soft != psutil.RLIM_INFINITY:
            yield soft, process.memory_info().vms
    lines: list[str] = []
    with contextlib.suppress(OSError):
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
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
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
