"""Everything that a first hour found, in one file; and back. No torch."""

from __future__ import annotations

import io
import re
import secrets
import shutil
import zipfile
from pathlib import Path, PurePosixPath

from sarathi_sim.profiler.first_light.hour_ledger import LEDGER, parse_ledger
from sarathi_sim.profiler.planning.profile_error import ProfileError
from sarathi_sim.profiler.storage.files import write_whole

MOST_BYTES = 16 * 10**6
_MOST_UNPACKED = 2**30
_LEFT_OUT = "left_out.txt"
#: Locks, and scratch files of writers that were killed (``write_whole``, ``write_bundle``).
_SCRATCH = re.compile(r"(^|/)(lock$|\.[^/]*\.partial$|\.tp\d+-[0-9a-f]{8}/)")
_SAME_DATE = (1980, 1, 1, 0, 0, 0)  # the same files give the same bytes


def pack(folder: Path, archive: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Write all files of ``folder`` to the file ``archive``; returns the names left out for want
    of room, which the archive lists in ``left_out.txt``.

    Logs go first, the largest of them before the others; then the largest of all others. Raises
    ProfileError where ``archive`` exists and is of another hour, or foreign; OSError.
    """
    check_archive(archive, folder)
    files = {
        name: path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _SCRATCH.search(name := path.relative_to(folder).as_posix())
    }
    left_out: list[str] = []
    while len(content := _zipped(files, left_out)) > most_bytes and files.keys() != {LEDGER}:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            sizes = {info.filename: info.compress_size for info in packed.infolist()}
        excess = len(content) - most_bytes
        order = sorted(files.keys() - {LEDGER}, key=lambda name: (not _is_log(name), -sizes[name]))
        while excess > 0 and order:
            name = order.pop(0)
            excess -= sizes[name]
            left_out.append(name)
            del files[name]
    write_whole(archive, content)
    return left_out


def _is_log(name: str) -> bool:
    return name.startswith("logs/")


def _zipped(files: dict[str, Path], left_out: list[str]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, path in files.items():
            packed.writestr(_entry(name), path.read_bytes())
        if left_out:
            packed.writestr(_entry(_LEFT_OUT), "".join(f"{name}\n" for name in left_out))
    return stream.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _SAME_DATE)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    return info


def check_archive(archive: Path, folder: Path) -> None:
    """Check that ``archive`` is missing, or was packed from ``folder``. Raises ProfileError."""
    if not archive.exists():
        return
    try:
        with zipfile.ZipFile(archive) as packed:
            theirs = parse_ledger(packed.read(LEDGER), f"{archive}: {LEDGER}")[0]
    except (OSError, KeyError, zipfile.BadZipFile):
        raise ProfileError(
            f"{archive}: exists and is no archive of first-light, so it is not replaced: name "
            "another --archive"
        ) from None
    if theirs != parse_ledger((folder / LEDGER).read_bytes(), str(folder / LEDGER))[0]:
        raise ProfileError(
            f"{archive}: exists and is not of {folder}: go on from it with --resume and another "
            "--out, or name another --archive"
        )


def unpack(archive: Path, folder: Path) -> None:
    """Make ``folder`` from an archive: whole or not at all.

    Raises ProfileError for a file that is no archive of first-light, and a damaged one; OSError.
    """
    scratch = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(archive) as packed:
            parse_ledger(packed.read(LEDGER), f"{archive}: {LEDGER}")
            names = [PurePosixPath(name) for name in packed.namelist()]
            if any(name.is_absolute() or ".." in name.parts for name in names):
                raise ProfileError(f"{archive}: names files outside of the folder")
            if sum(info.file_size for info in packed.infolist()) > _MOST_UNPACKED:
                raise ProfileError(f"{archive}: unpacks to more than {_MOST_UNPACKED} bytes")
            folder.parent.mkdir(parents=True, exist_ok=True)
            packed.extractall(scratch)
        if folder.exists():
            folder.rmdir()  # it is empty
        scratch.rename(folder)
    except (KeyError, zipfile.BadZipFile, EOFError, NotImplementedError):
        raise ProfileError(f"{archive}: is no archive of first-light, or a damaged one") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
