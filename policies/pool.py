"""The scheduler of engines with paged memory: any request may join any micro-batch.

The drivers use it like :class:`~policies.scheduler.Scheduler`. It differs in two points: a policy
sees all running sequences, not the members of one micro-batch, and it may preempt. A policy acts on
the pool while it plans (:class:`PoolPolicy`), because the blocks of earlier requests decide whether
a request fits.

Tokens count as processed (``Sequence.prefilled``, a cohort's contexts) from when they are
scheduled, as in vLLM. Only the driver knows which sequence ends, and with which token
(:class:`~policies.decodes.Endings`).
"""

from __future__ import annotations

from policies.batch import Batch
from policies.cohort import Cohort
from policies.decodes import by_admission
from policies.kv import Block
from policies.pool_books import HIT, HIT_AGAIN, LOST, Books
from policies.request import Request, Sequence, too_long
from policies.scheduler import LivelockError

MANY_PREEMPTIONS = 1000
"""After so many, and ten for each running sequence, somebody must have got a token."""


class Pool(Books):
    """Queues requests, lets the policy act, and does the bookkeeping of a replica with paged
    memory.

    ``waiting``  sequences that hold no memory, in the order in which they are served
    ``running``  those that do, in the order of admission
    ``partials`` those of them whose prompt is not all scheduled, in that order
    ``step``     how often an iteration was formed
    ``num_decodes`` sequences that could decode in this iteration; ``decode_blocks`` the free KV
                 blocks that it takes if they all do
    ``blocks``   the KV cache
    ``idle``     whether there may be one more iteration in flight
    ``state``    what the policy remembers of this replica from one call to the next
    ``emptied``  how often everybody had been served
    """

    __slots__ = ()

    # What drivers use --------------------------------------------------------------------------

    def refusal(self, request: Request) -> str | None:
        """The reason why the request can never be served, or None."""
        if reason := too_long(request, self.max_length):
            return reason
        # The last token it yields is never written.
        needed = self.blocks.blocks(request.prompt_tokens + request.max_tokens - 1)
        if needed > self.blocks.capacity:
            return f"needs {needed} KV blocks, but the replica holds {self.blocks.capacity}"
        return None

    def add(self, request: Request) -> str | None:
        """Queue an arrived request. Returns why it is rejected, or None."""
        reason = self.refusal(request)
        if reason is None:
            sequence = Sequence(
                request.id,
                request.prompt_tokens,
                request.max_tokens,
                0,
                request.arrival_s,
                request.priority,
                request.prefix,
                request.user,
            )
            if self.policy.order is None:
                self.waiting.append(sequence)
            else:
                self._queue(sequence, last=True)
            self._settled = False
            self._unfinished += 1
        return reason

    @property
    def num_unfinished(self) -> int:
        """Accepted requests that are not finished."""
        return self._unfinished

    def next_batch(self) -> Batch | None:
        """Form the next iteration, which is empty if all sequences are in flight; None if none may
        be formed."""
        if not (self.idle and self._unfinished):
            return None
        batch = self.form()
        if self._in_flight > self._empty:
            return batch
        # Without anything in flight an empty iteration has no use: it is formed again until the
        # last step that a decode waits for, or until all running sequences could be preempted.
        for _ in range(self.stages + len(self.running)):
            self._withdraw(batch)
            batch = self.form()
            if self._in_flight > self._empty:
                return batch
        self._withdraw(batch)
        return None

    def _withdraw(self, batch: Batch) -> None:
        """Undo an empty iteration."""
        cohort = self.cohorts[batch.slot]
        cohort.iteration -= 1
        cohort.outstanding -= 1
        self._in_flight -= 1
        self.idle = True
        self._empty -= 1
        self.kv_log.pop()
        if self.policy.ahead:
            self._num_formed -= 1
            del self._formed_as[batch.slot, batch.iteration]

    def form(self) -> Batch:
        """Form an iteration, with any number of them in flight."""
        self.step += 1
        ready = self._ready = self._gather()
        full = ready.at_block_end()
        if self._settled and not self.partials and len(full) <= self.blocks.free:
            if full:
                self.blocks.grow(full)
            return self._formed(ready)
        self.num_decodes, self.decode_blocks = len(ready.members), len(full)
        self._chunks, self._decodes = {}, {}
        # (A waiting request might find what these decodes generate.)
        self._settled = bool(self.policy.plan(self)) and not self.blocks.sharing
        ready = self._split() if self._decodes is not None else ready
        return self._close_chunks(ready) if self._chunks else self._formed(ready)

    def complete(self, batch: Batch) -> list[Sequence]:
        """Book an iteration that returned from the last stage; returns the finished sequences."""
        self._in_flight -= 1
        self.idle = True
        cohort = self.cohorts[batch.slot]
        cohort.outstanding -= 1
        ahead = self.policy.ahead
        if ahead:
            del self._formed_as[batch.slot, batch.iteration]
            self._returns.append((self._num_formed, batch))
        ended = self.endings.ended(batch)
        if batch.chunks:
            self._book_chunks(batch, cohort)
        elif not batch.num_decodes:
            self._empty -= 1
        if self._stale:
            for sequence in self._stale.pop((batch.slot, batch.iteration), ()):
                sequence.stale -= 1
                sequence.target += 1
                self._settled = False
        if ahead and self.blocks.sharing:
            self._enter_returned(cohort)
        if ended:
            self._settled = self._settled and not self.waiting
            if len(ended) > 1:
                ended.sort(key=by_admission)
            for sequence in ended:
                self._finish(sequence, cohort, batch.iteration)
        return ended

    def _book_chunks(self, batch: Batch, cohort: Cohort) -> None:
        for sequence, tokens, done in batch.chunks:
            sequence.awaited -= tokens
            if sequence.stale:
                self._settled = False
                sequence.stale -= tokens
                sequence.target += sequence in batch.yields
            elif done + tokens == sequence.target:
                sequence.yielding = False
                if not self.policy.ahead:
                    self._join(sequence, cohort, sequence.target)

    def _decode_one(self, sequence: Sequence) -> None:
        """Schedule the decode of one of the possible ones."""
        ready, blocks = self._ready, self.blocks
        if sequence in ready.at_block_end():
            blocks.grow((sequence,))
        if sequence in blocks.sharing:
            blocks.enter(sequence, self._returned(sequence) + 1)
        assert self._decodes is not None
        self._decodes[sequence] = None

    # What policies see and do ------------------------------------------------------------------

    def decodes_all(self) -> int:
        """Schedule all possible decodes; returns their number."""
        ready, blocks = self._ready, self.blocks
        if self.decode_blocks:
            blocks.grow(ready.at_block_end())
        if blocks.sharing:
            self._enter_returned(ready, 1)
        self._decodes = None
        return self.num_decodes

    def decoding(self) -> list[Sequence]:
        """The sequences that decode in this iteration, as far as it is formed."""
        return list(self._ready if self._decodes is None else self._decodes)

    def eligible(self) -> list[Sequence]:
        """All running sequences with tokens to compute, in the order of admission."""
        return sorted([*self._ready, *self.partials], key=by_admission)

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that an eligible sequence could compute now."""
        return 1 if sequence in self._ready.members else sequence.target - sequence.prefilled

    def context(self, sequence: Sequence) -> int:
        """Tokens that an eligible sequence has KV for."""
        if sequence in self._ready.members:
            return self._ready.context_of(sequence)
        return sequence.prefilled

    def needs(self, sequence: Sequence, tokens: int) -> int:
        """Free blocks it takes for an eligible sequence to compute ``tokens`` more tokens."""
        if sequence in self._ready.members:
            return int(sequence in self._ready.at_block_end())
        return self.blocks.need(sequence, sequence.prefilled + tokens)

    def run(self, sequence: Sequence, tokens: int) -> None:
        """Let an eligible sequence compute ``tokens`` tokens; its blocks must be free."""
        if sequence in self._ready.members:
            self._decode_one(sequence)
            return
        total = sequence.prefilled + tokens
        self.blocks.take(sequence, total, (), min(total, sequence.target))
        self._chunks[sequence] = tokens

    def held(self, sequence: Sequence) -> int:
        """Tokens that a running sequence has blocks for, those of this iteration's decode not
        counted."""
        cohort = sequence.cohort
        if cohort is None:
            return sequence.held
        if sequence in self._draining:
            return sequence.offset + self._draining[sequence][1]
        return cohort.context_of(sequence)

    def newest(self) -> Sequence:
        """The running sequence that was admitted last."""
        return next(reversed(self.running))

    def preempt(self, sequence: Sequence, *, last: bool = False) -> int:
        """Preempt a running sequence: it loses its memory and waits again, with its generated
        tokens.

        It waits before all others, or with ``last`` behind them. Returns the tokens that it had
        been given in this iteration. Raises LivelockError where preempting leads nowhere.
        """
        given = self._chunks.pop(sequence, 0)
        del self.running[sequence]
        if sequence in self._ready.members:
            self.num_decodes -= 1
            self.decode_blocks -= sequence in self._ready.at_block_end()
        if sequence.cohort is not None:
            given += self._take_back(sequence)
            out = self._out(sequence)
            known = self._returned(sequence)
            # A decode takes down what is known when it is scheduled: the token before it, too.
            known += bool(given) or self._scheduled_last(sequence)
            lost = context = self._leave(sequence)
            known = max(sequence.target, known) if self.policy.ahead else context + given
            self.blocks.release(sequence, context + given, known, again=True)
            for slot, iteration in out:
                self._stale.setdefault((slot, iteration), []).append(sequence)
            sequence.stale = len(out) + sequence.awaited
            sequence.target = context + 1 - len(out) - sequence.yielding
        else:
            # Its chunks count as processed, but for the one of this iteration.
            self.partials.pop(sequence, None)
            lost = sequence.prefilled
            known = min(lost + given, sequence.target)
            self.blocks.release(sequence, sequence.held, known, again=True)
            sequence.stale = sequence.awaited
            if sequence._group >= 0:
                self._log_part(sequence)
        self.events.extend((sequence.id, LOST, lost))
        sequence.prefilled = 0
        sequence.yielding = False
        self._queue(sequence, last=last)
        self._preempted += 1
        if self._preempted > MANY_PREEMPTIONS + 10 * len(self.running):
            self._look_for_progress()
        return given

    def _look_for_progress(self) -> None:
        """Raise LivelockError if nobody has got a token since it was last called."""
        here = [*self.running, *self.waiting]
        tokens = sum(s.target if s.cohort is None else self.held(s) for s in here)
        before, self._progress = self._progress, (self._finished, tokens)
        if before[0] == self._finished and before[1] >= tokens:
            raise LivelockError(
                f"{self._preempted} preemptions in a row, and nobody got a token: "
                f"{len(self.running)} running and {len(self.waiting)} waiting requests take the "
                "KV cache from each other; give it more blocks, or let fewer run at a time"
            )
        self._preempted = 0

    def admit(
        self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = (), hold: int = 0
    ) -> None:
        """Let a waiting sequence run: it has the ``hits``, and computes ``tokens`` tokens more.

        It takes blocks for those, or for its first ``hold`` tokens if that is more.
        """
        if self.waiting[0] is sequence:
            del self.waiting[0]
        else:
            self.waiting.remove(sequence)
        cached = len(hits) * self.blocks.block_size
        total = cached + tokens
        target = sequence.target
        known = total if total < target else target
        self.blocks.take(sequence, total if total > hold else hold, hits, known)
        if cached:
            again = HIT if sequence.order < 0 else HIT_AGAIN
            self.events.extend((sequence.id, again, cached))
        sequence.prefilled = cached
        sequence.order = self._orders
        self._orders += 1
        self.running[sequence] = None
        self.partials[sequence] = None
        self._chunks[sequence] = tokens
