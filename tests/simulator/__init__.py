from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.simulator.loop import simulation
from sarathi_sim.simulator.loop.records import Records


def simulate(
    requests: Sequence[Request], schedulers: Sequence[Scheduler], predict: Any,
    layers: tuple[int, ...], *, seed: int = 0, clients: Any = None, progress: Any = None,
    **rest: Any,
) -> Records:  # fmt: skip
    """A run on replicas of these schedulers; ``rest`` is what :class:`simulation.Replicas` has."""
    workers = simulation.Replicas(schedulers, predict, layers, **rest)
    return simulation.simulate(requests, workers, seed=seed, clients=clients, progress=progress)
