"""The output of commands: the table of deployments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.table import Table

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.run.rich_table import rich_table


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
