"""Files and folders that are complete or absent, even after a power failure; and where the shipped
data and the public measurements are.

A rename alone keeps readers from half a file. But the disk may store the rename before the content,
so the content is flushed to the disk first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gzip
import os
import secrets
import stat
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from .strict import SpecError

DATASETS_VARIABLE = "SARATHI_SIM_DATASETS"


PACKAGE = Path(__file__).absolute().parents[2]
"""The folder that holds the four packages and ``data/``."""


@lru_cache(maxsize=1)
def data_dir() -> Path:
    """The folder that holds ``models/``, ``devices/`` and ``profiles/``. Raises FileNotFoundError
    where it is not there."""
    folder = (PACKAGE / "data").resolve()
    if not (folder / "models").is_dir():
        raise FileNotFoundError(f"shipped data not found: {folder} has no models/ folder")
    return folder


WHERE = "data/README.md says where the measurements come from"
"""For messages about public measurements that are not there."""


def user_path(text: str | Path) -> Path:
    """The path ``text`` with a leading ``~`` or ``~user`` replaced by the home folder. Raises
    SpecError where there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        home = Path(text).parts[0]
        problem = f"there is no home folder {home}; a folder of this name is ./{home}"
        raise SpecError(f"{text}: {problem}") from None


def public_datasets(flag: Path | None = None) -> Path:
    """The folder of public measurements: ``flag``, else the environment's SARATHI_SIM_DATASETS.
    Raises FileNotFoundError where neither is given, or where the folder is not there."""
    named = flag if flag is not None else os.environ.get(DATASETS_VARIABLE)
    if not named:
        raise FileNotFoundError(
            "this needs the public measurements: name their folder with --datasets DIR or in "
            f"{DATASETS_VARIABLE}; {WHERE}"
        )
    folder = user_path(named)
    if not folder.is_dir():
        origin = "--datasets" if flag is not None else DATASETS_VARIABLE
        raise FileNotFoundError(f"{origin} names {folder}, which is not a folder; {WHERE}")
    return folder


LARGEST_FILE = 8 * 2**20
"""The largest file that people write, bytes: a configuration, a model."""
LARGEST_DATA = 2**28
"""The largest file that a program writes and that is read at once, bytes: a table, a log."""
_GZIP = b"\x1f\x8b"

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


def open_file(file: Path) -> BufferedReader:
    """A file that the user names, opened to read. It never waits for another program to write.
    Raises SpecError where it is missing, may not be read, or is a folder, a device or a pipe."""
    name = str(file) if str(file).isprintable() else ascii(str(file))
    try:
        found = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise SpecError(f"{name}: {error.strerror or error}") from None
    except ValueError:  # a NUL in its name, or what is no UTF-8
        raise SpecError(f"{str(file)!a}: is no name of a file") from None
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise SpecError(f"{name}: not a regular file")
    return open(found, "rb")  # noqa: PTH123


def unzipped(file: BufferedReader) -> BinaryIO:
    """The content of an open file: of a gzipped one, decompressed."""
    return cast(BinaryIO, gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == _GZIP else file)


def read_bounded(path: Path, most: int = LARGEST_FILE) -> bytes:
    """A file's content. Raises SpecError as :func:`open_file` does, and where it is larger than
    ``most`` bytes.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            content = b"" if size > most else file.read(most + 1)
        except OSError as error:
            raise SpecError(f"{path}: {error.strerror or error}") from None
    if max(size, len(content)) > most:
        limit = f"{most:,} ({most >> 20} MiB)" if most >= 2**20 else f"{most:,}"
        held = max(size, len(content))
        raise SpecError(f"{path}: holds {held:,} bytes: must be at most {limit}")
    return content


def write_whole(file: Path, content: str | bytes) -> None:
    """Replace ``file`` by one with this content (text as UTF-8), or leave it as it was. Raises
    OSError where that cannot be done."""
    scratch = partial(file)
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        _to_disk(scratch)
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def make_folders(folder: Path) -> list[Path]:
    """Make a folder and all folders above it; returns the new ones, the lowest first. Raises
    OSError where that cannot be done; none of them is left then."""
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
    """Exchange the names of two folders side by side, in one step if the system can. Elsewhere
    ``second`` is missing for a moment; see :func:`restore`. Raises OSError."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or an old one
        _three_renames(first, second)
        return
    if (
        rename(
            _HERE,
            os.fsencode(first),
            _HERE,
            os.fsencode(second),
            _EXCHANGE,
        )
        == 0
    ):
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
    """Put back the folder of ``target`` after a process was killed during an exchange. If the new
    folder is already in place, the earlier one gets an unused name."""
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
