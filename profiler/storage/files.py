"""Files and folders that are complete or absent, even after a power failure.

A rename alone keeps readers from half a file. But the disk may store the rename before the content,
so the content is flushed to the disk first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def partial(file: Path) -> Path:
    """The temporary file of :func:`write_whole`; a killed process may leave it."""
    return file.with_name(f".{file.name}.partial")


def files_sha256(files: Iterable[Path], *also: str) -> str:
    """Hash of files, their names included, and of further text. Raises OSError."""
    digest = sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    for text in also:
        digest.update(text.encode())
    return digest.hexdigest()


def regular(file: Path) -> Path:
    """``file`` itself, which may be missing. Raises OSError where it is a folder, or what has no
    end: a device, or a pipe.
    """
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(file))
    return file


def write_whole(file: Path, content: str | bytes) -> None:
    """Replace ``file`` by one with this content (text as UTF-8), or leave it as it was.

    Raises OSError where that cannot be done.
    """
    scratch = partial(file)
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        _to_disk(scratch)
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def make_folders(folder: Path) -> list[Path]:
    """Make a folder and all folders above it; returns the new ones, the lowest first.

    Raises OSError where that cannot be done; none of them is left then.
    """
    missing = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        missing.append(each)
    made: list[Path] = []
    try:
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process was faster
                each.mkdir()
                made.insert(0, each)
        folder.mkdir(exist_ok=True)  # raises where a file is in its place
    except OSError:
        remove_empty(made)
        raise
    return made


def remove_empty(folders: list[Path]) -> None:
    """Remove the folders that are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def flush_folder(folder: Path) -> None:
    """Flush all of a folder to the disk. Raises OSError."""
    for root, _, names in os.walk(folder):
        for name in names:
            _to_disk(Path(root, name))
        with contextlib.suppress(OSError):  # some file systems cannot do that with a folder
            _to_disk(Path(root))


def exchange(first: Path, second: Path) -> None:
    """Exchange the names of two folders side by side, in one step if the system can.

    Elsewhere ``second`` is missing for a moment; see :func:`restore`. Raises OSError.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or an old one
        _three_renames(first, second)
        return
    if rename(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in _UNKNOWN:
        raise OSError(code, os.strerror(code), str(second))
    _three_renames(first, second)


def _three_renames(first: Path, second: Path) -> None:
    aside = _aside(second)
    second.replace(aside)
    try:
        first.replace(second)
    except OSError:
        aside.replace(second)
        raise
    aside.replace(first)


def restore(target: Path) -> None:
    """Put back the folder of ``target`` after a process was killed during an exchange.

    If the new folder is already in place, the earlier one gets an unused name.
    """
    aside = _aside(target)
    if aside.is_dir() and not os.path.lexists(target):
        aside.replace(target)
    elif aside.is_dir():
        aside.replace(target.with_name(f".{target.name}.{secrets.token_hex(4)}"))


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.earlier")


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
