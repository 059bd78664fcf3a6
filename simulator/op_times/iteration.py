"""The cost of an iteration: the one place that adds up op times, for numbers and arrays.

The predictor tabulates it. The breakdown and the explanation divide recorded iterations with it.
``Machine`` (``experiments/run/machine.py``) uses it for single iterations. Terms of whole layers
are fitted to it (``interaction.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, OPS, PREFILL, names
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.together import Together

MIXING = "mixing"
"""Of a layer's parts, the one that is no op: what a chunk and decodes in one batch add."""
FIRST = names(lambda op: op.part == "first")
LAST = names(lambda op: op.part == "last")

Seconds = TypeVar("Seconds", float, Floats)
TimeBySize = Callable[[npt.ArrayLike], Floats]
TimeByPair = Callable[[npt.ArrayLike, npt.ArrayLike], Floats]
"""Seconds by one size, and by two (chunk and context, batch and mean context)."""


class OpFunctions(Protocol):
    """Every op's seconds as a function of its sizes, for one layer on one tensor-parallel rank: as
    much of :class:`~sarathi_sim.simulator.op_times.regression.OpTimes` as the cost of an iteration
    needs."""

    model: ModelSpec
    tp: int
    dtype_bytes: int
    by_rows: dict[str, TimeBySize]
    together: Together
    all_reduce: TimeBySize | None
    send: dict[str, TimeBySize]

    @property
    def linear(self) -> dict[str, TimeBySize]: ...

    @property
    def reduces(self) -> float: ...

    @property
    def prefill(self) -> TimeByPair: ...

    @property
    def decode(self) -> TimeByPair: ...

    def decode_table(self, batch: Floats, context: Floats) -> Floats:
        """:attr:`decode` of every batch with every context."""


@dataclass(frozen=True)
class WholeLayer:
    """The time of a layer beyond its ops.

    It takes ``scale`` times their sum, and ``extra_s``. A layer with a chunk and decodes takes on
    top: the share ``both`` of all its scaled ops, the share ``decode`` of the scaled decode
    attention, and ``both_s``.
    """

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
        """The same, from the ``mixed_s`` that the ops take with it."""
        return mixed_s - (mixed_s - self.decode * decode_s - self.both_s) / (1 + self.both)


SUM = WholeLayer()


@dataclass(frozen=True)
class HostTime:
    """Seconds of the engine's host that no GPU time hides: of an iteration, and of each sequence
    in it. Scheduling, preparing inputs and sampling are such times. ``launch_layer_s`` is the least
    time of a layer with prompts, whose kernels no CUDA graph launches."""

    iteration_s: float = 0.0
    sequence_s: float = 0.0
    launch_layer_s: float = 0.0


NO_HOST = HostTime()


def counted_context(mean: Seconds, longest: Seconds, skew: Seconds | float) -> Seconds:
    """The context of equal decodes that take as long as these."""
    return mean + skew * (longest - mean)


@dataclass(frozen=True)
class IterationCost:
    """The times of an iteration's parts in seconds, by its sizes.

    ``scope`` is how far the next stage is (None: there is none). Without ``include_head`` the first
    and the last stage do their layers only. ``host`` comes on top on the first stage.
    """

    ops: OpFunctions
    layer: WholeLayer = SUM
    scope: str | None = None
    include_head: bool = True
    host: HostTime = NO_HOST

    def layer_parts(
        self,
        tokens: npt.ArrayLike,
        prefill_s: npt.ArrayLike = 0.0,
        decode_s: npt.ArrayLike = 0.0,
        mixed: npt.ArrayLike = False,
    ) -> dict[str, Floats]:
        """A mean layer of ``tokens`` rows, by op and :data:`MIXING`; they add up to the layer.

        ``prefill_s`` and ``decode_s`` are its attention (:meth:`prefill_s`, :meth:`decode_s`), and
        ``mixed`` says where there are both.
        """
        rows = np.asarray(tokens)
        share = self.ops.model.share
        found = {
            op: self.layer.scale * share(op) * time(rows) for op, time in self.ops.linear.items()
        }
        prefill, decode = np.asarray(prefill_s, np.float64), np.asarray(decode_s, np.float64)
        if self.layer.mixes:
            ops_s = sum(found.values(), prefill + decode)
            found[MIXING] = np.where(mixed, self.layer.mixing_s(ops_s, decode), 0.0)
        for op in self.ops.linear:
            if OPS[op].rest:
                found[op] = found[op] + self.layer.extra_s
        found |= {PREFILL: prefill, DECODE: decode}
        if self.ops.all_reduce is not None:
            found[ALL_REDUCE] = self.ops.reduces * self.ops.all_reduce(self.num_bytes(rows))
        return found

    def beside_s(self, tokens: npt.ArrayLike) -> Floats:
        """The part of a layer without scale and mixing: ``extra_s`` and the all-reduces."""
        rows = np.asarray(tokens)
        found = np.full(rows.shape, self.layer.extra_s)
        if self.ops.all_reduce is not None:
            found += self.ops.reduces * self.ops.all_reduce(self.num_bytes(rows))
        return found

    def prefill_s(self, chunk: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        """One layer's attention of a chunk."""
        return self.layer.scale * self.ops.prefill(chunk, context)

    def saved(self, chunk: Floats, alone_s: Floats) -> Floats:
        """What chunks that take ``alone_s`` without context take less in a batch with others
        (:meth:`~sarathi_sim.simulator.op_times.together.Together.saved`)."""
        scale = self.layer.scale
        return scale * self.ops.together.saved(chunk, alone_s / scale)

    def saved_s(self, chunks: Floats) -> float:
        """What the attention of these chunks in one batch takes less than that of each alone. No
        batch without context takes less than its longest chunk."""
        if len(chunks) < 2 or not self.ops.together.each:
            return 0.0
        alone, tokens = self.prefill_s(chunks, 0.0), chunks.sum()
        at = np.searchsorted(self.ops.together.batches, tokens // chunks, side="right")
        gain, launch = self.saved(chunks, alone)[np.arange(len(chunks)), at].T
        return float(min((gain - launch / tokens).sum(), alone.sum() - alone.max()))

    def decode_s(self, batch: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        """One layer's attention of decodes that hold ``context`` tokens each."""
        return self.layer.scale * self.ops.decode(batch, context)

    def first_s(self, tokens: npt.ArrayLike) -> Floats:
        """Extra time on the first stage."""
        return self._edges(FIRST, tokens)

    def last_s(self, outputs: npt.ArrayLike) -> Floats:
        """Extra time on the last stage, for the rows that yield a token."""
        return self._edges(LAST, outputs)

    def host_s(self, sequences: npt.ArrayLike) -> Floats:
        """What the host adds to an iteration of so many sequences."""
        return self.host.iteration_s + self.host.sequence_s * np.asarray(sequences, np.float64)

    def transfer_s(self, tokens: npt.ArrayLike) -> Floats:
        """Time to send the activations to the next stage: each rank sends its slice."""
        rows = np.asarray(tokens)
        if self.scope is None:
            return np.zeros(rows.shape)
        return self.ops.send[self.scope](self.num_bytes(rows) / self.ops.tp)

    def num_bytes(self, tokens: npt.ArrayLike) -> Floats:
        """Bytes of the activations of ``tokens`` rows."""
        rows = np.asarray(tokens, np.float64)
        return rows * self.ops.model.hidden_size * self.ops.dtype_bytes

    def _edges(self, ops: tuple[str, ...], rows: npt.ArrayLike) -> Floats:
        nothing = np.zeros(np.shape(rows))
        if not self.include_head:
            return nothing
        return sum((self.ops.by_rows[op](rows) for op in ops), nothing)
