"""What the claims measure with: one iteration taken apart, and a whole batch of requests served."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from policies.batch import Batch
from policies.policy import Policy
from policies.scheduler import Scheduler
from profiler.facts.device import DeviceSpec, load_device
from simulator.load.workload import at_once, make_requests
from simulator.loop.quantum import quantize
from simulator.loop.records import Ints, Records
from simulator.loop.replica import Predictor
from simulator.loop.simulation import simulate
from simulator.op_times.predictor import BundlePredictor
from simulator.op_times.regression import OpTimes, TimeByPair

"""Seconds of one layer's attention, by its two sizes."""

_LONGEST, _MOST_DECODES, _MOST_ROWS = 8192, 256, 4096


@dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration of the whole model, as Table 2 of the paper splits it.

    ``linear_s`` is all but attention: GEMMs, elementwise ops, embedding, LM head, all-reduces.
    """

    linear_s: float
    attention_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the iteration."""
        return self.linear_s + self.attention_s


@dataclass(frozen=True)
class Throughput:
    """What serving a set of requests took: seconds in all, and seconds by op."""

    seconds: float
    tokens: int
    ops: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens a second."""
        return self.tokens / self.seconds

    def share(self, ops: Iterable[str]) -> float:
        """Seconds in these ops a token."""
        return sum(self.ops[op] for op in ops) / self.tokens


class Machine:
    """A model on one tensor-parallel group of GPUs, timed by a bundle's regressions.

    ``mixed_s`` is what each layer takes longer where prefill and decodes share an iteration.
    """

    def __init__(self, ops: OpTimes, device: str, mixed_s: float = 0.0) -> None:
        self.ops = ops
        self.device: DeviceSpec = load_device(device)
        self.layers = ops.model.num_layers
        self.mixed_s = mixed_s
        self._attention: dict[tuple[float, float], float] = {}
        self._decode: dict[tuple[int, float], float] = {}

    def iteration(
        self, chunks: Sequence[tuple[int, int]] = (), decodes: int = 0, context: float = 0
    ) -> Iteration:
        """One iteration of chunks ``(tokens, cached tokens)`` and decodes of a mean ``context``."""
        rows = sum(tokens for tokens, _ in chunks) + decodes
        block = self.block(rows)
        linear = self.layers * sum(block.values())
        linear += float(self.ops.embedding(rows) + self.ops.lm_head(len(chunks) + decodes))
        attention = self.attentions(chunks)
        if decodes:
            attention += self.decode_attention(decodes, context)
        if chunks and decodes:
            linear += self.layers * self.mixed_s
        return Iteration(linear, attention)

    def attention(self, tokens: float, cached: float = 0) -> float:
        """Seconds of one chunk's attention in all layers."""
        return self.attentions([(tokens, cached)])

    def attentions(self, chunks: Iterable[tuple[float, float]]) -> float:
        """Seconds of the attention of chunks ``(tokens, cached tokens)``, summed, in all layers.

        A regression takes about as long for one pair as for a thousand, so all that are not known
        yet are asked for at once, and kept.
        """
        wanted = list(chunks)
        if missing := list(dict.fromkeys(c for c in wanted if c not in self._attention)):
            tokens, cached = np.array(missing, np.float64).T
            times = self.layers * self.ops.prefill(tokens, cached)
            self._attention.update(zip(missing, times.tolist(), strict=True))
        return sum(self._attention[chunk] for chunk in wanted)

    def decode_attention(self, batch: int, context: float) -> float:
        """Seconds of a batch of decodes' attention in all layers, at a mean ``context``."""
        key = (batch, context)
        if key not in self._decode:
            self._decode[key] = self.layers * float(self.ops.decode(batch, context))
        return self._decode[key]

    def block(self, rows: float) -> dict[str, float]:
        """Seconds of one layer's ops on ``rows`` fused token rows, attention left out."""
        times = {op: float(time(rows)) for op, time in self.ops.linear.items()}
        if self.ops.all_reduce is not None:
            size = rows * self.ops.model.hidden_size * self.ops.dtype_bytes
            times["all_reduce"] = 2 * float(self.ops.all_reduce(size))
        return times

    def prefill(self, tokens: int, chunk: int | None = None, prompts: int = 1) -> Iteration:
        """Whole prompts in one iteration; with ``chunk``, one prompt in chunks of that size."""
        if chunk is None:
            return self.iteration([(tokens, 0)] * prompts)
        chunks = [(min(chunk, tokens - done), done) for done in range(0, tokens, chunk)]
        attention = self.attentions(chunks)
        linear = sum(self.iteration([part]).linear_s for part in chunks)
        return Iteration(linear, attention)

    def prefill_rate(self, tokens: int, prompts: int = 1) -> float:
        """Prompt tokens a second of a single layer, ``prompts`` prompts at a time."""
        one = sum(self.block(tokens * prompts).values())
        return tokens * prompts / (one + prompts * self.attention(tokens) / self.layers)

    def decode_rate(self, batch: int, context: int) -> float:
        """Decoded tokens a second of a single layer."""
        one = sum(self.block(batch).values())
        return batch / (one + self.decode_attention(batch, context) / self.layers)

    def serve(
        self, policy: Policy, batch: int, prompt: int, output: int, rounds: int = 20
    ) -> Throughput:
        """Serve ``rounds * batch`` equal requests, all there at once, ``batch`` at a time."""
        count = rounds * batch
        prompts, outputs = np.full(count, prompt, np.int64), np.full(count, output, np.int64)
        records = self.run(policy, batch, prompts, outputs)
        return Throughput(records.end_s, count * (prompt + output), self._by_op(records))

    def run(self, policy: Policy, batch: int, prompt: Ints, output: Ints) -> Records:
        """Serve requests of these lengths, all there at once, ``batch`` at a time."""
        longest = int((prompt + output).max())
        scheduler = Scheduler(
            policy,
            max_batch=batch,
            max_in_flight=1,
            kv_capacity=batch * longest,
            max_length=longest,
        )
        requests = make_requests(at_once(len(prompt)), prompt, output, max_length=longest)
        return simulate(requests, [scheduler], self.predictor, (self.layers,))

    @cached_property
    def predictor(self) -> Predictor:
        """Times of batches of up to 256 sequences of up to 8192 tokens."""
        times = BundlePredictor(
            self.ops, max_tokens=_MOST_ROWS, max_length=_LONGEST, max_batch=_MOST_DECODES
        )
        return mixing(times, self.mixed_s)

    def _by_op(self, records: Records) -> dict[str, float]:
        """Seconds in each op over the run; what is left of a layer's time is attention."""
        columns = records.replicas[0].iterations
        rows = columns["prefill_tokens"] + columns["decodes"]
        ops = {op: self.layers * float(time(rows).sum()) for op, time in self.ops.linear.items()}
        mixed = (columns["prefill_tokens"] > 0) & (columns["decodes"] > 0)
        ops["mixing"] = self.layers * self.mixed_s * float(mixed.sum())
        layers = self.layers * float(columns["layer_s"].sum())
        ops["attention"] = layers - sum(ops.values())
        return ops


def with_attention(ops: OpTimes, prefill: TimeByPair, decode: TimeByPair, mark: str) -> OpTimes:
    """The op times with other attention; ``mark`` tells its kept tables from those of others."""
    new = copy.copy(ops)
    new.prefill, new.decode = prefill, decode
    new.key = f"{ops.key} {mark}"
    return new


def mixing(times: Predictor, mixed_s: float) -> Predictor:
    """``times`` with ``mixed_s`` more a layer for batches of both prefill and decodes."""
    extra_s = float(quantize(mixed_s))
    if not extra_s:
        return times

    def timed(batch: Batch) -> tuple[float, float, float, float]:
        layer_s, first_s, last_s, send_s = times(batch)
        if batch.chunks and batch.num_decodes:
            layer_s += extra_s
        return layer_s, first_s, last_s, send_s

    return timed
