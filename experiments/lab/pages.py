"""Pages and tables of the documentation that are made from the code and the stored fits.

``python -m sarathi_sim.experiments.lab.pages docs`` writes docs/reference, docs/model/limits.md and
the tables of the shipped kernels' errors, docs/lab/kernel_errors*.md.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from sarathi_sim.profiler.facts.formats import WEIGHT_DTYPES
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, MOE
from sarathi_sim.profiler.kernels.stack_attention import STATE
from sarathi_sim.profiler.kernels.stack_file import KernelFit, StackSpec
from sarathi_sim.profiler.storage.files import data_dir, write_whole
from sarathi_sim.profiler.storage.not_modelled import LIMITS, Kind
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.simulator.load.trace import NAMES, NEEDED
from sarathi_sim.simulator.views.metric_registry import METRICS
from ..config.scenario import PARAMETERS, Header, Scenario
from ..report import render
from ..report.score_answers import by_device, matrix, models, support_section
from ..run.support import Combination, supported
from ..sweeps.points import SweepSpec
from .fit.accuracy import by_class, scores_of, shipped_stacks

Rows = Iterator[Sequence[str]]
Schema = Mapping[str, Any]
"""A JSON schema, or a part of one."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], ruler: str = "") -> list[str]:
    """The lines of a table and an empty one; all columns are aligned as the reader likes."""
    cells = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return [cells[0], ruler or f"|{'---|' * len(header)}", *cells[1:], ""]


def markdown(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A titled table of numbers; the first column is left-aligned."""
    ruler = f"| --- |{' ---: |' * (len(header) - 1)}"
    return "\n".join([f"## {title}", "", *table(header, rows, ruler)])


def update(page: str, tables: str, some: bool = False) -> str:
    """The page with the text between ``<!-- table: TITLE -->`` and ``<!-- end -->`` replaced by the
    table of that title. Raises KeyError for a missing table, unless ``some`` may stay unchanged."""
    parts = dict(re.findall(r"^## (.+?)\n\n((?:\|.*\n)+)", tables, re.MULTILINE))

    def replaced(match: re.Match[str]) -> str:
        if some and match[2] not in parts:
            return match[0]
        return f"{match[1]}\n\n{parts[match[2]]}\n<!-- end -->"

    return re.sub(r"(<!-- table: (.+?) -->).*?<!-- end -->", replaced, page, flags=re.DOTALL)


# docs/reference: commands, configuration keys, columns of a trace, metrics, models, files ---------

_SECTIONS: list[tuple[str, type[Any], str]] = [
    ("A scenario", Scenario, ""),
    ("Beside the scenarios", Header, ""),
    ("A sweep", SweepSpec, "sweep"),
]
_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "yes or no"}
_BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "from",
    "exclusiveMaximum": "below",
    "maximum": "to",
}
_FILES = """# Files: every field, with its unit

`python -m sarathi_sim.experiments.lab.pages docs` makes this page from `data/schema.yaml`.

The files of a command are an interface. `schema` in every `summary.json`, and in what `--json`
prints, is the version of this page: {version}. It changes when a field is renamed or dropped, or
changes its meaning. A new field does not change it.

A folder also holds `config.yaml`, the configuration with every default (`sarathi-sim run` accepts
it); `manifest.json`, the size and SHA-256 of every file; `figures/NAME.png` and `.svg`. `run
--timeline` adds `SCENARIO/timeline.json.gz`, a trace for Perfetto. `recommend` adds `winner.yaml`,
`launch.sh` and `load.sh`. `capacity` and `recommend` add `probes/`, the runs of the search.

In a path `*` is any name and `[]` every item of a list. METRIC is a metric of
[metrics.md](metrics.md) and its statistic, such as `ttft_s.p99`; ACCOUNT is an account of the
bubble ledger, KEY a swept key, CLAUSE a clause of an SLO, `**` a tree that another page describes.
A share is from 0 to 1. A load is in requests/s or clients, as `load` says. A number that does not
exist is null.
"""
_CONFIGURATION = """# Configuration: every key

`python -m sarathi_sim.experiments.lab.pages docs` makes this page from the code.

A key is written as a path: `cluster.tp` is the key `tp` of the section `cluster`, and
`--set cluster.tp=8` sets it. A key of a scenario may stand at the top level, for all scenarios, or
inside one scenario.
"""
_COMMANDS = """# Commands: every option

`python -m sarathi_sim.experiments.lab.pages docs` makes this page: what `--help` prints.
"""


def commands() -> str:
    """docs/reference/commands.md."""
    app, lab = (import_module(f"sarathi_sim.experiments.{name}").app for name in ("cli", "lab.cli"))
    own, proofs = (vars(get_command(one))["commands"] for one in (app, lab))
    names = [*own, *(f"lab {name}" for name in proofs)]
    lines = [_COMMANDS]
    for name in names:
        said = CliRunner().invoke(app, [*name.split(), "--help"], terminal_width=100).output
        usage = said.replace("Usage: root", "Usage: sarathi-sim").rstrip()
        lines += [f"## {name}", "", "```console", usage, "```", ""]
    return "\n".join(lines)


def configuration() -> str:
    """docs/reference/configuration.md."""
    lines = [_CONFIGURATION]
    for title, model, prefix in _SECTIONS:
        schema = model.model_json_schema()
        lines += [f"## {title}", ""]
        lines += _tables(schema, schema.get("$defs", {}), prefix)
    names = [
        (f"`{meaning}`{' (needed)' * (meaning in NEEDED)}", _quoted(names))
        for meaning, names in NAMES.items()
    ]
    lines += ["## Columns of a trace", "", *table(("meaning", "names"), names)]
    lines += ["[Traces and logs](../server/traces.md) describes the files and units."]
    return "\n".join(lines) + "\n"


def listed() -> str:
    """The tables of docs/reference/metrics.md and models.md, each under its title."""
    better = {"less": "less", "more": "more"}
    metrics = [
        (f"`{m.key}`", m.name, m.unit, better.get(m.better, ""), _quoted(m.statistics))
        for m in METRICS.values()
    ]
    section: Any = models().section
    (grid,) = section.tables
    lines = ["## Metrics", "", *table(("key", "name", "unit", "better", "statistics"), metrics)]
    return "\n".join([*lines, "## Models", "", *table(grid.headings, grid.rows)])


def schema() -> dict[str, Any]:
    """What results hold, with units: ``data/schema.yaml``."""
    return read_mapping(data_dir() / "schema.yaml")


def fields_of(result: Schema, groups: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The fields of a result of the schema by path, those of its groups in their places."""
    fields: dict[str, str] = {}
    for name, places in result.get("groups", {}).items():
        for place in places.split(", "):
            fields |= {f"{place}{path}": unit for path, unit in groups[name].items()}
    return {**fields, **result["fields"]}


def files() -> str:
    """docs/reference/files.md."""
    content = schema()
    lines = [_FILES.format(version=content["version"])]
    for name, result in content["results"].items():
        found = fields_of(result, content["groups"])
        lines += [f"## `{name}`", "", f"`summary.json`, with `format`: `{result['format']}`.", ""]
        lines += table(("field", "unit", ""), _with_units(found))
    for name, result in content["tables"].items():
        lines += [f"## `{name}`: {result['title']}", ""]
        lines += table(("column", "unit", ""), _with_units(result["columns"]))
    return "\n".join(lines)


def _with_units(fields: Mapping[str, str]) -> list[tuple[str, str, str]]:
    parts = {path: text.partition(", ") for path, text in fields.items()}
    return [(_quoted(path.split(", ")), unit, text) for path, (unit, _, text) in parts.items()]


def _quoted(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _tables(schema: Schema, classes: Schema, prefix: str) -> Iterator[str]:
    """The section's description and its table of keys, then those of the sections within."""
    keys = schema.get("properties", {})
    if prefix:  # one of several forms of a section says which it is
        forms = (f", `{key}: {keys[key]['const']}`" for key in ("kind", "name")
                 if "const" in keys.get(key, {}))  # fmt: skip
        yield from (f"### `{prefix}`{next(forms, '')}", "")
    text = re.sub(r"``(.+?)``", r"`\1`", schema.get("description", ""))  # the class's docstring
    yield from (re.sub(r":\w+:`~?(.+?)`", r"`\1`", line) for line in (*text.splitlines(), ""))
    inner: list[tuple[str, Schema]] = []
    rows = []
    for key, form in keys.items():
        path = f"{prefix}.{key}" if prefix else key
        sections = [classes[name] for name in _references(form)]
        sections = [each for each in sections if each.get("properties")]
        # Sections with names of the user's own, such as workload.system_prompts.coding.
        named = f"{path}.NAME" if _by_name(form) else path
        inner += [(named, each) for each in sections]
        if "const" in form:
            continue
        default = "required" if key in schema.get("required", ()) else _shown(form.get("default"))
        known = PARAMETERS.get(path.replace(".NAME", ""))
        meaning = (known.unit, known.name) if known else ("", "")
        cells = (f"`{path}`", _type(form), default, *meaning)
        rows.append([cell.replace("|", " or ") for cell in cells])
    if rows:
        yield from table(("key", "type", "default", "unit", "name"), rows)
    for path, section in inner:
        yield from _tables(section, classes, path)


def _references(form: Schema) -> Iterator[str]:
    """Names of the classes that a key's value may be of."""
    if "$ref" in form:
        yield form["$ref"].rpartition("/")[2]
    for inner in (*_forms(form), form.get("items"), *_by_name(form)):
        if isinstance(inner, dict):
            yield from _references(inner)


def _forms(form: Schema) -> Sequence[Schema]:
    """The forms that a value may have, if there are several."""
    return form.get("anyOf") or form.get("oneOf") or ()


def _by_name(form: Schema) -> list[dict[str, Any]]:
    """The form of the values of a section whose keys are names of the user's own."""
    values = [form.get("additionalProperties"), *form.get("patternProperties", {}).values()]
    return [each for each in values if isinstance(each, dict)]


def _type(form: Schema) -> str:
    if forms := _forms(form):
        types = dict.fromkeys(map(_type, forms))
        return " or ".join(name for name in types if name != "null")
    if "enum" in form:
        return _quoted(form["enum"])
    if form.get("type") == "array":
        return f"list: {_type(form['items'])}" if form.get("items") else "list"
    if "$ref" in form or form.get("type") == "object":
        return "section"
    bounds = [
        f"{word} {bound:,}" if isinstance(bound, int) and bound < 1e9 else f"{word} {bound:g}"
        for key, word in _BOUNDS.items()
        if (bound := form.get(key)) is not None
    ]
    kind: str = form.get("type", "any")
    name = _TYPES.get(kind, kind)
    return f"{name}, {' '.join(bounds)}" if bounds else name


def _shown(value: object) -> str:
    """A value as YAML takes it, on one line; empty for none, and for a section."""
    if value in (None, [], "") or isinstance(value, dict):
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


# docs/model/limits.md -----------------------------------------------------------------------------

_TITLES: dict[Kind, str] = {
    "feature": "What engines do",
    "model": "Models",
    "device": "GPUs and other accelerators",
    "format": "Number formats",
}

_LIMITS = """# Limits

`python -m sarathi_sim.experiments.lab.pages docs` makes this page from
`profiler/storage/not_modelled.py`.

What is not modelled is refused by its name: as a key or a value of a configuration, an
option, a model or a device. The message says what its row on this page says. Names are
patterns: `*` stands for anything. Capitals do not matter, `_` is the same as `-`, and
the owner of a model is left out.
"""


def limits() -> str:
    """docs/model/limits.md, from :data:`~sarathi_sim.profiler.storage.not_modelled.LIMITS`."""
    lines = [_LIMITS]
    for kind, rows in LIMITS.items():
        cells = (
            (limit.what, limit.instead, " ".join(f"`{name}`" for name in limit.names.split()))
            for limit in rows
        )
        lines += [f"## {_TITLES[kind]}", ""]
        lines += table(("not modelled", "what to do", "names"), cells)
    return "\n".join(lines)


# docs/reference/devices.md ------------------------------------------------------------------------

_SUPPORT = (
    "`python -m sarathi_sim.experiments.lab.pages docs` makes this page, from what `run` takes op "
    "times from. `sarathi-sim list support --model M --device D` has every op's origin and error, "
    "and the memory."
)


def support(cells: Sequence[Combination]) -> str:
    """docs/reference/devices.md, of all cells."""
    section = support_section(cells, None, None, None)
    tables = (matrix(cells, dtype) for dtype in WEIGHT_DTYPES)
    page = replace(section, tables=[by_device(cells), *tables], about=_SUPPORT)
    return render.markdown(page)


# docs/lab/kernel_errors*.md: the errors of the shipped kernels -----------------------------------


def kernel_tables(specs: Sequence[StackSpec]) -> str:
    """All tables, as Markdown with a title each."""
    where = "device, stack"
    block = (where, "version", "rows", "prompts: chunk sizes", "head counts",
             "decodes: batches, contexts", "head counts")  # fmt: skip
    fit = ("rows", "repaired > 5 %, > 50 %", "token counts")
    return "\n".join(
        markdown(title, header, rows)
        for title, header, rows in (
            ("classes", ("left out", "tables", "aim", "tables that meet it",
                         "median of their medians, of their p95", "covered by the band"),
             _classes(specs)),
            ("gemm", (where, "weights", *fit, "shapes", "shapes, raw", "beyond"),
             _each(specs, "gemm", ("between", "shapes", "shapes,raw", "beyond"))),
            ("experts", (where, "experts", *fit, "shapes", "alone"),
             _each(specs, MOE, ("between", "shapes", "beyond"), "power_law_1.2")),
            ("attention", (where, "chunk sizes", "heads, prefill", "several prompts",
                           "batch or context", "heads, decode", "messages, most GPUs"),
             _attention(specs)),
            ("latent", block, _pairs(specs, "bf16.mla")),
            ("sparse", block, _pairs(specs, "bf16.dsa192-bf16")),
            ("recurrent", block, _pairs(specs, STATE)),
            ("windows", ("", "numbers a head", "window", "tables", "sizes", "head counts"),
             _windows(specs)),
        )
    )  # fmt: skip


def _classes(specs: Sequence[StackSpec]) -> Rows:
    for one in by_class([score for spec in specs for score in scores_of(spec)]):
        aim = f"{one.aim[0]:g} / {one.aim[1]:g}" if one.aim else ""
        met = "" if one.met is None else str(one.met)
        least, most = one.covered_range or (0.0, 0.0)
        covered = f"{one.covered:.0f} % ({least:.0f} to {most:.0f})"
        yield one.group, str(one.scores), aim, met, f"{one.median:.1f} / {one.p95:.1f}", covered


def _each(specs: Sequence[StackSpec], family: str, kinds: Sequence[str], spread: str = "") -> Rows:
    """Every table of a family (of one spread of tokens), and its errors by these kinds."""
    tables = ((spec, *table) for spec in specs for table in spec.kernels.items())
    for spec, table, fit in tables:
        of, _, name = table.partition(".")
        dtype, _, tail = name.partition(".")
        if (of, tail) == (family, spread):
            errors = (_error(fit, *kind.partition(",")[::2]) for kind in kinds)
            repaired = f"{fit.repaired_pct:.0f}, {fit.repaired_far_pct:.1f}"
            source = f"{spec.device}, {spec.stack} {fit.version}"
            yield source, dtype, f"{fit.rows:,}", repaired, *errors


def _attention(specs: Sequence[StackSpec]) -> Rows:
    wanted = (("prefill", "sizes"), ("prefill", "heads"), ("added", "batches"),
              ("decode", "sizes"), ("decode", "heads"))  # fmt: skip
    for spec in specs:
        cells = [_error(spec.kernels.get(f"{f}.bf16.128"), kind) for f, kind in wanted]
        graphs = (name for name in spec.having(ALL_REDUCE) if name.startswith("graph."))
        most = max(graphs, key=lambda name: int(name.partition(".")[2]), default="")
        last = spec.kernels.get(f"{ALL_REDUCE}.{most}")
        source = f"{spec.device}, {spec.stack} {spec.kernels['decode.bf16.128'].version}"
        yield source, *cells, _error(last, "sizes")


def _pairs(specs: Sequence[StackSpec], table: str) -> Rows:
    for spec in specs:
        prompts, decodes = (spec.kernels.get(f"{f}.{table}") for f in ("prefill", "decode"))
        if prompts is not None and decodes is not None:
            version, _, block = decodes.version.partition(" ")
            pairs = product((prompts, decodes), ("sizes", "heads"))
            yield (f"{spec.device}, {spec.stack}", version + " (block)" * bool(block),
                   f"{prompts.rows + decodes.rows:,}",
                   *(_error(*pair, digits=0) for pair in pairs))  # fmt: skip


def _windows(specs: Sequence[StackSpec]) -> Rows:
    families = {"prompts": "prefill", "decodes": "decode"}.items()
    for (called, family), (head_dim, window) in product(families, _WINDOWS.items()):
        table = f"{family}.bf16.{head_dim}w{window}"
        fits = [spec.kernels[table].left_out for spec in specs if table in spec.kernels]
        cells = []
        for kind in ("sizes", "heads"):
            errors = [(left[kind].median_pct, left[kind].p95_pct) for left in fits if kind in left]
            cells.append("{:.1f} / {:.0f}".format(*map(median, zip(*errors, strict=True))))
        yield called, str(head_dim), f"{window:,}", str(len(fits)), *cells


#: Sliding windows of published models by their head dimension.
_WINDOWS = {64: 128, 256: 1024, 128: 8192}


def _error(fit: KernelFit | None, kind: str, raw: str = "", digits: int = 1) -> str:
    """Median / 95th percentile, the latter with so many digits; ``raw``: of the measured rows."""
    if fit is None or (left := fit.left_out.get(kind)) is None:
        return "-"
    middle, far = left.median_pct, left.p95_pct
    if raw:
        middle, far = left.measured_median_pct, left.measured_p95_pct
    return f"{middle:.1f} / {far:.{digits}f}"


PAGES: Mapping[str, Callable[[], str]] = {
    "model/limits": limits,
    "reference/commands": commands,
    "reference/configuration": configuration,
    "reference/devices": lambda: support(supported()),
    "reference/files": files,
}
"""Pages that are made whole, by their place in docs; others have tables."""


def with_tables(docs: Path) -> dict[Path, str]:
    """The pages whose tables are made, with these tables."""
    tables = listed() + kernel_tables(shipped_stacks())
    pages = (*docs.glob("reference/m*.md"), *docs.glob("lab/kernel_errors*.md"))
    return {page: update(page.read_text(encoding="utf-8"), tables) for page in pages}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    made = {folder / f"{name}.md": make() for name, make in PAGES.items()}
    for page, text in (made | with_tables(folder)).items():
        write_whole(page, text)
