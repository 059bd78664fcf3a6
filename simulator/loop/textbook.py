"""The simulation as a textbook would write it, to hold the fast path against.

A SimPy process for each stage and each link, a Store in front of each, lists of requests, and a
loop over every request in every iteration. It shares with the fast path what a system consists of
(policies, predictor, jitter, the order within an instant) but neither the book-keeping of
``policies.scheduler`` nor the recurrence of ``simulator.loop.replica``. Results must be bitwise
equal (``tests/simulator/test_textbook.py``); ``sarathi-sim bench`` states the fast path's speed as
a multiple of this one's.
"""

from __future__ import annotations

from array import array
from collections import abc, deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import simpy

from policies.batch import Batch
from policies.policy import Policy, View
from policies.request import Request, Sequence
from simulator.loop.jitter import Jitter
from simulator.loop.moment import ARRIVAL, DISPATCH, Moment
from simulator.loop.quantum import quantize
from simulator.loop.replica import Predictor
from simulator.loop.simulation import Router
from simulator.loop.switches import DEFAULT, Switches

Process = abc.Generator[simpy.Event, Any, None]


@dataclass(eq=False, slots=True)
class Member:
    """A request, how far it has come, and the batches it rode in."""

    request: Request
    sequence: Sequence
    generated: int = 0
    first_token_s: float = -1.0
    finish_s: float = -1.0
    iterations: array[int] = field(default_factory=lambda: array("q"))

    @property
    def context(self) -> int:
        """KV tokens it holds: the prompt so far, and all generated tokens but the newest."""
        return self.sequence.prefilled + max(0, self.generated - 1)


@dataclass(eq=False, slots=True)
class Micro:
    """One micro-batch on its way. ``stages`` is its start and finish on each stage, in turn."""

    index: int
    slot: int
    ready_s: float
    batch: Batch
    chunks: list[tuple[Member, int]]
    decodes: list[Member]
    padding: list[Member]
    times: tuple[float, float, float, float]
    factors: list[float] | None
    stages: array[float] = field(default_factory=lambda: array("d"))
    returned_s: float = -1.0


class TextbookReplica:
    """One replica: a queue, slots of members, and a pipeline of processes."""

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
        self.env = env
        self.policy = policy
        self.predict = predict
        self.layers = layers
        self.max_batch = max_batch
        self.max_length = max_length
        self.free_kv = kv_capacity
        self.reserve_declared = reserve_declared
        self.free_pool = free_pool
        self.lazy = switches.lazy
        self.blocking_send = switches.blocking_send
        self.turnaround_s = float(quantize(switches.turnaround_s))
        self.jitter = jitter
        self.kv_capacity = kv_capacity
        self.rejected: list[int] = []
        self.members: dict[Sequence, Member] = {}
        self.waiting: deque[Sequence] = deque()
        self.slots: list[list[Member]] = [[] for _ in range(max_in_flight)]
        self.held: list[list[Member]] = [[] for _ in range(max_in_flight)]
        self.idle: list[int] = list(range(max_in_flight))
        self.micros: list[Micro] = []
        self.stage0_busy = False
        self._dispatching = False
        self.stores = [simpy.Store(env) for _ in layers]
        self.links = [simpy.Store(env) for _ in layers[1:]]
        for stage in range(len(layers)):
            env.process(self._stage(stage))
        for hop in range(len(layers) - 1):
            env.process(self._link(hop))

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

    def _wake(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            Moment(self.env, 0.0, DISPATCH, self._dispatch)

    def _dispatch(self, _: object) -> None:
        self._dispatching = False
        while not (self.lazy and self.stage0_busy):
            if self.free_pool and len(self.idle) > 1:
                self.idle.sort(key=lambda slot: not self.slots[slot])
            micro = next(
                (m for slot in list(self.idle) if (m := self._form(slot)) is not None), None
            )
            if micro is None:
                return
            self.idle.remove(micro.slot)
            self.micros.append(micro)
            self.stage0_busy = True
            self.stores[0].put(micro)

    def _form(self, slot: int) -> Micro | None:
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
        times = self.predict(batch)
        index = len(self.micros)
        for member in running + [m for m, _ in chunks]:
            member.iterations.append(index)
        padding = list(self.held[slot])
        factors = None if self.jitter is None else self.jitter.factors()
        return Micro(index, slot, self.env.now, batch, chunks, running, padding, times, factors)

    def _stage(self, stage: int) -> Process:
        last = len(self.layers) - 1
        while True:
            micro: Micro = yield self.stores[stage].get()
            layer_s, first_s, last_s, send_s = micro.times
            duration = self.layers[stage] * layer_s
            if stage == 0:
                duration += first_s
            if stage == last:
                duration += last_s
            if micro.factors is not None:
                duration = float(quantize(duration * micro.factors[stage]))
            start = self.env.now
            yield self.env.timeout(duration)
            micro.stages.extend((start, self.env.now))
            if stage == last:
                self.env.process(self._return(micro))
            elif self.blocking_send:
                yield self.env.timeout(send_s)
                self.stores[stage + 1].put(micro)
            else:
                self.links[stage].put((micro, self.env.now + send_s))
            if stage == 0 and not self.stores[0].items:
                self.stage0_busy = False
                self._wake()

    def _link(self, hop: int) -> Process:
        while True:
            micro, arrival = yield self.links[hop].get()
            if arrival > self.env.now:
                yield self.env.timeout(arrival - self.env.now)
            self.stores[hop + 1].put(micro)

    def _return(self, micro: Micro) -> Process:
        now = micro.returned_s = self.env.now
        yield self.env.timeout(self.turnaround_s)
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
                # Decoding members stand in the order in which their prompts were finished.
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
        self._wake()


def simulate_textbook(
    requests: abc.Sequence[Request],
    policy: Policy,
    predict: Predictor,
    layers: tuple[int, ...],
    *,
    replicas: int = 1,
    switches: Switches = DEFAULT,
    router: Router = "round_robin",
    seed: int = 0,
    **options: Any,
) -> list[TextbookReplica]:
    """Serve ``requests`` on several replicas; ``options`` are :class:`TextbookReplica`'s."""
    env = simpy.Environment()
    cluster = []
    for stream in np.random.SeedSequence(seed).spawn(replicas):
        source = Jitter(switches.jitter, len(layers), stream) if switches.jitter else None
        cluster.append(
            TextbookReplica(
                env, policy, predict, layers, switches=switches, jitter=source, **options
            )
        )
    for number, request in enumerate(sorted(requests, key=lambda r: r.arrival_s)):
        in_turn = cluster[number % replicas] if router == "round_robin" else None
        arrive = partial(_submit, cluster, in_turn)
        Moment(env, float(quantize(request.arrival_s)), ARRIVAL, arrive, request)
    env.run()
    return cluster


def _submit(cluster: list[TextbookReplica], target: TextbookReplica | None, event: Moment) -> None:
    """Hand a request to its replica, or to the one with the fewest declared tokens unfinished."""
    if target is None:
        target = min(cluster, key=_declared_tokens)
    target.submit(event._value)


def _declared_tokens(replica: TextbookReplica) -> int:
    unfinished = (m.request for m in replica.members.values() if m.finish_s < 0)
    return sum(request.prompt_tokens + request.max_tokens for request in unfinished)
