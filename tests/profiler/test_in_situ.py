"""The bundle of a running engine: medians and spreads of repeated micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sarathi_sim.profiler.bundle.schema import load_bundle, write_bundle
from sarathi_sim.profiler.engine.processes import StageLog
from sarathi_sim.profiler.engine.spec import TIMED_OPS, EngineSpec
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.measuring.to_bundle import GridWork, in_situ_bundle

WORKS: list[GridWork] = [
    ([], [(1, 10)]),
    ([], [(1, 10), (2, 30)]),
    ([(0, 64, 0, 1)], []),
    ([(0, 62, 0, 1)], [(1, 20), (2, 20)]),
]


def test_repeats_become_a_median_and_a_spread(tmp_path: Path) -> None:
    """Each op of the k-th work takes 10 (k + 1) us a layer, times 1, 1.2 and 1.8 in turn."""
    spec = EngineSpec(load_model("tiny-llama-40m"), (2,), 1, 4, 128, 64)
    factors = np.repeat([1.0, 1.2, 1.8], len(WORKS))
    base_s = np.tile(10e-6 * np.arange(1, len(WORKS) + 1), 3) * factors
    ops = np.zeros((len(factors), 1, len(TIMED_OPS) + 2))
    ops[:, 0, : len(TIMED_OPS)] = 2 * base_s[:, None]
    ops[:, 0, len(TIMED_OPS)] = 2 * 8 * base_s
    ops[:, 0, len(TIMED_OPS) + 1] = base_s
    start = np.zeros((len(factors), 1))
    finish = (17.5 * base_s)[:, None]
    log = StageLog(start, start, finish, finish, ops)
    bundle = in_situ_bundle(spec, 3 * WORKS, log, 1e-4, "in-situ")
    write_bundle(bundle, tmp_path / "b")
    read = load_bundle(tmp_path / "b")
    # The quartiles of 1, 1.2 and 1.8 are 1.1 and 1.5.
    scatter = pytest.approx(100 * 0.4 / 1.2, abs=1e-3)
    for table, times in (("attn_decode", 12.0), ("attn_decode_skew", 24.0), ("attn_prefill", 36.0)):
        assert read.tables()[table]["time_us"].tolist() == pytest.approx([times])
        assert read.tables()[table]["spread_pct"].tolist() == [scatter]
    assert read.mixed["time_us"].tolist() == pytest.approx([8 * 48.0])
    assert read.mixed["spread_pct"].tolist() == [scatter]
    preproj = read.linear[read.linear["op"] == "preproj"].set_index("num_tokens")
    assert preproj.loc[1, "time_us"] == pytest.approx(12.0)
    assert preproj.loc[1, "spread_pct"] == scatter
    assert "spread_pct" not in read.send_recv  # one number for all sizes, as it is calibrated
