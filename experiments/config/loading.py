"""From a YAML file and ``--set`` options to checked scenarios, or to one message per mistake; and
back to what a result keeps."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sarathi_sim.profiler.storage.files import read_bounded, user_path
from sarathi_sim.profiler.storage.plain_yaml import parse_yaml, read_mapping
from sarathi_sim.profiler.storage.strict import SpecError, UserError, did_you_mean
from sarathi_sim.simulator.views.metric_registry import METRICS, percentile, quantity
from .base import (
    Assignments,
    Config,
    KeyPath,
    Name,
    Source,
    assign,
    assign_all,
    get,
    has,
    key_path,
    merge,
    without,
)
from .policy import (
    FilePolicy,
    SessionPolicy,
    read_policy,
    session_policy,
)
from .pools import NEEDED, acting, check_pools, shared_keys, written
from .scenario import POOLS, Header, Ratio, Scenario, Validation

CONFIGS = Path(__file__).parents[1] / "configs"

# Files and folders of a result, which are no names for a scenario.
_RESERVED = ("figures", "config.yaml", "summary.json")
TRACE_PATH = ("workload", "lengths", "path")
_OF_YAML = (Mapping, list, str, int, float, type(None))
_FILE_KEYS = (*Header.model_fields, "scenarios", "sweep")


@dataclass(frozen=True)
class Experiment:
    """A checked file: named scenarios, and the ratios to report."""

    file: str
    name: str
    description: str
    scenarios: dict[str, Scenario]
    compare: dict[str, Ratio]
    sources: dict[str, Source]
    validation: Validation
    runs: dict[str, str]


def shipped_configs() -> list[str]:
    """Names of the configurations that come with the package, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@dataclass(frozen=True)
class Draft:
    """A file with the values of the ``--set`` options, not yet turned into scenarios. ``raw`` has
    the keys that all scenarios share, ``overrides`` the changes of each."""

    header: Header
    raw: dict[str, Any]
    overrides: dict[str, dict[str, Any]]
    assigned: tuple[KeyPath, ...]
    source: Source


def load_experiment(config: Config, assignments: Assignments = ()) -> Experiment:
    """Read a configuration. ``assignments`` are applied to the top level in order (a scenario by
    ``scenarios.NAME.key.path=value``). Raises UserError with one line per mistake."""
    draft = read_draft(config, assignments)
    if "sweep" in draft.raw:
        raise UserError(
            f"{draft.source.file}: sweep: this file describes many runs: use sarathi-sim sweep, "
            "or sarathi-sim sweep --dry-run to list them"
        )
    header, source = draft.header, draft.source
    scenarios: dict[str, Scenario] = {}
    sources: dict[str, Source] = {}
    found: list[str] = []
    for name, override in draft.overrides.items():
        sources[name] = replace(source, scenario=name, override=override)
        try:
            scenarios[name] = check_scenario(merge(draft.raw, override), sources[name])
        except UserError as error:
            found += str(error).splitlines()
    if found:
        # A mistake at the top level shows in every scenario: say it once.
        raise UserError("\n".join(dict.fromkeys(found)))
    check_effect(draft)
    _check_ratios(header, scenarios, source)
    for name in header.runs.keys() - scenarios.keys():
        raise source.error("runs", name, f"one of {', '.join(scenarios)}")
    return Experiment(
        source.file,
        header.name,
        header.description,
        scenarios,
        header.compare,
        sources,
        header.validation,
        header.runs,
    )


def read_draft(config: Config, assignments: Assignments = ()) -> Draft:
    """Read a configuration as :func:`load_experiment` does, up to its scenarios' own keys."""
    if isinstance(config, Mapping):
        path, raw = Path("configuration"), {"name": "session", **_plain(config)}
    else:
        path = _find(str(config))
        raw = read_mapping(path)
    if isinstance(assignments, Mapping):
        given = [(key, key, _plain(value)) for key, value in assignments.items()]
    else:
        given = [_parsed(text) for text in assignments]
    assigned = tuple(_assign(raw, *one) for one in given)
    overrides = raw.pop("scenarios", None)
    source = Source(str(path), "", {}, assigned)
    raw = with_whole_paths(raw, source)
    header_keys = {key: raw.pop(key) for key in list(raw) if key in Header.model_fields}
    header = source.checked(Header, header_keys)
    named = {header.name: {}} if overrides is None else _check_names(overrides, source)
    for name, override in named.items():
        own = replace(source, scenario=name, override=override)
        named[name] = with_whole_paths(override, own)
    return Draft(header, raw, named, assigned, source)


def with_whole_paths(tree: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """The tree with the whole paths of the files that it names: a relative path starts from
    :meth:`Source.folder`, and a result that keeps the tree may be read from any folder."""
    found = dict(tree)
    for key in (*_PATHS, *_NAMES):
        path = get(found, key) if has(found, key) else None
        if isinstance(path, str) and path and "\0" not in path:
            with suppress(SpecError):  # of a ~user without a home: its reader says so
                whole = (source.folder(key) / user_path(path)).absolute()
                named = whole.suffix in (".json", ".yaml") or (whole / "config.json").is_file()
                if named or key in _PATHS:
                    found = assign(found, key, str(whole))
    return found


_PATHS = (TRACE_PATH, ("calibration",), ("profiles",))
_OF_POOLS = (("device",), ("speculation", "model"))
_NAMES = (
    *(("model",), *_OF_POOLS),
    *(("disaggregation", pool, *key) for pool in POOLS for key in _OF_POOLS),
)
"""Keys that hold the name of a model or a device, or a path."""


def check_scenario(merged: Mapping[str, Any], source: Source) -> Scenario:
    """The scenario that ``merged`` describes. Raises UserError, a line per mistake."""
    merged = with_whole_paths(merged, source)
    policy = merged.get("policy")
    if isinstance(policy, Mapping) and "file" in policy:
        merged = {**merged, "policy": read_policy(policy, source)}
    elif "policy" in merged and not isinstance(policy, _OF_YAML):
        merged = {**merged, "policy": session_policy(policy, source)}
    also = () if source.override.keys() - Scenario.model_fields.keys() else _FILE_KEYS
    scenario = source.checked(Scenario, merged, also=also)
    check_pools(scenario, source)
    return scenario


def _find(config: str) -> Path:
    path = user_path(config)
    if path.is_file():
        return path
    shipped = CONFIGS / f"{config}.yaml"
    if path.name == config and config in shipped_configs():
        return shipped
    raise UserError(
        f"{config}: no such file, nor a shipped configuration ({', '.join(shipped_configs())})"
    )


def _plain(tree: Any) -> Any:
    """A copy of nested mappings and sequences, as YAML gives them."""
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(value) for value in tree] if isinstance(tree, list | tuple) else tree


def _parsed(text: str) -> tuple[str, str, Any]:
    """A ``key.path=value``, its key path and its value."""
    where, equals, value = text.partition("=")
    if not equals:
        raise _no_assignment(text)
    return text, where, parse_yaml(value, f"--set {text}")


def _no_assignment(text: str) -> UserError:
    said = " ".join(text.split())
    return UserError(f"--set {said}: expected KEY.PATH=VALUE, as in --set seed=3")


def _assign(raw: dict[str, Any], text: str, where: str, value: Any) -> KeyPath:
    """Apply one value at a key path, given as ``text``; returns the path."""
    path = key_path(where.strip())
    if path is None:
        raise _no_assignment(text)
    given = raw.get("scenarios")
    names = list(given) if given and isinstance(given, dict) else [str(raw.get("name"))]
    if path[0] == "scenarios" and len(path) > 2 and path[1] not in names:
        raise UserError(
            f"--set {'.'.join(path)}: no scenario is called {path[1]}"
            f"{did_you_mean(path[1], names)}; there are {', '.join(names)}"
        )
    changed = assign(raw, path, value)
    raw.clear()
    raw.update(changed)
    return path


def _check_names(overrides: Any, source: Source) -> dict[str, dict[str, Any]]:
    if not isinstance(overrides, dict) or not overrides:
        raise source.error("scenarios", overrides, "expected scenario names, each with its keys")
    lowered: set[str] = set()
    for name, override in overrides.items():
        try:
            TypeAdapter(Name).validate_python(name)
        except ValidationError:
            problem = (
                "a name is 1 to 64 letters, digits, '_', '.' or '-', "
                "and begins with a letter or digit"
            )
            raise source.error("scenarios", name, problem) from None
        if name.lower() in _RESERVED:
            raise source.error("scenarios", name, "this name is taken by a file")
        if name.lower() in lowered:  # on some systems their folders would be the same
            raise source.error(
                "scenarios", name, "another name differs in upper and lower case only"
            )
        lowered.add(name.lower())
        if override is None:
            overrides[name] = {}
        elif not isinstance(override, dict):
            raise source.error(f"scenarios.{name}", override, "expected keys and values")
    return overrides


def check_effect(
    draft: Draft, points: Collection[Mapping[str, Any]] = ({},), space: str = ""
) -> None:
    """Refuse a key of the file, or a ``--set``, that every scenario, or both of its pools,
    override, and such an axis of the ``points`` of a ``space``: it would have no effect. Raises
    UserError."""
    raw, overrides, source = draft.raw, draft.overrides, draft.source
    needed = [path for path in draft.assigned if path in NEEDED]
    for path in (*needed, *written(raw)):
        free = [name for name, override in overrides.items() if not has(override, path)]
        if not free:
            own = ".".join(("scenarios", next(iter(overrides)), *path))
            problem = "has no effect, because every scenario sets this itself"
            raise UserError(f"{source.name(path)}: {problem}; change one with --set {own}=...")
        _check_reach(draft, points, free, path, source.name(path))
    for axis in dict.fromkeys(key for point in points for key in point):
        _check_reach(draft, points, overrides, tuple(axis.split(".")), f"{space}: {axis}")
    for name, override in overrides.items():
        own_source = replace(source, scenario=name, override=override)
        for path in written(override):
            _check_reach(draft, points, [name], path, own_source.name(path))


def _check_reach(
    draft: Draft,
    points: Collection[Mapping[str, Any]],
    names: Collection[str],
    key: KeyPath,
    where: str,
) -> None:
    """Refuse a key that both pools override in all of these scenarios, at all points."""
    hidden = False
    for point, name in product(points, names):
        tree = assign_all(merge(draft.raw, draft.overrides[name]), point)
        if has(tree, key):
            if acting(tree) != acting(without(tree, key)):
                return
            hidden = True
    if hidden:
        inside = ("disaggregation", POOLS[-1], *key)
        own = next((name for name in names if has(draft.overrides[name], inside)), None)
        there = ".".join(inside if own is None else ("scenarios", own, *inside))
        problem = "has no effect, because both pools set this themselves"
        raise UserError(f"{where}: {problem}; change one with --set {there}=...")


def _check_ratios(header: Header, scenarios: Mapping[str, Scenario], source: Source) -> None:
    for name, ratio in header.compare.items():
        check_metric(ratio.metric, source.name(("compare", name, "metric")))
        for scenario in ratio.over:
            if scenario not in scenarios:
                problem = f"one of {', '.join(scenarios)}"
                raise source.error(f"compare.{name}.over", scenario, problem)


# The dotted names of a summary's numbers ------------------------------------------------------


def _shape() -> dict[str, Any]:
    """Zeros where a summary has numbers."""
    shape: dict[str, Any] = {}
    steady: dict[str, Any] = {"state": ""}
    for one in METRICS.values():
        value: Any = dict.fromkeys(one.statistics, 0.0) or (0 if one.whole else 0.0)
        if one.key.startswith("steady."):
            steady[one.key.removeprefix("steady.")] = value
        elif one.in_summary:
            shape[one.key] = value
        if one.grows:
            steady[one.key] = value
    return shape | {"steady": steady}


SHAPE: dict[str, Any] = _shape()
"""The keys of :meth:`sarathi_sim.simulator.views.metrics.Analysis.summary`: the metrics that a file
can name before a run.

Bands and warnings, which a run adds, are no numbers to compare."""


def check_metric(path: str, where: str) -> None:
    """Raise UserError, naming ``where``, for a path that names no metric."""
    found = quantity(path)
    if found is None or percentile(found.statistic) is None:
        metric(SHAPE, path, where)


def metric(summary: Mapping[str, Any], path: str, where: str) -> float:
    """The number at a dotted path. Raises UserError, naming ``where``, if there is none."""
    node: Any = summary
    for part in re.split(r"\.(?!\d+$)", path):  # p99.9 is one word
        if not isinstance(node, Mapping) or part not in node:
            allowed = list(node) if isinstance(node, Mapping) else ["nothing below a number"]
            problem = f"{part} is not one of {', '.join(allowed)}{did_you_mean(part, allowed)}"
            raise UserError(f"{where}: value {path!r}: {problem}")
        node = node[part]
    if not isinstance(node, int | float):
        below = ", ".join(f"{path}.{key}" for key in node) if isinstance(node, Mapping) else ""
        problem = f"is not a number{'; one of ' if below else ''}{below}"
        raise UserError(f"{where}: value {path!r}: {problem}")
    return float(node)


# What a result keeps --------------------------------------------------------------------------


def refuse_of_session(scenario: Scenario, source: Source) -> None:
    """Raises UserError for a session's policy: no file and no other process can hold it."""
    if isinstance(scenario.policy, SessionPolicy):
        problem = (
            "is an object of this session, which a folder cannot keep: write the policy to a file, "
            "and name it (file: mine.py, name: ...)"
        )
        raise source.error("policy", scenario.policy.name, problem)


def stored(scenario: Scenario, name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A resolved scenario as in a result's ``config.yaml``, and the files stored with it. A user's
    policy and calibration are stored, so that the result can be simulated again anywhere; profiles
    are stored as absolute paths, so on this machine it can be from any folder."""
    content, policy = shared_keys(scenario, scenario.model_dump()), scenario.policy
    if scenario.profiles:
        content["profiles"] = str(user_path(scenario.profiles).absolute())
    files: dict[str, bytes] = {}
    if scenario.calibration:
        content["calibration"] = f"{name}/calibration.yaml"
        files[content["calibration"]] = read_bounded(user_path(scenario.calibration))
    if isinstance(policy, FilePolicy):
        content["policy"]["file"] = f"{name}/policy.py"
        files[content["policy"]["file"]] = policy.code.encode()
    return content, files
