"""Every YAML file here: mappings, lists and the scalars of YAML 1.2's core schema, nothing else.

PyYAML only splits the text into events, with libyaml if it is installed (ten times as fast). This
module gives them their meaning, and both parsers refuse the same: aliases, duplicate keys, and
tags, so none constructs an object. The output of ``dump_yaml`` reads back unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import Reader

from .files import data_dir, read_bounded
from .strict import SpecError, T, parse

#: How deep lists and mappings may lie in each other.
DEEPEST = 100
#: The longest whole number, characters. (Python itself refuses to print more than 4,300 digits.)
_LONGEST_NUMBER = 1000

_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_CORE = "tag:yaml.org,2002:"
_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_BASES = {"0o": 8, "0x": 16}
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Refused(ValueError):
    def __init__(self, event: Any, problem: str) -> None:
        super().__init__(f"line {event.start_mark.line + 1}: {problem}")


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises SpecError, in one line, if there is none."""
    content = read_bounded(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{path}: line {line}: not valid YAML: it is not UTF-8 text") from None
    found = parse_yaml(text, str(path))
    if not isinstance(found, dict):
        raise SpecError(f"{path}: expected keys and values, as in 'name: first'")
    return found


def load_shipped(kind: type[T], file: str) -> T:
    """The dataclass in a YAML ``file`` of the shipped data, strictly. Raises SpecError."""
    return parse(kind, read_mapping(data_dir() / file), file)


def parse_yaml(text: str, where: str) -> Any:
    """The value in a piece of YAML: dict, list, str, int, float, bool or None. Raises SpecError,
    one line that names ``where``, the line in it, and what is allowed."""
    odd = Reader.NON_PRINTABLE.search(text)
    if odd is not None:
        line = text.count("\n", 0, odd.start()) + 1
        problem = f"the character {odd.group()!a} is not allowed"
        raise SpecError(f"{where}: line {line}: not valid YAML: {problem}")
    try:
        return _document(yaml.parse(text, Loader=_PARSER))
    except _Refused as error:
        raise SpecError(f"{where}: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}: " if mark else ""
        raise SpecError(f"{where}: {at}not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # an escape that is no character
        reason = " ".join(str(error).split())
        raise SpecError(f"{where}: not valid YAML: {reason}") from None


def dump_yaml(value: Any, width: int = 80) -> str:
    """``value`` as YAML text, keys in their order; text that would read as a number is quoted."""
    dumped = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)
    assert isinstance(dumped, str)
    return dumped


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes for readers of YAML 1.1, and of 1.2, where more text is a number: 1e3, 0o17."""


for _name, _form in (("int", _INT), ("float", _FLOAT)):
    _whole = re.compile(f"^(?:{_form.pattern})$")
    _Dumper.add_implicit_resolver(_CORE + _name, _whole, list("-+.0123456789"))


def _document(events: Iterator[Any]) -> Any:
    """The value of a stream that holds one document, or none."""
    next(events)  # the stream's start
    event = next(events)
    if isinstance(event, yaml.StreamEndEvent):
        return None
    value = _node(next(events), events, 0)
    next(events)  # the document's end
    event = next(events)
    if not isinstance(event, yaml.StreamEndEvent):
        raise _Refused(event, "not valid YAML: a second document begins; only one is allowed")
    return value


def _node(event: Any, events: Iterator[Any], depth: int) -> Any:
    if isinstance(event, yaml.AliasEvent):  # also what makes "billion laughs" files
        raise _Refused(event, "aliases (*name) are not allowed")
    if event.tag is not None:
        tag = event.tag.replace(_CORE, "!!", 1)
        raise _Refused(event, f"not valid YAML: the tag {tag} is not allowed; quotes make text")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event)
    if depth == DEEPEST:
        raise _Refused(event, f"not valid YAML: nested too deeply, at most {DEEPEST} levels")
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            items.append(_node(item, events, depth + 1))
        return items
    mapping: dict[str, Any] = {}
    while not isinstance(start := next(events), yaml.MappingEndEvent):
        key = _node(start, events, depth + 1)
        if type(key) is int:  # in files of others: 1: ...
            key = start.value
        if not isinstance(key, str):
            raise _Refused(start, f"key {key!r}: keys must be text")
        if key in mapping:
            raise _Refused(start, f"key {key!r} is given twice")
        mapping[key] = _node(next(events), events, depth + 1)
    return mapping


def _scalar(event: Any) -> str | int | float | bool | None:
    text = str(event.value)
    if not text.isascii() and _SURROGATE.search(text):  # an escape; libyaml refuses it itself
        raise _Refused(event, "not valid YAML: \\ud800 to \\udfff are no characters")
    if not event.implicit[0]:  # quoted
        return text
    try:
        return _resolved(text)
    except (ValueError, OverflowError):
        raise _Refused(event, f"a number has more than {_LONGEST_NUMBER} digits") from None


@lru_cache(maxsize=4096)
def _resolved(text: str) -> str | int | float | bool | None:
    """A plain scalar's value in the core schema. Raises ValueError for an endless number."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if text[0] not in "-+.0123456789":
        return text
    if _INT.fullmatch(text):
        if len(text) > _LONGEST_NUMBER:
            raise ValueError
        base = _BASES.get(text[:2], 10)
        return int(text[2:] if base != 10 else text, base)
    if _FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1) if text[-1] in "fFnN" else text)
    return text
