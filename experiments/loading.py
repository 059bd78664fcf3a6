"""From a YAML file and ``--set`` options to checked scenarios, or to one message per mistake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from experiments.config import Header, Name, Ratio, Scenario
from experiments.errors import ConfigError
from experiments.messages import mistakes
from experiments.metric_paths import SHAPE, metric
from experiments.yaml_reader import parse_yaml, read_mapping

CONFIGS = Path(__file__).parent / "configs"
KeyPath = tuple[str, ...]

# Files and folders of a result that a scenario must not be called like.
_RESERVED = ("figures", "config.yaml", "summary.json")
_FILE_KEYS = (*Header.model_fields, "scenarios")
# The keys that say which alternative a mapping is.
_TAGS = ("kind", "name")


@dataclass(frozen=True)
class Source:
    """Where the values of one scenario come from, for messages.

    ``override`` is what the scenario itself sets, ``assigned`` the key paths of ``--set``.
    """

    file: str
    scenario: str
    override: Mapping[str, Any]
    assigned: tuple[KeyPath, ...]

    def name(self, key: KeyPath) -> str:
        """``FILE: key``, as the user wrote it."""
        if any(key[: len(path)] == path[: len(key)] for path in self.assigned):
            return f"--set {'.'.join(key)}"
        if _has(self.override, key):
            key = ("scenarios", self.scenario, *key)
        return f"{self.file}: {'.'.join(key)}" if key else self.file

    def error(self, key: str, value: object, problem: str) -> ConfigError:
        """What to raise when a value cannot be used although its type is right."""
        return ConfigError(f"{self.name(tuple(key.split('.')))}: value {value!r}: {problem}")


@dataclass(frozen=True)
class Experiment:
    """A checked file: named scenarios, and the ratios to report."""

    file: str
    name: str
    description: str
    scenarios: dict[str, Scenario]
    compare: dict[str, Ratio]
    sources: dict[str, Source]


def shipped_configs() -> list[str]:
    """Names of the configurations that come with the package, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def load_experiment(config: str | Path, assignments: Iterable[str] = ()) -> Experiment:
    """Read a configuration: the path of a file, or the name of a shipped one.

    ``assignments`` are ``key.path=value``, applied to the top level in order (a scenario by
    ``scenarios.NAME.key.path=value``). Raises ConfigError with one line per mistake.
    """
    path = _find(str(config))
    raw = read_mapping(path)
    assigned = tuple(_assign(raw, text) for text in assignments)
    overrides = raw.pop("scenarios", None)
    header_keys = {key: raw.pop(key) for key in list(raw) if key in Header.model_fields}
    base_source = Source(str(path), "", {}, assigned)
    found: list[str] = []
    try:
        header = Header.model_validate(header_keys)
    except ValidationError as error:
        found += mistakes(error, Header, header_keys, base_source.name)
        raise ConfigError("\n".join(found)) from None
    overrides = {header.name: {}} if overrides is None else _check_names(overrides, path)

    scenarios: dict[str, Scenario] = {}
    sources: dict[str, Source] = {}
    for name, override in overrides.items():
        merged = _merge(raw, override)
        local = tuple(
            p[2:] if p[:2] == ("scenarios", name) else p for p in assigned if _applies(p, name)
        )
        sources[name] = Source(str(path), name, override, local)
        try:
            scenarios[name] = Scenario.model_validate(merged)
        except ValidationError as error:
            also = () if override.keys() - Scenario.model_fields.keys() else _FILE_KEYS
            found += mistakes(error, Scenario, merged, sources[name].name, also)
    if found:
        # A mistake at the top level shows in every scenario: say it once.
        raise ConfigError("\n".join(dict.fromkeys(found)))
    _check_effect(raw, overrides, assigned)
    _check_ratios(header, scenarios, base_source)
    return Experiment(
        str(path), header.name, header.description, scenarios, header.compare, sources
    )


def _find(config: str) -> Path:
    path = Path(config)
    if path.is_file():
        return path
    shipped = CONFIGS / f"{config}.yaml"
    if path.name == config and config in shipped_configs():
        return shipped
    raise ConfigError(
        f"{config}: no such file, nor a shipped configuration ({', '.join(shipped_configs())})"
    )


def _assign(raw: dict[str, Any], text: str) -> KeyPath:
    """Apply one ``key.path=value``; returns the path."""
    where, equals, value = text.partition("=")
    path = tuple(where.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {text}: expected KEY.PATH=VALUE, as in --set seed=3")
    change = parse_yaml(value, f"--set {text}")
    for key in reversed(path):
        change = {key: change}
    raw.update(_merge(raw, change))
    return path


def _applies(path: KeyPath, scenario: str) -> bool:
    return path[0] != "scenarios" or path[1:2] == (scenario,)


def _check_names(overrides: Any, path: Path) -> dict[str, dict[str, Any]]:
    if not isinstance(overrides, dict) or not overrides:
        raise ConfigError(
            f"{path}: scenarios: value {overrides!r}: expected names with what each changes"
        )
    for name, override in overrides.items():
        try:
            TypeAdapter(Name).validate_python(name)
        except ValidationError:
            raise ConfigError(
                f"{path}: scenarios: value {name!r}: a name is 1 to 64 letters, digits, '_', '.' "
                "or '-', and begins with a letter or digit"
            ) from None
        if name.lower() in _RESERVED:
            raise ConfigError(f"{path}: scenarios: value {name!r}: this name is taken by a file")
        if override is None:
            overrides[name] = {}
        elif not isinstance(override, dict):
            raise ConfigError(
                f"{path}: scenarios.{name}: value {override!r}: expected keys and values"
            )
    return overrides


def _merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """``override`` laid over ``base``, mapping by mapping.

    A mapping of another kind (``kind: zipf`` over ``kind: fixed``) replaces the one below it: their
    other keys have nothing to do with each other.
    """
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and _same_kind(below, value):
            value = _merge(below, value)
        merged[key] = value
    return merged


def _same_kind(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    pairs = [(below.get(tag), above.get(tag)) for tag in _TAGS]
    return all(a == b for a, b in pairs if isinstance(a, str) and isinstance(b, str))


def _has(tree: Mapping[str, Any], key: KeyPath) -> bool:
    node: Any = tree
    for part in key:
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return bool(key)


def _get(tree: Mapping[str, Any], key: KeyPath) -> Any:
    node: Any = tree
    for part in key:
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _check_effect(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], assigned: tuple[KeyPath, ...]
) -> None:
    """A ``--set`` that every scenario sets again itself would do nothing, silently."""
    for path in assigned:
        if path[0] in ("scenarios", *Header.model_fields):
            continue
        wanted = _get(raw, path)
        merged = [_get(_merge(raw, override), path) for override in overrides.values()]
        if all(value != wanted for value in merged):
            key = ".".join(path)
            first = next(iter(overrides))
            raise ConfigError(
                f"--set {key}: value {wanted!r}: has no effect, because every scenario sets this "
                f"itself; change one with --set scenarios.{first}.{key}=..."
            )


def _check_ratios(header: Header, scenarios: Mapping[str, Scenario], source: Source) -> None:
    for name, ratio in header.compare.items():
        metric(SHAPE, ratio.metric, source.name(("compare", name, "metric")))
        for scenario in ratio.over:
            if scenario not in scenarios:
                raise source.error(
                    f"compare.{name}.over", scenario, f"one of {', '.join(scenarios)}"
                )
