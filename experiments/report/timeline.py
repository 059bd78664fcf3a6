"""The work of every stage in a window of time: rows of a timeline, and Chrome's trace format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.records import Floats, Ints, Records, ReplicaLog
from sarathi_sim.simulator.views.ledger import BUBBLES
from sarathi_sim.simulator.views.metrics import Analysis

_BINS, _OF_MEMORY = 80, 60
KINDS = ("prefill", "decode", "mixed")

Curve = tuple[Floats, Floats]
IDLE = (*BUBBLES, "slowest rank")
"""The kinds of idle time before a batch."""


@dataclass(frozen=True)
class StageSlices:
    """One stage of one replica within a window; times in seconds, one entry per micro-batch.

    ``row`` is the micro-batch's row in the replica's iteration columns, ``kind`` indexes
    :data:`KINDS`. ``bubble_start`` is when the idle time before it began, ``bubble_s`` the part of
    it that was a bubble (communication and turn-around included), ``bubble_kind`` indexes
    :data:`IDLE`. ``called`` is the replica's name, with its rank if it has several; what a ``rank``
    waited for others at the end of a step is the idle time before its next one.
    """

    replica: int
    called: str
    stage: int
    row: Ints
    kind: Ints
    start: Floats
    finish: Floats
    bubble_start: Floats
    bubble_s: Floats
    bubble_kind: Ints
    rank: bool = False

    @property
    def label(self) -> str:
        """The name of the row: the replica and the stage, or the rank."""
        return self.called if self.rank else f"{self.called}:{self.stage}"


@dataclass(frozen=True)
class Window:
    """A window of simulated time, in seconds."""

    start_s: float
    length_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.length_s

    def check(self, end_s: float) -> None:
        """Raise UserError if it does not begin before ``end_s``, when the last scenario ends."""
        if self.start_s >= end_s > 0:
            raise UserError(
                f"--window {self.start_s:g}:{self.length_s:g}: nothing happens there: "
                f"START must be less than {end_s:.6g}, when the last scenario ends"
            )


def default_window(runs: list[Records]) -> Window:
    """A window in the middle of the shortest run: four passes through the slowest pipeline, or
    without one forty iterations of the slowest replica."""
    ends = [records.end_s for records in runs if records.end_s > 0]
    if not ends:
        return Window(0.0, 1.0)
    pipelines, single = [0.0], [0.0]
    for log in (log for records in runs for log in records.replicas if log.num_iterations):
        took = float(np.median(log.iterations["finish_s"] - log.iterations["ready_s"]))
        (pipelines if log.num_stages > 1 else single).append(took)
    length = 4 * max(pipelines) or 40 * max(single)
    return Window(min(ends) / 2, min(length, min(ends)))


def stage_slices(analysis: Analysis, window: Window) -> list[StageSlices]:
    """All stages of all replicas, in order."""
    found = []
    pairs = zip(analysis.records.replicas, analysis.gaps, strict=True)
    for number, (log, split) in enumerate(pairs):
        times = split.times
        kind = iteration_kinds(log)
        bubble = split.bubble + split.communication + split.turnaround
        bubble_kind, ended = split.kind.astype(np.int64), times.finish
        if (waited := log.waited_s) is not None:
            ended = ended - waited[:, None]
            before = np.append(0.0, waited[:-1])
            bubble = bubble + split.slowest_rank + (before - waited)[:, None]
            bubble_kind[:] = IDLE.index("slowest rank")
        for stage in range(log.num_stages):
            start, finish = times.start[:, stage], ended[:, stage]
            released = finish if waited is not None else times.release[:, stage]
            released = np.concatenate([start[:1], released[:-1]])
            rows = np.flatnonzero((released < window.end_s) & (finish > window.start_s))
            busy = (kind[rows], start[rows], finish[rows])
            idle = (released[rows], bubble[rows, stage], bubble_kind[rows])
            where = (number, analysis.records.called(number), stage)
            found.append(StageSlices(*where, rows, *busy, *idle, waited is not None))
    return found


def iteration_kinds(log: ReplicaLog) -> Ints:
    """The kind of every micro-batch: an index of :data:`KINDS`."""
    columns = log.iterations
    has_prefill, has_decode = columns["prefill_tokens"] > 0, columns["decodes"] > 0
    return np.where(has_prefill & has_decode, 2, np.where(has_prefill, 0, 1))


def busy_shares(analysis: Analysis, bins: int = _BINS) -> tuple[Floats, Floats]:
    """The edges of equal intervals of the run, and the share of each that stages spend on each of
    :data:`KINDS`, mean over stages."""
    edges = np.linspace(0.0, max(analysis.records.end_s, 1e-9), bins + 1)
    total, stages = np.zeros((len(KINDS), bins)), 0
    for log, split in zip(analysis.records.replicas, analysis.gaps, strict=True):
        stages += log.num_stages
        kinds: Ints = iteration_kinds(log)
        for stage in range(log.num_stages):
            start, finish = split.times.start[:, stage], split.times.finish[:, stage]
            for kind in range(len(KINDS)):
                total[kind] += _time_in(edges, start[kinds == kind], finish[kinds == kind])
    shares: Floats = total / (max(stages, 1) * np.diff(edges))
    return edges, shares


def _time_in(edges: Floats, start: Floats, finish: Floats) -> Floats:
    """How much of each interval lies between starts and finishes, which rise."""
    when, took = np.stack([start, finish], axis=1).ravel(), np.cumsum(finish - start)
    done = np.stack([took - (finish - start), took], axis=1).ravel()
    return np.diff(np.interp(edges, when, done)) if len(when) else np.zeros(len(edges) - 1)


def joined(stage: StageSlices, window: Window) -> list[tuple[Floats, Floats]]:
    """What takes most of the time in each 500th of the window, neighbours as one: starts and ends
    of each of :data:`KINDS`, and of bubbles."""
    edges = np.linspace(window.start_s, window.end_s, 501)
    idle = stage.bubble_s > 0
    kinds = [stage.kind == kind for kind in range(len(KINDS))]
    spans = [(stage.start[one], stage.finish[one]) for one in kinds]
    spans.append((stage.bubble_start[idle], stage.start[idle]))
    shares = np.stack([_time_in(edges, *span) for span in spans])
    most = np.where(
        shares.sum(axis=0) < np.diff(edges) / 2,
        -1,
        shares.argmax(axis=0),
    )
    first = np.flatnonzero(np.diff(most, prepend=-2))
    starts, ends = edges[first], edges[np.append(first[1:], len(most))]
    here = most[first]
    return [(starts[here == kind], ends[here == kind]) for kind in range(len(spans))]


def memory_curves(records: Records) -> tuple[Curve, Curve, Curve] | None:
    """Occupancy in percent, tokens and sequences of an iteration, of the first replica (of two
    pools the first decode worker) over simulated time, means over a 60th of the run; None without
    paged memory."""
    log = records.replicas[records.prefill_logs]
    if log.pool is None:
        return None
    columns = log.iterations
    return (
        _means(log, 100 * log.pool.kv_tokens / log.kv_capacity),
        _means(log, columns["prefill_tokens"] + columns["decodes"] + columns["drafts"]),
        _means(log, columns["chunks"] + columns["decodes"]),
    )


def _means(log: ReplicaLog, values: Floats) -> Curve:
    """Middles of intervals of time, and the mean over the iterations in each; NaN without any."""
    ready = log.iterations["ready_s"]
    busy = log.iterations["prefill_tokens"] + log.iterations["decodes"] > 0
    edges = np.linspace(
        0.0,
        max(float(ready[-1]), 1e-9),
        _OF_MEMORY + 1,
    )
    count, _ = np.histogram(ready[busy], edges)
    total, _ = np.histogram(
        ready[busy],
        edges,
        weights=values[busy].astype(np.float64),
    )
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return (edges[:-1] + edges[1:]) / 2, mean


def bubble_name(kind: int) -> str:
    """The name of a bubble, as in the ledger."""
    return IDLE[kind].upper() if IDLE[kind].startswith("pb") else IDLE[kind]


def parse_window(text: str) -> Window:
    """``START:LENGTH`` in seconds. Raises UserError."""
    start, colon, length = text.partition(":")
    try:
        window = Window(float(start), float(length))
    except ValueError:
        window = Window(-1.0, 0.0)
    if not (colon and 0 <= window.start_s < 1e9 and 0 < window.length_s < 1e9):
        raise UserError(
            f"--window {text}: expected START:LENGTH in seconds, as in 120:1.5; "
            "START must be at least 0, LENGTH more than 0, and both less than 1e9"
        )
    return window


MOST_BOXES = 50_000
"""Boxes of all timelines of a report together: 3 MB of its file, with the bubbles."""
MOST_ROWS = 32


def boxes_window(analyses: Iterable[Analysis], most: int = MOST_BOXES) -> Window:
    """The part of the runs that the timelines of a page hold, around the middle of the shortest
    run: as long as ``most`` boxes allow."""
    records = [analysis.records for analysis in analyses]
    first = default_window(records)
    a_second = sum(
        log.num_iterations * min(log.num_stages, MOST_ROWS) / max(each.end_s, 1e-9)
        for each in records
        for log in each.replicas[:MOST_ROWS]
    )
    length = max(0.9 * most / max(a_second, 1e-9), first.length_s)
    end_s = max(each.end_s for each in records)
    if length >= end_s:
        return Window(0.0, max(end_s, 1e-9))
    return Window(max(0.0, first.start_s - length / 2), length)


# Perfetto's reserved colour names.
_COLOURS = {"prefill": "thread_state_runnable", "decode": "rail_response", "mixed": "good"}


def trace_events(analysis: Analysis, window: Window) -> dict[str, Any]:
    """Replicas as processes, stages as threads, micro-batches and bubbles as slices (in us)."""
    events: list[dict[str, Any]] = []
    for stage in stage_slices(analysis, window):
        if stage.stage == 0:
            events += _about("process", stage, f"replica {stage.called}", stage.replica)
        events += _about("thread", stage, f"stage {stage.stage}", stage.stage)
        events += _stage_events(analysis.records, stage)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(analysis: Analysis, window: Window, path: Path) -> None:
    """Write the trace; ``path`` ends in ``.json.gz``. The same run gives the same bytes."""
    text = json.dumps(trace_events(analysis, window), separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _stage_events(records: Records, slices: StageSlices) -> list[dict[str, Any]]:
    columns = records.replicas[slices.replica].iterations
    keys = ("group", "prefill_tokens", "prefill_context", "decodes", "decode_context")
    track = {"ph": "X", **_track(slices)}
    events: list[dict[str, Any]] = []
    for i, row in enumerate(slices.row.tolist()):
        start, finish = float(slices.start[i]), float(slices.finish[i])
        if slices.bubble_s[i] > 0:
            about = {"name": f"bubble {bubble_name(int(slices.bubble_kind[i]))}", "cat": "bubble"}
            span = _span(float(slices.bubble_start[i]), start)
            events.append({**track, **about, "cname": "terrible", **span})
        kind, counts = KINDS[slices.kind[i]], {key: int(columns[key][row]) for key in keys}
        about = {"name": f"{kind} {counts['prefill_tokens']}+{counts['decodes']}", "cat": kind}
        more = {"cname": _COLOURS[kind], "args": {"iteration": row, **counts}}
        events.append({**track, **about, **_span(start, finish), **more})
    return events


def _track(stage: StageSlices) -> dict[str, int]:
    # From 1 on: Perfetto takes 0 for the idle process.
    return {"pid": stage.replica + 1, "tid": stage.stage + 1}


def _about(what: str, stage: StageSlices, name: str, index: int) -> list[dict[str, Any]]:
    """The name of a process or thread, and where it is shown."""
    told = ((f"{what}_name", {"name": name}), (f"{what}_sort_index", {"sort_index": index}))
    return [
        {
            "ph": "M",
            "name": event,
            **_track(stage),
            "args": args,
        }
        for event, args in told
    ]


def _span(start_s: float, finish_s: float) -> dict[str, float]:
    # Both ends rounded to nanoseconds, so that neighbours still touch and never overlap.
    start, finish = round(1e9 * start_s), round(1e9 * finish_s)
    return {"ts": start / 1000, "dur": (finish - start) / 1000}
