"""A pool with paged memory as a textbook would write it: lists, loops, and every block an object.

It replaces ``sarathi_sim.policies.pool``, ``scheduler`` and ``kv`` in the textbook simulation.
Policies act on :class:`TextbookPool` as they act on :class:`~sarathi_sim.policies.pool.Pool`. It
visits each sequence in every iteration, and counts its computed tokens and its tokens in flight for
it alone. A request ends by its own output length.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.log import ACCEPTED, DRAFTED, HIT, HIT_AGAIN, LOST, REMOTE
from sarathi_sim.policies.pool import PoolPolicy, by_admission
from sarathi_sim.policies.request import Request, Sequence
from tests.textbook.blocks import TextbookBlock, TextbookBlocks
from tests.textbook.pipeline import Member


@dataclass(eq=False, slots=True)
class PoolMember(Member):
    """A request in a pool.

    ``computed`` tokens have KV or are scheduled, ``out`` of them are in flight; ``pending`` output
    tokens are on their way where iterations are formed ahead; it may ``decode_at`` that step. It
    has blocks for ``holds`` tokens. ``token_s`` is when its tokens were there: with drafts several
    at a time. Of its ``drafts`` that came back so many ``held``.
    """

    computed: int = 0
    lost: int = 0
    out: int = 0
    pending: int = 0
    decode_at: int = 0
    holds: int = 0
    drafts: int = 0
    held: int = 0
    token_s: array[float] = field(default_factory=lambda: array("d"))

    @property
    def known(self) -> int:
        return self.request.prompt_tokens + self.generated

    @property
    def partial(self) -> bool:
        return self.computed < self.sequence.target


def _place(row: Row) -> tuple[bool, int]:
    """Chunks are booked before decodes, each in the order of admission."""
    member, _, chunk, _, _ = row
    return not chunk, member.sequence.order


Row = tuple[PoolMember, int, bool, bool, bool]
"""Who is in an iteration, its tokens there, whether of a chunk, whether it yields a token, and
whether its drafts are padding."""


class TextbookPool:
    """What a pool policy sees and does (see :class:`~sarathi_sim.policies.pool.Pool`), with plain
    lists.

    ``check`` has every block looked at after every event.
    """

    def __init__(
        self,
        policy: PoolPolicy,
        blocks: TextbookBlocks,
        max_length: int,
        stages: int,
        check: bool,
        draft_length: int = 0,
        lookahead: int = 0,
        acceptance: Callable[[int, int, int], int] = lambda *_: 0,
        draft_slots: int = 0,
    ) -> None:
        self.policy = policy
        self.draft_length = draft_length
        self.lookahead = lookahead
        self.draft_slots = draft_slots
        self.acceptance = acceptance
        self.padded: list[Sequence] = []
        self.check = check
        self.blocks = blocks
        self.max_length = max_length
        self.stages = stages
        self.step = 0
        self.members: dict[Sequence, PoolMember] = {}
        self.waiting: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.running: list[Sequence] = []
        self.sending: dict[int, Sequence] = {}
        self.reserved: list[Sequence] = []
        self.remote = False
        self.ready: list[Sequence] = []
        self.given: dict[Sequence, int] = {}
        self.events: list[tuple[int, int, int]] = []
        self.state: dict[str, Any] = {}
        self.emptied = 0
        self._admitted = 0

    def add(self, request: Request) -> bool:
        if request.sends_kv:
            request = replace(request, output_tokens=1, max_tokens=1)
        if self.refuses(request):
            return False
        sequence = Sequence(
            request.id, request.prompt_tokens, request.max_tokens, 0,
            arrival_s=request.arrival_s, priority=request.priority, prefix=request.prefix,
            user=request.user, remote=request.remote_tokens, sends=request.sends_kv,
        )  # fmt: skip
        self.members[sequence] = PoolMember(request, sequence)
        self.remote |= request.remote_tokens > 0
        self.queue(sequence, len(self.waiting))
        return True

    def refuses(self, request: Request) -> bool:
        length = request.prompt_tokens + request.max_tokens
        most = length - 1
        if self.draft_length:
            decodes = 2 if self.policy.ahead and not self.lookahead else 1  # in flight
            most = min(most + decodes * self.draft_length, self.max_length - 1)
        needed = self.blocks.blocks(self.until(most))
        return length > self.max_length or needed > self.blocks.capacity - self.blocks.state_blocks

    @property
    def vacant(self) -> bool:
        return not self.blocks.tables

    def received(self, ids: Iterable[int]) -> None:
        for id in ids:
            next(each for each in self.loading if each.id == id).arrived = True

    def sent(self, id: int) -> None:
        sequence = self.sending.pop(id)
        self.blocks.computed(sequence, sequence.target)
        self.blocks.release(sequence)

    def reserve(self, sequence: Sequence, hits: tuple[TextbookBlock, ...] = ()) -> None:
        """Give a waiting sequence blocks for its remote tokens; it runs when their KV is there."""
        member = self.members[sequence]
        self.waiting.remove(sequence)
        self.blocks.take(sequence, sequence.remote, hits)
        member.holds = sequence.remote
        member.computed = sequence.prefilled = len(hits) * self.blocks.block_size
        self.loading.append(sequence)
        if self.policy.order is not None:
            self.loading.sort(key=self.policy.order)
        if sequence.order < 0:
            self.reserved.append(sequence)
        sequence.arrived = sequence.order >= 0

    def start(self, sequence: Sequence) -> None:
        member = self.members[sequence]
        self.loading.remove(sequence)
        self._has(member, sequence.remote)
        sequence.target = sequence.remote
        self.blocks.enter(sequence, sequence.remote)
        self.blocks.computed(sequence, sequence.remote)
        member.generated = max(member.generated, 1)
        self._runs(sequence)
        self.ready.append(sequence)

    def _has(self, member: PoolMember, tokens: int) -> None:
        """A sequence has KV for so many tokens, beyond those found in the cache."""
        found, sequence = member.computed, member.sequence
        again = sequence.order >= 0
        if found:
            self.events.append((sequence.id, HIT_AGAIN if again else HIT, found))
        if tokens > found:
            self.events.append((sequence.id, HIT_AGAIN if again else REMOTE, tokens - found))
        member.computed = sequence.prefilled = tokens

    def _runs(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        sequence.arrived = False
        sequence.order = self._admitted
        self._admitted += 1

    @property
    def partials(self) -> list[Sequence]:
        return [s for s in self.running if self.members[s].partial]

    @property
    def num_decodes(self) -> int:
        return len(self.ready)

    @property
    def decode_blocks(self) -> int:
        return sum(self.needs(sequence, self.remaining(sequence)) for sequence in self.ready)

    @property
    def most_drafts(self) -> int:
        """Drafts of all decodes of a sequence that may be in flight."""
        return 2 * self.draft_length if self.policy.ahead else self.draft_length

    @property
    def decode_tokens(self) -> int:
        return sum(self.remaining(sequence) for sequence in self.ready)

    @property
    def drafting(self) -> list[Sequence]:
        found = [s for s in self.running if not self.members[s].partial]
        return found if self.draft_length else []

    def decodes_all(self) -> int:
        for sequence in self.ready:
            self.run(sequence, self.remaining(sequence))
        return self.decode_tokens

    def decoding(self) -> list[Sequence]:
        return [sequence for sequence in self.given if sequence in self.ready]

    def eligible(self) -> list[Sequence]:
        return [s for s in self.running if s in self.ready or self.members[s].partial]

    def remaining(self, sequence: Sequence) -> int:
        context = self.context(sequence)
        if sequence not in self.ready:
            return sequence.target - context
        return min(1 + self.draft_length, max(self.max_length - context - 1, 1))

    def context(self, sequence: Sequence) -> int:
        return self.members[sequence].computed

    def needs(self, sequence: Sequence, tokens: int) -> int:
        return self.blocks.need(sequence, self.until(self.context(sequence) + tokens))

    def until(self, tokens: int) -> int:
        """Whoever computes so many tokens needs room for so many."""
        return min(tokens + self.lookahead, self.max_length) if self.lookahead else tokens

    def run(self, sequence: Sequence, tokens: int) -> None:
        member = self.members[sequence]
        total = member.computed + tokens
        member.holds = max(member.holds, self.until(total))
        self.blocks.take(sequence, member.holds)
        self.blocks.enter(sequence, min(total, member.known))
        self.given[sequence] = tokens

    def held(self, sequence: Sequence) -> int:
        """Tokens that a running sequence has blocks for, a decode of this iteration left out."""
        holds = self.members[sequence].holds
        return holds - (sequence in self.ready and sequence in self.given and not self.draft_length)

    def generated(self, sequences: Iterable[Sequence]) -> list[int]:
        return [self.members[sequence].generated for sequence in sequences]

    @property
    def drained(self) -> int:
        """Running sequences that decode no longer, because all their tokens are scheduled."""
        if not self.policy.ahead:
            return 0
        members = [self.members[s] for s in self.running]
        return sum(self._over(m) and self.step >= m.decode_at for m in members)

    def put_back(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.order = self._admitted
            self._admitted += 1
        self.running.sort(key=by_admission)
        self.ready.sort(key=by_admission)

    def newest(self) -> Sequence:
        return self.running[-1]

    def preempt(self, sequence: Sequence, *, last: bool = False) -> int:
        """Take its memory from a running sequence; it waits again. Returns its tokens of now."""
        member = self.members[sequence]
        self.running.remove(sequence)
        if sequence in self.ready:
            self.ready.remove(sequence)
        self.blocks.release(sequence)
        self.events.append((sequence.id, LOST, member.computed))
        member.lost = member.computed
        member.computed = member.pending = member.holds = 0
        sequence.prefilled, sequence.target, sequence.stale = 0, member.known, member.out
        self.queue(sequence, len(self.waiting) if last else 0)
        return self.given.pop(sequence, 0)

    def admit(
        self, sequence: Sequence, tokens: int, hits: tuple[TextbookBlock, ...] = (), hold: int = 0
    ) -> None:
        """Let a waiting sequence run: it has the ``hits``, and computes ``tokens`` tokens more.

        It takes blocks for those, or for its first ``hold`` tokens if that is more.
        """
        member = self.members[sequence]
        if sequence.arrived:
            self.loading.remove(sequence)
        else:
            self.waiting.remove(sequence)
            member.computed = len(hits) * self.blocks.block_size
            if sequence.remote and sequence.order < 0:  # nothing has to be sent
                self.reserved.append(sequence)
        # What is sent here is sent once; the last token of a prompt is computed here.
        sent = min(sequence.remote, sequence.target - 1) if sequence.order < 0 else 0
        self._has(member, max(member.computed, sent))
        self._runs(sequence)
        total = member.computed + tokens
        if total > sequence.target:
            self.ready.append(sequence)
            self.padded.append(sequence)
        member.holds = max(self.until(total), hold)
        self.blocks.take(sequence, member.holds, hits)
        self.blocks.enter(sequence, min(total, member.known))
        self.given[sequence] = tokens

    def queue(self, sequence: Sequence, place: int) -> None:
        self.waiting.insert(place, sequence)
        if self.policy.order is not None:
            self.waiting.sort(key=self.policy.order)

    def look(self) -> None:
        self.given, self.padded = {}, []
        self.ready = [s for s in self.running if self._decodes_next(self.members[s])]

    def form(self) -> tuple[Batch, list[Row]]:
        self.look()
        self.step += 1
        self.policy.plan(cast(Any, self))
        self._checked()
        return self._batch(), [self._scheduled(*given) for given in self.given.items()]

    def _decodes_next(self, member: PoolMember) -> bool:
        if member.partial:
            return False
        if not self.policy.ahead:
            return member.computed < member.known
        if self.draft_length and member.computed + 1 >= self.max_length:
            return False
        # Until all the tokens it may have are on their way.
        return not self._over(member) and self.step + 1 >= member.decode_at

    def _over(self, member: PoolMember) -> bool:
        request = member.request
        longest = min(request.prompt_tokens + request.max_tokens, self.max_length)
        return not member.partial and member.known + member.pending >= longest

    def _batch(self) -> Batch:
        chunks = [(s, n, self.context(s)) for s, n in self.given.items() if s not in self.ready]
        members = self.decoding()
        contexts = [self.context(sequence) for sequence in members]
        verified = [
            (s, self.given[s], context)
            for s, context in zip(members, contexts, strict=True)
            if self.draft_length
        ]
        return Batch(
            slot=0,
            chunks=tuple(chunks),
            prefill_tokens=sum(tokens for _, tokens, _ in chunks),
            num_decodes=len(members),
            decode_context=sum(contexts),
            longest_context=max(contexts, default=0),
            members=lambda: members,
            verified=tuple(verified),
            drafts=sum(tokens - 1 for _, tokens, _ in verified),
        )

    def _scheduled(self, sequence: Sequence, tokens: int) -> Row:
        member, chunk = self.members[sequence], sequence not in self.ready
        member.computed += tokens
        member.out += tokens
        sequence.prefilled = min(member.computed, sequence.target)
        yields = not member.partial
        if yields and self.policy.ahead:
            member.pending += 1
            member.decode_at = self.step + self.stages
        if chunk:
            sequence.awaited += tokens
        return member, tokens, chunk, yields, sequence in self.padded

    def returned(self, rows: list[Row], now: float) -> None:
        """What an iteration computed has come back: refused drafts are booked first, ends then."""
        drops = getattr(self.policy, "drops", False)
        ends = list[tuple[int, int, int]]()
        for member, tokens, chunk, yields, padded in sorted(rows, key=_place):
            sequence = member.sequence
            if chunk:
                sequence.awaited -= tokens
            member.out -= tokens
            stale = sequence.stale > 0
            if stale:
                sequence.stale -= tokens
            if not yields or member.finish_s >= 0:
                continue
            drafts = 0 if chunk else tokens - 1
            held = 0
            if not padded and drafts:
                left = member.request.output_tokens - member.generated - 1
                held = min(self.acceptance(sequence.id, member.known, drafts), left)
            member.drafts += drafts
            # (A sequence whose KV is lost cannot send it.)
            dropped = stale and (drops or sequence.sends)
            if stale and (refused := drafts - (0 if dropped else held)):
                member.lost -= refused  # drafts that did not hold were none of its tokens
                self.events.append((sequence.id, LOST, -refused))
            if dropped:
                continue
            member.held += held
            if not member.generated:
                member.first_token_s = now
            member.generated += 1 + held
            member.token_s.append(now)
            if stale:
                sequence.target += 1 + held
            else:
                member.computed -= drafts - held
                if self.policy.ahead:
                    member.pending -= 1
                    self.blocks.enter(sequence, member.known - 1)
            if member.generated == member.request.output_tokens:
                member.finish_s = now
                if member.drafts:
                    ends.append((sequence.id, DRAFTED, member.drafts))
                    ends.append((sequence.id, ACCEPTED, member.held))
                if sequence in self.running:
                    self.running.remove(sequence)
                    self.blocks.computed(sequence, min(member.computed, member.known))
                    if sequence.sends:
                        self.sending[sequence.id] = sequence
                    else:
                        self.blocks.release(sequence)
                else:
                    self.waiting.remove(sequence)
                    if member.lost:
                        ends.append((sequence.id, LOST, -member.lost))
                self.emptied += not (self.running or self.waiting or self.loading)
            elif chunk and not stale:
                self.blocks.computed(sequence, sequence.target)
        self.events += ends
        self._checked()

    def _checked(self) -> None:
        """Every block is free or held by a running sequence, as many as its tokens take."""
        if self.check:
            self.blocks.check()
            holders = [*self.running, *self.loading, *self.sending.values()]
            assert set(self.blocks.tables) == set(holders)
            assert len({*holders, *self.waiting}) == len(holders) + len(self.waiting)
            for sequence, table in self.blocks.tables.items():
                assert len(table) == self.blocks.blocks(self.members[sequence].holds)
