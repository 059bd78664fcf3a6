"""One thread a library, where the user has not chosen otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sarathi_sim.profiler.storage.threads import default_to_one_thread
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
IMPORTS = "import json, numpy, scipy.linalg, sklearn.utils._openmp_helpers, threadpoolctl\n"
COUNT = "print(json.dumps([i['num_threads'] for i in threadpoolctl.threadpool_info()]))\n"
BEFORE = (
    "from sarathi_sim.profiler.storage.threads import default_to_one_thread\n"
    "default_to_one_thread()\n"
)
FIT = (
    "from sklearn.ensemble import HistGradientBoostingRegressor as Model\n"
    "from sarathi_sim.profiler.physics.residual import fit_trees\n"
    "fit = Model.fit\n"
    f"def counted(*all):\n    {COUNT}    return fit(*all)\n"
    "Model.fit = counted\n"
    "x = numpy.arange(40.0)\n"
    "fit_trees(x[:, None], x, 1, 2)\n"
)


def threads(code: str, **chosen: str) -> list[list[int]]:
    """What a fresh process prints: the threads of each library, a line per call."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | chosen,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_before_and_after_numpy_is_imported() -> None:
    (before,) = threads(BEFORE + IMPORTS + COUNT)
    (after,) = threads(IMPORTS + BEFORE + COUNT)
    assert set(before) == set(after) == {1}
    assert len(before) >= 2, "numpy and scikit-learn bring one each"


@pytest.mark.slow
def test_the_users_choice_counts() -> None:
    (all_of_them,) = threads(BEFORE + IMPORTS + COUNT, OMP_NUM_THREADS="2")
    assert set(all_of_them) == {2}
    (found,) = threads(IMPORTS + BEFORE + COUNT, OPENBLAS_NUM_THREADS="2")
    assert sorted(set(found)) == [1, 2]


def test_a_fit_in_somebody_elses_process_takes_one_and_gives_the_others_back() -> None:
    own, within, after = threads(IMPORTS + COUNT + FIT + COUNT)
    assert set(within) == {1}
    assert after == own


def test_processes_that_are_started_get_it_too() -> None:
    environment = {"PATH": "/bin"}
    default_to_one_thread(environment)
    assert environment == {"PATH": "/bin", **dict.fromkeys(VARIABLES, "1")}
    chosen = {"OMP_NUM_THREADS": "3"}
    default_to_one_thread(chosen)
    assert chosen == {"OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize("chosen", [{}, {"OMP_NUM_THREADS": "2"}])
def test_the_command_line(chosen: dict[str, str]) -> None:
    code = (
        "import sys, sarathi_sim.experiments.cli.app as cli\n"
        "assert 'numpy' not in sys.modules\n"
        "cli.app = lambda: None\n"
        "cli.main()\n"
    )
    (found,) = threads(code + IMPORTS + COUNT, **chosen)
    assert set(found) == {int(chosen.get("OMP_NUM_THREADS", "1"))}
