"""The cost of an iteration: the one place that adds up op times, for numbers and arrays.

The predictor tabulates it. The breakdown and the explanation divide recorded iterations with it.
``Machine`` (``experiments/run/machine.py``) uses it for single iterations. Terms of whole layers
are fitted to it (``interaction.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, OPS, PREFILL, names
from ..loop.records import Floats
from .op_times import SUM, OpTimes, WholeLayer

MIXING = "mixing"
"""The part of a layer that is no op: the extra time of a chunk and decodes in one batch."""
LONG_CHUNK = 2048
"""Tokens of a chunk whose attention runs at the rate of the device's matrix units."""
MANY_DECODES = 128
"""Decodes whose attention takes as long as their FLOPs, or as reading their KV cache."""
FIRST = names(lambda op: op.part == "first")
LAST = names(lambda op: op.part == "last")


@dataclass(frozen=True)
class HostTime:
    """Seconds of the engine's host that no GPU time hides, for an iteration and for each sequence
    in it: scheduling, preparing inputs, sampling. ``launch_layer_s`` is the least time of a layer
    with prompts, whose kernels no CUDA graph launches."""

    iteration_s: float = 0.0
    sequence_s: float = 0.0
    launch_layer_s: float = 0.0


NO_HOST = HostTime()


@dataclass(frozen=True)
class IterationCost:
    """The times of an iteration's parts in seconds, by its sizes. ``scope`` is the link to the next
    stage (None: a single stage). Without ``include_head`` the first and the last stage run their
    layers only. ``host`` time is added on the first stage."""

    ops: OpTimes
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
        ``mixed`` says where there are both."""
        rows = np.asarray(tokens)
        found = {op: self.op_s(op, rows) for op in self.ops.linear}
        prefill, decode = np.asarray(prefill_s, np.float64), np.asarray(decode_s, np.float64)
        if self.layer.mixes:
            ops_s = sum(found.values(), prefill + decode)
            found[MIXING] = np.where(mixed, self.layer.mixing_s(ops_s, decode), 0.0)
        for op in self.ops.linear:
            if OPS[op].rest:
                found[op] = found[op] + self.layer.extra_s
        found |= {PREFILL: prefill, DECODE: decode}
        if self.ops.all_reduce is not None:
            found[ALL_REDUCE] = self.reduce_s(rows)
        return found

    def op_s(self, op: str, rows: npt.ArrayLike) -> Floats:
        """A mean layer's op by token rows."""
        return self.layer.scale * self.ops.model.share(op) * self.ops.by_rows[op](np.asarray(rows))

    def beside_s(self, tokens: npt.ArrayLike) -> Floats:
        """The part of a layer without scale and mixing: ``extra_s`` and the all-reduces."""
        rows = np.asarray(tokens)
        found = np.full(rows.shape, self.layer.extra_s)
        if self.ops.all_reduce is not None:
            found += self.reduce_s(rows)
        return found

    def reduce_s(self, rows: Floats) -> Floats:
        """A layer's all-reduces, with that of two float32 numbers a row where queries and keys are
        normed over the heads of all ranks (vLLM 0.19, ``MiniMaxText01RMSNormTP.forward_qk``)."""
        assert self.ops.all_reduce is not None
        found = self.ops.reduces * self.ops.all_reduce(self.num_bytes(rows))
        if self.ops.model.norm_over_heads and self.ops.tp > 1:
            found = found + self.ops.all_reduce(8.0 * rows)
        return found

    def prefill_s(self, chunk: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        """One layer's attention of a chunk."""
        return self.layer.scale * self.ops.prefill(chunk, context)

    def saved(self, chunk: Floats, alone_s: Floats) -> Floats:
        """The time that chunks without context, ``alone_s`` each, save in a batch with others
        (:meth:`~sarathi_sim.simulator.op_times.op_times.Together.saved`)."""
        scale = self.layer.scale
        return scale * self.ops.together.saved(chunk, alone_s / scale)

    def saved_s(self, chunks: Floats) -> float:
        """The attention time that these chunks save in one batch, against one call each. No batch
        without context takes less than its longest chunk."""
        if len(chunks) < 2 or not len(self.ops.together.batches):
            return 0.0
        alone, tokens = self.prefill_s(chunks, 0.0), chunks.sum()
        at = np.searchsorted(self.ops.together.batches, tokens // chunks, side="right")
        gain, launch = self.saved(chunks, alone)[np.arange(len(chunks)), at].T
        return float(min((gain - launch / tokens).sum(), alone.sum() - alone.max()))

    def decode_s(self, batch: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        """One layer's attention of decodes that hold ``context`` tokens each."""
        return self.layer.scale * self.ops.decode(batch, context)

    def query_s(self, context: npt.ArrayLike) -> Floats:
        """One layer's attention of one query of many over ``context`` tokens, by its FLOPs alone:
        at the rate of a long chunk, but no longer than one of many decodes takes.

        Latent attention projects keys and values of tokens before a chunk again; so there it is the
        rate of a prompt of twice the context, whose mean query sees as many tokens.
        """
        held = np.asarray(context, np.float64)
        chunk, cached = np.full_like(held, LONG_CHUNK), held
        if self.ops.model.latent is not None:
            chunk, cached = np.maximum(2 * held, LONG_CHUNK), np.zeros_like(held)
        share = held / (cached + chunk / 2) / chunk  # of the chunk's query-key pairs
        query_s = self.ops.wider * share * self.prefill_s(chunk, cached)
        return np.minimum(query_s, self.decode_s(MANY_DECODES, held) / MANY_DECODES)

    def first_s(self, tokens: npt.ArrayLike) -> Floats:
        """Extra time on the first stage."""
        return self._edges(FIRST, tokens)

    def last_s(self, outputs: npt.ArrayLike) -> Floats:
        """Extra time on the last stage, for the rows that yield a token."""
        return self._edges(LAST, outputs)

    def host_s(self, sequences: npt.ArrayLike) -> Floats:
        """Host time of an iteration of ``sequences`` sequences. An empty one takes none: engines do
        not call the model for it (vLLM's ``gpu_model_runner.py`` returns
        ``EMPTY_MODEL_RUNNER_OUTPUT``)."""
        count = np.asarray(sequences, np.float64)
        time_s = self.host.iteration_s + self.host.sequence_s * count
        return np.asarray(np.where(count > 0, time_s, 0.0))

    def transfer_s(self, tokens: npt.ArrayLike) -> Floats:
        """Time to send the activations to the next stage: each rank sends its slice."""
        rows = np.asarray(tokens)
        if self.scope is None:
            return np.zeros(rows.shape)
        return self.ops.send[self.scope](self.num_bytes(rows) / self.ops.tp)

    def num_bytes(self, tokens: npt.ArrayLike) -> Floats:
        """Bytes of the activations of ``tokens`` rows."""
        rows = np.asarray(tokens, np.float64)
        return rows * self.ops.model.hidden_size * self.ops.number_bytes.activation

    def _edges(self, ops: tuple[str, ...], rows: npt.ArrayLike) -> Floats:
        nothing = np.zeros(np.shape(rows))
        if not self.include_head:
            return nothing
        return sum((self.ops.by_rows[op](rows) for op in ops), nothing)
