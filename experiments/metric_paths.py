"""The dotted names of a summary's numbers, as a ``compare`` section takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.errors import ConfigError
from experiments.messages import suggest
from simulator.ledger import ACCOUNTS
from simulator.metrics import QUANTILES

_QUANTILES = {f"p{round(100 * q)}": 0.0 for q in QUANTILES}
_SPREAD = {"mean": 0.0, **_QUANTILES}

SHAPE: dict[str, Any] = {
    "requests": 0,
    "finished": 0,
    "rejected": 0,
    "makespan_s": 0.0,
    "requests_per_s": 0.0,
    "tokens_per_s": 0.0,
    "output_tokens_per_s": 0.0,
    "mfu": 0.0,
    "gpus": 0,
    "iterations": 0,
    "stage_executions": 0,
    "mean_batch": 0.0,
    "kv_peak_share": 0.0,
    "tbt_s": _QUANTILES,
    "queueing_s": _SPREAD,
    "ttft_s": _SPREAD,
    "tpot_s": _SPREAD,
    "latency_s": _SPREAD,
    "bubble_s": _SPREAD,
    "bubble_share": 0.0,
    "ledger_s": dict.fromkeys(("wall", *ACCOUNTS), 0.0),
}
"""The keys of :meth:`simulator.metrics.Analysis.summary`: what can be asked for before a run.

Bands and warnings, which a run adds, are no numbers to compare."""


def metric(summary: Mapping[str, Any], path: str, where: str) -> float:
    """The number at a dotted path. Raises ConfigError, naming ``where``, if there is none."""
    node: Any = summary
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            allowed = list(node) if isinstance(node, Mapping) else ["nothing below a number"]
            raise ConfigError(
                f"{where}: value {path!r}: {part} is not one of {', '.join(allowed)}"
                f"{suggest(part, allowed)}"
            )
        node = node[part]
    if not isinstance(node, int | float):
        raise ConfigError(
            f"{where}: value {path!r}: is not a number; "
            f"one of {', '.join(f'{path}.{key}' for key in node)}"
        )
    return float(node)
