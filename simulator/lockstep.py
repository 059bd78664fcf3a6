"""The simulator's own loop, fed with what a real engine measured.

:func:`play_back` runs :class:`~simulator.replica.Replica` with recorded times in place of predicted
ones. With the clocks that the engine's decisions saw, scheduler and event loop must form the very
same batches (*lock-step*). Without them, and with the stages' own busy times, what differs from the
measurement is what the recurrence does not model (*replay*).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import simpy

from policies.batch import Batch
from policies.request import Request
from policies.scheduler import Scheduler
from simulator.jitter import Jitter
from simulator.moment import ARRIVAL, Moment
from simulator.quantum import quantize
from simulator.records import Floats, Records, ReplicaLog
from simulator.replica import Replica
from simulator.timeline import StageTimes


@dataclass(frozen=True)
class Recorded:
    """Seconds for each micro-batch in launch order.

    ``service`` on each stage, shape (batches, stages); ``send`` from stage 0 to 1, 1 to 2, ...,
    shape (batches, stages - 1); ``turnaround`` from the last stage's finish until the scheduler had
    handled the return, shape (batches,). ``clock`` is what each decision saw, or None.
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
    """A batch as the playback formed it; the fields are those of an engine's decision."""

    group: int
    chunks: tuple[tuple[int, int, int], ...]
    decodes: tuple[int, ...]
    decode_context: int
    padding: int


class _Playback(Replica):
    """A replica whose k-th batch takes the k-th recorded times."""

    def __init__(self, env: simpy.Environment, scheduler: Scheduler, recorded: Recorded) -> None:
        # One layer of a second a stage, so that "jitter factors" are durations in seconds.
        super().__init__(env, scheduler, self._times, (1,) * recorded.num_stages, lazy=True)
        self._plain = False
        self._recorded = recorded
        self.jitter = _Durations(recorded.service)
        self.formed: list[Formed] = []
        self._sends: Floats = np.zeros(0)
        self._passed: list[tuple[list[float], list[float]]] = []

    def _times(self, batch: Batch) -> tuple[float, float, float, float]:
        """What the log says of the links is their mean: it has one number for all."""
        return 1.0, 0.0, 0.0, float(self._sends.mean()) if len(self._sends) else 0.0

    def _dispatch(self, now: float) -> None:
        clock = self._recorded.clock
        if clock is None:
            super()._dispatch(now)
            return
        while self.scheduler.idle and len(self.formed) < len(clock):
            due = float(clock[len(self.formed)])
            if due > now:
                self._wake(due)
                return
            batch = self.scheduler.next_batch()
            if batch is None:
                return
            self._launch(batch, now)

    def _launch(self, batch: Batch, now: float) -> None:
        number = min(len(self.formed), len(self._recorded.service) - 1)
        self.formed.append(
            Formed(
                batch.group.index,
                tuple((sequence.id, n, context) for sequence, n, context in batch.chunks),
                tuple(sequence.id for sequence in batch.decodes),
                batch.decode_context,
                batch.padding,
            )
        )
        self.turnaround_s = float(self._recorded.turnaround[number])
        self._sends = self._recorded.send[number]
        super()._launch(batch, now)

    def _pass_through(self, now: float, durations: list[float], send_s: float) -> float:
        """Every link has a time of its own."""
        assert self.jitter is not None
        durations = self.jitter.factors()
        self._stage_rows.append(durations)
        arrival = finish = now
        starts, finishes = [], []
        for stage, duration in enumerate(durations):
            starts.append(max(arrival, self._free[stage]))
            finish = starts[-1] + duration
            self._free[stage] = finish
            finishes.append(finish)
            if stage < len(self._sends):
                arrival = finish + float(self._sends[stage])
        self._passed.append((starts, finishes))
        return finish

    def log(self) -> ReplicaLog:
        """With the times as they were: the log's one number a link does not reproduce them."""
        times = np.array(self._passed).reshape(-1, 2, len(self.layers))
        finish = times[:, 1]
        return replace(super().log(), measured=StageTimes(times[:, 0], finish, finish))


class _Durations(Jitter):
    """Recorded durations in place of factors; the last ones again when they run out."""

    def __init__(self, durations: Floats) -> None:
        self._rows = durations.tolist()
        self._next = 0

    def factors(self) -> list[float]:
        row: list[float] = self._rows[min(self._next, len(self._rows) - 1)]
        self._next += 1
        return row


def play_back(
    requests: Seq[Request], scheduler: Scheduler, recorded: Recorded
) -> tuple[list[Formed], Records]:
    """Serve the requests on one replica with recorded times; what was formed, and the records.

    A batch is formed when stage 0 is free, or at its recorded clock where there are clocks. With
    fewer records than batches the last one counts for the rest.
    """
    exact = Recorded(
        quantize(recorded.service),
        quantize(recorded.send),
        quantize(recorded.turnaround),
        None if recorded.clock is None else quantize(recorded.clock),
    )
    env = simpy.Environment()
    replica = _Playback(env, scheduler, exact)
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
    ordered = sorted(requests, key=lambda request: request.id)
    records = Records(
        request_id=np.array([r.id for r in ordered], np.int64),
        arrival_s=quantize(np.array([r.arrival_s for r in ordered], np.float64)),
        prompt_tokens=np.array([r.prompt_tokens for r in ordered], np.int64),
        output_tokens=np.array([r.output_tokens for r in ordered], np.int64),
        replica=np.array([-1 if r.id in rejections else 0 for r in ordered], np.int64),
        rejections=rejections,
        replicas=[replica.log()],
    )
    return replica.formed, records
