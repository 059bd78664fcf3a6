"""The names of configuration keys on axes, in legends and in headings of tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.simulator.views.metric_registry import number_text, with_unit

#: Units of keys by how they end.
_UNITS = {"s": "s", "bytes": "bytes"}
_TAGS = ("kind", "name")


@dataclass(frozen=True)
class Parameter:
    """A key's name and unit; ``short`` is its label beside a point, as in ``TP 4``."""

    name: str
    unit: str = ""
    short: str = ""

    @property
    def axis(self) -> str:
        """The label of an axis: ``chunk size (tokens)``."""
        return with_unit(self.name, self.unit)

    @property
    def heading(self) -> str:
        """The heading of a column: ``chunk (tokens)``."""
        return with_unit(self.short or self.name, self.unit)

    def value(self, value: object) -> str:
        """Beside a point: ``TP 4``, ``chunk size 256``; of a text, it alone."""
        text = number_text(value) if isinstance(value, float) else str(value)
        return text if isinstance(value, str) else self.called(text)

    def called(self, text: str) -> str:
        """A value, as text, after the short name: ``P:D 50``."""
        return f"{self.short or self.name} {text}"


def _named(model: type[BaseModel], section: str = "") -> Iterator[tuple[str, Parameter]]:
    """The path and the name of each key that has one, in a section and in those within."""
    for key, field in model.model_fields.items():
        path = f"{section}.{key}" if section else key
        if field.title is not None:
            extra: Any = field.json_schema_extra or {}
            unit = extra.get("unit") or _UNITS.get(key.rpartition("_")[2], "")
            called = Parameter(field.title, unit, extra.get("short", ""))
            yield path, called
        for inner in _sections(field.annotation):
            # What says which of several sections it is goes by the section's name.
            yield from ((f"{path}.{tag}", called) for tag in _TAGS if tag in inner.model_fields)
            yield from _named(inner, path)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a value may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


PARAMETERS = dict(_named(Scenario))
"""By key path. What is missing, such as a policy's own keys, is called by the key's words."""


def parameter(path: str) -> Parameter:
    """The name of a key, its unit, and its short name."""
    return PARAMETERS.get(path) or Parameter(path.rpartition(".")[2].replace("_", " "))


def value_name(value: object) -> str:
    """A swept value in a legend; of a policy's keys the words."""
    if isinstance(value, float):
        return f"{value:g}"
    name, space, keys = str(value).partition(" ")
    return name + space + keys.replace("_", " ")
