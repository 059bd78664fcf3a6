"""Chunks in one call, computed by hand."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from sarathi_sim.simulator.op_times.iteration import IterationCost
from sarathi_sim.simulator.op_times.op_times import OpTimes, Together, WholeLayer
from sarathi_sim.simulator.op_times.regression import PiecewiseLinear

#: Calls of 1, 2 and 4 chunks: 100 tokens take 10, 12 and 20 s, 300 tokens 30, 60 and 120.
ALONE = PiecewiseLinear([100.0, 300.0], [10.0, 30.0])
CALLS = Together(
    np.array([2.0, 4.0]),
    lambda size: np.array([np.interp(size, [100, 300], [of_100, 30]) for of_100 in (6, 5)]),
)


OPS = cast(OpTimes, SimpleNamespace(together=CALLS, prefill=lambda chunk, context: ALONE(chunk)))


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([100], 10),
        ([100] * 2, 12),
        ([100] * 3, 16),  # between two and four
        ([100] * 4, 20),
        ([100] * 8, 40),  # beyond the most: as much each
        ([100, 300], 35),  # of 400 tokens: a quarter of four of the one, and nothing saved
        ([], 0),
    ],
)
def test_a_chunk_takes_its_share_of_as_many_equal_ones(chunks: list[int], expected: float) -> None:
    size = np.array(chunks, np.float64)
    assert ALONE(size).sum() - IterationCost(OPS).saved_s(size) == pytest.approx(expected)
    twice = IterationCost(OPS, WholeLayer(scale=2.0))
    assert twice.saved_s(size) == pytest.approx(2 * IterationCost(OPS).saved_s(size))


def test_a_batch_takes_no_less_than_its_longest_chunk() -> None:
    """Two of 100 tokens take less than one: noise of a table. And a call of many is no slower."""
    calls = Together(np.array([2.0]), lambda size: np.array([size / 25]))
    gain, launch = calls.saved(np.array([100.0]), np.array([10.0]))[0].T
    assert gain - launch / np.array([100, 200]) == pytest.approx([0, 5])
    assert calls.least_s(np.array([100.0]), np.array([10.0])) == pytest.approx([5])
    assert CALLS.least_s(np.array([100.0, 300.0]), np.array([10.0, 30.0])) == pytest.approx([5, 30])
