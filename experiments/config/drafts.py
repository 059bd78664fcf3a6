"""The ``speculation`` section: what it means for a scenario's pools, and what it cannot be used
with."""

from __future__ import annotations

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.policies.policy import speculates
from sarathi_sim.profiler.facts.drafters import drafter_of
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.simulator.load.acceptance import (
    AcceptanceError,
    DrawnAcceptance,
    golden,
    golden_length,
    held_by_mean,
    held_by_position,
)


def check_speculation(scenario: Scenario, model: ModelSpec, source: Source) -> None:
    """Raise ConfigError for speculation that cannot be simulated, or of unknown acceptance."""
    spec = scenario.speculation
    if spec is None:
        return
    policy, name = scenario.policy.build(), scenario.policy.name
    problem = None
    if not speculates(policy):
        problem = f"must be left out: {name} verifies no drafts; vllm, sglang and trtllm do"
    elif scenario.cluster.pp > 1:
        problem = "needs cluster.pp 1: drafts over several stages are not modelled"
    elif scenario.policy.described().get("enable_mixed_chunk"):
        problem = "needs policy.enable_mixed_chunk: false, as the engine does"
    if problem is not None:
        raise source.error("speculation", spec.method, problem)
    if (drafter := drafter_of(model, spec.method)) is not None:
        try:
            drafter.check_tp(scenario.cluster.tp)
        except ValueError as error:
            raise source.error("cluster.tp", scenario.cluster.tp, str(error)) from None
    try:
        acceptance_of(scenario, model)
    except (AcceptanceError, ValueError) as error:
        raise source.error("speculation.acceptance", spec.acceptance, str(error)) from None


def acceptance_of(scenario: Scenario, model: ModelSpec) -> DrawnAcceptance:
    """How many drafts hold. Raises AcceptanceError or ValueError where that is unknown."""
    spec = scenario.speculation
    assert spec is not None
    given, length = spec.acceptance, spec.draft_length
    if isinstance(given, list):
        if len(given) != length:
            raise ValueError(f"must be {length} probabilities (speculation.draft_length)")
        return DrawnAcceptance(held_by_position(given), scenario.seed)
    if isinstance(given, str):
        thinking = "thinking_off" if given.endswith("off") else "thinking_on"
        given = golden_length(model.name, spec.method, thinking, length)
    return DrawnAcceptance(held_by_mean(given, length), scenario.seed)


def speculation_note(scenario: Scenario, model: ModelSpec) -> str:
    """Draft length, acceptance and its origin, in words."""
    spec = scenario.speculation
    assert spec is not None
    acceptance, drafter = acceptance_of(scenario, model), drafter_of(model, spec.method)
    origin = "as configured"
    if isinstance(spec.acceptance, str):
        thinking = "off" if spec.acceptance.endswith("off") else "on"
        origin = f"of coding prompts with thinking {thinking}, {golden().origin}"
    said = "looked up in no time"
    if drafter is not None:
        weights = sum(drafter.parameters_in())
        said = f"by {drafter.num_layers} layer of {weights / 1e9:.2f} billion parameters"
        if scenario.policy.described().get("disable_overlap_schedule") is False:
            said += ", with overlap, which SGLang has under SGLANG_ENABLE_SPEC_V2=1 alone"
    return (
        f"speculation: {spec.method}, {spec.draft_length} drafts a decode, {said}; a decode yields "
        f"{acceptance.mean:.2f} tokens ({origin})"
    )
