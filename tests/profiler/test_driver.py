"""The serving loop says that it is alive, and of two ranks that fail the right one is blamed."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from types import SimpleNamespace

import pytest

from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.engine import driver
from sarathi_sim.profiler.engine.driver import Book, Returned, Served, serve
from sarathi_sim.profiler.engine.spec import Work
from sarathi_sim.profiler.planning.grid import ProfileError
from sarathi_sim.profiler.shard.rank_processes import LOST_A_PEER, RankProcesses
from tests.clock import only_sleep_takes_time


class SlowLastStage:
    """Two stages of which the second is always the later one: nothing is ever back unawaited."""

    def __init__(self) -> None:
        self._works: deque[Work] = deque()

    def submit(self, work: Work) -> None:
        self._works.append(work)

    def returned(self, until: float | None = 0.0) -> Returned | None:
        if until == 0.0 or not self._works:
            return None
        work = self._works.popleft()
        tokens = sum(yields for *_, yields in work.chunks) + len(work.decodes)
        return Returned(work.index, [0] * tokens, 1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = only_sleep_takes_time()
    monkeypatch.setattr(driver, "time", fake)
    return fake


def served(requests: list[Request], signs: list[float], clock: SimpleNamespace) -> Served:
    book = Book(requests, 4, vocab_size=96)
    settings = {"max_batch": 2, "max_in_flight": 2, "kv_capacity": 400, "max_length": 100}
    scheduler = MicroBatches(Orca(max_prefills=1), endings=book, **settings)
    return serve(
        requests, scheduler, SlowLastStage(), book, progress=lambda done: signs.append(clock.now)
    )


def test_a_busy_pipeline_shows_life(clock: SimpleNamespace) -> None:
    """Also where no micro-batch is ever back before it is awaited, as behind a slow last stage."""
    signs: list[float] = []
    run = served([Request(i, 0.0, 8, 30, 92) for i in range(4)], signs, clock)
    assert len(run.decisions) > 50
    assert len(signs) >= len(run.decisions)


def test_an_idle_engine_shows_life(clock: SimpleNamespace) -> None:
    signs: list[float] = []
    run = served([Request(i, 100.0 * i, 8, 1, 92) for i in range(3)], signs, clock)
    assert [decision.clock_s for decision in run.decisions] == [0.0, 100.0, 200.0]
    assert max(b - a for a, b in pairwise(signs)) <= 1.0


@pytest.mark.parametrize(
    ("codes", "blamed"),
    [
        ((LOST_A_PEER, 1), "rank 1 of 2 ended with code 1"),
        ((2, LOST_A_PEER), "rank 0 of 2 ended with code 2"),
        ((1, -9), "rank 1 of 2 was ended by SIGKILL"),
        ((None, LOST_A_PEER), "rank 1 of 2 ended with code 4"),
    ],
)
def test_who_lost_a_peer_is_blamed_last(codes: tuple[int | None, ...], blamed: str) -> None:
    processes = RankProcesses("sarathi_sim.profiler.engine.rank", lambda folder: [], 2, "gloo")
    for code in codes:
        processes.processes.append(SimpleNamespace(poll=lambda code=code: code))  # type: ignore[arg-type]
    processes._complaint = lambda first=0: ""  # type: ignore[method-assign]
    with pytest.raises(ProfileError, match=blamed):
        processes.check()
