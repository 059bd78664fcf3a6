"""System prompts, sessions and Mooncake traces: lengths and cache hits worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.requests import build_clients, build_requests
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.clock import quantize
from sarathi_sim.simulator.views.metrics import Analysis
from tests.simulator.pools import OTHERS, PoolSystem, compare

LONGEST = 4000


def scenario_of(seed: int, workload: dict[str, Any]) -> Scenario:
    """By default 20 prompt and 13 output tokens each, all at once."""
    tree = {"lengths": {"kind": "fixed", "prompt": 20, "decode": 13}, "requests": 12} | workload
    return Scenario.model_validate(
        {"seed": seed, "model": "m", "device": "d", "policy": {"name": "vllm"}, "workload": tree}
    )


def made(seed: int = 0, longest: int = LONGEST, **workload: Any) -> list[Request]:
    scenario = scenario_of(seed, workload)
    return build_requests(scenario, longest, Source("here.yaml", "one", {}, ()))


def talking(seed: int = 0, **workload: Any) -> dict[str, Any]:
    requests = made(seed, **workload)
    return {"requests": requests, "sender": build_clients(scenario_of(seed, workload), requests)}


def traced(path: Path, rows: list[tuple[float, int, int, list[int]]], **more: Any) -> list[Request]:
    """The requests of a Mooncake trace of (ms, input, output, hash ids), arriving as in it."""
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    lengths = {"kind": "trace", "path": str(path)}
    return made(**{"lengths": lengths, "arrivals": {"kind": "trace"}, "requests": None} | more)


def hits(requests: list[Request], block_size: int = 16, **system: Any) -> list[int]:
    """Prompt tokens found in the prefix cache by each request under vLLM's policy, with room for
    all; the textbook's pool says the same."""
    records = compare(
        PoolSystem(
            policy=Vllm(4096, 64, async_scheduling=False),
            block_size=block_size,
            num_blocks=2000,
            caching=True,
            requests=requests,
            max_length=LONGEST,
            **system,
        )
    )
    return Analysis(records).requests["hit_tokens"].tolist()


# System prompts ------------------------------------------------------------------------------


def test_a_system_prompt_is_computed_once() -> None:
    """Of 40 tokens before 20 own ones two blocks of 16 are whole; the first request computes them,
    and the others find them, also within the same iteration."""
    requests = made(requests=3, system_prompts={"all": {"share": 1.0, "tokens": 40}})
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(60, 13)] * 3
    assert hits(requests) == [0, 32, 32]
    assert hits(requests, block_size=8) == [0, 40, 40]
    no_room_for_the_first = made(requests=2, system_prompts={"all": {"share": 1.0, "tokens": 9}})
    assert hits(no_room_for_the_first) == [0, 0]


def test_groups_are_drawn_by_share_and_seed() -> None:
    prompts = {"chat": {"share": 0.5, "tokens": 512}, "code": {"share": 0.2, "tokens": 2048}}
    drawn = Counter(r.prompt_tokens for r in made(requests=20_000, system_prompts=prompts))
    assert drawn.keys() == {20, 532, 2068}
    assert drawn[532] / 20_000 == pytest.approx(0.5, abs=0.015)
    assert drawn[2068] / 20_000 == pytest.approx(0.2, abs=0.015)
    first, again, other = (made(seed, system_prompts=prompts) for seed in (1, 1, 2))
    assert first == again != other
    # Who has none is as without system prompts.
    plain = made(requests=40)
    some = made(requests=40, system_prompts={"chat": {"share": 0.3, "tokens": 64}})
    assert (
        {r.id for r in some if r in plain} == {r.id for r in some if r.prompt_tokens == 20} != set()
    )


# Sessions ------------------------------------------------------------------------------------

THREE = {"min_turns": 3, "max_turns": 3, "think_s": 1.0}


def test_a_turn_holds_the_turns_before_it() -> None:
    requests = made(requests=7, sessions=THREE, arrivals={"kind": "poisson", "rate": 1.0})
    # 20; 20 + 13 + 20; 20 + 13 + 20 + 13 + 20. The last session is cut short.
    assert [r.prompt_tokens for r in requests] == [20, 53, 86, 20, 53, 86, 20]
    assert all(r.output_tokens == 13 for r in requests)
    assert [r.prefix[0][0][1] for r in requests] == [0, 0, 0, 1, 1, 1, 2]  # type: ignore[index]
    # What is in the KV cache when a turn is done: all but the last token.
    assert [r.prefix[0][1] for r in requests] == [32, 65, 98, 32, 65, 98, 32]
    assert [r.id for r in requests] == list(range(7))


def test_a_turn_finds_its_session_in_the_cache() -> None:
    """32 tokens are two blocks of 16, 65 are four."""
    assert hits(**talking(requests=3, sessions=THREE)) == [0, 32, 64]
    system = {"all": {"share": 1.0, "tokens": 40}}
    both = talking(requests=6, sessions=THREE, system_prompts=system)
    assert [r.prompt_tokens for r in both["requests"]] == [60, 93, 126] * 2
    # Behind the system prompt: 40 + 32 = 72 tokens are four blocks, 40 + 65 are six.
    assert hits(**both) == [0, 64, 96, 32, 64, 96]


@pytest.mark.parametrize("think_s", [0.0, 5.0])
def test_a_turn_is_sent_after_the_answer(think_s: float) -> None:
    arrivals = {"kind": "poisson", "rate": 2.0}
    sessions = THREE | {"think_s": think_s}
    system = talking(3, requests=900, sessions=sessions, arrivals=arrivals)
    records = PoolSystem(
        Vllm(4096, 64, async_scheduling=False), num_blocks=3000, max_length=LONGEST, **system
    ).fast()
    table = Analysis(records).requests
    starts = made(3, requests=300, arrivals=arrivals)
    assert table["arrival_s"][::3].tolist() == [float(quantize(r.arrival_s)) for r in starts]
    waited = np.concatenate(
        [table["arrival_s"][k::3].to_numpy() - table["finish_s"][k - 1 :: 3] for k in (1, 2)]
    )
    assert waited.min() >= 0
    assert waited.mean() == pytest.approx(think_s, rel=0.15)


def test_sessions_of_a_rejected_turn_go_on() -> None:
    """The second turn is too long, and so is the third: neither is waited for."""
    system = talking(requests=4, sessions=THREE, too_long="reject", declared="exact")
    records = PoolSystem(
        Vllm(64, 8, async_scheduling=False), num_blocks=400, **{**system, "max_length": 60}
    ).fast()
    assert set(records.rejections) == {1, 2}


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(0, 4), st.integers(1, 60))
def test_any_sessions(seed: int, low: int, more: int, count: int) -> None:
    lengths = {"kind": "uniform", "min": 4, "max": 30}
    sessions = {"min_turns": low, "max_turns": low + more, "think_s": 2.0}
    requests = made(seed, requests=count, lengths=lengths, pd_ratio=1.0, sessions=sessions)
    assert len(requests) == count
    turns: dict[Any, list[Request]] = {}
    for request in requests:
        turns.setdefault(request.prefix[-1][0], []).append(request)
    sizes = [len(turns["session", i]) for i in range(len(turns))]
    assert all(low <= size <= low + more for size in sizes[:-1]) and sizes[-1] <= low + more
    for members in turns.values():
        held = 0
        for request in members:
            own = request.prompt_tokens - held
            assert 4 <= own + request.output_tokens <= 30
            held = request.prompt_tokens + request.output_tokens
    assert requests == made(seed, requests=count, lengths=lengths, pd_ratio=1.0, sessions=sessions)


# Mooncake ------------------------------------------------------------------------------------


def test_blocks_of_512_become_blocks_of_16(tmp_path: Path) -> None:
    rows = [
        (0.0, 1024, 4, [7, 8]),
        (60_000.0, 1024, 4, [7, 8]),  # the same prompt: its last token is computed again
        (120_000.0, 700, 4, [7, 9]),  # shares 512 tokens
        (180_000.0, 700, 4, [7, 9]),  # 699 tokens are 43 blocks and 11 tokens
        (240_000.0, 700, 4, [9, 8]),  # a prompt is known by its beginning
        (300_000.5, 1300, 4, [7, 8]),  # its last, unfinished block has no number
    ]
    requests = traced(tmp_path / "trace.jsonl", rows)
    assert [r.arrival_s for r in requests] == [0, 60, 120, 180, 240, 300.0005]
    assert [r.prompt_tokens for r in requests] == [1024, 1024, 700, 700, 700, 1300]
    assert {r.output_tokens for r in requests} == {4}
    assert hits(requests) == [0, 63 * 16, 512, 43 * 16, 0, 1024]
    # 512 is no multiple of 48: the block across the boundary differs where the second one does.
    assert hits(requests, block_size=48) == [0, 21 * 48, 10 * 48, 14 * 48, 0, 21 * 48]


@given(st.lists(st.integers(1, 60), max_size=5), st.integers(1, 70))
def test_a_block_is_named_by_what_holds_to_its_end(steps: list[int], size: int) -> None:
    ends = np.cumsum(steps).tolist()
    sequence = Sequence(0, 400, 10, 0, prefix=tuple(enumerate(ends)))
    for index in range(400 // size):
        end = (index + 1) * size
        expected = next((name for name, until in sequence.prefix if end <= until), sequence)
        assert sequence.content(index, size) == (expected, index)


def test_arrivals_may_be_drawn_instead(tmp_path: Path) -> None:
    rows = [(0.0, 600, 4, [1, 2]), (9000.0, 600, 4, [1, 3])]
    requests = traced(tmp_path / "trace.jsonl", rows, arrivals={"kind": "at_once"}, requests=2)
    assert [r.arrival_s for r in requests] == [0, 0]
    assert len(traced(tmp_path / "trace.jsonl", rows, requests=1)) == 1


# Both pools ----------------------------------------------------------------------------------

WORKLOADS: dict[str, dict[str, Any]] = {
    "system_prompts": {
        "system_prompts": {"a": {"share": 0.5, "tokens": 40}, "b": {"share": 0.3, "tokens": 19}}
    },
    "sessions": {"sessions": {"max_turns": 4, "think_s": 0.2}},
    "both": {
        "sessions": {"max_turns": 3, "think_s": 0.0},
        "system_prompts": {"a": {"share": 0.6, "tokens": 33}},
    },
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("policy", ["vllm", "vllm_async", *OTHERS])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_both_pools_agree(workload: str, policy: str, stages: int) -> None:
    """So little memory that cached blocks are evicted, and some policies preempt."""
    engine = OTHERS.get(policy) or Vllm(64, 8, async_scheduling=policy == "vllm_async")
    lengths = {"kind": "uniform", "min": 4, "max": 30}
    arrivals = {"kind": "poisson", "rate": 30.0}
    workload_ = {
        "requests": 40, "lengths": lengths, "pd_ratio": 1.0, "arrivals": arrivals,
        "declared": "exact", "too_long": "reject", **WORKLOADS[workload],
    }  # fmt: skip
    compare(PoolSystem(engine, (2,) * stages, 60, caching=True, **talking(3, **workload_)))


# Mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (
            {
                "system_prompts": dict(
                    zip("ab", [{"share": s, "tokens": 9} for s in (0.7, 0.4)], strict=True)
                )
            },
            "workload.system_prompts: value {'a': 0.7, 'b': 0.4}: the shares add up to 1.1: must",
        ),
        (
            {"sessions": THREE | {"min_turns": 4}},
            "workload.sessions.max_turns: value 3: must be at least min_turns, which is 4",
        ),
        (
            {"sessions": THREE, "arrivals": {"kind": "poisson", "rate": 1e-6}, "requests": 90},
            "workload.arrivals.rate: value 1e-06: the last request arrives after",
        ),
        (
            {"sessions": THREE, "lengths": {"kind": "trace", "path": "x.csv"}},
            "workload.sessions: value {'min_turns': 3, 'max_turns': 3, 'think_s': 1.0}: must "
            "be left out: the prompts of a trace are complete",
        ),
        (
            {"sessions": THREE | {"min_turns": 200, "max_turns": 200}, "requests": 200},
            "cluster.max_length: value 4000: request 121 of the workload has 4013 prompt and 13 ",
        ),
    ],
)
def test_mistakes(workload: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        made(**workload)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
