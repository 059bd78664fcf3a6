"""The errors of a bundle's fit: a table, and a figure per op with points, fit and band."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.facts.ops import op_of
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.simulator.confidence.bands import Band, coverage, fit_band
from sarathi_sim.simulator.confidence.held_out import OpTable, held_out_errors, op_tables
from ..results import FITS_FORMAT, result_folder, write_summary
from .draw import draw_all
from .palette import line_styles
from .section import Axis, Chart, Series

CURVES = 5
"""Contexts of an attention op that are drawn."""


def describe(bundle: Bundle, progress: Progress) -> pd.DataFrame:
    """:func:`~sarathi_sim.simulator.confidence.held_out.held_out_errors`, and ``covered``: the
    share of the points inside that the 90 % band covers, in percent."""
    tables = op_tables(bundle)
    steps = 2 * len(tables)
    errors = held_out_errors(bundle, lambda done: progress("hold-outs", done, steps))
    errors["covered"] = np.nan
    for done, table in enumerate(tables):
        progress("hold-outs", len(tables) + done, steps)
        here = (errors["op"] == table.op) & (errors["where"] == "between")
        errors.loc[here, "covered"] = 100 * coverage(table)[1]
    return errors


def write_fits(bundle: Bundle, errors: pd.DataFrame, out: Path, progress: Progress) -> None:
    """``errors.csv``, ``summary.json`` and ``figures/<op>.png`` and ``.svg``, whole or not at all.

    Raises UserError where ``out`` holds something else.
    """
    meta = bundle.meta
    with result_folder(out, FITS_FORMAT) as folder:
        errors.to_csv(folder / "errors.csv", index=False, float_format="%.4g")
        content = {
            "bundle": {"device": meta.device, "model": meta.model, "tp": meta.tp,
                       "content_sha256": meta.content_sha256},
            "errors_percent": errors.to_dict("records"),
        }  # fmt: skip
        write_summary(folder, FITS_FORMAT, content)
        charts = {table.op: [fit_chart(table, fit_band(table))] for table in op_tables(bundle)}
        draw_all(
            charts,
            folder / "figures",
            progress,
            f"{meta.model}, TP {meta.tp}, {meta.device}",
        )


def fit_chart(table: OpTable, band: Band) -> Chart:
    """Points, fit and 90 % band of one op, a while beyond the range, on logarithmic axes."""
    size = table.points[:, 0]
    sizes = np.geomspace(max(float(size.min()), 1.0), 4 * float(size.max()), 400)
    grid = np.unique(np.round(sizes)).astype(np.float64)
    label, *others = (size.axis for size in op_of(table.op).sizes)
    curves: list[float | None] = [None]
    if table.points.shape[1] == 2:
        contexts = np.unique(table.points[:, 1])
        curves = contexts[np.linspace(0, len(contexts) - 1, CURVES).astype(int)].tolist()
    fit = table.fit(table.points, table.time_s)
    far = table.far(table.points, table.time_s)
    series = []
    for context, style in zip(curves, line_styles(), strict=False):
        fixed = [] if context is None else [np.full(len(grid), context)]
        wanted = np.stack([grid, *fixed], axis=1)
        time = 1e6 * (far if context is None else fit)(wanted)
        half = band.half_widths(table, wanted)
        ends = (time * np.exp(-half), time * np.exp(half))
        name = "fit, 90 % band" if context is None else f"{others[0]} {context:.0f}"
        series.append(Series("line", name, grid, time, *style, ends=ends))
    drawn = [context for context in curves if context is not None]
    own = np.isin(table.points[:, -1], drawn) if drawn else np.full(len(size), fill_value=True)
    series.append(Series("points", "points", size[own], 1e6 * table.time_s[own]))
    along, up = Axis(f"{label}, log scale", log=True), Axis("time (µs), log scale", log=True)
    return Chart(table.op, along, up, series, edge=float(size.max()))
