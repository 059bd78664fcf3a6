"""The points to measure: adaptive grids on functions whose shape is known, and designed ones."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import LOCAL
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.measuring.measure import stalled
from sarathi_sim.profiler.planning.grid import (
    Grid,
    Limits,
    SizeGrid,
    Surface,
    allowed,
    coarse_grid,
    default_limits,
    designed_points,
    skewed_contexts,
)
from sarathi_sim.simulator.op_times.regression import PiecewiseLinear


def refine(grid: Grid, time: object, most: int = 200) -> list[tuple[int, ...]]:
    """Measure what the grid proposes until it is content; returns the points."""
    added = []
    for _ in range(most):
        proposal = grid.propose()
        if proposal is None:
            return added
        grid.add(proposal.key, time(*proposal.key))  # type: ignore[operator]
        added.append(proposal.key)
    raise AssertionError("the grid never was content")


def test_a_line_that_is_linear_is_looked_at_twice_an_interval() -> None:
    coarse = {(m,): 10.0 + m for m in (1, 2, 4, 128, 129, 1024)}
    line = SizeGrid(coarse, target=0.02)
    added = refine(line, lambda m: 10.0 + m)
    # (1, 2) and (128, 129) hold nothing between them; halves of the others are looked at once more.
    assert sorted(added) == [(3,), (35,), (66,), (97,), (352,), (576,), (800,)]
    assert line.held_out == pytest.approx([0] * 7)


def test_a_line_is_content_where_the_ends_agree_and_a_surface_on_one_line() -> None:
    assert Surface({(1, 5): 1.0, (2, 5): 2.0}, 0.1, terms, lambda _: True).propose() is None
    assert SizeGrid({(1,): 100.0, (1000,): 101.9}, target=0.02).propose() is None
    assert SizeGrid({(1,): 100.0, (1000,): 102.1}, target=0.02).propose() is not None


def test_two_steps_that_hide_each_other_from_one_look_are_found() -> None:
    def time(m: int) -> float:  # up at 300, up at 700: the middle is on the line by accident
        return 100.0 + 50.0 * (m >= 300) + 50.0 * (m >= 700)

    coarse = {(1,): time(1), (1000,): time(1000)}
    points = {*coarse, *refine(SizeGrid(coarse, target=0.01), time)}
    assert {(299,), (300,), (699,), (700,)} <= points


@pytest.mark.parametrize("step", [300, 700, 1001])
@pytest.mark.parametrize("height", [40.0, -8.0])
def test_a_line_finds_a_step_to_the_token(step: int, height: float) -> None:
    def time(m: int) -> float:
        return 10.0 + m / 20 + (height if m >= step else 0.0)

    coarse = {(m,): time(m) for m in (1, 64, 128, 129, 256, 257, 512, 513, 1024)}
    line = SizeGrid(coarse, target=0.01)
    points = {*coarse, *refine(line, time)}
    assert {(step - 1,), (step,)} <= points
    # Three looks at most into each of seven intervals, nine more halvings to the step.
    assert len(points) - len(coarse) <= 7 * 3 + 9 + 4
    sizes = np.array(sorted(m for (m,) in points))
    guess = np.interp(np.arange(1, 1025), sizes, [time(int(m)) for m in sizes])
    truth = np.array([time(m) for m in range(1, 1025)])
    assert np.max(np.abs(guess - truth) / truth) < 0.02


def test_a_line_stops_at_its_resolution_and_forgives_noise() -> None:
    def time(m: int) -> float:
        return 100.0 if m < 700 else 150.0

    coarse = {(m,): time(m) for m in (512, 1024)}
    rough = refine(SizeGrid(coarse, target=0.01, resolution=1 / 16), time)
    assert 2 <= len(rough) <= 8
    assert min(abs(m - 700) for (m,) in rough) < 64

    noisy = SizeGrid({(512,): 100.0, (1024,): 102.0}, target=0.01)
    noisy.add((768,), 104.0, noise=0.05)
    assert noisy.held_out == [0.0]


def test_the_largest_step_comes_first_and_a_skipped_point_not_again() -> None:
    line = SizeGrid({(m,): float(t) for m, t in ((1, 10), (100, 10), (200, 30), (300, 10))}, 0.01)
    first = line.propose()
    assert first is not None
    assert first.key == (150,)  # 10 to 30 is a step of 2; 30 to 10 one of 2/3; 10 to 10 none
    assert first.score == pytest.approx(2 * (100 / 300) ** 0.5)
    line.skip(first.key)
    second = line.propose()
    assert second is not None
    assert second.key == (250,)


def terms(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(a), a, a * (a + b)], axis=-1)


def test_a_surface_finds_where_the_physics_is_wrong() -> None:
    def time(chunk: int, context: int) -> float:
        smooth = 20 + chunk * 0.1 + chunk * (chunk + context) * 1e-3
        return smooth * (1.5 if chunk > 200 else 1.0)

    coarse = {
        (n, c): time(n, c) for n in (16, 64, 256, 1024) for c in (0, 128, 1024) if n + c <= 1500
    }
    surface = Surface(coarse, 0.05, terms, lambda key: sum(key) <= 1500)
    added = []
    for _ in range(60):
        proposal = surface.propose()
        if proposal is None:
            break
        added.append(proposal.key)
        surface.add(proposal.key, time(*proposal.key))
    assert all(n + c <= 1500 for n, c in added)
    assert len(set(added)) == len(added)
    near = sum(64 <= n <= 256 for n, _ in added)
    assert near > len(added) / 2, added
    assert np.mean(surface.held_out[-10:]) < np.mean(surface.held_out[:10])


@pytest.mark.parametrize("op", LOCAL)
def test_coarse_grids(op: str) -> None:
    limits = Limits(max_tokens=1000, max_context=700, max_batch=20)
    grid = coarse_grid(op, limits)
    assert grid == sorted(set(grid))
    assert all(allowed(op, key, limits) for key in grid)
    if op.startswith("attn"):
        assert max(sum(key) for key in grid) in (700, 719)
    else:
        assert grid[-1] == (20 if op == "lm_head" else 1000,)
    for device, longest in (("cpu", 512), ("cuda", 4096)):
        assert default_limits(device, longest).max_context == longest, "that of the model"
    if op == "preproj":
        assert {(128,), (129,), (256,), (257,), (512,), (513,)} <= set(grid)


# The points that are laid out beforehand, and the contexts of a skewed batch


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


def test_a_search_that_finds_noise_alone_is_over() -> None:
    noise = [0.5] * 100
    assert not stalled([0.5] * 31, noise)
    assert stalled([0.5] * 32, noise)
    assert not stalled([0.5] * 16 + [0.4] * 16, noise)
    assert stalled([0.5] * 40 + [0.4] * 16 + [0.39] * 16, noise)
    assert not stalled([0.05] * 32, [0.003] * 32)  # a GPU's steps


def test_a_gpu_whose_steps_are_shape_is_searched_on() -> None:
    """A published GEMM that takes up to 10 % more or less in each tile of 128 rows, as with a
    library that picks a kernel for each; points with a spread of 0.3 %. Where a search ends as soon
    as errors get no smaller, it leaves half of these 160 points, and a third of its error."""
    rng, limits = np.random.default_rng(1), default_limits("cuda", 8192)
    tokens = np.arange(1.0, 8193.0)
    stack = StackTimes("h200-sxm", Kernels("vllm"), load_model("llama-3-8b"), 1)
    true = stack.by_rows("ffn_ln2", tokens) * np.repeat(rng.uniform(0.9, 1.1, 64), 128)
    seen = true * np.exp(0.002 * rng.normal(size=len(true)))

    def search(noise: float) -> tuple[int, float]:
        """Points taken, and the mean error over all sizes, in percent."""
        points = {key: float(seen[key[0] - 1]) for key in coarse_grid("ffn_ln2", limits)}
        grid = SizeGrid(points, target=0.03)
        while len(points) < 160 and not stalled(grid.held_out, [noise] * len(grid.held_out)):
            proposal = grid.propose()
            assert proposal is not None
            points[proposal.key] = float(seen[proposal.key[0] - 1])
            grid.add(proposal.key, points[proposal.key], 0.003)
        sizes = sorted(points)
        fit = PiecewiseLinear([key[0] for key in sizes], [points[key] for key in sizes])
        return len(points), float(100 * np.abs(fit(tokens) / true - 1).mean())

    before, after = search(np.inf), search(0.003)
    assert before[0] < 100 and after[0] == 160
    assert after[1] < 0.75 * before[1]
