"""The keys of an experiment: type, bounds, default and name of each.

The ``workload`` section is in :mod:`sarathi_sim.experiments.config.workload`, ``policy`` in
:mod:`sarathi_sim.experiments.config.policy`.
:mod:`sarathi_sim.experiments.config.loading` reads them from YAML and turns mistakes into messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from sarathi_sim.profiler.facts.formats import (
    STACKS,
    A2aBackend,
    Distribution,
    Kernels,
    KvDtype,
    MoeDtype,
    WeightDtype,
    named_stack,
)
from sarathi_sim.profiler.facts.ops import OPS
from sarathi_sim.profiler.storage.not_modelled import not_modelled
from sarathi_sim.simulator.loop.records import EngineSwitches
from sarathi_sim.simulator.loop.routers import Router
from sarathi_sim.simulator.views.metric_registry import number_text, with_unit
from .base import (
    Count,
    Degree,
    Name,
    Positive,
    Seconds,
    Share,
    Strict,
    Text,
    Tokens,
    key,
)
from .policy import PolicyConfig
from .workload import Workload

Bandwidth = Annotated[float, Field(ge=1e6, le=1e14)]
Latency = Annotated[float, Field(ge=0, le=1)]
Bytes = Annotated[float, Field(ge=0, le=1e15)]
OpName = Literal[*OPS]  # type: ignore[valid-type]

POOLS = ("prefill", "decode")
"""The pools of a disaggregated deployment."""


def _one_kind(value: Any) -> Any:
    if isinstance(value, list | dict):
        raise ValueError(f"must be one; {not_modelled('heterogeneous')}")
    return value


def _stack(value: str) -> str:
    named_stack(value)
    return value


#: A stack with the version whose kernels run, or without: the newest.
StackName = Annotated[
    str, AfterValidator(_stack), WithJsonSchema({"enum": [*STACKS, "vllm@VERSION"]})
]


def _no_rate(value: Any) -> Any:
    if type(value) in (int, float):
        raise ValueError(f"must be true or false; {not_modelled('hit-rate')}")
    return value


class NodeLink(Strict):
    """The link between the GPUs of a node: ``nvlink``, ``pcie_peer`` (PCIe, where a GPU can write
    into another one's memory) or ``pcie`` (through the host's memory). ``bandwidth`` and
    ``latency_s`` of a message are one GPU's; what is not given is the device's, or assumed."""

    kind: Literal["nvlink", "pcie_peer", "pcie"] | None = key("kind of link", default=None)
    bandwidth: Bandwidth | None = key("bandwidth", "bytes/s", default=None)
    latency_s: Latency | None = key("latency", default=None)


class NetworkLink(Strict):
    """The link between nodes: ``infiniband`` or ``roce``, an adapter for each GPU, or ``tcp``, one
    adapter for the GPUs of a node, whose ``bandwidth`` they share."""

    kind: Literal["infiniband", "roce", "tcp"] | None = key("kind of link", default=None)
    bandwidth: Bandwidth | None = key("bandwidth", "bytes/s", default=None)
    latency_s: Latency | None = key("latency", default=None)


class Cluster(Strict):
    """``replicas`` pipelines of ``pp`` stages, each on ``tp`` GPUs, behind a ``router``: in turn,
    to the replica with the fewest declared tokens or the fewest requests that have not ended (of
    equals the first), to the one with the fewest prompt tokens of those with fewer requests than
    others (TensorRT-LLM's ranks), or to the one with fewer requests of two drawn at random.

    With data-parallel attention a replica has ``dp`` ranks of ``tp`` GPUs each, in lock-step: a
    step ends with its slowest rank. Each has requests (``rank_router``), a batch and a KV cache of
    its own; ``policy``, ``batching`` and ``kv_cache`` are those of one rank. Attention, dense and
    shared feed-forward networks and the LM head are on every rank; the experts are spread over all
    ``tp * dp`` GPUs. So vLLM's ``--tensor-parallel-size`` and ``--data-parallel-size`` are ``tp``
    and ``dp``, and SGLang's ``--tp 8 --dp 8 --enable-dp-attention`` (TensorRT-LLM's
    ``enable_attention_dp``) is ``tp: 1, dp: 8``. It needs a mixture of experts, and ``pp`` 1.

    ``max_length`` is the longest prompt + output a sequence may have (default: the model's).
    ``layers_per_stage`` defaults to an even split, ``gpus_per_node`` to the device's: a pipeline
    with more GPUs sends between nodes, from every stage to the next one. A stage with more GPUs is
    on several nodes, and its all-reduces go between them. ``intra_node`` and ``inter_node`` are
    the links, by default those over which the op times were measured; with ``dp`` above 1 these
    keys must be left out. Of a mixture's experts each of the ``tp * dp`` GPUs holds a part of every
    one or, with ``expert_parallel``, some whole; ``moe_a2a_backend`` sends tokens to them and back
    (none: the layer's all-reduce adds up): NCCL's all-to-all, DeepEP (low latency up to 256 tokens
    of a GPU on Hopper and between nodes, elsewhere up to 1,024, else normal), or TensorRT-LLM's
    kernels over NVLink. ``redundant_experts`` are copies that a load balancer places (SGLang:
    ep_num_redundant_experts; TensorRT-LLM: num_slots less the experts).
    """

    tp: Degree = key("tensor-parallel degree", short="TP", default=1)
    pp: Degree = key("pipeline stages", short="PP", default=1)
    replicas: Annotated[Degree, BeforeValidator(_one_kind)] = key("replicas", default=1)
    router: Router = key("router", default="round_robin")
    layers_per_stage: list[Degree] | None = key("layers of each stage", default=None)
    usable_memory: Share = key("usable share of the memory", default=0.9)
    max_length: Tokens | None = key("longest sequence", "tokens", default=None)
    gpus_per_node: Degree | None = key("GPUs of a node", default=None)
    intra_node: NodeLink | None = key("link within a node", default=None)
    inter_node: NetworkLink | None = key("link between nodes", default=None)
    expert_parallel: bool | None = key("expert parallel", needs="experts", default=None)
    moe_a2a_backend: A2aBackend | None = key(
        "all-to-all of the experts", needs="experts", default=None
    )
    dp: Degree = key("data-parallel degree of attention", short="DP", default=1)
    rank_router: Router = key("router of ranks", default="round_robin")
    redundant_experts: int | None = key(
        "copies of experts", needs="experts", default=None, ge=0, le=2**16
    )

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.dp * self.pp


class Batching(Strict):
    """How micro-batches are formed.

    ``max_batch`` defaults to what the memory holds, ``max_in_flight`` to ``pp``. ``formation``:
    form a batch when a micro-batch returns (eager) or when stage 0 is free (lazy).
    ``micro_batches``: a request stays in one (bound) or may join any (free).
    """

    max_batch: Count | None = key("largest batch", "sequences", "batch", default=None)
    max_in_flight: Degree | None = key("micro-batches in flight", default=None)
    formation: Literal["eager", "lazy"] = key("batch formation", default="eager")
    micro_batches: Literal["bound", "free"] = key("micro-batches", default="bound")
    kv_reservation: Literal["max_length", "declared"] = key("KV reservation", default="max_length")


class KvCache(Strict):
    """The paged KV cache of policies that act on a pool (``sarathi-sim list policies`` says which).

    ``block_size`` tokens a block; ``num_blocks`` of them, one of which is never used (default: what
    the engine's own formula makes of the memory). That takes ``gpu_memory_utilization`` (vLLM,
    Sarathi-Serve), ``mem_fraction_static`` (SGLang) or ``free_gpu_memory_fraction`` (TensorRT-LLM;
    default of each: ``cluster.usable_memory``, if that is given, else 0.92 for vLLM from 0.20 on
    and 0.9 for all others), and what an engine prints when it starts: the peak of its activations
    and what lies outside of torch, of a GPU (default: assumed), and its CUDA graphs (vLLM from 0.21
    on; before that they are not counted).
    ``prefix_caching`` keeps full blocks to be found again by their content (SGLang's decode workers
    only if their pool's own ``kv_cache`` says so); with
    ``prompts_cached`` those of every prompt are there from the beginning, as after a run of the
    same requests.
    """

    block_size: Tokens = key("KV block size", "tokens", "block", default=16)
    num_blocks: Annotated[int, Field(ge=2, le=10**8)] | None = key("KV blocks", default=None)
    gpu_memory_utilization: Share | None = key("share of the GPU memory", default=None)
    mem_fraction_static: Share | None = key("static share of the GPU memory", default=None)
    free_gpu_memory_fraction: Share | None = key("share of the free GPU memory", default=None)
    activation_bytes: Bytes | None = key("peak of activations", default=None)
    non_torch_bytes: Bytes | None = key("memory outside of torch", default=None)
    cuda_graph_bytes: Bytes = key("memory of CUDA graphs", default=0.0)
    prefix_caching: Annotated[bool, BeforeValidator(_no_rate)] = key("prefix caching", default=True)
    prompts_cached: bool = key("prompts cached before", default=False)


GRAPH_KEYS = ("cudagraph_mode", "splitting_ops")
FUSED = "fi_allreduce_fusion_max_size_mb"
OF_VLLM = (*GRAPH_KEYS, FUSED)
"""Keys of ``engine`` that only vLLM has."""


class Engine(Strict, EngineSwitches):  # type: ignore[misc]  # both are frozen
    """What the serving engine adds: scheduler turn-around a batch, run-time jitter (coefficient
    of variation), sends that occupy the stage or not, whether logits are computed, and the host's
    time that no GPU time hides: of each iteration, and of each sequence in it. ``frontend_s`` is
    what a request takes from its client to the scheduler and back; it counts in TTFT and latency.
    ``admission_s`` is what a replica's front end takes for each request, one after the other.
    An ``executor`` starts and feeds the GPUs' processes (vLLM's names); ``ray`` has constants of
    its own, and so has ``tensorrt``: TensorRT-LLM's engines in their client's process
    (docs/lab/mlperf.md).
    ``launch_layer_s`` is the host's time to launch a layer's kernels one by one: a layer with
    prompts takes that long at least (the rest counts as prefill attention). These five are by
    default the stack's (``data/host_time.yaml``; ``host_time_mixtures.yaml`` for mixtures of
    experts, the only ones whose launches count), without a stack 0.

    Three are vLLM's. With ``cudagraph_mode: FULL_DECODE_ONLY``, or without ``splitting_ops``, no
    CUDA graph holds a batch with prompts, so launches count for dense models, too (from documents
    and other servers: ``data/engines``). ``fi_allreduce_fusion_max_size_mb`` is the largest
    all-reduce that is one kernel with the addition after it (0: none; default: the version's, on
    GPUs for which it has one).

    ``layer_time``: as whole layers were ``measured`` (where the profile holds some), or the ``sum``
    of the ops. ``op_scale``: what if an op took so many times as long
    (docs/plan/settings.md)."""

    send: Literal["overlapped", "blocking"] = key("sends", default="overlapped")
    lm_head: bool = key("LM head", default=True)
    layer_time: Literal["measured", "sum"] = key("layer time", default="measured")
    executor: Literal["uni", "mp", "ray", "tensorrt"] | None = key(
        "executor", needs="stack", default=None
    )
    host_iteration_s: Seconds | None = key("host time of an iteration", short="host", default=None)
    host_sequence_s: Seconds | None = key(
        "host time of a sequence", short="host a sequence", default=None
    )
    frontend_s: Seconds | None = key("frontend time of a request", short="frontend", default=None)
    admission_s: Seconds | None = key("admission of a request", short="admission", default=None)
    launch_layer_s: Seconds | None = key(
        "time to launch a layer's kernels", short="launch", default=None
    )
    cudagraph_mode: Literal["FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY"] | None = key(
        "CUDA graphs", needs="stack", default=None
    )
    splitting_ops: list[Text] | None = key("ops between graphs", needs="stack", default=None)
    fi_allreduce_fusion_max_size_mb: Annotated[float, Field(ge=0, le=1024)] | None = key(
        "largest fused all-reduce", "MiB", needs="stack", default=None
    )
    op_scale: dict[OpName, Annotated[float, Field(gt=0, le=1000)]] = key(
        "factors on op times", default={}
    )


class Speculation(Strict):
    """Speculative decoding: a drafter proposes ``draft_length`` tokens for each decode, which
    verifies them at once.

    ``mtp`` drafts with a layer like the model's own, ``eagle3`` with one dense layer,
    ``draft_model`` with a ``model`` of its own, named as the scenario's (SGLang: STANDALONE,
    TensorRT-LLM: DraftTarget); ``ngram`` looks drafts up, in no time on the GPU. ``acceptance``
    says how many hold: the mean tokens of a decode, its own included (each draft then holds with
    one probability, given those before it); or for each position the probability that it holds,
    given those before; or, with ``mtp`` and ``eagle3``, the published mean of the model
    (``golden``: with thinking on). Policies vllm, sglang and trtllm, with one stage.
    """

    method: Literal["mtp", "eagle3", "draft_model", "ngram"] = key("drafter")
    model: Text | None = key("draft model", default=None)
    draft_length: Annotated[int, Field(ge=1, le=16)] = key("draft length", short="K", default=3)
    acceptance: (
        Literal["golden", "golden_thinking_off"]
        | Annotated[float, Field(ge=1, le=17)]
        | list[Annotated[float, Field(ge=0, le=1)]]
    ) = key("acceptance", default="golden")


class Transfers(Strict):
    """How requests go from prefill workers to decode workers (docs/model/pools.md).

    ``order``: the decode worker is chosen and reserves blocks when the prefill has ended
    (prefill_first: vLLM, TensorRT-LLM), or before it begins (decode_reserves_first: SGLang). The
    first token is there at the end of the first decode step, or once the KV cache was sent
    (on_transfer). A prompt's KV takes ``setup_s`` and its bytes / ``bandwidth`` on the link of its
    prefill worker, or of its rank there, one prompt after the other, and ``latency_s`` on the way.
    What is left out is as the policy's engine has it.
    """

    order: Literal["prefill_first", "decode_reserves_first"] | None = key(
        "order of prefill and reservation", default=None
    )
    first_token: Literal["decode_step", "on_transfer"] | None = key("first token", default=None)
    bandwidth: Bandwidth | None = key(
        "bandwidth of a prefill worker's rank", "bytes/s", default=None
    )
    setup_s: Latency | None = key("time of a transfer before its bytes", "s", default=None)
    latency_s: Latency | None = key("latency of a transfer", default=None)


class Disaggregation(Strict):
    """Two pools: ``prefill`` workers compute prompts, ``decode`` the rest (docs/model/pools.md).

    Each of the two takes the scenario's keys (a ``device``, and those of ``cluster``, ``policy``,
    ``kv_cache`` and others, but no model, workload, seed, profiles or calibration), and has the
    scenario's own values where it gives none. ``cluster.replicas`` are its workers. Each of the
    ``frontends`` routes without knowing of the others; requests reach them in turn. ``handover``
    is by default that of the policy's engine.
    """

    prefill: dict[Text, Any] = key("prefill pool", default={})
    decode: dict[Text, Any] = key("decode pool", default={})
    handover: Transfers = key("handover", default=Transfers())
    frontends: Degree = key("frontends", default=1)


class Scenario(Strict):
    """One simulation, complete.

    ``model`` is a shipped model, a published checkpoint of one by its name on the Hugging Face Hub,
    or the path of a ``config.json``; ``device`` a shipped device or a device YAML; ``profiles`` the
    folder of profile bundles (default: the shipped one). ``stack`` takes the kernels of a serving
    stack (``vllm@0.19``: each as the nearest version that was measured has it; without a version
    the policy's, if it is that engine's), with weights in ``dtype`` and a KV cache in
    ``kv_cache_dtype`` (by default the checkpoint's); without it op times are the profile's own. A
    mixture's experts are in ``moe_dtype`` (default: ``dtype``), and tokens spread over them by
    ``expert_distribution`` (default: power_law_1.2). ``calibration`` is what ``sarathi-sim tune``
    found of a server of this stack. A path in a file starts at the file's folder, one of ``--set``
    or of another option at the current folder.
    """

    seed: int = key("seed", default=0, ge=0, lt=2**63)
    model: Text = key("model")
    device: Annotated[Text, BeforeValidator(_one_kind)] = key("device")
    profiles: Text | None = key("profiles", default=None)
    stack: StackName | None = key("serving stack", default=None)
    dtype: WeightDtype | None = key("number format", needs="stack", default=None)
    kv_cache_dtype: KvDtype | None = key(
        "number format of the KV cache", needs="stack", default=None
    )
    moe_dtype: MoeDtype | None = key("number format of the experts", needs="experts", default=None)
    expert_distribution: Distribution | None = key(
        "spread of tokens over experts", needs="experts", default=None
    )
    calibration: Text | None = key("calibration of the server", needs="stack", default=None)
    workload: Workload = key("workload")
    cluster: Cluster = key("cluster", default=Cluster())
    policy: PolicyConfig = key("policy")
    batching: Batching = key("batching", default=Batching())
    kv_cache: KvCache | None = key("KV cache", default=None)
    engine: Engine = key("engine", default=Engine())
    speculation: Speculation | None = key("speculative decoding", default=None)
    disaggregation: Disaggregation | None = key("prefill and decode pools", default=None)

    def having(self, section: str, **values: Any) -> Scenario:
        """The scenario with other values in a section, which are not checked."""
        changed = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: changed})

    @property
    def kernels(self) -> Kernels | None:
        """The kernels of the stack, in its version or else the policy's; None without a stack."""
        if self.stack is None:
            return None
        engine, version = named_stack(self.stack)
        if not version and self.policy.name == engine:
            version = self.policy.model_dump().get("version") or ""
        return Kernels(
            engine,
            self.dtype or "bf16",
            self.kv_cache_dtype or "bf16",
            self.moe_dtype,
            self.expert_distribution or Kernels.expert_distribution,
            bool(self.cluster.expert_parallel),
            self.cluster.moe_a2a_backend or "none",
            version,
            self.cluster.dp,
            self.cluster.redundant_experts or 0,
            self.engine.fi_allreduce_fusion_max_size_mb or 0.0,
        )


# The file ------------------------------------------------------------------------------------


class Ratio(Strict):
    """A metric of one scenario divided by the same metric of another, beside a paper's value.
    ``metric`` is a dotted path into the summary, such as ``makespan_s`` or ``bubble_s.p50``."""

    metric: Text
    over: Annotated[list[Name], Field(min_length=2, max_length=2)]
    paper: Positive | None = None
    label: Text | None = None


class Validation(Strict):
    """The settings of ``sarathi-sim lab validate``: the runs of each scenario, the length of the
    calibration runs around each, and the ``dtype`` that the engine computes in.

    ``limit_s``: no repeat after a layout's first begins that could end later after the
    engine's start, going by the longest so far.
    """

    repeats: Annotated[int, Field(ge=1, le=100)] = 5
    limit_s: Positive | None = None
    calibration_requests: Annotated[int, Field(ge=1, le=10_000)] = 10
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class Header(Strict):
    """The keys of a file beside those of its scenarios. ``runs`` says for ``score`` which measured
    runs a scenario describes: a pattern of file names, such as ``*_01.json`` (default: every
    run)."""

    name: Name
    description: Annotated[str, StringConstraints(max_length=20_000)] = ""
    compare: dict[Name, Ratio] = Field(default_factory=dict)
    validation: Validation = Validation()
    runs: dict[Name, Text] = Field(default_factory=dict)
    capacity: dict[Text, Any] | None = None  # checked where it is read: experiments/capacity


#: Units of keys by how they end.
_UNITS = {"s": "s", "bytes": "bytes"}
_TAGS = ("kind", "name")


@dataclass(frozen=True)
class Parameter:
    """A key's name and unit; ``short`` is its label beside a point, as in ``TP 4``."""

    name: str
    unit: str = ""
    short: str = ""

    @property
    def axis(self) -> str:
        """The label of an axis: ``chunk size (tokens)``."""
        return with_unit(self.name, self.unit)

    @property
    def heading(self) -> str:
        """The heading of a column: ``chunk (tokens)``."""
        return with_unit(self.short or self.name, self.unit)

    def value(self, value: object) -> str:
        """A value as text, beside a point: ``TP 4``, ``chunk size 256``; a text value alone."""
        text = number_text(value) if isinstance(value, float) else str(value)
        return text if isinstance(value, str) else self.called(text)

    def called(self, text: str) -> str:
        """A value, as text, after the short name: ``P:D 50``."""
        return f"{self.short or self.name} {text}"


def _named(model: type[BaseModel], section: str = "") -> Iterator[tuple[str, Parameter]]:
    """The path and the name of each key that has one, in a section and in those within."""
    for name, field in model.model_fields.items():
        path = f"{section}.{name}" if section else name
        if field.title is not None:
            extra: Any = field.json_schema_extra or {}
            unit = extra.get("unit") or _UNITS.get(name.rpartition("_")[2], "")
            called = Parameter(field.title, unit, extra.get("short", ""))
            yield path, called
        for inner in _sections(field.annotation):
            # The key that selects one of several sections has the section's name.
            yield from ((f"{path}.{tag}", called) for tag in _TAGS if tag in inner.model_fields)
            yield from _named(inner, path)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a key's value may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


PARAMETERS = dict(_named(Scenario))
"""Names by key path. A missing key, such as a policy's own, is named by its words."""


def parameter(path: str) -> Parameter:
    """The name of a key, its unit, and its short name; a pool's key after the pool's name."""
    section, _, inside = path.partition(".")
    pool, _, own = inside.partition(".")
    if section == "disaggregation" and pool in POOLS and own:
        found = parameter(own)
        return replace(
            found, name=f"{pool} {found.name}", short=f"{pool} {found.short or found.name}"
        )
    return PARAMETERS.get(path) or Parameter(path.rpartition(".")[2].replace("_", " "))


def value_name(value: object) -> str:
    """A swept value in a legend; a policy's keys as words."""
    if isinstance(value, float):
        return f"{value:g}"
    name, space, keys = str(value).partition(" ")
    return name + space + keys.replace("_", " ")
