"""kill -9 at random moments: ``python -m tests.kills --kills 100``.

Sweeps of sixty runs are killed (the parent, one of its workers, or the whole process group) and
gone on with by ``--resume``. In the end every file must be as in a sweep that nothing happened to,
and ten seconds after a parent's death none of its processes may be left. The exit code is 1 after
any failure, and the folder is kept then. For Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.experiments.small_sweep import SWEEP, tree
from tests.processes import children, gone

ROOT = Path(__file__).resolve().parents[1]
CONFIG = SWEEP.replace("max_batch: [2, 4, 8]", "max_batch: [1, 2, 4, 6, 8]").replace(
    "seeds: 3", "seeds: 6"
)
TARGETS = ("parent", "worker", "group")
GONE_S, HANG_S = 10, 300


def start(folder: Path) -> subprocess.Popen[str]:
    options = ["--workers", "2", "--quiet", *["--resume"] * folder.exists()]
    config = str(folder.with_name("sixty.yaml"))
    return subprocess.Popen(
        [sys.executable, "-m", "sarathi_sim", "sweep", config, "--out", str(folder), *options],
        cwd=ROOT,
        env={**os.environ, "SARATHI_SIM_CACHE": str(folder.with_name("cache"))},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a sweep; what is wrong with its end."""
    try:
        _, errors = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "hangs"
    return f"exit code {process.returncode}: {errors[-300:]}" if process.returncode else ""


def left(scratch: Path) -> list[int]:
    """Processes that a sweep in this folder has started, at any remove."""
    found, mark = [], f"SARATHI_SIM_CACHE={scratch / 'cache'}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def disturb(
    process: subprocess.Popen[str], target: str, counts: Counter[str], scratch: Path
) -> str:
    """Kill and count a sweep's ``target``, if it is there; what is wrong then."""
    workers = children(process.pid)
    if process.poll() is not None or (target == "worker" and not workers):
        return finish(process)
    counts[target] += 1
    if target == "worker":
        os.kill(random.choice(workers), signal.SIGKILL)
        return finish(process)
    (os.killpg if target == "group" else os.kill)(process.pid, signal.SIGKILL)
    process.wait()  # its stderr ends only when none is left
    if not gone(left(scratch), GONE_S):
        return f"processes {left(scratch)} are left after {GONE_S} s"
    process.communicate()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=10)
    options = parser.parse_args()
    random.seed(options.seed)
    scratch, counts = Path(tempfile.mkdtemp(prefix="sarathi-sim-kills-")), Counter[str]()
    (scratch / "sixty.yaml").write_text(CONFIG, encoding="utf-8")
    wrong = [finish(start(scratch / "warm"))]
    began = time.monotonic()
    wrong.append(finish(start(scratch / "undisturbed")))
    takes_s, expected = time.monotonic() - began, tree(scratch / "undisturbed")
    assert len(list((scratch / "undisturbed" / "runs").iterdir())) == 60
    while counts.total() < options.kills and not any(wrong):
        folder = scratch / f"sweep{counts.total()}"
        for _ in range(random.choice((1, 1, 2, 3))):
            process = start(folder)
            time.sleep(random.uniform(0, takes_s))
            wrong.append(disturb(process, random.choice(TARGETS), counts, scratch))
        wrong.append(finish(start(folder)))
        wrong.append("" if tree(folder) == expected else f"{folder}: other files than undisturbed")
        if not any(wrong):
            shutil.rmtree(folder)
    if here := left(scratch):
        wrong.append(f"processes {here} are left at the end")
    said = "; ".join(filter(None, wrong)) or "every file as undisturbed"
    print(f"seed {options.seed}, {dict(counts)}: {said}")  # noqa: T201
    if not any(wrong):
        shutil.rmtree(scratch)
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
