"""The simulator's own loop with the measured times of a real engine.

:func:`play_back` runs :class:`~sarathi_sim.simulator.loop.replica.Replica` with recorded times in
place of predicted ones. With the clocks of the engine's decisions, scheduler and event loop must
form the same batches (*lock-step*). Without these clocks, and with the measured busy times of the
stages, the difference from the measurement is what the recurrence does not model (*replay*).
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, replace

import numpy as np
import simpy

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.simulator.loop.clock import ARRIVAL, Moment, quantize
from sarathi_sim.simulator.loop.pipeline import scan
from sarathi_sim.simulator.loop.records import Floats, Records, ReplicaLog, Switches
from sarathi_sim.simulator.loop.replica import Replica


@dataclass(frozen=True)
class Recorded:
    """Seconds for each micro-batch in launch order.

    ``service`` on each stage, shape (batches, stages); ``send`` from stage 0 to 1, 1 to 2, ...,
    shape (batches, stages - 1); ``turnaround`` from the last stage's finish until the scheduler had
    handled the return, shape (batches,). ``clock`` is the clock at each decision, or None.
    """

    service: Floats
    send: Floats
    turnaround: Floats
    clock: Floats | None = None

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return int(self.service.shape[1])


@dataclass(frozen=True)
class Formed:
    """A batch formed by the playback, with the fields of an engine's decision."""

    group: int
    chunks: tuple[tuple[int, int, int], ...]
    decodes: tuple[int, ...]
    decode_context: int
    padding: int


class _Recording:
    """The k-th batch takes the k-th recorded times; batches beyond the record take the last ones.

    A :class:`~sarathi_sim.simulator.loop.replica.Replica` uses it as its predictor, its service
    and, where clocks were recorded, its ``opens``. ``formed`` lists the batches of the playback.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self.formed: list[Formed] = []

    @property
    def _row(self) -> int:
        return min(len(self.formed), len(self._recorded.service) - 1)

    def predict(self, batch: Batch) -> tuple[float, float, float, float]:
        """The times in the log's columns, which hold one transfer time: the mean of all links."""
        sends = self._recorded.send[self._row]
        return 1.0, 0.0, 0.0, float(sends.mean()) if len(sends) else 0.0

    def __call__(
        self, batch: Batch, nominal: tuple[float, float, float, float]
    ) -> tuple[list[float], list[float], float]:
        """The recorded times of this batch, which is the next one formed."""
        row, recorded = self._row, self._recorded
        self.formed.append(
            Formed(
                batch.slot,
                tuple((sequence.id, n, context) for sequence, n, context in batch.chunks),
                tuple(sequence.id for sequence in batch.decodes),
                batch.decode_context,
                batch.padding,
            )
        )
        return (
            recorded.service[row].tolist(),
            recorded.send[row].tolist(),
            float(recorded.turnaround[row]),
        )

    def opens(self) -> float:
        """When the engine formed its next batch; never after its last."""
        clock = self._recorded.clock
        assert clock is not None
        return float(clock[len(self.formed)]) if len(self.formed) < len(clock) else math.inf

    def with_stage_times(self, log: ReplicaLog) -> ReplicaLog:
        """``log`` with its stage times, which one mean transfer time cannot reproduce."""
        assert log.stage_s is not None
        rows = np.minimum(np.arange(log.num_iterations), len(self._recorded.send) - 1)
        ready = log.iterations["ready_s"]
        return replace(log, measured=scan(ready, log.stage_s, self._recorded.send[rows], False))


def play_back(
    requests: abc.Sequence[Request], scheduler: Scheduler, recorded: Recorded
) -> tuple[list[Formed], Records]:
    """Serve the requests on one replica with recorded times; returns the batches and the records.

    A batch is formed when stage 0 is free, or at its recorded clock where there are clocks. If
    there are fewer records than batches, the last record serves the rest.
    """
    recording = _Recording(
        Recorded(
            quantize(recorded.service),
            quantize(recorded.send),
            quantize(recorded.turnaround),
            None if recorded.clock is None else quantize(recorded.clock),
        )
    )
    env = simpy.Environment()
    replica = Replica(
        env,
        scheduler,
        recording.predict,
        (1,) * recorded.num_stages,
        Switches(lazy=True, turnaround_s=float(recorded.turnaround[-1])),
        service=recording,
        opens=None if recorded.clock is None else recording.opens,
    )
    rejections: dict[int, str] = {}

    def arrive(event: Moment) -> None:
        request = event._value
        assert isinstance(request, Request)
        reason = replica.submit(request)
        if reason is not None:
            rejections[request.id] = reason

    for request in requests:
        Moment(env, float(quantize(request.arrival_s)), ARRIVAL, arrive, request)
    env.run()
    log = recording.with_stage_times(replica.log())
    return recording.formed, records_of_one(requests, rejections, log)


def records_of_one(
    requests: abc.Sequence[Request], rejections: dict[int, str], log: ReplicaLog
) -> Records:
    """The records of requests that one replica served."""
    ordered = sorted(requests, key=lambda request: request.id)
    return Records(
        request_id=np.array([r.id for r in ordered], np.int64),
        arrival_s=quantize(np.array([r.arrival_s for r in ordered], np.float64)),
        prompt_tokens=np.array([r.prompt_tokens for r in ordered], np.int64),
        output_tokens=np.array([r.output_tokens for r in ordered], np.int64),
        replica=np.array([-1 if r.id in rejections else 0 for r in ordered], np.int64),
        rejections=rejections,
        replicas=[log],
    )
