"""Section 5.3: GPT-3 on 64 A100s served in three ways, under named readings of the paper.

:func:`ratios` are its four numbers under one reading; :data:`CHANGES` changes one assumption at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.paper.variants import Lab, untiled
from sarathi_sim.experiments.run.machine import Machine
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, OTHERS, PREFILL, SEND_RECV
from sarathi_sim.profiler.storage.child import mapped, silent
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.op_times.op_times import OpTimes, PairTimes
from sarathi_sim.simulator.views.ledger import gaps, iteration_bubbles
from sarathi_sim.simulator.views.spans import Spans

CONFIG = "gpt3_pp"
GPT3 = ("a100-80g-sxm", "gpt3-175b", 8)
"""Device, model and tensor parallelism."""
ORCA, SARATHI, TP_ONLY = "orca_pp", "sarathi_pp", "orca_tp"


@dataclass(frozen=True)
class Assumptions:
    """The changes of a reading of section 5.3 to ``experiments/configs/gpt3_pp.yaml``.

    ``settings`` are ``--set`` assignments. ``factors`` multiply the times of ops: ``linear``,
    ``others``, ``prefill``, ``decode``, ``all_reduce``, ``send``. With ``padded``, a decode's
    attention runs over all of the reserved length, whatever its context. With ``untiled``, GEMMs
    have no step past a multiple of the tile.
    """

    settings: tuple[str, ...] = ()
    padded: bool = False
    factors: tuple[tuple[str, float], ...] = ()
    untiled: bool = False


@dataclass(frozen=True)
class Ratios:
    """The numbers of section 5.3: of makespans, and of the median bubble time of a request.

    The paper does not define a request's bubble time. ``bubble`` reads it as the idle time of the
    stages before the request's micro-batches, ``waiting`` as the time that these wait themselves.
    """

    orca_over_sarathi: float
    orca_over_tp: float
    tp_over_sarathi: float
    bubble: float
    waiting: float


PAPER = Ratios(1.91, 1.28, 1.48, 6.29, 6.29)


def deployment(m: Machine, scenario: str, assumed: Assumptions, seed: int = 0) -> Deployment:
    """One scenario of ``gpt3_pp``, on the machine's op times."""
    experiment = load_experiment(CONFIG, [f"seed={seed}", *assumed.settings])
    found = deploy(experiment.scenarios[scenario], experiment.sources[scenario])
    longest = found.scenario.cluster.max_length
    assert longest is not None
    ops = changed(m.ops, assumed, longest)
    return replace(found, ops=ops)


def changed(ops: OpTimes, assumed: Assumptions, longest: int) -> OpTimes:
    """Op times under the assumptions."""
    if assumed.untiled:
        ops = untiled(ops)
    if assumed.padded:
        decode = ops.decode

        def attend(batch: ArrayLike, context: ArrayLike) -> Floats:
            return decode(batch, np.full_like(context, longest))

        ops = replace(ops, decode=PairTimes(attend))
    factors = dict(assumed.factors)
    linear = dict.fromkeys(ops.linear, factors.get("linear", 1.0))
    named = {op: factors.get(name, 1.0) for name, op in _NAMED.items()}
    return ops.scaled(linear | named) if factors else ops


_NAMED = {
    "others": OTHERS,
    "prefill": PREFILL,
    "decode": DECODE,
    "all_reduce": ALL_REDUCE,
    "send": SEND_RECV,
}


def run(m: Machine, scenario: str, assumed: Assumptions, seed: int = 0) -> Records:
    """Simulate one scenario."""
    return deployment(m, scenario, assumed, seed).simulate()


def request_bubbles(records: Records) -> Floats:
    """Bubble time of each request in seconds, as docs/metrics.md defines it (one replica)."""
    log = records.replicas[0]
    return Spans(log).total(iteration_bubbles(gaps(log)))


def request_waits(records: Records) -> Floats:
    """Seconds of each request, from when its first micro-batch is formed until it is done, in which
    none of its micro-batches is on a stage or on a link (one replica)."""
    log = records.replicas[0]
    spans, times = Spans(log), stage_times(log)
    served = (times.finish - times.start).sum(axis=1)
    served += (log.num_stages - 1) * log.iterations["send_s"]
    formed = log.iterations["ready_s"][spans.first_row()]
    return np.asarray(spans.finish_s() - formed - spans.total(served))


@dataclass(frozen=True)
class PipelineRun:
    """Seconds until the last request is done, and a request's median bubble time in both readings
    (NaN for TP only)."""

    makespan_s: float
    bubble_s: float
    waiting_s: float


@cache
def outcome(m: Machine, scenario: str, assumed: Assumptions, seed: int) -> PipelineRun:
    """One scenario, simulated."""
    records = run(m, scenario, assumed, seed)
    if scenario == TP_ONLY:
        return PipelineRun(records.end_s, np.nan, np.nan)
    medians = (float(np.median(of(records))) for of in (request_bubbles, request_waits))
    return PipelineRun(records.end_s, *medians)


def ratios(m: Machine, assumed: Assumptions, seed: int) -> Ratios:
    """The ratios under one reading."""
    orca, chunked, tp_only = (
        outcome(m, scenario, relevant(assumed, scenario), seed)
        for scenario in (ORCA, SARATHI, TP_ONLY)
    )
    return Ratios(
        orca.makespan_s / chunked.makespan_s,
        orca.makespan_s / tp_only.makespan_s,
        tp_only.makespan_s / chunked.makespan_s,
        orca.bubble_s / chunked.bubble_s,
        orca.waiting_s / chunked.waiting_s,
    )


_PIPELINE = ("batching.formation", "batching.micro_batches", "engine.send")


def relevant(assumed: Assumptions, scenario: str) -> Assumptions:
    """The assumptions that affect a scenario, so that equal runs are found again."""
    ignored = tuple(f"scenarios.{s}." for s in (ORCA, SARATHI, TP_ONLY) if s != scenario)
    if scenario == TP_ONLY:
        ignored += _PIPELINE
    kept = tuple(s for s in assumed.settings if not s.startswith(ignored))
    return replace(assumed, settings=kept)


# Readings, the spread of each over seeds, and the effect of each switch ---------------------------

SEEDS = range(5)
_GRID = "workload.lengths.step=1024"
_BLOCKING = "engine.send=blocking"
_JITTER = "engine.jitter=0.05"
_POOL = "batching.micro_batches=free"
_ON_TOP = "scenarios.sarathi_pp.policy.chunk_rule=fixed"


def _turnaround(seconds: float) -> str:
    return f"engine.turnaround_s={seconds}"


_ENGINE = (_turnaround(0.005), _JITTER, _BLOCKING)


@dataclass(frozen=True)
class ScenarioReading:
    """One way to read the paper's scenario, and the reason for it."""

    name: str
    why: str
    assumed: Assumptions


SCENARIO_READINGS = tuple(
    ScenarioReading(name, why, assumed)
    for name, why, assumed in (
        ("plain", "as described in `experiments/configs/gpt3_pp.yaml`", Assumptions()),
        (
            "lazy-pool",
            "a batch is formed when stage 0 is free, from all requests that are not in flight",
            Assumptions(("batching.formation=lazy", _POOL)),
        ),
        ("blocking", "a stage is occupied while it sends its result on", Assumptions((_BLOCKING,))),
        (
            "turnaround",
            "the scheduler needs 5 ms between two iterations of a micro-batch",
            Assumptions((_turnaround(0.005),)),
        ),
        ("jitter", "stage times vary by 5 %", Assumptions((_JITTER,))),
        (
            "padded",
            "the KV cache is pre-allocated for the longest request (section 4.5): a decode's "
            "attention runs over all 4096 tokens of it",
            Assumptions(padded=True),
        ),
        (
            "padded-engine",
            "padded, with 5 ms of turn-around, 5 % jitter and blocking sends",
            Assumptions(_ENGINE, padded=True),
        ),
        (
            "as-published",
            "the rules of the code that the authors' group published in November 2023 "
            "(microsoft/vidur @aa06400): one pool of requests, Orca fills all free slots, a chunk "
            "of 256 with the decodes on top, blocking sends",
            Assumptions((_POOL, "policy.case=unconstrained", _ON_TOP, _BLOCKING)),
        ),
        (
            "grid",
            "lengths are 1K, 2K, 3K or 4K, the lengths of the other sections",
            Assumptions((_GRID,)),
        ),
        (
            "grid-turnaround",
            "grid, with 5 ms of turn-around",
            Assumptions((_GRID, _turnaround(0.005))),
        ),
        (
            "grid-on-top",
            "grid, a chunk of 256 with the decodes on top, and GEMMs without the tile's step",
            Assumptions((_GRID, _ON_TOP), untiled=True),
        ),
        ("grid-padded", "grid and padded", Assumptions((_GRID,), padded=True)),
        (
            "grid-padded-engine",
            "grid and padded, with 5 ms of turn-around, 5 % jitter and blocking sends",
            Assumptions((_GRID, *_ENGINE), padded=True),
        ),
    )
)


@dataclass(frozen=True)
class Change:
    """One assumption changed, downwards and upwards; a switch has only one direction."""

    name: str
    down: Assumptions | None
    up: Assumptions


def _factor(op: str, label: str) -> Change:
    low, high = (Assumptions(factors=((op, factor),)) for factor in (0.8, 1.25))
    return Change(f"{label} x 0.8 / 1.25", low, high)


def _switch(label: str, *settings: str, padded: bool = False) -> Change:
    return Change(label, None, Assumptions(settings, padded))


_POLICY = "scenarios.sarathi_pp.policy"
CHANGES = (
    _factor("linear", "GEMMs"),
    _factor("prefill", "prefill attention"),
    _factor("decode", "decode attention"),
    _factor("others", "elementwise ops"),
    _factor("all_reduce", "all-reduce"),
    _factor("send", "sends"),
    Change(
        "chunk 128 / 512",
        Assumptions((f"{_POLICY}.chunk_size=128",)),
        Assumptions((f"{_POLICY}.chunk_size=512",)),
    ),
    Change(
        "Zipf theta 0 / 0.8",
        Assumptions(("workload.lengths.theta=0.0",)),
        Assumptions(("workload.lengths.theta=0.8",)),
    ),
    _switch("lengths 1K, 2K, 3K, 4K", _GRID),
    _switch("attention over 4K", padded=True),
    _switch("turn-around 5 ms", _turnaround(0.005)),
    _switch("jitter 5 %", _JITTER),
    _switch("blocking sends", _BLOCKING),
    _switch("formed when stage 0 is free", "batching.formation=lazy"),
    _switch("chunk C - (B - 1)", f"{_POLICY}.chunk_rule=reserve"),
    _switch("Orca unconstrained", "policy.case=unconstrained"),
)


@cache
def _machine() -> Machine:
    """One a process: machines are costly to make, and keep their results."""
    return Lab("predicted").machine(*GPT3)


def _one(job: tuple[Assumptions, int]) -> Ratios:
    return ratios(_machine(), *job)


def measure(
    jobs: Iterable[tuple[Assumptions, int]],
    progress: Callable[[int], object] = silent,
    workers: int = 2,
) -> list[Ratios]:
    """The predicted ratios of each (assumptions, seed), in order, on ``workers`` processes."""
    return mapped(_one, jobs, workers, progress)


def spread(results: Iterable[Ratios]) -> tuple[Ratios, Ratios, Ratios]:
    """Median, least and most of each ratio."""
    table: Floats = np.array([astuple(result) for result in results])
    return tuple(  # type: ignore[return-value]
        Ratios(*pick(table, axis=0).tolist()) for pick in (np.median, np.min, np.max)
    )
