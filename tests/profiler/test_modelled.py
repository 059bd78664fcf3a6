"""Op times asked of calibrated devices: what the device files give, and with the tile step."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from sarathi_sim.profiler.facts.device import device_files, device_sha256
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import LAYER_GEMMS, SCOPES
from sarathi_sim.profiler.physics.shard_times import DeviceTimes
from sarathi_sim.profiler.storage.strict import SpecError
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.op_times.op_times import OpTimes

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
    """The four GEMMs of a layer."""
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


def test_device_arrays_are_small_and_hold_no_objects() -> None:
    for device in ("a100-80g-sxm", "a6000", "a40"):
        arrays = next(p for p in device_files(device) if p.suffix == ".npz")
        assert arrays.stat().st_size < 500_000
        with np.load(arrays, allow_pickle=False) as stored:
            assert all(stored[name].dtype.kind in "fiu" for name in stored.files)


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


def test_tensor_parallel_ranks_do_less_than_the_whole() -> None:
    whole = times_of("a100-80g-sxm", "gpt3-175b", 1)
    rank = times_of("a100-80g-sxm", "gpt3-175b", 8)
    assert 6 < layer_s(whole, 4096) / layer_s(rank, 4096) < 8.5
    assert whole.all_reduce is None and rank.all_reduce is not None


@pytest.mark.parametrize(
    ("device", "model", "tp", "message"),
    [
        ("h100-80g-sxm", "llama-2-7b", 1, "specifications only"),
        ("a100-80g-sxm", "llama-2-70b", 16, "no all-reduce was fitted for tp 16"),
        ("a100-80g-sxm", "llama-33b", 8, r"tp 8 does not divide num_heads \(52\)"),
        ("a100-80", "llama-2-7b", 1, "did you mean a100-80g-sxm"),
    ],
)
def test_what_cannot_be_modelled(device: str, model: str, tp: int, message: str) -> None:
    with pytest.raises((SpecError, ValueError), match=message):
        DeviceTimes(device, load_model(model), tp)
