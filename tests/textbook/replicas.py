"""The textbook's replicas: who waits and who runs, in front of a pipeline of processes."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import simpy

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.log import LivelockError
from sarathi_sim.policies.policy import Policy, View
from sarathi_sim.policies.pool import PoolPolicy
from sarathi_sim.policies.radix import RadixBlocks
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.simulator.loop.pipeline import Jitter
from sarathi_sim.simulator.loop.records import DEFAULT, Switches
from sarathi_sim.simulator.loop.replica import Predictor
from tests.textbook.blocks import TextbookBlocks
from tests.textbook.pipeline import Member, Micro, TextbookPipeline
from tests.textbook.pool import Row, TextbookPool
from tests.textbook.radix import TextbookRadix

MANY_ITERATIONS = 2000
"""In so many iterations of a pool somebody must have got a token."""


class TextbookReplica(TextbookPipeline):
    """One replica: a queue and slots of members in front of a pipeline."""

    def __init__(
        self,
        env: simpy.Environment,
        policy: Policy,
        predict: Predictor,
        layers: tuple[int, ...],
        *,
        max_batch: int,
        max_in_flight: int,
        kv_capacity: int,
        max_length: int,
        reserve_declared: bool = False,
        free_pool: bool = False,
        switches: Switches = DEFAULT,
        jitter: Jitter | None = None,
    ) -> None:
        super().__init__(env, predict, layers, switches, jitter)
        self.policy = policy
        self.max_batch = max_batch
        self.max_length = max_length
        self.free_kv = kv_capacity
        self.reserve_declared = reserve_declared
        self.free_pool = free_pool
        self.kv_capacity = kv_capacity
        self.members: dict[Sequence, Member] = {}
        self.waiting: deque[Sequence] = deque()
        self.slots: list[list[Member]] = [[] for _ in range(max_in_flight)]
        self.held: list[list[Member]] = [[] for _ in range(max_in_flight)]
        self.idle: list[int] = list(range(max_in_flight))

    def submit(self, request: Request) -> None:
        length = request.prompt_tokens + request.max_tokens
        kv_tokens = length if self.reserve_declared else self.max_length
        if length > self.max_length or kv_tokens > self.kv_capacity:
            self.rejected.append(request.id)
            return
        sequence = Sequence(request.id, request.prompt_tokens, request.max_tokens, kv_tokens)
        self.members[sequence] = Member(request, sequence)
        self.waiting.append(sequence)
        self._wake()

    def everybody(self) -> list[Member]:
        return list(self.members.values())

    def _form(self) -> Micro | None:
        if self.free_pool and len(self.idle) > 1:
            self.idle.sort(key=lambda slot: not self.slots[slot])
        for slot in list(self.idle):
            micro = self._form_in(slot)
            if micro is not None:
                self.idle.remove(slot)
                return micro
        return None

    def _form_in(self, slot: int) -> Micro | None:
        members = self.slots[slot]
        if self.free_pool:
            for other in self.idle:
                if other != slot:
                    pool = self.slots[other]
                    for member in [m for m in pool if not m.generated] + [
                        m for m in pool if m.generated
                    ]:
                        if len(members) < self.max_batch:
                            pool.remove(member)
                            members.append(member)
        prefilling = [m for m in members if not m.generated]
        decoding = [m for m in members if m.generated]
        view = View(
            self.waiting,
            [m.sequence for m in prefilling],
            {m.sequence: None for m in decoding}.keys(),
            self.max_batch,
        )
        view.num_decodes = len(decoding)
        view.free_slots = self.max_batch - len(members)
        view.free_kv = self.free_kv
        view.cost = partial(self._cost, slot, decoding)
        plan = self.policy.plan(view)
        if plan is None:
            return None
        chunks = [(self.members[sequence], tokens) for sequence, tokens in plan.chunks]
        for member, _ in chunks:
            if member not in members:
                self.waiting.remove(member.sequence)
                members.append(member)
                self.free_kv -= member.sequence.kv_tokens
        running = [m for m in decoding if m.sequence not in plan.skip]
        batch = Batch(
            slot=slot,
            chunks=tuple((m.sequence, n, m.sequence.prefilled) for m, n in chunks),
            prefill_tokens=sum(n for _, n in chunks),
            num_decodes=len(running),
            decode_context=sum(m.context for m in running),
            longest_context=max((m.context for m in running), default=0),
            padding=len(self.held[slot]),
            members=lambda: [m.sequence for m in running],
        )
        return self._micro(batch, chunks, running, list(self.held[slot]))

    def _cost(self, slot: int, decoding: list[Member], sequence: Sequence, tokens: int) -> float:
        """Seconds of the slowest stage for a chunk and all decodes."""
        contexts = [member.context for member in decoding]
        layer_s, first_s, last_s, _ = self.predict(
            Batch(
                slot=slot,
                chunks=((sequence, tokens, sequence.prefilled),),
                prefill_tokens=tokens,
                num_decodes=len(decoding),
                decode_context=sum(contexts),
                longest_context=max(contexts, default=0),
                padding=len(self.held[slot]),
            )
        )
        stages = [count * layer_s for count in self.layers]
        stages[0] += first_s
        stages[-1] += last_s
        return max(stages)

    def _book(self, micro: Micro, now: float) -> None:
        slot = micro.slot
        held = self.held[slot]
        finished = []
        for member in micro.decodes:
            if member in micro.padding:
                continue
            member.generated += 1
            if member.generated == member.request.output_tokens:
                finished.append(member)
        for member, tokens in micro.chunks:
            member.sequence.prefilled += tokens
            if member.sequence.prefilled == member.request.prompt_tokens:
                # Decoding members are in the order in which their prompts were finished.
                self.slots[slot].remove(member)
                self.slots[slot].append(member)
                member.generated = 1
                member.first_token_s = now
                if member.request.output_tokens == 1:
                    finished.append(member)
        if self.policy.holds_finished:
            held += finished
            finished = list(held) if len(held) == len(self.slots[slot]) else []
        for member in finished:
            member.finish_s = now
            self.slots[slot].remove(member)
            self.free_kv += member.sequence.kv_tokens
            if member in held:
                held.remove(member)
        self.idle.append(slot)


class TextbookPoolReplica(TextbookPipeline):
    """One replica with paged memory (``check``: :class:`TextbookPool`).

    Raises LivelockError where preemptions let nobody get a token.
    """

    def __init__(
        self,
        env: simpy.Environment,
        policy: PoolPolicy,
        predict: Predictor,
        layers: tuple[int, ...],
        *,
        num_blocks: int,
        block_size: int,
        caching: bool,
        max_in_flight: int,
        max_length: int,
        switches: Switches = DEFAULT,
        jitter: Jitter | None = None,
        check: bool = False,
        state_blocks: int = 0,
        **drafts: Any,
    ) -> None:
        super().__init__(env, predict, layers, switches, jitter)
        blocks = TextbookBlocks(num_blocks, block_size, caching, state_blocks)
        if caching and policy.cached_blocks is RadixBlocks:
            blocks = TextbookRadix(num_blocks, block_size)
        self.pool = TextbookPool(policy, blocks, max_length, len(layers), check, **drafts)
        self.max_in_flight = max_in_flight
        self.rows: dict[Micro, list[Row]] = {}
        self.kv_tokens: list[int] = []
        self._tokens = -1

    def everybody(self) -> list[Member]:
        return list(self.pool.members.values())

    def submit(self, request: Request) -> None:
        if self.pool.add(request):
            self._wake()
        else:
            self.rejected.append(request.id)

    def _form(self) -> Micro | None:
        pool, blocks = self.pool, self.pool.blocks
        work = pool.waiting or pool.running or pool.loading
        if len(self.rows) == self.max_in_flight or not work:
            return None
        under_way = any(self.rows.values())
        batch, rows = pool.form()
        # Nothing is under way: steps that a decode waits for, or that only preempt, take no time.
        for _ in range(pool.stages + len(pool.running)):
            if rows or under_way:
                break
            batch, rows = pool.form()
        if not (rows or under_way):
            return None
        chunks: list[tuple[Member, int]] = [(pool.members[s], n) for s, n, _ in batch.chunks]
        decodes: list[Member] = [pool.members[s] for s in batch.members()]
        micro = self._micro(batch, chunks, decodes, [])
        self.rows[micro] = rows
        self.kv_tokens.append((blocks.capacity - blocks.free) * blocks.block_size)
        if len(self.kv_tokens) % MANY_ITERATIONS == 0:
            before, self._tokens = self._tokens, sum(len(m.token_s) for m in pool.members.values())
            if before == self._tokens:
                raise LivelockError(f"no token in {MANY_ITERATIONS} iterations")
        return micro

    def _book(self, micro: Micro, now: float) -> None:
        self.pool.returned(self.rows.pop(micro), now)
