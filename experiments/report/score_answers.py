"""The answers about one's own server: score, tune, fit, support; and the lists of what ships."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.check import Checked
from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.facts.device import list_devices, load_device
from sarathi_sim.profiler.facts.formats import WEIGHT_DTYPES
from sarathi_sim.profiler.facts.model import list_models, load_model
from sarathi_sim.profiler.facts.ops import op_label, op_of
from sarathi_sim.profiler.kernels.stack_file import load_stack, stacks_on, versions_on
from sarathi_sim.profiler.physics.shard_times import KINDS
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.simulator.confidence.bands import Band, coverage, fit_band
from sarathi_sim.simulator.confidence.held_out import OpTable, held_out_errors, op_tables
from sarathi_sim.simulator.views.metric_registry import METRICS, known, number_text
from ..config.policy import POLICIES
from ..config.scenario import parameter
from ..measured.replay import COUNTS, MEASURES, NUMBERS, VARIANTS, number_at
from ..measured.score import HOST, ScoredRun
from ..measured.tune import NOISE
from ..results import FITS_FORMAT, result_folder, write_summary
from ..run.compare import part_label
from ..run.support import FAMILIES, ITERATION, SEQUENCE, SHARE, Combination
from .charts import bars, cumulative
from .draw import draw_all
from .palette import BLACK, BLUE, GREEN, PURPLE, VERMILION, Style, line_styles
from .section import (
    Axis,
    Chart,
    Result,
    Section,
    Series,
    Table,
    first_upper,
    read_section,
    sentence,
    table,
    thinned,
)

SETTLED, OPEN = 0.6, 0.2
"""A constant is settled, or still open, if the runs tell so much of it."""
DOUBTFUL_PCT = 20
"""An error after the fit beyond which the calibration is doubted."""
SMALLEST_S = 0.005
"""Parts of the latency below this are not shown."""
CHECKED = (
    *(f"{key}.{each}" for key in MEASURES for each in ("mean", "p50", "p99")),
    "output_tokens_per_s",
)
"""The numbers of a run in the first table."""


def score_section(content: Mapping[str, Any], name: str = "") -> Section:
    """Of what ``score --json`` prints: what was predicted before the runs beside what was measured,
    inside the 90 % band or not; then every simulation of them."""
    runs = content["runs"]
    checks = [
        (run, path, one)
        for run, found in runs.items()
        for path in CHECKED
        if (one := found["check"].get(path))
    ]
    missed = [each for each in checks if not each[-1]["inside"]]
    run, path, worst = max(missed or checks, key=lambda each: abs(_off_pct(each[-1])))
    far = f"{number_text(worst['predicted'])} predicted, {number_text(worst['measured'])} measured"
    parts = {
        "inside the 90 % band": f"{len(checks) - len(missed)} of {len(checks)} numbers",
        "largest error": f"{known(path).axis}{f' of {run}' if len(runs) > 1 else ''}: {far}",
    }
    rows = [
        ({} if len(runs) == 1 else {"run": run})
        | {"metric": known(path).axis, "predicted": f"{one['predicted']:.4g}"}
        | {"measured": f"{one['measured']:.4g}", "error": f"{_off_pct(one):+.1f} %"}
        | {"90 % band": "{:.4g} to {:.4g}".format(*one["band"])}
        | {"in band": "yes" if one["inside"] else "no"}
        for run, path, one in checks
    ]
    note = "Predicted with the shipped constants of the stack, or those of the configuration."
    details = [
        beside_table(run, found["measured"], variants_of(found), NUMBERS)
        for run, found in runs.items()
    ]
    first = table("Predicted and measured", rows, 1 + (len(runs) > 1), note)
    tables = (first, *details, _lacking(runs))
    return Section(
        kind="score",
        name=name,
        question="Does my server do what was predicted?",
        answer=sentence(parts),
        assumed=[
            *dict.fromkeys(f"90 % bands: {_of_bands(found)}" for found in runs.values()),
            *thinned(note for found in runs.values() for note in found["zero"]["notes"]),
        ],
        warnings=[found["too_fast"] for found in runs.values() if found["too_fast"]],
        tables=[grid for grid in tables if grid.rows],
    )


def _off_pct(check: Mapping[str, Any]) -> float:
    off: float = 100 * (check["predicted"] / check["measured"] - 1)
    return off


def _of_bands(run: Mapping[str, Any]) -> str:
    errors, host = run["stack_error"], f"errors of op times, host times by a factor of {HOST:g}"
    if errors is None:
        return f"{host}; servers without a stack were not measured: their error is not in it"
    own = " and ".join(f"{100 * sigma:.0f} % of {name.upper()}" for name, sigma in errors.items())
    return f"{host}, and the further error of servers of the stack (standard deviations {own})"


def variants_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The simulations of a recorded run, by what they are shown as."""
    return {label: run[key] for key, label in VARIANTS.items() if "off_pct" in run.get(key, {})}


def beside_table(
    title: str, measured: Mapping[str, Any], simulated: Mapping[str, Any], paths: Iterable[str]
) -> Table:
    """A row a number: what was measured, and each simulation with how far it is off."""
    rows = []
    for path in paths:
        off = [
            f"{_number(one, path)} ({_number(one['off_pct'], path, '{:+.1f} %')})"
            for one in simulated.values()
        ]
        rows.append((known(path).axis, _number(measured, path), *off))
    for key, label in COUNTS.items():
        counts = [number_text(one[key]) for one in simulated.values() if key in one]
        rows += [(label, "not recorded", *counts)] if counts else []
    note = "'Fitted to these runs' knows the run, the other simulations do not."
    return Table(title, ("", "measured", *(f"{name} (error)" for name in simulated)), rows, note)


def _number(numbers: Mapping[str, Any], path: str, form: str = "{:.4g}") -> str:
    return "-" if (value := number_at(numbers, path)) is None else form.format(value)


def _lacking(runs: Mapping[str, Any]) -> Table:
    rows = []
    for name, run in runs.items():
        remains = run["remains"]
        parts = ", ".join(
            f"{part_label('mean_latency', part)} {value:+.3f}"
            for part, value in sorted(remains["parts"].items(), key=lambda one: -abs(one[1]))
            if abs(value) >= SMALLEST_S
        )
        keys = ("latency_s", "host", "frontend", "first_token", "later_tokens")
        rows.append((name, parts, *(f"{remains[key]:+.3f}" for key in keys)))
    what = ("total", "host, fitted", "frontend, fitted", "first token", "later tokens")
    title = "Mean latency that is missing without host time (s)"
    return Table(title, ("run", "parts of the host", *what), rows, text=2)


def tune_section(content: Mapping[str, Any], name: str = "") -> Section:
    """Of what ``tune --json`` prints."""
    runs, settled = content["runs"], content["known"]
    names = {key: parameter(f"engine.{key}").name for key in settled}
    after, before = (
        {m: max(abs(run[m][when]) for run in runs.values() if m in run) for m in NOISE
         if any(m in run for run in runs.values())}
        for when in ("after_pct", "before_pct")
    )  # fmt: skip
    next_runs = sorted(content["next_runs"].items(), key=lambda one: -one[1])
    parts = {"fitted to": ", ".join(runs)}
    parts |= {
        METRICS[m].name: f"error of at most {after[m]:.1f} % (before {before[m]:.1f} %)"
        for m in after
    }
    parts |= {"next run": next_runs[0][0]} if next_runs else {}
    rows = [
        {"constant": names[key], "of the stack": _constant(key, content["before"])}
        | {"tuned": _constant(key, content["tuned"])}
        | {"known from the runs": "yes" if share >= SETTLED else "no" if share < OPEN else "partly"}
        for key, share in settled.items()
    ]
    note = "Constants that the runs do not determine stay near those of the stack."
    sample = "In sample: the constants were fitted to these runs. Other loads are less certain."
    headings = ("run", *(f"{METRICS[m].name}: measured, before, after" for m in NOISE))
    gains = [{"load": t, "information (nats)": f"{gain:.2f}"} for t, gain in next_runs]
    errors = [(run, *(_beside(of.get(m)) for m in NOISE)) for run, of in runs.items()]
    warnings = content["too_fast"] + [
        f"these runs do not separate {names[a]} from {names[b]}: their sum is reliable, each of "
        "them is not"
        for a, b in content["mixed_up"]
    ]
    warnings += [
        f"{METRICS[m].name} still has an error of {off:.0f} %: the configuration is not that of "
        "the server, or a part of the server is not modelled"
        for m, off in after.items()
        if off > DOUBTFUL_PCT
    ]
    return Section(
        kind="tune",
        name=name,
        question="With which constants does the simulation agree with this server?",
        answer=sentence(parts),
        command=content.get("command", ""),
        tables=[
            table("Constants", rows, note=note),
            Table("Measured and predicted means", headings, errors, sample),
            table("Information that a next run would give", gains),
        ],
        assumed=thinned(content["notes"]),
        warnings=warnings,
    )


def _constant(key: str, values: Mapping[str, float]) -> str:
    value = values[key]
    return f"{value:.3f}" if key in ("kernels", "links") else f"{1e3 * value:.3g} ms"


def _beside(one: Mapping[str, float] | None) -> str:
    if one is None:
        return ""
    off = (f"{one[key]:+.1f} %" for key in ("before_pct", "after_pct"))
    return ", ".join((f"{1e3 * one['measured_s']:.4g} ms", *off))


# Charts -----------------------------------------------------------------------------------------

_STYLES = {
    "measured": Style(BLACK, "-"),
    "zero": Style(BLUE, "--"),
    "configured": Style(GREEN, "-."),
    "fitted": Style(VERMILION, ":"),
    "left_out": Style(PURPLE, (0, (5, 1, 1, 1))),
}


def scored(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``score --out`` folder, of recorded runs or of the laboratory."""
    name = folder.resolve().name
    if "runs" not in found:
        return replace(read_section(folder), name=name)
    return replace(score_section(found, name), charts=[_latencies(found["runs"])])


def _latencies(runs: Mapping[str, Any]) -> Chart:
    """The errors of the mean latency, for the simulations that every run has."""
    latencies: dict[str, list[float]] = {}
    for run in runs.values():
        for label, one in variants_of(run).items():
            latencies.setdefault(label, []).append(one["off_pct"]["latency_s"]["mean"])
    whole = {label: each for label, each in latencies.items() if len(each) == len(runs)}
    looks = dict(zip(latencies, line_styles(), strict=False))
    colours = [looks[label].colour for label in whole]
    return bars("Mean latency", Axis("error of the mean latency (%)"), [*runs], whole, colours)


def run_distributions(scored: ScoredRun) -> list[Chart]:
    """A chart for each measure: the share of requests up to each time."""
    tables = {"measured": scored.case.run.requests}
    tables |= {name: each.requests for name, each in scored.simulated.items()}
    share = Axis("share of requests (%)", ends=(0.0, 1.0), shares=True)
    charts = []
    for key in MEASURES:
        scale, unit = (1e3, "ms") if key == "tpot_s" else (1.0, "s")
        series = [
            Series(
                "step",
                VARIANTS[name],
                *cumulative(scale * table[key].dropna()),
                *_STYLES[name],
            )
            for name, table in tables.items()
        ]
        title = METRICS[key].name
        charts.append(Chart(first_upper(title), Axis(f"{title} ({unit})"), share, series))
    return charts


# Fits of a bundle -------------------------------------------------------------------------------

CURVES = 5
"""Contexts of an attention op that are drawn."""
LEVELS = ("error", "warning", "note")


def fit_section(
    path: Path, checked: Checked, errors: pd.DataFrame | None, details: Sequence[Table] = ()
) -> Section:
    """What a bundle in ``path`` holds and the findings on it; with ``errors`` (:func:`describe`)
    those of its fits, too."""
    levels = {op: [f.level for f in checked.findings if f.where == op] for op in checked.coverage}
    coverage = [
        (op, there, ", ".join(dict.fromkeys(levels[op])) or "good")
        for op, there in checked.coverage.items()
    ]
    findings = Table("Contents", ("op", "measured points", "findings"), coverage, text=3)
    worst_first = sorted(checked.findings, key=lambda one: LEVELS.index(one.level))
    said = [f"{f.level}: {f.where}: {f.message}" for f in worst_first]
    question = f"How large are the errors of the bundle {path}?"
    if errors is None:
        wrong = (f.where for f in checked.findings if f.level == "error")
        answer = sentence({"cannot be used": ", ".join(dict.fromkeys(wrong))})
        return Section("fit", str(path), question, answer, [findings], warnings=said)
    headings = ("points", "median", "p95", "worst", "forest: median", "p95", "polynomial: median")
    rows = [
        (op, where, str(points), *("" if value != value else f"{value:.1f}" for value in percent))
        for op, where, points, *percent in errors.itertuples(index=False)
    ]
    title = "Error on held-out points, percent"
    of_ops = Table(title, ("op", "where", *headings, "p95", "in band"), rows, text=2)
    between = errors[errors["where"] == "between"].sort_values("median")
    answer = ""
    if len(between):
        op, _, _, median, p95, *_ = next(between.iloc[-1:].itertuples(index=False))
        of_worst = f"{op}, median {median:.1f} %, p95 {p95:.1f} %"
        covered = f"{between['covered'].mean():.0f} % of the points on average"
        answer = sentence({"largest error": of_worst, "inside the 90 % band": covered})
    return Section(
        "fit",
        str(path),
        question,
        answer,
        [of_ops, *details, findings],
        warnings=said,
    )


def describe(bundle: Bundle, progress: Progress) -> pd.DataFrame:
    """:func:`~sarathi_sim.simulator.confidence.held_out.held_out_errors`, and ``covered``: the
    share of the points inside that the 90 % band covers, in percent."""
    tables = op_tables(bundle)
    steps = 2 * len(tables)
    errors = held_out_errors(bundle, lambda done: progress("hold-outs", done, steps))
    errors["covered"] = np.nan
    for done, one in enumerate(tables):
        progress("hold-outs", len(tables) + done, steps)
        here = (errors["op"] == one.op) & (errors["where"] == "between")
        errors.loc[here, "covered"] = 100 * coverage(one)[1]
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
        charts = {one.op: [fit_chart(one, fit_band(one))] for one in op_tables(bundle)}
        heading = f"{meta.model}, TP {meta.tp}, {meta.device}"
        draw_all(charts, folder / "figures", progress, heading)


def fit_chart(table: OpTable, band: Band) -> Chart:
    """Points, fit and 90 % band of one op, a while beyond the range, on logarithmic axes."""
    size = table.points[:, 0]
    sizes = np.geomspace(
        max(float(size.min()), 1.0),
        4 * float(size.max()),
        400,
    )
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
    note = "Dotted: the largest measured size; beyond it the fit is an extrapolation."
    return Chart(
        op_label(table.op),
        along,
        up,
        series,
        note,
        edge=float(size.max()),
    )


def beyond_single_ops(bundle: Bundle) -> list[Table]:
    """Held-out errors of whole layers and of skewed decodes, each beside doing nothing; empty if
    the bundle has neither."""
    if not (len(bundle.mixed) or len(bundle.attn_decode_skew)):
        return []
    from sarathi_sim.simulator.op_times.interaction import interaction_errors, skew_errors
    from sarathi_sim.simulator.op_times.regression import bundle_times

    ops = bundle_times(bundle)
    layers, skewed, skew = interaction_errors(bundle, ops), skew_errors(bundle, ops), ops.skew
    groups = [(f"{kind} layer", rows) for kind, rows in layers.groupby("kind", sort=False)]
    limit = "" if skew.sequences == math.inf else f", to {skew.sequences:.0f} sequences"
    ways = {
        "sum": "sum of its ops",
        "measured": "whole layer",
        "mean": "mean context",
        "skew": f"{skew.share:.2f} of the way to the longest{limit}",
    }
    if len(skewed):
        groups.append(("skewed decodes", skewed))
    rows = []
    for what, errors in groups:
        for column in filter(ways.__contains__, errors.columns):
            percent = (f"{value:.1f}" for value in errors[column].quantile([0.5, 0.95, 1.0]))
            rows.append((what, ways[column], str(len(errors)), *percent))
    title = "Layers and skewed decodes: error on held-out points, percent"
    headings = ("what", "predicted as", "points", "median", "p95", "worst")
    return [Table(title, headings, rows, text=2)]


# What runs where ---------------------------------------------------------------------------------

#: Kinds of op times as the matrix writes them.
LETTERS = {"measured": "m", "interpolated": "i", "derived": "d", "modelled": "p"}
LEGEND = (
    f"A cell is the smallest layout that holds a sequence of {SEQUENCE:,} tokens beside the "
    f"weights, with {SHARE:.0%} of the memory and {ITERATION.tokens:,} tokens an iteration: GPUs "
    "of tensor parallelism, x pipeline stages. The letter says where GEMM and attention times come "
    "from: m: measured with this shape and these head counts; i: interpolated between measured "
    "ones; d: derived from the same chip with other memory, or borrowed from another GPU of the "
    "architecture; p: physics only, fitted to "
    "measurements. The number is the half-width in percent of the widest 90 % band of the layer's "
    "GEMMs. The stack that needs the fewest GPUs counts, then the most direct. -: refused."
)


def support_section(
    found: Sequence[Combination], model: str | None, device: str | None, dtype: str | None
) -> Section:
    """The answer for the cells of a model or a device; without either, the matrix of ``dtype``."""
    runs = [cell for cell in found if cell.memory is not None]
    if model is None and device is None:
        grid = matrix(found, dtype or WEIGHT_DTYPES[0])
        broken = [name.replace("-", "\n") for name in grid.headings]  # for a narrow terminal
        return _section(found, [by_device(found), replace(grid, headings=broken)])
    tables = [details(runs)]
    if model and device:
        tables += [grid for cell in runs for grid in _of_cell(cell)]
    return _section(found, [grid for grid in (*tables, _refusals(found)) if grid.rows] or tables)


def _pairs(cells: Iterable[Combination]) -> set[tuple[str, str]]:
    return {(cell.model.name, cell.device.name) for cell in cells}


def _section(found: Sequence[Combination], tables: Sequence[Table]) -> Section:
    every, runs = _pairs(found), _pairs(cell for cell in found if cell.memory is not None)
    parts = {"pairs of a model and a device that run": f"{len(runs)} of {len(every)}"}
    if len(every) == 1:
        ((model, device),) = every
        least = min((math.prod(cell.memory[0]) for cell in found if cell.memory), default=0)
        gpus = f"at least {least} GPU{'s' * (least > 1)}" if least else "does not run"
        parts = {f"{model} on {device}": gpus}
    return Section("support", "models", "What runs where?", sentence(parts), tables)


def _grid(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> Table:
    return Table(title, headings, rows, note, text=len(headings))


def matrix(found: Sequence[Combination], dtype: str) -> Table:
    """Models by devices in one number format of the weights."""
    devices = list(dict.fromkeys(cell.device.name for cell in found))
    best: dict[tuple[str, str], Combination] = {}
    for cell in found:
        key = cell.model.name, cell.device.name
        if cell.dtype == dtype and cell.memory is not None:
            best[key] = min(best.get(key, cell), cell, key=_rank)
    used = [name for name in devices if any(key[1] == name for key in best)]
    models = dict.fromkeys(cell.model.name for cell in found)
    rows = [(m, *(_short(best.get((m, d))) for d in used)) for m in models]
    note = LEGEND if dtype == WEIGHT_DTYPES[0] else ""
    return _grid(f"Models, {dtype}", ("model", *used), rows, note)


def _rank(cell: Combination) -> tuple[int, int, float]:
    assert cell.memory is not None
    tp, pp = cell.memory[0]
    return tp * pp, KINDS.index(cell.kind), cell.off_pct["GEMM"]


def _short(cell: Combination | None) -> str:
    if cell is None or cell.memory is None:
        return "-"
    return f"{_layout(cell)}{LETTERS[cell.kind]} {cell.off_pct['GEMM']:.0f}"


def _layout(cell: Combination) -> str:
    assert cell.memory is not None
    tp, pp = cell.memory[0]
    return f"{tp}" if pp == 1 else f"{tp}x{pp}"


def by_device(found: Sequence[Combination]) -> Table:
    """The measurements of each device: stacks, versions, number formats."""
    rows = []
    for device, stack in dict.fromkeys((cell.device.name, cell.stack) for cell in found):
        mine = [c for c in found if (c.device.name, c.stack) == (device, stack)]
        dtypes = [d for d in WEIGHT_DTYPES if any(c.dtype == d and c.sources for c in mine)]
        kernels = load_stack(device, stack)[0].kernels if stack else {}
        of_nccl = {fit.version for name, fit in kernels.items() if "nccl" in name}
        versions = {fit.version for fit in kernels.values()} - of_nccl
        versions |= {*versions_on(device, stack)} if stack else set()
        degrees = sorted({tp for cell in mine for tp in cell.sources})
        used = (", ".join(some) or "-" for some in (dtypes, map(str, degrees)))
        kernels_of = ", ".join([*sorted(versions), *(f"NCCL {v}" for v in sorted(of_nccl))]) or "-"
        runs = str(len({c.model.name for c in mine if c.memory}))
        rows.append((device, stack or "(calibrated)", kernels_of, *used, runs))
    return _grid("Devices", ("device", "kernels of", "versions", "dtypes", "TP", "models"), rows)


def details(found: Iterable[Combination]) -> Table:
    """A row for every cell that runs."""
    rows = []
    for cell in (one for one in found if one.memory is not None):
        off = (f"{cell.off_pct[f]:.0f}" if f in cell.off_pct else "-" for f in FAMILIES)
        where = (cell.model.name, cell.device.name, cell.stack or "(calibrated)", cell.dtype)
        lists = (", ".join(some) for some in (cell.caches, map(str, sorted(cell.sources))))
        rows.append((*where, *lists, _layout(cell), cell.kind, *off))
    half_widths = (f"{family} ±%" for family in FAMILIES)
    about = ("model", "device", "stack", "dtype", "KV cache", "TP", "smallest", "op times")
    return _grid("Layouts and op times", (*about, *half_widths), rows)


def _of_cell(cell: Combination) -> list[Table]:
    assert cell.memory is not None
    (tp, pp), memory = cell.memory
    title = f"{cell.kernels.name if cell.kernels else 'calibrated device'}, tp {tp}, pp {pp}"
    ops = [(op, f"{one.half_width_pct:.1f}", one.mark) for op, one in cell.origins.items()]
    parts = [(name, f"{size / 1e9:.2f}", how) for name, size, how in memory.parts()]
    memory_rows = _grid(title, ("per GPU", "GB", "origin"), parts)
    return [_grid(title, ("op", "±%", "from"), ops), memory_rows]


def _refusals(found: Iterable[Combination]) -> Table:
    """Reasons for refusals, each with its TP degrees and models."""
    models: dict[tuple[str, str], dict[str, None]] = {}
    for cell in found:
        for reason, degrees in cell.refused.items():
            key = reason, ", ".join(map(str, degrees))
            models.setdefault(key, {})[cell.model.name] = None
    rows = [(reason, tps, ", ".join(names)) for (reason, tps), names in models.items()]
    return _grid("Refused", ("refused because", "TP", "models"), rows)


# What ships --------------------------------------------------------------------------------------


def models() -> Result:
    """Every shipped model: its fields by name, and a row of the most asked."""
    specs = {name: load_model(name) for name in list_models()}
    counted = ("num_parameters", "active_parameters")
    content = {n: asdict(m) | {key: getattr(m, key) for key in counted} for n, m in specs.items()}
    rows = [
        (
            *(name, f"{m.num_parameters / 1e9:.2f}", f"{m.active_parameters / 1e9:.2f}"),
            *(m.moe_dtype or m.dtype, str(m.num_layers), str(m.hidden_size)),
            *(f"{m.num_heads}/{m.num_kv_heads}", str(m.max_position_embeddings)),
            f"{m.kv_bytes_per_token() / 1024:.0f}",
        )
        for name, m in specs.items()
    ]
    headings = ("10^9 parameters", "active", "weights", "layers", "hidden", "heads/KV", "context")
    return _listed("models", content, (*headings, "KV KiB/token"), rows)


def devices() -> Result:
    """Every shipped device: its data sheet, and where its op times come from."""
    specs = {name: load_device(name) for name in list_devices()}
    stacks = {name: stacks_on(name) for name in specs}
    content = {
        name: asdict(replace(spec, fitted=None))
        | {"fitted": bool(spec.fitted), "stacks": stacks[name]}
        for name, spec in specs.items()
    }
    rows = [
        (
            *(name, f"{one.memory_bytes / 1e9:.0f}", f"{one.peak_flops / 1e12:.0f}"),
            *(f"{one.memory_bandwidth / 1e9:.0f}", str(one.gpus_per_node)),
            ", ".join(["calibrated"] * bool(one.fitted) + ["by stack"] * bool(stacks[name])),
            ", ".join(stacks[name]) or "-",
        )
        for name, one in specs.items()
    ]
    headings = ("GB", "peak TFLOP/s", "GB/s", "GPUs per node", "op times", "stacks")
    return _listed("devices", content, headings, rows)


def policies() -> Result:
    """Every scheduling policy, with the keys of its section and their defaults."""
    content, rows = {}, []
    for name, policy in POLICIES.items():
        about = " ".join((policy.__doc__ or "").split())
        keys = {key: one for key, one in policy.model_fields.items() if key != "name"}
        content[name] = {"about": about, "keys": {key: one.default for key, one in keys.items()}}
        defaults = (f"{k}={f.default}{_others(f.annotation, f.default)}" for k, f in keys.items())
        rows.append((name, ", ".join(defaults) or "-", about))
    return _listed("policies", content, ("keys and defaults", "what it does"), rows)


def _listed(
    what: str, content: Mapping[str, Any], headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> Result:
    listed = _grid("", ("name", *headings), rows)
    question, answer = f"Which {what} are shipped?", sentence({"shipped": str(len(rows))})
    return Result(content, Section("list", what, question, answer, [listed]))


def _others(annotation: object, default: object) -> str:
    """The other values a key may have, where they can be listed."""
    if get_origin(annotation) is not Literal:
        return ""
    others = [str(value) for value in get_args(annotation) if value != default]
    return f" (or {', '.join(others)})" if others else ""
