"""Put the tables and the figure of ``sarathi-sim lab fit-host FILE --peer FILE --out DIR`` into
docs/lab/servers*.md: ``python -m sarathi_sim.experiments.lab.servers.page DIR DOCS``. Tables of
models that FILE lacks stay. Those of MLPerf's runs (``--lengths``) go into docs/lab/mlperf*.md.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from sarathi_sim.profiler.storage.files import write_whole
from ...results import SUMMARY
from ..pages import markdown, update
from .answers import KINDS, Content, servers_answer

DENSE, MIXTURES = KINDS
_APART = {DENSE: ("class ", "mode ", "model "), MIXTURES: ("class ", "mode ")}
"""Groupings that the page leaves out: they have a single group, or too many."""


def tables(content: Content) -> str:
    """The tables of a score as Markdown, each under its title and the kind of its models."""
    section, found = servers_answer(content), []
    grids = section.tables
    if "mlperf" in content:
        return "\n".join(markdown(grid.title, grid.headings, grid.rows) for grid in grids)
    kind = DENSE if content["groups"].get(KINDS[DENSE], {"n": 0})["n"] else MIXTURES
    for grid in grids:
        title = grid.title if kind in grid.title else f"{grid.title}, {kind}"
        rows = grid.rows
        if grid is section.tables[0]:
            rows = [row for row in rows if not row[0].startswith(_APART[kind])]
        if title.startswith("Errors beside"):
            rows = [row for row in rows if row[0].startswith("model ")]
        shown = [n for n, heading in enumerate(grid.headings) if not heading.endswith("p90")]
        cells = ([row[n] for n in shown] for row in rows)
        found.append(markdown(title, [grid.headings[n] for n in shown], cells))
    return "\n".join(found)


def put(page: Path, made: str) -> None:
    """Replace the tables of a page; others stay."""
    write_whole(page, update(page.read_text("utf-8"), made, some=True))


if __name__ == "__main__":
    result, docs = map(Path, sys.argv[1:])
    content = json.loads((result / SUMMARY).read_text("utf-8"))
    name, figure, image = "servers", "measured_predicted", "score"
    if "mlperf" in content:
        name, figure, image = "mlperf", "capacity", "mlperf"
    made = "\n".join(map(tables, content.get("classes", {"": content}).values()))
    for page in docs.glob(f"lab/{name}*.md"):
        put(page, made)
    shutil.copy(result / f"figures/{figure}.png", docs / f"images/{image}.png")
