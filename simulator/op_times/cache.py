"""Arrays that take long to compute, cached on disk under a hash of their inputs.

The folder is ``$SARATHI_SIM_CACHE``, else ``$XDG_CACHE_HOME/sarathi-sim``, else
``~/.cache/sarathi-sim``; ``SARATHI_SIM_CACHE=off`` switches it off. It may be deleted at any time.
Each file carries a hash of its content. If the hash does not fit, or a file cannot be read, the
array is computed again and a message is logged. A folder that cannot be written is not an error.
The home of an unknown user (``~nosuch``) is an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np

from sarathi_sim.profiler.storage.files import user_path
from sarathi_sim.profiler.storage.strict import SpecError
from ..loop.records import Floats

VARIABLE = "SARATHI_SIM_CACHE"
_FORMAT = 2
"""Format version, part of the files' names: raise it with every change of their content."""
_LOG = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """The cache folder; None if the cache is switched off."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() == "off":
        return None
    if chosen:
        try:
            return user_path(chosen)
        except SpecError as error:
            raise SpecError(f"{VARIABLE}: {error}") from None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "sarathi-sim"
    except RuntimeError:  # no home
        return None


def kept(identity: str, what: str, make: Callable[[], Floats], sizes: bytes = b"") -> Floats:
    """The array that ``make`` computes, or its copy from the disk. ``identity``, ``what`` and
    ``sizes`` must cover everything that the array depends on; without an ``identity`` it is
    computed each time."""
    if not identity:
        return make()
    return cached(sha256(f"{identity} {what} ".encode() + sizes).hexdigest(), make)


def cached(key: str, make: Callable[[], Floats]) -> Floats:
    """As :func:`kept`, under a ``key`` that covers everything the array depends on."""
    folder = cache_folder()
    if folder is None:
        return make()
    path = folder / f"{key}.{_FORMAT}.npz"
    found = _read(path, key)
    if found is None:
        found = make()
        with contextlib.suppress(OSError):  # a full or read-only disk costs time, nothing else
            _write(path, found, key)
    return found


def _read(path: Path, key: str) -> Floats | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            array: Floats = stored["array"]
            digest = str(stored["sha256"])
        if array.dtype == np.float64 and digest == _digest(key, array):
            return array
        why = "its content was changed"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a damaged archive fails in a dozen ways
        why = " ".join(str(error).split()) or type(error).__name__
    _LOG.warning("%s is damaged (%s): computed anew", path, why)
    return None


def _digest(key: str, array: Floats) -> str:
    """Hash of content, shape and key, so that a file with another key's content is detected."""
    return sha256(f"{key} {array.shape} ".encode() + array.tobytes()).hexdigest()


def _write(path: Path, array: Floats, key: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=".", suffix=".npz", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, array=array, sha256=np.array(_digest(key, array)))
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
