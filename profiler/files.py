"""Files and folders that are there whole or not at all, also after the power has failed.

A rename alone keeps readers from half a file. But the disk may learn of it before it has what was
written, so what is put in its place is sent to the disk first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def partial(file: Path) -> Path:
    """Where :func:`write_whole` writes; a process that was killed may have left it."""
    return file.with_name(f".{file.name}.partial")


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


def put_in_place(scratch: Path, place: Path) -> None:
    """Rename a finished folder to ``place`` beside it, in place of one that may be there.

    Raises OSError where that cannot be done.
    """
    for folder, _, names in os.walk(scratch):
        for name in names:
            _to_disk(Path(folder, name))
        with contextlib.suppress(OSError):  # some file systems cannot do that with a folder
            _to_disk(Path(folder))
    retired = None
    if place.exists():
        retired = scratch.with_name(f"{scratch.name}.old")
        place.replace(retired)
    scratch.replace(place)
    if retired is not None:
        shutil.rmtree(retired)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
