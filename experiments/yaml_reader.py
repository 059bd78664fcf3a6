"""YAML read safely and strictly: no tags that construct objects, no duplicate keys, no aliases."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from experiments.errors import ConfigError


class _Reader(yaml.SafeLoader):
    """The safe loader, minus what lets a file surprise its reader."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # also what makes "billion laughs" files
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise ConfigError(_at(event.start_mark, "aliases (*name) are not allowed"))
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(_at(key_node.start_mark, f"key {key!r}: keys must be text"))
            if key in seen:
                raise ConfigError(_at(key_node.start_mark, f"key {key!r} is given twice"))
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-3 as text, for want of a dot; everyone who writes it means a number.
_Reader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*[eE][-+]?\d+$"), list("-+0123456789")
)


def _at(mark: Any, text: str) -> str:
    return f"line {mark.line + 1}: {text}"


def parse_yaml(text: str, where: str) -> Any:
    """The value in a piece of YAML. Raises ConfigError, naming ``where`` and the line."""
    try:
        return _Reader(text).get_single_data()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = f"not valid YAML: {error.problem or error.context}"
        raise ConfigError(f"{where}: {_at(mark, problem) if mark else problem}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date such as 2024-99-99
        reason = str(error).replace("\n", " ")
        raise ConfigError(f"{where}: not valid YAML: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML: nested too deeply") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError when there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not valid YAML: it is not UTF-8 text") from None
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys and values, as in 'name: first'")
    return content
