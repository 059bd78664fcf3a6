"""The scheduler of policies that plan for one micro-batch: reserved memory, bound slots."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from .batch import Batch, Chunk
from .kv import Reserved
from .log import DECODE, PADDING, PolicyError
from .policy import Plan, Policy, View
from .request import Cohort, Sequence, check_at_least_1
from .scheduler import Endings, OutputLengths, Scheduler


@dataclass(slots=True, eq=False)
class Slot(Cohort):
    """One micro-batch: a cohort that its members are bound to, with their prompts.

    ``view``         the policy's view of the slot; ``view.prefilling`` has its unfinished prompts
    ``held``         members that have finished, but stay as padding until all have: each still
                     computes a token an iteration, against the context it ended with
    ``held_longest`` the longest context of a held member
    """

    view: View = field(init=False)
    held: list[Sequence] = field(default_factory=list)
    held_longest: int = 0

    @property
    def size(self) -> int:
        """Members, held ones included: each takes a place."""
        return len(self.view.prefilling) + len(self.members)

    @property
    def longest(self) -> int:
        """The longest context of a decode, in KV tokens."""
        running = self.offsets[-1] + self.iteration if self.offsets else 0
        return max(running, self.held_longest)

    def postpone(self, sequence: Sequence) -> None:
        """Let a member whose offset was taken out sit out the next iteration."""
        sequence.offset -= 1
        self.members[sequence] = self.iteration + 1
        insort(self.offsets, sequence.offset)

    def hold(self, sequence: Sequence) -> None:
        """Keep a member whose context grows no longer."""
        del self.offsets[bisect_left(self.offsets, sequence.offset)]
        self.held.append(sequence)
        self.held_longest = max(self.held_longest, self.context_of(sequence))
        self.members[sequence] = self.iteration

    def release(self) -> list[Sequence]:
        """Take out the held members; call it when all members are held."""
        released, self.held = self.held, []
        for sequence in released:
            del self.members[sequence]
        self.context = self.held_longest = 0
        return released


class MicroBatches(Scheduler):
    """The scheduler of one replica with reserved memory, which carries out a policy's plans.

    ``max_in_flight`` micro-batches share ``kv_capacity`` KV tokens; each holds at most
    ``max_batch`` sequences. Admitting a sequence reserves the KV tokens of ``max_length`` (the
    paper's pre-allocation), or with ``reserve_declared`` those of its own declared length.

    A sequence stays in the micro-batch that admitted it. With ``free_pool`` it may join any: a new
    micro-batch is formed from the slot with members that returned first. It first takes the members
    of the other idle slots, in the order in which these returned.

    ``idle`` are the slots that are not in flight, in the order in which they returned.
    """

    __slots__ = ("free_pool",)
    policy: Policy
    cohorts: list[Slot]
    idle: list[Slot]

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
        endings: Endings | None = None,
    ) -> None:
        check_at_least_1(max_batch=max_batch)
        if free_pool and policy.holds_finished:
            raise ValueError("a policy that holds finished sequences needs bound micro-batches")
        super().__init__(
            policy,
            Reserved(kv_capacity, None if reserve_declared else max_length),
            max_in_flight=max_in_flight,
            max_length=max_length,
            endings=endings or OutputLengths(),
        )
        self.max_batch, self.free_pool = max_batch, free_pool
        self.cohorts = [Slot(index, 0) for index in range(max_in_flight)]
        self.idle = list(self.cohorts)
        for slot in self.cohorts:
            slot.view = View(self.waiting, [], slot.keys(), max_batch)

    # What drivers use ----------------------------------------------------------------------------

    def set_costs(self, iteration_s: Callable[[Batch], float]) -> None:
        """Set the function for the seconds of an iteration (``View.cost``)."""
        for slot in self.cohorts:
            slot.view.cost = partial(self._cost, slot, iteration_s)

    def _cost(
        self, slot: Slot, iteration_s: Callable[[Batch], float], sequence: Sequence, tokens: int
    ) -> float:
        chunks = ((sequence, tokens, sequence.prefilled),)
        return iteration_s(
            Batch(
                slot.index, chunks, tokens, len(slot.members), slot.context, slot.longest,
                len(slot.held), (), slot.keys,
            )
        )  # fmt: skip

    def next_batch(self) -> Batch | None:
        """Form the next micro-batch, or return None if no request has work."""
        idle = self.idle
        pooled = self.free_pool and len(idle) > 1
        if pooled:
            # Members first: an empty slot would have to take them in one by one.
            idle.sort(key=lambda slot: not slot.size)
        for slot in idle:
            if pooled:
                self._gather(slot)
            view = slot.view
            decodes = view.num_decodes = len(slot.members)
            prefilling = view.prefilling
            if not (decodes or prefilling or self.waiting):
                continue  # a policy could do nothing
            view.free_slots = self.max_batch - len(prefilling) - decodes
            view.free_kv = self.blocks.free
            plan = self.policy.plan(view)
            if plan is not None:
                idle.remove(slot)
                return self._form(slot, plan)
            if pooled and not slot.size:
                return None  # the pool is empty, so the other slots are, too
        return None

    def complete(self, batch: Batch) -> list[Sequence]:
        """Book a micro-batch that returned from the last stage; returns the finished sequences."""
        slot = self.cohorts[batch.slot]
        self.idle.append(slot)
        if batch.yields:
            for sequence in batch.yields:
                self._join(sequence, slot, sequence.target)
        ended = self.endings.ended(batch)
        if ended:
            if self.policy.holds_finished:
                return self._hold(slot, ended, batch.iteration)
            for sequence in ended:
                self._finish(sequence, self._leave(sequence, batch.iteration))
        return ended

    # How a plan is carried out -------------------------------------------------------------------

    def _gather(self, slot: Slot) -> None:
        """Take in members of the other idle slots, while there are places."""
        for other in self.idle:
            if other is slot:
                continue
            for sequence in [*other.view.prefilling, *other]:
                if slot.size >= self.max_batch:
                    return
                if sequence.cohort is None:
                    other.view.prefilling.remove(sequence)
                    slot.view.prefilling.append(sequence)
                else:
                    self._move(sequence, slot)

    def _form(self, slot: Slot, plan: Plan) -> Batch:
        """Admit, skip, and form the batch."""
        iteration, decodes, context = slot.iteration, slot.view.num_decodes, slot.context
        padding, skip, given = len(slot.held), plan.skip, plan.chunks
        chunks: tuple[Chunk, ...] = ()
        yields: tuple[Sequence, ...] = ()
        prefill_tokens = 0
        if skip:
            skipped, longest = self._skip(slot, skip)
            decodes -= len(skip)
            slot.context = context + decodes - padding
            context -= skipped
        else:
            longest = slot.longest if padding else slot.offsets[-1] + iteration if decodes else 0
            slot.context = context + decodes - padding
        if given:
            prefilling = slot.view.prefilling
            for sequence, _ in given:
                if sequence not in prefilling:
                    size = len(prefilling) + len(slot.members)
                    if size >= self.max_batch or sequence.kv_tokens > self.blocks.free:
                        raise PolicyError(
                            f"{sequence} was admitted without a free slot or free KV tokens"
                        )
                    self.admit(sequence, 0)
                    prefilling.append(sequence)
            chunks, prefill_tokens, yields = self._close_chunks(slot, given)
            for sequence in yields:
                prefilling.remove(sequence)
        elif not decodes:
            raise PolicyError("the plan is empty: return None when there is nothing to do")
        slot.iteration = iteration + 1
        return Batch(
            slot.index, chunks, prefill_tokens, decodes, context, longest, padding, skip,
            slot.keys, yields, iteration,
        )  # fmt: skip

    def _skip(self, slot: Slot, skipped: tuple[Sequence, ...]) -> tuple[int, int]:
        """Postpone the skipped members' decodes. Returns the sum of their contexts, and the longest
        context of the remaining members."""
        if len(set(skipped)) < len(skipped):
            raise PolicyError("the plan skips a sequence twice")
        for sequence in skipped:
            if sequence not in slot.members or sequence in slot.held:
                raise PolicyError(f"{sequence} does not decode in this micro-batch")
            del slot.offsets[bisect_left(slot.offsets, sequence.offset)]
        longest, held = slot.longest, 0
        for sequence in skipped:
            held += slot.context_of(sequence)
            self.endings.left(sequence, slot)
            self._log(sequence, DECODE, slot.index, slot.members[sequence], slot.iteration - 1)
            slot.postpone(sequence)
            self.endings.joined(sequence, slot)
        return held, longest

    def _hold(self, slot: Slot, finished: list[Sequence], iteration: int) -> list[Sequence]:
        """Keep finished sequences as padding; release them once all members are done."""
        for sequence in finished:
            self._log(sequence, DECODE, slot.index, slot.members[sequence], iteration)
            slot.hold(sequence)
        if slot.view.prefilling or len(slot.held) < len(slot.members):
            return []
        for sequence in slot.held:
            self._log(sequence, PADDING, slot.index, slot.members[sequence], iteration)
            self._finish(sequence)
        return slot.release()
