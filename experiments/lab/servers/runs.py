"""Rows of measured servers, simulated; and 90 % bands of TTFT, TPOT, latency and throughput.

A row's times are divided among ops by their shares in the life of a request; each op's error is
drawn from the half-width of its kernels, the host's from a factor of two, the stack's from what
other servers were off. Rows with a full KV cache are simulated again under joint draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from sarathi_sim.profiler.facts.ops import MOE
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.confidence.bands import UNKNOWN
from sarathi_sim.simulator.confidence.op_errors import NORMAL_90, standard_normals
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.cache import VARIABLE, cache_folder
from sarathi_sim.simulator.op_times.iteration import LAST, IterationCost
from ...config.base import Source
from ...config.deployment import Deployment, deploy
from ...config.inputs import host_of
from ...config.loading import check_scenario
from ...sweeps.backends import Backend
from ...sweeps.execute import Report, execute
from ...sweeps.plan import Run, SharedRequests, SweepPlan, run_key
from ...sweeps.store import Store
from .rows import METRICS, SCORED, Measured, Predictions, ServerTimes
from .scenarios import Settings

DRAWS = 512
"""Joint draws: the ends of a 90 % band are then accurate to about a twentieth of its width."""
REDRAWS = 8
"""Simulations of each row with a full KV cache: pairs of draws with opposite signs."""
HOST = "host"
HOST_SIGMA = float(np.log(2)) / NORMAL_90
"""The 90 % half-width of the host's time: a factor of two. Assumed."""
BLOCKS_SIGMA = float(np.log1p(0.05)) / NORMAL_90
"""The half-width of the KV blocks: 5 %, about one percent of a GPU's memory. Assumed."""
LARGEST_SIGMA = 2.0
NAME = "server"
"""The common name of all runs' scenarios, so that rows with equal scenarios share a run."""
FULL = 0.98
"""Share of the KV cache in use from which on a server counts as full."""


@dataclass(frozen=True)
class OpShares:
    """The shares of ops and host in each metric's time, and by op the standard deviation of the
    logarithm of its time."""

    shares: Mapping[str, Mapping[str, float]]
    sigmas: Mapping[str, float]


def op_shares(deployment: Deployment, row: Measured) -> OpShares:
    """The shares of one row. A request decodes beside ``concurrency`` requests on all ranks, or as
    many as fit into the memory; meanwhile each processes a prompt, unless another pool does so."""
    first, last = deployment.pools[0], deployment.pools[-1]
    ranks = last.scenario.cluster.replicas * last.scenario.cluster.dp
    fitting = max(1, int(last.kv_capacity // (row.isl + row.osl)))
    beside = min(max(row.concurrency / ranks, 1.0), float(fitting))
    prompt = _times(first, float(row.isl), 1.0, prompt=True)
    decode = _times(last, beside, beside, context=row.isl + row.osl / 2)
    life = {op: row.osl * time_s for op, time_s in decode.items()}
    if first is last:
        life = {op: beside * prompt[op] + time_s for op, time_s in life.items()}
    kernels = [pool.ops.meta.kernels for pool in (first, last)]
    half = {op: pct for of in kernels if of is not None for op, pct in of.half_width_pct.items()}
    sigmas = {op: np.log1p(half.get(op, 100 * UNKNOWN) / 100) / NORMAL_90 for op in prompt | decode}
    shares = {
        metric: {op: time_s / sum(times.values()) for op, time_s in times.items() if time_s}
        for metric, times in (("ttft", prompt), ("tpot", life))
    }
    return OpShares(shares, sigmas | {HOST: HOST_SIGMA})


def _times(
    pool: Deployment, rows: float, outputs: float, *, prompt: bool = False, context: float = 0.0
) -> dict[str, float]:
    """Seconds by op of a step in which each rank has so many rows and outputs: those of a
    ``prompt``, or of decodes with that ``context``."""
    cost, layers = IterationCost(pool.ops, host=host_of(pool.scenario.engine)), sum(pool.layers)
    size, ends, none = np.array([rows]), np.array([outputs]), np.zeros(1)
    prefill_s = cost.prefill_s(size, none) if prompt else none
    decode_s = none if prompt else cost.decode_s(size, np.array([context]))
    found = cost.layer_parts(size, prefill_s, decode_s)
    if MOE in found:  # the experts see the rows of all ranks
        found[MOE] = cost.op_s(MOE, np.round(pool.scenario.cluster.dp * size))
    times = {op: layers * float(time_s[0]) for op, time_s in found.items()}
    return times | {LAST[0]: float(cost.last_s(ends)[0]), HOST: float(cost.host_s(ends)[0])}


@dataclass(frozen=True)
class RowOutcome:
    """A simulated row: ``numbers`` by name, and the shares of ops."""

    numbers: Mapping[str, float]
    shares: OpShares

    @property
    def full(self) -> bool:
        """Whether the KV cache was full at a time."""
        return self.numbers["kv_peak_share"] >= FULL

    @property
    def times(self) -> ServerTimes:
        """The predictions, without bands."""
        ttft, tpot, rate = (self.numbers[n] for n in ("ttft_ms", "tpot_ms", "output_tokens_per_s"))
        return ServerTimes(ttft, tpot, rate, kv_full=self.full)


Outcomes = dict[str, RowOutcome]
"""By the row's id."""
Variant = Callable[[Measured], Settings | None]
"""The scenario of a row; None if it is not simulated. Raises UserError, as ``scenario_of``."""


@dataclass(frozen=True)
class Bench:
    """Where simulations run, and where the ``store`` of their summaries is."""

    store: Store
    backend: Backend
    progress: Progress
    say: Say


@contextmanager
def bench(backend: Backend, progress: Progress, say: Say) -> Iterator[Bench]:
    """On the runs of earlier scores in the cache, or on none if it is off; locked, so that a second
    score ends before it plans anything."""
    with TemporaryDirectory() as scratch:
        folder = (cache_folder() or Path(scratch)) / "scores"
        store = Store(folder, f"{VARIABLE}: {folder}")
        store.open(resume=True)
        with store.locked(f"another score is at work: wait for it, or set {VARIABLE}=off"):
            yield Bench(store, backend, progress, say)


def plan_row(
    row: Measured, scenario: Mapping[str, Any], requests_of: SharedRequests
) -> tuple[Run, OpShares]:
    """The run of a row's scenario. Raises UserError if it cannot be simulated."""
    source = Source(row.id, NAME, {}, ())
    try:
        found = deploy(check_scenario(scenario, source), source, requests_of)
    except UserError as error:
        raise UserError(str(error).replace(f"{source.file}: ", "")) from None
    run = Run(
        run_key(found, NAME),
        NAME,
        found.scenario.seed,
        {},
        found.scenario,
    )
    return run, op_shares(found, row)


def simulate_rows(
    rows: Sequence[Measured], variants: Mapping[str, Variant], at: Bench
) -> tuple[dict[str, Outcomes], dict[str, str]]:
    """The outcomes of rows by variant, and by id why rows have none. A row that cannot be simulated
    in one variant has no outcome in any."""
    planned: dict[tuple[str, str], tuple[Run, OpShares]] = {}
    refused: dict[str, str] = {}
    requests_of = SharedRequests()
    # Rows of one server share op times, and workers take runs in this order.
    alike = sorted(rows, key=lambda r: (r.system, r.backend, r.model, r.precision, r.tp or 0))
    for done, row in enumerate(alike):
        at.progress("checking", done, len(alike))
        try:
            for name, variant in variants.items():
                if (scenario := variant(row)) is not None:
                    planned[name, row.id] = plan_row(row, scenario, requests_of)
        except UserError as error:
            refused[row.id] = str(error)
    planned = {(name, id): one for (name, id), one in planned.items() if id not in refused}
    runs = {run.key: run for run, _ in planned.values()}
    report = Report(len(runs))
    if runs:
        sweep = SweepPlan(
            "",
            "score",
            "",
            (),
            None,
            tuple(runs.values()),
            (),
        )
        deque(execute(sweep, at.store, at.backend, at.progress, report, at.say), maxlen=0)
    failed = ((id, run.key) for (_, id), (run, _) in planned.items() if run.key in report.failures)
    refused |= {id: report.failures[key] for id, key in failed}
    found: dict[str, Outcomes] = {name: {} for name in variants}
    for (name, id), (run, shares) in planned.items():
        if id not in refused:
            summary, cache = at.store.summary(run.key, NAME), run.scenario.kv_cache
            numbers = {key: summary[key] for key in ("output_tokens_per_s", "kv_peak_share")}
            numbers |= {f"{metric}_ms": 1e3 * summary[f"{metric}_s"]["mean"] for metric in METRICS}
            numbers["num_blocks"] = float(cache.num_blocks or 0) if cache is not None else 0.0
            found[name][id] = RowOutcome(numbers, shares)
    return found, refused


Draws = Mapping[str, Mapping[str, Floats]]
"""Logarithms of the factors on a row's times under each joint draw, by id and metric."""


def redrawn(
    rows: Sequence[Measured], described: Variant, outcomes: Outcomes, at: Bench
) -> dict[str, dict[str, Floats]]:
    """:data:`Draws` of the rows whose KV cache was full, by simulation of these scenarios."""

    def drawn(number: int) -> Variant:
        return lambda row: draw(described(row), outcomes[row.id], number)

    full = [row for row in rows if row.id in outcomes and outcomes[row.id].full]
    known, _ = simulate_rows(
        full,
        {f"draw {n}": drawn(n) for n in range(REDRAWS)},
        at,
    )
    found: dict[str, dict[str, Floats]] = {}
    for row in full:
        numbers = [of[row.id].numbers for of in known.values() if row.id in of]
        for metric in METRICS if len(numbers) == REDRAWS else ():
            times = np.array([one[f"{metric}_ms"] for one in numbers])
            off = np.log(times / outcomes[row.id].numbers[f"{metric}_ms"])
            found.setdefault(row.id, {})[metric] = np.resize(off, DRAWS)
    return found


def draw(scenario: Settings | None, outcome: RowOutcome, number: int) -> Settings | None:
    """A scenario under one draw of op errors, host time and KV blocks."""
    if scenario is None:
        return None
    sign, at = divmod(number, REDRAWS // 2)
    at += sign * (DRAWS // 2)

    def factor(name: str, sigma: float) -> float:
        return float(np.exp(sigma * normals(name)[at]))

    engine, host = dict(scenario["engine"]), factor(HOST, HOST_SIGMA)
    for key in ("host_iteration_s", "host_sequence_s"):
        engine[key] *= host
    ops = {op: factor(op, sigma) for op, sigma in outcome.shares.sigmas.items() if op != HOST}
    blocks = round(outcome.numbers["num_blocks"] * factor("KV blocks", BLOCKS_SIGMA))
    cache = {**scenario["kv_cache"], "num_blocks": blocks}
    return {**scenario, "engine": {**engine, "op_scale": ops}, "kv_cache": cache}


def draws(ops: OpShares) -> dict[str, Floats]:
    """:data:`Draws` of a row. An op has the same draws in all metrics and rows."""
    factors = {metric: np.zeros(DRAWS) for metric in METRICS}
    for op, sigma in ops.sigmas.items():
        factor = np.exp(sigma * normals(op))
        for metric in METRICS:
            factors[metric] += ops.shares[metric].get(op, 0.0) * factor
    return {metric: np.asarray(np.log(factors[metric])) for metric in METRICS}


@lru_cache(maxsize=256)
def normals(name: str) -> Floats:
    """The draws for ``name``, the same in every call: pairs of opposite sign."""
    return np.asarray(standard_normals(name, DRAWS)[0])


def stack_sigma(off: Floats, op_draws: Sequence[Floats], share: float = 0.9) -> float:
    """The standard deviation of a stack's own error with which ``share`` of the errors ``off`` (log
    of measured / predicted) lie inside their bands; ``op_draws`` are the ops' draws of each row."""
    if not len(off):
        return float(np.log1p(UNKNOWN)) / NORMAL_90
    low, high = 0.0, LARGEST_SIGMA
    if _covered(off, op_draws, low) >= share:
        return 0.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if _covered(off, op_draws, middle) >= share else (middle, high)
    return high


def _covered(off: Floats, op_draws: Sequence[Floats], sigma: float) -> float:
    low, high = np.quantile(
        np.stack(op_draws) + sigma * normals("stack"),
        (0.05, 0.95),
        axis=1,
    )
    return float(np.mean((low <= off) & (off <= high)))


def with_bands(
    rows: Iterable[Measured],
    predictions: Predictions,
    op_draws: Draws,
    sigma_of: Mapping[str, Mapping[str, float]],
) -> dict[str, ServerTimes]:
    """The predictions of these rows with bands; ``sigma_of`` holds the standard deviation of the
    stack's own error by id and metric."""
    found = {}
    for row in rows:
        if (times := predictions.get(row.id)) is None:
            continue
        ttft, tpot = (
            getattr(times, SCORED[metric])
            * np.exp(op_draws[row.id][metric] + sigma_of[row.id][metric] * normals("stack"))
            for metric in METRICS
        )
        drawn = {"ttft": ttft, "tpot": tpot, "latency": row.latency_of(ttft, tpot)}
        if times.output_tokens_per_s is not None:
            slower = drawn["latency"] / row.latency_of(times.ttft_ms, times.tpot_ms)
            drawn["throughput"] = times.output_tokens_per_s / slower
        ends = np.quantile(
            np.stack([*drawn.values()]),
            (0.05, 0.95),
            axis=1,
        ).T.tolist()
        found[row.id] = replace(times, bands=dict(zip(drawn, map(tuple, ends), strict=True)))
    return found
