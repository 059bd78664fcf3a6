"""Manifests: each folder of ours names its files, with their sizes and hashes.

    DIR/manifest.json   {"format": ..., "kind": ..., "files": {NAME: {"size": ..., "sha256": ...}}}

A folder is replaced only if it has a manifest and everything in it is unchanged. So an added or
edited file is never lost: the error names it instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .files import (
    exchange,
    flush_folder,
    partial,
    regular,
    restore,
    write_whole,
)
from .strict import UserError

MANIFEST = "manifest.json"
_FORMAT = "sarathi-sim manifest 1"
_NAMED, _COUNTED = 10, 1000
"""How many names a message has, and how many are counted."""


class NotOursError(UserError):
    """A folder or file that is not replaced, because foreign files would be lost."""


class Digest(NamedTuple):
    """Size and hash of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a folder of ours: digests by name, with ``/`` below sub-folders. ``kind`` is the
    kind of folder. While a file is being replaced, ``earlier`` has the digest of the old one, which
    may still be there."""

    kind: str
    files: Mapping[str, Digest] = field(default_factory=dict)
    earlier: Mapping[str, Digest] = field(default_factory=dict)

    def names(self, name: str, content: Digest) -> bool:
        """Whether a file with this name and content is ours."""
        return content in (self.files.get(name), self.earlier.get(name))

    def dump(self) -> bytes:
        """The content of ``manifest.json``; the same files give the same bytes."""
        tree: dict[str, object] = {"format": _FORMAT, "kind": self.kind}
        for key, digests in (("files", self.files), ("earlier", self.earlier)):
            if digests or key == "files":
                tree[key] = {name: digests[name]._asdict() for name in sorted(digests)}
        return (json.dumps(tree, indent=1) + "\n").encode()


@dataclass(frozen=True)
class Differences:
    """The differences between a folder and its manifest; names are relative to it. ``changed`` are
    files with another content, ``missing`` absent files, ``foreign`` is everything that the
    manifest does not name (up to a thousand of each)."""

    changed: list[str]
    foreign: list[str]
    missing: list[str]

    def __str__(self) -> str:
        missing = [f"missing: {listed(self.missing)}"] if self.missing else []
        return "; ".join([*filter(None, [self.in_the_way()]), *missing])

    def in_the_way(self) -> str:
        """The files that would be lost if the folder were replaced."""
        kinds = (("changed", self.changed), ("not ours", self.foreign))
        return "; ".join(f"{what}: {listed(names)}" for what, names in kinds if names)


def digest(content: bytes) -> Digest:
    """Size and hash of a content."""
    return Digest(len(content), hashlib.sha256(content).hexdigest())


def file_digest(file: Path) -> Digest:
    """Size and hash of a file. Raises OSError."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256")
        return Digest(stream.tell(), found.hexdigest())


def write_manifest(folder: Path, kind: str) -> None:
    """Name everything that ``folder`` holds in its manifest, which is not flushed. Raises OSError.
    Only for a folder that no other process uses yet."""
    files = {name: file_digest(folder / name) for name in _entries(folder) if name != MANIFEST}
    (folder / MANIFEST).write_bytes(Manifest(kind, files).dump())


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of ``folder``; None if it has none of ours, or a damaged one."""
    try:
        content = regular(folder / MANIFEST).read_bytes()
        tree = json.loads(content)
        found = Manifest(
            str(tree["kind"]), _digests(tree["files"]), _digests(tree.get("earlier", {}))
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return found if found.dump() == content else None


def _digests(tree: dict[str, dict[str, object]]) -> dict[str, Digest]:
    """Raises ValueError for a name outside of the folder, and whatever a wrong tree leads to."""
    found = {}
    for name, entry in tree.items():
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or str(path) != name:
            raise ValueError(f"{name!r} is no name in the folder")
        size = entry["size"]
        if not isinstance(size, int):
            raise ValueError(f"{size!r} is no size")
        found[name] = Digest(size, str(entry["sha256"]))
    return found


def differences(
    folder: Path, manifest: Manifest, ignored: Callable[[str], object] = lambda name: False
) -> Differences:
    """Compare all of ``folder`` with its manifest, recursively, links not followed. Names for which
    ``ignored`` is true are skipped (a file's, a folder's, or that of an empty folder with ``/``
    behind it). Raises OSError if the folder cannot be read."""
    known = {*manifest.files, *manifest.earlier}
    folders = {str(above) for name in known for above in PurePosixPath(name).parents}
    changed: list[str] = []
    foreign: list[str] = []
    found = set()
    for name in _entries(folder, folders, ignored):
        found.add(name)
        if name in (MANIFEST, partial(Path(MANIFEST)).name):
            continue
        path = folder / name
        if name not in known or path.is_symlink() or not path.is_file():
            foreign.append(name)
        elif not manifest.names(name, file_digest(path)):
            changed.append(name)
        if max(len(changed), len(foreign)) >= _COUNTED:
            break
    missing = sorted(manifest.files.keys() - found - manifest.earlier.keys())
    return Differences(sorted(changed), sorted(foreign), missing)


def _entries(
    folder: Path,
    ours: Collection[str] | None = None,
    ignored: Callable[[str], object] = lambda name: False,
) -> Iterator[str]:
    """Names of all files below, and of folders with none in them that are not ``ours``. ``ours``
    None is all folders. A loop rather than a recursion: the user's folders may be nested without
    bound."""
    waiting = [""]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(folder / here) as scan:
                entries = list(scan)
        except OSError:
            if not here:
                raise
            yield f"{here}/"  # one may not look into it, or its path is too long
            continue
        empty = not entries and here and ours is not None and here not in ours
        if empty and not ignored(f"{here}/"):
            yield f"{here}/"
        for entry in entries:
            name = f"{here}/{entry.name}" if here else entry.name
            if ignored(name):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(name)
            else:
                yield name


def spoken(kind: str) -> str:
    """The words of a kind such as "sarathi-sim measured bundle 1"."""
    return kind.removeprefix("sarathi-sim ").rstrip("0123456789 ")


def listed(names: list[str]) -> str:
    """Some of the names and how many more there are, on one line."""
    shown = [name if name.isprintable() else ascii(name) for name in names[:_NAMED]]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(shown) + more


def check_ours(folder: Path, *kinds: str) -> None:
    """Check that replacing ``folder`` loses only files that we wrote. It may also be missing or
    empty. Raises NotOursError where it is of none of these kinds, or holds a file that is foreign
    or changed, with their names; OSError."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise NotOursError("exists and is not a folder, so it is not replaced")
    if not any(folder.iterdir()):
        return
    manifest = read_manifest(folder)
    if manifest is None:
        raise NotOursError(
            f"exists and is not an earlier result of ours (it has no {MANIFEST} of ours, but "
            f"{held(folder)}), so it is not replaced: name another folder"
        )
    if manifest.kind not in kinds:
        raise NotOursError(
            f"exists and is a result of another kind ({spoken(manifest.kind)}), so it is not "
            "replaced: name another folder"
        )
    found = differences(folder, manifest)
    if found.changed or found.foreign:
        raise NotOursError(
            f"holds files that are not part of an earlier result ({found.in_the_way()}), so it "
            "is not replaced: move them away, or name another folder"
        )


def held(folder: Path) -> str:
    """Some of the files that a folder holds, and how many more there are, on one line."""
    return listed(sorted(islice(_entries(folder, ours=()), _COUNTED)))


def replace_folder(scratch: Path, target: Path, kind: str, *, over: tuple[str, ...] = ()) -> None:
    """Move a finished folder to ``target`` beside it, with its manifest; completely or not at all.

    What is there must be missing, empty, or of this kind or one of ``over``, and as it was written:
    else it stays, and NotOursError names what is in the way. After a kill at any
    moment ``target`` is the earlier folder or the new one.

    Raises OSError where that cannot be done.
    """
    write_manifest(scratch, kind)
    flush_folder(scratch)
    restore(target)
    check_ours(target, kind, *over)
    if not target.exists() or not any(target.iterdir()):
        scratch.replace(target)
        return
    exchange(scratch, target)
    try:
        check_ours(scratch, kind, *over)  # another program may have written there meanwhile
    except BaseException:
        exchange(scratch, target)
        raise
    remove_ours(scratch)


def remove_ours(folder: Path) -> None:
    """Remove the files that the folder's manifest names, and all folders that are then empty."""
    manifest = read_manifest(folder)
    known = {*manifest.files, *manifest.earlier} if manifest is not None else set()
    present = [name for name in _entries(folder) if name in known]
    for name in present:
        (folder / name).unlink()
    above = {PurePosixPath(), *(a for name in known for a in PurePosixPath(name).parents)}
    (folder / MANIFEST).unlink(missing_ok=True)
    partial(folder / MANIFEST).unlink(missing_ok=True)
    for path in sorted(above, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):  # missing, or another process wrote into it
            (folder / path).rmdir()


def check_files(folder: Path, *names: str) -> None:
    """Check that the files of these names are ours to replace, or missing. Raises NotOursError."""
    manifest = read_manifest(folder) or Manifest("")
    for name in names:
        path = folder / name
        if not os.path.lexists(path):
            continue
        if path.is_symlink() or not path.is_file():
            raise NotOursError(f"{path}: exists and is not a file of ours, so it is not replaced")
        if not manifest.names(name, file_digest(path)):
            known = name in manifest.files
            why = "was changed since it was written" if known else f"is not in {MANIFEST}"
            raise NotOursError(f"{path}: {why}, so it is not replaced: move it away")


def replace_files(folder: Path, kind: str, contents: Mapping[str, bytes]) -> None:
    """Write files directly in a folder that holds foreign files too, and name them in its manifest.
    Each is whole or as it was, and killed at any moment they are known as ours. Raises NotOursError
    where one of them is there and is not ours."""
    check_files(folder, *contents)
    before = read_manifest(folder) or Manifest(kind)
    new = {name: digest(content) for name, content in contents.items()}
    present = {name: before.files[name] for name in contents if name in before.files}
    files = {**before.files, **new}
    write_whole(
        folder / MANIFEST,
        Manifest(
            kind,
            files,
            {**before.earlier, **present},
        ).dump(),
    )
    for name, content in contents.items():
        write_whole(folder / name, content)
    write_whole(folder / MANIFEST, Manifest(kind, files).dump())


def remove_files(folder: Path, kind: str, names: Collection[str]) -> None:
    """Remove files that :func:`replace_files` wrote. Raises NotOursError where one was changed."""
    check_files(folder, *names)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    before = read_manifest(folder) or Manifest(kind)
    files = {name: there for name, there in before.files.items() if name not in names}
    write_whole(folder / MANIFEST, Manifest(kind, files).dump())
