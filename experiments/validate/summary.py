"""The report of a validation: the content of ``validation.json``, and the met targets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np

from sarathi_sim.experiments.config.loading import Experiment
from sarathi_sim.experiments.results import VALIDATION_FORMAT
from sarathi_sim.experiments.validate.cells import Cell
from sarathi_sim.experiments.validate.differences import (
    MOST_DRIFT,
    PREDICTIONS,
    Comparison,
    drift,
    errors_by_kind,
    evaluate,
    iteration_errors,
    noise_floor,
    online_outcome,
    rejection,
)
from sarathi_sim.experiments.validate.disturbance import MOST_OF_TARGET, TARGETS
from sarathi_sim.experiments.validate.session import Session
from sarathi_sim.experiments.validate.totals import Whole, off
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.simulator.loop.records import Floats

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
