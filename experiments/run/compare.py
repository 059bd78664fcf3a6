"""Results side by side: common figures of several, and the difference of two, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.profiler.facts.ops import ACCOUNTS
from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.explain import Explanation
from sarathi_sim.simulator.views.explain import explain as explanation
from sarathi_sim.simulator.views.metrics import Analysis, known, number_text
from ..config.deployment import Deployment, deploy
from ..config.loading import load_experiment
from ..report.section import Section, Table, assumed_of
from ..results import (
    FORMAT,
    SWEEP_FORMAT,
    Tables,
    no_run,
    read_summary,
    read_tables,
    to_json,
)
from .run_answer import SHOWN, shown_row, shown_value
from .run_answer import answer as side_by_side

_LABELS = {
    **ACCOUNTS,
    "frontend": "the engine's frontend",
    "queueing": "queueing",
    "prefill_attention": "attention of prompts, as if whole",
    "drafter": "the drafter's passes",
    "host": "the engine's host",
    "chunking": "chunking: attention beyond that",
    "mixing": "chunk and decodes in one batch",
    "jitter": "jitter",
    "sending": "sending (blocking)",
    "pb1": "PB1: prefills of different length",
    "pb2": "PB2: prefill next to decodes",
    "pb3": "PB3: decodes of different context",
    "equal": "bubbles between equal batches",
    "communication": "transfers not hidden",
    "turnaround": "scheduler turn-around",
    "slowest_rank": "waiting for the slowest rank",
    "fill": "pipeline fill",
    "drain": "pipeline drain",
    "no_work": "no work",
    "waiting_for_stages": "waiting for a busy stage",
    "between_iterations": "waiting for the next micro-batch",
}


@dataclass(frozen=True)
class Compared:
    """One of two compared runs: name, policy, its numbers, the parts of its time (None: it has two
    pools), served requests (prompt, output tokens), and the assumptions of its result."""

    label: str
    policy: str
    summary: Mapping[str, Any]
    parts: Explanation | None
    requests: tuple[bytes, ...]
    notes: tuple[str, ...]
    assumed: tuple[str, ...] = ()


def explain(folder: Path, progress: Progress = silent) -> Compared:
    """Simulate a result's configuration again and divide its time; that of two pools is not
    divided.

    ``folder`` is the folder of a run with one scenario, a scenario's folder in it, or ``runs/KEY``
    of a sweep. Raises UserError if it is none of these.
    """
    where, scenario = _find(folder)
    again = simulate_again(where, scenario, str(folder), progress)
    notes, deployment, analysis = list(again.notes), again.deployment, again.analysis
    if again.state == "overloaded":
        notes.append(
            f"{folder}: overloaded: its queue grows while requests arrive, so its mean latency "
            "depends on the length of the run"
        )
    records = analysis.records
    requests = tuple(
        np.ascontiguousarray(column).tobytes()
        for column in (records.prompt_tokens, records.output_tokens)
    )
    pools, stored = deployment.pools, read_summary(where)
    parts = explanation(analysis, deployment.predictor) if len(pools) == 1 else None
    if parts is None:
        notes.append(f"{folder}: two pools, whose time is not divided into parts: numbers only")
    policy, said = pools[-1].scenario.policy.name, stored.get("notes")
    assumed = tuple(said.get(scenario, ())) if isinstance(said, dict) else ()
    summary = stored["scenarios"][scenario]
    return Compared(str(folder), policy, summary, parts, requests, tuple(notes), assumed)


@dataclass(frozen=True, eq=False)
class SimulatedAgain:
    """A scenario of a result, simulated again. ``notes`` say if its makespan changed; ``state`` is
    whether the run is steady or overloaded."""

    deployment: Deployment
    analysis: Analysis
    state: str
    notes: tuple[str, ...]


def simulate_again(
    folder: Path, scenario: str, label: str, progress: Progress = silent
) -> SimulatedAgain:
    """Simulate a scenario of the result in ``folder`` from its ``config.yaml``.

    Raises UserError if the file cannot be read or the scenario cannot run.
    """
    experiment = load_experiment(folder / "config.yaml")
    if scenario not in experiment.scenarios:
        raise UserError(f"{folder}: the result is damaged: config.yaml lacks {scenario}")
    deployment = deploy(experiment.scenarios[scenario], experiment.sources[scenario])
    total = len(deployment.requests)
    analysis = Analysis(deployment.simulate(lambda done: progress(label, done, total)))
    summary = to_json(deployment.summary(analysis))
    notes = []
    stored = read_summary(folder)["scenarios"][scenario].get("makespan_s")
    if stored != summary["makespan_s"]:
        notes.append(
            f"{label}: simulated again, its makespan is {summary['makespan_s']:.6g} s, not "
            f"{stored}: profiles or code have changed since"
        )
    return SimulatedAgain(deployment, analysis, summary["steady"]["state"], tuple(notes))


def _find(folder: Path) -> tuple[Path, str]:
    """The result's folder, and the scenario in it."""
    for where, chosen in ((folder, None), (folder.parent, folder.name)):
        summary = read_summary(where)
        names = summary.get("scenarios")
        if summary.get("format") != FORMAT or not isinstance(names, dict) or not names:
            continue
        if chosen is None and len(names) > 1:
            listed = ", ".join(str(folder / name) for name in names)
            raise UserError(f"{folder}: holds several scenarios: name one of {listed}")
        name = next(iter(names)) if chosen is None else chosen
        if isinstance(names.get(name), dict):
            return where, name
    if read_summary(folder).get("format") == SWEEP_FORMAT:
        raise UserError(f"{folder}: is a sweep: name two of its runs, {folder / 'runs'}/KEY")
    raise no_run(folder, "nor a scenario's folder in one")


def compare(a: Path, b: Path, progress: Progress = silent) -> dict[str, Any]:
    """JSON-able: both results and their difference (b - a), part by part, in seconds; the numbers
    of both, if one has two pools."""
    return comparison(explain(a, progress), explain(b, progress))


def comparison(one: Compared, other: Compared) -> dict[str, Any]:
    """The parts of both and their differences. Each difference is the sum of its parts' exactly.
    Where one has two pools, ``summaries`` has the numbers of both instead."""
    found: dict[str, Any] = {
        "a": one.label,
        "b": other.label,
        "policies": [one.policy, other.policy],
        "same_requests": one.requests == other.requests,
        "assumptions": assumed_of({"notes": {"A": one.assumed, "B": other.assumed}}),
        "notes": [*one.notes, *other.notes],
    }
    if one.parts is None or other.parts is None:
        return found | {"summaries": {"A": one.summary, "B": other.summary}}
    a, b = one.parts, other.parts
    return found | {
        "wall": _difference(a.wall, a.stages, b.wall, b.stages),
        "mean_latency": _difference(a.mean_latency, a.latency, b.mean_latency, b.latency),
    }


def _difference(
    a: Fraction, parts_a: Mapping[str, Fraction], b: Fraction, parts_b: Mapping[str, Fraction]
) -> dict[str, Any]:
    if sum(parts_a.values()) != a or sum(parts_b.values()) != b:  # exact: these are fractions
        raise AssertionError("the parts do not add up")
    pairs = {name: (parts_a[name], parts_b[name]) for name in parts_a}
    rows = {name: _row(*pair) for name, pair in pairs.items() if any(pair)}
    return {"total": _row(a, b), "parts": rows}


def _row(a: Fraction, b: Fraction) -> dict[str, float]:
    return {"a_s": float(a), "b_s": float(b), "difference_s": float(b - a)}


TITLES = {
    "wall": "Wall clock, by what the stages did (mean over stages)",
    "mean_latency": "Latency of a request (mean)",
}
"""The two breakdowns of :func:`comparison`."""


def part_label(key: str, name: str) -> str:
    """The name of a part of the breakdown ``key``."""
    if key == "mean_latency" and name == "prefill_attention":
        return "attention of prompts"  # this breakdown includes the extra time of chunking
    return _LABELS[name]


def by_difference(parts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Names of the parts, the largest difference first."""
    return sorted(parts, key=lambda name: -abs(parts[name]["difference_s"]))


NEAR_NOTHING = 0.01
"""Share of the larger total below which percentages of a difference have no meaning."""


def comparison_answer(found: Mapping[str, Any]) -> Section:
    """The answer of a :func:`comparison`: each part's difference in seconds, in percent of A's
    total and, unless the totals are nearly equal, in percent of the whole difference. Where one has
    two pools, the difference of each number.
    """
    a, b = (Path(found[side]).name for side in "ab")
    if a == b:
        a, b = found["a"], found["b"]
    unlike = [] if found["same_requests"] else ["A and B serve different requests."]
    divided = "summaries" not in found
    if divided:
        table, *details = [_parts_table(title, key, found[key]) for key, title in TITLES.items()]
        said = f"{_said(found['wall'], a, b)}; {_said(found['mean_latency'], a, b, True)}."
    else:
        table, details = _numbers_table(found["summaries"]), []
        said = side_by_side(found["summaries"])
    what = "Which part of the time makes" if divided else "In which numbers does"
    return Section(
        kind="comparison",
        name=f"{a} and {b}",
        question=f"{what} {b} (B) differ from {a} (A)?",
        answer=said,
        assumed=found.get("assumptions", ()),
        tables=[table, *details],
        warnings=[*found["notes"], *unlike],
    )


def _said(breakdown: Mapping[str, Any], a: str, b: str, latency: bool = False) -> str:
    """The difference of B from A, and the part that differs most, in words."""
    total, parts = breakdown["total"], breakdown["parts"]
    of, verb = ("a request's mean latency", "is") if latency else (f"{b} (B)", "takes")
    if not divisible(total):
        ours, theirs = number_text(total["b_s"]), number_text(total["a_s"])
        same = f"{theirs} s in both" if ours == theirs else f"{ours} s, within 1 % of {a} (A)"
        return f"{of} {verb} {same}"
    same_way = [n for n in parts if parts[n]["difference_s"] * total["difference_s"] > 0]
    most = max(same_way, key=lambda name: abs(parts[name]["difference_s"]))
    share = percent(abs(total["difference_s"]), total["a_s"]).lstrip("+")
    more = "more" if total["difference_s"] > 0 else "less"
    label = part_label("mean_latency" if latency else "wall", most)
    return (
        f"{of} {verb} {number_text(total['b_s'])} s, {share} {more} than the "
        f"{number_text(total['a_s'])} s of {a} (A), the largest part of it {label} "
        f"({_signed(parts[most]['difference_s'])} s)"
    )


def _parts_table(title: str, key: str, breakdown: Mapping[str, Any]) -> Table:
    total, parts = breakdown["total"], breakdown["parts"]
    divided = divisible(total)
    rows = [(part_label(key, name), parts[name]) for name in by_difference(parts)]
    return Table(
        title,
        ["part", *_HEADINGS[: 5 if divided else 4]],
        [[label, *_cells(row, total, divided)] for label, row in [*rows, ("in all", total)]],
        "The parts add up to the difference exactly."
        + ("" if divided else " The totals differ by less than 1 %: too little for shares of it."),
    )


def _numbers_table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """The numbers of both runs that ``run`` shows, and their differences."""
    rows = []
    for path in SHOWN:
        cells = None if path.endswith("_band") else shown_row(path, summaries.values())
        if cells is not None:
            a, b = (shown_value(each, path, known(path)) for each in summaries.values())
            rows.append([*cells, "-" if a is None or b is None else percent(b - a, a)])
    note = "Predicted. docs/metrics.md defines every number."
    return Table("Numbers", ["number", "unit", "A", "B", "B - A"], rows, note, text=2)


_HEADINGS = ("A (s)", "B (s)", "B - A (s)", "of A's total", "of the difference")


def divisible(total: Mapping[str, float]) -> bool:
    """Whether the totals differ enough for shares of their difference to be meaningful."""
    return abs(total["difference_s"]) >= NEAR_NOTHING * max(total["a_s"], total["b_s"]) > 0


def _cells(row: Mapping[str, float], total: Mapping[str, float], divided: bool) -> list[str]:
    difference = row["difference_s"]
    numbers = [f"{row[key]:,.4f}" for key in ("a_s", "b_s")]
    cells = [*numbers, f"{difference:+,.4f}", percent(difference, total["a_s"])]
    return [*cells, percent(difference, total["difference_s"])] if divided else cells


def percent(part: float, whole: float) -> str:
    """A signed share in percent; a dash if ``whole`` is 0."""
    return f"{100 * part / whole:+.1f} %" if whole else "-"


def labelled_tables(folders: Sequence[Path]) -> dict[str, tuple[Path, str, Tables]]:
    """Every scenario of the results, by label: its folder, its name in it, and its tables.

    Raises UserError where a folder is not a result.
    """
    return {
        name if len(folders) == 1 else f"{_label(folder, folders)}/{name}": (folder, name, table)
        for folder in folders
        for name, table in read_tables(folder).items()
    }


def _label(folder: Path, folders: Sequence[Path]) -> str:
    """The folder's name, or its whole path if another folder has the same name."""
    name = folder.resolve().name
    alike = [other for other in folders if other.resolve().name == name]
    return name if len(alike) == 1 else str(folder)


SMALLEST, NOTICED = 0.005, 0.05
"""Parts below the first share of both totals are not drawn, unless their difference is at least the
second share of the largest one."""


def drawn_parts(breakdown: Mapping[str, Any]) -> list[str]:
    """The parts worth drawing, the largest difference first."""
    parts, total = breakdown["parts"], breakdown["total"]
    least = SMALLEST * max(total["a_s"], total["b_s"])
    ordered = by_difference(parts)
    noticed = NOTICED * max((abs(part["difference_s"]) for part in parts.values()), default=0.0)
    return [
        name
        for name in ordered
        if max(abs(parts[name]["a_s"]), abs(parts[name]["b_s"])) >= least
        or abs(parts[name]["difference_s"]) >= noticed > 0
    ]


def left_out(breakdown: Mapping[str, Any]) -> str:
    """The number of parts that are not drawn, and their sum, in words; empty if all are."""
    parts = breakdown["parts"]
    rest = [parts[name]["difference_s"] for name in parts.keys() - set(drawn_parts(breakdown))]
    parts_are = "part is" if len(rest) == 1 else "parts are"
    return f"{len(rest)} smaller {parts_are} left out ({_signed(sum(rest))} s)" if rest else ""


def _signed(seconds: float) -> str:
    return f"{seconds:+,.0f}" if abs(seconds) >= 100 else f"{seconds:+.3g}"
