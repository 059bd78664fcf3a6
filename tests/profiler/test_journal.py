"""Finished points survive kill -9, damage is said, and two profilers do not share a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sarathi_sim.profiler.planning.journal import Journal, ProfileError, Timing, settings_hash
from sarathi_sim.profiler.storage.folder_lock import FolderBusyError, FolderLock

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys
from pathlib import Path
from sarathi_sim.profiler.planning.journal import Journal, Timing
journal = Journal(Path(sys.argv[1]), {"a": 1})
for number in range(10**9):
    journal.add("preproj", (number,), Timing(number + 0.5, samples=3))
    print(number, flush=True)
"""


def start_writer(folder: Path) -> subprocess.Popen[str]:
    """A process that writes points until it is killed, and prints the number of each."""
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_a_killed_writer_loses_no_finished_point(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    assert writer.stdout is not None
    for _ in range(50):
        writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    finished = 50 + len([line for line in writer.stdout.read().splitlines(keepends=True)
                         if line.endswith("\n")])  # fmt: skip
    writer.wait()
    writer.stdout.close()
    journal = Journal(tmp_path, {"a": 1})
    assert len(journal) >= finished
    for number in range(finished):
        assert journal.get("preproj", (number,)) == Timing(number + 0.5, samples=3)
    journal.close()


def test_a_line_cut_short_is_dropped_and_written_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    journal.add("attn_decode", (4, 128), Timing(7.0))
    journal.add("attn_decode", (8, 128), Timing(None, note="too large"))
    journal.close()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + whole[:20])
    again = Journal(tmp_path, {})
    assert again.points("attn_decode") == {
        (4, 128): Timing(7.0),
        (8, 128): Timing(None, note="too large"),
    }
    again.add("attn_decode", (16, 128), Timing(9.0))
    again.close()
    third = Journal(tmp_path, {})
    assert len(third) == 3
    third.remove()
    assert not tmp_path.exists()


def test_other_settings_have_a_journal_of_their_own(tmp_path: Path) -> None:
    assert settings_hash({"a": 1, "b": 2}) == settings_hash({"b": 2, "a": 1})
    first = Journal(tmp_path, {"repeats": 5})
    first.add("others", (1,), Timing(1.0))
    first.close()
    other = Journal(tmp_path, {"repeats": 6})
    assert other.get("others", (1,)) is None
    other.remove()
    assert first.path.exists()


GOOD = '{"op": "others", "key": [1], "time_us": 2.5}'
DAMAGED = {
    "half a line": GOOD[:20],
    "no point": "[]",
    "no key": '{"op": "others", "time_us": 2.5}',
    "unknown field": GOOD.replace("time_us", "time"),
    "no number": GOOD.replace("2.5", '"fast"'),
    "nan": GOOD.replace("2.5", "NaN"),
    "infinite": GOOD.replace("2.5", "Infinity"),
    "negative": GOOD.replace("2.5", "-2.5"),
    "infinite spread": GOOD.replace("2.5", '2.5, "spread": Infinity'),
    "bytes": "\xff\x00",
    "empty": "",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path: Path, damage: str) -> None:
    """Also where it is the last one: a crash cuts a line short, it does not end it."""
    journal = Journal(tmp_path, {})
    journal.close()
    for after in ([GOOD], []):
        content = "\n".join([GOOD, DAMAGED[damage], *after, ""]).encode("latin-1")
        journal.path.write_bytes(content)
        with pytest.raises(ProfileError, match="row 2 is damaged") as caught:
            Journal(tmp_path, {})
        assert str(caught.value).startswith(f"{journal.path}: row 2 is damaged: ")
        assert journal.path.read_bytes() == content
    journal.path.write_text(GOOD + "\n")
    mended = Journal(tmp_path, {})
    assert mended.get("others", (1,)) == Timing(2.5)
    mended.remove()


def test_a_second_profiler_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    first = start_writer(tmp_path)
    assert first.stdout is not None
    first.stdout.readline()
    for settings in ({"a": 1}, {"a": 2}):  # both would write the same bundle
        with pytest.raises(ProfileError, match=f"process {first.pid} on .* since 20") as caught:
            Journal(tmp_path, settings)
        assert str(caught.value).startswith(f"{tmp_path}: process ")
    assert first.poll() is None
    first.kill()
    first.stdout.close()
    first.wait()
    Journal(tmp_path, {"a": 1}).close()


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who had the folder removes it between our opening of the lock and our locking it."""
    lock = FolderLock._lock
    removed = []

    def remove_then_lock(self: FolderLock) -> None:
        if not removed:
            removed.append(self._path)
            self._path.unlink()
            self._path.parent.rmdir()
        lock(self)

    monkeypatch.setattr(FolderLock, "_lock", remove_then_lock)
    ours = FolderLock(tmp_path / "work")
    assert removed
    with pytest.raises(FolderBusyError, match=f"process {os.getpid()} on"):
        FolderLock(tmp_path / "work")
    ours.remove()
    FolderLock(tmp_path / "work").release()


def test_a_lock_that_is_gone_takes_no_other_with_it(tmp_path: Path) -> None:
    """Somebody cleared the folder while we were at work, and another process began there."""
    ours = FolderLock(tmp_path / "work")
    (tmp_path / "work" / "lock").unlink()
    ours.remove()
    ours = FolderLock(tmp_path / "work")
    (tmp_path / "work" / "lock").unlink()
    theirs = FolderLock(tmp_path / "work")
    ours.remove()
    with pytest.raises(FolderBusyError):
        FolderLock(tmp_path / "work")
    theirs.remove()
