"""The paths of the shipped data, and of the public measurements on this machine."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from sarathi_sim.profiler.storage.strict import SpecError

DATASETS_VARIABLE = "SARATHI_SIM_DATASETS"


PACKAGE = Path(__file__).absolute().parents[2]
"""The folder ``sarathi_sim``. In a checkout its packages are links; a wheel has the files
themselves."""


@lru_cache(maxsize=1)
def data_dir() -> Path:
    """The folder that holds ``models/``, ``devices/`` and ``profiles/``.

    Raises FileNotFoundError where it is not there.
    """
    folder = (PACKAGE / "data").resolve()
    if not (folder / "models").is_dir():
        raise FileNotFoundError(f"shipped data not found: {folder} has no models/ folder")
    return folder


WHERE = "data/README.md says where the measurements come from"
"""For messages about public measurements that are not there."""


def user_path(text: str | Path) -> Path:
    """The path ``text`` with a leading ``~`` or ``~user`` replaced by the home folder.

    Raises SpecError where there is no such user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        home = Path(text).parts[0]
        problem = f"there is no home folder {home}; a folder of this name is ./{home}"
        raise SpecError(f"{text}: {problem}") from None


def public_datasets(flag: Path | None = None) -> Path:
    """The folder of public measurements: ``flag``, else the environment's SARATHI_SIM_DATASETS.

    Raises FileNotFoundError where neither is given, or where the folder is not there.
    """
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
