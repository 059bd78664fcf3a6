"""What came out of a row's simulation, kept for the next call: a small file a row and host.

A key covers all that the numbers follow from: the row's scenario with the host's constants, the
code, and the shipped models, devices, kernels and profiles. So whatever of these changes, the row
is simulated anew; nothing is deployed to find that out.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from sarathi_sim.experiments.score.server_bands import OpShares
from sarathi_sim.experiments.sweeps.plan import code_fingerprint
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.strict import STRICT

_CODE = tuple(f"experiments/score/{name}.py" for name in ("row_cache", "server_bands", "simulated"))
_DATA = ("models", "devices", "kernels", "profiles")


@dataclass(frozen=True)
class RowOutcome:
    """Of a row simulated with one host: ``numbers`` by name, and the shares of the ops in them.
    Where the row has none, ``refused`` says why."""

    __pydantic_config__: ClassVar[Any] = STRICT

    numbers: dict[str, float] = field(default_factory=dict)
    shares: OpShares | None = None
    refused: str = ""


_OUTCOME = TypeAdapter(RowOutcome)


@lru_cache(maxsize=1)
def data_fingerprint(root: Path) -> str:
    """Hash of all files that deployments may read."""
    digest = sha256()
    for path in sorted(path for room in _DATA for path in (root / room).rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def outcome_key(scenario: Mapping[str, Any]) -> str:
    """32 hexadecimal digits: what a row's outcome depends on."""
    known = [scenario, code_fingerprint(*_CODE), data_fingerprint(data_dir())]
    return sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


class RowCache:
    """Outcomes by key below ``folder``; None keeps nothing.

    A damaged file counts as none, and a folder that cannot be written costs time, nothing else.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, key: str) -> RowOutcome | None:
        """The outcome of that key, if it is kept as it was written."""
        if self.folder is None:
            return None
        try:
            digest, _, content = self._file(key).read_bytes().partition(b"\n")
            if digest != _digest(key, content):
                return None
            return _OUTCOME.validate_json(content)
        except (OSError, ValidationError):
            return None

    def write(self, key: str, outcome: RowOutcome) -> None:
        """Keep an outcome: a reader sees all of it or none."""
        if self.folder is None:
            return
        content = json.dumps(asdict(outcome)).encode()
        with contextlib.suppress(OSError):
            self._file(key).parent.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(prefix=".", dir=self._file(key).parent)
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(key, content) + b"\n" + content)
            Path(scratch).replace(self._file(key))

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / key[2:]


def _digest(key: str, content: bytes) -> bytes:
    return sha256(key.encode() + content).hexdigest().encode()
