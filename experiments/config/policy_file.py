"""A user's own policy: of a file, kept with a result; or of a session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.key_paths import Source
from sarathi_sim.experiments.config.policy import (
    FilePolicy,
    NamedPolicy,
    SessionPolicy,
    code_sha256,
    file_policy,
)
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.policies.catalogue import PolicyFileError, builders_in, error_line
from sarathi_sim.policies.policy import is_pooled, of_micro_batches
from sarathi_sim.profiler.storage.files import read_bounded
from sarathi_sim.profiler.storage.paths import user_path
from sarathi_sim.profiler.storage.strict import did_you_mean, mistakes
from sarathi_sim.simulator.loop.simulation import SimulationError

_MOST_BYTES = 1_000_000


def read_policy(keys: Mapping[str, Any], source: Source) -> FilePolicy:
    """The policy that ``{file: mine.py, name: ..., ...}`` describes. **This executes the file.**

    Raises ConfigError, a line per mistake.
    """
    file = keys["file"]
    if not isinstance(file, str) or not file:
        raise source.error("policy.file", file, "must be the path of a Python file")
    path, code = _read(file, source)
    try:
        policy = _checked(keys, path, code, source)
        policy.build()
    except PolicyFileError as error:
        raise source.error("policy.file", file, str(error)) from error
    return policy


def session_policy(given: Any, source: Source) -> SessionPolicy:
    """The policy that a class or an object of the caller's session is. Raises ConfigError."""
    builder = given if isinstance(given, type) else type(given)
    try:
        made = given() if given is builder else given
        if not is_pooled(made):
            of_micro_batches(made).holds_finished  # noqa: B018
    except Exception as error:
        problem = f"is no policy: {error_line(error, '')}"
        raise source.error("policy", builder.__name__, problem) from error
    return SessionPolicy(name=getattr(builder, "policy_name", builder.__name__), given=made)


def refuse_of_session(scenario: Scenario, source: Source) -> None:
    """Raises ConfigError for a policy that neither a file nor another process can have."""
    if isinstance(scenario.policy, SessionPolicy):
        problem = (
            "is an object of this session, which a folder cannot keep: write the policy to a file, "
            "and name it (file: mine.py, name: ...)"
        )
        raise source.error("policy", scenario.policy.name, problem)


def _checked(keys: Mapping[str, Any], path: Path, code: str, source: Source) -> FilePolicy:
    found = builders_in(code, str(path))
    if not found:
        raise PolicyFileError("marks no policy with @named")
    name, options = keys.get("name"), ", ".join(found)
    if name is None:
        where = source.name(("policy", "name"))
        raise ConfigError(f"{where}: this key is missing; one of {options}")
    if not isinstance(name, str) or name not in found:
        problem = f"one of {options}{did_you_mean(str(name), found)}"
        raise source.error("policy.name", name, problem)
    given, known = keys.get("sha256"), code_sha256(code)
    if given is not None and given != known:
        problem = f"{path} has another content, of SHA-256 {known}"
        raise source.error("policy.sha256", given, problem)
    model = file_policy(code, str(path), name)
    try:
        return model.model_validate({**keys, "file": str(path), "sha256": known})
    except ValidationError as error:
        lines = mistakes(error, model, keys, lambda key: source.name(("policy", *key)))
        raise ConfigError("\n".join(lines)) from None


def _read(file: str, source: Source) -> tuple[Path, str]:
    try:
        path = source.folder(("policy", "file")) / user_path(file)
        return path, read_bounded(path, _MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        problem = "is not UTF-8 text"
    except ConfigError as error:
        problem = str(error)
    raise source.error("policy.file", file, problem)


@contextmanager
def policy_errors(policy: NamedPolicy) -> Iterator[None]:
    """Turns an error of a user's policy in a simulation into a ConfigError."""
    try:
        yield
    except (ConfigError, SimulationError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too
        if not isinstance(policy, FilePolicy):
            raise
        problem = error_line(error, policy.file)
        raise ConfigError(f"{policy.file}: policy {policy.name}: {problem}") from error


def stored(scenario: Scenario, name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A resolved scenario as in a result's ``config.yaml``, and the files stored with it.

    A user's policy is stored, so that the result can be simulated again anywhere; profiles have
    their whole path, so that this machine can from any folder.
    """
    content, policy = scenario.model_dump(), scenario.policy
    if scenario.profiles:
        content["profiles"] = str(user_path(scenario.profiles).absolute())
    if not isinstance(policy, FilePolicy):
        return content, {}
    content["policy"]["file"] = f"{name}/policy.py"
    return content, {f"{name}/policy.py": policy.code.encode()}
