"""The content of a request trace, and the reader of its file's lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from policies.request import Prefix
from simulator.load.memory import available_bytes, size_text
from simulator.load.workload import WorkloadError
from simulator.loop.records import Floats, Ints

MOST_TOKENS = 2**24
MOST_SECONDS = 1e12  # far beyond any clock; differences of two stay exact enough
SAMPLED_ROWS = 10_000  # tell how large the rest will be
_LONGEST_LINE = 2**20


@dataclass(frozen=True)
class Trace:
    """Prompt and output tokens, arrivals in seconds after the first, users by number, and what
    prompts share with others (None: not recorded)."""

    prompt: Ints
    output: Ints
    arrival_s: Floats | None
    user: Ints | None = None
    prefix: list[Prefix] | None = None


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The file as text; bytes that are not UTF-8 become surrogates. Raises WorkloadError."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise WorkloadError(f"{path}: is a device or a pipe, not a file")
        with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
            yield file
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from None


def lines(file: TextIO, path: Path) -> Iterator[str]:
    """The file's lines; the read of a line that is too long stops early."""
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise WorkloadError(f"{path}: line {number} is longer than {_LONGEST_LINE} characters")
        yield line


def check_memory(path: Path, rows: int, read: int, num_bytes: int, limit: int | None) -> None:
    """Raises WorkloadError where ``limit`` rows (None: all) of the file need too much memory.

    The first ``rows`` of them, ``read`` characters, take ``num_bytes``.
    """
    count = path.stat().st_size / read * rows
    if limit is not None:
        count = min(count, limit + 1)
    needed, free = count * num_bytes / rows, available_bytes()
    if needed > free:
        raise WorkloadError(
            f"{path}: about {count:.0f} rows would take {size_text(needed)} of memory, but only "
            f"{size_text(free)} are free: set workload.requests to read fewer"
        )
