"""The library: docs/research/python.md runs from top to bottom, and imports stay light."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

import sarathi_sim as sim
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.policies.policy import DECODES
from tests.experiments.notebook import NOTEBOOK, Outputs, outputs
from tests.experiments.small_config import ROOT, SMALL
from tests.experiments.small_sweep import RUNS, SWEEP

PAGE = (ROOT / "docs" / "research" / "python.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
HEAVY = ("pandas", "matplotlib", "numpy", "scipy", "sklearn", "pydantic", "pyarrow", "bokeh")


class Decoder:
    """Not a policy that gets far: nobody is ever admitted."""

    holds_finished = False

    def plan(self, view: Any) -> Any:
        return DECODES if view.num_decodes else None


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the examples of the page leave behind, run in order in a fresh folder."""
    names: dict[str, Any] = {"__name__": "a_session"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("session"))
        patch.setitem(matplotlib.rcParams, "backend", "agg")
        patch.setitem(names, "print", lambda *words: names.update(said=" ".join(map(str, words))))
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)):
            exec(compile(code, f"python.md, example {number + 1}", "exec"), names)
        names["page"] = Path("first.html").read_bytes()
    return names


@pytest.mark.slow
def test_the_notebook_gives_what_it_shows() -> None:
    """The same words, and numbers that are as good as the same: op times are fitted anew now and
    then. ``python -m tests.experiments.notebook`` writes it anew."""
    options = ("width", "max_columns", "float_format")  # which the notebook sets
    with pd.option_context(*(o for name in options for o in (f"display.{name}", None))):
        notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
        shown = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
        given = [text for each in outputs(notebook) for text in texts(each)]
    kept = [text for each in shown for text in texts(each)]
    assert [NUMBER.sub("#", text).split() for text in given] == [
        NUMBER.sub("#", text).split() for text in kept
    ]
    numbers = [[float(number) for text in each for number in NUMBER.findall(text)]
               for each in (given, kept)]  # fmt: skip
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=0.02)
    assert NOTEBOOK.stat().st_size < 100_000


def texts(given: Outputs) -> list[str]:
    """What a cell gave, figures by their type: their bytes depend on fonts."""
    found = []
    for output in given:
        data = output.get("data", {"text/plain": output.get("text")})
        found.append("".join(data.get("text/plain", data.keys())))
    return found


@pytest.mark.slow
def test_what_the_page_leaves_behind(told: dict[str, Any]) -> None:
    """A policy of the session runs as from a file does, and changes no other; the axes hold what
    was drawn; a result is shown in a line and knows its metrics."""
    outcome, mine = told["outcome"], told["mine"]
    assert "mixed" not in set(mine["mine"].iterations["kind"])
    assert mine["orca"].summary == outcome["orca"].summary
    assert mine["mine"].deployment.scenario.policy.name == "PrefillFirst"
    cdf, completions, ledger, timeline = told["axes"].ravel()
    assert [line.get_label().split(":")[0] for line in cdf.lines] == ["orca", "sarathi"]
    assert len(completions.lines) == 2
    assert sum(len(bars.get_paths()) for bars in ledger.collections) >= 8
    assert timeline.get_xlim() == (2.0, 3.0)
    assert {boxes.get_label() for boxes in timeline.collections} == {"mixed", "bubble"}
    assert repr(outcome) == f"<ExperimentResult of {outcome.experiment.name}: orca, sarathi>"
    assert repr(outcome["sarathi"]) == "<ScenarioRun of 200 requests>"
    with pytest.raises(sim.UserError, match="metric: value 'speed': one of"):
        sim.plot_cdf(Figure().subplots(), outcome, "speed")


def test_a_mapping_is_what_a_file_holds(tmp_path: Path) -> None:
    tree = yaml.safe_load(SMALL)
    before = repr(tree)
    loaded = sim.load(tree, {"seed": 5, "cluster": {"tp": 8, "pp": 4}})
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    same = load_experiment(path, ["seed=5", "cluster={tp: 8, pp: 4}"])
    assert loaded.scenarios == same.scenarios
    assert repr(tree) == before
    assert sim.load({**tree, "name": "x"}).name == "x"
    del tree["name"]
    assert sim.load(tree).name == "session"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster.ppp": 2}, "cluster.ppp: unknown key"),
        ({"cluster..pp": 2}, "expected KEY.PATH=VALUE"),
        ({"scenarios.orca.policy": object}, "is no policy: "),
        ({"scenarios.orca.policy": 5}, "policy"),
    ],
)
def test_a_mistake_is_a_user_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(sim.UserError, match=re.escape(said)):
        sim.load("first_experiment", changes)


def test_a_policy_of_the_session_is_not_kept(tmp_path: Path) -> None:
    """Neither a result nor a sweep could be repeated; nothing is written."""
    tree = yaml.safe_load(SMALL) | {"scenarios": {"mine": {"policy": Decoder()}}, "compare": {}}
    for command, more in (
        (sim.run, {}),
        (sim.sweep, {"sweep": {"seeds": 2}}),
        (sim.capacity, {"capacity": {"slo": "p50 ttft 1s"}}),
    ):
        with pytest.raises(sim.UserError, match="is an object of this session"):
            command(tree | more, out=tmp_path / "x")
    assert not list(tmp_path.iterdir())
    with pytest.raises(sim.UserError, match="changes: give them to load"):
        sim.run(sim.load("first_experiment"), {"seed": 1})


def test_a_failed_run_of_a_sweep_is_said(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(
        "from sarathi_sim.policies.policy import DECODES, named\n@named('odd')\nclass Odd:\n"
        "    '''Raises.'''\n    holds_finished = False\n"
        "    def plan(self, view):\n        raise RuntimeError('odd')\n"
    )
    scenario = {"policy": {"file": str(file), "name": "odd"}}
    tree = yaml.safe_load(SWEEP) | {"scenarios": {"odd": scenario}}
    assert sim.plan(yaml.safe_load(SWEEP))["runs"] == RUNS
    failed = sim.sweep(tree, workers=1)
    assert failed["finished"] == 0 and len(failed["failures"]) == 9 and failed.table is None
    assert re.match(r"failed: run [0-9a-f]{16}: .*odd", failed.failures[0])


def test_the_numbers_of_a_folder_and_of_a_session_are_the_same(result: Path) -> None:
    tables = sim.read(result)
    outcome = sim.run(result / "config.yaml")
    for name, table in tables.items():
        pd.testing.assert_frame_equal(table.requests, outcome[name].requests, check_dtype=False)
        assert np.array_equal(table.ledger["busy_s"], outcome[name].ledger["busy_s"])


def test_every_name_is_there_documented_and_not_that_of_a_room() -> None:
    """A room that was imported would take its place."""
    assert not {path.stem for path in (ROOT / "sarathi_sim").iterdir()} & set(sim.__all__)
    assert sim.__doc__
    for name in sim.__all__:
        assert getattr(sim, name).__doc__
        assert name in dir(sim)
        if name[0].islower():
            assert f"`{name}" in PAGE
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sim.nothing


LIGHT = "from sarathi_sim import policies, profiler, simulator, experiments; dir(sarathi_sim)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "heavy"),
    [
        (LIGHT, HEAVY),
        # Its op times are kept already. Loading the library draws nothing, nor does a simulation.
        ("sarathi_sim.run({config!r})", ("matplotlib", "bokeh", "torch")),
    ],
)
def test_imports_are_light(does: str, heavy: tuple[str, ...], result: Path) -> None:
    code = f"import sys, sarathi_sim; {does.format(config=str(result / 'config.yaml'))}; "
    code += f"print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_the_page_has_the_signatures_of_the_library() -> None:
    """Names, their order, their defaults, and what is given by name, as far as the page goes."""
    rows = re.findall(r"^\| `(\w+)\((.*)\)` \|", PAGE, re.MULTILINE)
    assert len(rows) == 18
    for name, said in rows:
        pairs = inspect.signature(getattr(sim, name)).parameters.items()
        given, by_name = list[str](), False
        for key, one in pairs:
            if one.kind is inspect.Parameter.KEYWORD_ONLY and not by_name:
                given, by_name = [*given, "*"], True
            empty = one.default is inspect.Parameter.empty
            given.append(key if empty else f"{key}={one.default!r}")
        shown = said.removesuffix(", ...")
        assert shown.split(", ") == given[: len(shown.split(", "))], name
