"""A validation: a real engine is run beside the simulator, compared with it, and judged."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_sim.experiments.config.loading import Experiment
from sarathi_sim.experiments.measured.session import (
    Cell,
    Comparison,
    Session,
    errors_by_kind,
    judged,
    middle,
    middles,
    noise_floor,
    off,
    prediction_errors,
    spread,
)
from sarathi_sim.experiments.measured.torch_session import (
    MOST_OF_TARGET,
    TorchSession,
    run_sessions,
)
from sarathi_sim.experiments.measured.vllm_session import check_cells, find_python, run_session
from sarathi_sim.experiments.results import VALIDATION_FORMAT, to_json
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.profiler.storage.strict import UserError

FEWEST_REPEATS = 3
"""Accepted repeats below which no target is judged."""
MOST_DRIFT = 0.05
"""Limit of a repeat's drift, decided beforehand: beyond it the machine changed."""
RATIO_TARGET = 0.10
REPLAY_TARGET = 0.03
PREDICTIONS = ("calibrated", "grid")
_RATIOS = {"makespan_s": "makespan", "bubble_s.mean": "bubble_per_request"}
"""The metrics that the ``compare`` section of a validation may name."""

Comparisons = dict[str, list[Comparison]]
"""The comparisons of each cell, repeat by repeat."""


def check_engine(
    engine: str, experiment: Experiment, cells: Sequence[Cell], *, realtime: bool
) -> None:
    """Raises UserError, before the work, if the engine cannot run, or if ``compare`` names a
    metric that an engine's runs do not have."""
    for name, ratio in experiment.compare.items():
        if ratio.metric not in _RATIOS:
            raise UserError(
                f"{experiment.file}: compare.{name}.metric: value {ratio.metric!r}: "
                f"a validation compares {' or '.join(_RATIOS)}"
            )
    if engine == "vllm":
        if realtime:
            raise UserError("--realtime: only for the engine in torch; vLLM's clock is CPU time")
        if experiment.validation.limit_s is not None:
            raise UserError(
                f"{experiment.file}: validation.limit_s: only for the engine in torch; "
                "vLLM gets all repeats as one job"
            )
        check_cells(cells)
        find_python()
        return
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "the engine needs torch, which is not installed: pip install 'sarathi-sim[profiler]'"
        )
    if realtime and (not hasattr(os, "sched_setscheduler") or os.geteuid() != 0):
        raise UserError("--realtime: needs Linux, and root")


def measure(
    engine: str,
    experiment: Experiment,
    cells: list[Cell],
    timeout_s: float | None,
    profiles: Path,
    progress: Progress,
    say: Say,
    *,
    realtime: bool,
) -> tuple[dict[str, Any], Comparisons]:
    """Run the engine, and compare; returns the content of ``validation.json`` and the comparisons.

    Raises ProfileError (vLLM: UserError) if the engine cannot run the cells.
    """
    settings = experiment.validation
    sessions: Sequence[Session]
    if engine == "vllm":
        sessions = [run_session(cells, settings, timeout_s or 300, progress)]
        about: dict[str, Any] = {"clock": "CPU time of the engine's process, idle time skipped"}
    else:
        sessions = run_sessions(
            cells,
            settings,
            realtime=realtime,
            timeout_s=timeout_s or 30,
            progress=progress,
            say=say,
            profiles=profiles,
        )
        about = {"realtime": realtime}
    outcomes = evaluate_all(sessions, progress)
    return to_json(report(experiment, sessions, outcomes) | about), outcomes


def evaluate_all(sessions: Sequence[Session], progress: Progress) -> Comparisons:
    """Every cell in every repeat."""
    jobs = [
        (session, repeat, cell)
        for session in sessions
        for repeat in session.repeats
        for cell in session.cells
        if cell.name in repeat.served
    ]
    found: Comparisons = {}
    for done, (session, repeat, cell) in enumerate(jobs):
        progress("simulations", done, len(jobs))
        found.setdefault(cell.name, []).append(session.evaluate(repeat, cell))
    progress("simulations", len(jobs), len(jobs))
    return found


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


# The report -------------------------------------------------------------------------------------


def report(
    experiment: Experiment, sessions: Sequence[Session], outcomes: Comparisons
) -> dict[str, Any]:
    """The content of ``validation.json``."""
    cells: dict[str, Any] = {}
    repeats: dict[str, Any] = {}
    accepted: dict[str, list[int]] = {}
    targets: dict[str, Mapping[str, float]] = {}
    gates = {"drift": MOST_DRIFT, "fewest_repeats": FEWEST_REPEATS}
    for session in sessions:
        layout, targets[session.layout] = session.layout, session.targets
        if isinstance(session, TorchSession):
            gates["lost_of_target"] = MOST_OF_TARGET
        reasons = rejected(session, outcomes)
        kept = [n for n in range(len(session.repeats)) if n not in reasons]
        repeats[layout] = {
            "run": len(session.repeats),
            "accepted": len(kept),
            "quiet": len(kept) >= FEWEST_REPEATS,
            "rejected": [{"repeat": n, "why": why} for n, why in reasons.items()],
            "drift": [session.drift(repeat) for repeat in session.repeats],
            "load_average": [repeat.load for repeat in session.repeats],
            "seconds": session.seconds,
            **session.about,
        }
        once = session.served_once()
        for cell in session.cells:
            about = {"layout": layout, "online": session.by_clock or cell.online, **_about(cell)}
            if cell.name in once:
                cells[cell.name] = about | once[cell.name]
            else:
                accepted[cell.name] = kept
                cells[cell.name] = about | _compared(session, cell, outcomes[cell.name], kept)
    result: dict[str, Any] = {
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
    return result | {"targets": _judged(result, targets)}


def rejected(session: Session, outcomes: Comparisons) -> dict[int, str]:
    """The repeats that the machine disturbed too much, with the reasons."""
    found = {}
    for number, repeat in enumerate(session.repeats):
        reasons = []
        moved = session.drift(repeat)
        if abs(moved - 1) > MOST_DRIFT:
            reasons.append(f"the grid took {moved:.2f} times as long after as before")
        spoilt = (session.spoilt(outcomes[name][number]) for name in repeat.served)
        reasons += [why for why in spoilt if why is not None][:1]
        if reasons:
            found[number] = "; ".join(reasons)
    return found


def _about(cell: Cell) -> dict[str, Any]:
    return {
        "policy": cell.policy,
        "pp": cell.layout[0],
        "tp": cell.layout[1],
        "requests": len(cell.requests()),
        "scenario": cell.scenario.model_dump(mode="json"),
    }


def _compared(
    session: Session, cell: Cell, outcomes: list[Comparison], kept: list[int]
) -> dict[str, Any]:
    """A cell's report: all repeats, and statistics over the accepted ones, or all if none was."""
    some = [outcomes[n] for n in kept] or outcomes
    parities = [outcome.parity for outcome in outcomes]
    counts = [len(outcome.measured_iterations) for outcome in outcomes]
    entry: dict[str, Any] = {
        "parity": sum(p.identical for p in parities) / max(1, sum(p.decisions for p in parities)),
        "first_difference": next(
            (p.first_difference for p in parities if p.first_difference), None
        ),
        "measured": {
            shown: middle([outcome.measured[name] for outcome in some])
            for name, shown in session.measures.items()
        },
        **session.entry(cell, outcomes, some),
    }
    if session.by_clock or cell.online:  # the batches differ between repeats
        entry["iterations"] = sum(counts)
    else:
        entry["iterations"] = len(some[0].measured_iterations)
        entry["noise_floor"] = noise_floor([outcome.measured_iterations for outcome in some])
        entry["makespan_spread"] = spread([outcome.measured["makespan"] for outcome in some])
    for prediction in some[0].whole:
        entry[prediction] = middles([prediction_errors(o, prediction) for o in some]) | {
            "repeats": [prediction_errors(o, prediction) for o in outcomes]
        }
        if "kind" in some[0].steps:
            entry[prediction]["by_kind"] = errors_by_kind(some, prediction)
    # The calibrated prediction is judged; the prediction of the grid alone is reported, too.
    return entry | {key: entry["calibrated"][key] for key in (*session.targets, "throughput_error")}


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
        total = _RATIOS[ratio.metric]
        measured = [_ratio(total, one.measured, other.measured) for one, other in pairs]
        entry: dict[str, Any] = {"of": [above, below], "metric": ratio.metric, "repeats": len(both)}
        entry["measured"] = middle(measured)
        for prediction in PREDICTIONS:
            entry[prediction] = middle(
                [_ratio(total, o.whole[prediction], p.whole[prediction]) for o, p in pairs]
            )
        entry["error"] = off(entry["calibrated"]["median"], entry["measured"]["median"])
        entry["measured_spread"] = spread(measured)
        found[name] = entry
    return found


def _ratio(total: str, above: Mapping[str, float], below: Mapping[str, float]) -> float:
    return above[total] / below[total] if below[total] else float("nan")


def _judged(
    result: Mapping[str, Any], targets: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Limit, value and whether it was met; None if the machine was too busy for a layout."""
    rows = []
    for name, cell in result["cells"].items():
        quiet = result["repeats"][cell["layout"]]["quiet"]
        rows += judged("parity", name, 0.0, cell["parity"] - 1, may=True)
        if "calibrated" not in cell:
            continue
        for what, limit in targets[cell["layout"]].items():
            rows += judged(what, name, limit, cell[what]["median"], may=quiet)
        if "replay" in cell:
            replayed = cell["replay"]["makespan_error"]["median"]
            rows += judged("replay makespan", name, REPLAY_TARGET, replayed, may=quiet)
    for name, ratio in result["ratios"].items():
        # Only repeats that both layouts accepted: each may have rejected different ones.
        enough = ratio["repeats"] >= FEWEST_REPEATS
        rows += judged("ratio", name, RATIO_TARGET, ratio["error"], may=enough)
    return rows
