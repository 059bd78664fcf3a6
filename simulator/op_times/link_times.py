"""Messages between GPUs over other links than those that were measured.

A stack's tables and profiles hold all-reduces over the link of the machine that measured them:
NVLink, or PCIe with peer access. A :class:`Route` says what another link takes; all-reduces over it
are rings (Patarasuk and Yuan, 2009): ``2 (n - 1)`` messages of the n-th part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from sarathi_sim.profiler.facts.ops import ALL_REDUCE, SENDS
from ..loop.records import Floats
from .op_times import OpTimes, TimeBySize

ASSUMED_PCT = 50.0
"""The half-width of what no measurement supports."""


@dataclass(frozen=True)
class Route:
    """A way from one GPU to the next: ``latency_s`` of a message, and ``bandwidth`` in bytes a
    second of each GPU while all of them send."""

    name: str
    bandwidth: float
    latency_s: float

    def __call__(self, num_bytes: ArrayLike) -> Floats:
        """Seconds of one message."""
        return self.latency_s + np.asarray(num_bytes, dtype=np.float64) / self.bandwidth

    def ring_s(self, num_bytes: Floats, ranks: int) -> Floats:
        """Seconds of an all-reduce of ``num_bytes`` on each of ``ranks`` GPUs."""
        return 2 * (ranks - 1) * self(num_bytes / ranks)

    @property
    def told(self) -> str:
        """Its numbers."""
        return f"{self.name}, {1e6 * self.latency_s:g} us + bytes / {self.bandwidth / 1e9:.3g} GB/s"


@dataclass(frozen=True)
class Reduce:
    """An all-reduce on ``ranks`` GPUs of each of ``nodes``.

    Within a node it is the ``measured`` one of its ranks (None: a single one) or, over ``within``,
    a ring after the time of the smallest measured message (its kernel and synchronisation); with
    ``at_least`` it is never faster than measured. Over ``between`` each GPU then reduces its part
    with its peers in other nodes.
    """

    measured: TimeBySize | None
    ranks: int
    nodes: int
    within: Route | None
    at_least: bool
    between: Route

    def __call__(self, num_bytes: ArrayLike) -> Floats:
        """Seconds."""
        size = np.asarray(num_bytes, dtype=np.float64)
        time = np.zeros_like(size) if self.measured is None else self.measured(size)
        if self.within is not None and self.measured is not None:
            ring = self.measured(np.ones(1))[0] + self.within.ring_s(size, self.ranks)
            time = np.maximum(time, ring) if self.at_least else ring
        return np.asarray(time + self.between.ring_s(size / self.ranks, self.nodes))


@dataclass(frozen=True)
class LinkTimes:
    """The links of a deployment: ``within`` a node and ``between`` nodes, None where the op times'
    own are meant. ``network`` is the one between nodes in any case, and ``nodes`` how many hold a
    stage's GPUs. ``slower``: the link within a node is not faster than the measured one; a message
    over it takes ``added_s`` longer."""

    within: Route | None
    between: Route | None
    network: Route
    nodes: int
    slower: bool = True
    added_s: float = 0.0

    def of(self, ops: OpTimes, node: OpTimes) -> OpTimes:
        """The op times over these links; ``node`` has the all-reduce of a node's GPUs."""
        send, marks = dict(ops.send), dict(ops.meta.environment)
        for op, scope in SENDS.items():
            route = self.within if scope == "intra_node" else self.between
            if route is not None:
                # Stacks send the residual, too.
                times = 1 if ops.meta.kernels is None else 2
                send[scope] = replace(route, bandwidth=route.bandwidth / times)
                marks[op] = f"modelled: {route.told} (formula, no data)"
        reduce = ops.all_reduce
        if reduce is not None and (self.within or self.nodes > 1):
            ranks, network = ops.tp // self.nodes, self.network
            within = self.within and replace(self.within, latency_s=self.added_s)
            reduce = Reduce(node.all_reduce, ranks, self.nodes, within, self.slower, network)
            ways = [self.within] if self.within else []
            ways += [network] if self.nodes > 1 else []
            told = ", and ".join(route.told for route in ways)
            marks[ALL_REDUCE] = f"modelled: a ring over {told} (formula, no data)"
        if marks == ops.meta.environment:
            return ops
        changed = [op for op, mark in marks.items() if mark != ops.meta.environment.get(op)]
        kernels = ops.meta.kernels
        if kernels is not None:
            half_width = {**kernels.half_width_pct, **dict.fromkeys(changed, ASSUMED_PCT)}
            kernels = replace(kernels, half_width_pct=half_width)
        meta = replace(ops.meta, environment=marks, kernels=kernels)
        return replace(ops, send=send, all_reduce=reduce, meta=meta)
