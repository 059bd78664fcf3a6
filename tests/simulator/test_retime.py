"""Re-timing a schedule: nothing changed gives what was recorded; what did change adds up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.confidence.retime import causes, retimed_finish
from sarathi_sim.simulator.loop.records import Floats, Ints, Records
from sarathi_sim.simulator.views.spans import Spans
from tests.simulator.oracle import System, make_requests, systems


def retimed(records: Records, extra: object, samples: int = 1) -> list[Floats]:
    spans = [Spans(log) for log in records.replicas]
    rows = [np.arange(log.num_iterations) for log in records.replicas]
    return retimed_finish(records, spans, extra, samples, rows)  # type: ignore[arg-type]


def nothing(_: int, rows: Ints) -> tuple[Floats, ...]:
    return (np.zeros((len(rows), 1)),) * 4


def parts(records: Records, replica: int, rows: Ints | slice) -> list[Floats]:
    """The recorded times that errors are added to, shape (rows, 1) each."""
    columns = records.replicas[replica].iterations
    return [columns[name][rows, None] for name in ("layer_s", "first_s", "last_s", "send_s")]


@settings(max_examples=300, deadline=None)
@given(systems())
def test_unchanged_durations_give_the_recorded_finish_times(system: System) -> None:
    records = system.fast()
    for log, finish in zip(records.replicas, retimed(records, nothing), strict=True):
        assert np.array_equal(finish[:, 0], log.iterations["finish_s"])


@pytest.mark.parametrize("factor", [2.0, 0.5])
@settings(max_examples=100, deadline=None)
@given(systems())
def test_a_run_scales_with_its_durations(factor: float, system: System) -> None:
    """Where nothing waits for an arrival or a client, and no turn-around stands between."""
    at_once = [
        Request(r.id, 0.0, r.prompt_tokens, r.output_tokens, r.max_tokens) for r in system.requests
    ]
    alone = {"requests": at_once, "turnaround_s": 0.0, "clients": 0}
    records = System(**{**vars(system), **alone}).fast()

    def scaled(replica: int, rows: Ints) -> tuple[Floats, ...]:
        return tuple((factor - 1) * part for part in parts(records, replica, rows))

    for log, finish in zip(records.replicas, retimed(records, scaled), strict=True):
        assert finish[:, 0] == pytest.approx(factor * log.iterations["finish_s"], rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(systems(), st.integers(0, 5))
def test_no_batch_starts_before_its_members_are_there(system: System, seed: int) -> None:
    """Whatever the errors: neither before they are back from their last one, nor arrived."""
    records = System(**{**vars(system), "jitter": 0.0}).fast()
    rng = np.random.default_rng(seed)
    added = [
        [rng.uniform(-0.9, 3) * part for part in parts(records, replica, slice(None))]
        for replica in range(len(records.replicas))
    ]
    finishes = retimed(records, lambda replica, rows: tuple(p[rows] for p in added[replica]))
    for number, (log, finish) in enumerate(zip(records.replicas, finishes, strict=True)):
        layer, first, last, send = (
            (old + new)[:, 0]
            for old, new in zip(parts(records, number, slice(None)), added[number], strict=True)
        )
        own = sum(log.layers) * layer + first + last + (log.num_stages - 1) * send
        ready = finish[:, 0] - own + 1e-9
        spans = Spans(log)
        for i, request in enumerate(spans.requests):
            arrival = records.arrival_s[np.searchsorted(records.request_id, request)]
            mine = range(spans.starts[i], spans.ends[i] + 1)
            rows = [r for j in mine for r in spans.by_group[spans.first[j] : spans.last[j] + 1]]
            assert (ready[rows] >= arrival).all()
            assert (ready[rows[1:]] >= finish[rows[:-1], 0] + log.switches.turnaround_s).all()


@pytest.mark.parametrize("seed", range(4))
def test_members_that_move_are_waited_for(seed: int) -> None:
    """From a free pool, formed when stage 0 is free: members come from other micro-batches."""
    system = System(
        "orca_unconstrained", (1, 1, 1, 1), max_in_flight=5, lazy=True, free_pool=True,
        requests=make_requests(30, seed=seed, rate=100),
    )  # fmt: skip
    records = system.fast()
    spans = Spans(records.replicas[0])
    later = np.setdiff1d(np.arange(len(spans.first)), spans.starts)
    after = causes(records.replicas[0], spans, records.arrival_s).after
    before = spans.by_group[spans.last[later - 1]]
    assert (after[spans.by_group[spans.first[later]]] >= before).all()


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

    def faster(replica: int, rows: Ints) -> tuple[Floats, ...]:
        return tuple(-part / 2 for part in parts(records, replica, rows))

    finish = retimed(records, faster)[0][:, 0]
    columns = records.replicas[0].iterations
    spent = columns["finish_s"] - columns["ready_s"]
    first = np.arange(0, 6, 2)
    assert np.array_equal(columns["ready_s"][first], [0.0, 10.0, 20.0])
    assert finish[first] == pytest.approx(columns["ready_s"][first] + spent[first] / 2)
