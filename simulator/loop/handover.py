"""Two pools of replicas: prefill workers compute prompts, decode workers their outputs.

A request runs on a prefill worker until its first token is known. Its KV stays there until it has
been sent to a decode worker, where blocks were reserved for it. Two orders are known:

``prefill_first``          the decode worker is chosen when the prefill has ended; then blocks are
                           reserved there, and the KV is sent
``decode_reserves_first``  both workers are chosen at the arrival; blocks are reserved first, then
                           the prefill worker takes the request, and the KV is sent at its end

A request with one output token ends with its prefill. If the KV was in the decode worker's prefix
cache, nothing is sent, and the prefill worker is told so (vLLM: ``NixlConnector``).
"""

from __future__ import annotations

from collections import abc, defaultdict
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sarathi_sim.policies.request import Request, Sequence
from .clock import HANDOVER, RECEIVED, RESERVED, Moment, quantize
from .records import Handovers, Records
from .simulation import Clients, Fleet, Replicas, Simulation


@dataclass(frozen=True)
class Handover:
    """How requests go from prefill workers to decode workers.

    A prompt's KV takes ``setup_s`` and, for each of its tokens, ``token_s`` seconds on the link of
    its prefill worker (with attention ranks: of its rank), which sends one prompt after the other.
    It arrives ``latency_s`` after it was sent. Without ``first_token_known`` the decode worker
    computes the last prompt token again, and with it the first token. The first token is there
    ``on_transfer`` of the KV, or at the end of the request's first iteration on the decode worker
    (``decode_step``). Each of the ``frontends`` routes without knowing of the others; requests
    reach them in turn.
    """

    order: Literal["prefill_first", "decode_reserves_first"] = "prefill_first"
    first_token: Literal["decode_step", "on_transfer"] = "decode_step"
    first_token_known: bool = True
    token_s: float = 0.0
    setup_s: float = 0.0
    latency_s: float = 0.0
    frontends: int = 1


def simulate_pools(
    requests: abc.Sequence[Request],
    prefill: Replicas,
    decode: Replicas,
    handover: Handover,
    *,
    seed: int = 0,
    clients: Clients | None = None,
    progress: abc.Callable[[int], None] | None = None,
) -> Records:
    """Serve ``requests`` on two pools; returns the records of the run, whose replicas are the
    prefill workers, then the decode workers.

    The schedulers are pools whose policies know remote prefills. A request that either pool would
    refuse is rejected when it arrives. ``seed``, ``clients``, ``progress`` and the errors raised
    are those of :func:`~sarathi_sim.simulator.loop.simulation.simulate`.
    """
    return _TwoPools(requests, prefill, decode, handover, seed, clients, progress).serve()


class _TwoPools(Simulation):
    """The way of each request through both pools. What happens to several requests at one instant
    happens in the order of the list of requests."""

    def __init__(
        self,
        requests: abc.Sequence[Request],
        prefill: Replicas,
        decode: Replicas,
        handover: Handover,
        seed: int,
        clients: Clients | None,
        progress: abc.Callable[[int], None] | None,
    ) -> None:
        super().__init__(requests, clients, progress)
        first = len(prefill.schedulers)
        count = first + len(decode.schedulers)
        streams = np.random.SeedSequence(seed).spawn(count + 2)
        frontends = handover.frontends
        self._prefill = Fleet(
            self.env, prefill, streams[:first], streams[-2], self._prefilled, frontends=frontends
        )
        self._decode = Fleet(
            self.env,
            decode,
            streams[first:-2],
            streams[-1],
            self._decoded,
            reserved=self._reserved,
            frontends=frontends,
        )
        self.replicas = [*self._prefill.replicas, *self._decode.replicas]
        self.ranks = prefill.ranks, decode.ranks
        self._handover = handover
        self._latency_s = float(quantize(handover.latency_s))
        self._decode_first = handover.order == "decode_reserves_first"
        self._place = {request.id: place for place, request in enumerate(requests)}
        self._frontend = np.zeros(len(requests), np.int32)
        self._prefilled_on = np.full(len(requests), -1)
        self._prefill_end_s, self._reserved_s, self._received_s = (
            np.full(len(requests), np.nan) for _ in range(3)
        )
        self._at_work: dict[int, tuple[Request, Request]] = {}  # by place: as each pool sees it
        self._decoded_on: dict[int, int] = {}
        self._link_free: defaultdict[tuple[int, int], float] = defaultdict(float)  # worker, rank
        self._together: dict[tuple[float, int], list[int]] = {}
        self._steps: dict[int, abc.Callable[[int], None]] = {
            HANDOVER: self._to_decode,
            RESERVED: self._go_on,
            RECEIVED: self._received,
        }

    def submit(self, request: Request) -> None:
        place = self._place[request.id]
        alone = request.output_tokens == 1
        sent = 0 if alone else request.prompt_tokens - (not self._handover.first_token_known)
        prompt = replace(request, output_tokens=1, max_tokens=1, sends_kv=sent > 0)
        rest = replace(request, remote_tokens=sent)
        reason = self._prefill.refusal(prompt) or self._decode.refusal(rest)
        if reason is not None:
            return self.reject(request, reason)
        frontend = self._frontend[place] = (self._arrived - 1) % self._handover.frontends
        self._at_work[place] = prompt, rest
        self._prefilled_on[place] = self._prefill.choose(prompt, frontend)
        if self._decode_first and sent:
            self._to_decode(place)
        else:
            self._to_prefill(place)

    def _to_prefill(self, place: int) -> None:
        self._prefill.submit(self._prefilled_on[place], self._at_work[place][0])

    def _to_decode(self, place: int) -> None:
        rest = self._at_work[place][1]
        target = self._decoded_on[place] = self._decode.choose(rest, self._frontend[place])
        self._decode.submit(target, rest)

    def _prefilled(self, worker: int, sequences: list[Sequence], now: float) -> None:
        for sequence in sequences:
            place = self._place[sequence.id]
            self._prefill.left(worker, sequence, self._frontend[place])
            self._prefill_end_s[place] = now
            if self.requests[place].output_tokens == 1:
                del self._at_work[place]
                self.finish([sequence], now)
            else:
                self._soon(now, RESERVED if place in self._decoded_on else HANDOVER, place)

    def _reserved(self, _: int, sequences: list[Sequence], now: float) -> None:
        """Blocks of a decode worker have been reserved, or need not be."""
        for sequence in sequences:
            place = self._place[sequence.id]
            if sequence.order < 0:
                self._reserved_s[place] = now
            self._soon(now, RESERVED, place)

    def _go_on(self, place: int) -> None:
        """Blocks are reserved: compute the prompt or, where this is done, send its KV."""
        if np.isnan(self._reserved_s[place]):
            return self._unsent(place)
        if np.isnan(self._prefill_end_s[place]):
            return self._to_prefill(place)
        worker, request = self._prefilled_on[place], self.requests[place]
        link = worker, self._prefill.replicas[worker].rank_of(request.id)
        over = self._handover
        took = float(quantize(over.setup_s + over.token_s * request.prompt_tokens))
        sent = self._link_free[link] = max(self.env.now, self._link_free[link]) + took
        self._soon(sent + self._latency_s, RECEIVED, place)

    def _received(self, place: int) -> None:
        self._received_s[place] = self.env.now
        request = self.requests[place].id
        self._prefill.replicas[self._prefilled_on[place]].sent(request)
        self._decode.replicas[self._decoded_on[place]].received(request)

    def _decoded(self, worker: int, sequences: list[Sequence], now: float) -> None:
        for sequence in sequences:
            place = self._place[sequence.id]
            self._decode.left(worker, sequence, self._frontend[place])
            del self._at_work[place], self._decoded_on[place]
        self.finish(sequences, now)

    def _unsent(self, place: int) -> None:
        """The prompt was in the decode worker's prefix cache: the prefill worker forgets its KV, or
        the request where it was not taken yet."""
        worker, prompt = self._prefilled_on[place], self._at_work[place][0]
        if np.isnan(self._prefill_end_s[place]):
            self._prefill.left(worker, prompt, self._frontend[place])
            self._prefilled_on[place] = -1
        else:
            self._prefill.replicas[worker].sent(prompt.id)

    def _soon(self, when: float, rank: int, place: int) -> None:
        """Take a request's next step at ``when``, together with all others of this rank."""
        places = self._together.setdefault((when, rank), [])
        if not places:
            Moment(
                self.env,
                when - self.env.now,
                rank,
                self._take_steps,
                (when, rank),
            )
        places.append(place)

    def _take_steps(self, moment: Moment) -> None:
        key: Any = moment._value
        step = self._steps[key[1]]
        for place in sorted(self._together.pop(key)):
            step(place)

    def _records(self) -> Records:
        records = super()._records()
        first = len(self._prefill.replicas) * self.ranks[0]  # logs of the prefill pool
        order = np.argsort([request.id for request in self.requests], kind="stable")
        received_s = self._received_s[order]
        logs = list(records.replicas)
        if self._handover.first_token == "on_transfer":
            sent = ~np.isnan(received_s)
            ids = records.request_id[sent].tolist()
            known = dict(zip(ids, received_s[sent].tolist(), strict=True))
            logs[first:] = [replace(log, first_token_s=known) for log in logs[first:]]
        handovers = Handovers(
            first,
            self._prefilled_on[order],
            self._prefill_end_s[order],
            self._reserved_s[order],
            received_s,
        )
        return replace(records, replicas=logs, handovers=handovers)
