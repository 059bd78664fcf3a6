"""The one mutable part of scheduling: queue, memory, members and log of one replica.

The simulator and the real engine drive it with three calls::

    scheduler.add(request)             # it arrived
    batch = scheduler.next_batch()     # until this is None
    finished = scheduler.complete(batch)

It reads no clock, because the driver keeps the times. It knows no output length: the driver's
:class:`Endings` say which sequences have ended.

How an iteration is put together depends on the policy. In a
:class:`~sarathi_sim.policies.pool.Pool` it may hold any request, in
:class:`~sarathi_sim.policies.micro_batches.MicroBatches` the members of one micro-batch.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from .batch import Batch, Chunk
from .kv import Block, Blocks
from .log import (
    DECODE,
    HIT,
    HIT_AGAIN,
    PART,
    PREFILL,
    RECOMPUTE,
    REMOTE,
    PolicyError,
    span,
)
from .request import Cohort, Request, Sequence, check_at_least_1, too_long

Acceptance = Callable[[int, int, int], int]
"""How many drafts hold, from a request's id, its tokens so far, and the number of drafts."""


class Endings(Protocol):
    """The ends of sequences. A simulator knows the output lengths; a real engine sees tokens."""

    def added(self, request: Request) -> None:
        """A request was accepted."""

    def joined(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence decodes from the cohort's next iteration on."""

    def left(self, sequence: Sequence, cohort: Cohort) -> None:
        """An unfinished sequence stops decoding from the cohort's next iteration on."""

    def preempted(self, sequence: Sequence) -> None:
        """A sequence has to compute its tokens again, and may end with a chunk of them."""

    def accepted(self, sequence: Sequence, drafts: int) -> int:
        """How many of its ``drafts`` hold in the decode that returns; its ``target`` tokens are
        known before it."""

    def ended(self, batch: Batch, dropped: Collection[Sequence] = ()) -> list[Sequence]:
        """The sequences whose last token this batch yields; ``dropped`` ones lose theirs."""

    def none_end(self, batch: Batch) -> int:
        """In how many iterations from this batch on, all of decodes, nobody ends for sure."""


class OutputLengths:
    """The :class:`Endings` of a simulation, from the requests' true output lengths.

    A sequence that decodes yields a token in every iteration of its cohort, so the iteration that
    yields its last one is known when it joins. How many drafts hold is what ``acceptance`` says,
    from the request, its tokens so far and the number of drafts (None: none hold); drafts beyond
    its last token never do.
    """

    def __init__(self, acceptance: Acceptance | None = None) -> None:
        self._acceptance = acceptance
        # By request, the position of the last token it processes, which yields its last output.
        self._position: dict[int, int] = {}
        self._due: dict[tuple[int, int], list[Sequence]] = {}  # by slot and iteration
        self._with_chunks = False  # whether a chunk has ever been able to yield a last token

    def added(self, request: Request) -> None:
        self._position[request.id] = request.prompt_tokens + request.output_tokens - 2
        self._with_chunks = self._with_chunks or request.output_tokens == 1

    def joined(self, sequence: Sequence, cohort: Cohort) -> None:
        last = self._position[sequence.id] - sequence.offset
        if last >= cohort.iteration:
            self._due.setdefault((cohort.index, last), []).append(sequence)

    def left(self, sequence: Sequence, cohort: Cohort) -> None:
        last = self._position[sequence.id] - sequence.offset
        if last >= cohort.iteration:
            self._due[cohort.index, last].remove(sequence)

    def preempted(self, sequence: Sequence) -> None:
        self._with_chunks = True

    def accepted(self, sequence: Sequence, drafts: int) -> int:
        last = self._position.get(sequence.id)
        if last is None or self._acceptance is None:
            return 0
        held = self._acceptance(sequence.id, sequence.target, drafts)
        return min(held, last + 1 - sequence.target)

    def none_end(self, batch: Batch) -> int:
        first, slot = batch.iteration, batch.slot
        ends = (last for of, last in self._due if of == slot and last >= first)
        return min(ends, default=first) - first

    def ended(self, batch: Batch, dropped: Collection[Sequence] = ()) -> list[Sequence]:
        found = self._due.pop((batch.slot, batch.iteration), None)
        if batch.yields and self._with_chunks:
            for sequence, tokens, context in batch.chunks:
                if context + tokens - 1 == self._position.get(sequence.id):
                    found = [*(found or ()), sequence]
        for sequence, _, _ in batch.verified:
            last = self._position.get(sequence.id)
            if last is not None and sequence.target == last + 2:
                found = [*(found or ()), sequence]
        if found is None:
            return []
        if dropped:
            found = [sequence for sequence in found if sequence not in dropped]
        for sequence in found:
            del self._position[sequence.id]
        return found


@dataclass(slots=True, eq=False)
class Scheduler:
    """The life of a request on one replica: it waits, is admitted, decodes, and ends.

    Tokens count as processed (``Sequence.prefilled``, a cohort's contexts) from when they are
    scheduled.

    ``policy``   decides what an iteration does
    ``blocks``   the KV cache
    ``waiting``  sequences that hold no memory, in the order in which they are served
    ``loading``  sequences that hold memory and do not run, because their KV is computed elsewhere:
                 it is on its way, or there (``arrived``)
    ``running``  sequences that run, and hold memory, in the order of admission
    ``cohorts``  by slot, the decoding sequences
    ``idle``     true if one more iteration may be in flight
    ``spans``    the log of the iterations of each request: request, role, slot, first and last
                 iteration. The spans of one request are in order
    ``events``   the log of the cache: request, what happened (HIT, HIT_AGAIN, LOST or REMOTE), and
                 the tokens; of speculation: request, DRAFTED or ACCEPTED, and the tokens
    ``kv_log``   blocks in use after each iteration was formed, with paged memory
    """

    policy: Any
    blocks: Blocks
    _: KW_ONLY
    max_in_flight: int = 1
    max_length: int
    endings: Endings = field(default_factory=OutputLengths)
    max_batch: int = field(init=False)
    idle: Any = field(init=False, default=True)
    waiting: Any = field(init=False, default_factory=deque[Sequence])
    loading: Any = field(init=False, default_factory=deque[Sequence])
    running: dict[Sequence, None] = field(init=False, default_factory=dict)
    cohorts: list[Any] = field(init=False, default_factory=list)
    # Arrays, because a long run has millions of numbers.
    spans: array[int] = field(init=False, default_factory=lambda: array("q"))
    events: array[int] = field(init=False, default_factory=lambda: array("q"))
    kv_log: array[int] = field(init=False, default_factory=lambda: array("i"))
    # By id, sequences that ended and send their KV, with the tokens that it and the cache hold.
    sending: dict[int, tuple[Sequence, int, int]] = field(init=False, default_factory=dict)
    num_unfinished: int = field(init=False, default=0)
    """Accepted requests that are not finished."""
    _orders: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        check_at_least_1(max_in_flight=self.max_in_flight, max_length=self.max_length)

    @property
    def kv_capacity(self) -> int:
        """The tokens that the memory holds."""
        return self.blocks.capacity * self.blocks.block_size

    # What drivers use ----------------------------------------------------------------------------

    def set_costs(self, iteration_s: Callable[[Batch], float]) -> None:
        """Set the function for the seconds of an iteration, for policies that ask for them."""

    def refusal(self, request: Request) -> str | None:
        """The reason why the request can never be served, or None."""
        return too_long(request, self.max_length) or self.blocks.refusal(request)

    def add(self, request: Request) -> str | None:
        """Queue an arrived request. Returns why it is rejected, or None."""
        reason = self.refusal(request)
        if reason is None:
            self.num_unfinished += 1
            self.endings.added(request)
            self.waiting.append(
                Sequence(
                    request.id,
                    request.prompt_tokens,
                    request.max_tokens,
                    self.blocks.reservation(request),
                    request.arrival_s,
                    request.priority,
                    request.prefix,
                    request.user,
                    request.remote_tokens,
                    request.sends_kv,
                )
            )
        return reason

    def next_batch(self) -> Batch | None:
        """Form the next iteration; None if none can be formed now."""
        raise NotImplementedError

    def complete(self, batch: Batch) -> list[Sequence]:
        """Book an iteration that returned from the last stage; returns the finished sequences."""
        raise NotImplementedError

    def repeats(self, batch: Batch) -> int:
        """How often the same happens once more when this batch has returned: nobody ends, and an
        iteration like it is formed, in which all running sequences decode, unless one arrives."""
        return 0

    def repeat(self, batch: Batch, times: int) -> None:
        """Book that so many batches returned, and as many were formed, as :meth:`repeats` says;
        ``batch`` is one of them."""

    # The life of a request -----------------------------------------------------------------------

    def admit(
        self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = (), hold: int = 0
    ) -> None:
        """Let a waiting sequence run: it has the ``hits``, and computes ``tokens`` tokens more.

        It takes blocks for these tokens, or for its first ``hold`` tokens if that is more. A
        sequence that runs for the first time has its remote tokens, too, whether it was ``loading``
        or not. Raises PolicyError for a sequence that is not waiting.
        """
        try:
            (self.loading if sequence.arrived else self.waiting).remove(sequence)
        except ValueError:
            raise PolicyError(f"{sequence} is neither waiting nor a member") from None
        done = cached = len(hits) * self.blocks.block_size if hits else sequence.prefilled
        target = sequence.target
        if sequence.remote and sequence.order < 0:
            done = max(cached, min(sequence.remote, target - 1))
        total = done + tokens
        known = total if total < target else target
        whole = self.until(total)
        self.blocks.take(sequence, whole if whole > hold else hold, hits, known)
        self._runs(sequence, cached, done)
        sequence.known = known

    def until(self, tokens: int) -> int:
        """The tokens for which a sequence needs KV while its first ``tokens`` are computed."""
        return tokens

    def _runs(self, sequence: Sequence, cached: int, done: int) -> None:
        """A sequence runs from now on: ``done`` tokens have KV, ``cached`` of them by the cache."""
        again = sequence.order >= 0
        if cached:
            self.events.extend((sequence.id, HIT_AGAIN if again else HIT, cached))
        if done > cached:
            self.events.extend((sequence.id, HIT_AGAIN if again else REMOTE, done - cached))
        sequence.prefilled = done
        sequence.arrived = False
        sequence.order = self._orders
        self._orders += 1
        self.running[sequence] = None

    def _close_chunks(
        self, home: Cohort, given: Iterable[tuple[Sequence, int]]
    ) -> tuple[tuple[Chunk, ...], int, tuple[Sequence, ...]]:
        """The chunks of a cohort's next iteration, their tokens, and the prompts that end with it.
        Raises PolicyError for a chunk that is not within the rest of its prompt."""
        chunks: list[Chunk] = []
        yields: list[Sequence] = []
        prefill_tokens, slot, iteration = 0, home.index, home.iteration
        for sequence, tokens in given:
            done, target = sequence.prefilled, sequence.target
            if not 0 < tokens <= target - done:
                raise PolicyError(f"a chunk of {tokens} tokens does not fit {sequence}")
            chunks.append((sequence, tokens, done))
            prefill_tokens += tokens
            if sequence._group != slot or sequence._next_iteration != iteration:
                if sequence._group >= 0:
                    if sequence._next_iteration > iteration and sequence._group == slot:
                        raise PolicyError(f"the plan holds two chunks of {sequence}")
                    self._log_part(sequence)
                sequence._group, sequence._span_first = slot, iteration
            sequence._next_iteration = iteration + 1
            sequence.prefilled = done = done + tokens
            if done == target:
                yields.append(sequence)
                role = RECOMPUTE if target > sequence.prompt_tokens else PREFILL
                first, sequence._group = sequence._span_first, -1
                self.spans.frombytes(span(sequence.id, role, slot, first, iteration))
        return tuple(chunks), prefill_tokens, tuple(yields)

    def _log_part(self, sequence: Sequence, role: int = PART) -> None:
        """Log a span of chunks that ended with no token, or of decodes with drafts."""
        first, last = sequence._span_first, sequence._next_iteration - 1
        self._log(sequence, role, sequence._group, first, last)
        sequence._group = -1

    def _log(self, sequence: Sequence, role: int, slot: int, first: int, last: int) -> None:
        """Log a span, if it is not empty."""
        if last >= first:
            self.spans.frombytes(span(sequence.id, role, slot, first, last))

    def _join(self, sequence: Sequence, cohort: Cohort, context: int) -> None:
        """Let a sequence decode from the cohort's next iteration on."""
        cohort.join(sequence, context)
        sequence.cohort = cohort
        self.endings.joined(sequence, cohort)

    def _leave(self, sequence: Sequence, last: int | None = None, dropped: int = 0) -> int:
        """Take a sequence out of its cohort; returns its context. If it has ended, ``last`` is the
        last iteration of its span, if it took part in it. The last ``dropped`` iterations yield it
        no token."""
        cohort, sequence.cohort = sequence.cohort, None
        assert cohort is not None
        if last is None:
            self.endings.left(sequence, cohort)
        first, stop = cohort.leave(sequence)
        if last is None or last >= stop:
            last = stop - 1
        if last - dropped >= first:
            self.spans.frombytes(span(sequence.id, DECODE, cohort.index, first, last - dropped))
        if dropped:
            self._log(sequence, PART, cohort.index, last - dropped + 1, last)
        return sequence.offset + stop

    def _move(self, sequence: Sequence, to: Cohort) -> None:
        self._join(sequence, to, self._leave(sequence))

    def _finish(self, sequence: Sequence, context: int = 0, known: int = 0) -> None:
        """A running sequence has its last token: release the memory of its ``context`` tokens, of
        which the first ``known`` may stay in the prefix cache. If it sends its KV, hold it."""
        self.num_unfinished -= 1
        del self.running[sequence]
        if sequence.sends:
            self.blocks.computed(sequence, sequence.target)
            self.sending[sequence.id] = sequence, context, known
        else:
            self.blocks.release(sequence, context, known, again=False)
