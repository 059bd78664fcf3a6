"""The free memory of this machine, so that larger needs can be refused before allocation."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Bytes that this process may still allocate without swapping.

    This is the machine's free memory (``MemAvailable``), or less if a control group or ``ulimit
    -v`` allows less.
    """
    left: list[int] = [psutil.virtual_memory().available, *_left_in_groups()]
    limit = getattr(psutil, "RLIMIT_AS", None)  # Linux only
    if limit is not None:
        process = psutil.Process()
        soft = process.rlimit(limit)[0]
        if soft != psutil.RLIM_INFINITY:
            left.append(soft - process.memory_info().vms)
    return max(0, min(left))


def size_text(num_bytes: float) -> str:
    """Bytes for a message: ``12.3 GB``, or ``12 MB`` below a gigabyte."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _left_in_groups() -> list[int]:
    """The free memory in each control group of this process (versions 1 and 2)."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, limit, usage, cache = (
            (
                GROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
            if controllers
            else (GROUPS, "memory.max", "memory.current", "inactive_file")
        )
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):  # within a container its own group is the root
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                most = int((folder / limit).read_text())
                taken = int((folder / usage).read_text()) - _field(folder / "memory.stat", cache)
                left.append(most - taken)
            if folder == root:
                break
    return left


def _field(path: Path, name: str) -> int:
    """A number of a ``name value`` file; 0 without. File cache counts as used, but can be
    dropped."""
    rows = (line.split() for line in path.read_text().splitlines())
    return next((int(row[1]) for row in rows if row[0] == name), 0)
