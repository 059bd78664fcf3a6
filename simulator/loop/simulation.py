"""A whole run: requests arrive, a router sends them to replicas, the result is records."""

from __future__ import annotations

import gc
from collections import abc
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import simpy

from sarathi_sim.policies.log import LivelockError
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.simulator.loop.closed_loop import Arrival, Clients
from sarathi_sim.simulator.loop.group import Group, StepPredictor
from sarathi_sim.simulator.loop.jitter import Jitter, JitteredService
from sarathi_sim.simulator.loop.moment import ADMISSION, ARRIVAL, Moment
from sarathi_sim.simulator.loop.quantum import HORIZON_S, quantize
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.loop.replica import Predictor, Replica
from sarathi_sim.simulator.loop.routers import Balancer, Router
from sarathi_sim.simulator.loop.switches import DEFAULT, Switches

TOO_LONG = f"simulated time passed {HORIZON_S / 86400:.0f} days, beyond which it is not exact"


class SimulationError(Exception):
    """A simulation cannot continue; the message says why."""


def simulate(
    requests: abc.Sequence[Request],
    schedulers: abc.Sequence[Scheduler],
    predict: Predictor | StepPredictor,
    layers: tuple[int, ...],
    *,
    switches: Switches = DEFAULT,
    router: Router = "round_robin",
    ranks: int = 1,
    rank_router: Router = "round_robin",
    seed: int = 0,
    clients: Clients | None = None,
    admission_s: float = 0.0,
    progress: abc.Callable[[int], None] | None = None,
) -> Records:
    """Serve ``requests`` on one replica per scheduler, or with ``ranks`` above 1 on one replica per
    so many schedulers: those of its ranks, in lock-step, whose steps ``predict`` times. Returns the
    records of the run.

    ``layers`` are the transformer layers of each pipeline stage. ``router`` sends an arriving
    request to the replicas in turn, to the one with the fewest declared tokens (prompt +
    ``max_tokens``) of unfinished requests or with the fewest such requests, or to the one with
    fewer of them of two drawn at random. Jitter and these two are drawn from ``seed``. Requests
    arrive at their ``arrival_s``, or when ``clients`` send them. Each replica has a front end that
    takes them to the scheduler one after the other, ``admission_s`` each, where ``rank_router``
    chooses among the ranks as ``router`` does among replicas. ``progress`` is called from time to
    time with the number of finished requests.

    Raises :class:`SimulationError` if simulated time passes 24 days, or if a policy leaves
    requests unserved or lets them preempt each other for ever; ValueError for two requests of one
    id, or a scheduler that has served before.
    """
    if len({request.id for request in requests}) < len(requests):
        raise ValueError("two requests have the same id")
    if any(scheduler.spans or scheduler.num_unfinished for scheduler in schedulers):
        raise ValueError("a scheduler has served before: each simulation needs fresh ones")
    if len(schedulers) % ranks:
        raise ValueError(f"{len(schedulers)} schedulers are no multiple of {ranks} ranks")
    count = len(schedulers) // ranks
    *streams, routing = np.random.SeedSequence(seed).spawn(len(schedulers) + 1)
    balancer = Balancer(router, count, np.random.default_rng(routing))
    cluster = _Replicas(requests, balancer, clients, count, admission_s, progress)
    rest: Any = (predict, layers, switches)
    for number, drawn in enumerate(routing.spawn(count)):
        own = slice(number * ranks, (number + 1) * ranks)
        finished = partial(cluster.finished, number)
        if ranks == 1:
            scheduler, stream = schedulers[number], streams[number]
            service = JitteredService(layers, switches, stream) if switches.jitter else None
            replica = Replica(cluster.env, scheduler, *rest, service=service, on_finished=finished)
        else:
            among = Balancer(rank_router, ranks, np.random.default_rng(drawn))
            jitter = [Jitter(switches.jitter, 1, s) for s in streams[own] if switches.jitter]
            replica = Group(
                *(cluster.env, schedulers[own], *rest, among), jitter=jitter, on_finished=finished
            )
        cluster.replicas.append(replica)
    try:
        with _no_collector():
            cluster.begin()
            cluster.env.run()
            return cluster.records()
    except LivelockError as error:
        raise SimulationError(str(error)) from error


@contextmanager
def _no_collector() -> abc.Iterator[None]:
    """Pause Python's cycle collector: neither the loop nor its records make cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Replicas:
    """The arrivals, the router and the number of finished requests."""

    def __init__(
        self,
        requests: abc.Sequence[Request],
        balancer: Balancer,
        clients: Clients | None,
        count: int,
        admission_s: float,
        progress: abc.Callable[[int], None] | None,
    ) -> None:
        self.env = simpy.Environment()
        self.replicas: list[Replica] = []
        self.requests = requests
        self.progress = progress
        self.num_finished = 0
        self._tick = max(1, len(requests) // 200)
        self._next_tick = self._tick
        self._accepted = 0
        self._rejections: dict[int, str] = {}
        self._balancer = balancer
        self._clients = clients
        # An array, not a list: with a million requests this saves 100 MB.
        self._arrival_s: Floats = quantize(np.array([r.arrival_s for r in requests], np.float64))
        self._admission_s = float(quantize(admission_s))
        self._admitted_at = [0.0] * count  # the last request of each front end

    def begin(self) -> None:
        """Set the first arrivals."""
        if self._clients is not None:
            self._place = {request.id: place for place, request in enumerate(self.requests)}
            self._send(self._clients.begin())
        elif len(self.requests):
            order = np.argsort(self._arrival_s, kind="stable")
            # Memory views, whose items are plain Python numbers.
            self._order, self._times = order.data, self._arrival_s[order].data
            first, last = self._times[0], self._times[-1]
            if first < 0 or last >= HORIZON_S:
                raise SimulationError(f"arrivals must lie between 0 and {HORIZON_S:.0f} s")
            Moment(self.env, first, ARRIVAL, self._arrive)

    def _arrive(self, _: Moment) -> None:
        """Route every request that arrives at this instant."""
        now = self.env.now
        following = now
        while following == now:
            self._submit(self.requests[self._order[self._balancer.num_sent]])
            arrived = self._balancer.num_sent
            if arrived == len(self._order):
                return
            following = self._times[arrived]
        Moment(self.env, following - now, ARRIVAL, self._arrive)

    def _send(self, arrivals: abc.Iterable[Arrival]) -> None:
        for when, place in arrivals:
            Moment(self.env, when - self.env.now, ARRIVAL, self._sent, place)

    def _sent(self, moment: Moment) -> None:
        """A client's request arrives."""
        place, now = moment._value, self.env.now
        self._arrival_s[place] = now
        self._submit(replace(self.requests[place], arrival_s=now))

    def _submit(self, request: Request) -> None:
        """Route a request, and queue it at its replica's front end if that takes time."""
        target = self._balancer.send(request)
        if not self._admission_s:
            return self._admit(target, request)
        now, free = self.env.now, self._admitted_at[target]
        self._admitted_at[target] = ready = max(now, free) + self._admission_s
        Moment(self.env, ready - now, ADMISSION, self._admitted, (target, request))

    def _admitted(self, moment: Moment) -> None:
        self._admit(*moment._value)

    def _admit(self, target: int, request: Request) -> None:
        """Hand a request to the scheduler, which may reject it."""
        reason = self.replicas[target].submit(request)
        if reason is None:
            self._accepted += 1
            return
        self._rejections[request.id] = reason
        self._balancer.ended(target, request)
        if self._clients is not None:
            self._send(self._clients.answered(self._place[request.id], self.env.now))

    def finished(self, replica: int, sequences: abc.Sequence[Sequence], now: float) -> None:
        """Called by each replica with finished sequences and the time."""
        self.num_finished += len(sequences)
        for sequence in sequences:
            self._balancer.ended(replica, sequence)
            if self._clients is not None:
                self._send(self._clients.answered(self._place[sequence.id], now))
        if self.num_finished >= self._next_tick:
            self._next_tick += self._tick
            if now >= HORIZON_S:
                raise SimulationError(TOO_LONG)
            if self.progress is not None:
                self.progress(self.num_finished)

    def records(self) -> Records:
        accepted = self._accepted
        if self.num_finished != accepted:
            raise SimulationError(
                f"{accepted - self.num_finished} of {accepted} requests were never finished: "
                "the policy stopped planning although requests were left"
            )
        if (arrived := self._balancer.num_sent) != len(self.requests):
            raise SimulationError(
                f"{len(self.requests) - arrived} of {len(self.requests)} requests were never "
                "sent by their clients"
            )
        requests = self.requests
        ids = np.array([r.id for r in requests], np.int64)
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        logs = [log for replica in self.replicas for log in replica.logs()]
        went = np.full(len(ids), -1)
        for number, log in enumerate(logs):  # each accepted request has finished, so it has spans
            went[np.searchsorted(ids, log.spans[:, 0])] = number
        records = Records(
            request_id=ids,
            arrival_s=self._arrival_s[order],
            prompt_tokens=np.array([r.prompt_tokens for r in requests], np.int64)[order],
            output_tokens=np.array([r.output_tokens for r in requests], np.int64)[order],
            replica=went,
            rejections=self._rejections,
            replicas=logs,
            ranks=len(logs) // max(len(self.replicas), 1),
        )
        if records.end_s >= HORIZON_S:
            raise SimulationError(TOO_LONG)
        return records
