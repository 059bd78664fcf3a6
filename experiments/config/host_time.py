"""What an engine's host adds to its kernels' times: shipped constants by serving stack.

``data/host_time.yaml`` holds them, with origin, plausible ranges and what they were fitted to. They
are the defaults of ``engine.host_iteration_s``, ``host_sequence_s`` and ``frontend_s`` where a
scenario names a stack. ``host_time_mixtures.yaml`` holds those of servers of mixtures of experts.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache

from experiments.config.scenario import Engine, Scenario
from profiler.storage.paths import data_dir
from profiler.storage.plain_yaml import read_mapping
from profiler.storage.strict import parse, strict_dataclass
from simulator.op_times.iteration import HostTime


@strict_dataclass
class HostConstants:
    """Seconds: of an iteration, of each sequence in it, and of a request on its way from the client
    to the scheduler and of its first token back (``frontend_token_s`` of these for each token of
    its prompt); and of launching a call of a layer where no CUDA graph does."""

    host_iteration_s: float
    host_sequence_s: float
    frontend_s: float
    frontend_token_s: float = 0.0
    launch_s: float = 0.0


@strict_dataclass
class StackErrors:
    """Standard deviations of the logarithm of a server's mean TTFT and TPOT that the errors of its
    ops do not explain: settings, version, scheduler."""

    ttft: float
    tpot: float


NONE = HostConstants(0.0, 0.0, 0.0)


@strict_dataclass
class Meaning:
    """A constant: what it stands for, and the plausible range that bounds its fit, in seconds."""

    meaning: str
    range: tuple[float, float]


@strict_dataclass
class Fold:
    """The constants by stack that were fitted without some ``servers``."""

    servers: list[str]
    stacks: dict[str, HostConstants]
    errors: dict[str, StackErrors]


@strict_dataclass
class HostTimes:
    """The file. ``measured`` is of another engine and data set, ``stacks`` was ``fitted_to`` rows
    of measured servers, and so was each of ``folds`` without its servers."""

    constants: dict[str, Meaning]
    measured: HostConstants
    measured_origin: str
    fitted_to: str
    stacks: dict[str, HostConstants]
    errors: dict[str, StackErrors]
    folds: list[Fold]

    def without(self, stack: str, server: str) -> tuple[HostConstants, StackErrors]:
        """The stack's constants and errors as fitted without a server, where it was among those
        fitted to. A stack of which nothing is known has its engine's."""
        fold = next((fold for fold in self.folds if server in fold.servers), self)
        known = stack if stack in fold.stacks else stack.partition(" ")[0]
        return fold.stacks[known], fold.errors[known]


@lru_cache(maxsize=2)
def host_times(mixtures: bool = False) -> HostTimes:
    """The shipped constants, of dense models or of ``mixtures`` of experts."""
    path = data_dir() / ("host_time_mixtures.yaml" if mixtures else "host_time.yaml")
    return parse(HostTimes, read_mapping(path), path)


def host_of(engine: Engine) -> HostTime:
    """The host's time in each iteration, as the engine's section has it."""
    return HostTime(
        engine.host_iteration_s or 0.0, engine.host_sequence_s or 0.0, engine.launch_layer_s
    )


def with_host_time(scenario: Scenario) -> tuple[Engine, tuple[str, ...]]:
    """The engine's section with every constant filled in, and a note on those that are defaults."""
    given = scenario.engine
    stack = scenario.stack
    defaults = asdict(host_times().stacks[stack] if stack else NONE)
    missing = {k: value for k, value in defaults.items() if getattr(given, k, value) is None}
    notes: tuple[str, ...] = ()
    if stack and missing:
        listed = ", ".join(f"{key} {1e3 * value:.3g} ms" for key, value in missing.items())
        notes = (f"host time of {stack}: {listed}; {host_times().fitted_to}",)
    return given.model_copy(update=missing), notes
