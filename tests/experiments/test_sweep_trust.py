"""Nothing is lost when something breaks, and the bytes do not depend on what happened."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.sweeps.backends import Bundles, InProcess, Outcomes
from sarathi_sim.experiments.sweeps.execute import ATTEMPTS
from sarathi_sim.experiments.sweeps.jobs import work
from sarathi_sim.experiments.sweeps.plan import SweepPlan, plan_sweep
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.profiler.storage.files import partial
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.records import Records
from tests.experiments.small_config import ROOT, summary_of
from tests.experiments.small_sweep import RUNS, Files, swept, tree
from tests.patience import PATIENCE_S


def start(config: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sarathi_sim", "sweep", str(config), "--out", str(out)]
    return subprocess.Popen(
        [*command, "--workers", "2", "--quiet", *more],
        cwd=out.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(out: Path) -> set[str]:
    """The runs that are there whole: what is being written has a name with a dot before it."""
    runs = out / "runs"
    return {path.name for path in runs.iterdir() if path.name[0] != "."} if runs.is_dir() else set()


def wait_for_runs(out: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(finished(out)) < count:
        assert time.monotonic() < deadline, f"{count} runs did not finish"
        time.sleep(0.05)


def test_the_table_has_a_row_per_run_in_order(tiny_files: Files, tmp_path: Path) -> None:
    path = tmp_path / "results.parquet"
    path.write_bytes(tiny_files["results.parquet"])
    table = pd.read_parquet(path)
    assert len(table) == RUNS
    assert table["batching.max_batch"].tolist() == sorted(table["batching.max_batch"])
    for _, row in table.iterrows():
        summary = json.loads(tiny_files[f"runs/{row['run']}/summary.json"])
        assert summary["scenarios"][row["scenario"]]["makespan_s"] == row["makespan_s"]
        assert summary["scenarios"][row["scenario"]]["tbt_s"]["p99"] == row["tbt_s.p99"]


class Deadly(InProcess):
    """Loses the worker that runs certain keys, and all that is under way with it."""

    def __init__(self, deadly: set[str], times: int) -> None:
        self.deadly, self.left = deadly, dict.fromkeys(deadly, times)
        self.ran: list[str] = []

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        waiting = iter(bundles)
        while under_way := [jobs for _, jobs in zip(range(ahead), waiting, strict=False)]:
            keys = [job.run.key for jobs in under_way for job in jobs]
            guilty = [key for key in keys if self.left.get(key, 0) > 0]
            for key in guilty:
                self.left[key] -= 1
            for jobs in under_way:
                self.ran += [job.run.key for job in jobs]
                yield ("lost", jobs, None) if guilty else ("returned", jobs, work(jobs))


def test_what_was_lost_is_sent_again(
    tiny_plan: SweepPlan, tiny_files: Files, tmp_path: Path
) -> None:
    backend = Deadly({tiny_plan.runs[4].key}, times=ATTEMPTS - 1)
    report = swept(tiny_plan, tmp_path / "sweep", backend)
    assert report.lost_workers > 0
    assert tree(tmp_path / "sweep") == tiny_files


def test_a_run_that_kills_every_worker_is_given_up_alone(
    tiny_plan: SweepPlan, tiny_files: Files, tmp_path: Path
) -> None:
    deadly = tiny_plan.runs[4].key
    backend = Deadly({deadly}, times=1000)
    report = swept(tiny_plan, tmp_path / "sweep", backend)
    assert list(report.failures) == [deadly]
    assert backend.ran.count(deadly) == ATTEMPTS
    assert report.finished == RUNS - 1
    swept(tiny_plan, tmp_path / "sweep", InProcess(), resume=True)
    assert tree(tmp_path / "sweep") == tiny_files


def test_a_run_that_raises(
    tiny_plan: SweepPlan, tiny_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate = Deployment.simulate

    def sometimes(self: Deployment) -> Records:
        if self.scenario.batching.max_batch == 4 and self.scenario.seed == 5:
            raise ZeroDivisionError("a bug")
        return simulate(self)

    folder = tmp_path / "sweep"
    with monkeypatch.context() as patch:
        patch.setattr(Deployment, "simulate", sometimes)
        report = swept(tiny_plan, folder, InProcess())
    assert set(report.failures.values()) == {"ZeroDivisionError: a bug"}
    assert report.finished == RUNS - 2
    summary = summary_of(folder)
    assert {key: one["error"] for key, one in summary["missing"].items()} == report.failures
    assert [one["point"] for one in summary["missing"].values()] == [
        {"batching.max_batch": 4, "scenario": name, "seed": 5} for name in ("orca", "sarathi")
    ]
    for key in report.failures:
        assert "in sometimes" in (folder / "failed" / f"{key}.txt").read_text()
        assert not (folder / "runs" / key).exists()
    swept(tiny_plan, folder, InProcess(), resume=True)
    assert tree(folder) == tiny_files


@pytest.mark.parametrize("writes", [0, 1, 2, 7, 41])
def test_a_full_disk(
    tiny_plan: SweepPlan,
    tiny_files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writes: int,
) -> None:
    folder, write, left = tmp_path / "sweep", Path.write_bytes, writes

    def fill_up(self: Path, content: bytes) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            write(self, content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        return write(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fill_up)
        with pytest.raises(OSError, match="No space left"):
            swept(tiny_plan, folder, InProcess())
    for run in (folder / "runs").glob("*"):
        assert tree(run) == {
            name.removeprefix(f"runs/{run.name}/"): content
            for name, content in tiny_files.items()
            if name.startswith(f"runs/{run.name}/")
        }, "what is there is whole"
    assert not [path.name for path in folder.iterdir() if path.name.endswith(".new")]
    swept(tiny_plan, folder, InProcess(), resume=True)
    assert tree(folder) == tiny_files


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tiny_config: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "sweep"
    process = start(tiny_config, out, "--set", "workload.requests=2000")
    wait_for_runs(out, 2)
    os.killpg(process.pid, number)  # as a terminal sends Ctrl-C: to the workers too
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert "Traceback" not in errors
    done = finished(out)
    assert 2 <= len(done) < RUNS
    assert f"of {RUNS} runs are finished; complete the sweep with the same command" in errors
    assert summary_of(out)["finished"] == len(done)
    assert len(pd.read_parquet(out / "results.parquet")) == len(done)


@pytest.mark.slow
def test_resumed_after_kill_is_the_same(
    tiny_config: Path, tiny_files: Files, tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    process = start(tiny_config, out)
    wait_for_runs(out, 4)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    before = {name: (out / "runs" / name).stat().st_mtime_ns for name in finished(out)}
    again = start(tiny_config, out, "--resume")
    _, errors = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, errors
    assert tree(out) == tiny_files
    after = {path.name: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    assert before.items() <= after.items(), "finished runs are not repeated"


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    """And only the holder of the lock may clear scratch folders."""
    said = pytest.raises(UserError, match=rf"another sweep is at work .*process {os.getpid()} on")
    store, other = Store(tmp_path / "sweep"), Store(tmp_path / "sweep")
    store.open(False)
    scratch = store.runs / ".0123456789abcdef"
    with store.locked():
        scratch.mkdir()
        other.open(True)
        with said, other.locked():
            pass
        assert scratch.exists()
    with other.locked():
        assert not scratch.exists(), "left by a process that was killed"


def test_what_a_killed_sweep_was_writing_is_no_obstacle(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    store.open(False)
    for name in ("results.parquet", "summary.json"):
        partial(store.folder / name).write_bytes(b"half")
    store.open(True)
    partial(store.folder / "thesis.tex").write_bytes(b"half")
    with pytest.raises(UserError, match=r"not part of an earlier result \(not ours: \.thesis\.tex"):
        store.open(True)


def test_everything_is_on_the_disk_before_it_counts(
    tiny_plan: SweepPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run might be there after a power cut, and its files empty."""
    inodes, sync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: inodes.add(os.fstat(fd).st_ino) or sync(fd))
    swept(tiny_plan, tmp_path / "sweep", InProcess())
    files = [path for path in (tmp_path / "sweep").rglob("*") if path.is_file()]
    assert len(files) == 5 * RUNS + 3, "four files and a manifest a run; two tables, a manifest"
    assert [path for path in files if path.stat().st_ino not in inodes] == []


def test_a_folder_is_not_overwritten(tiny_plan: SweepPlan, tmp_path: Path) -> None:
    swept(tiny_plan, tmp_path / "sweep", InProcess())
    with pytest.raises(UserError, match="holds a sweep: give --resume"):
        swept(tiny_plan, tmp_path / "sweep", InProcess())
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"not an earlier result of sweep \(it holds thesis\.tex\)"):
        swept(tiny_plan, tmp_path / "precious", InProcess())


def test_an_extended_sweep_repeats_nothing(
    tiny_plan: SweepPlan, tiny_config: Path, tmp_path: Path
) -> None:
    swept(tiny_plan, tmp_path / "sweep", InProcess())
    wider = plan_sweep(tiny_config, ["sweep.seeds=4"])
    report = swept(wider, tmp_path / "sweep", InProcess(), resume=True)
    assert (report.earlier, report.finished, report.total) == (RUNS, RUNS + 6, RUNS + 6)


# Finished runs that somebody or something changed -----------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def edit_a_number(path: Path) -> None:
    text, times = re.subn(r'("makespan_s": )', r"\g<1>1", path.read_text())
    assert times == 1
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("SCENARIO/requests.parquet", cut, "changed: SCENARIO/requests.parquet"),
        ("config.yaml", Path.unlink, "missing: config.yaml"),
        ("summary.json", edit_a_number, "changed: summary.json"),
        ("summary.json", lambda path: path.write_text("{"), "changed: summary.json"),
        ("manifest.json", Path.unlink, "it has no manifest.json"),
        ("manifest.json", cut, "it has no manifest.json, or one that cannot be read"),
    ],
)
def test_a_damaged_run_is_done_again_and_nothing_is_deleted(
    tiny_plan: SweepPlan,
    tiny_files: Files,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], object],
    says: str,
) -> None:
    folder, run = tmp_path / "sweep", tiny_plan.runs[4]
    runs, scenario = folder / "runs", run.name.partition(" ")[0]
    swept(tiny_plan, folder, InProcess())
    (runs / run.key / "mine.ipynb").write_text("hours of work")
    (runs / tiny_plan.runs[5].key / "mine.ipynb").write_text("an added file is no damage")
    for number in (1, 2):
        damage(runs / run.key / name.replace("SCENARIO", scenario))
        was = tree(runs / run.key)
        said: list[str] = []
        report = swept(tiny_plan, folder, InProcess(), resume=True, say=said.append)
        kept = folder / "damaged" / (run.key if number == 1 else f"{run.key}-2")
        says = says.replace("SCENARIO", scenario)
        assert said == [
            f"run {run.key} is damaged ({says}) and is done again; its old folder is now {kept}"
        ] or (name == "manifest.json" and says in said[0] and len(said) == 1)
        assert (report.earlier, report.finished) == (RUNS - 1, RUNS)
        assert tree(kept) == was
    (runs / tiny_plan.runs[5].key / "mine.ipynb").unlink()
    shutil.rmtree(folder / "damaged")
    assert tree(folder) == tiny_files
