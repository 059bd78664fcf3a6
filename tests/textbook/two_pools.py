"""Prefill and decode workers as a textbook would write them: a process for each request.

It shares with ``sarathi_sim.simulator.loop.handover`` the order within an instant, and nothing of
its bookkeeping: a request waits for events, a link is a resource, and the load of a worker is
counted anew for each choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import simpy

from sarathi_sim.policies.pool import PoolPolicy
from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.loop.clock import ARRIVAL, HANDOVER, RECEIVED, RESERVED, Moment, quantize
from sarathi_sim.simulator.loop.group import StepPredictor
from sarathi_sim.simulator.loop.handover import Handover
from sarathi_sim.simulator.loop.pipeline import Jitter
from sarathi_sim.simulator.loop.records import DEFAULT, Switches
from sarathi_sim.simulator.loop.replica import Predictor
from sarathi_sim.simulator.loop.routers import Router
from sarathi_sim.simulator.loop.simulation import Clients
from tests.textbook.group import TextbookGroup
from tests.textbook.pipeline import Micro, Process
from tests.textbook.pool import PoolMember
from tests.textbook.replicas import TextbookPoolReplica
from tests.textbook.simulation import FrontEnd, Route


class RemoteReplica(TextbookPoolReplica):
    """A worker of either pool, or a rank of one. ``on_reserved`` is told of each request with
    memory for its KV, and whether this has to be sent."""

    on_reserved: Callable[[int, bool], None]

    def _form(self) -> Micro | None:
        micro = super()._form()
        for sequence in self.pool.reserved:
            self.on_reserved(sequence.id, sequence in self.pool.loading)
        self.pool.reserved.clear()
        return micro

    def sent(self, request: int) -> None:
        self.pool.sent(request)
        if self.pool.waiting or self.pool.running:
            self._wake()

    def received(self, request: int) -> None:
        self.pool.received([request])
        self._wake()


@dataclass(frozen=True)
class TextbookWorkers:
    """Replicas of one pool; ``options`` are those of :class:`TextbookPoolReplica`."""

    count: int
    policy: PoolPolicy
    predict: Predictor | StepPredictor
    layers: tuple[int, ...]
    switches: Switches = DEFAULT
    router: Router = "round_robin"
    admission_s: float = 0.0
    ranks: int = 1
    rank_router: Router = "round_robin"
    options: dict[str, Any] = field(default_factory=dict)


class _Pool:
    """The workers of a pool at work, and which requests each frontend has sent to each."""

    def __init__(
        self, env: simpy.Environment, of: TextbookWorkers, streams: list[Any], drawn: Any
    ) -> None:
        self.router, self.rng, self.ranks = of.router, np.random.default_rng(drawn), of.ranks
        predict: Any = of.predict
        self.replicas = [
            RemoteReplica(
                env,
                of.policy,
                predict,
                of.layers,
                switches=of.switches,
                jitter=Jitter(of.switches.jitter, len(of.layers), stream)
                if of.switches.jitter
                else None,
                **of.options,
            )
            for stream in streams
        ]
        wait = float(quantize(of.admission_s))
        workers: list[Any] = [*self.replicas]
        if of.ranks > 1:
            workers = [self._group(env, of, n, drawn) for n in range(of.count)]
        self.fronts = [FrontEnd(env, worker, wait) for worker in workers]
        self.ended: dict[int, simpy.Event] = {}
        for worker in workers:
            worker.answer = lambda member: self.ended[member.request.id].succeed()
        self.env = env
        self.routed: dict[int, list[tuple[int, Request]]] = defaultdict(list)

    def _group(
        self, env: simpy.Environment, of: TextbookWorkers, number: int, drawn: Any
    ) -> TextbookGroup:
        own = self._of(number)
        predict: Any = of.predict
        key = (*drawn.spawn_key, number)
        fronts = [FrontEnd(env, rank, 0.0) for rank in own]
        route = Route(of.rank_router, fronts, drawn.entropy, key)
        depth = of.options["max_in_flight"]
        group = TextbookGroup(env, list(own), predict, *of.layers, of.switches, depth)
        group.choose = lambda sent: route(sent).replica
        return group

    def _of(self, worker: int) -> list[RemoteReplica]:
        return self.replicas[worker * self.ranks : (worker + 1) * self.ranks]

    def rank_of(self, worker: int, request: int) -> int:
        """The rank that holds the KV of a request, counted over all workers."""
        ranks = enumerate(self._of(worker), worker * self.ranks)
        (found,) = (number for number, each in ranks if request in each.pool.sending)
        return found

    def sent(self, worker: int, request: int) -> None:
        self.replicas[self.rank_of(worker, request)].sent(request)

    def received(self, worker: int, request: int) -> None:
        for rank in self._of(worker):
            if any(sequence.id == request for sequence in rank.pool.loading):
                return rank.received(request)
        raise AssertionError(f"nobody waits for the KV of {request}")

    def refuses(self, request: Request) -> bool:
        return self.replicas[0].pool.refuses(request)

    def choose(self, request: Request, frontend: int) -> int:
        """The worker for a request, by what this frontend sent that has not ended."""
        sent, workers = self.routed[frontend], range(len(self.fronts))
        load = {number: [0, 0, 0] for number in workers}
        for number, each in sent:
            if not self.ended[each.id].triggered:
                load[number][0] += 1
                load[number][1] += each.prompt_tokens + each.max_tokens
                load[number][2] += each.prompt_tokens
        if self.router == "round_robin":
            chosen = len(sent) % len(self.fronts)
        elif self.router == "random":
            chosen = int(self.rng.integers(len(self.fronts)))
        elif self.router == "least_tokens":
            chosen = min(workers, key=lambda number: load[number][1])
        elif self.router == "least_prompt_tokens":
            most = max(load[number][0] for number in workers)
            among = [number for number in workers if load[number][0] < most] or list(workers)
            chosen = min(among, key=lambda number: (load[number][2], load[number][0]))
        else:
            among = list(workers)
            if self.router == "power_of_two" and len(among) > 1:
                first = among[self.rng.integers(len(among))]
                others = [number for number in among if number != first]
                among = [first, others[self.rng.integers(len(others))]]
            chosen = min(among, key=lambda number: load[number][0])
        self.ended[request.id] = simpy.Event(self.env)
        sent.append((chosen, request))
        return chosen


class TwoPools:
    """A run; ``prefill_end_s``, ``reserved_s`` and ``received_s`` are by request."""

    def __init__(
        self,
        requests: list[Request],
        prefill: TextbookWorkers,
        decode: TextbookWorkers,
        handover: Handover,
        seed: int = 0,
        clients: Clients | None = None,
    ) -> None:
        self.env = env = simpy.Environment()
        self.requests, self.handover, self.clients = requests, handover, clients
        first, second = prefill.count * prefill.ranks, decode.count * decode.ranks
        streams = np.random.SeedSequence(seed).spawn(first + second + 2)
        self.prefill = _Pool(env, prefill, streams[:first], streams[-2])
        self.decode = _Pool(env, decode, streams[first:-2], streams[-1])
        self.links = [simpy.Resource(env) for _ in self.prefill.replicas]  # of each rank
        self.reserved: dict[int, simpy.Event] = {r.id: simpy.Event(env) for r in requests}
        for replica in self.decode.replicas:
            replica.on_reserved = lambda request, sends: self.reserved[request].succeed(sends)
        self.rejected: set[int] = set()
        self.prefill_end_s: dict[int, float] = {}
        self.reserved_s: dict[int, float] = {}
        self.received_s: dict[int, float] = {}
        self.prefilled_on: dict[int, int] = {}
        self._queues: dict[tuple[float, int], list[tuple[int, simpy.Event]]] = {}
        self._arrived = 0
        if clients is None:
            for request in sorted(requests, key=lambda each: each.arrival_s):
                when = float(quantize(request.arrival_s))
                Moment(env, when, ARRIVAL, self._arrives, request)
        else:
            self._send(clients.begin())
        env.run()

    @property
    def replicas(self) -> list[RemoteReplica]:
        return [*self.prefill.replicas, *self.decode.replicas]

    def _send(self, arrivals: Any) -> None:
        for when, place in arrivals:
            request = replace(self.requests[place], arrival_s=when)
            Moment(self.env, when - self.env.now, ARRIVAL, self._arrives, request)

    def _arrives(self, moment: Moment) -> None:
        self.env.process(self._way(moment._value, self._arrived))
        self._arrived += 1

    def _turn(self, rank: int, place: int) -> simpy.Event:
        """This rank's time within this instant, when requests go in the order of their list."""
        key = (self.env.now, rank)
        if key not in self._queues:
            self._queues[key] = []
            Moment(self.env, 0.0, rank, self._call, key)
        event = simpy.Event(self.env)
        self._queues[key].append((place, event))
        return event

    def _call(self, moment: Moment) -> None:
        key: Any = moment._value
        for _, event in sorted(self._queues.pop(key), key=lambda one: one[0]):
            event.succeed()

    def _way(self, request: Request, number: int) -> Process:
        """A request, from its arrival to its last token."""
        env, over = self.env, self.handover
        place = next(n for n, each in enumerate(self.requests) if each.id == request.id)
        alone, frontend = request.output_tokens == 1, number % over.frontends
        remote = request.prompt_tokens - (0 if over.first_token_known else 1)
        some = remote > 0 and not alone
        prompt = replace(request, output_tokens=1, max_tokens=1, sends_kv=some)
        rest = replace(request, remote_tokens=remote) if some else request
        if self.prefill.refuses(prompt) or self.decode.refuses(rest):
            self.rejected.add(request.id)
            return self._answered(place)
        source = self.prefilled_on[request.id] = self.prefill.choose(prompt, frontend)
        first = over.order == "decode_reserves_first" and some
        if first:
            target = self.decode.choose(rest, frontend)
            self.decode.fronts[target].submit(rest)
            sends = yield self.reserved[request.id]
            if sends:
                self.reserved_s[request.id] = env.now
            yield self._turn(RESERVED, place)
            if not sends:  # it found its whole prompt in the cache: no prefill
                self.prefill.ended[request.id].succeed()
                self.prefilled_on[request.id] = -1
                yield self.decode.ended[request.id]
                return self._answered(place)
        self.prefill.fronts[source].submit(prompt)
        yield self.prefill.ended[request.id]
        self.prefill_end_s[request.id] = env.now
        if alone:
            return self._answered(place)
        if not first:
            yield self._turn(HANDOVER, place)
            target = self.decode.choose(rest, frontend)
            self.decode.fronts[target].submit(rest)
            sends = some and (yield self.reserved[request.id])
            if not sends:  # it found its whole prompt in the cache, or has no KV yet
                if some:
                    yield self._turn(RESERVED, place)
                    self.prefill.sent(source, request.id)
                yield self.decode.ended[request.id]
                return self._answered(place)
            self.reserved_s[request.id] = env.now
        yield self._turn(RESERVED, place)
        with self.links[self.prefill.rank_of(source, request.id)].request() as turn:
            yield turn
            yield env.timeout(float(quantize(over.setup_s + over.token_s * request.prompt_tokens)))
        yield env.timeout(float(quantize(over.latency_s)))
        yield self._turn(RECEIVED, place)
        self.received_s[request.id] = env.now
        self.prefill.sent(source, request.id)
        self.decode.received(target, request.id)
        yield self.decode.ended[request.id]
        self._answered(place)
        return None

    def _answered(self, place: int) -> None:
        if self.clients is not None:
            self._send(self.clients.answered(place, self.env.now))

    def member(self, request: int) -> tuple[PoolMember, RemoteReplica]:
        found = [
            (member, replica)
            for replica in self.replicas
            for member in replica.pool.members.values()
            if member.request.id == request
        ]
        return found[-1]
