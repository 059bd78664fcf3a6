"""Request traces, and the reader of their files.

Files have three forms: CSV, an object of JSON a line, and a result of vLLM's ``bench serve``. Each
is a stream of rows by name; :data:`NAMES` says what the names mean.

Lines of JSON with ``hash_ids`` are in the form that Mooncake published (Qin et al., FAST 2025):
``{"timestamp": 3052, "input_length": 2287, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]}``
has the arrival in milliseconds, and a number for every 512 tokens of the prompt. Prompts whose
``hash_ids`` begin alike begin with the same tokens.
"""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from sys import getsizeof
from typing import Any, NamedTuple, TextIO

import numpy as np
import pandas as pd

from sarathi_sim.policies.request import Prefix
from sarathi_sim.profiler.storage.files import LARGEST_DATA, open_file, unzipped
from sarathi_sim.profiler.storage.memory import available_bytes, size_text
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.workload import WorkloadError, shared_prefixes
from sarathi_sim.simulator.loop.records import Floats, Ints

#: Each column's meaning, and its names in published traces and in tools' outputs; the first name
#: in a file counts. ``a.b`` is the key b of the object a in a line of JSON.
NAMES: dict[str, tuple[str, ...]] = {
    "arrival": (
        *("arrival_s", "arrival", "arrived_at", "arrival_time", "arrival_time_ns"),
        *("arrival_time_ms", "timestamp", "TIMESTAMP", "Timestamp", "time"),
        "metadata.request_start_ns",
    ),
    "prompt": (
        *("prompt_tokens", "prompt", "ContextTokens", "num_prefill_tokens", "input_toks"),
        *("input_tokens", "input_length", "input_len", "prompt_len", "Request tokens"),
        "metrics.input_sequence_length.value",
    ),
    "output": (
        *("output_tokens", "decode", "GeneratedTokens", "num_decode_tokens", "output_toks"),
        *("completion_tokens", "output_length", "output_len", "Response tokens"),
        "metrics.output_sequence_length.value",
    ),
    "user": ("user",),
    "session": ("session_id", "conversation_id", "Session ID", "metadata.conversation_id"),
    "turn": ("turn", "turn_index", "metadata.turn_index"),
}
NEEDED = ("prompt", "output")
SKIP_EMPTY = (
    "a request that failed has none: workload.lengths.skip_empty=true leaves such requests out"
)
OF_TEXT = (
    "this is text without token counts, as ShareGPT's: count tokens with the model's tokenizer, "
    "or take a result of vllm bench serve --dataset-name sharegpt --save-detailed "
    "(docs/workloads.md shows both)"
)
UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
# Larger times are not in seconds: since 1970, 1.8e9 s have passed.
_EPOCHS = (("ns", 1e17), ("us", 1e14), ("ms", 1e11))


#: Meanings of the lists in vLLM's results. Releases since 2025 record each request's start.
_VLLM = {"prompt": "input_lens", "output": "output_lens", "arrival": "start_times"}
_BLOCKS = "hash_ids"
_MOONCAKE = {"arrival": "timestamp", "prompt": "input_length", "output": "output_length"}
BLOCK_TOKENS = 512
"""Tokens of a prompt for each number of ``hash_ids``."""

_MOST_TOKENS = 2**24
_MOST_SECONDS = 1e12  # far beyond any clock; differences of two stay exact enough
_SAMPLED_ROWS = 10_000  # rows from which the memory of all is estimated
_LONGEST_LINE = 2**20
_MEASURED = 16  # MiB of content from which a gzipped file's whole size is estimated
_BLOCK_BYTES = 250  # memory of a new block of a prompt
_PLACES = 4 * 8  # bytes of a cell in a list, an array, one that is sorted, and in pandas
_START = 2**12  # characters that show what a file is


@dataclass(frozen=True)
class Trace:
    """Prompt and output tokens, arrivals in seconds after the first, users by number, shared
    prefixes, and sessions by number (None: not recorded). ``left_out`` is the number of skipped
    rows without prompt or output tokens."""

    prompt: Ints
    output: Ints
    arrival_s: Floats | None
    user: Ints | None = None
    prefix: list[Prefix] | None = None
    session: Ints | None = None
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.prompt)

    def pick(self, kept: Ints) -> Trace:
        """The requests at these places, in this order; the first of them arrives at 0."""
        arrival_s = None if self.arrival_s is None else self.arrival_s[kept]
        return Trace(
            self.prompt[kept],
            self.output[kept],
            None if arrival_s is None else arrival_s - arrival_s[:1],
            None if self.user is None else self.user[kept],
            None if self.prefix is None else [self.prefix[i] for i in kept.tolist()],
            None if self.session is None else self.session[kept],
        )

    def sampled(self, share: float, rng: np.random.Generator) -> Trace:
        """A random share of the requests, or of the sessions; at least one is kept."""
        unit = np.arange(len(self.prompt)) if self.session is None else self.session
        drawn = rng.random(int(unit.max()) + 1)
        kept = drawn[unit] < max(share, float(drawn[unit].min()) * (1 + 1e-12))
        return self.pick(np.flatnonzero(kept))

    def resampled(self, count: int, block: int, rng: np.random.Generator) -> Trace:
        """``count`` requests: blocks of ``block`` consecutive ones, each with the gaps before its
        requests, in a random order; when all were drawn, they are drawn again in another order.

        So every request occurs equally often. Those of another round share no prefix with this one.
        """
        size = len(self)
        starts = np.arange(0, size, block)
        rounds = [
            np.concatenate([np.arange(s, min(s + block, size)) for s in rng.permutation(starts)])
            for _ in range(-(-count // size))
        ]
        order, lap = np.concatenate(rounds)[:count], np.arange(count) // size
        found = self.pick(order)
        if self.arrival_s is not None:
            span = float(self.arrival_s[-1] - self.arrival_s[0])
            gaps = np.diff(self.arrival_s, prepend=self.arrival_s[0] - span / max(size - 1, 1))
            found = replace(found, arrival_s=np.cumsum(gaps[order]) - gaps[order[0]])
        if found.prefix is not None:
            named = zip(lap.tolist(), found.prefix, strict=True)
            prefix: list[Prefix] = [
                tuple(((turn, name), until) for name, until in each) for turn, each in named
            ]
            found = replace(found, prefix=prefix)
        if found.session is not None:
            found = replace(found, session=found.session + lap * (int(found.session.max()) + 1))
        return found

    def clipped(self, most_prompt: int | None, most_output: int | None) -> Trace:
        """The trace with prompts and outputs cut to these lengths (None: not cut)."""
        prompt = self.prompt if most_prompt is None else np.minimum(self.prompt, most_prompt)
        output = self.output if most_output is None else np.minimum(self.output, most_output)
        prefix = self.prefix
        if prefix is not None:
            ends = (prompt if self.session is None else prompt + output - 1).tolist()
            prefix = [_cut(each, end) for each, end in zip(prefix, ends, strict=True)]
        return replace(self, prompt=prompt, output=output, prefix=prefix)


def _cut(prefix: Prefix, end: int) -> Prefix:
    """The prefix as far as token ``end``."""
    kept = sum(until < end for _, until in prefix)
    return (*prefix[:kept], *((name, end) for name, _ in prefix[kept : kept + 1]))


@dataclass(frozen=True)
class Reading:
    """How to read a trace. ``columns`` names columns whose names are not in :data:`NAMES`;
    ``time_unit`` is the unit of arrivals that are numbers (None: by the column's name, or seconds);
    ``skip_empty`` leaves out requests without prompt or output: failed ones, in logs."""

    columns: Mapping[str, str] = field(default_factory=dict)
    time_unit: str | None = None
    skip_empty: bool = False


_PLAIN = Reading()


def read_trace(path: Path, limit: int | None = None, reading: Reading = _PLAIN) -> Trace:
    """The first ``limit`` requests of a trace's file (all: None), in order of arrival.

    The file's name says what it is: ``*.jsonl`` holds a request a line, ``*.json`` is a result of
    vLLM's ``bench serve``; any other is CSV. Each may be gzipped, with ``.gz`` at the end. Columns
    go by the names in :data:`NAMES`, or by those that ``reading`` gives. Raises WorkloadError,
    naming file and row (the header of a CSV is row 1), for a missing column, a truncated row, and a
    value that is not a number or is out of range.
    """
    form = _FORMS.get(form_of(path), _FORMS[".csv"])
    least = {"prompt": 1, "output": 1, "user": 0, "turn": 0}
    if reading.skip_empty:
        least |= {"prompt": 0, "output": 0}
    names, cells = dict[str, str](), dict[str, list[Any]]()
    tree, read = _Tree(), 0
    with _opened(path) as file:
        for index, (length, row) in enumerate(islice(form.rows(path, file), limit)):
            if not names:
                names = _columns(path, form, row, reading)
                cells = {meaning: [] for meaning in names}
            try:
                for meaning, name in names.items():
                    if meaning in least:
                        cell: object = _whole(row[name], name, least[meaning])
                    elif meaning == _BLOCKS:
                        cell = tree.prefix(row[name], cells["prompt"][index])
                    else:
                        cell = _text(row[name]).strip()
                    cells[meaning].append(cell)
            except WorkloadError as error:
                raise WorkloadError(f"{form.place(path, index)}: {error}") from None
            except KeyError as error:
                missing = f"the key {error.args[0]} is missing"
                raise WorkloadError(f"{form.place(path, index)}: {missing}") from None
            read += length
            if index + 1 == _SAMPLED_ROWS:
                size = sum(getsizeof(cell) + _PLACES for each in cells.values() for cell in each)
                _check_memory(path, _SAMPLED_ROWS, read, size + len(tree) * _BLOCK_BYTES, limit)
    if not names:
        raise WorkloadError(f"{path}: expected {form.least}")
    prompt, output = (np.array(cells[meaning], np.int64) for meaning in NEEDED)
    kept = np.flatnonzero((prompt > 0) & (output > 0))
    if not len(kept):
        raise WorkloadError(f"{path}: no request has both prompt and output tokens")
    arrival_s = session = None
    if "arrival" in cells:
        arrival_s = _arrivals(path, form, names, cells["arrival"], reading.time_unit)
        turn = np.array(cells.get("turn", prompt * 0))
        kept = kept[np.lexsort((turn[kept], arrival_s[kept]))]
        arrival_s = arrival_s - arrival_s[kept[0]]
    prefix = cells.get(_BLOCKS)
    if "session" in cells:  # numbered as they appear; one without a name is alone
        seen: dict[object, int] = {}
        named = (name or i for i, name in enumerate(cells["session"]))
        session = np.array([seen.setdefault(name, len(seen)) for name in named], np.int64)
        prefix = shared_prefixes([], None, session, prompt + output)
    user = np.array(cells["user"], np.int64) if "user" in cells else None
    whole = Trace(prompt, output, arrival_s, user, prefix, session)
    if len(kept) == len(prompt) and (np.diff(kept) > 0).all():
        return whole
    return replace(whole.pick(kept), left_out=len(prompt) - len(kept))


def form_of(path: Path) -> str:
    """The suffix of a trace's name that tells its form, such as ".csv", without ".gz"."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


# What the rows mean ------------------------------------------------------------------------------


def _columns(
    path: Path, form: _TraceForm, row: Mapping[str, Any], reading: Reading
) -> dict[str, str]:
    """The column of each meaning, by the first row."""
    if form.word == "request":
        return {meaning: name for meaning, name in _VLLM.items() if name in row}
    if form.word == "line" and _BLOCKS in row and not reading.columns:
        return {**_MOONCAKE, _BLOCKS: _BLOCKS}
    return find_columns(path, list(row), reading.columns)


def find_columns(path: Path, header: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """The column of ``header`` for each meaning: ``{"prompt": "input_length", ...}``.

    Raises WorkloadError for a column that is named and absent, and without prompts or outputs.
    """
    found = {}
    has = f"the file has {', '.join(' '.join(name.split()) for name in header)}"
    for meaning, names in NAMES.items():
        if meaning in columns:
            if columns[meaning] not in header:
                raise WorkloadError(f"{path}: no column {columns[meaning]} ({meaning}); {has}")
            found[meaning] = columns[meaning]
        elif name := next((name for name in names if name in header), None):
            found[meaning] = name
        elif meaning in NEEDED and "conversations" in header:
            raise WorkloadError(f"{path}: {OF_TEXT}")
        elif meaning in NEEDED:
            raise WorkloadError(
                f"{path}: none of the columns {', '.join(names)}; {has}: name the one with the "
                f"{meaning} tokens in lengths.columns.{meaning}"
            )
    return found


def _whole(cell: object, name: str, least: int) -> int:
    """A number of tokens, or of a user. Raises WorkloadError."""
    text = _text(cell).strip()
    # isdecimal alone accepts digits of other scripts; int() reads those too: fine.
    digits = text.lstrip("0")  # any number of them; int() refuses very long texts
    number = int(digits or 0) if text.isdecimal() and len(digits) <= 12 else -1
    if not least <= number <= _MOST_TOKENS:
        raise WorkloadError(
            f"{name} is {text[:40]!r}: must be a whole number from {least} to {_MOST_TOKENS}"
            + (f"; {SKIP_EMPTY}" if number == 0 < least else "")
        )
    return number


def _arrivals(
    path: Path, form: _TraceForm, names: Mapping[str, str], cells: list[str], unit: str | None
) -> Floats:
    """Seconds since some moment. Raises WorkloadError."""
    name, texts = names["arrival"], pd.Series(cells, dtype=str)
    numbers = np.asarray(pd.to_numeric(texts, errors="coerce"), np.float64)
    wanted = f"a number of at most {_MOST_SECONDS:g} s"
    if np.isnan(numbers[0]) and ":" in texts[0]:
        times = pd.to_datetime(texts, errors="coerce", format="ISO8601", utc=True)
        wanted = "a date and time"
        missing = times.isna().to_numpy()
        seconds = np.asarray((times - times.min()).dt.total_seconds(), np.float64)
    else:
        mooncake = _BLOCKS in names and unit is None
        seconds = numbers * UNITS_S[unit or ("ms" if mooncake else _unit(name, numbers))]
        missing = ~(np.abs(seconds) <= _MOST_SECONDS)
        if mooncake:
            seconds = (numbers - numbers.min()) / 1000  # rounded once
    if missing.any():
        row = int(missing.argmax())
        problem = f"{name} is {texts[row][:40]!r}: must be {wanted}"
        raise WorkloadError(f"{form.place(path, row)}: {problem}")
    return seconds


def _unit(name: str, numbers: Floats) -> str:
    """The unit of arrivals, from the end of their column's name, else from their size."""
    ending = name.rpartition("_")[2]
    if ending in UNITS_S:
        return ending
    smallest = np.abs(numbers[np.isfinite(numbers)]).min(initial=np.inf)
    return next((unit for unit, least in _EPOCHS if least <= smallest < np.inf), "s")


class _Tree:
    """Prompts by their blocks: equal beginnings share the path from the root."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def prefix(self, blocks: object, tokens: int) -> Prefix:
        """The prefix that a prompt of ``tokens`` tokens shares with prompts of the same blocks.

        A block is named by its node, and so by all blocks before it. The last block may be missing
        if it is not full. Raises WorkloadError.
        """
        if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
            shown = _text(blocks)[:40]
            raise WorkloadError(f"hash_ids is {shown}: must be a list of whole numbers")
        whole, most = tokens // BLOCK_TOKENS, -(-tokens // BLOCK_TOKENS)
        if not whole <= len(blocks) <= most:
            allowed = f"{most}" if whole == most else f"{whole} or {most}"
            raise WorkloadError(
                f"hash_ids has {len(blocks)} blocks: must be {allowed}, one for every "
                f"{BLOCK_TOKENS} tokens of input_length {tokens}"
            )
        node, found = -1, []
        for end, block in enumerate(blocks, 1):
            new = (len(self._nodes), end * BLOCK_TOKENS)
            name = self._nodes.setdefault((node, block), new)
            node = name[0]
            found.append(name if name[1] <= tokens else (node, tokens))
        return tuple(found)


# The rows of a file ------------------------------------------------------------------------------


_Row = tuple[int, Mapping[str, Any]]
"""A row: its characters in the file (0: not needed), and its cells by column."""


def _csv_rows(path: Path, file: TextIO) -> Iterator[_Row]:
    """The rows of a CSV, each with as many fields as the header."""
    places, number, empty = dict[str, int](), 0, 0
    try:
        for number, row in enumerate(csv.reader(_lines(path, file), strict=True), 1):
            "".join(row).encode()  # bytes that are not UTF-8 fail here, where the row is known
            if number == 1:
                header, places = row, {name: row.index(name) for name in row}
            elif not row:  # an empty line; at the end of the file it is no mistake
                empty = empty or number
            elif empty:
                raise WorkloadError(f"{path}: row {empty} is empty")
            elif len(row) != len(header):
                problem = f"has {len(row)} of {len(header)} fields"
                raise WorkloadError(f"{path}: row {number} {problem}")
            else:
                size = sum(map(len, row)) + len(row)
                yield size, {name: row[place] for name, place in places.items()}
    except UnicodeEncodeError:
        problem = f"row {number} is not readable CSV: it is not UTF-8 text"
        raise WorkloadError(f"{path}: {problem}") from None
    except csv.Error as error:
        raise WorkloadError(f"{path}: row {number + 1} is not readable CSV: {error}") from None


def _json_rows(path: Path, file: TextIO) -> Iterator[_Row]:
    for number, text in enumerate(_lines(path, file), 1):
        yield len(text), dict(_flat(_object(text, f"{path}: line {number}")))


def _benchmark_rows(path: Path, file: TextIO) -> Iterator[_Row]:
    """The requests of a vLLM benchmark result that was saved with ``--save-detailed``."""
    start = file.read(_START)
    if start.lstrip().startswith("[") and '"conversations"' in start:
        raise WorkloadError(f"{path}: {OF_TEXT}")
    text = start + file.read(LARGEST_DATA + 1 - _START)
    if len(text) > LARGEST_DATA:
        raise WorkloadError(f"{path}: larger than {LARGEST_DATA >> 20} MiB")
    result = _object(text, str(path))
    lists = {name: result[name] for name in _VLLM.values() if name in result}
    listed = {name for name, each in lists.items() if isinstance(each, list)}
    if not {"input_lens", "output_lens"} <= listed == lists.keys():
        raise WorkloadError(
            f"{path}: expected a detailed result of vLLM's benchmark, with the lists input_lens "
            "and output_lens"
        )
    if len({len(each) for each in lists.values()}) > 1 or not lists["input_lens"]:
        sizes = ", ".join(f"{name} {len(each)}" for name, each in lists.items())
        raise WorkloadError(f"{path}: must have as many of each, and one at least: {sizes}")
    for cells in zip(*lists.values(), strict=True):
        yield 0, dict(zip(lists, cells, strict=True))


class _TraceForm(NamedTuple):
    """A form of trace files: reader, name of a row, number of the first row, required content."""

    rows: Callable[[Path, TextIO], Iterator[_Row]]
    word: str
    first: int
    least: str

    def place(self, path: Path, index: int) -> str:
        """Where the row stands."""
        return f"{path}: {self.word} {index + self.first}"


_FORMS = {
    ".csv": _TraceForm(_csv_rows, "row", 2, "a header and at least one request"),
    ".jsonl": _TraceForm(_json_rows, "line", 1, "at least one request"),
    ".json": _TraceForm(_benchmark_rows, "request", 0, "at least one request"),
}


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
    if isinstance(value, str):
        return value
    whole = isinstance(value, float) and value.is_integer()
    return f"{value:.0f}" if whole else json.dumps(value)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The file as text, decompressed where it is gzipped; bytes that are not UTF-8 become
    surrogates. Raises WorkloadError."""
    try:
        with (
            open_file(path) as raw,
            TextIOWrapper(
                unzipped(raw), encoding="utf-8-sig", newline="", errors="surrogateescape"
            ) as file,
        ):
            yield file
    except UserError as error:
        raise WorkloadError(str(error)) from None
    except (EOFError, zlib.error) as error:
        raise WorkloadError(f"{path}: the gzipped file is damaged: {error}") from None
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from None


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The file's lines; the read of a line that is too long stops early."""
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise WorkloadError(f"{path}: line {number} is longer than {_LONGEST_LINE} characters")
        yield line


def _check_memory(path: Path, rows: int, read: int, num_bytes: int, limit: int | None) -> None:
    """Raises WorkloadError where ``limit`` rows (None: all) of the file need too much memory.

    The first ``rows`` of them, ``read`` characters, take ``num_bytes``.
    """
    count = _content_bytes(path) / read * rows
    if limit is not None:
        count = min(count, limit + 1)
    needed, free = count * num_bytes / rows, available_bytes()
    if needed > free:
        raise WorkloadError(
            f"{path}: about {count:.0f} rows would take {size_text(needed)} of memory, but only "
            f"{size_text(free)} are free: set workload.requests to read fewer"
        )


def _content_bytes(path: Path) -> float:
    """The size of the content; for a gzipped file, estimated from its beginning."""
    with open_file(path) as raw:
        file = unzipped(raw)
        content = sum(len(file.read(2**20)) for _ in range(_MEASURED))
        return content / max(raw.tell(), 1) * path.stat().st_size
