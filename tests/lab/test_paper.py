"""The paper's claims: what is reproduced stays so, what that is worth, and what the commands and
figures show. ``python -m tests.lab.test_paper`` writes reproduced.csv anew, once a change is meant.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.lab.paper import claims, figures, gpt3, quantities
from sarathi_sim.experiments.lab.paper.claims import ClaimResult, evaluate, load_claims
from sarathi_sim.experiments.lab.paper.gpt3 import Assumptions, changed, relevant, run
from sarathi_sim.experiments.lab.paper.quantities import balanced, policy_of
from sarathi_sim.experiments.lab.paper.variants import (
    TILE,
    VARIANTS,
    Constants,
    Lab,
    Variant,
    calibrated,
    shipped,
)
from sarathi_sim.experiments.run.machine import Machine
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.request import Sequence
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.profiler.facts.formats import TWO_BYTES
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, LAYER_OPS, OPS, ROW_OPS
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.op_times.iteration import WholeLayer
from tests.experiments.small_config import called, refused

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("reproduced.csv")
PAPER = load_claims()
DRIFT = 0.03
"""How far a value may move before someone must look at it and write down the new one."""


def recorded() -> dict[str, dict[Variant, float]]:
    with FILE.open(encoding="utf-8") as file:
        return {row["id"]: {v: float(row[v]) for v in VARIANTS} for row in csv.DictReader(file)}


def as_recorded() -> list[ClaimResult]:
    """Every claim in both variants, with the values that are written down."""
    values, fitted = recorded(), Lab("paper-calibrated").fitted
    return [
        ClaimResult(claim, name, values[id][name], name != "predicted" and id in fitted)
        for id, claim in PAPER.items()
        for name in VARIANTS
    ]


@pytest.mark.slow
def test_nothing_reproduced_is_lost_or_moves_unnoticed() -> None:
    """Each value is within 3 % of the one written down, and as good or bad as that. A claim that is
    a sum or a quotient of fitted ones is fitted."""
    results = claims.reproduce([*PAPER.values()], [Lab(name) for name in VARIANTS])
    moved, values = [], recorded()
    for result in results:
        before = values[result.claim.id][result.variant]
        same = result.ok == result.claim.holds(before)
        if not same or abs(result.ours - before) > DRIFT * abs(before) + 0.02:
            moved.append(f"{result.claim.id} ({result.variant}): {result.ours:.4g}, was {before}")
    assert moved == []
    named = claims.load_calibration().fitted
    assert len(named) <= 21
    fitted = {(r.claim.id, r.variant) for r in results if r.fitted}
    assert fitted == {(id, "paper-calibrated") for id in named}
    ours = {r.claim.id: r.ours for r in results if r.fitted}
    for scheme in ("prefill1024", "decode4", "mixed"):
        parts = ours[f"{scheme}_linear"] + ours[f"{scheme}_attn"]
        assert parts == pytest.approx(ours[f"{scheme}_total"])
    assert ours["decode4_per_token"] * 4 == pytest.approx(ours["decode4_total"])
    marginal = ours["mixed_total"] - ours["prefill1024_total"]
    assert ours["mixed_decode_per_token"] * 3 == pytest.approx(marginal)


def test_how_a_claim_is_judged() -> None:
    cases: dict[claims.Kind, tuple[float, float]] = {
        "ratio": (11.5, 11.6), "absolute": (8.5, 8.4), "upper bound": (10.0, 10.1),
        "lower bound": (10.0, 9.9), "ordering": (10.0, 9.9),
    }  # fmt: skip
    for kind, (ours, not_ours) in cases.items():
        claim = replace(PAPER["tile_256"], paper=10.0, kind=kind)
        assert claim.holds(ours) and not claim.holds(not_ours), kind


def test_a_gain_is_scored_on_what_is_gained() -> None:
    claim = PAPER["orca_best_1k"]
    assert claim.is_gain and claim.holds(1.04) and not claim.gain_holds(1.04)
    assert claim.gain_holds(1.126) and claim.gain_holds(1.094)
    assert not claim.gain_holds(1.127) and not claim.gain_holds(1.093)
    assert not PAPER["orca_worst"].is_gain, "there is nothing gained to score"
    some, _ = claims.gains(as_recorded())
    assert {result.claim.id for result in some} == {
        *(f"peak_{m}_{k}k_gain" for m in ("13b", "33b") for k in (1, 2, 3)),
        *("pd_peak_256_gain", "pd_peak_512_gain", "ablation_e2e_128", "orca_best_1k"),
        *("typical_gain", "orca_peak_gain", "sarathi_1k", "sarathi_2k", "sarathi_3k"),
    }


def test_the_counts_are_said_in_the_command_and_on_the_page() -> None:
    """What nothing was fitted to is counted apart."""
    assert PAPER.keys() == recorded().keys()
    assert claims.counts_text(as_recorded()) == [
        "predicted: 63 of 85 reproduced; 50 of the 64 that nothing was fitted to; "
        "9 of 15 gains on (gain - 1)",
        "paper-calibrated: 70 of 85 reproduced; 52 of the 64 that nothing was fitted to; "
        "4 of 15 gains on (gain - 1)",
    ]
    text = " ".join((ROOT / "docs/lab/paper.md").read_text(encoding="utf-8").split())
    assert re.search(r"\b63\b.{0,200}\b70\b.{0,200}\b64 that nothing .{0,99}\b50\b", text)


@pytest.mark.slow
def test_marks_are_what_is_computed() -> None:
    """Those of the claims that cost little, again."""
    cheap = ("max_batch_1k", "pp_batch", "tp_batch", "tile_256", "ablation_attn_64", "orca_worst")
    scrutiny = claims.scrutinise(cheap)
    assert scrutiny == {id: claims.load_scrutiny()[id] for id in cheap}
    assert not scrutiny["tile_256"].cannot_fail


def test_claims_that_cannot_fail_or_that_no_gain_would_pass_are_marked() -> None:
    scrutiny = claims.load_scrutiny()
    assert scrutiny.keys() == PAPER.keys()
    certain = {id for id, one in scrutiny.items() if one.cannot_fail}
    assert certain >= {"orca_worst", "max_batch_1k", "max_batch_2k", "max_batch_3k"}
    assert certain >= {"pp_batch", "tp_batch"}
    assert all(scrutiny[f"pd_peak_{chunk}_at"].unmoved for chunk in (256, 512))
    assert not any(id.endswith(("_decode", "_total")) for id in certain)
    assert {id for id, one in scrutiny.items() if one.no_gain} == {
        *("peak_33b_3k_gain", "orca_best_1k", "ablation_e2e_128", "ablation_e2e_64"),
        *("proj_reduction_min", "orca_worst", "typical_gain", "orca_peak_gain"),
        *("orca_best_2k", "orca_best_3k"),
    }
    ids = ("sarathi_1k", "peak_13b_1k_decode", "ablation_attn_64", "proj_reduction_max")
    values = claims.distorted_values(claims.NO_GAIN, ids)
    assert values == pytest.approx([1.0] * len(ids), abs=0.06)


def test_256_over_320_does_not_need_the_tile() -> None:
    """Its control holds: a prompt is four whole chunks of 239 tokens, and 3.2 of 303."""
    lab = Lab("predicted")
    assert [id for id, claim in PAPER.items() if claim.control] == ["ablation_256_over_320"]
    result = evaluate(PAPER["ablation_256_over_320"], lab)
    assert result.ok and result.control == 1.0
    assert claims.CONTROL_HOLDS in claims.marks([result])
    assert claims.CONTROL_HOLDS not in claims.marks([replace(result, control=0.0)])
    # The tile's step costs 320 something, and 256 next to nothing.
    one, other = (
        quantities.end_to_end(lab.untiled.a6000, n) - quantities.end_to_end(lab.a6000, n)
        for n in (256, 320)
    )
    assert other > 0.02 and abs(one) < other / 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_tiles_gemms_grow_evenly_between_whole_tiles(variant: Variant) -> None:
    lab = Lab(variant)
    before, after = (machines.a6000.ops.linear["ffn_ln1"] for machines in (lab, lab.untiled))
    for rows in (1, 64, TILE, 2 * TILE, 5 * TILE):
        assert after(rows) == pytest.approx(before(rows))
    steps = np.diff([float(after(rows)) for rows in range(2 * TILE, 3 * TILE + 1)])
    assert steps == pytest.approx(np.full(TILE, steps[0]))
    assert float(before(2 * TILE + 1)) - float(before(2 * TILE)) > 5 * steps[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_fill_the_curves_are_as_the_paper_says(variant: Variant) -> None:
    """Chunk 512 above Orca's best case, and gains near 10 % from P:D 7 to 60; not with reserve."""
    m = Lab(variant).a6000

    def gain(policy: quantities.Name, pd: int, rule: str = "fill") -> float:
        return quantities.gain(m, policy, 18, 1024, pd, rule)  # type: ignore[arg-type]

    assert all(gain(512, pd) > gain("orca_best", pd) for pd in (7, 14, 20, 28, 40))
    assert gain(512, 40, "reserve") < 1 < gain("orca_best", 40)
    assert all(max(gain(512, pd), gain(256, pd)) > 1.06 for pd in (7, 14, 20, 28, 40, 60))


# Commands and figures -----------------------------------------------------------------------------


def test_reproduce_writes_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "write_gallery", lambda *_: None)  # it takes a minute
    out = tmp_path / "out"
    words = ("lab", "reproduce", "tile_257", "tp_batch", "--out", str(out))
    output = called(*words).output
    rows = json.loads((out / "summary.json").read_text(encoding="utf-8"))["claims"]
    assert [(row["id"], row["variant"], row["status"]) for row in rows] == [
        ("tile_257", "predicted", "predicted"),
        ("tile_257", "paper-calibrated", "fitted"),
        ("tp_batch", "predicted", "predicted"),
        ("tp_batch", "paper-calibrated", "predicted"),
    ]
    assert rows[0]["paper"] == 92.33 and rows[0]["ok"] is True
    assert "predicted: 2 of 2 reproduced" in output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads(called(*words, "--json").stdout) == {"schema": 1, "claims": rows}
    one_variant = called("lab", "reproduce", "tp_batch", "--variant", "predicted").output
    assert "predicted: 1 of 1" in one_variant and "paper-calibrated" not in one_variant
    listing = called("lab", "reproduce", "--list").output
    assert all(f"{id} (section" in listing and c.reading in listing for id, c in PAPER.items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tile_25",), "tile_25: no such claim (did you mean tile_25"),
        (("tp_batch", "--variant", "predict"), "did you mean predicted"),
        (("tp_batch", "--json", "out.json"), "out.json: no such claim"),
    ],
)
def test_mistakes_give_one_message(words: tuple[str, ...], message: str) -> None:
    assert message in refused("lab", "reproduce", *words)


@pytest.mark.slow
def test_the_gallery_serves_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 4 is made from six claims; what the figures show besides is left out here."""
    served, serve = [], Machine.serve
    monkeypatch.setattr(
        Machine, "serve", lambda self, *words: served.append(words) or serve(self, *words)
    )
    monkeypatch.setattr(figures, "FIGURES", ())
    monkeypatch.setattr(figures, "_described", lambda: {"figures": {}})
    labs = [Lab(name) for name in VARIANTS]
    ids = [id for id in PAPER if re.match(r"peak_\d+b_.*_gain", id)]
    gains = claims.reproduce(claims.pick_claims(ids), labs)
    assert len(served) == 2 * len(gains) == 24, "ours and the baseline"
    figures.write_gallery(tmp_path, labs, None, lambda *_: None)
    assert len(served) == 24
    assert all(f"{gain.ours:.2f}" in (tmp_path / "tables.md").read_text() for gain in gains)
    ratios = defaultdict(lambda: gpt3.Ratios(1.0, 2.0, 3.0, 4.0, 5.0))
    monkeypatch.setattr(figures, "_all_ratios", lambda _: ratios)
    figures.write_gallery(tmp_path, labs, as_recorded(), lambda *_: None)
    tables = (tmp_path / "tables.md").read_text()
    assert "| `grid-padded` | 1.00 [1.00, 1.00] | 2.00 [2.00, 2.00] |" in tables
    assert len(re.findall("^## ", tables, re.MULTILINE)) == 6
    assert (tmp_path / "tornado.png").is_file()


def test_a_described_chart_shows_its_quantities_beside_the_papers() -> None:
    """What stands in braces is filled in; each named series is a quantity's values, the paper's
    are claims; and every figure names quantities that exist."""
    lab = Lab("predicted")
    prefill, decode = figures.quantity_charts("single_layer", [lab])
    l_128, *_, peak = prefill.series
    assert l_128.name == "L = 128" and l_128.x.tolist() == [1, 2, 4, 8, 16]
    assert l_128.y[1] == quantities.prefill_rate(lab.a6000, 128, 2)
    assert peak.y.tolist() == [PAPER["prefill_peak"].paper] * 2 and decode.edge == 256
    described = figures._described()["figures"]
    filled = figures._filled(described["throughput_over_pd"][0], {"rule": "fill", "length": 2048})
    assert filled["title"] == "2K, B = 10, fill: C - decodes"
    assert [one["x"] for one in filled["series"] if "x" in one] == [[balanced(256, 10)]]
    assert filled["series"][-1]["each"]["chunk 512"][1] == {"policy": 512, "rule": "fill"}
    parts = [one for panels in described.values() for panel in panels for one in panel["series"]]
    named = {one[key] for one in parts for key in ("curves", "bars", "totals") if key in one}
    assert named and all(hasattr(quantities, name) for name in named)


def test_the_schedule_has_the_papers_bubbles() -> None:
    """Under Orca the four requests leave more bubbles than under Sarathi (section 3.2)."""
    orca, sarathi = (
        figures.four_requests(Lab("predicted"), policy).requests["bubble_s"].sum()
        for policy in (Orca(max_prefills=1), Sarathi(256))
    )
    assert orca > 3 * sarathi > 0


# The parts of the claims against hand-computed values and independent sums

LAYERS = 40


def plain_ops(mixing_s: float = 0.0) -> Any:
    """Times one can compute by hand: 1 ms a layer, 2 us a row, 3 us a cached token of a decode."""
    model = load_model("llama-13b")
    by_rows = dict.fromkeys(ROW_OPS, lambda n: 0.0 * np.asarray(n))
    by_rows["preproj"] = lambda n: 1e-3 + 2e-6 * np.asarray(n)
    return SimpleNamespace(
        by_rows=by_rows,
        linear={op: by_rows[op] for op in LAYER_OPS},
        whole_layer=WholeLayer(both_s=mixing_s),
        all_reduce=None,
        reduces=OPS[ALL_REDUCE].calls,
        prefill=lambda chunk, context: 1e-9 * np.asarray(chunk) * (np.asarray(context) + 1),
        decode=lambda batch, context: 3e-9 * np.asarray(batch) * np.asarray(context),
        model=model,
        tp=1,
        numbers=TWO_BYTES,
        send={},
    )


def test_an_iteration_is_the_sum_of_its_ops() -> None:
    machine = Machine(plain_ops(mixing_s=1e-4), "a6000")
    mixed = machine.iteration([(100, 50)], decodes=4, context=1000)
    assert mixed.linear_s == pytest.approx(LAYERS * (1e-3 + 2e-6 * 104 + 1e-4))
    assert mixed.attention_s == pytest.approx(LAYERS * (1e-9 * 100 * 51 + 3e-9 * 4 * 1000))
    alone = machine.iteration(decodes=4, context=1000)
    assert alone.linear_s == pytest.approx(LAYERS * (1e-3 + 2e-6 * 4))  # nothing to mix


def test_a_machine_counts_whole_layers_as_the_predictor_does() -> None:
    """Every term, in an iteration of a chunk with decodes; contexts lie on the tables' grid."""
    terms = WholeLayer(scale=1.2, extra_s=3e-5, both=0.1, decode=0.3, both_s=2e-5)
    ops = replace(shipped("a6000", "llama-13b", 1), whole_layer=terms)
    machine = Machine(ops, "a6000")
    made = Batch(0, ((Sequence(0, 512, 1, 1), 256, 256),), 256, 4, 4 * 1024, 1024)
    layer_s, first_s, last_s, _ = machine.predictor(made)
    found = machine.iteration([(256, 256)], decodes=4, context=1024)
    assert found.total_s == pytest.approx(LAYERS * layer_s + first_s + last_s, rel=1e-6)
    parts = machine.iteration([(256, 256)]), machine.iteration(decodes=4, context=1024)
    assert found.attention_s == pytest.approx(sum(part.attention_s for part in parts))
    ops_s = sum(machine.block(260).values()) - 3e-5 + found.attention_s / LAYERS
    mixing = LAYERS * terms.mixing_s(ops_s, parts[1].attention_s / LAYERS)
    edges = float(machine.cost.first_s(260) + machine.cost.last_s(5))
    rows = machine.layers * sum(machine.block(260).values())
    assert found.linear_s == pytest.approx(rows + mixing + edges)


def test_quotients_of_iterations_by_hand() -> None:
    """40 layers of 1 ms and 2 us a row, 1 ns a query and key, 3 us a decode at context 1000."""
    machine = Machine(plain_ops(), "a6000")
    one, two = (LAYERS * (1e-3 + (2e-6 + 1e-9) * rows) for rows in (128, 256))
    assert quantities.iteration_growth(machine, 128, 256) == pytest.approx(100 * (two / one - 1))
    alone = LAYERS * (1e-3 + 4 * (2e-6 + 3e-9 * 1024)) / 4
    assert quantities.token_ms(machine, decodes=4) == pytest.approx(1e3 * alone)
    # Rows are as many; three pairs of query and key less, and three decodes' attention more.
    extra = LAYERS * (3 * 3e-9 * 1024 - 3 * 1e-9) / 3
    assert quantities.piggybacked_token_ms(machine, 1021, 3) == pytest.approx(1e3 * extra)
    assert quantities.piggybacked_decode_gain(machine, 4, 1021, 3) == pytest.approx(alone / extra)
    # (1 ms + 2 us B + 3 us B) / B over (2 us + 3 us), at context 1000 and B = 6.
    speedup = ((1e-3 + 6 * 5e-6) / 6) / 5e-6
    assert quantities.decode_speedup(machine, 6, 1000) == pytest.approx(speedup)
    parts = machine.prefill(600, chunk=256)  # 256, 256 and 88 tokens
    assert parts.linear_s == pytest.approx(LAYERS * (3 * 1e-3 + 2e-6 * 600))
    pairs = 256 * 1 + 256 * 257 + 88 * 513
    assert parts.attention_s == pytest.approx(LAYERS * 1e-9 * pairs)
    prefill = quantities.op_token_ms(machine, "preproj", "prefill", 2)
    assert prefill == pytest.approx(1e3 * LAYERS * (1e-3 + 2e-6 * 2048) / 2048)
    decode = quantities.op_token_ms(machine, "attention", "decode", 2)
    assert decode == pytest.approx(1e3 * LAYERS * 3e-9 * 1024)


def test_saturation_is_the_first_size_that_doubling_hardly_helps() -> None:
    rate = {1: 1.0, 2: 2.0, 4: 2.09, 8: 4.0}
    assert quantities.saturation(lambda n: rate[n], (1, 2, 4)) == 2
    assert quantities.saturation(float, (1, 2, 4)) == 8


@pytest.mark.parametrize(
    ("length", "batch", "stated", "chunks"),
    [(1024, 18, 14, 4), (1024, 6, 50, 4), (1024, 10, 28, 4), (2048, 5, 63, 8), (3072, 3, 127, 12)],
)
def test_the_papers_chunks_are_whole(length: int, batch: int, stated: int, chunks: int) -> None:
    """Each P:D at which the paper states a peak is the balanced one for chunk 256, rounded, and
    its prompt is a whole number of chunks of 256 - (B - 1) tokens, but for rounding."""
    assert balanced(256, batch) == pytest.approx(stated, abs=0.6)
    prompt, output = quantities.split(length, stated)
    assert prompt + output == length
    assert 0 <= chunks * (256 - (batch - 1)) - prompt <= 2


def test_the_baseline_serves_as_its_iterations_add_up() -> None:
    """B prompts together, then D - 1 iterations of B decodes; its rounds are alike."""
    machine = Lab("predicted").a6000
    batch, prompt, output = 6, 500, 12
    once, thrice = (
        machine.serve(policy_of("baseline"), batch, prompt, output, rounds) for rounds in (1, 3)
    )
    expected = machine.prefill(prompt, prompts=batch).total_s
    for step in range(output - 1):
        expected += machine.iteration(decodes=batch, context=prompt + step).total_s
    assert once.seconds == pytest.approx(expected, rel=2e-3)
    assert once.tokens == batch * (prompt + output)
    assert thrice.seconds == pytest.approx(3 * once.seconds)


@pytest.mark.parametrize("name", ["baseline", "orca_best", 256])
def test_seconds_by_op_add_up_to_the_run(name: quantities.Name) -> None:
    machine = Lab("paper-calibrated").a6000
    done = machine.serve(policy_of(name), 6, 500, 12, rounds=4)
    inside = sum(done.ops.values())
    assert inside < done.seconds < 1.02 * inside  # embedding and LM head come on top
    assert all(seconds >= 0 for seconds in done.ops.values())
    assert (done.ops["mixing"] > 0) == (name != "baseline")


def test_a_calibrated_gemm() -> None:
    """Its two limits, and a started tile that costs a whole one; without p all stays."""
    before = shipped("a6000", "llama-13b", 1)
    after = calibrated(before, Constants(read=1.5, compute=0.5, p=30.0, attn_decode=2.0))
    old, new = before.linear["ffn_ln1"], after.linear["ffn_ln1"]
    assert new(1) == pytest.approx(1.5 * old(1), rel=1e-6)  # memory-bound at such a p
    assert new(4096) == pytest.approx(0.5 * old(4096), rel=1e-6)
    assert new(1025) == pytest.approx(new(1152))
    assert new(1025) > new(1024)
    assert after.decode(4, 1000) == pytest.approx(2 * before.decode(4, 1000))
    assert after.prefill(64, 100) == before.prefill(64, 100)
    without_p = calibrated(before, Constants(read=3.0))
    assert without_p.linear["preproj"](300) == before.linear["preproj"](300), "as shipped"


def test_kept_tables_of_other_constants_are_not_mixed_up() -> None:
    """They are kept on disk by content."""
    before = shipped("a6000", "llama-13b", 1)
    sizes, contexts = np.arange(1.0, 4.0), np.array([1.0, 500.0])
    plain = before.decode.table(sizes, contexts)
    twice = calibrated(before, Constants(attn_decode=2.0)).decode.table(sizes, contexts)
    padded = changed(before, Assumptions(padded=True), 2048).decode.table(sizes, contexts)
    assert twice == pytest.approx(2 * plain)
    assert padded[:, 0] == pytest.approx(padded[:, 1])


def test_assumptions_change_op_times() -> None:
    ops = Lab("predicted").a6000.ops
    assert changed(ops, Assumptions(), 4096) is ops
    padded = changed(ops, Assumptions(padded=True), 2048)
    assert padded.decode(8, 100) == padded.decode(8, 2000) == ops.decode(8, 2048)
    scaled = changed(ops, Assumptions(factors=(("linear", 2.0), ("prefill", 3.0))), 2048)
    assert scaled.linear["preproj"](64) == pytest.approx(2 * ops.linear["preproj"](64))
    assert scaled.linear["others"](64) == pytest.approx(ops.linear["others"](64))
    assert scaled.prefill(64, 32) == pytest.approx(3 * ops.prefill(64, 32))
    assert scaled.decode(8, 100) == ops.decode(8, 100)


def test_runs_that_an_assumption_does_not_change_are_shared() -> None:
    pipeline_only = Assumptions(("engine.send=blocking", "batching.formation=lazy"))
    assert relevant(pipeline_only, gpt3.TP_ONLY) == Assumptions()
    assert relevant(pipeline_only, gpt3.ORCA) == pipeline_only
    both = Assumptions(("engine.jitter=0.05", "engine.send=blocking"), padded=True)
    assert relevant(both, gpt3.TP_ONLY) == Assumptions(("engine.jitter=0.05",), padded=True)
    chunk = Assumptions((f"scenarios.{gpt3.SARATHI}.policy.chunk_size=512",))
    assert relevant(chunk, gpt3.SARATHI) == chunk
    assert relevant(chunk, gpt3.ORCA) == relevant(chunk, gpt3.TP_ONLY) == Assumptions()


def test_without_a_pipeline_sends_and_formation_make_no_difference() -> None:
    machine, few = Lab("predicted").machine(*gpt3.GPT3), "workload.requests=200"
    plain, changed_too = (
        run(machine, gpt3.TP_ONLY, Assumptions((few, *settings))).end_s
        for settings in ((), ("engine.send=blocking", "batching.formation=lazy"))
    )
    assert plain == changed_too


def test_waiting_by_hand() -> None:
    """What is left of a request's time without its micro-batches' stages and links, one by one."""
    lab, few = Lab("predicted"), "workload.requests=60"
    records = run(lab.machine(*gpt3.GPT3), gpt3.SARATHI, Assumptions((few,)))
    log = records.replicas[0]
    times, rows = stage_times(log), log.iterations
    of_group = {g: np.flatnonzero(rows["group"] == g) for g in np.unique(rows["group"])}
    parts: dict[int, list[int]] = {}
    for request, _, group, first, last in log.spans.tolist():
        parts.setdefault(request, []).extend(of_group[group][first : last + 1].tolist())
    waits = []
    for _, own in sorted(parts.items()):
        served = (times.finish[own] - times.start[own]).sum() + 7 * rows["send_s"][own].sum()
        waits.append(rows["finish_s"][max(own)] - rows["ready_s"][min(own)] - served)
    assert gpt3.request_waits(records) == pytest.approx(waits, abs=1e-9)
    assert min(waits) >= -1e-9


def test_one_layer_and_intensity_by_hand() -> None:
    """An op's intensity at m rows is m n k / (m k + k n + m n); a decode's at 1024 is near 1."""
    machine = Lab("predicted").a6000  # its output projection is 5120 x 5120
    found = quantities.intensity(machine, "postproj", 1024, 1)
    assert found == pytest.approx(1024 * 5120 / (2 * 1024 + 5120))
    assert quantities.attention_intensity(machine, 1) == pytest.approx(1024 / 1025)
    usable, weights = 0.9 * machine.device.memory_bytes, 2 * 13.016e9
    assert quantities.batch_ratio(machine, 1024, layers=1) > machine.layers, (
        "the weights shrink, too"
    )
    a_request = 1024 * 40 * 2 * 2 * 5120
    assert quantities.fitting_batch(machine, 1024) == (usable - weights) // a_request


def test_claims_say_the_ratio_that_is_computed() -> None:
    """At the batch of their setting, of prompts in chunks of 256: a decode fewer than that fills
    an iteration."""
    pattern = re.compile(r"batch (\d+), P:D = (\d+)/(\d+)")
    found = [match for c in load_claims().values() if (match := pattern.search(c.setting))]
    assert len(found) == 6
    for batch, tokens, decodes in (map(int, match.groups()) for match in found):
        assert balanced(256, batch) == tokens / decodes


if __name__ == "__main__":
    labs = [Lab(variant) for variant in VARIANTS]
    lines = [
        ",".join([id, *(f"{evaluate(claim, lab).ours:.5g}" for lab in labs)])
        for id, claim in PAPER.items()
    ]
    FILE.write_text("\n".join([",".join(["id", *VARIANTS]), *lines]) + "\n", encoding="utf-8")
