"""From results to the sections of a report: a function for each kind of result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.manifest import spoken
from sarathi_sim.profiler.storage.strict import UserError
from ..capacity.probing import (
    CAPACITY_FORMAT,
    RECOMMEND_FORMAT,
    SENSITIVITY_FORMAT,
)
from ..results import (
    ACCURACY_FORMAT,
    FIGURES_FORMAT,
    FORMAT,
    SCORE_FORMAT,
    SUMMARY,
    SWEEP_FORMAT,
    VALIDATION_FORMAT,
    read_summary,
)
from .of_capacity import (
    capacity_section,
    recommend_section,
    sensitivity_section,
)
from .run_answers import comparison_section, runs_section, whole_sweep_section
from .score_answers import score_section
from .section import Section, damaged, read_section


def _comparison(folder: Path, found: Mapping[str, Any]) -> Section:
    if not found.keys() >= {"a", "b", "policies", "notes", "summaries"}:
        raise UserError(f"{folder}: holds figures only: name the folders of the results in them")
    return comparison_section(found)


SectionOf = Callable[[Path, Mapping[str, Any]], Section]
SECTIONS: dict[str, SectionOf] = {
    SWEEP_FORMAT: lambda folder, _: whole_sweep_section(folder),
    FIGURES_FORMAT: _comparison,
    SCORE_FORMAT: score_section,
    CAPACITY_FORMAT: capacity_section,
    RECOMMEND_FORMAT: recommend_section,
    SENSITIVITY_FORMAT: sensitivity_section,
    VALIDATION_FORMAT: lambda folder, _: read_section(folder),
    ACCURACY_FORMAT: lambda folder, _: read_section(folder),
}
"""By the format of the result's summary, which they get with its folder; runs come together."""


def sections_of(folders: Sequence[Path], progress: Progress = silent) -> list[Section]:
    """The sections of a report on the results in ``folders``: first all runs, in one section.

    Raises UserError for a folder that is none of these results, or a damaged one.
    """
    kinds = {folder: _kind(folder) for folder in folders}
    runs = [folder for folder, kind in kinds.items() if kind == FORMAT]
    found = []
    if runs:
        with damaged(", ".join(map(str, runs)), "run"):
            found.append(runs_section(runs, progress))
    for folder, kind in kinds.items():
        if kind != FORMAT:
            with damaged(str(folder), "compare" if kind == FIGURES_FORMAT else spoken(kind)):
                found.append(SECTIONS[kind](folder, read_summary(folder)))
    return found


def _kind(folder: Path) -> str:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    kind = read_summary(folder).get("format")
    if kind == FORMAT or (isinstance(kind, str) and kind in SECTIONS):
        return kind
    known = ", ".join(spoken(name) for name in (FORMAT, *SECTIONS) if name != FIGURES_FORMAT)
    raise UserError(
        f"{folder}: holds no {SUMMARY} of a result that a report shows: one of {known}, or what "
        "compare --out wrote"
    )
