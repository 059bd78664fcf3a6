"""The folder of a finished run: written whole or not at all, and read back for plots."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.errors import ConfigError
from profiler.files import put_in_place

FORMAT = "sarathi-sim result 1"
FIGURES_FORMAT = "sarathi-sim figures 1"
SUMMARY = "summary.json"
FITS_FORMAT = "sarathi-sim fits 1"
VALIDATION = "validation.json"
VALIDATION_FORMAT = "sarathi-sim validation 1"
SWEEP_FORMAT = "sarathi-sim sweep 1"
ITERATIONS = "iterations.parquet"
_TOP_LEVEL = {"config.yaml", SUMMARY, VALIDATION, ITERATIONS, "figures", "errors.csv"}
_KINDS = {
    FORMAT: "that of a run",
    FIGURES_FORMAT: "figures of several runs",
    FITS_FORMAT: "the fits of a bundle",
    VALIDATION_FORMAT: "that of a validation",
    SWEEP_FORMAT: "that of a sweep",
}


@contextmanager
def result_folder(out: Path, kind: str = FORMAT) -> Iterator[Path]:
    """A scratch folder that becomes ``out`` when the block ends well, and vanishes when not.

    ``out`` may exist if it is empty or an earlier result of that kind, which is replaced. Raises
    ConfigError where it is anything else.
    """
    check_replaceable(out, kind)
    out = out.resolve()
    created = [folder for folder in out.parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        scratch.mkdir()
        yield scratch
        check_replaceable(out, kind)  # it may have changed in the meantime
        put_in_place(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for folder in created:
            with suppress(OSError):  # it holds the result, or something of the user's
                folder.rmdir()


def check_replaceable(out: Path, kind: str = FORMAT) -> None:
    """Raises ConfigError where ``out`` holds something that is not ours to replace."""
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--out {str(out)!a}: is not a name in UTF-8") from None
    if out.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise ConfigError(
            f"--out {out}: the command runs in this folder or in one below it, so it is not "
            "replaced: name another folder"
        )
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    summary = read_summary(out)
    if summary.get("format") != kind:
        other = _KINDS.get(str(summary.get("format")))
        problem = (
            f"exists and is a result of another kind ({other})"
            if other
            else f"exists and is not an earlier result (it has no {SUMMARY} of ours)"
        )
        raise ConfigError(f"--out {out}: {problem}, so it is not replaced: name another folder")
    scenarios = summary.get("scenarios")
    ours = _TOP_LEVEL | set(scenarios if isinstance(scenarios, dict) else ())
    foreign = sorted(path.name for path in out.iterdir() if path.name not in ours)
    if foreign:
        raise ConfigError(
            f"--out {out}: holds what is not part of an earlier result ({', '.join(foreign)}), "
            "so it is not replaced: move that away, or name another folder"
        )


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
