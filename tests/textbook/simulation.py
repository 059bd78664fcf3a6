"""The simulation as a textbook would write it, to check the fast path.

A SimPy process for each stage and each link, a Store in front of each, lists of requests, and a
loop over every request in every iteration. It shares with the fast path what defines the system
(policies, predictor, jitter, the order within an instant), but neither the bookkeeping of
``sarathi_sim.policies`` nor the recurrence of ``sarathi_sim.simulator.loop.pipeline``.
Results must be bitwise equal (``tests/simulator/test_textbook.py``); ``python -m tests.bench``
gives the fast path's speed as a multiple of this one's.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import simpy

from sarathi_sim.policies.catalogue import is_pooled, of_micro_batches
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.pool import PoolPolicy
from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.loop.clock import ADMISSION, ARRIVAL, Moment, quantize
from sarathi_sim.simulator.loop.group import StepPredictor
from sarathi_sim.simulator.loop.pipeline import Jitter
from sarathi_sim.simulator.loop.records import DEFAULT, Switches
from sarathi_sim.simulator.loop.replica import Predictor
from sarathi_sim.simulator.loop.routers import Router
from sarathi_sim.simulator.loop.simulation import Arrival, Clients
from tests.textbook.group import TextbookGroup
from tests.textbook.pipeline import TextbookPipeline
from tests.textbook.replicas import TextbookPoolReplica, TextbookReplica


def simulate_textbook(
    requests: abc.Sequence[Request],
    policy: Policy | PoolPolicy,
    predict: Predictor | StepPredictor,
    layers: tuple[int, ...],
    *,
    replicas: int = 1,
    switches: Switches = DEFAULT,
    router: Router = "round_robin",
    ranks: int = 1,
    rank_router: Router = "round_robin",
    seed: int = 0,
    clients: Clients | None = None,
    admission_s: float = 0.0,
    **options: Any,
) -> list[TextbookPipeline]:
    """Serve ``requests`` on several replicas; returns all their ranks.

    ``options`` are :class:`TextbookReplica`'s, or for a policy that acts on a pool
    :class:`TextbookPoolReplica`'s.
    """
    env = simpy.Environment()
    cluster: list[TextbookPipeline] = []
    for stream in np.random.SeedSequence(seed).spawn(replicas * ranks):
        source = Jitter(switches.jitter, len(layers), stream) if switches.jitter else None
        common = {"switches": switches, "jitter": source, **options}
        cluster.append(
            TextbookPoolReplica(env, policy, predict, layers, **common)
            if is_pooled(policy)
            else TextbookReplica(env, of_micro_batches(policy), predict, layers, **common)
        )
    served: list[Any] = cluster
    if ranks > 1:
        served = []
        for number in range(replicas):
            own = cluster[number * ranks : (number + 1) * ranks]
            group = TextbookGroup(env, own, predict, *layers, switches, options["max_in_flight"])
            key = (replicas * ranks, number)
            among = Route(rank_router, [FrontEnd(env, rank, 0.0) for rank in own], seed, key)
            group.choose = lambda number, among=among: among(number).replica
            served.append(group)
    fronts = [FrontEnd(env, replica, float(quantize(admission_s))) for replica in served]
    route = Route(router, fronts, seed, (len(cluster),))
    if clients is not None:
        _Sent(env, requests, fronts, route, clients)
    else:
        for number, request in enumerate(sorted(requests, key=lambda r: r.arrival_s)):
            arrive = partial(_submit, route, number)
            Moment(env, float(quantize(request.arrival_s)), ARRIVAL, arrive, request)
    env.run()
    return cluster


class FrontEnd:
    """A queue before a replica, whose only server takes ``admission_s`` a request."""

    def __init__(
        self, env: simpy.Environment, replica: TextbookPipeline, admission_s: float
    ) -> None:
        self.env, self.replica, self.admission_s = env, replica, admission_s
        self.waiting: list[Request] = []
        self.rejected: abc.Callable[[Request], None] = lambda _: None

    def submit(self, request: Request) -> None:
        self.waiting.append(request)
        if not self.admission_s:
            self._admit()
        elif len(self.waiting) == 1:
            self._serve()

    def _serve(self) -> None:
        Moment(self.env, self.admission_s, ADMISSION, self._served)

    def _served(self, _: Moment) -> None:
        self._admit()
        if self.waiting:
            self._serve()

    def _admit(self) -> None:
        request = self.waiting.pop(0)
        self.replica.submit(request)
        if request.id in self.replica.rejected:
            self.rejected(request)


class _Sent:
    """What clients send, each request as a process of its own."""

    def __init__(
        self,
        env: simpy.Environment,
        requests: abc.Sequence[Request],
        fronts: list[FrontEnd],
        route: Route,
        clients: Clients,
    ) -> None:
        self.env, self.requests = env, list(requests)
        self.route, self.clients = route, clients
        self.sent = 0
        for front in fronts:
            front.rejected = self._sent_next
            front.replica.answer = lambda member: self._sent_next(member.request)
        self._send(clients.begin())

    def _send(self, arrivals: abc.Iterable[Arrival]) -> None:
        for when, place in arrivals:
            Moment(self.env, when - self.env.now, ARRIVAL, self._arrives, place)

    def _arrives(self, event: Moment) -> None:
        request = replace(self.requests[event._value], arrival_s=self.env.now)
        target = self.route(self.sent)
        self.sent += 1
        target.submit(request)

    def _sent_next(self, request: Request) -> None:
        place = next(n for n, r in enumerate(self.requests) if r.id == request.id)
        self._send(self.clients.answered(place, self.env.now))


class Route:
    """Chooses the replica of the ``number``-th request; what is drawn follows the replicas' jitter
    in the seed's streams."""

    def __init__(
        self, router: Router, fronts: list[FrontEnd], seed: int, key: tuple[int, ...]
    ) -> None:
        self.router, self.fronts = router, fronts
        self.rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))

    def __call__(self, number: int) -> FrontEnd:
        if self.router == "round_robin":
            return self.fronts[number % len(self.fronts)]
        if self.router == "least_tokens":
            return min(self.fronts, key=_declared_tokens)
        if self.router == "least_prompt_tokens":
            return min(_not_fullest(self.fronts), key=_prompt_tokens)
        choice = self.fronts
        if self.router == "random":
            return choice[self.rng.integers(len(choice))]
        if self.router == "power_of_two" and len(choice) > 1:
            first = choice[self.rng.integers(len(choice))]
            others = [front for front in choice if front is not first]
            choice = [first, others[self.rng.integers(len(others))]]
        return min(choice, key=lambda front: len(_unfinished(front)))


def _submit(route: Route, number: int, event: Moment) -> None:
    route(number).submit(event._value)


def _unfinished(front: FrontEnd) -> list[Request]:
    """What was sent to a replica and has not ended."""
    served = [m.request for m in front.replica.everybody() if m.finish_s < 0]
    return [*served, *front.waiting]


def _not_fullest(fronts: list[FrontEnd]) -> list[FrontEnd]:
    """Those with fewer requests than the fullest; all, if they are even."""
    most = max(len(_unfinished(front)) for front in fronts)
    return [front for front in fronts if len(_unfinished(front)) < most] or fronts


def _prompt_tokens(front: FrontEnd) -> tuple[int, int]:
    requests = _unfinished(front)
    return sum(r.prompt_tokens for r in requests), len(requests)


def _declared_tokens(front: FrontEnd) -> int:
    return sum(r.prompt_tokens + r.max_tokens for r in _unfinished(front))
