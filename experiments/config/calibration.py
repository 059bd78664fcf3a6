"""What ``sarathi-sim tune`` found of a user's own server, for other runs of it."""

from __future__ import annotations

from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sarathi_sim.profiler.facts.formats import named_stack
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ALL_TO_ALL, OPS, SEND_RECV
from sarathi_sim.profiler.storage.files import read_bounded, user_path
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml, read_mapping
from sarathi_sim.profiler.storage.strict import SpecError, UserError, parse, strict_dataclass
from .base import Source
from .scenario import Scenario

MARK = "# written by sarathi-sim tune\n"
LINKS = (ALL_REDUCE, ALL_TO_ALL, SEND_RECV)
Constant = Literal[
    "host_iteration_s", "host_sequence_s", "launch_layer_s", "frontend_s", "admission_s"
]
Factor = Annotated[float, Field(ge=0.1, le=10)]


@strict_dataclass
class ServerCalibration:
    """The constants of one server's ``engine`` (of a ``stack``, with a ``model`` on a ``device``)
    in seconds, and factors on the times of its ``kernels`` and of messages over its ``links``,
    fitted to ``runs``. ``known`` is, by constant, 1 if the runs settle it and 0 if they say
    nothing of it.
    """

    stack: str
    model: str
    device: str
    runs: list[str]
    engine: dict[Constant, Annotated[float, Field(ge=0, le=3600)]]
    kernels: Factor
    links: Factor
    known: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """The file."""
        return MARK + dump_yaml(asdict(self), width=96)


def factors(kernels: float, links: float) -> dict[str, float]:
    """Factors on the time of each op."""
    return {op: links if op in LINKS else kernels for op in OPS}


def check_replaceable(path: Path) -> None:
    """Raises UserError for a file that tune did not write, or where there is no folder for it."""
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}")
    if path.exists() and not (path.is_file() and read_bounded(path).startswith(MARK.encode())):
        raise UserError(f"{path}: exists, and tune did not write it: give another name")


def calibration_of(scenario: Scenario, source: Source) -> ServerCalibration | None:
    """The calibration that a scenario names. On another device its factors are 1: they belong to
    the device, the engine's constants to the host.

    Raises UserError for a file that is none, or that is of another engine.
    """
    if scenario.calibration is None:
        return None
    try:
        path = user_path(scenario.calibration)
        found = read_calibration(path)
    except (UserError, SpecError) as error:
        raise source.error("calibration", scenario.calibration, str(error)) from None
    engine = named_stack(scenario.stack)[0] if scenario.stack else "no stack"
    if engine != found.stack:
        problem = f"is of {found.stack}, and this scenario has {engine}"
        raise source.error("calibration", scenario.calibration, problem)
    if scenario.device == found.device:
        return found
    return replace(found, kernels=1.0, links=1.0)


def read_calibration(path: Path) -> ServerCalibration:
    """The calibration in a file. Raises SpecError if it is none."""
    return parse(ServerCalibration, read_mapping(path), path)
