"""The memory that a container leaves to this process: cgroup v2's limits and their use."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def memory_within_limits(
    total: int, free: int, mount: Path = _MOUNT, own: Path = _OWN
) -> tuple[int, int]:
    """(total, free) bytes of the machine, lowered to what the process's cgroups allow.

    A group's limit holds for all below it, so the tightest on the way up counts. Free is the limit
    less ``memory.current``, in which cached files that can be dropped do not count. A group that
    says nothing limits nothing.
    """
    for group in _groups(mount, own):
        limit = _number(group / "memory.max")
        if limit is None:
            continue
        used = (_number(group / "memory.current") or 0) - _droppable(group / "memory.stat")
        total, free = min(total, limit), min(free, max(0, limit - max(0, used)))
    return total, free


def _groups(mount: Path, own: Path) -> list[Path]:
    """The process's own group and those above it, up to the mount."""
    for line in _text(own).splitlines():
        if line.startswith("0::/"):
            path = PurePosixPath(line.removeprefix("0::/"))
            return [mount / part for part in (path, *path.parents)]
    return [mount]


def _droppable(stat: Path) -> int:
    """Bytes of files that were read and are not in active use."""
    for line in _text(stat).splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file" and value.isdecimal():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
