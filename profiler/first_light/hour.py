"""The loop over the steps of a first hour: finished steps stay finished, after any error. No torch.

Its ledger has the time and the outcome of each step; its archive holds all results.
"""

from __future__ import annotations

import datetime
import io
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sarathi_sim.profiler.first_light.steps import PROBE, STEPS, HourStep, Task
from sarathi_sim.profiler.planning.journal import ProfileError
from sarathi_sim.profiler.storage.child import Say, how_it_ended, start_child
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.profiler.storage.folder_lock import FolderBusyError, FolderLock

LEDGER = "ledger.json"
_FORMAT = "sarathi-sim first light 1"
DONE, FAILED, LATE, INTERRUPTED = "done", "failed", "over its limit", "interrupted"


@dataclass(frozen=True)
class Entry:
    """One try of a step. ``why`` is empty for one that is done; ``gpu`` is the machine's."""

    step: str
    state: str
    seconds: float
    started: str
    why: str = ""
    gpu: str = ""


class Ledger:
    """``ledger.json`` of a folder, created if it is missing, and written whole at each entry.

    ``run`` tells hours apart. Raises ProfileError for a damaged file, and for one of a rehearsal
    where ``rehearsal`` is not, or the other way around.
    """

    def __init__(self, folder: Path, rehearsal: bool) -> None:
        self._path, self.rehearsal = folder / LEDGER, rehearsal
        self.entries: list[Entry] = []
        self.run = secrets.token_hex(8)
        if self._path.is_file():
            self.run, was, self.entries = parse_ledger(self._path.read_bytes(), str(self._path))
            if was != rehearsal:
                kind, option = ("a", "with") if was else ("no", "without")
                raise ProfileError(
                    f"{folder}: is {kind} rehearsal: go on {option} --dry-run, or name another "
                    "--out"
                )
        else:
            self._write()

    def add(self, entry: Entry) -> None:
        """Book a try; it is on the disk when this returns."""
        self.entries.append(entry)
        self._write()

    def last(self, step: str) -> Entry | None:
        """The latest try of a step."""
        return next((e for e in reversed(self.entries) if e.step == step), None)

    def is_done(self, step: str) -> bool:
        """Whether the latest try of a step succeeded."""
        entry = self.last(step)
        return entry is not None and entry.state == DONE

    def _write(self) -> None:
        tree = {"format": _FORMAT, "run": self.run, "rehearsal": self.rehearsal}
        content = tree | {"entries": [asdict(entry) for entry in self.entries]}
        write_whole(self._path, json.dumps(content, indent=1) + "\n")


def parse_ledger(content: bytes, where: str) -> tuple[str, bool, list[Entry]]:
    """Which hour it is, whether a rehearsal, and its entries. Raises ProfileError."""
    try:
        tree: dict[str, Any] = json.loads(content)
        if tree["format"] != _FORMAT:
            raise ValueError
        entries = [Entry(**entry) for entry in tree["entries"]]
        return str(tree["run"]), bool(tree["rehearsal"]), entries
    except (ValueError, LookupError, TypeError):
        raise ProfileError(f"{where}: is no ledger of first-light, or a damaged one") from None


MOST_BYTES = 16 * 10**6
_MOST_UNPACKED = 2**30
_LEFT_OUT = "left_out.txt"
#: Locks, and scratch files of writers that were killed (``write_whole``, ``write_bundle``).
_SCRATCH = re.compile(r"(^|/)(lock$|\.[^/]*\.partial$|\.tp\d+-[0-9a-f]{8}/)")
_SAME_DATE = (1980, 1, 1, 0, 0, 0)  # the same files give the same bytes


def pack(folder: Path, archive: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Write all files of ``folder`` to the file ``archive``; returns the names left out for want
    of room, which the archive lists in ``left_out.txt``.

    Logs go first, the largest of them before the others; then the largest of all others. Raises
    ProfileError where ``archive`` exists and is of another hour, or foreign; OSError.
    """
    check_archive(archive, folder)
    files = {
        name: path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _SCRATCH.search(name := path.relative_to(folder).as_posix())
    }
    left_out: list[str] = []
    while len(content := _zipped(files, left_out)) > most_bytes and files.keys() != {LEDGER}:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            sizes = {info.filename: info.compress_size for info in packed.infolist()}
        excess = len(content) - most_bytes
        order = sorted(files.keys() - {LEDGER}, key=lambda name: (not _is_log(name), -sizes[name]))
        while excess > 0 and order:
            name = order.pop(0)
            excess -= sizes[name]
            left_out.append(name)
            del files[name]
    write_whole(archive, content)
    return left_out


def _is_log(name: str) -> bool:
    return name.startswith("logs/")


def _zipped(files: dict[str, Path], left_out: list[str]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, path in files.items():
            packed.writestr(_zip_entry(name), path.read_bytes())
        if left_out:
            packed.writestr(_zip_entry(_LEFT_OUT), "".join(f"{name}\n" for name in left_out))
    return stream.getvalue()


def _zip_entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _SAME_DATE)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    return info


def check_archive(archive: Path, folder: Path) -> None:
    """Check that ``archive`` is missing, or was packed from ``folder``. Raises ProfileError."""
    if not archive.exists():
        return
    try:
        with zipfile.ZipFile(archive) as packed:
            theirs = parse_ledger(packed.read(LEDGER), f"{archive}: {LEDGER}")[0]
    except (OSError, KeyError, zipfile.BadZipFile):
        raise ProfileError(
            f"{archive}: exists and is no archive of first-light, so it is not replaced: name "
            "another --archive"
        ) from None
    if theirs != parse_ledger((folder / LEDGER).read_bytes(), str(folder / LEDGER))[0]:
        raise ProfileError(
            f"{archive}: exists and is not of {folder}: go on from it with --resume and another "
            "--out, or name another --archive"
        )


def unpack(archive: Path, folder: Path) -> None:
    """Make ``folder`` from an archive: whole or not at all.

    Raises ProfileError for a file that is no archive of first-light, and a damaged one; OSError.
    """
    scratch = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(archive) as packed:
            parse_ledger(packed.read(LEDGER), f"{archive}: {LEDGER}")
            names = [PurePosixPath(name) for name in packed.namelist()]
            if any(name.is_absolute() or ".." in name.parts for name in names):
                raise ProfileError(f"{archive}: names files outside of the folder")
            if sum(info.file_size for info in packed.infolist()) > _MOST_UNPACKED:
                raise ProfileError(f"{archive}: unpacks to more than {_MOST_UNPACKED} bytes")
            folder.parent.mkdir(parents=True, exist_ok=True)
            packed.extractall(scratch)
        if folder.exists():
            folder.rmdir()  # it is empty
        scratch.rename(folder)
    except (KeyError, zipfile.BadZipFile, EOFError, NotImplementedError):
        raise ProfileError(f"{archive}: is no archive of first-light, or a damaged one") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


_MOST_LINES = 20
_WIDEST = 150


def write_summary(folder: Path, ledger: Ledger, steps: Sequence[HourStep]) -> list[str]:
    """The lines, which are in ``summary.txt`` then, too."""
    done = sum(ledger.is_done(step.name) for step in steps)
    gpu = next((entry.gpu for entry in reversed(ledger.entries) if entry.gpu), "no GPU yet")
    what = "rehearsal" if ledger.rehearsal else "first light"
    lines = [f"{what} on {gpu}: {done} of {len(steps)} steps are done"]
    width = max(len(step.name) for step in steps)
    compared: list[str] = []
    for step in steps:
        entry = ledger.last(step.name)
        text = "not begun"
        if entry is not None:
            text = f"{entry.state}, {entry.seconds:.0f} s: {entry.why}"
            if entry.state == DONE:
                found = Task(folder, 0.0, ledger.rehearsal).read(step.name)
                text = f"{entry.state}, {entry.seconds:.0f} s: {found.get('headline', '')}"
                compared += found.get("facts", {}).get("lines", [])
        lines.append(f"{step.name:{width}}  {text.rstrip(' :')}"[:_WIDEST])
    lines += compared
    if len(lines) > _MOST_LINES:
        more = len(lines) - _MOST_LINES + 1
        lines[_MOST_LINES - 1 :] = [f"and {more} more lines in results/"]
    write_whole(folder / "summary.txt", "".join(f"{line}\n" for line in lines))
    return lines


#: While a step runs the archive is made anew this often: whoever kills everything leaves it behind.
_COLLECT_S = 30.0
#: With less time than this a step is not tried again.
_AGAIN_S = 15.0


@dataclass(frozen=True)
class Options:
    """The options of ``sarathi-sim first-light``.

    ``minutes``: no step begins that could end later. ``keep_going``: no gate ends the hour.
    """

    out: Path
    archive: Path
    resume: Path | None = None
    minutes: float = math.inf
    rehearsal: bool = False
    keep_going: bool = False


def first_light(options: Options, say: Say, steps: Sequence[HourStep] = STEPS) -> bool:
    """Run every step that is not done; whether all are done then. ``say`` gets lines for the user.

    Results, logs, bundles and the ledger are in the folder ``out``, and after every step in the
    file ``archive``. An ``out`` that is missing is made from the archive ``resume``, or from
    ``archive`` where that exists. Raises ProfileError for a folder or archive that is not ours.
    """
    out, source = options.out, options.resume or options.archive
    fresh = not out.exists() or not {path.name for path in out.iterdir()} - {"lock"}
    if not fresh and not (out / LEDGER).exists():
        raise ProfileError(f"{out}: exists and is no folder of first-light: name another --out")
    if not fresh and options.resume:
        say(f"{out} is there already: going on from it, not from {options.resume}")
    if options.resume and not options.resume.exists():
        raise ProfileError(f"--resume {options.resume}: no such file")
    if fresh and source.exists():
        unpack(source, out)
        say(f"{out}: made from {source}")
    try:
        lock = FolderLock(out)
    except FolderBusyError as holder:
        raise ProfileError(f"{out}: {holder} works in it; wait for it, or stop it") from None
    try:
        return _Hour(options, say).run(steps)
    finally:
        lock.release()


class _Hour:
    """One call of the command: its ledger, its clock, its steps."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options, self.say = options, say
        self.began = time.monotonic()
        self.ledger = Ledger(options.out, options.rehearsal)
        self.gpu = ""
        self._left_out: list[str] = []
        check_archive(options.archive, options.out)
        for name in ("logs", "results"):
            (options.out / name).mkdir(exist_ok=True)

    def run(self, steps: Sequence[HourStep]) -> bool:
        """All steps that are not done, and the probe in any case: the machine may be another."""
        for step in steps:
            if step.name != PROBE and self.ledger.is_done(step.name):
                self.say(f"{step.name}: done before")
                continue
            left_s = 60 * self.options.minutes - (time.monotonic() - self.began)
            if left_s < step.least_s:
                self.say(
                    f"{step.name}: not begun: it takes {step.least_s:.0f} s or more, and "
                    f"{max(0.0, left_s):.0f} s are left; the same command goes on"
                )
                break
            entry = self._step(step, min(step.limit_s, left_s))
            if step.gate and entry.state != DONE and not self.options.keep_going:
                self.say(f"{step.name}: {entry.why}; what comes after it would be worth nothing")
                break
        for line in write_summary(self.options.out, self.ledger, steps):
            self.say(line)
        self._collect()
        self.say(f"everything so far: {self.options.archive}")
        return all(self.ledger.is_done(step.name) for step in steps)

    def _step(self, step: HourStep, seconds: float) -> Entry:
        """Try a step, again as long as it fails but gets further; its last entry in the ledger."""
        until = time.monotonic() + seconds
        while True:
            self.say(f"{step.name}: {step.about} (up to {until - time.monotonic():.0f} s)")
            before = self._points()
            entry = self._attempt(step, until - time.monotonic())
            self.say(f"{step.name}: {entry.state} in {entry.seconds:.0f} s. {entry.why}".rstrip())
            further = step.resumes and entry.state == FAILED and self._points() != before
            if not further or until - time.monotonic() < _AGAIN_S:
                return entry

    def _points(self) -> int:
        """Bytes of the points that profiles have kept so far."""
        journals = (self.options.out / "profiles").glob("*/*/.tp*.work/*.jsonl")
        return sum(path.stat().st_size for path in journals)

    def _attempt(self, step: HourStep, seconds: float) -> Entry:
        """One process: run, ended with all of its group, booked, collected."""
        task = Task(self.options.out, seconds, self.options.rehearsal)
        task.result(step.name).unlink(missing_ok=True)
        started = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        began = time.monotonic()
        state, why = INTERRUPTED, "by a signal"
        try:
            code = self._run_process(step.name, task)
            state, why = self._outcome(step.name, task, code)
        finally:
            took = round(time.monotonic() - began, 1)
            entry = Entry(step.name, state, took, started, why, self.gpu)
            self.ledger.add(entry)
            self._collect()
        return entry

    def _run_process(self, name: str, task: Task) -> int | None:
        """The exit code of a step; None if its time was over."""
        step = (name, str(task.folder), str(task.seconds), str(int(task.rehearsal)))
        deadline = time.monotonic() + task.seconds
        with (task.folder / "logs" / f"{name}.log").open("ab") as log:
            process, channel = start_child(
                *("sarathi_sim.profiler.first_light.one_step", *step),
                stdout=log,
                stderr=log,
                environment={"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        try:
            while (left := deadline - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left, _COLLECT_S))
                self._collect()
            return None
        finally:
            with suppress(ProcessLookupError):  # also processes that it left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            channel.close()

    def _outcome(self, name: str, task: Task, code: int | None) -> tuple[str, str]:
        """State and reason, for the ledger."""
        if code is None:
            return LATE, f"ended after {task.seconds:.0f} s"
        result = task.read(name)
        if code == 0 and "headline" in result:
            return self._same_machine(result) if name == PROBE else (DONE, "")
        if code < 0:
            return FAILED, how_it_ended(code)
        return FAILED, str(result.get("error", f"exit code {code}; logs/{name}.log says why"))

    def _same_machine(self, result: dict[str, Any]) -> tuple[str, str]:
        """Whether the probe has found the GPU that the hour began on."""
        self.gpu = str(result["facts"]["gpu"])
        before = {entry.gpu for entry in self.ledger.entries if entry.gpu} - {self.gpu}
        if before:
            return FAILED, f"this is {self.gpu}, and the hour began on {', '.join(sorted(before))}"
        return DONE, ""

    def _collect(self) -> None:
        left_out = pack(self.options.out, self.options.archive)
        if left_out and left_out != self._left_out:
            self.say(f"left out of the archive for want of room: {', '.join(left_out)}")
        self._left_out = left_out
