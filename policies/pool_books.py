"""The bookkeeping of a pool: its waiting, running and decoding sequences, and its log.

Drivers and policies use :class:`~policies.pool.Pool`, which inherits this.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from typing import Any, Protocol

from policies.batch import Batch, Chunk
from policies.cohort import Cohort
from policies.kv import Blocks
from policies.policy import PoolPolicy
from policies.request import Sequence
from policies.scheduler import DECODE, PREFILL, PolicyError

RECOMPUTE, PART = 3, 4
"""What a request does in a span, beside those of the scheduler: it processes again what it lost, up
to its next token; or chunks that end with no token, as it went on in another slot or was preempted.
"""

NO_CHUNKS: tuple[tuple[Chunk, ...], int, tuple[Sequence, ...]] = ((), 0, ())
HIT, HIT_AGAIN, LOST = 0, 1, 2
"""Tokens found in the prefix cache at a first admission and at a later one, or lost by
preemption."""


class Endings(Protocol):
    """The ends of sequences, from the driver: only it knows the output lengths or sees the
    tokens."""

    def joined(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence decodes from the cohort's next iteration on."""

    def left(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence stops decoding, from the next iteration to be formed on."""

    def ended(self, batch: Batch) -> list[Sequence]:
        """The sequences whose last token came with this batch."""


class Books:
    """The state of the requests of one replica with paged memory, and its changes."""

    def __init__(
        self,
        policy: PoolPolicy,
        blocks: Blocks,
        *,
        max_in_flight: int = 1,
        max_length: int,
        stages: int = 1,
        endings: Endings,
    ) -> None:
        self.policy = policy
        self.stages = stages
        self.blocks = blocks
        self.max_in_flight = max_in_flight
        self.max_length = max_length
        self.max_batch = policy.max_num_seqs
        self.kv_capacity = blocks.capacity * blocks.block_size
        self.endings = endings
        self.waiting: deque[Sequence] | list[Sequence] = deque()
        if policy.order is not None:
            self.waiting = []
        self.running: dict[Sequence, None] = {}
        self.partials: dict[Sequence, None] = {}
        self.step = 0
        self.state: dict[str, Any] = {}
        self.emptied = 0
        self.cohorts: list[Cohort] = []
        self.spans: array[int] = array("q")
        # Three numbers each: request, what happened (HIT, HIT_AGAIN, LOST), tokens.
        self.events: array[int] = array("q")
        self.kv_log: array[int] = array("q")  # blocks in use, after each iteration was formed
        self._orders = 0
        self._in_flight = 0
        self._busy = 0  # those of them that are not empty
        self._unfinished = 0
        self._home: dict[Sequence, Cohort] = {}  # of everyone whose prompt is processed
        # Of those, the ones all of whose tokens are scheduled (they run until the last one is
        # back): the first iteration they decoded in, and the one they would have been next in.
        self._draining: dict[Sequence, tuple[int, int]] = {}
        # Iterations in which a sequence decoded before it moved to another slot, while in flight.
        self._abroad: dict[Sequence, list[tuple[int, int]]] = {}
        # Preempted while decoding in iterations that are out, by slot and iteration.
        self._stale: dict[tuple[int, int], list[Sequence]] = {}
        # The iteration that is being put together.
        self._ready = Cohort(0, 1)
        self.num_decodes = self.decode_blocks = 0
        self._chunks: dict[Sequence, int] = {}
        self._decodes: dict[Sequence, None] | None = {}

    def _queue(self, sequence: Sequence, *, last: bool) -> None:
        """Let a sequence wait: behind all others, before them, or in the order of its key."""
        if isinstance(self.waiting, list):
            assert self.policy.order is not None
            insort(self.waiting, sequence, key=self.policy.order)
        elif last:
            self.waiting.append(sequence)
        else:
            self.waiting.appendleft(sequence)

    def _free_cohort(self, taken: Cohort | None = None) -> Cohort:
        """A slot with no members and nothing in flight."""
        for cohort in self.cohorts:
            if not cohort.members and not cohort.outstanding and cohort is not taken:
                return cohort
        self.cohorts.append(Cohort(len(self.cohorts), self.blocks.block_size))
        return self.cohorts[-1]

    def _gather(self) -> Cohort:
        """Merge all sequences that could decode now into the largest cohort; returns it."""
        ahead, step = self.policy.ahead, self.step
        ready = [
            cohort
            for cohort in self.cohorts
            if cohort.members and (cohort.opens <= step if ahead else not cohort.outstanding)
        ]
        if not ready:
            return self._free_cohort()
        largest = max(ready, key=len) if len(ready) > 1 else ready[0]
        for cohort in ready:
            if cohort is not largest:
                for sequence in list(cohort):
                    self._move(sequence, largest)
        if not largest.stops:
            return largest
        for sequence in largest.stops.pop(largest.iteration, ()):
            # (It may have been preempted, and have come again with a later stop, meanwhile.)
            first = largest.members.get(sequence)
            if first is not None and self._stop(sequence) <= largest.iteration:
                self._draining[sequence] = (first, largest.iteration)
                largest.leave(sequence)
        return largest

    def _join(self, sequence: Sequence, cohort: Cohort, context: int) -> None:
        cohort.join(sequence, context)
        self._home[sequence] = cohort
        self.endings.joined(sequence, cohort)
        if self.policy.ahead:
            stop = max(self._stop(sequence), cohort.iteration)
            cohort.stops.setdefault(stop, []).append(sequence)

    def _stop(self, sequence: Sequence) -> int:
        """The iteration before which all tokens that a decoding sequence may have are scheduled."""
        most = min(sequence.prompt_tokens + sequence.max_tokens, self.max_length)
        return most - 1 - sequence.offset

    def _leave(self, sequence: Sequence, last: int | None = None) -> int:
        """Take a sequence from where it decodes; returns its context.

        Its span ends with iteration ``last`` (the last one formed unless given).
        """
        cohort = self._home.pop(sequence)
        self.endings.left(sequence, cohort)
        self._abroad.pop(sequence, None)
        if sequence in self._draining:
            first, stop = self._draining.pop(sequence)
            context = sequence.offset + stop
        else:
            first, stop = cohort.members[sequence], cohort.iteration
            context = cohort.leave(sequence)
        if last is None:
            last = stop - 1
        self._log(sequence, DECODE, cohort.index, first, min(last, stop - 1))
        return context

    def _move(self, sequence: Sequence, to: Cohort) -> None:
        out = self._out(sequence)
        self._join(sequence, to, self._leave(sequence))
        if out:
            self._abroad[sequence] = out

    def _out(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Slot and iteration of every decode of a sequence that has not returned."""
        cohort = self._home[sequence]
        stop = cohort.iteration
        if sequence in self._draining:
            first, stop = self._draining[sequence]
        else:
            first = cohort.members[sequence]
        oldest = cohort.iteration - cohort.outstanding
        out = [
            (slot, iteration)
            for slot, iteration in self._abroad.get(sequence, ())
            if iteration >= self.cohorts[slot].iteration - self.cohorts[slot].outstanding
        ]
        return out + [(cohort.index, i) for i in range(max(first, oldest), stop)]

    def _returned(self, sequence: Sequence) -> int:
        """Tokens of a decoding sequence that are processed and known: what is out is left out."""
        _, stop = self._draining.get(sequence, (0, self._home[sequence].iteration))
        return sequence.offset + stop - len(self._out(sequence)) - sequence.yielding

    def _enter_returned(self, cohort: Cohort, more: int = 0) -> None:
        """Note what has come back of those whom others look for, where iterations are formed ahead.

        With ``more`` 1 the cohort's members decode now, and the token that came last counts too.
        """
        blocks, behind = self.blocks, cohort.outstanding - more
        for sequence in cohort.at_block_end(-behind):
            if sequence not in self._abroad:
                blocks.enter(sequence, cohort.context_of(sequence) - behind)
        for sequence in self._abroad if more else (*self._abroad, *self._draining):
            if sequence in blocks.sharing and (not more or sequence in cohort.members):
                blocks.enter(sequence, self._returned(sequence) + more)

    def _decode_one(self, sequence: Sequence) -> None:
        """Schedule the decode of one of the possible ones."""
        ready, blocks = self._ready, self.blocks
        if sequence in ready.at_block_end():
            blocks.grow((sequence,))
        if not self.policy.ahead:
            blocks.enter(sequence, ready.context_of(sequence) + 1)
        elif sequence in blocks.sharing:
            blocks.enter(sequence, self._returned(sequence) + 1)
        assert self._decodes is not None
        self._decodes[sequence] = None

    def _take_back(self, sequence: Sequence) -> int:
        """Undo :meth:`_decode_one` where it was done; returns the tokens."""
        if self._decodes is None:
            raise PolicyError(f"{sequence} is preempted although its decode was scheduled")
        if sequence in self._decodes:
            del self._decodes[sequence]
            return 1
        return 0

    def _close(self) -> Batch:
        """The iteration that the policy formed."""
        home = self._ready
        if self._decodes is not None and len(self._decodes) < len(home.members):
            home = self._split()
        iteration, decodes, context = home.iteration, len(home.members), home.context
        longest = home.longest if decodes else 0
        chunks, prefill_tokens, yields = NO_CHUNKS
        if self._chunks:
            chunks, prefill_tokens, yields = self._close_chunks(home)
        home.iteration = iteration + 1
        home.outstanding += 1
        home.context = context + decodes
        self._in_flight += 1
        if decodes or chunks:
            self._busy += 1
        self.kv_log.append(self.blocks.capacity - self.blocks.free)
        if self.policy.ahead:
            home.opens = self.step + self.stages
            for sequence in yields:
                self._join(sequence, home, sequence.target)
        members = home.members
        return Batch(
            home.index, chunks, prefill_tokens, decodes, context, longest, 0, (),
            lambda: [s for s, first in members.items() if first <= iteration], yields, iteration,
        )  # fmt: skip

    def _close_chunks(self, home: Cohort) -> tuple[tuple[Chunk, ...], int, tuple[Sequence, ...]]:
        """The chunks in a cohort's next iteration, their tokens, and which ones yield."""
        chunks: list[Chunk] = []
        yields: list[Sequence] = []
        prefill_tokens, iteration = 0, home.iteration
        for sequence, tokens in self._chunks.items():
            chunks.append((sequence, tokens, sequence.prefilled))
            prefill_tokens += tokens
            if sequence._group != home.index or sequence._next_iteration != iteration:
                self._end_chunks(sequence)
                sequence._group, sequence._span_first = home.index, iteration
            sequence._next_iteration = iteration + 1
            sequence.prefilled += tokens
            sequence.awaited += tokens
            if sequence.prefilled == sequence.target:
                del self.partials[sequence]
                sequence.yielding = True
                yields.append(sequence)
                self._end_chunks(sequence)
        return tuple(chunks), prefill_tokens, tuple(yields)

    def _split(self) -> Cohort:
        """Keep decoding sequences together: the ones left out move to another slot, or the others
        do."""
        ready, chosen = self._ready, self._decodes
        assert chosen is not None
        if not chosen:
            return self._free_cohort(ready)
        rest = self._free_cohort(ready)
        rest.opens = self.step
        for sequence in list(ready):
            if sequence not in chosen:
                self._move(sequence, rest)
        return ready

    def _end_chunks(self, sequence: Sequence) -> None:
        """Log the span that a sequence's last chunk ended, if there was one."""
        if sequence._group >= 0:
            role = RECOMPUTE if sequence.target > sequence.prompt_tokens else PREFILL
            if sequence.prefilled < sequence.target:
                role = PART
            first, last = sequence._span_first, sequence._next_iteration - 1
            self._log(sequence, role, sequence._group, first, last)
            sequence._group = -1

    def _log(self, sequence: Sequence, role: int, slot: int, first: int, last: int) -> None:
        if last >= first:
            self.spans.extend((sequence.id, role, slot, first, last))

    def _finish(self, sequence: Sequence, cohort: Cohort, iteration: int) -> None:
        """A sequence has its last token."""
        self._unfinished -= 1
        self.emptied += not self._unfinished
        if sequence not in self.running:  # preempted, with this token on its way
            self.waiting.remove(sequence)
            return
        del self.running[sequence]
        # Iterations that were formed after the one that ended it were in vain.
        here = self._home[sequence] is cohort
        known = sequence.offset + iteration + 1 if here else self._returned(sequence)
        context = self._leave(sequence, iteration if here else -1)
        self.blocks.release(sequence, context, min(known, context), again=False)


def by_admission(sequence: Sequence) -> int:
    return sequence.order
