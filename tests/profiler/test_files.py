"""Files and folders are on the disk before they are in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sarathi_sim.profiler.storage.files import (
    exchange,
    make_folders,
    partial,
    regular,
    remove_empty,
    restore,
    write_whole,
)
from sarathi_sim.profiler.storage.manifest import replace_folder


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
    replace_folder(scratch, place, "kind")
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    below = ["place/below", "place/below/two.csv", "place/manifest.json", "place/one.csv"]
    assert names == ["place", *below]
    content = {path.stat().st_ino for path in [place, *place.rglob("*")]}
    assert events[-1] == ("renamed", place.stat().st_ino)
    assert content <= {inode for what, inode in events if what == "to disk"}


@pytest.mark.parametrize("atomic", [True, False])
def test_two_folders_change_places(
    tmp_path: Path, atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not atomic:
        monkeypatch.setattr("sarathi_sim.profiler.storage.files._UNKNOWN", set(range(200)))
        monkeypatch.setattr(
            "sarathi_sim.profiler.storage.files._EXCHANGE", 1 << 20
        )  # a flag that no system knows
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    exchange(tmp_path / "a", tmp_path / "b")
    assert sorted(map(str, (p.relative_to(tmp_path) for p in tmp_path.rglob("*")))) == [
        "a", "a/b", "b", "b/a",
    ]  # fmt: skip


def test_what_a_kill_within_an_exchange_took_away_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system cannot exchange two names in one step."""

    class Killed(BaseException):
        pass

    rename = Path.replace

    def second_fails(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise Killed
        return rename(self, target)

    monkeypatch.setattr("sarathi_sim.profiler.storage.files._EXCHANGE", 1 << 20)
    for name in ("new", "place"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "replace", second_fails)
        exchange(tmp_path / "new", tmp_path / "place")
    assert not (tmp_path / "place").exists()
    restore(tmp_path / "place")
    assert (tmp_path / "place" / "file").read_text() == "place"
    restore(tmp_path / "place")


def test_folders_nested_beyond_the_recursion_limit(tmp_path: Path) -> None:
    deep = Path(tmp_path, *(["d"] * 1500))
    made = make_folders(deep)
    assert (len(made), made[0], deep.is_dir()) == (1500, deep, True)
    (tmp_path / "d" / "mine").write_text("kept")
    remove_empty(made)
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["mine"]


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    """A device gives bytes for ever, and a pipe waits for somebody who writes."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        with pytest.raises(OSError, match="is not a regular file"):
            regular(path)
    for name in ("file", "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("file")
        assert regular(tmp_path / name) == tmp_path / name
        (tmp_path / "file").touch()
