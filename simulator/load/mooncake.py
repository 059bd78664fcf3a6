"""Request traces in the form that Mooncake published (Qin et al., FAST 2025): JSON Lines.

A line is ``{"timestamp": 3052, "input_length": 2287, "output_length": 316, "hash_ids": [0, 42, 43,
44, 45]}``: arrival in milliseconds, prompt and output tokens, and a number for every 512 tokens of
the prompt. Prompts whose ``hash_ids`` begin alike begin with the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from sys import getsizeof
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sarathi_sim.policies.request import Prefix
from sarathi_sim.profiler.storage.strict import STRICT, mistakes
from sarathi_sim.simulator.load.trace_file import (
    MOST_SECONDS,
    MOST_TOKENS,
    SAMPLED_ROWS,
    Trace,
    check_memory,
    lines,
    opened,
)
from sarathi_sim.simulator.load.workload import WorkloadError

BLOCK_TOKENS = 512

_MOST_MS = 1000 * MOST_SECONDS
_LINE_BYTES, _BLOCK_BYTES = 240, 250
"""A line without its blocks while it is read; a block of which a prompt is the first to have it."""


class _TracedRequest(BaseModel):
    """One request. Other keys, such as a session's number, are left unread."""

    model_config = ConfigDict(**STRICT | ConfigDict(extra="ignore"))

    timestamp: Annotated[float, Field(ge=-_MOST_MS, le=_MOST_MS)]
    input_length: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    output_length: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    hash_ids: list[int]


class _Tree:
    """Prompts by their blocks: equal beginnings share the path from the root."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def prefix(self, hash_ids: list[int], tokens: int) -> Prefix:
        """What a prompt of ``tokens`` tokens shares with those that begin with the same blocks.

        A block is named by its node, and so by all blocks before it.
        """
        node, found = -1, []
        for end, block in enumerate(hash_ids, 1):
            new = (len(self._nodes), end * BLOCK_TOKENS)
            name = self._nodes.setdefault((node, block), new)
            node = name[0]
            found.append(name if name[1] <= tokens else (node, tokens))
        return tuple(found)


def read_mooncake(path: Path, limit: int | None = None) -> Trace:
    """The first ``limit`` requests of a file (all: None), in order of arrival.

    Raises WorkloadError, naming file and line, for a line that is not such an object, for numbers
    out of range, and for more or fewer ``hash_ids`` than the prompt has blocks (of the last one, if
    it is not full, there may be none).
    """
    rows: list[_Row] = []
    tree, read = _Tree(), 0
    with opened(path) as file:
        for number, text in enumerate(lines(file, path), 1):
            if limit is not None and number > limit:
                break
            line = _parsed(text, f"{path}: line {number}")
            prefix = tree.prefix(line.hash_ids, line.input_length)
            rows.append((line.timestamp, line.input_length, line.output_length, prefix))
            read += len(text)
            if number == SAMPLED_ROWS:
                size = number * _LINE_BYTES + len(tree) * _BLOCK_BYTES
                size += sum(getsizeof(row[3]) for row in rows)
                check_memory(path, number, read, size, limit)
    if not rows:
        raise WorkloadError(f"{path}: expected at least one request")
    rows.sort(key=lambda row: row[0])
    arrival_ms = np.array([row[0] for row in rows], np.float64)
    prompt, output = (np.array([row[i] for row in rows], np.int64) for i in (1, 2))
    return Trace(
        prompt, output, (arrival_ms - arrival_ms[0]) / 1000, prefix=[row[3] for row in rows]
    )


_Row = tuple[float, int, int, Prefix]


def _parsed(text: str, where: str) -> _TracedRequest:
    """The line, checked. Raises WorkloadError, one line, that begins with ``where``."""
    try:
        line = _TracedRequest.model_validate_json(text.rstrip().encode(errors="surrogateescape"))
    except ValidationError as error:
        first = mistakes(error, _TracedRequest, {}, lambda key: _at(where, key))[0]
        raise WorkloadError(first.replace(" at line 1 column ", " at column ")) from None
    blocks, whole = len(line.hash_ids), line.input_length // BLOCK_TOKENS
    most = -(-line.input_length // BLOCK_TOKENS)
    if not whole <= blocks <= most:
        allowed = f"{most}" if whole == most else f"{whole} or {most}"
        raise WorkloadError(
            f"{where}: hash_ids has {blocks} blocks: must be {allowed}, one for every "
            f"{BLOCK_TOKENS} tokens of input_length {line.input_length}"
        )
    return line


def _at(where: str, key: tuple[str, ...]) -> str:
    return f"{where}: {'.'.join(key)}" if key else where
