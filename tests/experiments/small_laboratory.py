"""A laboratory in a folder, a scenario judged by a run of its own, and an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.capacity.answer import Prices
from sarathi_sim.experiments.capacity.options import Option, Wanted, wanted_of
from sarathi_sim.experiments.capacity.probing import Laboratory
from sarathi_sim.experiments.capacity.recommend import Recommendation, recommendations
from sarathi_sim.experiments.capacity.search import AT_ONCE, Probe
from sarathi_sim.experiments.capacity.slo import CapacitySection, Objective, Verdict, judge
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.experiments.report.capacity_answers import recommend_section
from sarathi_sim.experiments.report.section import Section
from sarathi_sim.experiments.sweeps.backends import InProcess
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.profiler.storage.child import Say, silent
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import HERE
from tests.experiments.small_report import recommended, searched


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


def recommend(lab: Laboratory, asked: Wanted, prices: Prices, say: Say = silent) -> Recommendation:
    """The whole recommendation, which comes after all partial ones."""
    *partial, found = recommendations(lab, asked, prices, say)
    assert found.open is None and all(one.open and not one.finalists for one in partial)
    return found


def analysed(scenario: Scenario) -> Analysis:
    return Analysis(deploy(scenario, HERE).simulate())


def served_per_s(option: Option, requests: int) -> float:
    """The requests a second of a run in which so many arrive at once."""
    full = deploy(option.at(Probe(AT_ONCE, 0, requests), "rate").scenario, HERE)
    return float(full.summary(Analysis(full.simulate()))["requests_per_s"])


def verdict_of(scenario: Scenario, objectives: Sequence[Objective]) -> Verdict:
    deployment = deploy(scenario, HERE)
    analysis = Analysis(deployment.simulate())
    summary = deployment.summary(analysis)
    summary["after_warmup"] = analysis.after_warmup()
    return judge(objectives, [(summary, None)], open_loop=True)


def recommendation(**given: Any) -> Section:
    """The answer of ``recommend`` on a deployment that sustains nothing, or 8 requests/s."""
    load = given.pop("capacity", 0.0)
    row = searched("TP 8 x 1", 8, load or 1.0) | {"capacity": load, "carries": load or None}
    return recommend_section(None, recommended(row, **given))
