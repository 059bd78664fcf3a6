"""A validation: the engine is run beside the simulator, compared with it, and judged."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.records import Floats
from ...config.base import Assignments
from ...config.loading import Experiment, load_experiment
from ...report.timeline import KINDS
from ...results import VALIDATION_FORMAT, to_json
from .cells import Cell
from .session import (
    MOST_OF_TARGET,
    TARGETS,
    Comparison,
    Session,
    agreement,
    off,
    ratio_of,
    run_sessions,
    too_much,
    total_errors,
)

CONFIGS = Path(__file__).parents[1] / "configs"
FEWEST_REPEATS = 3
"""Accepted repeats below which no target is judged."""
MOST_DRIFT = 0.05
"""Limit of a repeat's drift, decided beforehand: beyond it the machine changed."""
RATIO_TARGET = 0.10
REPLAY_TARGET = 0.03
PREDICTIONS = ("calibrated", "grid")
_RATIOS = {"makespan_s": "makespan", "bubble_s.mean": "bubble_per_request"}
"""The metrics that the ``compare`` section of a validation may name."""
_MEASURED = {name: f"{name}_s" for name in ("makespan", "bubble", "bubble_per_request")}
_MEASURED["throughput"] = "tokens_per_s"
"""The measured totals in a report, with their names."""

Report = dict[str, Any]
"""The content of ``validation.json``, or a part of it."""
Comparisons = dict[str, list[Comparison]]
"""The comparisons of each cell, repeat by repeat."""


def load_validation(config: str, assignments: Assignments = ()) -> Experiment:
    """As :func:`load_experiment`; the laboratory's configurations have names, too. Raises UserError
    if ``compare`` names a metric that an engine's runs do not have."""
    shipped = CONFIGS / f"{config}.yaml"
    named = not Path(config).is_file() and Path(config).name == config and shipped.is_file()
    experiment = load_experiment(shipped if named else config, assignments)
    for name, ratio in experiment.compare.items():
        if ratio.metric not in _RATIOS:
            where = f"{experiment.file}: compare.{name}.metric: value {ratio.metric!r}"
            raise UserError(f"{where}: a validation compares {' or '.join(_RATIOS)}")
    return experiment


def check_machine(*, realtime: bool = False) -> None:
    """Raises UserError if the engine cannot run here."""
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "the engine needs torch, which is not installed: pip install 'sarathi-sim[profiler]'"
        )
    if realtime and (not hasattr(os, "sched_setscheduler") or os.geteuid() != 0):
        raise UserError("--realtime: needs Linux, and root")


def measure(
    experiment: Experiment,
    cells: list[Cell],
    profiles: Path,
    progress: Progress,
    say: Say,
    realtime: bool,
) -> tuple[Report, Comparisons]:
    """Run the engine, and compare; returns the content of ``validation.json`` and the comparisons.
    Raises ProfileError if the engine cannot run the cells."""
    how = (progress, say, profiles)
    sessions = run_sessions(cells, experiment.validation, *how, realtime=realtime)
    outcomes = evaluate_all(sessions, progress)
    return to_json(report(experiment, sessions, outcomes) | {"realtime": realtime}), outcomes


def evaluate_all(sessions: Sequence[Session], progress: Progress) -> Comparisons:
    """Every cell in every repeat."""
    repeats = [(session, repeat) for session in sessions for repeat in session.repeats]
    outcomes: Comparisons = {}
    for done, (session, repeat) in enumerate(repeats, 1):
        for cell in session.cells:
            if cell.name in repeat.served:
                outcomes.setdefault(cell.name, []).append(session.evaluate(repeat, cell))
        progress("simulations", done, len(repeats))
    return outcomes


def iterations(outcomes: Mapping[str, Sequence[Comparison]]) -> pd.DataFrame:
    """Every iteration of every repeat, also of rejected ones: its content, measured and predicted
    seconds."""
    tables = [
        outcome.steps.assign(
            cell=name,
            repeat=number,
            measured_s=outcome.measured_iterations,
            **{f"{key}_s": times for key, times in outcome.iterations.items()},
        )
        for name, repeats in outcomes.items()
        for number, outcome in enumerate(repeats)
    ]
    return pd.concat(tables, ignore_index=True)


def middle(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    middle, low, high = (float(of(values)) for of in (np.median, np.min, np.max))
    return {"median": middle, "min": low, "max": high}


def middles(rows: Sequence[Mapping[str, float]]) -> Report:
    """Median and range of each number."""
    return {key: middle([row[key] for row in rows]) for key in rows[0]}


def spread(values: Sequence[float]) -> float:
    """The range over the median."""
    return float(np.ptp(values) / np.median(values))


def median_p90(errors: Floats) -> dict[str, float]:
    """Median and 90th percentile of absolute errors."""
    return {"median": float(np.median(errors)), "p90": float(np.quantile(errors, 0.9))}


def noise_floor(repeats: list[Floats]) -> float:
    """Median relative difference of a micro-batch's time between two repeats, over all pairs with
    the same micro-batches; NaN without any."""
    pairs = ((a, b) for a, b in combinations(repeats, 2) if len(a) == len(b))
    differences = [np.abs(one / other - 1) for one, other in pairs]
    return float(np.median(np.concatenate(differences))) if differences else float("nan")


def iteration_errors(outcome: Comparison, prediction: str) -> Floats:
    """|predicted / measured - 1| of every micro-batch."""
    return np.asarray(np.abs(outcome.iterations[prediction] / outcome.measured_iterations - 1))


def errors_by_kind(repeats: list[Comparison], prediction: str) -> dict[str, dict[str, float]]:
    """Median and 90th percentile of the iterations' errors, by kind, of all repeats together."""
    errors = np.concatenate([iteration_errors(outcome, prediction) for outcome in repeats])
    kind = np.concatenate([outcome.steps["kind"].to_numpy() for outcome in repeats])
    return {
        name: {"count": int((kind == name).sum()), **median_p90(errors[kind == name])}
        for name in KINDS
        if name in kind
    }


def prediction_errors(outcome: Comparison, prediction: str) -> dict[str, float]:
    """Errors of iterations (median and 90th percentile), and of each total."""
    found = median_p90(iteration_errors(outcome, prediction))
    found = {f"iteration_error_{name}": value for name, value in found.items()}
    return found | total_errors(outcome.whole[prediction], outcome.measured)


def report(experiment: Experiment, sessions: Sequence[Session], outcomes: Comparisons) -> Report:
    """The content of ``validation.json``."""
    cells, repeats, accepted = Report(), Report(), dict[str, list[int]]()
    for session in sessions:
        layout = session.layout
        reasons = rejected(session, outcomes)
        quiet = [n for n in range(len(session.repeats)) if n not in reasons]
        repeats[layout] = {
            "run": len(session.repeats),
            "accepted": len(quiet),
            "quiet": len(quiet) >= FEWEST_REPEATS,
            "rejected": [{"repeat": n, "why": why} for n, why in reasons.items()],
            "drift": [repeat.drift for repeat in session.repeats],
            "load_average": [repeat.load for repeat in session.repeats],
            "seconds": session.seconds,
            **session.about,
        }
        for cell in session.cells:
            cells[cell.name] = {
                "layout": layout,
                "online": cell.online,
                "policy": cell.scenario.policy.described(),
                **dict(zip(("pp", "tp"), cell.layout, strict=True)),
                "requests": len(cell.requests()),
                "scenario": cell.scenario.model_dump(mode="json"),
            }
            if cell.online:
                cells[cell.name] |= vars(agreement(session.online[cell.name], cell))
            else:
                accepted[cell.name] = quiet
                cells[cell.name] |= _compared(outcomes[cell.name], quiet)
    gates = {"drift": MOST_DRIFT, "fewest_repeats": FEWEST_REPEATS}
    gates["lost_of_target"] = MOST_OF_TARGET
    result: Report = {
        "format": VALIDATION_FORMAT,
        "name": experiment.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "gates": gates,
        "quiet": all(entry["quiet"] for entry in repeats.values()),
        "repeats": repeats,
        "cells": cells,
        "ratios": _ratios(experiment, outcomes, accepted),
    }
    return result | {"targets": [*_judged(result)]}


def rejected(session: Session, outcomes: Comparisons) -> dict[int, str]:
    """The repeats that the machine disturbed too much, with the reasons."""
    reasons = {}
    for number, repeat in enumerate(session.repeats):
        disturbed = (too_much(outcomes[name][number].lost) for name in repeat.served)
        why = [*filter(None, disturbed)][:1]
        if abs(repeat.drift - 1) > MOST_DRIFT:
            why.insert(0, f"the grid took {repeat.drift:.2f} times as long after as before")
        if why:
            reasons[number] = "; ".join(why)
    return reasons


def _compared(outcomes: list[Comparison], accepted: list[int]) -> Report:
    """A cell's report: all repeats, and statistics over the accepted ones, or all if none was."""
    some = [outcomes[n] for n in accepted] or outcomes
    runs = [outcome.agreement for outcome in outcomes]
    entry: Report = {
        "parity": sum(run.parity for run in runs) / len(runs),
        "first_difference": next(filter(None, (run.first_difference for run in runs)), None),
        "measured": {
            shown: middle([outcome.measured[name] for outcome in some])
            for name, shown in _MEASURED.items()
        },
        "batches_sha256": sorted({run.batches_sha256 for run in runs}),
        "lost": [outcome.lost for outcome in outcomes],
        "op_share": middle([outcome.op_share for outcome in some]),
        "replay": middles([outcome.agreement.replay for outcome in some]),
        "iterations": len(some[0].measured_iterations),
        "noise_floor": noise_floor([outcome.measured_iterations for outcome in some]),
        "makespan_spread": spread([outcome.measured["makespan"] for outcome in some]),
    }
    for prediction in some[0].whole:
        entry[prediction] = {
            **middles([prediction_errors(outcome, prediction) for outcome in some]),
            "repeats": [prediction_errors(outcome, prediction) for outcome in outcomes],
            "by_kind": errors_by_kind(some, prediction),
        }
    # The calibrated prediction is judged; the prediction of the grid alone is reported, too.
    return entry | {key: entry["calibrated"][key] for key in (*TARGETS, "throughput_error")}


def _ratios(
    experiment: Experiment, outcomes: Comparisons, accepted: Mapping[str, list[int]]
) -> Report:
    """The configuration's ``compare``: measured and simulated, repeat by repeat."""
    ratios = {}
    for name, ratio in experiment.compare.items():
        above, below = ratio.over
        if above not in outcomes or below not in outcomes:
            continue
        total = _RATIOS[ratio.metric]
        both = [n for n in accepted[above] if n in accepted[below]]
        rows = []
        for n in both or range(len(outcomes[above])):
            one, other = outcomes[above][n], outcomes[below][n]
            pairs = {"measured": (one.measured, other.measured)}
            pairs |= {key: (one.whole[key], other.whole[key]) for key in PREDICTIONS}
            rows.append({key: ratio_of(a[total], b[total]) for key, (a, b) in pairs.items()})
        found = middles(rows)
        ratios[name] = {
            "of": [above, below],
            "metric": ratio.metric,
            "repeats": len(both),
            **found,
            "error": off(found["calibrated"]["median"], found["measured"]["median"]),
            "measured_spread": spread([row["measured"] for row in rows]),
        }
    return ratios


def _judged(result: Report) -> Iterator[Report]:
    """Each target's limit, value, and whether it was met; None if the machine was too busy."""
    targets: list[tuple[str, str, float, float, bool]] = []
    for name, cell in result["cells"].items():
        quiet = result["repeats"][cell["layout"]]["quiet"]
        targets.append(("parity", name, 0.0, cell["parity"] - 1, True))
        if "calibrated" in cell:
            targets += [
                (what, name, limit, cell[what]["median"], quiet) for what, limit in TARGETS.items()
            ]
            replayed = cell["replay"]["makespan_error"]["median"]
            targets.append(("replay makespan", name, REPLAY_TARGET, replayed, quiet))
    for name, ratio in result["ratios"].items():
        # Only repeats that both layouts accepted: each may have rejected different ones.
        enough = ratio["repeats"] >= FEWEST_REPEATS
        targets.append(("ratio", name, RATIO_TARGET, ratio["error"], enough))
    for what, of, limit, value, judged in targets:
        if np.isfinite(value):
            met = abs(value) <= limit if judged else None
            yield {"what": what, "cell": of, "limit": limit, "value": value, "met": met}
