"""Put the tables and figures of `sarathi-sim reproduce --out` into docs/paper.md.

``python -m experiments.paper.page RESULT DOCS`` copies the figures to ``DOCS/images/paper`` and
replaces what stands between ``<!-- table: TITLE -->`` and ``<!-- end -->`` in ``DOCS/paper.md``.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from profiler.storage.files import write_whole


def update(page: str, tables: str) -> str:
    """The page with its tables replaced by those of the same titles. Raises KeyError without."""
    parts = dict(re.findall(r"^## (.+?)\n\n((?:\|.*\n)+)", tables, re.MULTILINE))

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{parts[match[2]]}\n<!-- end -->"

    return re.sub(r"(<!-- table: (.+?) -->).*?<!-- end -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    result, docs = map(Path, sys.argv[1:])
    page = docs / "paper.md"
    text = update(page.read_text(encoding="utf-8"), (result / "tables.md").read_text("utf-8"))
    images = docs / "images" / "paper"
    images.mkdir(parents=True, exist_ok=True)
    for figure in result.glob("*.png"):
        shutil.copy(figure, images)
    write_whole(page, text)
