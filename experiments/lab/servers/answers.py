"""The answers of lab score, lockstep, validate and accuracy: from numbers to sections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sarathi_sim.simulator.views.metric_registry import number_text
from ...report.section import Section, Table, enumerated
from ..engines.lockstep import Replay
from .errors import DRAFTED, TOO_WIDE
from .host import BASE, ONE_MODEL_OUT, TRIPLE_OUT
from .rows import METRICS, SCORED

Content = Mapping[str, Any]
"""What a command prints with ``--json``, or a part of it."""
KINDS = {"dense models": "class dense", "mixtures of experts": "class mixture of experts"}
"""Their groups: rows without flags."""
_ERRORS = (
    "TTFT, TPOT: mean / median absolute error in percent. Bias: the mean signed one, positive "
    "where predictions are too slow. In band: measured values inside the 90 % band, and the 95 % "
    "interval of that share, were servers drawn again. Zero-fit: "
    "without any constant fitted to such rows. Flagged rows are doubtful: the column flags of the "
    "table says why. They are in no other group, and in no fit."
)
_CONSTANTS = {
    "host_iteration_s": (1e3, ".2f", "ms an iteration"),
    "host_sequence_s": (1e3, ".4f", "ms a sequence"),
    "frontend_s": (1e3, ".1f", "ms a request"),
    "frontend_token_s": (1e6, ".1f", "us a prompt's token"),
    "launch_s": (1e6, ".0f", "us a launch"),
}
"""A constant's factor, digits and heading."""


def servers_answer(content: Content) -> Section:
    """Of what a score of servers prints with ``--json``, or one of MLPerf's runs."""
    if "mlperf" in content:
        return _mlperf_answer(content)
    groups = {group: one for group, one in content["groups"].items() if one["n"]}
    wide, drawn = content.get("too_wide", 0), content.get("bands", {})
    answer = f"{content['answered'] + wide:,} of {content['rows']:,} rows have a prediction"
    answer += f" ({wide:,} with {TOO_WIDE})" if wide else ""
    if which := next((name for name in ("all", DRAFTED, "flagged") if name in groups), ""):
        whose = f" of the {groups[which]['n']:,} that are {'not ' * (which == 'all')}flagged"
        off = {m.upper(): groups[which][m]["median"] for m in METRICS}
        median = " and ".join(f"{error:.1f} % for {name}" for name, error in off.items())
        answer += f"; the median error{whose * ('flagged' in groups)} is {median}"
    again = "{rows} rows with a full KV cache were simulated again under {draws}"
    notes = {"host time": content.get("constants")}
    notes["host time of mixtures of experts"] = content.get("constants_of_mixtures")
    if drawn:
        joint = f"{drawn['draws']} joint draws of op errors, host time and the stack's error; "
        notes["90 % bands"] = joint + again.format(**drawn["redrawn"])
    table, *details = (_errors_table(*each) for each in _tables(content))
    for kind, key in zip(KINDS, ("host_time", "host_time_of_mixtures"), strict=True):
        hosts = content.get(key, {})
        of = {n: it for n, it in _CONSTANTS.items() if any(host.get(n) for host in hosts.values())}
        rows = [
            (stack, *(f"{factor * host[n]:{digits}}" for n, (factor, digits, _) in of.items()))
            for stack, host in hosts.items()
        ]
        headings = ("stack", *(heading for _, _, heading in of.values()))
        details.append(Table(f"Host time fitted, {kind}", headings, rows))
    refused = [(reason, f"{count:,}") for reason, count in content["refused"].items()]
    details.append(Table("Rows without a prediction", ("reason", "rows"), refused))
    return Section(
        kind="score",
        name="",
        question="How far are predictions of TTFT and TPOT from measured servers?",
        answer=f"{answer}.",
        assumed=[f"{topic}: {text}" for topic, text in notes.items() if text],
        tables=[replace(table, note=_ERRORS), *(grid for grid in details if grid.rows)],
    )


def _percent(share: float | None, half_width: float | None = None) -> str:
    known = "" if half_width is None else f" ± {half_width:.0f}"
    return "" if share is None else f"{share:.0f}{known} %"


def _errors_table(title: str, rows: Iterable[tuple[str, Content]], columns: Sequence[str]) -> Table:
    """A row for each group that holds rows. A column is ``METRIC``, ``METRIC in band``, or
    ``METRIC, PART``: a key of the group's, or of the metric's."""

    def cell(group: Content, column: str) -> str:
        metric, _, part = column.lower().partition(", ")
        one = group.get(part, group).get(metric.removesuffix(" in band"))
        if one is None:
            return ""
        if metric.endswith(" in band"):
            return _percent(one.get("coverage"), one.get("coverage_pm"))
        form = {"p90": "{p90:.1f}", "bias": "{bias:+.1f}"}.get(part, "{mape:.1f} / {median:.1f}")
        return form.format(**one)

    cells = [
        (name, f"{of['n']:,}", *(cell(of, c) for c in columns)) for name, of in rows if of["n"]
    ]
    return Table(title, ("group", "rows", *columns), cells)


def _tables(
    content: Content,
) -> Iterator[tuple[str, Iterable[tuple[str, Content]], Sequence[str]]]:
    """Title, groups and columns of each table of errors, that of all groups first."""
    groups, variants = content["groups"], content.get("variants", {})
    zero, peers = variants.get(BASE, {}), content.get("peers", {}).items()
    both = [(name, {**one, "zero-fit": zero.get(name, {})}) for name, one in groups.items()]
    parts = ("", ", p90", ", bias", " in band", ", zero-fit")
    yield "Errors by group", both, [f"{m.upper()}{part}" for m in METRICS for part in parts]
    more = [m for m in SCORED if m not in METRICS and any(one.get(m) for one in groups.values())]
    columns = [f"{metric}{part}" for metric in more for part in ("", " in band")]
    yield "Latency and throughput", groups.items() if more else (), columns
    of = ("TTFT", "TPOT", "latency")
    columns = [*of, *(f"{name} in band" for name in of)]
    for kind, which in KINDS.items():
        if not zero.get(which, {"n": 0})["n"]:
            continue
        league = [
            ("ours, nothing fitted to such rows", zero[which]),
            ("ours, fitted to other servers (cross-validated)", groups[which]),
        ]
        for path, peer in peers:
            one = peer["groups"][which]
            names = {"theirs": f"{Path(path).stem}, on the rows that it answers"}
            names["ours"] = "ours on those, cross-validated"
            names[TRIPLE_OUT] = "ours on those, without the row's model, GPU and engine"
            league += [(name, one[side]) for side, name in names.items() if side in one]
        yield f"League, {kind}", league, ("TTFT", "TPOT")
        fits = {name.replace("_", " "): of[which] for name, of in variants.items() if name != BASE}
        yield f"Left out of the fit, {kind}", fits.items(), columns
        models = {} if "classes" in content else variants.get(ONE_MODEL_OUT, {})
        alone = [(name, one) for name, one in models.items() if name.startswith("model ")]
        yield f"Each model left out, {kind}", alone, columns
    for path, peer in peers:
        columns = [f"{m.upper()}, {side}" for m in METRICS for side in ("ours", "theirs")]
        yield f"Errors beside {Path(path).name}", peer["groups"].items(), columns


def _mlperf_answer(content: Content) -> Section:
    said, runs = content["mlperf"], content["runs"]
    stopped, proven = said["stopped_at_a_limit"], said["proven"]
    columns = {f"{m}_ms_{s}": f"{m.upper()} {s}" for m in METRICS for s in ("mean", "p99")}
    capacities, latencies, form = [], [], "{} [{}, {}]"
    for id, one in runs.items():
        predicted = {k: form.format(*map(number_text, of)) for k, of in one["predicted"].items()}
        both = (f"{number_text(one['measured'][key])} / {predicted[key]}" for key in columns)
        latencies.append((id, *both))
        numbers = (one["scenario"], f"{one['rate']:.4g}", f"{one['offline']:.4g}")
        over = f"{one['predicted']['capacity_per_s'][0] / one['rate']:.2f}"
        limits = (f"{one['limit'].upper()} at {one['stress']:.2f}", one["binds"].upper())
        right = "" if one["right"] else "missed"
        capacities.append((id, *numbers, predicted["capacity_per_s"], over, *limits, right))
    errors = []
    for group, of in said["latencies"].items():
        off = (f"{of[key]['mape']:.1f} ({of[key]['bias']:+.1f})" for key in columns)
        errors.append((group, str(of["ttft_ms_mean"]["rows"]), *off))
    refused = [(id, " ".join(why.split())) for id, why in content["refused"].items()]
    heading = ("run", "scenario", "rate (1/s)", "Offline (1/s)", "capacity (1/s)", "over rate")
    inside = said["in_band_pct"]
    return Section(
        kind="score",
        name="",
        question="What rate do MLPerf's audited systems sustain at their P99 limits?",
        answer=f"{said['answered']} of {said['rows']} runs have a prediction. Of "
        f"{stopped['rows']} that stopped at a limit, {stopped['within']} have a capacity of 0.95 "
        f"to 1.10 times their rate, {stopped['same_limit']} meet the same limit, and "
        f"{stopped['in_90']} lie in the 90 % interval fitted without their own system; of "
        f"{proven['rows']} others, {proven['within']} have one from 0.97 times their rate to 1.05 "
        "times Offline.",
        assumed=[
            "constants of TensorRT's engines: those of other systems (GPU, number, model)",
            "" if inside is None else f"90 % bands: hold {inside:.0f} % of the measured latencies",
        ],
        tables=[
            Table(
                "Capacity",
                (*heading, "nearest limit", "predicted limit", ""),
                capacities,
                "90 % bands in brackets. A run proves that its rate is sustained, and Offline is "
                "about the most; one whose P99 is at 0.9 of a limit or more stopped there.",
                text=2,
            ),
            Table(
                "Errors at the measured rate",
                ("group", "rows", *columns.values()),
                errors,
                "Mean absolute error and bias in percent.",
            ),
            Table(
                "Latencies at the measured rate",
                ("run", *(f"{label} (ms)" for label in columns.values())),
                latencies,
                "Measured / predicted [90 % band].",
            ),
            Table("Runs without a prediction", ("run", "reason"), refused, text=2),
        ],
    )


def lockstep_answer(logs: Mapping[str, Replay]) -> Section:
    """Decisions of ours beside those of engines, log by log."""
    rows = [(name, f"{one.decisions:,}", f"{one.identical:,}") for name, one in logs.items()]
    total = sum(one.decisions for one in logs.values())
    same = sum(one.identical for one in logs.values())
    differences = {name: one.first_difference for name, one in logs.items()}
    return Section(
        kind="lockstep",
        name=enumerated([*logs][:1]),
        question="Does our scheduler decide what the engine's decided?",
        answer=f"{len(logs)} logs, {same:,} of {total:,} decisions identical.",
        tables=[Table("Decisions", ("log", "decisions", "identical"), rows)],
        warnings=[f"{n}: first difference: {one}" for n, one in differences.items() if one],
    )


_VALIDATED = {
    "scheduling: batches identical": ("parity",),
    "prediction: iteration error, median": ("iteration_error_median",),
    "prediction: iteration error, p90": ("iteration_error_p90",),
    "the same from the grid alone, median": ("grid", "iteration_error_median"),
    "noise floor, repeat against repeat": ("noise_floor",),
    "whole: makespan error": ("makespan_error",),
    "the same from the profile of single ops": ("isolated", "makespan_error"),
    "the same with the launch of each layer": ("launched", "makespan_error"),
    "whole: throughput error": ("throughput_error",),
    "whole: total bubble error": ("bubble_error",),
    "whole: TTFT error, median": ("calibrated", "ttft_p50_error"),
    "replay of measured times: makespan error": ("replay", "makespan_error"),
    "spread of the measured makespan": ("makespan_spread",),
    "share of GEMMs, attention, all-reduces, LM head in the stages' time": ("op_share",),
}


def validation_answer(result: Content) -> Section:
    """Of ``validation.json``: the cells side by side, and what was missed or cannot be said."""
    cells, repeats = result["cells"], result["repeats"]
    fewest = result["gates"]["fewest_repeats"]
    texts = {what: [_cell_text(cell, keys) for cell in cells.values()]
             for what, keys in _VALIDATED.items()}  # fmt: skip
    rows = [[what, *row] for what, row in texts.items() if set(row) != {"-"}]
    ratios = []
    for name, of in result["ratios"].items():
        medians = (of[key]["median"] for key in ("measured", "calibrated"))
        ratios.append([name, *("-" if value is None else f"{value:.2f}" for value in medians)])
    met = [row["met"] for row in result["targets"]]
    verdict = "all targets that could be judged were met" if None in met else "all targets met"
    if missed := met.count(False):
        verdict = f"{missed} of {len(met)} targets are missed"
    same = sum(cell["parity"] == 1 for cell in cells.values())
    warnings = [
        f"{layout}: repeat {r['repeat']} rejected: {r['why']}"
        for layout, entry in repeats.items()
        for r in entry["rejected"]
    ]
    warnings += [
        "missed: {what} of {cell} is {value:+.1%}, and should be within {limit:.0%}".format(**row)
        for row in result["targets"]
        if row["met"] is False
    ]
    warnings += [
        f"{layout}: the machine was not quiet: {entry['accepted']} of {entry['run']} repeats were "
        f"accepted, fewer than {fewest}, so nothing is claimed of predicted times"
        for layout, entry in repeats.items()
        if not entry["quiet"]
    ]
    return Section(
        kind="validation",
        name=str(result["name"]),
        question="Does a real engine do what the simulator says?",
        answer=f"Batches are identical in {same} of {len(cells)} cells; {verdict}.",
        tables=[
            Table("Cells", ["", *cells], rows, "Medians over the accepted repeats."),
            Table("Ratios", ["ratio", "measured", "simulated"], ratios),
        ][: 1 + bool(ratios)],
        warnings=warnings,
    )


def _cell_text(cell: Content, keys: Sequence[str]) -> str:
    node: Any = cell
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    if isinstance(node, Mapping):
        node, ends = node["median"], (node["min"], node["max"])
        if node is not None and keys != ("op_share",):
            return "{:+.1%} ({:+.1%} to {:+.1%})".format(node, *ends)
    if node is None:
        return "-"
    return f"{node:.0%}" if keys in (("parity",), ("op_share",)) else f"{node:.1%}"


def accuracy_answer(content: Content) -> Section:
    """Of what ``accuracy --json`` prints."""
    scores, classes = content["scores"], content["classes"]
    judged = [score["met"] for score in scores if score["met"] is not None]
    title = "By class: medians of the scores, and why some miss"
    headings = ("what", "scores", "median %", "p95 %", "aim", "met by", "in band", "")
    rows = []
    for one in classes:
        covered = _percent(one["covered"])
        if one["covered_range"] and one["scores"] > 1:
            covered += " ({:.0f} to {:.0f})".format(*one["covered_range"])
        met = "" if one["met"] is None else f"{one['met']} of {one['scores']}"
        errors = (f"{one['median']:.1f}", f"{one['p95']:.1f}", _aim(one["aim"]))
        text = (one["group"], str(one["scores"]))
        rows.append((*text, *errors, met, covered, "; ".join(one["causes"])))
    return Section(
        kind="accuracy",
        name="accuracy",
        question="How far are the fitted op times off on rows that were not fitted?",
        answer=f"{sum(judged):,} of {len(judged):,} scores meet their aims.",
        tables=[scores_table(scores), Table(title, headings, rows)],
    )


def scores_table(scores: Iterable[Content]) -> Table:
    """A row a score, with its aim beside it, and why it misses one."""
    rows = []
    for score in scores:
        said = "" if score["aim"] is None else "met"
        if score["missed"]:
            said = f"missed {', '.join(score['missed'])}: {'; '.join(score['causes'])}"
        numbers = (f"{score['rows']:,}", f"{score['median']:.2f}", f"{score['p95']:.2f}")
        text = (score["what"], score["source"], score["fitted"])
        rows.append((*text, *numbers, _aim(score["aim"]), _percent(score["covered"]), said))
    text = ("what", "measured on", "fitted to")
    headings = (*text, "rows", "median %", "p95 %", "aim", "in band", "")
    return Table("Errors on rows that were not fitted", headings, rows, text=3)


def _aim(aim: Sequence[float] | None) -> str:
    return "" if aim is None else f"{aim[0]:g} / {aim[1]:g}"
