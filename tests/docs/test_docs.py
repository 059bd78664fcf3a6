"""The reader and the comparison of ``python -m tests.docs``, and its short form: the same commands
word for word, with smaller sizes only.
"""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.cli.app import app
from experiments.config import inputs, loading
from profiler.storage.plain_yaml import read_mapping
from tests.docs import runner
from tests.docs.page import PAGES, ROOT, blocks
from tests.docs.runner import run_page
from tests.docs.shown import not_printed, numbers_not_printed, renewed

REQUESTS = 20
WHOLE = ("docs/engines.md",)
"""Pages that look into a run where a short one has ended already."""
WITH_COMMANDS = [
    page
    for page in PAGES
    if any(b.kind in ("commands", "python") for b in blocks((ROOT / page).read_text("utf-8")))
]


def smaller(path: Path) -> dict[str, Any]:
    """A configuration with few requests and seeds, and a capacity that is searched coarsely."""
    raw = read_mapping(path)
    tops = [raw, *(raw.get("scenarios") or {}).values()]
    for section in (top["workload"] for top in tops if top and "workload" in top):
        if "requests" in section:
            section["requests"] = min(section["requests"], REQUESTS)
    if isinstance(raw.get("sweep", {}).get("seeds"), int):
        raw["sweep"]["seeds"] = min(raw["sweep"]["seeds"], 2)
    if "capacity" in raw:
        raw["capacity"] |= {"tolerance": 0.5, "requests": 100, "most_requests": 200}
        raw["capacity"]["replications"] = {"least": 2, "most": 2}
    return raw


@pytest.fixture
def small_sizes(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer requests, seeds, trees and folds. What takes a GPU or a cluster is elsewhere."""
    if page not in WHOLE:
        monkeypatch.setattr(loading, "read_mapping", smaller)
    for name, size in {
        "simulator.op_times.surface.TREES": 20,
        "simulator.op_times.regression.TREES": 20,
        "simulator.confidence.held_out.FOLDS": 2,
        "simulator.confidence.bands.FOLDS": 2,
        "simulator.confidence.held_out.FOREST": 5,
        "experiments.run.bench.BATCHES": (8,),
        "experiments.run.bench.OUTPUT": 40,
        "experiments.capacity.capacity_section.BEYOND": 1,
        "experiments.capacity.options.LEAST_REQUESTS": 100,
        "experiments.capacity.options.PILOT_REQUESTS": 100,
        "experiments.capacity.options.FINEST_REQUESTS": 100,
    }.items():
        monkeypatch.setattr(name, size)
    for name in ("torch", "a GPU", "vLLM", "Dask"):
        monkeypatch.setitem(runner.NEEDS, name, lambda: False)
    inputs._load.cache_clear()
    inputs._made.cache_clear()


def in_process(line: str, folder: Path) -> tuple[int, str]:
    """Runs a line as a shell does, without a new process."""
    program, *words = shlex.split(line, comments=True)
    words = [name for word in words for name in sorted(glob.glob(word)) or [word]]
    if program == "cp":
        shutil.copy(*words)
        return 0, ""
    if program == "python":
        exec(compile((folder / words[0]).read_text("utf-8"), line, "exec"), {"__name__": "page"})
        return 0, ""
    began = time.monotonic()
    done = CliRunner().invoke(app, words)
    print(f"{time.monotonic() - began:6.1f} s  {line}")
    return done.exit_code, f"{done.output}{done.exception or ''}"


@pytest.mark.slow
@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = run_page(ROOT / page, tmp_path, in_process, compare=False)
    assert told.ran + told.left and not told.wrong, "\n".join(told.wrong)
