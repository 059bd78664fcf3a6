"""Replicas of one kind behind a router, each with a front end of its own."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import simpy

from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.simulator.loop.jitter import JitteredService
from sarathi_sim.simulator.loop.moment import ADMISSION, Moment
from sarathi_sim.simulator.loop.quantum import quantize
from sarathi_sim.simulator.loop.replica import Predictor, Replica
from sarathi_sim.simulator.loop.routers import ROUTERS, Router
from sarathi_sim.simulator.loop.switches import DEFAULT, Switches

Told = abc.Callable[[int, list[Sequence], float], None]
"""Called with the number of a replica, some of its sequences, and the time in seconds."""


@dataclass(frozen=True)
class Replicas:
    """Replicas of one kind: a fresh scheduler for each, ``predict`` for the times of a batch, the
    ``layers`` of each pipeline stage, the ``router`` before them, and the seconds that each one's
    front end takes for a request."""

    schedulers: abc.Sequence[Scheduler]
    predict: Predictor
    layers: tuple[int, ...]
    switches: Switches = DEFAULT
    router: Router = "round_robin"
    admission_s: float = 0.0

    def __post_init__(self) -> None:
        if any(each.spans or each.num_unfinished for each in self.schedulers):
            raise ValueError("a scheduler has served before: each simulation needs fresh ones")


class Fleet:
    """The replicas of :class:`Replicas` while they run.

    ``frontends`` route without knowing of each other: each counts what it sent itself. Jitter is
    drawn from ``streams``, one a replica, and the router's choices from ``drawn``. ``rejected`` is
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
        switches, layers = workers.switches, workers.layers
        self.replicas = [
            Replica(
                env,
                scheduler,
                workers.predict,
                layers,
                switches,
                service=JitteredService(layers, switches, stream) if switches.jitter else None,
                on_finished=partial(finished, number),
                on_reserved=partial(reserved, number) if reserved is not None else None,
            )
            for number, (scheduler, stream) in enumerate(
                zip(workers.schedulers, streams, strict=True)
            )
        ]
        self._rejected = rejected
        self._choose, self._load = ROUTERS[workers.router]
        self._drawn = np.random.default_rng(drawn)
        self._routed = [0] * frontends
        self._loads = [[0] * len(self.replicas) for _ in range(frontends)]
        self._admission_s = float(quantize(workers.admission_s))
        self._admitted_at = [0.0] * len(self.replicas)  # the last request of each front end

    def refusal(self, request: Request) -> str | None:
        """The reason why no replica can ever serve a request, or None: they are alike."""
        return self.replicas[0].scheduler.refusal(request)

    def choose(self, request: Request, frontend: int = 0) -> int:
        """The replica to which a frontend sends a request; it is part of its load from now on."""
        loads = self._loads[frontend]
        target = self._choose(self._routed[frontend], loads, self._drawn)
        self._routed[frontend] += 1
        if self._load is not None:
            loads[target] += self._load(request)
        return target

    def left(self, target: int, request: Request | Sequence, frontend: int = 0) -> None:
        """A request is no longer part of a replica's load."""
        if self._load is not None:
            self._loads[frontend][target] -= self._load(request)

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
