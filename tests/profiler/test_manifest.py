"""Only what we wrote is replaced, and only as we wrote it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sarathi_sim.profiler.storage import files, manifest
from sarathi_sim.profiler.storage.files import restore
from sarathi_sim.profiler.storage.manifest import (
    MANIFEST,
    Manifest,
    NotOursError,
    check_ours,
    differences,
    digest,
    read_manifest,
    remove_ours,
    replace_files,
    replace_folder,
    write_manifest,
)

KIND = "sarathi-sim thing 1"


def manifest_of(kind: str, files: dict[str, bytes]) -> Manifest:
    """The manifest of a folder that is to hold ``files``."""
    return Manifest(kind, {name: digest(content) for name, content in files.items()})


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder; folders and links have no content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if path.is_file() and not path.is_symlink()
        else None
        for path in sorted(folder.rglob("*"))
    }


def put(place: Path, files: dict[str, str], kind: str = KIND) -> None:
    scratch = place.with_name(".scratch")
    for name, text in files.items():
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_text(text)
    replace_folder(scratch, place, kind)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of ours."""
    put(tmp_path / "place", {"a.txt": "a", "below/b.txt": "b"})
    return tmp_path / "place"


def test_a_folder_names_its_files(place: Path) -> None:
    found = read_manifest(place)
    assert found == manifest_of(KIND, {"a.txt": b"a", "below/b.txt": b"b"})
    assert found is not None and found.dump() == (place / MANIFEST).read_bytes()
    assert str(differences(place, found)) == ""


def test_what_we_wrote_is_replaced_whole(place: Path) -> None:
    put(place, {"c.txt": "c"})
    assert set(tree(place.parent)) == {"place", "place/c.txt", "place/manifest.json"}


def test_what_is_missing_is_no_obstacle(place: Path) -> None:
    (place / "a.txt").unlink()
    found = read_manifest(place)
    assert found is not None and str(differences(place, found)) == "missing: a.txt"
    put(place, {"c.txt": "c"})
    assert (place / "c.txt").exists()


def _add_a_key(file: Path) -> None:
    """A manifest that somebody edited is theirs, too."""
    file.write_text(file.read_text().replace("{", '{"x": null, ', 1))


def _link(place: Path) -> None:
    """A folder of ours becomes a link to one with the same content."""
    (place / "below").rename(place.parent / "elsewhere")
    (place / "below").symlink_to(place.parent / "elsewhere")


@pytest.mark.parametrize(
    ("disturb", "named"),
    [
        (lambda p: (p / "below" / "analysis.ipynb").write_text("!"), "below/analysis.ipynb"),
        (lambda p: (p / "below" / ".git").mkdir(), r"not ours: below/\.git/"),
        (lambda p: (p / "a.txt").write_text("A"), r"changed: a\.txt"),
        (lambda p: (p / "a.txt").write_text("longer"), r"changed: a\.txt"),
        (lambda p: (p / "x\ny").write_text(""), r"not ours: 'x\\ny'"),
        (lambda p: os.mkfifo(p / "pipe"), "not ours: pipe"),
        (lambda p: (p / MANIFEST).write_text("{}"), "has no manifest.json of ours, but a.txt"),
        (lambda p: _add_a_key(p / MANIFEST), "has no manifest.json of ours, but a.txt"),
        (lambda p: (p / MANIFEST).unlink(), "has no manifest.json of ours, but a.txt"),
        (lambda p: [(p / f"{i:02}").touch() for i in range(30)], "08, 09 and 20 more"),
        (_link, "not ours: below"),
    ],
)
def test_what_is_not_ours_stays(place: Path, disturb: Callable[[Path], object], named: str) -> None:
    disturb(place)
    before = tree(place)
    with pytest.raises(NotOursError, match=named) as caught:
        put(place, {"c.txt": "c"})
    assert "\n" not in str(caught.value)
    assert tree(place) == before


def test_folders_nested_without_bound_are_looked_into(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the recursion limit, and with a path that is longer than the system takes."""
    monkeypatch.chdir(place)
    depth = 3000
    for _ in range(depth):
        Path("dd").mkdir()
        os.chdir("dd")
    try:
        with pytest.raises(NotOursError, match=r"not ours: .*dd/dd/dd"):
            check_ours(place, KIND)
    finally:
        for _ in range(depth):  # nothing else can remove them
            os.chdir("..")
            Path("dd").rmdir()


def test_a_folder_of_another_kind_stays(place: Path) -> None:
    with pytest.raises(NotOursError, match=r"another kind \(thing\)"):
        put(place, {"c.txt": "c"}, "sarathi-sim other 1")
    check_ours(place, "sarathi-sim other 1", KIND)


def test_what_is_put_there_at_the_last_moment_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the exchange."""
    from sarathi_sim.profiler.storage.files import exchange

    calls = []

    def late(first: Path, second: Path) -> None:
        if not calls:
            (second / "mine.txt").write_text("mine")
        calls.append(1)
        exchange(first, second)

    before = tree(place)
    monkeypatch.setattr("sarathi_sim.profiler.storage.manifest.exchange", late)
    with pytest.raises(NotOursError, match=r"mine\.txt"):
        put(place, {"c.txt": "c"})
    assert tree(place) == {**before, "mine.txt": b"mine"}


@pytest.mark.parametrize("name", ["../outside", "/elsewhere/x", "a/../../x", "./a", ""])
def test_a_manifest_cannot_name_what_is_outside(place: Path, name: str) -> None:
    tree = json.loads((place / MANIFEST).read_text())
    tree["files"][name] = {"size": 1, "sha256": "0"}
    (place / MANIFEST).write_text(json.dumps(tree))
    assert read_manifest(place) is None


def test_removing_leaves_what_is_not_named(place: Path) -> None:
    (place / "below" / "mine").write_text("mine")
    remove_ours(place)
    assert tree(place) == {"below": None, "below/mine": b"mine"}


def test_single_files_in_a_folder_that_others_use(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("theirs")
    replace_files(tmp_path, KIND, {"a.yaml": b"1", "b.yaml": b"1"})
    replace_files(tmp_path, KIND, {"a.yaml": b"2"})
    assert read_manifest(tmp_path) == manifest_of(KIND, {"a.yaml": b"2", "b.yaml": b"1"})
    with pytest.raises(NotOursError, match=r"theirs\.yaml: is not in manifest\.json"):
        replace_files(tmp_path, KIND, {"theirs.yaml": b"ours"})
    (tmp_path / "a.yaml").write_text("edited")
    with pytest.raises(NotOursError, match=r"a\.yaml: was changed since"):
        replace_files(tmp_path, KIND, {"a.yaml": b"3", "b.yaml": b"3"})
    contents = {name: (tmp_path / f"{name}.yaml").read_text() for name in ("theirs", "a", "b")}
    assert contents == {"theirs": "theirs", "a": "edited", "b": "1"}


@pytest.mark.parametrize("written", range(4))
def test_a_kill_while_files_are_replaced_leaves_them_ours(
    tmp_path: Path, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sarathi_sim.profiler.storage.files import write_whole

    class Killed(BaseException):
        pass

    calls = []

    def until_killed(file: Path, content: bytes) -> None:
        if len(calls) == written:
            raise Killed
        calls.append(file)
        write_whole(file, content)

    replace_files(tmp_path, KIND, {"a": b"old", "b": b"old"})
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("sarathi_sim.profiler.storage.manifest.write_whole", until_killed)
        replace_files(tmp_path, KIND, {"a": b"new", "b": b"new"})
    found = read_manifest(tmp_path)
    assert found is not None and str(differences(tmp_path, found)) == ""
    replace_files(tmp_path, KIND, {"a": b"newer", "b": b"newer"})
    assert read_manifest(tmp_path) == manifest_of(KIND, {"a": b"newer", "b": b"newer"})


def test_a_manifest_is_written_for_all_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"x")
    write_manifest(tmp_path, KIND)
    write_manifest(tmp_path, KIND)
    assert read_manifest(tmp_path) == manifest_of(KIND, {"sub/a": b"x"})
    assert Manifest(KIND).dump() != Manifest("other").dump()


@pytest.mark.parametrize("atomic", [True, False])
def test_a_kill_at_any_step_leaves_the_earlier_folder_or_the_new_one(
    place: Path, atomic: bool
) -> None:
    """As kill -9 does: a child of this process ends without a word before its n-th step."""
    old = read_manifest(place)
    new = manifest_of(KIND, {"a.txt": b"A", "c.txt": b"c"})
    seen, step = [], 0
    while True:
        child = os.fork()
        if child == 0:
            _replace_and_die(place, step, atomic)
        _, status = os.waitpid(child, 0)
        restore(place)
        found = read_manifest(place)
        assert found in (old, new) and os.waitstatus_to_exitcode(status) in (0, 9), step
        assert found is not None and str(differences(place, found)) == "", step
        if os.waitstatus_to_exitcode(status) == 0:
            break
        seen.append(found == new)
        shutil.rmtree(place.with_name(".scratch"), ignore_errors=True)
        if found == new:
            put(place, {"a.txt": "a", "below/b.txt": "b"})
        step += 1
    assert found == new
    assert {True, False} <= set(seen), "some were killed before the exchange, some after it"


def _replace_and_die(place: Path, step: int, atomic: bool) -> None:
    """Replace the folder, and end before the ``step``-th change of the file system."""
    left = step

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def change_or_die(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            return change(*arguments, **options)

        return change_or_die

    try:
        if not atomic:
            files._EXCHANGE = 1 << 20  # a flag that no system knows
        for owner, name in ((os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir")):
            setattr(owner, name, counted(getattr(owner, name)))
        manifest.exchange = counted(files.exchange)
        put(place, {"a.txt": "A", "c.txt": "c"})
    except BaseException:
        os._exit(1)
    os._exit(0)
