"""The best chunk size and batch cap for a workload: ranked by a closed form, then simulated.

The paper does not say how to choose the chunk (section 6). The closed form is a steady state of
equal requests: a prompt of P tokens takes n chunks of C - (B - 1) tokens, B - 1 decodes piggybacked
on each; decodes that find no chunk to piggyback on run on their own, B at a time. All that are near
the best, and the fixed chunks 256 and 512, are then simulated on requests of the whole workload,
and the best batch of each chunk is looked for between those. A simulation decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from experiments.config.errors import ConfigError
from experiments.run.demand import Demand
from experiments.run.machine import Machine
from policies.sarathi import Sarathi
from simulator.load.capacity import kv_capacity_tokens, max_batch
from simulator.views.spans import Spans

TILE = 128
FIXED = (256, 512)
_CHUNKS = (128, 256, 384, 512, 640, 768, 1024, 1536, 2048)
_NEAR = 0.12
"""Part of the throughput by which the closed form may be wrong."""
_EVERY = 24
"""Batches up to this are all tried; from then on each is an eighth larger than the last."""
_REQUESTS = 360
_LARGEST_BATCH = 256


@dataclass(frozen=True, eq=False)
class Candidate:
    """A chunk size and batch cap, and the closed form's prediction for them.

    ``seconds`` is the GPU time of a request. ``lost`` is the part of it that each term costs,
    compared with prefill at the best rate, in one piece, with all decodes piggybacked.
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
    """All results; ``verified`` keeps the limit and is sorted, the best first. ``fixed`` is the
    best of each fixed chunk, whether or not it keeps the limit."""

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
    largest = batch_cap or fitting
    limit = inf if tbt_limit_s is None else tbt_limit_s
    chunks = [c for c in _CHUNKS if c <= max(FIXED[-1], ceil(demand.length / TILE) * TILE)]
    known: dict[tuple[int, int], Candidate] = {}
    found: dict[Candidate, Verified] = {}

    def closed(chunk: int, batch: int) -> Candidate:
        if (chunk, batch) not in known:
            known[chunk, batch] = candidate(machine, demand, chunk, batch)
        return known[chunk, batch]

    def simulated(jobs: Iterable[Candidate]) -> None:
        for job in jobs:
            if job not in found:
                found[job] = _simulate(machine, demand, job)
            if progress is not None:
                progress(len(found), max(len(found), len(allowed)))

    def kept(chunk: int | None = None) -> list[Verified]:
        inside = (v for v in found.values() if max(v.candidate.tbt_s, v.tbt_p99_s) <= limit)
        of_chunk = (v for v in inside if chunk in (None, v.candidate.chunk))
        return sorted(of_chunk, key=lambda v: -v.tokens_per_s)

    batches = _batches(largest)
    candidates = [closed(chunk, batch) for chunk in chunks for batch in batches]
    allowed = [p for p in candidates if p.tbt_s <= limit]
    likely = {
        chunk: min(
            (p for p in candidates if p.chunk == chunk), key=lambda p: (p.tbt_s > limit, p.seconds)
        )
        for chunk in FIXED
    }
    simulated(likely.values())
    for near in sorted(allowed, key=lambda p: p.seconds):
        best = min((v.candidate.seconds for v in kept()), default=inf)
        if near.seconds * (1 - _NEAR) > best:
            break
        simulated([near])
    for chunk in chunks:
        step = 1 + largest // 8
        while (step := step // 2) and (of_chunk := kept(chunk)):
            batch = of_chunk[0].candidate.batch
            around = (closed(chunk, b) for b in (batch - step, batch + step) if 2 <= b <= largest)
            simulated(p for p in around if p.tbt_s <= limit)
    if not (verified := kept()):
        shortest = min(max(p.tbt_s, found[p].tbt_p99_s if p in found else 0) for p in candidates)
        raise ConfigError(
            f"--tbt-limit {1e3 * limit:g}: no chunk and batch meets it; the least time between "
            f"tokens is {1e3 * shortest:.1f} ms"
        )
    fastest = min(candidates, key=lambda p: p.seconds)
    excluded = fastest if fastest.tbt_s > limit else None
    fixed = {chunk: (kept(chunk) or [found[likely[chunk]]])[0] for chunk in FIXED}
    return Advice(demand, largest, excluded, verified, fixed)


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
    m.attentions([*chunks, (prompt, 0), (size, prompt)])  # asked for at once, which is faster
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
