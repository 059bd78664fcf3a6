"""The differences between simulation and measurement, and their causes: functions of sessions.

Errors are fractions, predicted / measured - 1; an iteration's is absolute, and that of the
micro-batch's time summed over the stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sarathi_sim.experiments.validate.cells import Cell
from sarathi_sim.experiments.validate.disturbance import LostTime, lost
from sarathi_sim.experiments.validate.playback import (
    KINDS,
    Parity,
    kinds,
    lockstep,
    measured_records,
    replay,
    stage_times,
)
from sarathi_sim.experiments.validate.prediction import Links, StageTimePrediction, bundle_predictor
from sarathi_sim.experiments.validate.session import Repeat, Session
from sarathi_sim.experiments.validate.totals import Whole
from sarathi_sim.profiler.engine.processes import EngineRun, StageLog
from sarathi_sim.profiler.engine.spec import TIMED_OPS
from sarathi_sim.profiler.measuring.to_bundle import in_situ_bundle
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.op_times.regression import bundle_times

MOST_DRIFT = 0.05
"""Decided beforehand: a repeat beyond it says something of the machine, not of the model."""

PREDICTIONS = ("calibrated", "grid")


@dataclass(frozen=True)
class Comparison:
    """One cell in one repeat. ``iterations`` and ``whole`` are by prediction.

    ``measured_iterations`` is the time of each micro-batch, summed over the stages; ``op_share``
    the part of it in GEMMs, attention, all-reduces and the LM head.
    """

    parity: Parity
    kinds: list[str]
    measured_iterations: Floats
    iterations: dict[str, Floats]
    measured: Whole
    whole: dict[str, Whole]
    replayed: Whole
    lost: LostTime
    op_share: float
    records: dict[str, Records]


def drift(repeat: Repeat) -> float:
    """The grid's time after the repeat over that before it (1: no drift)."""
    before, after = ((log.finish - log.start).sum(axis=1) for log in repeat.grids)
    return float(np.median(after / before))


def rejection(repeat: Repeat, outcomes: list[Comparison]) -> str | None:
    """The reason why a repeat is rejected, or None."""
    reasons = []
    moved = drift(repeat)
    if abs(moved - 1) > MOST_DRIFT:
        reasons.append(f"the grid took {moved:.2f} times as long after as before")
    spoilt = (outcome.lost.too_much() for outcome in outcomes)
    reasons += [why for why in spoilt if why is not None][:1]
    return "; ".join(reasons) or None


def evaluate(session: Session, repeat: Repeat, cell: Cell) -> Comparison:
    """Everything about one cell in one repeat."""
    served = repeat.served[cell.name]
    run, requests = served.run, cell.requests()
    around = Links.of([calibration for calibration, _ in served.calibration])
    grid = _joined(repeat.grids)
    bundle = in_situ_bundle(session.spec, 2 * session.works, grid, around.send_s, "in-situ")
    alone = StageTimePrediction(cell, bundle_predictor(cell, bundle_times(bundle)), around)
    predictions = {"grid": alone, "calibrated": alone.calibrated(served.calibration)}
    if session.isolated is not None:
        ops = bundle_predictor(cell, bundle_times(session.isolated))
        predictions["isolated"] = StageTimePrediction(cell, ops, around)
    decisions = run.served.decisions
    measured = measured_records(run, requests, cell.scheduler())
    simulated = {name: p.simulate(requests) for name, p in predictions.items()}
    again = replay(run, requests, cell.scheduler())
    times = stage_times(run)
    return Comparison(
        parity=lockstep(run, requests, cell.scheduler()),
        kinds=kinds(decisions),
        measured_iterations=(times.finish - times.start).sum(axis=1),
        iterations={
            name: p.stages(decisions, requests).sum(axis=1) for name, p in predictions.items()
        },
        measured=Whole.of(measured),
        whole={name: Whole.of(records) for name, records in simulated.items()},
        replayed=Whole.of(again),
        lost=lost(session.spec, run, requests, cell.scheduler),
        op_share=_op_share(run.stages),
        records={"measured": measured, **simulated},
    )


def online_outcome(cell: Cell, run: EngineRun) -> tuple[Parity, Whole, Whole]:
    """Parity, and the totals measured and replayed, of a run with arrivals over time."""
    requests = cell.requests()
    return (
        lockstep(run, requests, cell.scheduler()),
        Whole.of(measured_records(run, requests, cell.scheduler())),
        Whole.of(replay(run, requests, cell.scheduler())),
    )


def _joined(grids: tuple[StageLog, StageLog]) -> StageLog:
    before, after = grids
    columns = ("arrived", "start", "finish", "cpu", "ops")
    return StageLog(*(np.concatenate([getattr(before, c), getattr(after, c)]) for c in columns))


def _op_share(log: StageLog) -> float:
    """The share without norms, rotary, activation and residuals: these are timed together with the
    Python code between the ops."""
    layers, head = log.ops[..., : len(TIMED_OPS)], log.ops[..., -1]
    return float((layers.sum() + head.sum()) / (log.finish - log.start).sum())


def noise_floor(repeats: list[Floats]) -> float:
    """Median relative difference of a micro-batch's time between two repeats, over all pairs.

    NaN where there is but one repeat. Only repeats with the same micro-batches compare.
    """
    differences = [
        np.abs(one / other - 1)
        for index, one in enumerate(repeats)
        for other in repeats[index + 1 :]
        if len(one) == len(other)
    ]
    return float(np.median(np.concatenate(differences))) if differences else float("nan")


def iteration_errors(outcome: Comparison, prediction: str) -> Floats:
    """|predicted / measured - 1| of every micro-batch."""
    return np.asarray(np.abs(outcome.iterations[prediction] / outcome.measured_iterations - 1))


def errors_by_kind(repeats: list[Comparison], prediction: str) -> dict[str, dict[str, float]]:
    """Median and 90th percentile of the iterations' errors, by kind, of all repeats together."""
    errors = np.concatenate([iteration_errors(outcome, prediction) for outcome in repeats])
    kind = np.array([kind for outcome in repeats for kind in outcome.kinds])
    found = {}
    for name in KINDS:
        some = errors[kind == name]
        if len(some):
            found[name] = {
                "count": len(some),
                "median": float(np.median(some)),
                "p90": float(np.quantile(some, 0.9)),
            }
    return found
