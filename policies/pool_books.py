"""The bookkeeping of a pool: its waiting, running and decoding sequences, and its log.

Drivers and policies use :class:`~policies.pool.Pool`, which inherits this.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from policies.batch import Batch, Chunk
from policies.cohort import Cohort
from policies.decodes import Decodes
from policies.request import Sequence
from policies.scheduler import PREFILL, PolicyError, span

RECOMPUTE, PART = 3, 4
"""What a request does in a span, beside those of the scheduler: it processes again what it lost, up
to its next token; or chunks that end with no token, as it went on in another slot or was preempted.
"""

HIT, HIT_AGAIN, LOST = 0, 1, 2
"""Tokens found in the prefix cache at a first admission and at a later one, or lost by
preemption."""


@dataclass(slots=True, eq=False)
class Books(Decodes):
    """The state of the requests of one replica with paged memory, and its changes."""

    running: dict[Sequence, None] = field(init=False, default_factory=dict)
    partials: dict[Sequence, None] = field(init=False, default_factory=dict)
    state: dict[str, Any] = field(init=False, default_factory=dict)
    emptied: int = field(init=False, default=0)
    # Three numbers each: request, what happened (HIT, HIT_AGAIN, LOST), tokens.
    events: array[int] = field(init=False, default_factory=lambda: array("q"))
    # Blocks in use, after each iteration was formed.
    kv_log: array[int] = field(init=False, default_factory=lambda: array("i"))
    _orders: int = field(init=False, default=0)
    _in_flight: int = field(init=False, default=0)
    idle: bool = field(init=False, default=True)
    _empty: int = field(init=False, default=0)  # those of them in which nobody takes part
    _unfinished: int = field(init=False, default=0)
    _finished: int = field(init=False, default=0)
    # Preemptions since progress was looked at, and what it was then: finished, and tokens.
    _preempted: int = field(init=False, default=0)
    _progress: tuple[int, int] = field(init=False, default=(-1, -1))
    # Preempted while decoding in iterations that are out, by slot and iteration.
    _stale: dict[tuple[int, int], list[Sequence]] = field(init=False, default_factory=dict)
    # What the policy said last, if nothing has happened since: nobody could be admitted.
    _settled: bool = field(init=False, default=False)
    # The iteration that is being put together.
    _ready: Cohort = field(init=False, default_factory=lambda: Cohort(0, 1))
    num_decodes: int = field(init=False, default=0)
    decode_blocks: int = field(init=False, default=0)
    _chunks: dict[Sequence, int] = field(init=False, default_factory=dict)
    _decodes: dict[Sequence, None] | None = field(init=False, default_factory=dict)
    max_batch: int = field(init=False)
    kv_capacity: int = field(init=False)
    waiting: deque[Sequence] | list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        Decodes.__post_init__(self)
        self.max_batch = self.policy.max_num_seqs
        self.kv_capacity = self.blocks.capacity * self.blocks.block_size
        self.waiting = deque() if self.policy.order is None else []

    def _queue(self, sequence: Sequence, *, last: bool) -> None:
        """Let a sequence wait: behind all others, before them, or in the order of its key."""
        if isinstance(self.waiting, list):
            assert self.policy.order is not None
            insort(self.waiting, sequence, key=self.policy.order)
        elif last:
            self.waiting.append(sequence)
        else:
            self.waiting.appendleft(sequence)

    def _take_back(self, sequence: Sequence) -> int:
        """Undo :meth:`_decode_one` where it was done; returns the tokens."""
        if self._decodes is None:
            raise PolicyError(f"{sequence} is preempted although its decode was scheduled")
        if sequence in self._decodes:
            del self._decodes[sequence]
            return 1
        return 0

    def _formed(
        self,
        home: Cohort,
        chunks: tuple[Chunk, ...] = (),
        prefill_tokens: int = 0,
        yields: tuple[Sequence, ...] = (),
    ) -> Batch:
        """A cohort's next iteration, in which all its members decode."""
        iteration, decodes, context = home.iteration, len(home.members), home.context
        longest = home.offsets[-1] + iteration if decodes else 0
        if not (decodes or chunks):
            self._empty += 1
        home.iteration = iteration + 1
        home.outstanding += 1
        home.context = context + decodes
        self._in_flight += 1
        self.idle = self._in_flight < self.max_in_flight
        self.kv_log.append(self.blocks.capacity - self.blocks.free)
        members: Callable[[], Iterable[Sequence]] = home.keys
        if self.policy.ahead:
            self._num_formed += 1
            self._formed_as[home.index, iteration] = self._num_formed
            home.opens = self.step + self.stages
            for sequence in yields:
                self._join(sequence, home, sequence.target)
            members = partial(home.members_at, iteration)
        return Batch(
            home.index, chunks, prefill_tokens, decodes, context, longest, 0, (), members, yields,
            iteration,
        )  # fmt: skip

    def _close_chunks(self, home: Cohort) -> Batch:
        """A cohort's next iteration, with the chunks that the policy chose."""
        chunks: list[Chunk] = []
        yields: list[Sequence] = []
        prefill_tokens, slot, iteration = 0, home.index, home.iteration
        for sequence, tokens in self._chunks.items():
            done = sequence.prefilled
            chunks.append((sequence, tokens, done))
            prefill_tokens += tokens
            if sequence._group != slot or sequence._next_iteration != iteration:
                if sequence._group >= 0:
                    self._log_part(sequence)
                sequence._group, sequence._span_first = slot, iteration
            sequence._next_iteration = iteration + 1
            sequence.prefilled = done + tokens
            sequence.awaited += tokens
            if done + tokens == sequence.target:
                del self.partials[sequence]
                sequence.yielding = True
                yields.append(sequence)
                role = RECOMPUTE if sequence.target > sequence.prompt_tokens else PREFILL
                first, sequence._group = sequence._span_first, -1
                self.spans.frombytes(span(sequence.id, role, slot, first, iteration))
        return self._formed(home, tuple(chunks), prefill_tokens, tuple(yields))

    def _split(self) -> Cohort:
        """Keep decoding sequences together: the ones left out move to another slot, or the others
        do."""
        ready, chosen = self._ready, self._decodes
        assert chosen is not None
        if len(chosen) == len(ready.members):
            return ready
        if not chosen:
            return self._free_cohort(ready)
        rest = self._free_cohort(ready)
        rest.opens = self.step
        for sequence in list(ready):
            if sequence not in chosen:
                self._move(sequence, rest)
        return ready

    def _log_part(self, sequence: Sequence) -> None:
        """Log a span of chunks that ended with no token."""
        first, last = sequence._span_first, sequence._next_iteration - 1
        self.spans.frombytes(span(sequence.id, PART, sequence._group, first, last))
        sequence._group = -1

    def _finish(self, sequence: Sequence, cohort: Cohort, iteration: int) -> None:
        """A sequence has its last token."""
        self._unfinished -= 1
        self._finished += 1
        self.emptied += not self._unfinished
        if sequence not in self.running:  # preempted, with this token on its way
            self.waiting.remove(sequence)
            return
        del self.running[sequence]
        # Iterations that were formed after the one that ended it were in vain.
        here = sequence.cohort is cohort
        known = sequence.offset + iteration + 1 if here else self._returned(sequence)
        context = self._leave(sequence, iteration if here else -1)
        self.blocks.release(sequence, context, known, again=False)
