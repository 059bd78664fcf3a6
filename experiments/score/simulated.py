"""Measured rows simulated: a run for each row and variant, kept, and again under joint draws."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.score.errors import ServerTimes
from sarathi_sim.experiments.score.measured import METRICS, Measured
from sarathi_sim.experiments.score.server_bands import (
    DRAWS,
    HOST,
    HOST_SIGMA,
    NORMAL_90,
    OpShares,
    normals,
    op_shares,
)
from sarathi_sim.experiments.sweeps.backends import Backend
from sarathi_sim.experiments.sweeps.execute import Report, execute
from sarathi_sim.experiments.sweeps.plan import (
    Run,
    SharedRequests,
    SweepPlan,
    code_fingerprint,
    run_key,
)
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.strict import STRICT
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.cache import VARIABLE, cache_folder

_CODE = tuple(f"experiments/score/{name}.py" for name in ("server_bands", "simulated"))
_DATA = ("models", "devices", "kernels", "profiles")


@dataclass(frozen=True)
class RowOutcome:
    """Of a row simulated with one host: ``numbers`` by name, and the shares of the ops in them.
    Where the row has none, ``refused`` says why."""

    __pydantic_config__: ClassVar[Any] = STRICT

    numbers: dict[str, float] = field(default_factory=dict)
    shares: OpShares | None = None
    refused: str = ""


_OUTCOME = TypeAdapter(RowOutcome)


@lru_cache(maxsize=1)
def data_fingerprint(root: Path) -> str:
    """Hash of all files that deployments may read."""
    digest = sha256()
    for path in sorted(path for room in _DATA for path in (root / room).rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def outcome_key(scenario: Mapping[str, Any]) -> str:
    """32 hexadecimal digits: what a row's outcome depends on."""
    known = [scenario, code_fingerprint(*_CODE), data_fingerprint(data_dir())]
    return sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


class RowCache:
    """Outcomes by key below ``folder``; None keeps nothing.

    A damaged file counts as none, and a folder that cannot be written costs time, nothing else.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, key: str) -> RowOutcome | None:
        """The outcome of that key, if it is kept as it was written."""
        if self.folder is None:
            return None
        try:
            digest, _, content = self._file(key).read_bytes().partition(b"\n")
            if digest != _digest(key, content):
                return None
            return _OUTCOME.validate_json(content)
        except (OSError, ValidationError):
            return None

    def write(self, key: str, outcome: RowOutcome) -> None:
        """Keep an outcome: a reader sees all of it or none."""
        if self.folder is None:
            return
        content = json.dumps(asdict(outcome)).encode()
        with contextlib.suppress(OSError):
            self._file(key).parent.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(prefix=".", dir=self._file(key).parent)
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(key, content) + b"\n" + content)
            Path(scratch).replace(self._file(key))

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / key[2:]


def _digest(key: str, content: bytes) -> bytes:
    return sha256(key.encode() + content).hexdigest().encode()


NAME = "server"
"""What each run's scenario is called: rows that describe the same one share a run."""
FULL = 0.98
"""From this share of its KV cache on a server counts as full."""

Variant = Callable[[Measured], dict[str, Any] | None]
"""The scenario that a row is simulated as; None if it is not. Raises ConfigError, as
``scenario_of`` does."""


class RowPlan:
    """What each row is simulated as, by variant and id: ``known`` outcomes of earlier calls, and
    the ``runs`` of others. ``refused`` rows have none, with the reason."""

    def __init__(self, variants: Mapping[str, Variant], kept: RowCache) -> None:
        self.variants, self.kept = variants, kept
        self.known: dict[str, dict[str, RowOutcome]] = {name: {} for name in variants}
        self.runs: dict[str, dict[str, Run]] = {name: {} for name in variants}
        self.refused: dict[str, str] = {}
        self._pending: dict[tuple[str, str], tuple[str, OpShares]] = {}

    def add(self, file: str, row: Measured, requests_of: SharedRequests) -> None:
        """Look a row's outcomes up, plan the runs of others, or note why it has none."""
        source = Source(f"{file}: {row.id}", NAME, {}, ())
        for name, variant in self.variants.items():
            try:
                scenario = variant(row)
                if scenario is not None:
                    self._add(name, row, scenario, source, requests_of)
            except ConfigError as error:
                self.refused[row.id] = str(error).replace(f"{source.file}: ", "")
                self.drop(row.id)
                return

    def drop(self, id: str) -> None:
        """Forget a row: it has no outcome in any variant."""
        for name in self.variants:
            self.known[name].pop(id, None)
            self.runs[name].pop(id, None)

    def _add(
        self,
        name: str,
        row: Measured,
        scenario: Mapping[str, Any],
        source: Source,
        requests_of: SharedRequests,
    ) -> None:
        key = outcome_key(scenario)
        outcome = self.kept.read(key)
        if outcome is None:
            try:
                found = deploy(check_scenario(scenario, source), source, requests_of)
            except ConfigError as error:
                outcome = RowOutcome(refused=str(error).replace(f"{source.file}: ", ""))
                self.kept.write(key, outcome)
            else:
                self.runs[name][row.id] = _run(found)
                self._pending[name, row.id] = key, op_shares(found, row)
                return
        if outcome.refused:
            raise ConfigError(outcome.refused)
        self.known[name][row.id] = outcome

    def finished(self, name: str, id: str, summary: Mapping[str, Any]) -> None:
        """Take the summary of a run in, and keep its outcome."""
        key, shares = self._pending[name, id]
        cache = self.runs[name][id].scenario.kv_cache
        numbers = {
            "ttft_ms": 1e3 * summary["ttft_s"]["mean"],
            "tpot_ms": 1e3 * summary["tpot_s"]["mean"],
            "output_tokens_per_s": summary["output_tokens_per_s"],
            "kv_peak_share": summary["kv_peak_share"],
            "num_blocks": float(cache.num_blocks or 0) if cache is not None else 0.0,
        }
        self.known[name][id] = RowOutcome(numbers, shares)
        self.kept.write(key, self.known[name][id])


def _run(found: Deployment) -> Run:
    scenario = found.scenario
    return Run(run_key(found, NAME), NAME, scenario.seed, {}, scenario)


def plan_rows(
    file: str,
    rows: Sequence[Measured],
    progress: Progress,
    variants: Mapping[str, Variant],
    kept: RowCache,
) -> RowPlan:
    """What is known of each row and variant, and runs of the rest. Rows of one server follow each
    other: they share op times, and workers take runs in this order."""
    plan, requests_of = RowPlan(variants, kept), SharedRequests()
    alike = sorted(rows, key=lambda r: (r.system, r.backend, r.model, r.precision, r.tp or 0))
    for done, row in enumerate(alike):
        progress("checking", done, len(alike))
        plan.add(file, row, requests_of)
    return plan


@contextmanager
def kept_runs() -> Iterator[tuple[Path, RowCache]]:
    """The folder of finished runs and the outcomes, in the cache, or nowhere if there is none."""
    cache = cache_folder()
    if cache is not None:
        yield cache / "scores", RowCache(cache / "outcomes")
        return
    with TemporaryDirectory() as scratch:
        yield Path(scratch) / "scores", RowCache(None)


def simulate_rows(
    plan: RowPlan, folder: Path, backend: Backend, progress: Progress, say: Say
) -> dict[str, str]:
    """Simulate the planned runs; ``plan`` then knows all outcomes. Returns the errors of runs that
    failed, by id: such a row has no outcome in any variant. ``folder`` keeps finished runs."""
    every = [run for id in _ids(plan) for runs in plan.runs.values() if (run := runs.get(id))]
    distinct = {run.key: run for run in every}
    if not distinct:
        return {}
    sweep = SweepPlan("", "score", "", (), None, tuple(distinct.values()), ())
    store, report = Store(folder, f"{VARIABLE}: {folder}"), Report(len(distinct))
    store.open(resume=True)
    with store.locked(f"another score is at work: wait for it, or set {VARIABLE}=off"):
        execute(sweep, store, backend, progress, report, say)
        planned = [(name, id, run) for name, runs in plan.runs.items() for id, run in runs.items()]
        failed = {
            id: report.failures[run.key] for _, id, run in planned if run.key in report.failures
        }
        for name, id, run in planned:
            if id not in failed:
                plan.finished(name, id, store.summary(run.key, run.name))
    for id in failed:
        plan.drop(id)
    return failed


def _ids(plan: RowPlan) -> Iterable[str]:
    return dict.fromkeys(id for runs in plan.runs.values() for id in runs)


def times_of(outcome: RowOutcome) -> ServerTimes:
    """The predictions of an outcome, without bands."""
    numbers = outcome.numbers
    ttft, tpot, rate = (numbers[name] for name in ("ttft_ms", "tpot_ms", "output_tokens_per_s"))
    return ServerTimes(ttft, tpot, rate, kv_full=numbers["kv_peak_share"] >= FULL)


REDRAWS = 8
"""Simulations of each such row: pairs of draws with opposite signs."""
BLOCKS_SIGMA = float(np.log1p(0.05)) / NORMAL_90
"""Of the KV blocks: 5 % either way, about one percent of a GPU's memory. Assumed."""


def redrawn(
    file: str,
    rows: Sequence[Measured],
    described: Variant,
    outcomes: Mapping[str, RowOutcome],
    where: tuple[Path, RowCache],
    backend: Backend,
    progress: Progress,
    say: Say,
) -> dict[str, dict[str, Floats]]:
    """Logarithms of the factors on a row's times under each draw, by id and metric, of the rows
    whose KV cache was full in ``outcomes``; ``described`` is what those were simulated as."""
    full = [
        row
        for row in rows
        if row.id in outcomes and outcomes[row.id].numbers["kv_peak_share"] >= FULL
    ]
    variants: dict[str, Variant] = {
        f"draw {n}": partial(drawn, described, outcomes, n) for n in range(REDRAWS)
    }
    plan = plan_rows(file, full, progress, variants, where[1])
    simulate_rows(plan, where[0], backend, progress, say)
    found = {}
    for row in full:
        numbers = [known[row.id].numbers for known in plan.known.values() if row.id in known]
        if len(numbers) == REDRAWS:
            base = outcomes[row.id].numbers
            found[row.id] = {
                metric: np.resize(
                    [np.log(one[f"{metric}_ms"] / base[f"{metric}_ms"]) for one in numbers], DRAWS
                )
                for metric in METRICS
            }
    return found


def drawn(
    described: Variant, outcomes: Mapping[str, RowOutcome], number: int, row: Measured
) -> dict[str, Any] | None:
    """The scenario of a row under one draw of op errors, host time and KV blocks."""
    scenario, outcome = described(row), outcomes[row.id]
    if scenario is None or outcome.shares is None:
        return None
    half = REDRAWS // 2
    at = number if number < half else DRAWS // 2 + number - half

    def factor(name: str, sigma: float) -> float:
        return float(np.exp(sigma * normals(name)[at]))

    engine, host = dict(scenario["engine"]), factor(HOST, HOST_SIGMA)
    for key in ("host_iteration_s", "host_sequence_s"):
        engine[key] *= host
    ops = {op: factor(op, sigma) for op, sigma in outcome.shares.sigmas.items() if op != HOST}
    blocks = round(outcome.numbers["num_blocks"] * factor("KV blocks", BLOCKS_SIGMA))
    cache = {**scenario["kv_cache"], "num_blocks": blocks}
    return {**scenario, "engine": {**engine, "op_scale": ops}, "kv_cache": cache}
