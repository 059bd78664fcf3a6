"""A page's commands, files and output blocks, in the order in which a reader meets them.

Comments that a reader does not see stand before a block and say what it is:

- ``<!-- file: NAME -->``: the reader saves the block under this name.
- ``<!-- files of: PAGE -->``: the reader has the files of another page.
- ``<!-- needs: WHAT -->`` (or ``# needs WHAT`` in the block): see :data:`tests.docs.runner.NEEDS`.
- ``<!-- not run: WHY -->``: a synopsis, say.
- ``<!-- printed by: COMMAND -->``: the block is output of a command that the page only speaks of.
- ``<!-- printed -->``: the numbers of the paragraph or table were printed by commands above it.
- ``<!-- not compared: WHY -->``: output that is another each time, such as times on a clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
PROGRAMS = ("sarathi-sim", "cp", "dask")
"""Other programs (git, make, pip) prepare a machine; their lines are not run."""
_MARK = re.compile(r"<!-- ([a-z ]+?)(?:: (.*?))? -->")
_MARKS = ("file", "files of", "needs", "not run", "printed by", "printed", "not compared")


@dataclass(frozen=True)
class Block:
    """``kind`` is ``commands``, ``python``, ``file``, ``shown`` (lines of output), ``numbers``
    (prose with printed numbers) or ``files of``. ``first`` is the index of its first line."""

    kind: str
    first: int
    lines: list[str]
    marks: dict[str, str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    @property
    def needs(self) -> str:
        """What the block cannot be run without; empty for nothing."""
        said = re.findall(r"^# needs (.*)$", self.text, re.MULTILINE)
        return self.marks.get("needs") or " ".join(said)

    @property
    def commands(self) -> list[str]:
        """Its commands, a line each, as a shell takes them."""
        joined = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for line in joined if line.split(" ")[0] in PROGRAMS]


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page that are run, saved or compared."""
    lines = text.splitlines()
    marks: dict[str, str] = {}
    at = 0
    while at < len(lines):
        line, first = lines[at], at
        at += 1
        mark = _MARK.fullmatch(line.strip())
        if mark is not None and mark[1] in _MARKS:
            if mark[1] == "files of":
                yield Block("files of", first, [mark[2]], {})
            else:
                marks[mark[1]] = mark[2] or ""
            continue
        if line.startswith("```"):
            while lines[at] != "```":
                at += 1
            kinds = {"": "shown", "text": "shown", "python": "python"}
            kind = "file" if "file" in marks else kinds.get(line.removeprefix("```"), "")
            if kind:
                yield Block(kind, first + 1, lines[first + 1 : at], marks)
            at += 1
        elif line.startswith("    ") and (first == 0 or not lines[first - 1].strip() or marks):
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            block = Block("commands", first, [each[4:] for each in lines[first:at]], marks)
            if block.commands:
                yield block
        elif line.strip():
            while at < len(lines) and lines[at].strip():
                at += 1
            if "printed" in marks:
                yield Block("numbers", first, lines[first:at], marks)
        else:
            continue
        marks = {}


def shown_again(text: str, block: Block, lines: list[str]) -> str:
    """The page with other lines in place of a block's."""
    rows = text.splitlines(keepends=True)
    rows[block.first : block.first + len(block.lines)] = [f"{line}\n" for line in lines]
    return "".join(rows)
