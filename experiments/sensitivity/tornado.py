"""A sensitivity as its result: an answer in words and a table, a tornado figure, files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sarathi_sim.experiments.capacity.curves import figure_files
from sarathi_sim.experiments.content import (
    Section,
    SortableTable,
    assumed_of,
    doubts_of,
    enumerated,
)
from sarathi_sim.experiments.figures.style import BLACK, BLUE, VERMILION, styled
from sarathi_sim.experiments.results import SUMMARY, json_bytes
from sarathi_sim.experiments.sensitivity.factors import Question
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from sarathi_sim.simulator.views.metric_registry import number_text

MOST_PANELS, MOST_BARS = 12, 14
HEADINGS = ("elasticity", "95 % interval")


def panels(content: Mapping[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of every deployment and measure, those that move it most first."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in content["rows"]:
        found.setdefault((row["deployment"], row["measure"]), []).append(row)
    return {
        key: sorted(rows, key=lambda row: -abs(row["elasticity"])) for key, rows in found.items()
    }


def title(content: Mapping[str, Any], deployment: str, measure: str) -> str:
    """What a panel is about, with the value that nothing was changed for."""
    (base,) = (d["base"][measure] for d in content["deployments"] if d["name"] == deployment)
    about = f"{deployment}: " if len(content["deployments"]) > 1 else ""
    return f"{about}{content['measures'][measure]}, {number_text(float(base))}"


def sides(content: Mapping[str, Any]) -> tuple[str, str]:
    """``-10 %`` and ``+10 %``."""
    by = f"{100 * content['by']:g} %"
    return f"-{by}", f"+{by}"


def sensitivity_answer(found: Mapping[str, Any]) -> Section:
    """The answer of what ``sensitivity`` found, as its ``summary.json`` has it: what each factor
    does to each measure of each deployment."""
    said = [_strongest(found, *key) for key in panels(found)]
    under = f" under the SLO {found['slo']}" if found["slo"] else ""
    rows = [
        [name, found["measures"][measure], row["factor"], row["kind"], *cells(row)]
        for (name, measure), some in panels(found).items()
        for row in some
    ]
    headings = ("deployment", "of what", "factor", "is a", *sides(found), *HEADINGS)
    note = (
        "Predicted. The elasticity is percent for a percent. docs/sensitivity.md says what each "
        "number is."
    )
    return Section(
        kind="sensitivity",
        name=str(found["name"]),
        question=f"What moves {enumerated(list(found['measures'].values()))}{under} most?",
        answer=f"{'; '.join(said)}." if said else "Nothing that was changed.",
        table=SortableTable("What each factor does", headings, rows, note, text=4),
        assumptions=assumed_of(found),
        about=str(found["description"] or ""),
        warnings=[*doubts_of(found), *found["warnings"]],
    )


def cells(row: Mapping[str, Any]) -> list[str]:
    """Both effects, the elasticity and its interval, as text."""
    interval = row["interval"]
    ends = "-" if interval is None else " to ".join(f"{end:+.2f}" for end in interval)
    return [f"{row['low_pct']:+.2f} %", f"{row['high_pct']:+.2f} %",
            f"{row['elasticity']:+.3f}", ends]  # fmt: skip


def _strongest(content: Mapping[str, Any], deployment: str, measure: str) -> str:
    """What moves a measure most."""
    rows = panels(content)[deployment, measure]
    single = [f"{r['factor']} ({r['elasticity']:+.2f})" for r in rows if r["kind"] != "ops"][:3]
    text = f"{title(content, deployment, measure)}: moves most with {', '.join(single)}"
    for row in rows:
        if row["kind"] == "ops":
            text += f"; with {row['factor']} together {row['elasticity']:+.2f}"
    return f"{text} (percent for a percent)"


def tornado_figure(content: Mapping[str, Any]) -> Figure:
    """A panel for each deployment and measure: how far each factor moves it, the farthest on
    top."""
    shown = list(panels(content).items())[:MOST_PANELS]
    columns = max(1, min(len(content["measures"]), len(shown)))
    lines = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(6.4 * columns, 5.2 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel in grid[len(shown) :]:
        panel.set_visible(False)
    for panel, (key, rows) in zip(grid, shown, strict=False):
        some = rows[:MOST_BARS][::-1]
        places = np.arange(len(some))
        looks = zip(("low_pct", "high_pct"), (BLUE, VERMILION), sides(content), strict=True)
        for side, colour, name in looks:
            panel.barh(places, [row[side] for row in some], 0.7, color=colour, label=name)
        panel.axvline(0.0, color=BLACK, linewidth=1.0)
        panel.set_yticks(places, [row["factor"] for row in some])
        panel.set(xlabel="change (%)", title=title(content, *key))
        panel.grid(visible=False, axis="y")
    if shown:
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def table_of(content: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each deployment, measure and factor."""
    rows = []
    for row in content["rows"]:
        low, high = row["interval"] or (None, None)
        plain = {key: value for key, value in row.items() if key != "interval"}
        rows.append({**plain, "interval_low": low, "interval_high": high})
    return pd.DataFrame(rows)


def sensitivity_files(asked: Question, content: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the result beside its runs."""
    draft = asked.draft
    header = draft.header.model_dump(include={"name", "description"})
    config = {**header, **draft.raw, "scenarios": draft.overrides}
    if not asked.measures:
        config["capacity"] = asked.section.model_dump(exclude_none=True)
    with styled():
        figures = figure_files({"tornado": tornado_figure(content)})
    return {
        SUMMARY: json_bytes(content),
        "sensitivity.csv": table_of(content).to_csv(index=False).encode(),
        "config.yaml": dump_yaml(config).encode(),
        **figures,
    }
