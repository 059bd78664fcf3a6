"""What ``sarathi-sim tune`` found of a user's own server, for other runs of it."""

from __future__ import annotations

from dataclasses import asdict, field, replace
from pathlib import Path

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.profiler.facts.formats import named_stack
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ALL_TO_ALL, OPS, SEND_RECV
from sarathi_sim.profiler.storage.files import read_bounded, user_path
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml, read_mapping
from sarathi_sim.profiler.storage.strict import SpecError, parse, strict_dataclass
from sarathi_sim.simulator.op_times.op_times import OpTimes

MARK = "# written by sarathi-sim tune\n"
LINKS = (ALL_REDUCE, ALL_TO_ALL, SEND_RECV)


@strict_dataclass
class ServerCalibration:
    """The constants of one server's ``engine`` (of a ``stack``, on a ``device``) in seconds, and
    factors on the times of its ``kernels`` and of messages over its ``links``, fitted to ``runs``.

    ``known`` is, by constant, 1 if the runs settle it and 0 if they say nothing of it.
    """

    stack: str
    device: str
    runs: list[str]
    engine: dict[str, float]
    kernels: float
    links: float
    known: dict[str, float] = field(default_factory=dict)

    def of(self, ops: OpTimes) -> OpTimes:
        """The op times with its factors, and with bands narrower by what is known of kernels."""
        kernels = ops.meta.kernels
        if kernels is not None:
            left = {op: 1 - self.known.get(_factor(op), 0.0) for op in kernels.half_width_pct}
            half = {op: width * left[op] for op, width in kernels.half_width_pct.items()}
            kernels = replace(kernels, half_width_pct=half)
        named = f"{ops.meta.content_sha256} {self}"
        meta = replace(ops.meta, kernels=kernels, content_sha256=named)
        return replace(ops, meta=meta).scaled({op: getattr(self, _factor(op)) for op in OPS})

    def text(self) -> str:
        """The file."""
        return MARK + dump_yaml(asdict(self), width=96)


def check_replaceable(path: Path) -> None:
    """Raises ConfigError for a file that :func:`tune` did not write."""
    if path.exists() and not (path.is_file() and read_bounded(path).startswith(MARK.encode())):
        raise ConfigError(f"{path}: exists, and tune did not write it: give another name")


def _factor(op: str) -> str:
    return "links" if op in LINKS else "kernels"


def calibration_of(scenario: Scenario, source: Source) -> ServerCalibration | None:
    """The calibration that a scenario names. On another device its factors are 1: they belong to
    the device, the engine's constants to the host.

    Raises ConfigError for a file that is none, or that is of another engine.
    """
    if scenario.calibration is None:
        return None
    try:
        path = user_path(scenario.calibration)
        found = read_calibration(path)
    except (ConfigError, SpecError) as error:
        raise source.error("calibration", scenario.calibration, str(error)) from None
    engine = named_stack(scenario.stack)[0] if scenario.stack else "no stack"
    if engine != found.stack:
        problem = f"is of {found.stack}, and this scenario has {engine}"
        raise source.error("calibration", scenario.calibration, problem)
    if scenario.device == found.device:
        return found
    return replace(found, kernels=1.0, links=1.0, known={})


def read_calibration(path: Path) -> ServerCalibration:
    """The calibration in a file. Raises SpecError if it is none."""
    return parse(ServerCalibration, read_mapping(path), path)
