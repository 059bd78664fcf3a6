"""docs/capacity.md: its commands and examples work as they stand there.

The one about a 70B model takes half a minute or more of two processors: it is checked up to its
first run, and so is the shipped configuration that the page names.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.capacity.answer import load_prices, read_question
from sarathi_sim.experiments.capacity.options import LEAST_REQUESTS, layouts, plan_of, wanted_of
from sarathi_sim.experiments.cli import app
from sarathi_sim.experiments.report.sections import sections_of

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


@pytest.mark.parametrize("words", [words for words in COMMANDS if "70b" not in " ".join(words)])
@pytest.mark.slow
def test_the_other_commands(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = BLOCKS[0].replace("  tolerance: 0.03\n", "  tolerance: 0.5\n  requests: 1000\n")
    assert text != BLOCKS[0]
    Path("my_capacity.yaml").write_text(text.replace("[8, 16]", "[8]"))
    more = ["--no-bands"] if words[0] == "capacity" else []
    done = CliRunner().invoke(app, [*words, *more, "--workers", "1"])
    assert done.exit_code == 0, done.stderr
    out = Path(words[words.index("--out") + 1])
    found = json.loads((out / "summary.json").read_text())["deployments"]
    assert all(row["settled"] and row["capacity"] > 0 for row in found)
    if words[0] == "recommend":
        the_cheapest_for_the_rate(out)


def the_cheapest_for_the_rate(out: Path) -> None:
    content = json.loads((out / "summary.json").read_text())
    first = content["deployments"][0]
    assert first["capacity"] >= 6
    rows = content["deployments"]
    assert first["gpus"] == min(row["gpus"] for row in rows if row["capacity"] >= 6)
    for name in ("recommend.csv", "headroom.csv", "winner.yaml", "launch.sh"):
        assert (out / name).is_file()
    link = f"../probes/runs/{first['at_capacity']['run']}/summary.json"
    assert link in (out / "figures" / "pareto_cost_slo.svg").read_text()
    assert (out / "figures" / link).resolve().is_file()
    (section,) = sections_of([out])
    said = "1 server of 1 GPU (TP 1), max_num_batched_tokens 256, max_num_seqs 16, carries 6.00 "
    assert section.answer.startswith(f"{said}requests/s at ")
    assert section.command == (out / "launch.sh").read_text().strip()
    assert {grid.title for grid in section.details} >= {"Every point", "Op times: origin and error"}
    assert (out / "figures" / "pareto_throughput_interactivity.svg").is_file()
    checked = CliRunner().invoke(app, ["run", "--dry-run", str(out / "winner.yaml")])
    assert checked.exit_code == 0, checked.stderr


def test_the_prices(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(BLOCKS[1])
    assert load_prices(str(path)).of("a6000") == 0.6
