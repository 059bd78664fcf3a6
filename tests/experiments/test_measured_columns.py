"""Spreads and backends are said, and change no time: readers ask for the columns they need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sarathi_sim.profiler.bundle.check import check_bundle
from sarathi_sim.profiler.bundle.schema import TABLES, Bundle, load_bundle
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.measuring.to_bundle import best_gemm, best_send
from sarathi_sim.simulator.confidence.held_out import op_tables
from sarathi_sim.simulator.op_times.regression import bundle_times
from tests.sampled import profile_folder


@pytest.fixture(scope="module")
def plain() -> Bundle:
    bundle = load_bundle(profile_folder("a100-80g-sxm", "llama-2-70b", 4))
    return replace(bundle, meta=replace(bundle.meta, content_sha256=""))


@pytest.fixture(scope="module")
def measured(plain: Bundle) -> Bundle:
    extras = {"spread_pct": 7.0, "power_w": 300.0, "sm_clock_mhz": 1400.0, "backend": "a, b"}
    tables = {
        name: frame.assign(**{column: extras[column] for column in TABLES[name].extras})
        for name, frame in plain.tables().items()
    }
    return replace(plain, **tables)


def test_fits_are_of_the_same_points(plain: Bundle, measured: Bundle) -> None:
    sizes = np.array([1.0, 100.0, 3000.0])
    for ours, theirs in zip(op_tables(plain), op_tables(measured), strict=True):
        assert ours.op == theirs.op
        assert np.array_equal(ours.points, theirs.points)
        assert np.array_equal(ours.time_s, theirs.time_s)
    one, other = bundle_times(plain), bundle_times(measured)
    for op in one.linear:
        assert np.array_equal(one.linear[op](sizes), other.linear[op](sizes))
    assert np.array_equal(one.prefill(sizes, sizes), other.prefill(sizes, sizes))
    assert np.array_equal(one.decode(sizes, sizes), other.decode(sizes, sizes))


def test_checks_are_of_the_same_points(plain: Bundle, measured: Bundle) -> None:
    device = load_device("a100-80g-sxm")
    assert check_bundle(measured, device) == check_bundle(plain, device)
    assert best_gemm([measured]) == best_gemm([plain])
    assert best_send([measured], "inter_node") == best_send([plain], "inter_node")
