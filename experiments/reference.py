"""docs/reference.md: every configuration key, column of a trace, metric and file of a result.

``python -m sarathi_sim.experiments.reference docs`` writes it from the schema, the registries and
the shipped configurations, and docs/limits.md from ``profiler/storage/not_modelled.py``. No key,
name or metric is listed here by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.config.loading import CONFIGS
from sarathi_sim.experiments.config.scenario import PARAMETERS, Header, Scenario
from sarathi_sim.experiments.sweeps.points import SweepSpec
from sarathi_sim.profiler.storage import not_modelled
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.simulator.load.trace import NAMES, NEEDED
from sarathi_sim.simulator.views.metric_registry import METRICS

#: The files of a result's folder, and what they hold.
FILES = {
    "config.yaml": "the configuration, every default filled in; `sarathi-sim run` takes it again",
    "summary.json": "metrics of each scenario, ratios, bands, warnings, the origin of op times",
    "manifest.json": "size and SHA-256 of every file; only a folder with it is replaced",
    "SCENARIO/requests.parquet": "a row per request ([metrics.md](metrics.md))",
    "SCENARIO/iterations.parquet": "a row per micro-batch",
    "SCENARIO/ledger.csv": "a row per stage: what its time went to",
    "SCENARIO/token_gaps.parquet": "the distribution of the time between tokens",
    "figures/NAME.png, .svg": "the figures",
    "SCENARIO/timeline.json.gz": "with `--timeline`: a trace for Perfetto",
}
_SECTIONS: list[tuple[str, type[Any], str]] = [
    ("A scenario", Scenario, ""),
    ("Beside the scenarios", Header, ""),
    ("A sweep", SweepSpec, "sweep"),
]
_WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "yes or no"}


def page() -> str:
    """The page, in Markdown."""
    lines = [
        "# Reference",
        "",
        "`python -m sarathi_sim.experiments.reference docs` makes this page from the code.",
        "",
        "Keys go by their path: `cluster.tp` is the key `tp` of the section `cluster`, and",
        "`--set cluster.tp=8` sets it. Any key of a scenario may stand at the top level, for all",
        "scenarios, or within one.",
        "",
    ]
    for title, model, prefix in _SECTIONS:
        schema = model.model_json_schema()
        lines += [f"## {title}", ""]
        lines += _tables(schema, schema.get("$defs", {}), prefix)
    lines += ["## Columns of a trace", "", *_columns(), ""]
    lines += ["## Metrics", "", *_metrics(), ""]
    lines += ["## Files of a result", "", "| file | content |", "|---|---|"]
    lines += [f"| `{name}` | {content} |" for name, content in FILES.items()]
    return "\n".join([*lines, ""])


def _tables(schema: Mapping[str, Any], classes: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """The section's description and its table of keys, then those of the sections within."""
    if prefix:
        yield f"### `{prefix}`{_kind(schema)}"
        yield ""
    yield from (*_description(schema), "")
    inner: list[tuple[str, Mapping[str, Any]]] = []
    rows = []
    for key, form in schema.get("properties", {}).items():
        path = f"{prefix}.{key}" if prefix else key
        sections = [classes[name] for name in _references(form)]
        sections = [each for each in sections if each.get("properties")]
        # Sections with names of the user's own, such as workload.system_prompts.coding.
        named = f"{path}.NAME" if _by_name(form) else path
        inner += [(named, each) for each in sections]
        if "const" in form:
            continue
        kind = _type(form)
        default = "required" if key in schema.get("required", ()) else _default(form)
        rows.append((f"`{path}`", kind, default, *_meaning(path), _example(path)))
    if rows:
        yield "| key | type | default | unit | name | example |"
        yield "|---|---|---|---|---|---|"
        yield from (f"| {' | '.join(cell.replace('|', ' or ') for cell in row)} |" for row in rows)
        yield ""
    for path, section in inner:
        yield from _tables(section, classes, path)


def _kind(schema: Mapping[str, Any]) -> str:
    """Which of several forms of a section this is: ``, kind: zipf``."""
    for key in ("kind", "name"):
        if "const" in schema["properties"].get(key, {}):
            return f", `{key}: {schema['properties'][key]['const']}`"
    return ""


def _description(schema: Mapping[str, Any]) -> list[str]:
    """The class's docstring, in Markdown."""
    text = re.sub(r"``(.+?)``", r"`\1`", schema.get("description", ""))
    return [re.sub(r":\w+:`~?(.+?)`", r"`\1`", line) for line in text.splitlines()]


def _references(form: Mapping[str, Any]) -> Iterator[str]:
    """Names of the classes that a key's value may be of."""
    if "$ref" in form:
        yield form["$ref"].rpartition("/")[2]
    for inner in (*form.get("anyOf", ()), *form.get("oneOf", ())):
        yield from _references(inner)
    for section in (form.get("items"), *_by_name(form)):
        if isinstance(section, dict):
            yield from _references(section)


def _by_name(form: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The form of the values of a section whose keys are names of the user's own."""
    values = [form.get("additionalProperties"), *form.get("patternProperties", {}).values()]
    return [each for each in values if isinstance(each, dict)]


def _type(form: Mapping[str, Any]) -> str:
    if "anyOf" in form or "oneOf" in form:
        each = [_type(inner) for inner in form.get("anyOf", form.get("oneOf", ()))]
        return " or ".join(dict.fromkeys(kind for kind in each if kind != "null"))
    if "enum" in form:
        return ", ".join(f"`{value}`" for value in form["enum"])
    if form.get("type") == "array":
        return f"list: {_type(form['items'])}" if form.get("items") else "list"
    if "$ref" in form or form.get("type") == "object":
        return "section"
    word = _WORDS.get(form.get("type", ""), form.get("type", "any"))
    return f"{word}{_bounds(form)}"


def _bounds(form: Mapping[str, Any]) -> str:
    words = {
        "exclusiveMinimum": "above", "minimum": "from",
        "exclusiveMaximum": "below", "maximum": "to",
    }  # fmt: skip
    found = [f"{word} {_number(form[key])}" for key, word in words.items() if key in form]
    return f", {' '.join(found)}" if found else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and value < 1e9 else f"{value:g}"


def _default(form: Mapping[str, Any]) -> str:
    value = form.get("default")
    if value in (None, {}, [], "") or isinstance(value, dict):
        return ""
    return f"`{_shown(value)}`"


def _shown(value: object) -> str:
    """As YAML takes it, on one line."""
    return value if isinstance(value, str) else json.dumps(value)


def _meaning(path: str) -> tuple[str, str]:
    """Unit and name."""
    parameter = PARAMETERS.get(path.replace(".NAME", ""))
    return (parameter.unit, parameter.name) if parameter else ("", "")


@cache
def _shipped() -> dict[str, object]:
    """A value of each key that a shipped configuration sets."""
    found: dict[str, object] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        elif path not in found:
            found[path] = value

    for file in sorted(CONFIGS.glob("*.yaml")):
        content = read_mapping(file)
        for scenario in (content.get("scenarios") or {}).values():
            walk(scenario, "")
        walk({key: value for key, value in content.items() if key != "scenarios"}, "")
    return found


def _example(path: str) -> str:
    value = _shipped().get(path)
    text = "" if value is None else _shown(value)
    return f"`{text}`" if text and len(text) <= 60 and "\n" not in text else ""


def _columns() -> Iterator[str]:
    yield "| meaning | names |"
    yield "|---|---|"
    for meaning, names in NAMES.items():
        needed = " (needed)" if meaning in NEEDED else ""
        yield f"| `{meaning}`{needed} | {', '.join(f'`{name}`' for name in names)} |"
    yield ""
    yield "[workloads.md](workloads.md#traces) describes the files and units."


def _metrics() -> Iterator[str]:
    yield "[metrics.md](metrics.md) has the formulas."
    yield ""
    yield "| key | name | unit | better | statistics |"
    yield "|---|---|---|---|---|"
    for metric in METRICS.values():
        statistics = ", ".join(f"`{each}`" for each in metric.statistics)
        better = {"less": "less", "more": "more"}.get(metric.better, "")
        yield f"| `{metric.key}` | {metric.name} | {metric.unit} | {better} | {statistics} |"


def main() -> None:
    """Write reference.md and limits.md to the folder named on the command line."""
    for name, text in (("reference.md", page()), ("limits.md", not_modelled.page())):
        write_whole(Path(sys.argv[1]) / name, text)


if __name__ == "__main__":
    main()
