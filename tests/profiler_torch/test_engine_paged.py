"""Engines with block tables: preempted or hit, each request gets the tokens it has alone; the
simulator decides the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


from sarathi_sim.experiments.measured.torch_session import lockstep, measured_records
from sarathi_sim.policies.catalogue import build, is_pooled
from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.log import HIT, LOST
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.engine import driver
from sarathi_sim.profiler.engine.driver import Served
from sarathi_sim.profiler.engine.processes import EngineProcesses
from sarathi_sim.profiler.engine.spec import EngineSpec, Work
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.planning.journal import ProfileError
from sarathi_sim.simulator.loop.clock import quantize
from sarathi_sim.simulator.views.metrics import Analysis
from tests.clock import only_sleep_takes_time
from tests.patience import PATIENCE_S
from tests.profiler_torch.local_engine import LocalEngine

MODEL = replace(load_model("tiny-llama-40m"), num_layers=2, hidden_size=64, num_heads=4,
                num_kv_heads=2, head_dim=16, ffn_hidden_size=128, vocab_size=96)  # fmt: skip
MAX_LENGTH, BLOCK, BLOCKS, SEQUENCES = 96, 4, 30, 8
#: Twice the largest difference between two orders of summation (see test_engine.py).
LEAD = 4e-5
EOS = 38
SMALL: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": SEQUENCES}
POLICIES: dict[str, dict[str, Any]] = {
    "vllm": {"name": "vllm", **SMALL, "async_scheduling": False},
    "vllm_async": {"name": "vllm", **SMALL, "async_scheduling": True},
    "vllm_priority": {"name": "vllm", **SMALL, "scheduling_policy": "priority",
                      "async_scheduling": False},
    "sglang": {"name": "sglang", "chunked_prefill_size": 16, "max_running_requests": SEQUENCES,
               "schedule_conservativeness": 0.0},
    "sglang_mixed": {"name": "sglang", "chunked_prefill_size": 16, "schedule_policy": "lpm",
                     "max_running_requests": SEQUENCES, "schedule_conservativeness": 0.0,
                     "enable_mixed_chunk": True, "disable_overlap_schedule": True},
    "sarathi_serve": {"name": "sarathi_serve", "chunk_size": 24, "max_num_seqs": SEQUENCES},
    "trtllm": {"name": "trtllm", "max_num_tokens": 40, "max_batch_size": SEQUENCES,
               "capacity_scheduler_policy": "max_utilization", "enable_chunked_prefill": True},
    "fair": {"name": "fair", **SMALL},
}  # fmt: skip
EVERY = pytest.mark.parametrize("policy", POLICIES)
PP2 = pytest.mark.parametrize("engine", [2], indirect=True, ids=["pp2"])
CACHING = pytest.mark.parametrize("caching", [False, True], ids=["plain", "cached"])


def requests(rate: float | None = None, count: int = 14, seed: int = 6) -> list[Request]:
    """Half of them begin alike, with 9 or with 22 tokens."""
    rng = np.random.default_rng(seed)
    gaps = np.random.default_rng(seed + 1).exponential(size=count)
    arrival = np.cumsum(gaps) / rate if rate else np.zeros(count)
    found = []
    for i, when in enumerate(quantize(arrival).tolist()):
        prompt, output = int(rng.integers(3 + 22 * (i % 2), 30)), int(rng.integers(1, 40))
        prefix = ((), (("short", 9),), (), (("short", 9), (("long", 1), 22)))[i % 4]
        found.append(Request(i, when, prompt, output, output + i % 3, i % 3, prefix, i % 2))
    return found


def settings(policy: str, pp: int = 1) -> dict[str, Any]:
    depth = pp + policy.endswith("async")
    return {"max_in_flight": depth, "max_length": MAX_LENGTH, "stages": pp}


@cache
def alone() -> dict[int, list[int]]:
    """What each request generates with nobody beside it, and memory for all."""
    engine = LocalEngine(MODEL, blocks=1, block_size=MAX_LENGTH)
    one = {"max_batch": 1, "kv_capacity": MAX_LENGTH, "max_length": MAX_LENGTH}
    found: dict[int, list[int]] = {}
    for request in requests():
        found |= engine.serve([request], build("orca"), one).outputs
    return found


def told(served: Served, kind: int) -> int:
    """Tokens that were hit or lost."""
    return sum(served.events[2::3][i] for i, k in enumerate(served.events[1::3]) if k == kind)


@EVERY
@CACHING
def test_tight_memory_changes_no_token(policy: str, caching: bool) -> None:
    """Blocks are overwritten whenever they are given out, so nobody reads what others left."""
    engine = LocalEngine(MODEL, blocks=BLOCKS - 1, block_size=BLOCK)
    run = engine.serve(
        requests(), build(**POLICIES[policy]), settings(policy), poison=True, prefix_caching=caching
    )
    assert run.margin > LEAD
    assert run.outputs == alone()
    assert told(run, LOST) > 20, "nobody was preempted"
    if policy != "sarathi_serve":  # which has no prefix cache
        assert (told(run, HIT) > 0) == caching
    assert max(run.kv_log) >= BLOCKS - 4


@pytest.fixture(scope="module", params=[1, 2], ids=["pp1", "pp2"])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineProcesses]:
    pp = request.param
    spec = EngineSpec(MODEL, (2 // pp,) * pp, 1, slots=SEQUENCES, max_length=MAX_LENGTH,
                      max_tokens=160, num_blocks=60, block_size=BLOCK)  # fmt: skip
    with EngineProcesses(spec, PATIENCE_S) as started:
        yield started


def pool(policy: str, pp: int, caching: bool, load: list[Request]) -> Pool:
    """The simulator's."""
    built = build(**POLICIES[policy])
    assert is_pooled(built)
    blocks = (built.cached_blocks if caching else Blocks)(BLOCKS, BLOCK)
    return Pool(built, blocks, **settings(policy, pp))


@CACHING
@pytest.mark.parametrize("policy", ["vllm", "vllm_async", "sglang", "sglang_mixed"])
def test_the_simulator_decides_the_same(
    engine: EngineProcesses, policy: str, caching: bool
) -> None:
    served = in_lockstep(engine, policy, caching, requests())
    assert served.outputs == alone()
    if settings(policy, engine.spec.pp)["max_in_flight"] == 1:
        # With two, how many are preempted depends on when the first comes back.
        assert told(served, LOST) > 0


@PP2
@pytest.mark.parametrize("policy", ["vllm", "vllm_async", "sglang"])
def test_so_it_does_where_requests_come_one_by_one(engine: EngineProcesses, policy: str) -> None:
    assert in_lockstep(engine, policy, True, requests(150.0)).outputs == alone()


@PP2
@pytest.mark.parametrize(
    "policy", sorted(POLICIES.keys() - {"vllm", "vllm_async", "sglang", "sglang_mixed"})
)
def test_so_it_does_for_every_other_policy(engine: EngineProcesses, policy: str) -> None:
    assert in_lockstep(engine, policy, True, requests()).outputs == alone()


def in_lockstep(
    engine: EngineProcesses, policy: str, caching: bool, load: list[Request], eos: int | None = None
) -> Served:
    """Serve the load, let the simulator do the same, and look at what can be said of the run."""
    pp = engine.spec.pp
    run = engine.serve(
        load, POLICIES[policy], settings(policy, pp),
        num_blocks=BLOCKS, prefix_caching=caching, eos=eos,
    )  # fmt: skip
    # It may have ended some: with as many output tokens as it generated.
    generated = {request: len(tokens) for request, tokens in run.served.outputs.items()}
    load = [replace(r, output_tokens=generated.get(r.id, r.output_tokens)) for r in load]
    assert lockstep(run, load, pool(policy, pp, caching, load)) is None
    assert len(run.served.decisions) > 30  # 278 tokens, at most 8 at a time
    assert run.served.margin > LEAD
    measured = Analysis(measured_records(run, load, pool(policy, pp, caching, load))).requests
    assert (measured["latency_s"] >= measured["ttft_s"]).all()
    assert measured["recomputed_tokens"].sum() <= told(run.served, LOST)
    return run.served


@PP2
@pytest.mark.parametrize("policy", ["vllm_async", "sglang"])
def test_a_token_ends_a_request(engine: EngineProcesses, policy: str) -> None:
    """The scheduler knows of no length; the simulator is told those that came of it."""
    load = [replace(request, max_tokens=40) for request in requests()]
    served = in_lockstep(engine, policy, True, load, eos=EOS)
    ends = [tokens.index(EOS) if EOS in tokens else None for tokens in served.outputs.values()]
    assert all(
        len(tokens) == (40 if end is None else end + 1)
        for tokens, end in zip(served.outputs.values(), ends, strict=True)
    )
    assert len({end for end in ends if end is not None}) > 3
    for id, tokens in alone().items():
        same = min(len(tokens), len(served.outputs[id]))
        assert tokens[:same] == served.outputs[id][:same]


def test_a_token_ends_a_request_with_reserved_memory_too() -> None:
    engine = LocalEngine(MODEL, blocks=4, block_size=MAX_LENGTH)
    load = [replace(request, max_tokens=40, output_tokens=40) for request in requests()]
    four = {"max_batch": 4, "kv_capacity": 4 * MAX_LENGTH, "max_length": MAX_LENGTH}
    whole = engine.serve(load, build("orca"), four).outputs
    ended = {id: tokens[: (*tokens, EOS).index(EOS) + 1] for id, tokens in whole.items()}
    for name in ("orca", "request_level"):
        run = engine.serve(load, build(name), four, eos=EOS)
        assert run.outputs == ended
    sarathi = engine.serve(load, build("sarathi", chunk_size=16, tile=4), four, eos=EOS)
    assert sarathi.outputs == ended
    assert min(map(len, ended.values())) < 40


def test_a_session_begins_with_what_was_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn finds the blocks of the turns before, the generated tokens among them."""
    monkeypatch.setattr(driver, "time", only_sleep_takes_time())
    engine = LocalEngine(MODEL, blocks=BLOCKS - 1, block_size=BLOCK)
    turns = [
        Request(i, 1.0 * i, 10 + 20 * i, 8, 8, prefix=(("session", 18 + 20 * i),)) for i in range(3)
    ]
    run = engine.serve(turns, build("vllm"), settings("vllm"), prefix_caching=True)
    # The last token is never written, and a hit is whole blocks: 17 and 37 tokens are there.
    assert [run.events[i : i + 3] for i in (0, 3)] == [[1, HIT, 16], [2, HIT, 36]]
    plain = engine.serve(turns, build("vllm"), settings("vllm"))
    assert plain.outputs == run.outputs and not plain.events
    at_once = [replace(turn, arrival_s=0.0) for turn in turns]
    with pytest.raises(ProfileError, match="a request that goes on from request 0 came before"):
        engine.serve(at_once, build("vllm"), settings("vllm"), prefix_caching=True)


def test_who_begins_alike_has_the_same_blocks() -> None:
    works: list[Work] = []

    class Spy(LocalEngine):
        def submit(self, work: Work) -> None:
            works.append(work)
            super().submit(work)

    load = [Request(i, 0.0, 10 + i, 2, 2, prefix=(("system", 9),)) for i in range(2)]
    Spy(MODEL, blocks=20, block_size=BLOCK).serve(
        load, build("vllm"), settings("vllm"), prefix_caching=True
    )
    (first, *_), (second, *_) = works[0].chunks
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert works[0].chunks[1][1:3] == (11 - 8, 8)
    assert [set(table) & set(first) for table, _ in works[1].decodes] == [
        set(first),
        set(first[:2]),
    ]


def test_what_a_paged_engine_cannot_do_is_said(engine: EngineProcesses) -> None:
    vllm, depth = POLICIES["vllm"], settings("vllm")
    for named, settings_, blocks, complaint in (
        ({"name": "orca"}, {}, 0, "this policy needs an engine that was started with memory that"),
        (vllm | {"max_num_seqs": 9}, depth, 0, "1 micro-batches of 9 sequences need more KV slots"),
        (vllm, depth, 61, "the engine was started with 60 KV blocks"),
    ):
        with pytest.raises(ProfileError, match=complaint):
            engine.serve(requests(), named, settings_, num_blocks=blocks)
