"""Generated tables in a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def update(page: str, tables: str, some: bool = False) -> str:
    """The page with the text between ``<!-- table: TITLE -->`` and ``<!-- end -->`` replaced by the
    table of that title. Raises KeyError for a missing table, unless ``some`` may stay unchanged."""
    parts = dict(re.findall(r"^## (.+?)\n\n((?:\|.*\n)+)", tables, re.MULTILINE))

    def table(match: re.Match[str]) -> str:
        if some and match[2] not in parts:
            return match[0]
        return f"{match[1]}\n\n{parts[match[2]]}\n<!-- end -->"

    return re.sub(r"(<!-- table: (.+?) -->).*?<!-- end -->", table, page, flags=re.DOTALL)


def markdown(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A titled table; the first column is left-aligned."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"## {title}", "", *(f"| {' | '.join(r)} |" for r in (header, ruler, *rows)), ""]
    return "\n".join(lines)
