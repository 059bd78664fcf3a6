"""Several results in the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.results import (
    FIGURES_FORMAT,
    Tables,
    check_replaceable,
    read_tables,
    result_folder,
    write_summary,
)


def plot_results(folders: Sequence[Path], out: Path) -> None:
    """Draw all scenarios of the results in ``folders`` to ``out/figures``.

    Raises ConfigError where a folder is not a result, or ``out`` is not ours to replace.
    """
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise ConfigError(f"--out {out}: is one of the results to plot: name another folder")
    check_replaceable(out, FIGURES_FORMAT)
    tables = {label: table for label, (_, _, table) in labelled_tables(folders).items()}
    with result_folder(out, FIGURES_FORMAT) as scratch:
        write_summary(scratch, FIGURES_FORMAT, {"plotted": sorted(tables)})
        from sarathi_sim.experiments.figures.distributions import run_figures
        from sarathi_sim.experiments.figures.drawn import draw_figures

        draw_figures(run_figures(tables), scratch / "figures")


def labelled_tables(folders: Sequence[Path]) -> dict[str, tuple[Path, str, Tables]]:
    """Every scenario of the results: its label to its folder, its name in there, and its tables.

    Raises ConfigError where a folder is not a result.
    """
    return {
        name if len(folders) == 1 else f"{_label(folder, folders)}/{name}": (folder, name, table)
        for folder in folders
        for name, table in read_tables(folder).items()
    }


def _label(folder: Path, folders: Sequence[Path]) -> str:
    """The folder's name, or all of its path where another one is called the same."""
    name = folder.resolve().name
    alike = [other for other in folders if other.resolve().name == name]
    return name if len(alike) == 1 else str(folder)
