"""The mixing terms on a GPU that others measured: vLLM's attention of mixed batches, RTX 4090.

LLMServingSim @5daddb2, Llama-3.1-8B: 8,448 mixed cells with the prefill and the decodes of each
measured alone as well. Not our measurement, and attention only; the linear ops around it are summed
from the same source.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.profiler.storage.files import public_datasets
from sarathi_sim.simulator.op_times.interaction import _fit_layer, _Layers
from sarathi_sim.simulator.op_times.op_times import SUM, WholeLayer
from tests.sampled import needs_datasets

LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "act_fn", "rotary_emb")


def mixed_layers(folder: Path) -> _Layers:
    cells = pd.read_csv(folder / "attention.csv")
    names = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
    alone = {tuple(row[:4]): row[4] for row in cells[[*names, "time_us"]].to_numpy()}
    mixed = cells[(cells["prefill_chunk"] > 0) & (cells["n_decode"] > 0)]
    prefill = [alone[chunk, held, 0, 0] for chunk, held, _, _ in mixed[names].to_numpy()]
    decode = [alone[0, 0, count, held] for _, _, count, held in mixed[names].to_numpy()]
    tokens = (mixed["prefill_chunk"] + mixed["n_decode"]).to_numpy(np.int64)
    dense = pd.read_csv(folder / "dense.csv")
    linear = np.zeros(len(mixed))
    for layer in (*LINEAR, "layernorm", "layernorm"):
        rows = dense[dense["layer"] == layer]
        linear += np.interp(tokens, rows["tokens"], rows["time_us"])
    attention = mixed["time_us"].to_numpy(np.float64)
    return _Layers(
        tokens,
        (linear + attention) * 1e-6,
        (linear + np.array(prefill) + np.array(decode)) * 1e-6,
        np.array(decode) * 1e-6,
        np.ones(len(mixed), dtype=bool),
    )


def errors(layers: _Layers, terms: WholeLayer) -> tuple[float, float]:
    """Median and p95, percent."""
    off = 100 * np.abs(layers.predict(terms) / layers.time - 1)
    return float(np.median(off)), float(np.percentile(off, 95))


@needs_datasets
def test_a_few_cells_tell_what_decodes_cost_beside_a_chunk() -> None:
    layers = mixed_layers(public_datasets() / "llmservingsim_rtx4090")
    assert len(layers.time) == 8448
    found, terms = [], []
    rng = np.random.default_rng(0)
    for _ in range(20):
        fitted = np.zeros(len(layers.time), dtype=bool)
        fitted[rng.choice(len(fitted), 24, replace=False)] = True
        terms.append(_fit_layer(layers.take(fitted)))
        found.append(errors(layers.take(~fitted), terms[-1]))
    median, p95 = np.median(found, axis=0)
    of_sum = errors(layers, SUM)
    assert of_sum == pytest.approx((4.7, 49.6), abs=0.2)
    assert median < 4.0
    assert p95 < 33.0
    # Decodes beside a chunk take about twice as long as alone.
    assert 0.8 < np.median([t.decode for t in terms]) < 1.5
