"""How micro-batches pass through a pipeline: one recurrence, written once for each way to use it.

Micro-batches visit every stage in launch order. With ``arrival`` the instant at which a batch can
start on a stage (it was formed, or its result has come from the stage before)::

    start   = max(arrival, release of the batch before)      on this stage
    finish  = start + duration
    release = finish, or with blocking sends finish + send   (not on the last stage)
    arrival on the next stage = finish + send

:class:`Pipeline` takes one batch at a time (the event loop), :func:`stage_times` all batches of a
run at once, stage by stage (the views), and :class:`Diagonal` one batch on every stage at once, for
many samples (re-timing). Times are whole quanta (``clock.py``), so the three agree to the bit.
:class:`Jitter` varies stage times at random, from a seeded stream of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sarathi_sim.policies.batch import Batch
from .clock import ROUNDER, quantize
from .records import Floats, ReplicaLog, StageTimes, Switches


class Pipeline:
    """The stages of one replica, and when each is free (``free``). ``layers`` are the transformer
    layers of each stage."""

    def __init__(self, layers: tuple[int, ...], blocking_send: bool) -> None:
        self.layers = layers
        self.blocking_send = blocking_send
        self.free = [0.0] * len(layers)
        self._later = tuple(enumerate(layers))[1:]

    def launch(
        self, now: float, layer_s: float, first_s: float, last_s: float, send_s: float
    ) -> float:
        """Send a batch down the pipeline at its predicted times; returns its finish time."""
        if self.blocking_send:
            times = nominal_times(self.layers, layer_s, first_s, last_s, send_s)
            return self.launch_stages(now, *times)
        free = self.free
        busy_until = free[0]
        finish = now if now > busy_until else busy_until
        finish += self.layers[0] * layer_s + first_s
        free[0] = finish
        for stage, layers in self._later:
            finish += send_s
            busy_until = free[stage]
            if busy_until > finish:
                finish = busy_until
            finish += layers * layer_s
            free[stage] = finish
        free[-1] = finish = finish + last_s
        return finish

    def launch_stages(
        self, now: float, durations: Sequence[float], sends: Sequence[float]
    ) -> float:
        """Send a batch down the pipeline at given times; returns its finish time. ``durations`` has
        a value for each stage, ``sends`` for each link between two stages."""
        free = self.free
        last = len(free) - 1
        arrival = finish = now
        for stage, duration in enumerate(durations):
            busy_until = free[stage]
            finish = (arrival if arrival > busy_until else busy_until) + duration
            free[stage] = finish
            if stage < last:
                arrival = finish + sends[stage]
                if self.blocking_send:
                    free[stage] = arrival
        return finish


def slowest_stage_s(layers: tuple[int, ...], nominal: tuple[float, float, float, float]) -> float:
    """Seconds of the slowest stage, from a batch's nominal times."""
    return max(nominal_times(layers, *nominal)[0])


def nominal_times(
    layers: tuple[int, ...], layer_s: float, first_s: float, last_s: float, send_s: float
) -> tuple[list[float], list[float]]:
    """A batch's predicted time on each stage, and on each link between them."""
    durations = [n * layer_s for n in layers]
    durations[0] += first_s
    durations[-1] += last_s
    return durations, [send_s] * (len(layers) - 1)


def stage_times(log: ReplicaLog) -> StageTimes:
    """When every micro-batch started and finished on every stage, from the recorded durations.

    Stage s runs the batches in order, so ``release[k] = max(arrival[k], release[k-1]) + d[k]``.
    With ``D[k]`` the sum of the first durations, ``release[k] - D[k]`` is the running maximum of
    ``arrival[k] - D[k-1]``: one vectorised scan per stage. The log of a real engine has measured
    times instead. On a rank of a replica with data-parallel attention a batch starts with those of
    the other ranks; its wait for them at the end is part of its time there.
    """
    if log.measured is not None:
        return log.measured
    if log.waited_s is not None:
        release = log.iterations["finish_s"][:, None]
        return StageTimes(release - log.stage_durations() - log.waited_s[:, None], release, release)
    sends = np.broadcast_to(
        log.iterations["send_s"][:, None], (log.num_iterations, log.num_stages - 1)
    )
    return scan(log.iterations["ready_s"], log.stage_durations(), sends, log.switches.blocking_send)


def scan(ready_s: Floats, durations: Floats, sends: Floats, blocking_send: bool) -> StageTimes:
    """The times of batches that were formed at ``ready_s``, shape (iterations,). ``durations`` has
    the shape (iterations, stages), ``sends`` (iterations, stages - 1)."""
    stages = durations.shape[1]
    start, release = np.empty_like(durations), np.empty_like(durations)
    finish = np.empty_like(durations) if blocking_send else release
    arrival = ready_s
    for stage in range(stages):
        last = stage == stages - 1
        held = durations[:, stage]
        if blocking_send and not last:
            held = held + sends[:, stage]
        total = np.cumsum(held)
        latest = np.subtract(arrival, total - held)
        np.maximum.accumulate(latest, out=latest)
        np.add(latest, total, out=release[:, stage])
        np.subtract(release[:, stage], held, out=start[:, stage])
        if blocking_send:
            finish[:, stage] = start[:, stage] + durations[:, stage]
        if not last:
            arrival = finish[:, stage] + sends[:, stage]
    return StageTimes(start, finish, release)


class Diagonal:
    """The recurrence on all stages at once, each with a batch of its own, for many samples.
    ``free`` holds when each stage is released, ``arrival`` when its next batch arrives. Both have
    the shape (stages, replicas, samples). The caller sets ``arrival[0]``."""

    def __init__(self, shape: tuple[int, int, int], blocking_send: bool) -> None:
        self.free = np.full(shape, -np.inf)
        self.arrival = np.full(shape, -np.inf)
        self.blocking_send = blocking_send
        self._sent, self._received = self.free[:-1], self.arrival[1:]

    def advance(self, duration: Floats, send: Floats) -> None:
        """Every stage runs the batch that arrived, and sends it to the next stage. ``duration`` has
        the shape of ``free``, ``send`` is one stage shorter."""
        np.maximum(self.arrival, self.free, out=self.free)
        np.add(self.free, duration, out=self.free)
        if len(self._sent):
            np.add(self._sent, send, out=self._received)
        if self.blocking_send:
            np.copyto(self._sent, self._received)


class Jitter:
    """Log-normal factors with mean 1 and coefficient of variation ``cv``, one per stage and batch.
    The stream depends only on ``seed``, not on the number of factors per call."""

    def __init__(self, cv: float, num_stages: int, seed: np.random.SeedSequence) -> None:
        if not 0 < cv < 10:
            raise ValueError(f"jitter must lie between 0 and 10, not {cv}")
        self._sigma = math.sqrt(math.log1p(cv * cv))
        self._num_stages = num_stages
        self._generator = np.random.default_rng(seed)
        self._block: list[list[float]] = []

    def factors(self) -> list[float]:
        """One factor for each stage."""
        if not self._block:
            normal = self._generator.standard_normal((1024, self._num_stages))
            self._block = np.exp(self._sigma * normal - self._sigma**2 / 2)[::-1].tolist()
        return self._block.pop()


class JitteredService:
    """Predicted stage times with random variation (a
    :class:`~sarathi_sim.simulator.loop.replica.Service`)."""

    def __init__(
        self, layers: tuple[int, ...], switches: Switches, seed: np.random.SeedSequence
    ) -> None:
        self._layers = layers
        self._turnaround_s = float(quantize(switches.turnaround_s))
        self._jitter = Jitter(switches.jitter, len(layers), seed)

    def __call__(
        self, batch: Batch, nominal: tuple[float, float, float, float]
    ) -> tuple[list[float], list[float], float]:
        """Seconds on each stage, on each link, and the turn-around; ``nominal`` as predicted."""
        durations, sends = nominal_times(self._layers, *nominal)
        factors = self._jitter.factors()
        varied = [(d * f + ROUNDER) - ROUNDER for d, f in zip(durations, factors, strict=True)]
        return varied, sends, self._turnaround_s
