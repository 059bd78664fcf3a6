"""What engines reserve and switch on, by their version: ``data/engines/ENGINE.yaml``.

A fact has rows, each with its value, its source, and the versions from ``since`` on and before
``until`` for which it holds. The first row that holds counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cache
from typing import Any

from ..storage.files import data_dir
from ..storage.plain_yaml import read_mapping
from ..storage.strict import parse, strict_dataclass
from .device import DeviceSpec
from .formats import STACKS, Stack, release


@strict_dataclass
class Fact:
    """A value, its source, and when it holds: for versions from ``since`` on and before ``until``
    (empty: all), and where each key of ``when`` has that value."""

    value: bool | int | float
    source: str
    since: str = ""
    until: str = ""
    when: dict[str, str] = field(default_factory=dict)

    def holds(self, version: str, about: Mapping[str, Any]) -> bool:
        """Whether it does for a version, and what is known ``about`` the server."""
        early = self.since and release(version) < release(self.since)
        late = self.until and release(version) >= release(self.until)
        return not early and not late and all(about.get(k) == v for k, v in self.when.items())


@strict_dataclass
class EngineFacts:
    """The facts of an engine; ``lockstep`` are the versions whose decisions are reproduced."""

    lockstep: list[str]
    facts: dict[str, list[Fact]]

    @property
    def newest(self) -> str:
        """The newest version whose decisions are reproduced; empty if none are."""
        return self.lockstep[-1] if self.lockstep else ""

    def at(self, fact: str, version: str = "", **about: Any) -> Any:
        """The value of a fact in a version (empty: the newest known). Raises KeyError without."""
        rows = self.facts.get(fact, [])
        known = version or self.newest or "999"
        found = next((row.value for row in rows if row.holds(known, about)), None)
        if found is None:
            raise KeyError(fact)
        return found


def memory_class(device: DeviceSpec) -> str:
    """The class of a GPU by which vLLM chooses its limits (``vllm/engine/arg_utils.py``,
    ``get_batch_defaults``): "huge" from 160 GiB on, "large" from 70 on but for A100, "small"."""
    gib = device.memory_bytes / 2**30
    if gib >= 160:
        return "huge"
    return "large" if gib >= 70 and not device.name.startswith("a100") else "small"


def capability(device: DeviceSpec) -> str:
    """The compute capability of a GPU for whose kind engines have numbers of their own; else
    empty."""
    kinds = {"90": ("h100", "h200"), "100": ("b200", "gb200"), "103": ("b300", "gb300")}
    return next((kind for kind, names in kinds.items() if device.name.startswith(names)), "")


@cache
def engine_facts(name: Stack) -> EngineFacts:
    """The facts of an engine, as shipped. Raises SpecError for a file that is none."""
    path = data_dir() / "engines" / f"{name}.yaml"
    return parse(EngineFacts, read_mapping(path), str(path))


def engines() -> dict[Stack, EngineFacts]:
    """Every engine."""
    return {name: engine_facts(name) for name in STACKS}
