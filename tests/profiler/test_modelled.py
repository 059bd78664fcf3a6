"""The shipped bundles are what the shipped device files give, and carry the tile step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sarathi_sim.profiler.bundle.schema import (
    Bundle,
    bundle_path,
    list_bundles,
    load_bundle,
    write_bundle,
)
from sarathi_sim.profiler.facts.device import device_files, device_sha256
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import LAYER_GEMMS
from sarathi_sim.profiler.physics.modelled import device_model, make_bundle, token_grid
from sarathi_sim.profiler.storage.paths import data_dir
from sarathi_sim.profiler.storage.strict import SpecError
from sarathi_sim.simulator.op_times.surface import decode_surface

SHIPPED = list_bundles(data_dir() / "profiles")
MODELLED = [b for b in SHIPPED if b[0] in ("a100-80g-sxm", "a6000", "a40")]


def shipped(device: str, model: str, tp: int) -> Bundle:
    return load_bundle(bundle_path(data_dir() / "profiles", device, model, tp))


def layer_us(bundle: Bundle, tokens: int) -> float:
    """The four GEMMs of a layer at a sampled token count."""
    rows = bundle.linear[bundle.linear["op"].isin(LAYER_GEMMS)]
    picked = rows[rows["num_tokens"] == tokens]
    assert len(picked) == 4
    return float(picked["time_us"].sum())


def test_what_ships() -> None:
    assert set(MODELLED) >= {
        ("a6000", "llama-13b", 1),
        ("a100-80g-sxm", "llama-33b", 1),
        ("a100-80g-sxm", "gpt3-175b", 8),
        ("a100-80g-sxm", "gpt3-175b", 1),
        ("a100-80g-sxm", "llama-2-70b", 4),
        ("a100-80g-sxm", "llama-2-70b", 8),
        ("a100-80g-sxm", "llama-3-8b", 1),
    }


@pytest.mark.parametrize(("device", "model", "tp"), MODELLED)
def test_shipped_bundle_is_remade_to_the_byte(
    tmp_path: Path, device: str, model: str, tp: int
) -> None:
    write_bundle(make_bundle(device, load_model(model), tp), tmp_path / "b")
    folder = bundle_path(data_dir() / "profiles", device, model, tp)
    names = sorted(p.name for p in folder.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "b").iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert sum((folder / name).stat().st_size for name in names) < 200_000


@pytest.mark.parametrize(("device", "model", "tp"), MODELLED)
def test_shipped_bundle_names_its_device_files(device: str, model: str, tp: int) -> None:
    meta = shipped(device, model, tp).meta
    assert meta.source == "modelled"
    assert meta.device_file_sha256 == device_sha256(device)
    assert meta.model_spec == load_model(model)


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
    bundle = shipped("a100-80g-sxm", "gpt3-175b", 8)
    assert layer_us(bundle, 257) / layer_us(bundle, 256) >= 1.25
    assert layer_us(bundle, 129) / layer_us(bundle, 128) >= 1.2


def test_short_decodes_follow_the_kernel_between_the_sampled_contexts() -> None:
    """The kernel's times step past each block of 32 keys. Contexts 16, 64, 128 and 256 alone gave
    20 and 5 %."""
    model = load_model("llama-13b")
    rows = shipped("a6000", model.name, 1).attn_decode.to_numpy(np.float64)
    surface = decode_surface(rows[:, 0], rows[:, 1], 1e-6 * rows[:, 2])
    batch, context = (grid.ravel() for grid in np.meshgrid([6.0, 18, 60], np.arange(2.0, 257, 3)))
    kernel_us = device_model("a6000", model, 1).attn_decode(batch, context, model, 1)
    off = np.abs(1e6 * surface(batch, context) / kernel_us - 1)
    assert np.median(off[context < 64]) < 0.08
    assert np.median(off[context > 64]) < 0.03


def test_both_sides_of_every_tile_are_sampled() -> None:
    grid = set(token_grid(131072).astype(int))
    for edge in range(128, 4097, 128):
        assert {edge, edge + 1} <= grid
    assert set(range(1, 65)) <= grid and max(grid) == 131072
    assert set(token_grid(300).astype(int)) == {t for t in grid if t < 300} | {300}


@pytest.mark.parametrize(("device", "model", "tp"), MODELLED)
def test_times_grow_from_end_to_end(device: str, model: str, tp: int) -> None:
    """Monotone over factors of ten, where no kernel switch can excuse a fall."""
    bundle = shipped(device, model, tp)
    for _, rows in bundle.linear.groupby("op"):
        at = np.interp([1, 100, 1000, 4096], rows["num_tokens"], rows["time_us"])
        assert (np.diff(at) > 0).all()
    for _, rows in bundle.attn_prefill.groupby("chunk_tokens"):
        assert (np.diff(rows["time_us"]) > -0.05 * rows["time_us"][:-1]).all()
    long = bundle.attn_decode[bundle.attn_decode["context_tokens"] == 8192]
    assert long["time_us"].iloc[-1] > 20 * long["time_us"].iloc[0]


def test_tensor_parallel_ranks_do_less_than_the_whole() -> None:
    whole = shipped("a100-80g-sxm", "gpt3-175b", 1)
    rank = shipped("a100-80g-sxm", "gpt3-175b", 8)
    assert 6 < layer_us(whole, 4096) / layer_us(rank, 4096) < 8.5
    assert whole.all_reduce.empty and not rank.all_reduce.empty


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
        make_bundle(device, load_model(model), tp)
