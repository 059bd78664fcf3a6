"""The one mutable part of scheduling: the queue, the KV cache, the micro-batches in flight.

The simulator and the real engine drive it with three calls::

    scheduler.add(request)             # it arrived
    batch = scheduler.next_batch()     # until this is None
    finished = scheduler.complete(batch)

It reads no clock: the driver keeps the times. It logs ``spans``, as integers: the consecutive
iterations of a group in which a request took part, and its role in them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from functools import partial

from sarathi_sim.policies.batch import Batch, Chunk
from sarathi_sim.policies.group import Group
from sarathi_sim.policies.log import DECODE, PADDING, PREFILL, PolicyError, span
from sarathi_sim.policies.policy import Plan, Policy
from sarathi_sim.policies.request import Request, Sequence, check_at_least_1, too_long


def _is_empty(group: Group) -> bool:
    return not (group.num_decodes or group.prefilling)


class Scheduler:
    """Queues requests, asks the policy, and does the bookkeeping of one replica.

    ``max_in_flight`` micro-batches share ``kv_capacity`` KV tokens; each holds at most
    ``max_batch`` sequences. Admitting a sequence reserves the KV tokens of ``max_length`` (the
    paper's pre-allocation), or with ``reserve_declared`` those of its own declared length. So every
    admitted sequence can finish (invariant 2).

    A sequence stays in the micro-batch that admitted it. With ``free_pool`` it may join any: a new
    micro-batch is formed from the group with members that returned first. It first takes the
    members of the other idle groups, in the order in which these returned.

    ``ended`` tells whom a batch ended. A real engine gives it, because it learns that from the
    tokens; then requests' output lengths are not read.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_batch: int,
        max_in_flight: int = 1,
        kv_capacity: int,
        max_length: int,
        reserve_declared: bool = False,
        free_pool: bool = False,
        ended: Callable[[Batch], list[Sequence]] | None = None,
    ) -> None:
        check_at_least_1(
            max_batch=max_batch,
            max_in_flight=max_in_flight,
            kv_capacity=kv_capacity,
            max_length=max_length,
        )
        if free_pool and policy.holds_finished:
            raise ValueError("a policy that holds finished sequences needs bound micro-batches")
        self.policy = policy
        self.max_batch = max_batch
        self.max_in_flight = max_in_flight
        self.kv_capacity = kv_capacity
        self.max_length = max_length
        self.reserve_declared = reserve_declared
        self.free_pool = free_pool
        self.ended = ended
        self.free_kv = kv_capacity
        self.waiting: deque[Sequence] = deque()
        self.groups = [Group(i, self.waiting, max_batch) for i in range(max_in_flight)]
        self.idle = list(self.groups)  # not in flight, in the order in which they returned
        # Five numbers each: request, what it does, group, first and last iteration. Those of one
        # request in order. An array, because a long run has millions of them.
        self.spans: array[int] = array("q")
        self._output_tokens: dict[int, int] = {}

    def set_costs(self, iteration_s: Callable[[Batch], float]) -> None:
        """Set the function for the seconds of an iteration (``View.cost``)."""
        for group in self.groups:
            group.view.cost = partial(self._cost, group, iteration_s)

    def _cost(
        self, group: Group, iteration_s: Callable[[Batch], float], sequence: Sequence, tokens: int
    ) -> float:
        chunks = ((sequence, tokens, sequence.prefilled),)
        longest = group.offsets[-1] + group.iteration if group.offsets else 0
        return iteration_s(
            Batch(
                group.index, chunks, tokens, group.num_decodes, group.context,
                max(longest, group.held_longest), len(group.held), (), group.members,
            )
        )  # fmt: skip

    def refusal(self, request: Request) -> str | None:
        """The reason why the request can never be served, or None."""
        if reason := too_long(request, self.max_length):
            return reason
        if self._reservation(request) > self.kv_capacity:
            return (
                f"reserves {self._reservation(request)} KV tokens, "
                f"but the replica holds {self.kv_capacity}"
            )
        return None

    def add(self, request: Request) -> str | None:
        """Queue an arrived request. Returns why it is rejected, or None."""
        reason = self.refusal(request)
        if reason is None:
            known = self.ended is None
            self._output_tokens[request.id] = request.output_tokens if known else request.max_tokens
            self.waiting.append(
                Sequence(
                    request.id,
                    request.prompt_tokens,
                    request.max_tokens,
                    self._reservation(request),
                )
            )
        return reason

    def next_batch(self) -> Batch | None:
        """Form the next micro-batch, or return None if no request has work."""
        idle = self.idle
        pooled = self.free_pool and len(idle) > 1
        if pooled:
            # Members first: an empty group would have to take them in one by one.
            idle.sort(key=_is_empty)
        for position, group in enumerate(idle):
            if pooled:
                self._gather(group)
            decodes = group.num_decodes
            if not (decodes or self.waiting or group.prefilling):
                continue  # a policy could do nothing
            view = group.view
            view.num_decodes = decodes
            view.free_slots = self.max_batch - len(group.prefilling) - decodes
            view.free_kv = self.free_kv
            plan = self.policy.plan(view)
            if plan is not None:
                del idle[position]
                return self._form(group, plan)
            if pooled and _is_empty(group):
                return None  # the pool is empty, so the other groups are, too
        return None

    def complete(self, batch: Batch) -> list[Sequence]:
        """Book a micro-batch that returned from the last stage; returns the finished sequences."""
        group = self.groups[batch.slot]
        iteration = group.iteration
        group.context += batch.num_decodes - batch.padding
        if batch.chunks:
            for sequence, tokens, _ in batch.chunks:
                sequence.prefilled += tokens
                if sequence.prefilled == sequence.prompt_tokens:
                    group.prefilling.remove(sequence)
                    decodes = self._output_tokens[sequence.id] - 1
                    group.join(sequence, sequence.prompt_tokens, decodes, iteration + 1)
                    self._close_span(sequence, PREFILL, iteration)
                    sequence._span_first = iteration + 1
        if self.ended is not None:
            for sequence in self.ended(batch):
                self._output_tokens[sequence.id] -= group.end(sequence, iteration)
        group.iteration = iteration + 1
        self.idle.append(group)
        finished = group.due.pop(iteration, None)
        if finished is None:
            return []
        if self.policy.holds_finished:
            return self._hold(group, finished, iteration)
        for sequence in finished:
            group.num_decodes -= 1
            context = sequence.prompt_tokens + self._output_tokens[sequence.id] - 1
            group.context -= context
            group.forget_context(context)
            self._close_span(sequence, DECODE, iteration)
            self._retire(group, sequence)
        return finished

    @property
    def num_unfinished(self) -> int:
        """Accepted requests that are not finished."""
        return len(self._output_tokens)

    def _reservation(self, request: Request) -> int:
        if self.reserve_declared:
            return request.prompt_tokens + request.max_tokens
        return self.max_length

    def _form(self, group: Group, plan: Plan) -> Batch:
        """Carry out a plan: admit, skip, and form the batch."""
        decodes = group.num_decodes
        context = group.context
        offsets = group.offsets
        longest = offsets[-1] + group.iteration if offsets else 0
        if group.held:
            longest = max(longest, group.held_longest)
        if plan.skip:
            if len(set(plan.skip)) < len(plan.skip):
                raise PolicyError("the plan skips a sequence twice")
            decodes -= len(plan.skip)
            held, longest = self._skip(group, plan.skip)
            context -= held
        if not plan.chunks:
            if not decodes:
                raise PolicyError("the plan is empty: return None when there is nothing to do")
            return Batch(
                group.index, (), 0, decodes, context, longest, len(group.held), plan.skip,
                group.members,
            )  # fmt: skip
        chunks: list[Chunk] = []
        prefill_tokens = 0
        iteration = group.iteration
        for sequence, tokens in plan.chunks:
            done = sequence.prefilled
            if not 1 <= tokens <= sequence.prompt_tokens - done:
                raise PolicyError(f"a chunk of {tokens} tokens does not fit {sequence}")
            if sequence in group.prefilling:
                if sequence._group == group.index and sequence._next_iteration > iteration:
                    raise PolicyError(f"the plan holds two chunks of {sequence}")
            else:
                self._admit(group, sequence)
            if sequence._group != group.index or sequence._next_iteration != iteration:
                self._close_span(sequence, PREFILL, sequence._next_iteration - 1)
                sequence._group = group.index
                sequence._span_first = iteration
            sequence._next_iteration = iteration + 1
            chunks.append((sequence, tokens, done))
            prefill_tokens += tokens
        return Batch(
            group.index, tuple(chunks), prefill_tokens, decodes, context, longest,
            len(group.held), plan.skip, group.members,
        )  # fmt: skip

    def _admit(self, group: Group, sequence: Sequence) -> None:
        if group.size >= self.max_batch or sequence.kv_tokens > self.free_kv:
            raise PolicyError(f"{sequence} was admitted without a free slot or free KV tokens")
        if self.waiting and self.waiting[0] is sequence:
            self.waiting.popleft()
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            raise PolicyError(f"{sequence} is neither waiting nor a member of this micro-batch")
        self.free_kv -= sequence.kv_tokens
        group.prefilling.append(sequence)

    def _retire(self, group: Group, sequence: Sequence) -> None:
        del group.decoding[sequence], group.last_iteration[sequence]
        self.free_kv += sequence.kv_tokens
        del self._output_tokens[sequence.id]

    def _hold(self, group: Group, finished: list[Sequence], iteration: int) -> list[Sequence]:
        """Keep the finished as padding; release the whole group once all its members are done."""
        group.held += finished
        for sequence in finished:
            context = sequence.prompt_tokens + self._output_tokens[sequence.id] - 1
            group.forget_context(context)
            group.held_longest = max(group.held_longest, context)
            self._close_span(sequence, DECODE, iteration)
            sequence._span_first = iteration + 1
        if group.prefilling or len(group.held) < group.num_decodes:
            return []
        released, group.held = group.held, []
        group.num_decodes = group.context = group.held_longest = 0
        for sequence in released:
            self._close_span(sequence, PADDING, iteration)
            self._retire(group, sequence)
        return released

    def _skip(self, group: Group, skipped: tuple[Sequence, ...]) -> tuple[int, int]:
        """Postpone the skipped members' decodes.

        Returns the context they hold, summed, and the longest of the members that remain.
        """
        contexts = []
        iteration = group.iteration
        for sequence in skipped:
            if sequence not in group.decoding or sequence in group.held:
                raise PolicyError(f"{sequence} does not decode in this micro-batch")
            contexts.append(self._context(group, sequence))
            group.forget_context(contexts[-1])
        running = group.offsets[-1] + iteration if group.offsets else 0
        for sequence, context in zip(skipped, contexts, strict=True):
            group.postpone(sequence, context)
            self._close_span(sequence, DECODE, iteration - 1)
            sequence._span_first = iteration + 1
        return sum(contexts), max(running, group.held_longest)

    def _context(self, group: Group, sequence: Sequence) -> int:
        """KV tokens a decoding member holds between iterations."""
        decodes_left = group.last_iteration[sequence] + 1 - group.iteration
        return sequence.prompt_tokens + self._output_tokens[sequence.id] - 1 - decodes_left

    def _close_span(self, sequence: Sequence, role: int, last: int) -> None:
        """Log the run of consecutive iterations that ended with ``last``, if there was one."""
        first = sequence._span_first
        if sequence._group >= 0 and last >= first:
            self.spans.frombytes(span(sequence.id, role, sequence._group, first, last))

    def _gather(self, group: Group) -> None:
        """Take in members of the other idle groups, while there are slots."""
        for other in self.idle:
            if other is group or _is_empty(other):
                continue
            for sequence in list(other.prefilling):
                if group.size >= self.max_batch:
                    return
                other.prefilling.remove(sequence)
                self._close_span(sequence, PREFILL, sequence._next_iteration - 1)
                sequence._group = -1
                group.prefilling.append(sequence)
            for sequence in list(other.decoding):
                if group.size >= self.max_batch:
                    return
                context = self._context(other, sequence)
                self._close_span(sequence, DECODE, other.iteration - 1)
                sequence._group = group.index
                sequence._span_first = group.iteration
                group.join(sequence, context, other.leave(sequence, context), group.iteration)
