"""Every table that a command prints, made in one place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table


def rich_table(
    text: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], **about: Any
) -> Table:
    """Columns of text to the left, then columns of numbers to the right, by their headings.

    A cell that is too wide continues in the next line. ``about`` are options of rich's tables: a
    title, a caption.
    """
    table = Table(**{"title_justify": "left", "caption_justify": "left", **about})
    for heading in text:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        # Without a heading it is no number: yes or no.
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
