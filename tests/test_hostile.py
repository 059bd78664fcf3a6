"""A sample of what ``python -m tests.hostile`` tries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.harness import Harness, inputs

#: Beside all the known ones.
SAMPLE = 12


@pytest.mark.slow
def test_hostile_inputs_end_in_a_result_or_a_message(tmp_path: Path) -> None:
    """No traceback, no hang, no exit code but 0 and 2, and nothing of the user's lost."""
    report = Harness(tmp_path, seed=0).try_all(inputs(SAMPLE), jobs=1)
    if report.bad:
        pytest.fail(
            "\n".join(f"{w.door} {w.which}: {o.word}: {o.detail}" for w, o, _ in report.bad)
        )
    assert sum(count.total() for count in report.counts.values()) >= SAMPLE
