"""Typed access to the keys of a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sarathi_sim.profiler.facts.hf_keys import short
from sarathi_sim.profiler.storage.strict import SpecError

_MOST = 2**24
"""No size of a model is larger; ModelSpec's own bounds are narrower."""
#: No model has more layers.
MOST_LAYERS = 4096


class HfConfig:
    """Typed access to the keys of one config.json; errors name the file and the key.

    ``used`` collects the keys that were asked for, and those declared to cost nothing.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = dict(config), where
        self.used: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        self.used.add(key)
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise SpecError(f"{self.where}: key '{key}' is missing")
            return default
        if type(value) is not int or not 0 < value <= _MOST:
            raise SpecError(
                f"{self.where}: {key} must be a positive integer, got {short(value)}"
                if type(value) is not int or value <= 0
                else f"{self.where}: {key} must be at most {_MOST}, got {short(value)}"
            )
        return value

    def layers(self) -> int:
        """``num_hidden_layers``, which readers may list one by one."""
        value = self.integer("num_hidden_layers")
        if value > MOST_LAYERS:
            raise SpecError(
                f"{self.where}: num_hidden_layers must be at most {MOST_LAYERS}, got {value}"
            )
        return value

    def count(self, key: str, default: int = 0) -> int:
        """Zero or a positive integer; ``default`` also for null."""
        value = self.config.get(key)
        self.used.add(key)
        if value is None or value is False or value == 0:
            return default if value is None else 0
        return self.integer(key)

    def window(self, default: int, key: str = "sliding_window") -> int:
        """Tokens that a layer sees: ``default`` where the file says nothing; 0 (all) for null."""
        return self.count(key) if key in self.config else default

    def flag(self, key: str, default: bool) -> bool:
        self.used.add(key)
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(f"{self.where}: {key} must be true or false, got {short(value)}")
        return value

    def share(self, whole: str, parts: str) -> int:
        """``whole`` over ``parts``. Raises SpecError where that leaves a remainder."""
        size, count = self.integer(whole), self.integer(parts)
        if size % count:
            raise SpecError(
                f"{self.where}: {whole} ({size}) must be a multiple of {parts} ({count})"
            )
        return size // count

    def listed(self, key: str, length: int | None = None) -> list[Any] | None:
        """A list (of that ``length``), or None."""
        self.used.add(key)
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or length not in (None, len(value)):
            many = "" if length is None else f" of {length}"
            raise SpecError(f"{self.where}: {key} must be a list{many}, got {short(value)}")
        return value

    def free(self, keys: str) -> None:
        """Declare keys to cost nothing in this type of model, whatever their values."""
        self.used |= set(keys.split())

    def default(self, **values: int) -> None:
        """Values of keys that the file leaves out."""
        self.config = {**values, **self.config}
