"""A whole run: requests arrive, a router sends them to replicas, the result is records.

Two pools of replicas, one for prompts and one for decodes, are in ``handover.py``.
"""

from __future__ import annotations

import gc
from collections import abc
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import simpy

from sarathi_sim.policies.log import LivelockError
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.simulator.loop.closed_loop import Arrival, Clients
from sarathi_sim.simulator.loop.fleet import Fleet, Replicas
from sarathi_sim.simulator.loop.group import StepPredictor
from sarathi_sim.simulator.loop.moment import ARRIVAL, Moment
from sarathi_sim.simulator.loop.quantum import HORIZON_S, quantize
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.loop.replica import Predictor, Replica
from sarathi_sim.simulator.loop.routers import Router
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
    """Serve ``requests`` on one replica per scheduler; returns the records of the run.

    ``layers`` are the transformer layers of each pipeline stage. ``router`` sends an arriving
    request to the replicas in turn, to the one with the fewest declared tokens (prompt +
    ``max_tokens``) of unfinished requests or with the fewest such requests, or to the one with
    fewer of them of two drawn at random. Jitter and these two are drawn from ``seed``. Requests
    arrive at their ``arrival_s``, or when ``clients`` send them. Each replica has a front end that
    takes them to the scheduler one after the other, ``admission_s`` each. ``progress`` is called
    from time to time with the number of finished requests.

    Raises :class:`SimulationError` if simulated time passes 24 days, or if a policy leaves
    requests unserved or lets them preempt each other for ever; ValueError for two requests of one
    id, or a scheduler that has served before.
    """
    workers = Replicas(
        schedulers, predict, layers, switches, router, admission_s, ranks, rank_router
    )
    return simulate_workers(requests, workers, seed=seed, clients=clients, progress=progress)


def simulate_workers(
    requests: abc.Sequence[Request],
    workers: Replicas,
    *,
    seed: int = 0,
    clients: Clients | None = None,
    progress: abc.Callable[[int], None] | None = None,
) -> Records:
    """:func:`simulate` on these workers."""
    return _OnePool(requests, workers, seed, clients, progress).serve()


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


class Simulation:
    """The arrivals of a run and what became of them. A subclass has the ``replicas``, each of so
    many ``ranks`` (a number for each pool), and says where requests go (``submit``)."""

    replicas: list[Replica]
    ranks: tuple[int, ...]

    def __init__(
        self,
        requests: abc.Sequence[Request],
        clients: Clients | None,
        progress: abc.Callable[[int], None] | None,
    ) -> None:
        if len({request.id for request in requests}) < len(requests):
            raise ValueError("two requests have the same id")
        self.env = simpy.Environment()
        self.requests = requests
        self.progress = progress
        self.num_finished = 0
        self._tick = max(1, len(requests) // 200)
        self._next_tick = self._tick
        self._rejections: dict[int, str] = {}
        self._clients = clients
        self._place: dict[int, int] = {}  # of each request in the list, by its id
        # An array, not a list: with a million requests this saves 100 MB.
        self._arrival_s: Floats = quantize(np.array([r.arrival_s for r in requests], np.float64))
        self._arrived = 0

    def serve(self) -> Records:
        """Run it; returns the records."""
        try:
            with _no_collector():
                self._begin()
                self.env.run()
                return self._records()
        except LivelockError as error:
            raise SimulationError(str(error)) from error

    def submit(self, request: Request) -> None:
        """A request arrives now."""
        raise NotImplementedError

    def _begin(self) -> None:
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
            self._arrived += 1
            self.submit(self.requests[self._order[self._arrived - 1]])
            if self._arrived == len(self._order):
                return
            following = self._times[self._arrived]
        Moment(self.env, following - now, ARRIVAL, self._arrive)

    def _send(self, arrivals: abc.Iterable[Arrival]) -> None:
        for when, place in arrivals:
            Moment(self.env, when - self.env.now, ARRIVAL, self._sent, place)

    def _sent(self, moment: Moment) -> None:
        """A client's request arrives."""
        place, now = moment._value, self.env.now
        self._arrival_s[place] = now
        self._arrived += 1
        self.submit(replace(self.requests[place], arrival_s=now))

    def reject(self, request: Request, reason: str) -> None:
        """Note that a request is never served; its client learns of it."""
        self._rejections[request.id] = reason
        if self._clients is not None:
            self._send(self._clients.answered(self._place[request.id], self.env.now))

    def finish(self, sequences: abc.Sequence[Sequence], now: float) -> None:
        """Requests have their last token at ``now``."""
        self.num_finished += len(sequences)
        if self._clients is not None:
            for sequence in sequences:
                self._send(self._clients.answered(self._place[sequence.id], now))
        if self.num_finished >= self._next_tick:
            self._next_tick += self._tick
            if now >= HORIZON_S:
                raise SimulationError(TOO_LONG)
            if self.progress is not None:
                self.progress(self.num_finished)

    def _records(self) -> Records:
        accepted = self._arrived - len(self._rejections)
        if self.num_finished != accepted:
            raise SimulationError(
                f"{accepted - self.num_finished} of {accepted} requests were never finished: "
                "the policy stopped planning although requests were left"
            )
        if self._arrived != len(self.requests):
            raise SimulationError(
                f"{len(self.requests) - self._arrived} of {len(self.requests)} requests were never "
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
            ranks=self.ranks,
        )
        if records.end_s >= HORIZON_S:
            raise SimulationError(TOO_LONG)
        return records


class _OnePool(Simulation):
    """Requests go to replicas of one kind."""

    def __init__(
        self,
        requests: abc.Sequence[Request],
        workers: Replicas,
        seed: int,
        clients: Clients | None,
        progress: abc.Callable[[int], None] | None,
    ) -> None:
        super().__init__(requests, clients, progress)
        *streams, drawn = np.random.SeedSequence(seed).spawn(len(workers.schedulers) + 1)
        self._fleet = Fleet(
            self.env, workers, streams, drawn, self._finished, rejected=self._rejected
        )
        self.replicas, self.ranks = self._fleet.replicas, (workers.ranks,)

    def submit(self, request: Request) -> None:
        self._fleet.submit(self._fleet.choose(request), request)

    def _rejected(self, target: int, request: Request, reason: str) -> None:
        self._fleet.left(target, request)
        self.reject(request, reason)

    def _finished(self, target: int, sequences: abc.Sequence[Sequence], now: float) -> None:
        for sequence in sequences:
            self._fleet.left(target, sequence)
        self.finish(sequences, now)
