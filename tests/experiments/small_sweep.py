"""A small sweep: eighteen runs, each of a few milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pandas as pd

from sarathi_sim.experiments.sweeps.backends import Backend
from sarathi_sim.experiments.sweeps.execute import Report, execute
from sarathi_sim.experiments.sweeps.plan import SweepPlan
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.experiments.sweeps.sweep import Sweep

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
RATE, CHUNK = "workload.arrivals.rate", "policy.chunk_size"
Files = dict[str, bytes]


def of(table: pd.DataFrame, axes: list[str]) -> Sweep:
    """A sweep with this table, of which a run says nothing else."""
    own = {"name": "a", "policy.name": "sarathi", "steady.state": "steady"}
    own |= {"run": table.index.map(str)}
    missing = {key: value for key, value in own.items() if key not in table}
    return Sweep(Path("sweep"), table.assign(**missing), axes, None, {"name": "layouts"})


def tree(folder: Path) -> Files:
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
    store = Store(folder)
    store.open(resume)
    with closing(backend):
        *_, report = execute(plan, store, backend, say=say)
        return report
