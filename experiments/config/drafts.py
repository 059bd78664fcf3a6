"""The ``speculation`` section: what it means for a scenario's pools, and what it cannot be used
with."""

from __future__ import annotations

from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.model import ModelSpec, drafting_layer
from sarathi_sim.simulator.load.acceptance import (
    AcceptanceError,
    DrawnAcceptance,
    golden,
    golden_length,
    held_by_mean,
    held_by_position,
)
from .base import Source
from .inputs import named_model, with_formats
from .scenario import Scenario

DRAFT_MODEL = "draft_model"


def drafter_of(scenario: Scenario, model: ModelSpec, source: Source) -> ModelSpec | None:
    """The layers that draft for a scenario's model; None without speculation, and for ``ngram``.

    Raises UserError for speculation that cannot be simulated, or of unknown acceptance.
    """
    spec = scenario.speculation
    if spec is None:
        return None
    policy, name = scenario.policy.build(), scenario.policy.name
    problem = None
    if not policy.speculates:
        problem = f"must be left out: {name} verifies no drafts; vllm, sglang and trtllm do"
    elif scenario.cluster.pp > 1:
        problem = "needs cluster.pp 1: drafts over several stages are not modelled"
    elif scenario.policy.described().get("enable_mixed_chunk"):
        problem = "needs policy.enable_mixed_chunk: false, as the engine does"
    elif spec.method == DRAFT_MODEL and name == "sglang" and scenario.cluster.dp > 1:
        problem = "needs cluster.dp 1: SGLang has no draft model beside data-parallel attention"
    elif draft_slots(scenario) and scenario.policy.described()["max_num_batched_tokens"] < 2:
        problem = "needs policy.max_num_batched_tokens of 2 or more: one is the draft model's"
    if problem is not None:
        raise source.error("speculation", spec.method, problem)
    drafter = None
    if spec.method == DRAFT_MODEL:
        drafter = _draft_model(scenario, model, source)
    elif spec.model is not None:
        problem = f"must be left out: {spec.method} has no model of its own, only draft_model has"
        raise source.error("speculation.model", spec.model, problem)
    elif spec.method != "ngram":
        drafter = drafting_layer(model, spec.method)
        try:
            drafter.check_tp(scenario.cluster.tp)
        except ValueError as error:
            raise source.error("cluster.tp", scenario.cluster.tp, str(error)) from None
    try:
        acceptance_of(scenario, model)
    except (AcceptanceError, ValueError) as error:
        raise source.error("speculation.acceptance", spec.acceptance, str(error)) from None
    return drafter


def _draft_model(scenario: Scenario, model: ModelSpec, source: Source) -> ModelSpec:
    """The model that drafts for another. Raises UserError where engines refuse it."""
    assert scenario.speculation is not None
    key, name = "speculation.model", scenario.speculation.model
    if name is None:
        problem = "is missing: draft_model needs the name of a model, or the path of a config.json"
        raise source.error(key, None, problem)
    drafter = named_model(name, key, scenario, source)
    if drafter.vocab_size != model.vocab_size:
        problem = f"must have the vocabulary of {model.name}: {model.vocab_size} tokens, not "
        raise source.error(key, name, f"{problem}{drafter.vocab_size}")
    return drafter


def scenario_of_drafter(
    scenario: Scenario, drafter: ModelSpec, device: DeviceSpec, source: Source
) -> Scenario:
    """The scenario by which a drafter's ops are timed and its numbers sized.

    No profile holds a layer of ``mtp`` or ``eagle3``, whose numbers are the model's. A draft model
    is profiled like any other, and has the number formats of its checkpoint; but there is one KV
    cache for both. Raises UserError for a quantised checkpoint without a stack.
    """
    spec = scenario.speculation
    assert spec is not None
    if spec.method != DRAFT_MODEL:
        return scenario.model_copy(update={"profiles": None})
    cached_in = scenario.kv_cache_dtype or ("bf16" if scenario.stack else None)
    own = {"model": spec.model, "dtype": None, "moe_dtype": None, "kv_cache_dtype": cached_in}
    return with_formats(scenario.model_copy(update=own), drafter, device, source)


def draft_slots(scenario: Scenario) -> int:
    """Rows of each sequence that a drafter computes beyond the model's own: one of vLLM's draft
    model, whose input is not the model's shifted by a token (``max_num_new_slots_for_drafting``).
    """
    spec, policy = scenario.speculation, scenario.policy.build()
    return int(spec is not None and spec.method == DRAFT_MODEL and policy.looks_ahead)


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
        if spec.method == DRAFT_MODEL:
            raise AcceptanceError(
                f"no acceptance of a draft model was published: give the mean tokens of a decode "
                f"(1 to {length + 1}), or {length} probabilities, as you measured them"
            )
        thinking = "thinking_off" if given.endswith("off") else "thinking_on"
        given = golden_length(model.name, spec.method, thinking, length)
    return DrawnAcceptance(held_by_mean(given, length), scenario.seed)


def speculation_note(scenario: Scenario, model: ModelSpec, drafter: ModelSpec | None) -> str:
    """Draft length, acceptance and its origin, in words."""
    spec = scenario.speculation
    assert spec is not None
    acceptance = acceptance_of(scenario, model)
    origin = "as configured"
    if isinstance(spec.acceptance, str):
        thinking = "off" if spec.acceptance.endswith("off") else "on"
        origin = f"of coding prompts with thinking {thinking}, {golden().origin}"
    said = "looked up in no time"
    if drafter is not None:
        weights, many = sum(drafter.parameters_in()), drafter.num_layers
        own = f" of {drafter.name}" if spec.method == DRAFT_MODEL else ""
        said = f"by {many} layer{'s' * (many > 1)}{own} of {weights / 1e9:.2f} billion parameters"
        if scenario.policy.described().get("disable_overlap_schedule") is False:
            said += ", with overlap, which SGLang has under SGLANG_ENABLE_SPEC_V2=1 alone"
    return (
        f"speculation: {spec.method}, {spec.draft_length} drafts a decode, {said}; a decode yields "
        f"{acceptance.mean:.2f} tokens ({origin})"
    )
