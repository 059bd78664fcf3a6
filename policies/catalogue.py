"""Policies by name: everything that this package or a user's file marks with ``@named``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from hashlib import sha256
from traceback import walk_tb
from types import ModuleType
from typing import Any, TypeGuard, cast

from sarathi_sim import policies
from .policy import Chunking, Policy, add_defaults
from .pool import PoolPolicy

Builder = Callable[..., Policy | PoolPolicy]

# Old top-level packages, now in ``sarathi_sim``: users' older policy files import them.
_FORMER = ("policies", "profiler", "simulator", "experiments")


class PolicyFileError(ValueError):
    """A file of policies cannot be used; the message is one line."""


@cache
def builders() -> dict[str, Builder]:
    """Every shipped policy, sorted by name: a class, or a function that returns a policy. Raises
    PolicyFileError where two have the same name."""
    found: dict[str, Builder] = {}
    for module in pkgutil.iter_modules(policies.__path__, f"{policies.__name__}."):
        _collect(importlib.import_module(module.name), found)
    return dict(sorted(found.items()))


@lru_cache(maxsize=64)
def builders_in(code: str, file: str) -> dict[str, Builder]:
    """Every policy of a user's file, by name. **This executes ``code``.** ``file`` is its name in
    tracebacks and messages. Raises PolicyFileError if it cannot be executed, or if two policies
    have the same name."""
    module = ModuleType(f"policy_file_{sha256(code.encode()).hexdigest()[:16]}", None)
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses look their module up
    found: dict[str, Builder] = {}
    try:
        with foreign_code(file):
            exec(compile(code.encode(), file, "exec", dont_inherit=True), module.__dict__)
            _collect(module, found)
    except PolicyFileError:
        del sys.modules[module.__name__]
        raise
    return dict(sorted(found.items()))


@contextmanager
def foreign_code(file: str, what: str = "") -> Iterator[None]:
    """Turns whatever a user's code raises, SystemExit too, into a PolicyFileError of one line that
    begins with ``what``; an interruption (KeyboardInterrupt) goes through."""
    try:
        yield
    except (KeyboardInterrupt, PolicyFileError):
        raise
    except BaseException as error:
        raise PolicyFileError(f"{what}{error_line(error, file)}") from error


def error_line(error: BaseException, file: str) -> str:
    """An exception in one line, with the last line of ``file`` in its traceback."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"line {error.lineno}: {error.msg}"
    where = ""
    for frame, line in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == file:
            where = f"line {line}: "
    try:
        said = " ".join(str(error).split())
    except Exception:  # its __str__ is the user's, too
        said = ""
    if isinstance(error, ModuleNotFoundError) and error.name in _FORMER:
        said += f": from sarathi_sim.{error.name}... is meant"
    return f"{where}{type(error).__name__}: {said}".removesuffix(": ")


def build(
    name: str, code: str | None = None, file: str = "", **arguments: Any
) -> Policy | PoolPolicy:
    """The named policy with its arguments: a shipped one, or one of a file with content ``code``.
    Raises KeyError for an unknown name."""
    found = builders() if code is None else builders_in(code, file)
    return complete(found[name](**arguments))


def complete(policy: Policy | PoolPolicy) -> Policy | PoolPolicy:
    """The policy, whose class now has the default of every attribute that it left out. Raises
    TypeError where one is missing that has none."""
    add_defaults(type(policy))
    needed = ["plan", "max_num_seqs"] if policy.pooled else ["plan"]
    if missing := [name for name in needed if not hasattr(policy, name)]:
        raise TypeError(f"it has no attribute {missing[0]}; needed: {' and '.join(needed)}")
    if not isinstance(policy.chunking, Chunking | None):
        raise TypeError(f"its chunking is no Chunking, but {policy.chunking!r}")
    return policy


def is_pooled(policy: Policy | PoolPolicy) -> TypeGuard[PoolPolicy]:
    """Whether a policy acts on a pool, not on one micro-batch."""
    return policy.pooled


def of_micro_batches(policy: Policy | PoolPolicy) -> Policy:
    """The policy, if it plans for one micro-batch. Raises ValueError if it acts on a pool."""
    if is_pooled(policy):
        raise ValueError("this policy acts on a pool with paged memory")
    return cast(Policy, policy)


def needs_of(policy: Policy | PoolPolicy) -> dict[str, tuple[str, bool]]:
    """By parameter of a policy, what it ``needs``, and whether this is an attribute of the policy
    that is set."""
    return {key: (need, bool(getattr(policy, need, False))) for key, need in policy.needs.items()}


def _collect(module: ModuleType, found: dict[str, Builder]) -> None:
    """Add the policies that ``module`` itself defines, not those that it imports."""
    for item in vars(module).values():
        name = getattr(item, "policy_name", None)
        if not (isinstance(name, str) and callable(item)) or item.__module__ != module.__name__:
            continue
        if found.get(name, item) is not item:
            raise PolicyFileError(f"there are two policies called {name!r}")
        found[name] = item
