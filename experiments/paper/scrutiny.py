"""The worth of a reproduced claim: whether it could have failed, and whether no gain passes, too.

``python -m sarathi_sim.experiments.paper.scrutiny`` computes every claim on distorted op times, and
writes ``data/paper/scrutiny.csv``:

``passes``   how many of the :data:`DISTORTIONS` it is reproduced under; with all, it cannot fail on
             op times: it is arithmetic of the memory or of the schedule
``unmoved``  1 where its value is the same with any op several times slower or faster
``no_gain``  1 for a ratio of two ways to serve that is reproduced where neither saves anything
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from io import StringIO

import numpy as np
from numpy.typing import ArrayLike

from sarathi_sim.experiments.paper.claims import TOLERANCE, Claim, ClaimResult, load_claims
from sarathi_sim.experiments.paper.variants import Lab, with_rows
from sarathi_sim.profiler.facts.ops import DECODE, GEMMS, LAYER_OPS, OTHERS, PREFILL
from sarathi_sim.profiler.storage.child import mapped
from sarathi_sim.profiler.storage.files import data_dir, write_whole
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.op_times import OpTimes, PairTimes, TimeBySize

_FACTOR = 4.0
_UNMOVED = 0.01
_LARGE = 4096  # rows at which an op runs at its full rate
_PROMPT = 1024

Change = Callable[[OpTimes], OpTimes]


_GROUPS = {"GEMMs": GEMMS, "others": (OTHERS,), "prefill": (PREFILL,), "decode": (DECODE,)}


def _scaled(group: str, factor: float, ops: OpTimes) -> OpTimes:
    """One group of ops at ``factor`` times its time."""
    return ops.scaled(dict.fromkeys(_GROUPS[group], factor))


def _nothing_saved(ops: OpTimes) -> OpTimes:
    """Every token row costs the same, and every pair of query and key of a prompt.

    Then neither piggybacking on a chunk nor cutting a prompt changes the cost.
    """

    def by_row(time: TimeBySize, rows: ArrayLike) -> Floats:
        return np.asarray(rows, np.float64) * time(_LARGE) / _LARGE

    def pairs(chunk: ArrayLike, context: ArrayLike) -> Floats:
        chunk = np.asarray(chunk, np.float64)
        return np.asarray(chunk * np.asarray(context, np.float64) + chunk * (chunk + 1) / 2)

    def by_pair(chunk: ArrayLike, context: ArrayLike) -> Floats:
        return pairs(chunk, context) * (ops.prefill(_PROMPT, 0) / pairs(_PROMPT, 0))

    return replace(_by_rows(by_row, ops), prefill=PairTimes(by_pair))


def _rows_are_free(ops: OpTimes) -> OpTimes:
    """An op takes the time of a single row, for any number of rows."""
    return _by_rows(lambda time, rows: np.full(np.shape(rows), time(1)), ops)


def _by_rows(shape: Callable[[TimeBySize, ArrayLike], Floats], ops: OpTimes) -> OpTimes:
    changed = (*LAYER_OPS, *GEMMS)
    return with_rows(ops, {op: partial(shape, ops.by_rows[op]) for op in changed})


NO_GAIN = "nothing saved"
_SCALINGS: dict[str, Change] = {
    f"{group} x {factor:g}": partial(_scaled, group, factor)
    for group in _GROUPS
    for factor in (1 / _FACTOR, _FACTOR)
}
DISTORTIONS: dict[str, Change] = {
    **_SCALINGS,
    NO_GAIN: _nothing_saved,
    "rows are free": _rows_are_free,
}
"""Op times that are strongly wrong, in size or in shape."""


@dataclass(frozen=True)
class Scrutiny:
    """The findings about one claim."""

    passes: int
    unmoved: bool
    no_gain: bool

    @property
    def cannot_fail(self) -> bool:
        """Whether it is reproduced with any op times."""
        return self.passes == len(DISTORTIONS)


def values(distortion: str, ids: Iterable[str]) -> list[float]:
    """Each claim's value on the predicted op times so distorted."""
    lab, claims = Lab("predicted", change=DISTORTIONS[distortion]), load_claims()
    return [claims[id].value(lab) for id in ids]


def scrutinise(ids: Iterable[str], workers: int = 1) -> dict[str, Scrutiny]:
    """Each claim under every distortion, on ``workers`` processes."""
    wanted = tuple(ids)
    rows = mapped(partial(values, ids=wanted), DISTORTIONS, workers)
    table = dict(zip(DISTORTIONS, rows, strict=True))
    return {
        id: _judge(load_claims()[id], {name: row[index] for name, row in table.items()})
        for index, id in enumerate(wanted)
    }


def _judge(claim: Claim, found: Mapping[str, float]) -> Scrutiny:
    scaled = [found[name] for name in _SCALINGS]
    return Scrutiny(
        passes=sum(map(claim.holds, found.values())),
        unmoved=max(scaled) - min(scaled) <= _UNMOVED * abs(scaled[0]),
        no_gain=claim.unit == "x"
        and abs(found[NO_GAIN] - 1) <= TOLERANCE
        and claim.holds(found[NO_GAIN]),
    )


_FILE = data_dir() / "paper" / "scrutiny.csv"


@cache
def load_scrutiny() -> dict[str, Scrutiny]:
    """The findings by claim."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        return {
            row["id"]: Scrutiny(int(row["passes"]), row["unmoved"] == "1", row["no_gain"] == "1")
            for row in csv.DictReader(file)
        }


CANNOT_FAIL, UNMOVED, NO_GAIN_PASSES, CONTROL_HOLDS = "†", "(†)", "‡", "¶"
MARKS = (
    f"{CANNOT_FAIL}: cannot fail on op times (reproduced under all {len(DISTORTIONS)} distortions "
    f"of them). {UNMOVED}: nearly so (the same with any op {_FACTOR:g} times slower or faster). "
    f"{NO_GAIN_PASSES}: no gain at all would pass. "
    f"{CONTROL_HOLDS}: holds in its control, without the reason that the paper gives."
)
"""The meaning of a claim's marks."""


def marks(results: Sequence[ClaimResult]) -> str:
    """The marks that lower a claim's worth, from its results in the variants."""
    found = load_scrutiny()[results[0].claim.id]
    shown = [
        (CANNOT_FAIL, found.cannot_fail),
        (UNMOVED, found.unmoved and not found.cannot_fail),
        (NO_GAIN_PASSES, found.no_gain),
        (CONTROL_HOLDS, any(result.control_holds for result in results)),
    ]
    return " ".join(mark for mark, holds in shown if holds)


if __name__ == "__main__":
    # By its module's name, so that worker processes find its functions.
    from sarathi_sim.experiments.paper.scrutiny import scrutinise as study

    text = StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["id", "passes", "unmoved", "no_gain"])
    for id, found in study(load_claims(), workers=2).items():
        table.writerow([id, found.passes, int(found.unmoved), int(found.no_gain)])
    write_whole(_FILE, text.getvalue())
