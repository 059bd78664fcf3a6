"""Whole layers and skewed decodes: known effects are found again, and told from the ops' sum; and
where the errors of a bundle's ops come from."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.profiler.bundle.schema import TABLES, Bundle
from sarathi_sim.profiler.planning.grid import default_limits, designed_points
from sarathi_sim.profiler.storage.files import public_datasets
from sarathi_sim.simulator.confidence.bands import UNKNOWN
from sarathi_sim.simulator.confidence.op_errors import NORMAL_90, layer_error, op_errors
from sarathi_sim.simulator.loop.clock import QUANTUM_S
from sarathi_sim.simulator.op_times import interaction
from sarathi_sim.simulator.op_times.regression import bundle_times
from tests.sampled import needs_datasets
from tests.simulator.test_predictor import batch, predictor, simple_bundle

LIMITS = default_limits("cpu", 1024)


def attention_bundle() -> Bundle:
    """Attention weighs as much as the linear ops."""
    bundle = simple_bundle()
    return replace(bundle, linear=bundle.linear.assign(time_us=bundle.linear["time_us"] / 50))


def layers(bundle: Bundle, true: interaction.WholeLayer, noise: float = 0.0) -> pd.DataFrame:
    """What whole layers would take if ``true`` held, at the points that are measured."""
    ops, rng = bundle_times(bundle), np.random.default_rng(0)
    rows = []
    for chunk, context, decodes, held in designed_points("mixed", LIMITS):
        decode = float(ops.decode(decodes, held)) if decodes else 0.0
        total = decode + sum(float(op(chunk + decodes)) for op in ops.linear.values())
        total += float(ops.prefill(chunk, context)) if chunk else 0.0
        more = true.both * total + true.decode * decode if chunk and decodes else 0.0
        seconds = true.scale * (total + more) + true.extra_s
        time_us = 1e6 * seconds * float(np.exp(noise * rng.normal()))
        rows.append((chunk, context, decodes, held, time_us))
    return pd.DataFrame(rows, columns=list(TABLES["mixed"].columns))


def skewed(share: float) -> pd.DataFrame:
    """``simple_bundle``'s decode attention, 3 + 0.01 b c us, with an effective context."""
    points = [(b, 100, 100 * f) for b in (2, 4, 8) for f in (1, 2)] + [(8, 100, 600)]
    rows = [(b, c, m, 3 + 0.01 * b * (c + share * (m - c))) for b, c, m in points]
    return pd.DataFrame(rows, columns=list(TABLES["attn_decode_skew"].columns))


@pytest.mark.parametrize(
    "true",
    [
        interaction.WholeLayer(1.3, 0.0, 0.0, 0.0),
        interaction.WholeLayer(0.9, 30e-6, 0.0, 0.0),
        interaction.WholeLayer(1.0, 0.0, 0.2, 0.0),
        interaction.WholeLayer(1.1, 20e-6, 0.0, 0.8),
        interaction.WholeLayer(1.0, 0.0, -0.2, 1.5),
    ],
)
def test_a_known_effect_is_found(
    true: interaction.WholeLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = attention_bundle()
    found = interaction.fit_whole_layer(bundle_times(bundle), layers(bundle, true))
    # The prior holds every term back, by less than a fifth here; without it they are exact.
    for term in ("both", "decode"):
        assert getattr(found, term) == pytest.approx(getattr(true, term), rel=0.2, abs=0.06)
    monkeypatch.setattr("sarathi_sim.simulator.op_times.interaction._PRIOR", 1e-12)
    exact = interaction.fit_whole_layer(bundle_times(bundle), layers(bundle, true))
    assert astuple(exact) == pytest.approx(astuple(true), rel=1e-5, abs=1e-5)


def test_without_the_tables_the_sum_and_the_mean_stand() -> None:
    ops = bundle_times(simple_bundle())
    assert ops.whole_layer == interaction.SUM
    assert ops.skew == interaction.MEAN
    assert interaction.interaction_errors(simple_bundle(), ops).empty
    assert interaction.skew_errors(simple_bundle(), ops).empty


def test_held_out_errors_are_of_points_that_the_fit_did_not_see() -> None:
    """One size takes twice as long: no fit to the others can know, so half of it is missing."""
    bundle = attention_bundle()
    mixed = layers(bundle, interaction.WholeLayer(1.2, 0.0, 0.1, 0.3))
    odd = (mixed["chunk_tokens"] + mixed["batch_size"] == 128).to_numpy()
    mixed.loc[odd, "time_us"] *= 2
    errors = interaction.interaction_errors(replace(bundle, mixed=mixed), bundle_times(bundle))
    assert errors["measured"][odd].median() == pytest.approx(50, abs=2)
    honest = interaction.interaction_errors(
        replace(bundle, mixed=layers(bundle, interaction.WholeLayer(1.2, 0.0, 0.1, 0.3))),
        bundle_times(bundle),
    )
    assert honest["measured"].max() < 2
    alone = honest["kind"] != "mixed"
    assert honest["sum"][alone].to_numpy() == pytest.approx(100 * (1 - 1 / 1.2))
    assert honest["sum"][~alone].min() > 100 * (1 - 1 / 1.32)
    assert set(honest["kind"]) == {"mixed", "prefill", "decode"}


def test_the_predictor_takes_whole_layers_or_the_sum() -> None:
    bundle = simple_bundle()
    true = interaction.WholeLayer(1.25, 40e-6, 0.1, 0.5)
    mixed = replace(bundle, mixed=layers(bundle, true))
    found = bundle_times(mixed).whole_layer
    plain, whole = predictor(bundle), predictor(mixed)
    beside = 14e-6 if bundle.meta.tp > 1 else 0.0  # two all-reduces
    chunk, decodes = batch((500, 100, 50)), batch(decodes=4, context=400)
    both = batch((500, 100, 50), decodes=4, context=400)
    for work in (chunk, decodes):
        ops = plain(work)[0] - beside
        expected = found.scale * ops + found.extra_s + beside
        assert whole(work)[0] == pytest.approx(expected, abs=3 * QUANTUM_S)
    decode_s = (3 + 0.01 * 4 * 100) * 1e-6
    ops = plain(both)[0] - beside
    expected = found.scale * (ops * (1 + found.both) + found.decode * decode_s) + found.extra_s
    assert whole(both)[0] == pytest.approx(expected + beside, abs=3 * QUANTUM_S)
    assert predictor(mixed, layer_time="sum")(both) == plain(both)
    assert whole(both)[1:] == plain(both)[1:]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_effective_context_is_found_and_used(share: float) -> None:
    bundle = simple_bundle()
    with_skew = replace(bundle, attn_decode_skew=skewed(share))
    ops = bundle_times(with_skew)
    assert ops.skew.share == pytest.approx(share, abs=1e-3)
    errors = interaction.skew_errors(with_skew, ops)
    assert errors["skew"].max() < 0.1
    if share:
        assert errors["mean"].max() > 10
    equal, longer = batch(decodes=4, context=400), batch(decodes=4, context=400, longest=300)
    even = batch(decodes=4, context=4 * round(100 + share * 200))
    assert predictor(with_skew)(longer)[0] == pytest.approx(
        predictor(bundle)(even)[0], abs=3 * QUANTUM_S
    )
    assert predictor(bundle)(longer) == predictor(bundle)(equal)


def test_a_skew_error_is_of_batches_that_the_fit_did_not_see() -> None:
    """Batches of 8 pad, the others do not: what the others say of them is far off."""
    rows = skewed(0.0)
    odd = (rows["batch_size"] == 8).to_numpy()
    rows.loc[odd, "time_us"] = skewed(1.0)["time_us"][odd]
    bundle = replace(simple_bundle(), attn_decode_skew=rows)
    errors = interaction.skew_errors(bundle, bundle_times(bundle))
    assert errors["skew"][odd].to_numpy() == pytest.approx(errors["mean"][odd].to_numpy())
    assert errors["longest"][odd].max() < 0.1


def test_larger_batches_fill_what_short_contexts_leave() -> None:
    """By hand: three quarters of the way up to 4 sequences, and a quarter of that for 8."""
    law = interaction.Skew(0.75, 4.0)
    assert [law.of(batch) for batch in (1, 4, 8)] == [0.75, 0.75, 0.1875]
    points = [(b, 100, m) for b in (2, 4, 8, 16) for m in (150, 200)]
    rows = [(b, c, m, 3 + 0.01 * b * (c + law.of(b) * (m - c))) for b, c, m in points]
    skewed = pd.DataFrame(rows, columns=list(TABLES["attn_decode_skew"].columns))
    found = interaction.fit_skew(bundle_times(simple_bundle()).decode, skewed)
    assert astuple(found) == pytest.approx(astuple(law), rel=1e-2)


def test_a_correction_that_does_not_carry_over_is_not_taken() -> None:
    """One batch size waits for its longest, and no other: from the others nothing is learned of
    it, and it would spoil theirs."""
    rows = skewed(0.0)
    odd = (rows["batch_size"] == 4).to_numpy()
    rows.loc[odd, "time_us"] = skewed(1.0)["time_us"][odd]
    alone = skewed(1.0)[lambda frame: frame["batch_size"] == 8]  # one says nothing of others
    for each in (rows, alone):
        assert interaction.fit_skew(bundle_times(simple_bundle()).decode, each) == interaction.MEAN


def marked(**marks: str) -> Bundle:
    """``simple_bundle``, of a device that nothing was fitted for, with origins of its ops."""
    bundle = simple_bundle()
    return replace(bundle, meta=replace(bundle.meta, environment=dict(marks)))


def test_what_was_measured_has_its_own_error_alone() -> None:
    for error in op_errors(bundle_times(simple_bundle())).values():
        assert (error.common, error.local) == (0.0, 0.0)


@pytest.mark.parametrize("mark", ["interpolated", "modelled: from ffn_ln1", "scaled"])
def test_a_model_that_nothing_is_known_of_is_not_exact(mark: str) -> None:
    """No calibration of the device says how good it is, so the assumed error stands in."""
    found = op_errors(bundle_times(marked(preproj=mark)))
    guessed, measured = found["preproj"], found["postproj"]
    assert np.hypot(guessed.common, guessed.local) == pytest.approx(UNKNOWN / NORMAL_90)
    assert measured.local == 0.0
    at = np.array([[128.0]])
    assert guessed.sigmas(at) > measured.sigmas(at)


def test_whole_layers_are_off_by_their_noise() -> None:
    bundle, noise = attention_bundle(), 0.1
    true = interaction.WholeLayer(1.2, 0.0, 0.1, 0.3)
    noisy = replace(bundle, mixed=layers(bundle, true, noise))
    exact = replace(bundle, mixed=layers(bundle, true))
    assert layer_error(bundle_times(noisy)).local == pytest.approx(noise, rel=0.4)
    # The terms are drawn towards none by their prior, which is all that is left here.
    assert layer_error(bundle_times(exact)).local < 0.02


# On a GPU that others measured: vLLM's attention of mixed batches, RTX 4090 (LLMServingSim
# @5daddb2, Llama-3.1-8B: 8,448 mixed cells, each part measured alone as well). Attention only; the
# linear ops around it are summed from the same source


LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "act_fn", "rotary_emb")


def mixed_layers(folder: Path) -> interaction._Layers:
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
    return interaction._Layers(
        tokens,
        (linear + attention) * 1e-6,
        (linear + np.array(prefill) + np.array(decode)) * 1e-6,
        np.array(decode) * 1e-6,
        np.ones(len(mixed), dtype=bool),
    )


def errors(layers: interaction._Layers, terms: interaction.WholeLayer) -> tuple[float, float]:
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
        terms.append(interaction._fit_layer(layers.take(fitted)))
        found.append(errors(layers.take(~fitted), terms[-1]))
    median, p95 = np.median(found, axis=0)
    of_sum = errors(layers, interaction.SUM)
    assert of_sum == pytest.approx((4.7, 49.6), abs=0.2)
    assert median < 4.0
    assert p95 < 33.0
    # Decodes beside a chunk take about twice as long as alone.
    assert 0.8 < np.median([t.decode for t in terms]) < 1.5
