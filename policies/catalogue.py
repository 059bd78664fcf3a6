"""Policies by name: whatever a module of this package marks with ``@named``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

import policies
from policies.policy import Builder, Policy


@cache
def builders() -> dict[str, Builder]:
    """Every named policy, sorted: a class, or a function that returns a policy.

    Raises ValueError where two have the same name.
    """
    found: dict[str, Builder] = {}
    for module in pkgutil.iter_modules(policies.__path__, "policies."):
        for item in vars(importlib.import_module(module.name)).values():
            name = getattr(item, "policy_name", None)
            if name is None or item.__module__ != module.name or not callable(item):
                continue
            if name in found:
                raise ValueError(f"{module.name}: there are two policies called {name!r}")
            found[name] = item
    return dict(sorted(found.items()))


def build(name: str, **arguments: Any) -> Policy:
    """The named policy with its arguments. Raises KeyError for an unknown name."""
    return builders()[name](**arguments)
