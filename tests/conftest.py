"""Settings of all tests."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from sarathi_sim.profiler.storage.child import default_to_one_thread

# Before numpy is imported, and for the processes that tests start.
default_to_one_thread()

# An example's time depends on the machine and on what else it does: it says nothing.
settings.register_profile("sarathi-sim", deadline=None)
settings.load_profile("sarathi-sim")

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# xdist sets it for its workers, and tables would be cut to it.
os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the cache of whoever runs them. xdist's workers share theirs."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SARATHI_SIM_CACHE", str(folder / "cache"))
        yield
