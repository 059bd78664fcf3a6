"""kill -9 at random moments: ``python -m tests.kills --kills 100``.

Sweeps of sixty runs are killed (the parent, one of its workers, or the whole process group) and
gone on with by ``--resume``, which may be killed as well. In the end every file must be as in a
sweep that nothing happened to, and ten seconds after a parent's death none of its processes may be
left. Prints counts by outcome; the exit code is 1 after any failure, and the folder is kept then.
For Linux.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.experiments.small_sweep import SWEEP, tree
from tests.processes import children, gone

ROOT = Path(__file__).resolve().parents[1]
CONFIG = SWEEP.replace("max_batch: [2, 4, 8]", "max_batch: [1, 2, 4, 6, 8]").replace(
    "seeds: 3", "seeds: 6"
)
RUNS = 60
TARGETS = ("parent", "worker", "group")
GONE_S, HANG_S = 10, 300
_MARK = "SARATHI_SIM_KILLS"


@dataclass
class Trial:
    """Sweeps in a scratch folder, and what came of them."""

    scratch: Path
    random: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def start(self, folder: Path) -> subprocess.Popen[str]:
        """Begin a sweep, or go on with it."""
        options = ["--out", str(folder), "--workers", "2", "--quiet"]
        if folder.exists():
            options.append("--resume")
        config = str(self.scratch / "sixty.yaml")
        return subprocess.Popen(
            [sys.executable, "-m", "sarathi_sim", "sweep", config, *options],
            cwd=ROOT,
            env=os.environ
            | {_MARK: str(self.scratch), "SARATHI_SIM_CACHE": str(self.scratch / "cache")},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str], what: str) -> None:
        """Wait for a sweep to end well."""
        try:
            _, errors = process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            self.fail(f"{what}: hangs")
            return
        if process.returncode:
            self.fail(f"{what}: exit code {process.returncode}: {errors.strip()[-300:]}")

    def kill(self, process: subprocess.Popen[str], target: str, after_s: float) -> str:
        """Kill a sweep's ``target`` after a while; returns how far it was, empty if it was over."""
        moment = time.monotonic() + after_s
        workers: list[int] = []
        while process.poll() is None:
            workers = children(process.pid)
            if time.monotonic() >= moment and (workers or target != "worker"):
                break
            time.sleep(0.01)
        else:
            return ""
        if target == "worker":
            os.kill(self.random.choice(workers), signal.SIGKILL)
        elif target == "group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        return "at work" if workers else "before or after the runs"

    def fail(self, what: str) -> None:
        """Note a failure, and say so at once."""
        self.failures.append(what)
        print(f"FAILED: {what}", file=sys.stderr, flush=True)  # noqa: T201

    def disturbed(self, folder: Path, after_s: float) -> bool:
        """Start or go on, and kill; returns whether there was still something to kill."""
        target = self.random.choice(TARGETS)
        what = f"kill {sum(self.outcomes.values()) + 1} ({target} after {after_s:.2f} s)"
        process = self.start(folder)
        phase = self.kill(process, target, after_s)
        if target == "worker" or not phase:
            self.finish(process, what)
        else:
            process.wait()
            if not gone(self.left(), GONE_S):
                self.fail(f"{what}: processes {self.left()} are left after {GONE_S} s")
            assert process.stderr is not None
            process.stderr.close()
        if phase:
            self.outcomes[f"{target} killed, {phase}"] += 1
        return bool(phase)

    def left(self) -> list[int]:
        """Processes that a sweep of this trial has started, at any remove."""
        found = []
        mark = f"{_MARK}={self.scratch}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue  # it has ended, or is another user's
        return found


def main() -> int:
    """Print counts by outcome; 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=10)
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="sarathi-sim-kills-"))
    (scratch / "sixty.yaml").write_text(CONFIG, encoding="utf-8")
    trial = Trial(scratch, random.Random(options.seed))
    trial.finish(trial.start(scratch / "warm"), "the sweep that fills the cache")
    began = time.monotonic()
    trial.finish(trial.start(scratch / "undisturbed"), "the undisturbed sweep")
    takes_s = time.monotonic() - began
    expected = tree(scratch / "undisturbed")
    assert len(list((scratch / "undisturbed" / "runs").iterdir())) == RUNS
    print(f"seed {options.seed}; an undisturbed sweep of {RUNS} runs takes {takes_s:.1f} s")  # noqa: T201
    same = 0
    while (done := sum(trial.outcomes.values())) < options.kills and len(trial.failures) < 10:
        folder = scratch / f"sweep{done}"
        trial.disturbed(folder, trial.random.uniform(0, takes_s))
        while sum(trial.outcomes.values()) < options.kills and trial.random.random() < 0.5:
            trial.disturbed(folder, trial.random.uniform(0, takes_s))
        what = f"the sweep of kills {done + 1} to {sum(trial.outcomes.values())}"
        trial.finish(trial.start(folder), what)
        if tree(folder) == expected:
            same += sum(trial.outcomes.values()) > done  # not where every kill came too late
            shutil.rmtree(folder)
        else:
            trial.fail(f"{what}: other files than undisturbed, see {folder}")
    for outcome, times in sorted(trial.outcomes.items()):
        print(f"{times:5d}  {outcome}")  # noqa: T201
    print(f"{same:5d}  killed sweeps completed with every file as undisturbed")  # noqa: T201
    print(f"{len(trial.failures):5d}  failures")  # noqa: T201
    if trial.left():
        trial.fail(f"processes {trial.left()} are left at the end")
    if not trial.failures:
        shutil.rmtree(scratch)
    return 1 if trial.failures else 0


if __name__ == "__main__":
    sys.exit(main())
