"""The points measured so far, on disk: a killed profiler loses none that it finished."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.grid import Key


@dataclass(frozen=True)
class Timing:
    """One measured point.

    ``time_us`` is the median, ``spread`` the interquartile range over it, ``samples`` how many were
    timed, ``preempted`` in how many of them another process had the core for a while, ``seconds``
    what measuring took in all. ``time_us`` is None for a point that was skipped, and ``note`` then
    says why.
    """

    time_us: float | None
    spread: float = 0.0
    samples: int = 0
    preempted: int = 0
    seconds: float = 0.0
    note: str = ""


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits of everything that a point's time depends on."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Journal:
    """JSON lines, one a point, flushed to the disk before the next point is begun.

    ``folder`` is made; the file in it is named after :func:`settings_hash`, so points measured with
    other settings are never mixed in. A last line cut short by a crash is dropped.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{settings_hash(settings)}.jsonl"
        self._points: dict[tuple[str, Key], Timing] = {}
        good = self._read()
        self._file = self.path.open("ab")
        self._file.truncate(good)

    def _read(self) -> int:
        """Fill the points; returns the length in bytes of the whole lines."""
        if not self.path.is_file():
            return 0
        good = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                entry = json.loads(line)
                key = (str(entry.pop("op")), tuple(int(size) for size in entry.pop("key")))
                timing = Timing(**entry)
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            self._points[key] = timing
            good += len(line)
        return good

    def __len__(self) -> int:
        return len(self._points)

    def get(self, op: str, key: Key) -> Timing | None:
        """A finished point, or None."""
        return self._points.get((op, key))

    def points(self, op: str) -> dict[Key, Timing]:
        """The finished points of one op, the skipped ones included, in the order of measuring."""
        return {key: timing for (name, key), timing in self._points.items() if name == op}

    def add(self, op: str, key: Key, timing: Timing) -> None:
        """Book a finished point; it is on the disk when this returns."""
        line = json.dumps({"op": op, "key": list(key), **vars(timing)}) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._points[op, key] = timing

    def close(self) -> None:
        """Close the file; the points stay."""
        self._file.close()

    def remove(self) -> None:
        """Delete the file, and its folder if no other settings' points are in it."""
        self.close()
        self.path.unlink()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
