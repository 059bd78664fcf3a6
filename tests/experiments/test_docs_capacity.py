"""docs/plan/gpus.md and settings.md: what they say of 70B models, checked up to the first run."""

from __future__ import annotations

import re
import shlex

import pytest

from sarathi_sim.experiments.capacity.answer import read_question
from sarathi_sim.experiments.capacity.options import LEAST_REQUESTS, layouts, plan_of, wanted_of
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import simulate_all
from tests.experiments.small_config import ROOT

PAGE = (ROOT / "docs" / "plan" / "gpus.md").read_text(encoding="utf-8").replace("\\\n", "")
COMMANDS = [shlex.split(line) for line in re.findall(r"^    sarathi-sim (.*)$", PAGE, re.M)]
pytestmark = pytest.mark.usefixtures("few_trees")


def test_what_is_about_70b_models() -> None:
    (sixteen,) = (words for words in COMMANDS if "70b" in " ".join(words))
    draft, section, options = read_question("capacity_llama3_70b", [])
    layout = {(o.scenario.cluster.tp, o.scenario.cluster.pp) for o in options}
    assert layout == {(8, 1), (4, 2), (2, 4)}
    assert {option.scenario.policy.name for option in options} == {"vllm", "sarathi"}
    assert plan_of(options[0], section, draft.source.file).requests >= LEAST_REQUESTS
    given = dict(zip(sixteen[1::2], sixteen[2::2], strict=True))
    asked = wanted_of(
        given["--model"], given["--device"], given["--slo"], int(given["--gpus"]), None,
        "capacity_llama3_70b", None, given["--stack"], "bf16", None, None, 0.05,
    )  # fmt: skip
    assert f"{len(list(layouts(asked)))} deployments of a 70B model" in PAGE


@pytest.mark.slow
def test_the_ledgers_of_free_micro_batches() -> None:
    """What docs/research/timelines.md says of them holds for fewer requests, too."""
    outcome = simulate_all(load_experiment("engines_pp", ["workload.requests=80"]))
    runs = outcome.summary()["scenarios"]
    shares = {name: {pb: one["ledger_s"][pb] / one["ledger_s"]["wall"] for pb in ("pb2", "pb3")}
              for name, one in runs.items()}  # fmt: skip
    for free in ("vllm", "vllm_async"):
        assert shares[free]["pb2"] < 0.5 * shares["sarathi"]["pb2"]
        assert shares[free]["pb3"] > shares["sarathi"]["pb3"]
    assert shares["sarathi_serve"]["pb2"] == pytest.approx(shares["sarathi"]["pb2"], rel=0.2)
    assert shares["vllm_async"]["pb3"] < shares["vllm"]["pb3"]
    assert runs["vllm"]["ttft_s"]["p50"] < 0.7 * runs["sarathi"]["ttft_s"]["p50"]
    assert runs["vllm"]["tbt_s"]["p99"] > runs["sarathi"]["tbt_s"]["p99"]
    assert "empty_iterations" not in runs["sarathi"] and runs["vllm"]["empty_iterations"] > 0
