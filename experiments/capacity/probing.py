"""Probes as runs of a sweep: sent to its backends, found again by content; and the folder that
keeps them beside the answer.

DIR/summary.json      the question and the answer
    capacity.csv      a row a deployment
    headroom.csv      a row a probe: load, every clause of the SLO, throughput
    config.yaml       the question, to ask it again
    figures/          headroom, Pareto fronts
    probes/           the sweep of all runs; the same question again takes them from here
    manifest.json     names all of them but probes/, which has its own
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from sarathi_sim.profiler.storage import manifest as manifests
from sarathi_sim.profiler.storage.child import Progress, Say, silent
from sarathi_sim.profiler.storage.files import remove_empty
from sarathi_sim.profiler.storage.manifest import MANIFEST, Manifest
from ..results import open_result
from ..sweeps.backends import Backend
from ..sweeps.execute import Report, execute, write_tables
from ..sweeps.plan import Run, SweepPlan, run_key
from ..sweeps.store import Store
from .options import Option
from .search import Probe, Probed, Search, UnbreakableError
from .slo import CapacitySection, RunTables, judge, tables_read

T = TypeVar("T")
NAME = "probe"
"""The common name of all runs' scenarios, so that options with equal scenarios share a run; of
probes with the tables that they keep."""
AXES = ("deployment", "load", "requests", "slower", "seed")


class OutOfTimeError(Exception):
    """A search has reached its time limit."""


@dataclass
class Laboratory:
    """The folder, the backend and the question of probes; the monotonic time ``until`` which they
    may be made."""

    section: CapacitySection
    store: Store
    backend: Backend
    progress: Progress = silent
    say: Say = silent
    until: float = math.inf
    report: Report = field(default_factory=lambda: Report(0))
    runs: dict[str, Run] = field(default_factory=dict)

    def pursue(
        self, searches: Mapping[Option, Search[T]], before: int = 0, total: int | None = None
    ) -> dict[Option, T | str]:
        """The results of the searches; the error of a search with a failed run. Call it under the
        store's lock. Of ``total`` deployments ``before`` are done already. Raises OutOfTimeError
        where it is later than ``until``."""
        *_, found = self.ended(searches, before, total)
        return found

    def ended(
        self, searches: Mapping[Option, Search[T]], before: int = 0, total: int | None = None
    ) -> Iterator[dict[Option, T | str]]:
        """As :meth:`pursue`: the results so far, whenever a search has ended; the last are all."""
        chase = _Chase(self, searches, before, total or len(searches))
        plan = SweepPlan(
            "",
            "capacity",
            "",
            AXES,
            None,
            tuple(chase.begin()),
            (),
        )
        self.report.total += len(plan.runs)
        told = (self.progress, self.report, self.say)
        known = 0
        try:
            with closing(execute(plan, self.store, self.backend, *told, chase.follow)) as outcomes:
                for _ in outcomes:
                    if len(chase.found) > known:
                        known = len(chase.found)
                        yield chase.found
                    self.check_time()
        finally:
            self.runs |= chase.runs
        if not searches:
            yield chase.found

    def check_time(self) -> None:
        """Raises OutOfTimeError where it is later than ``until``."""
        if time.monotonic() > self.until:
            raise OutOfTimeError

    def write_tables(self) -> None:
        """Write the tables of the probes' sweep, in an order that does not depend on the time."""
        runs = sorted(self.runs.values(), key=lambda run: (*run.point.values(), run.seed))
        plan = SweepPlan("", "capacity", "", AXES, None, tuple(runs), ())
        write_tables(plan, self.store, self.report.failures)


def _name(tables: Sequence[str]) -> str:
    return "_with_".join([NAME, *(Path(file).stem for file in tables)])


class _Chase(Generic[T]):
    def __init__(
        self, lab: Laboratory, searches: Mapping[Option, Search[T]], before: int, total: int
    ) -> None:
        self.lab = lab
        self._before, self._total = before, total
        self.searches = searches
        self.found: dict[Option, T | str] = {}
        self.runs: dict[str, Run] = {}
        self._summaries: dict[str, dict[str, Any]] = {}
        self._asked: dict[Option, list[tuple[Probe, str]]] = {}
        self._waiting: dict[str, list[Option]] = {}

    def begin(self) -> Iterator[Run]:
        """The first runs of all searches."""
        for option, search in self.searches.items():
            yield from self._ask(option, next(search))

    def follow(self, run: Run) -> list[Run]:
        """The next runs of the searches that waited for this run."""
        options = self._waiting.pop(run.key, [])
        error = self.lab.report.failures.get(run.key)
        if error is None:
            self._summaries[run.key] = self.lab.store.summary(run.key, run.name)
        more = []
        for option in dict.fromkeys(options):
            if error is not None:
                self._end(option, error)
            elif option not in self.found:
                more += self._answered(option)
        return more

    def _answered(self, option: Option) -> list[Run]:
        """Continue a search if all its probes have results; returns its next runs."""
        asked = self._asked[option]
        if any(key not in self._summaries for _, key in asked):
            return []
        try:
            wanted = self.searches[option].send([self._probed(option, *one) for one in asked])
        except StopIteration as done:
            self._end(option, done.value)
            return []
        except UnbreakableError as error:
            self._end(option, str(error))
            return []
        runs = self._ask(option, wanted)
        return runs or self._answered(option)

    def _end(self, option: Option, found: T | str) -> None:
        self.found[option] = found
        self.lab.progress("deployments", self._before + len(self.found), self._total)

    def _ask(self, option: Option, probes: list[Probe]) -> list[Run]:
        runs, asked = [], []
        for probe in probes:
            deployment = option.at(probe, self.lab.section.load)
            tables = tables_read(self.lab.section.objectives, probe.pooled)
            key = run_key(deployment, name := _name(tables))
            asked.append((probe, key))
            if key in self._summaries:
                continue
            if key not in self._waiting:
                point = {"deployment": option.name, "load": probe.load}
                point |= {"requests": probe.requests, "slower": probe.slower}
                scenario = deployment.scenario
                self.runs[key] = Run(key, name, probe.seed, point, scenario, tables)
                runs.append(self.runs[key])
            self._waiting.setdefault(key, []).append(option)
        self._asked[option] = asked
        return runs

    def _probed(self, option: Option, probe: Probe, key: str) -> Probed:
        summary, section = self._summaries[key], self.lab.section
        name = _name(tables_read(section.objectives, probe.pooled))
        tables = RunTables(self.lab.store.runs / key / name)
        rate = section.load == "rate"
        verdict = judge(section.objectives, [(summary, tables)], rate, section.rejected)
        return Probed(probe, key, summary, verdict, option.alike if rate else 1, tables)


CAPACITY_FORMAT = "sarathi-sim capacity 1"
RECOMMEND_FORMAT = "sarathi-sim recommend 3"
SENSITIVITY_FORMAT = "sarathi-sim sensitivity 1"
PROBES = "probes"
_APART = re.compile(r"probes(/.*)?|figures/?|.*\.partial")


@contextmanager
def probes_in(out: Path, kind: str) -> Iterator[Store]:
    """The store of the probes below ``out``, locked. If the block fails without a probe, nothing is
    left. Raises UserError if ``out`` is something else, or holds files that are not ours."""
    made = open_result(out, kind, _APART.fullmatch)
    store = Store(out / PROBES)
    store.open(resume=True)
    try:
        with store.locked():
            yield store
    except BaseException:
        if made is not None and not any(store.runs.iterdir()):
            store.runs.rmdir()
            manifests.remove_ours(store.folder)
            (out / MANIFEST).unlink()
            remove_empty(made)
        raise


def write_result(out: Path, kind: str, files: Mapping[str, bytes]) -> None:
    """Write the files of the answer, each whole or as it was; remove an earlier answer's others."""
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
    manifests.replace_files(out, kind, files)
    written = manifests.read_manifest(out) or Manifest(kind)
    manifests.remove_files(out, kind, written.files.keys() - files.keys())
