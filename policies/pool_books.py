"""The bookkeeping of a pool: its waiting, running and decoding sequences, and its log.

Drivers and policies use :class:`~policies.pool.Pool`, which inherits this.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
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

    __slots__ = (
        "_abroad", "_chunks", "_decodes", "_draining", "_empty", "_formed_as", "_in_flight",
        "_num_formed", "_orders", "_ready", "_returns", "_settled", "_stale", "_unfinished",
        "blocks", "cohorts", "decode_blocks", "emptied", "endings", "events", "kv_capacity",
        "kv_log", "max_batch", "max_in_flight", "max_length", "num_decodes", "partials", "policy",
        "running", "spans", "stages", "state", "step", "waiting",
    )  # fmt: skip

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
        self._empty = 0  # those of them in which nobody takes part
        self._unfinished = 0
        # Of those that decode, the ones all of whose tokens are scheduled (they run until the last
        # one is back): the first iteration they decoded in, and the one they would have been next
        # in.
        self._draining: dict[Sequence, tuple[int, int]] = {}
        # Iterations in which a sequence decoded before it moved to another slot, while in flight.
        self._abroad: dict[Sequence, list[tuple[int, int]]] = {}
        # Preempted while decoding in iterations that are out, by slot and iteration.
        self._stale: dict[tuple[int, int], list[Sequence]] = {}
        # With iterations formed ahead: the number of each one that is out, by slot and iteration;
        # and those that returned last, with the number of iterations formed by then.
        self._num_formed = 0
        self._formed_as: dict[tuple[int, int], int] = {}
        self._returns: deque[tuple[int, Batch]] = deque(maxlen=max_in_flight)
        # What the policy said last, if nothing has happened since: nobody could be admitted.
        self._settled = False
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
        largest = ready[0]
        if len(ready) > 1:
            largest = max(ready, key=len)
            for cohort in ready:
                if cohort is not largest:
                    for sequence in list(cohort):
                        self._move(sequence, largest)
        if largest.stops:
            self._drain(largest)
        return largest

    def _drain(self, cohort: Cohort) -> None:
        """Take out those all of whose tokens are scheduled."""
        for sequence in cohort.stops.pop(cohort.iteration, ()):
            # (It may have been preempted, and have come again with a later stop, meanwhile.)
            first = cohort.members.get(sequence)
            if first is not None and self._stop(sequence) <= cohort.iteration:
                self._draining[sequence] = (first, cohort.iteration)
                cohort.leave(sequence)

    def _join(self, sequence: Sequence, cohort: Cohort, context: int) -> None:
        cohort.join(sequence, context)
        sequence.cohort = cohort
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
        cohort, sequence.cohort = sequence.cohort, None
        assert cohort is not None
        self.endings.left(sequence, cohort)
        if self._abroad:
            self._abroad.pop(sequence, None)
        if self._draining and sequence in self._draining:
            first, stop = self._draining.pop(sequence)
            context = sequence.offset + stop
        else:
            first, stop = cohort.members[sequence], cohort.iteration
            context = cohort.leave(sequence)
        if last is None:
            last = stop - 1
        self._log(sequence, DECODE, cohort.index, first, last if last < stop else stop - 1)
        return context

    def _move(self, sequence: Sequence, to: Cohort) -> None:
        out = self._out(sequence)
        self._join(sequence, to, self._leave(sequence))
        if out:
            self._abroad[sequence] = out

    def _out(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Slot and iteration of every decode of a sequence that has not returned."""
        cohort = sequence.cohort
        assert cohort is not None
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
        cohort = sequence.cohort
        assert cohort is not None
        _, stop = self._draining.get(sequence, (0, cohort.iteration))
        return sequence.offset + stop - len(self._out(sequence)) - sequence.yielding

    def _scheduled_last(self, sequence: Sequence) -> bool:
        """Whether a decode of a sequence was scheduled after its last token returned."""
        cohort = sequence.cohort
        assert cohort is not None
        first, stop = self._draining.get(sequence, (cohort.members.get(sequence, 0), 0))
        stop = stop or cohort.iteration
        abroad = self._abroad.get(sequence, [])
        last = (cohort.index, stop - 1) if stop > first else ((-1, -1), *abroad)[-1]
        number = self._formed_as.get(last)
        if number is None:
            return False

        def took_part(batch: Batch) -> bool:
            here = batch.slot == cohort.index and first <= batch.iteration < stop
            return here or (batch.slot, batch.iteration) in abroad or sequence in batch.yields

        later = (batch for formed, batch in self._returns if formed >= number)
        return not any(map(took_part, later))

    def _take_back(self, sequence: Sequence) -> int:
        """Undo :meth:`_decode_one` where it was done; returns the tokens."""
        if self._decodes is None:
            raise PolicyError(f"{sequence} is preempted although its decode was scheduled")
        if sequence in self._decodes:
            del self._decodes[sequence]
            return 1
        return 0

    def _again(self) -> Batch | None:
        """The next iteration, if all running sequences decode in the cohort of the last one."""
        home, blocks = self._ready, self.blocks
        full = home.at_block_end()
        if (
            not home.members
            or len(home.members) < len(self.running)
            or len(full) > blocks.free
            or (home.opens > self.step + 1 if self.policy.ahead else home.outstanding)
            or home.iteration in home.stops
        ):
            return None
        self.step += 1
        if full:
            blocks.grow(full)
        return self._formed(home)

    def _close(self) -> Batch:
        """The iteration that the policy formed."""
        home = self._ready
        if self._decodes is not None and len(self._decodes) < len(home.members):
            home = self._split()
        if self._chunks:
            return self._formed(home, *self._close_chunks(home))
        return self._formed(home)

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
        self.kv_log.append(self.blocks.capacity - self.blocks.free)
        members: Callable[[], Iterable[Sequence]] = home.members.keys
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

    def _close_chunks(self, home: Cohort) -> tuple[tuple[Chunk, ...], int, tuple[Sequence, ...]]:
        """The chunks in a cohort's next iteration, their tokens, and which ones yield."""
        chunks: list[Chunk] = []
        yields: list[Sequence] = []
        prefill_tokens, slot, iteration = 0, home.index, home.iteration
        for sequence, tokens in self._chunks.items():
            chunks.append((sequence, tokens, sequence.prefilled))
            prefill_tokens += tokens
            if sequence._group != slot or sequence._next_iteration != iteration:
                self._end_chunks(sequence)
                sequence._group, sequence._span_first = slot, iteration
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
        here = sequence.cohort is cohort
        known = sequence.offset + iteration + 1 if here else self._returned(sequence)
        context = self._leave(sequence, iteration if here else -1)
        self.blocks.release(sequence, context, min(known, context), again=False)


def by_admission(sequence: Sequence) -> int:
    return sequence.order
