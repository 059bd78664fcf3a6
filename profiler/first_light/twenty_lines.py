"""At most twenty lines at the end: what ran, what failed, how far from the shipped tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sarathi_sim.profiler.first_light.hour_ledger import DONE, Ledger
from sarathi_sim.profiler.first_light.steps import HourStep, Task
from sarathi_sim.profiler.storage.files import write_whole

_MOST_LINES = 20
_WIDEST = 150


def write_summary(folder: Path, ledger: Ledger, steps: Sequence[HourStep]) -> list[str]:
    """The lines, which are in ``summary.txt`` then, too."""
    done = sum(ledger.is_done(step.name) for step in steps)
    gpu = next((entry.gpu for entry in reversed(ledger.entries) if entry.gpu), "no GPU yet")
    what = "rehearsal" if ledger.rehearsal else "first light"
    lines = [f"{what} on {gpu}: {done} of {len(steps)} steps are done"]
    width = max(len(step.name) for step in steps)
    compared: list[str] = []
    for step in steps:
        entry = ledger.last(step.name)
        text = "not begun"
        if entry is not None:
            text = f"{entry.state}, {entry.seconds:.0f} s: {entry.why}"
            if entry.state == DONE:
                found = Task(folder, 0.0, ledger.rehearsal).read(step.name)
                text = f"{entry.state}, {entry.seconds:.0f} s: {found.get('headline', '')}"
                compared += found.get("facts", {}).get("lines", [])
        lines.append(f"{step.name:{width}}  {text.rstrip(' :')}"[:_WIDEST])
    lines += compared
    if len(lines) > _MOST_LINES:
        more = len(lines) - _MOST_LINES + 1
        lines[_MOST_LINES - 1 :] = [f"and {more} more lines in results/"]
    write_whole(folder / "summary.txt", "".join(f"{line}\n" for line in lines))
    return lines
