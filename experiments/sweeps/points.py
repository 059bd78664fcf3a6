"""The keys of a file's ``sweep`` section, its points, their neighbours and points between them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from operator import itemgetter
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag

from sarathi_sim.profiler.storage.strict import UserError
from ..config.base import Count, Strict, Text, key_path

MOST_RUNS = 200_000
# A place among the points must be a 64-bit number.
_MOST_DRAWN_FROM = 2**63 - 1

Point = dict[str, Any]
"""Key path -> value."""


def axis_values(axis: list[Any] | Range, where: str) -> list[Any]:
    """The values of one axis, in order. Raises UserError, naming ``where``."""
    if isinstance(axis, list):
        if not axis:
            raise UserError(f"{where}: value []: must name at least one value")
        return axis
    if (axis.step is None) == (axis.num is None):
        raise UserError(f"{where}: a range needs either step or num beside from and to")
    if axis.to < axis.start:
        raise UserError(f"{where}.to: value {axis.to:g}: must be at least from, {axis.start:g}")
    if axis.scale == "log" and (axis.num is None or axis.start <= 0):
        raise UserError(f"{where}: a range with scale log needs num, and from above 0")
    if axis.num is None:
        assert axis.step is not None
        steps = (axis.to - axis.start) / axis.step
        if steps >= MOST_RUNS:  # infinitely many, too
            raise UserError(
                f"{where}.step: value {axis.step:g}: is too small for a range from "
                f"{axis.start:g} to {axis.to:g}, which may have at most {MOST_RUNS} values"
            )
        # A hair more than the quotient: (0.3 - 0.1) / 0.1 is 1.9999999999999998.
        count = math.floor(steps + 1e-9) + 1
        numbers = axis.start + axis.step * np.arange(count)
    elif axis.scale == "log":
        numbers = np.geomspace(axis.start, axis.to, axis.num)
    else:
        numbers = np.linspace(axis.start, axis.to, axis.num)
    # Twelve digits, so 0.30000000000000004 is 0.3. Whole numbers become integers, because counts
    # must be integers.
    rounded = [float(f"{number:.12g}") for number in numbers]
    if (duplicate := _duplicate(rounded)) is not None:
        raise UserError(
            f"{where}: the range has {len(rounded)} values, but {duplicate[0]:g} more than once: "
            "give fewer, or from and to further apart"
        )
    return [*map(int, rounded)] if all(number.is_integer() for number in rounded) else rounded


def expand(spec: SweepSpec, contrast: str | None, where: str) -> list[Point]:
    """The points of ``spec``, in order. Raises UserError. ``sample`` does not draw over
    ``contrast``: every drawn point has all its values, so that they can be compared."""
    grid = _values(spec.grid, f"{where}.grid")
    for key, axis in spec.grid.items():
        if isinstance(axis, list):
            _refuse_duplicates(axis, f"{where}.grid.{key}")
    zipped = _values(spec.zip, f"{where}.zip")
    if len({len(values) for values in zipped.values()}) > 1:
        named = ", ".join(f"{key} has {len(values)}" for key, values in zipped.items())
        raise UserError(f"{where}.zip: all keys need the same number of values: {named}")
    parts = {key: [{key: value} for value in values] for key, values in grid.items()}
    if zipped:
        rows = zip(*zipped.values(), strict=True)
        parts["zip"] = [dict(zip(zipped, row, strict=True)) for row in rows]
        _refuse_duplicates(parts["zip"], f"{where}.zip")
    if spec.cases:
        _refuse_duplicates(spec.cases, f"{where}.cases")
        parts["cases"] = spec.cases
    total = math.prod(len(part) for part in parts.values())
    wanted = spec.sample.points if spec.sample else total
    if min(total, wanted) > MOST_RUNS:
        raise UserError(f"{where}: describes {_many(total)} points: at most {MOST_RUNS:,}")
    keys = [
        *grid,
        *zipped,
        *dict.fromkeys(key for case in spec.cases for key in case),
    ]
    for number, key in enumerate(keys):
        if key_path(key) is None:
            raise UserError(f"{where}: {key!r} is not a key path such as cluster.pp")
        if key in keys[:number]:
            raise UserError(f"{where}: {key} is swept twice")
    if spec.sample is None:
        return [_joined(combination) for combination in product(*parts.values())]
    drawn = {key: part for key, part in parts.items() if key != contrast}
    count = math.prod(len(part) for part in drawn.values())
    if count > _MOST_DRAWN_FROM:
        raise UserError(
            f"{where}.sample: draws from {_many(count)} points: at most {_many(_MOST_DRAWN_FROM)}"
        )
    if wanted > count:
        raise UserError(
            f"{where}.sample.points: value {wanted}: must be at most {count}, the number of points"
        )
    rng = np.random.default_rng(spec.sample.seed)
    chosen = np.sort(rng.choice(count, wanted, replace=False)).tolist()
    compared = parts.get(contrast or "", [{}])
    return [_joined((*_nth(drawn, n), other)) for n in chosen for other in compared]


def _values(axes: Axes, where: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for key, axis in axes.items():
        found[key] = axis_values(axis, f"{where}.{key}")
        if sum(map(len, found.values())) > MOST_RUNS:
            raise UserError(f"{where}: its keys have more than {MOST_RUNS:,} values together")
    return found


def _refuse_duplicates(values: list[Any], where: str) -> None:
    if (duplicate := _duplicate(values)) is not None:
        raise UserError(f"{where}: value {duplicate[0]!r}: is given twice")


def _duplicate(values: Iterable[Any]) -> list[Any] | None:
    """The first value that was there before, in a list."""
    seen: set[Hashable] = set()
    for value in values:
        if (frozen := _frozen(value)) in seen:
            return [value]
        seen.add(frozen)
    return None


def _frozen(value: Any) -> Hashable:
    if isinstance(value, dict):
        return frozenset((key, _frozen(item)) for key, item in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _many(count: int) -> str:
    return f"{count:,}" if count <= 10**21 else "more than 10^21"


def _nth(parts: Mapping[str, list[Point]], number: int) -> list[Point]:
    found: list[Point] = []
    for part in reversed(list(parts.values())):
        number, index = divmod(number, len(part))
        found.insert(0, part[index])
    return found


def _joined(parts: tuple[Point, ...]) -> Point:
    return {key: value for part in parts for key, value in part.items()}


# The numbers of a range have twelve digits.
_FURTHEST = 1e12


class Range(Strict):
    """Numbers from ``from`` to ``to``, both included: every ``step``, or ``num`` of them. ``scale``
    log spaces the ``num`` numbers evenly in their logarithm."""

    start: Annotated[float, Field(alias="from", ge=-_FURTHEST, le=_FURTHEST)]
    to: Annotated[float, Field(ge=-_FURTHEST, le=_FURTHEST)]
    step: Annotated[float, Field(gt=0, le=2 * _FURTHEST)] | None = None
    num: Annotated[int, Field(ge=2, le=100_000)] | None = None
    scale: Literal["linear", "log"] = "linear"


class Sample(Strict):
    """``points`` of the points, drawn without replacement."""

    points: Count
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


# A mistake is reported for the form that the value has, not for every possible form.
Axis = Annotated[
    Annotated[Range, Tag("<range>")] | Annotated[list[Any], Tag("<list>")],
    Discriminator(lambda value: "<range>" if isinstance(value, dict | Range) else "<list>"),
]
Axes = dict[Text, Axis]
Seeds = Annotated[
    Annotated[list[int], Tag("<list>")] | Annotated[int, Field(ge=1, le=100_000), Tag("<count>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<count>"),
]


class SweepSpec(Strict):
    """The values of each key: ``grid`` crosses its keys, ``zip`` combines their values element by
    element, ``cases`` lists points. The three are crossed with each other, with the file's
    scenarios and with ``seeds`` (a list, or a number, counted from the file's seed). ``sample``
    draws from the points. ``contrast``: the key, or ``scenario``, that is compared pair by pair."""

    grid: Axes = Field(default_factory=dict)
    zip: Axes = Field(default_factory=dict)
    cases: list[dict[Text, Any]] = Field(default_factory=list)
    sample: Sample | None = None
    seeds: Seeds | None = None
    contrast: Text | None = None


STEP = 64
"""Halfway between two multiples of this, the nearest multiple of it is taken."""


def neighbours(best: int, points: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """The neighbours of the point at place ``best``: for every numeric key the next point below and
    the next above, all other keys equal. Each is a place and the key that differs."""
    found, there = list[tuple[str, int]](), points[best]
    for key, value in there.items():
        if not _is_number(value):
            continue
        others = [
            (one[key], place)
            for place, one in enumerate(points)
            if _is_number(one.get(key)) and {**one, key: value} == there
        ]
        below = [each for each in others if each[0] < value]
        above = [each for each in others if each[0] > value]
        found += [(key, max(below, key=itemgetter(0))[1])] if below else []
        found += [(key, min(above, key=itemgetter(0))[1])] if above else []
    return found


def halfway(one: float, other: float) -> float | None:
    """The value halfway between two: a multiple of 64 between multiples of 64, a whole number
    between others. None if there is none between."""
    if isinstance(one, float) or isinstance(other, float):
        return float(f"{(one + other) / 2:.6g}")
    step = STEP if one % STEP == other % STEP == 0 else 1
    middle = round((one + other) / (2 * step)) * step
    return middle if min(one, other) < middle < max(one, other) else None


def apart(best: int, points: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of those neighbours of the best point that leave a value between."""
    return [place for place, _ in _halves(best, points)]


def between(best: int, points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The new points halfway between the best point and its neighbours."""
    return [point for _, point in _halves(best, points)]


def _halves(best: int, points: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Point]]:
    for key, place in neighbours(best, points):
        middle = halfway(points[best][key], points[place][key])
        if middle is not None:
            yield place, {**points[best], key: middle}


def in_order(points: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of the points, sorted by their keys: numbers by value, others as listed."""
    ranks: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for point in points for key in point):
        values = [point[key] for point in points if key in point]
        numbers = sorted(value for value in values if _is_number(value))
        ranks[key] = [*(value for value in values if not _is_number(value)), *numbers]

    def order(place: int) -> list[int]:
        one = points[place]
        return [ranked.index(one[key]) if key in one else -1 for key, ranked in ranks.items()]

    return sorted(range(len(points)), key=order)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
