"""A laboratory in a folder, a scenario judged by a run of its own, and an answer in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.capacity.options import Option, Wanted, wanted_of
from sarathi_sim.experiments.capacity.probing import Laboratory
from sarathi_sim.experiments.capacity.search import AT_ONCE, Probe
from sarathi_sim.experiments.capacity.slo import CapacitySection, Objective, Verdict, judge
from sarathi_sim.experiments.capacity.written import recommend_answer
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.experiments.report.section import Section
from sarathi_sim.experiments.sweeps.backends import InProcess
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import HERE


def question(**given: object) -> Wanted:
    """What ``recommend`` is asked, with the usual values of what is not given."""
    usual = dict.fromkeys(("rate", "workload", "max_length", "stack", "dtype", "budget", "seqs"))
    return wanted_of(**usual | {"tolerance": 0.1} | given)  # type: ignore[arg-type]


def laboratory(folder: Path, section: CapacitySection) -> Laboratory:
    """A laboratory whose probes lie in the folder, in this process."""
    store = Store(folder)
    store.open(resume=True)
    return Laboratory(section, store, InProcess())


@contextmanager
def opened(folder: Path, section: CapacitySection) -> Iterator[Laboratory]:
    """It, its folder locked."""
    found = laboratory(folder, section)
    with found.store.locked():
        yield found


def analysed(scenario: Scenario) -> Analysis:
    """A run of the scenario."""
    return Analysis(deploy(scenario, HERE).simulate())


def served_per_s(option: Option, requests: int) -> float:
    """The requests a second of a run in which so many arrive at once."""
    full = deploy(option.at(Probe(AT_ONCE, 0, requests), "rate").scenario, HERE)
    return float(full.summary(Analysis(full.simulate()))["requests_per_s"])


def verdict_of(scenario: Scenario, objectives: Sequence[Objective]) -> Verdict:
    """Whether a run of the scenario keeps them."""
    deployment = deploy(scenario, HERE)
    analysis = Analysis(deployment.simulate())
    summary = deployment.summary(analysis)
    summary["after_warmup"] = analysis.after_warmup()
    return judge(objectives, [(summary, None)], open_loop=True)


def recommendation(**given: Any) -> Section:
    """The answer of ``recommend`` on a deployment that carries nothing, or on what is given."""
    row = {"name": "TP 8", "why": "", "capacity": 0.0, "settled": True, "interval": [0, 0],
           "gpus": 8, "replicas": 1, "rejected_share": 0.0, "curve": [], "tp": 8, "pp": 1,
           "scenario": {"policy": {}}}  # fmt: skip
    prices = {"currency": "USD", "date": "2026-01-01", "mark": "assumed"}
    return recommend_answer({
        "deployments": [row | given.pop("row", {})], "load": "rate", "rate": None,
        "tolerance": 0.05, "winner": None, "one_fewer": None, "screened": [], "dropped": {},
        "replicas": 1, "model": "m", "devices": ["d"], "gpus": 8, "slo": "p99 ttft 1s",
        "command": None, "needs": None, "keep": 0.9, "prices": prices, **given,
    })  # fmt: skip
