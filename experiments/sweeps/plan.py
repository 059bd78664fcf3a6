"""From a file to its runs, each checked, resolved and keyed before any of them starts.

A run's key is a hash of all inputs of its result."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.files import PACKAGE, files_sha256, user_path
from sarathi_sim.profiler.storage.strict import UserError, did_you_mean
from ..config.base import Assignments, Config, KeyPath, Source, assign_all, merge, overlap
from ..config.deployment import Deployment, deploy
from ..config.effects import Effects
from ..config.loading import Draft, check_effect, check_scenario, read_draft, refuse_of_session
from ..config.pools import shared_keys
from ..config.requests import build_requests, trace_path
from ..config.scenario import Scenario
from ..config.workload import TraceLengths
from .points import MOST_RUNS, Point, SweepSpec, expand

_MOST_KEPT = 500_000  # requests, about 130 MB
_MOST_SHOWN = 12


@dataclass(frozen=True)
class Run:
    """One run: its place in the sweep, and the resolved scenario that it simulates. ``point`` has
    the swept values by key path; ``scenario`` and ``seed`` are axes of their own. A probe has
    ``tables``, those that are kept: beside them its folder has a summary only, which also has
    :meth:`sarathi_sim.simulator.views.metrics.Analysis.after_warmup`."""

    key: str
    name: str
    seed: int
    point: Point
    scenario: Scenario
    tables: tuple[str, ...] | None = None


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep, in order. ``contrast`` is the axis whose values are compared."""

    file: str
    name: str
    description: str
    axes: tuple[str, ...]
    contrast: str | None
    runs: tuple[Run, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _SweptSource(Source):
    swept: tuple[KeyPath, ...] = ()

    def name(self, key: KeyPath) -> str:
        for path in self.swept:
            if overlap(path, key):
                return f"{self.file}: sweep: {'.'.join(key if len(key) > len(path) else path)}"
        return super().name(key)


class SharedRequests:
    """``build_requests`` with a cache for the last few workloads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[object, list[Request]] = OrderedDict()
        self._lock = Lock()  # a Dask worker may have several threads

    def __call__(self, scenario: Scenario, max_length: int, source: Source) -> list[Request]:
        lengths, changed = scenario.workload.lengths, 0
        if isinstance(lengths, TraceLengths):
            path = trace_path(lengths, source)
            changed = path.stat().st_mtime_ns if path.is_file() else 0
        key = (scenario.workload.model_dump_json(), scenario.seed, max_length, changed)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = build_requests(scenario, max_length, source)
            self._kept.move_to_end(key)
            while sum(map(len, self._kept.values())) > _MOST_KEPT and len(self._kept) > 1:
                self._kept.popitem(last=False)
            return self._kept[key]


def plan_sweep(
    config: Config, assignments: Assignments = (), progress: Progress = silent
) -> SweepPlan:
    """Read a sweep, check its runs and fill in their defaults. Raises UserError, a line per
    mistake, for everything that would stop a run at its start."""
    draft = read_draft(config, assignments)
    raw, several = draft.raw.get("sweep", {}), len(draft.overrides) > 1
    if not isinstance(raw, dict):
        raise draft.source.error("sweep", raw, "expected keys such as grid and seeds")
    # A file without a section has a run for each of its scenarios.
    spec = draft.source.checked(SweepSpec, raw, "sweep")
    where = f"{draft.source.file}: sweep"
    contrast = spec.contrast or ("policy" if "policy" in spec.grid else None)
    if several and not spec.contrast:
        contrast = "scenario"
    points = expand(spec, contrast, where)
    swept = tuple(dict.fromkeys(tuple(key.split(".")) for point in points for key in point))
    _check_keys(draft, spec, swept, where)
    further = ("scenario",) * several + ("seed",) * (spec.seeds is not None)
    axes = (*(".".join(key) for key in swept), *further)
    if contrast is not None and contrast not in axes:
        raise UserError(
            f"{where}.contrast: value {contrast!r}: must be one of {', '.join(axes) or 'no axes'}"
            f"{did_you_mean(contrast, axes)}"
        )
    seeds = _seeds(draft, spec)
    total = len(points) * len(draft.overrides) * len(seeds)
    if total > MOST_RUNS:
        raise UserError(
            f"{where}: describes {total:,} runs, scenarios and seeds counted: at most {MOST_RUNS:,}"
        )
    wanted = [(name, seed, point) for point in points for name in draft.overrides for seed in seeds]
    runs, notes, found = [], dict[str, None](), dict[str, None]()
    effects, requests_of = Effects(), SharedRequests()
    for number, (name, seed, point) in enumerate(wanted):
        progress("checking", number, len(wanted))
        override = draft.overrides[name]
        tree = merge(draft.raw, override) | ({} if seed is None else {"seed": seed})
        tree.pop("sweep", None)
        tree = assign_all(tree, point)
        source = _SweptSource(draft.source.file, name, override, draft.assigned, swept)
        try:
            scenario = check_scenario(tree, source)
            refuse_of_session(scenario, source)
            deployment = deploy(scenario, source, requests_of)
        except UserError as error:
            found |= dict.fromkeys(str(error).splitlines())
            if len(found) > 20:
                break
            continue
        effects.add(source, deployment)
        notes |= dict.fromkeys(deployment.remarks)
        resolved = deployment.scenario
        runs.append(Run(run_key(deployment, name), name, resolved.seed, point, resolved))
    if found:
        raise UserError("\n".join(found))
    check_effect(draft, points, where)
    effects.check()
    about = (draft.source.file, draft.header.name, draft.header.description)
    return SweepPlan(*about, axes, contrast, tuple(runs), tuple(notes))


def _seeds(draft: Draft, spec: SweepSpec) -> list[int] | list[None]:
    if spec.seeds is None:
        return [None]
    if isinstance(spec.seeds, list):
        return spec.seeds
    first = draft.raw.get("seed", 0)
    return [first + n for n in range(spec.seeds)] if isinstance(first, int) else [None]


def _check_keys(draft: Draft, spec: SweepSpec, swept: tuple[KeyPath, ...], where: str) -> None:
    if spec.seeds is not None and ("seed",) in swept:
        raise UserError(f"{where}: seed is swept twice, by seeds too")
    if isinstance(spec.seeds, list) and len(set(spec.seeds)) < max(len(spec.seeds), 1):
        raise UserError(f"{where}.seeds: value {spec.seeds}: a seed is given twice")
    for key in swept:
        if key[0] in ("scenarios", "sweep") or key == ("scenario",):
            raise UserError(f"{where}: {'.'.join(key)} cannot be swept: name a key of a scenario")
        for path in draft.assigned:
            if path[0] != "scenarios" and len(path) >= len(key) and overlap(path, key):
                raise UserError(
                    f"--set {'.'.join(path)}: has no effect, because the sweep sets "
                    f"{'.'.join(key)} itself"
                )


def describe(value: object) -> str | int | float | bool | None:
    """A swept value as one cell: a policy by its name and its other keys."""
    if isinstance(value, Mapping):
        rest = dict(value)
        tag = rest.pop("name", rest.pop("kind", None))
        settings = [f"{key} {describe(item)}" for key, item in rest.items()]
        return " ".join([*([str(tag)] if tag else []), ", ".join(settings)]).strip()
    if isinstance(value, list):
        return " ".join(str(describe(item)) for item in value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def coordinates(run: Run, axes: Iterable[str]) -> dict[str, Any]:
    """A run's cell by axis; for a mapping also its own keys, as ``policy.chunk_size``."""
    found: dict[str, Any] = {}
    own: dict[str, Any] = {"scenario": run.name, "seed": run.seed}
    for axis in axes:
        value = own[axis] if axis in own else run.point.get(axis)
        found[axis] = describe(value)
        if isinstance(value, Mapping):
            found |= {f"{axis}.{key}": describe(item) for key, item in value.items()}
    return found


def axes_rows(plan: SweepPlan) -> list[list[str]]:
    """A row for every axis: its values, and whether they are compared pair by pair."""
    rows, cells = [], [coordinates(run, plan.axes) for run in plan.runs]
    for axis in plan.axes:
        values = list(dict.fromkeys(str(cell.get(axis)) for cell in cells))
        many = len(values) > _MOST_SHOWN
        shown = [*values[: _MOST_SHOWN - 1], "…", values[-1]] if many else values
        note = "compared pair by pair" if axis == plan.contrast else ""
        rows.append([axis, f"{len(values)}: {', '.join(shown)}", note])
    return rows


# The code that a run's files depend on. The profiler's parts are those that read profiles.
_CODE = (
    *("policies/*.py", "simulator/*/*.py"),
    *(
        f"profiler/{room}/*.py"
        for room in ("storage", "facts", "bundle", "public", "physics", "kernels")
    ),
    *("experiments/config/*.py", "experiments/results.py"),
    "experiments/sweeps/jobs.py",
)
_LIBRARIES = ("numpy", "scipy", "scikit-learn", "pandas", "pyarrow")


@lru_cache(maxsize=2)
def code_fingerprint(*also: str) -> str:
    """Hash of the code that a result depends on, of further files, and of the versions of the
    numeric libraries: random streams, fits and file formats may change with them."""
    files = (path for pattern in (*_CODE, *also) for path in sorted(PACKAGE.glob(pattern)))
    return files_sha256(files, *(f"{library} {version(library)}\n" for library in _LIBRARIES))


def run_key(deployment: Deployment, name: str) -> str:
    """16 hexadecimal digits: the resolved scenario, its ``name``, the content of its files (model,
    devices, bundles, trace, policy) whatever their paths, and the code."""
    scenario = shared_keys(deployment.scenario, deployment.scenario.model_dump())
    # Without the devices' keys from which bundles are made: no simulation reads them.
    devices = [asdict(replace(pool.device, fitted=None)) for pool in deployment.pools]
    scenario |= {"model": asdict(deployment.model), "device": devices}
    if (ops := deployment.pools[-1].drafter) is not None:
        scenario["drafter"] = asdict(ops.model)
    for own in (scenario, *(scenario["disaggregation"] or {}).values()):
        if isinstance(own, dict) and own.get("speculation"):
            own["speculation"].pop("model")
        if isinstance(own, dict) and own is not scenario:
            own.pop("device", None)
    scenario["profiles"] = deployment.bundle_sha256
    if (calibration := deployment.scenario.calibration) is not None:
        scenario["calibration"] = files_sha256([user_path(calibration)])
    scenario["policy"].pop("file", None)  # its sha256 stays
    lengths = scenario["workload"]["lengths"]
    if lengths["kind"] == "trace":
        path = user_path(lengths["path"])
        lengths["path"] = _file_sha256(path, path.stat().st_mtime_ns)
    content = json.dumps([name, scenario, code_fingerprint()], sort_keys=True)
    return sha256(content.encode()).hexdigest()[:16]


@lru_cache(maxsize=8)
def _file_sha256(path: Path, changed: int) -> str:
    return sha256(path.read_bytes()).hexdigest()
