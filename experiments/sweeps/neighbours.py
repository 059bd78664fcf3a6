"""Points of a space that lie beside the best one, and what lies between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STEP = 64
"""Half-way between two multiples of it lies another multiple."""


def neighbours(best: int, points: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """The points beside the one at place ``best``: of every key with a number the next one below
    and the next one above, all other keys alike. Each with that key, by its place."""
    found, there = [], points[best]
    for key, value in there.items():
        if not _is_number(value):
            continue
        others = {
            place: one[key]
            for place, one in enumerate(points)
            if _is_number(one.get(key)) and {**one, key: value} == there
        }
        below = [place for place in others if others[place] < value]
        above = [place for place in others if others[place] > value]
        found += [(key, max(below, key=lambda place: others[place]))] if below else []
        found += [(key, min(above, key=lambda place: others[place]))] if above else []
    return found


def halfway(one: float, other: float) -> float | None:
    """The value half-way between two: a multiple of 64 between multiples of it, a whole number
    between others. None where nothing lies between."""
    if isinstance(one, float) or isinstance(other, float):
        return float(f"{(one + other) / 2:.6g}")
    step = STEP if one % STEP == other % STEP == 0 else 1
    middle = round((one + other) / (2 * step)) * step
    return middle if min(one, other) < middle < max(one, other) else None


def between(best: int, points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The new points half-way between the best and its neighbours."""
    there = points[best]
    return [
        {**there, key: middle}
        for key, place in neighbours(best, points)
        if (middle := halfway(there[key], points[place][key])) is not None
    ]


def in_order(points: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of the points, ordered along their keys: numbers by value, others as they came."""
    ranks: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for point in points for key in point):
        values = [point[key] for point in points if key in point]
        numbers = sorted(value for value in values if _is_number(value))
        ranks[key] = [*(value for value in values if not _is_number(value)), *numbers]
    places = [
        [ranked.index(one[key]) if key in one else -1 for key, ranked in ranks.items()]
        for one in points
    ]
    return sorted(range(len(points)), key=lambda place: places[place])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
