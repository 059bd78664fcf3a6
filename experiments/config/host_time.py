"""What an engine's host adds to its kernels' times: shipped constants by serving stack.

``data/host_time.yaml`` holds them, with origin, plausible ranges and what they were fitted to. They
are the defaults of ``engine.host_iteration_s``, ``host_sequence_s`` and ``frontend_s`` where a
scenario names a stack. ``host_time_mixtures.yaml`` holds those of servers of mixtures of experts,
and of launching (``launch_layer_s``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache

from sarathi_sim.experiments.config.scenario import Engine, Scenario
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import MOE, OPS, elementwise
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import parse, strict_dataclass
from sarathi_sim.simulator.op_times.iteration import HostTime


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
#: The engine's keys that have a default by stack.
DEFAULTS = tuple(key for key, field in Engine.model_fields.items() if field.default is None)
#: Calls of a layer beside its GEMMs, norms and activations (additions are fused with norms, rotary
#: with attention): routing, permutation and the experts; attention and what writes the cache; two
#: all-reduces. Assumed.
_EXPERT_CALLS, _OTHER_CALLS = 3, 4
_FUSED = ("add", "rope")


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
    given = {key.removeprefix("host_"): value for key, value in engine}
    return HostTime(**{each.name: given[each.name] or 0.0 for each in fields(HostTime)})


def with_host_time(
    scenario: Scenario, model: ModelSpec, requests: Sequence[Request]
) -> tuple[Engine, tuple[str, ...]]:
    """The engine's section with every constant filled in, and notes on its host's time.

    A mixture of experts has the constants of mixtures. Those of a prompt's token and of a launch
    count for the mean prompt of ``requests`` and for the calls of the ``model``'s layer.
    """
    given, stack = scenario.engine, scenario.stack
    times = host_times(mixtures=model.experts is not None)
    known = times.stacks[stack] if stack else NONE
    defaults = {key: getattr(known, key, 0.0) for key in DEFAULTS}
    if known.frontend_token_s and requests:
        mean_prompt = sum(request.prompt_tokens for request in requests) / len(requests)
        defaults["frontend_s"] += known.frontend_token_s * mean_prompt
    if known.launch_s:
        defaults["launch_layer_s"] = known.launch_s * calls_of_layer(model, scenario.dtype)
    missing = {key: value for key, value in defaults.items() if getattr(given, key) is None}
    engine = given.model_copy(update=missing)
    shipped, own = list[str](), list[str]()
    for key in DEFAULTS:
        if value := getattr(engine, key):
            where = shipped if value == defaults[key] else own
            where.append(f"{key} {1e3 * value:.3g} ms")
    notes = [f"host time: {stack}'s, {', '.join(shipped)}; {times.fitted_to}"] if shipped else []
    notes += [f"host time: as configured, {', '.join(own)}"] if own else []
    return engine, tuple(notes)


def calls_of_layer(model: ModelSpec, dtype: str | None) -> float:
    """How many calls a layer of prompts launches, about: a quantised GEMM quantises its input
    first."""
    quantised = dtype not in (None, "bf16")
    gemms = sum(
        model.share(op) * (2 if quantised and OPS[op].split else 1)
        for op in model.row_ops
        if OPS[op].shape is not None and OPS[op].part == "layer"
    )
    streams = [one for one in elementwise(model.shard(1)) if one.kernel not in _FUSED]
    beside = sum(one.times for one in streams) + model.share(MOE) * _EXPERT_CALLS
    return gemms + beside + _OTHER_CALLS
