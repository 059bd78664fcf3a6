"""The folder of a finished run: written completely or not at all, and read for plots."""

from __future__ import annotations

import glob
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sarathi_sim.profiler.storage.files import (
    LARGEST_DATA,
    make_folders,
    partial,
    read_bounded,
    regular,
    remove_empty,
    restore,
    write_whole,
)
from sarathi_sim.profiler.storage.folder_lock import held, is_held
from sarathi_sim.profiler.storage.manifest import (
    MANIFEST,
    Manifest,
    NotOursError,
    check_ours,
    differences,
    read_manifest,
    replace_folder,
    spoken,
)
from sarathi_sim.profiler.storage.manifest import held as held_by
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml, read_mapping
from sarathi_sim.profiler.storage.strict import UserError, one_line
from sarathi_sim.simulator.views.ledger import ACCOUNTS
from sarathi_sim.simulator.views.metric_registry import known, percentile
from sarathi_sim.simulator.views.metrics import Analysis, Table

if TYPE_CHECKING:
    from .config.scenario import Scenario

FORMAT = "sarathi-sim result 1"
FIGURES_FORMAT = "sarathi-sim figures 1"
SUMMARY = "summary.json"
SCHEMA = 1
"""The version of data/schema.yaml, which lists the fields of summaries and tables."""
FITS_FORMAT = "sarathi-sim fits 1"
VALIDATION = "validation.json"
VALIDATION_FORMAT = "sarathi-sim validation 1"
SWEEP_FORMAT = "sarathi-sim sweep 1"
ACCURACY_FORMAT = "sarathi-sim accuracy 1"
PAPER_FORMAT = "sarathi-sim paper 1"
SCORE_FORMAT = "sarathi-sim score 1"
WORKLOAD_FORMAT = "sarathi-sim workload 1"
ITERATIONS = "iterations.parquet"
REQUESTS = "requests.parquet"
TOKEN_GAPS = "token_gaps.parquet"
# The columns that figures need.
REQUEST_COLUMNS = ("arrival_s", "finish_s", "ttft_s", "latency_s", "bubble_s")
GAP_COLUMNS = ("share", "tbt_s")
LEDGER_COLUMNS = (
    *("replica", "stage", "wall_s", "fill_s", "drain_s"),
    *(f"{account}_s" for account in ACCOUNTS if account not in ("fill", "drain")),
)


@contextmanager
def result_folder(out: Path, kind: str = FORMAT) -> Iterator[Path]:
    """A scratch folder that becomes ``out`` when the block ends well, and vanishes when not. An
    earlier result of that kind is replaced. Raises UserError where ``out`` is anything else, holds
    a file that we did not write, or where another command is about to write it."""
    target = check_replaceable(out, kind)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with about_out(out):
        made = make_folders(target.parent)
    try:
        with about_out(out):
            scratch.mkdir()
        with held(scratch):
            others = target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}")
            if any(other != scratch and is_held(other) for other in others):
                raise UserError(
                    f"--out {out}: another command is writing this result: wait for it, or name "
                    "another folder"
                )
            yield scratch
            with about_out(out):
                replace_folder(scratch, target, kind)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        remove_empty(made)


def open_result(
    out: Path, kind: str, apart: Callable[[str], object], where: str = ""
) -> list[Path] | None:
    """Make the folder of a result that grows. Returns the folders that were made, or None if it is
    a result of that kind already. Raises UserError, which begins with ``where`` (default:
    ``--out``), if it is something else, or holds foreign files other than the names ``apart``."""
    folder, where = resolved(out), where or f"--out {out}"
    with about_out(out):
        made = make_folders(folder)
    if {path.name for path in folder.iterdir()} <= {partial(folder / MANIFEST).name}:
        write_whole(folder / MANIFEST, Manifest(kind).dump())
        return made
    manifest = read_manifest(folder)
    if manifest is None or manifest.kind != kind:
        held_there = (
            f"exists and is not an earlier result of {spoken(kind)} (it holds {held_by(folder)})"
        )
        raise UserError(f"{where}: {held_there}: name another folder")
    found = differences(folder, manifest, apart)
    if found.changed or found.foreign:
        raise UserError(
            f"{where}: holds files that are not part of an earlier result "
            f"({found.in_the_way()}): move them away, or name another folder"
        )
    return None


def write_summary(folder: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write ``summary.json``, which holds the kind of the folder."""
    (folder / SUMMARY).write_bytes(json_bytes({"format": kind, **content}))


def check_replaceable(out: Path, kind: str = FORMAT) -> Path:
    """The resolved path of ``out``. Raises UserError if it holds files that we may not replace."""
    target = resolved(out)
    if target in (Path.cwd(), *Path.cwd().parents):
        raise UserError(
            f"--out {out}: the command runs in this folder or in one below it, so it is not "
            "replaced: name another folder"
        )
    with about_out(out):
        restore(target)
        check_ours(target, kind)
    return target


def resolved(out: Path) -> Path:
    """The absolute path of ``out``, links followed. Raises UserError where it cannot be one."""
    try:
        str(out).encode()
        target = out.resolve()
        # A link that is left leads in a circle; before 3.13, Python raises RuntimeError for it.
        loop = any(path.is_symlink() for path in (target, *target.parents))
    except UnicodeEncodeError:
        raise UserError(f"--out {str(out)!a}: is not a name in UTF-8") from None
    except RuntimeError:
        loop = True
    except (OSError, ValueError) as error:  # a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--out {str(out)!a}: is no folder: {reason}") from None
    if loop:
        raise UserError(f"--out {str(out)!a}: is no folder: its links lead in a circle")
    return target


@contextmanager
def about_out(out: Path) -> Iterator[None]:
    """Turns refusals to replace ``--out``, and failures to write it, into errors that name it."""
    try:
        yield
    except NotOursError as error:
        raise UserError(f"--out {out}: {error}") from None
    except OSError as error:
        where = "" if error.filename in (None, str(out)) else f" ({error.filename})"
        raise UserError(f"--out {out}: {error.strerror or error}{where}") from None


def read_summary(folder: Path) -> dict[str, Any]:
    """The folder's summary; empty where there is none."""
    name = VALIDATION if (folder / VALIDATION).is_file() else SUMMARY
    try:
        content = json.loads(read_bounded(folder / name, LARGEST_DATA), parse_int=_whole)
    except (ValueError, OverflowError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _whole(digits: str) -> int:
    """A whole number of JSON. Raises OverflowError beyond a float's range: results stay below."""
    float(found := int(digits))
    return found


def no_run(folder: Path, otherwise: str) -> UserError:
    """The error for a folder without the result of a run: it says what the folder holds."""
    kind = spoken(str(read_summary(folder).get("format", "")))
    if kind in ("capacity", "recommend", "sensitivity", "score"):
        otherwise = f"is the answer of {kind}, not of a run: sarathi-sim report {folder} draws it"
        return UserError(f"{folder}: {otherwise}")
    return UserError(f"{folder}: not the result of a run ({otherwise})")


def run_files(
    runs: Mapping[str, tuple[Scenario, Analysis]], config: Mapping[str, Any]
) -> dict[str, bytes]:
    """Files of a result by name: each scenario's requests, its ledger, a policy of the user's own;
    and ``config.yaml``: ``config`` with the resolved scenarios, to simulate the same again."""
    files, content = stored_files({name: scenario for name, (scenario, _) in runs.items()})
    for name, (_, analysis) in runs.items():
        files[f"{name}/requests.parquet"] = parquet_bytes(analysis.request_columns)
        files[f"{name}/ledger.csv"] = csv_bytes(analysis.ledger_columns)
    return files | {"config.yaml": dump_yaml({**config, **content}).encode()}


def stored_files(scenarios: Mapping[str, Scenario]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The policies of the user's own as files, and the resolved scenarios of a ``config.yaml``."""
    from .config.loading import stored

    found = {name: stored(scenario, name) for name, scenario in scenarios.items()}
    files = {path: content for _, policy in found.values() for path, content in policy.items()}
    return files, {"scenarios": {name: scenario for name, (scenario, _) in found.items()}}


def parquet_bytes(table: Table) -> bytes:
    """A table as a file of Parquet."""
    content: bytes = pd.DataFrame(table, copy=False).to_parquet(index=False)
    return content


def csv_bytes(table: Table) -> bytes:
    """The bytes of ``DataFrame(table).to_csv(index=False)``, of finite numbers."""
    rows = zip(*(column.tolist() for column in table.values()), strict=True)
    return "".join(f"{','.join(map(str, row))}\n" for row in (table, *rows)).encode()


def json_bytes(content: Mapping[str, Any], indent: int | None = 2) -> bytes:
    """A file of JSON with the version of its fields, in which NaN and infinities are null. Without
    ``indent`` it is one line."""
    text = json.dumps({**to_json(content), "schema": SCHEMA}, indent=indent, allow_nan=False)
    return f"{text}\n".encode()


def to_json(value: Any) -> Any:
    """``value`` with NaN and infinities as None: JSON has neither."""
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_requests(folder: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Columns of the requests of a sweep's run. Raises UserError where they are damaged."""
    path = folder / REQUESTS
    try:
        return pd.read_parquet(regular(path), columns=list(columns))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the sweep is damaged: {one_line(error)}") from None


def check_kept(path: str, where: str) -> None:
    """Raise UserError for a percentile over tokens, whose times no run of a sweep keeps."""
    found = known(path)
    if found.metric.key == "tbt_s" and found.statistic not in found.metric.statistics:
        kept = ", ".join(found.metric.statistics)
        raise UserError(f"{where} {path}: the runs of a sweep keep {kept} of tbt_s")


def percentile_in(folder: Path, path: str, steady: Mapping[str, Any]) -> float:
    """A percentile over the requests of a sweep's run, or over its steady part; NaN without one.
    ``steady`` has the state of the run and the requests of its warm-up."""
    found = known(path)
    columns = dict.fromkeys(("arrival_s", "latency_s", found.metric.key))
    requests = read_requests(folder, list(columns))
    if found.of_steady_part:
        there = requests.dropna(subset="latency_s").sort_values("arrival_s", kind="stable")
        warm_up = int(steady["warmup_requests"]) if steady["state"] == "steady" else len(there)
        requests = there[warm_up:]
    return float(requests[found.metric.key].quantile(percentile(found.statistic) or 0.0))


@dataclass(frozen=True)
class Tables:
    """One scenario's tables, as the figures take them, and the policy it ran; ``token_gaps`` None
    if it was not kept. ``steady``: whether the run is overloaded, and its warm-up."""

    requests: pd.DataFrame
    ledger: pd.DataFrame
    token_gaps: pd.DataFrame | None
    policy: str
    steady: dict[str, Any]


def read_tables(folder: Path) -> dict[str, Tables]:
    """The tables of every scenario of a result. Raises UserError where it is not one."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    summary = read_summary(folder)
    kind, scenarios = summary.get("format"), summary.get("scenarios")
    if kind == FIGURES_FORMAT:
        raise UserError(f"{folder}: holds figures of several runs: name the runs' own folders")
    if kind == SWEEP_FORMAT:
        raise UserError(f"{folder}: is a sweep: name it alone, or the folders of its runs")
    if kind != FORMAT:
        raise no_run(folder, f"no {SUMMARY} of ours")
    if not isinstance(scenarios, dict) or not scenarios:
        raise UserError(f"{folder}: the result is damaged: {SUMMARY} names no scenarios")
    found = {}
    for name, numbers in scenarios.items():
        steady = numbers.get("steady") if isinstance(numbers, dict) else None
        warmup = steady.get("warmup_requests") if isinstance(steady, dict) else None
        if not isinstance(steady, dict) or not isinstance(warmup, int) or warmup < 0:
            raise UserError(f"{folder}: the result is damaged: {SUMMARY}: {name}: no steady")
        found[name] = _tables(folder / name, policy_of(folder, name), steady)
    return found


def read_text(path: Path) -> str:
    """The text of a result's file. Raises UserError where there is none."""
    try:
        return read_bounded(path).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None


def policy_of(folder: Path, scenario: str) -> str:
    """The name of the policy that a result's scenario ran. Raises UserError where none is."""
    path = folder / "config.yaml"
    config: Any = read_mapping(path)
    for key in ("scenarios", scenario, "policy", "name"):
        config = config.get(key) if isinstance(config, dict) else None
    if not isinstance(config, str):
        raise UserError(f"{path}: the result is damaged: no policy of {scenario}")
    return config


def _tables(folder: Path, policy: str, steady: dict[str, Any]) -> Tables:
    requests, ledger = folder / REQUESTS, folder / "ledger.csv"
    gaps = folder / TOKEN_GAPS  # the runs of a sweep do not keep it
    try:
        token_gaps = pd.read_parquet(regular(gaps)) if gaps.exists() else None
        served, idle = pd.read_parquet(regular(requests)), pd.read_csv(regular(ledger))
        tables = Tables(served, idle, token_gaps, policy, steady)
    except (OSError, ValueError, LookupError, NotImplementedError) as error:
        raise UserError(f"{folder}: the result is damaged: {one_line(error)}") from None
    needed = [(requests, served, REQUEST_COLUMNS), (ledger, idle, LEDGER_COLUMNS)]
    needed += [(gaps, token_gaps, GAP_COLUMNS)] if token_gaps is not None else []
    for path, table, columns in needed:
        lacking = ["no rows"] if table.empty and path != gaps else []
        lacking += [f"no column {column}" for column in columns if column not in table]
        for column in filter(table.__contains__, columns):
            if not pd.api.types.is_numeric_dtype(table[column]):
                lacking.append(f"no numbers in {column}")
        if lacking:
            raise UserError(f"{path}: the result is damaged: {lacking[0]}")
    return tables
