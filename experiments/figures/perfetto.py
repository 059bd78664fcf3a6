"""A window of a run in Chrome's trace format, which ui.perfetto.dev opens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.figures.slices import (
    KINDS,
    StageSlices,
    Window,
    bubble_name,
    stage_slices,
)
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.views.metrics import Analysis

# Perfetto's reserved colour names.
_COLOURS = {"prefill": "thread_state_runnable", "decode": "rail_response", "mixed": "good"}


def trace_events(analysis: Analysis, window: Window) -> dict[str, Any]:
    """Replicas as processes, stages as threads, micro-batches and bubbles as slices (in us).

    Process and thread ids begin at 1: Perfetto takes 0 for the idle process.
    """
    events: list[dict[str, Any]] = []
    named = set()
    for stage in stage_slices(analysis, window):
        if stage.replica not in named:
            named.add(stage.replica)
            events += _about("process", stage, f"replica {stage.replica}", stage.replica)
        events += _about("thread", stage, f"stage {stage.stage}", stage.stage)
        events += _stage_events(analysis.records, stage)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(analysis: Analysis, window: Window, path: Path) -> None:
    """Write the trace; ``path`` ends in ``.json.gz``. The same run gives the same bytes."""
    text = json.dumps(trace_events(analysis, window), separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _about(what: str, stage: StageSlices, name: str, index: int) -> list[dict[str, Any]]:
    """The name of a process or thread, and where it is shown."""
    arguments: dict[str, dict[str, Any]] = {
        f"{what}_name": {"name": name},
        f"{what}_sort_index": {"sort_index": index},
    }
    return [
        {"ph": "M", "name": event, **_track(stage), "args": args}
        for event, args in arguments.items()
    ]


def _track(stage: StageSlices) -> dict[str, int]:
    return {"pid": stage.replica + 1, "tid": stage.stage + 1}


def _stage_events(records: Records, slices: StageSlices) -> list[dict[str, Any]]:
    columns = records.replicas[slices.replica].iterations
    track = {"ph": "X", **_track(slices)}
    events: list[dict[str, Any]] = []
    for i, row in enumerate(slices.row.tolist()):
        start, finish = float(slices.start[i]), float(slices.finish[i])
        if slices.bubble_s[i] > 0:
            began = float(slices.bubble_start[i])
            events.append(
                {
                    **track,
                    "name": f"bubble {bubble_name(int(slices.bubble_kind[i]))}",
                    "cat": "bubble",
                    "cname": "terrible",
                    **_span(began, start),
                }
            )
        kind = KINDS[slices.kind[i]]
        counts = {
            name: int(columns[name][row])
            for name in ("group", "prefill_tokens", "prefill_context", "decodes", "decode_context")
        }
        events.append(
            {
                **track,
                "name": f"{kind} {counts['prefill_tokens']}+{counts['decodes']}",
                "cat": kind,
                "cname": _COLOURS[kind],
                **_span(start, finish),
                "args": {"iteration": row, **counts},
            }
        )
    return events


def _span(start_s: float, finish_s: float) -> dict[str, float]:
    # Both ends rounded to nanoseconds, so that neighbours still touch and never overlap.
    start, finish = round(1e9 * start_s), round(1e9 * finish_s)
    return {"ts": start / 1000, "dur": (finish - start) / 1000}
