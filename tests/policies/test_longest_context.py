"""A batch's summed and longest context against books that count every sequence's tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca, OrcaWorstCase
from sarathi_sim.policies.policy import Plan, Policy, View
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.request_level import RequestLevel
from sarathi_sim.policies.sarathi import Sarathi

LENGTH = 40


class Skipping:
    """Orca, but some decodes sit out, now one, now several, now the longest."""

    name = "skipping"
    holds_finished = False

    def plan(self, view: View) -> Plan | None:
        plan = Orca(max_prefills=1).plan(view)
        if plan is None:
            return None
        count = len(view.decoding)
        skip = tuple(s for s in view.decoding if (s.id + count) % 3 == 0)
        if len(skip) == count and not plan.chunks:
            skip = skip[1:]
        return Plan(chunks=plan.chunks, skip=skip)


POLICIES: dict[str, Policy] = {
    "request_level": RequestLevel(),
    "orca": Orca(),
    "orca_worst": OrcaWorstCase(),
    "sarathi": Sarathi(chunk_size=8, tile=4),
    "skipping": Skipping(),
}


def book(context: dict[Sequence, int], batch: Batch, held: set[Sequence]) -> None:
    """Count the tokens of a batch that returned."""
    for sequence in batch.decodes:
        context[sequence] += sequence not in held
    for sequence, tokens, before in batch.chunks:
        context[sequence] = before + tokens


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12),
    in_flight=st.integers(1, 3),
    free_pool=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_contexts_are_those_of_the_sequences(
    policy: str, lengths: list[tuple[int, int]], in_flight: int, free_pool: bool, order: object
) -> None:
    books = MicroBatches(
        POLICIES[policy],
        max_batch=4,
        max_in_flight=in_flight,
        kv_capacity=100 * LENGTH,
        max_length=LENGTH,
        free_pool=free_pool and policy != "request_level",
    )
    for number, (prompt, output) in enumerate(lengths):
        assert books.add(Request(number, 0.0, prompt, output, 20)) is None
    context: dict[Sequence, int] = {}
    flying: list[Batch] = []
    seen = 0
    while True:
        while (batch := books.next_batch()) is not None:
            holding = [context[sequence] for sequence in batch.decodes]
            assert batch.num_decodes == len(holding)
            assert batch.decode_context == sum(holding)
            assert batch.longest_context == max(holding, default=0)
            flying.append(batch)
            seen += 1
        if not flying:
            break
        batch = flying.pop(order.randrange(len(flying)))  # type: ignore[attr-defined]
        held = set(books.cohorts[batch.slot].held)
        book(context, batch, held)
        books.complete(batch)
    assert seen >= max(output for _, output in lengths)
    assert books.num_unfinished == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nothing_is_left_in_a_group(policy: str) -> None:
    books = MicroBatches(POLICIES[policy], max_batch=3, kv_capacity=10 * LENGTH, max_length=LENGTH)
    for number in range(7):
        books.add(Request(number, 0.0, 3 + number, 2 + number % 4, 20))
    while (batch := books.next_batch()) is not None:
        books.complete(batch)
    for group in books.cohorts:
        assert (group.offsets, group.held_longest, group.context) == ([], 0, 0)
