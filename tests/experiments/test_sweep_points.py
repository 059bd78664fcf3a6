"""Which points a sweep section describes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.experiments.sweeps.points import Range, Sample, SweepSpec, axis_values, expand
from sarathi_sim.profiler.storage.strict import UserError


def points(contrast: str | None = None, **sections: Any) -> list[dict[str, Any]]:
    return expand(SweepSpec.model_validate(sections), contrast, "sweep")


def test_grid_zip_and_cases_are_crossed() -> None:
    found = points(
        grid={"a": [1, 2]}, zip={"b": [10, 20], "c": ["x", "y"]}, cases=[{"d.e": 0}, {"d.f": 1}]
    )
    assert len(found) == 2 * 2 * 2
    assert found[0] == {"a": 1, "b": 10, "c": "x", "d.e": 0}
    assert found[1] == {"a": 1, "b": 10, "c": "x", "d.f": 1}
    assert {"a": 2, "b": 20, "c": "x", "d.e": 0} not in found


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ({"from": 0.1, "to": 0.5, "step": 0.1}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"from": 128, "to": 512, "step": 128}, [128, 256, 384, 512]),
        ({"from": 1, "to": 8, "step": 3}, [1, 4, 7]),
        ({"from": 1, "to": 1000, "num": 4, "scale": "log"}, [1, 10, 100, 1000]),
        ({"from": 0, "to": 1, "num": 3}, [0.0, 0.5, 1.0]),
    ],
)
def test_ranges(axis: dict[str, Any], values: list[float]) -> None:
    found = axis_values(Range.model_validate(axis), "axis")
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


def test_a_key_taken_in_step_may_repeat_a_value() -> None:
    assert points(zip={"a": [1, 1], "b": [2, 3]}) == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32))
def test_a_sample_holds_different_points_of_the_grid(a: int, b: int, seed: int) -> None:
    grid = {"a": list(range(a)), "b": list(range(b))}
    count = max(1, a * b // 2)
    drawn = points(grid=grid, sample={"points": count, "seed": seed})
    assert drawn == points(grid=grid, sample={"points": count, "seed": seed})
    assert len({tuple(point.items()) for point in drawn}) == len(drawn) == count
    everything = points(grid=grid)
    places = [everything.index(point) for point in drawn]
    assert places == sorted(places)


def test_all_that_is_compared_is_at_every_drawn_point() -> None:
    drawn = points(
        "policy", grid={"a": list(range(9)), "policy": ["x", "y", "z"]}, sample={"points": 4}
    )
    assert len(drawn) == 12
    at: dict[int, list[str]] = {}
    for point in drawn:
        at.setdefault(point["a"], []).append(point["policy"])
    assert list(at.values()) == [["x", "y", "z"]] * 4


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"grid": {"a": []}}, r"sweep\.grid\.a: value \[\]: must name at least one"),
        ({"grid": {"a": [1, 1]}}, r"sweep\.grid\.a: value 1: is given twice"),
        ({"cases": [{"a": 1}, {"b": 1}, {"a": 1}]}, r"sweep\.cases: value .*: is given twice"),
        ({"zip": {"a": [1, 1], "b": [2, 2]}}, r"sweep\.zip: value .*: is given twice"),
        ({"grid": {"a": {"from": 1, "to": 2}}}, "needs either step or num"),
        ({"grid": {"a": {"from": 1, "to": 2, "step": 1, "num": 2}}}, "needs either step or num"),
        ({"grid": {"a": {"from": 3, "to": 2, "num": 2}}}, r"\.to: value 2: must be at least from,"),
        ({"grid": {"a": {"from": 0, "to": 2, "num": 2, "scale": "log"}}}, "from above 0"),
        ({"grid": {"a": {"from": 0, "to": 1e9, "step": 1e-9}}}, "at most 200000"),
        ({"zip": {"a": [1], "b": [1, 2]}}, "the same number of values: a has 1, b has 2"),
        ({"grid": {"a": [1], "b..c": [1]}}, "is not a key path"),
        ({"grid": {"a": [1]}, "cases": [{"a": 2}]}, "a is swept twice"),
        ({"grid": {"a": [1, 2]}, "sample": {"points": 3}}, "value 3: must be at most 2"),
        (
            {"grid": {k: {"from": 1, "to": 9999, "step": 1} for k in "abc"}},
            "points: at most 200,000",
        ),
    ],
)
def test_mistakes(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        points(**sections)


def test_a_sample_of_a_grid_too_large_to_list() -> None:
    axes = {key: Range.model_validate({"from": 1, "to": 9999, "step": 1}) for key in "abc"}
    drawn = expand(SweepSpec(grid=axes, sample=Sample(points=5)), None, "sweep")
    assert len(drawn) == 5
    assert all(1 <= point[key] <= 9999 for point in drawn for key in "abc")
