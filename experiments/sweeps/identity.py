"""The key of a run: a hash of all that its result depends on."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.profiler.storage.files import PACKAGE, files_sha256, user_path

# The code that a run's files depend on. The profiler's parts are those that read profiles.
_CODE = (
    *("policies/*.py", "simulator/*/*.py"),
    *(f"profiler/{room}/*.py" for room in ("storage", "facts", "bundle", "physics", "kernels")),
    *("experiments/config/*.py", "experiments/results.py"),
    "experiments/sweeps/jobs.py",
)
_LIBRARIES = ("numpy", "scipy", "scikit-learn", "pandas", "pyarrow")


@lru_cache(maxsize=2)
def code_fingerprint(*also: str) -> str:
    """Hash of the code that a result depends on, and of the versions of the numeric libraries.

    The libraries count because random streams, fits and file formats may change with them.
    ``also`` are further files.
    """
    files = (path for pattern in (*_CODE, *also) for path in sorted(PACKAGE.glob(pattern)))
    return files_sha256(files, *(f"{library} {version(library)}\n" for library in _LIBRARIES))


def run_key(deployment: Deployment, name: str) -> str:
    """16 hexadecimal digits: the resolved scenario and its ``name``, the content of what it names
    (model, device, profile bundle, trace, a policy's file), and the code.

    The paths of these files do not matter.
    """
    scenario = deployment.scenario.model_dump()
    # What bundles are made from is left out of the device: no simulation reads it.
    device = asdict(replace(deployment.device, fitted=None))
    scenario |= {"model": asdict(deployment.model), "device": device}
    scenario["profiles"] = deployment.bundle_sha256
    scenario["policy"].pop("file", None)  # its sha256 stays
    lengths = scenario["workload"]["lengths"]
    if lengths["kind"] == "trace":
        path = user_path(lengths["path"])
        lengths["path"] = _file_sha256(path, path.stat().st_mtime_ns)
    content = json.dumps([name, scenario, code_fingerprint()], sort_keys=True)
    return sha256(content.encode()).hexdigest()[:16]


@lru_cache(maxsize=8)
def _file_sha256(path: Path, changed: int) -> str:
    return sha256(path.read_bytes()).hexdigest()
