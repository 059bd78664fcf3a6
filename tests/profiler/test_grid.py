"""The adaptive grids, on functions whose shape is known."""

from __future__ import annotations

import numpy as np
import pytest

from sarathi_sim.profiler.facts.ops import LOCAL
from sarathi_sim.profiler.planning.grid import Grid, SizeGrid, Surface
from sarathi_sim.profiler.planning.settings import Limits, allowed, coarse_grid, default_limits


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


def test_a_line_is_content_where_the_ends_agree() -> None:
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


def test_a_surface_on_one_line_proposes_nothing() -> None:
    assert Surface({(1, 5): 1.0, (2, 5): 2.0}, 0.1, terms, lambda _: True).propose() is None


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
    if op == "preproj":
        assert {(128,), (129,), (256,), (257,), (512,), (513,)} <= set(grid)


def test_default_limits_stay_within_the_model() -> None:
    assert default_limits("cpu", 512).max_context == 512
    assert default_limits("cuda", 4096).max_context == 4096
