"""The speed of the event loop, as a multiple of a textbook SimPy simulation in one process.

Absolute times depend on the machine and its other work; the ratio of two loops timed in turn hardly
does. ``python -m tests.bench`` prints it.
"""

from __future__ import annotations

import gc
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.loading import Experiment
from sarathi_sim.experiments.config.requests import build_clients
from sarathi_sim.experiments.report.render import rich_table
from sarathi_sim.policies.catalogue import is_pooled
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.requests import at_once, make_requests
from sarathi_sim.simulator.loop.records import Records
from tests.simulator import simulate
from tests.textbook.pipeline import TextbookPipeline
from tests.textbook.simulation import simulate_textbook

BATCHES = (8, 32, 128, 512)
OUTPUT = 4096
"""Tokens that each sequence of a full batch generates."""

SCENARIOS = {"orca": "orca_pp", "sarathi": "sarathi_pp"}


def benchmark(
    experiments: Sequence[Experiment], repeats: int, progress: Progress
) -> dict[str, Any]:
    """Time the experiments' scenarios on their workloads; medians over ``repeats``.

    Returns, by scenario, ``loop_s`` (records included), ``oracle_s``, ``speedup_vs_oracle``,
    ``loop_iteration_us``, ``over_reserved`` (paged scenarios: the time of an iteration as a
    multiple of that of the experiment's first scenario with reserved memory in the same repeat),
    their ranges over the repeats (``speedup_range``, ``over_reserved_range``) and ``iteration_us``
    (by batch; the least over the repeats); and ``peak_rss_mb`` of this whole process. All times are
    seconds or microseconds of the processor. Raises UserError for a scenario that serves no
    request, or is too short to be timed.
    """
    deployments, reserved = _deployed(experiments)
    # The first pass fills the predictor's tables, and counts the work.
    iterations = {
        name: sum(log.num_iterations for log in deployment.simulate().replicas)
        for name, deployment in deployments.items()
    }
    iteration_us = _by_batch(deployments, repeats, progress)
    loop: dict[str, list[float]] = {name: [] for name in deployments}
    oracle: dict[str, list[float]] = {name: [] for name in deployments}
    total = repeats * len(deployments)
    for repeat in range(repeats):
        # The loops one after the other, so that they are compared at one time of the machine.
        for name, deployment in deployments.items():
            loop[name].append(_timed(Deployment.simulate, deployment))
        for number, (name, deployment) in enumerate(deployments.items()):
            progress("against textbook SimPy", repeat * len(deployments) + number, total)
            oracle[name].append(_timed(_textbook, deployment))
    loop_s, oracle_s = (
        {name: median(of) for name, of in times.items()} for times in (loop, oracle)
    )
    each_us = {name: [1e6 * t / iterations[name] for t in times] for name, times in loop.items()}
    over = {name: _ratios(each_us[name], each_us[other]) for name, other in reserved.items()}
    return {
        "loop_s": loop_s,
        "oracle_s": oracle_s,
        "speedup_vs_oracle": {name: oracle_s[name] / loop_s[name] for name in loop_s},
        "speedup_range": {name: _range(_ratios(oracle[name], loop[name])) for name in loop_s},
        "loop_iteration_us": {name: median(times) for name, times in each_us.items()},
        "over_reserved": {name: median(ratios) for name, ratios in over.items()},
        "over_reserved_range": {name: _range(ratios) for name, ratios in over.items()},
        "iteration_us": iteration_us,
        "peak_rss_mb": _peak_rss_mb(),
        "repeats": repeats,
    }


#: Rows of the table: what, the key of its numbers, and their form.
ROWS = (
    ("event loop (s)", "loop_s", "{:.3f}"),
    ("textbook SimPy (s)", "oracle_s", "{:.2f}"),
    ("times faster", "speedup_vs_oracle", "{:.1f}"),
    ("us an iteration", "loop_iteration_us", "{:.2f}"),
    ("that, times reserved memory", "over_reserved", "{:.2f}"),
)


def bench_table(numbers: Mapping[str, Any]) -> Table:
    policies, by_batch = list(numbers["loop_s"]), numbers["iteration_us"]
    found = [(label, form, numbers[key]) for label, key, form in ROWS]
    for batch in max(by_batch.values(), key=len):
        of_batch = {policy: us[batch] for policy, us in by_batch.items() if batch in us}
        found.append((f"us an iteration at batch {batch}", "{:.2f}", of_batch))
    rows = [
        [label, *(form.format(of[policy]) if policy in of else "-" for policy in policies)]
        for label, form, of in found
    ]
    memory = f"peak memory of the process: {numbers['peak_rss_mb']:.0f} MB"
    return rich_table([""], policies, rows, caption=memory)


def _deployed(experiments: Sequence[Experiment]) -> tuple[dict[str, Deployment], dict[str, str]]:
    """What is timed, by its name in the numbers; and for each scenario with paged memory the one
    with reserved memory that it is compared with."""
    deployments: dict[str, Deployment] = {}
    compared: dict[str, str] = {}
    for experiment in experiments:
        # Those that the demo compares, or all.
        demo = all(name in experiment.scenarios for name in SCENARIOS.values())
        names = SCENARIOS if demo else {name: name for name in experiment.scenarios}
        timed = {
            name: deploy(experiment.scenarios[scenario], experiment.sources[scenario])
            for name, scenario in names.items()
        }
        reserved = [name for name, each in timed.items() if each.scenario.kv_cache is None]
        if reserved:
            compared |= {name: reserved[0] for name in timed if name not in reserved}
        deployments |= timed
    return deployments, compared


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def _range(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def _textbook(deployment: Deployment) -> list[TextbookPipeline]:
    """The same system, with every switch that the configuration sets."""
    scenario = deployment.scenario
    cluster, batching, kv_cache = scenario.cluster, scenario.batching, scenario.kv_cache
    options: dict[str, Any] = {
        "max_batch": batching.max_batch,
        "kv_capacity": deployment.kv_capacity,
        "reserve_declared": batching.kv_reservation == "declared",
        "free_pool": batching.micro_batches == "free",
    }
    if kv_cache is not None:
        options = {name: getattr(kv_cache, name) for name in ("num_blocks", "block_size")}
        options["caching"] = kv_cache.prefix_caching
    return simulate_textbook(
        deployment.requests,
        scenario.policy.build(),
        deployment.predictor,
        deployment.layers,
        replicas=cluster.replicas,
        switches=deployment.switches,
        router=cluster.router,
        seed=scenario.seed,
        clients=build_clients(scenario, deployment.requests),
        max_in_flight=batching.max_in_flight,
        max_length=cluster.max_length,
        **options,
    )


def _by_batch(
    deployments: Mapping[str, Deployment], repeats: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """Microseconds per iteration with micro-batches of each size in :data:`BATCHES`.

    The least over the repeats, in each of which all deployments take their turn.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in deployments}
    for number, batch in enumerate(BATCHES):
        progress("by batch", number, len(BATCHES))
        full = {name: wide for name, each in deployments.items() if (wide := _full(each, batch))}
        iterations = {name: _served(wide).replicas[0].num_iterations for name, wide in full.items()}
        for _ in range(repeats):
            for name, wide in full.items():
                took = 1e6 * _timed(_served, wide) / iterations[name]
                found[name][str(batch)] = min(took, found[name].get(str(batch), math.inf))
    return found


def _full(deployment: Deployment, batch: int) -> Deployment | None:
    """The deployment with micro-batches of a size that are full nearly all the time: prompts are
    short, outputs long, and memory does not limit them. None if its policy does not allow them."""
    prompt = 16
    length = prompt + OUTPUT
    scenario = deployment.scenario
    count = batch * scenario.cluster.pp
    policy = scenario.policy.build()
    if is_pooled(policy) and policy.max_num_seqs < count:
        return None
    requests = make_requests(
        at_once(count), np.full(count, prompt), np.full(count, OUTPUT), max_length=length
    )
    room = {"max_batch": batch, "micro_batches": "bound", "kv_reservation": "max_length"}
    changes = {
        "batching": scenario.batching.model_copy(update=room),
        "cluster": scenario.cluster.model_copy(update={"max_length": length, "replicas": 1}),
    }
    if scenario.kv_cache is not None:
        blocks = count * (length // scenario.kv_cache.block_size + 2)
        changes["kv_cache"] = scenario.kv_cache.model_copy(update={"num_blocks": blocks})
    return replace(
        deployment,
        scenario=scenario.model_copy(update=changes),
        requests=requests,
        kv_capacity=count * length,
    )


def _served(deployment: Deployment) -> Records:
    """Its requests, without the switches of the engine."""
    schedulers = deployment.schedulers()
    return simulate(deployment.requests, schedulers, deployment.predictor, deployment.layers)


def _timed(work: Callable[[Deployment], object], deployment: Deployment) -> float:
    """Seconds of the processor. Raises UserError where the machine's clock did not move."""
    gc.collect()
    began = time.process_time()
    result = work(deployment)
    took = time.process_time() - began
    del result
    if took <= 0:
        raise UserError("too short for this machine's clock: set a larger workload.requests")
    return took


def _peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
