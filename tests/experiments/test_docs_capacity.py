"""docs/capacity.md: its commands and examples work as they stand there.

The one about a 70B model takes half a minute or more of two processors: it is checked up to its
first run, and so is the shipped configuration that the page names.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from sarathi_sim.experiments.capacity.answer import read_question
from sarathi_sim.experiments.capacity.options import LEAST_REQUESTS, layouts, plan_of, wanted_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "capacity.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^    sarathi-sim (.*)$", PAGE, re.M)]
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
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
    assert f"The first looks at {len(list(layouts(asked)))} deployments" in PAGE
