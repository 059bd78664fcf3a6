"""Re-timing a schedule: nothing changed gives what was recorded; what did change adds up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from policies.request import Request
from simulator.records import Floats, Ints, Records
from simulator.retime import retimed_finish
from simulator.rides import Rides
from tests.simulator.oracle import System, make_requests, systems


def retimed(records: Records, extra: object, samples: int = 1) -> list[Floats]:
    rides = [Rides(log) for log in records.replicas]
    rows = [np.arange(log.num_iterations) for log in records.replicas]
    return retimed_finish(records, rides, extra, samples, rows)  # type: ignore[arg-type]


def nothing(_: int, rows: Ints) -> tuple[Floats, ...]:
    return (np.zeros((len(rows), 1)),) * 4


@settings(max_examples=300, deadline=None)
@given(systems())
def test_unchanged_durations_give_the_recorded_finish_times(system: System) -> None:
    records = system.fast()
    for log, finish in zip(records.replicas, retimed(records, nothing), strict=True):
        assert np.array_equal(finish[:, 0], log.iterations["finish_s"])


@settings(max_examples=100, deadline=None)
@given(systems())
def test_everything_twice_as_slow_takes_twice_as_long(system: System) -> None:
    """Where nothing waits for an arrival, and no turn-around or jitter stands between."""
    at_once = [
        Request(r.id, 0.0, r.prompt_tokens, r.output_tokens, r.max_tokens) for r in system.requests
    ]
    records = System(**{**vars(system), "requests": at_once, "turnaround_s": 0.0}).fast()
    if records.rejections:
        return

    def doubled(replica: int, rows: Ints) -> tuple[Floats, ...]:
        columns = records.replicas[replica].iterations
        names = ("layer_s", "first_s", "last_s", "send_s")
        return tuple(columns[name][rows, None] for name in names)

    for log, finish in zip(records.replicas, retimed(records, doubled), strict=True):
        assert np.array_equal(finish[:, 0], 2 * log.iterations["finish_s"])


@pytest.mark.parametrize("stages", [1, 3])
def test_a_long_run_over_several_chunks(stages: int) -> None:
    system = System(layers=(2,) * stages, max_in_flight=3, replicas=2, turnaround_s=1e-3)
    records = System(**{**vars(system), "requests": make_requests(200, rate=40)}).fast()
    assert min(log.num_iterations for log in records.replicas) > 1000
    for log, finish in zip(records.replicas, retimed(records, nothing), strict=True):
        assert np.array_equal(finish[:, 0], log.iterations["finish_s"])


def test_one_request_by_hand() -> None:
    """Two stages of three layers; what is added passes through the formula of one batch."""
    request = Request(0, 0.5, 10, 3, 3)
    records = System(max_in_flight=2, turnaround_s=0.25, requests=[request]).fast()
    columns = records.replicas[0].iterations

    def extra(_: int, rows: Ints) -> tuple[Floats, ...]:
        size = np.array([[0.0, 1.0]])
        return tuple(f * np.repeat(size, len(rows), axis=0) for f in (0.01, 0.1, 0.2, 0.4))

    recorded, slower = retimed(records, extra, 2)[0].T
    assert np.array_equal(recorded, columns["finish_s"])
    added = 3 * 0.01 * 2 + 0.1 + 0.2 + 0.4
    assert slower - recorded == pytest.approx(added * np.array([1, 2, 3]))


def test_an_arrival_is_not_moved() -> None:
    """With faster ops a batch that waited for its request still waits for it."""
    requests = [Request(i, 10.0 * i, 10, 2, 2) for i in range(3)]
    records = System(max_in_flight=1, requests=requests).fast()

    def faster(_: int, rows: Ints) -> tuple[Floats, ...]:
        columns = records.replicas[0].iterations
        names = ("layer_s", "first_s", "last_s", "send_s")
        return tuple(-columns[name][rows, None] / 2 for name in names)

    finish = retimed(records, faster)[0][:, 0]
    ready = columns_ready = records.replicas[0].iterations["ready_s"]
    expected = 10.0 * np.arange(3).repeat(2)
    spent = records.replicas[0].iterations["finish_s"] - columns_ready
    first = np.arange(0, 6, 2)
    assert np.allclose(finish[first], expected[first] + spent[first] / 2)
    assert np.allclose(ready[first], expected[first])
