"""Many hostile inputs, each in a forked child of one warm process; counts by door and outcome."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.hostile import box as boxes
from tests.hostile.box import Command, Outcome
from tests.hostile.doors import _REPORTED, DOORS
from tests.hostile.known import KNOWN
from tests.hostile.template import RUNS, write_results, write_template

KNOWN_DOOR = "known"
#: Inputs that are tried in one child. A fork takes as long as a command.
_BATCH = 10


@dataclass(frozen=True)
class Input:
    """One hostile input: the door, and its number or (of a known one) its name."""

    door: str
    which: int | str


@dataclass
class Report:
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[tuple[Input, Outcome, list[str]]] = field(default_factory=list)

    def add(self, what: Input, outcome: Outcome, argv: list[str]) -> None:
        self.counts.setdefault(what.door, Counter())[outcome.word] += 1
        if not outcome.good:
            self.bad.append((what, outcome, argv))

    def table(self) -> str:
        """A line a door: how many inputs had which outcome."""
        found = {(w not in boxes.GOOD, w) for c in self.counts.values() for w in c}
        words = [word for _, word in sorted(found)]
        every = sum(self.counts.values(), Counter[str]())
        lines = [f"{'door':14}" + "".join(word.rjust(12) for word in ("inputs", *words))]
        for door, count in {**self.counts, "all": every}.items():
            numbers = (count.total(), *(count[word] for word in words))
            lines.append(f"{door:14}" + "".join(f"{number:12}" for number in numbers))
        return "\n".join(lines)


def inputs(number: int, only: list[str] | None = None) -> list[Input]:
    """The known ones and ``number`` generated ones, of all doors or some."""
    doors = {name: share for name, (_, share) in DOORS.items() if not only or name in only}
    known = [Input(KNOWN_DOOR, name) for name in KNOWN] if not only or KNOWN_DOOR in only else []
    every, taken = sum(doors.values()), []
    for name, share in doors.items():
        taken += [Input(name, i) for i in range(-(-number * share // every))]
    return known + taken


class Harness:
    """The warm process: everything is imported, and the valid files are there.

    ``folder`` is where boxes are made.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.template, self.earlier = folder / "template", folder / "earlier"
        os.environ["SARATHI_SIM_CACHE"] = str(folder / "cache")
        os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")
        self._warm()
        whole = boxes.snapshot(self.earlier)
        self.ours = {os.path.relpath(path, self.earlier): each for path, each in whole.items()}

    def _warm(self) -> None:
        """In a child, as some libraries' threads do not survive a fork; then import the same."""
        self.template.mkdir(parents=True)
        names = self.folder / "modules.json"

        def work() -> None:
            write_template(self.template)
            from typer.testing import CliRunner

            from sarathi_sim.experiments.cli import app

            for line in (
                "run exp.yaml --no-figures --out result",
                "sweep sweep.yaml --workers 1 --out swept",
                "sweep sweep.yaml --dry-run",
                "compare result/orca result/sarathi --out drawn",
                "plot swept --metric makespan_s --out plotted",
                "run own.yaml --no-figures --out own",
                "report result swept drawn --out page.html",
                "score server.jsonl --config exp.yaml",
                "lab score measured.csv --peer peer.csv --workers 1",
                "lab lockstep decisions.jsonl",
                "run stacked.yaml --no-figures --set calibration=calibration.yaml --out stacked",
                *(f"score {name} --config stacked.yaml --quiet" for name in RUNS),
            ):
                done = CliRunner().invoke(app, line.split(), catch_exceptions=False)
                assert done.exit_code == 0, (line, done.output)
            write_results(Path())
            for name in ("plotted", "own", "stacked"):
                shutil.rmtree(name)
            Path("page.html").unlink()
            self.earlier.mkdir()
            for name in _REPORTED:
                Path(name).rename(self.earlier / name)
            names.write_text(json.dumps([n for n in sys.modules if "__main__" not in n]))

        (ended,), _ = boxes.run([(work, self.template)], 10 * boxes.MOST_WAITING_S)
        if ended.code:
            raise RuntimeError(f"the valid files do not work: {ended.said}")
        for name in json.loads(names.read_text()):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        import typer

        from sarathi_sim.experiments import cli

        cli.app = typer.main.get_command(cli.app)  # type: ignore[assignment]  # takes 20 ms
        boxes.caches()
        gc.collect()
        gc.freeze()

    def try_batch(self, batch: list[Input]) -> list[tuple[Outcome, list[str]]]:
        """Try inputs in one child; those that did not end well once more, each in its own."""
        made = [self._make(what) for what in batch]
        found = boxes.outcomes(made, self.ours)
        for _, box in made:
            boxes.empty(box)
        return [
            (outcome, command.argv) if outcome.good else self._try_alone(what)
            for what, (command, _), outcome in zip(batch, made, found, strict=True)
        ]

    def _try_alone(self, what: Input) -> tuple[Outcome, list[str]]:
        command, box = self._make(what)
        (outcome,) = boxes.outcomes([(command, box)], self.ours, boxes.MOST_WAITING_S)
        boxes.empty(box)
        return outcome, command.argv

    def _make(self, what: Input) -> tuple[Command, Path]:
        name = f"{what.door}-{what.which}".replace(" ", "_").replace("/", "_")
        box = self.folder / name.lstrip("-")[:60]
        plain = what.door in DOORS and what.door not in ("result", "sweep", "--out", "report")
        boxes.fill(box, self.template, *(() if plain else (self.earlier,)))
        with contextlib.chdir(box):
            if isinstance(what.which, str):
                return KNOWN[what.which](box), box
            rng = Random(f"{self.seed} {what.door} {what.which}")
            return DOORS[what.door][0](rng, box), box

    def try_all(
        self, tried: list[Input], jobs: int, progress: Callable[[int], None] = lambda _: None
    ) -> Report:
        report = Report()
        batches = [tried[i : i + _BATCH] for i in range(0, len(tried), _BATCH)]
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            for batch, results in zip(batches, pool.map(self.try_batch, batches), strict=True):
                for what, (outcome, argv) in zip(batch, results, strict=True):
                    report.add(what, outcome, argv)
                progress(sum(count.total() for count in report.counts.values()))
        return report
