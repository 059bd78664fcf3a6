"""Asks a question as a user would, and has the answer judged."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sarathi_sim.experiments.config.scenario import POOLS
from sarathi_sim.profiler.storage.strict import UserError
from tests.answers.judge import SEEDS, Judgement, Scenario, judged, load_of, resolved
from tests.answers.questions import Question, limited
from tests.answers.questions import question as one_question

LIMIT_S = 600.0
"""What a command may take, in seconds."""
SMALL = 8
"""Deployments of a space up to which brute force looks at all of them."""
ABOVE, BETTER, LITTLE = 0.10, 0.03, 0.1
"""What is added to the tolerance: for the load that must break, and for a better deployment. The
part of a configuration's own load that is tried where nothing is said to carry any."""
SHOWS: Mapping[str, Callable[[Scenario], Any]] = {
    "pools": lambda scenario: scenario.get("disaggregation"),
    "ranks": lambda scenario: scenario["cluster"].get("dp", 1) > 1,
    "drafts": lambda scenario: scenario.get("speculation"),
}
"""By kind of a question, whether a deployment has what it is about."""


Task = tuple[int, int, str, float]
"""A question's number and seed, the folder of all judgements, the limit of its command (s)."""


def judged_task(task: Task) -> dict[str, Any]:
    """Ask and judge one question, and keep the judgement."""
    number, seed, _, limit_s = task
    asked, path = one_question(number, seed), path_of(task)
    try:
        found = judgement_of(asked, path.parent, limit_s)
    except Exception:  # one question must not end the others; it counts as failed
        found = {"name": asked.name, "outcome": "failed", "seconds": 0.0}
        found["message"] = traceback.format_exc()
        return found
    write_json(path, found)
    return found


def path_of(task: Task) -> Path:
    """The file of its judgement."""
    return Path(task[2]) / f"q{task[0]:03d}" / "judgement.json"


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(content, indent=1))
    scratch.replace(path)


def judgement_of(question: Question, folder: Path, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """The question, how its command ended, and every judgement, JSON-able.

    ``outcome``: ``answered``, ``refused`` (exit code 2), ``unsettled``, ``none`` (no deployment
    carries anything), ``timeout`` or ``failed``.
    """
    began = time.monotonic()
    names = ("name", "command", "kind", "hard", "slo", "tolerance")
    found: dict[str, Any] = {name: getattr(question, name) for name in names}
    found["arguments"] = question.arguments(folder)
    summary = _ask(found, folder, limit_s)
    found["command_s"] = round(time.monotonic() - began, 1)
    if summary is not None:
        _judge(question, found, summary, folder / "traces")
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def _ask(found: dict[str, Any], folder: Path, limit_s: float) -> dict[str, Any] | None:
    """Run the command; the content of its ``summary.json``, if there is one."""
    out = folder / "result"
    words = [*found["arguments"], "--out", str(out), "--workers", "1", "--quiet"]
    grows = found["command"] == "recommend"
    words += ["--progress", "json"] if grows else []
    command, began = [sys.executable, "-m", "sarathi_sim", *words], time.monotonic()
    told, lines = (folder / "told").open("w+"), list[tuple[float, dict[str, Any]]]()
    with told, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True) as child:
        assert child.stdout is not None
        timer = threading.Timer(limit_s, child.kill)
        timer.start()
        for line in child.stdout if grows else ():
            if line.endswith("\n"):  # else it was killed
                lines.append((time.monotonic() - began, json.loads(line)))
        code = child.wait()
        timer.cancel()
        told.seek(0)
        said = told.read().strip()[-600:]
    if code:
        late = time.monotonic() - began > limit_s
        outcome = "timeout" if late else "refused" if code == 2 else "failed"
        found |= {"outcome": outcome, "message": f"more than {limit_s:.0f} s" if late else said}
        return None
    if lines:
        _judge_growth(found, lines)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def _judge_growth(found: dict[str, Any], lines: list[tuple[float, dict[str, Any]]]) -> None:
    """Whether the first answer holds the settled one, and the time that was expected, over the
    time that it took: when it was first said, and before the search."""
    partial, (took_s, whole) = lines[:-1], lines[-1]
    best, times = whole["deployments"][0], list[tuple[float, float, int]]()
    settled = best["capacity"] if whole["rate"] is None else best["per_hour"]
    for at_s, one in partial:
        if (left_s := one["open"]["left_s"]) is not None:
            times.append((at_s + left_s, at_s, one["open"]["not_settled"]))
    before = [expected for expected, _, not_settled in times if not_settled]
    found["first_s"] = partial[0][0] if partial else None
    low, high = partial[0][1]["open"]["between"] if partial else (None, None)
    found["between"], found["settled"] = [low, high], settled
    if partial and best["settled"] and (best["carries"] or whole["rate"] is None):
        high = math.inf if high is None else high
        found["held"] = low * (1 - 1e-9) <= settled <= high * (1 + 1e-9)
    found["expected"] = [each / took_s for each in (*(t[0] for t in times[:1]), *before[:1])]


def _judge(
    question: Question, found: dict[str, Any], summary: Mapping[str, Any], traces: Path
) -> None:
    deployments = summary["deployments"]
    found["unsettled"] = [one["name"] for one in deployments if not one.get("settled", True)]
    stated = ("name", "capacity", "offered", "gpus", "settled")
    found["stated"] = [{key: one.get(key) for key in stated} for one in deployments]
    # Of a recommendation the first counts; a capacity question asks about every deployment.
    asked = deployments if question.command == "capacity" else deployments[:1]
    if any(not one.get("settled", True) for one in asked):
        found["outcome"] = "unsettled"
    carrying = [one for one in deployments if one["capacity"] and one.get("settled", True)]
    rate, judge = question.options.get("rate"), _Judge(question, traces)
    if rate is not None:
        carrying = [one for one in carrying if one["capacity"] >= rate]
    if not carrying:
        found.setdefault("outcome", "none")
        if question.command == "capacity":
            config = yaml.safe_load(Path(found["arguments"][1]).read_text())
            found["brute"] = list(_brute_force(question, judge, config, LITTLE, None))
        return
    found.setdefault("outcome", "answered")
    if question.command == "capacity":
        carrying = sorted(carrying, key=lambda one: -one["capacity"])
    found["at"], found["above"], found["fewer"] = [], [], []
    shows = SHOWS.get(question.kind.partition(",")[0], bool)
    first, *others = carrying
    # The winner and the next; the best that has what the question is about, if it is none of both.
    others.sort(key=lambda one: not shows(one["scenario"]) or bool(shows(first["scenario"])))
    for one in (first, *others[:1]):
        name, scenario = one["name"], one["scenario"]
        stated = 1.0 if rate is None else rate / load_of(scenario)
        found["at"].append(asdict(judge.judge(name, scenario, stated)))
        if rate is None:
            factor = 1 + question.tolerance + ABOVE
            found["above"].append(asdict(judge.judge(name, scenario, factor)))
    name, first = first["name"], first["scenario"]
    for fewer in one_fewer(first) if rate is not None else ():
        factor = rate / load_of(first)
        found["fewer"].append(asdict(judge.judge(f"{name} less one", fewer, factor)))
    if rate is None:
        better = 1 + question.tolerance + BETTER
        found["brute"] = list(_brute_force(question, judge, first, better, first))


class _Judge:
    """Reruns for one question: always the same seeds, which no search has."""

    def __init__(self, question: Question, traces: Path) -> None:
        self.question, self.traces = question, traces
        rng = np.random.default_rng([question.number, 977])
        self.seeds = [int(seed) for seed in rng.integers(10**9, 2 * 10**9, SEEDS)]

    def judge(
        self, name: str, scenario: Scenario, factor: float, *, short: bool = False
    ) -> Judgement:
        """A deployment at so many times its load; ``short``: one run as long as the search's."""
        seeds, times = (self.seeds[:1], 1.0) if short else (self.seeds, 5.0)
        return judged(name, self.question.slo, scenario, factor, seeds, self.traces, times=times)


def _brute_force(
    question: Question, judge: _Judge, first: Scenario, factor: float, but: Scenario | None
) -> Iterator[dict[str, Any]]:
    """Every deployment of a small space, ``but`` one, at so many times the load of the first.

    One that keeps the SLO in a short run is judged once more, as an answer is.
    """
    space = list((_grid if question.command == "capacity" else _enumerated)(question, first))
    for name, scenario in space if len(space) <= SMALL else ():
        try:
            if but is not None and resolved(scenario) == resolved(but):
                continue
            found = judge.judge(name, scenario, factor, short=True)
            suspect = found.keeps
            if suspect:
                found = judge.judge(name, scenario, factor)
        except UserError as error:
            yield {"name": name, "refused": str(error)[:300]}
            continue
        yield {**asdict(found), "suspect": suspect}


def one_fewer(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with one replica fewer; with one worker fewer of either pool."""
    pooled = scenario.get("disaggregation") is not None
    for path in [("disaggregation", pool) for pool in POOLS] if pooled else [()]:
        fewer = json.loads(json.dumps(scenario))
        cluster = reduce(getitem, path, fewer)["cluster"]
        if cluster["replicas"] > 1:
            cluster["replicas"] -= 1
            yield fewer


def _grid(question: Question, first: Scenario) -> Iterator[tuple[str, dict[str, Any]]]:
    """The deployments of a configuration's grid, under the first one's load."""
    config = {key: value for key, value in question.config.items() if key != "capacity"}
    grid = question.config["capacity"].get("space", {}).get("grid", {})
    for values in itertools.product(*grid.values()):
        scenario = json.loads(json.dumps({k: v for k, v in config.items() if k != "name"}))
        for key, chosen in zip(grid, values, strict=True):
            *path, name = key.split(".")
            reduce(lambda tree, part: tree.setdefault(part, {}), path, scenario)[name] = chosen
        scenario["workload"] = first["workload"]
        yield ", ".join(f"{k} {v}" for k, v in zip(grid, values, strict=True)), scenario


def _enumerated(question: Question, first: Scenario) -> Iterator[tuple[str, dict[str, Any]]]:
    """The layouts of a recommendation on so many GPUs, under the first one's load; none where the
    question has further ones."""
    gpus, options = question.options["gpus"], question.options
    if question.kind.partition(",")[0] in SHOWS:
        return
    budgets, limits = (options.get(key, "512,1024,2048").split(",") for key in ("budget", "seqs"))
    degrees = (1, 2, 4, 8)
    for stack in str(options.get("stack", "")).split(","):
        for tp, pp, *numbers in itertools.product(degrees, degrees, budgets, limits):
            if tp * pp > gpus:
                continue
            policy = limited(stack or "vllm", *map(int, numbers))
            scenario = {key: first[key] for key in ("model", "device", "workload")}
            cluster = {"tp": tp, "pp": pp, "replicas": gpus // (tp * pp)}
            cluster["max_length"] = first["cluster"]["max_length"]
            scenario |= {"cluster": cluster, "policy": policy}
            if stack:
                scenario |= {"stack": stack, "dtype": "bf16"}
            yield f"{stack} TP {tp} PP {pp} {' '.join(numbers)}".strip(), scenario


# The counts ----------------------------------------------------------------------------------


def counts(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the issue asks to be counted, of all questions; with the names of those that failed."""
    at, above, fewer, brute = (
        [(one["name"], each) for one in found for each in one.get(key, [])]
        for key in ("at", "above", "fewer", "brute")
    )
    outcomes = [one["outcome"] for one in found]

    def part(number: int, whole: int) -> float | None:
        return number / whole if whole else None

    def ended(*names: str) -> list[str]:
        return [one["name"] for one in found if one["outcome"] in names]

    kept = [name for name, each in at if each["nearly"]]
    held = [name for name, each in above if each["keeps"]]
    spared = [name for name, each in fewer if each["keeps"]]
    better = [f"{name}: {each['name']}" for name, each in brute if each.get("keeps")]
    unsettled = ended("unsettled", "timeout")
    holds = [one["held"] for one in found if "held" in one]
    expected = [one["expected"] for one in found if len(one.get("expected", [])) == 2]
    within = [(sum(0.5 <= e[n] <= 2 for e in expected), len(expected)) for n in range(2)]
    return {
        "questions": len(found),
        "outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))},
        "answers judged": len(at),
        "kept at the stated load (at least 0.95)": part(len(kept), len(at)),
        "not kept": [name for name, each in at if not each["nearly"]],
        "answers judged above": len(above),
        "still kept above it (at most 0.10)": part(len(held), len(above)),
        "kept above": held,
        "kept with one replica fewer (at most 0.10)": part(len(spared), len(fewer)),
        "kept with fewer": spared,
        "spaces looked at by brute force": sum(bool(one.get("brute")) for one in found),
        "better deployments found (none)": len(better),
        "better": better,
        "first answers that hold the settled one (at least 0.90)": part(sum(holds), len(holds)),
        "seconds until the first answer (at most)": max(
            [one["first_s"] for one in found if one.get("first_s")], default=None
        ),
        "times expected at first within a factor of two": part(*within[0]),
        "the same before the search (at least 0.80)": part(*within[1]),
        "not settled (at most 5)": len(unsettled),
        "unsettled": unsettled,
        "failed": ended("failed"),
        "refused": ended("refused"),
        "nothing carried": ended("none"),
        "shortened reruns": sum(bool(each["shortened"]) for _, each in (*at, *above)),
        "seconds": round(sum(one["seconds"] for one in found), 1),
    }


def table(counted: Mapping[str, Any]) -> str:
    """The counts as lines."""
    lines = []
    for key, value in counted.items():
        shown = (
            f"{100 * value:.1f} %" if isinstance(value, float) and "seconds" not in key else value
        )
        if value is None:
            shown = "-"
        elif isinstance(value, list):
            shown = ", ".join(value) or "-"
        elif isinstance(value, dict):
            shown = ", ".join(f"{number} {name}" for name, number in value.items())
        lines.append(f"{key:44} {shown}")
    return "\n".join(lines)
