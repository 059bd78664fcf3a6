"""The dotted names of a summary's numbers, as a ``compare`` section takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.profiler.storage.strict import did_you_mean
from sarathi_sim.simulator.views.metric_registry import METRICS


def _shape() -> dict[str, Any]:
    """Zeros where a summary has numbers."""
    shape: dict[str, Any] = {}
    steady: dict[str, Any] = {"state": ""}
    for metric in METRICS.values():
        value: Any = 0 if metric.whole else 0.0
        if metric.statistics:
            value = dict.fromkeys(metric.statistics, 0.0)
        if metric.key.startswith("steady."):
            steady[metric.key.removeprefix("steady.")] = value
        elif metric.in_summary:
            shape[metric.key] = value
        if metric.grows:
            steady[metric.key] = value
    return shape | {"steady": steady}


SHAPE: dict[str, Any] = _shape()
"""The keys of :meth:`sarathi_sim.simulator.views.metrics.Analysis.summary`: what can be asked for
before a run.

Bands and warnings, which a run adds, are no numbers to compare."""


def metric(summary: Mapping[str, Any], path: str, where: str) -> float:
    """The number at a dotted path. Raises ConfigError, naming ``where``, if there is none."""
    node: Any = summary
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            allowed = list(node) if isinstance(node, Mapping) else ["nothing below a number"]
            raise ConfigError(
                f"{where}: value {path!r}: {part} is not one of {', '.join(allowed)}"
                f"{did_you_mean(part, allowed)}"
            )
        node = node[part]
    if not isinstance(node, int | float):
        below = [f"{path}.{key}" for key in node] if isinstance(node, Mapping) else []
        raise ConfigError(
            f"{where}: value {path!r}: is not a number"
            + (f"; one of {', '.join(below)}" if below else "")
        )
    return float(node)
