"""The ledger: which step ran when, for how long, and what came of it. No torch."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.planning.profile_error import ProfileError
from sarathi_sim.profiler.storage.files import write_whole

LEDGER = "ledger.json"
_FORMAT = "sarathi-sim first light 1"
DONE, FAILED, LATE, INTERRUPTED = "done", "failed", "over its limit", "interrupted"


@dataclass(frozen=True)
class Entry:
    """One try of a step. ``why`` is empty for one that is done; ``gpu`` is the machine's."""

    step: str
    state: str
    seconds: float
    started: str
    why: str = ""
    gpu: str = ""


class Ledger:
    """``ledger.json`` of a folder, begun where it is missing, and written whole at each entry.

    ``run`` tells hours apart. Raises ProfileError for a damaged file, and for one of a rehearsal
    where ``rehearsal`` is not, or the other way around.
    """

    def __init__(self, folder: Path, rehearsal: bool) -> None:
        self._path, self.rehearsal = folder / LEDGER, rehearsal
        self.entries: list[Entry] = []
        self.run = secrets.token_hex(8)
        if self._path.is_file():
            self.run, was, self.entries = parse_ledger(self._path.read_bytes(), str(self._path))
            if was != rehearsal:
                kind, option = ("a", "with") if was else ("no", "without")
                raise ProfileError(
                    f"{folder}: is {kind} rehearsal: go on {option} --dry-run, or name another "
                    "--out"
                )
        else:
            self._write()

    def add(self, entry: Entry) -> None:
        """Book a try; it is on the disk when this returns."""
        self.entries.append(entry)
        self._write()

    def last(self, step: str) -> Entry | None:
        """The latest try of a step."""
        return next((e for e in reversed(self.entries) if e.step == step), None)

    def is_done(self, step: str) -> bool:
        """Whether the latest try of a step succeeded."""
        entry = self.last(step)
        return entry is not None and entry.state == DONE

    def _write(self) -> None:
        tree = {"format": _FORMAT, "run": self.run, "rehearsal": self.rehearsal}
        content = tree | {"entries": [asdict(entry) for entry in self.entries]}
        write_whole(self._path, json.dumps(content, indent=1) + "\n")


def parse_ledger(content: bytes, where: str) -> tuple[str, bool, list[Entry]]:
    """Which hour it is, whether a rehearsal, and its entries. Raises ProfileError."""
    try:
        tree: dict[str, Any] = json.loads(content)
        if tree["format"] != _FORMAT:
            raise ValueError
        entries = [Entry(**entry) for entry in tree["entries"]]
        return str(tree["run"]), bool(tree["rehearsal"]), entries
    except (ValueError, LookupError, TypeError):
        raise ProfileError(f"{where}: is no ledger of first-light, or a damaged one") from None
