"""What a recommendation saves, and which deployments are as good: *equal*.

Money ranks: at a stated rate GPUs times their price, else that of a token. Two deployments are
equal if their money differs by less than the interval of paired differences, as replications have
the same seeds. Errors of op times cancel for one engine on one kind of GPU; else both count in
full. A load that was only screened is as uncertain as the screening."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sarathi_sim.simulator.confidence.quantile import mean_and_interval
from .options import Option
from .search import Begun, Capacity


@dataclass(frozen=True)
class Rival:
    """A deployment beside the first: the load of one replica, and its value (requests a second for
    a unit of money an hour); ``found`` if it was searched, and else the ``half`` width of its load,
    in logarithms."""

    name: str
    option: Option
    load: float
    value: float
    found: Capacity | None = None
    half: float = 0.0


@dataclass(frozen=True)
class Weighed:
    """Names of deployments that are equal to the first; the next one that is not, by which share of
    its money the first is cheaper, and whether that is a bound only. ``errors``: the half-widths of
    the op times' errors that count, by engine and GPU, in logarithms."""

    equal: tuple[str, ...] = ()
    next: str = ""
    saves: float = 0.0
    at_least: bool = False
    errors: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For ``summary.json``."""
        return {
            "equal": list(self.equal),
            "next": {"name": self.next, "saves": self.saves, "at_least": self.at_least}
            if self.saves
            else None,
            "op_errors": {kind: math.expm1(half) for kind, half in self.errors.items()},
        }


NOT_WEIGHED = Weighed()


def kind_of(option: Option) -> str:
    """Engine and GPUs, whose op times have errors in common."""
    pools = option.deployment.pools
    kinds = dict.fromkeys(f"{p.scenario.stack or 'profile'} on {p.device.name}" for p in pools)
    return " and ".join(kinds)


def weigh(
    best: Rival,
    others: list[Rival],
    worth: Callable[[Option, float], float],
    error: Callable[[Option], float],
    most_left_out: float,
) -> Weighed:
    """The first beside ``others``. ``worth``: the value of an option whose replicas sustain a load;
    ``error``: the half-width of the 90 % band of an option's op times, in logarithms; others are
    worth at most ``most_left_out``."""
    errors: dict[str, float] = {}

    def half(option: Option) -> float:
        kind = kind_of(option)
        if kind not in errors:
            errors[kind] = error(option)
        return errors[kind]

    equal, rest = list[str](), list[Rival]()
    for one in sorted(others, key=lambda one: -one.value):
        apart = [one.half if one.found is None else paired(best.found, one.found)[1]]
        if kind_of(one.option) != kind_of(best.option):
            apart += [half(best.option), half(one.option)]
        most = max(one.value, worth(one.option, one.load * math.exp(math.hypot(*apart))))
        (equal.append(one.name) if most >= best.value * (1 - 1e-9) else rest.append(one))
    value = max([one.value for one in rest], default=0.0)
    saves = 1 - max(value, most_left_out) / best.value
    name = rest[0].name if rest and value >= most_left_out else ""
    return Weighed(tuple(equal), name, max(saves, 0.0), not name, errors)


def paired(one: Begun | Capacity | None, other: Begun | Capacity | None) -> tuple[float, float]:
    """The mean logarithm of the second one's loads over the first one's, of replications with the
    same seeds, and half of its 95 % interval; both 0 with fewer than two."""
    loads = [
        {each.kept.probe.seed: math.log(each.load) for each in (found.crossings if found else ())}
        for found in (one, other)
    ]
    ratios = [loads[1][seed] - loads[0][seed] for seed in loads[0].keys() & loads[1].keys()]
    if len(ratios) < 2:
        return 0.0, 0.0
    mean, (_, high) = mean_and_interval(ratios)
    return mean, high - mean
