"""The keys of a file's ``sweep`` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from sarathi_sim.experiments.config.base import Count, Strict, Text

# The numbers of a range have twelve digits.
_FURTHEST = 1e12


class Range(Strict):
    """Numbers from ``from`` to ``to``, both included: every ``step``, or ``num`` of them.

    ``scale`` log spaces the ``num`` numbers evenly in their logarithm.
    """

    start: Annotated[float, Field(alias="from", ge=-_FURTHEST, le=_FURTHEST)]
    to: Annotated[float, Field(ge=-_FURTHEST, le=_FURTHEST)]
    step: Annotated[float, Field(gt=0, le=2 * _FURTHEST)] | None = None
    num: Annotated[int, Field(ge=2, le=100_000)] | None = None
    scale: Literal["linear", "log"] = "linear"


class Sample(Strict):
    """``points`` of the points, drawn without replacement."""

    points: Count
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


# A mistake is about the form that the value has, rather than about every one that it might have.
def _axis_form(value: object) -> str:
    return "<range>" if isinstance(value, dict | Range) else "<list>"


def _seeds_form(value: object) -> str:
    return "<list>" if isinstance(value, list) else "<count>"


Axis = Annotated[
    Annotated[Range, Tag("<range>")] | Annotated[list[Any], Tag("<list>")],
    Discriminator(_axis_form),
]
Axes = dict[Text, Axis]
Seeds = Annotated[
    Annotated[list[int], Tag("<list>")] | Annotated[int, Field(ge=1, le=100_000), Tag("<count>")],
    Discriminator(_seeds_form),
]


class SweepSpec(Strict):
    """The values of each key.

    ``grid`` crosses its keys, ``zip`` combines the values of its keys element by element, ``cases``
    lists points one by one. The three are crossed with each other, with the file's scenarios and
    with ``seeds`` (a list, or a number, counted from the file's seed). ``sample`` draws from the
    points. ``contrast`` is the key, or ``scenario``, whose values are compared pair by pair.
    """

    grid: Axes = Field(default_factory=dict)
    zip: Axes = Field(default_factory=dict)
    cases: list[dict[Text, Any]] = Field(default_factory=list)
    sample: Sample | None = None
    seeds: Seeds | None = None
    contrast: Text | None = None
