"""The scenarios of two pools and their handover; and what drafts mean for a scenario."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
from .base import KeyPath, Source, assign, get, has, merge, without
from .inputs import named_model, with_formats
from .scenario import POOLS, Scenario, Transfers

Order = Literal["prefill_first", "decode_reserves_first"]
FirstToken = Literal["decode_step", "on_transfer"]

SHARED = ("seed", "model", "workload", "profiles", "calibration", "disaggregation")
"""Keys of a scenario that its pools cannot change."""


class EngineHandover(NamedTuple):
    """How an engine hands over: the order, when the first token is there, and whether the prefill
    worker yields it (else the decode worker computes the last prompt token again); how fast a GPU
    sends KV, its time for each prompt before that, and the latency; and whether its decode workers
    have a prefix cache by default."""

    order: Order
    first_token: FirstToken
    token_known: bool
    bandwidth: float = 50e9
    setup_s: float = 0.0
    latency_s: float = 0.005
    decode_caches: bool = True


HANDOVERS = {
    "vllm": EngineHandover("prefill_first", "decode_step", False),
    "trtllm": EngineHandover("prefill_first", "decode_step", True),
    "sglang": EngineHandover(
        *("decode_reserves_first", "on_transfer", True), 1.5e9, 0.040, 0.035, decode_caches=False
    ),
}
"""By policy, as behind Dynamo (docs/model/pools.md). The speed is that of an adapter of 400 Gb/s,
assumed; SGLang's was chosen on measured servers (docs/lab/servers_pools.md)."""


@dataclass(frozen=True)
class PoolSource(Source):
    """The origin of a pool's values: its own keys, or else the scenario's."""

    pool: str
    own: Mapping[str, Any]
    whole: Source

    def name(self, key: KeyPath) -> str:
        """``FILE: key``, as the user wrote it."""
        own = has(self.own, key[:1]) and (has(self.own, key) or not has(self.override, key))
        return self.whole.name(("disaggregation", self.pool, *key) if own else key)

    def folder(self, key: KeyPath) -> Any:
        """See :meth:`Source.folder`."""
        return self.whole.folder(key)


def acting(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The keys of a scenario as they act: its own or, with two pools, those of each."""
    if not isinstance(given := tree.get("disaggregation"), Mapping):
        return [dict(tree)]
    return [merge(_usual(tree, pool), given.get(pool) or {}) for pool in POOLS]


def written(tree: Mapping[str, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    """The keys of a scenario that may be left out, down to their values."""
    for key, value in tree.items():
        path = (*above, key)
        if isinstance(value, Mapping) and value:
            yield from written(value, path)
        elif path[0] in Scenario.model_fields.keys() - {"disaggregation"}:
            yield from () if path in NEEDED else (path,)


NEEDED = (("model",), ("device",), ("policy", "name"))
"""Keys that stand above the scenarios although each, or both pools, may set them."""


def without_hidden(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario without the keys that both of its pools set themselves."""
    rests = (without(tree, key) for key in written(tree))
    hidden = next((rest for rest in rests if acting(rest) == acting(tree)), None)
    return dict(tree) if hidden is None else without_hidden(hidden)


def _usual(tree: Mapping[str, Any], pool: str) -> dict[str, Any]:
    """The keys of a scenario for a pool that gives none."""
    # Requests of the prefill pool end with their first token.
    return {**tree, "speculation": None} if pool == "prefill" else dict(tree)


def pool_of(scenario: Scenario, pool: str, source: Source) -> tuple[Scenario, PoolSource]:
    """The checked scenario of one pool alone, and the origin of its values. Raises UserError, a
    line per mistake."""
    given = scenario.disaggregation
    assert given is not None
    own: dict[str, Any] = getattr(given, pool)
    usual = _usual(scenario.model_dump(exclude={"disaggregation"}), pool)
    usual["policy"] = scenario.policy.model_dump(exclude_unset=True)
    engine = HANDOVERS.get(str(get(merge(usual, own), ("policy", "name"))))
    if pool == "decode" and engine is not None and not engine.decode_caches:
        usual = assign(usual, ("kv_cache", "prefix_caching"), False)
    where = PoolSource(source.file, source.scenario, usual, source.assigned, pool, own, source)
    for key in SHARED:
        if key in own:
            problem = "is the same for both pools: give it outside of disaggregation"
            raise where.error(key, own[key], problem)
    return where.checked(Scenario, merge(usual, own)), where


def check_pools(scenario: Scenario, source: Source) -> None:
    """Raise UserError for a mistake in the keys of either pool, or in how they fit together."""
    if scenario.disaggregation is None:
        return
    found = [pool_of(scenario, pool, source) for pool in POOLS]
    for one, where in found:
        name = one.policy.name
        if name not in HANDOVERS:
            problem = f"takes no KV cache from another pool; use one of {', '.join(HANDOVERS)}"
            raise where.error("policy.name", name, problem)
    (prefill, at_first), (decode, where) = found
    if prefill.speculation is not None:
        problem = "must be left out: requests end with their first token there"
        raise at_first.error("speculation", prefill.speculation.method, problem)
    check_alike("policy.name", decode.policy.name, prefill.policy.name, where)
    frontend_s = get(where.own, ("engine", "frontend_s"))
    if frontend_s is not None:
        problem = (
            "has no effect: requests come in and go out at the prefill pool's front end; give "
        )
        problem += "disaggregation.prefill.engine.frontend_s"
        raise where.error("engine.frontend_s", frontend_s, problem)
    if decode.kv_cache is not None and decode.kv_cache.prompts_cached:
        problem = "must be false: the prefill pool computes the prompts"
        raise where.error("kv_cache.prompts_cached", True, problem)
    given = scenario.disaggregation.handover
    if given.first_token == "on_transfer" and not HANDOVERS[decode.policy.name].token_known:
        problem = f"the decode workers of {decode.policy.name} compute the first token"
        raise source.error("disaggregation.handover.first_token", given.first_token, problem)


def check_alike(key: str, decode: object, prefill: object, source: Source) -> None:
    """Raise UserError where a decode pool's value is not that of the prefill pool."""
    if decode != prefill:
        problem = f"must be that of the prefill pool, {prefill}: it takes over the other's KV cache"
        raise source.error(key, decode, problem)


def handover_of(policy: str, senders: int, given: Transfers) -> EngineHandover:
    """The handover with every default filled in; its ``bandwidth`` is that of a prefill worker's
    rank, of which so many GPUs send."""
    usual = HANDOVERS[policy]
    usual = usual._replace(bandwidth=senders * usual.bandwidth)
    return usual._replace(**{key: value for key, value in given if value is not None})


def shared_keys(scenario: Scenario, content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a resolved scenario without the keys that both of its pools set."""
    if scenario.disaggregation is None:
        return dict(content)
    shared = {key: content[key] for key in (*SHARED, "device")}
    return shared | {"policy": {"name": scenario.policy.name}}


def own_keys(scenario: Scenario) -> dict[str, Any]:
    """The keys of a pool's resolved scenario that are its own."""
    return scenario.model_dump(exclude=set(SHARED))


DRAFT_MODEL = "draft_model"


def drafter_of(scenario: Scenario, model: ModelSpec, source: Source) -> ModelSpec | None:
    """The layers that draft for a scenario's model; None without speculation, and for ``ngram``.
    Raises UserError for speculation that cannot be simulated, or of unknown acceptance."""
    spec = scenario.speculation
    if spec is None:
        return None
    policy, name = scenario.policy.build(), scenario.policy.name
    problem = None
    if not policy.speculates:
        problem = f"must be left out: {name} does not speculate; vllm, sglang and trtllm do"
    elif scenario.cluster.pp > 1:
        problem = "needs cluster.pp 1: drafts over several stages are not modelled"
    elif scenario.policy.described().get("enable_mixed_chunk"):
        problem = "needs policy.enable_mixed_chunk: false, as the engine does"
    elif spec.method == DRAFT_MODEL and name == "sglang" and scenario.cluster.dp > 1:
        problem = "needs cluster.dp 1: SGLang has no draft model with data-parallel attention"
    elif draft_slots(scenario) and scenario.policy.described()["max_num_batched_tokens"] < 2:
        problem = "needs policy.max_num_batched_tokens of 2 or more: the draft model takes one"
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
    said = "drafting takes no time"
    if drafter is not None:
        weights, many = sum(drafter.parameters_in()), drafter.num_layers
        own = f" of {drafter.name}" if spec.method == DRAFT_MODEL else ""
        said = f"by {many} layer{'s' * (many > 1)}{own} of {weights / 1e9:.2f} billion parameters"
        if scenario.policy.described().get("disable_overlap_schedule") is False:
            said += ", with overlap, which SGLang has only with SGLANG_ENABLE_SPEC_V2=1"
    return (
        f"speculation: {spec.method}, draft length {spec.draft_length}, {said}; acceptance length "
        f"{acceptance.mean:.2f} tokens per decode ({origin})"
    )
