"""Pages and tables of the documentation that are made from the code and the stored fits."""

from __future__ import annotations

from pathlib import Path

import pytest

import sarathi_sim as sim
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.lab.pages import (
    PAGES,
    configuration,
    files,
    markdown,
    update,
    with_tables,
)
from sarathi_sim.profiler.storage.child import silent

pytestmark = pytest.mark.lab

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_pages_are_up_to_date() -> None:
    """``python -m sarathi_sim.experiments.lab.pages docs`` writes them."""
    made = {DOCS / f"{name}.md": make for name, make in PAGES.items() if "devices" not in name}
    for page, make in made.items():
        assert page.read_text(encoding="utf-8") == make()
    for page, text in with_tables(DOCS).items():
        assert page.read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_the_page_of_models_and_devices_is_up_to_date() -> None:
    page = DOCS / "reference" / "devices.md"
    assert PAGES["reference/devices"]() == page.read_text(encoding="utf-8")


def test_the_reference_names_every_key_and_its_bounds() -> None:
    rows = [line for line in configuration().splitlines() if line.startswith("| `")]
    found = {line.split("`")[1] for line in rows}
    assert {"seed", "cluster.tp", "workload.lengths.theta", "policy.chunk_size"} <= found
    assert {"workload.system_prompts.NAME.share", "workload.arrivals.rates.at_s"} <= found
    assert {"sweep.grid", "compare.NAME.over"} <= found
    (theta,) = (line for line in rows if "`workload.lengths.theta`" in line)
    assert "number, from 0 to 100 | required |  | Zipf exponent |" in theta


def test_every_file_of_a_result_is_on_the_page_of_files(tmp_path: Path) -> None:
    experiment = load_experiment("first_experiment", ["workload.requests=5"])
    sim.run(experiment, out=tmp_path / "r", figures=False, timeline=True, progress=silent)
    names = [path.relative_to(tmp_path / "r") for path in (tmp_path / "r").rglob("*.*")]
    scenarios = set(experiment.scenarios)
    found = {f"SCENARIO/{name.name}" if name.parts[0] in scenarios else str(name) for name in names}
    assert all(f"`{name}`" in files() for name in found), found


def test_a_page_takes_tables_of_its_titles() -> None:
    tables = markdown("One", ["a", "b"], [["x", "1"]]) + "\n" + markdown("Two", ["c"], [["y"]])
    page = "before\n<!-- table: Two -->\nold\n<!-- end -->\nafter\n"
    new = update(page, tables)
    assert new == "before\n<!-- table: Two -->\n\n| c |\n| --- |\n| y |\n\n<!-- end -->\nafter\n"
    assert update(new, tables) == new
    with pytest.raises(KeyError):
        update(page.replace("Two", "Three"), tables)
