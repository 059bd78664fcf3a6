"""Mappings from YAML and JSON files into frozen dataclasses, with one clear line per mistake."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")

#: Put as ``__pydantic_config__`` on a dataclass that a file fills: unknown keys, wrong types, NaN
#: and infinity are errors.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

#: Characters of a wrong value that a message repeats.
_SHOWN = 200


class SpecError(ValueError):
    """A model, device or meta file that cannot be used; the message names file, key and value."""


def one_line(error: Exception) -> str:
    """What an error of a library says, which may take several lines, in one."""
    return " ".join(str(error).split())


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` when ``allowed`` has something close to ``name``, else ``""``."""
    choices = list(allowed)
    close = [c for c in choices if c.startswith(name)] if name else []
    close = close or difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def parse(cls: type[T], fields: Mapping[str, Any], where: Path | str) -> T:
    """An instance of the dataclass ``cls`` from ``fields``, strictly.

    Raises SpecError with every mistake: ``where``, key, what is wrong, the value, and for an
    unknown key what is allowed.
    """
    try:
        # Through JSON, because strict validation of Python objects refuses a mapping for a nested
        # dataclass.
        text = json.dumps(dict(fields))
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{where}: not keys and plain values: {error}") from None
    try:
        return TypeAdapter(cls).validate_json(text)
    except ValidationError as error:
        lines = [f"{where}: {_line(cls, dict(item))}" for item in error.errors()]
        raise SpecError("\n".join(lines)) from error


def _line(cls: type[Any], item: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        leaf = str(item["loc"][-1])
        allowed = [f.name for f in dataclasses.fields(cls)] if len(item["loc"]) == 1 else []
        listed = f"; allowed: {', '.join(allowed)}" if allowed else ""
        return f"unknown key '{key}'{did_you_mean(leaf, allowed)}{listed}"
    if item["type"] in ("missing", "missing_argument"):
        return f"key '{key}' is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    if not key:
        return message
    return f"{key}: {message[0].lower() + message[1:]}, got {_shown(item['input'])}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
