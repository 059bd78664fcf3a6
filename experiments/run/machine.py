"""Times for the paper's claims: one iteration op by op, and a whole batch of requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.policy import Policy
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.ops import ATTENTION, OPS
from sarathi_sim.simulator.load.workload import at_once, make_requests
from sarathi_sim.simulator.loop.records import Ints, Records
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.op_times.breakdown import breakdown, mixing_s
from sarathi_sim.simulator.op_times.iteration import MIXING, IterationCost
from sarathi_sim.simulator.op_times.op_times import OpTimes
from sarathi_sim.simulator.op_times.predictor import BundlePredictor

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
    """The time to serve a set of requests: seconds in all, and seconds by op."""

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

    Its iterations cost what the predictor's do, without tables between.
    """

    def __init__(self, ops: OpTimes, device: str) -> None:
        self.ops = ops
        self.cost = IterationCost(ops, ops.whole_layer)
        self.device: DeviceSpec = load_device(device)
        self.layers = ops.model.num_layers
        self._attention: dict[tuple[float, float], float] = {}
        self._decode: dict[tuple[int, float], float] = {}

    def iteration(
        self, chunks: Sequence[tuple[int, int]] = (), decodes: int = 0, context: float = 0
    ) -> Iteration:
        """One iteration of chunks ``(tokens, cached tokens)`` and decodes of a mean ``context``."""
        rows = sum(tokens for tokens, _ in chunks) + decodes
        prefill_s = self.attentions(chunks) - self._saved(chunks)
        decode_s = self.decode_attention(decodes, context) if decodes else 0.0
        parts = self.cost.layer_parts(
            rows, prefill_s / self.layers, decode_s / self.layers, bool(chunks and decodes)
        )
        linear = self.layers * sum(float(t) for op, t in parts.items() if op not in ATTENTION)
        linear += float(self.cost.first_s(rows) + self.cost.last_s(len(chunks) + decodes))
        return Iteration(linear, prefill_s + decode_s)

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
            times = self.layers * self.cost.prefill_s(tokens, cached)
            self._attention.update(zip(missing, times.tolist(), strict=True))
        return sum(self._attention[chunk] for chunk in wanted)

    def _saved(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds less, in all layers, for the attention of chunks in one call."""
        return self.layers * self.cost.saved_s(np.array([size for size, _ in chunks], np.float64))

    def decode_attention(self, batch: int, context: float) -> float:
        """Seconds of a batch of decodes' attention in all layers, at a mean ``context``."""
        key = (batch, context)
        if key not in self._decode:
            self._decode[key] = self.layers * float(self.cost.decode_s(batch, context))
        return self._decode[key]

    def block(self, rows: float) -> dict[str, float]:
        """Seconds of one layer's ops on ``rows`` fused token rows, attention left out."""
        parts = self.cost.layer_parts(rows)
        return {op: float(t) for op, t in parts.items() if op not in (*ATTENTION, MIXING)}

    def mixing_s(self, linear_s: float, prefill_s: float, decode_s: float) -> float:
        """Extra seconds for a chunk and decodes in one iteration, in all layers.

        The arguments are those of all layers: linear ops, attention of chunks and of decodes.
        """
        ops_s = (linear_s + prefill_s + decode_s) / self.layers
        return self.layers * self.cost.layer.mixing_s(ops_s, decode_s / self.layers)

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
        scheduler = MicroBatches(
            policy,
            max_batch=batch,
            max_in_flight=1,
            kv_capacity=batch * longest,
            max_length=longest,
        )
        requests = make_requests(at_once(len(prompt)), prompt, output, max_length=longest)
        return simulate(requests, [scheduler], self.predictor, (self.layers,))

    @cached_property
    def predictor(self) -> BundlePredictor:
        """Times of batches of up to 256 sequences of up to 8192 tokens."""
        return BundlePredictor(
            self.ops, max_tokens=_MOST_ROWS, max_length=_LONGEST, max_batch=_MOST_DECODES
        )

    def _by_op(self, records: Records) -> dict[str, float]:
        """Seconds in each op over the run; what is left of a layer's time is attention."""
        log = records.replicas[0]
        used = breakdown(log, self.predictor)
        times = {op: use.time_s for op, use in used.items() if OPS[op].part == "layer"}
        times = {op: time_s for op, time_s in times.items() if op not in ATTENTION}
        times[MIXING] = mixing_s(log, self.predictor, used)
        ops = {op: self.layers * float(time_s.sum()) for op, time_s in times.items()}
        layers = self.layers * float(log.iterations["layer_s"].sum())
        ops["attention"] = layers - sum(ops.values())
        return ops
