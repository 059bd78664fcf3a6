"""The run in numbers, computed by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.loop.switches import Switches
from sarathi_sim.simulator.views.metrics import QUANTILES, Analysis, _spreads

UNIT = 2.0**-10
MODEL, DEVICE = load_model("llama-2-7b"), load_device("a40")


def predict(batch: Batch) -> tuple[float, float, float, float]:
    return (batch.prefill_tokens + batch.decode_context // 2) * UNIT, 0.0, 0.0, 0.0


def test_summary_by_hand() -> None:
    """The best-case schedule of test_by_hand.py, which lasts 35 units on two stages."""
    lengths = [(4, 3), (2, 2), (6, 2), (2, 2)]
    requests = [Request(i, 0.0, prompt, output, 8) for i, (prompt, output) in enumerate(lengths)]
    scheduler = MicroBatches(
        Orca(max_prefills=1), max_batch=2, max_in_flight=2, kv_capacity=64, max_length=16
    )
    records = simulate(requests, [scheduler], predict, (1, 1))
    summary = Analysis(records).summary(MODEL, DEVICE, tp=2)
    assert summary["makespan_s"] == 35 * UNIT
    assert summary["tokens_per_s"] == pytest.approx((14 + 9) / (35 * UNIT))
    assert summary["output_tokens_per_s"] == pytest.approx(9 / (35 * UNIT))
    assert summary["requests_per_s"] == pytest.approx(4 / (35 * UNIT))
    assert (summary["gpus"], summary["iterations"], summary["stage_executions"]) == (4, 6, 12)
    # A | B | C+a | D+b | a c | d
    assert summary["mean_batch"] == pytest.approx((1 + 1 + 2 + 2 + 2 + 1) / 6)
    # Request bubbles are 15, 0, 15, 0; those of both stages 7 and 8 of 35 each.
    assert summary["bubble_s"]["mean"] == pytest.approx(7.5 * UNIT)
    assert summary["bubble_share"] == pytest.approx((7 + 8) / 70)
    # Request A: first token at 8, last at 34, two tokens after the first.
    assert Analysis(records).requests["tpot_s"][0] == pytest.approx((34 - 8) / 2 * UNIT)
    # A 4, B 2; C+a adds 6 + 1, D+b 2 + 1, and a c 2 more before B leaves with its 3.
    assert summary["kv_peak_share"] == pytest.approx(18 / 64)
    processed = [prompt + output - 1 for prompt, output in lengths]
    # A token attends to those before it and itself: scores and weighted sum, 2 FLOPs each a number.
    attended = sum(sum(range(1, n + 1)) for n in processed)
    flops = (
        sum(processed) * MODEL.linear_flops_per_token()
        + 4 * MODEL.num_layers * MODEL.num_heads * MODEL.head_dim * attended
        + 9 * MODEL.lm_head_flops_per_token()
    )
    assert summary["mfu"] == pytest.approx(flops / (35 * UNIT * 4 * DEVICE.peak_flops))
    assert summary["ledger_s"]["wall"] == 70 * UNIT


def test_bubble_share_leaves_out_what_blocks_the_sender() -> None:
    def sends(batch: Batch) -> tuple[float, float, float, float]:
        return (*predict(batch)[:3], 3 * UNIT)

    requests = [Request(i, 0.0, 4, 3, 8) for i in range(4)]
    scheduler = MicroBatches(Orca(), max_batch=1, max_in_flight=2, kv_capacity=64, max_length=16)
    records = simulate(requests, [scheduler], sends, (1, 1), switches=Switches(blocking_send=True))
    found = Analysis(records)
    summary = found.summary(MODEL, DEVICE, tp=1)
    assert summary["ledger_s"]["sending"] == 3 * UNIT * 12
    assert summary["bubble_share"] * summary["ledger_s"]["wall"] == pytest.approx(
        found.iterations["bubble_s"].sum()
    )


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 10_007])
def test_spreads_are_to_the_bit_those_of_pandas(count: int) -> None:
    """Of columns that go together and of one that has gaps, hence another length."""
    columns = {name: np.random.default_rng(count + i).exponential(3.0, count)
               for i, name in enumerate("abc")}  # fmt: skip
    columns["b"][::5] = np.nan
    for name, found in _spreads(columns).items():
        series = pd.Series(columns[name], dtype=float)
        expected = [float(series.mean()), *series.quantile(list(QUANTILES)).tolist()]
        assert np.array_equal(list(found.values()), expected, equal_nan=True)
