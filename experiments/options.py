"""The options that several commands have, each with its words, and how their text is read."""

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

import typer
from annotated_types import Ge, Le

from sarathi_sim.profiler.storage.strict import UserError, parse, strict_dataclass
from .config.base import Assignments, Config, Several

if TYPE_CHECKING:
    from .config.loading import Experiment
    from .sweeps.backends import Backend

P = ParamSpec("P")
T = TypeVar("T")
Folder = str | Path

# A parameter is an option if its Annotated has a help: before it may stand --NAME and the metavar,
# anywhere Ge and Le; a type in it is what the command line reads.
FolderText = Annotated[Folder, Path]
FolderTexts = Annotated[Sequence[Folder], list[Path]]
OutText = Annotated[Folder | None, Path | None]
SetText = Annotated[Assignments, list[str]]
Texts = Annotated[Sequence[str], list[str]]
Words = Annotated[Several, str]
_CONFIG = typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped one.")
ConfigArgument = Annotated[Config, _CONFIG, str]
ConfigOrExperiment = Annotated["Config | Experiment", _CONFIG, str]
SetOption = Annotated[SetText, "--set", "KEY.PATH=VALUE", "Change a value; may be repeated."]
LENGTHS = (
    "PROMPT:OUTPUT tokens, equal for all requests (1024:256) or spread around it (1024:256~0.5); "
    "total tokens @ their P:D ratio (1K@14, 1K@5..50, 1K@?); a trace; or a configuration."
)
WorkloadOption = Annotated[str | None, "LENGTHS", LENGTHS]
OutOption = Annotated[OutText, "Folder of the result.  [default: runs/NAME]"]
AlsoOption = Annotated[OutText, "Also write it to this folder, with figures."]
WorkersOption = Annotated[
    int | str | None,
    "N",
    "Processes, or the address of a Dask scheduler (tcp://HOST:PORT).  [default: all processors]",
    str | None,
]
ModelOption = Annotated[str, "A shipped model, its Hub name, or a config.json."]


def further(kind: type[T], assignments: Assignments) -> T:
    """The options of ``kind`` that ``--set NAME=VALUE`` gives. Raises UserError."""
    from sarathi_sim.profiler.storage.plain_yaml import parse_yaml

    if not isinstance(assignments, Mapping):
        if wrong := [text for text in assignments if "=" not in text]:
            raise UserError(f"--set {wrong[0]}: expected NAME=VALUE")
        pairs = ((text, text.partition("=")) for text in assignments)
        assignments = {name: parse_yaml(value, f"--set {text}") for text, (name, _, value) in pairs}
    return parse(kind, assignments, "--set")


def last_of(function: Callable[P, Iterator[T]], name: str) -> Callable[P, T]:
    """The function ``name`` with the same parameters, which returns the last of its results."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return deque(function(*args, **kwargs), maxlen=1).pop()

    called.__name__ = called.__qualname__ = name
    of_one, *_ = get_args(signature(function).return_annotation)
    called.__signature__ = signature(function).replace(return_annotation=of_one)  # type: ignore[attr-defined]
    return called


_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


def seconds_of(option: str, given: float | str | None) -> float:
    """A time such as 10, 10s, 2min or 1h; without one infinity. Raises UserError."""
    if given is None:
        return math.inf
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(s|m|min|h|)", str(given))
    if match is None or not 0 < (seconds := float(match[1]) * _UNITS[match[2]]) < 1e7:
        raise UserError(f"{option} {str(given)[:99]}: expected a time such as 10s, 2min or 1h")
    return seconds


def refuse_options(options: Mapping[str, object], where: str) -> None:
    """Raises UserError for an option with a value, which has no effect ``where`` it stands."""
    for name, value in options.items():
        if value:
            raise UserError(f"--{name}: has no effect {where}")


def in_a_paragraph(kind: type[Any]) -> str:
    """The options that ``--set`` reaches, for ``--help``."""
    hints = get_type_hints(kind, include_extras=True)
    said = (f"{name} ({hint.__metadata__[-1]})" for name, hint in hints.items())
    return f"Any other option; may be repeated: {', '.join(said)}."


@strict_dataclass
class Choosing:
    """The options of ``recommend`` that ``--set`` gives."""

    max_length: Annotated[int | None, Ge(2), "longest sequence, tokens"] = None
    tolerance: Annotated[float, Ge(0.01), Le(0.5), "relative error of a capacity: 0.05"] = 0.05
    rejected: Annotated[float, Ge(0), Le(0.99), "share of requests that may be rejected: 0"] = 0.0
    drafts: Annotated[int | str | list[int] | None, "draft lengths to try, as 0,1,2"] = None
    refine: Annotated[int, Ge(0), Le(10), "rounds halfway to the neighbours: 0"] = 0
    prices: Annotated[str | None, "YAML file of GPU prices"] = None
    profiles: Annotated[str | None, "folder of profile bundles, with --policy"] = None


RUNS = Path("runs/NAME")
"""``out`` of a command: NAME stands for the configuration's."""


def named(out: Folder, name: str) -> Path:
    """The folder ``out``."""
    return RUNS.with_name(name) if out == RUNS else Path(out)


def written(out: Folder | None, folder: Path | None = None) -> list[Path]:
    """Where a result is, if ``out`` is given: there, or in the ``folder`` that it stands for."""
    return [] if out is None else [folder or Path(out)]


@contextmanager
def backend_of(workers: int | str | None) -> "Iterator[Backend]":
    """Processes, or the workers of a Dask cluster, closed at the end. Raises UserError."""
    from .sweeps.backends import DaskWorkers, InProcess, LocalProcesses, processors

    backend: Backend
    said = str(workers)[:99]
    if "://" in said:
        backend = DaskWorkers(str(workers))
    elif workers is None or (said.isdecimal() and len(said) < 5 and 1 <= int(said) <= 4096):
        wanted = processors() if workers is None else int(said)
        backend = LocalProcesses(wanted) if wanted > 1 else InProcess()
    else:
        raise UserError(f"--workers {said}: must be 1 to 4096, or an address (tcp://HOST:PORT)")
    try:
        yield backend
    finally:
        backend.close()
