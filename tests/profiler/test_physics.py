"""Each physics form by hand, its residuals, and op times asked of calibrated devices."""

from __future__ import annotations

import io
from functools import cache

import numpy as np
import pytest

from sarathi_sim.profiler.facts.device import device_sha256
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import LAYER_GEMMS, SCOPES
from sarathi_sim.profiler.facts.roofline import (
    Array,
    attn_context_us,
    attn_decode_us,
    gemm_us,
    link_us,
    soft_max,
    split_fill,
    stream_us,
    wave_fill,
)
from sarathi_sim.profiler.physics.fit import leave_one_group_out
from sarathi_sim.profiler.physics.residual import (
    Curve,
    Trees,
    fit_curve,
    fit_trees,
    residual_from_arrays,
)
from sarathi_sim.profiler.physics.shard_times import DeviceTimes
from sarathi_sim.profiler.storage.strict import SpecError
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.op_times.op_times import OpTimes

HARDWARE = {"peak_flops": 100e12, "bandwidth": 1e12, "num_sms": 100.0}
#: A soft maximum this sharp is a hard one.
HARD = 200.0


def columns(**inputs: float) -> dict[str, Array]:
    return {name: np.array([float(v)]) for name, v in {**HARDWARE, **inputs}.items()}


def test_gemm_pays_a_tile_at_the_first_row_beyond_its_edge() -> None:
    constants = {"tile_m": 128.0, "tile_n": 128.0, "tile_share": 1.0, "wave_share": 0.0}
    constants |= {"overhead_us": 0.0, "compute": 1.0, "memory": 1.0, "p": HARD}
    at, beyond = (gemm_us(columns(m=m, n=12800, k=12800), constants)[0] for m in (1024, 1025))
    # 2 x 1024 x 12800^2 FLOPs at 100 TFLOP/s.
    assert abs(at - 3355.4) < 0.1
    np.testing.assert_allclose(beyond / at, 9 / 8, rtol=1e-6)


def test_gemm_of_one_row_reads_the_weights() -> None:
    constants = {"tile_m": 64.0, "tile_n": 64.0, "tile_share": 0.0, "wave_share": 0.0}
    constants |= {"overhead_us": 5.0, "compute": 1.0, "memory": 0.5, "p": HARD}
    time = gemm_us(columns(m=1, n=1000, k=5000), constants)[0]
    np.testing.assert_allclose(time, 5.0 + 2 * (1000 * 5000 + 6000) / 0.5e12 * 1e6)


def test_soft_maximum_and_waves() -> None:
    """The former lies between the larger and the sum."""
    a, b = np.array([3.0, 0.0]), np.array([4.0, 2.0])
    np.testing.assert_allclose(soft_max(2.0, a, b), [5.0, 2.0])
    np.testing.assert_allclose(soft_max(HARD, a, b), [4.0, 2.0], rtol=1e-6)
    blocks, sms = np.array([50.0, 100.0, 101.0]), np.array([100.0] * 3)
    np.testing.assert_allclose(wave_fill(blocks, sms), [0.5, 1.0, 101 / 200])
    # Fifty blocks split in two fill the machine; more parts than keys allow are not made.
    np.testing.assert_allclose(split_fill(blocks, sms, np.array([8.0] * 3)), [1.0, 1.0, 101 / 200])
    np.testing.assert_allclose(split_fill(blocks, sms, np.array([1.0] * 3)), [0.5, 1.0, 101 / 200])


def test_decode_of_many_sequences_reads_every_key_and_value_once() -> None:
    constants = {"splits": 0.0, "packed": 1.0, "overhead_us": 1.0, "block_us": 0.0}
    constants |= {"token_us": 1e-6, "hbm": 0.5, "p": HARD, "wave_share": 1.0}
    time = attn_decode_us(
        columns(batch=64, context=2000, heads=32, kv_heads=8, head_dim=128), constants
    )
    kv_bytes = 64 * 2000 * 2 * 8 * 128 * 2
    np.testing.assert_allclose(time, 1.0 + kv_bytes / 0.5e12 * 1e6)


def test_context_adds_its_score_pairs() -> None:
    constants = {"tile_m": 64.0, "compute": 0.5, "wave_share": 0.0, "step_us": 2.0}
    inputs = {"chunk": 256, "context": 4000, "heads": 32, "kv_heads": 32, "head_dim": 128}
    time = attn_context_us(columns(base_us=10.0, **inputs), constants)
    flops = 4 * 128 * 32 * 256 * 4000
    np.testing.assert_allclose(time, 10 + 2 + flops / 50e12 * 1e6)


def test_stream_and_link() -> None:
    sharp = {"overhead_us": 3.0, "memory": 0.5, "p": HARD}
    np.testing.assert_allclose(stream_us(columns(num_bytes=1e9), sharp), 2000.0)
    np.testing.assert_allclose(stream_us(columns(num_bytes=10), sharp), 3.0)
    wire = {"overhead_us": 20.0, "us_per_mb": 10.0, "ramp_us": 5.0}
    np.testing.assert_allclose(link_us(columns(num_bytes=4e6), wire), 20 + 40 + 10)


def test_leaving_groups_out_fits_to_all_others_and_scores_what_counts() -> None:
    groups = np.array([7, 3, 7, 5, 3])
    scored = np.array([True, True, False, False, True])
    folds = [(fit.tolist(), out.tolist()) for fit, out in leave_one_group_out(groups, scored)]
    # Row 2 belongs to group 7: it is not scored, and must not be fitted either.
    assert folds == [([0, 2, 3], [1, 4]), ([1, 3, 4], [0])]
    everything = [out.tolist() for _, out in leave_one_group_out(groups)]
    assert everything == [[1, 4], [3], [0, 2]]
    assert leave_one_group_out(np.ones(4)) == [], "nothing is left to fit"


# The exported trees are scikit-learn's, and survive the disk without pickle


@pytest.fixture(scope="module")
def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(7)
    features = rng.normal(size=(800, 5))
    features[:, 1] = np.round(features[:, 1] * 3)  # ties, as in counts of tiles
    target = np.sin(features[:, 0]) + 0.2 * features[:, 1] * (features[:, 2] > 0)
    return features, target


def test_exported_trees_predict_what_sklearn_predicts(data: tuple[Array, Array]) -> None:
    from sklearn.ensemble import HistGradientBoostingRegressor

    features, target = data
    model = HistGradientBoostingRegressor(max_iter=40, random_state=0).fit(features, target)
    unseen = np.random.default_rng(8).normal(scale=2, size=(500, 5))
    for rows in (features, unseen):
        ours = Trees.from_sklearn(model).predict(rows)
        np.testing.assert_allclose(ours, model.predict(rows), rtol=1e-6, atol=1e-6)


def test_few_rows_are_as_many(data: tuple[Array, Array], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many go down together; of neighbours that are alike all go one way in most nodes."""
    features, target = data
    trees = fit_trees(features, target, 40, 31)
    features = features[np.argsort(features[:, 0])]
    whole = trees.predict(features)
    parts = [trees.predict(features[at : at + 3]) for at in range(0, 60, 3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole[:60])
    monkeypatch.setattr("sarathi_sim.profiler.physics.residual._AT_ONCE", 17)
    np.testing.assert_array_equal(trees.predict(features), whole)


def test_trees_and_curve_survive_npz_without_pickle(data: tuple[Array, Array]) -> None:
    features, target = data
    for residual in (fit_trees(features, target, 10, 8), fit_curve(features[:, 0], target, 12)):
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **residual.arrays())
        buffer.seek(0)
        with np.load(buffer, allow_pickle=False) as stored:
            read = residual_from_arrays({name: stored[name] for name in stored.files})
        assert type(read) is type(residual)
        np.testing.assert_array_equal(read.predict(features), residual.predict(features))


def test_curve_passes_through_group_medians_and_is_flat_outside() -> None:
    x = np.array([1.0, 1.0, 1.0, 2.0, 3.0])
    y = np.array([0.1, 0.2, 0.9, 0.4, 0.6])
    curve = fit_curve(x, y, knots=24)
    assert isinstance(curve, Curve)
    at = np.array([[0.0], [1.0], [1.5], [3.0], [9.0]])
    np.testing.assert_allclose(curve.predict(at), [0.2, 0.2, 0.3, 0.6, 0.6])


# Op times asked of calibrated devices: what the device files give, and with the tile step


MODELLED = [
    ("a6000", "llama-13b", 1),
    ("a100-80g-sxm", "llama-33b", 1),
    ("a100-80g-sxm", "gpt3-175b", 8),
    ("a100-80g-sxm", "gpt3-175b", 1),
    ("a100-80g-sxm", "llama-2-70b", 4),
    ("a40", "llama-3-8b", 1),
]


@cache
def times_of(device: str, model: str, tp: int) -> OpTimes:
    return modelled_times(DeviceTimes(device, load_model(model), tp))


def layer_s(ops: OpTimes, tokens: int) -> float:
    return sum(float(ops.by_rows[op](tokens)) for op in LAYER_GEMMS)


@pytest.mark.parametrize(("device", "model", "tp"), MODELLED)
def test_a_run_gets_what_the_device_says(device: str, model: str, tp: int) -> None:
    """To the last bit, at sizes that no table of the profiler has; and it says where from."""
    ops, spec = times_of(device, model, tp), load_model(model)
    times = DeviceTimes(device, spec, tp)
    heads = (*spec.heads_per_rank(tp), spec.head_dim)
    rows, batch, held = np.array([1, 237, 5001]), np.array([3.0, 77.0]), np.array([33.0, 4099.0])
    for op in spec.row_ops:
        expected = 1e-6 * times.by_rows(op, rows.astype(float))
        assert np.array_equal(ops.by_rows[op](rows), expected), op
    assert np.array_equal(ops.decode(batch, held), 1e-6 * times.attn_decode(batch, held, *heads))
    chunk = 1e-6 * times.attn_prefill(batch, held, *heads)
    assert np.array_equal(ops.prefill(batch, held), chunk)
    assert np.array_equal(ops.prefill.table(batch, held).diagonal(), chunk)
    for scope in SCOPES:
        assert ops.send[scope](12345.0) == 1e-6 * times.send_recv(np.array([12345.0]), scope)[0]
    meta = ops.meta
    assert meta.source == "modelled" and meta.device_file_sha256 == device_sha256(device)
    assert meta.content_sha256 and ops.longest_context == 8192


def test_what_is_not_one_row_or_more_is_asked_for_as_such() -> None:
    """No row takes as long as one, half a row is no index, and many rows are not tabulated."""
    time = times_of(*MODELLED[0]).by_rows["preproj"]
    assert time(0) == time(1) and np.shape(time(np.ones((2, 3)))) == (2, 3)
    assert time(100.5) not in (time(100), time(101)) and time(100.5) < time(200) < time(200_000)


def test_gpt3_layer_carries_the_step_from_256_to_257_tokens() -> None:
    """A roofline alone halves the step, which lies just where Sarathi's chunks do.

    The measured layer (same GEMM shapes, QKV interpolated over n) steps by 39 %.
    """
    ops = times_of("a100-80g-sxm", "gpt3-175b", 8)
    assert layer_s(ops, 257) / layer_s(ops, 256) >= 1.25
    assert layer_s(ops, 129) / layer_s(ops, 128) >= 1.2


@pytest.mark.parametrize(("device", "model", "tp"), MODELLED)
def test_times_grow_from_end_to_end(device: str, model: str, tp: int) -> None:
    """Monotone over factors of ten, where no kernel switch can excuse a fall."""
    ops = times_of(device, model, tp)
    for op, time in ops.by_rows.items():
        assert (np.diff(time([1, 100, 1000, 4096])) > 0).all(), op
    held = np.array([0.0, 128, 1024, 4096, 8192])
    for chunk in (64.0, 1024.0, 8192.0):
        after = ops.prefill(np.full(5, chunk), held)
        assert (np.diff(after) > -0.05 * after[:-1]).all()
    few, many = ops.decode([1.0, 512.0], [8192.0, 8192.0])
    assert many > 20 * few


@pytest.mark.parametrize(
    ("device", "model", "tp", "message"),
    [
        ("h100-80g-sxm", "llama-2-7b", 1, "no op times without a stack"),
        ("a100-80g-sxm", "llama-2-70b", 16, "no all-reduce was fitted for tp 16"),
        ("a100-80", "llama-2-7b", 1, "did you mean a100-80g-sxm"),
    ],
)
def test_what_cannot_be_modelled(device: str, model: str, tp: int, message: str) -> None:
    with pytest.raises((SpecError, ValueError), match=message):
        DeviceTimes(device, load_model(model), tp)


def test_an_attention_that_was_lent_says_so_and_is_wide() -> None:
    """The A40 has the A6000's kernel; paged kernels are 2 to 3 times slower in prefill."""
    own, lent = (
        DeviceTimes(name, load_model("llama-3.1-8b"), 1).provenance() for name in ("a6000", "a40")
    )
    for op, least in (("attn_prefill", 100), ("attn_decode", 35)):
        assert "(lent)" in lent[op].mark and "(lent)" not in own[op].mark
        assert lent[op].half_width_pct >= max(least, own[op].half_width_pct)
    assert lent["attn_prefill"].half_width_pct > 2 * own["attn_prefill"].half_width_pct
