"""The text of a small experiment, what becomes of one, and of a command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from sarathi_sim.experiments.cli import app
from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.loading import Experiment, load_experiment
from sarathi_sim.experiments.run.experiment import deploy_all
from sarathi_sim.profiler.storage.strict import UserError

ROOT = Path(__file__).resolve().parents[2]
HERE = Source("", "x", {}, ())
Write = Callable[[str], Path]
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

AT_MOST = '''"""Mine."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_sim.policies.policy import DECODES, Plan, View, named


@named("at_most")
@dataclass
class AtMost:
    """Whole prompts, at most so many an iteration."""

    prompts: int
    eager: bool = True
    holds_finished = False

    def plan(self, view: View) -> Plan | None:
        joining = view.admissible()[: self.prompts]
        if joining:
            return Plan(tuple((s, s.prompt_tokens) for s in joining))
        return DECODES if view.num_decodes else None
'''
"""A policy of a user's own."""


def loaded(config: Path | str | Mapping[str, Any], *assignments: str) -> Experiment:
    """The experiment of a file, of a shipped configuration's name, or of a text of YAML."""
    return load_experiment(
        yaml.safe_load(config) if isinstance(config, str) else config, assignments
    )


def deployed(config: Path | str | Mapping[str, Any], *assignments: str) -> dict[str, Deployment]:
    return deploy_all(loaded(config, *assignments))


def message(config: Path | str | Mapping[str, Any], *assignments: str) -> str:
    """The lines that say what is wrong with it."""
    with pytest.raises(UserError) as caught:
        deployed(config, *assignments)
    return str(caught.value)


def summary_of(result: Path) -> Any:
    return json.loads((result / "summary.json").read_text())


def called(*words: object, code: int = 0) -> Result:
    """What a command line says that ends with this exit code."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


def refused(*words: object) -> str:
    """The one line of a command that ends with exit code 2."""
    done = called(*words, code=2)
    assert isinstance(done.exception, SystemExit)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line
