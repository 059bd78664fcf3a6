"""Runs a page from top to bottom, as a reader would who types what it says, in a fresh folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.docs.page import ROOT, blocks, shown_again
from tests.docs.shown import not_printed, numbers_not_printed, renewed

LINKS = ("data", "experiments", "tests")
"""Folders of a checkout that pages name. The results of commands stand beside them."""
NEEDS: dict[str, Callable[[], bool]] = {
    "a GPU": lambda: shutil.which("nvidia-smi") is not None,
    "torch": lambda: find_spec("torch") is not None,
    "Dask": lambda: find_spec("distributed") is not None,
    "the public measurements": lambda: "SARATHI_SIM_DATASETS" in os.environ,
}
"""What a page's commands may need, and whether this machine has it."""


@dataclass
class Told:
    """What became of a page: commands run, commands that need what is not here or are marked as
    not run, blocks compared, and one line for each thing that is wrong."""

    ran: int = 0
    left: int = 0
    compared: int = 0
    wrong: list[str] = field(default_factory=list)


Shell = Callable[[str, Path], tuple[int, str]]
"""Runs a line in a folder; its exit code, and what it printed."""


def lacking(needs: str) -> bool:
    """Whether a block's needs are not met. Raises ValueError for one that is not known."""
    named = [have() for name, have in NEEDS.items() if name in needs]
    if needs and not named:
        raise ValueError(f"needs {needs}: known are {', '.join(NEEDS)}")
    return not all(named)


def prepare(folder: Path) -> None:
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    if "SARATHI_SIM_DATASETS" in os.environ:
        (folder / "datasets").symlink_to(os.environ["SARATHI_SIM_DATASETS"])


def run_page(
    page: Path, folder: Path, shell: Shell, *, compare: bool = True, update: bool = False
) -> Told:
    """Run a page's blocks in ``folder``, its Python as one session at the end.

    ``update`` puts what was printed into the page's output blocks. All that was printed so far is
    in ``printed.txt``, too.
    """
    prepare(folder)
    told, printed, session = Told(), "", ""
    text = changed = page.read_text(encoding="utf-8")
    for block in blocks(text):
        where = f"{page.name}:{block.first + 1}"
        if block.kind == "files of":
            for each in blocks(page.with_name(block.lines[0]).read_text(encoding="utf-8")):
                if each.kind == "file":
                    (folder / each.marks["file"]).write_text(each.text, encoding="utf-8")
        elif block.kind == "file":
            (folder / block.marks["file"]).write_text(block.text, encoding="utf-8")
        elif block.kind == "numbers" and compare:
            told.compared += 1
            missing = numbers_not_printed(block.text, printed)
            if missing:
                told.wrong.append(f"{where}: no command printed {', '.join(missing)}")
        elif "not run" in block.marks or lacking(block.needs):
            told.left += max(1, len(block.commands))
        elif block.kind == "python":
            session += block.text
            told.ran += 1
        elif block.kind == "commands" or "printed by" in block.marks:
            for line in block.commands or [block.marks["printed by"]]:
                code, said = shell(line, folder)
                told.ran += 1
                printed += said
                (folder / "printed.txt").write_text(printed, encoding="utf-8")
                if code:
                    told.wrong.append(f"{where}: {line}: exit {code}: {said[-2000:]}")
        unknown = {"not run", "not compared"} & block.marks.keys() or lacking(block.needs)
        if block.kind == "shown" and compare and not unknown:
            told.compared += 1
            lines = renewed(block.lines, printed.splitlines()) if update else block.lines
            changed = shown_again(changed, block, lines)
            told.wrong += [f"{where}: {each}" for each in not_printed(lines, printed.splitlines())]
    if session:
        (folder / "session.py").write_text(session, encoding="utf-8")
        code, said = shell("python session.py", folder)
        if code:
            told.wrong.append(f"{page.name}: its Python: exit {code}: {said[-2000:]}")
    if changed != text:
        page.write_text(changed, encoding="utf-8")
    return told
