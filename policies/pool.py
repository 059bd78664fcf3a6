"""The scheduler of engines with paged memory: any request may join any micro-batch.

A policy sees all running sequences and may preempt. It acts on the pool while it plans
(:class:`PoolPolicy`), because the blocks of earlier requests decide whether a request fits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from .batch import Batch, Chunk
from .in_flight import InFlight, by_admission
from .kv import Block
from .log import (
    ACCEPTED,
    DECODE,
    DRAFTED,
    LOST,
    PART,
    PREFILL,
    RECOMPUTE,
    LivelockError,
    PolicyError,
)
from .policy import AnyPolicy
from .request import Cohort, Request, Sequence
from .scheduler import Scheduler

MANY_PREEMPTIONS = 1000
"""Preemptions without a new token that are too many; ten more for each running sequence."""


class PoolPolicy(AnyPolicy, Protocol):
    """Decides what an iteration does by acting on the pool. It keeps its state in ``Pool.state``.

    ``max_num_seqs`` is the largest number of running sequences.
    """

    pooled: bool = True
    max_num_seqs: int

    def plan(self, pool: Pool) -> bool | None:
        """Choose the chunks and decodes of the next iteration; it may stay empty.

        Returns True if no waiting request can be admitted until a request arrives, ends or is
        preempted, or may be admitted again. Until then, while no prompt is under way and the blocks
        suffice, every possible decode runs, and the policy is not asked.
        """


class Ordered(list[Sequence]):
    """A queue sorted by a key, smallest first; equal keys in the order of insertion."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        super().__init__()
        self._key = key

    def append(self, sequence: Sequence) -> None:
        """Add a waiting sequence in its place."""
        insort(self, sequence, key=self._key)

    appendleft = append


@dataclass(slots=True, eq=False)
class Pool(InFlight):
    """The scheduler of one replica with paged memory, on which the policy acts.

    ``partials`` running sequences whose prompt is not all scheduled, in the order of admission
    ``num_decodes`` sequences that could decode in this iteration; ``decode_blocks`` the free KV
                 blocks that they need for it
    ``state``    the policy's state for this replica, kept from one call to the next
    ``emptied``  how often the replica ran out of requests
    ``given``    the tokens that this iteration, as far as it is formed, computes of each prompt,
                 and with speculation of each decode

    With speculation (``draft_length`` above 0) a sequence that decodes is in no cohort. Each of its
    decodes is served like a chunk, of one token and its drafts; the result says how many hold.

    ``lookahead``    tokens beyond those computed for which the drafter needs KV
    ``draft_slots``  rows of each sequence in an iteration that its drafter computes beyond the
                 model's own: 1 for a draft model, which reads the token just yielded, too (MTP and
                 EAGLE read the tokens shifted by one, with the model's hidden states)
    ``drafting``     running sequences that decode, each with the drafts for its next decode
    ``reserved`` sequences whose KV may be sent here, because they have blocks for it now, or need
                 not be sent, because it was in the cache: these run (``order`` is not negative).
                 Whoever sends it takes them out
    ``remote``   whether the KV of any request was computed elsewhere: a decode worker
    """

    policy: PoolPolicy
    _: KW_ONLY
    stages: int = 1
    lookahead: int = 0
    draft_slots: int = 0
    drafting: dict[Sequence, int] = field(init=False, default_factory=dict)
    partials: dict[Sequence, None] = field(init=False, default_factory=dict)
    num_decodes: int = field(init=False, default=0)
    decode_blocks: int = field(init=False, default=0)
    state: dict[str, Any] = field(init=False, default_factory=dict)
    emptied: int = field(init=False, default=0)
    reserved: list[Sequence] = field(init=False, default_factory=list)
    remote: bool = field(init=False, default=False)
    _in_flight: int = field(init=False, default=0)
    _empty: int = field(init=False, default=0)  # iterations in flight without any sequence
    _finished: int = field(init=False, default=0)
    # Preemptions since the last look at progress, and progress then: finished requests, tokens.
    _preempted: int = field(init=False, default=0)
    _progress: tuple[int, int] = field(init=False, default=(-1, -1))
    # By slot and iteration in flight, the sequences preempted while they decoded in it.
    _stale: dict[tuple[int, int], list[Sequence]] = field(init=False, default_factory=dict)
    # Whether the policy said last that no request can be admitted, and nothing happened since.
    _settled: bool = field(init=False, default=False)
    given: dict[Sequence, int] = field(init=False, default_factory=dict)
    # The iteration that is being formed: the possible decodes, and the chosen decodes (None: all
    # possible ones); with speculation, the possible ones, each with the tokens it would process.
    _ready: Cohort = field(init=False, default_factory=lambda: Cohort(0, 1))
    _decodes: dict[Sequence, None] | None = field(init=False, default_factory=dict)
    _verifying: dict[Sequence, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        InFlight.__post_init__(self)
        self.max_batch = self.policy.max_num_seqs
        if self.policy.order is not None:
            self.waiting, self.loading = Ordered(self.policy.order), Ordered(self.policy.order)

    # What drivers use --------------------------------------------------------------------------

    def add(self, request: Request) -> str | None:
        """Queue an arrived request. Returns why it is rejected, or None."""
        if request.sends_kv:
            request = replace(request, output_tokens=1, max_tokens=1)
        reason = Scheduler.add(self, request)
        self.remote = self.remote or request.remote_tokens > 0
        self._settled = self._settled and reason is not None
        return reason

    def refusal(self, request: Request) -> str | None:
        """The reason why the request can never be served, or None. (Where its last drafts do not
        fit, vLLM would wait for ever, and SGLang aborts it.)"""
        # vLLM preempts a sequence whose next decode does not fit beside the one in flight.
        drafts = self.draft_length if self.lookahead else self.most_drafts
        longest = request.prompt_tokens + request.max_tokens - 1 + drafts
        needed = self.blocks.blocks(self.until(min(longest, self.max_length - 1)))
        most = self.blocks.capacity - self.blocks.state_blocks
        if drafts and needed > most:
            return f"needs {needed} KV blocks with its drafts, but the replica holds {most}"
        return Scheduler.refusal(self, request)

    def received(self, ids: Iterable[int]) -> None:
        """The KV of these ``loading`` sequences is there: they may run from the next iteration on.
        Raises KeyError for one that holds no blocks for it, as :meth:`sent` does."""
        loading = {each.id: each for each in self.loading}
        for id in ids:
            loading[id].arrived = True
        self._settled = False

    def sent(self, id: int) -> None:
        """The KV of this sequence, which ended here, has been sent: release it."""
        self.blocks.release(*self.sending.pop(id), again=False)
        self._settled = False

    @property
    def vacant(self) -> bool:
        """Whether nobody holds memory."""
        return not (self.running or self.loading or self.sending)

    def next_batch(self) -> Batch | None:
        """Form the next iteration, which is empty if all sequences are in flight; None if none may
        be formed."""
        if not (self.idle and self.num_unfinished):
            return None
        batch = self.form()
        if self._in_flight > self._empty:
            return batch
        # With nothing in flight an empty iteration is useless. Form another one, until the step
        # that the last decode waits for, or until all running sequences could be preempted.
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

    def look(self) -> None:
        """Find the possible decodes of the iteration that is to be formed now, for policies whose
        ranks agree before they form it."""
        self.step += 1
        self._look(self._gather())
        self.step -= 1

    def _look(self, ready: Cohort) -> None:
        self._ready, self.num_decodes = ready, len(ready.members)
        self.decode_blocks = len(ready.at_block_end())
        self.given, self._decodes = {}, {}
        if self.draft_length:
            self._gather_drafts()

    def form(self) -> Batch:
        """Form an iteration, with any number of them in flight."""
        self.step += 1
        ready = self._ready = self._gather()
        if self._settled and not self.partials:
            full = ready.at_block_end()
            if len(full) <= self.blocks.free:
                if full:
                    self.blocks.grow(full)
                return self._formed(ready)
        self._look(ready)
        # (A waiting request might find tokens in the cache that these decodes generate.)
        settled = bool(self.policy.plan(self))
        self._settled = settled and not (self.blocks.sharing or self.draft_length)
        ready = self._split() if self._decodes is not None else ready
        if not self.given:
            return self._formed(ready)
        verified, padded = self._close_drafts(ready) if self._verifying else ((), ())
        chunks, prefill_tokens, yields = self._close_chunks(ready, self.given.items())
        for sequence, tokens, _ in chunks:
            sequence.awaited += tokens
        for sequence in yields:
            del self.partials[sequence]
            sequence.yielding = True
            if self.draft_length:
                self.drafting[sequence] = self.draft_length
                sequence.hoped = 1
        return self._formed(ready, chunks, prefill_tokens, yields + padded, verified)

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
        stale = self._stale.pop((batch.slot, batch.iteration), []) if self._stale else []
        for sequence in stale:
            sequence.stale -= 1
            sequence.target += not self._drops_of(sequence)
            self._settled = False
        if batch.chunks:
            stale += self._book_chunks(batch, cohort)
        elif not batch.num_decodes:
            self._empty -= 1
        if batch.verified:
            stale += self._book_drafts(batch)
        dropped = [each for each in stale if self._drops_of(each)] if stale else ()
        ended = self.endings.ended(batch, dropped)
        if ahead and self.blocks.sharing:
            self._enter_returned(cohort)
        if ended:
            self._settled = self._settled and not (self.waiting or self.loading)
            if len(ended) > 1:
                ended.sort(key=by_admission)
        rows = ended
        if self.blocks.late and batch.yields:
            own = [each for each in batch.yields if each not in dropped]
            rows = own + [each for each in ended if each not in own]
        for sequence in rows:
            if sequence in ended:
                self._end(sequence, cohort, batch.iteration)
            else:
                self.blocks.computed(sequence, sequence.known)
        return ended

    def repeats(self, batch: Batch) -> int:
        """How often the same happens once more when this batch has returned: nobody ends, and an
        iteration like it is formed, in which all running sequences decode, unless one arrives."""
        decodes = batch.num_decodes
        if not self._settled or batch.chunks or not decodes or self.partials or self._stale:
            return 0
        cohort, blocks = self.cohorts[batch.slot], self.blocks
        same = decodes == len(self.running) == len(cohort.members)
        # Else one that ended decoded in vain, and another one has joined since.
        same = same and next(reversed(cohort.members.values())) <= batch.iteration
        if not same or cohort.outstanding != self.max_in_flight or blocks.sharing:
            return 0
        stops = min(cohort.stops, default=cohort.iteration + decodes * blocks.block_size)
        room = (blocks.free // decodes - 1) * blocks.block_size
        return max(0, min(self.endings.none_end(batch), stops - cohort.iteration, room))

    def repeat(self, batch: Batch, times: int) -> None:
        """Book that so many batches returned, and as many were formed, as :meth:`repeats` says;
        ``batch`` is one of them."""
        cohort, blocks = self.cohorts[batch.slot], self.blocks
        first = cohort.iteration
        for iteration in range(first, first + times):
            cohort.iteration = iteration
            if full := cohort.at_block_end():
                blocks.grow(full)
            self.kv_log.append(blocks.capacity - blocks.free)
        cohort.iteration = last = first + times
        cohort.context += times * batch.num_decodes
        self.step += times
        if not self.policy.ahead:
            return
        depth, slot = cohort.outstanding, cohort.index
        for done in range(max(0, times - depth), times):
            returned = replace(batch, iteration=first - depth + done, chunks=(), yields=())
            self._returns.append((self._num_formed + done, returned))
        self._num_formed += times
        cohort.opens = self.step + self.stages
        self._formed_as = {
            (slot, last - depth + place): self._num_formed - depth + 1 + place
            for place in range(depth)
        }

    def _book_chunks(self, batch: Batch, cohort: Cohort) -> list[Sequence]:
        """Book a batch's chunks; returns the preempted sequences for which it yields a token."""
        stale = []
        for sequence, tokens, done in batch.chunks:
            sequence.awaited -= tokens
            if sequence.stale:
                self._settled = False
                sequence.stale -= tokens
                if sequence in batch.yields:
                    stale.append(sequence)
                    sequence.target += not self._drops_of(sequence)
            elif done + tokens == sequence.target:
                sequence.yielding = False
                if self.draft_length:
                    sequence.target += 1
                    sequence.hoped -= 1
                elif not self.policy.ahead:
                    self._join(sequence, cohort, sequence.target)
        return stale

    def _book_drafts(self, batch: Batch) -> list[Sequence]:
        """Book a batch's decodes with drafts; returns the preempted sequences among them."""
        stale = []
        for sequence, tokens, _ in batch.verified:
            sequence.awaited -= tokens
            if sequence not in self.running and not sequence.stale:
                continue  # it has ended: this was computed in vain
            padded = sequence in batch.yields
            accepted = self.endings.accepted(sequence, 0 if padded else tokens - 1)
            sequence.drafted += tokens - 1
            if sequence.stale:
                self._settled = False
                sequence.stale -= tokens
                stale.append(sequence)
                drops = self._drops_of(sequence)
                if refused := tokens - 1 - (0 if drops else accepted):  # these were no tokens of it
                    sequence.lost -= refused
                    self.events.extend((sequence.id, LOST, -refused))
                if drops:
                    continue
            else:
                sequence.yielding = False
                sequence.hoped -= tokens
                sequence.prefilled -= tokens - 1 - accepted
            sequence.accepted += accepted
            sequence.target += 1 + accepted
            if self.policy.ahead and not sequence.stale:
                sequence.known = max(sequence.known, sequence.target - 1)
                if sequence in self.blocks.sharing:
                    self.blocks.enter(sequence, sequence.known)
        return stale

    def _drops_of(self, sequence: Sequence) -> bool:
        """Whether a sequence loses its tokens in flight when it is preempted: also where its KV,
        which is lost, is to be sent (vLLM: ``requires_kv_delivery``)."""
        return self.policy.drops or sequence.sends

    def _decode_one(self, sequence: Sequence) -> None:
        """Schedule one of the possible decodes."""
        ready, blocks = self._ready, self.blocks
        if sequence in ready.at_block_end():
            blocks.grow((sequence,))
        if sequence in blocks.sharing:
            blocks.enter(sequence, self._returned(sequence) + 1)
        assert self._decodes is not None
        self._decodes[sequence] = None

    # What policies see and do ------------------------------------------------------------------

    @property
    def most_drafts(self) -> int:
        """The drafts of a sequence that may have KV at a time: those of all decodes in flight."""
        return self.draft_length * (1 + self.policy.ahead)

    @property
    def decode_tokens(self) -> int:
        """The tokens that all possible decodes process."""
        return self.num_decodes + sum(self._verifying.values()) - len(self._verifying)

    def decodes_all(self) -> int:
        """Schedule all possible decodes; returns the tokens that they process."""
        ready, blocks = self._ready, self.blocks
        if self._verifying:
            for sequence, tokens in self._verifying.items():
                self.run(sequence, tokens)
            return self.decode_tokens
        if self.decode_blocks:
            blocks.grow(ready.at_block_end())
        if blocks.sharing:
            self._enter_returned(ready, 1)
        self._decodes = None
        return self.num_decodes

    def decoding(self) -> list[Sequence]:
        """The sequences that decode in this iteration, as far as it is formed."""
        verified = [each for each in self._verifying if each in self.given]
        return verified or list(self._ready if self._decodes is None else self._decodes)

    def eligible(self) -> list[Sequence]:
        """All running sequences with tokens to compute, in the order of admission."""
        return sorted([*self._ready, *self.partials, *self._verifying], key=by_admission)

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that an eligible sequence could compute now."""
        if sequence in self._verifying:
            return self._verifying[sequence]
        return 1 if sequence in self._ready.members else sequence.target - sequence.prefilled

    def context(self, sequence: Sequence) -> int:
        """Tokens that an eligible sequence has KV for."""
        if sequence in self._ready.members:
            return self._ready.context_of(sequence)
        return sequence.prefilled

    def needs(self, sequence: Sequence, tokens: int) -> int:
        """Free blocks that an eligible sequence needs to compute ``tokens`` more tokens."""
        if sequence in self._ready.members:
            return int(sequence in self._ready.at_block_end())
        return self.blocks.need(sequence, self.until(sequence.prefilled + tokens))

    def until(self, tokens: int) -> int:
        """The tokens for which a sequence needs KV while its first ``tokens`` are computed."""
        return min(tokens + self.lookahead, self.max_length) if self.lookahead else tokens

    def run(self, sequence: Sequence, tokens: int) -> None:
        """Let an eligible sequence compute ``tokens`` tokens; its blocks must be free."""
        if sequence in self._ready.members:
            self._decode_one(sequence)
            return
        total = sequence.prefilled + tokens
        sequence.known = min(total, sequence.target)
        self.blocks.take(sequence, self.until(total), (), sequence.known)
        self.given[sequence] = tokens

    def held(self, sequence: Sequence) -> int:
        """Tokens that a running sequence has blocks for, without this iteration's decode."""
        cohort = sequence.cohort
        return sequence.held if cohort is None else cohort.context_of(sequence)

    def generated(self, sequences: Iterable[Sequence]) -> list[int]:
        """Tokens that each of these running sequences has generated, without those in flight."""
        counts, abroad, last = [], self._abroad, None
        for sequence in sequences:
            cohort = sequence.cohort
            if cohort is not last and cohort is not None:
                last, members, drained = cohort, cohort.members, cohort.drained
                oldest = cohort.iteration - cohort.outstanding  # the oldest iteration in flight
            if cohort is None:
                known = sequence.target - 1
            elif sequence in drained or sequence in abroad:
                known = self._returned(sequence)
            else:
                first = members[sequence]
                known = sequence.offset + (oldest if oldest > first else first) - sequence.yielding
            counts.append(known + 1 - sequence.prompt_tokens)
        return counts

    @property
    def drained(self) -> int:
        """The number of running sequences that stopped decoding: all their tokens are scheduled."""
        drained = sum(len(cohort.drained) for cohort in self.cohorts)
        return drained + len(self.drafting) - len(self._verifying)

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Move these running sequences to the end of the order of admission."""
        running, place = self.running, self._orders
        for sequence in sequences:
            del running[sequence]
            running[sequence] = None
            sequence.order = place
            place += 1
        self._orders = place

    def newest(self) -> Sequence:
        """The running sequence that was admitted last."""
        return next(reversed(self.running))

    def preempt(self, sequence: Sequence, *, last: bool = False) -> int:
        """Preempt a running sequence: it loses its memory and waits again, with its generated
        tokens.

        It waits before all others, or with ``last`` behind them. Returns the tokens that this
        iteration had scheduled for it. Raises LivelockError if preemptions bring no progress.
        """
        if sequence in self._verifying:
            self.num_decodes -= 1
            self.decode_blocks -= self.needs(sequence, self._verifying.pop(sequence))
        given = self.given.pop(sequence, 0)
        del self.running[sequence]
        if sequence in self._ready.members:
            self.num_decodes -= 1
            self.decode_blocks -= sequence in self._ready.at_block_end()
        if sequence.cohort is not None:
            given += self._take_back(sequence)
            out = self._out(sequence)
            known = self._returned(sequence)
            # Scheduling a decode makes the token before it known, in its block.
            known += bool(given) or self._scheduled_last(sequence)
            drops = self._drops_of(sequence)
            if drops and sequence.yielding:
                self._yields_nothing(sequence)
            mine = sum(slot == sequence.cohort.index for slot, _ in out) if drops else 0
            lost = context = self._leave(sequence, dropped=mine)
            known = max(sequence.target, known) if self.policy.ahead else context + given
            self.blocks.release(sequence, context + given, known, again=True)
            for slot, iteration in out:
                self._stale.setdefault((slot, iteration), []).append(sequence)
            sequence.stale = len(out) + sequence.awaited
            sequence.target = context + 1 - len(out) - sequence.yielding
        else:
            # Its chunks count as processed, except this iteration's chunk.
            self.partials.pop(sequence, None)
            role = PART if self.drafting.pop(sequence, None) is None else DECODE
            lost = sequence.prefilled
            self.blocks.release(sequence, sequence.held, sequence.known, again=True)
            sequence.stale, sequence.hoped = sequence.awaited, 0
            if sequence._group >= 0:
                self._log_part(sequence, role)
        sequence.lost = lost
        self.events.extend((sequence.id, LOST, lost))
        self.endings.preempted(sequence)
        sequence.prefilled = 0
        sequence.yielding = False
        (self.waiting.append if last else self.waiting.appendleft)(sequence)
        self._preempted += 1
        if self._preempted > MANY_PREEMPTIONS + 10 * len(self.running):
            self._look_for_progress()
        return given

    def _look_for_progress(self) -> None:
        """Raise LivelockError if no sequence got a token since the last call."""
        here = [*self.running, *self.waiting]
        tokens = sum(s.target if s.cohort is None else self.held(s) for s in here)
        before, self._progress = self._progress, (self._finished, tokens)
        if before[0] == self._finished and before[1] >= tokens:
            raise LivelockError(
                f"{self._preempted} preemptions in a row, and no request got a token: "
                f"{len(self.running)} running and {len(self.waiting)} waiting requests take the "
                "KV cache from each other; give it more blocks, or let fewer run at a time"
            )
        self._preempted = 0

    def admit(
        self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = (), hold: int = 0
    ) -> None:
        """Let a waiting sequence run: it has the ``hits``, and computes ``tokens`` tokens more. It
        takes blocks for those, or for its first ``hold`` tokens if that is more. With speculation
        its last token may be padded with drafts, of which none holds."""
        if sequence.remote and sequence.order < 0 and not sequence.arrived:
            self.reserved.append(sequence)
        Scheduler.admit(self, sequence, tokens, hits, hold)
        if sequence.prefilled + tokens > sequence.target:
            self._verifying[sequence] = tokens
        else:
            self.partials[sequence] = None
        self.given[sequence] = tokens

    def reserve(self, sequence: Sequence, hits: tuple[Block, ...] = ()) -> None:
        """Let a waiting sequence hold blocks for its remote tokens, the ``hits`` among them. It is
        ``loading``. The KV of a sequence that ran before was kept nearby, and is there."""
        self.waiting.remove(sequence)
        sequence.prefilled = len(hits) * self.blocks.block_size
        self.blocks.take(sequence, sequence.remote, hits, sequence.prefilled)
        self.loading.append(sequence)
        if sequence.order < 0:
            self.reserved.append(sequence)
        else:
            sequence.arrived = True

    def start(self, sequence: Sequence) -> None:
        """Let a sequence whose KV arrived run; its next token is known, so it may decode now."""
        self.loading.remove(sequence)
        self._runs(sequence, sequence.prefilled, sequence.remote)
        self.blocks.enter(sequence, sequence.remote)
        self.blocks.computed(sequence, sequence.remote)
        sequence.known = sequence.target = sequence.remote
        if self.draft_length:
            sequence.target += 1
            self.drafting[sequence] = self.draft_length
            self._offer(sequence)
            return
        self._join(sequence, self._ready, sequence.remote)
        self.num_decodes += 1
        self.decode_blocks += sequence in self._ready.at_block_end()

    # The bookkeeping of requests ---------------------------------------------------------------

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
        verified: tuple[Chunk, ...] = (),
    ) -> Batch:
        """A cohort's next iteration, in which all its members decode."""
        iteration, decodes, context = home.iteration, len(home.members), home.context
        longest = home.offsets[-1] + iteration if decodes else 0
        if not (decodes or chunks or verified):
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
            if not self.draft_length:
                for sequence in yields:
                    self._join(sequence, home, sequence.target)
            members = partial(home.members_at, iteration)
        batch = Batch(
            home.index, chunks, prefill_tokens, decodes, context, longest, 0, (), members, yields,
            iteration,
        )  # fmt: skip
        if verified:
            sequences, tokens, contexts = zip(*verified, strict=True)
            batch.verified, batch.drafts = verified, sum(tokens) - len(tokens)
            batch.num_decodes, batch.members = len(sequences), lambda: sequences
            batch.decode_context, batch.longest_context = sum(contexts), max(contexts)
        return batch

    def _split(self) -> Cohort:
        """The cohort of the chosen decodes; the other possible decodes are in another slot then."""
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

    def _gather_drafts(self) -> None:
        """Find the decodes that are possible now. One that is in flight is, where iterations are
        formed ahead, as if all its drafts held, unless its next token may be the last."""
        self._verifying = {}
        for sequence in self.drafting:
            if not sequence.hoped or (self.policy.ahead and self._goes_on(sequence)):
                self._offer(sequence)

    def _offer(self, sequence: Sequence) -> None:
        """Note a decode with drafts as possible, unless the sequence is at its greatest length."""
        tokens = min(1 + self.drafting[sequence], self.max_length - sequence.prefilled - 1)
        if tokens > 0:
            self._verifying[sequence] = tokens
            self.num_decodes += 1
            self.decode_blocks += self.needs(sequence, tokens)

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether a sequence has more tokens to come, if those in flight yield one."""
        most = min(sequence.prompt_tokens + sequence.max_tokens, self.max_length)
        return sequence.target + 1 < most

    def _close_drafts(self, home: Cohort) -> tuple[tuple[Chunk, ...], tuple[Sequence, ...]]:
        """The decodes of a home's next iteration, and those of them that end a padded prompt."""
        verified: list[Chunk] = []
        padded: list[Sequence] = []
        slot, iteration = home.index, home.iteration
        for sequence in [each for each in self.given if each in self._verifying]:
            tokens = self.given.pop(sequence)
            verified.append((sequence, tokens, sequence.prefilled))
            sequence.prefilled += tokens
            sequence.awaited += tokens
            sequence.hoped += tokens
            if sequence not in self.drafting:
                self.drafting[sequence] = self.draft_length
                padded.append(sequence)
                role = RECOMPUTE if sequence.target > sequence.prompt_tokens else PREFILL
                self._log(sequence, role, slot, iteration, iteration)
                continue
            if sequence._next_iteration != iteration or sequence._group < 0:
                if sequence._group >= 0:
                    self._log_part(sequence, DECODE)
                sequence._group, sequence._span_first = slot, iteration
            sequence._next_iteration = iteration + 1
        return tuple(verified), tuple(padded)

    def _end(self, sequence: Sequence, cohort: Cohort, iteration: int) -> None:
        """Book the end of a sequence, whose last token ``iteration`` of ``cohort`` yielded."""
        self._finished += 1
        if sequence.drafted:
            self.events.extend((sequence.id, DRAFTED, sequence.drafted))
            self.events.extend((sequence.id, ACCEPTED, sequence.accepted))
        if sequence not in self.running:  # preempted, with this token on its way
            self.num_unfinished -= 1
            self.waiting.remove(sequence)
            if sequence.lost:
                self.events.extend((sequence.id, LOST, -sequence.lost))
        elif sequence.cohort is None:
            del self.drafting[sequence]
            if sequence._group >= 0:
                first, sequence._group = sequence._span_first, -1
                self._log(sequence, DECODE, cohort.index, first, iteration)
            known = sequence.known
            if self.blocks.late:
                known = min(sequence.prefilled, sequence.target) - 1
            self._finish(sequence, sequence.held, known)
        elif sequence.cohort is cohort:
            # Later iterations that were already formed computed tokens in vain.
            known = sequence.offset + iteration + 1
            self._finish(sequence, self._leave(sequence, iteration), known)
        else:
            known = self._returned(sequence)
            self._finish(sequence, self._leave(sequence, -1), known)
        self.emptied += not self.num_unfinished
