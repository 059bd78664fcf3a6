"""The serving loop: the same scheduler and policy as in the simulator, around a real engine.

No torch: an :class:`Executor` executes the works. The scheduler handles sequences, the stages
handle slots: :class:`Book` translates, and knows the tokens. Every scheduling decision is logged
with the clock that it saw, so that the simulator's loop can replay it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Cohort, Request, Sequence
from sarathi_sim.policies.scheduler import Scheduler
from .spec import EngineError, Work

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
        Instants are those of ``time.perf_counter``."""


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


def prompt_of(request: Request, vocab_size: int, seed: int) -> list[int]:
    """The random token ids of a request's prompt, from the seed and its id."""
    rng = np.random.default_rng([seed, request.id])
    tokens: list[int] = rng.integers(vocab_size, size=request.prompt_tokens).tolist()
    return tokens


class Book:
    """Tokens and KV slot of every sequence, and the ends of sequences
    (:class:`~sarathi_sim.policies.scheduler.Endings`): a scheduler knows no output length. A
    request ends with its ``output_tokens``-th token."""

    def __init__(
        self, requests: Iterable[Request], slots: int, vocab_size: int, seed: int = 0
    ) -> None:
        self._requests = {request.id: request for request in requests}
        self._vocab_size, self._seed = vocab_size, seed
        self._num_slots = slots
        self._free = [*reversed(range(slots))]
        self._slots: dict[Sequence, int] = {}
        self._tokens: dict[int, list[int]] = {}
        self._over: set[int] = set()
        self._ended: dict[Batch, list[Sequence]] = {}

    @property
    def outputs(self) -> dict[int, list[int]]:
        """Generated tokens of each started request."""
        return {
            id: tokens[self._requests[id].prompt_tokens :] for id, tokens in self._tokens.items()
        }

    def slot_of(self, sequence: Sequence) -> int:
        """A sequence's slot; a new one gets that which was freed last. Raises EngineError if more
        sequences are admitted than there are slots."""
        if sequence not in self._slots:
            if not self._free:
                raise EngineError(f"all {self._num_slots} KV slots are taken")
            self._slots[sequence] = self._free.pop()
            request = self._requests[sequence.id]
            self._tokens[sequence.id] = prompt_of(request, self._vocab_size, self._seed)
        return self._slots[sequence]

    def work(self, index: int, batch: Batch) -> tuple[Work, list[Sequence]]:
        """The work of a batch just formed, and the sequence of each output."""
        chunks, decodes, owners = [], [], []
        rows: list[int] = []
        yields = set(batch.yields)
        for sequence, count, context in batch.chunks:
            slot, ends = self.slot_of(sequence), sequence in yields
            chunks.append((slot, count, context, int(ends)))
            rows += self._tokens[sequence.id][context : context + count]
            if ends:
                owners.append(sequence)
        for sequence in batch.decodes:
            tokens = self._tokens[sequence.id]
            # The context of padding does not grow.
            over = batch.padding and sequence.id in self._over
            context = len(tokens) - 1 if over else sequence.offset + batch.iteration
            decodes.append((self.slot_of(sequence), context))
            rows.append(tokens[context])
            owners.append(sequence)
        return Work(
            index,
            tuple(chunks),
            tuple(decodes),
            np.array(rows, np.int32),
        ), owners

    def book(self, batch: Batch, owners: list[Sequence], tokens: list[int]) -> None:
        """Append the tokens of a batch; those of ended sequences (padding) are dropped."""
        ended = self._ended[batch] = []
        for sequence, token in zip(owners, tokens, strict=True):
            if sequence.id in self._over:
                continue
            request, known = self._requests[sequence.id], self._tokens[sequence.id]
            known.append(token)
            if len(known) == request.prompt_tokens + request.output_tokens:
                self._over.add(sequence.id)
                ended.append(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that the scheduler is done with."""
        self._free.append(self._slots.pop(sequence))

    # Endings, for the scheduler -------------------------------------------------------------------

    def added(self, request: Request) -> None:
        """A request was accepted: the book knows it already."""

    def joined(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence decodes: its tokens will show its end."""

    def left(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence decodes no longer."""

    def preempted(self, sequence: Sequence) -> None:
        """Nobody is, where memory is reserved."""

    def accepted(self, sequence: Sequence, drafts: int) -> int:
        """How many of its drafts hold: this engine has no drafter."""
        return 0

    def none_end(self, batch: Batch) -> int:
        """An engine learns it from the tokens."""
        return 0

    def ended(self, batch: Batch, dropped: Collection[Sequence] = ()) -> list[Sequence]:
        """The sequences whose last token this batch yields."""
        return self._ended.pop(batch)


@dataclass
class Served:
    """A finished run: every decision, the scheduler's log, and the generated tokens."""

    began: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
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

    ``book`` is the scheduler's ``Endings``. A batch is formed when stage 0 is free (the simulator's
    ``lazy``). ``progress`` is a sign of life: it gets the number of requests done on every turn of
    the loop and while that waits for arrivals, but not while it waits for a micro-batch. Raises
    EngineError where the policy leaves requests unserved.
    """
    arrivals = deque(sorted(requests, key=lambda request: request.arrival_s))
    run = Served()
    in_flight: deque[tuple[Batch, list[Sequence], Decision]] = deque()
    done = 0
    run.began = began = time.perf_counter()

    def clock() -> float:
        """Seconds since the start, in whole quanta as simulated times are."""
        return int((time.perf_counter() - began) * _QUANTA) / _QUANTA

    def handle(result: Returned) -> int:
        """Book the result of the oldest batch; returns how many requests it finished."""
        batch, owners, decision = in_flight.popleft()
        book.book(batch, owners, result.tokens)
        run.margin = min(run.margin, result.margin)
        decision.returned_s = clock()
        finished = scheduler.complete(batch)
        for sequence in finished:
            book.forget(sequence)
        return len(finished)

    while True:
        progress(done)
        while in_flight and (result := executor.returned(0.0)):
            done += handle(result)
        now = clock()
        while arrivals and arrivals[0].arrival_s <= now:
            request = arrivals.popleft()
            if (reason := scheduler.add(request)) is not None:
                run.rejected[request.id] = reason
        batch = scheduler.next_batch()
        if batch is not None:
            decision = Decision.of(batch, now)
            work, owners = book.work(len(run.decisions), batch)
            run.decisions.append(decision)
            in_flight.append((batch, owners, decision))
            executor.submit(work)
            continue
        until = began + arrivals[0].arrival_s if arrivals else None
        if in_flight:
            if result := executor.returned(until):
                done += handle(result)
        elif until is None:
            break
        else:
            _sleep(until, partial(progress, done))
    if scheduler.num_unfinished:
        raise EngineError(f"the policy left {scheduler.num_unfinished} requests unserved")
    run.spans = scheduler.spans.tolist()
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
