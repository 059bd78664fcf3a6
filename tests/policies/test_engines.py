"""What holds for every policy that acts on a pool, in tight memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_sim.policies.catalogue import build
from sarathi_sim.policies.policy import is_pooled
from sarathi_sim.policies.request import Request
from tests.policies.by_hand import schedule

POLICIES = {
    "fair": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "sarathi_serve": {"chunk_size": 16, "max_num_seqs": 4},
    "sarathi_serve dynamic": {
        "max_num_seqs": 6,
        "enable_dynamic_chunking_schedule": True,
        "low_chunk_size": 32,
        "high_chunk_size": 64,
        "chunk_schedule_max_tokens": 64,
        "chunk_schedule_stages": 2,
    },
    "sglang": {"chunked_prefill_size": 16, "schedule_conservativeness": 0.1},
    "sglang lpm": {
        "chunked_prefill_size": 16,
        "schedule_conservativeness": 0.1,
        "schedule_policy": "lpm",
        "enable_mixed_chunk": True,
        "disable_overlap_schedule": True,
    },
    "sglang whole": {"chunked_prefill_size": None, "max_prefill_tokens": 30},
    "trtllm": {"max_num_tokens": 64, "max_batch_size": 4},
    "trtllm max": {
        "max_num_tokens": 16,
        "max_batch_size": 5,
        "capacity_scheduler_policy": "max_utilization",
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": True,
    },
    "trtllm waits": {
        "max_num_tokens": 64,
        "capacity_scheduler_policy": "max_utilization",
        "batch_wait_timeout_iters": 3,
        "batch_wait_max_tokens_ratio": 0.5,
    },
}


@st.composite
def arrivals(draw: st.DrawFn) -> dict[int, list[Request]]:
    """A few requests, some of which share a prefix, in the order of their ids."""
    found: dict[int, list[Request]] = {}
    at = 0
    for id in range(draw(st.integers(1, 9))):
        at += draw(st.integers(0, 3))
        prompt, output = draw(st.integers(1, 24)), draw(st.integers(1, 14))
        most = output + draw(st.integers(0, 3))
        shared = draw(st.sampled_from([0, 6, 12]))
        prefix = (("system", shared),) if 0 < shared < prompt else ()
        user = draw(st.integers(0, 2))
        found.setdefault(at, []).append(
            Request(id, float(at), prompt, output, most, prefix=prefix, user=user)
        )
    return found


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=150, deadline=None)
@given(
    requests=arrivals(),
    caching=st.booleans(),
    stages=st.integers(1, 3),
    blocks=st.integers(11, 16),
)
def test_everybody_is_served_in_tight_memory(
    name: str, requests: dict[int, list[Request]], caching: bool, stages: int, blocks: int
) -> None:
    """Each request yields its tokens, no more blocks are taken than there are, and in the end all
    are free (``schedule`` checks that)."""
    policy = build(name.split()[0], **POLICIES[name])
    assert is_pooled(policy)
    steps = schedule(
        policy,
        requests,
        blocks=blocks,
        caching=caching,
        stages=stages,
        in_flight=stages + policy.ahead,
        steps=20_000,
    )
    assert len(steps) < 20_000
    assert min(step.free for step in steps) >= 0
    served = Counter(id for step in steps for id in step.decodes)
    served.update(id for step in steps for id, _ in step.chunks)
    for each in (each for group in requests.values() for each in group):
        assert served[each.id] >= each.output_tokens
    if name == "trtllm":  # guaranteed
        assert not any(step.preempted for step in steps)
