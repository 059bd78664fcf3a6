"""The paper's claims: what is reproduced today stays reproduced; and what that is worth: marks,
controls, and how gains are scored.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from sarathi_sim.experiments.figures.style import styled
from sarathi_sim.experiments.paper import scrutiny
from sarathi_sim.experiments.paper.claims import (
    Claim,
    ClaimResult,
    counts_text,
    evaluate,
    gains,
    independent,
    load_claims,
    pick_claims,
    summary,
)
from sarathi_sim.experiments.paper.figures import bubbles, chunks, costs, throughput
from sarathi_sim.experiments.paper.figures.costs import Labs
from sarathi_sim.experiments.paper.figures.gallery import DPI, LOOK
from sarathi_sim.experiments.paper.figures.markdown import claims_table, gains_table
from sarathi_sim.experiments.paper.quantities import ORCA_BEST, end_to_end, gain, sarathi
from sarathi_sim.experiments.paper.scrutiny import load_scrutiny
from sarathi_sim.experiments.paper.variants import TILE, VARIANTS, Lab, Variant, load_calibration
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.paper.record import FILE

DRIFT = 0.03
"""How far a value may move before someone must look at it and write down the new one."""


def recorded() -> dict[str, dict[Variant, float]]:
    """Ours, as written down in reproduced.csv (record.py writes it)."""
    with FILE.open(encoding="utf-8") as file:
        return {
            row["id"]: {variant: float(row[variant]) for variant in VARIANTS}
            for row in csv.DictReader(file)
        }


@pytest.fixture(scope="module")
def results() -> list[ClaimResult]:
    labs = [Lab(variant) for variant in VARIANTS]
    return [evaluate(claim, lab) for claim in load_claims().values() for lab in labs]


@pytest.mark.slow
def test_nothing_reproduced_is_lost_or_moves_unnoticed(results: list[ClaimResult]) -> None:
    """Each value is within 3 % of the one written down, and as good or bad as that."""
    today = recorded()
    moved = []
    for result in results:
        before = today[result.claim.id][result.variant]
        same = result.ok == result.claim.holds(before)
        if not same or abs(result.ours - before) > DRIFT * abs(before) + 0.02:
            moved.append(f"{result.claim.id} ({result.variant}): {result.ours:.4g}, was {before}")
    assert moved == []


@pytest.mark.slow
def test_as_many_as_promised_and_only_the_named_claims_are_fitted(
    results: list[ClaimResult],
) -> None:
    counts = summary(results)
    assert counts["predicted"][0] >= 42
    assert counts["paper-calibrated"][0] >= 55
    named = load_calibration().fitted
    fitted = {(r.claim.id, r.variant) for r in results if r.fitted}
    assert fitted == {(id, "paper-calibrated") for id in named}
    assert len(named) <= 21


@pytest.mark.slow
def test_what_follows_from_fitted_claims_is_marked(results: list[ClaimResult]) -> None:
    """A claim that is a sum or a quotient of fitted ones is no prediction."""
    ours = {r.claim.id: r for r in results if r.variant == "paper-calibrated"}
    for scheme in ("prefill1024", "decode4", "mixed"):
        parts = [ours[f"{scheme}_{part}"] for part in ("linear", "attn", "total")]
        assert parts[0].ours + parts[1].ours == pytest.approx(parts[2].ours)
        assert all(part.fitted for part in parts)
    assert ours["decode4_per_token"].ours * 4 == pytest.approx(ours["decode4_total"].ours)
    marginal = ours["mixed_total"].ours - ours["prefill1024_total"].ours
    assert ours["mixed_decode_per_token"].ours * 3 == pytest.approx(marginal)
    assert ours["mixed_decode_per_token"].fitted


@pytest.mark.parametrize(
    ("kind", "ours", "not_ours"),
    [
        ("ratio", 11.5, 11.6),
        ("absolute", 8.5, 8.4),
        ("upper bound", 10.0, 10.1),
        ("lower bound", 10.0, 9.9),
        ("ordering", 10.0, 9.9),
    ],
)
def test_how_a_claim_is_judged(kind: str, ours: float, not_ours: float) -> None:
    claim = replace(load_claims()["tile_256"], paper=10.0, kind=kind)  # type: ignore[arg-type]
    assert claim.holds(ours) and not claim.holds(not_ours)


def test_a_row_has_what_readers_of_the_json_expect() -> None:
    claim = load_claims()["tile_257"]
    row = ClaimResult(claim, "predicted", 80.0, fitted=False).row()
    assert row["id"] == "tile_257" and row["paper"] == 92.33 and row["ours"] == 80.0
    assert row["status"] == "predicted" and row["variant"] == "predicted" and row["ok"] is True
    assert ClaimResult(claim, "paper-calibrated", 9.0, fitted=True).row()["status"] == "fitted"


def test_an_unknown_claim_is_named_with_what_is_meant() -> None:
    assert len(load_claims()) == 85 and load_claims().keys() == recorded().keys()
    with pytest.raises(UserError, match="tile_25: no such claim"):
        pick_claims(["tile_25"])
    assert [claim.id for claim in pick_claims(["tp_batch", "tile_128", "tp_batch"])] == [
        "tp_batch",
        "tile_128",
    ]
    assert all(isinstance(claim, Claim) for claim in pick_claims([]))


# What it is worth -------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[3]


def as_recorded() -> list[ClaimResult]:
    """Every claim in both variants, with the values that are written down."""
    fitted = Lab("paper-calibrated").fitted
    return [
        ClaimResult(claim, name, recorded()[id][name], name != "predicted" and id in fitted)
        for id, claim in load_claims().items()
        for name in VARIANTS
    ]


def test_a_gain_is_scored_on_what_is_gained() -> None:
    claim = load_claims()["orca_best_1k"]
    assert claim.is_gain and claim.holds(1.04) and not claim.gain_holds(1.04)
    assert claim.gain_holds(1.126) and claim.gain_holds(1.094)
    assert not claim.gain_holds(1.127) and not claim.gain_holds(1.093)
    assert not load_claims()["orca_worst"].is_gain, "there is nothing gained to score"
    some, counts = gains(as_recorded())
    assert {r.claim.id for r in some} == {
        *(f"peak_{m}_{k}k_gain" for m in ("13b", "33b") for k in (1, 2, 3)),
        *("pd_peak_256_gain", "pd_peak_512_gain", "ablation_e2e_128", "orca_best_1k"),
        *("typical_gain", "orca_peak_gain"),
        *(f"sarathi_{k}k" for k in (1, 2, 3)),
    }
    assert counts == {"predicted": (9, 15), "paper-calibrated": (4, 15)}


def test_the_counts_are_said_in_the_command_and_in_the_documents() -> None:
    """What nothing was fitted to is counted apart."""
    assert summary(as_recorded()) == {"predicted": (63, 85), "paper-calibrated": (70, 85)}
    apart = summary(independent(as_recorded()))
    assert apart == {"predicted": (50, 64), "paper-calibrated": (52, 64)}
    assert counts_text(as_recorded()) == [
        "predicted: 63 of 85 reproduced; 50 of the 64 that nothing was fitted to; "
        "9 of 15 gains on (gain - 1)",
        "paper-calibrated: 70 of 85 reproduced; 52 of the 64 that nothing was fitted to; "
        "4 of 15 gains on (gain - 1)",
    ]
    for file in ("README.md", "docs/paper.md"):
        text = " ".join((ROOT / file).read_text(encoding="utf-8").split())
        assert re.search(r"\b63\b.{0,200}\b70\b.{0,200}\b64 that nothing .{0,99}\b50\b", text), file


@pytest.mark.slow
def test_marks_are_what_is_computed() -> None:
    """Those of the claims that cost little, again."""
    cheap = ("max_batch_1k", "pp_batch", "tp_batch", "tile_256", "ablation_attn_64", "orca_worst")
    found = scrutiny.scrutinise(cheap)
    assert found == {id: load_scrutiny()[id] for id in cheap}
    assert found["tile_256"].passes < len(scrutiny.DISTORTIONS)
    assert load_scrutiny().keys() == load_claims().keys()


def test_claims_that_cannot_fail_or_that_no_gain_would_pass_are_marked() -> None:
    found = load_scrutiny()
    certain = {id for id, one in found.items() if one.cannot_fail}
    assert certain >= {"orca_worst", "max_batch_1k", "max_batch_2k", "max_batch_3k"}
    assert certain >= {"pp_batch", "tp_batch"}
    assert all(found[f"pd_peak_{chunk}_at"].unmoved for chunk in (256, 512))
    assert not any(id.endswith(("_decode", "_total")) for id in certain)
    assert {id for id, one in found.items() if one.no_gain} == {
        *("peak_33b_3k_gain", "orca_best_1k", "ablation_e2e_128", "ablation_e2e_64"),
        *("proj_reduction_min", "orca_worst", "typical_gain", "orca_peak_gain"),
        *("orca_best_2k", "orca_best_3k"),
    }
    ids = ("sarathi_1k", "peak_13b_1k_decode", "ablation_attn_64", "proj_reduction_max")
    assert scrutiny.values(scrutiny.NO_GAIN, ids) == pytest.approx([1.0] * len(ids), abs=0.06)


def test_the_tables_show_the_marks() -> None:
    results = as_recorded()
    rows = {row.split("`")[1]: row for row in claims_table(results).splitlines() if "`" in row}
    assert (
        f"| `orca_worst` | {scrutiny.CANNOT_FAIL} {scrutiny.NO_GAIN_PASSES} |" in rows["orca_worst"]
    )
    assert f"| {scrutiny.UNMOVED} |" in rows["pd_peak_256_at"]
    assert rows["tile_257"].startswith("| `tile_257` |  |")
    assert "| `orca_best_1k` | 11 % | **4.2 %** | **0.38** |" in gains_table(results)


def test_256_over_320_does_not_need_the_tile() -> None:
    """Its control holds: a prompt is four whole chunks of 239 tokens, and 3.2 of 303."""
    lab = Lab("predicted")
    result = evaluate(load_claims()["ablation_256_over_320"], lab)
    assert result.ok and result.control_holds
    assert scrutiny.CONTROL_HOLDS in scrutiny.marks([result])
    assert scrutiny.CONTROL_HOLDS not in scrutiny.marks([replace(result, control=0.0)])
    # The tile's step costs 320 something, and 256 next to nothing.
    added = {
        chunk: end_to_end(lab.untiled.a6000, chunk) - end_to_end(lab.a6000, chunk)
        for chunk in (256, 320)
    }
    assert added[320] > 0.02 and abs(added[256]) < added[320] / 4
    assert [id for id, claim in load_claims().items() if claim.control] == ["ablation_256_over_320"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_tiles_gemms_grow_evenly_between_whole_tiles(variant: str) -> None:
    lab = Lab(variant)  # type: ignore[arg-type]
    before, after = (machines.a6000.ops.linear["ffn_ln1"] for machines in (lab, lab.untiled))
    for rows in (1, 64, TILE, 2 * TILE, 5 * TILE):
        assert after(rows) == pytest.approx(before(rows))
    steps = np.diff([float(after(rows)) for rows in range(2 * TILE, 3 * TILE + 1)])
    assert steps == pytest.approx(np.full(TILE, steps[0]))
    assert float(before(2 * TILE + 1)) - float(before(2 * TILE)) > 5 * steps[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_fill_the_curves_are_as_the_paper_says(variant: str) -> None:
    """Chunk 512 above Orca's best case, and gains near 10 % from P:D 7 to 60; not with reserve."""
    machine = Lab(variant).a6000  # type: ignore[arg-type]
    filled, reserved, orca = (
        {pd: gain(machine, policy, 18, 1024, pd) for pd in (7, 14, 20, 28, 40, 60)}
        for policy in (sarathi(512, "fill"), sarathi(512), ORCA_BEST)
    )
    assert all(filled[pd] > orca[pd] for pd in filled if pd <= 40)
    assert reserved[40] < 1 < orca[40]
    smaller = {pd: gain(machine, sarathi(256, "fill"), 18, 1024, pd) for pd in filled}
    assert all(max(filled[pd], smaller[pd]) > 1.06 for pd in filled)


DRAWN = (
    chunks.attention_mask,
    costs.tile_quantisation,
    costs.decode_speedups,
    bubbles.bubble_schedule,
)


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_figures_are_legible_at_half_their_size(draw: object) -> None:
    """Each letter is at least nine pixels high there; the whole is no wider than a page."""
    labs: Labs = [Lab(variant) for variant in VARIANTS]
    assert callable(draw)
    with styled(), matplotlib.rc_context(LOOK):
        figure: Figure = draw(labs)
        figure.draw_without_rendering()
    assert figure.get_figwidth() * DPI <= 1100
    sizes = {t.get_fontsize() for t in figure.findobj(Text) if t.get_text() and t.get_visible()}
    assert min(sizes) * DPI / 72 / 2 >= 9


def test_both_chunk_rules_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of panels each, by length."""
    monkeypatch.setattr(throughput, "gains", lambda *_: {1.0: 1.0})
    figure = throughput.throughput_over_pd([Lab("predicted")] * 2)
    titles = [axes.get_title() for axes in figure.axes]
    assert [title.split("\n")[1].split(":")[0] for title in titles] == ["reserve"] * 3 + [
        "fill"
    ] * 3
