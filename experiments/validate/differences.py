"""The differences between simulation and measurement, and their causes: functions of sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

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
from sarathi_sim.experiments.validate.session import Cell, Repeat, Session
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.engine.processes import EngineRun, StageLog
from sarathi_sim.profiler.engine.spec import TIMED_OPS, EngineSpec
from sarathi_sim.profiler.facts.ops import ALL_REDUCE
from sarathi_sim.profiler.measuring.to_bundle import in_situ_bundle
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.op_times.regression import bundle_times
from sarathi_sim.simulator.views.ledger import WAITS
from sarathi_sim.simulator.views.metrics import Analysis


@dataclass(frozen=True)
class Whole:
    """A run in totals. Bubbles are those of the ledger, communication and turn-around included."""

    makespan_s: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    bubble_s: float
    bubble_by_stage_s: tuple[float, ...]
    bubble_per_request_s: float

    @staticmethod
    def of(records: Records) -> Whole:
        """The totals of a simulated or a measured run."""
        analysis = Analysis(records)
        table = analysis.requests
        stages = [
            sum(float(row[f"{name}_s"]) for name in WAITS) for _, row in analysis.ledger.iterrows()
        ]
        tokens = int(records.prompt_tokens.sum() + records.output_tokens.sum())
        makespan = records.end_s - float(records.arrival_s.min())
        return Whole(
            makespan,
            tokens / makespan,
            float(table["ttft_s"].quantile(0.5)),
            float(table["ttft_s"].quantile(0.9)),
            sum(stages),
            tuple(stages),
            float(table["bubble_s"].mean()),
        )


def off(simulated: float, measured: float) -> float:
    """The relative error; NaN if the measured value is 0 (a run without bubbles, for example)."""
    return simulated / measured - 1 if measured else float("nan")


TARGETS = {
    "iteration_error_median": 0.05,
    "iteration_error_p90": 0.15,
    "makespan_error": 0.05,
    "bubble_error": 0.10,
}
"""How far a prediction may be off."""

MOST_OF_TARGET = 0.5
"""What lost time may use up of a target: half. A prediction that misses it all the same is then off
by more than the machine was."""


@dataclass(frozen=True)
class LostTime:
    """The apparent errors of a perfect prediction of the undisturbed run.

    Fractions, by the same names as :data:`TARGETS`. NaN if they are unknown: on a GPU, whose work
    takes no CPU time, and for bubbles if there are none.
    """

    iteration_error_median: float
    iteration_error_p90: float
    makespan_error: float
    bubble_error: float

    def too_much(self) -> str | None:
        """The target of which it uses up too much, in words, or None."""
        for name, share in dataclasses.asdict(self).items():
            limit = MOST_OF_TARGET * TARGETS[name]
            if abs(share) > limit:
                return (
                    f"preempted work accounts for {abs(share):.1%} of {name}, "
                    f"and {limit:.2%} is allowed"
                )
        return None


def lost_seconds(log: StageLog) -> Floats:
    """Lost time of each stage's work on each micro-batch."""
    wall = log.finish - log.start - log.ops[:, :, TIMED_OPS.index(ALL_REDUCE)]
    return np.asarray(np.maximum(0.0, wall - log.cpu))


def lost(
    spec: EngineSpec,
    run: EngineRun,
    requests: Sequence[Request],
    scheduler: Callable[[], Scheduler],
) -> LostTime:
    """The effect of lost time on a run: on its iterations and, through the pipeline, on its totals.

    ``scheduler`` makes a fresh one like the engine's.
    """
    if spec.device == "cuda":
        return LostTime(*[float("nan")] * 4)
    seconds, times = lost_seconds(run.stages), stage_times(run)
    shares = seconds.sum(axis=1) / (times.finish - times.start).sum(axis=1)
    as_it_was = Whole.of(replay(run, requests, scheduler()))
    undisturbed = Whole.of(replay(run, requests, scheduler(), less=seconds))
    makespan = off(undisturbed.makespan_s, as_it_was.makespan_s)
    bubble = float("nan")
    if spec.pp > 1:
        bubble = off(undisturbed.bubble_s, as_it_was.bubble_s)
    return LostTime(float(np.median(shares)), float(np.quantile(shares, 0.9)), makespan, bubble)


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
