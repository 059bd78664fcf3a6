"""The simulation as a textbook would write it, to check the fast path.

A SimPy process for each stage and each link, a Store in front of each, lists of requests, and a
loop over every request in every iteration. It shares with the fast path what defines the system
(policies, predictor, jitter, the order within an instant), but neither the bookkeeping of
``policies.scheduler`` nor the recurrence of ``simulator.loop.pipeline``. Results must be bitwise
equal (``tests/simulator/test_textbook.py``); ``sarathi-sim bench`` gives the fast path's speed as a
multiple of this one's.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import simpy

from policies.batch import Batch
from policies.policy import Policy, PoolPolicy, View, is_pooled, of_micro_batches
from policies.request import Request, Sequence
from simulator.loop.closed_loop import Arrival, Clients
from simulator.loop.jitter import Jitter
from simulator.loop.moment import ARRIVAL, Moment
from simulator.loop.quantum import quantize
from simulator.loop.replica import Predictor
from simulator.loop.simulation import Router
from simulator.loop.switches import DEFAULT, Switches
from simulator.loop.textbook_pipeline import Member, Micro, TextbookPipeline
from simulator.loop.textbook_pool import TextbookPoolReplica


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
        """A request arrives."""
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


def simulate_textbook(
    requests: abc.Sequence[Request],
    policy: Policy | PoolPolicy,
    predict: Predictor,
    layers: tuple[int, ...],
    *,
    replicas: int = 1,
    switches: Switches = DEFAULT,
    router: Router = "round_robin",
    seed: int = 0,
    clients: Clients | None = None,
    **options: Any,
) -> list[TextbookPipeline]:
    """Serve ``requests`` on several replicas.

    ``options`` are :class:`TextbookReplica`'s, or for a policy that acts on a pool
    :class:`~simulator.loop.textbook_pool.TextbookPoolReplica`'s.
    """
    env = simpy.Environment()
    cluster: list[TextbookPipeline] = []
    for stream in np.random.SeedSequence(seed).spawn(replicas):
        source = Jitter(switches.jitter, len(layers), stream) if switches.jitter else None
        common = {"switches": switches, "jitter": source, **options}
        cluster.append(
            TextbookPoolReplica(env, policy, predict, layers, **common)
            if is_pooled(policy)
            else TextbookReplica(env, of_micro_batches(policy), predict, layers, **common)
        )
    if clients is not None:
        _Sent(env, requests, cluster, router, clients)
    else:
        for number, request in enumerate(sorted(requests, key=lambda r: r.arrival_s)):
            in_turn = cluster[number % replicas] if router == "round_robin" else None
            arrive = partial(_submit, cluster, in_turn)
            Moment(env, float(quantize(request.arrival_s)), ARRIVAL, arrive, request)
    env.run()
    return cluster


class _Sent:
    """What clients send, each request as a process of its own."""

    def __init__(
        self,
        env: simpy.Environment,
        requests: abc.Sequence[Request],
        cluster: list[TextbookPipeline],
        router: Router,
        clients: Clients,
    ) -> None:
        self.env, self.requests, self.cluster = env, list(requests), cluster
        self.router, self.clients = router, clients
        self.sent = 0
        for replica in cluster:
            replica.answer = self._answered
        self._send(clients.begin())

    def _send(self, arrivals: abc.Iterable[Arrival]) -> None:
        for when, place in arrivals:
            Moment(self.env, when - self.env.now, ARRIVAL, self._arrives, place)

    def _arrives(self, event: Moment) -> None:
        request = replace(self.requests[event._value], arrival_s=self.env.now)
        target = self.cluster[self.sent % len(self.cluster)]
        if self.router == "least_tokens":
            target = min(self.cluster, key=_declared_tokens)
        self.sent += 1
        target.submit(request)
        if request.id in target.rejected:
            self._send(self.clients.answered(event._value, self.env.now))

    def _answered(self, member: Member) -> None:
        place = next(n for n, r in enumerate(self.requests) if r.id == member.request.id)
        self._send(self.clients.answered(place, self.env.now))


def _submit(
    cluster: list[TextbookPipeline], target: TextbookPipeline | None, event: Moment
) -> None:
    """Send a request to its replica, or to the one with the fewest declared unfinished tokens."""
    if target is None:
        target = min(cluster, key=_declared_tokens)
    target.submit(event._value)


def _declared_tokens(replica: TextbookPipeline) -> int:
    unfinished = (m.request for m in replica.everybody() if m.finish_s < 0)
    return sum(request.prompt_tokens + request.max_tokens for request in unfinished)
