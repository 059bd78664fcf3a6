"""The deployments to choose from: every scenario of a file at every point of its space, or the
sensible layouts of a model, with several token budgets, sequence limits and draft lengths.

Tensor parallelism stays inside a node, pipeline stages span nodes; replicas fill the other GPUs."""

from __future__ import annotations

import math
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal

import numpy as np

from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.formats import STACKS, WEIGHT_DTYPES
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.facts.ops import OPS
from sarathi_sim.profiler.kernels.stack_file import stacks_on
from sarathi_sim.profiler.storage.strict import UserError, did_you_mean
from sarathi_sim.simulator.load.acceptance import AcceptanceError, golden_length
from sarathi_sim.simulator.loop.routers import Router
from ..config.base import Several, Source, assign_all, listed, merge
from ..config.deployment import Deployment, Requests, deploy
from ..config.effects import Effects
from ..config.loading import Draft, check_effect, check_scenario
from ..config.requests import build_requests
from ..config.scenario import (
    POOLS,
    Engine,
    Scenario,
    Speculation,
    parameter,
)
from ..config.workload import (
    Arrivals,
    AtOnce,
    Closed,
    Gamma,
    Poisson,
    TraceArrivals,
    TraceLengths,
    Varying,
)
from ..run.traffic import parse_workload, rates_of
from ..sweeps.plan import SharedRequests, describe
from ..sweeps.points import Point, SweepSpec, expand
from .search import AT_ONCE, Probe, Probed, SearchPlan
from .slo import CapacitySection, Verdict, judge, parse_slo

PILOT_REQUESTS = 1000
LEAST_REQUESTS = 2500
"""Least requests of a run on one replica, for each unit of variance of its gaps and lengths."""
FINEST_REQUESTS = 20_000
"""Most requests of a run whose length follows from the tolerance."""
MOST_REQUESTS = 100_000
"""Most requests of a run on one replica that must last longer."""
BLOCKS = 20
"""A trace is resampled in so many blocks."""


Stage = Literal["unfit", "alone", "bound", "race", "rate", "failed"]


@dataclass(frozen=True)
class Left:
    """Why a deployment was left out. Its ``stage``: it cannot be deployed (``unfit``); it breaks
    the SLO with a single request (``alone``); its op times allow less than would make it as good as
    ``beaten_by`` (``bound``), or it breaks the SLO under that load (``race``); the GPUs are too few
    for the ``rate``; or a run of it ``failed``. ``at``: the load of one server in requests/s that
    it sustains at most, or where it breaks. ``clause``: the SLO's, or the text of the refusal."""

    stage: Stage
    beaten_by: str | None = None
    at: float | None = None
    clause: str | None = None


@dataclass(frozen=True, eq=False)
class Option:
    """A candidate deployment: its name, its point of the space, and the resolved deployment."""

    name: str
    point: Point
    deployment: Deployment

    @property
    def scenario(self) -> Scenario:
        return self.deployment.scenario

    @cached_property
    def natural_rate(self) -> float:
        """The configured arrival rate in requests a second, of a varying one the mean."""
        arrivals = self.scenario.workload.arrivals
        if isinstance(arrivals, Varying) and arrivals.repeat:
            at_s, rate = np.array([(each.at_s, each.rate) for each in arrivals.rates]).T
            return float(arrivals.scale * np.trapezoid(rate, at_s) / (at_s[-1] - at_s[0]))
        arrival_s = [request.arrival_s for request in self.deployment.requests]
        span_s = max(arrival_s, default=0.0) - min(arrival_s, default=0.0)
        return (len(arrival_s) - 1) / span_s if span_s else 1.0

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return sum(self.deployment.gpus.values())

    @property
    def pooled(self) -> bool:
        """Whether prompts and decodes have workers of their own: then it is one replica."""
        return self.scenario.disaggregation is not None

    @property
    def drafts(self) -> int:
        """Drafted tokens of a decode."""
        spec = self.scenario.speculation
        return spec.draft_length if spec is not None else 0

    @property
    def replicas(self) -> int:
        """Its replicas, or the workers of its larger pool."""
        return max(pool.scenario.cluster.replicas for pool in self.deployment.pools)

    @property
    def alike(self) -> int:
        """The number of replicas that one simulated replica stands for: all, or 1. A round-robin
        router gives every n-th request to one of n replicas, so all see the same traffic. If
        arrivals do not depend on answers, replicas do not interact: one stands for all."""
        scenario, workload = self.scenario, self.scenario.workload
        if self.pooled:  # a worker's requests come from another pool
            return 1
        turns = scenario.cluster.router == "round_robin"
        alone = workload.sessions is None and not isinstance(workload.arrivals, Closed)
        return scenario.cluster.replicas if turns and alone else 1

    def at(self, probe: Probe, load: str) -> Deployment:
        """Under a probe's load, or one replica with its share of the load (:attr:`alike`)."""
        scenario, alike = self.under(probe.load, load), self.alike if load == "rate" else 1
        scenario = scenario.having("workload", requests=probe.requests, every=alike)
        if alike > 1:
            scenario = scenario.having("cluster", replicas=1)
        if probe.slower != 1:
            scenario = slowed(scenario, OPS, probe.slower)
        seeded = scenario.model_copy(update={"seed": probe.seed})
        return replace(self.deployment, scenario=seeded)

    def under(self, load: float, kind: str) -> Scenario:
        """The scenario of all replicas at a load. A trace is resampled: a run may be longer."""
        lengths = self.scenario.workload.lengths
        if isinstance(lengths, TraceLengths) and lengths.resample is None:
            block = math.ceil(len(self.deployment.requests) / BLOCKS)
            lengths = lengths.model_copy(update={"resample": block})
        arrivals = arrivals_at(self.scenario, load, kind, self.natural_rate)
        return self.scenario.having("workload", arrivals=arrivals, lengths=lengths)

    def changed(self, name: str, scenario: Scenario) -> Option:
        """The option with another name and another resolved scenario."""
        return Option(name, self.point, replace(self.deployment, scenario=scenario))


def slowed(scenario: Scenario, ops: Collection[str], times: float) -> Scenario:
    """The scenario with these ops taking ``times`` as long."""

    def slower(engine: Engine) -> dict[str, Any]:
        scale = engine.op_scale
        return {"op_scale": {**scale, **{op: times * scale.get(op, 1.0) for op in ops}}}

    return with_engines(scenario, slower)


def with_engines(scenario: Scenario, changed: Callable[[Engine], dict[str, Any]]) -> Scenario:
    """The resolved scenario with ``changed`` keys of its engine, or of both pools' engines."""
    pools = scenario.disaggregation
    if pools is None:
        return scenario.having("engine", **changed(scenario.engine))
    given = {}
    for pool in POOLS:
        own = getattr(pools, pool)
        engine = Engine.model_validate(own["engine"])
        given[pool] = {**own, "engine": {**own["engine"], **changed(engine)}}
    return scenario.having("disaggregation", **given)


def arrivals_at(scenario: Scenario, load: float, kind: str, natural: float) -> Any:
    """The arrivals of a scenario at another load; ``natural`` is its configured mean rate."""
    given = scenario.workload.arrivals
    if kind == "clients":
        think_s = given.think_s if isinstance(given, Closed) else 0.0
        return Closed(kind="closed_loop", clients=round(load), think_s=think_s)
    if load == AT_ONCE:
        return AtOnce(kind="at_once")
    if isinstance(given, Gamma):
        return given.model_copy(update={"rate": load})
    if isinstance(given, TraceArrivals | Varying):
        return given.model_copy(update={"scale": given.scale * load / natural})
    return Poisson(kind="poisson", rate=load)


def options_of(draft: Draft, section: CapacitySection) -> list[Option]:
    """The deployments that a file describes. Raises UserError, a line per mistake."""
    points, requests_of = _points(draft, section), SharedRequests()
    options, found, effects = [], dict[str, None](), Effects()
    for name, override in draft.overrides.items():
        source = replace(draft.source, scenario=name, override=override)
        for point in points:
            try:
                options.append(option_at(draft, section, name, point, requests_of))
                effects.add(source, options[-1].deployment)
            except UserError as error:
                found |= dict.fromkeys(str(error).splitlines())
    if found:
        raise UserError("\n".join(found))
    check_effect(draft, points, f"{draft.source.file}: capacity.space")
    effects.check()
    return options


def option_at(
    draft: Draft,
    section: CapacitySection,
    scenario: str,
    point: Point,
    requests_of: Requests = build_requests,
) -> Option:
    """The deployment of a scenario at a point of the space. Raises UserError."""
    override = draft.overrides[scenario]
    tree = assign_all(merge(draft.raw, override), point)
    source = replace(draft.source, scenario=scenario, override=override)
    words = [parameter(key).value(describe(value)) for key, value in point.items()]  # TP 4, vllm
    called = ", ".join([scenario, *words] if len(draft.overrides) > 1 or not words else words)
    checked = check_scenario(tree, source)
    workload = checked.workload
    if not (isinstance(workload.lengths, TraceLengths) or isinstance(workload.arrivals, Varying)):
        # As many requests as a pilot has, so that checking takes no time; of the others all are
        # needed for the mean rate and lengths.
        count = min(pilot_requests(section), workload.requests or MOST_REQUESTS)
        checked = checked.having("workload", requests=count)
    return Option(called, {"scenario": scenario, **point}, deploy(checked, source, requests_of))


def _points(draft: Draft, section: CapacitySection) -> list[Point]:
    where = f"{draft.source.file}: capacity.space"
    if not section.space:
        return [{}]
    spec = draft.source.checked(SweepSpec, section.space, "capacity", "space")
    if spec.seeds is not None or spec.contrast is not None:
        raise UserError(f"{where}: takes grid, zip, cases and sample only")
    points = expand(spec, None, where)
    for key in dict.fromkeys(key for point in points for key in point):
        if key.partition(".")[0] in ("workload", "seed", "scenarios", "capacity"):
            raise UserError(f"{where}: {key}: is not part of a deployment")
    return points


def pilot_requests(section: CapacitySection) -> int:
    """Requests of a pilot's runs."""
    most = section.requests or MOST_REQUESTS
    return min(most, max(PILOT_REQUESTS, section.fewest, (section.requests or 0) // 10))


def plan_of(option: Option, section: CapacitySection, where: str) -> SearchPlan:
    """The plan of the search for an option's capacity. Raises UserError for runs too short for
    the SLO, or longer than the budget of a search."""
    given = section.replications
    if given.least > given.most:
        raise UserError(
            f"{where}: capacity.replications.least: value {given.least}: must be at "
            f"most replications.most, which is {given.most}"
        )
    scale = option.alike if section.load == "rate" else 1
    simulated = option.replicas // scale
    variance, budget = _variance(option, section, scale), section.most_requests
    budget = budget or simulated * MOST_REQUESTS
    if (section.requests or 0) > budget:
        raise UserError(
            f"{where}: capacity.requests: value {section.requests}: must be at most {budget}, "
            "capacity.most_requests (default: 100,000 a replica or worker): give that, too"
        )
    requests, fewest = section.requests or 0, 0
    if section.requests is None:
        requests, fewest = (
            simulated * _long_enough(variance, section, tolerance)
            for tolerance in (section.tolerance, math.inf)
        )
    if (requests := min(requests, budget)) < section.fewest:
        raise UserError(
            f"{where}: capacity.requests: {requests} requests a run are too few for the SLO "
            f"{section.slo!r}: at least {section.fewest}, so that ten of them lie beyond the "
            "percentile"
        )
    return SearchPlan(
        section.tolerance,
        given.least,
        given.most,
        requests,
        min(requests, pilot_requests(section)),
        option.scenario.seed,
        partial(pooled, section),
        whole=section.load == "clients",
        keep=given.keep,
        limit_s=max(max(objective.limits.values()) for objective in section.objectives),
        pattern_s=_pattern_s(option.scenario.workload.arrivals),
        budget=budget,
        scale=scale,
        variance=simulated * variance,
        fewest=fewest,
    )


def _pattern_s(arrivals: Arrivals) -> float:
    """Seconds that arrivals must last to cover a varying rate: all of it, or three periods."""
    if not isinstance(arrivals, Varying):
        return 0.0
    last_s = arrivals.rates[-1].at_s
    return 3 * (last_s - arrivals.rates[0].at_s) if arrivals.repeat else last_s


def pooled(section: CapacitySection, probes: Sequence[Probed]) -> Verdict:
    runs = [(probed.summary, probed.tables) for probed in probes]
    return judge(section.objectives, runs, section.load == "rate", section.rejected)


def _variance(option: Option, section: CapacitySection, scale: int) -> float:
    """The relative variance of the gap before a request plus that of its tokens, for one of
    ``scale`` replicas behind a round-robin router."""
    requests = option.deployment.requests
    refused = option.deployment.refused[0]  # rejected requests are no work
    tokens = np.array(
        [0 if r.id in refused else r.prompt_tokens + r.output_tokens for r in requests], np.float64
    )
    variance = float(np.var(tokens) / np.mean(tokens) ** 2)
    if section.load == "clients":
        return variance
    gaps = np.diff(np.sort([r.arrival_s for r in requests]))
    of_gaps = float(np.var(gaps) / gaps.mean() ** 2) if gaps.any() else 1.0
    return variance + of_gaps / scale


def _long_enough(variance: float, section: CapacitySection, tolerance: float) -> int:
    """Requests of a run on one replica, before its latencies are known: the offered load scatters,
    by the root of variance over requests, by at most half the ``tolerance`` (up to
    :data:`FINEST_REQUESTS`), and no more than :data:`LEAST_REQUESTS` Poisson arrivals."""
    fine = min(variance / (tolerance / 2) ** 2, FINEST_REQUESTS)
    wanted = 100 * math.ceil(max(fine, LEAST_REQUESTS * variance) / 100)
    return min(max(wanted, section.fewest, LEAST_REQUESTS), MOST_REQUESTS)


BUDGETS = (512, 1024, 2048, 4096, 8192)
SEQUENCES = (64, 128, 256, 512)
MOST_STAGES = 8
TRAFFIC = "capacity_llama3_70b"
"""The default lengths: Azure's conversations of 2023."""
MOST_GPUS = 64
"""For a rate, unless said."""
DRAFTS = (0, 1, 2, 3)
"""Draft lengths to try with speculation, unless said; 0 is none."""


@dataclass(frozen=True)
class Wanted:
    """The question: a model on ``gpus`` GPUs of one of the devices, or on as many as ``rate``
    requests a second need (at most ``gpus``). ``stated`` is the text of ``--workload``, if any;
    ``pools``: also with prefill and decode workers. ``speculation``: the section without a draft
    length; ``drafts``: the lengths to try, 0 without. ``log_rates``: a log's requests a second, on
    average and in its busiest minute."""

    model: str
    devices: tuple[str, ...]
    gpus: int
    section: CapacitySection
    workload: dict[str, Any]
    max_length: int
    rate: float | None = None
    stacks: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16",)
    budgets: tuple[int, ...] = BUDGETS
    sequences: tuple[int, ...] = SEQUENCES
    stated: str | None = None
    pools: bool = False
    speculation: Speculation | None = None
    drafts: tuple[int, ...] = (0,)
    log_rates: tuple[float, float] | None = None

    def drafting(self, length: int) -> dict[str, Any]:
        """The scenario's key ``speculation`` with so many drafts; empty for none."""
        if self.speculation is None or not length:
            return {}
        given = self.speculation.acceptance
        acceptance = given[:length] if isinstance(given, list) else given
        section = self.speculation.model_dump(exclude_none=True)
        return {"speculation": {**section, "draft_length": length, "acceptance": acceptance}}

    @property
    def not_tried(self) -> str:
        """The settings that were not searched and may be better, in words."""
        stacks = self.stacks or {s for name in self.devices for s in _stacks(load_device(name))}
        listed: dict[str, Sequence[object]] = {"token budgets": self.budgets}
        listed["sequence limits"] = self.sequences
        if any(stacks):
            listed |= {"formats": self.dtypes, "stacks": sorted(filter(None, stacks))}
        if self.speculation is not None:
            listed[f"draft lengths of {self.speculation.method}"] = self.drafts
        but = [f"{what} other than {', '.join(map(str, some))}" for what, some in listed.items()]
        but += ["speculation (--speculation)"] if self.speculation is None else []
        workers = "workers with pipeline stages, or a smaller budget or limit; "
        workers += "pools of two kinds of GPUs"
        but.append(workers if self.pools else "prefill and decode workers (--pools)")
        return "; ".join([*but, "any other setting of the engine"])


Described = tuple[Point, dict[str, Any]]
"""The layout and the limit of sequences of a deployment, and its scenario."""
DRAFTING = " drafts "
"""Before the draft length in the name of a layout."""


def named(point: Point) -> str:
    """The name of a deployment of :func:`layouts`."""
    return f"{point['layout']} seqs {point['seqs']}"


def layouts(wanted: Wanted) -> Iterator[Described]:
    """Every deployment: its layout and limit of sequences, and a scenario of one replica."""
    model = load_model(wanted.model)
    for name in wanted.devices:
        device = load_device(name)
        for stack in wanted.stacks or _stacks(device):
            for dtype in wanted.dtypes:
                shapes = _shapes(model, device, wanted.gpus, stack)
                sizes = (wanted.drafts, wanted.budgets, wanted.sequences)
                for shape, drafts, budget, most in product(shapes, *sizes):
                    if not drafts or shape["pp"] == 1:  # no drafts over several stages
                        yield _layout(wanted, name, stack, dtype, shape, drafts, budget, most)


def _stacks(device: DeviceSpec) -> tuple[str, ...]:
    """The stacks to try: vLLM if its kernels were fitted; without any, the device's own profile."""
    there = stacks_on(device.name)
    return ("vllm",) if "vllm" in there else tuple(there[:1]) or ("",)


def _shapes(
    model: ModelSpec, device: DeviceSpec, gpus: int, stack: str
) -> Iterator[dict[str, Any]]:
    """The layouts to try: ``tp``, ``pp`` and, for a mixture with a stack, ``expert_parallel`` and
    ``dp``: with latent attention, or fewer KV heads than GPUs, tensor-parallel GPUs would hold the
    same KV cache. TensorRT-LLM's ranks have one GPU each."""
    mixture = model.experts is not None and bool(stack)
    for tp in _doubled(1, min(gpus, device.gpus_per_node)):
        try:
            model.check_tp(tp)
        except ValueError:
            break
        for pp in _doubled(1, min(gpus // tp, MOST_STAGES, model.num_layers)):
            if mixture and tp > 1:
                yield from ({"tp": tp, "pp": pp, "expert_parallel": ep} for ep in (False, True))
            else:
                yield {"tp": tp, "pp": pp}
        for dp in _doubled(2, gpus // tp) if mixture else ():
            alike = model.latent is not None or model.num_kv_heads < tp * dp
            if alike and (stack != "trtllm" or tp == 1):
                ranks = {"dp": dp, "rank_router": router_of_ranks(stack)}
                yield {"tp": tp, "pp": 1, **ranks, "expert_parallel": True}


def _doubled(first: int, most: int) -> Iterator[int]:
    while first <= most:
        yield first
        first *= 2


def router_of_ranks(engine: str) -> Router:
    """How an engine chooses a rank: vLLM the one with the fewest requests (waiting ones count
    more), TensorRT-LLM the one with the fewest prompt tokens (``schedule_attention_dp_requests``),
    SGLang takes turns (``--load-balance-method auto``)."""
    known: dict[str, Router] = {"vllm": "least_requests", "trtllm": "least_prompt_tokens"}
    return known.get(engine, "round_robin")


def _layout(
    wanted: Wanted,
    device: str,
    stack: str,
    dtype: str,
    shape: dict[str, Any],
    drafts: int,
    budget: int,
    most: int,
) -> Described:
    keys = {
        "sglang": ("chunked_prefill_size", "max_running_requests"),
        "trtllm": ("max_num_tokens", "max_batch_size"),
    }.get(stack, ("max_num_batched_tokens", "max_num_seqs"))
    policy = {"name": stack or "vllm", **dict(zip(keys, (budget, most), strict=True))}
    scenario = {
        "model": wanted.model,
        "device": device,
        "workload": wanted.workload,
        "cluster": {**shape, "max_length": wanted.max_length},
        "policy": policy | ({"enable_chunked_prefill": True} if stack == "trtllm" else {}),
        **wanted.drafting(drafts),
        **({"stack": stack, "dtype": dtype} if stack else {}),
    }
    several = ((device, wanted.devices), (stack, wanted.stacks), (dtype, wanted.dtypes))
    name = "".join(f"{one} " for one, every in several if len(every) > 1)
    name += f"TP {shape['tp']}" + (f" DP {shape['dp']}" if "dp" in shape else "")
    name += " EP" if shape.get("expert_parallel") else ""
    name += f" PP {shape['pp']}" if shape["pp"] > 1 else ""
    name += f"{DRAFTING}{drafts}" if drafts else ""
    point = {"layout": f"{name} budget {budget}", "shape": name, "budget": budget, "seqs": most}
    return point, scenario


def deployable(
    wanted: Wanted,
    described: Iterable[Described] | None = None,
    requests_of: SharedRequests | None = None,
) -> tuple[list[Option], dict[str, Left]]:
    """The layouts (None: all) that can be deployed, one replica each, and why others cannot."""
    options, dropped, requests_of = (
        list[Option](),
        dict[str, Left](),
        requests_of or SharedRequests(),
    )
    for point, tree in layouts(wanted) if described is None else described:
        name = named(point)
        source = Source("recommend", name, {}, ())
        try:
            deployment = deploy(check_scenario(tree, source), source, requests_of)
            if deployment.rejected > wanted.section.rejected:
                hint = "raise --set max_length, or --set rejected"
                raise UserError(f"{deployment.rejections}; {hint}")
            options.append(Option(name, point, deployment))
        except UserError as error:
            why = str(error).removeprefix("recommend: ").splitlines()[0]
            dropped[name] = Left("unfit", clause=why)
    return options, dropped


def wanted_of(
    model: str,
    device: Several,
    slo: str,
    gpus: int | None,
    rate: float | None,
    workload: str | None,
    max_length: int | None,
    stack: Several,
    dtype: Several,
    budget: Several,
    seqs: Several,
    tolerance: float,
    rejected: float = 0.0,
    pools: bool = False,
    speculation: str | None = None,
    drafts: Several = None,
) -> Wanted:
    """The question of ``recommend``'s options, checked; without ``dtype`` the number format is the
    checkpoint's. Raises UserError."""
    if (gpus is None) == (rate is None):
        raise UserError("--gpus and --rate: give exactly one of them")
    try:
        parse_slo(slo)
    except ValueError as error:
        raise UserError(f"--slo: {error}") from None
    section = CapacitySection(slo=slo, tolerance=tolerance, rejected=rejected)
    spec, devices = load_model(model), _words("--device", device)
    for name in devices:
        load_device(name)
    traffic, longest = parse_workload(workload or TRAFFIC, max_length)
    drafter, lengths = _speculation(spec.name, speculation, drafts)
    stacks = _words("--stack", stack, STACKS) if stack else ()
    dtypes = _words("--dtype", dtype or spec.dtype, WEIGHT_DTYPES)
    budgets = counts("--budget", budget) or BUDGETS
    sequences = counts("--seqs", seqs) or SEQUENCES
    asked = (model, devices, gpus or MOST_GPUS, section, traffic, longest, rate, stacks, dtypes)
    rates = rates_of(workload or "")
    return Wanted(*asked, budgets, sequences, workload, pools, drafter, lengths, rates)


def _speculation(
    model: str, text: str | None, drafts: Several
) -> tuple[Speculation | None, tuple[int, ...]]:
    """``METHOD`` with the model's published acceptance, ``METHOD:golden_thinking_off``, or
    ``METHOD:0.8,0.6``, the probability that each further draft holds, given those before; and the
    draft lengths to try. Raises UserError, also where no acceptance is known."""
    lengths = counts("--set drafts", drafts, least=0)
    if text is None:
        if lengths:
            raise UserError(f"--set drafts={drafts}: needs --speculation")
        return None, (0,)
    method, _, given = text.partition(":")
    try:
        acceptance: str | list[float] = given or "golden"
        if not given.startswith("golden") and given:
            acceptance = [float(word) for word in given.split(",")]
        found = Speculation.model_validate({"method": method, "acceptance": acceptance})
    except ValueError:
        raise UserError(
            f"--speculation {text}: expected mtp, eagle3 or ngram, then nothing or :golden (the "
            "published acceptance), :golden_thinking_off, or the probabilities that the first, "
            "second, ... draft holds, given those before, such as :0.8,0.6"
        ) from None
    if isinstance(found.acceptance, list):
        most = len(found.acceptance)
        lengths = lengths or tuple(range(most + 1))
        if max(lengths) > most:
            problem = f"gives the probabilities of {most} drafts, and --set drafts asks for"
            raise UserError(f"--speculation {text}: {problem} {max(lengths)}")
    else:
        thinking = "thinking_off" if str(found.acceptance).endswith("off") else "thinking_on"
        lengths = lengths or DRAFTS
        try:
            golden_length(model, method, thinking, max(lengths))
        except AcceptanceError as error:
            raise UserError(
                f"--speculation {text}: {error}; each number is the probability of one draft, "
                f"as in {method}:0.8,0.6"
            ) from None
    return found, lengths


def _words(option: str, given: Several, allowed: Iterable[str] = ()) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(listed(given)))
    wrong = [word for word in found if not word or (allowed and word not in allowed)]
    if wrong:
        hint = ": expected names separated by commas"
        if allowed:
            hint = f": one of {', '.join(allowed)}{did_you_mean(wrong[0], allowed)}"
        raise UserError(f"{option} {','.join(listed(given))}: {wrong[0]!r}{hint}")
    return found


def counts(option: str, given: Several, least: int = 1) -> tuple[int, ...]:
    words = listed(given)
    try:
        found = tuple(int(word) for word in words)
    except ValueError:
        found = (-1,)
    if any(not least <= count <= 1_000_000 for count in found):
        said = ",".join(words)
        raise UserError(f"{option} {said}: expected whole numbers of at least {least}, as in 8,16")
    return found
