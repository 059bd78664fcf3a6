"""From a measured row to the scenario that describes its server and its load.

Engine settings that a row lacks are in ``data/serving/launch_scripts.yaml``: the engines' defaults
and those of the benchmarks' launch scripts. Entries that fit a row override each other in order;
each names its document or the evidence. Nothing is fitted to the rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any

from sarathi_sim.policies.request import release_of
from sarathi_sim.profiler.facts.device import DeviceSpec, engine_facts, load_device, memory_class
from sarathi_sim.profiler.facts.formats import STACKS
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.storage.plain_yaml import load_shipped
from sarathi_sim.profiler.storage.strict import UserError, strict_dataclass
from sarathi_sim.simulator.load.acceptance import golden_length
from sarathi_sim.simulator.load.engine_memory import SHARES
from ...capacity.options import router_of_ranks
from ...config.inputs import HostConstants, calls_of_layer, launch_s_of
from ...config.scenario import OF_VLLM, Engine
from ..sources.aiconfigurator import SYSTEMS
from .rows import Measured, StartedPool, present

#: AIConfigurator's system -> shipped device.
DEVICES = {system: device for device, system in SYSTEMS.items()}
DTYPES = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp4": "nvfp4", "nvfp4": "nvfp4"}
DTYPES |= {"int4": "int4_wo"}
_BLACKWELL = ("b200_sxm", "b300_sxm", "gb200")
INFERENCEX = "inferencex"
#: AIConfigurator's tables under this name repeat InferenceX's numbers (58 of 61 loads of both).
_REPEATED = "nvidia_gap_csv"
VLLM_LIMITS = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization")
_UNDATED = "0.27"
"""The release for which a build without one is taken: those measured are of 2025 and 2026."""
THINK_S = 0.003
"""Mean seconds until a client's next request reaches the engine: assumed."""
APART = 0.95
"""The shortest length as a share of the longest where clients have drifted apart: assumed. With
equal lengths they go on in lock-step, as they began."""
Settings = dict[str, Any]


@strict_dataclass
class ServedModel:
    """A shipped model, and by a row's precision the ``formats`` of a layer's weights (by default
    the usual) and, of a ``mixture``, of its experts."""

    model: str
    mixture: bool = False
    formats: dict[str, list[str]] = field(default_factory=dict)


@strict_dataclass
class BenchmarkLoad:
    """``rounds`` of requests per client, from the day ``warm_since`` on after some others."""

    documents: list[str]
    rounds: int
    warm_since: str


@strict_dataclass
class ScriptCase:
    """Settings of some rows of an entry."""

    when: Settings
    set: Settings


@strict_dataclass
class LaunchScript:
    """Settings of all rows with the columns ``of``, and those of its ``cases``, in their order.

    A condition is a value, a list of values, or a range ``{from: ..., below: ...}``, never of an
    empty cell. A setting is a value, or a factor times columns of the row, ``plus`` a number,
    rounded up to a ``multiple``, and at ``least`` one. ``expert_parallel: as_row`` and
    ``attention_dp: true`` trust the row's layout. ``also`` are settings that no scenario has.
    """

    of: Settings
    set: Settings
    documents: list[str] = field(default_factory=list)
    inferred: str = ""
    cases: list[ScriptCase] = field(default_factory=list)
    also: Settings = field(default_factory=dict)


@strict_dataclass
class LaunchScripts:
    """The file."""

    load: BenchmarkLoad
    models: dict[str, ServedModel]
    entries: list[LaunchScript]


@lru_cache(maxsize=1)
def launch_scripts() -> LaunchScripts:
    """The shipped file. Raises SpecError if it is damaged."""
    return load_shipped(LaunchScripts, "serving/launch_scripts.yaml")


def mixture(row: Measured) -> bool:
    """Whether the row's model is a known mixture of experts."""
    served = launch_scripts().models.get(row.model)
    return served is not None and served.mixture


def origin(row: Measured) -> str:
    """The origin of the row's measurement: its source, or the source that this one repeats."""
    return INFERENCEX if row.source == _REPEATED else row.source


def settings_of(row: Measured) -> Settings:
    """The known settings of the row's server, by their names in a configuration, and
    ``attention_dp``. SGLang's limits are those of all ranks, other engines' of one."""
    known: Settings = {}
    if row.backend == "vllm":
        version = row.backend_version if row.backend_version[:1].isdigit() else _UNDATED
        device = DEVICES.get(row.system)  # (one that is not known is refused later)
        memory = memory_class(load_device(device)) if device else ""
        keys, facts = (*VLLM_LIMITS, "async_scheduling"), engine_facts("vllm")
        known |= {key: facts.at(key, version, memory=memory) for key in keys}
    for entry in launch_scripts().entries:
        if _holds(row, entry.of):
            parts = [entry.set, *(case.set for case in entry.cases if _holds(row, case.when))]
            known |= {key: _value(row, it) for part in parts for key, it in part.items()}
    return known


def of_a_rank(server: Settings, ranks: int) -> Settings:
    """The limits of each of SGLang's ranks: ``server_args.py``, ``_handle_data_parallelism``, and
    ``kv_cache_configurator.py``, ``resolve_max_num_reqs``."""
    divided = ("chunked_prefill_size", "max_running_requests")
    return {key: max(server[key] // ranks, 1) for key in divided if server.get(key)}


def sglang_memory(device: DeviceSpec, tp: int, pp: int = 1, ranks: int = 1) -> Settings:
    """SGLang's defaults that follow from a GPU's memory: the chunk, and the static share.

    Reserved are, in MiB, 512, 1.5 a token of the chunk, 2 a sequence of the largest CUDA graph (and
    3 for each rank of data-parallel attention, 4.5 if it has more than 300), and 128 a GPU; at
    least 10 GiB of more than 60. Source: ``handle_gpu_memory_settings`` of SGLang 0.5.23,
    ``arg_groups/memory_hook.py``, without what it reserves for CUDA graphs of prompts.
    """
    total, tp = (device.reported_bytes or device.memory_bytes) / 2**20, tp * ranks
    if total >= 160 * 1024:
        chunk, graph, least = 16384, 512, 10 * 1024
    elif total >= 60 * 1024:
        chunk, graph, least = 8192, 512 if tp >= 4 else 256, 10 * 1024
    else:
        chunk, graph, least = 4096, 160 if tp >= 4 else 32, 0
    reserved = 512 + 1.5 * chunk + 2 * graph + tp * pp / 8 * 1024
    if ranks > 1:
        reserved += graph * ranks * (4.5 if graph > 300 else 3)
    share = round((total - max(reserved, least)) / total, 3)
    return {"chunked_prefill_size": chunk, "mem_fraction_static": share}


def _holds(row: Measured, when: Settings) -> bool:
    return all(_matches(row, column, wanted) for column, wanted in when.items())


def _matches(row: Measured, column: str, wanted: Any) -> bool:
    value = origin(row) if column == "source" else getattr(row, column)
    if not isinstance(wanted, dict):
        return value in wanted if isinstance(wanted, list) else value == wanted
    order: Any = release_of if column == "backend_version" else lambda bound: bound
    if not value or (order is release_of and not value[:1].isdigit()):
        return False
    low, high = (order(wanted.get(end, value)) for end in ("from", "below"))
    return bool(low <= order(value) and ("below" not in wanted or order(value) < high))


def _value(row: Measured, given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    terms = dict(given)
    step, least, total = terms.pop("multiple", 1), terms.pop("least", 0), terms.pop("plus", 0)
    total += sum(times * getattr(row, column) for column, times in terms.items())
    return max(-(-total // step) * step, least)


def stack_of(row: Measured) -> str:
    """The name by which host constants are stored: the engine's own server, NVIDIA Dynamo's
    frontend (its images served ``nvidia_gap_sweep``), or pools, of SGLang by release (its images
    of December 2025 and of 2026 differ by half)."""
    if row.mode != "agg":
        release = ".".join(row.backend_version.split(".")[:3]) if row.backend == "sglang" else ""
        return f"{row.backend} {release}".rstrip() + " in pools"
    return f"{row.backend} under dynamo" if origin(row).startswith("nvidia_gap") else row.backend


def _version(row: Measured) -> str:
    """The engine's version; none of a nightly build, nor of Dynamo, which names its own."""
    version = re.fullmatch(r"\d+(\.\w+)*", row.backend_version)
    dynamo = row.backend == "trtllm" and row.backend_version.startswith("0.")
    return row.backend_version if version and not dynamo else ""


def server_of(row: Measured) -> str:
    """The row's server, without its load. A server's rows are fitted, or left out, together."""
    layout = f"tp{row.tp} pp{row.pp} dp{attention_ranks(row)}"
    if row.launch is not None:
        layout = row.launch.layout or layout
    return f"{stack_of(row)}, {row.model}, {row.system}, {row.precision}, {layout}"


def campaign_of(row: Measured) -> str:
    """The row's campaign, if its load tool is not recorded, so that its clients may have drifted
    apart; else empty. Lengths tell campaigns of one source apart."""
    if origin(row) == INFERENCEX or row.length_range_ratio < 1:
        return ""
    return f"{row.source}, {'multiples of 1,000' if row.isl % 1000 == 0 else 'powers of two'}"


def mean_prompt(row: Measured) -> float:
    """Mean tokens of the row's prompts."""
    return row.isl * (1 + row.length_range_ratio) / 2


def scenario_of(row: Measured, host: HostConstants, apart: bool = False) -> Settings:
    """The row's scenario as a configuration has it, with the ``host``'s constants; its clients may
    be ``apart``, with lengths of the same mean. Raises UserError for what is not modelled."""
    for name, value, allowed in (
        ("model", row.model, launch_scripts().models),
        ("system", row.system, DEVICES),
        ("backend", row.backend, STACKS),
        ("precision", row.precision, DTYPES),
    ):
        if value not in allowed:
            raise UserError(f"{name} {value}: not modelled; modelled: {', '.join(allowed)}")
    if row.mode != "agg":
        experts = load_model(launch_scripts().models[row.model].model).experts
        number = experts.num_experts if experts else 0
        return _base(row, apart) | pools_of(row, _engine(row, host), number)
    if row.tp is None:
        raise UserError("tp: this key is missing")
    if mixture(row):
        _check_layout(row)
    dp, known = attention_ranks(row), settings_of(row)
    if reason := known.pop("refused", None):
        raise UserError(reason)
    if row.backend == "sglang":
        # The load tools ask for outputs of a fixed length (ignore-eos).
        device = load_device(DEVICES[row.system])
        known = sglang_memory(device, row.tp, row.pp, dp) | {"ignore_eos": True} | known
        known |= of_a_rank(known, dp)
    known.pop("attention_dp", None)
    spread = known.pop("expert_parallel", "as_row")
    spread = row.moe_ep > 1 if spread == "as_row" else spread
    ranks = {"dp": dp, "rank_router": router_of_ranks(row.backend)} if dp > 1 else {}
    version = _version(row) if row.backend in ("vllm", "sglang") else ""
    groups: tuple[Iterable[str], ...] = (("moe_dtype", "kv_cache_dtype"), SHARES, OF_VLLM)
    formats, shares, engine = (
        {name: known.pop(name) for name in names if name in known} for names in groups
    )
    return {
        **_base(row, apart),
        **formats,
        "cluster": present(
            tp=row.tp,
            pp=row.pp,
            **ranks,
            max_length=sum(_lengths(row, apart)[:2]),
            expert_parallel=spread if mixture(row) else None,
        ),
        "kv_cache": {"prefix_caching": False, **shares},
        "engine": _engine(row, host, **engine),
        "policy": {"name": row.backend, **present(version=version or None), **known},
    }


def _base(row: Measured, apart: bool) -> Settings:
    """Model, device, kernels and load."""
    isl, osl, ratio = _lengths(row, apart)
    lengths = {"prompt": isl, "decode": osl, "range_ratio": ratio}
    return {
        "model": launch_scripts().models[row.model].model,
        "device": DEVICES[row.system],
        "stack": "@".join(filter(None, (row.backend, _version(row)))),
        **_weights(row),
        "workload": {
            "requests": launch_scripts().load.rounds * row.concurrency,
            "lengths": {"kind": "random", "tool": "sglang", **lengths},
            "arrivals": {"kind": "closed_loop", "clients": row.concurrency, "think_s": THINK_S},
            "declared": "exact",
        },
    }


def _lengths(row: Measured, apart: bool) -> tuple[int, int, float]:
    """The longest prompt and output, and the shortest ones' share of them."""
    if not apart:
        return row.isl, row.osl, row.length_range_ratio
    longest = 2 / (1 + APART)
    return round(row.isl * longest), round(row.osl * longest), APART


def _engine(row: Measured, host: HostConstants, **own: Any) -> Settings:
    launch_s = launch_s_of(host, Engine(**own))
    model = load_model(launch_scripts().models[row.model].model)
    calls = calls_of_layer(model, _weights(row)["dtype"]) if launch_s else 0
    return {
        **own,
        "host_iteration_s": host.host_iteration_s,
        "host_sequence_s": host.host_sequence_s,
        "frontend_s": host.frontend_s + mean_prompt(row) * host.frontend_token_s,
        "launch_layer_s": float(launch_s * calls),
    }


def _weights(row: Measured) -> dict[str, str]:
    """``dtype`` and, of a mixture, ``moe_dtype``. gpt-oss computes with fp8 activations on
    Blackwell."""
    served = launch_scripts().models[row.model]
    if not served.mixture:
        (dtype,) = served.formats.get(row.precision, [DTYPES[row.precision]])
        return {"dtype": dtype}
    if row.precision not in served.formats:
        known = f"not modelled; modelled: {', '.join(served.formats)}"
        raise UserError(f"precision {row.precision} of {row.model}: {known}")
    dtype, experts = served.formats[row.precision]
    if experts == "w4a16_mxfp4" and row.system in _BLACKWELL:
        experts = "w4a8_mxfp4_mxfp8"
    return {"dtype": dtype, "moe_dtype": experts}


def attention_ranks(row: Measured) -> int:
    """Ranks of data-parallel attention: one if the launch script cannot ask for more, and as many
    as the experts have GPUs for each of ``tp``, if a row has these alone. (Where vLLM spreads
    experts rows have ``tp`` in ``dp``, too; 17 loads measured under both names agree within 1 %.)
    """
    if not settings_of(row).get("attention_dp", True):
        return 1
    hidden = mixture(row) and origin(row) != INFERENCEX
    return max(row.dp, row.moe_tp * row.moe_ep // (row.tp or 1)) if hidden else row.dp


def measured_cold(row: Measured) -> bool:
    """Whether SGLang compiled kernels of a mixture while the first requests waited, for seconds
    that are not modelled. (Rows without a date are copies of later ones.)"""
    early = origin(row) == INFERENCEX and "" < row.measured_date < launch_scripts().load.warm_since
    return early and row.backend == "sglang" and mixture(row)


def _check_layout(row: Measured) -> None:
    """Raises UserError if the GPUs of the experts do not tell the ranks of attention: they are no
    multiple of its own, or ``moe_tp`` and ``moe_ep`` count the same ones. InferenceX's rows have
    them in ``dp`` (.github/configs/nvidia-master.yaml in InferenceMAX/InferenceMAX at 525079a)."""
    gpus, experts = (row.tp or 1) * row.dp, row.moe_tp * row.moe_ep
    twice = experts % gpus > 0 or (row.moe_ep > 1 and row.moe_tp == row.tp)
    if origin(row) != INFERENCEX and experts not in (0, gpus) and twice:
        numbers = f"moe_tp x moe_ep is {experts}, tp x dp {gpus}"
        raise UserError(f"data-parallel attention: its degree is not told; {numbers}")


DRAFTER = ("deepseek-v4-pro", "mtp", "thinking_on")
"""Whose published acceptance stands for DeepSeek-R1's, of which none is: the nearest model."""
_BF16_CACHE = (("sglang", "h100_sxm"), ("sglang", "h200_sxm"))
_WITH_DRAFTS = 48
_B200 = {"chunked_prefill_size": 32768, "max_prefill_tokens": 32768}
_B200_PROMPTS, _B200_STATIC = 512, 0.85
"""What the public recipes for SGLang on B200 say, where the launch list knows no limits
(NVIDIA/srt-slurm, recipes/b200-fp4 and b200-fp8). Their largest ones have twice the limits."""
_REDUNDANT = 32
"""Redundant experts of each recipe whose ranks do not divide the experts."""


def pools_of(row: Measured, engine: Mapping[str, float], experts: int) -> Settings:
    """A row's pools, and what they have in common. Raises UserError for what is not known."""
    launch = row.launch
    if launch is None or launch.prefill is None or launch.decode is None:
        raise UserError("separate prefill workers: no launch settings are known")
    pools = {"prefill": launch.prefill, "decode": launch.decode}
    found: Settings = {
        # Recipes for SGLang on Blackwell say fp8_e4m3, those for Hopper nothing: bf16 (srt-slurm,
        # recipes/; server_args.py, `kv_cache_dtype: auto`).
        "kv_cache_dtype": "bf16" if (row.backend, row.system) in _BF16_CACHE else "fp8",
        "cluster": {"max_length": row.isl + row.osl},
        "kv_cache": {"prefix_caching": False},
        "policy": {"name": row.backend},
        "engine": dict(engine),
        "disaggregation": {pool: _pool(row, pool, one, experts) for pool, one in pools.items()},
    }
    if drafts := row.drafts:
        length = {"draft_length": drafts, "acceptance": golden_length(*DRAFTER, drafts)}
        found["speculation"] = {"method": "mtp", **length}
    return found


def _pool(row: Measured, pool: str, one: StartedPool, experts: int) -> Settings:
    """What a pool has of its own. Prompts go to a rank of SGLang by their bootstrap room, a random
    number, unless the recipe says round_robin: only those for GB200 do (srt-slurm, recipes/; SGLang
    `managers/data_parallel_controller.py`)."""
    drawn = row.backend == "sglang" and pool == "prefill" and row.system != "gb200"
    router = "random" if drawn else router_of_ranks(row.backend)
    more = one.redundant or (one.slots or experts) - experts
    if experts % one.ep:
        more = more or _REDUNDANT
    cluster = present(
        tp=one.tp // one.ranks,
        dp=one.ranks,
        replicas=one.workers,
        rank_router=router if one.ranks > 1 else None,
        expert_parallel=one.ep > 1 or None,
        moe_a2a_backend=one.a2a or None,
        redundant_experts=more or None,
    )
    settings = _trtllm if row.backend == "trtllm" else _sglang
    policy, memory = settings(row, pool == "decode", one)
    return {"cluster": cluster, "policy": {"name": row.backend, **policy}, "kv_cache": memory}


def _trtllm(row: Measured, decoding: bool, one: StartedPool) -> tuple[Settings, Settings]:
    """Limits are a rank's. Where none is known, no request waits for a slot, and a prefill worker
    takes 16 prompts of 16,384 tokens at a time, or two longer ones: as most known ones do."""
    clients = max(-(-row.concurrency // (one.workers * one.ranks)), 1)
    batch = one.max_batch_size or (clients if decoding else 16)
    rows = batch * (1 + row.drafts)
    usual, least = (max(rows, 64), rows) if decoding else (max(2 * row.isl + 64, 16384), row.isl)
    tokens = max(one.max_num_tokens or usual, least)
    share = one.free_share or (0.8 if decoding else 0.6)
    policy = {"max_batch_size": batch, "max_num_tokens": tokens}
    return policy, {"free_gpu_memory_fraction": share}


def _sglang(row: Measured, decoding: bool, one: StartedPool) -> tuple[Settings, Settings]:
    """With drafts the server has no overlap (recipes for B200 switch it on), and 48 requests where
    no limit is given (server_args.py, `_handle_speculative_decoding`)."""
    policy: Settings = {"ignore_eos": True}
    drafts = row.drafts and row.system != "b200_sxm"
    most, share = _WITH_DRAFTS if drafts else 2048 * one.ranks, 0.9
    if row.system == "b200_sxm" and one.chunked_prefill_size is None:
        policy |= _B200
        share, most = _B200_STATIC, most if decoding else _B200_PROMPTS
    for key in ("chunked_prefill_size", "max_prefill_tokens"):
        if (size := getattr(one, key)) is not None:
            policy[key] = size if size > 0 else None
    policy["max_running_requests"] = one.max_running_requests or most
    policy |= of_a_rank(policy, one.ranks)
    if drafts:
        policy["disable_overlap_schedule"] = True
    if one.recv_interval:
        policy["scheduler_recv_interval"] = one.recv_interval
    return policy, {"mem_fraction_static": one.static_share or share}
