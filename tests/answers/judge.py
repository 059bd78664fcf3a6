"""Runs again what an answer states, with other seeds and more requests, and judges it.

Nothing here is shared with the search: an SLO is read, percentiles are taken, the warm-up is cut
and overload is told by rules of this module's own. Only the simulation is the library's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.simulator.views.metrics import Analysis

Floats = npt.NDArray[np.float64]
Scenario = Mapping[str, Any]

TIMES = 5
"""How many times the requests of the search a rerun has."""
SEEDS = 3
MOST_REQUESTS = 400_000
MOST_TOKENS = 12_000_000
"""Requests, and output tokens, of one rerun that are simulated: what exceeds them is left out, and
the judgement says so."""
MOST_DRAWN = 1_500_000
"""Requests of one rerun that are drawn, where only some replicas are simulated."""
FEWEST, FLOOR = 20_000, 4000
"""Requests that are simulated at least, if so many are drawn, where some of many replicas are;
requests of any rerun, however short the search's runs were."""
LASTS = 30
"""How many times the largest limit of the SLO the arrivals of a rerun last at least: in a shorter
one a queue that fills up once looks like one that grows for ever."""
WARM_UP = 0.1
"""The part of the time of arrivals that is left out."""
GROWTH = 0.02
"""The part of the arrivals by which a queue must grow to be growing."""
BLOCK = 200
"""Rows of a trace that stay together when it is resampled."""
NEARLY, POINTS = 1.05, 0.02
"""How much of a limit a value may reach, and by how much an attainment may fall short."""

METRICS = {name: f"{name}_s" for name in ("ttft", "tpot", "tbt", "tbt_max", "latency")}
METRICS |= {"itl": "tbt_s", "e2e": "latency_s"}
REQUEST_METRICS = ("ttft_s", "tpot_s", "tbt_max_s", "latency_s")
NOWHERE = Source("answers", "", {}, ())
_TIME = re.compile(r"(\d*\.?\d+)(us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


# The SLO -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clause:
    """``statistic`` of the one metric in ``limits`` (seconds) is bounded; or, with ``share``, so
    many of the requests must keep all of ``limits``."""

    text: str
    limits: Mapping[str, float]
    statistic: str = ""
    share: float = 0.0


def read_slo(text: str) -> list[Clause]:
    """The clauses of an SLO."""
    clauses = []
    for clause in map(str.strip, text.split(",")):
        statistic, *words = clause.lower().split()
        share, limits = 0.0, {}
        if statistic == "attainment":
            share, words, statistic = float(words[0].rstrip("%")) / 100, words[1:], ""
        for name, limit in zip(words[::2], words[1::2], strict=True):
            found = _TIME.fullmatch(limit)
            assert found, clause
            limits[METRICS[name]] = float(found[1]) * _SECONDS[found[2]]
        clauses.append(Clause(clause, limits, statistic, share))
    return clauses


# A run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Observed:
    """What a run shows of the requests that arrive after the warm-up.

    ``latencies`` by metric in seconds, NaN where a request has none (all of them, where it was
    rejected); ``gaps_s`` are times between tokens, each ``counts`` times. ``growing`` has, for each
    replica that was simulated, whether its queue grows.
    """

    latencies: Mapping[str, Floats]
    rejected: npt.NDArray[np.bool_]
    gaps_s: Floats
    counts: npt.NDArray[np.int64]
    growing: Sequence[bool] = ()

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.rejected)


def observe(deployment: Deployment, open_loop: bool = True) -> Observed:
    """Simulate it, and leave out who arrives in the first tenth of the time of arrivals.

    Turns of sessions that begin after the last session are left out, too.
    """
    analysis = Analysis(deployment.simulate())
    done = analysis.request_columns
    arrival = np.asarray(done["arrival_s"], np.float64)
    last = float(arrival.max())
    if deployment.scenario.workload.sessions is not None:
        last = max(request.arrival_s for request in deployment.requests)
    since = float(arrival.min()) + WARM_UP * (last - float(arrival.min()))
    part = (arrival >= since) & (arrival <= last)
    found = [analysis.spans[replica].token_gaps(since) for replica in analysis.at_work]
    nothing = [(np.zeros(0), np.zeros(0, np.int32))]
    gaps, counts = zip(*(found or nothing), strict=True)
    finish = np.asarray(done["finish_s"], np.float64)
    return Observed(
        {name: np.asarray(done[name], np.float64)[part] for name in REQUEST_METRICS},
        np.isnan(finish[part]),
        np.concatenate(gaps),
        np.concatenate(counts).astype(np.int64),
        [open_loop and grows(arrival, finish, since, last)],
    )


def grows(arrival_s: Floats, finish_s: Floats, since_s: float, last_s: float) -> bool:
    """Whether more and more requests are in the system between two times.

    Their mean number rises from each fifth of the time to the next, and from the first to the last
    by more than a fiftieth of the arrivals. Rejected requests (NaN) were never there.
    """
    there = ~np.isnan(finish_s)
    came, left = np.sort(arrival_s[there]), np.sort(finish_s[there])
    at = np.linspace(since_s, last_s, 1001)
    inside = np.searchsorted(came, at, "right") - np.searchsorted(left, at, "right")
    means = np.array([part.mean() for part in np.array_split(inside, 5)])
    arrivals = int(((came >= since_s) & (came <= last_s)).sum())
    return bool((np.diff(means) > 0).all() and means[-1] - means[0] > 0.8 * GROWTH * arrivals)


def together(runs: Iterable[Observed]) -> Observed:
    """Several runs as one."""
    runs = list(runs)
    return Observed(
        {name: np.concatenate([run.latencies[name] for run in runs]) for name in REQUEST_METRICS},
        np.concatenate([run.rejected for run in runs]),
        np.concatenate([run.gaps_s for run in runs]),
        np.concatenate([run.counts for run in runs]),
        [one for run in runs for one in run.growing],
    )


def value(clause: Clause, seen: Observed) -> float:
    """What the clause bounds, in seconds; of an attainment the share that keeps all limits.

    A request without such a time keeps its limit; a rejected one keeps none. NaN for no times.
    """
    if clause.share:
        kept = ~seen.rejected
        for metric, limit in clause.limits.items():
            kept &= ~(seen.latencies[metric] > limit)
        return float(kept.mean()) if seen.requests else math.nan
    (metric,) = clause.limits
    gaps = metric == "tbt_s"
    times = seen.gaps_s if gaps else seen.latencies[metric]
    times = times[~np.isnan(times)]
    if not len(times):
        return math.nan
    if clause.statistic == "mean":
        return float(np.average(times, weights=seen.counts if gaps else None))
    level = float(clause.statistic[1:]) / 100
    if gaps:
        return float(np.quantile(times, level, weights=seen.counts, method="inverted_cdf"))
    return float(np.quantile(times, level))


# A judgement ---------------------------------------------------------------------------------


@dataclass
class Judgement:
    """A deployment at a load, judged by reruns.

    ``keeps``: every clause keeps its limit, no queue grows, and no more requests are rejected than
    the question allows. ``nearly``: the same with limits 5 % wider (attainments 2 points lower).
    ``parts`` are values over limits (of an attainment: points short of it).
    """

    name: str
    factor: float
    load: float
    values: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    growing: float = 0.0
    rejected: float = 0.0
    requests: int = 0
    seeds: int = 0
    shortened: bool = False
    keeps: bool = False
    nearly: bool = False


def judged(
    name: str,
    slo: str,
    scenario: Scenario,
    factor: float,
    seeds: Sequence[int],
    folder: Path,
    *,
    times: float = TIMES,
    allowed: float = 0.0,
) -> Judgement:
    """A scenario at ``factor`` times its load, run with each of the seeds and ``times`` its
    requests. ``allowed`` is the share of requests that may be rejected; ``folder`` is for
    resampled traces."""
    found, runs = Judgement(name, factor, load_of(loaded(scenario, factor))), []
    largest = max(limit for clause in read_slo(slo) for limit in clause.limits.values())
    for seed in seeds:
        seen, shortened = rerun(loaded(scenario, factor), seed, times, folder, LASTS * largest)
        found.shortened |= shortened
        runs.append(seen)
    seen = together(runs)
    found.requests, found.seeds = seen.requests, len(seeds)
    found.growing = float(np.mean(seen.growing))
    found.rejected = float(seen.rejected.mean()) if seen.requests else 1.0
    keeps = nearly = found.growing < 0.5 and found.rejected <= allowed
    for clause in read_slo(slo):
        there = found.values[clause.text] = value(clause, seen)
        if clause.share:
            found.parts[clause.text] = 100 * (clause.share - there)
            keeps &= there >= clause.share
            nearly &= there >= clause.share - POINTS
        else:
            (limit,) = clause.limits.values()
            found.parts[clause.text] = there / limit
            keeps &= not there > limit
            nearly &= not there > NEARLY * limit
    found.keeps, found.nearly = keeps, nearly
    return found


def load_of(scenario: Scenario) -> float:
    """The load that a scenario states: requests a second, clients, or the scale of its rates."""
    arrivals = scenario["workload"]["arrivals"]
    for key in ("rate", "clients", "scale"):
        if key in arrivals:
            return float(arrivals[key])
    raise ValueError(f"arrivals {arrivals}: no load")


def loaded(scenario: Scenario, factor: float) -> dict[str, Any]:
    """The scenario at so many times its load. Of clients there is at least one more, if more are
    wanted at all."""
    changed = deepcopy(dict(scenario))
    arrivals = changed["workload"]["arrivals"]
    if arrivals["kind"] in ("trace", "varying"):
        arrivals.setdefault("scale", 1.0)
    for key in ("rate", "scale"):
        if key in arrivals:
            arrivals[key] *= factor
            return changed
    clients = arrivals["clients"]
    arrivals["clients"] = math.ceil(clients * factor - 1e-9)
    if factor > 1:
        arrivals["clients"] = max(arrivals["clients"], clients + 1)
    return changed


def rerun(
    scenario: Scenario, seed: int, times: float, folder: Path, least_s: float = 0.0
) -> tuple[Observed, bool]:
    """Simulate a scenario with another seed and ``times`` its requests, or as many as arrive by
    themselves in ``least_s`` seconds; a trace is resampled.

    Of many independent replicas only some are simulated, as many as give :data:`FEWEST` requests.
    Also returns whether :data:`MOST_REQUESTS` or :data:`MOST_TOKENS` made the run shorter.
    """
    changed = deepcopy(dict(scenario))
    workload, replicas = changed["workload"], changed.get("cluster", {}).get("replicas", 1)
    short = {**changed, "workload": {**workload, "requests": min(1000, requests_of(scenario))}}
    sample = deploy(check_scenario(short, NOWHERE), NOWHERE).requests
    outputs = [request.output_tokens for request in sample]
    last = max(request.arrival_s for request in sample)
    lasting = least_s * len(sample) / last if last else 0.0
    open_loop = workload["arrivals"]["kind"] != "closed_loop"
    apart = independent(scenario)
    wanted = round(max(FLOOR, times * requests_of(scenario), lasting))
    most = min(MOST_REQUESTS, int(MOST_TOKENS / np.mean(outputs)))
    drawn = min(wanted, MOST_DRAWN if apart and replicas > 1 else most)
    changed["seed"], workload["requests"] = seed, drawn
    if workload["lengths"]["kind"] == "trace":
        path = folder / f"resampled_{seed}_{drawn}.csv"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            resample(pd.read_csv(workload["lengths"]["path"]), drawn, seed).to_csv(
                path, index=False
            )
        workload["lengths"]["path"] = str(path)
    deployment = deploy(check_scenario(changed, NOWHERE), NOWHERE)
    if not apart or replicas == 1:
        return observe(deployment, open_loop), drawn < wanted
    count = min(replicas, math.ceil(FEWEST * replicas / drawn), max(1, most * replicas // drawn))
    alone = [observe(one_of(deployment, place)) for place in range(count)]
    return together(alone), drawn < wanted


def requests_of(scenario: Scenario) -> int:
    """The requests of a run as the search made it: a trace without a number has all its rows."""
    workload = scenario["workload"]
    if workload.get("requests") is not None:
        return int(workload["requests"])
    return len(pd.read_csv(workload["lengths"]["path"]))


def independent(scenario: Scenario) -> bool:
    """Whether each replica could as well be alone: arrivals come by themselves, and in turn."""
    workload, cluster = scenario["workload"], scenario.get("cluster", {})
    closed = workload["arrivals"]["kind"] == "closed_loop" or workload.get("sessions") is not None
    pooled = scenario.get("disaggregation") is not None
    return not (closed or pooled) and cluster.get("router", "round_robin") == "round_robin"


def resolved(scenario: Scenario) -> dict[str, Any]:
    """All keys that act, but the load's and the seed."""
    short = {**scenario, "workload": {**scenario["workload"], "requests": 10}}
    found = deploy(check_scenario(short, NOWHERE), NOWHERE).scenario
    return found.model_dump(exclude={"workload", "seed"})


def one_of(deployment: Deployment, place: int) -> Deployment:
    """One of a deployment's replicas, which take turns, with the requests that come to it."""
    scenario = deployment.scenario
    replicas = scenario.cluster.replicas
    cluster = scenario.cluster.model_copy(update={"replicas": 1})
    single = scenario.model_copy(update={"cluster": cluster})
    return replace(deployment, scenario=single, requests=deployment.requests[place::replicas])


def resample(trace: pd.DataFrame, rows: int, seed: int) -> pd.DataFrame:
    """Blocks of consecutive rows with the gaps before them, drawn with replacement, at the trace's
    own mean rate. The trace begins again behind its end."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(trace), -(-rows // BLOCK))
    places = (starts[:, None] + np.arange(BLOCK)).ravel()[:rows] % len(trace)
    found = trace.iloc[places].reset_index(drop=True)
    if "arrival_s" in trace:
        arrival = trace["arrival_s"].to_numpy(np.float64)
        gaps = np.diff(arrival, prepend=arrival[0])
        gaps[0] = gaps[1:].mean() if len(gaps) > 1 else 0.0
        at = np.cumsum(gaps[places])
        at -= at[0]
        wanted = (arrival[-1] - arrival[0]) / len(trace) * rows
        found["arrival_s"] = at * (wanted / at[-1] if at[-1] else 1.0)
    return found
