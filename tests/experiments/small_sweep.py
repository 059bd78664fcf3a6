"""A small sweep: eighteen runs, each of a few milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sarathi_sim.experiments.sweeps.backends import Backend
from sarathi_sim.experiments.sweeps.execute import Report, execute
from sarathi_sim.experiments.sweeps.plan import SweepPlan
from sarathi_sim.experiments.sweeps.store import Store

SWEEP = """\
name: tiny
seed: 3
model: llama-13b
device: a6000
workload:
  requests: 40
  lengths: {kind: uniform, min: 64, max: 512}
  pd_ratio: 5
cluster: {max_length: 512}
scenarios:
  orca: {policy: {name: orca, case: best}}
  sarathi: {policy: {name: sarathi, chunk_size: 128}}
sweep:
  grid:
    batching.max_batch: [2, 4, 8]
  seeds: 3
"""
RUNS = 18


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and what is in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def swept(
    plan: SweepPlan,
    folder: Path,
    backend: Backend,
    resume: bool = False,
    say: Callable[[str], object] = print,
) -> Report:
    """Do the sweep, or go on with it, in a folder."""
    store = Store(folder)
    store.open(resume)
    return execute(plan, store, backend, say=say)
