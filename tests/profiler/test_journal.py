"""Finished points survive kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from profiler.journal import Journal, Timing, settings_hash

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys
from pathlib import Path
from profiler.journal import Journal, Timing
journal = Journal(Path(sys.argv[1]), {"a": 1})
for number in range(10**9):
    journal.add("preproj", (number,), Timing(number + 0.5, samples=3))
    print(number, flush=True)
"""


def test_a_killed_writer_loses_no_finished_point(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
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
    first, other = Journal(tmp_path, {"repeats": 5}), Journal(tmp_path, {"repeats": 6})
    first.add("others", (1,), Timing(1.0))
    assert other.get("others", (1,)) is None
    first.remove()
    assert other.path.exists()
    other.close()
