"""The folder of a sweep: a folder per run, and a table with a row per run.

    DIR/summary.json       what was swept, what is missing, paired differences
        results.parquet    one row per finished run, in the sweep's order
        runs/KEY/          a result like that of `sarathi-sim run`, under its run's key
        failed/KEY.txt     the traceback of a run that raised
        lock               while a sweep is at work here, or was killed

A run's folder appears whole or not at all, so what is there is done.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.errors import ConfigError
from experiments.results import FORMAT, SUMMARY
from experiments.sweeps.work import Result
from profiler.files import partial, write_whole
from profiler.folder_lock import FolderBusyError, FolderLock
from profiler.manifest import replace_folder

RESULTS = "results.parquet"
_OURS = {SUMMARY, RESULTS, "runs", "failed", "figures", "paired.csv", "lock"}


class Store:
    """Reads and writes one sweep's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"

    def open(self, resume: bool) -> None:
        """Make the folder, or check that it is a sweep's to go on with. Raises ConfigError."""
        folder = self.folder
        if folder.is_dir() and any(folder.iterdir()):
            left = {partial(folder / name).name for name in (SUMMARY, RESULTS)}  # by a kill
            foreign = sorted(p.name for p in folder.iterdir() if p.name not in _OURS | left)
            if foreign or not self.runs.is_dir():
                what = f"it holds {', '.join(foreign[:3])}" if foreign else "it has no runs/"
                raise ConfigError(
                    f"--out {folder}: exists and is no sweep's folder ({what}): name another one"
                )
            if not resume:
                raise ConfigError(
                    f"--out {folder}: holds a sweep: give --resume to complete it (finished "
                    "runs are not repeated), or name another folder"
                )
        self.runs.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other sweeps out of the folder. Raises ConfigError where one is at work.

        Whoever has the lock clears what a process left that was killed while it wrote: without it,
        that may be what another sweep is writing now.
        """
        try:
            lock = FolderLock(self.folder)
        except FolderBusyError as error:
            raise ConfigError(
                f"--out {self.folder}: another sweep is at work in this folder ({error})"
            ) from None
        try:
            for scratch in self.runs.glob(".*"):
                shutil.rmtree(scratch, ignore_errors=True)
            yield
        finally:
            lock.remove()

    def finished(self) -> set[str]:
        """Keys of the runs that are done."""
        return {entry.name for entry in os.scandir(self.runs) if not entry.name.startswith(".")}

    def write(self, result: Result) -> None:
        """Put a run's folder in its place: whole, or not at all."""
        scratch, place = self.runs / f".{result.key}", self.runs / result.key
        try:
            for name, content in result.files.items():
                path = scratch / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            replace_folder(scratch, place, FORMAT)
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self.failure(result.key).unlink(missing_ok=True)

    def failure(self, key: str) -> Path:
        """Where the traceback of a run that raised is."""
        return self.folder / "failed" / f"{key}.txt"

    def write_failure(self, key: str, details: str) -> None:
        """Keep the traceback of a run that raised."""
        path = self.failure(key)
        path.parent.mkdir(exist_ok=True)
        path.write_text(details, encoding="utf-8")

    def drop_failures(self) -> None:
        """Forget earlier tracebacks: their runs are tried again."""
        shutil.rmtree(self.folder / "failed", ignore_errors=True)

    def summary(self, key: str, name: str) -> dict[str, Any]:
        """The numbers of a finished run. Raises ConfigError where its folder is damaged."""
        path = self.runs / key / SUMMARY
        try:
            summary = json.loads(path.read_bytes())["scenarios"][name]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{path}: damaged ({error}): remove the folder {path.parent} and give --resume"
            ) from None
        if not isinstance(summary, dict):
            raise ConfigError(f"{path}: damaged: remove {path.parent} and give --resume")
        return summary

    def replace(self, name: str, content: bytes) -> None:
        """Write one file of the folder, whole or not at all."""
        write_whole(self.folder / name, content)
