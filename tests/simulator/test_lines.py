"""Piecewise-linear times, and GEMMs beyond their last point."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial import ConvexHull

from sarathi_sim.profiler.facts.ops import GemmShape
from sarathi_sim.profiler.facts.roofline import gemm_us
from sarathi_sim.simulator.confidence.coverage import SLACK, MeasuredRegion
from sarathi_sim.simulator.op_times.regression import PiecewiseLinear, PooledRoofline, coordinates

SHAPES = (GemmShape(4096, 1024), GemmShape(1024, 4096), GemmShape(8192, 1024))
TRUE = np.array([5.0, 1.5e8, 0.6e6, 2.0, 0.5])


def roofline_s(shape: GemmShape, tokens: np.ndarray) -> np.ndarray:
    """By hand: overhead, and the root of the squares of compute and memory time."""
    rows = tokens + 0.5 * (np.ceil(tokens / 128) * 128 - tokens)
    compute = 2 * rows * shape.n * shape.k / 1.5e8
    numbers = shape.n * shape.k + tokens * (shape.n + shape.k)
    return np.asarray(1e-6 * (5 + np.hypot(compute, numbers / 0.6e6)))


def test_the_pooled_roofline_is_found_and_continues_a_gemm() -> None:
    tokens = np.array([1, 16, 64, 128, 129, 200, 256, 257, 384, 512, 640, 900, 1000, 1024.0])
    pooled = PooledRoofline({s: (tokens, roofline_s(s, tokens)) for s in SHAPES})
    assert pooled.constants == pytest.approx(TRUE, rel=1e-3)
    far = np.array([1025.0, 2000, 4096, 100_000])
    for shape in SHAPES:
        time = roofline_s(shape, tokens)
        line = PiecewiseLinear(tokens, time, pooled.beyond(shape, tokens, time))
        assert line(far) == pytest.approx(roofline_s(shape, far), rel=1e-3)
        assert np.array_equal(line(tokens), time)


def test_half_of_a_late_deviation_lasts() -> None:
    """A kernel 21 % slower than the roofline is expected to be 10 % slower further on."""
    tokens = np.arange(32.0, 1025, 32)
    pooled = PooledRoofline({s: (tokens, roofline_s(s, tokens)) for s in SHAPES})
    slow = 1.21 * roofline_s(SHAPES[0], tokens)
    beyond = pooled.beyond(SHAPES[0], tokens, slow)
    far = np.array([4096.0])
    assert beyond(far) == pytest.approx(1.1 * roofline_s(SHAPES[0], far), rel=1e-3)


def test_times_beyond_never_fall_below_the_last() -> None:
    line = PiecewiseLinear([1, 10], [1.0, 5.0], lambda size: size * 0.01)
    assert line([10, 11, 1000]).tolist() == [5.0, 5.0, 10.0]
    assert PiecewiseLinear([1, 10], [1.0, 5.0])([20, 0.5]).tolist() == [10.0, 1.0]


def test_a_hull_over_one_size_is_its_range() -> None:
    region = MeasuredRegion(np.array([[2.0], [8.0], [4.0]]))
    wanted = np.array([[1.0], [2.0], [8.0], [12.0]])
    assert region.outside(wanted).tolist() == [True, False, False, True]
    assert region.times_beyond(wanted).tolist() == [1.0, 1.0, 1.0, 1.5]


def test_a_hull_over_two_sizes_leaves_the_unmeasured_corner_out() -> None:
    """Chunks to 1024 without context, contexts to 1024 for small ones, never both."""
    points = [(16, 0), (1024, 0), (16, 992), (512, 512), (128, 896)]
    region = MeasuredRegion(np.array(points, float))
    inside = [*points, (400, 400), (64, 0), (20, 500)]
    outside = [(1024, 992), (2048, 0), (8, 0), (16, 2000), (0, 100)]
    assert not region.outside(np.array(inside, float)).any()
    assert region.outside(np.array(outside, float)).all()
    # Largest measured: chunk 1024, context 992, sum 1024, product 512 x 512.
    beyond = region.times_beyond(np.array([(1024, 1024), (2048, 0), (8, 0)], float))
    assert beyond == pytest.approx([4.0, 2.0, 1.0])


@pytest.mark.parametrize("seed", range(4))
def test_a_hull_is_that_of_qhull(seed: int) -> None:
    """On a grid with missing corners, so that points lie on its sides, too."""
    draw = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(2.0 ** np.arange(9), 64.0 * np.arange(9)), axis=-1).reshape(-1, 2)
    points = grid[draw.random(len(grid)) < 0.7]
    exact, region = ConvexHull(coordinates(*points.T)), MeasuredRegion(points)
    assert not region.outside(points).any()
    wanted = np.concatenate([draw.uniform(0, 600, (4000, 2)), grid, 1.01 * points[exact.vertices]])
    away = coordinates(*wanted.T) @ exact.equations[:, :2].T + exact.equations[:, 2]
    beyond = ((wanted < points.min(axis=0)) | (wanted > points.max(axis=0))).any(axis=1)
    assert np.array_equal(region.outside(wanted), beyond | (away > SLACK).any(axis=1))


def test_points_on_a_line_have_a_box_for_a_hull() -> None:
    region = MeasuredRegion(np.array([(16.0, 0), (64, 0), (256, 0)]))
    wanted = np.array([(100.0, 0), (100, 5), (300, 0)])
    assert region.outside(wanted).tolist() == [False, True, True]


def test_a_bundles_gemm_is_a_device_models_without_its_waves() -> None:
    """One formula: rates a microsecond here, those of the hardware and efficiencies there."""
    tokens = np.array([1, 100, 128, 200, 1000.0])
    pooled = PooledRoofline({s: (tokens, roofline_s(s, tokens)) for s in SHAPES})
    overhead, flops, numbers, p, paid = pooled.constants
    shape = SHAPES[0]
    columns = {"m": tokens, "n": np.full(5, shape.n), "k": np.full(5, shape.k),
               "num_sms": np.full(5, 108.0), "peak_flops": np.full(5, 2e6 * flops),
               "bandwidth": np.full(5, 4e6 * numbers)}  # fmt: skip
    constants = {"overhead_us": overhead, "compute": 0.5, "memory": 0.5, "p": p, "wave_share": 0.0,
                 "tile_share": paid, "tile_m": 128.0, "tile_n": 128.0}  # fmt: skip
    assert pooled.time_s(shape, tokens) == pytest.approx(1e-6 * gemm_us(columns, constants), 1e-12)
