"""A model on one tensor-parallel group of GPUs, timed op by op for the paper's claims; and the best
chunk size and batch cap for a workload on it, by simulation of all of its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, inf, isnan
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.profiler.bundle.schema import find_bundle, list_bundles, load_bundle
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ATTENTION, OPS
from sarathi_sim.profiler.kernels.op_source import op_source
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.engine_memory import kv_capacity_tokens, max_batch
from sarathi_sim.simulator.load.requests import at_once, make_requests
from sarathi_sim.simulator.loop.records import Ints, Records
from sarathi_sim.simulator.loop.simulation import Replicas, simulate
from sarathi_sim.simulator.op_times.iteration import MIXING, IterationCost
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.op_times.op_times import OpTimes
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.op_times.regression import bundle_times
from sarathi_sim.simulator.views.explain import breakdown, mixing_s
from sarathi_sim.simulator.views.ledger import Spans
from sarathi_sim.simulator.views.metrics import weighted_quantiles
from .traffic import Demand

_LONGEST, _MOST_DECODES, _MOST_ROWS = 8192, 256, 4096


@dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration of the whole model, as Table 2 of the paper splits it. ``linear_s``
    is all but attention: GEMMs, elementwise ops, embedding, LM head, all-reduces."""

    linear_s: float
    attention_s: float

    @property
    def total_s(self) -> float:
        return self.linear_s + self.attention_s


@dataclass(frozen=True)
class Throughput:
    """The time to serve a set of requests: seconds in all, and seconds by op."""

    seconds: float
    tokens: int
    ops: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def share(self, ops: Iterable[str]) -> float:
        """Seconds per token in these ops."""
        return sum(self.ops[op] for op in ops) / self.tokens


class Machine:
    """A model on one tensor-parallel group of GPUs, timed by a bundle's regressions. An iteration
    takes the predictor's time, computed without tables."""

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
        # One attention call for these chunks saves some.
        sizes = np.array([size for size, _ in chunks], np.float64)
        prefill_s = self.attentions(chunks) - self.layers * self.cost.saved_s(sizes)
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
        """Seconds of the attention of chunks ``(tokens, cached tokens)``, summed, in all layers;
        all unknown pairs are computed at once, and cached."""
        wanted = list(chunks)
        if missing := list(dict.fromkeys(c for c in wanted if c not in self._attention)):
            tokens, cached = np.array(missing, np.float64).T
            times = self.layers * self.cost.prefill_s(tokens, cached)
            self._attention.update(zip(missing, times.tolist(), strict=True))
        return sum(self._attention[chunk] for chunk in wanted)

    def decode_attention(self, batch: int, context: float) -> float:
        """Seconds of a batch of decodes' attention in all layers, at a mean ``context``."""
        if (key := (batch, context)) not in self._decode:
            self._decode[key] = self.layers * float(self.cost.decode_s(batch, context))
        return self._decode[key]

    def block(self, rows: float) -> dict[str, float]:
        """Seconds of one layer's ops on ``rows`` fused token rows, attention left out."""
        parts = self.cost.layer_parts(rows)
        return {op: float(t) for op, t in parts.items() if op not in (*ATTENTION, MIXING)}

    def prefill(self, tokens: int, chunk: int | None = None, prompts: int = 1) -> Iteration:
        """Whole prompts in one iteration; with ``chunk``, one prompt in chunks of that size."""
        if chunk is None:
            return self.iteration([(tokens, 0)] * prompts)
        chunks = [(min(chunk, tokens - done), done) for done in range(0, tokens, chunk)]
        attention = self.attentions(chunks)
        linear = sum(self.iteration([part]).linear_s for part in chunks)
        return Iteration(linear, attention)

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
        room: dict[str, Any] = {"kv_capacity": batch * longest, "max_length": longest}
        scheduler = MicroBatches(policy, max_batch=batch, max_in_flight=1, **room)
        requests = make_requests(at_once(len(prompt)), prompt, output, max_length=longest)
        return simulate(requests, Replicas([scheduler], self.predictor, (self.layers,)))

    @cached_property
    def predictor(self) -> BundlePredictor:
        """Times of batches of up to 256 sequences of up to 8192 tokens."""
        return BundlePredictor(
            self.ops, max_tokens=_MOST_ROWS, max_length=_LONGEST, max_batch=_MOST_DECODES
        )

    def _by_op(self, records: Records) -> dict[str, float]:
        log = records.replicas[0]
        used = breakdown(log, self.predictor)
        times = {op: use.time_s for op, use in used.items() if OPS[op].part == "layer"}
        times = {op: time_s for op, time_s in times.items() if op not in ATTENTION}
        times[MIXING] = mixing_s(log, self.predictor, used)
        ops = {op: self.layers * float(time_s.sum()) for op, time_s in times.items()}
        layers = self.layers * float(log.iterations["layer_s"].sum())
        ops["attention"] = layers - sum(ops.values())
        return ops


def machine_of(model: str, device: str, tp: int, profiles: str | None) -> Machine:
    """A model on ``tp`` GPUs of a device, with the op times that a run takes: of a bundle in
    ``profiles``, or without them of the calibrated device. Raises UserError."""
    gpu = load_device(device)
    if profiles is None:
        source = op_source(gpu, load_model(model), tp)
    else:
        if model not in (name for _, name, _ in list_bundles(Path(profiles))):
            model = load_model(model).name
        source = find_bundle(Path(profiles), gpu.name, model, tp)
    ops = bundle_times(load_bundle(source)) if isinstance(source, Path) else modelled_times(source)
    return Machine(ops, device)


TILE = 128
FIXED = (256, 512)
_CHUNKS = (128, 256, 384, 512, 640, 768, 1024, 1536, 2048)
_PARTS = 8
"""Batches of each chunk, evenly spread, that are tried first."""
_REQUESTS = 360
_LARGEST_BATCH = 256


@dataclass(frozen=True)
class Candidate:
    """A chunk size and batch cap, as simulated on a sample of the whole workload."""

    chunk: int
    batch: int
    tokens_per_s: float
    tbt_p99_s: float


def advise(
    machine: Machine,
    demand: Demand,
    *,
    batch_cap: int | None = None,
    tbt_limit_s: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The best chunk size and batch cap for a workload on one tensor-parallel group of GPUs.
    ``verified`` candidates keep ``tbt_limit_s`` (P99 of the time between tokens), the best first;
    ``excluded`` is a faster one that breaks it, or None. Raises UserError for a cap beyond what the
    memory holds and for a limit that nothing meets, CapacityError where not one request fits."""
    ops, layers = machine.ops, (machine.layers,)
    numbers = ops.number_bytes
    capacity = kv_capacity_tokens(ops.model, machine.device, ops.tp, layers, numbers=numbers)
    fitting = min(max_batch(capacity, demand.length), _LARGEST_BATCH)
    if batch_cap is not None and batch_cap > fitting:
        raise UserError(
            f"--seqs {batch_cap}: does not fit: at most {fitting} requests of {demand.length} "
            "tokens fit"
        )
    largest, limit_s = batch_cap or fitting, tbt_limit_s or inf
    found = _search(machine, demand, largest, limit_s, progress)
    verified = [one for one in found if one.tbt_p99_s <= limit_s]
    if not verified:
        shortest = min(one.tbt_p99_s for one in found)
        raise UserError(
            f"--slo: p99 tbt {1e3 * limit_s:g}ms: no chunk size and batch keep it; the shortest "
            f"time between tokens is {1e3 * shortest:.1f} ms"
        )
    return {
        "workload": demand.line(),
        "largest_batch": largest,
        "excluded": None if found[0] is verified[0] else asdict(found[0]),
        "verified": [asdict(one) for one in verified],
    }


def _search(
    machine: Machine,
    demand: Demand,
    largest: int,
    limit_s: float,
    progress: Callable[[int, int], None],
) -> list[Candidate]:
    """What was simulated, the most tokens a second first: of each chunk, batches evenly spread, and
    those with which a mean prompt is a whole number of chunks; then those a step to either side of
    the chunk's best, in halving steps, unless it is too slow to become the best."""
    found: dict[tuple[int, int], Candidate] = {}
    longest = max(FIXED[-1], ceil(demand.length / TILE) * TILE)
    # A batch that leaves a chunk hardly any prompt tokens is slow, also to simulate.
    tops = {chunk: min(largest, chunk - TILE // 4) for chunk in _CHUNKS if chunk <= longest}

    def simulate(chunk: int, batches: Iterable[int]) -> None:
        for batch in batches:
            if (chunk, batch) not in found and min(2, largest) <= batch <= tops[chunk]:
                found[chunk, batch] = _simulate(machine, demand, chunk, batch)
                progress(len(found), max(len(found), 2 * _PARTS * len(tops)))

    def order(one: Candidate) -> tuple[bool, float]:
        keeps = one.tbt_p99_s <= limit_s
        return keeps, one.tokens_per_s if keeps else -one.batch

    step = ceil(largest / _PARTS)
    for chunk, top in tops.items():
        simulate(chunk, range(top, 0, -step))
        simulate(chunk, (chunk + 1 - ceil(demand.prompt.mean() / n) for n in range(1, 2 * _PARTS)))
    while step > 1:
        step = ceil(step / 2)
        for chunk in tops:
            best = max(found.values(), key=order)
            here = max((one for one in found.values() if one.chunk == chunk), key=order)
            reach = here.tokens_per_s * (1 + step / here.batch)
            if chunk in FIXED or reach >= best.tokens_per_s or not order(best)[0]:
                simulate(chunk, (here.batch - step, here.batch + step))
    return sorted(found.values(), key=lambda one: -one.tokens_per_s)


def _simulate(machine: Machine, demand: Demand, chunk: int, batch: int) -> Candidate:
    prompt, output = demand.requests(max(_REQUESTS, 10 * batch))
    records = machine.run(Sarathi(chunk, TILE, "reserve"), batch, prompt, output)
    (tbt_s,) = weighted_quantiles(*Spans(records.replicas[0]).token_gaps(), [0.99])
    tokens_per_s = int((prompt + output).sum()) / records.end_s
    return Candidate(chunk, batch, tokens_per_s, 0.0 if isnan(tbt_s) else tbt_s)
