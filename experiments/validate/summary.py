"""The report of a validation: content of validation.json, met targets, tables, figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.table import Table

from sarathi_sim.experiments.config.loading import Experiment
from sarathi_sim.experiments.content import rich_table
from sarathi_sim.experiments.figures.slices import Window, stage_slices
from sarathi_sim.experiments.figures.style import BLACK, GREY, KIND_COLOURS
from sarathi_sim.experiments.figures.timeline import stage_timeline
from sarathi_sim.experiments.results import VALIDATION_FORMAT
from sarathi_sim.experiments.validate.differences import (
    MOST_DRIFT,
    MOST_OF_TARGET,
    PREDICTIONS,
    TARGETS,
    Comparison,
    Whole,
    drift,
    errors_by_kind,
    evaluate,
    iteration_errors,
    noise_floor,
    off,
    online_outcome,
    rejection,
)
from sarathi_sim.experiments.validate.session import Cell, Session
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metrics import Analysis

FEWEST_REPEATS = 3
"""Accepted repeats below which nothing is claimed."""

RATIO_TARGET = 0.10
REPLAY_TARGET = 0.03

Comparisons = dict[str, list[Comparison]]
"""Of each cell, repeat by repeat."""


def evaluate_all(sessions: Sequence[Session], progress: Progress) -> Comparisons:
    """Every offline cell in every repeat."""
    jobs = [
        (session, repeat, cell)
        for session in sessions
        for repeat in session.repeats
        for cell in session.cells
        if not cell.online
    ]
    found: Comparisons = {}
    for done, (session, repeat, cell) in enumerate(jobs):
        progress("simulations", done, len(jobs))
        found.setdefault(cell.name, []).append(evaluate(session, repeat, cell))
    progress("simulations", len(jobs), len(jobs))
    return found


def report(
    experiment: Experiment, sessions: Sequence[Session], outcomes: Comparisons
) -> dict[str, Any]:
    """The content of ``validation.json``."""
    cells: dict[str, Any] = {}
    repeats: dict[str, Any] = {}
    accepted: dict[str, list[int]] = {}
    for session in sessions:
        layout = f"pp{session.spec.pp}_tp{session.spec.tp}"
        offline = [cell for cell in session.cells if not cell.online]
        rejected = {}
        for number, repeat in enumerate(session.repeats):
            why = rejection(repeat, [outcomes[cell.name][number] for cell in offline])
            if why is not None:
                rejected[number] = why
        kept = [n for n in range(len(session.repeats)) if n not in rejected]
        repeats[layout] = {
            "run": len(session.repeats),
            "accepted": len(kept),
            "quiet": len(kept) >= FEWEST_REPEATS,
            "rejected": [{"repeat": n, "why": why} for n, why in rejected.items()],
            "drift": [drift(repeat) for repeat in session.repeats],
            "load_average": [repeat.load for repeat in session.repeats],
            "seconds": session.seconds,
            "engine": session.environment
            | {"device": session.spec.device, "dtype": session.spec.dtype},
        }
        for cell in offline:
            accepted[cell.name] = kept
            cells[cell.name] = _cell(cell, outcomes[cell.name], kept) | {"layout": layout}
        for name, run in session.online.items():
            cell = next(cell for cell in session.cells if cell.name == name)
            parity, measured, replayed = online_outcome(cell, run)
            cells[name] = _about(cell) | {
                "layout": layout,
                "parity": float(parity.identical),
                "batches_sha256": parity.engine_sha256,
                "first_difference": parity.difference,
                "replay": _errors(replayed, measured),
            }
    result: dict[str, Any] = {
        **head(experiment, lost_of_target=MOST_OF_TARGET),
        "quiet": all(entry["quiet"] for entry in repeats.values()),
        "repeats": repeats,
        "cells": cells,
        "ratios": _ratios(experiment, outcomes, accepted),
    }
    result["targets"] = _targets(result)
    return result


def head(experiment: Experiment, **gates: float) -> dict[str, Any]:
    """What every report begins with; the ``gates`` are beside those of all."""
    return {
        "format": VALIDATION_FORMAT,
        "name": experiment.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "gates": {**gates, "drift": MOST_DRIFT, "fewest_repeats": FEWEST_REPEATS},
    }


def _about(cell: Cell) -> dict[str, Any]:
    return {
        "policy": cell.policy,
        "pp": cell.layout[0],
        "tp": cell.layout[1],
        "online": cell.online,
        "requests": len(cell.requests()),
        "scenario": cell.scenario.model_dump(mode="json"),
    }


def _cell(cell: Cell, all_repeats: list[Comparison], kept: list[int]) -> dict[str, Any]:
    """All repeats are listed; statistics are over the accepted ones, or all where none was."""
    some = [all_repeats[n] for n in kept] or all_repeats
    parities = [outcome.parity for outcome in all_repeats]
    entry = _about(cell) | {
        "parity": float(np.mean([parity.identical for parity in parities])),
        "batches_sha256": sorted({parity.engine_sha256 for parity in parities}),
        "first_difference": next((p.difference for p in parities if not p.identical), None),
        "iterations": len(some[0].measured_iterations),
        "noise_floor": noise_floor([outcome.measured_iterations for outcome in some]),
        "makespan_spread": _spread([o.measured.makespan_s for o in some]),
        "measured": {
            name: middle([getattr(o.measured, name) for o in some])
            for name in ("makespan_s", "tokens_per_s", "bubble_s", "bubble_per_request_s")
        },
        "lost": [asdict(o.lost) for o in all_repeats],
        "op_share": middle([o.op_share for o in some]),
        "replay": middles([_errors(o.replayed, o.measured) for o in some]),
    }
    for prediction in some[0].whole:
        entry[prediction] = middles([_prediction(outcome, prediction) for outcome in some]) | {
            "by_kind": errors_by_kind(some, prediction),
            "repeats": [_prediction(outcome, prediction) for outcome in all_repeats],
        }
    # The calibrated prediction is judged; that of the grid alone is reported, too.
    return entry | {key: entry["calibrated"][key] for key in (*TARGETS, "throughput_error")}


def _prediction(outcome: Comparison, prediction: str) -> dict[str, Any]:
    of_iterations = spread_of(iteration_errors(outcome, prediction))
    return of_iterations | _errors(outcome.whole[prediction], outcome.measured)


def spread_of(errors: Floats) -> dict[str, float]:
    """Of a run's iterations: the median error, and the 90th percentile."""
    return {
        "iteration_error_median": float(np.median(errors)),
        "iteration_error_p90": float(np.quantile(errors, 0.9)),
    }


def _errors(simulated: Whole, measured: Whole) -> dict[str, float]:
    """Relative errors, signed. Bubbles are compared where there is a pipeline."""
    found = {
        "makespan_error": off(simulated.makespan_s, measured.makespan_s),
        "throughput_error": off(simulated.tokens_per_s, measured.tokens_per_s),
        "ttft_p50_error": off(simulated.ttft_p50_s, measured.ttft_p50_s),
        "ttft_p90_error": off(simulated.ttft_p90_s, measured.ttft_p90_s),
    }
    if len(measured.bubble_by_stage_s) == 1:
        return found | {"bubble_error": float("nan")}
    found["bubble_error"] = off(simulated.bubble_s, measured.bubble_s)
    found["bubble_per_request_error"] = off(
        simulated.bubble_per_request_s, measured.bubble_per_request_s
    )
    stages = zip(simulated.bubble_by_stage_s, measured.bubble_by_stage_s, strict=True)
    for stage, (one, other) in enumerate(stages):
        found[f"bubble_stage{stage}_error"] = off(one, other)
    return found


def middles(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Median and range of each number."""
    return {key: middle([row[key] for row in rows]) for key in rows[0]}


def middle(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {
        "median": float(np.median(values)),
        "min": float(np.min(values)),
        "max": float(np.max(values)),
    }


def _spread(values: Sequence[float]) -> float:
    return float((np.max(values) - np.min(values)) / np.median(values))


def _ratios(
    experiment: Experiment, outcomes: Comparisons, accepted: Mapping[str, list[int]]
) -> dict[str, Any]:
    """The configuration's ``compare``: measured and simulated, repeat by repeat."""
    found = {}
    for name, ratio in experiment.compare.items():
        above, below = ratio.over
        if above not in outcomes or below not in outcomes:
            continue
        both = [n for n in accepted[above] if n in accepted[below]]
        shown = both or range(len(outcomes[above]))
        pairs = [(outcomes[above][n], outcomes[below][n]) for n in shown]
        field = _FIELDS[ratio.metric]
        measured = [_ratio(field, one.measured, other.measured) for one, other in pairs]
        entry: dict[str, Any] = {"of": [above, below], "metric": ratio.metric, "repeats": len(both)}
        entry["measured"] = middle(measured)
        for prediction in PREDICTIONS:
            entry[prediction] = middle(
                [_ratio(field, o.whole[prediction], p.whole[prediction]) for o, p in pairs]
            )
        entry["error"] = off(entry["calibrated"]["median"], entry["measured"]["median"])
        entry["measured_spread"] = _spread(measured)
        found[name] = entry
    return found


def _ratio(field: str, above: Whole, below: Whole) -> float:
    below_s = float(getattr(below, field))
    return float(getattr(above, field)) / below_s if below_s else float("nan")


_FIELDS = {"makespan_s": "makespan_s", "bubble_s.mean": "bubble_per_request_s"}
COMPARABLE = tuple(_FIELDS)
"""What a ``compare`` section may ask of a validation."""


def _targets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Limit, value and whether it was met; None if the machine was too busy for a layout."""
    rows = []
    quiet = {
        name: result["repeats"][cell["layout"]]["quiet"] for name, cell in result["cells"].items()
    }
    for name, cell in result["cells"].items():
        rows += judged("parity", name, 0.0, cell["parity"] - 1, may=True)
        if cell["online"]:
            continue
        for what, limit in TARGETS.items():
            rows += judged(what, name, limit, cell[what]["median"], may=quiet[name])
        replayed = cell["replay"]["makespan_error"]["median"]
        rows += judged("replay makespan", name, REPLAY_TARGET, replayed, may=quiet[name])
    for name, ratio in result["ratios"].items():
        # Those that both accepted: two layouts may have rejected different repeats.
        enough = ratio["repeats"] >= FEWEST_REPEATS
        rows += judged("ratio", name, RATIO_TARGET, ratio["error"], may=enough)
    return rows


def judged(what: str, of: str, limit: float, value: float, *, may: bool) -> list[dict[str, Any]]:
    """A target's row: whether it was met, or None where one ``may`` not say. None for a NaN."""
    if not np.isfinite(value):
        return []
    met = abs(value) <= limit if may else None
    return [{"what": what, "cell": of, "limit": limit, "value": value, "met": met}]


def cells_table(cells: Sequence[Cell]) -> Table:
    """What a validation would run, side by side."""
    rows: dict[str, list[str]] = {
        "model": [cell.model.name for cell in cells],
        "this machine's": [cell.device for cell in cells],
        "policy": [cell.scenario.policy.name for cell in cells],
        "TP x PP": [f"{tp} x {pp}" for pp, tp in (cell.layout for cell in cells)],
        "sequences of a micro-batch": [str(cell.sequences) for cell in cells],
        "requests": [f"{len(cell.requests()):,}" for cell in cells],
    }
    return rich_table([""], [cell.name for cell in cells], [[k, *v] for k, v in rows.items()])


def table(result: Mapping[str, Any]) -> Table:
    """The cells side by side; medians over the accepted repeats, with their range."""
    rows = [
        [label, *(_cell_text(cell, keys) for cell in result["cells"].values())]
        for label, keys in _ROWS.items()
    ]
    rows = [row for row in rows if set(row[1:]) != {"-"}]
    for name, ratio in result["ratios"].items():
        both = (_ratio_text(ratio[key]["median"]) for key in ("measured", "calibrated"))
        rows.append([f"ratio {name}: measured / simulated", " / ".join(both)])
    return rich_table([""], list(result["cells"]), rows, title=result["name"], title_style="bold")


_ROWS = {
    "scheduling: batches identical": ("parity",),
    "prediction: iteration error, median": ("iteration_error_median",),
    "prediction: iteration error, p90": ("iteration_error_p90",),
    "the same from the grid alone, median": ("grid", "iteration_error_median"),
    "noise floor, repeat against repeat": ("noise_floor",),
    "whole: makespan error": ("makespan_error",),
    "the same from the profile of single ops": ("isolated", "makespan_error"),
    "whole: throughput error": ("throughput_error",),
    "whole: TTFT error, mean": ("ttft_error",),
    "whole: TPOT error, mean": ("tpot_error",),
    "whole: total bubble error": ("bubble_error",),
    "whole: TTFT error, median": ("calibrated", "ttft_p50_error"),
    "replay of measured times: makespan error": ("replay", "makespan_error"),
    "spread of the measured makespan": ("makespan_spread",),
    "share of GEMMs, attention, all-reduces, LM head in the stages' time": ("op_share",),
}


def iterations(outcomes: Mapping[str, Sequence[Comparison]]) -> pd.DataFrame:
    """Every micro-batch of every repeat, rejected ones included: measured and predicted seconds."""
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "cell": name,
                    "repeat": number,
                    "micro_batch": np.arange(len(outcome.kinds)),
                    "kind": outcome.kinds,
                    "measured_s": outcome.measured_iterations,
                    **{f"{key}_s": outcome.iterations[key] for key in outcome.iterations},
                }
            )
            for name, repeats in outcomes.items()
            for number, outcome in enumerate(repeats)
        ],
        ignore_index=True,
    )


def _cell_text(cell: Mapping[str, Any], keys: Sequence[str]) -> str:
    node: Any = cell
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    if node is None:
        return "-"
    if isinstance(node, Mapping):
        if node["median"] is None:
            return "-"
        if keys == ("op_share",):
            return f"{node['median']:.0%}"
        return f"{node['median']:+.1%} ({node['min']:+.1%} to {node['max']:+.1%})"
    return f"{node:.0%}" if keys == ("parity",) else f"{node:.1%}"


def _ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def verdict(result: Mapping[str, Any]) -> list[str]:
    """The conclusions in sentences, layout by layout."""
    lines = []
    for layout, entry in result["repeats"].items():
        lines += [f"{layout}: repeat {r['repeat']} rejected: {r['why']}" for r in entry["rejected"]]
    missed = [row for row in result["targets"] if row["met"] is False]
    lines += [
        f"missed: {row['what']} of {row['cell']} is {row['value']:+.1%}, "
        f"and should be within {row['limit']:.0%}"
        for row in missed
    ]
    lines += [
        f"{layout}: the machine was not quiet: {entry['accepted']} of {entry['run']} repeats were "
        f"accepted, fewer than {FEWEST_REPEATS}, so nothing is claimed of predicted times"
        for layout, entry in result["repeats"].items()
        if not entry["quiet"]
    ]
    unjudged = any(row["met"] is None for row in result["targets"])
    if not missed:
        lines.append("all targets that could be judged were met" if unjudged else "all targets met")
    return lines


_MARKS = {"prefill": "s", "mixed": "D", "decode": "o"}


def iterations_figure(outcomes: Mapping[str, Comparison], prediction: str) -> Figure:
    """A panel a cell: every micro-batch's time, predicted over measured; the line is equality."""
    across = min(2, len(outcomes))
    down = -(-len(outcomes) // across)
    figure = Figure(figsize=(5 * across, 0.6 + 4 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels[len(outcomes) :]:
        axes.remove()
    for axes, (name, outcome) in zip(panels, outcomes.items(), strict=False):
        measured = 1e3 * outcome.measured_iterations
        predicted = 1e3 * outcome.iterations[prediction]
        kind = np.array(outcome.kinds)
        for label, mark in _MARKS.items():
            some = kind == label
            if some.any():
                axes.plot(
                    measured[some], predicted[some], mark, color=KIND_COLOURS[label],
                    markeredgecolor=BLACK, markeredgewidth=0.5, markersize=6, label=label,
                )  # fmt: skip
        ends = [min(measured.min(), predicted.min()), max(measured.max(), predicted.max())]
        axes.plot(ends, ends, "-", color=BLACK, linewidth=1.2)
        for factor in (0.9, 1.1):
            axes.plot(ends, [factor * end for end in ends], ":", color=GREY, linewidth=1.2)
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.set(title=name, xlabel="measured (ms)", ylabel="predicted (ms)")
        axes.legend(loc="upper left", title="dotted: 10 % off")
    return figure


def timelines_figure(outcomes: Mapping[str, Comparison], prediction: str) -> Figure:
    """Measured and simulated stages above each other, cell by cell, in the middle of the run."""
    runs = {}
    for name, outcome in outcomes.items():
        runs[f"{name}: measured"] = Analysis(outcome.records["measured"])
        runs[f"{name}: simulated"] = Analysis(outcome.records[prediction])
    shortest = min(analysis.records.end_s for analysis in runs.values())
    window = Window(0.3 * shortest, 0.25 * shortest)
    panels = {name: stage_slices(analysis, window) for name, analysis in runs.items()}
    return stage_timeline(panels, window)
