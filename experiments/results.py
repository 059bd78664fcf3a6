"""The folder of a finished run: written whole or not at all, and read back for plots."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.errors import ConfigError
from profiler.files import make_folders, remove_empty, restore
from profiler.manifest import NotOursError, check_ours, replace_folder

FORMAT = "sarathi-sim result 1"
FIGURES_FORMAT = "sarathi-sim figures 1"
SUMMARY = "summary.json"
FITS_FORMAT = "sarathi-sim fits 1"
VALIDATION = "validation.json"
VALIDATION_FORMAT = "sarathi-sim validation 1"
SWEEP_FORMAT = "sarathi-sim sweep 1"
ITERATIONS = "iterations.parquet"


@contextmanager
def result_folder(out: Path, kind: str = FORMAT) -> Iterator[Path]:
    """A scratch folder that becomes ``out`` when the block ends well, and vanishes when not.

    ``out`` may exist if it is empty or an earlier result of that kind, which is replaced. Raises
    ConfigError where it is anything else, or holds a file that we did not write.
    """
    place = check_replaceable(out, kind)
    made = make_folders(place.parent)
    scratch = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        scratch.mkdir()
        yield scratch
        with _refusals_about(out):
            replace_folder(scratch, place, kind)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        remove_empty(made)


def check_replaceable(out: Path, kind: str = FORMAT) -> Path:
    """Where ``out`` leads to. Raises ConfigError where it holds what is not ours to replace."""
    place = resolved(out)
    if place in (Path.cwd(), *Path.cwd().parents):
        raise ConfigError(
            f"--out {out}: the command runs in this folder or in one below it, so it is not "
            "replaced: name another folder"
        )
    restore(place)
    with _refusals_about(out):
        check_ours(place, kind)
    return place


def resolved(out: Path) -> Path:
    """The absolute path of ``out``, links followed. Raises ConfigError where it cannot be one."""
    try:
        str(out).encode()
        return out.resolve()
    except UnicodeEncodeError:
        raise ConfigError(f"--out {str(out)!a}: is not a name in UTF-8") from None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL in the name
        reason = "its links lead in a circle" if isinstance(error, RuntimeError) else str(error)
        raise ConfigError(f"--out {str(out)!a}: is no folder: {reason}") from None


@contextmanager
def _refusals_about(out: Path) -> Iterator[None]:
    try:
        yield
    except NotOursError as error:
        raise ConfigError(f"--out {out}: {error}") from None


def read_summary(folder: Path) -> dict[str, Any]:
    """The folder's summary; empty where there is none."""
    name = VALIDATION if (folder / VALIDATION).is_file() else SUMMARY
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def to_json(value: Any) -> Any:
    """``value`` with NaN and infinities as None: JSON has neither."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class Tables:
    """One scenario's tables, as the figures take them."""

    requests: pd.DataFrame
    ledger: pd.DataFrame


def read_tables(folder: Path) -> dict[str, Tables]:
    """The tables of every scenario of a result. Raises ConfigError where it is not one."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    summary = read_summary(folder)
    if summary.get("format") == FIGURES_FORMAT:
        raise ConfigError(f"{folder}: holds figures of several runs: name the runs' own folders")
    if summary.get("format") == SWEEP_FORMAT:
        raise ConfigError(f"{folder}: is a sweep: name it alone, or the folders of its runs")
    if summary.get("format") != FORMAT:
        raise ConfigError(f"{folder}: not the result of a run (no {SUMMARY} of ours)")
    names = summary.get("scenarios")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{folder}: the result is damaged: {SUMMARY} names no scenarios")
    return {name: _tables(folder / name) for name in names}


def _tables(folder: Path) -> Tables:
    from experiments.figures import LEDGER_COLUMNS, REQUEST_COLUMNS

    requests, ledger = folder / "requests.parquet", folder / "ledger.csv"
    try:
        tables = Tables(pd.read_parquet(requests), pd.read_csv(ledger))
    except (OSError, ValueError, LookupError, NotImplementedError) as error:
        raise ConfigError(f"{folder}: the result is damaged: {error}") from None
    needed = {requests: (tables.requests, REQUEST_COLUMNS), ledger: (tables.ledger, LEDGER_COLUMNS)}
    for path, (table, columns) in needed.items():
        for column in columns:
            if column not in table:
                raise ConfigError(f"{path}: the result is damaged: no column {column}")
            if table.empty or not pd.api.types.is_numeric_dtype(table[column]):
                raise ConfigError(f"{path}: the result is damaged: no numbers in {column}")
    return tables
