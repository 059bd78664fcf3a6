"""The paper's claims (``data/paper/claims.yaml``), and our values of them in both variants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from sarathi_sim.experiments.paper import quantities
from sarathi_sim.experiments.paper.variants import Lab, Variant, load_calibration
from sarathi_sim.experiments.run.machine import Machine
from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import UserError, did_you_mean, parse, strict_dataclass

TOLERANCE = 0.15
"""How far a value may be from the paper's to count as reproduced."""

Kind = Literal["ratio", "absolute", "upper bound", "lower bound", "ordering"]


@strict_dataclass
class GPUs:
    """The setting of a number; ``parallelism`` begins with the tensor-parallel degree."""

    model: str
    device: str
    parallelism: str

    def machine(self, lab: Lab) -> Machine:
        """One tensor-parallel group."""
        degree = self.parallelism.removeprefix("tp").split("-")[0].split(" ")[0]
        return lab.machine(self.device, self.model, int(degree))

    def __str__(self) -> str:
        return f"{self.model}, {self.device}, {self.parallelism}"


@strict_dataclass
class Claim:
    """One number of the paper.

    ``kind`` says how ours is judged: within :data:`TOLERANCE` (ratio, absolute), on the right side
    (bounds), or equal (ordering: 1 if it holds, else 0). ``quantity`` is a function of
    ``quantities.py``. With ``control`` it is computed without the reason that the paper gives, too:
    a claim that still holds is no evidence for this reason.
    """

    section: str
    machine: GPUs
    setting: str
    metric: str
    paper: float
    unit: str
    kind: Kind
    reading: str
    quantity: str
    arguments: dict[str, str | int] = field(default_factory=dict)
    control: Literal["untiled"] | None = None
    id: str = ""

    def value(self, lab: Lab) -> float:
        """Ours."""
        compute = getattr(quantities, self.quantity)
        return float(compute(self.machine.machine(lab), **self.arguments))

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


@strict_dataclass
class _Claims:
    claims: dict[str, Claim]


@cache
def load_claims() -> dict[str, Claim]:
    """Every claim by id, in the order of the paper."""
    path = data_dir() / "paper" / "claims.yaml"
    claims = parse(_Claims, read_mapping(path), path).claims
    return {id: replace(claim, id=id) for id, claim in claims.items()}


def pick_claims(ids: Iterable[str]) -> list[Claim]:
    """The named claims, or all of them. Raises UserError for an id that does not exist."""
    claims = load_claims()
    wanted = list(dict.fromkeys(ids))
    for id in wanted:
        if id not in claims:
            raise UserError(
                f"{id}: no such claim{did_you_mean(id, claims)}; `sarathi-sim reproduce --list` "
                "shows all of them"
            )
    return [claims[id] for id in wanted] or list(claims.values())


@dataclass(frozen=True)
class ClaimResult:
    """A claim, in one variant."""

    claim: Claim
    variant: Variant
    ours: float
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
            "setting": f"{self.claim.machine}: {self.claim.setting}",
            "reading": self.claim.reading,
            "control": self.control,
        }


def evaluate(claim: Claim, lab: Lab) -> ClaimResult:
    """Our value of one claim."""
    control = claim.value(getattr(lab, claim.control)) if claim.control else None
    return ClaimResult(claim, lab.variant, claim.value(lab), claim.id in lab.fitted, control)


def reproduce(
    claims: Sequence[Claim], labs: Sequence[Lab], progress: Progress = silent
) -> list[ClaimResult]:
    """Our values, by claim and then lab. The labs keep their simulations."""
    results = []
    for number, claim in enumerate(claims):
        progress("claims", number, len(claims))
        results += [evaluate(claim, lab) for lab in labs]
    progress("claims", len(claims), len(claims))
    return results


Tally = dict[Variant, tuple[int, int]]
"""By variant: the number of reproduced claims, and of all claims."""


def summary(
    results: Iterable[ClaimResult], ok: Callable[[ClaimResult], bool] = lambda r: r.ok
) -> Tally:
    """The number of reproduced results."""
    total, good = Counter[Variant](), Counter[Variant]()
    for result in results:
        total[result.variant] += 1
        good[result.variant] += ok(result)
    return {variant: (good[variant], total[variant]) for variant in total}


def independent(results: Iterable[ClaimResult]) -> list[ClaimResult]:
    """The rows whose claims no constant was fitted to, in either variant."""
    fitted = load_calibration().fitted
    return [result for result in results if result.claim.id not in fitted]


def gains(results: Iterable[ClaimResult]) -> tuple[list[ClaimResult], Tally]:
    """The gains in throughput, and how many are reproduced on (gain - 1)."""
    some = [result for result in results if result.claim.is_gain]
    return some, summary(some, lambda r: r.claim.gain_holds(r.ours))


def counts_text(results: Sequence[ClaimResult]) -> list[str]:
    """The counts in sentences, one per variant."""
    apart, gained = summary(independent(results)), gains(results)[1]
    lines = []
    for variant, (good, total) in summary(results).items():
        line = f"{variant}: {good} of {total} reproduced"
        if variant in apart:
            line += "; {} of the {} that nothing was fitted to".format(*apart[variant])
        if variant in gained:
            line += "; {} of {} gains on (gain - 1)".format(*gained[variant])
        lines.append(line)
    return lines
