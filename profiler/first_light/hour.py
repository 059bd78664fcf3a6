"""The loop over the steps of a first hour: what is done stays done, whatever happens. No torch."""

from __future__ import annotations

import datetime
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.first_light.archive import check_archive, pack, unpack
from sarathi_sim.profiler.first_light.hour_ledger import (
    DONE,
    FAILED,
    INTERRUPTED,
    LATE,
    LEDGER,
    Entry,
    Ledger,
)
from sarathi_sim.profiler.first_light.steps import PROBE, STEPS, HourStep, Task
from sarathi_sim.profiler.first_light.twenty_lines import write_summary
from sarathi_sim.profiler.planning.profile_error import ProfileError
from sarathi_sim.profiler.storage.child import how_it_ended, start_child
from sarathi_sim.profiler.storage.folder_lock import FolderBusyError, FolderLock
from sarathi_sim.profiler.storage.progress import Say

#: While a step runs the archive is made anew this often: whoever kills everything leaves it behind.
_COLLECT_S = 30.0
#: With less time than this a step is not tried again.
_AGAIN_S = 15.0


@dataclass(frozen=True)
class Options:
    """What ``sarathi-sim first-light`` was asked for.

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
                    f"{step.name}: not begun: it may take {step.limit_s:.0f} s, and "
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
        """Its exit code; None where its time was over."""
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
            with suppress(ProcessLookupError):  # also what it has left behind
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
