"""Request traces in CSV files, in their published forms."""

from __future__ import annotations

import csv
from pathlib import Path
from sys import getsizeof

import numpy as np
import pandas as pd

from simulator.load.mooncake import read_mooncake
from simulator.load.trace_file import (
    MOST_SECONDS,
    MOST_TOKENS,
    SAMPLED_ROWS,
    Trace,
    check_memory,
    lines,
    opened,
)
from simulator.load.workload import WorkloadError
from simulator.loop.records import Floats, Ints

PROMPT = ("prompt_tokens", "prompt", "ContextTokens", "num_prefill_tokens", "input_toks")
OUTPUT = ("output_tokens", "decode", "GeneratedTokens", "num_decode_tokens", "output_toks")
USER = "user"
# Column -> seconds per unit; None is a date and time.
ARRIVAL: dict[str, float | None] = {
    "arrival_s": 1.0,
    "arrival": 1.0,
    "arrived_at": 1.0,
    "arrival_time_ns": 1e-9,
    "TIMESTAMP": None,
}


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """The first ``limit`` requests of a trace (all: None), in order of arrival.

    A file that is called ``*.jsonl`` is in Mooncake's form (``mooncake.py``), any other is CSV.
    Of the latter it knows the columns of the Azure LLM inference traces, of the processed traces
    of Vidur and of LLMServingSim, and the plain ``arrival,prompt,decode``; beside any of them,
    ``user``. Raises WorkloadError, naming file and row (the header is row 1), for a missing
    column, a truncated row, a value that is not a number or that is out of range, and for
    arrivals that are not in order.
    """
    if path.suffix == ".jsonl":
        return read_mooncake(path, limit)
    rows = _rows(path, limit)
    header = rows[0]
    prompt = _tokens(path, header, rows, PROMPT)
    output = _tokens(path, header, rows, OUTPUT)
    arrival_s = _arrivals(path, header, rows)
    user = _numbers(path, header, rows, USER, least=0) if USER in header else None
    return Trace(prompt, output, arrival_s, user)


def _rows(path: Path, limit: int | None) -> list[list[str]]:
    """The header and the rows, each as long as the header."""
    rows: list[list[str]] = []
    try:
        with opened(path) as file:
            for row in csv.reader(lines(file, path), strict=True):
                if rows and len(row) != len(rows[0]):
                    problem = "is empty" if not row else f"has {len(row)} of {len(rows[0])} fields"
                    raise WorkloadError(f"{path}: row {len(rows) + 1} {problem}")
                "".join(row).encode()  # bytes that are not UTF-8 fail here, where the row is known
                rows.append(row)
                if len(rows) == SAMPLED_ROWS:
                    read = sum(len(text) + 1 for row in rows for text in row)
                    size = sum(getsizeof(row) + sum(map(getsizeof, row)) for row in rows)
                    check_memory(path, len(rows), read, size, limit)
                if limit is not None and len(rows) > limit:
                    break
    except UnicodeEncodeError:
        raise WorkloadError(
            f"{path}: row {len(rows) + 1} is not readable CSV: it is not UTF-8 text"
        ) from None
    except csv.Error as error:
        raise WorkloadError(f"{path}: row {len(rows) + 1} is not readable CSV: {error}") from None
    if len(rows) < 2:
        raise WorkloadError(f"{path}: expected a header and at least one request")
    return rows


def _column(path: Path, header: list[str], names: tuple[str, ...]) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    raise WorkloadError(
        f"{path}: none of the columns {', '.join(names)}; the file has "
        f"{', '.join(' '.join(name.split()) for name in header)}"
    )


def _tokens(path: Path, header: list[str], rows: list[list[str]], names: tuple[str, ...]) -> Ints:
    return _numbers(path, header, rows, header[_column(path, header, names)], least=1)


def _numbers(
    path: Path, header: list[str], rows: list[list[str]], name: str, *, least: int
) -> Ints:
    column = header.index(name)
    values = np.empty(len(rows) - 1, np.int64)
    for i, row in enumerate(rows[1:]):
        text = row[column].strip()
        # isdecimal alone accepts digits of other scripts; int() reads those too, so that is fine.
        digits = text.lstrip("0")  # any number of them; int() refuses very long texts
        number = int(digits or 0) if text.isdecimal() and len(digits) <= 12 else -1
        if not least <= number <= MOST_TOKENS:
            raise WorkloadError(
                f"{path}: row {i + 2}: {name} is {text[:40]!r}: "
                f"must be a whole number from {least} to {MOST_TOKENS}"
            )
        values[i] = number
    return values


def _arrivals(path: Path, header: list[str], rows: list[list[str]]) -> Floats | None:
    name = next((known for known in ARRIVAL if known in header), None)
    if name is None:
        return None
    unit_s, column = ARRIVAL[name], header.index(name)
    texts = pd.Series([row[column].strip() for row in rows[1:]], dtype=str)
    if unit_s is None:
        times = pd.to_datetime(texts, errors="coerce", format="ISO8601", utc=True)
        wanted = "a date and time"
        missing = times.isna().to_numpy()
        seconds = np.asarray((times - times.min()).dt.total_seconds(), np.float64)
    else:
        seconds = np.asarray(pd.to_numeric(texts, errors="coerce"), np.float64) * unit_s
        wanted = f"a number of at most {MOST_SECONDS:g} s"
        missing = ~(np.abs(seconds) <= MOST_SECONDS)
    if missing.any():
        row = int(missing.argmax())
        raise WorkloadError(f"{path}: row {row + 2}: {name} is {texts[row]!r}: must be {wanted}")
    falls = np.diff(seconds) < 0
    if falls.any():
        row = int(falls.argmax()) + 3
        raise WorkloadError(f"{path}: row {row}: {name} is earlier than in the row before")
    return np.asarray(seconds - seconds[0])
