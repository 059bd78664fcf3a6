"""The content of a request trace, and the reader of its file's lines."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import numpy as np

from sarathi_sim.policies.request import Prefix
from sarathi_sim.profiler.storage.files import open_file, unzipped
from sarathi_sim.profiler.storage.memory import available_bytes, size_text
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.workload import WorkloadError
from sarathi_sim.simulator.loop.records import Floats, Ints

MOST_TOKENS = 2**24
MOST_SECONDS = 1e12  # far beyond any clock; differences of two stay exact enough
SAMPLED_ROWS = 10_000  # tell how large the rest will be
_LONGEST_LINE = 2**20
_MEASURED = 16  # MiB of content, which tell how much larger it is than the file


@dataclass(frozen=True)
class Trace:
    """Prompt and output tokens, arrivals in seconds after the first, users by number, what prompts
    share with others, and sessions by number (None: not recorded). ``left_out`` is the number of
    rows read without prompt or output tokens."""

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
        """Longer prompts and outputs are cut to these (None: as they are)."""
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


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
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


def form(path: Path) -> str:
    """The end of a trace's name that says what it is, such as ".csv", without ".gz"."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


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
    """The size of the content; of a gzipped file as its beginning has it."""
    with open_file(path) as raw:
        file = unzipped(raw)
        content = sum(len(file.read(2**20)) for _ in range(_MEASURED))
        return content / max(raw.tell(), 1) * path.stat().st_size
