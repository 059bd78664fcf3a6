"""The command ``capacity``: from a file to the content of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from sarathi_sim.experiments.capacity.answer import Answer, answers, as_json, said_of
from sarathi_sim.experiments.capacity.capacity_section import CapacitySection
from sarathi_sim.experiments.capacity.curves import figure_files, frontier_figures, headroom_figure
from sarathi_sim.experiments.capacity.folder import CAPACITY_FORMAT
from sarathi_sim.experiments.capacity.options import Option, option_at, options_of
from sarathi_sim.experiments.capacity.prices import Prices, add_costs
from sarathi_sim.experiments.capacity.probing import Laboratory
from sarathi_sim.experiments.capacity.written import capacities, capacity_answer, headroom
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import Assignments, Config, Draft, read_draft
from sarathi_sim.experiments.figures.style import styled
from sarathi_sim.experiments.results import SUMMARY, json_bytes
from sarathi_sim.experiments.run.traffic import with_workload
from sarathi_sim.experiments.sweeps.neighbours import between, in_order
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from sarathi_sim.profiler.storage.strict import KeyPath, mistakes


def read_question(
    config: Config, assignments: Assignments, workload: str | None = None
) -> tuple[Draft, CapacitySection, list[Option]]:
    """A file with a ``capacity`` section, and its deployments, checked; ``workload`` gives lengths
    in place of its own (:func:`with_workload`). Raises ConfigError."""
    draft = with_workload(read_draft(config, assignments), workload)
    raw = draft.header.capacity
    if raw is None:
        raise ConfigError(
            f"{draft.source.file}: capacity: this section is missing: it states the SLO, as in "
            "capacity: {slo: 'p99 ttft 1s, p99 tbt 50ms'}"
        )
    try:
        section = CapacitySection.model_validate(raw)
    except ValidationError as error:

        def origin(key: KeyPath) -> str:
            return draft.source.name(("capacity", *key))

        raise ConfigError("\n".join(mistakes(error, CapacitySection, raw, origin))) from None
    return draft, section, options_of(draft, section)


def answered(
    lab: Laboratory,
    draft: Draft,
    options: list[Option],
    bands: bool,
    prices: Prices,
    refine: int = 0,
) -> dict[str, Any]:
    """The question and the answer, as ``summary.json`` has it: with costs of GPUs with a price.

    ``refine`` times, deployments half-way between the best and its neighbours are searched, too.
    """
    section, where = lab.section, draft.source.file
    found = answers(lab, options, where, bands)
    for _ in range(refine):
        if not (further := _halfway(lab, draft, found)):
            break
        found += answers(lab, further, where, bands)
        found = [found[place] for place in in_order([one.option.point for one in found])]
    options = [one.option for one in found]
    lab.write_tables()
    deployments = [as_json(each, section.load) for each in found]
    for one in deployments:
        if (gpu_hour := prices.gpu_hour.get(one["device"])) is not None:
            add_costs(one, gpu_hour * one["gpus"])
    content = {
        "format": CAPACITY_FORMAT,
        "name": draft.header.name,
        "description": draft.header.description,
        "slo": section.slo,
        "load": section.load,
        "tolerance": section.tolerance,
        "keep": section.replications.keep,
        "may_reject": section.rejected,
        "deployments": deployments,
        **said_of(options, section.load),
        "prices": prices.stated,
        "probes": len(lab.runs.keys() - lab.report.failures.keys()),
        "provenance": "predicted",
    }
    return content | capacity_answer(content).words()


def _halfway(lab: Laboratory, draft: Draft, found: Sequence[Answer]) -> list[Option]:
    """The deployments half-way between the best and its neighbours, those that can be."""
    loads, options = [one.load for one in found], list[Option]()
    if not any(loads):
        return []
    for point in between(loads.index(max(loads)), [one.option.point for one in found]):
        scenario = point.pop("scenario")
        try:
            options.append(option_at(draft, lab.section, scenario, point))
        except ConfigError as error:
            lab.say(f"not between: {str(error).splitlines()[0]}")
    if options:
        lab.say(f"refining: {'; '.join(one.name for one in options)}")
    return options


def result_files(
    draft: Draft, section: CapacitySection, content: Mapping[str, Any]
) -> dict[str, bytes]:
    """The files of the result beside its probes."""
    found = content["deployments"]
    header = draft.header.model_dump(include={"name", "description"})
    question = {**header, **draft.raw, "capacity": section.model_dump(exclude_none=True)}
    with styled():
        fronts = frontier_figures(found, (), content["prices"]["currency"])
        figures = figure_files({"headroom": headroom_figure(found, section), **fronts})
    return {
        SUMMARY: json_bytes(content),
        "capacity.csv": capacities(found).to_csv(index=False).encode(),
        "headroom.csv": headroom(found).to_csv(index=False).encode(),
        "config.yaml": dump_yaml({**question, "scenarios": draft.overrides}).encode(),
        **figures,
    }
