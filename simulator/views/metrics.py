"""The metrics of a run: per request, per iteration and in total. See docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from sarathi_sim.policies.log import (
    ACCEPTED,
    DECODE,
    DRAFTED,
    HIT,
    HIT_AGAIN,
    LOST,
    PADDING,
    REMOTE,
)
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.model import ModelSpec
from ..loop.records import Floats, Ints, Records, ReplicaLog
from .ledger import ACCOUNTS, WAITS, Counts, Gaps, Spans, gaps, iteration_bubbles, ledger
from .metric_registry import QUANTILES, STEADY

BLOCKS, CRITICAL = 10, 27
FEWEST = 50
"""Requests below which a run is not judged."""

State = Literal["steady", "overloaded", "closed", "short"]


@dataclass(frozen=True)
class SteadyState:
    """``state`` is closed if all requests arrive at once, and short if there are too few.
    ``kendall_s`` is the trend of the waiting requests, -45 to 45 (0 where not tested);
    ``warmup_requests`` is the number of first requests that a steady state leaves out."""

    state: State
    kendall_s: int = 0
    warmup_requests: int = 0


def waiting_at(
    arrival_s: Floats, finish_s: Floats, begin_s: Floats, end_s: Floats
) -> npt.NDArray[np.int64]:
    """How many earlier requests wait when each arrives: those in the system less those at work.
    ``arrival_s`` and ``finish_s`` (s) are of all requests, arrivals in order; ``begin_s`` and
    ``end_s`` (s) of all stretches of iterations that they took part in, in any order."""
    done, *work = (
        np.searchsorted(np.sort(times), arrival_s, "right") for times in (finish_s, begin_s, end_s)
    )
    return np.arange(len(arrival_s)) - done - (work[0] - work[1])


def steady_state(
    arrival_s: Floats, waiting: npt.NDArray[np.int64], latency_s: Floats
) -> SteadyState:
    """Judge a run by its finished requests, in order of arrival: their times in seconds, and the
    requests that were :func:`waiting_at` each arrival.

    A request *waits* while it is in no iteration: before its first chunk, between two chunks, for
    a slot or for its KV cache in another pool, after a preemption. A run is *overloaded* if the
    mean numbers of waiting requests of :data:`BLOCKS` equal blocks, in order of arrival, rise
    (Kendall's S is at least :data:`CRITICAL`: one-sided 1 % for ten values in random order), and if
    from the first to the last block they rise by what arrives in a tenth of the median latency.
    Below the capacity they fluctuate; above it they grow while requests arrive, in whatever order
    and place these wait. ``tests/simulator/test_steady.py`` measures how often this errs.
    """
    if not len(arrival_s) or arrival_s[0] == arrival_s[-1]:
        return SteadyState("closed")
    if len(arrival_s) < FEWEST:
        return SteadyState("short")
    rising, (first, *_, last) = trend(waiting), np.array_split(waiting, BLOCKS)
    grown_s = (last.mean() - first.mean()) * (arrival_s[-1] - arrival_s[0]) / len(arrival_s)
    if rising >= CRITICAL and grown_s > 0.1 * np.median(latency_s):
        return SteadyState("overloaded", rising)
    return SteadyState("steady", rising, mser5(latency_s))


def trend(values: npt.NDArray[Any]) -> int:
    """Kendall's S of the means of :data:`BLOCKS` blocks; 0 of fewer than :data:`FEWEST` values."""
    if len(values) < FEWEST:
        return 0
    return kendall_s(np.array([block.mean() for block in np.array_split(values, BLOCKS)]))


def kendall_s(values: Floats) -> int:
    """Pairs in rising order minus pairs in falling order."""
    first, second = np.triu_indices(len(values), 1)
    return int(np.sign(values[second] - values[first]).sum())


def mser5(values: Floats) -> int:
    """How many of the first values are a warm-up: a multiple of five, at most half. MSER-5 (White
    1997): values are averaged in fives, and the first averages dropped so that the standard error
    of the mean of the rest is smallest."""
    count = len(values) // 5
    if count < 2:
        return 0
    means = values[: 5 * count].reshape(count, 5).mean(axis=1)
    # Sums of the values left when the first d are dropped, for every d at once. Values are centred,
    # because the variance is a difference of two sums.
    centred = means - means.mean()
    left = count - np.arange(count)
    total = np.cumsum(centred[::-1])[::-1]
    squares = np.cumsum(centred[::-1] ** 2)[::-1]
    error = np.maximum(squares - total**2 / left, 0) / left.astype(float) ** 2
    return 5 * int(np.argmin(error[: count // 2 + 1]))


T = TypeVar("T")
MOST_KEPT = 4_000_000
"""Stage executions up to which the views of a run are kept: they take some 60 bytes each."""


class PerReplica(Sequence[T]):
    """A value computed for each replica's log at its first use, and kept unless it is large. For a
    million requests the gaps of all replicas would take more memory than the records. Then they are
    computed for one replica at a time, more than once."""

    def __init__(self, records: Records, work_out: Callable[[ReplicaLog], T]) -> None:
        self._logs = records.replicas
        self._work_out = work_out
        self._keep = sum(log.num_iterations * log.num_stages for log in self._logs) <= MOST_KEPT
        self._kept: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._logs)

    def __getitem__(self, replica: Any) -> Any:
        if replica >= len(self._logs):
            raise IndexError(replica)
        if replica in self._kept:
            return self._kept[replica]
        found = self._work_out(self._logs[replica])
        if self._keep:
            self._kept[replica] = found
        return found


def is_paged(records: Records) -> bool:
    """Whether the run's replicas have paged memory."""
    return any(log.pool is not None for log in records.replicas)


def paging_columns(records: Records) -> dict[str, Ints]:
    """Per request, by id.

    ``preemptions``; ``hit_tokens`` found in the prefix cache when it was first admitted, which were
    not computed; ``recomputed_tokens`` lost by preemption, and neither found in the cache
    afterwards nor useless, because the request ended before it was admitted again.
    With speculation ``drafted_tokens`` that were verified, and the ``accepted_tokens`` among them.
    """
    kinds = (LOST, HIT, HIT_AGAIN, DRAFTED, ACCEPTED)
    found = {kind: np.zeros(len(records.request_id), np.int64) for kind in kinds}
    preemptions = np.zeros(len(records.request_id), np.int64)
    first, way = records.prefill_logs or len(records.replicas), records.handovers
    for number, log in enumerate(records.replicas):
        if log.pool is None:
            continue
        request, kind, tokens = log.pool.events.T
        row = np.searchsorted(records.request_id, request)
        if number >= first and way is not None:  # hits of prompts computed in the other pool
            kind = np.where(
                (kind == HIT) & (way.prefilled_on[row] >= 0),
                REMOTE,
                kind,
            )
        for what, sums in found.items():
            np.add.at(sums, row[kind == what], tokens[kind == what])
        np.add.at(preemptions, row[(kind == LOST) & (tokens >= 0)], 1)
    drafts = {"drafted_tokens": found[DRAFTED], "accepted_tokens": found[ACCEPTED]}
    # Tokens found at a later admission were computed, or found, before.
    return {
        "preemptions": preemptions,
        "hit_tokens": found[HIT],
        "recomputed_tokens": np.maximum(found[LOST] - found[HIT_AGAIN], 0),
        **(drafts if found[DRAFTED].any() else {}),
    }


def extra_decodes(log: ReplicaLog) -> int:
    """Decodes of sequences that had ended, in iterations formed before the scheduler knew it."""
    if log.pool is None:
        return 0
    # Every chunk and every other decode is in a span.
    carried = int((log.iterations["chunks"] + log.iterations["decodes"]).sum())
    return carried - _iterations_in(log, lambda role: role != PADDING)


def _iterations_in(log: ReplicaLog, wanted: Callable[[Ints], npt.NDArray[np.bool_]]) -> int:
    _, role, _, first, last = log.spans.T
    return int((last - first + 1)[wanted(role)].sum())


def speculation_summary(records: Records, done: Mapping[str, Ints]) -> dict[str, Any]:
    """What drafts gave (docs/reference/metrics.md); nothing without speculation."""
    if "drafted_tokens" not in done:
        return {}
    drafted, accepted = int(done["drafted_tokens"].sum()), int(done["accepted_tokens"].sum())
    decodes = sum(_iterations_in(log, lambda role: role == DECODE) for log in records.replicas)
    return {
        "drafted_tokens": drafted,
        "refused_tokens": drafted - accepted,
        "accepted_per_step": 1 + accepted / decodes if decodes else np.nan,
    }


def paging_summary(records: Records, done: Mapping[str, Ints]) -> dict[str, Any]:
    """The run in numbers (docs/reference/metrics.md); ``done`` are the requests that finished."""
    extra = sum(map(extra_decodes, records.replicas))
    computed = -extra + sum(
        float(sum(log.iterations[name].sum() for name in ("prefill_tokens", "decodes", "drafts")))
        for log in records.replicas
    )
    prompts, finished = int(done["prompt_tokens"].sum()), len(done["request"])
    empty = sum(
        int(((log.iterations["chunks"] == 0) & (log.iterations["decodes"] == 0)).sum())
        for log in records.replicas
    )
    return {
        "preemptions": int(done["preemptions"].sum()),
        "preemption_rate": float(done["preemptions"].sum()) / finished if finished else 0.0,
        "hit_rate": float(done["hit_tokens"].sum()) / prompts if prompts else 0.0,
        "recomputed_share": float(done["recomputed_tokens"].sum()) / computed if computed else 0.0,
        "extra_decodes": extra,
        "empty_iterations": empty,
    }


PARTS = ("prefill_s", "slot_s", "transfer_s")
"""Parts of the way through two pools."""
WARM_UP = 5
"""Where loads are compared, the first of so many parts of a run is its warm-up."""
GAP_SHARES = tuple(part / 1000 for part in range(1001))
COUNTS = (
    *("chunks", "prefill_tokens", "prefill_context", "decodes", "decode_context", "padding"),
    "drafts",
)

Table = dict[str, npt.NDArray[Any]]
"""Columns by name: faster than pandas for many short tables."""


class Hardware(NamedTuple):
    """What a pool runs on: GPUs of one kind, so many a stage, with kernels (None: all in bf16)."""

    device: DeviceSpec
    tp: int
    kernels: Kernels | None = None


class Analysis:
    """The views of one finished run, each computed at its first use and then kept.

    ``quantiles`` are those that a summary has of each distribution. ``requests``, ``iterations``
    and ``ledger`` are data frames (``request_columns`` and ``ledger_columns`` the plain columns);
    :meth:`summary` is the run in numbers. Nothing here changes ``records``.
    """

    def __init__(self, records: Records, quantiles: Sequence[float] = QUANTILES) -> None:
        self.records = records
        self.quantiles = quantiles

    @cached_property
    def at_work(self) -> list[int]:
        """The replicas that served any request. The others are not analysed."""
        return [n for n, log in enumerate(self.records.replicas) if log.num_iterations]

    @cached_property
    def spans(self) -> PerReplica[Spans]:
        """The spans of every replica."""
        return PerReplica(self.records, Spans)

    @cached_property
    def gaps(self) -> PerReplica[Gaps]:
        """The idle time before every micro-batch of every replica."""
        return PerReplica(self.records, gaps)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """:attr:`request_columns` as a frame."""
        return pd.DataFrame(self.request_columns, copy=False)

    @cached_property
    def request_columns(self) -> Table:
        """One row per request, by id; times in seconds, NaN where it was rejected.

        Columns: request, replica, arrival_s, prompt_tokens, output_tokens, queueing_s (arrival
        until its first chunk starts on stage 0), ttft_s, tpot_s (mean time per token after the
        first; NaN for one token, or where all come with the first), tbt_max_s, finish_s, latency_s,
        bubble_s and its parts pb1_s, pb2_s, pb3_s, equal_s, communication_s, turnaround_s,
        slowest_rank_s, with paged memory preemptions, hit_tokens and recomputed_tokens, and
        rejected (the reason, or None). With two pools also prefilled_on (a replica), prefill_s
        (from the first chunk's start to the prefill's end), slot_s (waiting for blocks of a decode
        worker) and transfer_s (of the KV). Where nothing was sent the last two are NaN: the request
        ended with its prefill, or its prompt was in the decode worker's prefix cache (prefill_s,
        too, if it was never prefilled).
        """
        records = self.records
        parts = ("bubble", *WAITS)
        found = {
            name: np.full(len(records.request_id), np.nan)
            for name in ("start", "first_token", "finish", "tbt_max", *parts)
        }
        for number in self.at_work:
            self._measure(self.spans[number], self.gaps[number], found)
        arrival = records.arrival_s
        later = np.where(records.output_tokens > 1, records.output_tokens - 1, np.nan)
        steps_s = found["finish"] - found["first_token"]
        reasons = [records.rejections.get(int(i)) for i in records.request_id]
        return {
            "request": records.request_id,
            "replica": records.replica,
            "arrival_s": arrival,
            "prompt_tokens": records.prompt_tokens,
            "output_tokens": records.output_tokens,
            "queueing_s": found["start"] - arrival,
            "ttft_s": found["first_token"] - arrival + records.frontend_s,
            "tpot_s": np.where(steps_s > 0, steps_s / later, np.nan),
            "tbt_max_s": found["tbt_max"],
            "finish_s": found["finish"],
            "latency_s": found["finish"] - arrival + records.frontend_s,
            **{f"{name}_s": found[name] for name in parts},
            **(paging_columns(records) if is_paged(records) else {}),
            **self._handed_over(found["start"]),
            "rejected": np.array(reasons, object),
        }

    def _measure(self, spans: Spans, split: Gaps, found: dict[str, Floats]) -> None:
        """Fill in the requests of one replica; a function of its own, so that its arrays are
        freed. Of two replicas that served a request the later one has its tokens."""
        row = np.searchsorted(self.records.request_id, spans.requests)
        start = split.times.start[spans.first_row(), 0]
        found["start"][row] = np.fmin(found["start"][row], start)
        found["first_token"][row] = spans.first_token_s()
        found["finish"][row] = spans.finish_s()
        found["tbt_max"][row] = spans.longest_token_gap()
        for name in ("bubble", *WAITS):
            before = np.nan_to_num(found[name][row])
            found[name][row] = before + spans.total(iteration_bubbles(split, name))

    def _handed_over(self, start: Floats) -> Table:
        """The parts of the way between two pools; ``start`` is when each prefill began."""
        way = self.records.handovers
        if way is None:
            return {}
        ready = np.where(way.reserved_s <= start, self.records.arrival_s, way.prefill_end_s)
        return {
            "prefilled_on": way.prefilled_on,
            "prefill_s": way.prefill_end_s - start,
            "slot_s": way.reserved_s - ready,
            "transfer_s": way.received_s - np.maximum(way.reserved_s, way.prefill_end_s),
        }

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """One row per micro-batch, by replica and in launch order; times in seconds.

        Columns: replica, group, iteration (within the group), kind (prefill, decode or mixed),
        ready_s, start_s (on stage 0), finish_s (on the last stage), chunks, prefill_tokens,
        prefill_context, decodes, decode_context, padding, drafts, layer_s, first_s, last_s, send_s,
        on a rank with data-parallel attention waited_s (for other ranks, after its own work),
        kv_tokens (written on the replica once it was formed), and bubble_s (idle time before it,
        and waited_s, summed over the stages).
        """
        tables = []
        for number in self.at_work or [0]:  # if none served a request, an empty table's columns
            log, spans, split = self.records.replicas[number], self.spans[number], self.gaps[number]
            columns = log.iterations
            changed_s, kv_tokens = self.kv_occupancy(number)
            formed = np.searchsorted(changed_s, columns["ready_s"], side="right") - 1
            prefill, decodes = columns["prefill_tokens"] > 0, columns["decodes"] > 0
            kind = np.select([prefill & decodes, prefill], ["mixed", "prefill"], "decode")
            table = {
                "replica": np.full(log.num_iterations, number),
                "group": columns["group"].astype(np.int64),
                "iteration": spans.number,
                "kind": pd.Categorical(kind, categories=["prefill", "decode", "mixed"]),
                "ready_s": columns["ready_s"],
                "start_s": split.times.start[:, 0],
                "finish_s": columns["finish_s"],
                **{name: columns[name].astype(np.int64) for name in COUNTS},
                **{name: columns[name] for name in ("layer_s", "first_s", "last_s", "send_s")},
                **({} if log.waited_s is None else {"waited_s": log.waited_s}),
                "kv_tokens": kv_tokens[formed].astype(np.int64),
                "bubble_s": iteration_bubbles(split),
            }
            tables.append(pd.DataFrame(table))
        return pd.concat(tables, ignore_index=True)

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """:attr:`ledger_columns` as a frame."""
        return pd.DataFrame(self.ledger_columns, copy=False)

    @cached_property
    def ledger_columns(self) -> Table:
        """One row per replica and stage: see :func:`sarathi_sim.simulator.views.ledger.ledger`."""
        return ledger(self.records, self.gaps)

    def tbt_quantiles(self, quantiles: Sequence[float]) -> list[float]:
        """Quantiles of the time between successive tokens, over all tokens of all requests. The
        smallest gap such that at least that share of all gaps is no longer. NaN without any."""
        values, weights = self._gaps_between_tokens()
        return weighted_quantiles(values, weights, quantiles)

    def _gaps_between_tokens(self, since_s: float = -np.inf) -> tuple[Floats, Counts]:
        """:meth:`Spans.token_gaps` of all replicas together."""
        found = [self.spans[number].token_gaps(since_s) for number in self.at_work or [0]]
        values, weights = zip(*found, strict=True)
        return np.concatenate(values), np.concatenate(weights)

    def after_warmup(self) -> dict[str, Any]:
        """Mean and quantiles of the latencies, and of the times between tokens, without the
        warm-up (the first fifth of the served requests, ``warmup_requests``), whether or not the
        run is steady; with two pools of the parts of the way through them, too.

        ``arrivals_s`` is the time from the first to the last arrival. Between the warm-up and the
        last arrival, ``offered_per_s`` requests arrive a second and ``served_per_s`` finish (0 if
        this time is 0). ``latency_trend`` is Kendall's S of ten blocks' mean latencies.
        """
        done, part = self.request_columns, self._steady_part
        names = [name for name in (*STEADY, "tbt_max_s", *PARTS) if name in done]
        gaps_s, counts = self._gaps_after_warmup
        mean = float(np.average(gaps_s, weights=counts)) if len(gaps_s) else np.nan
        return {
            "warmup_requests": len(done["request"]) - len(self.records.rejections) - len(part),
            **self._spreads({name: done[name][part] for name in names}),
            "tbt_s": _named(
                self.quantiles, weighted_quantiles(gaps_s, counts, self.quantiles), mean
            ),
            **self._flow(part),
        }

    def _flow(self, part: npt.NDArray[np.intp]) -> dict[str, float]:
        arrival_s, finish_s = (self.request_columns[name] for name in ("arrival_s", "finish_s"))
        flow = {"arrivals_s": 0.0, "offered_per_s": 0.0, "served_per_s": 0.0, "latency_trend": 0}
        if not len(part):
            return flow
        flow["arrivals_s"] = float(np.ptp(arrival_s[finish_s > 0]))
        begin, end = float(arrival_s[part[0]]), float(arrival_s[part[-1]])
        if end > begin:
            finished = np.count_nonzero((finish_s > begin) & (finish_s <= end))
            flow["offered_per_s"] = (len(part) - 1) / (end - begin)
            flow["served_per_s"] = finished / (end - begin)
            flow["latency_trend"] = trend(self.request_columns["latency_s"][part])
        return flow

    @cached_property
    def _steady_part(self) -> npt.NDArray[np.intp]:
        """The served requests in order of arrival, without the warm-up. MSER-5 would choose the
        warm-up by latencies, and so sometimes drop the worst of a queue."""
        done = self.request_columns
        order = np.argsort(done["arrival_s"], kind="stable")
        order = order[~np.isnan(done["latency_s"][order])]
        return np.asarray(order[len(order) // WARM_UP :], np.intp)

    @cached_property
    def _gaps_after_warmup(self) -> tuple[Floats, Counts]:
        part = self._steady_part
        since_s = float(self.request_columns["arrival_s"][part[0]]) if len(part) else np.inf
        return self._gaps_between_tokens(since_s)

    def gaps_after_warmup(self) -> Table:
        """Times between tokens without the warm-up, ``tbt_s``: a thousand quantiles, each for an
        equal number of ``tokens``."""
        gaps_s, counts = self._gaps_after_warmup
        if not len(gaps_s):
            return {"tbt_s": np.zeros(0), "tokens": np.zeros(0)}
        shares = (np.arange(1000) + 1) / 1000
        found = np.array(weighted_quantiles(gaps_s, counts, shares.tolist()))
        return {"tbt_s": found, "tokens": np.full(1000, counts.sum() / 1000)}

    @cached_property
    def token_gaps(self) -> pd.DataFrame:
        """The distribution of the time between tokens, tbt_s, at shares 0 to 1. The first row is
        the shortest gap, the last one the longest. Empty without any."""
        found = self.tbt_quantiles(GAP_SHARES)
        return pd.DataFrame({"share": GAP_SHARES, "tbt_s": found}).dropna()

    def kv_occupancy(self, replica: int) -> tuple[Floats, Floats]:
        """KV tokens written on one replica: times in seconds, and the tokens from then on. A
        micro-batch's tokens count from when it is formed; the tokens of requests that finish in it
        are freed when it returns."""
        records, spans = self.records, self.spans[replica]
        log = records.replicas[replica]
        columns = log.iterations
        if log.pool is not None:  # the capacity of the blocks in use
            return columns["ready_s"], log.pool.kv_tokens.astype(np.float64)
        grown = columns["prefill_tokens"] + columns["decodes"] - columns["padding"]
        held = np.searchsorted(records.request_id, spans.requests)
        gone = records.prompt_tokens[held] + records.output_tokens[held] - 1
        when = np.concatenate([columns["ready_s"], spans.finish_s()])
        change = np.concatenate([grown, -gone.astype(float)])
        order = np.lexsort((change, when))
        return when[order], np.cumsum(change[order])

    def summary(self, model: ModelSpec, *pools: Hardware) -> dict[str, Any]:
        """The run in numbers, JSON-able (docs/reference/metrics.md: formulas). ``pools`` are
        the prefill and the decode pool, where there are two."""
        records, logs = self.records, self.records.replicas
        done = self.request_columns
        if records.rejections:  # this copies, so only if needed
            there = records.replica >= 0
            done = {name: column[there] for name, column in done.items()}
        finished = len(done["request"])
        makespan = records.end_s - float(records.arrival_s.min()) if finished else 0.0
        prompt, output = done["prompt_tokens"], done["output_tokens"]
        hit = done.get("hit_tokens", np.zeros(1))
        first = records.prefill_logs or len(logs)
        gpus = sum(
            pool.tp * sum(log.num_stages for log in part)
            for pool, part in zip(pools, (logs[:first], logs[first:]), strict=False)
        )
        iterations = sum(log.num_iterations for log in logs)
        carried = sum(
            float((log.iterations["decodes"] + log.iterations["chunks"]).sum()) - extra_decodes(log)
            for log in logs
        )
        totals = {n: float(self.ledger_columns[f"{n}_s"].sum()) for n in ("wall", *ACCOUNTS)}
        bubble = sum(totals[name] for name in WAITS)
        peaks = (self.kv_occupancy(i)[1].max(initial=0) / logs[i].kv_capacity for i in self.at_work)
        rate = 1 / makespan if makespan else np.nan
        return {
            "requests": len(records.request_id),
            "finished": finished,
            "rejected": len(records.rejections),
            "makespan_s": makespan,
            "requests_per_s": finished * rate,
            "tokens_per_s": int(prompt.sum() + output.sum()) * rate,
            "output_tokens_per_s": int(output.sum()) * rate,
            "mfu": _useful_s_of_pools(model, pools, prompt, output, hit) * rate / gpus,
            "gpus": gpus,
            "iterations": iterations,
            "stage_executions": sum(log.num_iterations * log.num_stages for log in logs),
            "mean_batch": carried / iterations if iterations else np.nan,
            "kv_peak_share": float(max(peaks, default=0.0)),
            **(paging_summary(records, done) if is_paged(records) else {}),
            **speculation_summary(records, done),
            "tbt_s": _named(self.quantiles, self.tbt_quantiles(self.quantiles)),
            **self._spreads(
                {name: done[name] for name in (*STEADY, "bubble_s", *PARTS) if name in done}
            ),
            "bubble_share": bubble / totals["wall"] if totals["wall"] else np.nan,
            "ledger_s": totals,
            "steady": self._steady(done),
        }

    def _steady(self, done: Table) -> dict[str, Any]:
        """The state of the run, and quantiles over its steady part; NaN if it has none."""
        served = {name: done[name] for name in ("arrival_s", "finish_s", *STEADY)}
        arrival = served["arrival_s"]
        if np.any(arrival[1:] < arrival[:-1]):
            order = np.argsort(arrival, kind="stable")
            served = {name: column[order] for name, column in served.items()}
        arrival = served["arrival_s"]
        work = [
            self.spans[n].work_s(self.records.replicas[n].iterations["ready_s"])
            for n in self.at_work
        ]
        begin_s, end_s = np.concatenate([np.zeros((2, 0)), *work], axis=1)
        waiting = waiting_at(arrival, served["finish_s"], begin_s, end_s)
        found = steady_state(arrival, waiting, served["latency_s"])
        part = slice(found.warmup_requests if found.state == "steady" else len(arrival), None)
        return {
            "state": found.state,
            "kendall_s": found.kendall_s,
            "warmup_requests": found.warmup_requests,
            **self._spreads({name: served[name][part] for name in STEADY}),
        }

    def _spreads(self, columns: Mapping[str, Floats]) -> dict[str, dict[str, float]]:
        """Mean and quantiles of each column without its NaNs; columns of one length together."""
        there = {name: values[~np.isnan(values)] for name, values in columns.items()}
        nothing = _named(
            self.quantiles,
            [np.nan] * len(self.quantiles),
            np.nan,
        )
        spreads = dict.fromkeys(columns, nothing)
        for size in {len(values) for values in there.values()} - {0}:
            names = [name for name, values in there.items() if len(values) == size]
            columns_of = [there[name] for name in names]
            quantiles = np.percentile(columns_of, 100 * np.asarray(self.quantiles), axis=1)
            for name, values in zip(names, quantiles.T.tolist(), strict=True):
                spreads[name] = _named(self.quantiles, values, np.nansum(columns[name]) / size)
        return spreads


def weighted_quantiles(values: Floats, weights: Counts, quantiles: Sequence[float]) -> list[float]:
    """For each quantile, the smallest value with that share of the weight up to it; else NaN."""
    if not len(values):
        return [np.nan] * len(quantiles)
    order = np.argsort(values)
    until = np.cumsum(weights[order], dtype=np.int64)
    indices = np.searchsorted(until, (np.asarray(quantiles) - 1e-12) * until[-1])
    return [float(values[i]) for i in order[np.minimum(indices, len(values) - 1)]]


def _named(
    quantiles: Sequence[float], values: Sequence[float], mean: float | None = None
) -> dict[str, float]:
    named = {f"p{100 * q:.6g}": float(v) for q, v in zip(quantiles, values, strict=True)}
    return named if mean is None else {"mean": float(mean), **named}


def _useful_s_of_pools(
    model: ModelSpec, pools: Sequence[Hardware], prompt: Floats, output: Floats, hit: Floats
) -> float:
    """:func:`_useful_s`, of prompts on the first of two pools, and of the rest on the second."""
    parts = [(prompt, output, hit)]
    if len(pools) > 1:
        parts = [(prompt, np.ones_like(output), hit), (prompt + 1, output - 1, prompt)]
    return sum(_useful_s(model, pool, *part) for pool, part in zip(pools, parts, strict=True))


def _useful_s(
    model: ModelSpec, pool: Hardware, prompt: Floats, output: Floats, hit: Floats
) -> float:
    """Seconds that one GPU needs for the FLOPs of the requests, under any schedule, each kind at
    the peak of its number format. Cached tokens, ``hit``, take none."""
    device, used = pool.device, pool.kernels or Kernels("vllm")  # all in bf16
    processed = prompt + output - 1
    attention = float(model.num_layers * model.attention_flops_per_pair)
    nothing = np.zeros(1)
    attention *= model.pairs(processed, nothing).sum() - model.pairs(hit, nothing).sum()
    # A long trace has more FLOPs than 64 bits hold.
    linear, computed = model.linear_flops_by_kind(), float(processed.sum() - hit.sum())
    head = float(model.lm_head_flops_per_token()) * output.sum()
    return float(
        attention / device.peak_of(used.kv_cache_dtype)
        + linear.routed * computed / device.peak_of(used.experts_in)
        + linear.matrices * computed / device.peak_of(used.dtype)
        + (linear.plain * computed + head) / device.peak_flops
    )
