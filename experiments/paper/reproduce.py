"""Compute claims in both variants, and write the results, figures and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from sarathi_sim.experiments.paper.claims import Claim, ClaimResult, evaluate
from sarathi_sim.experiments.paper.variants import Lab, Variant, load_calibration
from sarathi_sim.profiler.storage.child import Progress, silent


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
"""By variant: claims reproduced, and claims in all."""


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
    """Those whose claims no constant was fitted to, in either variant."""
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
