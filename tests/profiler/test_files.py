"""Files and folders are on the disk before they are in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from profiler.files import partial, put_in_place, write_whole


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was sent to the disk (by inode) and what was renamed, in order."""
    found: list[tuple[str, int]] = []
    sync, rename = os.fsync, Path.replace

    def recorded_sync(descriptor: int) -> None:
        found.append(("to disk", os.fstat(descriptor).st_ino))
        sync(descriptor)

    def recorded_rename(self: Path, target: Path) -> Path:
        found.append(("renamed", self.stat().st_ino))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(Path, "replace", recorded_rename)
    return found


def test_a_file_is_on_the_disk_before_it_replaces_another(
    tmp_path: Path, events: list[tuple[str, int]]
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old")
    write_whole(file, "nöu")
    assert file.read_bytes() == b"n\xc3\xb6u"
    inode = file.stat().st_ino
    assert events == [("to disk", inode), ("renamed", inode)]
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "a.txt"
    file.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, b"new")
    assert (file.read_text(), partial(file).exists()) == ("old", False)


def test_a_folder_is_on_the_disk_before_it_is_in_its_place(
    tmp_path: Path, events: list[tuple[str, int]]
) -> None:
    scratch, place = tmp_path / ".new", tmp_path / "place"
    (scratch / "below").mkdir(parents=True)
    (scratch / "one.csv").write_text("1")
    (scratch / "below" / "two.csv").write_text("2")
    place.mkdir()
    (place / "earlier.csv").write_text("0")
    put_in_place(scratch, place)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert names == ["place", "place/below", "place/below/two.csv", "place/one.csv"]

    content = {path.stat().st_ino for path in [place, *place.rglob("*")]}
    renamed = [number for number, (what, _) in enumerate(events) if what == "renamed"]
    assert {inode for what, inode in events[: renamed[0]] if what == "to disk"} == content
    assert events[renamed[-1]] == ("renamed", place.stat().st_ino)
