"""Shared by the tests: small systems run on the fast path and on the textbook oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.log import DRAFTED
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca, OrcaWorstCase, RequestLevel
from sarathi_sim.policies.policy import Plan, Policy, View
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.simulator.loop.clock import quantize
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.loop.records import Records, ReplicaLog, Switches
from sarathi_sim.simulator.loop.routers import Router
from sarathi_sim.simulator.loop.simulation import Clients, ClosedLoop
from sarathi_sim.simulator.views.metrics import Analysis
from tests.simulator import simulate
from tests.textbook.pipeline import Micro, TextbookPipeline
from tests.textbook.replicas import TextbookPoolReplica, TextbookReplica
from tests.textbook.simulation import simulate_textbook


class Skipping(Orca):
    """Orca, but some decodes sit out, now one, now several, now the longest."""

    def plan(self, view: View) -> Plan | None:
        plan = super().plan(view)
        if plan is None:
            return None
        skip = tuple(s for s in view.decoding if (s.id + view.num_decodes) % 3 == 0)
        return Plan(plan.chunks, skip[not plan.chunks and len(skip) == view.num_decodes :])


POLICIES: dict[str, Policy] = {
    "request_level": RequestLevel(),
    "orca_unconstrained": Orca(),
    "orca_best": Orca(max_prefills=1),
    "orca_worst": OrcaWorstCase(),
    "skipping": Skipping(max_prefills=1),
    "sarathi_fill": Sarathi(chunk_size=32, tile=8),
    "sarathi_reserve": Sarathi(chunk_size=16, tile=4, chunk_rule="reserve"),
    "sarathi_equal_time": Sarathi(32, tile=4, chunk_rule="equal_time", iteration_s=1.5e-3),
    "sarathi_fixed": Sarathi(chunk_size=24, tile=8, chunk_rule="fixed"),
}
MAX_LENGTH = 128


def predict(batch: Batch) -> tuple[float, float, float, float]:
    """Made-up times with the right dependences, none of them a round number."""
    layer = 1e-3 / 3 + 1e-5 * -(-batch.num_tokens // 8) * 8 + 1e-7 / 7 * batch.decode_context
    layer += 1e-7 / 11 * batch.longest_context
    layer += sum(1e-8 / 3 * n * (context + n) for _, n, context in batch.chunks)
    first = 1e-5 / 9 * batch.num_tokens
    last = 2e-4 / 3 * (batch.num_decodes + len(batch.chunks))
    send = 5e-5 + 1e-6 / 3 * batch.num_tokens
    return tuple(float(quantize(t)) for t in (layer, first, last, send))  # type: ignore[return-value]


def predict_step(
    step: Sequence[Batch | None],
) -> tuple[list[tuple[float, float, float, float]], tuple[float, float, float, float]]:
    """A step of ranks: their own times, and in each layer experts that see the tokens of all."""
    tokens = [batch.num_tokens if batch else 0 for batch in step]
    experts = float(quantize(1e-4 / 7 * sum(tokens) + 1e-5 / 3 * max(tokens)))
    ranks = [predict(batch) if batch else (0.0,) * 4 for batch in step]
    times = [
        (layer + experts, first, last, 0.0) if batch else (0.0, 0.0, 0.0, 0.0)
        for batch, (layer, first, last, _) in zip(step, ranks, strict=True)
    ]
    layer, first, last, _ = (max(part) for part in zip(*times, strict=True))
    return times, (layer, first, last, 0.0)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a system has around its schedulers, which both implementations understand."""

    lazy: bool = False
    blocking_send: bool = False
    turnaround_s: float = 0.0
    replicas: int = 1
    router: Router = "round_robin"
    ranks: int = 1
    rank_router: Router = "round_robin"
    jitter: float = 0.0
    clients: int = 0  # of a closed loop; none: requests arrive by themselves
    think_s: float = 0.0
    sender: Clients | None = None  # of other clients
    admission_s: float = 0.0
    requests: list[Request] = field(default_factory=list)

    @property
    def times(self) -> Any:
        """The predictor of a batch, or of a step of several ranks."""
        return predict if self.ranks == 1 else predict_step

    @property
    def switches(self) -> Switches:
        return Switches(self.turnaround_s, self.jitter, self.lazy, self.blocking_send)

    def _around(self) -> dict[str, Any]:
        clients = self.sender or closed_loop(self.clients, self.think_s, len(self.requests))
        return {
            "switches": self.switches,
            "router": self.router,
            "ranks": self.ranks,
            "rank_router": self.rank_router,
            "seed": 7,
            "clients": clients,
            "admission_s": self.admission_s,
        }


@st.composite
def surroundings(draw: st.DrawFn) -> dict[str, Any]:
    """Any, and the layers of any pipeline."""
    stages = draw(st.integers(1, 4))
    return {
        "layers": tuple(draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))),
        "lazy": draw(st.booleans()),
        "blocking_send": draw(st.booleans()),
        "turnaround_s": draw(st.sampled_from([0.0, 1e-3, 0.01])),
        "jitter": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "replicas": draw(st.integers(1, 3)),
        "router": draw(st.sampled_from(get_args(Router))),
        "clients": draw(st.sampled_from([0, 0, 1, 3])),
        "think_s": draw(st.sampled_from([0.0, 0.05])),
        "admission_s": draw(st.sampled_from([0.0, 0.0, 2.0**-8, 0.03])),
    }


@st.composite
def with_ranks(draw: st.DrawFn, systems: st.SearchStrategy[Any]) -> Any:
    """Any of these systems with data-parallel attention."""
    return replace(
        draw(systems),
        layers=(draw(st.integers(1, 4)),),
        blocking_send=False,
        ranks=draw(st.integers(2, 3)),
        rank_router=draw(st.sampled_from(get_args(Router))),
    )


#: On a coarse grid, so that several fall on one instant (or on a batch's return).
arrivals = st.integers(0, 30).map(lambda k: k * 2.0**-7)


@dataclass(frozen=True)
class System(Surroundings):
    policy: str = "orca_best"
    layers: tuple[int, ...] = (3, 3)
    max_batch: int = 4
    max_in_flight: int = 2
    kv_sequences: int = 100
    kv_tokens: int = 0  # in place of the above, if given
    free_pool: bool = False
    reserve_declared: bool = False

    def settings(self) -> dict[str, Any]:
        return {
            "max_batch": self.max_batch,
            "max_in_flight": self.max_in_flight,
            "kv_capacity": self.kv_tokens or self.kv_sequences * MAX_LENGTH,
            "max_length": MAX_LENGTH,
            "reserve_declared": self.reserve_declared,
            "free_pool": self.free_pool,
        }

    def schedulers(self) -> list[MicroBatches]:
        policy = POLICIES[self.policy]
        count = self.replicas * self.ranks
        return [MicroBatches(policy, **self.settings()) for _ in range(count)]

    def fast(self, **extra: Any) -> Records:
        return simulate(
            self.requests,
            extra.pop("schedulers", None) or self.schedulers(),
            self.times,
            self.layers,
            **self._around(),
            **extra,
        )

    def textbook(self) -> list[TextbookReplica]:
        return simulate_textbook(
            self.requests,
            POLICIES[self.policy],
            self.times,
            self.layers,
            replicas=self.replicas,
            **self._around(),
            **self.settings(),
        )


def closed_loop(clients: int, think_s: float, count: int) -> ClosedLoop | None:
    """Clients who think longer from request to request; None for no clients."""
    if not clients:
        return None
    return ClosedLoop(clients, quantize(think_s * np.arange(count) / max(count, 1)))


def make_requests(
    count: int, *, seed: int = 0, rate: float | None = None, longest: int = MAX_LENGTH
) -> list[Request]:
    """Random lengths; all at t = 0, or Poisson arrivals at ``rate`` per second."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count)) if rate else np.zeros(count)
    requests = []
    for i in range(count):
        prompt = int(rng.integers(1, longest - 1))
        output = int(rng.integers(1, min(40, longest - prompt) + 1))
        requests.append(Request(i, float(arrivals[i]), prompt, output, MAX_LENGTH - prompt))
    return requests


def start_finish(micros: list[Micro]) -> tuple[np.ndarray, np.ndarray]:
    """Start and finish on every stage of every batch, shape (batches, stages)."""
    times = np.array([m.stages for m in micros])
    return times[:, 0::2], times[:, 1::2]


def assert_bitwise_equal(records: Records, oracle: Sequence[TextbookPipeline]) -> None:
    """Every batch, every request and what was rejected are the textbook's, to the bit."""
    table = Analysis(records).requests.set_index("request")
    assert len(records.rejections) == sum(len(replica.rejected) for replica in oracle)
    for log, replica in zip(records.replicas, oracle, strict=True):
        assert set(replica.rejected) <= set(records.rejections)
        assert all(table.loc[i, "rejected"] is not None for i in replica.rejected)
        assert_equal_log(log, replica)
        for member in replica.everybody():
            row = table.loc[member.request.id]
            assert row["finish_s"] == member.finish_s
            assert row["ttft_s"] == member.first_token_s - row["arrival_s"]
            first = replica.micros[member.iterations[0]].stages[0]
            assert row["queueing_s"] == first - row["arrival_s"]


def assert_equal_log(log: ReplicaLog, replica: TextbookPipeline) -> None:
    """What one replica did is what the textbook's did."""
    micros = replica.micros
    assert log.num_iterations == len(micros)
    columns = {
        "ready_s": [m.ready_s for m in micros],
        "finish_s": [m.returned_s for m in micros],
        "chunks": [len(m.chunks) for m in micros],
        "prefill_tokens": [sum(n for _, n in m.chunks) for m in micros],
        "prefill_context": [sum(held for _, _, held in m.batch.chunks) for m in micros],
        "decodes": [len(m.decodes) for m in micros],
        "decode_context": [m.batch.decode_context for m in micros],
        "padding": [len(m.padding) for m in micros],
    }
    if isinstance(replica, TextbookPoolReplica):
        assert log.pool is not None
        assert log.pool.kv_tokens.tolist() == replica.kv_tokens
        fast, slow = log.pool.events.tolist(), [list(event) for event in replica.pool.events]
        for events in (fast, slow):  # of those who end together, drafts come in any order
            events.sort(key=lambda event: (event[1] >= DRAFTED) * tuple(event))
        assert fast == slow
    else:
        columns["group"] = [m.slot for m in micros]
    for name, of in columns.items():
        assert log.iterations[name].tolist() == of, name
    if micros:
        start, finish = start_finish(micros)
        times = stage_times(log)
        assert np.array_equal(times.start, start)
        assert np.array_equal(times.finish, finish)


@st.composite
def systems(draw: st.DrawFn) -> System:
    """Any small system: policies, pipelines, switches, lengths and arrivals."""
    policy = draw(st.sampled_from(sorted(POLICIES)))
    declared = draw(st.booleans())
    lengths = st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 8), arrivals)
    requests = [
        Request(i, at, prompt, output, min(output + slack, MAX_LENGTH - prompt))
        for i, (prompt, output, slack, at) in enumerate(
            draw(st.lists(lengths, min_size=1, max_size=25))
        )
    ]
    return System(
        policy,
        max_batch=draw(st.integers(1, 6)),
        max_in_flight=draw(st.integers(1, 5)),
        kv_sequences=draw(st.integers(1, 12)),
        # A cache so small that some requests can never fit.
        kv_tokens=draw(st.sampled_from([0, 30])) if declared else 0,
        free_pool=policy != "request_level" and draw(st.booleans()),
        reserve_declared=declared,
        requests=requests,
        **draw(surroundings()),
    )
