"""A policy is one file: it is found by its name, with its arguments as keys."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sarathi_sim.experiments.config.policy import POLICIES
from sarathi_sim.policies import catalogue
from sarathi_sim.policies.orca import Orca, OrcaWorstCase
from sarathi_sim.policies.request_level import RequestLevel
from sarathi_sim.policies.sarathi import Sarathi

ROOT = Path(__file__).resolve().parents[2]
SHORTEST_FIRST = '''
from sarathi_sim.policies.policy import DECODES, Plan, View, named


@named("at_most")
class AtMost:
    """Whole prompts, at most so many an iteration."""

    holds_finished = False

    def __init__(self, prompts: int, eager: bool = True) -> None:
        self.prompts, self.eager = prompts, eager

    def plan(self, view: View) -> Plan | None:
        joining = view.admissible()[: self.prompts]
        if joining:
            return Plan(tuple((s, s.prompt_tokens) for s in joining))
        return DECODES if view.num_decodes else None
'''


def test_the_shipped_policies_are_found() -> None:
    assert {"orca", "request_level", "sarathi"} <= set(catalogue.builders())  # and the reader's
    assert isinstance(catalogue.build("orca", case="worst"), OrcaWorstCase)
    best, free = catalogue.build("orca"), catalogue.build("orca", case="unconstrained")
    assert isinstance(best, Orca)
    assert isinstance(free, Orca)
    assert (best.max_prefills, free.max_prefills) == (1, None)
    assert type(catalogue.build("request_level")) is RequestLevel
    sarathi = catalogue.build("sarathi", chunk_size=64, chunk_rule="fixed")
    assert isinstance(sarathi, Sarathi)
    assert (sarathi.chunk_size, sarathi.tile, sarathi.chunk_rule) == (64, 128, "fixed")


def test_what_builds_a_policy_says_its_keys() -> None:
    fields = POLICIES["sarathi"].model_fields
    assert list(fields) == ["name", "chunk_size", "tile", "chunk_rule", "iteration_s"]
    assert fields["chunk_size"].default == 256
    assert POLICIES["orca"].model_fields["case"].default == "best"


def test_a_new_file_is_all_it_takes(tmp_path: Path) -> None:
    """In a process of its own, with a folder of policies beside the shipped ones."""
    (tmp_path / "at_most.py").write_text(SHORTEST_FIRST)
    code = (
        f"from sarathi_sim import policies; policies.__path__.append({str(tmp_path)!r})\n"
        "from sarathi_sim.experiments.run.experiment import simulate_all\n"
        "from sarathi_sim.experiments.config.loading import load_experiment\n"
        "e = load_experiment('first_experiment', ['workload.requests=30',\n"
        "    'scenarios.orca.policy={name: at_most, prompts: 2}'])\n"
        "print(vars(e.scenarios['orca'].policy.build()))\n"
        "print(simulate_all(e).runs['orca'].summary['finished'])\n"
        "load_experiment('first_experiment', ['scenarios.orca.policy={name: at_most}'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["{'prompts': 2, 'eager': True}", "30"]
    assert re.search(r"policy\.prompts: this key is missing", done.stderr), done.stderr


def test_two_policies_of_one_name_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(SHORTEST_FIRST)
    from sarathi_sim import policies

    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    with pytest.raises(ValueError, match="two policies called 'at_most'"):
        catalogue.builders.__wrapped__()
    for name in ("one", "other"):
        sys.modules.pop(f"sarathi_sim.policies.{name}", None)
