"""What a reproduced claim is worth: whether it could have failed, and whether no gain passes too.

``python -m experiments.paper.scrutiny`` computes every claim on op times that are nobody's, and
writes ``data/paper/scrutiny.csv``:

``passes``   how many of the :data:`DISTORTIONS` it is reproduced under
``no_gain``  1 where it is reproduced although riding along saves a decode nothing

A claim that passes under all distortions cannot fail on op times: it is arithmetic of the memory or
of the schedule.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO

import numpy as np
from numpy.typing import ArrayLike

from experiments.paper.claims import load_claims, readings
from experiments.paper.scenarios import Assumptions, changed
from experiments.paper.variants import Lab, RowTime, with_rows
from profiler.files import write_whole
from profiler.paths import data_dir
from simulator.records import Floats
from simulator.regression import OpTimes

_FACTOR = 4.0
_LARGE = 4096  # rows at which an op runs at its full rate

Change = Callable[[OpTimes], OpTimes]


def _scaled(op: str, factor: float) -> Change:
    return lambda ops: changed(ops, Assumptions(factors=((op, factor),)), 0)


def _every_row_costs_the_same(time: RowTime, rows: ArrayLike) -> Floats:
    return np.asarray(rows, np.float64) * time(_LARGE) / _LARGE


def _rows_are_free(time: RowTime, rows: ArrayLike) -> Floats:
    return np.full(np.shape(rows), time(1))


def _shaped(shape: Callable[[RowTime, ArrayLike], Floats], ops: OpTimes) -> OpTimes:
    linear = {op: partial(shape, time) for op, time in ops.linear.items()}
    return with_rows(ops, linear, partial(shape, ops.lm_head), shape.__name__)


NO_GAIN: Change = partial(_shaped, _every_row_costs_the_same)
"""A decode's rows cost the same on their own: riding on a prompt's chunk saves nothing."""

DISTORTIONS: dict[str, Change] = {
    **{
        f"{op} x {factor:g}": _scaled(op, factor)
        for op in ("linear", "others", "prefill", "decode", "all_reduce")
        for factor in (1 / _FACTOR, _FACTOR)
    },
    "every row costs the same": NO_GAIN,
    "rows are free": partial(_shaped, _rows_are_free),
}
"""Op times that are strongly wrong, in size or in shape."""


@dataclass(frozen=True)
class Scrutiny:
    """What was found of one claim."""

    passes: int
    no_gain: bool

    @property
    def cannot_fail(self) -> bool:
        """Whether it is reproduced whatever the op times."""
        return self.passes == len(DISTORTIONS)

    @property
    def hardly_fails(self) -> bool:
        """Whether a single distortion spoils it."""
        return self.passes == len(DISTORTIONS) - 1


def passing(change: Change, ids: Iterable[str]) -> list[bool]:
    """Whether each claim is reproduced on the predicted op times so changed."""
    lab, claims, read = Lab("predicted", change=change), load_claims(), readings()
    return [claims[id].holds(float(read[id].compute(lab))) for id in ids]


def scrutinise(ids: Iterable[str], workers: int = 1) -> dict[str, Scrutiny]:
    """Each claim under every distortion, on ``workers`` processes."""
    wanted = tuple(ids)
    with ProcessPoolExecutor(workers) as pool:
        found = dict(
            zip(DISTORTIONS, pool.map(partial(_passing, wanted), DISTORTIONS), strict=True)
        )
    no_gain = found["every row costs the same"]
    return {
        id: Scrutiny(sum(column[place] for column in found.values()), no_gain[place])
        for place, id in enumerate(wanted)
    }


def _passing(ids: tuple[str, ...], distortion: str) -> list[bool]:
    return passing(DISTORTIONS[distortion], ids)


_FILE = data_dir() / "paper" / "scrutiny.csv"


@cache
def load_scrutiny() -> dict[str, Scrutiny]:
    """What was found, by claim."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        return {
            row["id"]: Scrutiny(int(row["passes"]), row["no_gain"] == "1")
            for row in csv.DictReader(file)
        }


if __name__ == "__main__":
    text = StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["id", "passes", "no_gain"])
    for id, found in scrutinise(load_claims(), workers=2).items():
        table.writerow([id, found.passes, int(found.no_gain)])
    write_whole(_FILE, text.getvalue())
