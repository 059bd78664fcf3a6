"""The output of commands: tables of deployments and of times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from experiments.config.deployment import Deployment
from experiments.run.rich_table import rich_table


def deployments_table(deployments: Mapping[str, Deployment]) -> Table:
    """The deployment of each scenario, side by side."""
    rows: dict[str, Callable[[Deployment], str]] = {
        "model": lambda d: d.model.name,
        "device": lambda d: d.device.name,
        "policy": lambda d: d.scenario.policy.name,
        "TP x PP x replicas": lambda d: (
            f"{d.scenario.cluster.tp} x {d.scenario.cluster.pp} x {d.scenario.cluster.replicas}"
        ),
        "max batch": lambda d: str(d.scenario.batching.max_batch),
        "micro-batches in flight": lambda d: str(d.scenario.batching.max_in_flight),
        "KV tokens": lambda d: f"{d.kv_capacity:,}",
        "requests": lambda d: f"{len(d.requests):,}",
    }
    cells = [[label, *map(cell, deployments.values())] for label, cell in rows.items()]
    return rich_table([""], list(deployments), cells)


def bench_table(numbers: Mapping[str, Any]) -> Table:
    """The benchmark's numbers."""
    policies = list(numbers["loop_s"])
    simple = {
        "event loop (s)": ("loop_s", "{:.3f}"),
        "textbook SimPy (s)": ("oracle_s", "{:.2f}"),
        "times faster": ("speedup_vs_oracle", "{:.1f}"),
        "per-stage traces, share of the loop's time": ("trace_share", "{:.2f}"),
        "stage executions a second": ("stage_executions_per_s", "{:,.0f}"),
        "us an iteration": ("loop_iteration_us", "{:.2f}"),
        "that, times reserved memory": ("over_reserved", "{:.2f}"),
    }
    rows = [
        [
            label,
            *(form.format(numbers[key][p]) if p in numbers[key] else "-" for p in policies),
        ]
        for label, (key, form) in simple.items()
    ]
    by_batch = numbers["iteration_us"]
    for batch in max(by_batch.values(), key=len):
        times = (by_batch[policy].get(batch) for policy in policies)
        cells = ("-" if time_us is None else f"{time_us:.2f}" for time_us in times)
        rows.append([f"us an iteration at batch {batch}", *cells])
    memory = f"peak memory of the process: {numbers['peak_rss_mb']:.0f} MB"
    return rich_table([""], policies, rows, caption=memory)
