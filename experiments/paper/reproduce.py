"""Compute claims in both variants, and write the results, figures and tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experiments.paper.claims import Claim, Result, evaluate
from experiments.paper.variants import Lab, Variant
from profiler.files import write_whole

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is to do."""


def reproduce(
    claims: Sequence[Claim], labs: Sequence[Lab], progress: Progress | None = None
) -> list[Result]:
    """Our values, by claim and then lab. What was served for them is kept with the labs."""
    results = []
    for number, claim in enumerate(claims):
        if progress is not None:
            progress("claims", number, len(claims))
        results += [evaluate(claim, lab) for lab in labs]
    if progress is not None:
        progress("claims", len(claims), len(claims))
    return results


def summary(results: Iterable[Result]) -> dict[Variant, tuple[int, int]]:
    """By variant: claims reproduced, and claims in all."""
    total, good = Counter[Variant](), Counter[Variant]()
    for result in results:
        total[result.variant] += 1
        good[result.variant] += result.ok
    return {variant: (good[variant], total[variant]) for variant in total}


def write_json(results: Iterable[Result], file: Path) -> None:
    """The rows as a list. The file is whole, or as it was."""
    text = json.dumps([result.row() for result in results], indent=2, allow_nan=False)
    write_whole(file, text + "\n")
