"""The product stands without the laboratory: with its folder deleted every command works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sarathi_sim.experiments.cli import GROUPS
from tests.hostile.template import write_template

ROOT = Path(__file__).resolve().parents[1]
RECOMMEND = "--slo 'p90 ttft 2s' --workload 64:8 --budget 512 --seqs 16 --set tolerance=0.4"
FEW = "capacity={slo: p90 ttft 2s, tolerance: 0.5, requests: 100, most_requests: 400}"
CAPACITY = f"--workload 32:8 --set '{FEW}'"
COMMANDS = f"""
run exp.yaml --no-figures --out result
run exp.yaml --dry-run
sweep sweep.yaml --workers 1 --out swept
sweep sweep.yaml --dry-run
compare result/orca result/sarathi
plot result --out drawn
report result swept --out page.html
capacity exp.yaml {CAPACITY} --no-bands --workers 1 --out c
capacity exp.yaml --sensitivity --metric mfu --only lm_head --replications 1 --workers 1 --out s
recommend --model llama-3.1-8b --device l40s --gpus 1 --stack vllm {RECOMMEND} --workers 1 --out r
recommend --policy sarathi --model llama-13b --device a6000 --gpus 1 --workload 1K@14 --seqs 2
fit profiles/dev/tiny/tp1
score server.jsonl --config own.yaml
tune vllm.json --config stacked.yaml --out tuned.yaml
list models
list devices
list policies
list support --model llama-3.1-8b --device l40s
workload trace.csv
profile --help
"""


@pytest.mark.slow
def test_every_command_runs_without_the_laboratory(tmp_path: Path) -> None:
    code, work = tmp_path / "code", tmp_path / "work"
    for name in ("policies", "profiler", "simulator", "experiments", "sarathi_sim", "data"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(code / "experiments" / "lab")
    write_template(work)
    # Without site: an editable install would find the laboratory where it was installed from.
    places = (str(code), sysconfig.get_path("purelib"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    lines = COMMANDS.strip().splitlines()
    assert {line.split()[0] for line in lines} == {n for names in GROUPS.values() for n in names}
    for line in lines:
        words = [sys.executable, "-S", "-m", "sarathi_sim"]
        done = subprocess.run(
            f"{' '.join(words)} {line}",
            **{"shell": True, "cwd": work, "env": environment, "text": True},
            capture_output=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    done = subprocess.run([*words, "lab"], cwd=work, env=environment, capture_output=True)
    assert done.returncode == 2 and b"the laboratory is not installed" in done.stderr
