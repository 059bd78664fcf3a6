"""The folder of a sweep: a folder per run, and a table with a row per run.

    DIR/summary.json       axes, missing runs, paired differences
        results.parquet    one row per finished run, in the sweep's order
        runs/KEY/          a result like that of `sarathi-sim run`, under its run's key
        failed/KEY.txt     the traceback of a run that raised
        damaged/KEY/       a folder of runs/KEY that was changed after writing
        lock               exists while a sweep works here, or after a kill
        manifest.json      the mark of a sweep, and its files outside of runs/

A run's folder appears completely or not at all, and its manifest names its files. So every existing
folder is a finished run, and later changes to it are detected.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.storage.files import make_folders, regular
from sarathi_sim.profiler.storage.folder_lock import FolderBusyError, FolderLock
from sarathi_sim.profiler.storage.manifest import (
    MANIFEST,
    Manifest,
    differences,
    read_manifest,
    remove_files,
    replace_files,
    replace_folder,
)
from sarathi_sim.profiler.storage.strict import UserError, one_line
from ..results import FORMAT, SUMMARY, SWEEP_FORMAT, open_result
from .jobs import JobResult

POLICY = "policy.name"
"""The column of the table that names a run's policy."""
RESULTS = "results.parquet"
_APART = re.compile(
    r"lock|figures|damaged/?|\.figures\.\w+|runs/|runs/\.?[0-9a-f]{16}|failed/"
    r"|\.(summary\.json|results\.parquet)\.partial|failed/\.[0-9a-f]{16}\.txt\.partial"
)
"""Names that a sweep's manifest leaves out: what has its own manifest, and leftovers of a kill."""


class Store:
    """Reads and writes one sweep's folder; ``where`` names it in errors (default: ``--out``)."""

    def __init__(self, folder: Path, where: str | None = None) -> None:
        self.folder = folder
        self.where = where or f"--out {folder}"
        self.runs = folder / "runs"

    def open(self, resume: bool) -> None:
        """Make the folder, or check that it holds a sweep to continue. Raises UserError."""
        made = open_result(self.folder, SWEEP_FORMAT, _APART.fullmatch, self.where)
        if made is None and not resume:
            raise UserError(
                f"{self.where}: holds a sweep: give --resume to complete it (finished "
                "runs are not repeated), or name another folder"
            )
        make_folders(self.runs)

    @contextmanager
    def locked(self, busy: str | None = None) -> Iterator[None]:
        """Lock the folder against other sweeps. Raises UserError if another sweep works in it, with
        the line ``busy`` or a line about the folder. With the lock, remove the files that a killed
        process left half-written: without it, another sweep may be writing them now."""
        try:
            lock = FolderLock(self.folder)
        except FolderBusyError as error:
            problem = busy or f"{self.where}: another sweep is at work in this folder"
            raise UserError(f"{problem} ({error})") from None
        try:
            for scratch in self.runs.glob(".*"):
                if _APART.fullmatch(f"runs/{scratch.name}"):
                    shutil.rmtree(scratch, ignore_errors=True)
            yield
        finally:
            lock.remove()

    def finished(self) -> set[str]:
        """Keys of the finished runs."""
        return {entry.name for entry in os.scandir(self.runs) if not entry.name.startswith(".")}

    def intact(self, keys: Iterable[str], say: Callable[[str], object]) -> set[str]:
        """The keys whose runs are finished, with every file unchanged. A damaged folder is moved
        away, so that no edit is lost; ``say`` gets a message. Raises OSError."""
        found = self.finished().intersection(keys)
        for key in sorted(found):
            if damage := _damage(self.runs / key):
                found.remove(key)
                again = f"run {key} is damaged ({damage}) and is done again"
                say(f"{again}; its old folder is now {self._move_away(key)}")
        return found

    def _move_away(self, key: str) -> Path:
        folder = self.folder / "damaged"
        folder.mkdir(exist_ok=True)
        names = chain([key], (f"{key}-{number}" for number in count(2)))
        target = next(folder / name for name in names if not os.path.lexists(folder / name))
        (self.runs / key).rename(target)
        return target

    def write(self, result: JobResult) -> None:
        """Write a run's folder, completely or not at all."""
        scratch, target = self.runs / f".{result.key}", self.runs / result.key
        try:
            for name, content in result.files.items():
                path = scratch / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            replace_folder(scratch, target, FORMAT)
        except (OSError, UserError):
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self.failure(result.key).unlink(missing_ok=True)

    def failure(self, key: str) -> Path:
        """The file with the traceback of a failed run."""
        return self.folder / "failed" / f"{key}.txt"

    def write_failure(self, key: str, details: str) -> None:
        """Store the traceback of a failed run."""
        self.failure(key).parent.mkdir(exist_ok=True)
        self.replace(f"failed/{key}.txt", details.encode(errors="backslashreplace"))

    def drop_failures(self) -> None:
        """Remove earlier tracebacks: their runs are tried again."""
        manifest = read_manifest(self.folder) or Manifest(SWEEP_FORMAT)
        names = [name for name in manifest.files if name.startswith("failed/")]
        remove_files(self.folder, SWEEP_FORMAT, names)
        with suppress(OSError):
            (self.folder / "failed").rmdir()

    def summary(self, key: str, name: str) -> dict[str, Any]:
        """The numbers of a finished run. Raises UserError where its folder is damaged."""
        path = self.runs / key / SUMMARY
        try:
            summary = json.loads(regular(path).read_bytes())["scenarios"][name]
            if not isinstance(summary, dict):
                raise ValueError(f"{name} has no numbers")
        except (OSError, ValueError, LookupError, TypeError) as error:
            hint = f"remove the folder {path.parent} and give --resume"
            raise UserError(f"{path}: damaged ({one_line(error)}): {hint}") from None
        return summary

    def replace(self, name: str, content: bytes) -> None:
        """Write one file of the folder, whole or not at all."""
        replace_files(self.folder, SWEEP_FORMAT, {name: content})


def _damage(folder: Path) -> str:
    if (manifest := read_manifest(folder)) is None:
        return f"it has no {MANIFEST}, or one that cannot be read"
    return str(replace(differences(folder, manifest), foreign=[]))
