"""The content of files and options as checked objects, with one clear line per mistake.

Pydantic models (experiments) and frozen dataclasses (models, devices, bundles) are checked alike.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import (
    Any,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from .not_modelled import Kind, called_here, not_modelled

T = TypeVar("T")
KeyPath = tuple[str, ...]
#: Mistakes of one mapping that are spelt out; the others are counted.
MOST = 20

#: For models filled from files: unknown keys, wrong types, NaN and infinity are errors.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

#: Characters of a wrong value that a message repeats.
_SHOWN = 200


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def strict_dataclass(cls: type[T]) -> type[T]:
    """A frozen dataclass that :func:`parse` fills from a file, with :data:`STRICT`."""
    cls.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True)(cls)


class UserError(ValueError):
    """A mistake that the user can correct; the message says where, what, and what is allowed. The
    command line prints it and exits with code 2."""


class SpecError(UserError):
    """A model, device or meta file that cannot be used; the message names file, key and value."""


def one_line(error: Exception) -> str:
    """The message of a library's error in one line."""
    return " ".join(str(error).split())


def did_you_mean(name: str, allowed: Iterable[str], *kinds: Kind) -> str:
    """``" (did you mean x?)"`` where ``allowed`` has something close to ``name``, else empty;
    of something that is not modelled (``kinds`` as there) what to do instead, and of an engine's
    name its own key."""
    if limit := not_modelled(name, *kinds):
        return f"; {limit}"
    choices = list(allowed)
    if (key := called_here(name)) and name not in choices:
        return f" (that is {key})"
    close = [choice for choice in choices if choice.startswith(name)] if name else []
    close = close or difflib.get_close_matches(name, choices, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def parse(cls: type[T], fields: Mapping[str, Any], where: Path | str) -> T:
    """An instance of the dataclass ``cls`` from ``fields``, strictly. Raises SpecError with a line
    per mistake (:func:`mistakes`) that begins with ``where``."""
    try:
        # Through JSON, because strict validation of Python objects refuses a mapping for a nested
        # dataclass.
        text = json.dumps(dict(fields))
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{where}: not keys and plain values: {error}") from None
    try:
        return TypeAdapter(cls).validate_json(text)
    except ValidationError as error:
        found = mistakes(
            error,
            cls,
            fields,
            lambda key: ": ".join([str(where), *_dotted(key)]),
        )
        raise SpecError("\n".join(found)) from error


def _dotted(key: KeyPath) -> list[str]:
    return [".".join(key)] if key else []


def show(value: object) -> str:
    """A value as YAML spells it, if Python spells it differently."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def short(value: object) -> str:
    """A value for a message, cut off if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or lists in lists
        return "a value too long to show"
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)"


def mistakes(
    error: ValidationError,
    model: type[Any],
    data: Mapping[str, Any],
    origin: Callable[[KeyPath], str],
    also: tuple[str, ...] = (),
) -> list[str]:
    """``FILE: key.path: value VALUE: what is allowed``, one line each. ``origin`` turns a key path
    into the part before the value; ``also`` are keys that the file may have at the top level beside
    the keys of ``model``."""
    lines = []
    found = error.errors(include_url=False)
    for item in found[:MOST]:
        path = _key_path(item["loc"], data)
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            if limit := not_modelled(path[-1]):
                lines.append(f"{origin(path)}: unknown key: {limit}")
                continue
            allowed = _allowed_keys(model, path[:-1], data)
            if len(path) == 1:
                allowed += also
            hint = did_you_mean(path[-1], allowed)
            known = f"; allowed: {', '.join(allowed)}" if allowed else ""
            lines.append(f"{origin(path)}: unknown key{hint}{known}")
        else:
            lines.append(_line(dict(item), path, model, origin))
    if len(found) > MOST:
        lines.append(f"{origin(())}: ... and {len(found) - MOST} more mistakes")
    return lines


def _key_path(loc: tuple[int | str, ...], data: Any) -> KeyPath:
    """pydantic's location without the tags it inserts for alternatives."""
    path: list[str] = []
    node = data
    for part in loc:
        named = isinstance(node, Mapping) and part in node
        if isinstance(node, Mapping) and not named and part in _tags(node):
            continue
        # An alternative that is told by its form, or that it is the key that is wrong.
        if not named and (str(part).startswith("<") or part == "[key]"):
            continue
        path.append(str(part))
        if isinstance(node, Mapping):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            node = None
    return tuple(path)


def _tags(node: Mapping[str, Any]) -> tuple[Any, ...]:
    return (node.get("kind"), node.get("name"))


def _line(
    item: dict[str, Any],
    path: KeyPath,
    model: type[Any],
    origin: Callable[[KeyPath], str],
) -> str:
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    if kind in ("missing", "missing_argument"):
        return f"{origin(path)}: this key is missing"
    if kind == "union_tag_not_found":
        tag = context["discriminator"].strip("'")
        options = _alternatives(model, path)
        return f"{origin((*path, tag))}: this key is missing; one of {', '.join(options)}"
    if kind == "union_tag_invalid":
        tag = context["discriminator"].strip("'")
        options = [option.strip(" '") for option in context["expected_tags"].split(",")]
        return f"{origin((*path, tag))}: {_none_of(context['tag'], options)}"
    if kind == "literal_error":
        expected = context["expected"].replace(" or ", ", ")
        options = [option.strip("'") for option in expected.split(", ")]
        return f"{origin(path)}: {_none_of(value, options)}"
    if not path:
        return f"{origin(path)}: {_expectation(kind, context, item['msg'])}"
    return f"{origin(path)}: value {show(value)}: {_expectation(kind, context, item['msg'])}"


def _none_of(value: object, options: list[str]) -> str:
    return f"value {show(value)}: one of {', '.join(options)}{did_you_mean(str(value), options)}"


def _expectation(kind: str, context: Mapping[str, Any], message: str) -> str:
    expected = {
        "int_type": "a whole number",
        "int_parsing": "a whole number",
        "float_type": "a number",
        "float_parsing": "a number",
        "bool_type": "true or false",
        "string_type": "text",
        "list_type": "a list",
        "dict_type": "keys and values",
        "model_type": "keys and values",
        "model_attributes_type": "keys and values",
        "dataclass_type": "keys and values",
        "finite_number": "a finite number",
        "string_pattern_mismatch": "1 to 64 letters, digits, '_', '.' or '-', "
        "beginning with a letter or digit",
    }.get(kind)
    if expected is not None:
        return f"must be {expected}"
    bounds = {
        "greater_than": "more than",
        "greater_than_equal": "at least",
        "less_than": "less than",
        "less_than_equal": "at most",
    }.get(kind)
    if bounds is not None:
        bound = next(iter(context.values()))
        shown = f"{bound:.12g}" if isinstance(bound, float) else bound
        return f"must be {bounds} {shown}"
    text = message.removeprefix("Value error, ").removeprefix("Input ")
    return text[0].lower() + text[1:]


def _allowed_keys(model: type[Any], path: KeyPath, data: Any) -> list[str]:
    found = _model_at(model, path, data)
    return [] if found is None else list(_fields(found))


def _alternatives(model: type[Any], path: KeyPath) -> list[str]:
    parent = _model_at(model, path[:-1], {})
    if parent is None:
        return []
    return [str(_tag_of(option)) for option in _models_in(parent, path[-1])]


def _model_at(model: type[Any], path: KeyPath, data: Any) -> type[Any] | None:
    """The model that describes the mapping at ``path``; ``data`` tells alternatives apart."""
    parts = iter(path)
    for part in parts:
        data = data.get(part) if isinstance(data, Mapping) else None
        if part not in _fields(model):
            return None
        options = _models_in(model, part)
        if get_origin(_fields(model)[part]) is dict:  # the next part is a name
            name = next(parts, None)
            data = data.get(name) if isinstance(data, Mapping) else None
        if len(options) > 1:
            tags = _tags(data) if isinstance(data, Mapping) else ()
            options = [option for option in options if _tag_of(option) in tags]
        if len(options) != 1:
            return None
        model = options[0]
    return model


def _models_in(model: type[Any], field: str) -> list[type[Any]]:
    annotation = _fields(model)[field]
    return [option for option in (annotation, *get_args(annotation)) if _has_keys(option)]


def _has_keys(kind: Any) -> bool:
    return isinstance(kind, type) and (
        issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)
    )


def _fields(model: type[Any]) -> dict[str, Any]:
    if issubclass(model, BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    types = get_type_hints(model)
    return {field.name: types[field.name] for field in dataclasses.fields(model)}


def _tag_of(model: type[Any]) -> object:
    for name in ("kind", "name"):
        if name in _fields(model):
            return next(iter(get_args(_fields(model)[name])), None)
    return None
