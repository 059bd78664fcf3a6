"""Questions as whole commands, beside the same of another commit: processor and wall time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from sarathi_sim.profiler.storage.child import Progress

ROOT = Path(__file__).parents[2]
BEFORE = "713f80ee"
_RECOMMEND = ("recommend", "--device", "h100-80g-sxm", "--stack", "vllm")
QUESTIONS = {
    "recommend 70B on 16": (*_RECOMMEND, "--model", "llama-3.3-70b", "--gpus", "16", "--slo",
                            "p99 ttft 1s, p99 tbt 50ms"),
    "recommend 8B on 1": (*_RECOMMEND, "--model", "llama-3.1-8b", "--gpus", "1", "--slo",
                          "p90 ttft 2s, p90 tpot 50ms", "--workload", "1024:256"),
    "recommend 32B, 8/s": ("recommend", "--model", "qwen3-32b", "--device", "h100-80g-sxm,h200-sxm",
                           "--rate", "8", "--slo", "p99 ttft 2s, p99 tbt 80ms"),
    "capacity_llama3_70b": ("capacity", "capacity_llama3_70b"),
    "its sensitivity": ("capacity", "capacity_llama3_70b", "--sensitivity"),
}  # fmt: skip
"""Questions by name, as arguments of the command."""


def answers_table(before: str, repeats: int, progress: Progress) -> str:
    """A line a question: medians of seconds of the ``before`` commit, and of this checkout, taken
    in turns; what takes over a minute runs once."""
    lines = [
        f"{'':22}{'CPU s':>9}{'before':>9}{'ratio':>7}{'wall s':>9}{'before':>9}{'first s':>9}"
    ]
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "before"
        tree = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*tree, "add", "--detach", "--quiet", str(old), before], check=True)
        try:
            for place, (name, words) in enumerate(QUESTIONS.items()):
                progress("questions", place, len(QUESTIONS))
                took: dict[Path, list[tuple[float, float]]] = {ROOT: [], old: []}
                for number in range(repeats):
                    if number == 0 or max(both[-1][0] for both in took.values()) < 60:
                        for root, times in took.items():
                            times.append(_timed(root, words, Path(folder) / f"{place}_{number}"))
                (cpu, wall), (cpu_old, wall_old) = (
                    map(median, zip(*times, strict=True)) for times in took.values()
                )
                numbers = f"{cpu:9.1f}{cpu_old:9.1f}{cpu / cpu_old:7.2f}{wall:9.1f}{wall_old:9.1f}"
                first = f"{_first_s(words):9.1f}" if words[0] == "recommend" else ""
                lines.append(f"{name:22}{numbers}{first}")
        finally:
            subprocess.run([*tree, "remove", "--force", str(old)], check=True)
    return "\n".join(lines)


def _first_s(words: tuple[str, ...]) -> float:
    """Seconds of the clock until the first answer is printed."""
    command = [sys.executable, "-m", "sarathi_sim", *words, "--progress", "json", "--quiet"]
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as out,
        subprocess.Popen([*command, "--out", out], cwd=ROOT, stdout=subprocess.PIPE) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        took = time.perf_counter() - began
        child.kill()
    return took


def _timed(root: Path, words: tuple[str, ...], out: Path) -> tuple[float, float]:
    """Seconds of the processor, its workers' too, and of the clock."""
    if root != ROOT and "--sensitivity" in words:
        words = ("sensitivity", *words[1:-1])
    command = [
        sys.executable,
        "-m",
        "sarathi_sim",
        *words,
        "--quiet",
        "--out",
        f"{out}_{root.name}",
    ]
    began = time.perf_counter()
    child = subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{root}: {' '.join(command[2:])} ended with {status}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - began
