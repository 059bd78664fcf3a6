"""Generated tables in a page of the documentation."""

from __future__ import annotations

import re


def update(page: str, tables: str) -> str:
    """The page with what stands between ``<!-- table: TITLE -->`` and ``<!-- end -->`` replaced by
    the table of that title. Raises KeyError without."""
    parts = dict(re.findall(r"^## (.+?)\n\n((?:\|.*\n)+)", tables, re.MULTILINE))

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{parts[match[2]]}\n<!-- end -->"

    return re.sub(r"(<!-- table: (.+?) -->).*?<!-- end -->", table, page, flags=re.DOTALL)
