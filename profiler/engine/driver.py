"""The serving loop: the same scheduler and policy as in the simulator, around a real engine.

No torch: an :class:`Executor` executes the works. Every scheduling decision is logged with the
clock that it saw, so that the simulator can replay it
(``simulator/loop/lockstep.py``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.engine.book import Book
from sarathi_sim.profiler.engine.spec import EngineError, Work

_QUANTA = 2**30
_SIGN_OF_LIFE_S = 0.5
"""Longest sleep of the loop, in seconds, before it gives a sign of life."""


@dataclass(frozen=True)
class Returned:
    """A returned micro-batch: a token for each output, and the smallest difference between the best
    and the second-best logit."""

    index: int
    tokens: list[int]
    margin: float


class Executor(Protocol):
    """A pipeline that executes works and returns them in the same order."""

    def submit(self, work: Work) -> None:
        """Run the first stage and send the result on."""

    def returned(self, until: float | None = 0.0) -> Returned | None:
        """The next returned work; waits for it until that instant (None: as long as needed).

        Instants are those of ``time.perf_counter``.
        """


@dataclass
class Decision:
    """One micro-batch: the decision and its time. Times are seconds since the run began.

    ``chunks``    ``[request, tokens, context]``
    ``decodes``   requests that decode, with finished ones held as padding
    ``clock_s``   the clock at the decision; ``returned_s`` the clock when its result was handled
    """

    group: int
    clock_s: float
    chunks: list[list[int]]
    decodes: list[int]
    decode_context: int
    longest_context: int
    padding: int
    returned_s: float = -1.0

    @staticmethod
    def of(batch: Batch, clock_s: float) -> Decision:
        """The record of a batch that was just formed."""
        return Decision(
            batch.slot,
            clock_s,
            [[sequence.id, tokens, context] for sequence, tokens, context in batch.chunks],
            [sequence.id for sequence in batch.decodes],
            batch.decode_context,
            batch.longest_context,
            batch.padding,
        )


@dataclass
class Served:
    """A finished run: every decision, the scheduler's logs, and the generated tokens.

    ``events`` and ``kv_log`` are a pool's: tokens hit and lost, blocks in use at each decision.
    """

    began: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    kv_log: list[int] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    margin: float = float("inf")


def serve(
    requests: list[Request],
    scheduler: Scheduler,
    executor: Executor,
    book: Book,
    *,
    progress: Callable[[int], object] = lambda done: None,
) -> Served:
    """Serve the requests as they arrive; returns when all are done.

    ``scheduler`` is the book's. A batch is formed when stage 0 is free (the simulator's ``lazy``).
    ``progress`` is a sign of life: it gets the number of requests done on every turn of the loop
    and while that waits for arrivals, but not while it waits for a micro-batch. Raises EngineError
    where the policy leaves requests unserved.
    """
    arrivals = deque(sorted(requests, key=lambda request: request.arrival_s))
    run = Served()
    in_flight: deque[tuple[Batch, list[Sequence], Decision]] = deque()
    back: deque[tuple[Batch, Decision]] = deque()  # returned, but not booked by the scheduler yet
    done = 0
    run.began = began = time.perf_counter()

    def clock() -> float:
        """Seconds since the start, in whole quanta as simulated times are."""
        return int((time.perf_counter() - began) * _QUANTA) / _QUANTA

    def receive(until: float | None) -> bool:
        """Take the next result, if one arrives until then."""
        result = executor.returned(until) if in_flight else None
        if result is None:
            return False
        batch, owners, decision = in_flight.popleft()
        book.book(batch, owners, result.tokens)
        run.margin = min(run.margin, result.margin)
        back.append((batch, decision))
        return True

    def handle(batch: Batch, decision: Decision) -> int:
        decision.returned_s = clock()
        finished = scheduler.complete(batch)
        for sequence in finished:
            book.forget(sequence)
        return len(finished)

    while True:
        progress(done)
        while receive(0.0):
            pass
        while back:
            done += handle(*back.popleft())
        now = clock()
        while arrivals and arrivals[0].arrival_s <= now:
            request = arrivals.popleft()
            if (reason := scheduler.add(request)) is not None:
                run.rejected[request.id] = reason
        batch = scheduler.next_batch()
        if batch is not None:
            decision = Decision.of(batch, now)
            while book.waits(batch) and receive(None):
                pass  # it was formed before the tokens that it continues from were known
            work, owners = book.work(len(run.decisions), batch)
            run.decisions.append(decision)
            in_flight.append((batch, owners, decision))
            executor.submit(work)
            continue
        until = began + arrivals[0].arrival_s if arrivals else None
        if in_flight:
            receive(until)
        elif until is None:
            break
        else:
            _sleep(until, partial(progress, done))
    if scheduler.num_unfinished:
        raise EngineError(f"the policy left {scheduler.num_unfinished} requests unserved")
    run.spans = scheduler.spans.tolist()
    run.events, run.kv_log = scheduler.events.tolist(), scheduler.kv_log.tolist()
    run.outputs = book.outputs
    return run


def _sleep(until: float, sign_of_life: Callable[[], object]) -> None:
    while (left := until - time.perf_counter()) > 0:
        time.sleep(min(left, _SIGN_OF_LIFE_S))
        sign_of_life()


def signature(decision: Decision) -> tuple[Any, ...]:
    """The identity of a micro-batch: everything but its times."""
    return (
        decision.group,
        tuple(map(tuple, decision.chunks)),
        tuple(decision.decodes),
        decision.decode_context,
        decision.padding,
    )
