"""The work of a worker: simulate some runs and return the bytes of their result folders."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.storage.child import Told, silent
from sarathi_sim.profiler.storage.files import user_path
from sarathi_sim.simulator.views.metrics import Analysis
from ..config.base import Source
from ..config.deployment import deploy
from ..config.scenario import POOLS, Scenario
from ..results import (
    FORMAT,
    REQUESTS,
    SUMMARY,
    TOKEN_GAPS,
    json_bytes,
    parquet_bytes,
    run_files,
    stored_files,
)
from .plan import Run, SharedRequests, run_key

_requests_of = SharedRequests()


@dataclass(frozen=True)
class Job:
    """A run as it is sent to a worker. Relative paths in it start at ``base``."""

    run: Run
    base: str


@dataclass(frozen=True)
class JobResult:
    """The files of a run's folder, or the reason why there are none: ``error`` is one line,
    ``details`` the traceback. ``seconds``: the time of the run."""

    key: str
    files: dict[str, bytes]
    seconds: float
    error: str = ""
    details: str = ""


def work(jobs: list[Job], told: Told = silent) -> list[JobResult]:
    """Simulate runs one after the other. An exception in one does not stop the others."""
    return [_one(job) for job in jobs]


def _one(job: Job) -> JobResult:
    began, said, details = time.perf_counter(), "", ""
    files: dict[str, bytes] = {}
    try:
        files = folder_files(job)
    except Exception as error:
        kind, details = type(error).__name__, traceback.format_exc()
        said = f"{kind}: {' '.join(str(error).split()) or kind}"
    return JobResult(job.run.key, files, time.perf_counter() - began, said, details)


def folder_files(job: Job) -> dict[str, bytes]:
    """The files of one run's folder by name: a result such as ``sarathi-sim run`` writes, without
    the iterations and the figures; of a probe its summary and some tables. Raises RuntimeError if
    this worker's inputs are not the sender's."""
    run, name = job.run, job.run.name
    where = Source(f"run {run.key}", name, {}, ())
    deployment = deploy(located(run.scenario, Path(job.base)), where, _requests_of)
    if (found := run_key(deployment, name)) != run.key:
        raise RuntimeError(
            f"the worker has another model, device, profile, trace or code: its key of this run is "
            f"{found}, not {run.key}"
        )
    analysis = Analysis(deployment.simulate())
    summary = deployment.summary(analysis)
    if run.tables is None:
        files = run_files({name: (run.scenario, analysis)}, {"name": name})
    else:
        summary["after_warmup"] = analysis.after_warmup()
        makes: dict[str, Callable[[], Any]] = {
            REQUESTS: lambda: analysis.request_columns,
            TOKEN_GAPS: analysis.gaps_after_warmup,
        }
        files, config = stored_files({name: run.scenario})
        files |= {f"{name}/{file}": parquet_bytes(makes[file]()) for file in run.tables}
        text = json.dumps({"name": name, **config}, ensure_ascii=False)  # which is YAML
        files["config.yaml"] = text.encode()
    content: dict[str, Any] = {"format": FORMAT, "name": name, "key": run.key}
    content |= {"scenarios": {name: summary}, "ratios": {}, "reference": {}}
    return {**files, SUMMARY: json_bytes(content)}


def located(scenario: Scenario, base: Path) -> Scenario:
    """The scenario with its relative paths made absolute, where ``base`` has such a file."""

    def find(text: str) -> str:
        path = base / user_path(text)
        return str(path) if path.exists() else text

    lengths = scenario.workload.lengths
    if lengths.kind == "trace":
        trace = lengths.model_copy(update={"path": find(lengths.path)})
        scenario = scenario.having("workload", lengths=trace)
    named = {key: getattr(scenario, key) for key in ("model", "device", "profiles", "calibration")}
    found: dict[str, Any] = {key: find(text) for key, text in named.items() if text is not None}
    if (spec := scenario.speculation) is not None and spec.model is not None:
        found["speculation"] = spec.model_copy(update={"model": find(spec.model)})
    if (both := scenario.disaggregation) is not None:
        pools = {pool: dict(getattr(both, pool)) for pool in POOLS}
        for own in pools.values():
            own |= {"device": find(own["device"])} if "device" in own else {}
        found["disaggregation"] = both.model_copy(update=pools)
    return scenario.model_copy(update=found)
