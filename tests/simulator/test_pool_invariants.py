"""The invariants on small systems with paged memory and preemption; 3, 4 and 5 are in
``test_invariants``."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.fair import Fair
from sarathi_sim.policies.kv import CachedBlocks
from sarathi_sim.policies.log import LOST
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.radix import RadixBlocks, path
from sarathi_sim.policies.request import Sequence
from sarathi_sim.simulator.views.ledger import ACCOUNTS, WAITS, gaps, iteration_bubbles
from sarathi_sim.simulator.views.metrics import Analysis, extra_decodes
from tests.simulator.pools import PoolSystem, Who, pool_systems, sglang_policies, vllm_policies

any_system = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class AuditedPool(Pool):
    """Counts every block after every event."""

    def form(self) -> Batch:
        batch = super().form()
        self._audit()
        return batch

    def complete(self, batch: Batch) -> list[Sequence]:
        finished = super().complete(batch)
        self._audit()
        return finished

    def _audit(self) -> None:
        blocks = self.blocks
        assert 0 <= blocks.free <= blocks.capacity
        assert not set(self.waiting) & set(self.running)
        counts = {sequence: blocks.blocks(self.held(sequence)) for sequence in self.running}
        used = sum(counts.values())
        if isinstance(blocks, CachedBlocks):
            # What several hold counts once.
            tables = blocks._held
            used -= sum(map(len, tables.values()))
            used += len({block for table in tables.values() for block in table})
            assert all(block.holders for table in tables.values() for block in table)
        if isinstance(blocks, RadixBlocks):
            ends = {each: end for each, end in blocks._ends.items() if each in self.running}
            assert ends == blocks._ends
            used -= sum(end.end for end in ends.values())
            shared = {node for end in ends.values() for node in path(end)}
            used += sum(node.end - node.start for node in shared)
            assert all(node.locks for node in shared)
            assert 0 <= blocks.blank <= blocks.free
        assert used + blocks.free == blocks.capacity


@any_system
@given(pool_systems())
def test_1_every_request_completes_once_or_is_rejected(system: PoolSystem) -> None:
    records = system.fast()
    table = Analysis(records).requests
    rejected = table["replica"] < 0
    assert (table["rejected"].notna() == rejected).all()
    assert table["finish_s"].isna().equals(rejected)
    most = (system.num_blocks - 1) * system.block_size
    assert rejected.tolist() == [r.prompt_tokens + r.max_tokens - 1 > most for r in system.requests]
    served = table[~rejected]
    processed = sum(
        log.iterations["prefill_tokens"].sum() + log.iterations["decodes"].sum()
        for log in records.replicas
    )
    events = np.concatenate([log.pool.events for log in records.replicas if log.pool is not None])
    lost = events[events[:, 1] == LOST, 2].sum()
    hits = events[events[:, 1] != LOST, 2].sum()
    due = (served["prompt_tokens"] + served["output_tokens"] - 1).sum()
    extra = sum(map(extra_decodes, records.replicas))
    assert system.policy.ahead or not extra
    assert due <= processed - extra + hits <= due + lost
    assert (served["latency_s"] >= served["ttft_s"]).all()
    assert (served["ttft_s"] > 0).all()


@any_system
@given(pool_systems(vllm_policies() | sglang_policies()))
def test_2_every_block_is_free_or_held(system: PoolSystem) -> None:
    pools = system.pools(AuditedPool)
    system.fast(pools=pools)
    for pool in pools:
        assert pool.blocks.free == pool.blocks.capacity
        assert pool.num_unfinished == 0
        assert not pool.running and not pool.waiting


@any_system
@given(pool_systems())
def test_6_output_lengths_are_not_seen(system: PoolSystem) -> None:
    """With all outputs longer, batches are the same until the first one's last token."""
    requests = [replace(r, max_tokens=60, prefix=()) for r in system.requests]
    longer = [replace(r, output_tokens=r.output_tokens + 17) for r in requests]
    system = replace(system, num_blocks=400, replicas=1)
    seen: list[list[Who]] = [[], []]
    records = [
        replace(system, requests=variant).fast(seen=who)
        for variant, who in zip((requests, longer), seen, strict=True)
    ]
    first_done = Analysis(records[0]).requests["finish_s"].min()
    alike = int((records[0].replicas[0].iterations["ready_s"] < first_done).sum())
    assert alike and seen[0][:alike] == seen[1][:alike]


@any_system
@given(pool_systems())
def test_7_the_ledger_closes(system: PoolSystem) -> None:
    records = system.fast()
    rows = Analysis(records).ledger
    bubbles = sum(
        iteration_bubbles(gaps(log)).sum() for log in records.replicas if log.num_iterations
    )
    assert rows[[f"{name}_s" for name in WAITS]].to_numpy().sum() == bubbles
    assert (rows[[f"{name}_s" for name in ACCOUNTS]].sum(axis=1) == records.end_s).all()


@any_system
@given(pool_systems(st.one_of(vllm_policies(), st.just(Fair(20, 3)), st.just(Fair(64, 8)))))
def test_8_nobody_begins_before_those_who_come_first(system: PoolSystem) -> None:
    """By arrival; under priorities by those, among who is there; under ``fair`` user by user."""
    system = replace(system, requests=[replace(r, user=r.priority) for r in system.requests])
    analysis = Analysis(system.fast())
    by_id = {request.id: request for request in system.requests}
    table = analysis.requests.set_index("request")
    for log, spans in zip(analysis.records.replicas, analysis.spans, strict=True):
        formed = log.iterations["ready_s"][spans.first_row()].tolist()
        queues: dict[int, list[tuple[int, float, str | int, float]]] = {}
        for id, begun in zip(spans.requests.tolist(), formed, strict=True):
            request, arrival = by_id[id], table.loc[id, "arrival_s"]
            fcfs = system.policy.order is None
            key = (0, arrival, id) if fcfs else (request.priority, arrival, str(id))
            user = request.user if isinstance(system.policy, Fair) else 0
            queues.setdefault(user, []).append((*key, begun))
        for queue in queues.values():
            for first, then in combinations(sorted(queue), 2):
                assert first[3] <= then[3] or first[1] > then[3]


@any_system
@given(pool_systems())
def test_times_between_tokens_against_a_list_of_them_all(system: PoolSystem) -> None:
    seen = []
    for replica in system.textbook():
        for member in replica.pool.members.values():
            seen += np.diff(member.token_s).tolist()
    (found,) = Analysis(system.fast()).tbt_quantiles([0.75])
    if seen:
        assert found == sorted(seen)[-(-3 * len(seen) // 4) - 1]
    else:
        assert np.isnan(found)
