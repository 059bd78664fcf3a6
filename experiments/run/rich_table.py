"""Every table that a command prints, made in one place; that of deployments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from sarathi_sim.experiments.config.deployment import Deployment


def rich_table(
    text: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], **about: Any
) -> Table:
    """Columns of text to the left, then columns of numbers to the right, by their headings.

    A cell that is too wide continues in the next line. ``about`` are options of rich's tables: a
    title, a caption.
    """
    table = Table(**{"title_justify": "left", "caption_justify": "left", **about})
    for heading in text:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        # Without a heading it is no number: yes or no.
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


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
