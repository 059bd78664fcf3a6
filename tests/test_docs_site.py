"""The generated reference, the messages of docs/troubleshooting.md, and the site of the docs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.reference import FILES, page
from sarathi_sim.experiments.run.experiment import run_experiment
from sarathi_sim.profiler.storage.child import silent
from tests.patience import PATIENCE_S
from tests.test_architecture import MODULES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def test_the_reference_is_up_to_date() -> None:
    """``python -m sarathi_sim.experiments.reference docs`` writes it."""
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == page()


def test_the_reference_names_every_key_and_its_bounds() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    found = {line.split("`")[1] for line in rows}
    assert {"seed", "cluster.tp", "workload.lengths.theta", "policy.chunk_size"} <= found
    assert {"workload.system_prompts.NAME.share", "workload.arrivals.rates.at_s"} <= found
    assert {"sweep.grid", "compare.NAME.over"} <= found
    (theta,) = (line for line in rows if "`workload.lengths.theta`" in line)
    assert "number, from 0 to 100 | required |  | Zipf exponent | `0.4` |" in theta


def test_every_file_of_a_result_is_in_the_reference(tmp_path: Path) -> None:
    experiment = load_experiment("first_experiment", ["workload.requests=5"])
    run_experiment(experiment, tmp_path / "r", figures=False, trace=True, progress=silent)
    names = [path.relative_to(tmp_path / "r") for path in (tmp_path / "r").rglob("*.*")]
    scenarios = set(experiment.scenarios)
    found = {f"SCENARIO/{name.name}" if name.parts[0] in scenarios else str(name) for name in names}
    assert found == {name for name in FILES if not name.startswith("figures")}


def test_messages_are_worded_as_in_the_code() -> None:
    rows = re.findall(
        r"^\| (`.+?`) \|", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(rows) > 9
    code = " ".join(path.read_text(encoding="utf-8") for path in MODULES.values())
    code = re.sub(r'"\s*f?"', "", re.sub(r"\s+", " ", code))
    for message in re.findall(r"`(.+?)`", " ".join(rows)):
        for part in re.split(r"'?\.\.\.'?|[(?)]|: ", message):
            assert part.strip() in code, message


def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install -e '.[dev]')")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="workloads.html"' in start
    assert 'src="images/gpt3_pp_timeline.png"' in start
    assert (tmp_path / "site" / "images" / "gpt3_pp_timeline.png").is_file()
    notebook = (tmp_path / "site" / "notebook.html").read_text(encoding="utf-8")
    assert 'src="data:image/png;base64,' in notebook
    shutil.rmtree(tmp_path / "site")
