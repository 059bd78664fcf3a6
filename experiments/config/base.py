"""The base of all configuration keys: strict sections, key names and bounds; trees of keys, as YAML
gives them, by key path; and the origin of each value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from sarathi_sim.profiler.storage.strict import STRICT, UserError, mistakes, show
from sarathi_sim.profiler.storage.strict import KeyPath as KeyPath

Config = str | Path | Mapping[str, Any]
"""The path of a file, the name of a shipped configuration, or the content of one."""
Assignments = Iterable[str] | Mapping[str, Any]
"""``key.path=value``, as of ``--set``; or values by key path."""

Several = str | Sequence[object] | None
"""Words: a text with commas, or a list."""


def listed(given: Several) -> list[str]:
    """The words; none of None."""
    several = given.split(",") if isinstance(given, str) else given
    return [str(word).strip() for word in several or ()]


# Names become folder and file names.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


def _nameable(text: str) -> str:
    if "\0" in text:  # no file is called so
        raise ValueError("must not hold the character NUL")
    return text


Text = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_nameable)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Tokens = Annotated[int, Field(ge=1, le=16_777_216)]
Degree = Annotated[int, Field(ge=1, le=4096)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Seconds = Annotated[float, Field(ge=0, le=3600)]
Share = Annotated[float, Field(gt=0, le=1)]


def key(
    name: str,
    unit: str = "",
    short: str = "",
    *,
    needs: Literal["", "stack", "experts"] = "",
    **field: Any,
) -> Any:
    """A key with its ``name`` in figures and tables, and its ``short`` name: ``TP 4``. A key that
    ``needs`` a stack, or a stack and a model with experts, is refused without them. ``field`` is
    what pydantic's ``Field`` takes: default and bounds."""
    given = {"unit": unit, "short": short, "needs": needs}
    extra: Any = {key: text for key, text in given.items() if text}
    return Field(title=name, json_schema_extra=extra, **field)


class Strict(BaseModel):
    """Unknown keys, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(**STRICT, frozen=True)


S = TypeVar("S", bound=BaseModel)
#: No configuration has keys that lie deeper.
DEEPEST = 100
# The keys that select a mapping's alternative.
_TAGS = ("kind", "name")


def key_path(text: str) -> KeyPath | None:
    """``cluster.pp`` as a key path; None if it has an empty key, or far too many keys."""
    path = tuple(text.split("."))
    return path if all(path) and len(path) <= DEEPEST else None


def overlap(path: KeyPath, key: KeyPath) -> bool:
    """Whether one key path equals the other, or is below it."""
    return key[: len(path)] == path[: len(key)]


def without(tree: Mapping[str, Any], key: KeyPath) -> dict[str, Any]:
    """A copy that lacks one key."""
    rest = {name: value for name, value in tree.items() if len(key) > 1 or name != key[0]}
    below = rest.get(key[0])
    if isinstance(below, dict):
        rest[key[0]] = without(below, key[1:])
    return rest


def assign(tree: Mapping[str, Any], key: KeyPath, value: Any) -> dict[str, Any]:
    """A copy with one value set; a mapping replaces the whole mapping there."""
    below = without(tree, key) if isinstance(value, dict) else tree
    for name in reversed(key):
        value = {name: value}
    return merge(below, value)


def assign_all(tree: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the values of a point: by key path in dots."""
    for key, value in point.items():
        tree = assign(tree, tuple(key.split(".")), value)
    return dict(tree)


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``override``, mapping by mapping. A mapping of another kind
    (``kind: zipf`` over ``kind: fixed``) replaces the whole mapping, because their other keys are
    unrelated."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and _same_kind(below, value):
            value = merge(below, value)
        merged[key] = value
    return merged


def _same_kind(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    pairs = [(below.get(tag), above.get(tag)) for tag in _TAGS]
    return all(a == b for a, b in pairs if isinstance(a, str) and isinstance(b, str))


def has(tree: Mapping[str, Any], key: KeyPath) -> bool:
    node: Any = tree
    for part in key:
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return bool(key)


def get(tree: Mapping[str, Any], key: KeyPath) -> Any:
    node: Any = tree
    for part in key:
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


@dataclass(frozen=True)
class Source:
    """The origin of a scenario's values, for messages. ``override`` is what the scenario itself
    sets, ``assigned`` the key paths of ``--set``."""

    file: str
    scenario: str
    override: Mapping[str, Any]
    assigned: tuple[KeyPath, ...]

    def name(self, key: KeyPath) -> str:
        """``FILE: key``, as the user wrote it."""
        assigned = self._assigned(key)
        if assigned is not None:
            return f"--set {'.'.join(assigned)}"
        if has(self.override, key):
            key = ("scenarios", self.scenario, *key)
        return f"{self.file}: {'.'.join(key)}" if key else self.file

    def folder(self, key: KeyPath) -> Path:
        """The folder that a relative path at ``key`` starts from: the file's folder, or for
        ``--set`` the current folder."""
        return Path(self.file).parent if self._assigned(key) is None else Path()

    def _assigned(self, key: KeyPath) -> KeyPath | None:
        """The ``--set`` that ``key`` comes from."""
        own = ("scenarios", self.scenario, *key)
        given = has(self.override, key)
        if any(overlap(path, own) and (given or len(path) > 2) for path in self.assigned):
            return own
        if not given and any(overlap(path, key) for path in self.assigned):
            return key
        return None

    def checked(
        self, kind: type[S], raw: Mapping[str, Any], *section: str, also: tuple[str, ...] = ()
    ) -> S:
        """The keys of a section. Raises UserError, a line per mistake (:func:`mistakes`)."""
        try:
            return kind.model_validate(raw)
        except ValidationError as error:
            found = mistakes(
                error,
                kind,
                raw,
                lambda key: self.name((*section, *key)),
                also,
            )
            raise UserError("\n".join(found)) from None

    def error(self, key: str, value: object, problem: str) -> UserError:
        """The error for a value that is not allowed although its type is right; or, with None, for
        a key that is missing or whose file cannot be used."""
        shown = "" if value is None else f"value {show(value)}: "
        return UserError(f"{self.name(tuple(key.split('.')))}: {shown}{problem}")
