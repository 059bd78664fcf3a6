"""The content of every answer, which terminal, JSON, HTML and Markdown draw; and every table that a
command prints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.engine_version import version_defaults
from sarathi_sim.experiments.config.inputs import prompts_captured
from sarathi_sim.experiments.config.scenario import FUSED, POOLS
from sarathi_sim.experiments.config.workload import Closed, Gamma, TraceArrivals, Varying, Workload
from sarathi_sim.profiler.kernels.reduce_curves import CAPTURED_TOKENS
from sarathi_sim.profiler.storage.strict import UserError, one_line
from sarathi_sim.simulator.load.describe import traffic_line, without_times
from sarathi_sim.simulator.views.metric_registry import number_text

_MOST_ALIKE = 3


@dataclass(frozen=True)
class SortableTable:
    """A table that a click on a heading sorts. The first ``text`` columns are left-aligned.

    ``anchors`` are the names of the rows: a click on a point of a chart leads to one.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text: int = 1
    anchors: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """An interactive chart: a Bokeh model, with a text alternative."""

    title: str
    model: Any
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """One result, or several runs beside each other.

    ``answer`` is one sentence, ``command`` the command line for the server or simulation that it
    names, ``table`` the numbers behind it, ``details`` are further tables. ``assumptions`` are
    lines ``topic: text``, ``warnings`` are caveats. ``about`` is the description of the
    configuration, ``configuration`` maps names of files to their text.
    """

    kind: str
    name: str
    question: str
    answer: str
    table: SortableTable
    assumptions: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    details: Sequence[SortableTable] = ()
    about: str = ""
    command: str = ""
    configuration: dict[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def words(self) -> dict[str, Any]:
        """JSON-able: the texts of the section, which a result's summary has beside its numbers."""
        lists = {"assumptions": list(self.assumptions), "warnings": list(self.warnings)}
        return {"question": self.question, "answer": self.answer, **lists}


_SECTION = "section.json"


def write_section(folder: Path, section: Section) -> None:
    """Keep a section, without its charts, beside a result's numbers."""
    text = json.dumps(asdict(replace(section, charts=())), indent=1)
    (folder / _SECTION).write_text(text, encoding="utf-8")


def read_section(folder: Path) -> Section:
    """The section that :func:`write_section` kept. Raises UserError if there is none."""
    try:
        return TypeAdapter(Section).validate_json((folder / _SECTION).read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{folder}: has no readable {_SECTION}: {one_line(error)}") from error


def markdown(section: Section) -> str:
    """A section as a Markdown page."""
    parts = [f"# {section.question}", section.about, section.answer]
    parts.append(f"    {section.command}" if section.command else "")
    for grid in (section.table, *section.details):
        ruler = ["---" if at < grid.text else "---:" for at in range(len(grid.headings))]
        lines = (f"| {' | '.join(cells)} |" for cells in (grid.headings, ruler, *grid.rows))
        parts += [f"## {grid.title}", "\n".join(lines), grid.note]
    parts += [f"- {line}" for line in (*section.assumptions, *section.warnings)]
    return "\n\n".join(filter(None, parts)) + "\n"


def anchor(run: str) -> str:
    """The name of the row of a run."""
    return f"run-{run}"


def enumerated(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def number_or_dash(value: float | list[float] | None) -> str:
    """A cell of a table: a number, or the two ends of a band."""
    if value is None:
        return "-"
    return " to ".join(map(number_text, value if isinstance(value, list) else [value]))


def assumed_of(found: Mapping[str, Any]) -> list[str]:
    """The assumptions about a result's deployments (its ``notes``): each line once, with the names
    of its deployments if not all have it."""
    notes: Mapping[str, Sequence[str]] = found.get("notes", {})
    whose: dict[str, list[str]] = {}
    for name, lines in notes.items():
        for line in lines:
            whose.setdefault(line, []).append(name)
    topics, told = list(dict.fromkeys(topic_of(line)[0] for line in whose)), []
    for line in thinned(sorted(whose, key=lambda line: topics.index(topic_of(line)[0]))):
        names = whose.get(line, list(notes))
        more = len(names) - _MOST_ALIKE
        shown = names if more <= 0 else [*names[:_MOST_ALIKE], f"{more} more"]
        told.append(line if len(names) == len(notes) else f"{line} (of {enumerated(shown)})")
    return told


def doubts_of(found: Mapping[str, Any]) -> list[str]:
    """The doubts about the op times of a result's deployments (its ``doubts``), each once."""
    said: Mapping[str, Sequence[str]] = found.get("doubts", {})
    return list(dict.fromkeys(line for lines in said.values() for line in lines))


def topic_of(assumption: str) -> tuple[str, str]:
    """The topic of a line of ``assumptions``, empty without one, and its text."""
    topic, colon, text = assumption.partition(": ")
    return (topic, text) if colon else ("", assumption)


def thinned(notes: Iterable[str]) -> list[str]:
    """Each note once; of more than three that differ in numbers alone, the first and a count."""
    alike: dict[str, list[str]] = {}
    for note in dict.fromkeys(notes):
        alike.setdefault(re.sub(r"[\d.,]+", "0", note), []).append(note)
    found = []
    for same in alike.values():
        few = len(same) <= _MOST_ALIKE
        found += (
            same if few else [same[0], f"and {len(same) - 1} more like this, with other numbers"]
        )
    return found


# The assumptions about a deployment -------------------------------------------------------------


def assumed(
    deployment: Deployment, searched: str | None = None, varied: Collection[str] = ()
) -> list[str]:
    """``topic: text`` lines: the traffic, its arrivals, the engine's settings at their default
    (without ``varied`` ones, which are no assumption), number formats, what is not modelled, and
    the notes of the deployment (op times, memory, host time).

    ``searched`` is the kind of load that is searched (rate or clients; None: the load is given).
    """
    found = {
        "traffic": traffic_line(deployment.requests),
        "arrivals": _arrivals(deployment.scenario.workload, searched),
        **_by_pool(deployment, "engine", lambda pool: _defaults(pool, varied)),
        **_by_pool(deployment, "formats", _formats),
    }
    return [*(f"{topic}: {text}" for topic, text in found.items() if text), *deployment.notes]


def _by_pool(
    deployment: Deployment, topic: str, text: Callable[[Deployment], str]
) -> dict[str, str]:
    """A line of a topic; of two pools that differ, one each."""
    found = [text(pool) for pool in deployment.pools]
    if len(set(found)) == 1:
        return {topic: found[0]}
    return {f"{pool} {topic}": said for pool, said in zip(POOLS, found, strict=True)}


def _arrivals(workload: Workload, searched: str | None) -> str:
    """When requests arrive, in words."""
    given = workload.arrivals
    if searched == "clients":
        return "clients, each with a next request when it has its answer; their number is searched"
    if isinstance(given, Closed) and searched is None:
        return without_times(given.clients)
    if given.kind == "at_once" and searched is None:
        return without_times(None)
    each = "" if workload.sessions is None else " sessions"
    rate = f"; the rate{' of' + each if each else ''} is searched"
    if searched is None:
        rate = f", {given.rate:g}{each or ' requests'}/s" if hasattr(given, "rate") else ""
    if isinstance(given, Gamma):
        return f"Gamma-distributed gaps, coefficient of variation {given.cv:g}{rate}"
    if isinstance(given, Varying):
        return f"independent, at a rate that varies{rate}"
    return f"{'as in the trace' if isinstance(given, TraceArrivals) else 'Poisson'}{rate}"


def _defaults(deployment: Deployment, varied: Collection[str]) -> str:
    """The settings of the engine at their default, in words; empty if none is. A run from a
    resolved configuration gets the same text."""
    scenario, memory = deployment.scenario, deployment.memory
    policy, cache, cluster = scenario.policy, scenario.kv_cache, scenario.cluster
    usual = {key: one.default for key, one in type(policy).model_fields.items()}
    of_version = version_defaults(scenario, deployment.device)
    usual |= of_version["policy"]
    found = {
        key: value
        for key, value in policy.model_dump().items()
        if key not in varied and usual[key] == value
    }
    if cache is not None and cache.prefix_caching:
        found["prefix_caching"] = True
    share = type(cluster).model_fields["usable_memory"].default
    if memory is None and cluster.usable_memory == share:
        found["usable_memory"] = share
    elif memory is not None and memory.share == of_version["kv_cache"].get(memory.setting, share):
        found[memory.setting] = memory.share
    if (
        deployment.model.experts is not None
        and cluster.tp * cluster.dp > 1
        and cluster.expert_parallel is None
    ):
        found["expert_parallel"] = False
    words = [f"{key} {_word(value)}" for key, value in found.items() if value is not None]
    if scenario.stack is not None:
        largest = scenario.engine.fi_allreduce_fusion_max_size_mb
        if largest and largest == of_version["engine"].get(FUSED):
            words.append(f"additions fused with all-reduces up to {largest:g} MiB")
        decodes = "" if prompts_captured(scenario.engine) else " of decodes"
        words.append(f"CUDA graphs{decodes} up to {CAPTURED_TOKENS} tokens")
        if cache is not None and not cache.cuda_graph_bytes:
            words[-1] += " (their memory is not counted)"
    return f"at the default: {', '.join(words)}" if words else ""


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _formats(deployment: Deployment) -> str:
    """The number formats, in words."""
    kernels = deployment.scenario.kernels
    if kernels is None:
        return f"{deployment.ops.meta.dtype} throughout, as in the profile"
    found = f"weights {kernels.dtype}, KV cache {kernels.kv_cache_dtype}"
    if deployment.model.experts is None:
        return found
    return (
        f"{found}, experts {kernels.experts_in}; tokens over experts {kernels.expert_distribution}"
    )


def rich_table(
    text: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], **about: Any
) -> Table:
    """Columns of text to the left, then columns of numbers to the right, by their headings.

    A cell that is too wide continues in the next line. ``about`` are options of rich's tables: a
    title, a caption.
    """
    table = Table(**{"title_justify": "left", "caption_justify": "left", **about})
    for heading in text:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        # Without a heading it is no number: yes or no.
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def deployments_table(deployments: Mapping[str, Deployment]) -> Table:
    """The deployment of each scenario, side by side."""
    rows: dict[str, Callable[[Deployment], str]] = {
        "model": lambda d: d.model.name,
        "device": lambda d: d.device.name,
        "policy": lambda d: d.scenario.policy.name,
        "TP x PP x replicas": lambda d: (
            f"{d.scenario.cluster.tp} x {d.scenario.cluster.pp} x {d.scenario.cluster.replicas}"
        ),
        "max batch": lambda d: str(d.scenario.batching.max_batch),
        "micro-batches in flight": lambda d: str(d.scenario.batching.max_in_flight),
        "KV tokens": lambda d: f"{d.kv_capacity:,}",
        "requests": lambda d: f"{len(d.requests):,}",
    }
    if any(pool.scenario.cluster.dp > 1 for each in deployments.values() for pool in each.pools):
        rows["data-parallel ranks of attention"] = lambda d: str(d.scenario.cluster.dp)
    cells = [
        [
            label,
            *(
                " + ".join(dict.fromkeys(map(cell, deployment.pools)))
                for deployment in deployments.values()
            ),
        ]
        for label, cell in rows.items()
    ]
    return rich_table([""], list(deployments), cells)
