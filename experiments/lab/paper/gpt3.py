"""Section 5.3: GPT-3 on 64 A100s served in three ways, under the readings of the paper in
``data/paper/readings.yaml``. :func:`ratios` are its numbers under one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, OTHERS, PREFILL, SEND_RECV
from sarathi_sim.profiler.storage.plain_yaml import load_shipped
from sarathi_sim.profiler.storage.strict import strict_dataclass
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.op_times.op_times import OpTimes, PairTimes
from sarathi_sim.simulator.views.ledger import Spans
from sarathi_sim.simulator.views.metrics import Analysis
from ...config.deployment import deploy
from ...config.loading import load_experiment
from ...run.machine import Machine
from .variants import Lab, untiled

GPT3 = ("a100-80g-sxm", "gpt3-175b", 8)
"""Device, model and tensor parallelism."""
ORCA, SARATHI, TP_ONLY = "orca_pp", "sarathi_pp", "orca_tp"
"""The scenarios of ``experiments/configs/gpt3_pp.yaml``."""


@strict_dataclass
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


PLAIN = Assumptions()


@strict_dataclass
class Change:
    """One assumption changed upwards (or switched on), and downwards."""

    up: Assumptions
    down: Assumptions = PLAIN


@strict_dataclass
class Readings:
    """``data/paper/readings.yaml``."""

    readings: dict[str, Assumptions]
    changes: dict[str, Change]


@cache
def load_readings() -> Readings:
    """All readings and changes by name."""
    return load_shipped(Readings, "paper/readings.yaml")


class Ratios(NamedTuple):
    """The numbers of section 5.3: of makespans, and of the median bubble time of a request, which
    the paper does not define. ``bubble`` reads it as the idle time of the stages before the
    request's micro-batches, ``waiting`` as the time that these wait themselves."""

    orca_over_sarathi: float
    orca_over_tp: float
    tp_over_sarathi: float
    bubble: float
    waiting: float


PAPER = Ratios(1.91, 1.28, 1.48, 6.29, 6.29)
SEEDS = range(5)


def run(m: Machine, scenario: str, assumed: Assumptions, seed: int = 0) -> Records:
    """Simulate one scenario on the machine's op times."""
    experiment = load_experiment("gpt3_pp", [f"seed={seed}", *assumed.settings])
    deployment = deploy(experiment.scenarios[scenario], experiment.sources[scenario])
    longest = deployment.scenario.cluster.max_length
    assert longest is not None
    return replace(deployment, ops=changed(m.ops, assumed, longest)).simulate()


_FACTORS = {"others": OTHERS, "prefill": PREFILL, "decode": DECODE}
_FACTORS |= {"all_reduce": ALL_REDUCE, "send": SEND_RECV}


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
    named = {op: factors.get(name, 1.0) for name, op in _FACTORS.items()}
    return ops.scaled(linear | named) if factors else ops


def request_waits(records: Records) -> Floats:
    """Seconds of each request, from when its first micro-batch is formed until it is done, in which
    none of its micro-batches is on a stage or on a link (one replica)."""
    log = records.replicas[0]
    spans, times = Spans(log), stage_times(log)
    served = (times.finish - times.start).sum(axis=1)
    served += (log.num_stages - 1) * log.iterations["send_s"]
    formed = log.iterations["ready_s"][spans.first_row()]
    return np.asarray(spans.finish_s() - formed - spans.total(served))


class PipelineRun(NamedTuple):
    """Seconds until the last request is done, and a request's median bubble time in both readings
    (NaN for TP only)."""

    makespan_s: float
    bubble_s: float
    waiting_s: float


@cache
def outcome(m: Machine, scenario: str, assumed: Assumptions = PLAIN, seed: int = 0) -> PipelineRun:
    """One scenario, simulated."""
    records = run(m, scenario, assumed, seed)
    if scenario == TP_ONLY:
        return PipelineRun(records.end_s, np.nan, np.nan)
    # Bubbles as docs/reference/metrics.md defines them.
    seconds = (Analysis(records).request_columns["bubble_s"], request_waits(records))
    return PipelineRun(records.end_s, *(float(np.median(values)) for values in seconds))


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
    settings = (s for s in assumed.settings if not s.startswith(ignored))
    return replace(assumed, settings=tuple(settings))


_PREDICTED = Lab("predicted")
"""One a process: its machines are costly to make, and keep their results."""


def predicted_ratios(job: tuple[Assumptions, int]) -> Ratios:
    """The ratios of (assumptions, seed) in the predicted variant, for worker processes."""
    return ratios(_PREDICTED.machine(*GPT3), *job)


def spread(results: Iterable[Ratios]) -> tuple[Ratios, Ratios, Ratios]:
    """Median, least and most of each ratio."""
    table = np.array(list(results))
    middle, low, high = (Ratios(*of(table, axis=0).tolist()) for of in (np.median, np.min, np.max))
    return middle, low, high
