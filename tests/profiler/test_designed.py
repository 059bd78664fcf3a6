"""The points that are laid out beforehand, and the contexts of a skewed batch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.profiler.planning.settings import (
    Limits,
    default_limits,
    designed_points,
    skewed_contexts,
)

LIMITS = [
    default_limits("cpu", 2048),
    default_limits("cuda", 131072),
    Limits(64, 96, 4),
    Limits(2, 16, 2),
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_mixed_points_lie_within_the_limits_and_come_with_their_parts(limits: Limits) -> None:
    points = designed_points("mixed", limits)
    assert points == sorted(set(points))
    for chunk, context, batch, decode_context in points:
        assert 0 < chunk + batch <= limits.max_tokens
        assert chunk + context <= limits.max_context
        assert batch <= limits.max_batch
        assert decode_context < limits.max_context
    kinds = Counter((chunk > 0, batch > 0) for chunk, _, batch, _ in points)
    assert kinds[True, False]
    assert (kinds[True, True] > 0) == (kinds[False, True] > 0) == (limits.max_tokens > 2)
    decodes_alone = {point[2:] for point in points if point[0] == 0}
    assert {point[2:] for point in points} - {(0, 0)} <= decodes_alone


def test_every_two_sizes_of_a_mixed_batch_meet() -> None:
    limits = default_limits("cpu", 2048)
    mixed = [p for p in designed_points("mixed", limits) if p[0] and p[2]]
    assert 20 <= len(mixed) <= 60
    assert {(context, held) for _, context, _, held in mixed} == {
        (context, held) for context in (0, 1024) for held in (128, 1024)
    }
    assert {(batch, held) for _, _, batch, held in mixed} == {
        (batch, held) for batch in (2, 8, 32) for held in (128, 1024)
    }


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_skewed_points_exist_as_batches_and_fit(limits: Limits) -> None:
    points = designed_points("attn_decode_skew", limits)
    assert points
    for batch, mean, longest in points:
        assert mean < longest < limits.max_context
        assert batch <= limits.max_batch
        skewed_contexts(batch, mean, longest)


def test_skewed_contexts_by_hand() -> None:
    assert skewed_contexts(3, 5, 5) == [5, 5, 5]
    assert skewed_contexts(3, 5, 15) == [15, 0, 0]
    assert skewed_contexts(3, 7, 12) == [12, 6, 3]  # a ratio of a half
    with pytest.raises(ValueError, match="no 2 contexts have the mean 3 and the maximum 7"):
        skewed_contexts(2, 3, 7)


@given(st.data())
def test_skewed_contexts_keep_mean_and_maximum(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 300))
    mean = data.draw(st.integers(1, 5000))
    longest = data.draw(st.integers(mean, batch * mean))
    contexts = skewed_contexts(batch, mean, longest)
    assert len(contexts) == batch
    assert sum(contexts) == batch * mean
    assert contexts[0] == max(contexts) == longest
    assert min(contexts) >= 0
    falls = [a - b for a, b in pairwise(contexts)]
    assert all(step >= -1 for step in falls)  # rounding may turn a fall of nothing around
