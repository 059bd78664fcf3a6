"""Shared by the tests of pools: small systems with paged memory, on both implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from sarathi_sim.experiments.config.loading import CONFIGS
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.catalogue import builders_in
from sarathi_sim.policies.fair import Fair
from sarathi_sim.policies.kv import Blocks, CachedBlocks
from sarathi_sim.policies.log import LivelockError
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Prefix, Request
from sarathi_sim.policies.sarathi_serve import SarathiServe
from sarathi_sim.policies.scheduler import Acceptance, OutputLengths
from sarathi_sim.policies.sglang import Sglang
from sarathi_sim.policies.trtllm import Trtllm
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.loop.simulation import SimulationError
from tests.simulator import simulate
from tests.simulator.oracle import (
    Surroundings,
    arrivals,
    assert_bitwise_equal,
    predict,
    surroundings,
)
from tests.textbook.replicas import TextbookPoolReplica
from tests.textbook.simulation import simulate_textbook

MAX_LENGTH = 160
Who = tuple[list[tuple[int, int, int]], list[int]]
"""Who was in a batch: id, tokens and context of each chunk; the ids that decode, sorted."""


def drawn(id: int, known: int, drafts: int) -> int:
    """Drafts that hold, from none to all."""
    return (7919 * id + 104729 * known) % 97 % (drafts + 1)


def who(batch: Batch) -> Who:
    chunks = [(s.id, tokens, context) for s, tokens, context in batch.chunks]
    return chunks, sorted(s.id for s in batch.decodes)


@dataclass(frozen=True)
class Pooled:
    """A policy on a pool, its memory and its drafts."""

    policy: PoolPolicy = field(default_factory=Vllm)
    layers: tuple[int, ...] = (3,)
    num_blocks: int = 60
    block_size: int = 4
    caching: bool = False
    max_in_flight: int | None = None
    max_length: int = MAX_LENGTH
    draft_length: int = 0
    lookahead: int = 0
    draft_slots: int = 0
    acceptance: Acceptance | None = None
    state_blocks: int = 0

    @property
    def depth(self) -> int:
        return self.max_in_flight or len(self.layers) + self.policy.ahead

    def pool(self, kind: type[Pool] = Pool) -> Pool:
        blocks = self.policy.cached_blocks if self.caching else Blocks
        return kind(
            self.policy,
            blocks(self.num_blocks, self.block_size, self.state_blocks),
            max_in_flight=self.depth,
            max_length=self.max_length,
            stages=len(self.layers),
            draft_length=self.draft_length,
            lookahead=self.lookahead,
            draft_slots=self.draft_slots,
            endings=OutputLengths(self.acceptance),
        )

    @property
    def options(self) -> dict[str, Any]:
        names = ("num_blocks", "block_size", "caching", "max_length", "draft_length", "lookahead")
        found = {name: getattr(self, name) for name in (*names, "draft_slots", "state_blocks")}
        acceptance = self.acceptance or (lambda *_: 0)
        return {**found, "max_in_flight": self.depth, "check": True, "acceptance": acceptance}

    def with_drafts(self, length: int, slots: int = 0, acceptance: Acceptance = drawn) -> Self:
        """On one stage; of vLLM's drafts the drafter needs KV, too."""
        ahead = isinstance(self.policy, Vllm)
        drafts = {"draft_length": length, "lookahead": length * ahead, "draft_slots": slots * ahead}
        return replace(self, layers=(3,), acceptance=acceptance, **drafts)


@dataclass(frozen=True)
class PoolSystem(Surroundings, Pooled):
    def pools(self, kind: type[Pool] = Pool) -> list[Pool]:
        return [self.pool(kind) for _ in range(self.replicas * self.ranks)]

    def fast(self, pools: list[Pool] | None = None, seen: list[Who] | None = None) -> Records:
        times = self.times if seen is None else watched(seen)
        return served(
            simulate, self.requests, pools or self.pools(), times, self.layers, **self._around()
        )

    def textbook(self, seen: list[Who] | None = None) -> list[TextbookPoolReplica]:
        return simulate_textbook(  # type: ignore[return-value]
            self.requests,
            self.policy,
            self.times if seen is None else watched(seen),
            self.layers,
            replicas=self.replicas,
            **self.options,
            **self._around(),
        )


def served(simulation: Callable[..., Records], *arguments: Any, **options: Any) -> Records:
    """Its records. A system whose requests preempt each other for ever is no example."""
    try:
        return simulation(*arguments, **options)
    except SimulationError as error:
        if isinstance(error.__cause__, LivelockError):
            reject()
        raise


def watched(seen: list[Who]) -> Callable[[Batch], tuple[float, float, float, float]]:
    """The predictor, which also notes whom it is asked about."""

    def look(batch: Batch) -> tuple[float, float, float, float]:
        seen.append(who(batch))
        return predict(batch)

    return look


def compare(system: PoolSystem) -> Records:
    """Fast and textbook, bitwise; and whom each batch held, if there is one replica of one rank."""
    ours: list[Who] = []
    theirs: list[Who] = []
    alone = system.ranks == 1
    records = system.fast(seen=ours if alone else None)
    oracle = system.textbook(seen=theirs if alone else None)
    if system.replicas == 1:
        assert ours == theirs
    assert_bitwise_equal(records, oracle)
    return records


def pool_requests(count: int, *, seed: int = 0, rate: float | None = None) -> list[Request]:
    """Random lengths and priorities; a prefix that some share, and turns that hold earlier ones."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count)) if rate else np.zeros(count)
    requests = []
    for i in range(count):
        prompt = int(rng.integers(1, 90))
        output = int(rng.integers(1, 40))
        most = output + int(rng.integers(0, 6))
        prefix: Prefix = ()
        if i % 3 == 1:
            prefix = ((("system", i % 2), min(prompt, 24)),)
        elif i % 3 == 2:
            prefix = ((("session", i % 4), prompt + output - 1),)
        priority = int(rng.integers(0, 3))
        requests.append(Request(i, float(arrivals[i]), prompt, output, most, priority, prefix))
    return requests


@st.composite
def vllm_policies(draw: st.DrawFn) -> Vllm:
    threshold = draw(st.sampled_from([None, None, 5, 12]))
    chunked = draw(st.integers(0, 5)) > 0
    return Vllm(
        max_num_batched_tokens=draw(st.sampled_from([9, 20, 64])) if chunked else MAX_LENGTH,
        max_num_seqs=draw(st.sampled_from([1, 3, 8])),
        long_prefill_token_threshold=threshold,
        adaptive_threshold=threshold is not None and draw(st.booleans()),
        enable_chunked_prefill=chunked,
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
    )


@st.composite
def sglang_policies(draw: st.DrawFn, mixed: bool = True) -> Sglang:
    return Sglang(
        chunked_prefill_size=draw(st.sampled_from([None, 12, 24, 64])),
        max_prefill_tokens=draw(st.sampled_from([9, 40, 160])),
        max_running_requests=draw(st.sampled_from([1, 3, 8])),
        schedule_conservativeness=draw(st.sampled_from([0.0, 0.3, 1.0])),
        schedule_policy=draw(st.sampled_from(["fcfs", "lpm", "lof"])),
        enable_mixed_chunk=mixed and draw(st.booleans()),
        disable_overlap_schedule=draw(st.booleans()),
        scheduler_recv_interval=draw(st.sampled_from([1, 1, 3])),
        ignore_eos=draw(st.booleans()),
    )


@st.composite
def trtllm_policies(draw: st.DrawFn) -> Trtllm:
    chunked = draw(st.booleans())
    return Trtllm(
        draw(st.sampled_from([24, 64])) if chunked else MAX_LENGTH,
        draw(st.sampled_from([1, 3, 8])),
        draw(st.sampled_from(["guaranteed_no_evict", "max_utilization"])),
        enable_chunked_prefill=chunked,
        disable_overlap_scheduler=draw(st.booleans()),
        enable_balance=draw(st.booleans()),
        timeout_iters=draw(st.sampled_from([1, 3, 8])),
        batching_wait_iters=draw(st.sampled_from([None, 1, 2])),
    )


_FILE = CONFIGS / "vllm_v0.py"
VllmV0: Any = builders_in(_FILE.read_text(), str(_FILE))["vllm_v0"]

OTHERS: dict[str, PoolPolicy] = {
    "sarathi_serve": SarathiServe(chunk_size=32, max_num_seqs=8),
    "sglang": Sglang(24, 80, 8),
    "sglang_mixed": Sglang(24, 80, 8, enable_mixed_chunk=True, disable_overlap_schedule=True),
    "sglang_lpm": Sglang(24, 80, 8, schedule_policy="lpm", enable_mixed_chunk=True),
    "sglang_tight": Sglang(None, 80, 8, schedule_conservativeness=0.0, ignore_eos=True),
    "trtllm": Trtllm(180, 8),
    "vllm_v0": VllmV0(24, 8),
    "trtllm_max": Trtllm(40, 8, "max_utilization", enable_chunked_prefill=True),
    "trtllm_waits": Trtllm(
        400, 8, "max_utilization", batch_wait_timeout_iters=3, batch_wait_max_tokens_ratio=0.1
    ),
    "serve_dynamic": SarathiServe(
        max_num_seqs=6, enable_dynamic_chunking_schedule=True, low_chunk_size=32,
        high_chunk_size=64, chunk_schedule_max_tokens=64, chunk_schedule_stages=2,
    ),
    "fair": Fair(48, 8),
}  # fmt: skip


def any_policies() -> st.SearchStrategy[Any]:
    """Of every engine."""
    engines = vllm_policies() | sglang_policies() | trtllm_policies()
    return engines | st.sampled_from([*OTHERS.values()])


@st.composite
def shared_requests(draw: st.DrawFn, most: int = 25, priorities: int = 2) -> list[Request]:
    """Any few, of which some begin with the prefix of a group."""
    rows = st.tuples(
        st.integers(1, 60), st.integers(1, 20), st.integers(0, 8), arrivals,
        st.integers(0, priorities), st.integers(0, 90), st.integers(0, 3),
    )  # fmt: skip
    requests = []
    for i, row in enumerate(draw(st.lists(rows, min_size=1, max_size=most))):
        prompt, output, slack, at, priority, shared, group = row
        until = min(shared, prompt + output - 1)
        prefix = ((("group", group), until),) if group and until else ()
        requests.append(Request(i, at, prompt, output, output + slack, priority, prefix))
    return requests


@st.composite
def pool_systems(
    draw: st.DrawFn,
    policies: st.SearchStrategy[Any] = vllm_policies(),  # noqa: B008
) -> PoolSystem:
    """Any small system with paged memory."""
    policy = draw(policies)
    # (A radix tree has a pool of states beside it.)
    states = [0, 0, 2] if policy.cached_blocks is CachedBlocks else [0]
    return PoolSystem(
        policy,
        # So few that some requests can never fit.
        num_blocks=draw(st.sampled_from([16, 26, 40, 200])),
        block_size=draw(st.sampled_from([1, 3, 4])),
        caching=draw(st.booleans()),
        max_in_flight=draw(st.sampled_from([None, None, None, 1, 2])),
        requests=draw(shared_requests()),
        state_blocks=draw(st.sampled_from(states)),
        **draw(surroundings()),
    )
