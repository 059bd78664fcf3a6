"""When every micro-batch started and finished on every stage, recovered from the records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.records import Floats, ReplicaLog


@dataclass(frozen=True)
class StageTimes:
    """Times in seconds, shape (iterations, stages), in launch order.

    A stage is occupied from ``start`` to ``release``: until ``finish``, and with blocking sends
    until its result is on the next stage.
    """

    start: Floats
    finish: Floats
    release: Floats


def stage_times(log: ReplicaLog) -> StageTimes:
    """Re-time the pipeline from the recorded durations.

    Stage s runs the batches in order, so ``release[k] = max(arrival[k], release[k-1]) + d[k]``.
    With ``D[k]`` the sum of the first durations, ``release[k] - D[k]`` is the running maximum of
    ``arrival[k] - D[k-1]``: one vectorised scan per stage. Times are whole quanta, so this agrees
    to the bit with the loop that ran. The log of a real engine has measured times instead.
    """
    if log.measured is not None:
        return log.measured
    durations = log.stage_durations()
    send = log.iterations["send_s"]
    start = np.empty_like(durations)
    release = np.empty_like(durations)
    # Sends that overlap release a stage when it finishes: one array for both.
    finish = np.empty_like(durations) if log.blocking_send else release
    arrival = log.iterations["ready_s"]
    for stage in range(log.num_stages):
        held = durations[:, stage]
        if log.blocking_send and stage < log.num_stages - 1:
            held = held + send
        total = np.cumsum(held)
        release[:, stage] = np.maximum.accumulate(arrival - (total - held)) + total
        start[:, stage] = release[:, stage] - held
        if log.blocking_send:
            finish[:, stage] = start[:, stage] + durations[:, stage]
        arrival = release[:, stage] if log.blocking_send else finish[:, stage] + send
    return StageTimes(start, finish, release)
