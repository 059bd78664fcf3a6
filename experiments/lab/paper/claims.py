"""The paper's claims (``data/paper/claims.yaml``), and our values of them in both variants.

``python -m sarathi_sim.experiments.lab.paper.claims`` fits the constants of ``paper-calibrated``
(``data/paper/calibration.yaml``) anew, and finds out which claims cannot fail, or would be
reproduced by no gain, too (``data/paper/scrutiny.csv``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from sarathi_sim.profiler.facts.ops import DECODE, GEMMS, LAYER_OPS, OTHERS, PREFILL
from sarathi_sim.profiler.storage.child import Progress, default_to_one_thread, mapped, silent
from sarathi_sim.profiler.storage.files import data_dir, write_whole
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml, load_shipped
from sarathi_sim.profiler.storage.strict import UserError, did_you_mean, strict_dataclass
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.op_times import OpTimes, PairTimes, TimeBySize
from ...report.section import Section, Table
from . import quantities
from .variants import (
    LARGE,
    Calibration,
    Constants,
    DeviceFit,
    Lab,
    Variant,
    load_calibration,
    with_rows,
)

TOLERANCE = 0.15
"""How far a value may be from the paper's to count as reproduced."""

Kind = Literal["ratio", "absolute", "upper bound", "lower bound", "ordering"]


@strict_dataclass
class GPUs:
    """The setting of a number; ``parallelism`` begins with the tensor-parallel degree."""

    model: str
    device: str
    parallelism: str

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
        """Ours, of one tensor-parallel group."""
        degree = re.sub("[ -].*", "", self.machine.parallelism.removeprefix("tp"))
        machine = lab.machine(self.machine.device, self.machine.model, int(degree))
        return float(getattr(quantities, self.quantity)(machine, **self.arguments))

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
    claims = load_shipped(_Claims, "paper/claims.yaml").claims
    return {id: replace(claim, id=id) for id, claim in claims.items()}


def pick_claims(ids: Iterable[str]) -> list[Claim]:
    """The named claims, or all of them. Raises UserError for an id that does not exist."""
    claims, wanted = load_claims(), list(dict.fromkeys(ids))
    for id in wanted:
        if id not in claims:
            raise UserError(
                f"{id}: no such claim{did_you_mean(id, claims)}; "
                "`sarathi-sim lab reproduce --list` shows all of them"
            )
    return [claims[id] for id in wanted] or list(claims.values())


@dataclass(frozen=True)
class ClaimResult:
    """A claim in one variant."""

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
    def ratio(self) -> float:
        """Ours / the paper's."""
        return self.ours / self.claim.paper

    def row(self) -> dict[str, Any]:
        """JSON-able."""
        claim = self.claim
        return {
            "id": claim.id,
            "variant": self.variant,
            "paper": claim.paper,
            "ours": self.ours,
            "ratio": self.ratio,
            "status": "fitted" if self.fitted else "predicted",
            "ok": self.ok,
            **{key: getattr(claim, key) for key in ("kind", "section", "metric")},
            "setting": f"{claim.machine}: {claim.setting}",
            "reading": claim.reading,
            "control": self.control,
        }


Results = Sequence[ClaimResult]
"""By claim and then variant."""


def evaluate(claim: Claim, lab: Lab) -> ClaimResult:
    """Our value of one claim."""
    control = claim.value(getattr(lab, claim.control)) if claim.control else None
    return ClaimResult(
        claim,
        lab.variant,
        claim.value(lab),
        claim.id in lab.fitted,
        control,
    )


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
    by_variant: dict[Variant, list[bool]] = {}
    for result in results:
        by_variant.setdefault(result.variant, []).append(ok(result))
    return {variant: (sum(good), len(good)) for variant, good in by_variant.items()}


def gains(results: Iterable[ClaimResult]) -> tuple[list[ClaimResult], Tally]:
    """The gains in throughput, and how many are reproduced on (gain - 1)."""
    some = [result for result in results if result.claim.is_gain]
    return some, summary(some, lambda r: r.claim.gain_holds(r.ours))


def counts_text(results: Results) -> list[str]:
    """The counts in sentences, one per variant; those of claims that no constant was fitted to, in
    either variant, apart."""
    fitted = load_calibration().fitted
    apart = summary(result for result in results if result.claim.id not in fitted)
    gained = gains(results)[1]
    lines = []
    for variant, (good, total) in summary(results).items():
        line = f"{variant}: {good} of {total} reproduced"
        if variant in apart:
            line += "; {} of the {} that nothing was fitted to".format(*apart[variant])
        if variant in gained:
            line += "; {} of {} gains on (gain - 1)".format(*gained[variant])
        lines.append(line)
    return lines


_BOUNDS = {"upper bound": "≤ ", "lower bound": "≥ "}


def claim_rows(results: Results, miss: str) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of a table of claims, the variants side by side: what was fitted with a
    star, and what is not reproduced in the format ``miss``."""
    by_id: dict[str, list[ClaimResult]] = {}
    for result in results:
        by_id.setdefault(result.claim.id, []).append(result)
    rows = []
    for id, variants in by_id.items():
        claim = variants[0].claim
        row = [id, marks(variants), claim.section, claim.unit]
        row.append(f"{_BOUNDS.get(claim.kind, '')}{claim.paper:g}")
        for one in variants:
            cells = (f"{one.ours:.4g}{'*' * one.fitted}", f"{one.ratio:.2f}")
            row += cells if one.ok else map(miss.format, cells)
        rows.append(row)
    return ["claim", "", "§", "unit", "paper", *headings(summary(results))], rows


def headings(counts: Tally) -> list[str]:
    """Of two columns a variant: what is reproduced, and the ratios."""
    texts = [f"{variant}: {good} of {total}" for variant, (good, total) in counts.items()]
    return [heading for text in texts for heading in (text, "ratio")]


def claims_section(results: Results) -> Section:
    """Every claim beside ours, and the counts."""
    note = (
        "*: fitted. Reproduced: within 15 %, or on the right side of a bound; else in parentheses. "
    )
    table = Table("", *claim_rows(results, "({})"), note=note + MARKS, text=4)
    answer = "\n".join(counts_text(results))
    return Section("reproduce", "", "What of the paper is reproduced?", answer, [table])


_LIMITS = {"mixed_us": (0.0, 200.0), "p": (1.1, 20.0)}
_FACTOR_LIMITS = (0.5, 2.0)


def fit_device(device: str, fit: DeviceFit) -> DeviceFit:
    """Constants by least squares over the logarithms of ours / the paper's."""
    from scipy.optimize import least_squares

    claims = [load_claims()[id] for id in fit.fitted_to]

    def miss(values: Floats) -> Floats:
        constants = Constants(**dict(zip(fit.start, values.tolist(), strict=True)))
        lab = Lab("paper-calibrated", {device: constants})
        return np.log([claim.value(lab) / claim.paper for claim in claims])

    start = np.array(list(fit.start.values()))
    low, high = np.array([_LIMITS.get(name, _FACTOR_LIMITS) for name in fit.start]).T
    found = least_squares(
        miss,
        start,
        bounds=(low, high),
        x_scale=start,
        diff_step=1e-3,
    ).x
    # Four digits are more than the paper's numbers hold.
    rounded = {n: float(f"{v:.4g}") for n, v in zip(fit.start, found, strict=True)}
    return replace(fit, constants=Constants(**rounded))


_TIMES_SLOWER = 4.0
_UNMOVED_WITHIN = 0.01
_PROMPT = 1024
_GROUPS = {
    "GEMMs": GEMMS,
    "others": (OTHERS,),
    "prefill": (PREFILL,),
    "decode": (DECODE,),
}
_LINEAR = (*LAYER_OPS, *GEMMS)


def _scaled(group: str, factor: float, ops: OpTimes) -> OpTimes:
    return ops.scaled(dict.fromkeys(_GROUPS[group], factor))


def _nothing_saved(ops: OpTimes) -> OpTimes:
    """Every token row costs the same, and every pair of query and key of a prompt: neither
    piggybacking on a chunk nor cutting a prompt changes the cost."""

    def pairs(chunk: ArrayLike, context: ArrayLike) -> Floats:
        chunk = np.asarray(chunk, np.float64)
        return np.asarray(chunk * np.asarray(context, np.float64) + chunk * (chunk + 1) / 2)

    def by_pair(chunk: ArrayLike, context: ArrayLike) -> Floats:
        return pairs(chunk, context) * (ops.prefill(_PROMPT, 0) / pairs(_PROMPT, 0))

    def full_rate(time: TimeBySize, rows: ArrayLike) -> Floats:
        return np.asarray(rows, np.float64) * time(LARGE) / LARGE

    return replace(with_rows(ops, full_rate, _LINEAR), prefill=PairTimes(by_pair))


Change = Callable[[OpTimes], OpTimes]
NO_GAIN = "nothing saved"
_SCALINGS: dict[str, Change] = {
    f"{group} x {factor:g}": partial(_scaled, group, factor)
    for group in _GROUPS
    for factor in (1 / _TIMES_SLOWER, _TIMES_SLOWER)
}
DISTORTIONS: dict[str, Change] = {
    **_SCALINGS,
    NO_GAIN: _nothing_saved,
    "rows are free": partial(
        with_rows, shape=lambda time, rows: np.full(np.shape(rows), time(1)), changed=_LINEAR
    ),
}
"""Op times that are strongly wrong, in size or in shape."""


class Scrutiny(NamedTuple):
    """The worth of a claim: a row of ``data/paper/scrutiny.csv``.

    ``passes`` counts the :data:`DISTORTIONS` under which it is reproduced; ``unmoved`` is 1 where
    its value is the same with any op several times slower or faster, ``no_gain`` 1 for a ratio of
    two ways to serve that is reproduced where neither saves anything.
    """

    passes: int
    unmoved: int
    no_gain: int

    @property
    def cannot_fail(self) -> bool:
        """Whether it is reproduced with any op times: arithmetic of the memory or the schedule."""
        return self.passes == len(DISTORTIONS)


def distorted_values(distortion: str, ids: Iterable[str]) -> list[float]:
    """Each claim's value on the predicted op times so distorted."""
    lab = Lab("predicted", change=DISTORTIONS[distortion])
    return [load_claims()[id].value(lab) for id in ids]


def scrutinise(ids: Iterable[str], workers: int = 1) -> dict[str, Scrutiny]:
    """Each claim under every distortion, on ``workers`` processes."""
    wanted = tuple(ids)
    by_distortion = mapped(partial(distorted_values, ids=wanted), DISTORTIONS, workers)
    found = {}
    for id, row in zip(wanted, zip(*by_distortion, strict=True), strict=True):
        claim, values = load_claims()[id], dict(zip(DISTORTIONS, row, strict=True))
        scaled, flat = [values[name] for name in _SCALINGS], values[NO_GAIN]
        unmoved = max(scaled) - min(scaled) <= _UNMOVED_WITHIN * abs(scaled[0])
        no_gain = claim.unit == "x" and abs(flat - 1) <= TOLERANCE and claim.holds(flat)
        found[id] = Scrutiny(
            sum(map(claim.holds, row)),
            int(unmoved),
            int(no_gain),
        )
    return found


@cache
def load_scrutiny() -> dict[str, Scrutiny]:
    """The findings by claim."""
    table = pd.read_csv(data_dir() / "paper" / "scrutiny.csv")
    return {id: Scrutiny(*found) for id, *found in table.itertuples(index=False)}


CANNOT_FAIL, UNMOVED, NO_GAIN_PASSES, CONTROL_HOLDS = "†", "(†)", "‡", "¶"
MARKS = (
    f"{CANNOT_FAIL}: cannot fail on op times (reproduced under all {len(DISTORTIONS)} distortions "
    f"of them). {UNMOVED}: nearly so (the same with any op {_TIMES_SLOWER:g} times slower or "
    f"faster). {NO_GAIN_PASSES}: no gain at all would pass. "
    f"{CONTROL_HOLDS}: holds in its control, without the reason that the paper gives."
)
"""The meaning of a claim's marks."""


def marks(results: Results) -> str:
    """The marks that lower a claim's worth, from its results in the variants."""
    claim = results[0].claim
    found = load_scrutiny()[claim.id]
    shown = {
        CANNOT_FAIL: found.cannot_fail,
        UNMOVED: found.unmoved and not found.cannot_fail,
        NO_GAIN_PASSES: found.no_gain,
        CONTROL_HOLDS: any(r.control is not None and claim.holds(r.control) for r in results),
    }
    return " ".join(mark for mark, holds in shown.items() if holds)


def refresh() -> None:
    """Fit and scrutinise anew, and write both files."""
    default_to_one_thread()
    folder = data_dir() / "paper"
    file = folder / "calibration.yaml"
    comment = "".join(line for line in file.open(encoding="utf-8") if line.startswith("#"))
    fits = {name: fit_device(name, fit) for name, fit in load_calibration().devices.items()}
    write_whole(file, comment + dump_yaml(asdict(Calibration(fits))))
    table = pd.DataFrame(scrutinise(load_claims(), workers=2), Scrutiny._fields).T
    write_whole(folder / "scrutiny.csv", table.to_csv(index_label="id"))


if __name__ == "__main__":
    # By its module's name, so that worker processes find its functions.
    from . import claims

    claims.refresh()
