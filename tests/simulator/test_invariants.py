"""The simulator's invariants 1 to 8 (ARCHITECTURE.md), on any small system, and views of it against
counts of everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.fair import Fair
from sarathi_sim.policies.kv import CachedBlocks
from sarathi_sim.policies.log import ACCEPTED, DRAFTED, HIT, HIT_AGAIN, LOST, PADDING
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.policy import Plan, Policy, View
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.radix import RadixBlocks, path
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.simulator.loop.clock import quantize
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.views.ledger import ACCOUNTS, WAITS, Spans, gaps, iteration_bubbles
from sarathi_sim.simulator.views.metrics import Analysis, extra_decodes
from tests.simulator.oracle import (
    MAX_LENGTH,
    POLICIES,
    System,
    make_requests,
    systems,
    with_ranks,
)
from tests.simulator.pools import (
    PoolSystem,
    Who,
    any_policies,
    pool_systems,
    sglang_policies,
    trtllm_policies,
    vllm_policies,
)
from tests.textbook.pipeline import Micro, TextbookPipeline
from tests.textbook.pool import PoolMember
from tests.textbook.replicas import TextbookReplica

any_system = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Audited:
    """Checks the books after every step."""

    def next_batch(self) -> Batch | None:
        batch = super().next_batch()  # type: ignore[misc]
        self._audit()
        return batch

    def complete(self, batch: Batch) -> list[Sequence]:
        finished = super().complete(batch)  # type: ignore[misc]
        self._audit()
        return finished


class AuditedMicroBatches(Audited, MicroBatches):
    def _audit(self) -> None:
        assert sum(s.kv_tokens for s in self.running) + self.blocks.free == self.kv_capacity
        assert self.blocks.free >= 0  # invariant 2
        held = [s for slot in self.cohorts for s in slot]
        assert len(set(held)) == len(held)
        assert set(held) <= set(self.running)
        assert all(slot.size <= self.max_batch for slot in self.cohorts)


class AuditedPool(Audited, Pool):
    """Counts every block."""

    def _audit(self) -> None:
        blocks = self.blocks
        assert 0 <= blocks.free <= blocks.capacity
        assert not set(self.waiting) & set(self.running)
        counts = {sequence: blocks.blocks(self.held(sequence)) for sequence in self.running}
        used = sum(counts.values()) + blocks.state_blocks * sum(map(bool, counts.values()))
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


either = st.one_of(systems(), pool_systems(any_policies()))
any_ranks = st.one_of(either, with_ranks(either))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_ranks)
def test_1_every_request_completes_once_or_is_rejected(system: System | PoolSystem) -> None:
    records = system.fast()
    table = Analysis(records).requests
    rejected = table["replica"] < 0
    assert (table["rejected"].notna() == rejected).all()
    assert table["finish_s"].isna().equals(rejected)
    longest = [r.prompt_tokens + r.max_tokens for r in system.requests]
    served = table[~rejected]
    due = (served["prompt_tokens"] + served["output_tokens"] - 1).sum()
    names = ("prefill_tokens", "decodes")
    processed = sum(log.iterations[name].sum() for log in records.replicas for name in names)
    processed -= sum(log.iterations["padding"].sum() for log in records.replicas)
    if isinstance(system, PoolSystem):
        most = (system.num_blocks - 1 - system.state_blocks) * system.block_size + 1
        pools = [log.pool for log in records.replicas if log.pool is not None]
        events = np.concatenate([pool.events for pool in pools])
        lost = events[events[:, 1] == LOST, 2].sum()
        hits = events[events[:, 1] != LOST, 2].sum()
        extra = sum(map(extra_decodes, records.replicas))
        assert system.policy.ahead or not extra
        assert processed - extra + hits == due + lost
        if getattr(system.policy, "capacity_scheduler_policy", "") == "guaranteed_no_evict":
            assert not lost
        assert served["recomputed_tokens"].sum() >= 0
    else:
        most = system.kv_tokens or MAX_LENGTH
        assert processed == due
    assert rejected.tolist() == [length > most for length in longest]
    assert (served["ttft_s"] > 0).all()
    assert (served["latency_s"] >= served["ttft_s"]).all()


@any_system
@given(st.one_of(systems(), with_ranks(systems())))
def test_2_kv_tokens_are_allocated_or_free(system: System) -> None:
    audited = [
        AuditedMicroBatches(POLICIES[system.policy], **system.settings())
        for _ in range(system.replicas * system.ranks)
    ]
    records = system.fast(schedulers=audited)
    for number, scheduler in enumerate(audited):
        assert scheduler.blocks.free == scheduler.kv_capacity
        assert scheduler.num_unfinished == 0
        if records.replicas[number].num_iterations:
            _, tokens = Analysis(records).kv_occupancy(number)
            assert tokens.min() >= 0 and tokens.max() <= scheduler.kv_capacity
            assert tokens[-1] == 0


@any_system
@given(pool_systems(any_policies()))
def test_2_every_block_is_free_or_held(system: PoolSystem) -> None:
    pools = system.pools(AuditedPool)
    system.fast(pools=pools)
    for pool in pools:
        assert pool.blocks.free == pool.blocks.capacity
        assert pool.num_unfinished == 0
        assert not pool.running and not pool.waiting


@any_system
@given(
    pool_systems(vllm_policies() | sglang_policies(mixed=False) | trtllm_policies()),
    st.integers(1, 5),
    st.integers(0, 1),
)
def test_1_and_2_with_drafts(system: PoolSystem, length: int, slots: int) -> None:
    """Refused drafts are booked apart; their blocks come back with all others."""
    system = system.with_drafts(length, slots)
    pools = system.pools(AuditedPool)
    records = system.fast(pools=pools)
    table = Analysis(records).requests
    served = table[table["replica"] >= 0]
    due = (served["prompt_tokens"] + served["output_tokens"] - 1).sum()
    processed, sums = -sum(map(extra_decodes, records.replicas)), dict.fromkeys(range(6), 0)
    for pool, log in zip(pools, records.replicas, strict=True):
        assert pool.blocks.free == pool.blocks.capacity >= max(pool.kv_log, default=0)
        assert not (pool.running or pool.waiting or pool.drafting or pool.num_unfinished)
        assert log.pool is not None
        processed += sum(log.iterations[name].sum() for name in ("prefill_tokens", "decodes"))
        for _, kind, tokens in log.pool.events.tolist():
            sums[kind] += tokens
    computed = processed + sums[ACCEPTED] + sums[HIT] + sums[HIT_AGAIN]
    assert computed == due + sums[LOST]
    assert (
        sums[ACCEPTED]
        <= sums[DRAFTED]
        <= sum(log.iterations["drafts"].sum() for log in records.replicas)
    )


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(either)
def test_3_and_5_stages_run_in_order_and_without_gaps(system: System | PoolSystem) -> None:
    depth = system.depth if isinstance(system, PoolSystem) else system.max_in_flight
    for log in system.fast().replicas:
        times, ready = stage_times(log), log.iterations["ready_s"]
        assert (np.diff(ready) >= 0).all()
        assert (times.start[1:] >= times.release[:-1]).all()
        # (In an empty iteration of a pool nothing takes time.)
        assert ((times.finish > times.start).all(1) | (log.pool is not None)).all()
        assert np.array_equal(times.finish[:, -1], log.iterations["finish_s"])
        back = log.iterations["finish_s"] + log.switches.turnaround_s
        for i, at in enumerate(ready):
            assert (back[:i] > at).sum() < depth
        before = np.vstack([np.zeros(log.num_stages), times.release[:-1]])
        arrival = np.empty_like(times.start)
        arrival[:, 0] = ready
        send = 0 if log.switches.blocking_send else log.iterations["send_s"][:, None]
        arrival[:, 1:] = times.release[:, :-1] + send
        assert np.array_equal(times.start, np.maximum(arrival, before))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_ranks)
def test_4_same_seed_same_bytes(system: System | PoolSystem) -> None:
    first, second = (system.fast() for _ in range(2))
    for one, other in zip(first.replicas, second.replicas, strict=True):
        assert one.spans.tobytes() == other.spans.tobytes()
        assert (one.pool is None) == (other.pool is None)
        if one.pool is not None and other.pool is not None:
            assert one.pool.events.tobytes() == other.pool.events.tobytes()
        for name, column in one.iterations.items():
            assert column.tobytes() == other.iterations[name].tobytes()


class Watched:
    """A policy that is asked twice, and whose view must not have changed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.holds_finished = policy.holds_finished
        self.plans: list[object] = []

    def plan(self, view: View) -> Plan | None:
        seen = self._snapshot(view)
        plans = [self.policy.plan(view) for _ in range(2)]
        assert self._snapshot(view) == seen
        first, second = (
            None if p is None else ([(s.id, n) for s, n in p.chunks], p.skip) for p in plans
        )
        assert first == second
        self.plans.append(first)
        return plans[0]

    @staticmethod
    def _snapshot(view: View) -> object:
        queues = (view.waiting, view.prefilling, view.decoding)
        members = [[(s.id, s.prompt_tokens, s.max_tokens, s.prefilled) for s in q] for q in queues]
        return members, view.num_decodes, view.max_batch, view.free_slots, view.free_kv


@any_system
@given(systems())
def test_6_a_policy_is_pure(system: System) -> None:
    schedulers = system.schedulers()
    for scheduler in schedulers:
        scheduler.policy = Watched(scheduler.policy)
    system.fast(schedulers=schedulers)


@any_system
@given(systems())
def test_6_a_policy_never_sees_the_output_length(system: System) -> None:
    """With all outputs longer, every plan is the same until the first one's last token."""
    requests = [
        Request(r.id, r.arrival_s, min(r.prompt_tokens, 40), r.output_tokens, 80)
        for r in system.requests
    ]
    longer = [replace(r, output_tokens=r.output_tokens + 17) for r in requests]
    system = replace(system, kv_tokens=0)
    logs = []
    for variant in (requests, longer):
        system_variant = replace(system, requests=variant, replicas=1)
        schedulers = system_variant.schedulers()
        schedulers[0].blocks.capacity = schedulers[0].blocks.free = 12 * MAX_LENGTH
        watched = schedulers[0].policy = Watched(schedulers[0].policy)
        records = system_variant.fast(schedulers=schedulers)
        logs.append((watched.plans, records.replicas[0]))
    log = logs[0][1]
    done = {
        request: (group, last) for request, role, group, _, last in log.spans if role != PADDING
    }
    row = {
        (group, number): i
        for i, (group, number) in enumerate(
            zip(log.iterations["group"], Spans(log).number, strict=True)
        )
    }
    first_done = min(log.iterations["finish_s"][row[place]] for place in done.values())
    alike = int((log.iterations["ready_s"] < first_done).sum())
    for name in ("ready_s", "group", "prefill_tokens", "decodes", "decode_context"):
        one, other = (log.iterations[name][:alike] for _, log in logs)
        assert np.array_equal(one, other)


@any_system
@given(pool_systems())
def test_6_a_pools_policy_never_sees_the_output_length(system: PoolSystem) -> None:
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


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_ranks)
def test_7_the_ledger_closes_to_the_bit(system: System | PoolSystem) -> None:
    records = system.fast()
    rows = Analysis(records).ledger
    parts = rows[[f"{name}_s" for name in ACCOUNTS]]
    assert (parts.to_numpy() >= 0).all()
    assert (parts.sum(axis=1) == rows["wall_s"]).all() and (rows["wall_s"] == records.end_s).all()
    bubbles = sum(
        iteration_bubbles(gaps(log)).sum() for log in records.replicas if log.num_iterations
    )
    assert rows[[f"{name}_s" for name in WAITS]].to_numpy().sum() == bubbles
    assert system.blocking_send or rows["sending_s"].sum() == 0
    assert Analysis(records).iterations["bubble_s"].sum() == bubbles


@any_system
@given(systems())
def test_7_the_ledger_agrees_with_a_naive_one(system: System) -> None:
    rows = Analysis(system.fast()).ledger.set_index(["replica", "stage"])
    oracle = system.textbook()
    end = max((m.returned_s for r in oracle for m in r.micros), default=0.0)
    for number, replica in enumerate(oracle):
        for stage in range(len(system.layers)):
            naive = naive_ledger(system, replica, stage, end)
            row = rows.loc[(number, stage)]
            assert {name: row[f"{name}_s"] for name in naive} == naive


def naive_ledger(
    system: System, replica: TextbookReplica, stage: int, end: float
) -> dict[str, float]:
    """The same accounts from the oracle's log, gap by gap and instant by instant."""
    micros = replica.micros
    book = dict.fromkeys(ACCOUNTS, 0.0)
    if not micros:
        return book | {"no_work": end}
    sends = system.blocking_send and stage < len(system.layers) - 1
    instants = sorted(
        {m.ready_s for m in micros}
        | {m.returned_s + replica.turnaround_s for m in micros}
        | {t for m in micros for t in (m.stages[0], released(system, m, 0))}
    )

    def starved(t: float) -> bool:
        flying = sum(m.ready_s <= t < m.returned_s + replica.turnaround_s for m in micros)
        if system.lazy and any(m.stages[0] <= t < released(system, m, 0) for m in micros):
            return False
        return flying < min(system.max_in_flight, len(system.layers))

    before = None
    for micro in micros:
        start, finish = micro.stages[2 * stage : 2 * stage + 2]
        book["busy"] += finish - start
        book["sending"] += micro.times[3] if sends else 0.0
        if before is None:
            book["no_work"] += micro.ready_s
            book["fill"] += start - micro.ready_s
        else:
            left, right = released(system, before, stage), start
            if stage and not system.blocking_send:
                wait = min(right - left, micro.times[3])
                book["communication"] += wait
                right -= wait
            if not stage and any(
                m.slot == micro.slot and m.returned_s + replica.turnaround_s == micro.ready_s
                for m in micros[: micro.index]
            ):
                wait = min(right - left, replica.turnaround_s)
                book["turnaround"] += wait
                right -= wait
            cuts = [left, *(t for t in instants if left < t < right), right]
            for a, b in pairwise(cuts):
                book["no_work" if starved(a) else pair_name(before.batch, micro.batch)] += b - a
        before = micro
    assert before is not None
    done = max(m.returned_s for m in micros)
    book["drain"] += done - released(system, before, stage)
    book["no_work"] += end - done
    return book


@any_system
@given(with_ranks(either))
def test_7_the_ledger_of_ranks_agrees_with_a_naive_one(system: System | PoolSystem) -> None:
    rows = Analysis(system.fast()).ledger.set_index(["replica", "stage"])
    oracle = system.textbook()
    end = max((m.returned_s for r in oracle for m in r.micros), default=0.0)
    for number, rank in enumerate(oracle):
        naive = ledger_of_rank(rank, system.layers[0], end)
        row = rows.loc[(number, 0)]
        assert {name: row[f"{name}_s"] for name in naive} == naive


def ledger_of_rank(rank: TextbookPipeline, layers: int, end: float) -> dict[str, float]:
    """What a rank waits with a batch is for the slowest one; else its scheduler books the last one
    or has no work."""
    book = dict.fromkeys(ACCOUNTS, 0.0)
    until = handled = 0.0  # when its last batch was done, and booked
    for micro in rank.micros:
        start, finish = micro.stages
        factor = 1.0 if micro.factors is None else micro.factors[0]
        layer_s, first_s, last_s, _ = (float(quantize(factor * s)) for s in micro.times)
        own = layers * layer_s + first_s + last_s
        ready = max(micro.ready_s, until)
        booked = min(handled, ready)
        book["turnaround"] += booked - until
        book["no_work"] += ready - booked
        book["slowest_rank"] += start - ready + finish - start - own
        book["busy"] += own
        until, handled = finish, finish + rank.turnaround_s
    book["no_work"] += end - until
    return book


def released(system: System, micro: Micro, stage: int) -> float:
    finish = micro.stages[2 * stage + 1]
    if system.blocking_send and stage < len(system.layers) - 1:
        finish += micro.times[3]
    return finish


def pair_name(one: Batch, other: Batch) -> str:
    if one.prefill_tokens and other.prefill_tokens:
        return "equal" if one.prefill_tokens == other.prefill_tokens else "pb1"
    if one.prefill_tokens or other.prefill_tokens:
        return "pb2"
    work = [(b.num_decodes, b.decode_context) for b in (one, other)]
    return "equal" if work[0] == work[1] else "pb3"


@any_system
@given(systems())
def test_8_first_come_first_served(system: System) -> None:
    records = system.fast()
    table = Analysis(records).requests
    table = table[table["replica"] >= 0].copy()
    table["begin_s"] = table["arrival_s"] + table["queueing_s"]
    for _, served in table.sort_values(["arrival_s", "request"], kind="stable").groupby("replica"):
        assert served["begin_s"].is_monotonic_increasing


@any_system
@given(pool_systems(st.one_of(vllm_policies(), st.just(Fair(20, 3)), st.just(Fair(64, 8)))))
def test_8_first_come_first_served_in_a_pool(system: PoolSystem) -> None:
    """By arrival; under priorities by those, among who is there; under ``fair`` user by user."""
    users = [replace(r, user=r.priority) for r in system.requests]
    system = replace(system, requests=users, admission_s=0.0)
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


def test_bubble_time_of_a_request_is_the_sum_over_its_batches() -> None:
    """Against a loop over the oracle's batches, for every policy."""
    for policy in POLICIES:
        system = System(
            policy=policy,
            layers=(1, 2, 1),
            max_in_flight=3,
            free_pool=policy.startswith("orca"),
            requests=make_requests(40, seed=3, rate=60.0),
        )
        records = system.fast()
        table = Analysis(records).requests.set_index("request")
        per_batch = iteration_bubbles(gaps(records.replicas[0]))
        finish = records.replicas[0].iterations["finish_s"]
        for member in system.textbook()[0].members.values():
            row = table.loc[member.request.id]
            assert row["bubble_s"] == sum(per_batch[i] for i in member.iterations)
            prompt_done = next(i for i in member.iterations if finish[i] == member.first_token_s)
            tokens = [finish[i] for i in member.iterations if i >= prompt_done]
            tokens = tokens[: member.request.output_tokens]
            longest = max(np.diff(tokens), default=np.nan)
            assert row["tbt_max_s"] == longest or np.isnan([row["tbt_max_s"], longest]).all()


@any_system
@given(systems())
def test_kv_tokens_against_a_count_of_them_all(system: System) -> None:
    table = Analysis(system.fast()).iterations
    for number, replica in enumerate(system.textbook()):
        naive = []
        for formed in replica.micros:
            written = sum(
                m.batch.num_tokens - len(m.padding)
                for m in replica.micros
                if m.ready_s <= formed.ready_s
            )
            freed = sum(
                m.request.prompt_tokens + m.request.output_tokens - 1
                for m in replica.members.values()
                if m.finish_s <= formed.ready_s
            )
            naive.append(written - freed)
        assert table[table["replica"] == number]["kv_tokens"].tolist() == naive


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_ranks, st.integers(1, 20))
def test_times_between_tokens_naively(system: System | PoolSystem, twentieths: int) -> None:
    seen: list[float] = []
    for replica in system.textbook():
        for member in replica.everybody():
            if isinstance(member, PoolMember):
                tokens = list(member.token_s)
            else:
                at = [replica.micros[i].returned_s for i in member.iterations]
                tokens = [t for t in at if t >= member.first_token_s]
            seen += np.diff(tokens[: member.request.output_tokens]).tolist()
    (found,) = Analysis(system.fast()).tbt_quantiles([twentieths / 20])
    if seen:
        assert found == sorted(seen)[-(-twentieths * len(seen) // 20) - 1]
    else:
        assert np.isnan(found)
