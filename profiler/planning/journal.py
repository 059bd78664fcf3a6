"""The journal of measured points on disk: a killed profiler loses no finished point."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..storage.folder_lock import FolderBusyError, FolderLock
from ..storage.strict import UserError
from .grid import Key


class ProfileError(UserError):
    """A device or setting that cannot be profiled; the message says why and what to do."""


@dataclass(frozen=True)
class Timing:
    """One measured point.

    ``time_us`` is the median, ``spread`` the interquartile range over it, ``samples`` how many were
    timed, ``preempted`` in how many of them another process had the core for a while, or a GPU
    waited for its host, ``seconds`` what measuring took in all. ``time_us`` is None for a point
    that was skipped or failed, and ``note`` then says why; ``lost`` whether the GPU did no more for
    this process after it. ``kernel`` is what computed attention, where that is known of the point.
    The rest is the GPU's state meanwhile (profiler/shard/timing.py).
    """

    time_us: float | None
    spread: float = 0.0
    samples: int = 0
    preempted: int = 0
    seconds: float = 0.0
    note: str = ""
    lost: bool = False
    kernel: str = ""
    clock_mhz: float = 0.0
    power_w: float = 0.0
    temperature_c: float = 0.0
    throttle: str = ""


def relative_iqr(samples: list[float]) -> float:
    """Interquartile range over the median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits of everything that a point's time depends on."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Journal:
    """JSON lines, one per point, flushed to the disk before the next point begins.

    ``folder`` is made, and held until :meth:`close`; the file in it is named after
    :func:`settings_hash`, so points measured with other settings are never mixed in. A last line
    cut short by a crash is dropped. Raises ProfileError where another process holds the folder, and
    for any other line that is no point.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        try:
            self._lock = FolderLock(folder)
        except FolderBusyError as holder:
            raise ProfileError(
                f"{folder}: {holder} is measuring the same bundle; wait for it or stop it (its "
                "points are kept), or name another --out or --set device_name"
            ) from None
        self.path = folder / f"{settings_hash(settings)}.jsonl"
        self._points: dict[tuple[str, Key], Timing] = {}
        self._file = self.path.open("ab")
        try:
            self._file.truncate(self._read())
        except ProfileError:
            self.close()
            raise

    def _read(self) -> int:
        """Fill the points; returns the length in bytes of the whole lines."""
        content = self.path.read_bytes()
        *lines, cut = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                op, key, timing = _point(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ProfileError(
                    f"{self.path}: row {number} is damaged: {line[:60]!r}; remove this line to "
                    "measure its point again, or the file to measure all points again"
                ) from None
            self._points[op, key] = timing
        return len(content) - len(cut)

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
        """Close the file and release the folder; the points stay."""
        self._file.close()
        self._lock.release()

    def remove(self) -> None:
        """Delete the file, and its folder if no other settings' points are in it."""
        self._file.close()
        self.path.unlink()
        self._lock.remove()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()


def _point(line: bytes) -> tuple[str, Key, Timing]:
    """Op, key and timing of one line. Raises ValueError, KeyError, TypeError or AttributeError."""
    entry = json.loads(line)
    op, key = str(entry.pop("op")), tuple(int(size) for size in entry.pop("key"))
    timing = Timing(**entry)
    if timing.time_us is not None and not 0 < timing.time_us < math.inf:
        raise ValueError("no time")
    if not 0 <= timing.spread < math.inf:
        raise ValueError("no spread")
    return op, key, timing
