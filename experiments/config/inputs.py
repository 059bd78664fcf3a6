"""The inputs of a scenario, read and checked: its model, its device, its profile bundle, its links,
the host times of its engine, and what ``sarathi-sim tune`` found of a user's own server.

They are cached for the next scenario, because all runs of a sweep name the same few.
``data/host_time.yaml`` holds the host's constants by serving stack, with origin, plausible ranges
and what they were fitted to: the defaults of ``engine.host_iteration_s``, ``host_sequence_s`` and
``frontend_s``. ``host_time_mixtures.yaml`` holds those of servers of mixtures of experts, and of
launching (``launch_layer_s``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, field, fields, replace
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sarathi_sim.policies.pool import PoolPolicy
from sarathi_sim.policies.request import Request, release_of
from sarathi_sim.profiler.bundle.check import load_plausible
from sarathi_sim.profiler.bundle.schema import BundleMeta, bundle_path
from sarathi_sim.profiler.facts.device import DeviceSpec, capability, engine_facts, load_device
from sarathi_sim.profiler.facts.formats import (
    STACKS,
    TWO_BYTES,
    Kernels,
    NumberBytes,
    Stack,
    named_stack,
)
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.facts.ops import (
    ALL_REDUCE,
    ALL_ROW_OPS,
    ALL_TO_ALL,
    ATTENTION,
    MOE,
    OPS,
    SEND_RECV,
    SENDS,
    elementwise,
    op_label,
)
from sarathi_sim.profiler.kernels.borrowed import BY_RATIO
from sarathi_sim.profiler.kernels.op_source import op_source, served_formats
from sarathi_sim.profiler.kernels.stack_file import stacks_on
from sarathi_sim.profiler.physics.shard_times import DOUBT
from sarathi_sim.profiler.storage.files import data_dir, read_bounded, user_path
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml, load_shipped, read_mapping
from sarathi_sim.profiler.storage.strict import SpecError, UserError, parse, strict_dataclass
from sarathi_sim.simulator.load.engine_memory import MORE_GPUS, SHARES, STACK_SHARES, EngineMemory
from sarathi_sim.simulator.op_times.iteration import HostTime
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.op_times.op_times import LinkTimes, OpTimes, Route
from sarathi_sim.simulator.op_times.regression import bundle_times
from .base import Source, Strict
from .scenario import FUSED, Engine, KvCache, NetworkLink, NodeLink, Scenario

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
    the device, the engine's constants to the host. Raises UserError for a file that is none, or
    that is of another engine."""
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


def model_of(scenario: Scenario, source: Source) -> ModelSpec:
    """The model. Raises UserError for an unknown name, or if TP cannot divide the model."""
    return named_model(scenario.model, "model", scenario, source)


def named_model(name: str, key: str, scenario: Scenario, source: Source) -> ModelSpec:
    """The model that a ``key`` names; raises as :func:`model_of`."""
    try:
        path = user_path(name)
        model = _load_model(name, _changed(path) or _changed(path / "config.json"))
    except UserError as error:
        raise source.error(key, None, str(error)) from None
    try:
        model.check_tp(scenario.cluster.tp)
    except ValueError as error:
        raise source.error("cluster.tp", scenario.cluster.tp, str(error)) from None
    return model


def device_of(scenario: Scenario, source: Source) -> DeviceSpec:
    """The device. Raises UserError where it is unknown, or a node of it is too small for TP."""
    try:
        device = load_device(scenario.device)
    except UserError as error:
        raise source.error("device", None, str(error)) from None
    cluster, node = scenario.cluster, node_gpus(scenario, device)
    if node > device.gpus_per_node and cluster.tp > device.gpus_per_node:
        problem = f"must be at most {device.gpus_per_node}, the GPUs of a node of {device.name}"
        raise source.error("cluster.gpus_per_node", node, problem)
    if cluster.tp > node and cluster.tp % node:
        problem = f"must be at most {node}, the GPUs of a node, or a multiple of that"
        raise source.error("cluster.tp", cluster.tp, problem)
    if cluster.tp > node and cluster.moe_a2a_backend == "nccl":
        problem = f"must be none: between nodes of {node} GPUs experts add up by all-reduce"
        raise source.error("cluster.moe_a2a_backend", cluster.moe_a2a_backend, problem)
    link, own = cluster.intra_node, device.intra_node
    if (link or not own.peers) and cluster.moe_a2a_backend not in (None, "none"):
        problem = f"must be none: {own.kind} alone was measured" if own.peers else "must be none"
        problem += "; without peer access, or over another link, tokens go by all-reduce"
        raise source.error("cluster.moe_a2a_backend", cluster.moe_a2a_backend, problem)
    if link and link.kind == "nvlink" and not link.bandwidth and own.bandwidth <= PCIE:
        problem = f"is needed for NVLink on {device.name}, whose own link is {own.kind}"
        raise source.error("cluster.intra_node.bandwidth", None, problem)
    return device


def with_formats(
    scenario: Scenario, model: ModelSpec, device: DeviceSpec, source: Source
) -> Scenario:
    """The scenario with the checkpoint's number formats, unless it names its own. Raises UserError
    for a quantised checkpoint without a stack."""
    engine = named_stack(scenario.stack)[0] if scenario.stack else None
    own = served_formats(model, device.name, engine)
    found = {k: v for k, v in own.items() if getattr(scenario, k) is None}
    if found and scenario.stack is None:
        formats = ", ".join(f"{key} {value}" for key, value in found.items())
        problem = f"is needed for {model.name} ({formats}): {_stacks(device)}"
        raise source.error("stack", None, problem)
    return scenario.model_copy(update=found) if found else scenario


def _stacks(device: DeviceSpec) -> str:
    return ", ".join(stacks_on(device.name)) or "none fitted here"


def _profiles(scenario: Scenario, source: Source) -> Path:
    if not scenario.profiles:
        return data_dir() / "profiles"
    try:
        return user_path(scenario.profiles)
    except UserError as error:
        raise source.error("profiles", None, str(error)) from None


def _needing(section: Strict, prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """Path, value and need of each key of a section that is set and ``needs`` something."""
    for name, about in type(section).model_fields.items():
        extra, value = about.json_schema_extra, getattr(section, name)
        if isinstance(extra, dict) and "needs" in extra and value is not None:
            yield f"{prefix}{name}", value, str(extra["needs"])


def number_bytes_of(
    scenario: Scenario, model: ModelSpec, device: DeviceSpec, source: Source
) -> NumberBytes:
    """Bytes of numbers in the profiled dtype; those of fp16 if there is no profile. A missing
    profile is reported later, after the check of the memory. Raises UserError for a number format
    without a stack whose kernels compute with it, and for experts of a model that has none."""
    cluster = scenario.cluster
    own = *_needing(scenario), *_needing(cluster, "cluster."), *_needing(scenario.engine, "engine.")
    for key, value, needs in own:
        if scenario.stack is None:
            raise source.error(key, value, f"needs stack: {_stacks(device)}")
        if needs == "experts" and model.experts is None:
            raise source.error(key, value, f"model {model.name} has no experts")
    if not cluster.expert_parallel:
        for name, off in (("moe_a2a_backend", "none"), ("redundant_experts", 0)):
            if (value := getattr(cluster, name)) not in (None, off):
                problem = "needs cluster.expert_parallel: true"
                raise source.error(f"cluster.{name}", value, problem)
    _check_ranks(scenario, model, device, source)
    if scenario.kernels is not None:
        return scenario.kernels.number_bytes
    try:
        path = bundle_path(
            _profiles(scenario, source), device.name, model.name, scenario.cluster.tp
        )
        return _load(path, bundle_digest(path)).number_bytes if path.is_dir() else TWO_BYTES
    except UserError:
        return TWO_BYTES


def _check_ranks(scenario: Scenario, model: ModelSpec, device: DeviceSpec, source: Source) -> None:
    """Raise UserError for data-parallel attention of a model, or a layout, without it."""
    cluster = scenario.cluster
    if cluster.dp == 1:
        if cluster.rank_router != "round_robin":
            problem = "must be left out: needs cluster.dp above 1"
            raise source.error("cluster.rank_router", cluster.rank_router, problem)
        return
    if model.experts is None:
        problem = f"must be 1: model {model.name} has no experts, so its ranks would not wait for "
        raise source.error("cluster.dp", cluster.dp, f"{problem}each other: give cluster.replicas")
    if scenario.stack is None:
        raise source.error("cluster.dp", cluster.dp, f"needs stack: {_stacks(device)}")
    if cluster.pp > 1:
        problem = "must be 1: with data-parallel attention (cluster.dp) there are no stages"
        raise source.error("cluster.pp", cluster.pp, problem)
    for name in ("gpus_per_node", "intra_node", "inter_node"):
        if getattr(cluster, name) is not None:
            problem = "must be left out: with cluster.dp above 1 tokens go to the experts over "
            problem += f"{device.name}'s own links, between nodes of {device.gpus_per_node} GPUs"
            raise source.error(f"cluster.{name}", None, problem)


def op_times_of(
    scenario: Scenario, model: ModelSpec, device: DeviceSpec, source: Source
) -> tuple[OpTimes, str]:
    """The op times and their digest: of their bundle, or of the files from which a stack's or a
    device's times are computed (:func:`op_source`)."""
    ops, digest = _op_times(scenario, model, device, source)
    links, cluster = links_of(scenario, device), scenario.cluster
    node = ops
    if links.nodes > 1:  # the GPUs of one node reduce among themselves
        within = scenario.having("cluster", tp=cluster.tp // links.nodes)
        node, _ = _op_times(within, model, device, source)
    ops = _linked(ops, links, node)
    scale = dict(scenario.engine.op_scale)
    if (tuned := calibration_of(scenario, source)) is not None:
        found = factors(tuned.kernels, tuned.links)
        scale |= {op: factor * scale.get(op, 1.0) for op, factor in found.items()}
    return (_scaled(ops, tuple(sorted(scale.items()))) if scale else ops), digest


@lru_cache(maxsize=16)
def _linked(ops: OpTimes, links: LinkTimes, node: OpTimes) -> OpTimes:
    return links.of(ops, node)


@lru_cache(maxsize=16)
def _scaled(ops: OpTimes, factors: tuple[tuple[str, float], ...]) -> OpTimes:
    """The op times with each op scaled by its factor; equal scenarios share the object's tables."""
    return ops.scaled(dict(factors))


def _op_times(
    scenario: Scenario, model: ModelSpec, device: DeviceSpec, source: Source
) -> tuple[OpTimes, str]:
    """The op times of the profile, not scaled."""
    kernels, tp = scenario.kernels, scenario.cluster.tp
    profiles = _profiles(scenario, source) if scenario.profiles else None
    key = "profiles" if kernels is None else "stack"
    try:
        path = op_source(device, model, tp, kernels, profiles)
        if not isinstance(path, Path):
            modelled = _modelled(device.name, model, tp, kernels)
            return modelled, modelled.meta.content_sha256
        key, digest = "profiles", bundle_digest(path)
        ops = _load(path, digest)
    except ValueError as error:
        whose = _of_checkpoint(scenario, model, str(error))
        raise source.error(key, None, f"{error}{whose}") from None
    meta = ops.meta
    if (meta.device, meta.tp) != (device.name, tp):
        problem = (
            f"{path} holds the bundle of {meta.device} tp {meta.tp}, not {device.name} tp {tp}"
        )
        raise source.error("profiles", None, problem)
    if ops.model != model:
        # A config.json may be called like a shipped model and describe another one.
        profiled, wanted = asdict(ops.model), asdict(model)
        differ = [f"{k} {profiled[k]}, not {wanted[k]}" for k in wanted if profiled[k] != wanted[k]]
        problem = f"{path} was made for another model of that name, with {'; '.join(differ)}"
        raise source.error("model", scenario.model, problem)
    if scenario.cluster.pp > 1 and link_scope(scenario, device) not in ops.send:
        problem = f"{path} holds no {link_scope(scenario, device)} transfers, so pp must be 1"
        raise source.error("cluster.pp", scenario.cluster.pp, problem)
    return ops, digest


def _of_checkpoint(scenario: Scenario, model: ModelSpec, problem: str) -> str:
    """A hint for ``problem`` if the unmeasured number format is the checkpoint's; else empty."""
    wanted = problem.partition("; measured: ")[0]
    for key, value in model.formats.items():
        of_cache = (key == "kv_cache_dtype") == ("KV" in wanted)
        if of_cache and getattr(scenario, key) == value and re.search(rf"\b{value}\b", wanted):
            section = "quantization_config of " if _config_json(scenario.model) else ""
            return f"; {key} {value} is that of {section}{scenario.model}: give another {key}"
    return ""


def _config_json(model: str) -> bool:
    path = user_path(model)
    return path.suffix == ".json" or (path / "config.json").is_file()


def provenance(meta: BundleMeta) -> str:
    """The kind of origin of every op's times, in words; ops of one kind together, and the versions
    of the kernels. Borrowed times have their whole origin, and the half-width of their band."""
    kinds: dict[str, list[str]] = {}
    borrowed: dict[str, list[str]] = {}
    there = [op for op in (*ALL_ROW_OPS, *ATTENTION, ALL_REDUCE, *SENDS) if op in meta.environment]
    for op in there:
        kind, _, how = str(meta.environment[op]).partition(DOUBT)[0].partition(": ")
        kinds.setdefault(kind, []).append(op_label(op))
        if BY_RATIO in how and meta.kernels is not None:
            width = meta.kernels.half_width_pct[op]
            borrowed.setdefault(f"{how} (within {width:.0f} %)", []).append(op_label(op))
    if not kinds:  # a measured bundle, or one of a calibrated device
        return f"all {meta.source} on {meta.device}"
    told = "; ".join(f"{kind}: {', '.join(dict.fromkeys(ops))}" for kind, ops in kinds.items())
    told += "".join(f"; borrowed: {', '.join(ops)}: {how}" for how, ops in borrowed.items())
    text = " ".join(str(meta.environment[op]) for op in there)
    versions = sorted(set(re.findall(r" of (\w+ \d[\w.]*)", text)))
    told += f"; kernels of {', '.join(versions)}" if versions else ""
    return f"{told} (sources: meta.yaml of the bundle, or sarathi-sim list support)"


def link_scope(scenario: Scenario, device: DeviceSpec) -> Literal["intra_node", "inter_node"]:
    """The kind of link between a pipeline's stages."""
    gpus = scenario.cluster.gpus
    return "intra_node" if gpus <= node_gpus(scenario, device) else "inter_node"


def bundle_digest(path: Path) -> str:
    """SHA-256 of a bundle's ``meta.yaml``, which in turn holds that of its tables; empty without.
    Reading the bundle checks the latter."""
    meta = path / "meta.yaml"
    return sha256(meta.read_bytes()).hexdigest() if meta.is_file() else ""


def _changed(path: Path) -> int:
    """The time of a file's last change, for the caches below; 0 for a shipped name."""
    return path.stat().st_mtime_ns if path.is_file() else 0


@lru_cache(maxsize=8)
def _load_model(name: str, changed: int) -> ModelSpec:
    return load_model(name)


@lru_cache(maxsize=16)
def _load(path: Path, digest: str) -> OpTimes:
    """The regressions of one bundle; scenarios share them. ``digest`` is that of the bundle: a
    worker may outlive a change of the folder."""
    return bundle_times(load_plausible(path))


@lru_cache(maxsize=16)
def _modelled(device: str, model: ModelSpec, tp: int, kernels: Kernels | None) -> OpTimes:
    """Modelled op times, which no folder holds; scenarios share them, and so their tables."""
    source = op_source(load_device(device), model, tp, kernels)
    assert not isinstance(source, Path)
    return modelled_times(source)


@strict_dataclass
class HostConstants:
    """Host seconds: of an iteration; of each sequence in it; of a request on its way from the
    client to the scheduler and of its first token back (``frontend_token_s`` more for each token of
    its prompt); and of the launch of one of a layer's kernels without a CUDA graph."""

    host_iteration_s: float
    host_sequence_s: float
    frontend_s: float
    frontend_token_s: float = 0.0
    launch_s: float = 0.0


@strict_dataclass
class StackErrors:
    """Standard deviations of the logarithm of a server's mean TTFT and TPOT from causes other than
    op times: settings, version, scheduler."""

    ttft: float
    tpot: float


NONE = HostConstants(0.0, 0.0, 0.0)
#: The engine's keys that have a default by stack.
DEFAULTS = tuple(
    key for key, of in Engine.model_fields.items() if of.default is None and key.endswith("_s")
)
#: Calls of a layer beside its GEMMs, norms and activations (additions are fused with norms, rotary
#: with attention): routing, permutation and the experts; attention and what writes the cache; two
#: all-reduces. Assumed.
_EXPERT_CALLS, _OTHER_CALLS = 3, 4
#: Further calls of a recurrent layer's scan (SGLang 0.5.9: eight kernels of a chunk, the
#: convolution, gates, copies of states), and of an indexer (norm, rotation, quantisation, scores,
#: choice). Counted in its code.
_RECURRENT_CALLS, _INDEX_CALLS = 12, 10
_FUSED = ("add", "rope")
#: The pages with the runs to which an executor's constants were fitted.
_EXECUTORS = {"ray": "docs/lab/real_servers.md", "tensorrt": "docs/lab/mlperf.md"}


@strict_dataclass
class Meaning:
    """The meaning of a constant, and the plausible range that bounds its fit, in seconds."""

    meaning: str
    range: tuple[float, float]


@strict_dataclass
class HostTimes:
    """The file. ``measured`` constants are of another engine and data set; ``stacks`` were
    ``fitted_to`` rows of measured servers, ``executors`` to recorded runs
    (docs/lab/real_servers.md). ``apart`` says how far the clients of campaigns without a recorded
    load tool are spread, from 0 (in lock-step) to 1."""

    constants: dict[str, Meaning]
    measured: HostConstants
    measured_origin: str
    fitted_to: str
    stacks: dict[str, HostConstants]
    errors: dict[str, StackErrors]
    apart: dict[str, float] = field(default_factory=dict)
    executors: dict[str, dict[str, float]] = field(default_factory=dict)


@cache
def host_times(mixtures: bool = False) -> HostTimes:
    """The shipped constants, of dense models or of ``mixtures`` of experts."""
    return load_shipped(HostTimes, f"host_time{'_mixtures' * mixtures}.yaml")


def host_of(engine: Engine) -> HostTime:
    """The host's times in an iteration, from the ``engine`` section."""
    given = {key.removeprefix("host_"): value for key, value in engine}
    return HostTime(**{each.name: given[each.name] or 0.0 for each in fields(HostTime)})


def with_host_time(
    scenario: Scenario,
    model: ModelSpec,
    requests: Sequence[Request],
    tuned: ServerCalibration | None = None,
) -> tuple[Engine, tuple[str, ...]]:
    """The engine's section with every constant filled in, and notes on its host's time. A mixture
    of experts has the constants of mixtures. The constant of a prompt token is taken times the mean
    prompt of ``requests``, that of a launch times the calls of a layer of ``model``."""
    given = scenario.engine
    stack = named_stack(scenario.stack)[0] if scenario.stack else None
    times = host_times(mixtures=model.experts is not None)
    known = times.stacks[stack] if stack else NONE
    defaults = {key: getattr(known, key, 0.0) for key in DEFAULTS}
    if known.frontend_token_s and requests:
        mean_prompt = sum(request.prompt_tokens for request in requests) / len(requests)
        defaults["frontend_s"] += known.frontend_token_s * mean_prompt
    launch_s = launch_s_of(known, given)
    if launch_s:
        defaults["launch_layer_s"] = launch_s * calls_of_layer(model, scenario.dtype)
    executors = host_times().executors
    defaults |= executors.get(given.executor or "", {})
    whose = f"{stack}'s over {given.executor}" if given.executor in executors else f"{stack}'s"
    if tuned is not None:
        defaults, whose = defaults | tuned.engine, f"{scenario.calibration}'s"
    missing = {key: value for key, value in defaults.items() if getattr(given, key) is None}
    engine = given.model_copy(update=missing)
    shipped, own = list[str](), list[str]()
    for key in DEFAULTS:
        if value := getattr(engine, key):
            where = shipped if value == defaults[key] else own
            where.append(f"{1e3 * value:.3g} ms {_TIMES[key]}")
    of = times.fitted_to if tuned is None else f"tuned to {', '.join(tuned.runs)}"
    if tuned is None and given.executor in executors:
        of = f"fitted to the runs of {_EXECUTORS[given.executor]}"
    if tuned is not None and (tuned.model, tuned.device) != (model.name, scenario.device):
        of += f" ({tuned.model} on {tuned.device}: not this server)"
    if launch_s > known.launch_s and defaults["launch_layer_s"] == engine.launch_layer_s:
        of += "; launches from documents and from other engines' prompts (data/engines/vllm.yaml)"
    notes = [f"host time: {whose}, {', '.join(shipped)}; {of}"] if shipped else []
    notes += [f"host time: as configured, {', '.join(own)}"] if own else []
    return engine, tuple(notes)


_TIMES = {
    "host_iteration_s": "per iteration",
    "host_sequence_s": "per sequence",
    "launch_layer_s": "to launch a layer",
    "frontend_s": "per request",
    "admission_s": "per admission",
}
"""What the host's constants are of, in answers."""


def prompts_captured(engine: Engine) -> bool:
    """Whether vLLM may capture batches with prompts as CUDA graphs: piece by piece."""
    return engine.cudagraph_mode != "FULL_DECODE_ONLY" and engine.splitting_ops != []


def launch_s_of(known: HostConstants, engine: Engine) -> float:
    """Seconds to launch one call of a layer with prompts: the stack's constant, or the documents'
    where vLLM captures no CUDA graph of prompts."""
    least = 0.0 if prompts_captured(engine) else engine_facts("vllm").at("launch_s")
    return max(known.launch_s, least)


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
    beside += model.share_of("recurrent") * _RECURRENT_CALLS
    beside += _INDEX_CALLS if model.indexer else 0
    return gemms + beside + _OTHER_CALLS


#: PCIe 5.0 x16, of a device whose own link is NVLink.
PCIE = 64e9
#: A message through the host's memory crosses PCIe twice and the memory bus as often: assumed. The
#: latency is longer by half of what NCCL's smallest message takes longer between two RTX 4090
#: without peer access (11.8 us, tinygrad/open-gpu-kernel-modules issue 17) than with it (5).
PEER_LATENCY_S = 2e-6
THROUGH_HOST, HOST_LATENCY_S = 0.25, PEER_LATENCY_S + 3.4e-6
#: AIConfigurator's assumption for all networks; RoCE's is assumed.
NETWORK_LATENCY_S = {"infiniband": 10e-6, "roce": 15e-6}
#: NCCL over sockets: 4 to 6 GB/s by an adapter of 100 Gb/s (NVIDIA/nccl issue 450); an all-reduce
#: of a few bytes on two nodes takes 120 us, two messages (issue 1184).
TCP_BANDWIDTH, TCP_LATENCY_S = 5e9, 60e-6


def node_gpus(scenario: Scenario, device: DeviceSpec) -> int:
    """The GPUs of a node."""
    return scenario.cluster.gpus_per_node or device.gpus_per_node


def links_of(scenario: Scenario, device: DeviceSpec) -> LinkTimes:
    """The links of a deployment, where they are others than those of the measurements."""
    cluster, node = scenario.cluster, node_gpus(scenario, device)
    within, between = cluster.intra_node or NodeLink(), cluster.inter_node or NetworkLink()
    own = device.intra_node
    measured = "nvlink" if own.bandwidth > PCIE else "pcie_peer"
    kind = within.kind or (measured if own.peers else "pcie")
    pcie = min(own.bandwidth, PCIE)
    known = {
        "nvlink": (own.bandwidth, PEER_LATENCY_S),
        "pcie_peer": (pcie, PEER_LATENCY_S),
        "pcie": (THROUGH_HOST * pcie, HOST_LATENCY_S),
    }
    bandwidth, latency_s = known[kind]
    usual_s = known[measured][1]
    other = kind != measured or within.bandwidth or within.latency_s is not None
    inside = Route(
        kind,
        within.bandwidth or bandwidth,
        latency_s if within.latency_s is None else within.latency_s,
    )
    rack = between.kind is None and PCIE < own.bandwidth <= device.inter_node.bandwidth
    network = "nvlink" if rack else between.kind or "infiniband"
    latency_s = PEER_LATENCY_S if rack else NETWORK_LATENCY_S.get(network, TCP_LATENCY_S)
    shared = min(cluster.tp, node) if network == "tcp" else 1
    rate = between.bandwidth or (TCP_BANDWIDTH if network == "tcp" else device.inter_node.bandwidth)
    outside = Route(
        network, rate / shared, latency_s if between.latency_s is None else between.latency_s
    )
    return LinkTimes(
        inside if other else None,
        outside if cluster.inter_node else None,
        outside,
        max(1, cluster.tp // node),
        inside.bandwidth <= own.bandwidth,
        max(0.0, inside.latency_s - usual_s),
    )


def version_defaults(scenario: Scenario, device: DeviceSpec) -> dict[str, dict[str, Any]]:
    """The defaults of ``policy``, ``kv_cache`` and ``engine`` that depend on the engine's version:
    its policy's; and the kernels' where the stack names one."""
    policy, version = scenario.policy, scenario.policy.model_dump().get("version")
    cluster, spec = scenario.cluster, scenario.speculation
    about = {key: "several" if getattr(cluster, key) > 1 else "one" for key in ("pp", "dp")}
    inside = cluster.tp <= node_gpus(scenario, device)
    inside &= cluster.intra_node is None or cluster.intra_node.kind in (None, "nvlink")
    about |= {"tp": str(cluster.tp) if inside else "", "capability": capability(device)}
    about |= {} if spec is None else {"speculation": spec.method}
    wanted = list[tuple[Stack, str, str, str]]()
    if policy.name in STACKS and version:
        wanted.append((policy.name, version, "policy", "async_scheduling"))
        wanted.append((policy.name, version, "kv_cache", STACK_SHARES[policy.name]))
    if scenario.stack is not None:
        stack, own = named_stack(scenario.stack)
        own = own or (version if stack == policy.name else None) or ""
        wanted.append((stack, own, "engine", FUSED))
    found: dict[str, dict[str, Any]] = {"policy": {}, "kv_cache": {}, "engine": {}}
    for engine, of, section, key in wanted:
        if key in engine_facts(engine).facts:
            value = engine_facts(engine).at(key, of, **about)
            # A key of a run is the same however often it is resolved: a share is no whole number.
            found[section][key] = value if isinstance(value, bool) else float(value)
    return found


def of_its_version(scenario: Scenario, device: DeviceSpec) -> tuple[Scenario, list[str]]:
    """The scenario with the defaults of its engine's version for what it leaves open, and what to
    say of a version whose decisions were not compared."""
    policy, version = scenario.policy, scenario.policy.model_dump().get("version")
    found, cache = version_defaults(scenario, device), scenario.kv_cache or KvCache()
    if "usable_memory" in scenario.cluster.model_fields_set:
        found["kv_cache"] = {}
    for section, of in (("policy", policy), ("kv_cache", cache), ("engine", scenario.engine)):
        given = of.model_fields_set  # and null is not given
        left = {k: v for k, v in found[section].items() if k not in given or getattr(of, k) is None}
        if left:
            scenario = scenario.model_copy(update={section: of.model_copy(update=left)})
    if policy.name not in STACKS or not version:
        return scenario, []
    compared = engine_facts(policy.name).lockstep
    own, oldest, newest = map(release_of, (version, compared[0], compared[-1]))
    if own[: len(oldest)] >= oldest and own[: len(newest)] <= newest:
        return scenario, []
    near = compared[0] if own < oldest else compared[-1]
    told = f"{policy.name} {version}: simulated as {near}, the nearest version whose decisions "
    return scenario, [f"{told}were compared with the engine"]


def running_of(
    policy: PoolPolicy, cache: KvCache, memory: EngineMemory, source: Source
) -> tuple[int, str]:
    """The sequences that may run, as far as states of recurrent layers allow, and what to say of
    it. Raises UserError where the engine would not start.

    Sources: vllm-project/vllm, pull request 38270 (a block of the cache for each sequence); SGLang
    0.5.23, ``mem_cache/kv_cache_configurator.py`` (a pool of states, several a request).
    """
    most, version = policy.max_num_seqs, policy.version
    if not memory.state_bytes:
        return most, ""
    facts = engine_facts(SHARES[memory.setting].engine)
    size = f"recurrent layers: states take {memory.state_bytes / 1e6:.1f} MB per sequence and GPU"
    if memory.states is None:
        limit = "states_limit_sequences"
        refuses = limit in facts.facts and facts.at(limit, version)
        if refuses and most > memory.most_states:
            problem = f"must be at most {memory.most_states}: each needs a block for its states, "
            problem += f"or vLLM {version} does not start"
            raise source.error("policy.max_num_seqs", most, problem)
        return most, f"{size}, {memory.state_blocks} KV blocks"
    each = 1
    if cache.prefix_caching:
        each = facts.at("states_cached", version)
        each += facts.at("states_overlap", version) if policy.ahead else 0
    running = min(most, memory.states // each)
    told = f"{size}; {memory.states:,} fit, {each} per request: {running:,} requests run at once"
    if not running:
        raise source.error("kv_cache", None, f"{told}; use {MORE_GPUS}")
    return running, told


def with_running(scenario: Scenario, running: int, memory: EngineMemory | None) -> Scenario:
    """The scenario with SGLang's limit of running requests, where a pool of states lowers it."""
    key = "max_running_requests"
    if memory is None or memory.states is None or key not in type(scenario.policy).model_fields:
        return scenario
    return scenario.having("policy", **{key: running})
