"""The band of a run, from op errors that are known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.request_level import RequestLevel
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.simulator.confidence.bands import Band, coverage, fit_band
from sarathi_sim.simulator.confidence.coverage import queries_outside
from sarathi_sim.simulator.confidence.held_out import OpTable, linear_fit, op_tables, surface_fit
from sarathi_sim.simulator.confidence.op_errors import LayerError, OpError, standard_normals
from sarathi_sim.simulator.confidence.run_band import SAMPLES, makespan_samples
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.op_times.breakdown import OpUse, breakdown, whole_layer
from sarathi_sim.simulator.op_times.op_times import OpTimes
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.op_times.regression import bundle_times, decode_surface
from sarathi_sim.simulator.views.metrics import Analysis
from tests.simulator.test_predictor import simple_bundle

EXACT = Band(0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def run() -> tuple[Records, OpTimes, list[dict[str, OpUse]]]:
    """Forty prompts of 60 to 300 tokens in chunks, through two stages."""
    ops = bundle_times(simple_bundle())
    predict = BundlePredictor(ops, max_tokens=256, max_length=1024, max_batch=8, num_stages=2)
    requests = [Request(i, 0.0, 60 + 6 * i, 10, 10) for i in range(40)]
    scheduler = MicroBatches(
        Sarathi(chunk_size=128, tile=8), max_batch=8, max_in_flight=2, kv_capacity=20_000,
        max_length=1024,
    )  # fmt: skip
    records = simulate(requests, [scheduler], predict, (2, 2))
    return records, ops, [breakdown(log, predict) for log in records.replicas]


def errors(ops: OpTimes, common: float = 0.0) -> dict[str, OpError]:
    found = {t.op: OpError(t, EXACT, common, 0.0) for t in op_tables(ops.bundle)}
    return {**found, "send_recv": found["send_recv_inter_node"]}


def test_the_ops_add_up_to_the_layer(
    run: tuple[Records, OpTimes, list[dict[str, OpUse]]],
) -> None:
    records, ops, (uses,) = run
    columns = records.replicas[0].iterations
    parts = [use.time_s for op, use in uses.items() if op not in ("embedding", "lm_head")]
    total = sum(parts) - uses["send_recv"].time_s
    assert total == pytest.approx(columns["layer_s"], abs=1e-9)
    # By hand, for the first iteration: one chunk of the first two prompts, no decodes.
    assert columns["decodes"][0] == 0
    tokens = columns["prefill_tokens"][0]
    assert uses["preproj"].time_s[0] == pytest.approx(1e-6 * (10 + tokens))
    assert uses["all_reduce"].time_s[0] == pytest.approx(2 * 7e-6)
    alone = np.flatnonzero((columns["chunks"] == 1) & (columns["decodes"] > 0))
    chunk, context = columns["prefill_tokens"][alone], columns["prefill_context"][alone]
    assert uses["attn_prefill"].time_s[alone] == pytest.approx(ops.prefill(chunk, context), rel=0.1)
    assert uses["lm_head"].time_s.sum() == columns["last_s"].sum()


def test_without_errors_there_is_no_band(
    run: tuple[Records, OpTimes, list[dict[str, OpUse]]],
) -> None:
    records, ops, uses = run
    samples = makespan_samples(records, Analysis(records).spans, uses, errors(ops), "key")
    assert (samples == records.end_s).all()


def test_times_in_doubt_may_only_be_too_slow(
    run: tuple[Records, OpTimes, list[dict[str, OpUse]]],
) -> None:
    """Half of the draws are as simulated, the others shorter."""
    records, ops, uses = run
    doubted = errors(ops)
    doubted["preproj"] = dataclasses.replace(doubted["preproj"], slow=1.0)
    samples = makespan_samples(records, Analysis(records).spans, uses, doubted, "key")
    assert (samples <= records.end_s).all()
    assert (samples == records.end_s).sum() == (samples < records.end_s).sum() == SAMPLES / 2


def test_an_error_of_one_op_moves_the_run_by_its_share(
    run: tuple[Records, OpTimes, list[dict[str, OpUse]]],
) -> None:
    """On one stage nothing overlaps: the makespan moves by the op's time times the error."""
    _, ops, _ = run
    predict = BundlePredictor(ops, max_tokens=256, max_length=1024, max_batch=8)
    scheduler = MicroBatches(
        Sarathi(chunk_size=128, tile=8), max_batch=8, kv_capacity=20_000, max_length=1024
    )
    records = simulate(
        [Request(i, 0.0, 60 + 6 * i, 10, 10) for i in range(40)], [scheduler], predict, (3,)
    )
    uses = [breakdown(log, predict) for log in records.replicas]
    one = errors(ops)
    one["ffn_ln1"] = dataclasses.replace(one["ffn_ln1"], common=0.2)
    samples = makespan_samples(records, Analysis(records).spans, uses, one, "key")
    draws = np.expm1(0.2 * standard_normals("key ffn_ln1", SAMPLES)[0])
    moved = 3 * uses[0]["ffn_ln1"].time_s.sum() * draws
    assert samples == pytest.approx(records.end_s + moved)
    # And with local errors only, draws of the octaves it was used in.
    one["ffn_ln1"] = dataclasses.replace(one["ffn_ln1"], common=0.0, local=0.2)
    local = makespan_samples(records, Analysis(records).spans, uses, one, "key")
    octave = np.log2(uses[0]["ffn_ln1"].size[:, 0]).astype(int)
    normal = standard_normals("key ffn_ln1", SAMPLES)
    moved = 3 * uses[0]["ffn_ln1"].time_s @ np.expm1(0.2 * normal[1 + octave])
    assert local == pytest.approx(records.end_s + moved)


def test_an_error_of_whole_layers_moves_all_but_the_all_reduces(
    run: tuple[Records, OpTimes, list[dict[str, OpUse]]],
) -> None:
    """Two prompts, one after the other, on one stage; by hand from the recorded columns."""
    _, ops, _ = run
    predict = BundlePredictor(ops, max_tokens=256, max_length=1024, max_batch=1)
    scheduler = MicroBatches(RequestLevel(), max_batch=1, kv_capacity=20_000, max_length=1024)
    requests = [Request(i, 0.0, 100, 1, 1) for i in range(2)]
    records = simulate(requests, [scheduler], predict, (3,))
    (log,) = records.replicas
    uses = breakdown(log, predict)
    uses["whole_layer"] = whole_layer(log, uses)
    off = {"whole_layer": LayerError(0.1)}
    samples = makespan_samples(records, Analysis(records).spans, [uses], off, "key")
    layer_s = float(log.iterations["layer_s"][0]) - 2 * 7e-6
    draws = np.expm1(0.1 * standard_normals("key whole_layer", SAMPLES)[1 + 6])  # 64 to 127 tokens
    assert samples == pytest.approx(records.end_s + 2 * 3 * layer_s * draws)


def test_draws_come_in_opposite_pairs_and_belong_to_their_key() -> None:
    draws = standard_normals("a", SAMPLES)
    assert np.array_equal(draws, standard_normals("a", SAMPLES))
    assert not np.array_equal(draws, standard_normals("b", SAMPLES))
    assert np.array_equal(draws[:, : SAMPLES // 2], -draws[:, SAMPLES // 2 :])
    assert abs(draws[0].std() - 1) < 0.3


def test_queries_outside_are_counted(
    run: tuple[Records, OpTimes, list[dict[str, OpUse]]],
) -> None:
    """Against a bundle whose chunks end at 64 tokens."""
    records, ops, uses = run
    tables = {table.op: table for table in op_tables(ops.bundle)}
    assert queries_outside(uses, tables) == []
    short = tables["attn_prefill"]
    tables["attn_prefill"] = short.only(np.flatnonzero(short.points[:, 0] <= 64))
    (outside,) = queries_outside(uses, tables)
    columns = records.replicas[0].iterations
    mean = columns["prefill_tokens"] / np.maximum(columns["chunks"], 1)
    assert outside.op == "attn_prefill"
    assert outside.iterations == pytest.approx((mean > 64.5).sum() / (mean > 0).sum())
    assert outside.beyond == pytest.approx(np.round(mean.max()) / 64)
    assert outside.profile[0][0] == round(mean.max())
    assert "attn_prefill" in str(outside) and f"chunk {round(mean.max())}" in str(outside)


def noisy(scale: float, seed: int = 0, count: int = 300) -> OpTable:
    """A straight line with log-normal noise of standard deviation ``scale``."""
    rng = np.random.default_rng(seed)
    size = np.arange(1.0, count + 1) * 16
    time: Floats = size * np.exp(scale * rng.standard_normal(count))
    return OpTable("x", size[:, None], time, linear_fit, linear_fit, tile=128)


def test_a_band_is_as_wide_as_the_noise() -> None:
    """A point is off the mean of two others by sigma times the root of 1.5: 90 % of it."""
    table = noisy(0.02)
    band = fit_band(table)
    widths = band.half_widths(table, table.points[1:-1] + 8)
    assert np.median(widths) == pytest.approx(1.645 * 0.02 * np.sqrt(1.5), rel=0.25)
    assert fit_band(noisy(0.0)).half_widths(noisy(0.0), np.array([[1000.0]])) < 1e-6
    far = band.half_widths(table, np.array([[9700.0], [19300]]))
    assert far == pytest.approx(band.beyond * np.log2([9700 / 4800, 19300 / 4800]))


def test_a_band_is_wide_where_times_step() -> None:
    """Steps of 20 % between points 64 apart, every 512: the band opens up around them alone."""
    size = np.arange(64.0, 8193, 64)
    time = (100 + size) * 1.2 ** np.floor((size - 1) / 512)
    table = OpTable("x", size[:, None], time, linear_fit, linear_fit)
    band = fit_band(table)
    at_step, between = band.half_widths(table, np.array([[512.0 + 32], [512 + 7 * 32]]))
    assert at_step > 0.1 > 0.02 > between


def test_a_band_covers_what_it_says() -> None:
    found = [coverage(noisy(0.03, seed)) for seed in range(4)]
    assert {points for points, _ in found} == {298}
    assert 0.85 <= np.mean([covered for _, covered in found]) <= 0.95


def test_a_band_is_for_the_sizes_that_are_used_and_not_for_those_that_were_measured() -> None:
    """Most points are around a jump at 1024, and hardly any size that is used."""
    size = np.union1d(np.geomspace(8, 4096, 40).round(), 1024 + np.arange(-30.0, 30))
    used = np.geomspace(9, 4000, 400)
    covered = []
    for seed in range(3):
        noise = 0.002 * np.random.default_rng(seed).standard_normal(len(size))
        time = _jumping(size) * np.exp(noise)
        table = OpTable("x", size[:, None], time, linear_fit, linear_fit)
        off = np.abs(np.log(np.interp(used, size, time) / _jumping(used)))
        covered.append(off <= fit_band(table).half_widths(table, used[:, None]))
    assert 0.85 <= np.mean(covered) <= 0.97


def _jumping(size: Floats) -> Floats:
    return np.asarray((50 + size / 40) * np.where(size > 1024, 1.5, 1.0))


def test_a_band_is_widest_between_points() -> None:
    size = np.array([64.0, 128, 256, 512, 1024])[:, None]
    table = OpTable("x", size, np.array([9.0, 8, 12, 19, 44]), linear_fit, linear_fit)
    at, near, middle, above = Band(1.0, 1.0, 0.5, 0.01).half_widths(
        table, np.array([[256.0], [288], [384], [480]])
    )
    assert at == 0.01 < near < middle and above == pytest.approx(near)
    assert near - 0.01 == pytest.approx(4 * 0.125 * 0.875 * (middle - 0.01))
    # Where times hardly differ there is little to be wrong about, however rough it is around.
    flat = OpTable("x", size, np.array([9.0, 8, 12, 12.01, 44]), linear_fit, linear_fit)
    assert Band(1.0, 1.0, 0.5, 0.0).half_widths(flat, np.array([[384.0]])) < 0.001


def test_a_band_over_two_sizes_grows_with_the_distance_to_what_was_measured() -> None:
    points = np.array([[1.0, 32], [1, 4064], [64, 32], [64, 4064], [8, 480]])
    fit = surface_fit(decode_surface)
    table = OpTable("x", points, np.ones(5), fit, fit)
    band = Band(inside=0.2, edges=0.2, beyond=0.5, floor=0.0)
    at, one, two = band.half_widths(table, np.array([[8.0, 480], [16, 480], [32, 480]]))
    assert (one, two) == pytest.approx((0.2, 0.2 * np.sqrt(2)))
    assert at == pytest.approx(0.2 * np.sqrt(0.1)), "a tenth of an octave is noise"


def test_unmeasured_edges_have_a_band_of_their_own() -> None:
    size = np.arange(1.0, 2050)
    time = 100 + 30 * np.floor((size - 1) / 128)
    measured = np.isin(size % 128, (0, 1, 40, 80))
    table = OpTable("x", size[measured, None], time[measured], linear_fit, linear_fit, tile=128)
    sparse = table.only(np.flatnonzero(table.points[:, 0] % 128 > 1))
    band = Band(inside=1.0, edges=3.0, beyond=0.5, floor=0.01)
    at, above = band.half_widths(sparse, np.array([[384.0], [385]]))
    (inside,) = dataclasses.replace(band, edges=1.0).half_widths(sparse, np.array([[384.0]]))
    assert at == above == pytest.approx(3 * inside)
    # Where both sides of an edge were measured, it is a point like others.
    known = band.half_widths(table, np.array([[384.0], [385]]))
    same = Band(1.0, 1.0, 0.5, 0.01).half_widths(table, np.array([[384.0], [385]]))
    assert np.array_equal(known, same)
    fitted = fit_band(table)
    assert fitted.edges > fitted.inside
