"""The paper's claims, and the registry of functions that compute our values."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.paper.register import CLAIM_READINGS, ClaimReading
from sarathi_sim.experiments.paper.variants import Lab, Variant
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.strict import did_you_mean

TOLERANCE = 0.15
"""How far a value may be from the paper's to count as reproduced."""

Kind = Literal["ratio", "absolute", "upper bound", "lower bound", "ordering"]


@dataclass(frozen=True)
class Claim:
    """One number of the paper: row of ``data/paper/claims.csv``.

    ``kind`` says how ours is judged: within :data:`TOLERANCE` (ratio, absolute), on the right side
    (bounds), or equal (ordering: 1 if it holds, else 0).
    """

    id: str
    section: str
    model: str
    device: str
    parallelism: str
    setting: str
    metric: str
    paper: float
    unit: str
    kind: Kind

    def holds(self, ours: float) -> bool:
        """Whether our value reproduces the claim."""
        if self.kind == "upper bound":
            return ours <= self.paper
        if self.kind == "lower bound":
            return ours >= self.paper
        if self.kind == "ordering":
            return ours == self.paper
        return abs(ours - self.paper) <= TOLERANCE * self.paper

    @property
    def is_gain(self) -> bool:
        """Whether it is a gain in throughput over the baseline."""
        return "throughput gain" in self.metric and self.paper > 1

    def gain_holds(self, ours: float) -> bool:
        """Whether our gain minus 1 is within :data:`TOLERANCE` of the paper's gain minus 1."""
        return abs(ours - self.paper) <= TOLERANCE * (self.paper - 1)


@dataclass(frozen=True)
class ClaimResult:
    """A claim, in one variant."""

    claim: Claim
    variant: Variant
    ours: float
    reading: str
    fitted: bool
    control: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the claim is reproduced."""
        return self.claim.holds(self.ours)

    @property
    def control_holds(self) -> bool:
        """Whether it is reproduced without the reason that the paper gives, too."""
        return self.control is not None and self.claim.holds(self.control)

    @property
    def ratio(self) -> float:
        """Ours / the paper's."""
        return self.ours / self.claim.paper

    def row(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "id": self.claim.id,
            "variant": self.variant,
            "paper": self.claim.paper,
            "ours": self.ours,
            "ratio": self.ratio,
            "status": "fitted" if self.fitted else "predicted",
            "ok": self.ok,
            "kind": self.claim.kind,
            "section": self.claim.section,
            "metric": self.claim.metric,
            "setting": f"{self.claim.model}, {self.claim.device}, {self.claim.parallelism}: "
            f"{self.claim.setting}",
            "reading": self.reading,
            "control": self.control,
        }


def readings() -> dict[str, ClaimReading]:
    """Every claim's reading, by id."""
    from sarathi_sim.experiments.paper import (  # noqa: F401  (they register theirs)
        ablation,
        costs,
        decode_speedup,
        gpt3,
        throughput,
    )

    return CLAIM_READINGS


@cache
def load_claims() -> dict[str, Claim]:
    """Every claim by id, in the order of the paper."""
    with (data_dir() / "paper" / "claims.csv").open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return {row["id"]: Claim(**{**row, "paper": float(row["paper"])}) for row in rows}


def pick_claims(ids: Iterable[str]) -> list[Claim]:
    """The named claims, or all of them. Raises ConfigError for an id that does not exist."""
    claims = load_claims()
    wanted = list(dict.fromkeys(ids))
    for id in wanted:
        if id not in claims:
            raise ConfigError(
                f"{id}: no such claim{did_you_mean(id, claims)}; `sarathi-sim reproduce --list` "
                "shows all of them"
            )
    return [claims[id] for id in wanted] or list(claims.values())


def evaluate(claim: Claim, lab: Lab) -> ClaimResult:
    """Our value of one claim."""
    reading = readings()[claim.id]
    ours = float(reading.compute(lab))
    control = None if reading.control is None else float(reading.control(lab))
    return ClaimResult(claim, lab.variant, ours, reading.text, claim.id in lab.fitted, control)
