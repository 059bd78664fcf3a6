"""Runs a policy that acts on a pool, one iteration after the other, for schedules worked out by
hand."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.log import DECODE, LOST, PREFILL, RECOMPUTE
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Prefix, Request


@dataclass
class Step:
    """One iteration: ``chunks`` (request, tokens) and ``decodes`` (requests), who
    was ``preempted``, and the blocks that were free once it was formed."""

    chunks: list[tuple[int, int]]
    decodes: list[int]
    preempted: list[int]
    free: int


def request(
    id: int,
    prompt: int,
    output: int,
    most: int | None = None,
    *,
    user: int = 0,
    prefix: Prefix = (),
    arrival_s: float | None = None,
) -> Request:
    at = float(id) if arrival_s is None else arrival_s
    return Request(id, at, prompt, output, most or output, prefix=prefix, user=user)


def schedule(
    policy: PoolPolicy,
    arrivals: Mapping[int, list[Request]],
    *,
    blocks: int,
    block_size: int = 4,
    caching: bool = False,
    in_flight: int = 1,
    stages: int = 1,
    steps: int = 1000,
    tokens: Counter[int] | None = None,
) -> list[Step]:
    """The iterations until everybody is served (or ``steps`` of them), each returning when as many
    as may be are in flight. ``arrivals`` are by the iteration before which they come; ``blocks``
    can be used (one more is the null block). ``tokens`` gets those of each request according to the
    log's spans."""
    pool = Pool(
        policy,
        (policy.cached_blocks if caching else Blocks)(blocks + 1, block_size),
        max_in_flight=in_flight,
        max_length=10_000,
        stages=stages,
    )
    found: list[Step] = []
    out: deque[Batch] = deque()
    last = max(arrivals)
    while len(found) < steps:
        for each in arrivals.get(len(found), []):
            assert pool.add(each) is None
        if not pool.num_unfinished and len(found) >= last:
            break
        before = len(pool.events)
        batch = pool.form()
        logged = list(pool.events[before:])
        events = [logged[place : place + 3] for place in range(0, len(logged), 3)]
        found.append(
            Step(
                [(sequence.id, tokens) for sequence, tokens, _ in batch.chunks],
                sorted(sequence.id for sequence in batch.members()) if batch.num_decodes else [],
                [id for id, what, _ in events if what == LOST],
                pool.blocks.free,
            )
        )
        out.append(batch)
        if len(out) == in_flight:
            pool.complete(out.popleft())
    assert pool.num_unfinished or pool.blocks.free == pool.blocks.capacity
    if tokens is not None:
        spans = iter(pool.spans)
        for id, role, _, first, last in zip(*5 * [spans], strict=True):
            tokens[id] += {DECODE: last - first + 1, PREFILL: 1, RECOMPUTE: 1}.get(role, 0)
    return found


def chunks(steps: list[Step]) -> list[list[tuple[int, int]]]:
    return [step.chunks for step in steps]


def decodes(steps: list[Step]) -> list[list[int]]:
    return [step.decodes for step in steps]
