"""The simulator's invariants 1 to 8 (ARCHITECTURE.md), on any small system."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.log import PADDING
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.policy import Plan, Policy, View
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.views.ledger import ACCOUNTS, WAITS, gaps, iteration_bubbles
from sarathi_sim.simulator.views.metrics import Analysis
from sarathi_sim.simulator.views.spans import Spans
from tests.simulator.oracle import MAX_LENGTH, POLICIES, System, make_requests, systems
from tests.simulator.pools import PoolSystem, pool_systems
from tests.textbook.pipeline import Micro
from tests.textbook.replicas import TextbookReplica

any_system = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Audited(MicroBatches):
    """Checks the books after every step."""

    def next_batch(self) -> Batch | None:
        batch = super().next_batch()
        self._audit()
        return batch

    def complete(self, batch: Batch) -> list[Sequence]:
        finished = super().complete(batch)
        self._audit()
        return finished

    def _audit(self) -> None:
        assert sum(s.kv_tokens for s in self.running) + self.blocks.free == self.kv_capacity
        assert self.blocks.free >= 0  # invariant 2
        held = [s for slot in self.cohorts for s in slot]
        assert len(set(held)) == len(held)
        assert set(held) <= set(self.running)
        assert all(slot.size <= self.max_batch for slot in self.cohorts)


@any_system
@given(systems())
def test_1_every_request_completes_once_or_is_rejected(system: System) -> None:
    records = system.fast()
    table = Analysis(records).requests
    rejected = table["replica"] < 0
    assert (table["rejected"].notna() == rejected).all()
    assert table["finish_s"].isna().equals(rejected)
    too_long = [
        bool(system.kv_tokens) and r.prompt_tokens + r.max_tokens > system.kv_tokens
        for r in system.requests
    ]
    assert rejected.tolist() == too_long
    served = table[~rejected]
    processed = sum(
        log.iterations["prefill_tokens"].sum()
        + log.iterations["decodes"].sum()
        - log.iterations["padding"].sum()
        for log in records.replicas
    )
    assert processed == (served["prompt_tokens"] + served["output_tokens"] - 1).sum()
    assert (served["ttft_s"] > 0).all()
    assert (served["latency_s"] >= served["ttft_s"]).all()


@any_system
@given(systems())
def test_2_kv_tokens_are_allocated_or_free(system: System) -> None:
    audited = [
        Audited(POLICIES[system.policy], **system.settings()) for _ in range(system.replicas)
    ]
    records = system.fast(schedulers=audited)
    for number, scheduler in enumerate(audited):
        assert scheduler.blocks.free == scheduler.kv_capacity
        assert scheduler.num_unfinished == 0
        if records.replicas[number].num_iterations:
            _, tokens = Analysis(records).kv_occupancy(number)
            assert tokens.min() >= 0 and tokens.max() <= scheduler.kv_capacity
            assert tokens[-1] == 0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(systems(), pool_systems()))
def test_3_and_5_stages_run_in_order_and_never_wait_for_nothing(
    system: System | PoolSystem,
) -> None:
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
@given(st.one_of(systems(), pool_systems()))
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
@given(systems())
def test_7_the_ledger_closes_to_the_bit(system: System) -> None:
    records = system.fast()
    rows = Analysis(records).ledger
    parts = rows[[f"{name}_s" for name in ACCOUNTS]]
    assert (parts.to_numpy() >= 0).all()
    assert (parts.sum(axis=1) == rows["wall_s"]).all()
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


@any_system
@given(systems(), st.integers(1, 20))
def test_times_between_tokens_against_a_list_of_them_all(system: System, twentieths: int) -> None:
    gaps_seen = []
    for replica in system.textbook():
        for member in replica.members.values():
            at = [replica.micros[i].returned_s for i in member.iterations]
            tokens = [t for t in at if t >= member.first_token_s]
            gaps_seen += np.diff(tokens[: member.request.output_tokens]).tolist()
    (found,) = Analysis(system.fast()).tbt_quantiles([twentieths / 20])
    if gaps_seen:
        rank = -(-twentieths * len(gaps_seen) // 20)
        assert found == sorted(gaps_seen)[rank - 1]
    else:
        assert np.isnan(found)
