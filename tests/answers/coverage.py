"""``python -m tests.answers.coverage CONFIG``: how often a capacity's interval covers the truth.

One replication's crossing depends on its seed alone. So the crossings of many seeds are searched
once, with runs of one length. Their quantile is the truth (10 % of replications have less). Groups
of them, drawn anew for each repeat, are what a search would have had: replications come one by one
until the interval is narrow, as in :func:`sarathi_sim.experiments.capacity.search.replications`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from sarathi_sim.experiments.capacity.answer import read_question
from sarathi_sim.experiments.capacity.options import plan_of
from sarathi_sim.experiments.capacity.probing import Laboratory
from sarathi_sim.experiments.capacity.search import (
    Crossing,
    Probe,
    Search,
    SearchPlan,
    crossing,
    pilot,
)
from sarathi_sim.experiments.capacity.search import together as side_by_side
from sarathi_sim.experiments.sweeps.backends import LocalProcesses
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.simulator.confidence.quantile import quantile, spread


def crossings(plan: SearchPlan, count: int) -> Search[list[float]]:
    """The crossings of so many seeds."""
    _, rough = yield from pilot(plan)
    assert isinstance(rough, Crossing), "the SLO breaks under any load"
    found = yield from side_by_side(
        crossing(Probe(0, plan.seed + 1 + n, plan.requests), rough.load, rough.slope, plan)
        for n in range(count)
    )
    return [one.load for one in found if isinstance(one, Crossing)]


def covered(loads: list[float], plan: SearchPlan, repeats: int) -> tuple[float, float, float]:
    """The share of repeats whose interval covers the quantile of all ``loads``, the mean number of
    replications, and the mean estimate over that quantile."""
    truth = float(np.quantile(loads, 1 - plan.keep))
    rng, hits, counts, ratios = np.random.default_rng(0), 0, [], []
    for _ in range(repeats):
        drawn = rng.choice(loads, plan.most, replace=False).tolist()
        for count in range(plan.least, plan.most + 1):
            found = quantile(drawn[:count], 1 - plan.keep)
            if found.interval[1] - found.interval[0] <= plan.tolerance * found.value:
                break
        hits += found.interval[0] <= truth <= found.interval[1]
        counts.append(count)
        ratios.append(found.value / truth)
    return hits / repeats, float(np.mean(counts)), float(np.mean(ratios))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.answers.coverage", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], dest="assignments")
    parser.add_argument("--seeds", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    _, section, (option, *_) = read_question(options.config, options.assignments)
    plan = plan_of(option, section, options.config)
    with TemporaryDirectory() as scratch:
        store = Store(Path(scratch) / "probes")
        store.open(resume=True)
        with store.locked():
            lab = Laboratory(section, store, LocalProcesses(2))
            found = lab.pursue({option: crossings(plan, options.seeds)})[option]
    if isinstance(found, str):
        print(found, file=sys.stderr)
        return 1
    share, count, ratio = covered(found, plan, options.repeats)
    print(
        f"{len(found)} seeds, runs of {plan.requests:,} requests: crossings scatter by "
        f"{spread(found):.1%}; of {options.repeats} repeats {share:.1%} cover the quantile, with "
        f"{count:.1f} replications in the mean; estimates are {ratio - 1:+.2%} off in the mean"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
