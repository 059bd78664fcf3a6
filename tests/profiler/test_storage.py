"""Files and folders: written whole, marked, locked and journaled. Child processes and threads."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

from sarathi_sim.profiler.planning.grid import Journal, ProfileError, Timing, settings_hash
from sarathi_sim.profiler.storage import files, manifest
from sarathi_sim.profiler.storage.child import default_to_one_thread, mapped
from sarathi_sim.profiler.storage.files import (
    make_folders,
    partial,
    regular,
    remove_empty,
    restore,
    write_whole,
)
from sarathi_sim.profiler.storage.folder_lock import FolderBusyError, FolderLock
from sarathi_sim.profiler.storage.strict import UserError
from tests.patience import PATIENCE_S
from tests.processes import children, gone


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


def test_a_file_is_written_and_then_moved(tmp_path: Path, events: list[tuple[str, int]]) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old")
    write_whole(file, "nöu")
    assert file.read_bytes() == b"n\xc3\xb6u"
    inode = file.stat().st_ino
    assert events == [("to disk", inode), ("renamed", inode)]
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_changes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "a.txt"
    file.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, b"new")
    assert (file.read_text(), partial(file).exists()) == ("old", False)


def test_a_folder_is_written_and_then_moved(tmp_path: Path, events: list[tuple[str, int]]) -> None:
    scratch, place = tmp_path / ".new", tmp_path / "place"
    (scratch / "below").mkdir(parents=True)
    (scratch / "one.csv").write_text("1")
    (scratch / "below" / "two.csv").write_text("2")
    manifest.replace_folder(scratch, place, "kind")
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    below = ["place/below", "place/below/two.csv", "place/manifest.json", "place/one.csv"]
    assert names == ["place", *below]
    content = {path.stat().st_ino for path in [place, *place.rglob("*")]}
    assert events[-1] == ("renamed", place.stat().st_ino)
    assert content <= {inode for what, inode in events if what == "to disk"}


@pytest.mark.slow
def test_folders_nested_beyond_the_recursion_limit(tmp_path: Path) -> None:
    deep = Path(tmp_path, *(["d"] * 1100))
    made = make_folders(deep)
    assert (len(made), made[0], deep.is_dir()) == (1100, deep, True)
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


# Only what we wrote is replaced, and only as we wrote it


KIND = "sarathi-sim thing 1"


def manifest_of(kind: str, files: dict[str, bytes]) -> manifest.Manifest:
    return manifest.Manifest(
        kind, {name: manifest.digest(content) for name, content in files.items()}
    )


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
    manifest.replace_folder(scratch, place, kind)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    put(tmp_path / "place", {"a.txt": "a", "below/b.txt": "b"})
    return tmp_path / "place"


def test_a_folder_names_its_files_and_is_replaced_whole(place: Path) -> None:
    """What is missing is no obstacle."""
    found = manifest.read_manifest(place)
    assert found == manifest_of(KIND, {"a.txt": b"a", "below/b.txt": b"b"})
    assert found is not None and found.dump() == (place / manifest.MANIFEST).read_bytes()
    assert str(manifest.differences(place, found)) == ""
    (place / "a.txt").unlink()
    assert str(manifest.differences(place, found)) == "missing: a.txt"
    put(place, {"c.txt": "c"})
    assert set(tree(place.parent)) == {"place", "place/c.txt", "place/manifest.json"}


def _add_a_key(file: Path) -> None:
    """A manifest that somebody edited is theirs, too."""
    file.write_text(file.read_text().replace("{", '{"x": null, ', 1))


def _link(place: Path) -> None:
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
        (
            lambda p: (p / manifest.MANIFEST).write_text("{}"),
            "has no manifest.json of ours, but a.txt",
        ),
        (lambda p: _add_a_key(p / manifest.MANIFEST), "has no manifest.json of ours, but a.txt"),
        (lambda p: (p / manifest.MANIFEST).unlink(), "has no manifest.json of ours, but a.txt"),
        (lambda p: [(p / f"{i:02}").touch() for i in range(30)], "08, 09 and 20 more"),
        (_link, "not ours: below"),
    ],
)
def test_what_is_not_ours_stays(place: Path, disturb: Callable[[Path], object], named: str) -> None:
    disturb(place)
    before = tree(place)
    with pytest.raises(manifest.NotOursError, match=named) as caught:
        put(place, {"c.txt": "c"})
    assert "\n" not in str(caught.value)
    assert tree(place) == before


@pytest.mark.slow
def test_endless_folders_are_looked_into(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the recursion limit, and with a path that is longer than the system takes."""
    monkeypatch.chdir(place)
    depth = 1500
    for _ in range(depth):
        Path("dd").mkdir()
        os.chdir("dd")
    try:
        with pytest.raises(manifest.NotOursError, match=r"not ours: .*dd/dd/dd"):
            manifest.check_ours(place, KIND)
    finally:
        for _ in range(depth):  # nothing else can remove them
            os.chdir("..")
            Path("dd").rmdir()


def test_a_folder_of_another_kind_stays(place: Path) -> None:
    with pytest.raises(manifest.NotOursError, match=r"another kind \(thing\)"):
        put(place, {"c.txt": "c"}, "sarathi-sim other 1")
    manifest.check_ours(place, "sarathi-sim other 1", KIND)


def test_a_file_of_the_last_moment_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(manifest.NotOursError, match=r"mine\.txt"):
        put(place, {"c.txt": "c"})
    assert tree(place) == {**before, "mine.txt": b"mine"}


@pytest.mark.parametrize("name", ["../outside", "/elsewhere/x", "a/../../x", "./a", ""])
def test_a_manifest_cannot_name_what_is_outside(place: Path, name: str) -> None:
    tree = json.loads((place / manifest.MANIFEST).read_text())
    tree["files"][name] = {"size": 1, "sha256": "0"}
    (place / manifest.MANIFEST).write_text(json.dumps(tree))
    assert manifest.read_manifest(place) is None


def test_removing_leaves_what_is_not_named(place: Path) -> None:
    (place / "below" / "mine").write_text("mine")
    manifest.remove_ours(place)
    assert tree(place) == {"below": None, "below/mine": b"mine"}


def test_single_files_in_a_folder_that_others_use(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("theirs")
    manifest.replace_files(tmp_path, KIND, {"a.yaml": b"1", "b.yaml": b"1"})
    manifest.replace_files(tmp_path, KIND, {"a.yaml": b"2"})
    assert manifest.read_manifest(tmp_path) == manifest_of(KIND, {"a.yaml": b"2", "b.yaml": b"1"})
    with pytest.raises(manifest.NotOursError, match=r"theirs\.yaml: is not in manifest\.json"):
        manifest.replace_files(tmp_path, KIND, {"theirs.yaml": b"ours"})
    (tmp_path / "a.yaml").write_text("edited")
    with pytest.raises(manifest.NotOursError, match=r"a\.yaml: was changed since"):
        manifest.replace_files(tmp_path, KIND, {"a.yaml": b"3", "b.yaml": b"3"})
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

    manifest.replace_files(tmp_path, KIND, {"a": b"old", "b": b"old"})
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("sarathi_sim.profiler.storage.manifest.write_whole", until_killed)
        manifest.replace_files(tmp_path, KIND, {"a": b"new", "b": b"new"})
    found = manifest.read_manifest(tmp_path)
    assert found is not None and str(manifest.differences(tmp_path, found)) == ""
    manifest.replace_files(tmp_path, KIND, {"a": b"newer", "b": b"newer"})
    assert manifest.read_manifest(tmp_path) == manifest_of(KIND, {"a": b"newer", "b": b"newer"})


def test_a_manifest_is_written_for_all_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"x")
    manifest.write_manifest(tmp_path, KIND)
    manifest.write_manifest(tmp_path, KIND)
    assert manifest.read_manifest(tmp_path) == manifest_of(KIND, {"sub/a": b"x"})
    assert manifest.Manifest(KIND).dump() != manifest.Manifest("other").dump()


@pytest.mark.parametrize("atomic", [True, False])
def test_a_kill_leaves_the_earlier_folder_or_the_new_one(place: Path, atomic: bool) -> None:
    """As kill -9 does: a child of this process ends without a word before its n-th step."""
    old = manifest.read_manifest(place)
    new = manifest_of(KIND, {"a.txt": b"A", "c.txt": b"c"})
    seen, step = [], 0
    while True:
        child = os.fork()
        if child == 0:
            _replace_and_die(place, step, atomic)
        _, status = os.waitpid(child, 0)
        restore(place)
        found = manifest.read_manifest(place)
        assert found in (old, new) and os.waitstatus_to_exitcode(status) in (0, 9), step
        assert found is not None and str(manifest.differences(place, found)) == "", step
        restore(place)  # there is nothing to put back
        assert manifest.read_manifest(place) == found
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


# Finished points survive kill -9, damage is said, and two profilers do not share a folder


ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys
from pathlib import Path
from sarathi_sim.profiler.planning.grid import Journal, Timing
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


def test_a_lock_on_a_removed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# Calls on several processes: their order, their errors, their end


def test_values_come_in_the_order_of_the_items() -> None:
    seen: list[int] = []
    assert mapped(math.isqrt, [9, 4, 100], 2, seen.append) == [3, 2, 10]
    assert seen == [1, 2, 3]


def test_an_error_comes_as_it_is_and_a_killed_process_is_told() -> None:
    with pytest.raises(ValueError, match="nonnegative"):
        mapped(math.isqrt, [9, -1], 2)
    with pytest.raises(UserError, match="a worker process was killed"):
        mapped(os._exit, [9], 1)


def test_a_signal_ends_all_at_once() -> None:
    code = (
        "import time\n"
        "from sarathi_sim.experiments.cli import end_on_signals\n"
        "from sarathi_sim.profiler.storage.child import mapped\n"
        "end_on_signals()\n"
        "mapped(time.sleep, [1000] * 4, 2)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE_S
    while len(workers := children(parent.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    parent.send_signal(signal.SIGTERM)
    _, errors = parent.communicate(timeout=PATIENCE_S)
    assert b"KeyboardInterrupt" in errors
    assert len(workers) == 2 and gone(workers, seconds=PATIENCE_S)


# What a rank does once its parent is gone. torch-free: the ranks are stand-ins


@pytest.mark.parametrize(("name", "stays"), [("sarathi-sim-ranks-x", False), ("mine", True)])
def test_scratch_goes_with_the_parent(tmp_path: Path, name: str, stays: bool) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "spec.json").write_text("{}")
    code = (
        "import pathlib, sys, time\n"
        "from sarathi_sim.profiler.shard.rank_processes import channel_of_rank\n"
        "channel_of_rank(pathlib.Path(sys.argv[1]))\n"
        "time.sleep(60)\n"
    )
    ours, theirs = Pipe()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], cwd=ROOT, stdin=theirs.fileno()
        )
    assert (process.wait(PATIENCE_S), folder.exists()) == (0, stays)
    assert tmp_path.is_dir()


# One thread a library, where the user has not chosen otherwise


LIBRARIES = ("OMP", "OPENBLAS", "MKL", "VECLIB")
VARIABLES = [f"{name}_{'MAXIMUM' if name == 'VECLIB' else 'NUM'}_THREADS" for name in LIBRARIES]
IMPORTS = "import json, numpy, scipy.linalg, sklearn.utils._openmp_helpers, threadpoolctl\n"
COUNT = "print(json.dumps([i['num_threads'] for i in threadpoolctl.threadpool_info()]))\n"
BEFORE = (
    "from sarathi_sim.profiler.storage.child import default_to_one_thread\n"
    "default_to_one_thread()\n"
)
FIT = (
    "from sklearn.ensemble import HistGradientBoostingRegressor as Model\n"
    "from sarathi_sim.profiler.physics.residual import fit_trees\n"
    "fit = Model.fit\n"
    f"def counted(*all):\n    {COUNT}    return fit(*all)\n"
    "Model.fit = counted\n"
    "x = numpy.arange(40.0)\n"
    "fit_trees(x[:, None], x, 1, 2)\n"
)


def threads(code: str, **chosen: str) -> list[list[int]]:
    """What a fresh process prints: the threads of each library, a line per call."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment | chosen, capture_output=True,
        text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


COMMAND = (
    "import sys, sarathi_sim.experiments.cli as cli\n"
    "assert 'numpy' not in sys.modules\n"
    "cli.app = lambda: None\n"
    "cli.main()\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "chosen", "expected"),
    [
        (BEFORE + IMPORTS, {}, {1}),
        (IMPORTS + BEFORE, {}, {1}),
        (BEFORE + IMPORTS, {"OMP_NUM_THREADS": "2"}, {2}),
        (COMMAND + IMPORTS, {}, {1}),
        (COMMAND + IMPORTS, {"OMP_NUM_THREADS": "2"}, {2}),
    ],
)
def test_one_thread_by_default(code: str, chosen: dict[str, str], expected: set[int]) -> None:
    """Before and after numpy is imported, and for the processes that are started."""
    (found,) = threads(code + COUNT, **chosen)
    assert set(found) == expected and len(found) >= 2, "numpy and scikit-learn bring one each"
    environment = dict(chosen)
    default_to_one_thread(environment)
    whole = "OMP_NUM_THREADS" in chosen
    assert environment == (chosen if whole else {**dict.fromkeys(VARIABLES, "1"), **chosen})


@pytest.mark.slow
def test_a_fit_in_somebody_elses_process_takes_one_and_gives_the_others_back() -> None:
    own, within, after = threads(IMPORTS + COUNT + FIT + COUNT)
    assert set(within) == {1}
    assert after == own
