"""Request traces from files: CSV, lines of JSON, Mooncake's form, and vLLM's benchmark results."""

from __future__ import annotations

import csv
from pathlib import Path
from sys import getsizeof

from sarathi_sim.simulator.load.mooncake import read_mooncake
from sarathi_sim.simulator.load.trace_columns import Reading, TraceTable, find_columns
from sarathi_sim.simulator.load.trace_file import (
    SAMPLED_ROWS,
    Trace,
    check_memory,
    form,
    lines,
    opened,
)
from sarathi_sim.simulator.load.trace_json import is_mooncake, read_json_lines, read_vllm_benchmark
from sarathi_sim.simulator.load.workload import WorkloadError

_PLAIN = Reading()


def read_trace(path: Path, limit: int | None = None, reading: Reading = _PLAIN) -> Trace:
    """The first ``limit`` requests of a trace's file (all: None), in order of arrival.

    The file's name says what it is: ``*.jsonl`` holds a request a line, in Mooncake's form
    (``mooncake.py``) where lines have ``hash_ids``; ``*.json`` is a result of vLLM's
    ``bench serve``; any other is CSV. Each may be gzipped, with ``.gz`` at the end. Columns go by
    the names in :data:`~sarathi_sim.simulator.load.trace_columns.NAMES`, or by those that
    ``reading`` gives. Raises WorkloadError, naming file and row (the header of a CSV is row 1), for
    a missing column, a truncated row, and a value that is not a number or is out of range.
    """
    if form(path) == ".json":
        return read_vllm_benchmark(path, limit).trace(reading)
    if form(path) == ".jsonl":
        if not reading.columns and is_mooncake(path):
            return read_mooncake(path, limit)
        return read_json_lines(path, limit, reading.columns).trace(reading)
    header, *rows = _rows(path, limit)
    names = find_columns(path, header, reading.columns)
    cells = {}
    for meaning, name in names.items():
        column = header.index(name)
        cells[meaning] = [row[column] for row in rows]
    return TraceTable(path, names, cells, lambda i: f"row {i + 2}").trace(reading)


def _rows(path: Path, limit: int | None) -> list[list[str]]:
    """The header and the rows, each as long as the header."""
    rows: list[list[str]] = []
    try:
        with opened(path) as file:
            ended = False
            for row in csv.reader(lines(file, path), strict=True):
                if rows and not row:  # at the end of a file it is no row
                    ended = True
                    continue
                if ended:
                    raise WorkloadError(f"{path}: row {len(rows) + 1} is empty")
                if rows and len(row) != len(rows[0]):
                    problem = f"has {len(row)} of {len(rows[0])} fields"
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
