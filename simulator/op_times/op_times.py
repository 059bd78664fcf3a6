"""Every op's time as a function of its sizes: all that the loop asks for; over other links, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from sarathi_sim.profiler.bundle.schema import Bundle, BundleMeta
from sarathi_sim.profiler.facts.formats import NumberBytes
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import (
    ALL_LAYER_OPS,
    ALL_REDUCE,
    ALL_TO_ALL,
    DECODE,
    OPS,
    PREFILL,
    SEND_RECV,
    SENDS,
)
from ..loop.records import Floats
from .cache import kept


@dataclass(frozen=True, eq=False)
class Together:
    """In a call of ``batches[i]`` equal chunks of n tokens, each takes ``added(n)[i]`` seconds.

    Other batch sizes are interpolated linearly; beyond the largest, a chunk's share stays. A chunk
    of n tokens in a batch of N tokens takes its share of a call of N / n such chunks, which keeps
    the GPU as busy.
    """

    batches: Floats
    added: Callable[[Floats], Floats]

    def saved(self, chunk: Floats, alone_s: Floats) -> Floats:
        """(gain, launch) of chunks that take ``alone_s`` alone: in a batch of N tokens each saves
        ``gain - launch / N``. Shape (chunks, batches + 1, 2): one for each interval of batches."""
        sizes, calls = self._calls(chunk, alone_s)
        slope = np.append(
            np.diff(calls) / np.diff(sizes),
            calls[:, -1:] / sizes[-1],
            axis=-1,
        )
        launch = chunk[:, None] * (calls - slope * sizes)
        return np.stack([alone_s[:, None] - slope, launch], axis=-1)

    def least_s(self, chunk: Floats, alone_s: Floats) -> Floats:
        """The least time of each chunk, alone or with others."""
        sizes, calls = self._calls(chunk, alone_s)
        return np.asarray((calls / sizes).min(axis=-1))

    def _calls(self, chunk: Floats, alone_s: Floats) -> tuple[Floats, Floats]:
        """Batch sizes from 1 on, and the time of a call of so many chunks, which never falls."""
        sizes = np.append(1.0, self.batches)
        shares = np.vstack([alone_s, self.added(chunk)]).T
        return sizes, np.maximum.accumulate(sizes * shares, axis=-1)


Seconds = TypeVar("Seconds", float, Floats)
TimeBySize = Callable[[ArrayLike], Floats]
"""Seconds by one size, in the shape of the sizes."""


class TimeByPair(Protocol):
    """Seconds by two sizes (chunk and context, batch and mean context)."""

    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Floats:
        """Seconds, of the broadcast shape of both."""

    def table(self, a: Floats, b: Floats) -> Floats:
        """Seconds of every ``a`` with every ``b``: shape (a, b)."""


@dataclass(frozen=True, eq=False)
class PairTimes:
    """A function of two sizes; its tables are kept on disk (``cache.py``) under the hash
    ``identity`` of their inputs, if it has one."""

    time: Callable[[ArrayLike, ArrayLike], Floats]
    identity: str = ""
    op: str = ""

    def __call__(self, a: ArrayLike, b: ArrayLike) -> Floats:
        return self.time(a, b)

    def table(self, a: Floats, b: Floats) -> Floats:
        """Seconds of every ``a`` with every ``b``."""
        sizes = np.concatenate([a, b]).astype(np.float64).tobytes()
        what = f"{self.op} {len(a)}"
        return kept(
            self.identity,
            what,
            lambda: self.time(a[:, None], b),
            sizes,
        )


@dataclass(frozen=True)
class WholeLayer:
    """The time of a layer beyond its ops. A layer takes ``scale`` times the sum of its ops, plus
    ``extra_s``. With a chunk and decodes it takes in addition: the share ``both`` of all its scaled
    ops, the share ``decode`` of the scaled decode attention, and ``both_s``."""

    scale: float = 1.0
    extra_s: float = 0.0
    both: float = 0.0
    decode: float = 0.0
    both_s: float = 0.0

    @property
    def mixes(self) -> bool:
        """Whether a chunk and decodes in one batch take extra time."""
        return bool(self.both or self.decode or self.both_s)

    def mixing_s(self, ops_s: Seconds, decode_s: Seconds) -> Seconds:
        """The extra time of mixing for scaled ops of ``ops_s``, with ``decode_s`` decode
        attention."""
        return self.both * ops_s + self.decode * decode_s + self.both_s

    def mixing_within_s(self, mixed_s: Seconds, decode_s: Seconds) -> Seconds:
        """The extra time of mixing, from the ``mixed_s`` that the ops take including it."""
        return mixed_s - (mixed_s - self.decode * decode_s - self.both_s) / (1 + self.both)


SUM = WholeLayer()


@dataclass(frozen=True)
class Skew:
    """The time of decodes of unequal contexts: beside equal ones of their mean, the share
    :meth:`of` of what equal ones of their longest take longer.

    Up to ``sequences`` in a batch it is ``share``: their blocks of work are on the GPU at once, and
    it waits for the longest. In larger batches, others take the place of the short ones, and it
    falls with the square of the batch. A kernel that pads waits in every batch (infinitely many
    ``sequences``), and may take longer with a mask than without (a share above 1).
    """

    share: float = 0.0
    sequences: float = math.inf

    def of(self, batch: Seconds) -> Seconds:
        """The share for a batch of so many sequences, at least one."""
        waits: Seconds = np.minimum(1.0, (self.sequences / batch) ** 2)
        return self.share * waits


MEAN = Skew()


def _nothing(chunk: Floats) -> Floats:
    return np.empty((0, len(chunk)))


ALONE = Together(np.empty(0), _nothing)
"""For stacks whose calls of several chunks were not measured."""


@dataclass(frozen=True, eq=False)
class OpTimes:
    """Every op's time in seconds, for one layer on one tensor-parallel rank.

    There are two kinds: :func:`~sarathi_sim.simulator.op_times.regression.bundle_times` fits them
    to a profile, :func:`~sarathi_sim.simulator.op_times.modelled.modelled_times` asks a stack's
    tables or a calibrated device.

    ``meta``        origin of the times; its ``content_sha256`` identifies them
    ``by_rows``     each op by token rows
    ``prefill``     attention of a chunk after cached tokens; ``together``: several in one call
    ``decode``      attention of a batch of decodes with equal contexts; ``skew``: unequal ones
    ``all_reduce``  by bytes on each rank; None for a single rank
    ``send``        a message to the next stage by bytes, for each kind of link
    ``whole_layer`` the time of a layer beyond its ops
    ``longest_context`` longest context that measurements support
    ``wider``       how many times the FLOPs of a chunk's query one of a decode takes
    ``bundle``      the profile, if the times are fitted to one
    """

    meta: BundleMeta
    by_rows: Mapping[str, TimeBySize]
    prefill: TimeByPair
    decode: TimeByPair
    all_reduce: TimeBySize | None
    send: Mapping[str, TimeBySize]
    longest_context: int
    together: Together = ALONE
    whole_layer: WholeLayer = SUM
    skew: Skew = MEAN
    wider: float = 1.0
    bundle: Bundle | None = None

    @property
    def tp(self) -> int:
        return self.meta.tp

    @property
    def model(self) -> ModelSpec:
        return self.meta.model_spec

    @property
    def number_bytes(self) -> NumberBytes:
        """The sizes of numbers in the timed formats."""
        if self.meta.kernels is not None:
            return self.meta.kernels.used.number_bytes
        size = 4 if self.meta.dtype == "float32" else 2
        return NumberBytes(size, size, size)

    @property
    def linear(self) -> dict[str, TimeBySize]:
        """The ops of one layer by token rows."""
        return {op: self.by_rows[op] for op in ALL_LAYER_OPS if op in self.by_rows}

    @property
    def reduces(self) -> float:
        """All-reduces of a mean layer: one fewer in a layer without a feed-forward network. Sending
        tokens to experts and back replaces one."""
        calls = OPS[ALL_REDUCE].calls - self.model.share_of("bare")
        return calls - self.model.share(ALL_TO_ALL) if ALL_TO_ALL in self.by_rows else calls

    def scaled(self, factors: Mapping[str, float]) -> OpTimes:
        """These op times, where each op takes ``factors[op]`` times as long (1 where not named).
        The time of whole layers beyond their ops stays."""

        def of(op: str, time: Callable[..., Floats]) -> Scaled:
            return Scaled(time, factors.get(op, 1.0))

        return replace(
            self,
            by_rows={op: of(op, time) for op, time in self.by_rows.items()},
            prefill=of(PREFILL, self.prefill),
            decode=of(DECODE, self.decode),
            all_reduce=of(ALL_REDUCE, self.all_reduce) if self.all_reduce else None,
            send={scope: of(SEND_RECV, time) for scope, time in self.send.items()},
            together=replace(self.together, added=of(PREFILL, self.together.added)),
        )


@dataclass(frozen=True)
class Scaled:
    """The function ``time``, its values multiplied by ``factor``."""

    time: Callable[..., Floats]
    factor: float

    def __call__(self, *sizes: ArrayLike) -> Floats:
        return self.factor * self.time(*sizes)

    def table(self, a: Floats, b: Floats) -> Floats:
        """The table of ``time``, multiplied: the table on disk is not scaled."""
        return self.factor * self.time.table(a, b)  # type: ignore[attr-defined, no-any-return]


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
        size = np.asarray(num_bytes, dtype=np.float64)
        time = np.zeros_like(size) if self.measured is None else self.measured(size)
        if self.within is not None and self.measured is not None:
            ring = self.measured(np.ones(1))[0] + self.within.ring_s(size, self.ranks)
            time = np.maximum(time, ring) if self.at_least else ring
        return np.asarray(time + self.between.ring_s(size / self.ranks, self.nodes))


@dataclass(frozen=True)
class LinkTimes:
    """Messages over other links than the measured ones, which are NVLink, or PCIe with peer access.

    All-reduces over them are rings (Patarasuk and Yuan, 2009): ``2 (n - 1)`` messages of the n-th
    part. The links are ``within`` a node and ``between`` nodes, None where the op times' own are
    meant. ``network`` is the one between nodes in any case, and ``nodes`` how many hold a stage's
    GPUs. ``slower``: the link within a node is not faster than the measured one; a message over it
    takes ``added_s`` longer."""

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
