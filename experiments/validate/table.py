"""A validation's report as tables and in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from sarathi_sim.experiments.content import rich_table
from sarathi_sim.experiments.validate.cells import Cell
from sarathi_sim.experiments.validate.differences import Comparison
from sarathi_sim.experiments.validate.summary import FEWEST_REPEATS


def cells_table(cells: Sequence[Cell]) -> Table:
    """What a validation would run, side by side."""
    rows: dict[str, list[str]] = {
        "model": [cell.model.name for cell in cells],
        "this machine's": [cell.device for cell in cells],
        "policy": [cell.scenario.policy.name for cell in cells],
        "TP x PP": [f"{tp} x {pp}" for pp, tp in (cell.layout for cell in cells)],
        "sequences of a micro-batch": [str(cell.sequences) for cell in cells],
        "requests": [f"{len(cell.requests()):,}" for cell in cells],
    }
    return rich_table([""], [cell.name for cell in cells], [[k, *v] for k, v in rows.items()])


def table(result: Mapping[str, Any]) -> Table:
    """The cells side by side; medians over the accepted repeats, with their range."""
    rows = [
        [label, *(_cell_text(cell, keys) for cell in result["cells"].values())]
        for label, keys in _ROWS.items()
    ]
    rows = [row for row in rows if set(row[1:]) != {"-"}]
    for name, ratio in result["ratios"].items():
        both = (_ratio_text(ratio[key]["median"]) for key in ("measured", "calibrated"))
        rows.append([f"ratio {name}: measured / simulated", " / ".join(both)])
    return rich_table([""], list(result["cells"]), rows, title=result["name"], title_style="bold")


_ROWS = {
    "scheduling: batches identical": ("parity",),
    "prediction: iteration error, median": ("iteration_error_median",),
    "prediction: iteration error, p90": ("iteration_error_p90",),
    "the same from the grid alone, median": ("grid", "iteration_error_median"),
    "noise floor, repeat against repeat": ("noise_floor",),
    "whole: makespan error": ("makespan_error",),
    "the same from the profile of single ops": ("isolated", "makespan_error"),
    "whole: throughput error": ("throughput_error",),
    "whole: TTFT error, mean": ("ttft_error",),
    "whole: TPOT error, mean": ("tpot_error",),
    "whole: total bubble error": ("bubble_error",),
    "whole: TTFT error, median": ("calibrated", "ttft_p50_error"),
    "replay of measured times: makespan error": ("replay", "makespan_error"),
    "spread of the measured makespan": ("makespan_spread",),
    "share of GEMMs, attention, all-reduces, LM head in the stages' time": ("op_share",),
}


def iterations(outcomes: Mapping[str, Sequence[Comparison]]) -> pd.DataFrame:
    """Every micro-batch of every repeat, rejected ones included: measured and predicted seconds."""
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "cell": name,
                    "repeat": number,
                    "micro_batch": np.arange(len(outcome.kinds)),
                    "kind": outcome.kinds,
                    "measured_s": outcome.measured_iterations,
                    **{f"{key}_s": outcome.iterations[key] for key in outcome.iterations},
                }
            )
            for name, repeats in outcomes.items()
            for number, outcome in enumerate(repeats)
        ],
        ignore_index=True,
    )


def _cell_text(cell: Mapping[str, Any], keys: Sequence[str]) -> str:
    node: Any = cell
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    if node is None:
        return "-"
    if isinstance(node, Mapping):
        if node["median"] is None:
            return "-"
        if keys == ("op_share",):
            return f"{node['median']:.0%}"
        return f"{node['median']:+.1%} ({node['min']:+.1%} to {node['max']:+.1%})"
    return f"{node:.0%}" if keys == ("parity",) else f"{node:.1%}"


def _ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def verdict(result: Mapping[str, Any]) -> list[str]:
    """The conclusions in sentences, layout by layout."""
    lines = []
    for layout, entry in result["repeats"].items():
        lines += [f"{layout}: repeat {r['repeat']} rejected: {r['why']}" for r in entry["rejected"]]
    missed = [row for row in result["targets"] if row["met"] is False]
    lines += [
        f"missed: {row['what']} of {row['cell']} is {row['value']:+.1%}, "
        f"and should be within {row['limit']:.0%}"
        for row in missed
    ]
    lines += [
        f"{layout}: the machine was not quiet: {entry['accepted']} of {entry['run']} repeats were "
        f"accepted, fewer than {FEWEST_REPEATS}, so nothing is claimed of predicted times"
        for layout, entry in result["repeats"].items()
        if not entry["quiet"]
    ]
    unjudged = any(row["met"] is None for row in result["targets"])
    if not missed:
        lines.append("all targets that could be judged were met" if unjudged else "all targets met")
    return lines
