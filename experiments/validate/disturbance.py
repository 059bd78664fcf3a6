"""The time of a run that other work on the machine took.

*Lost time* is the time of a stage's work in which its thread did not run: wall-clock time minus CPU
time. All-reduces are left out, because in them a rank waits for others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sarathi_sim.experiments.validate.playback import replay, stage_times
from sarathi_sim.experiments.validate.totals import Whole, off
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.engine.processes import EngineRun, StageLog
from sarathi_sim.profiler.engine.spec import TIMED_OPS, EngineSpec
from sarathi_sim.profiler.facts.ops import ALL_REDUCE
from sarathi_sim.simulator.loop.records import Floats

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
