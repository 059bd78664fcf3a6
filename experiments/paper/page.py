"""Put the tables and figures of `sarathi-sim reproduce --out` into docs/paper.md.

``python -m sarathi_sim.experiments.paper.page RESULT DOCS`` copies the figures to
``DOCS/images/paper`` and replaces what stands between ``<!-- table: TITLE -->`` and
``<!-- end -->`` in ``DOCS/paper.md``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from sarathi_sim.experiments.lab.pages import update
from sarathi_sim.profiler.storage.files import write_whole

if __name__ == "__main__":
    result, docs = map(Path, sys.argv[1:])
    page = docs / "paper.md"
    text = update(page.read_text(encoding="utf-8"), (result / "tables.md").read_text("utf-8"))
    images = docs / "images" / "paper"
    images.mkdir(parents=True, exist_ok=True)
    for figure in result.glob("*.png"):
        shutil.copy(figure, images)
    write_whole(page, text)
