"""A whole run: requests arrive, a router sends them to replicas, the result is records.

:class:`Replicas` are of one kind, behind a router; :class:`Fleet` is what they are while they run.
Two of them, one for prompts and one for decodes, are in ``handover.py``. :class:`Clients` wait for
an answer before they send the next request.
"""

from __future__ import annotations

import gc
from collections import abc
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import simpy

from sarathi_sim.policies.log import LivelockError
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.scheduler import Scheduler
from .clock import ADMISSION, ARRIVAL, HORIZON_S, Moment, quantize
from .group import Group, StepPredictor
from .pipeline import Jitter, JitteredService
from .records import DEFAULT, Floats, Ints, Records, Switches
from .replica import Predictor, Replica
from .routers import Balancer, Router

TOO_LONG = f"simulated time passed {HORIZON_S / 86400:.0f} days, beyond which it is not exact"


class SimulationError(Exception):
    """A simulation cannot continue; the message says why."""


def simulate(
    requests: abc.Sequence[Request],
    workers: Replicas,
    *,
    seed: int = 0,
    clients: Clients | None = None,
    progress: abc.Callable[[int], None] | None = None,
) -> Records:
    """Serve ``requests`` on these workers; returns the records of the run.

    Jitter and random routers are drawn from ``seed``. Requests arrive at their ``arrival_s``, or
    when ``clients`` send them. ``progress`` is called from time to time with the number of finished
    requests.

    Raises :class:`SimulationError` if simulated time passes 24 days, or if a policy leaves
    requests unserved or lets them preempt each other for ever; ValueError for two requests of one
    id.
    """
    return _OnePool(requests, workers, seed, clients, progress).serve()


OnSequences = abc.Callable[[int, list[Sequence], float], None]
"""Called with the number of a replica, some of its sequences, and the time in seconds."""


@dataclass(frozen=True)
class Replicas:
    """Replicas of one kind: a fresh scheduler for each rank of each, ``predict`` for the times of a
    batch (of a step, with several ``ranks``), the transformer ``layers`` of each pipeline stage,
    the ``router`` before them (``routers.py``), the seconds that each one's front end takes for a
    request, one after the other, and the router among the ranks of a replica. Raises ValueError for
    a scheduler that has served before."""

    schedulers: abc.Sequence[Scheduler]
    predict: Predictor | StepPredictor
    layers: tuple[int, ...]
    switches: Switches = DEFAULT
    router: Router = "round_robin"
    admission_s: float = 0.0
    ranks: int = 1
    rank_router: Router = "round_robin"

    def __post_init__(self) -> None:
        if any(each.spans or each.num_unfinished for each in self.schedulers):
            raise ValueError("a scheduler has served before: each simulation needs fresh ones")
        if len(self.schedulers) % self.ranks:
            count = len(self.schedulers)
            raise ValueError(f"{count} schedulers are no multiple of {self.ranks} ranks")

    def replica(
        self,
        number: int,
        env: simpy.Environment,
        streams: abc.Sequence[np.random.SeedSequence],
        among: np.random.SeedSequence,
        callbacks: abc.Mapping[str, Any],
    ) -> Replica:
        """Replica ``number``, of one rank or of several."""
        own = slice(number * self.ranks, (number + 1) * self.ranks)
        layers, switches, predict = self.layers, self.switches, cast(Any, self.predict)
        if self.ranks > 1:
            balancer = Balancer(self.rank_router, self.ranks, np.random.default_rng(among))
            jitter = [Jitter(switches.jitter, 1, s) for s in streams[own] if switches.jitter]
            rest = (predict, layers, switches, balancer)
            return Group(env, self.schedulers[own], *rest, jitter=jitter, **callbacks)
        stream = streams[number]
        service = JitteredService(layers, switches, stream) if switches.jitter else None
        scheduler = self.schedulers[number]
        return Replica(env, scheduler, predict, layers, switches, service=service, **callbacks)


class Fleet:
    """The replicas of :class:`Replicas` while they run.

    ``frontends`` route without knowing of each other: each counts what it sent itself. Jitter is
    drawn from ``streams``, one a rank, and the routers' choices from ``drawn``. ``rejected`` is
    called with a replica's number, a request that its scheduler does not take, and the reason.
    """

    def __init__(
        self,
        env: simpy.Environment,
        workers: Replicas,
        streams: abc.Sequence[np.random.SeedSequence],
        drawn: np.random.SeedSequence,
        finished: OnSequences,
        *,
        reserved: OnSequences | None = None,
        rejected: abc.Callable[[int, Request, str], None] | None = None,
        frontends: int = 1,
    ) -> None:
        self.env = env
        count = len(workers.schedulers) // workers.ranks
        routing = np.random.default_rng(drawn)
        self._balancers = [Balancer(workers.router, count, routing) for _ in range(frontends)]
        self.replicas = []
        for number, among in enumerate(drawn.spawn(count)):
            callbacks = {"on_finished": partial(finished, number)}
            if reserved is not None:
                callbacks["on_reserved"] = partial(reserved, number)
            self.replicas.append(workers.replica(number, env, streams, among, callbacks))
        self._rejected = rejected
        self._admission_s = float(quantize(workers.admission_s))
        self._admitted_at = [0.0] * count  # the last request of each front end

    def refusal(self, request: Request) -> str | None:
        """The reason why no replica can ever serve a request, or None: they are alike."""
        return self.replicas[0].scheduler.refusal(request)

    def choose(self, request: Request, frontend: int = 0) -> int:
        """The replica to which a frontend sends a request; it is part of its load from now on."""
        return self._balancers[frontend].send(request)

    def left(self, target: int, request: Request | Sequence, frontend: int = 0) -> None:
        """A request is no longer part of a replica's load."""
        self._balancers[frontend].ended(target, request)

    def submit(self, target: int, request: Request) -> None:
        """Hand a request to a replica's front end, which takes it to the scheduler."""
        if not self._admission_s:
            return self._admit(target, request)
        now, free = self.env.now, self._admitted_at[target]
        self._admitted_at[target] = ready = max(now, free) + self._admission_s
        Moment(self.env, ready - now, ADMISSION, self._admitted, (target, request))

    def _admitted(self, moment: Moment) -> None:
        at: Any = moment._value
        self._admit(*at)

    def _admit(self, target: int, request: Request) -> None:
        reason = self.replicas[target].submit(request)
        if reason is not None:
            assert self._rejected is not None, reason
            self._rejected(target, request, reason)


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


Arrival = tuple[float, int]
"""When a request arrives, in seconds, and its place in the list of requests."""


class Clients(Protocol):
    """The clients' requests and their times. All times are whole quanta."""

    def begin(self) -> abc.Iterable[Arrival]:
        """The requests sent at the begin of a run."""
        ...

    def answered(self, position: int, now: float) -> abc.Iterable[Arrival]:
        """The requests sent because this request was finished, or rejected, at ``now``."""
        ...


@dataclass(eq=False)
class ClosedLoop:
    """``clients`` requests are in flight at any time, until there are no more of them.

    Load generators with a limit of concurrency work like this. They send the first ``clients``
    requests at 0. Whenever a request finishes or is rejected, they send the next one in the order
    of the list, ``think_s[place]`` seconds later. A client learns of a finish when the scheduler
    does.
    """

    clients: int
    think_s: Floats
    _next: int = 0

    def begin(self) -> list[Arrival]:
        """The first requests, one a client."""
        self._next = min(self.clients, len(self.think_s))
        return [(0.0, place) for place in range(self._next)]

    def answered(self, position: int, now: float) -> list[Arrival]:
        """The next request, whichever client had the answer."""
        if self._next == len(self.think_s):
            return []
        place = self._next
        self._next += 1
        return [(now + float(self.think_s[place]), place)]


@dataclass(eq=False)
class Conversations:
    """Clients who hold conversations, and wait for each answer before they go on.

    ``session[place]`` is the conversation of a request. Its turns follow each other in the list.
    The first is sent at its ``arrival_s``. Each other one is sent ``think_s[place]`` seconds after
    the turn before it was finished, or rejected.
    """

    session: Ints
    arrival_s: Floats
    think_s: Floats

    def begin(self) -> list[Arrival]:
        """The first turn of every conversation."""
        first = np.flatnonzero(np.diff(self.session, prepend=-1))
        return list(zip(self.arrival_s[first].tolist(), first.tolist(), strict=True))

    def answered(self, position: int, now: float) -> list[Arrival]:
        """The conversation's next turn, if there is one."""
        place = position + 1
        if place == len(self.session) or self.session[place] != self.session[position]:
            return []
        return [(now + float(self.think_s[place]), place)]
