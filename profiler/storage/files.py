"""Files and folders that are there whole or not at all, also after the power has failed.

A rename alone keeps readers from half a file. But the disk may learn of it before it has what was
written, so what is put in its place is sent to the disk first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from pathlib import Path

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def partial(file: Path) -> Path:
    """Where :func:`write_whole` writes; a process that was killed may have left it."""
    return file.with_name(f".{file.name}.partial")


def regular(file: Path) -> Path:
    """``file`` itself, which may be missing. Raises OSError where it is a folder, or what has no
    end: a device, or a pipe.
    """
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(file))
    return file


def write_whole(file: Path, content: str | bytes) -> None:
    """Replace ``file`` by one with this content, text as UTF-8; else it stays as it was.

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
    """Make a folder and those above it, however many; returns what was made, the lowest first.

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
    """Remove those of the folders that nothing was put into."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def flush_folder(folder: Path) -> None:
    """Send all of a folder to the disk. Raises OSError."""
    for root, _, names in os.walk(folder):
        for name in names:
            _to_disk(Path(root, name))
        with contextlib.suppress(OSError):  # some file systems cannot do that with a folder
            _to_disk(Path(root))


def exchange(first: Path, second: Path) -> None:
    """Give two folders side by side each other's name, in one step where the system can.

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
    """Put back the folder that a process took from ``target`` that was killed within an exchange.

    Where the new folder was in place already, the earlier one gets a name that is in nobody's way.
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
