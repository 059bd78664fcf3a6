"""From results to the sections of a report: a function for each kind of result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.manifest import spoken
from sarathi_sim.profiler.storage.strict import UserError, one_line
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
from .capacity_answers import capacity_section, recommend_section, sensitivity_section
from .of_comparison import comparison_section
from .of_run import run_section
from .of_sweep import sweep_section
from .score_answers import score_section
from .section import Section, read_section

SectionOf = Callable[[Path, Mapping[str, Any]], Section]
SECTIONS: dict[str, SectionOf] = {
    SWEEP_FORMAT: sweep_section,
    FIGURES_FORMAT: comparison_section,
    SCORE_FORMAT: score_section,
    CAPACITY_FORMAT: capacity_section,
    RECOMMEND_FORMAT: recommend_section,
    SENSITIVITY_FORMAT: sensitivity_section,
    VALIDATION_FORMAT: lambda folder, _: read_section(folder),
    ACCURACY_FORMAT: lambda folder, _: read_section(folder),
}
"""By the format of the result's summary, which they get with its folder. Runs are shown together:
:func:`run_section`."""


def sections_of(folders: Sequence[Path], progress: Progress = silent) -> list[Section]:
    """The sections of a report on the results in ``folders``: first all runs, in one section.

    Raises UserError for a folder that is none of these results, or a damaged one.
    """
    kinds = {folder: _kind(folder) for folder in folders}
    runs = [folder for folder, kind in kinds.items() if kind == FORMAT]
    found = []
    if runs:
        with _damaged(", ".join(map(str, runs)), "run"):
            found.append(run_section(runs, progress))
    for folder, kind in kinds.items():
        if kind != FORMAT:
            with _damaged(str(folder), "compare" if kind == FIGURES_FORMAT else spoken(kind)):
                found.append(SECTIONS[kind](folder, read_summary(folder)))
    return found


@contextmanager
def _damaged(where: str, command: str) -> Iterator[None]:
    """Turns any error of a section into a UserError: the result of ``command`` is damaged."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{where}: the result of {command} is damaged: {problem}") from error


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
