"""Request traces, and the reader of their files.

Files have three forms: CSV, an object of JSON a line, and a result of vLLM's ``bench serve``. Each
is a stream of rows by name; :data:`NAMES` says what the names mean. A unit of time is known from
the form or from the end of a column's name, or it is asked for.

Lines of JSON with ``timestamp``, ``input_length`` and ``output_length`` are in the form that
Mooncake published (Qin et al., FAST 2025): ``{"timestamp": 3052, "input_length": 2287,
"output_length": 316, "hash_ids": [0, 42, 43, 44, 45]}`` has the arrival in milliseconds, and a
number for every 512 tokens of the prompt. Prompts whose ``hash_ids`` begin alike begin with the
same tokens. Alibaba's traces of Qwen have the same keys and ``chat_id``: seconds, and 16 tokens.
"""

from __future__ import annotations

import csv
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from sys import getsizeof
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt
import pandas as pd

from sarathi_sim.policies.request import Prefix
from sarathi_sim.profiler.storage.child import available_bytes, size_text
from sarathi_sim.profiler.storage.files import LARGEST_DATA, open_file, unzipped
from sarathi_sim.profiler.storage.strict import UserError
from ..loop.records import Floats, Ints
from .requests import WorkloadError, shared_prefixes

Flags = npt.NDArray[np.bool_]
#: Each column's meaning, and its names in published traces and in tools' outputs; the first name
#: in a file counts. ``a.b`` is the key b of the object a in a line of JSON.
NAMES: dict[str, tuple[str, ...]] = {
    "arrival": (
        *("arrival_s", "arrival", "arrived_at", "arrival_time", "arrival_time_ns"),
        *("arrival_time_ms", "timestamp", "TIMESTAMP", "Timestamp", "time"),
        *("start_times", "metadata.request_start_ns"),
    ),
    "prompt": (
        *("prompt_tokens", "prompt", "ContextTokens", "num_prefill_tokens", "input_toks"),
        *("input_tokens", "input_length", "input_len", "prompt_len", "Request tokens"),
        *("input_lens", "metrics.input_sequence_length.value"),
    ),
    "output": (
        *("output_tokens", "decode", "GeneratedTokens", "num_decode_tokens", "output_toks"),
        *("completion_tokens", "output_length", "output_len", "Response tokens"),
        *("output_lens", "metrics.output_sequence_length.value"),
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
    "(docs/server/traces.md shows both)"
)
UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SECONDS = ("arrival", "arrived_at", "start_times")
"""Columns of arrivals that are in seconds in the form that has them: ours, Vidur's, vLLM's."""
_EPOCHS = (("ns", 1e17), ("us", 1e14), ("ms", 1e11), ("s", 1e9))
"""Units of times since 1970 by their least size: since then 1.8e9 s have passed."""
_NO_VALUE = ("", "null", "none", "nan", "na", "n/a", "<na>")
"""Cells, in small letters, that stand for no value."""

_MOONCAKE = ("timestamp", "input_length", "output_length")
_VLLM = ("input_lens", "output_lens", "start_times")
"""Lists in vLLM's results. Releases since 2025 record each request's start."""
_QWEN = "chat_id"
_BLOCKS = "hash_ids"
BLOCK_TOKENS = 512
"""Tokens of a prompt for each number of ``hash_ids`` in Mooncake's form."""
_QWEN_BLOCK_TOKENS = 16

_FATES = ("metadata.benchmark_phase", "metadata.was_cancelled", "error")
"""What AIPerf's records say of a request beside its lengths."""
_SHOWN = 6  # columns that are not used and named
_MOST_TOKENS = 2**24
_MOST_SECONDS = 1e12  # far beyond any clock; differences of two stay exact enough
_SAMPLED_ROWS = 10_000  # rows from which the memory of all is estimated
_LONGEST_LINE = 2**20
_MEASURED = 16  # MiB of content from which a gzipped file's whole size is estimated
_BLOCK_BYTES = 400  # memory of a new block of a prompt
_PLACES = 5 * 8  # bytes of a cell in a list, an array, one that is sorted, and in pandas
_START = 2**12  # characters that show what a file is


@dataclass(frozen=True)
class Trace:
    """Prompt and output tokens, arrivals in seconds after the first, users by number, shared
    prefixes, and sessions by number (None: not recorded). ``left_out`` is the number of skipped
    rows without prompt or output tokens; ``notes`` say what else was left out or taken as known.
    ``unit_of`` is the column of arrivals whose unit is not known, and which are left out, too."""

    prompt: Ints
    output: Ints
    arrival_s: Floats | None
    user: Ints | None = None
    prefix: list[Prefix] | None = None
    session: Ints | None = None
    left_out: int = 0
    notes: tuple[str, ...] = ()
    unit_of: str = ""

    def __len__(self) -> int:
        return len(self.prompt)

    def pick(self, kept: Ints) -> Trace:
        """The requests at these places, in this order; the first of them arrives at 0."""
        arrival_s = None if self.arrival_s is None else self.arrival_s[kept]
        return replace(
            self,
            prompt=self.prompt[kept],
            output=self.output[kept],
            arrival_s=None if arrival_s is None else arrival_s - arrival_s[:1],
            user=None if self.user is None else self.user[kept],
            prefix=None if self.prefix is None else [self.prefix[i] for i in kept.tolist()],
            session=None if self.session is None else self.session[kept],
        )

    def sampled(self, share: float, rng: np.random.Generator) -> Trace:
        """A random share of the requests, or of the sessions; at least one is kept."""
        unit = np.arange(len(self.prompt)) if self.session is None else self.session
        drawn = rng.random(int(unit.max()) + 1)
        kept = drawn[unit] < max(share, float(drawn[unit].min()) * (1 + 1e-12))
        return self.pick(np.flatnonzero(kept))

    def resampled(self, count: int, block: int, rng: np.random.Generator) -> Trace:
        """``count`` requests: blocks of ``block`` consecutive ones, each with the gaps before its
        requests, in a random order; when all were drawn, they are drawn again in another order. So
        every request occurs equally often. Those of another round share no prefix with this one."""
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
    kept = sum(until < end for _, until in prefix)
    return (*prefix[:kept], *((name, end) for name, _ in prefix[kept : kept + 1]))


@dataclass(frozen=True)
class Reading:
    """How to read a trace. ``columns`` names columns whose names are not in :data:`NAMES`;
    ``time_unit`` is the unit of arrivals that are numbers (None: that of the form, or of the
    column's name); ``skip_empty`` leaves out requests without prompt or output: failed ones, in
    logs; ``block_tokens`` is the size of the blocks of ``hash_ids`` (None: that of the form, or the
    only one that fits the prompts)."""

    columns: Mapping[str, str] = field(default_factory=dict)
    time_unit: str | None = None
    skip_empty: bool = False
    block_tokens: int | None = None


_PLAIN = Reading()


def read_trace(path: Path, limit: int | None = None, reading: Reading = _PLAIN) -> Trace:
    """The first ``limit`` requests of a trace's file (all: None), in order of arrival.

    The file's name says what it is: ``*.jsonl`` holds a request a line, ``*.json`` is a result of
    vLLM's ``bench serve``; any other is CSV. Each may be gzipped, with ``.gz`` at the end. Columns
    go by the names in :data:`NAMES`, or by those that ``reading`` gives. Requests of AIPerf's
    warm-up are left out. Raises WorkloadError, naming file and row (the header of a CSV is row 1),
    for a missing column, a truncated row, and a value that is not a number or is out of range.
    """
    form = _FORMS.get(form_of(path), _FORMS[".csv"])
    wanted = {_BLOCKS, *_FATES, *chain(*NAMES.values()), *reading.columns.values()}
    header, cells = dict[str, None](), dict[str, list[Any]]()
    tree, read, count = _Tree(), 0, 0
    with _opened(path) as file:
        for length, row in islice(form.rows(path, file, header), limit):
            for name in row.keys() & wanted:
                column = cells.setdefault(name, [])
                column += [None] * (count - len(column))
                column.append(tree.numbered(row[name]) if name == _BLOCKS else row[name])
            read, count = read + length, count + 1
            if count == _SAMPLED_ROWS:
                size = sum(getsizeof(cell) + _PLACES for each in cells.values() for cell in each)
                size += len(tree) * _BLOCK_BYTES
                _check_memory(path, _SAMPLED_ROWS, read, size, limit)
    if not count:
        raise WorkloadError(f"{path}: expected {form.least}")
    for column in cells.values():
        column += [None] * (count - len(column))
    cells |= dict.fromkeys(wanted - cells.keys(), [None] * count)
    return _Cells(path, form, list(header), cells, reading).trace(tree)


def form_of(path: Path) -> str:
    """The suffix of a trace's name that tells its form, such as ".csv", without ".gz"."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


# What the rows mean ------------------------------------------------------------------------------


class _Cells(NamedTuple):
    """The cells of a file by column; None where a row has no such cell."""

    path: Path
    form: _TraceForm
    header: Sequence[str]
    cells: Mapping[str, list[Any]]
    reading: Reading

    def trace(self, tree: _Tree) -> Trace:
        """What they say; ``tree`` has numbered the blocks of the prompts."""
        names, notes = (
            find_columns(
                self.path,
                self.header,
                self.reading.columns,
            ),
            list[str](),
        )
        warm_up, failed = self._fates()
        blank = 0 if self.reading.skip_empty else None
        prompt, output = (self._whole(names[key], warm_up | failed, 1, blank) for key in NEEDED)
        out = (prompt == 0) | (output == 0)
        if out.all():
            raise WorkloadError(f"{self.path}: no request has both prompt and output tokens")
        if warm_up.any():
            notes.append(f"{int(warm_up.sum()):,} requests of the warm-up left out")
        blocks = _BLOCKS in self.header and self.form.word == "line"
        size = self._block_tokens(prompt) if blocks else 0
        kept, arrival_s, unit_of = np.flatnonzero(~out), None, ""
        if "arrival" in names:
            arrival_s, unit = self._arrivals(names, out, size)
            turn = self._whole(names["turn"], out, 0, 0) if "turn" in names else prompt * 0
            kept = kept[np.lexsort((turn[kept], arrival_s[kept]))]
            arrival_s = arrival_s - arrival_s[kept[0]]
            if unit is None:
                arrival_s, unit_of = None, names["arrival"]
            elif unit:
                notes.append(unit)
        prefix = session = None
        if blocks:
            names = {key: name for key, name in names.items() if key != "session"}
            names[_BLOCKS] = _BLOCKS
            given = zip(self.cells[_BLOCKS], prompt.tolist(), strict=True)
            prefix = [tree.prefix(blocks or (), tokens, size) for blocks, tokens in given]
            notes.append(f"each number of {_BLOCKS} stands for {size} tokens")
        elif "session" in names:  # numbered as they appear; one without a name is alone
            seen: dict[object, int] = {}
            named = (_name(cell) or i for i, cell in enumerate(self.cells[names["session"]]))
            session = np.array([seen.setdefault(name, len(seen)) for name in named], np.int64)
            prefix = shared_prefixes([], None, session, prompt + output)
        user = self._whole(names["user"], out, 0) if "user" in names else None
        if unused := [name for name in self.header if name not in {*names.values(), *_FATES}]:
            rest = len(unused) - _SHOWN
            more = f" and {rest} more" if rest > 0 else ""
            notes.append(f"columns not used: {', '.join(unused[:_SHOWN])}{more}")
        whole = Trace(prompt, output, arrival_s, user, prefix, session, 0, tuple(notes), unit_of)
        if len(kept) == len(prompt) and (np.diff(kept) > 0).all():
            return whole
        return replace(whole.pick(kept), left_out=len(prompt) - len(kept) - int(warm_up.sum()))

    def _error(self, row: int, problem: str) -> WorkloadError:
        return WorkloadError(f"{self.form.place(self.path, row)}: {problem}")

    def _fates(self) -> tuple[Flags, Flags]:
        """Which requests are of a warm-up, and which failed, as AIPerf's records say. Raises
        WorkloadError for one that failed, unless such are skipped."""
        phase, *fates = (self.cells[name] for name in _FATES)
        warm_up = np.array([one == "warmup" for one in phase])
        failed = np.array([bool(gone or error) for gone, error in zip(*fates, strict=True)])
        failed &= ~warm_up & (_FATES[0] in self.header)
        if failed.any() and not self.reading.skip_empty:
            raise self._error(int(failed.argmax()), f"has no tokens; {SKIP_EMPTY}")
        return warm_up, failed

    def _whole(self, name: str, out: Flags, least: int, blank: int | None = None) -> Ints:
        """Whole numbers from ``least`` on; 0 where the row is left out, ``blank`` (None: refused)
        for one without a value, or with 0 where that is too few. Raises WorkloadError."""
        found = np.zeros(len(out), np.int64)
        for row, (cell, left_out) in enumerate(zip(self.cells[name], out.tolist(), strict=True)):
            if left_out:
                continue
            text = _text(cell).strip()
            # isdecimal alone accepts digits of other scripts; int() reads those too: fine.
            digits = text.lstrip("0")  # any number of them; int() refuses very long texts
            number = int(digits or 0) if text.isdecimal() and len(digits) <= 12 else -1
            nothing = number < least and (number == 0 or _name(cell) is None)
            if nothing and blank is not None:
                number = blank
            elif not least <= number <= _MOST_TOKENS:
                allowed = f"must be a whole number from {least} to {_MOST_TOKENS}"
                said = f"{name} is {text[:40]!r}: {allowed}"
                said = f"the key {name} is missing" if cell is None else said
                raise self._error(row, said + (f"; {SKIP_EMPTY}" if nothing and least else ""))
            found[row] = number
        return found

    def _arrivals(
        self, names: Mapping[str, str], out: Flags, block_tokens: int
    ) -> tuple[Floats, str | None]:
        """Seconds since some moment, and what must be said of their unit; None: it is not known.
        Raises WorkloadError."""
        name = names["arrival"]
        texts = pd.Series([_text(cell) for cell in self.cells[name]], dtype=str)
        numbers = np.asarray(pd.to_numeric(texts, errors="coerce"), np.float64)
        first = int(np.flatnonzero(~out)[0])
        note: str | None = ""
        wanted = f"a number of at most {_MOST_SECONDS:g} s"
        if np.isnan(numbers[first]) and ":" in texts[first]:
            times = pd.to_datetime(texts, errors="coerce", format="ISO8601", utc=True)
            wanted = "a date and time"
            missing = times.isna().to_numpy()
            seconds = np.asarray((times - times.min()).dt.total_seconds(), np.float64)
        else:
            unit, note = self._unit(names, numbers[~out], block_tokens)
            seconds = numbers * UNITS_S[unit]
            missing = ~(np.abs(seconds) <= _MOST_SECONDS)
            if unit == "ms":
                seconds = (numbers - np.nanmin(numbers)) / 1000  # rounded once
        if (missing & ~out).any():
            row = int((missing & ~out).argmax())
            raise self._error(row, f"{name} is {texts[row][:40]!r}: must be {wanted}")
        return seconds, note

    def _unit(
        self, names: Mapping[str, str], numbers: Floats, block_tokens: int
    ) -> tuple[str, str | None]:
        """The unit of arrivals: as given, by the end of their column's name or by the form; else by
        the size of times since 1970, which is said, or not known (None)."""
        name, ending = names["arrival"], names["arrival"].rpartition("_")[2]
        if self.reading.time_unit or ending in UNITS_S:
            return self.reading.time_unit or ending, ""
        burst_gpt = (name, names["prompt"]) == ("Timestamp", "Request tokens")
        if name in _SECONDS or burst_gpt:
            return "s", ""
        if self.form.word == "line" and (name, *map(names.get, NEEDED)) == _MOONCAKE:
            if _QWEN in self.header:
                return "s", ""
            if block_tokens == BLOCK_TOKENS or (np.isfinite(numbers) & (numbers % 1 == 0)).all():
                return "ms", ""
        least = np.abs(numbers[np.isfinite(numbers)]).min(initial=np.inf)
        unit = next((unit for unit, size in _EPOCHS if size <= least < np.inf), None)
        if unit is None:
            return "s", None
        return unit, f"{name} is taken for {unit} since 1970, by its size"

    def _block_tokens(self, prompt: Ints) -> int:
        """The tokens that a number of ``hash_ids`` stands for: as given, else those of the form, or
        the only number that fits all prompts. Raises WorkloadError."""
        blocks = self.cells[_BLOCKS]
        for row, each in enumerate(blocks):
            if not isinstance(each, array | None):
                shown = _text(each)[:40]
                raise self._error(row, f"{_BLOCKS} is {shown}: must be a list of whole numbers")
        count = np.array([-1 if each is None else len(each) for each in blocks])
        # Of b tokens a prompt of p has floor(p / b) to ceil(p / b) blocks.
        least = np.where(
            count < 0,
            1,
            prompt // np.maximum(count + 1, 1) + 1,
        )
        most = np.where(
            count < 2,
            2**24,
            -(-prompt // np.maximum(count - 1, 1)) - 1,
        )
        usual = _QWEN_BLOCK_TOKENS if _QWEN in self.header else BLOCK_TOKENS
        size = self.reading.block_tokens or usual
        wrong = (size < least) | (size > most)
        if not wrong.any():
            return size
        if self.reading.block_tokens is None and least.max() == most.min():
            return int(most.min())
        row = int(wrong.argmax())
        tokens = int(prompt[row])
        allowed = " or ".join(map(str, sorted({tokens // size, -(-tokens // size)})))
        raise self._error(
            row,
            f"{_BLOCKS} has {count[row]} blocks: must be {allowed}, one for every {size} of the "
            f"prompt's {tokens} tokens; blocks of another size (here {least[row]} to {most[row]} "
            "tokens) are set by workload.lengths.block_tokens",
        )


def _name(cell: object) -> object:
    """What a cell names; None for one without a value."""
    text = _text(cell).strip()
    return None if text.lower() in _NO_VALUE else text


def find_columns(path: Path, header: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """The column of ``header`` for each meaning: ``{"prompt": "input_length", ...}``. Raises
    WorkloadError for a column that is named and absent, and without prompts or outputs."""
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


class _Tree:
    """Prompts by their blocks: equal beginnings share the path from the root."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def numbered(self, blocks: object) -> object:
        """A list of whole numbers, each in the order of its first appearance; else as it stands."""
        if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
            return blocks
        seen = self._numbers
        return array("l", [seen.setdefault(block, len(seen)) for block in blocks])

    def prefix(self, blocks: Sequence[int], tokens: int, size: int) -> Prefix:
        """The prefix that a prompt of ``tokens`` tokens shares with prompts of the same blocks of
        ``size`` tokens. A block is named by its node, and so by all blocks before it. The last
        block may be missing if it is not full."""
        node, found = -1, []
        for end, block in enumerate(blocks, 1):
            name = self._nodes.setdefault((node, block), (len(self._nodes), end * size))
            node = name[0]
            found.append(name if name[1] <= tokens else (node, tokens))
        return tuple(found)


# The rows of a file ------------------------------------------------------------------------------


_Row = tuple[int, Mapping[str, Any]]
"""A row: its characters in the file (0: not needed), and its cells by column."""


def _csv_rows(path: Path, file: TextIO, header: dict[str, None]) -> Iterator[_Row]:
    """The rows of a CSV, each with as many fields as the header."""
    places, number, empty = dict[str, int](), 0, 0
    try:
        for number, row in enumerate(csv.reader(_lines(path, file), strict=True), 1):
            "".join(row).encode()  # bytes that are not UTF-8 fail here, where the row is known
            if number == 1:
                width, places = len(row), {name: row.index(name) for name in row}
                header |= dict.fromkeys(places)
            elif not row:  # an empty line; at the end of the file it is no mistake
                empty = empty or number
            elif empty:
                raise WorkloadError(f"{path}: row {empty} is empty")
            elif len(row) != width:
                problem = f"has {len(row)} of {width} fields"
                raise WorkloadError(f"{path}: row {number} {problem}")
            else:
                size = sum(map(len, row)) + len(row)
                yield size, {name: row[place] for name, place in places.items()}
    except UnicodeEncodeError:
        problem = f"row {number} is not readable CSV: it is not UTF-8 text"
        raise WorkloadError(f"{path}: {problem}") from None
    except csv.Error as error:
        raise WorkloadError(f"{path}: row {number + 1} is not readable CSV: {error}") from None


def _json_rows(path: Path, file: TextIO, header: dict[str, None]) -> Iterator[_Row]:
    for number, text in enumerate(_lines(path, file), 1):
        row = dict(_flat(_object(text, f"{path}: line {number}")))
        if not row.keys() <= header.keys():
            header |= {name: None for name, cell in row.items() if not isinstance(cell, dict)}
        yield len(text), row


def _benchmark_rows(path: Path, file: TextIO, header: dict[str, None]) -> Iterator[_Row]:
    start = file.read(_START)
    if start.lstrip().startswith("[") and '"conversations"' in start:
        raise WorkloadError(f"{path}: {OF_TEXT}")
    text = start + file.read(LARGEST_DATA + 1 - _START)
    if len(text) > LARGEST_DATA:
        raise WorkloadError(f"{path}: larger than {LARGEST_DATA >> 20} MiB")
    result = _object(text, str(path))
    lists = {name: result[name] for name in _VLLM if name in result}
    listed = {name for name, each in lists.items() if isinstance(each, list)}
    if not {"input_lens", "output_lens"} <= listed == lists.keys():
        raise WorkloadError(
            f"{path}: expected a detailed result of vLLM's benchmark, with the lists input_lens "
            "and output_lens"
        )
    if len({len(each) for each in lists.values()}) > 1 or not lists["input_lens"]:
        sizes = ", ".join(f"{name} {len(each)}" for name, each in lists.items())
        raise WorkloadError(f"{path}: must have as many of each, and one at least: {sizes}")
    count = len(lists["input_lens"])
    header |= {
        name: None for name, each in result.items() if isinstance(each, list) and len(each) == count
    }
    for cells in zip(*lists.values(), strict=True):
        yield 0, dict(zip(lists, cells, strict=True))


class _TraceForm(NamedTuple):
    """A form of trace files: reader (which notes the columns, too), name of a row, number of the
    first row, required content."""

    rows: Callable[[Path, TextIO, dict[str, None]], Iterator[_Row]]
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
    """Raises WorkloadError where ``limit`` rows (None: all) of the file need too much memory. The
    first ``rows`` of them, ``read`` characters, take ``num_bytes``."""
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
