"""A lock for one process at a time in a folder."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_HOLDER = "process "
"""The first bytes of a lock of ours."""


class FolderBusyError(Exception):
    """Another process holds the folder; the message says which, and since when."""


class FolderLock:
    """Holds ``folder`` for this process, by a lock on the file ``lock`` in it; makes the folder.
    The system drops the lock with the process, however that ends. Raises FolderBusyError;
    FileExistsError if ``lock`` is a foreign file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._file = self._path.open("a+", encoding="utf-8")
            except FileNotFoundError:
                continue  # the earlier holder has removed the folder meanwhile
            self._lock()
            if self._is_in_place():
                break
            self._file.close()  # a lock on a removed file has no effect
        self._file.seek(0)
        if self._file.read(len(_HOLDER)) not in ("", _HOLDER):
            self._file.close()
            raise FileExistsError(f"{self._path}: is not a lock of ours: move it away")
        self._file.truncate(0)
        now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        self._file.write(f"{_HOLDER}{os.getpid()} on {socket.gethostname()} since {now}")
        self._file.flush()

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read() or "an unknown process"
            self._file.close()
            raise FolderBusyError(holder) from None

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let others in. The file stays, which is harmless."""
        self._file.close()

    def remove(self) -> None:
        """Let others in, and remove the file."""
        if not self._file.closed:
            if self._is_in_place():  # and not another's: ours may be gone with all of the folder
                self._path.unlink()
            self._file.close()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder of this process's own, so that :func:`is_held` tells others; it leaves no file.
    Nothing is held on a file system that has no locks."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a living process has the folder by :func:`held`."""
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # gone meanwhile, or no folder
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
