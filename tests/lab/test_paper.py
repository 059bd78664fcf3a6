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

import numpy as np
import pytest

from sarathi_sim.experiments.lab.paper import claims, figures, gpt3, quantities
from sarathi_sim.experiments.lab.paper.claims import ClaimResult, evaluate, load_claims
from sarathi_sim.experiments.lab.paper.variants import TILE, VARIANTS, Lab, Variant
from sarathi_sim.experiments.run.machine import Machine
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.sarathi import Sarathi
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
        "ratio": (11.5, 11.6),
        "absolute": (8.5, 8.4),
        "upper bound": (10.0, 10.1),
        "lower bound": (10.0, 9.9),
        "ordering": (10.0, 9.9),
    }
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
    assert len({result.claim.id for result in some}) == 15


def test_the_counts_are_said_in_the_command_and_in_the_documents() -> None:
    """What nothing was fitted to is counted apart."""
    assert PAPER.keys() == recorded().keys()
    assert claims.counts_text(as_recorded()) == [
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
    assert scrutiny["orca_best_1k"].no_gain and not scrutiny["sarathi_1k"].no_gain
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
    assert json.loads(called(*words, "--json").stdout) == {"claims": rows}
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


def test_the_schedule_has_the_papers_bubbles() -> None:
    """Under Orca the four requests leave more bubbles than under Sarathi (section 3.2)."""
    orca, sarathi = (
        figures.four_requests(Lab("predicted"), policy).requests["bubble_s"].sum()
        for policy in (Orca(max_prefills=1), Sarathi(256))
    )
    assert orca > 3 * sarathi > 0


if __name__ == "__main__":
    labs = [Lab(variant) for variant in VARIANTS]
    lines = [
        ",".join([id, *(f"{evaluate(claim, lab).ours:.5g}" for lab in labs)])
        for id, claim in PAPER.items()
    ]
    FILE.write_text("\n".join([",".join(["id", *VARIANTS]), *lines]) + "\n", encoding="utf-8")
