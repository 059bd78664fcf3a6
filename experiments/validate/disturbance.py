"""What other work on the machine took of a run, next to what was measured in it.

A stage's work is *lost time* where its thread did not run: wall time less CPU time. All-reduces are
left out: in them a rank waits for others, and has no need of its core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.validate.playback import replay, stage_times
from experiments.validate.totals import Whole, off
from policies.request import Request
from policies.scheduler import Scheduler
from profiler.engine.processes import EngineRun, StageLog
from profiler.engine.spec import EngineSpec
from profiler.engine.work import TIMED_OPS
from profiler.facts.ops import ALL_REDUCE
from simulator.loop.records import Floats

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
    """The errors that a perfect prediction of the undisturbed run would be found to have.

    Fractions, by the same names as :data:`TARGETS`. NaN where nothing can be said: on a GPU, whose
    work takes none of the host's time, and of bubbles where there are none.
    """

    iteration_error_median: float
    iteration_error_p90: float
    makespan_error: float
    bubble_error: float

    def too_much(self) -> str | None:
        """Which target it uses up more of than it may, in words, or None."""
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
    """What lost time did to a run: to its iterations, and by way of the pipeline to its totals.

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
