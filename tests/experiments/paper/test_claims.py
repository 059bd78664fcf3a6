"""The paper's claims: what is reproduced today stays reproduced."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.paper.claims import (
    Claim,
    ClaimResult,
    evaluate,
    load_claims,
    pick_claims,
    summary,
)
from sarathi_sim.experiments.paper.variants import VARIANTS, Lab, Variant, load_calibration
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
    with pytest.raises(ConfigError, match="tile_25: no such claim"):
        pick_claims(["tile_25"])
    assert [claim.id for claim in pick_claims(["tp_batch", "tile_128", "tp_batch"])] == [
        "tp_batch",
        "tile_128",
    ]
    assert all(isinstance(claim, Claim) for claim in pick_claims([]))
