"""Every engine's policy in a pool, against the textbook's pool: every number bitwise equal."""

from __future__ import annotations

import pytest

from sarathi_sim.policies.catalogue import build
from sarathi_sim.policies.policy import is_pooled
from tests.policies.test_engines import POLICIES
from tests.simulator.pools import PoolSystem, pool_requests
from tests.simulator.test_textbook_pool import compare


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"sglang whole"}))
def test_every_engine(name: str, stages: int, caching: bool) -> None:
    keys = dict(POLICIES[name])
    if name.startswith("trtllm") and not keys.get("enable_chunked_prefill"):
        keys["max_num_tokens"] = 400  # the longest prompt, computed again, must fit
    policy = build(name.split()[0], **keys)
    assert is_pooled(policy)
    compare(
        PoolSystem(
            policy=policy,
            layers=(2,) * stages,
            num_blocks=75,
            caching=caching,
            requests=pool_requests(24, seed=stages, rate=40.0),
        )
    )
