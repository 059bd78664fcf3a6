"""Each physics form in a case that can be computed by hand."""

from __future__ import annotations

import numpy as np

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

HARDWARE = {"peak_flops": 100e12, "bandwidth": 1e12, "num_sms": 100.0}
#: A soft maximum this sharp is a hard one.
HARD = 200.0


def columns(**inputs: float) -> dict[str, Array]:
    return {name: np.array([float(v)]) for name, v in {**HARDWARE, **inputs}.items()}


def test_soft_max_lies_between_the_larger_and_the_sum() -> None:
    a, b = np.array([3.0, 0.0]), np.array([4.0, 2.0])
    np.testing.assert_allclose(soft_max(2.0, a, b), [5.0, 2.0])
    np.testing.assert_allclose(soft_max(HARD, a, b), [4.0, 2.0], rtol=1e-6)


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


def test_waves() -> None:
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
