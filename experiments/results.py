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

FORMAT = "sarathi-sim result 1"
SUMMARY = "summary.json"


@contextmanager
def result_folder(out: Path) -> Iterator[Path]:
    """A scratch folder that becomes ``out`` when the block ends well, and vanishes when not.

    ``out`` may exist if it is empty or an earlier result, which is replaced. Raises ConfigError
    where it is anything else.
    """
    check_replaceable(out)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    scratch.mkdir()
    try:
        yield scratch
        retired = None
        if out.exists():
            retired = scratch.with_name(f"{scratch.name}.old")
            out.replace(retired)
        scratch.replace(out)
        if retired is not None:
            shutil.rmtree(retired)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raises ConfigError where ``out`` holds something that is not ours to replace."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if out.is_dir() and _format(out / SUMMARY) == FORMAT:
        return
    raise ConfigError(
        f"--out {out}: exists and is not an earlier result (it has no {SUMMARY} of ours), "
        "so it is not replaced: name another folder"
    )


def _format(path: Path) -> object:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content.get("format") if isinstance(content, dict) else None


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
    if _format(folder / SUMMARY) != FORMAT:
        raise ConfigError(f"{folder}: not the result of a run (no {SUMMARY} of ours)")
    names = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["scenarios"]
    try:
        return {
            name: Tables(
                pd.read_parquet(folder / name / "requests.parquet"),
                pd.read_csv(folder / name / "ledger.csv"),
            )
            for name in names
        }
    except (OSError, ValueError) as error:  # pyarrow's and pandas' errors are ValueErrors
        raise ConfigError(f"{folder}: the result is damaged: {error}") from None
