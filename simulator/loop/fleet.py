"""Replicas of one kind behind a router, each with a front end of its own."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import simpy

from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.simulator.loop.group import Group, StepPredictor
from sarathi_sim.simulator.loop.jitter import Jitter, JitteredService
from sarathi_sim.simulator.loop.moment import ADMISSION, Moment
from sarathi_sim.simulator.loop.quantum import quantize
from sarathi_sim.simulator.loop.replica import Predictor, Replica
from sarathi_sim.simulator.loop.routers import Balancer, Router
from sarathi_sim.simulator.loop.switches import DEFAULT, Switches

Told = abc.Callable[[int, list[Sequence], float], None]
"""Called with the number of a replica, some of its sequences, and the time in seconds."""


@dataclass(frozen=True)
class Replicas:
    """Replicas of one kind: a fresh scheduler for each rank of each, ``predict`` for the times of a
    batch (of a step, with several ``ranks``), the ``layers`` of each pipeline stage, the ``router``
    before them, the seconds that each one's front end takes for a request, and the router among
    the ranks of a replica."""

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
        told: abc.Mapping[str, Any],
    ) -> Replica:
        """Replica ``number``, of one rank or of several. ``told`` are its call-backs."""
        own = slice(number * self.ranks, (number + 1) * self.ranks)
        layers, switches, predict = self.layers, self.switches, cast(Any, self.predict)
        if self.ranks > 1:
            balancer = Balancer(self.rank_router, self.ranks, np.random.default_rng(among))
            jitter = [Jitter(switches.jitter, 1, s) for s in streams[own] if switches.jitter]
            rest = (predict, layers, switches, balancer)
            return Group(env, self.schedulers[own], *rest, jitter=jitter, **told)
        stream = streams[number]
        service = JitteredService(layers, switches, stream) if switches.jitter else None
        scheduler = self.schedulers[number]
        return Replica(env, scheduler, predict, layers, switches, service=service, **told)


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
        finished: Told,
        *,
        reserved: Told | None = None,
        rejected: abc.Callable[[int, Request, str], None] | None = None,
        frontends: int = 1,
    ) -> None:
        self.env = env
        count = len(workers.schedulers) // workers.ranks
        routing = np.random.default_rng(drawn)
        self._balancers = [Balancer(workers.router, count, routing) for _ in range(frontends)]
        self.replicas = []
        for number, among in enumerate(drawn.spawn(count)):
            told: dict[str, Any] = {"on_finished": partial(finished, number)}
            if reserved is not None:
                told["on_reserved"] = partial(reserved, number)
            self.replicas.append(workers.replica(number, env, streams, among, told))
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
