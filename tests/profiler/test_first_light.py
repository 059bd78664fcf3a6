"""The loop of ``first-light``, its ledger and its archive, with stand-ins for the steps."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest

from sarathi_sim.profiler.first_light.hour import Ledger, Options, _Hour, first_light, pack, unpack
from sarathi_sim.profiler.first_light.steps import STEPS, HourStep, Task
from sarathi_sim.profiler.planning.journal import ProfileError

THREE = (
    HourStep("probe", "", 20, gate=True),
    HourStep("a", "", 20, resumes=True),
    HourStep("b", "", 20),
)


class Machine:
    """Stands for the processes: what each step's does, and which were started."""

    def __init__(self, gpu: str = "NVIDIA H200") -> None:
        self.gpu = gpu
        self.started: list[tuple[str, float]] = []
        self.does: dict[str, Callable[[Task], int | None]] = {}

    def run(self, _: Any, name: str, task: Task) -> int | None:
        self.started.append((name, task.seconds))
        if name in self.does:
            return self.does[name](task)
        return well(task, name, self.gpu)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.started]


def well(task: Task, name: str, gpu: str = "") -> int:
    task.result(name).write_text(json.dumps({"headline": f"{name} ran", "facts": {"gpu": gpu}}))
    return 0


def badly(task: Task, name: str, why: str = "it is wrong") -> int:
    task.result(name).write_text(json.dumps({"error": why}))
    return 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(_Hour, "_run_process", lambda self, *more: found.run(self, *more))
    return found


def hour(
    tmp_path: Path, steps: tuple[HourStep, ...] = THREE, out: str = "hour", **more: Any
) -> tuple[bool, str]:
    lines: list[str] = []
    options = Options(tmp_path / out, tmp_path / f"{out}.zip", **more)
    done = first_light(options, lines.append, steps)
    return done, "\n".join(lines)


def states(tmp_path: Path, out: str = "hour") -> dict[str, str]:
    ledger = Ledger(tmp_path / out, rehearsal=False)
    return {entry.step: entry.state for entry in ledger.entries}


def test_what_is_done_is_not_done_again_but_the_probe(tmp_path: Path, machine: Machine) -> None:
    machine.does["b"] = lambda task: badly(task, "b")
    done, text = hour(tmp_path)
    assert not done and "b: failed" in text and "it is wrong" in text
    assert states(tmp_path) == {"probe": "done", "a": "done", "b": "failed"}
    del machine.does["b"]
    done, text = hour(tmp_path)
    assert done and "a: done before" in text
    assert machine.names == ["probe", "a", "b", "probe", "b"]
    assert "3 of 3 steps are done" in text
    assert "b ran" in (tmp_path / "hour" / "summary.txt").read_text()


def test_a_gate_ends_the_hour_unless_told_otherwise(tmp_path: Path, machine: Machine) -> None:
    machine.does["probe"] = lambda task: badly(task, "probe", "no GPU")
    done, text = hour(tmp_path)
    assert not done and machine.names == ["probe"]
    assert "no GPU; what comes after it would be worth nothing" in text
    assert not hour(tmp_path, keep_going=True)[0]
    assert machine.names == ["probe", "probe", "a", "b"]


def test_no_step_begins_that_could_end_too_late(tmp_path: Path, machine: Machine) -> None:
    """Of 90 s: a step of 100 s that keeps its points gets what is left, another is not begun."""
    steps = (THREE[0], HourStep("a", "", 100, resumes=True), HourStep("b", "", 100))
    done, text = hour(tmp_path, steps, minutes=1.5)
    assert not done and machine.names == ["probe", "a"]
    assert machine.started[0][1] == pytest.approx(20, abs=1)
    assert 60 < machine.started[1][1] <= 90
    assert "b: not begun: it takes 100 s or more" in text
    assert "the same command goes on" in text


def test_a_process_over_its_limit_and_one_that_dies(tmp_path: Path, machine: Machine) -> None:
    machine.does["a"] = lambda task: None
    machine.does["b"] = lambda task: -11
    done, text = hour(tmp_path)
    assert not done
    assert "a: over its limit" in text and "ended after 20 s" in text
    assert "ended by SIGSEGV" in text


def test_a_step_is_tried_again_as_long_as_it_gets_further(tmp_path: Path, machine: Machine) -> None:
    journal = tmp_path / "hour" / "profiles" / "h200" / "m" / ".tp1.work" / "0.jsonl"

    def lost(task: Task) -> int:
        points = journal.read_text() if journal.exists() else ""
        if len(points) < 3:
            journal.parent.mkdir(parents=True, exist_ok=True)
            journal.write_text(points + "x")
        return badly(task, "a", "the GPU does nothing more for this process")

    machine.does["a"] = lost
    assert not hour(tmp_path)[0]
    assert machine.names == ["probe", "a", "a", "a", "a", "b"]  # the fourth got no further


def test_another_gpu_is_another_hour(tmp_path: Path, machine: Machine) -> None:
    assert hour(tmp_path)[0]
    machine.gpu = "NVIDIA A100-SXM4-80GB"
    done, text = hour(tmp_path)
    assert not done
    assert "this is NVIDIA A100-SXM4-80GB, and the hour began on NVIDIA H200" in text


def test_another_machine_goes_on_from_the_archive(tmp_path: Path, machine: Machine) -> None:
    machine.does["b"] = lambda task: badly(task, "b")
    assert not hour(tmp_path)[0]
    del machine.does["b"]
    (tmp_path / "other").mkdir()
    archive = (tmp_path / "hour.zip").rename(tmp_path / "carried.zip")
    done, text = hour(tmp_path / "other", resume=archive)
    assert done and machine.names == ["probe", "a", "b", "probe", "b"]
    assert [e.step for e in Ledger(tmp_path / "other" / "hour", False).entries] == [
        "probe", "a", "b", "probe", "b",
    ]  # fmt: skip
    done, text = hour(tmp_path / "other", resume=archive)
    assert done and "is there already: going on from it, not from" in text


def test_a_lost_folder_is_made_from_its_archive(tmp_path: Path, machine: Machine) -> None:
    assert hour(tmp_path)[0]
    (tmp_path / "hour").rename(tmp_path / "lost")
    done, text = hour(tmp_path)
    assert done and "made from" in text and "a: done before" in text


def test_a_signal_is_booked_and_archived(tmp_path: Path, machine: Machine) -> None:
    def interrupt(_: Task) -> int:
        raise KeyboardInterrupt

    machine.does["b"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        hour(tmp_path)
    assert states(tmp_path)["b"] == "interrupted"
    with zipfile.ZipFile(tmp_path / "hour.zip") as packed:
        assert json.loads(packed.read("ledger.json"))["entries"][-1]["state"] == "interrupted"
    del machine.does["b"]
    assert hour(tmp_path)[0]


def test_a_rehearsal_and_an_hour_are_not_mixed(tmp_path: Path, machine: Machine) -> None:
    assert hour(tmp_path, rehearsal=True)[0]
    with pytest.raises(ProfileError, match="is a rehearsal: go on with --dry-run, or name another"):
        hour(tmp_path)


def test_nothing_foreign_is_replaced(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "hour").mkdir()
    (tmp_path / "hour" / "mine.txt").write_text("mine")
    with pytest.raises(ProfileError, match="exists and is no folder of first-light"):
        hour(tmp_path)
    (tmp_path / "new.zip").write_text("mine")
    with pytest.raises(ProfileError, match="is no archive of first-light, or a damaged one"):
        hour(tmp_path, out="new")
    assert hour(tmp_path, out="first")[0] and hour(tmp_path, out="second")[0]
    with pytest.raises(ProfileError, match=r"second.zip: exists and is not of .*first"):
        pack(tmp_path / "first", tmp_path / "second.zip")
    with pytest.raises(ProfileError, match="no such file"):
        hour(tmp_path, out="third", resume=tmp_path / "none.zip")
    assert (tmp_path / "hour" / "mine.txt").read_text() == "mine"


def folder_of(tmp_path: Path, files: dict[str, bytes]) -> Path:
    folder = tmp_path / "hour"
    folder.mkdir()
    Ledger(folder, rehearsal=False)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*") if p.is_file()
    }


def test_packed_and_unpacked_it_is_the_same(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        {
            "logs/a.log": b"log",
            "profiles/h200/m/tp1/linear.csv": b"1,2",
            "profiles/h200/m/.tp1.work/ab12.jsonl": b"{}",
        },
    )
    expected = tree(folder)
    (folder / "lock").write_text("process 1")
    for scratch in (".ledger.json.partial", "profiles/h200/m/.tp1-0123abcd/linear.csv"):
        (folder / scratch).parent.mkdir(exist_ok=True)
        (folder / scratch).write_text("half")
    assert pack(folder, tmp_path / "hour.zip") == []
    first = (tmp_path / "hour.zip").read_bytes()
    pack(folder, tmp_path / "hour.zip")
    assert (tmp_path / "hour.zip").read_bytes() == first
    unpack(tmp_path / "hour.zip", tmp_path / "again")
    assert tree(tmp_path / "again") == expected


def test_the_largest_logs_are_left_out_first_then_the_largest_others(tmp_path: Path) -> None:
    """Bytes that do not compress; the limit leaves room for all but 3,000 of them, then for 900."""
    noise = __import__("random").Random(0).randbytes
    sizes = {"logs/a.log": 2000, "logs/b.log": 4000, "results/x.json": 6000, "results/y.json": 500}
    folder = folder_of(tmp_path, {name: noise(size) for name, size in sizes.items()})
    archive = tmp_path / "hour.zip"
    whole = sum(sizes.values()) + 1500  # of the ledger and the archive's own
    assert pack(folder, archive, whole) == []
    assert pack(folder, archive, whole - 3000) == ["logs/b.log"]
    with zipfile.ZipFile(archive) as packed:
        assert "logs/a.log" in packed.namelist()
        assert packed.read("left_out.txt") == b"logs/b.log\n"
    assert archive.stat().st_size <= whole - 3000
    assert pack(folder, archive, 2000) == ["logs/b.log", "logs/a.log", "results/x.json"]
    unpack(archive, tmp_path / "again")
    assert (tmp_path / "again" / "results" / "y.json").read_bytes()


def test_an_archive_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {})
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as packed:
        packed.write(folder / "ledger.json", "ledger.json")
        packed.writestr("../outside.txt", "x")
    with pytest.raises(ProfileError, match="outside of the folder"):
        unpack(tmp_path / "bad.zip", tmp_path / "sub" / "again")
    assert not (tmp_path / "sub").exists()
    cut = (tmp_path / "bad.zip").read_bytes()[:-30]
    (tmp_path / "cut.zip").write_bytes(cut)
    with pytest.raises(ProfileError, match="damaged"):
        unpack(tmp_path / "cut.zip", tmp_path / "again")


def test_a_damaged_ledger_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {})
    (folder / "ledger.json").write_text('{"format": "sarathi-sim first light 1", "entries": [{}]}')
    with pytest.raises(ProfileError, match=r"ledger.json: is no ledger of first-light"):
        Ledger(folder, rehearsal=False)


def test_the_first_five_steps_take_ten_minutes_at_most() -> None:
    assert [step.name for step in STEPS[:5]] == [
        "probe", "correctness", "ceilings", "methods", "llama-13b",
    ]  # fmt: skip
    assert sum(step.limit_s for step in STEPS[:5]) <= 570  # and half a minute to start and end


def test_the_wheels_for_a_gpu_node_bring_what_they_need() -> None:
    """The node has torch, and NumPy; each carried package's own needs are carried, too."""
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    found = re.search(r"GPU_NEEDS := ((?:.*\\\n)*.*)", makefile)
    assert found
    carried = set(found[1].replace("\\", "").split())
    assert {"pydantic", "simpy", "xformers"} <= carried
    for package in carried:
        with suppress(PackageNotFoundError):  # those of NVIDIA need nothing
            needs = [need for need in requires(package) or [] if "extra ==" not in need]
            names = {re.split(r"[^A-Za-z0-9_.-]", need)[0].replace("_", "-") for need in needs}
            assert names <= carried | {"torch", "numpy"}, package
