"""Routers: to which replica an arriving request goes, and to which rank of it.

A router is a pure function of the number of requests before this one, the load of each replica, and
a source of random numbers. The load is what was sent to a replica and has not ended yet, also what
still waits in its front end. The ranks of a replica with data-parallel attention are chosen by the
same rules when its front end has admitted a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from sarathi_sim.policies.request import Request
from sarathi_sim.policies.request import Sequence as Served

Router = Literal[
    "round_robin",
    "random",
    "least_tokens",
    "least_requests",
    "least_prompt_tokens",
    "power_of_two",
]


def in_turn(before: int, loads: Sequence[int], _: np.random.Generator) -> int:
    """Every replica in turn."""
    return before % len(loads)


def drawn(_: int, loads: Sequence[int], rng: np.random.Generator) -> int:
    """A replica drawn at random, each as likely."""
    return int(rng.integers(len(loads)))


def least(_: int, loads: Sequence[int], __: np.random.Generator) -> int:
    """The replica with the least load, of equals the first."""
    return loads.index(min(loads))


def least_prompt(_: int, loads: Sequence[int], __: np.random.Generator) -> int:
    """The replica with the fewest prompt tokens (of equals, requests; then the first) of those with
    fewer requests than the fullest one; of all, if they are even.

    Source: TensorRT-LLM ``executor_request_queue.py``, ``_balance_requests_across_ranks``, which
    sorts the requests that have come since the last step; here each goes when it comes.
    """
    held = [divmod(load, ONE_REQUEST) for load in loads]
    requests = [count for count, _ in held]
    most = max(requests) + (min(requests) == max(requests))
    return min((tokens, count, i) for i, (count, tokens) in enumerate(held) if count < most)[2]


def of_two(_: int, loads: Sequence[int], rng: np.random.Generator) -> int:
    """Of two replicas drawn at random the one with less load, of equals the one drawn first."""
    if len(loads) == 1:
        return 0
    one, other = int(rng.integers(len(loads))), int(rng.integers(len(loads) - 1))
    other += other >= one  # each of the others is as likely
    return other if loads[other] < loads[one] else one


def declared_tokens(request: Request | Served) -> int:
    """Prompt and declared output, the most tokens it may hold."""
    return request.prompt_tokens + request.max_tokens


ONE_REQUEST = 2**40
"""A request, in a load that counts prompt tokens, too."""


class Routing(NamedTuple):
    """How a router chooses, and how much load a request is (None: it does not look)."""

    choose: Callable[[int, Sequence[int], np.random.Generator], int]
    load: Callable[[Request | Served], int] | None


ROUTERS: dict[Router, Routing] = {
    "round_robin": Routing(in_turn, None),
    "random": Routing(drawn, None),
    "least_tokens": Routing(least, declared_tokens),
    "least_requests": Routing(least, lambda _: 1),
    "least_prompt_tokens": Routing(least_prompt, lambda one: ONE_REQUEST + one.prompt_tokens),
    "power_of_two": Routing(of_two, lambda _: 1),
}


class Balancer:
    """A router at work: it sends each request to one of ``count`` replicas, or of the ranks of one,
    and counts the load of each. ``drawn`` is its source of random numbers."""

    def __init__(self, router: Router, count: int, drawn: np.random.Generator) -> None:
        self._choose, self._load = ROUTERS[router]
        self._loads = [0] * count
        self._drawn = drawn
        self.num_sent = 0

    def send(self, request: Request) -> int:
        """The number of the replica, or rank, to which this request goes."""
        target = self._choose(self.num_sent, self._loads, self._drawn)
        self.num_sent += 1
        if self._load is not None:
            self._loads[target] += self._load(request)
        return target

    def ended(self, target: int, request: Request | Served) -> None:
        """A request that was sent to ``target`` is finished, or was rejected."""
        if self._load is not None:
            self._loads[target] -= self._load(request)
