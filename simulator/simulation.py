"""A whole run: requests arrive, a router spreads them over replicas, records come out."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Literal

import numpy as np
import simpy

from policies.request import Request, Sequence
from policies.scheduler import Scheduler
from simulator.jitter import Jitter
from simulator.moment import ARRIVAL, Moment
from simulator.quantum import HORIZON_S, quantize
from simulator.records import Records
from simulator.replica import Predictor, Replica

Router = Literal["round_robin", "least_tokens"]


TOO_LONG = f"simulated time passed {HORIZON_S / 86400:.0f} days, beyond which it is not exact"


class SimulationError(Exception):
    """A simulation cannot go on, and why."""


def simulate(
    requests: Seq[Request],
    schedulers: Seq[Scheduler],
    predict: Predictor,
    layers: tuple[int, ...],
    *,
    router: Router = "round_robin",
    lazy: bool = False,
    blocking_send: bool = False,
    turnaround_s: float = 0.0,
    jitter: float = 0.0,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Records:
    """Serve ``requests`` on one replica per scheduler and record what happened.

    ``layers`` are the transformer layers of each pipeline stage. ``router`` sends an arriving
    request to the replicas in turn, or to the one with the fewest declared tokens (prompt +
    ``max_tokens``) of unfinished requests. ``jitter`` is the coefficient of variation of run
    times (0: none), drawn from ``seed``. The remaining switches are those of
    :class:`~simulator.replica.Replica`. ``progress`` is called now and then with the number of
    requests finished.

    Raises :class:`SimulationError` if simulated time passes 24 days, or if a policy leaves
    requests unserved; ValueError for two requests of one id, or a scheduler that has served before.
    """
    if len({request.id for request in requests}) < len(requests):
        raise ValueError("two requests have the same id")
    if any(scheduler.rides or scheduler.num_unfinished for scheduler in schedulers):
        raise ValueError("a scheduler has served before: each simulation needs fresh ones")
    cluster = _Cluster(requests, router, progress)
    streams = np.random.SeedSequence(seed).spawn(len(schedulers))
    cluster.replicas = [
        Replica(
            cluster.env,
            scheduler,
            predict,
            layers,
            lazy=lazy,
            blocking_send=blocking_send,
            turnaround_s=turnaround_s,
            jitter=Jitter(jitter, len(layers), stream) if jitter else None,
            on_finished=cluster.finished,
        )
        for scheduler, stream in zip(schedulers, streams, strict=True)
    ]
    with _no_collector():
        cluster.env.run()
    return cluster.records()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Pause Python's cycle collector: the loop makes no cycles, and would be searched in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Cluster:
    """The arrivals, the router and the count of what is done."""

    def __init__(
        self, requests: Seq[Request], router: Router, progress: Callable[[int], None] | None
    ) -> None:
        self.env = simpy.Environment()
        self.replicas: list[Replica] = []
        self.requests = requests
        self.router = router
        self.progress = progress
        self.num_finished = 0
        self._tick = max(1, len(requests) // 200)
        self._next_tick = self._tick
        self._replica_of: dict[int, int] = {}
        self._rejections: dict[int, str] = {}
        self._outstanding: list[int] = []
        self._arrivals = deque(
            sorted(((float(quantize(r.arrival_s)), r) for r in requests), key=lambda pair: pair[0])
        )
        if self._arrivals:
            if self._arrivals[0][0] < 0 or self._arrivals[-1][0] >= HORIZON_S:
                raise SimulationError(f"arrivals must lie between 0 and {HORIZON_S:.0f} s")
            Moment(self.env, self._arrivals[0][0], ARRIVAL, self._arrive)

    def _arrive(self, _: Moment) -> None:
        """Route every request that arrives at this instant."""
        now = self.env.now
        arrivals = self._arrivals
        while arrivals and arrivals[0][0] == now:
            request = arrivals.popleft()[1]
            target = self._route(request)
            reason = self.replicas[target].submit(request)
            if reason is None:
                self._replica_of[request.id] = target
            else:
                self._rejections[request.id] = reason
                self._account(target, -request.prompt_tokens - request.max_tokens)
        if arrivals:
            Moment(self.env, arrivals[0][0] - now, ARRIVAL, self._arrive)

    def _route(self, request: Request) -> int:
        if not self._outstanding:
            self._outstanding = [0] * len(self.replicas)
        if self.router == "least_tokens":
            target = self._outstanding.index(min(self._outstanding))
        else:
            target = (len(self._replica_of) + len(self._rejections)) % len(self.replicas)
        self._account(target, request.prompt_tokens + request.max_tokens)
        return target

    def _account(self, target: int, tokens: int) -> None:
        self._outstanding[target] += tokens

    def finished(self, sequences: Iterable[Sequence], now: float) -> None:
        """Called by the replicas with what they finished, and when."""
        for sequence in sequences:
            self.num_finished += 1
            self._account(
                self._replica_of[sequence.id], -sequence.prompt_tokens - sequence.max_tokens
            )
        if self.num_finished >= self._next_tick:
            self._next_tick += self._tick
            if now >= HORIZON_S:
                raise SimulationError(TOO_LONG)
            if self.progress is not None:
                self.progress(self.num_finished)

    def records(self) -> Records:
        accepted = len(self._replica_of)
        if self.num_finished != accepted:
            raise SimulationError(
                f"{accepted - self.num_finished} of {accepted} requests were never finished: "
                "the policy stopped planning although requests were left"
            )
        requests = sorted(self.requests, key=lambda r: r.id)
        records = Records(
            request_id=np.array([r.id for r in requests], np.int64),
            arrival_s=quantize(np.array([r.arrival_s for r in requests], np.float64)),
            prompt_tokens=np.array([r.prompt_tokens for r in requests], np.int64),
            output_tokens=np.array([r.output_tokens for r in requests], np.int64),
            replica=np.array([self._replica_of.get(r.id, -1) for r in requests], np.int64),
            rejections=self._rejections,
            replicas=[replica.log() for replica in self.replicas],
        )
        if records.end_s >= HORIZON_S:
            raise SimulationError(TOO_LONG)
        return records
