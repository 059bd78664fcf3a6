"""What the columns of a request trace mean: the names they go by, units of time, numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_sim.simulator.load.prefixes import shared_prefixes
from sarathi_sim.simulator.load.trace_file import MOST_SECONDS, MOST_TOKENS, Trace
from sarathi_sim.simulator.load.workload import WorkloadError
from sarathi_sim.simulator.loop.records import Floats, Ints

#: What a column means, and the names that it has in published traces and in tools' outputs; the
#: first one that a file has counts. ``a.b`` is the key b of the object a in a line of JSON.
NAMES: dict[str, tuple[str, ...]] = {
    "arrival": (
        *(
            "arrival_s",
            "arrival",
            "arrived_at",
            "arrival_time",
            "arrival_time_ns",
            "arrival_time_ms",
        ),
        *("timestamp", "TIMESTAMP", "Timestamp", "time", "metadata.request_start_ns"),
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
# Numbers from here on are no seconds: counted from 1970, today is 1.8e9 s.
_EPOCHS = (("ns", 1e17), ("us", 1e14), ("ms", 1e11))


@dataclass(frozen=True)
class Reading:
    """How to read a trace. ``columns`` names the columns that go by other names than :data:`NAMES`;
    ``time_unit`` is the unit of arrivals that are numbers (None: by the column's name, or seconds);
    ``skip_empty`` leaves out requests without prompt or output, which logs have of failures."""

    columns: Mapping[str, str] = field(default_factory=dict)
    time_unit: str | None = None
    skip_empty: bool = False


def find_columns(path: Path, header: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """What each column of ``header`` that is read means: ``{"prompt": "input_length", ...}``.

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


@dataclass(frozen=True)
class TraceTable:
    """A trace as text: a list of cells for each column, and where in the file each row stands."""

    path: Path
    names: dict[str, str]
    cells: dict[str, list[str]]
    where: Callable[[int], str]

    def trace(self, reading: Reading) -> Trace:
        """The requests in order of arrival. Raises WorkloadError, naming file, row and column."""
        least = 0 if reading.skip_empty else 1
        prompt, output = (self._numbers(name, least=least) for name in NEEDED)
        arrival_s = self._arrivals(reading.time_unit) if "arrival" in self.names else None
        user = self._numbers("user", least=0) if "user" in self.names else None
        session = self._sessions()
        kept = np.flatnonzero((prompt > 0) & (output > 0))
        if not len(kept):
            raise WorkloadError(f"{self.path}: no request has both prompt and output tokens")
        if arrival_s is not None:
            turn = self._numbers("turn", least=0) if "turn" in self.names else np.zeros(len(prompt))
            kept = kept[np.lexsort((turn[kept], arrival_s[kept]))]
            arrival_s = arrival_s - arrival_s[kept[0]]
        prefix = None
        if session is not None:
            prefix = shared_prefixes([], None, session, prompt + output)
        whole = Trace(prompt, output, arrival_s, user, prefix, session)
        if len(kept) == len(prompt) and (np.diff(kept) > 0).all():
            return whole
        return replace(whole.pick(kept), left_out=len(prompt) - len(kept))

    def _numbers(self, meaning: str, *, least: int) -> Ints:
        values = np.empty(len(self.cells[meaning]), np.int64)
        for i, cell in enumerate(self.cells[meaning]):
            text = cell.strip()
            # isdecimal alone accepts digits of other scripts; int() reads those too: fine.
            digits = text.lstrip("0")  # any number of them; int() refuses very long texts
            number = int(digits or 0) if text.isdecimal() and len(digits) <= 12 else -1
            if not least <= number <= MOST_TOKENS:
                raise WorkloadError(
                    f"{self.path}: {self.where(i)}: {self.names[meaning]} is {text[:40]!r}: "
                    f"must be a whole number from {least} to {MOST_TOKENS}"
                    + (f"; {SKIP_EMPTY}" if number == 0 < least else "")
                )
            values[i] = number
        return values

    def _arrivals(self, unit: str | None) -> Floats:
        """Seconds since some moment."""
        name, cells = self.names["arrival"], self.cells["arrival"]
        texts = pd.Series([cell.strip() for cell in cells], dtype=str)
        numbers = np.asarray(pd.to_numeric(texts, errors="coerce"), np.float64)
        wanted = f"a number of at most {MOST_SECONDS:g} s"
        if np.isnan(numbers[0]) and ":" in texts[0]:
            times = pd.to_datetime(texts, errors="coerce", format="ISO8601", utc=True)
            wanted = "a date and time"
            missing = times.isna().to_numpy()
            seconds = np.asarray((times - times.min()).dt.total_seconds(), np.float64)
        else:
            seconds = numbers * UNITS_S[unit or _unit(name, numbers)]
            missing = ~(np.abs(seconds) <= MOST_SECONDS)
        if missing.any():
            row = int(missing.argmax())
            raise WorkloadError(
                f"{self.path}: {self.where(row)}: {name} is {texts[row][:40]!r}: must be {wanted}"
            )
        return seconds

    def _sessions(self) -> Ints | None:
        """The session of each request, numbered as they appear; one without a name is alone."""
        if "session" not in self.cells:
            return None
        seen: dict[object, int] = {}
        names = [cell.strip() or i for i, cell in enumerate(self.cells["session"])]
        return np.array([seen.setdefault(name, len(seen)) for name in names], np.int64)


def _unit(name: str, numbers: Floats) -> str:
    """The unit of arrivals, from the end of their column's name, else from their size."""
    ending = name.rpartition("_")[2]
    if ending in UNITS_S:
        return ending
    smallest = np.abs(numbers[np.isfinite(numbers)]).min(initial=np.inf)
    return next((unit for unit, least in _EPOCHS if least <= smallest < np.inf), "s")
