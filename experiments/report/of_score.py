"""The section of a score: measured servers, or recorded runs, beside their predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.content import Chart, Section
from sarathi_sim.experiments.figures.style import BLUE, ORANGE, line_styles
from sarathi_sim.experiments.measured.answers import score_answer, variants_of
from sarathi_sim.experiments.measured.servers import METRICS
from sarathi_sim.experiments.report.charts import paired_bars

_MOST_DRAWN = 40
_COLOURS = dict(zip(METRICS, (BLUE, ORANGE), strict=True))


def score_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``score --out`` folder."""
    section = score_answer(found, folder.resolve().name)
    chart = _latencies(found["runs"]) if "runs" in found else _medians(found["groups"])
    return replace(section, charts=[chart] if section.table.rows else [])


def _medians(groups: Mapping[str, Any]) -> Chart:
    drawn = dict([(name, one) for name, one in groups.items() if one["n"]][:_MOST_DRAWN])
    medians = {
        m.upper(): (_COLOURS[m], [one[m]["median"] for one in drawn.values()]) for m in METRICS
    }
    return Chart("Median error by group", paired_bars(list(drawn), medians, "error (%)"))


def _latencies(runs: Mapping[str, Any]) -> Chart:
    """The errors of the mean latency, for the simulations that every run has."""
    latencies: dict[str, list[float]] = {}
    for run in runs.values():
        for label, one in variants_of(run).items():
            latencies.setdefault(label, []).append(one["off_pct"]["latency_s"]["mean"])
    sides = {
        label: (style["color"], each)
        for (label, each), style in zip(latencies.items(), line_styles(), strict=False)
        if len(each) == len(runs)
    }
    return Chart("Mean latency", paired_bars([*runs], sides, "mean latency, off (%)"))
