"""Request traces in JSON: one request a line, or the result of vLLM's ``bench serve``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from sys import getsizeof
from typing import Any

from sarathi_sim.profiler.storage.files import LARGEST_DATA
from sarathi_sim.simulator.load.trace_columns import OF_TEXT, TraceTable, find_columns
from sarathi_sim.simulator.load.trace_file import SAMPLED_ROWS, check_memory, lines, opened
from sarathi_sim.simulator.load.workload import WorkloadError

_START = 2**12  # characters that show what a file is
# Of vLLM's results: what the lists mean. Its releases since 2025 record when each request started.
_VLLM = {"prompt": "input_lens", "output": "output_lens", "arrival": "start_times"}


def is_mooncake(path: Path) -> bool:
    """Whether the first line has ``hash_ids``, as Mooncake's traces do; raises nothing of JSON."""
    with opened(path) as file:
        return '"hash_ids"' in next(lines(file, path), "")


def read_json_lines(path: Path, limit: int | None, columns: Mapping[str, str]) -> TraceTable:
    """A table of the first ``limit`` lines (all: None), each an object.

    The first line tells the columns, which every line must have. Raises WorkloadError, naming file
    and line, for what is no such object.
    """
    names: dict[str, str] = {}
    cells: dict[str, list[str]] = {}
    read = size = 0
    with opened(path) as file:
        for number, text in enumerate(lines(file, path), 1):
            if limit is not None and number > limit:
                break
            flat = dict(_flat(_object(text, f"{path}: line {number}")))
            if not names:
                names = find_columns(path, list(flat), columns)
                cells = {meaning: [] for meaning in names}
            for meaning, name in names.items():
                if name not in flat:
                    raise WorkloadError(f"{path}: line {number}: the key {name} is missing")
                cells[meaning].append(_text(flat[name]))
                size += getsizeof(cells[meaning][-1]) + 8
            read += len(text)
            if number == SAMPLED_ROWS:
                check_memory(path, number, read, size, limit)
    if not names:
        raise WorkloadError(f"{path}: expected at least one request")
    return TraceTable(path, names, cells, lambda i: f"line {i + 1}")


def read_vllm_benchmark(path: Path, limit: int | None) -> TraceTable:
    """A table of the first ``limit`` requests of a result that was saved with ``--save-detailed``.

    Raises WorkloadError for a file that is no such result, or has lists of several lengths.
    """
    with opened(path) as file:
        start = file.read(_START)
        if start.lstrip().startswith("[") and '"conversations"' in start:
            raise WorkloadError(f"{path}: {OF_TEXT}")
        text = start + file.read(LARGEST_DATA + 1 - _START)
        if len(text) > LARGEST_DATA:
            raise WorkloadError(f"{path}: larger than {LARGEST_DATA >> 20} MiB")
        result = _object(text, str(path))
    names = {meaning: name for meaning, name in _VLLM.items() if name in result}
    lists = [result[name] for name in names.values()]
    if not {"prompt", "output"} <= names.keys() or not all(isinstance(x, list) for x in lists):
        raise WorkloadError(
            f"{path}: expected a detailed result of vLLM's benchmark, with the lists input_lens "
            "and output_lens"
        )
    if len({len(each) for each in lists}) > 1 or not lists[0]:
        sizes = ", ".join(f"{name} {len(result[name])}" for name in names.values())
        raise WorkloadError(f"{path}: must have as many of each, and one at least: {sizes}")
    cells = {meaning: [_text(v) for v in result[name][:limit]] for meaning, name in names.items()}
    return TraceTable(path, names, cells, lambda i: f"request {i}")


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text.encode(errors="surrogateescape"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one, too
        raise WorkloadError(f"{where} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise WorkloadError(f"{where}: must be a JSON object, not {_text(value)[:40]}")
    return value


def _flat(value: dict[str, Any], prefix: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Keys of inner objects as ``outer.inner``."""
    for key, inner in value.items():
        yield prefix + key, inner
        if isinstance(inner, dict) and depth:
            yield from _flat(inner, f"{prefix}{key}.", depth - 1)


def _text(value: object) -> str:
    """As a cell of a CSV: whole numbers without a point, text without quotes."""
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    return value if isinstance(value, str) else json.dumps(value)
