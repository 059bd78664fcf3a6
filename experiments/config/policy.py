"""The ``policy`` section: a shipped policy by its name, or a policy of a user's file.

The parameters of a policy's constructor are its keys. A user's file is kept with a result; an
object of the caller's session cannot be.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from inspect import Parameter, signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    get_type_hints,
)

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic.errors import PydanticUserError

from sarathi_sim.policies.catalogue import (
    Builder,
    PolicyFileError,
    build,
    builders,
    builders_in,
    complete,
    error_line,
    foreign_code,
)
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.pool import PoolPolicy
from sarathi_sim.profiler.storage.files import read_bounded, user_path
from sarathi_sim.profiler.storage.strict import SpecError, UserError, did_you_mean
from sarathi_sim.simulator.loop.simulation import SimulationError
from .base import Source, Strict, Text, Tokens
from .base import key as named


class NamedPolicy(Strict):
    """A policy's name, and its arguments."""

    name: str

    def build(self) -> Policy | PoolPolicy:
        """The policy object this describes."""
        return build(**self.described())

    def described(self) -> dict[str, Any]:
        """Name and arguments, as ``sarathi_sim.policies.catalogue.build`` takes them."""
        return self.model_dump()


class ShippedPolicy(NamedPolicy):
    """A shipped policy. Its class is made at run time, so it is pickled by name."""

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        self.build()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _shipped, (self.model_dump(),)


class FilePolicy(NamedPolicy):
    """A policy of a user's file; its subclasses hold the file's ``code``. It is pickled as that
    code, so that a worker needs no such file. ``sha256`` is that of the file."""

    code: ClassVar[str]
    file: Text
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    def described(self) -> dict[str, Any]:
        """See :meth:`NamedPolicy.described`."""
        return self.model_dump(exclude={"sha256"}) | {"code": self.code}

    def build(self) -> Policy | PoolPolicy:
        """The policy object this describes. Raises PolicyFileError where there is none."""
        with foreign_code(self.file, f"{self.name} cannot be built: "):
            return super().build()

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.code, self.model_dump())


class SessionPolicy(NamedPolicy):
    """A policy object of the caller's session. It is in no file, so a result cannot keep it, and
    no other process can have it."""

    given: Annotated[Any, Field(exclude=True)]

    def build(self) -> Policy | PoolPolicy:
        """The object itself: policies keep no state."""
        built: Policy | PoolPolicy = self.given
        return built


_Kind = TypeVar("_Kind", bound=NamedPolicy)
_BOUNDED: dict[Any, Any] = {
    int: Tokens,
    int | None: Tokens | None,
    float: Annotated[float, Field(ge=0, le=1e12)],
    float | None: Annotated[float, Field(ge=0, le=1e12)] | None,
}
"""Bounds of a policy's numbers: counts are at least 1, all others at least 0."""
_NAMES = {"chunk_size": ("chunk size", "tokens", "chunk"), "tile": ("tile", "tokens")}
"""Names of those keys of policies whose words alone are no good name."""
_FILE_KEYS = ("name", "file", "sha256", "code")


def _quoted(version: Any) -> Any:
    if isinstance(version, int | float):
        raise ValueError('must be in quotes, as in "0.33": 0.30 is not 0.3')
    return version


@lru_cache(maxsize=64)
def file_policy(code: str, file: str, name: str) -> type[FilePolicy]:
    """The keys that a policy of the user's file takes. Raises PolicyFileError."""
    with foreign_code(file, f"{name}: "):
        model = _policy_model(name, builders_in(code, file)[name], FilePolicy, _FILE_KEYS)
    model.code = code
    return model


def _again(code: str, keys: dict[str, Any]) -> FilePolicy:
    return file_policy(code, keys["file"], keys["name"]).model_validate(keys)


def _policy_model(
    name: str, builder: Builder, base: type[_Kind], reserved: Iterable[str] = ("name",)
) -> type[_Kind]:
    """The keys of a policy: the parameters of its constructor. Whole numbers are counts."""
    fields: dict[str, Any] = {"name": (Literal[name], ...)}
    try:
        made_by = builder.__init__ if isinstance(builder, type) else builder  # type: ignore[misc]
        hints = get_type_hints(made_by)
        parameters = signature(builder).parameters
    except (TypeError, ValueError, NameError) as error:
        raise PolicyFileError(f"{name}: its parameters cannot be read: {error}") from None
    for key, parameter in parameters.items():
        if key in reserved:
            raise PolicyFileError(f"{name}: a parameter cannot be called {key}: the key is taken")
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        needed = parameter.default is Parameter.empty
        hint = hints.get(key, Any)
        kind = _BOUNDED.get(hint, hint) if isinstance(hint, Hashable) else hint
        kind = (
            Annotated[kind, BeforeValidator(_quoted)] if (key, hint) == ("version", str) else kind
        )
        default = ... if needed else parameter.default
        fields[key] = (kind, named(*_NAMES[key], default=default) if key in _NAMES else default)
    about = (builder.__doc__ or "").partition("\n")[0]
    try:
        model = create_model(
            f"{name}_policy", __base__=base, __doc__=about, __module__=__name__, **fields
        )
        model.model_rebuild()  # raises where a type of the user's cannot be resolved
        return model
    except (PydanticUserError, NameError, ValueError) as error:
        problem = str(error).partition("\n")[0]
        raise PolicyFileError(f"{name}: its parameters cannot be keys: {problem}") from None


POLICIES = {
    name: _policy_model(name, builder, ShippedPolicy) for name, builder in builders().items()
}
"""Every policy of ``policies/`` that has a name."""


def _shipped(keys: dict[str, Any]) -> ShippedPolicy:
    return POLICIES[keys["name"]].model_validate(keys)


_MOST_BYTES = 1_000_000


def _read_already(value: Any, validate: Any) -> Any:
    return value if isinstance(value, FilePolicy | SessionPolicy) else validate(value)


if TYPE_CHECKING:
    PolicyConfig = NamedPolicy
else:
    PolicyConfig = SerializeAsAny[
        Annotated[
            Union[tuple(POLICIES.values())],  # noqa: UP007
            Field(discriminator="name"),
            WrapValidator(_read_already),
        ]
    ]


# A user's policy ------------------------------------------------------------------------------


def read_policy(keys: Mapping[str, Any], source: Source) -> FilePolicy:
    """The policy that ``{file: mine.py, name: ..., ...}`` describes. **This executes the file.**
    Raises UserError, a line per mistake."""
    file = keys["file"]
    if not isinstance(file, str) or not file:
        raise source.error("policy.file", file, "must be the path of a Python file")
    try:
        path = source.folder(("policy", "file")) / user_path(file)
        code = read_bounded(path, _MOST_BYTES).decode("utf-8")
        policy = _described(keys, path, code, source)
        policy.build()
    except UnicodeDecodeError:
        raise source.error("policy.file", file, "is not UTF-8 text") from None
    except (PolicyFileError, SpecError) as error:
        raise source.error("policy.file", file, str(error)) from error
    return policy


def _described(keys: Mapping[str, Any], path: Path, code: str, source: Source) -> FilePolicy:
    found, name, stated = builders_in(code, str(path)), keys.get("name"), keys.get("sha256")
    if not found:
        raise PolicyFileError("marks no policy with @named")
    options, known = ", ".join(found), sha256(code.encode()).hexdigest()
    if name is None:
        raise source.error("policy.name", None, f"this key is missing; one of {options}")
    if not isinstance(name, str) or name not in found:
        problem = f"one of {options}{did_you_mean(str(name), found)}"
        raise source.error("policy.name", name, problem)
    if stated is not None and stated != known:
        problem = f"{path} has another content, of SHA-256 {known}"
        raise source.error("policy.sha256", stated, problem)
    given = {**keys, "file": str(path), "sha256": known}
    return source.checked(file_policy(code, str(path), name), given, "policy")


def session_policy(given: Any, source: Source) -> SessionPolicy:
    """The policy of a class or an object of the caller's session. Raises UserError."""
    builder = given if isinstance(given, type) else type(given)
    try:
        made = complete(given() if given is builder else given)
    except Exception as error:
        problem = f"is no policy: {error_line(error, '')}"
        raise source.error("policy", builder.__name__, problem) from error
    return SessionPolicy(name=getattr(builder, "policy_name", builder.__name__), given=made)


@contextmanager
def policy_errors(policy: NamedPolicy) -> Iterator[None]:
    """Turns an error of a user's policy in a simulation into a UserError."""
    try:
        yield
    except (UserError, SimulationError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too
        if not isinstance(policy, FilePolicy):
            raise
        problem = error_line(error, policy.file)
        raise UserError(f"{policy.file}: policy {policy.name}: {problem}") from error
