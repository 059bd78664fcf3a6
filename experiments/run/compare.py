"""Results side by side: the tables of several, and the difference of two, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.profiler.facts.ops import ACCOUNTS
from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.explain import Explanation
from sarathi_sim.simulator.views.explain import explain as explanation
from sarathi_sim.simulator.views.metrics import Analysis
from ..config.deployment import Deployment, deploy
from ..config.loading import load_experiment
from ..results import FORMAT, SWEEP_FORMAT, Tables, no_run, read_summary, read_tables, to_json

_LABELS = {
    **ACCOUNTS,
    "frontend": "the engine's frontend",
    "queueing": "queueing",
    "prefill_attention": "attention of prompts without chunking",
    "drafter": "the drafter's passes",
    "host": "the engine's host",
    "chunking": "chunking: additional attention",
    "mixing": "chunk and decodes in one batch",
    "jitter": "jitter",
    "sending": "sending (blocking)",
    "pb1": "PB1: prefills of different length",
    "pb2": "PB2: prefill next to decodes",
    "pb3": "PB3: decodes of different context",
    "equal": "bubbles between equal batches",
    "communication": "transfers that do not overlap",
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
    """One of two compared runs: ``parts`` of its time (None: it has two pools), ``requests``: the
    bytes of prompt and output tokens, ``deployment``: its model and GPU."""

    label: str
    policy: str
    summary: Mapping[str, Any]
    parts: Explanation | None
    requests: tuple[bytes, ...]
    notes: tuple[str, ...]
    assumed: tuple[str, ...] = ()
    deployment: Mapping[str, str] = field(default_factory=dict)


def explain(folder: Path, progress: Progress = silent) -> Compared:
    """Simulate a result's configuration again and divide its time; that of two pools is not
    divided. ``folder`` is the folder of a run with one scenario, a scenario's folder in it, or
    ``runs/KEY`` of a sweep. Raises UserError if it is none of these."""
    where, scenario = _find(folder)
    again = simulate_again(where, scenario, str(folder), progress)
    notes, deployment, analysis = list(again.notes), again.deployment, again.analysis
    if again.state == "overloaded":
        growing = "overloaded: its queue grows while requests arrive, so its mean latency"
        notes.append(f"{folder}: {growing} depends on the length of the run")
    columns = (analysis.records.prompt_tokens, analysis.records.output_tokens)
    requests = tuple(np.ascontiguousarray(column).tobytes() for column in columns)
    pools, stored = deployment.pools, read_summary(where)
    parts = explanation(analysis, deployment.predictor) if len(pools) == 1 else None
    if parts is None:
        notes.append(f"{folder}: two pools: only metrics are compared, not the parts of the time")
    policy, said = pools[-1].scenario.policy.name, stored.get("notes")
    assumed = tuple(said.get(scenario, ())) if isinstance(said, dict) else ()
    summary = stored["scenarios"][scenario]
    served = {"model": deployment.model.name, "device": deployment.device.name}
    return Compared(str(folder), policy, summary, parts, requests, tuple(notes), assumed, served)


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
    """Simulate a scenario of the result in ``folder`` from its ``config.yaml``. Raises UserError if
    the file cannot be read or the scenario cannot run."""
    experiment = load_experiment(folder / "config.yaml")
    if scenario not in experiment.scenarios:
        raise UserError(f"{folder}: the result is damaged: config.yaml lacks {scenario}")
    deployment = deploy(experiment.scenarios[scenario], experiment.sources[scenario])
    total = len(deployment.requests)
    analysis = Analysis(deployment.simulate(lambda done: progress(label, done, total)))
    summary = to_json(deployment.summary(analysis))
    stored, now = read_summary(folder)["scenarios"][scenario], summary["makespan_s"]
    before = stored.get("makespan_s")
    note = f"{label}: simulated again, its makespan is {now:.6g} s, not {before}: profiles or code "
    notes = () if before == now else (f"{note}have changed since",)
    return SimulatedAgain(deployment, analysis, summary["steady"]["state"], notes)


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
    """JSON-able: the numbers of both results and their difference (b - a), part by part, in
    seconds; without the parts, if one has two pools."""
    return comparison(explain(a, progress), explain(b, progress))


def comparison(one: Compared, other: Compared) -> dict[str, Any]:
    """The numbers of both, the parts of their time, and the differences: each is the sum of its
    parts' exactly. Without the parts where one has two pools."""
    found: dict[str, Any] = {
        "a": one.label,
        "b": other.label,
        "policies": [one.policy, other.policy],
        "deployments": {"A": one.deployment, "B": other.deployment},
        "same_requests": one.requests == other.requests,
        "assumed": {"A": list(one.assumed), "B": list(other.assumed)},
        "notes": [*one.notes, *other.notes],
        "summaries": {"A": one.summary, "B": other.summary},
    }
    if one.parts is None or other.parts is None:
        return found
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


def part_label(key: str, name: str) -> str:
    """The name of a part of the breakdown ``key``."""
    if key == "mean_latency" and name == "prefill_attention":
        return "attention of prompts"  # this breakdown includes the extra time of chunking
    return _LABELS[name]


def labelled_tables(folders: Sequence[Path]) -> dict[str, tuple[Path, str, Tables]]:
    """Every scenario of the results, by label: its folder, its name in it, and its tables. Raises
    UserError where a folder is not a result."""
    names = [folder.resolve().name for folder in folders]
    found = {}
    for folder, label in zip(folders, names, strict=True):
        label = label if names.count(label) == 1 else str(folder)
        for name, table in read_tables(folder).items():
            found[name if len(folders) == 1 else f"{label}/{name}"] = (folder, name, table)
    return found
