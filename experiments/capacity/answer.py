"""From a question to capacities: what the command ``capacity`` finds, as numbers and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.capacity.judgement import OVERLOAD
from experiments.capacity.options import Option, plan_of
from experiments.capacity.probing import Laboratory
from experiments.capacity.search import (
    AT_ONCE,
    Capacity,
    Crossing,
    Probe,
    Probed,
    Search,
    SearchPlan,
    capacity,
    crossing,
)
from experiments.config.deployment import deploy
from experiments.config.loading import Source
from experiments.run.uncertainty import QUANTILES, uncertainty
from simulator.views.metrics import Analysis

FINE = 0.005
"""The tolerance of searches for a band, which is a few percent wide."""
FULL, MANY_BUBBLES, MOSTLY = 0.97, 0.1, 0.5
"""Shares from which on something is said to bind: of the KV cache, of the stages' time, of a
latency."""


@dataclass(frozen=True)
class Answer:
    """The capacity of one deployment.

    ``band`` is the load under op times that are slower, and faster, by their joint 90 % band (None:
    not asked for). ``error`` says why there is no capacity.
    """

    option: Option
    found: Capacity | None
    band: tuple[float, float] | None = None
    error: str = ""

    @property
    def load(self) -> float:
        """The capacity; 0 where there is none."""
        return self.found.load if self.found is not None else 0.0


def answers(lab: Laboratory, options: list[Option], where: str, bands: bool = True) -> list[Answer]:
    """The capacity of every option, in their order. Raises ConfigError for an SLO that the runs are
    too short for."""
    plans = {option: plan_of(option, lab.section, where) for option in options}
    found = lab.pursue({option: capacity(plans[option]) for option in options})
    spreads: dict[Option, tuple[float, float]] = {}
    if bands:
        spreads = banded(lab, plans, {o: f for o, f in found.items() if isinstance(f, Capacity)})
    return [_answer(option, found[option], spreads.get(option)) for option in options]


def _answer(option: Option, found: Capacity | str, band: tuple[float, float] | None) -> Answer:
    if isinstance(found, str):
        return Answer(option, None, None, found)
    return Answer(option, found, band)


def banded(
    lab: Laboratory, plans: Mapping[Option, SearchPlan], found: Mapping[Option, Capacity]
) -> dict[Option, tuple[float, float]]:
    """Each capacity if all ops were slower, or faster, by the joint 90 % band of their errors.

    The band is that of a saturated run's makespan. Pilots under these op times and under the
    profile's have the same random numbers; the ratio of what they carry is the capacity's.
    """
    searches = {}
    for number, (option, one) in enumerate(found.items()):
        lab.progress("errors of op times", number, len(found))
        if isinstance(one.pilot, Crossing):
            searches[option] = _scaled_pilots(plans[option], one.pilot, _slower(option, one))
    lab.progress("errors of op times", len(found), len(found))
    return {
        option: (low * found[option].load, high * found[option].load)
        for option, ratios in lab.pursue(searches).items()
        if not isinstance(ratios, str)
        for low, high in [ratios]
    }


def _slower(option: Option, found: Capacity) -> list[float]:
    """The quantiles of how many times longer a loaded run takes under errors of its op times."""
    assert isinstance(found.pilot, Crossing)
    probe = found.saturated.probe if found.saturated is not None else found.pilot.broken.probe
    kind = "clients" if found.saturated is None else "rate"
    where = Source("capacity", option.name, {}, ())
    deployment = deploy(option.at(probe, kind).scenario, where)  # with the probe's own requests
    analysis = Analysis(deployment.simulate())
    spread = uncertainty(deployment, analysis)
    return [] if spread is None else [float(q) for q in np.quantile(spread.slower, QUANTILES)]


def _scaled_pilots(
    plan: SearchPlan, rough: Crossing, factors: list[float]
) -> Search[tuple[float, float]]:
    """A search for the ratios of the capacity with slower op times, and with faster ones."""
    if not factors:
        return 1.0, 1.0
    loads, plan = [], replace(plan, tolerance=min(plan.tolerance, FINE))
    for slower in (1.0, *reversed(factors)):
        like = Probe(0, plan.seed, plan.pilot_requests, slower)
        there = yield from crossing(like, rough.load / slower, rough.slope, plan)
        loads.append(there.load if isinstance(there, Crossing) else 0.0)
    base = loads[0] or rough.load
    return loads[1] / base, loads[-1] / base


# What binds ----------------------------------------------------------------------------------


def binding(answer: Answer) -> dict[str, Any]:
    """What breaks first when the load rises, and why: numbers of the probe just above the capacity.

    ``slo`` is the clause that breaks, ``because`` one of memory, bubbles, queueing, and iterations
    (the time of the batches themselves).
    """
    found = answer.found
    if found is None:
        return {}
    if found.crossings:
        broken = min((one.broken for one in found.crossings), key=lambda p: p.verdict.stress)
    else:
        broken = found.pilot.broken if isinstance(found.pilot, Crossing) else found.pilot
    summary = broken.summary
    evidence = {
        "kv_peak_share": summary["kv_peak_share"],
        "preemption_rate": summary.get("preemption_rate"),
        "bubble_share": summary["bubble_share"],
        "queueing_share_of_ttft": _queueing(summary),
        "mean_batch": summary["mean_batch"],
        "mfu": summary["mfu"],
    }
    return {
        "slo": broken.verdict.worst,
        "because": _cause(broken, evidence, answer.option),
        "at_load": broken.probe.load,
        **evidence,
    }


def _queueing(summary: Mapping[str, Any]) -> float:
    """The share of the time to first token that requests wait for their first chunk, at P99."""
    after = summary["after_warmup"]
    return float(after["queueing_s"]["p99"] / after["ttft_s"]["p99"])


def _cause(broken: Probed, evidence: Mapping[str, Any], option: Option) -> str:
    waits = broken.verdict.worst == OVERLOAD or any(
        word in broken.verdict.worst for word in ("ttft", "latency", "e2e", "attainment")
    )
    if evidence["preemption_rate"] or (evidence["kv_peak_share"] >= FULL and waits):
        return "memory"
    if evidence["bubble_share"] >= MANY_BUBBLES:
        return "bubbles"
    if waits and (broken.verdict.overloaded or evidence["queueing_share_of_ttft"] >= MOSTLY):
        return "queueing"
    return "iterations"


# JSON ----------------------------------------------------------------------------------------


def as_json(answer: Answer) -> dict[str, Any]:
    """One deployment's answer in numbers."""
    option, found = answer.option, answer.found
    cluster = option.scenario.cluster
    about = {
        "name": option.name,
        "point": option.point,
        "policy": option.scenario.policy.name,
        "device": option.deployment.device.name,
        "tp": cluster.tp,
        "pp": cluster.pp,
        "replicas": cluster.replicas,
        "gpus": option.gpus,
    }
    if found is None:
        return {**about, "capacity": None, "error": answer.error}
    single = len(found.crossings) < 2
    return {
        **about,
        "capacity": found.load,
        "mean": found.mean,
        "interval": None if single else list(found.interval),
        "band": None if answer.band is None else list(answer.band),
        "spread_of_a_run": None if single else found.spread,
        "replications": [one.load for one in found.crossings],
        "saturation": found.saturated.summary["requests_per_s"] if found.saturated else None,
        "binds": binding(answer),
        "at_capacity": numbers(found.at, option) if found.at is not None else None,
        "curve": [numbers(probed, option) for probed in curve(found)],
    }


def curve(found: Capacity) -> list[Probed]:
    """All probes of the headroom curve, by load: the single ones, and those at the capacity."""
    probes = {probed.probe.load: probed for probed in found.curve}
    if found.at is not None:
        probes[found.at.probe.load] = found.at
    if not probes and isinstance(found.pilot, Probed):
        probes[found.pilot.probe.load] = found.pilot
    return [probes[load] for load in sorted(probes) if load != AT_ONCE]


def numbers(probed: Probed, option: Option) -> dict[str, Any]:
    """A probe's load, values, and what a user of it, and a GPU, gets."""
    summary, after = probed.summary, probed.summary["after_warmup"]
    tpot = after["tpot_s"]["p50"]
    return {
        "run": probed.run,
        "load": probed.probe.load,
        "requests": probed.probe.requests,
        "holds": probed.verdict.holds,
        "overloaded": probed.verdict.overloaded,
        "slo": probed.verdict.values,
        "stress": probed.verdict.stresses,
        "ttft_p99_s": after["ttft_s"]["p99"],
        "tbt_p99_s": after["tbt_s"]["p99"],
        "tokens_per_s_per_user": 1 / tpot if tpot else float("nan"),
        "requests_per_s": summary["requests_per_s"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "output_tokens_per_s_per_gpu": summary["output_tokens_per_s"] / option.gpus,
    }
