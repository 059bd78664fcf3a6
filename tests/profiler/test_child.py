"""Calls on several processes: their order, their errors, their end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sarathi_sim.profiler.storage.child import mapped
from sarathi_sim.profiler.storage.strict import UserError
from tests.patience import PATIENCE_S
from tests.processes import children, gone

ROOT = Path(__file__).resolve().parents[2]


def test_values_come_in_the_order_of_the_items() -> None:
    seen: list[int] = []
    assert mapped(math.isqrt, [9, 4, 100], 2, seen.append) == [3, 2, 10]
    assert seen == [1, 2, 3]


def test_an_error_comes_as_it_is_and_a_killed_process_is_told() -> None:
    with pytest.raises(ValueError, match="nonnegative"):
        mapped(math.isqrt, [9, -1], 2)
    with pytest.raises(UserError, match="a worker process was killed"):
        mapped(os._exit, [9], 1)


def test_a_signal_ends_all_at_once() -> None:
    code = (
        "import time\n"
        "from sarathi_sim.experiments.cli.common import end_on_signals\n"
        "from sarathi_sim.profiler.storage.child import mapped\n"
        "end_on_signals()\n"
        "mapped(time.sleep, [1000] * 4, 2)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE_S
    while len(workers := children(parent.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    parent.send_signal(signal.SIGTERM)
    _, errors = parent.communicate(timeout=30)
    assert b"KeyboardInterrupt" in errors
    assert len(workers) == 2 and gone(workers, seconds=PATIENCE_S)
