"""From a bundle's points to a batch's time: lines through and beyond them, chunks in one call, and
arrays that are kept on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Sequence
from sarathi_sim.profiler.bundle.schema import Bundle, BundleMeta, load_bundle
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import GemmShape
from sarathi_sim.profiler.facts.roofline import gemm_us
from sarathi_sim.profiler.physics.residual import Trees, fit_trees
from sarathi_sim.simulator.confidence.coverage import SLACK, MeasuredRegion
from sarathi_sim.simulator.loop.clock import QUANTUM_S
from sarathi_sim.simulator.op_times import regression
from sarathi_sim.simulator.op_times.cache import VARIABLE, cache_folder, cached
from sarathi_sim.simulator.op_times.iteration import HostTime, IterationCost, WholeLayer
from sarathi_sim.simulator.op_times.op_times import OpTimes, Skew, Together
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from tests.sampled import profile_folder

GPT3 = load_model("gpt3-175b")
SHIPPED = (("a6000", "llama-13b", 1), ("a100-80g-sxm", "llama-2-70b", 4))


@cache
def shipped(device: str, model: str, tp: int) -> tuple[Bundle, OpTimes]:
    bundle = load_bundle(profile_folder(device, model, tp))
    return bundle, regression.bundle_times(bundle)


@cache
def gpt3_predictor() -> BundlePredictor:
    _, ops = shipped("a100-80g-sxm", "gpt3-175b", 8)
    return BundlePredictor(ops, max_tokens=512, max_length=4096, max_batch=27, num_stages=8)


LAYER_OPS = ("preproj", "postproj", "ffn_ln1", "ffn_ln2", "others")


def simple_bundle(tp: int = 2) -> Bundle:
    """Times of a made-up device: every layer op 10 + M us, attention linear in its pairs."""
    tokens = [1, 128, 129, 1024]
    linear = pd.DataFrame(
        [(op, m, 10.0 + m) for op in (*LAYER_OPS, "embedding", "lm_head") for m in tokens],
        columns=["op", "num_tokens", "time_us"],
    )
    prefill = [
        (n, c, 5 + 1e-3 * n * (c + (n + 1) / 2))
        for n in (1, 64, 256, 1024)
        for c in (0, 128, 512, 1024)
    ]
    decode = [(b, c, 3 + 0.01 * b * c) for b in (1, 2, 4, 8) for c in (1, 256, 1024)]
    meta = BundleMeta(
        device="made-up",
        model="gpt3-175b",
        model_spec=GPT3,
        tp=tp,
        source="measured",
        created="2026-01-01",
        generator="test",
    )
    return Bundle(
        meta,
        linear,
        pd.DataFrame(prefill, columns=["chunk_tokens", "context_tokens", "time_us"]),
        pd.DataFrame(decode, columns=["batch_size", "context_tokens", "time_us"]),
        pd.DataFrame([(1, 7.0), (10**9, 7.0)], columns=["num_bytes", "time_us"]),
        pd.DataFrame(
            [(0, "inter_node", 20.0), (10**9, "inter_node", 20.0 + 1e5)],
            columns=["num_bytes", "scope", "time_us"],
        ),
    )


def batch(
    *chunks: tuple[int, int, int], decodes: int = 0, context: int = 0, longest: int = 0
) -> Batch:
    """Chunks are (prompt, tokens, cached)."""
    made = tuple((Sequence(i, p, 1, 1), n, c) for i, (p, n, c) in enumerate(chunks))
    return Batch(0, made, sum(n for _, n, _ in chunks), decodes, context, longest)


def predictor(bundle: Bundle, **options: object) -> BundlePredictor:
    settings = {"max_tokens": 512, "max_length": 1024, "max_batch": 8, "num_stages": 2}
    return BundlePredictor(regression.bundle_times(bundle), **(settings | options))  # type: ignore[arg-type]


def test_a_number_takes_what_the_profiled_dtype_takes() -> None:
    half = simple_bundle()
    full = dataclasses.replace(half, meta=dataclasses.replace(half.meta, dtype="float32"))
    sends = [predictor(bundle)(batch(decodes=4, context=400))[3] for bundle in (half, full)]
    num_bytes = 4 * GPT3.hidden_size * 2 / 2
    assert sends[0] == pytest.approx(20e-6 + num_bytes * 1e-10, abs=QUANTUM_S)
    assert sends[1] == pytest.approx(20e-6 + 2 * num_bytes * 1e-10, abs=QUANTUM_S)


def test_a_mixed_batch_by_hand() -> None:
    """100 prompt tokens after 256 cached ones, and 4 decodes with 300 tokens of context each."""
    predict = predictor(simple_bundle())
    layer, first, last, send = predict(batch((356, 100, 256), decodes=4, context=1200))
    linear = 5 * (10 + 104) + 2 * 7
    attention = 5 + 1e-3 * 100 * (256 + 50.5) + 3 + 0.01 * 1200
    assert layer == pytest.approx((linear + attention) * 1e-6, rel=1e-4)
    assert first == pytest.approx((10 + 104) * 1e-6, abs=QUANTUM_S)
    assert last == pytest.approx((10 + 5) * 1e-6, abs=QUANTUM_S)  # 4 decodes and a finished prompt
    sent = 104 * GPT3.hidden_size * 2 / 2  # each of the 2 ranks sends its half
    assert send == pytest.approx((20 + sent * 1e-4) * 1e-6, abs=QUANTUM_S)
    # The same chunk in the middle of its prompt needs no logits.
    assert predict(batch((900, 100, 256), decodes=4, context=1200))[2] < last


def test_a_layer_of_prompts_takes_as_long_as_its_launches() -> None:
    _, ops = shipped("a100-80g-sxm", "gpt3-175b", 8)
    sizes = {"max_tokens": 64, "max_length": 256, "max_batch": 4}
    free = BundlePredictor(ops, **sizes)  # type: ignore[arg-type]
    slow = BundlePredictor(ops, **sizes, host=HostTime(launch_layer_s=0.5))  # type: ignore[arg-type]
    chunk = Batch(0, ((Sequence(0, 32, 8, 0), 32, 0),), 32, 0, 0, 0)
    decodes = Batch(0, (), 0, 2, 100, 50)
    assert slow(chunk) == (0.5, *free(chunk)[1:]) and slow(decodes) == free(decodes)


def test_without_head_and_with_one_stage() -> None:
    predict = predictor(simple_bundle(), include_head=False, num_stages=1)
    assert predict(batch((100, 100, 0)))[1:] == (0.0, 0.0, 0.0)


def test_all_reduce_only_with_tensor_parallelism() -> None:
    chunk = batch((100, 100, 0))
    alone = dataclasses.replace(simple_bundle().meta, tp=1)
    with_two = predictor(simple_bundle())(chunk)[0]
    with_one = predictor(dataclasses.replace(simple_bundle(), meta=alone))(chunk)[0]
    assert with_two - with_one == pytest.approx(14e-6, abs=2 * QUANTUM_S)


def test_more_tokens_than_tabulated() -> None:
    small, large = (predictor(simple_bundle(), max_tokens=n) for n in (16, 4096))
    for tokens in (17, 1000, 3000):
        many = batch(*[(tokens // 4, tokens // 4, 0)] * 4)
        assert small(many) == large(many)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_time_is_a_positive_whole_quantum(data: st.DataObject) -> None:
    predict = gpt3_predictor()
    for _ in range(20):
        prompt = data.draw(st.integers(1, 4000))
        cached = data.draw(st.integers(0, prompt - 1))
        tokens = data.draw(st.integers(1, prompt - cached))
        decodes = data.draw(st.integers(0, 26))
        context = data.draw(st.integers(0, 4095)) * decodes
        times = predict(batch((prompt, tokens, cached), decodes=decodes, context=context))
        assert times[0] > 0 and min(times) >= 0
        assert all((t / QUANTUM_S).is_integer() for t in times)


@pytest.mark.parametrize(
    ("device", "model", "tp", "longest"),
    [(*each, 4096) for each in SHIPPED] + [(*each, 65536) for each in SHIPPED[:1]],
)
def test_tables_agree_with_the_regressions(device: str, model: str, tp: int, longest: int) -> None:
    """The sum of the ops, whose attention is that of the two contexts of the row around it."""
    _, ops = shipped(device, model, tp)
    predict = BundlePredictor(ops, max_tokens=1024, max_length=longest, max_batch=32)
    step = 32 if longest == 4096 else 64
    rng = np.random.default_rng(0)
    # As many short contexts as long ones.
    tokens, decodes = rng.integers(1, 600, 200), rng.integers(1, 32, 200)
    cached = (longest ** rng.uniform(0.1, 0.98, 200)).astype(int)
    mean = (longest ** rng.uniform(0, 0.98, 200)).astype(int)

    def between(
        op: regression.PhysicalSurface, size: np.ndarray, context: np.ndarray
    ) -> np.ndarray:
        low = context // step * step
        first, second = (op(size, np.maximum(at, 1)) for at in (low, low + step))
        return first + (second - first) * (context - low) / step

    rows = tokens + decodes
    exact = sum(op(rows) for op in ops.linear.values())
    if ops.all_reduce is not None:
        exact += 2 * ops.all_reduce(rows * ops.model.hidden_size * 2)
    exact += between(ops.prefill, tokens, cached) + between(ops.decode, decodes, mean)
    for i in range(200):
        chunk = (longest, int(tokens[i]), int(cached[i]))
        context = int(mean[i] * decodes[i])
        layer = predict(batch(chunk, decodes=int(decodes[i]), context=context))[0]
        assert layer == pytest.approx(exact[i], abs=QUANTUM_S)


@pytest.mark.parametrize(("device", "model", "tp"), SHIPPED)
def test_regressions_go_through_the_points_of_the_bundle(device: str, model: str, tp: int) -> None:
    bundle, ops = shipped(device, model, tp)
    for op, rows in bundle.linear.groupby("op"):
        found = ops.by_rows[str(op)]
        assert np.allclose(found(rows["num_tokens"]), rows["time_us"] * 1e-6)
    prefill, decode = bundle.attn_prefill, bundle.attn_decode
    surface = ops.prefill(prefill["chunk_tokens"], prefill["context_tokens"])
    assert np.allclose(surface, prefill["time_us"] * 1e-6)
    surface = ops.decode(decode["batch_size"], decode["context_tokens"])
    assert np.allclose(surface, decode["time_us"] * 1e-6)


def test_piecewise_linear() -> None:
    line = regression.PiecewiseLinear([10, 20, 40], [1.0, 3.0, 4.0])
    assert line([5, 10, 15, 30, 40, 80]).tolist() == [1.0, 1.0, 2.0, 3.5, 4.0, 8.0]


def test_a_surface_recovers_what_it_is_made_of() -> None:
    """Physical terms with known coefficients come back, inside the points and beyond them."""

    def terms(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.stack([np.ones_like(a), a, a * b], axis=-1)

    def features(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.stack([a, b], axis=-1)

    kind = regression.Kind(terms, features)

    a, b = (x.ravel() for x in np.meshgrid(np.arange(1.0, 6), np.arange(1.0, 6)))
    found = regression.PhysicalSurface(a, b, 2 + 0.5 * a + 0.25 * a * b, kind)
    assert found.coefficients == pytest.approx([2, 0.5, 0.25])
    assert found([2.5, 20.0], [3.5, 30.0]) == pytest.approx([3.25 + 2.1875, 12 + 150])
    # All points on one line: no triangulation, and still the fitted terms.
    line = regression.PhysicalSurface(a[:5], b[:5], 2 + 0.5 * a[:5], kind)
    assert line([3.0], [1.0]) == pytest.approx([3.5])


def test_the_same_points_are_fitted_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """And other points, other trees."""
    fitted: list[int] = []

    def fit(features: np.ndarray, left: np.ndarray, trees: int, leaves: int) -> Trees:
        fitted.append(trees)
        return fit_trees(features, left, trees, leaves)

    monkeypatch.setattr(regression, "fit_trees", fit)
    size = np.arange(1.0, 41)
    for time, trees in ((size + 0.5, 3), (size + 0.5, 3), (size + 0.25, 3), (size + 0.5, 4)):
        monkeypatch.setattr(regression, "TREES", trees)
        regression.decode_surface(size, 8 * size, time)
    assert fitted == [3, 3, 4]


@pytest.mark.parametrize("layer_time", ["measured", "sum"])
@pytest.mark.parametrize("skew", [0.0, 0.25])
def test_a_batch_takes_what_an_iteration_costs(layer_time: str, skew: float) -> None:
    """The predictor's tables say what the one function of costs says, term by term."""
    _, ops = shipped("a100-80g-sxm", "gpt3-175b", 8)
    each = [regression.PiecewiseLinear([1.0, 512.0], [1e-7, time]) for time in (2e-5, 1e-5)]
    changed = dataclasses.replace(
        ops,
        whole_layer=WholeLayer(scale=1.1, extra_s=2e-5, both=0.05, decode=0.1, both_s=1e-5),
        skew=Skew(skew),
        together=Together(np.array([2.0, 4.0]), lambda n: np.array([time(n) for time in each])),
    )
    predict = BundlePredictor(
        changed, max_tokens=512, max_length=1024, max_batch=8, num_stages=8, layer_time=layer_time
    )
    for chunks, decodes, mean, longest in (
        ([(128, 0), (64, 256)], 4, 512, 1024),  # contexts on the tables' grid: nothing to round
        ([(128, 64)], 0, 0, 0),
        ([], 4, 512, 1024),
    ):
        held = batch(
            *((2048, chunk, context) for chunk, context in chunks),
            decodes=decodes,
            context=decodes * mean,
            longest=longest,
        )
        cost = predict.cost
        prefill = sum(float(cost.prefill_s(*chunk)) for chunk in chunks)
        if len(chunks) > 1:
            saved = cost.saved_s(np.array([size for size, _ in chunks], np.float64))
            assert 0 < saved < prefill
            slower = dataclasses.replace(cost, ops=changed.scaled({"attn_prefill": 2.0}))
            assert slower.saved_s(np.array([128.0, 64.0])) == pytest.approx(2 * saved)
            prefill -= saved
        decode = 0.0
        if decodes:
            even, padded = (float(cost.decode_s(decodes, held)) for held in (mean, longest))
            decode = even + skew * (padded - even)
        tokens = sum(chunk for chunk, _ in chunks) + decodes
        parts = cost.layer_parts([tokens], prefill, decode, bool(chunks and decodes))
        layer_s, first_s, _, send_s = predict(held)
        assert sum(parts.values())[0] == pytest.approx(layer_s, abs=2 * QUANTUM_S)
        assert float(cost.first_s(tokens)) == pytest.approx(first_s, abs=QUANTUM_S)
        assert float(cost.transfer_s(tokens)) == pytest.approx(send_s, abs=QUANTUM_S)


# Piecewise-linear times, and GEMMs beyond their last point


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
    pooled = regression.PooledRoofline({s: (tokens, roofline_s(s, tokens)) for s in SHAPES})
    assert pooled.constants == pytest.approx(TRUE, rel=1e-3)
    far = np.array([1025.0, 2000, 4096, 100_000])
    for shape in SHAPES:
        time = roofline_s(shape, tokens)
        line = regression.PiecewiseLinear(tokens, time, pooled.beyond(shape, tokens, time))
        assert line(far) == pytest.approx(roofline_s(shape, far), rel=1e-3)
        assert np.array_equal(line(tokens), time)


def test_half_of_a_late_deviation_lasts() -> None:
    """A kernel 21 % slower than the roofline is expected to be 10 % slower further on."""
    tokens = np.arange(32.0, 1025, 32)
    pooled = regression.PooledRoofline({s: (tokens, roofline_s(s, tokens)) for s in SHAPES})
    slow = 1.21 * roofline_s(SHAPES[0], tokens)
    beyond = pooled.beyond(SHAPES[0], tokens, slow)
    far = np.array([4096.0])
    assert beyond(far) == pytest.approx(1.1 * roofline_s(SHAPES[0], far), rel=1e-3)


def test_times_beyond_never_fall_below_the_last() -> None:
    line = regression.PiecewiseLinear([1, 10], [1.0, 5.0], lambda size: size * 0.01)
    assert line([10, 11, 1000]).tolist() == [5.0, 5.0, 10.0]
    assert regression.PiecewiseLinear([1, 10], [1.0, 5.0])([20, 0.5]).tolist() == [10.0, 1.0]


def test_how_far_beyond_a_hull_something_is() -> None:
    """Of one size: its range. Of two: chunks to 1024 without context, contexts to 1024 for small
    ones, never both. Largest measured: chunk 1024, context 992, sum 1024, product 512 x 512."""
    region = MeasuredRegion(np.array([[2.0], [8.0], [4.0]]))
    wanted = np.array([[1.0], [2.0], [8.0], [12.0]])
    assert region.outside(wanted).tolist() == [True, False, False, True]
    assert region.times_beyond(wanted).tolist() == [1.0, 1.0, 1.0, 1.5]
    region = MeasuredRegion(np.array([(16.0, 0), (1024, 0), (16, 992), (512, 512), (128, 896)]))
    beyond = region.times_beyond(np.array([(1024.0, 1024), (2048, 0), (8, 0)]))
    assert beyond == pytest.approx([4.0, 2.0, 1.0])


@pytest.mark.parametrize("seed", range(4))
def test_a_hull_is_that_of_qhull(seed: int) -> None:
    """On a grid with missing corners, so that points lie on its sides, too."""
    draw = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(2.0 ** np.arange(9), 64.0 * np.arange(9)), axis=-1).reshape(-1, 2)
    points = grid[draw.random(len(grid)) < 0.7]
    exact, region = ConvexHull(regression.coordinates(*points.T)), MeasuredRegion(points)
    assert not region.outside(points).any()
    wanted = np.concatenate([draw.uniform(0, 600, (4000, 2)), grid, 1.01 * points[exact.vertices]])
    away = regression.coordinates(*wanted.T) @ exact.equations[:, :2].T + exact.equations[:, 2]
    beyond = ((wanted < points.min(axis=0)) | (wanted > points.max(axis=0))).any(axis=1)
    assert np.array_equal(region.outside(wanted), beyond | (away > SLACK).any(axis=1))


def test_points_on_a_line_have_a_box_for_a_hull() -> None:
    region = MeasuredRegion(np.array([(16.0, 0), (64, 0), (256, 0)]))
    wanted = np.array([(100.0, 0), (100, 5), (300, 0)])
    assert region.outside(wanted).tolist() == [False, True, True]


def test_a_bundles_gemm_is_a_device_models_without_its_waves() -> None:
    """One formula: rates a microsecond here, those of the hardware and efficiencies there."""
    tokens = np.array([1, 100, 128, 200, 1000.0])
    pooled = regression.PooledRoofline({s: (tokens, roofline_s(s, tokens)) for s in SHAPES})
    overhead, flops, numbers, p, paid = pooled.constants
    shape = SHAPES[0]
    columns = {"m": tokens, "n": np.full(5, shape.n), "k": np.full(5, shape.k),
               "num_sms": np.full(5, 108.0), "peak_flops": np.full(5, 2e6 * flops),
               "bandwidth": np.full(5, 4e6 * numbers)}  # fmt: skip
    constants = {"overhead_us": overhead, "compute": 0.5, "memory": 0.5, "p": p, "wave_share": 0.0,
                 "tile_share": paid, "tile_m": 128.0, "tile_n": 128.0}  # fmt: skip
    assert pooled.time_s(shape, tokens) == pytest.approx(1e-6 * gemm_us(columns, constants), 1e-12)


# Chunks in one call, computed by hand


#: Calls of 1, 2 and 4 chunks: 100 tokens take 10, 12 and 20 s, 300 tokens 30, 60 and 120.
ALONE = regression.PiecewiseLinear([100.0, 300.0], [10.0, 30.0])
CALLS = Together(
    np.array([2.0, 4.0]),
    lambda size: np.array([np.interp(size, [100, 300], [of_100, 30]) for of_100 in (6, 5)]),
)


OPS = cast(OpTimes, SimpleNamespace(together=CALLS, prefill=lambda chunk, context: ALONE(chunk)))


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([100], 10),
        ([100] * 2, 12),
        ([100] * 3, 16),  # between two and four
        ([100] * 4, 20),
        ([100] * 8, 40),  # beyond the most: as much each
        ([100, 300], 35),  # of 400 tokens: a quarter of four of the one, and nothing saved
        ([], 0),
    ],
)
def test_a_chunk_takes_its_share_of_as_many_equal_ones(chunks: list[int], expected: float) -> None:
    size = np.array(chunks, np.float64)
    assert ALONE(size).sum() - IterationCost(OPS).saved_s(size) == pytest.approx(expected)
    twice = IterationCost(OPS, WholeLayer(scale=2.0))
    assert twice.saved_s(size) == pytest.approx(2 * IterationCost(OPS).saved_s(size))


def test_a_batch_takes_no_less_than_its_longest_chunk() -> None:
    """Two of 100 tokens take less than one: noise of a table. And a call of many is no slower."""
    calls = Together(np.array([2.0]), lambda size: np.array([size / 25]))
    gain, launch = calls.saved(np.array([100.0]), np.array([10.0]))[0].T
    assert gain - launch / np.array([100, 200]) == pytest.approx([0, 5])
    assert calls.least_s(np.array([100.0]), np.array([10.0])) == pytest.approx([5])
    assert CALLS.least_s(np.array([100.0, 300.0]), np.array([10.0, 30.0])) == pytest.approx([5, 30])


# Arrays kept on disk: the same as computed ones, and never in the way


ARRAY = np.array([[0.1, 2**-40], [np.pi, 0.0]])


def fail() -> np.ndarray:
    raise AssertionError("computed again")


def test_an_array_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new" / "folder"))
    assert np.array_equal(cached("key", lambda: ARRAY), ARRAY)
    assert np.array_equal(cached("key", fail), ARRAY)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["key.2.npz"]
    with pytest.raises(AssertionError):
        cached("other", fail)


@pytest.mark.slow
def test_any_byte_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags and methods of the archive among them, which zipfile answers in ways of their own."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    file = tmp_path / "key.2.npz"
    cached("key", lambda: ARRAY)
    good = file.read_bytes()
    for place in range(len(good)):
        for change in (0x01, 0xFF):
            file.write_bytes(good[:place] + bytes([good[place] ^ change]) + good[place + 1 :])
            assert np.array_equal(cached("key", lambda: ARRAY), ARRAY)


def other_content(array: np.ndarray) -> Callable[[Path], object]:
    def write(file: Path) -> None:
        with np.load(file) as stored:
            digest = stored["sha256"]
        np.savez(file, array=array, sha256=digest)

    return write


@pytest.mark.parametrize(
    "damage",
    [
        other_content(ARRAY[:1]),
        other_content(ARRAY.reshape(4)),
        other_content(ARRAY * 2),
        other_content(ARRAY.astype(np.float32)),
        lambda file: np.savez(file, array=ARRAY),
        lambda file: file.write_bytes(file.with_name("other.2.npz").read_bytes()),
        lambda file: np.savez(file, array=np.array([{}], dtype=object)),  # to be unpickled
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"PK\x03\x04 cut short"),
        lambda file: file.write_bytes(b"no archive"),
    ],
)
def test_another_content_is_found_out_and_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    cached("key", lambda: ARRAY)
    cached("other", lambda: ARRAY + 1)
    assert caplog.messages == []
    damage(tmp_path / "key.2.npz")
    assert np.array_equal(cached("key", lambda: ARRAY), ARRAY)
    (message,) = caplog.messages
    assert str(tmp_path / "key.2.npz") in message and "computed anew" in message
    assert "\n" not in message
    assert np.array_equal(cached("key", fail), ARRAY)


def test_a_cache_that_is_off_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    assert cache_folder() is None
    assert cached("key", lambda: ARRAY) is ARRAY
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "below"))
    assert cached("key", lambda: ARRAY) is ARRAY
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sarathi-sim"


def test_times_with_and_without_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, lazily tabulated chunks included; a hit fits nothing."""
    bundle, _ = shipped("a6000", "llama-13b", 1)

    def tables(ops: OpTimes) -> list[object]:
        predict = BundlePredictor(ops, max_tokens=64, max_length=512, max_batch=4)
        predict._tabulate_chunks(40)
        return [predict._whole, predict._decode_rows, predict._chunk_rows, predict._by_tokens]

    monkeypatch.setenv(VARIABLE, "off")
    without = tables(regression.bundle_times(bundle))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert tables(regression.bundle_times(bundle)) == without
    again = regression.bundle_times(bundle)
    assert tables(again) == without
    assert "_surface" not in vars(again.prefill) and "_surface" not in vars(again.decode)
