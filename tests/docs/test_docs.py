"""The reader and the comparison of ``python -m tests.docs``, and its short form: the same commands
word for word, with smaller sizes only.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.cli import app
from sarathi_sim.experiments.config import inputs, loading
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from tests.docs import runner
from tests.docs.page import PAGES, ROOT, blocks
from tests.docs.runner import run_page
from tests.docs.shown import not_printed, numbers_not_printed, renewed

REQUESTS = 20
WHOLE = ("docs/research/timelines.md",)
"""Pages that look into a run where a short one has ended already."""
WITH_COMMANDS = [
    page
    for page in PAGES
    if any(b.kind in ("commands", "python") for b in blocks((ROOT / page).read_text("utf-8")))
]


def smaller(path: Path) -> dict[str, Any]:
    """A configuration with few requests and seeds, and a capacity that is searched coarsely."""
    raw = read_mapping(path)
    tops = [raw, *(raw.get("scenarios") or {}).values()]
    for section in (top["workload"] for top in tops if top and "workload" in top):
        if "requests" in section:
            section["requests"] = min(section["requests"], REQUESTS)
    if isinstance(raw.get("sweep", {}).get("seeds"), int):
        raw["sweep"]["seeds"] = min(raw["sweep"]["seeds"], 2)
    if "capacity" in raw:
        raw["capacity"] |= {"tolerance": 0.5, "requests": 100, "most_requests": 200}
        raw["capacity"]["replications"] = {"least": 2, "most": 2}
    return raw


@pytest.fixture
def small_sizes(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer requests, seeds, trees and folds. What takes a GPU or a cluster is elsewhere."""
    if page not in WHOLE:
        monkeypatch.setattr(loading, "read_mapping", smaller)
    for name, size in {
        "sarathi_sim.simulator.op_times.regression.TREES": 20,
        "sarathi_sim.simulator.confidence.held_out.FOLDS": 2,
        "sarathi_sim.simulator.confidence.bands.FOLDS": 2,
        "sarathi_sim.simulator.confidence.held_out.FOREST": 5,
        "sarathi_sim.experiments.capacity.slo.BEYOND": 1,
        "sarathi_sim.experiments.capacity.options.LEAST_REQUESTS": 100,
        "sarathi_sim.experiments.capacity.options.PILOT_REQUESTS": 100,
        "sarathi_sim.experiments.capacity.options.FINEST_REQUESTS": 100,
        "sarathi_sim.experiments.capacity.recommend.FINALISTS": 1,
        "sarathi_sim.experiments.capacity.recommend.MOST_SEARCHED": 1,
        "sarathi_sim.experiments.lab.paper.gpt3.SEEDS": (0,),
    }.items():
        monkeypatch.setattr(name, size)
    for name in ("torch", "a GPU", "vLLM", "Dask"):
        monkeypatch.setitem(runner.NEEDS, name, lambda: False)
    inputs._load.cache_clear()
    inputs._modelled.cache_clear()


def in_process(line: str, folder: Path) -> tuple[int, str]:
    """Runs a line as a shell does, without a new process."""
    program, *words = shlex.split(line, comments=True)
    found = (sorted(map(str, Path().glob(word))) if "*" in word else [word] for word in words)
    words = [name for names in found for name in names]
    if program == "cp":
        shutil.copy(*words)
        return 0, ""
    if program == "python":
        exec(compile((folder / words[0]).read_text("utf-8"), line, "exec"), {"__name__": "page"})
        return 0, ""
    done = CliRunner().invoke(app, words)
    return done.exit_code, f"{done.output}{done.exception or ''}"


PRINTED = """\
makespan                │ s    │ 1,172 │ 1,746
TP 4 x 2   24.64   6.16   22.48 to 25.80
TP 8 x 2   18.83   4.71   17.75 to 19.39
""".splitlines()


def test_what_is_shown_was_printed_in_the_same_order_perhaps_without_columns() -> None:
    shown = ["│ makespan │ 1,172 │ …", "TP 4 x 2  24.64  22.48 to 25.80", "…"]
    assert not_printed(shown, PRINTED) == []
    (wrong,) = not_printed(["TP 8 x 2   18.90   4.71   17.75 to 19.39"], PRINTED)
    assert wrong.startswith("shown is: TP 8 x 2 18.90") and "printed was: TP 4 x 2" in wrong
    (wrong,) = not_printed(["makespan │ s │ 1,746 │ 1,172"], PRINTED)
    assert "printed was: makespan s 1,172 1,746" in wrong
    assert "nothing like it" in not_printed(["throughput 7"], PRINTED)[0]


def test_shown_numbers_are_renewed_line_by_line() -> None:
    shown = ["makespan   s   999   1,746", "TP 8 x 2   18.00   4.71   1.75 to 19.39", "gone 3"]
    assert renewed(shown, PRINTED) == [
        "makespan   s   1,172   1,746",
        "TP 4 x 2   24.64   6.16   22.48 to 25.80",
        "gone 3",
    ]
    assert renewed(PRINTED, PRINTED) == PRINTED


def test_numbers_of_prose_are_printed_ones_rounded_as_it_rounds_them() -> None:
    assert numbers_not_printed("24.6 or +1,172 or 1172, and 7", "\n".join(PRINTED)) == ["7"]
    assert numbers_not_printed("24.7", "\n".join(PRINTED)) == ["24.7"]


PAGE_TEXT = """\
<!-- file: a.yaml -->
```yaml
x: 1
```

    sarathi-sim run a.yaml \\
        --out runs/a   # its result
    pip install this

```text
found 3 of …
```

<!-- not run: a synopsis -->

    sarathi-sim run FILE

<!-- needs: a GPU -->

    sarathi-sim profile

<!-- printed -->
It found 3, and 5 more.
"""


def test_a_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runner.NEEDS, "a GPU", lambda: False)
    page, folder, seen = tmp_path / "page.md", tmp_path / "reader", []
    page.write_text(PAGE_TEXT, encoding="utf-8")

    def shell(line: str, where: Path) -> tuple[int, str]:
        seen.append((line, (where / "a.yaml").read_text("utf-8")))
        return 0, "found 4 of 9\n"

    folder.mkdir()
    told = run_page(page, folder, shell)
    assert seen == [("sarathi-sim run a.yaml --out runs/a   # its result", "x: 1\n")]
    assert (told.ran, told.left, told.compared) == (1, 2, 2)
    assert told.wrong == [
        "page.md:11: shown is: found 3 of; printed was: found 4 of 9",
        "page.md:23: no command printed 3, 5",
    ]
    (tmp_path / "again").mkdir()
    told = run_page(page, tmp_path / "again", shell, update=True)
    assert page.read_text("utf-8") == PAGE_TEXT  # a column is left out: nobody knows which
    page.write_text(PAGE_TEXT.replace("found 3 of …", "found 3 of 8"), encoding="utf-8")
    (tmp_path / "third").mkdir()
    assert len(run_page(page, tmp_path / "third", shell, update=True).wrong) == 1
    assert "found 4 of 9\n" in page.read_text("utf-8")


def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "reader"
    page.write_text("    sarathi-sim run nothing\n", encoding="utf-8")
    folder.mkdir()
    (wrong,) = run_page(page, folder, lambda line, where: (2, "error: no such file")).wrong
    assert wrong == "page.md:1: sarathi-sim run nothing: exit 2: error: no such file"


def test_every_need_is_known() -> None:
    for page in WITH_COMMANDS:
        for block in blocks((ROOT / page).read_text("utf-8")):
            runner.lacking(block.needs)


@pytest.mark.slow
@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = run_page(ROOT / page, tmp_path, in_process, compare=False)
    assert told.ran + told.left and not told.wrong, "\n".join(told.wrong)
