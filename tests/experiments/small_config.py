"""The text of a small experiment, and the message that a mistake in one gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import deploy_all

SMALL = """\
name: small
description: Two schedulers on a small load.
seed: 7
model: gpt3-175b
device: a100-80g-sxm
workload:
  requests: 60
  lengths: {kind: uniform, min: 200, max: 600}
  pd_ratio: 5
cluster: {tp: 8, pp: 8, max_length: 1024}
batching: {max_batch: 4}
policy: {name: orca, case: best}
scenarios:
  orca: {}
  sarathi: {policy: {name: sarathi, chunk_size: 256}}
compare:
  speedup: {metric: makespan_s, over: [orca, sarathi], paper: 1.5}
"""


def message(path: Path, *assignments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        deploy_all(load_experiment(path, assignments))
    return str(caught.value)
