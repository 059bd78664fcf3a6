"""Section 5.3 under one reading: GPT-3 on 64 A100s served in three ways, and the paper's ratios."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.paper.variants import Lab
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, OTHERS, PREFILL, SEND_RECV
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.op_times.op_times import OpTimes, PairTimes
from sarathi_sim.simulator.views.ledger import gaps, iteration_bubbles
from sarathi_sim.simulator.views.spans import Spans

CONFIG = "gpt3_pp"
DEVICE, MODEL, TP = "a100-80g-sxm", "gpt3-175b", 8
ORCA, SARATHI, TP_ONLY = "orca_pp", "sarathi_pp", "orca_tp"


@dataclass(frozen=True)
class Assumptions:
    """The changes of a reading of section 5.3 to ``experiments/configs/gpt3_pp.yaml``.

    ``settings`` are ``--set`` assignments. ``factors`` multiply the times of ops: ``linear``,
    ``others``, ``prefill``, ``decode``, ``all_reduce``, ``send``. With ``padded``, a decode's
    attention runs over all of the reserved length, whatever its context.
    """

    settings: tuple[str, ...] = ()
    padded: bool = False
    factors: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Ratios:
    """The four numbers of section 5.3: of makespans, and of the median bubble time of a request."""

    orca_over_sarathi: float
    orca_over_tp: float
    tp_over_sarathi: float
    bubble: float


PAPER = Ratios(1.91, 1.28, 1.48, 6.29)


def deployment(lab: Lab, scenario: str, assumed: Assumptions, seed: int = 0) -> Deployment:
    """One scenario of ``gpt3_pp``, on the lab's op times."""
    experiment = load_experiment(CONFIG, [f"seed={seed}", *assumed.settings])
    found = deploy(experiment.scenarios[scenario], experiment.sources[scenario])
    longest = found.scenario.cluster.max_length
    assert longest is not None
    ops = changed(lab.machine(DEVICE, MODEL, TP).ops, assumed, longest)
    return replace(found, ops=ops)


def changed(ops: OpTimes, assumed: Assumptions, longest: int) -> OpTimes:
    """Op times under the assumptions."""
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


def run(lab: Lab, scenario: str, assumed: Assumptions, seed: int = 0) -> Records:
    """Simulate one scenario."""
    return deployment(lab, scenario, assumed, seed).simulate()


def request_bubbles(records: Records) -> Floats:
    """Bubble time of each request in seconds, as docs/metrics.md defines it (one replica)."""
    log = records.replicas[0]
    return Spans(log).total(iteration_bubbles(gaps(log)))


@cache
def makespan(lab: Lab, scenario: str, assumed: Assumptions, seed: int) -> tuple[float, float]:
    """Seconds until the last request is done, and the median bubble time (NaN for TP only)."""
    records = run(lab, scenario, assumed, seed)
    bubble = np.nan if scenario == TP_ONLY else float(np.median(request_bubbles(records)))
    return records.end_s, bubble


def ratios(lab: Lab, assumed: Assumptions, seed: int) -> Ratios:
    """The four ratios under one reading."""
    (orca, orca_bubble), (chunked, chunked_bubble), (tp_only, _) = (
        makespan(lab, scenario, relevant(assumed, scenario), seed)
        for scenario in (ORCA, SARATHI, TP_ONLY)
    )
    return Ratios(orca / chunked, orca / tp_only, tp_only / chunked, orca_bubble / chunked_bubble)


_PIPELINE = ("batching.formation", "batching.micro_batches", "engine.send")


def relevant(assumed: Assumptions, scenario: str) -> Assumptions:
    """The assumptions without those that do not affect a scenario: its run may exist already."""
    ignored = tuple(f"scenarios.{s}." for s in (ORCA, SARATHI, TP_ONLY) if s != scenario)
    if scenario == TP_ONLY:
        ignored += _PIPELINE
    kept = tuple(s for s in assumed.settings if not s.startswith(ignored))
    return replace(assumed, settings=kept)
