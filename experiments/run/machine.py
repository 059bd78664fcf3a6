"""A model on one tensor-parallel group of GPUs, timed op by op for the paper's claims; and the best
chunk size and batch cap for a workload on it.

The paper does not say how to choose the chunk (section 6). The closed form is a steady state of
equal requests: a prompt of P tokens takes n chunks of C - (B - 1) tokens, B - 1 decodes piggybacked
on each; decodes without a chunk to piggyback on run on their own, B at a time. All candidates near
the best, and the fixed chunks 256 and 512, are then simulated on requests of the whole workload,
and the best batch of each chunk is searched between them. The simulation decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf

import numpy as np

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.run.traffic import Demand
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.ops import ATTENTION, OPS
from sarathi_sim.simulator.load.engine_memory import kv_capacity_tokens, max_batch
from sarathi_sim.simulator.load.workload import at_once, make_requests
from sarathi_sim.simulator.loop.records import Ints, Records
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.op_times.breakdown import breakdown, mixing_s
from sarathi_sim.simulator.op_times.iteration import MIXING, IterationCost
from sarathi_sim.simulator.op_times.op_times import OpTimes
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.views.spans import Spans

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
        """Seconds per token in these ops."""
        return sum(self.ops[op] for op in ops) / self.tokens


class Machine:
    """A model on one tensor-parallel group of GPUs, timed by a bundle's regressions.

    An iteration takes the predictor's time, computed without tables.
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

        A regression takes about as long for one pair as for a thousand, so all unknown pairs are
        computed at once, and cached.
        """
        wanted = list(chunks)
        if missing := list(dict.fromkeys(c for c in wanted if c not in self._attention)):
            tokens, cached = np.array(missing, np.float64).T
            times = self.layers * self.cost.prefill_s(tokens, cached)
            self._attention.update(zip(missing, times.tolist(), strict=True))
        return sum(self._attention[chunk] for chunk in wanted)

    def _saved(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds saved, in all layers, by one attention call for these chunks."""
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

        The arguments are times of all layers: linear ops, attention of chunks and of decodes.
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
        """Serve ``rounds * batch`` equal requests that arrive at once, ``batch`` at a time."""
        count = rounds * batch
        prompts, outputs = np.full(count, prompt, np.int64), np.full(count, output, np.int64)
        records = self.run(policy, batch, prompts, outputs)
        return Throughput(records.end_s, count * (prompt + output), self._by_op(records))

    def run(self, policy: Policy, batch: int, prompt: Ints, output: Ints) -> Records:
        """Serve requests of these lengths that arrive at once, ``batch`` at a time."""
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
        """Seconds in each op over the run; the rest of a layer's time is attention."""
        log = records.replicas[0]
        used = breakdown(log, self.predictor)
        times = {op: use.time_s for op, use in used.items() if OPS[op].part == "layer"}
        times = {op: time_s for op, time_s in times.items() if op not in ATTENTION}
        times[MIXING] = mixing_s(log, self.predictor, used)
        ops = {op: self.layers * float(time_s.sum()) for op, time_s in times.items()}
        layers = self.layers * float(log.iterations["layer_s"].sum())
        ops["attention"] = layers - sum(ops.values())
        return ops


TILE = 128
FIXED = (256, 512)
_CHUNKS = (128, 256, 384, 512, 640, 768, 1024, 1536, 2048)
_NEAR = 0.12
"""Relative error of the closed form's throughput that is allowed for."""
_EVERY = 24
"""All batch sizes up to this are tried; larger ones grow by an eighth."""
_REQUESTS = 360
_LARGEST_BATCH = 256


@dataclass(frozen=True, eq=False)
class Candidate:
    """A chunk size and batch cap, and the closed form's prediction for them.

    ``seconds`` is the GPU time of a request. ``lost`` is each term's part of it, compared with
    prefill at the best rate, in one piece, with all decodes piggybacked.
    """

    chunk: int
    batch: int
    seconds: float
    tbt_s: float
    lost: dict[str, float]

    @property
    def name(self) -> str:
        """Short."""
        return f"chunk {self.chunk}, batch {self.batch}"


@dataclass(frozen=True)
class Verified:
    """A candidate as simulated on a sample of the whole workload."""

    candidate: Candidate
    tokens_per_s: float
    tbt_p99_s: float


@dataclass(frozen=True)
class Advice:
    """All results. ``verified`` candidates keep the limit, the best first. ``fixed`` is the best
    candidate of each fixed chunk, whether or not it keeps the limit."""

    demand: Demand
    largest_batch: int
    excluded: Candidate | None
    verified: list[Verified]
    fixed: dict[int, Verified]

    def regret(self, chunk: int) -> float:
        """Percent of the best throughput that a fixed chunk loses."""
        return 100 * (1 - self.fixed[chunk].tokens_per_s / self.verified[0].tokens_per_s)


def advise(
    machine: Machine,
    demand: Demand,
    *,
    batch_cap: int | None = None,
    tbt_limit_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Advice:
    """The best chunk size and batch cap for a workload on one tensor-parallel group of GPUs.

    ``tbt_limit_s`` bounds the time of an iteration that carries decodes, in the closed form, and
    P99 of the time between tokens, simulated. Raises ConfigError for a cap beyond what the memory
    holds and for a limit that nothing meets, CapacityError where not one request fits.
    """
    capacity = kv_capacity_tokens(
        machine.ops.model,
        machine.device,
        machine.ops.tp,
        (machine.layers,),
        numbers=machine.ops.number_bytes,
    )
    fitting = min(max_batch(capacity, demand.length), _LARGEST_BATCH)
    if batch_cap is not None and batch_cap > fitting:
        raise ConfigError(
            f"--batch {batch_cap}: does not fit: at most {fitting} requests of {demand.length} "
            "tokens do"
        )
    search = _Search(machine, demand, batch_cap or fitting, tbt_limit_s or inf, progress)
    likely = search.fixed()
    search.simulate(likely.values())
    search.race()
    search.refine()
    if not (verified := search.kept()):
        shortest = min(search.shortest(p) for p in search.candidates)
        raise ConfigError(
            f"--tbt-limit {1e3 * search.limit_s:g}: no chunk and batch meets it; the least time "
            f"between tokens is {1e3 * shortest:.1f} ms"
        )
    fastest = min(search.candidates, key=lambda p: p.seconds)
    excluded = fastest if fastest.tbt_s > search.limit_s else None
    fixed = {chunk: (search.kept(chunk) or [search.found[p]])[0] for chunk, p in likely.items()}
    return Advice(demand, search.largest, excluded, verified, fixed)


class _Search:
    """The results for chunks and batches so far: by the closed form, and by simulation.

    The closed form selects candidates, the simulation decides.
    """

    def __init__(
        self,
        machine: Machine,
        demand: Demand,
        largest: int,
        limit_s: float,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.machine, self.demand, self.progress = machine, demand, progress
        self.largest, self.limit_s = largest, limit_s
        self.found: dict[Candidate, Verified] = {}
        self._closed: dict[tuple[int, int], Candidate] = {}
        longest = max(FIXED[-1], ceil(demand.length / TILE) * TILE)
        self.chunks = [chunk for chunk in _CHUNKS if chunk <= longest]
        self.candidates = [self.closed(c, b) for c in self.chunks for b in _batches(largest)]
        self.allowed = [p for p in self.candidates if p.tbt_s <= limit_s]

    def closed(self, chunk: int, batch: int) -> Candidate:
        """A candidate by the closed form."""
        key = chunk, batch
        if key not in self._closed:
            self._closed[key] = candidate(self.machine, self.demand, chunk, batch)
        return self._closed[key]

    def simulate(self, jobs: Iterable[Candidate]) -> None:
        """Simulate the candidates that were not simulated yet."""
        for job in jobs:
            if job not in self.found:
                self.found[job] = _simulate(self.machine, self.demand, job)
            if self.progress is not None:
                self.progress(len(self.found), max(len(self.found), len(self.allowed)))

    def kept(self, chunk: int | None = None) -> list[Verified]:
        """The simulated candidates (of one chunk) that keep the limit, the best first."""
        inside = [
            v
            for v in self.found.values()
            if chunk in (None, v.candidate.chunk) and self.shortest(v.candidate) <= self.limit_s
        ]
        return sorted(inside, key=lambda v: -v.tokens_per_s)

    def shortest(self, p: Candidate) -> float:
        """The smallest TBT limit that a candidate keeps, by the best estimate so far."""
        return max(p.tbt_s, self.found[p].tbt_p99_s) if p in self.found else p.tbt_s

    def fixed(self) -> dict[int, Candidate]:
        """The likely best of each fixed chunk."""

        def order(p: Candidate) -> tuple[bool, float]:
            return p.tbt_s > self.limit_s, p.seconds

        return {c: min((p for p in self.candidates if p.chunk == c), key=order) for c in FIXED}

    def race(self) -> None:
        """Simulate all candidates whose closed form is near the best that keeps the limit."""
        for near in sorted(self.allowed, key=lambda p: p.seconds):
            best = min((v.candidate.seconds for v in self.kept()), default=inf)
            if near.seconds * (1 - _NEAR) > best:
                break
            self.simulate([near])

    def refine(self) -> None:
        """Search each chunk's best batch between the batches already tried."""
        for chunk in self.chunks:
            step = 1 + self.largest // 8
            while (step := step // 2) and (kept := self.kept(chunk)):
                at = kept[0].candidate.batch
                around = [b for b in (at - step, at + step) if 2 <= b <= self.largest]
                near = (self.closed(chunk, b) for b in around)
                self.simulate(p for p in near if p.tbt_s <= self.limit_s)


def _batches(largest: int) -> list[int]:
    """Batch caps up to ``largest`` that are tried first."""
    found = [*range(min(2, largest), min(_EVERY, largest) + 1)]
    while found[-1] < largest:
        found.append(min(largest, found[-1] + found[-1] // 8))
    return found


def candidate(machine: Machine, demand: Demand, chunk: int, batch: int) -> Candidate:
    """The closed form, averaged over the parts of the workload."""
    parts = [_steady(machine, prompt, output, chunk, batch) for prompt, output in demand.parts]
    terms = parts[0][1]
    return Candidate(
        chunk,
        batch,
        float(np.mean([seconds for seconds, _, _ in parts])),
        max(tbt for _, _, tbt in parts),
        {term: float(np.mean([lost[term] for _, lost, _ in parts])) for term in terms},
    )


def _steady(
    m: Machine, prompt: int, output: int, chunk: int, batch: int
) -> tuple[float, dict[str, float], float]:
    """Seconds per request, the cost of each term, and the longest iteration."""
    length, decodes = prompt + output, output - 1
    size = Sarathi(chunk, TILE, "reserve").chunk_tokens(batch - 1, batch)
    count = ceil(prompt / size)
    piggybacked = min(batch - 1, decodes / count)
    context = (prompt + length) / 2
    alone = max(0.0, decodes - count * piggybacked) / batch

    chunks = [(min(size, prompt - done), done) for done in range(0, prompt, size)]
    m.attentions([*chunks, (prompt, 0), (size, prompt)])  # computed at once, which is faster
    attention = m.attentions(chunks)
    rows = [tokens + piggybacked for tokens, _ in chunks]
    linear_s = [_linear(m, r) for r in rows]
    linear = sum(linear_s)
    decoding = m.iteration(decodes=batch, context=context)
    each = decoding.attention_s / batch
    mixing = 0.0
    if piggybacked:
        mixing = sum(
            m.mixing_s(of_rows, m.attention(*part), piggybacked * each)
            for of_rows, part in zip(linear_s, chunks, strict=True)
        )
    seconds = linear + attention + mixing + count * piggybacked * each + alone * decoding.total_s

    whole = TILE * max(8, ceil(length / TILE))
    best_rate = _linear(m, whole) / whole
    tiled = sum(_linear(m, ceil(r / TILE) * TILE) * r / (ceil(r / TILE) * TILE) for r in rows)
    lost = {
        "tile": max(0.0, linear - tiled),
        "prefill efficiency": max(0.0, tiled - sum(rows) * best_rate),
        "re-read of KV": max(0.0, attention - m.attention(prompt)),
        "P:D balance": alone * decoding.linear_s,
    }
    tbt = _linear(m, size + piggybacked) + m.attention(size, prompt) + piggybacked * each
    return seconds, lost, tbt


def _linear(m: Machine, rows: float) -> float:
    return m.layers * sum(m.block(rows).values())


def _simulate(machine: Machine, demand: Demand, chosen: Candidate) -> Verified:
    prompt, output = demand.requests(max(_REQUESTS, 10 * chosen.batch))
    policy = Sarathi(chosen.chunk, TILE, "reserve")
    records = machine.run(policy, chosen.batch, prompt, output)
    gaps, weights = Spans(records.replicas[0]).token_gaps()
    order = np.argsort(gaps)
    index = np.searchsorted(np.cumsum(weights[order]), 0.99 * weights.sum())
    tbt = float(gaps[order][min(int(index), len(gaps) - 1)]) if len(gaps) else 0.0
    return Verified(chosen, int((prompt + output).sum()) / records.end_s, tbt)


def explain(advice: Advice) -> list[str]:
    """Six lines: the lengths, the best choice, why, its limit, other chunks, regrets."""
    best, demand = advice.verified[0], advice.demand
    chosen = best.candidate
    piggybacked = chosen.batch - 1
    size = Sarathi(chosen.chunk, TILE, "reserve").chunk_tokens(piggybacked, chosen.batch)
    balance = "one request at a time: no decode has a chunk to piggyback on"
    if piggybacked:
        balance = (
            "chunks and decodes are in balance at P:D (C - (B - 1)) / (B - 1) = "
            f"{size / piggybacked:.1f}"
        )
    terms = sorted(chosen.lost.items(), key=lambda item: -item[1])
    shares = [f"{name} {100 * cost / chosen.seconds:.1f} %" for name, cost in terms]
    limit = f"limited by {shares[0]} of the time; then {', '.join(shares[1:])}"
    if advice.excluded is not None:
        gain = 100 * (chosen.seconds / advice.excluded.seconds - 1)
        limit = (
            f"limited by the TBT limit: {advice.excluded.name} would be {gain:.1f} % faster, at "
            f"{1e3 * advice.excluded.tbt_s:.0f} ms an iteration; then {shares[0]}"
        )
    first = {v.candidate.chunk: v for v in reversed(advice.verified)}  # the best of each chunk
    next_ones = sorted(first.values(), key=lambda v: -v.tokens_per_s)[1:4]
    others = [f"{v.candidate.name}: {_percent(v, best)}" for v in next_ones]
    return [
        f"workload: {demand.line()}",
        f"best: {chosen.name} (of at most {advice.largest_batch}): {best.tokens_per_s:,.0f} "
        f"tokens/s simulated, {1e3 * best.tbt_p99_s:.0f} ms between tokens (p99)",
        f"why: {balance}, and the workload's is {demand.ratio}",
        limit,
        f"next: {'; '.join(others) or 'nothing else was allowed'}",
        "regret: " + "; ".join(_regret(advice, chunk) for chunk in FIXED),
    ]


def _regret(advice: Advice, chunk: int) -> str:
    if advice.fixed[chunk] not in advice.verified:
        return f"fixed {chunk} breaks the TBT limit"
    return f"fixed {chunk} {advice.regret(chunk):.1f} %"


def _percent(found: Verified, best: Verified) -> str:
    return f"{100 * (found.tokens_per_s / best.tokens_per_s - 1):+.1f} %"
