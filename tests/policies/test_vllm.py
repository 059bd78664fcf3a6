"""What vLLM's versions decide otherwise, on a schedule worked out by hand."""

from __future__ import annotations

from typing import Literal

import pytest

from sarathi_sim.policies.request import Request
from sarathi_sim.policies.vllm import Vllm
from tests.policies.by_hand import decodes, schedule


@pytest.mark.parametrize(("version", "served"), [("0.32", [0]), ("0.33", [0, 2])])
def test_after_a_request_that_preempts_itself(
    version: Literal["0.32", "0.33"], served: list[int]
) -> None:
    """Five blocks of 4 tokens. Requests 0 and 1 take two each, request 2 the last one.

    In the third decode request 1 opens its third block, with its ninth token. There is none, and
    it has the lowest priority: it preempts itself. 0.32 stops there; 0.33 serves request 2, too.
    """
    rows = [(0, 5, 0), (1, 6, 2), (2, 2, 1)]
    zero, one, two = (Request(id, 0.0, prompt, 6, 6, level) for id, prompt, level in rows)
    policy = Vllm(64, 8, scheduling_policy="priority", version=version)
    steps = schedule(policy, {0: [zero, one], 1: [two]}, blocks=5)
    assert decodes(steps)[:4] == [[], [0, 1], [0, 1, 2], served]
    assert [step.preempted for step in steps[:4]] == [[], [], [], [1]]
