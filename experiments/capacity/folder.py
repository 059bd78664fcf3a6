"""The folder of a capacity result: the answer, its tables and figures, and the probes as a sweep.

DIR/summary.json      the question and the answer
    capacity.csv      a row a deployment
    headroom.csv      a row a probe: load, every clause of the SLO, throughput
    config.yaml       the question, to ask it again
    figures/          headroom, Pareto fronts
    probes/           the sweep of all runs; the same question again takes them from here
    manifest.json     names all of them but probes/, which has its own
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.results import about_out, resolved
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.profiler.storage.files import make_folders, partial, remove_empty, write_whole
from sarathi_sim.profiler.storage.manifest import (
    MANIFEST,
    Manifest,
    differences,
    held,
    read_manifest,
    remove_files,
    remove_ours,
    replace_files,
)

CAPACITY_FORMAT = "sarathi-sim capacity 1"
RECOMMEND_FORMAT = "sarathi-sim recommend 2"
SENSITIVITY_FORMAT = "sarathi-sim sensitivity 1"
PROBES = "probes"
_APART = re.compile(r"probes(/.*)?|figures/?|.*\.partial")


@contextmanager
def probes_in(out: Path, kind: str) -> Iterator[Store]:
    """The store of the probes below ``out``, locked; where the block fails without a probe, a new
    folder goes again, and one that was empty is left empty. Raises ConfigError where ``out`` is
    something else, or holds files that are not ours."""
    made = _open(out, kind)
    store = Store(out / PROBES)
    store.open(resume=True)
    try:
        with store.locked():
            yield store
    except BaseException:
        if made is not None and not any(store.runs.iterdir()):
            store.runs.rmdir()
            remove_ours(store.folder)
            (out / MANIFEST).unlink()
            remove_empty(made)
        raise


def write_result(out: Path, kind: str, files: Mapping[str, bytes]) -> None:
    """Write the files of the answer, each whole or as it was; an earlier one's others go."""
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
    replace_files(out, kind, files)
    written = read_manifest(out) or Manifest(kind)
    remove_files(out, kind, written.files.keys() - files.keys())


def _open(out: Path, kind: str) -> list[Path] | None:
    """Make the folder, or check it; returns the folders that it made, None where ``out`` is an
    earlier result."""
    folder = resolved(out)
    with about_out(out):
        made = make_folders(folder)
    if {path.name for path in folder.iterdir()} <= {partial(folder / MANIFEST).name}:
        write_whole(folder / MANIFEST, Manifest(kind).dump())
        return made
    manifest = read_manifest(folder)
    if manifest is None or manifest.kind != kind:
        raise ConfigError(
            f"--out {out}: exists and is no earlier result of this command (it holds "
            f"{held(folder)}): name another folder"
        )
    found = differences(folder, manifest, _APART.fullmatch)
    if found.changed or found.foreign:
        raise ConfigError(
            f"--out {out}: holds files that are not part of an earlier result "
            f"({found.in_the_way()}): move them away, or name another folder"
        )
    return None
