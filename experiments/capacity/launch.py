"""The engine's own command line for a deployment, with every setting that was simulated; and a load
tool's, with the load.

Options are those of vLLM 0.32 and SGLang 0.5.23, whose parsers read these commands in a test, and
of TensorRT-LLM 1.x (``trtllm-serve`` and the fields of ``TorchLlmArgs`` in its YAML).

Workers of two pools send the KV cache by NIXL, behind a router that takes turns: vLLM's own proxy
(its ``docs/features/nixl_connector_usage.md``), SGLang's router (0.5.23,
``docs/advanced_features/pd_disaggregation.md`` and ``router.md``), and for TensorRT-LLM Dynamo 1.x
(``examples/backends/trtllm``: ``launch/disagg.sh`` and ``engine_configs``)."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sarathi_sim.policies.catalogue import is_pooled
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.model import Checkpoint, checkpoints, find_published, load_model
from sarathi_sim.profiler.storage.files import user_path
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from ..config.base import Source, get
from ..config.inputs import version_defaults
from ..config.pools import pool_of
from ..config.requests import build_requests
from ..config.scenario import (
    FUSED,
    GRAPH_KEYS,
    OF_VLLM,
    POOLS,
    KvCache,
    Scenario,
    Speculation,
)
from ..config.workload import (
    Arrivals,
    AtOnce,
    Closed,
    Gamma,
    Poisson,
    RandomLengths,
    Shift,
    Workload,
)
from .options import router_of_ranks

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Launch:
    """The commented shell command that starts one replica with a ``checkpoint`` (of two pools: a
    worker of each, and the router); or what it ``needs``, such as a checkpoint known by name."""

    command: str | None
    needs: str | None = None
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class _ServerCommand:
    """The start command of an engine, and the ``port`` where it listens.

    ``options`` are paths of settings by option; without an ``options_file`` (YAML with all other
    settings, under the option and the name in ``file``) the policy's keys are options, too.
    ``negates``: a switch that is off is ``--no-...``, else left out. ``partition``: the environment
    variable for the layers of stages. ``on_the_fly``: the formats to which it quantises a bf16
    checkpoint, ``reads``: those of checkpoints that it loads (empty: all). ``follows_kv``: in place
    of a KV cache in bf16 it takes the checkpoint's format. ``told`` is what it is told of a
    policy's keys with so many ranks."""

    program: str
    options: Mapping[str, str]
    trust: str
    kv_names: Mapping[str, str]
    negates: bool = False
    partition: str = ""
    on_the_fly: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    follows_kv: bool = False
    options_file: Callable[[Settings], dict[str, Any]] | None = None
    file: tuple[str, str] = ("--extra_llm_api_options", "trtllm.yaml")
    drafting: Callable[[Speculation], str] = lambda _: ""
    told: Callable[[dict[str, Any], int], dict[str, Any]] = lambda policy, _: policy
    port: int = 8000


DRAFTER = "DRAFTER"
"""Stands for the checkpoint of an EAGLE-3 drafter: none is known by name."""


def _drafter(spec: Speculation) -> str:
    return DRAFTER if spec.method == "eagle3" else spec.model or ""


def _vllm_drafts(spec: Speculation) -> str:
    given: dict[str, Any] = {"method": spec.method, "num_speculative_tokens": spec.draft_length}
    given |= {"model": name} if (name := _drafter(spec)) else {}
    return f"--speculative-config '{json.dumps(given)}'"


def _sglang_drafts(spec: Speculation) -> str:
    """A chain: one token a step, and one row more than there are drafts."""
    algorithm = {"mtp": "EAGLE", "eagle3": "EAGLE3", "ngram": "NGRAM", "draft_model": "STANDALONE"}
    words = [f"--speculative-algorithm {algorithm[spec.method]}"]
    words += [f"--speculative-draft-model-path {name}"] if (name := _drafter(spec)) else []
    words += [f"--speculative-num-steps {spec.draft_length}"]
    chain = "ngram-max-bfs-breadth" if spec.method == "ngram" else "eagle-topk"
    words += [f"--speculative-{chain} 1"]
    return " ".join([*words, f"--speculative-num-draft-tokens {spec.draft_length + 1}"])


def _sglang_told(policy: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What its ``handle_data_parallelism`` and pool sizes make a rank's settings of."""
    if ranks == 1:
        return policy
    limits = {key: policy[key] for key in ("chunked_prefill_size", "max_running_requests")}
    found = {key: value and ranks * value for key, value in limits.items()}
    return policy | found | {"schedule_conservativeness": policy["schedule_conservativeness"] / 0.3}


def _trtllm_drafts(spec: Speculation) -> dict[str, Any]:
    kinds = {"mtp": "MTP", "eagle3": "Eagle", "ngram": "NGram", "draft_model": "DraftTarget"}
    length = "num_nextn_predict_layers" if spec.method == "mtp" else "max_draft_len"
    found = {"decoding_type": kinds[spec.method], length: spec.draft_length}
    return found | ({"speculative_model_dir": name} if (name := _drafter(spec)) else {})


def _lacks(engine: str, scenario: Scenario) -> str:
    if engine == "sglang" and scenario.cluster.dp > 1 and _method(scenario) == "ngram":
        return "SGLang has no n-gram drafts with ranks of attention"
    if engine == "trtllm" and scenario.cluster.dp > 1 and scenario.cluster.tp > 1:
        return "TensorRT-LLM's ranks of attention have one GPU each"
    return ""


def _method(scenario: Scenario) -> str:
    return scenario.speculation.method if scenario.speculation is not None else ""


def _notes(engine: str, scenario: Scenario) -> str:
    """Comments, a line each: what to know of the command, and what it leaves open."""
    cluster, method = scenario.cluster, _method(scenario)
    dp, ranks = cluster.dp, cluster.dp > 1
    notes = {
        "vllm": {"Limits are for each rank.": ranks},
        "sglang": {
            "SGLang divides --chunked-prefill-size and --max-running-requests by the ranks, and": (
                ranks
            ),
            "multiplies --schedule-conservativeness by 0.3; the simulated values are for a rank.": (
                ranks
            ),
            f"From 0.5.23 on, --attn-dp-size {dp} is the new name of --dp-size {dp} "
            "--enable-dp-attention.": ranks,
            "Dense layers are divided among all GPUs; in the simulation among those of a rank.": (
                ranks and cluster.tp > 1
            ),
        },
        "trtllm": {
            "max_num_tokens and max_batch_size are for each rank.": ranks,
            "Releases after 1.2 use max_draft_len for num_nextn_predict_layers.": method == "mtp",
            "Newer releases use decoding_type Eagle3, and speculative_model.": method == "eagle3",
        },
    }[engine]
    a_node = load_device(scenario.device).gpus_per_node
    far = f"{cluster.gpus} GPUs need several nodes of {a_node}: how the nodes find each other is "
    notes[f"{far}not set here."] = ranks and cluster.gpus > a_node
    drafter = f"Replace {DRAFTER} by the checkpoint of an EAGLE-3 drafter: none is known by name."
    notes[drafter] = method == "eagle3"
    return "".join(f"# {note}\n" for note, true in notes.items() if true)


_OF_RANKS = ("enable_balance", "timeout_iters", "batching_wait_iters")
"""TensorRT-LLM's keys that only ranks of data-parallel attention have."""


def _of_trtllm(settings: Settings) -> dict[str, Any]:
    policy, cache, cluster = dict(settings["policy"]), settings["kv_cache"], settings["cluster"]
    drafts = settings["speculation"]
    for key in ("name", "max_num_tokens", "max_batch_size", *_OF_RANKS):
        del policy[key]
    capacity = policy.pop("capacity_scheduler_policy").upper()
    stages = {"pp_partition": cluster["layers_per_stage"]} if cluster["pp"] > 1 else {}
    return {
        "dtype": "bfloat16",
        **({"enable_attention_dp": True} if cluster["dp"] > 1 else {}),
        **({"speculative_config": _trtllm_drafts(drafts)} if drafts else {}),
        **{key: _spelled(f"policy.{key}", value) for key, value in policy.items()},
        "scheduler_config": {"capacity_scheduler_policy": capacity},
        "kv_cache_config": {
            "dtype": settings["kv_cache_dtype"],
            "enable_block_reuse": cache["prefix_caching"],
            "tokens_per_block": cache["block_size"],
            "free_gpu_memory_fraction": settings["memory_share"],
        },
        **stages,
    }


_SERVERS = {
    "vllm": _ServerCommand(
        "vllm serve {model}",
        {
            "--tensor-parallel-size": "cluster.tp",
            "--pipeline-parallel-size": "cluster.pp",
            "--data-parallel-size": "ranks",
            "--enable-expert-parallel": "expert_parallel",
            "--max-model-len": "cluster.max_length",
            "--dtype": "dtype",
            "--quantization": "quantization",
            "--kv-cache-dtype": "kv_cache_dtype",
            "--gpu-memory-utilization": "memory_share",
            "--block-size": "kv_cache.block_size",
            "--enable-prefix-caching": "kv_cache.prefix_caching",
            "--compilation-config": "compilation",
        },
        "--trust-remote-code",
        {"bf16": "bfloat16", "fp8": "fp8"},
        negates=True,
        partition="VLLM_PP_LAYER_PARTITION",
        on_the_fly={"fp8": "fp8_per_tensor", "fp8_block": "fp8_per_block"},
        drafting=_vllm_drafts,
    ),
    "sglang": _ServerCommand(
        "python -m sglang.launch_server --model-path {model}",
        {
            "--tp-size": "gpus",
            "--pp-size": "cluster.pp",
            "--dp-size": "ranks",
            "--enable-dp-attention": "attention_dp",
            "--enable-dp-lm-head": "attention_dp",
            "--moe-dense-tp-size": "dense_tp",
            "--ep-size": "ep_size",
            "--context-length": "cluster.max_length",
            "--dtype": "dtype",
            "--quantization": "quantization",
            "--kv-cache-dtype": "kv_cache_dtype",
            "--mem-fraction-static": "memory_share",
            "--page-size": "kv_cache.block_size",
            "--disable-radix-cache": "no_prefix_caching",
        },
        "--trust-remote-code",
        {"bf16": "bf16", "fp8": "fp8_e4m3"},
        partition="SGLANG_PP_LAYER_PARTITION",
        on_the_fly={"fp8": "fp8"},
        drafting=_sglang_drafts,
        told=_sglang_told,
        port=30000,
    ),
    "trtllm": _ServerCommand(
        "trtllm-serve {model} --backend pytorch",
        {
            "--tp_size": "gpus",
            "--pp_size": "cluster.pp",
            "--ep_size": "ep_size",
            "--max_seq_len": "cluster.max_length",
            "--max_num_tokens": "policy.max_num_tokens",
            "--max_batch_size": "policy.max_batch_size",
        },
        "--trust_remote_code",
        {"bf16": "auto", "fp8": "fp8"},
        reads=("bf16", "fp8", "fp8_block", "nvfp4", "w4a16_mxfp4"),
        follows_kv=True,
        options_file=_of_trtllm,
    ),
}
"""Start commands by policy."""


def _of_dynamo(settings: Settings) -> dict[str, Any]:
    cluster, policy = settings["cluster"], settings["policy"]
    return {
        "backend": "pytorch",
        "tensor_parallel_size": settings["gpus"],
        "pipeline_parallel_size": cluster["pp"],
        "moe_expert_parallel_size": settings["ep_size"],
        "max_seq_len": cluster["max_length"],
        **{key: policy[key] for key in ("max_num_tokens", "max_batch_size")},
        **_of_trtllm(settings),
        "cache_transceiver_config": {"backend": "DEFAULT"},
        **({"trust_remote_code": True} if settings["custom_code"] else {}),
    }


@dataclass(frozen=True)
class _PoolsCommand:
    """The commands of two pools: how a worker's ``server`` is started, what stands ``before`` it
    and the ``options`` that it has besides, by pool; and how the ``router`` is, which knows the
    prefill and the decode workers' hosts and listens at a ``port``."""

    server: _ServerCommand
    options: Mapping[str, str]
    router: Callable[[list[str], list[str]], str]
    before: str = ""
    port: int = 8000


_PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"  # of vLLM's repository


def _vllm_router(prefill: list[str], decode: list[str]) -> str:
    told = [
        f"--{name}-hosts {' '.join(each)} --{name}-ports {' '.join(['8000'] * len(each))}"
        for name, each in (("prefiller", prefill), ("decoder", decode))
    ]
    return f"python {_PROXY} --port 8192 {' '.join(told)}"


def _sglang_router(prefill: list[str], decode: list[str]) -> str:
    workers = [f"--prefill http://{host}:30000 8998" for host in prefill]
    workers += [f"--decode http://{host}:30000" for host in decode]
    return (
        "python -m sglang_router.launch_router --pd-disaggregation --policy round_robin "
        f"{' '.join(workers)} --host 0.0.0.0 --port 8000"
    )


_SGLANG = "--host 0.0.0.0 --port 30000 --disaggregation-transfer-backend nixl --disaggregation-mode"
_POOLS = {
    "vllm": _PoolsCommand(
        _SERVERS["vllm"],
        {
            pool: "--port 8000 --kv-transfer-config "
            f"""'{{"kv_connector": "NixlConnector", "kv_role": "{role}"}}'"""
            for pool, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
        },
        _vllm_router,
        "VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname) ",
        8192,
    ),
    "sglang": _PoolsCommand(
        _SERVERS["sglang"],
        {
            # By default ranks of prefill workers would be drawn at random: the bootstrap room's.
            "prefill": f"{_SGLANG} prefill --disaggregation-bootstrap-port 8998 "
            "--load-balance-method round_robin",
            "decode": f"{_SGLANG} decode",
        },
        _sglang_router,
    ),
    "trtllm": _PoolsCommand(
        replace(
            _SERVERS["trtllm"],
            program="python -m dynamo.trtllm --model-path {model}",
            options={},
            trust="",
            options_file=_of_dynamo,
        ),
        {pool: f"--disaggregation-mode {pool}" for pool in POOLS},
        lambda *_: "python -m dynamo.frontend --router-mode round-robin --http-port 8000",
    ),
}
"""Commands of two pools by policy."""
_RENAMED = {"adaptive_threshold": "long_prefill_token_threshold_adaptive"}
"""Engine options for those keys of policies that have another name."""
_NO_OPTION = ("name", "version", "ignore_eos")
"""Keys of policies that no option sets."""
_WITHOUT = {
    "policy.chunked_prefill_size": -1,
    "policy.long_prefill_token_threshold": 0,
    "policy.batch_wait_timeout_iters": 0,
}
"""The spelling of an empty setting."""


def _spelled(path: str, value: Any) -> Any:
    return _WITHOUT.get(path) if value is None else value


def launch(scenario: Scenario) -> Launch:
    """The launch of one replica of a resolved scenario, or of two pools. Raises KeyError for a
    policy of no engine, and ValueError for what no command here says: how tokens reach experts,
    copies of experts, and routers of ranks that are not the engine's."""
    engine, version = scenario.policy.name, scenario.policy.build().version
    said = f"# The simulated settings, for {engine} {version}.\n" if version else ""
    if scenario.disaggregation is None:
        found = _launch(_SERVERS[engine], scenario)
        notes = said + _notes(engine, scenario)
        return found if found.command is None else replace(found, command=notes + found.command)
    lines, hosts = list(filter(None, [said.rstrip()])), list[list[str]]()
    checkpoint = None
    for pool in POOLS:
        worker, _ = pool_of(scenario, pool, Source("", "", {}, ()))
        if _method(scenario) not in ("", "ngram"):
            # The prefill workers' drafter computes its KV cache of the prompt.
            worker = worker.model_copy(update={"speculation": scenario.speculation})
        both, many = _POOLS[worker.policy.name], worker.cluster.replicas
        one = _launch(replace(both.server, file=("--extra-engine-args", f"{pool}.yaml")), worker)
        if one.command is None:
            return one
        checkpoint = one.checkpoint
        hosts.append([f"{pool}-{number}" for number in range(many)])
        first, _, last = one.command.rpartition("END\n")
        lines.append(f"# {many} {pool} worker{'s' if many > 1 else ''}, on {', '.join(hosts[-1])}")
        lines += filter(None, [_notes(worker.policy.name, worker).rstrip()])
        if pool == "prefill" and worker.speculation is not None:
            lines.append("# With the drafter, because its KV cache is sent, too (not simulated).")
        lines.append(f"{first}END\n" * bool(first) + f"{both.before}{last} {both.options[pool]}")
    return Launch(
        "\n".join([*lines, "# the router", both.router(*hosts)]),
        None,
        checkpoint,
    )


def _launch(server: _ServerCommand, scenario: Scenario) -> Launch:
    engine, cluster, plain = scenario.policy.name, scenario.cluster, ("bf16", "bf16")
    sent = cluster.moe_a2a_backend not in (None, "none") or cluster.redundant_experts
    if sent or (cluster.dp > 1 and cluster.rank_router != router_of_ranks(engine)):
        raise ValueError("no command says how tokens reach experts, nor how ranks are chosen")
    if lacking := _lacks(engine, scenario):
        return Launch(None, f"no launch file: {lacking}")
    weights, experts = formats = _formats(scenario)
    known: dict[tuple[str, str], Checkpoint] = {}
    own_kv = server.follows_kv and scenario.kv_cache_dtype in (None, "bf16")
    for one in _known(scenario.model):
        readable = not server.reads or {*_formats(one)} <= {*server.reads}
        if readable and not (own_kv and one.kv_cache_dtype != "bf16"):
            known.setdefault(_formats(one), one)
    made = server.on_the_fly.get(weights) if weights == experts else None
    if found := known.get(formats):
        return Launch(_command(server, scenario, found, None), None, found)
    if made and (found := known.get(plain)):
        return Launch(_command(server, scenario, found, made), None, found)
    told = weights if weights == experts else f"{weights} with experts in {experts}"
    told += " and a KV cache in bf16" if own_kv else ""
    said = "" if formats == plain else ", whose config.json gives its quantisation"
    needed = f"no checkpoint of {scenario.model} in {told} that {engine} loads is known by name"
    return Launch(None, f"no launch file: {needed}; it needs one{said}")


def _command(
    server: _ServerCommand, scenario: Scenario, checkpoint: Checkpoint, quantization: str | None
) -> str:
    cluster, cache = scenario.cluster, scenario.kv_cache or KvCache()
    policy = scenario.policy.build()
    assert is_pooled(policy)
    spec, ranks = scenario.speculation, cluster.dp
    settings = {
        "cluster": cluster.model_dump(),
        "policy": server.told(scenario.policy.described(), ranks),
        "speculation": spec,
        "gpus": cluster.tp * ranks,
        "ranks": ranks if ranks > 1 else None,
        "attention_dp": True if ranks > 1 else None,
        "dense_tp": 1 if ranks > 1 and cluster.tp == 1 else None,
        "kv_cache": cache.model_dump(),
        "dtype": "bfloat16",
        "quantization": quantization,
        "kv_cache_dtype": server.kv_names[scenario.kv_cache_dtype or "bf16"],
        "memory_share": getattr(cache, policy.memory_share) or cluster.usable_memory,
        "expert_parallel": bool(cluster.expert_parallel),
        "ep_size": cluster.tp * ranks if cluster.expert_parallel else 1,
        "no_prefix_caching": not cache.prefix_caching,
        "custom_code": checkpoint.custom_code,
        "compilation": _compilation(scenario),
    }
    words = [server.program.format(model=shlex.quote(checkpoint.name))]
    words += [server.trust] if checkpoint.custom_code and server.trust else []
    options = dict(server.options)
    if server.options_file is None:
        keys = (key for key in scenario.policy.described() if key not in _NO_OPTION)
        options |= {f"--{_RENAMED.get(k, k).replace('_', '-')}": f"policy.{k}" for k in keys}
    for option, path in options.items():
        value = _spelled(path, get(settings, tuple(path.split("."))))
        if value is True:
            words.append(option)
        elif value is False:
            words += [option.replace("--", "--no-", 1)] if server.negates else []
        elif value is not None:
            words.append(f"{option} {value}")
    words += [server.drafting(spec)] if spec is not None and server.drafting(spec) else []
    before = ""
    if server.partition and cluster.pp > 1 and cluster.layers_per_stage:
        before = f"{server.partition}={','.join(map(str, cluster.layers_per_stage))} "
    if server.options_file is not None:
        text, (option, file) = dump_yaml(server.options_file(settings)), server.file
        before = f"cat > {file} <<'END'\n{text}END\n"
        words.append(f"{option} {file}")
    return before + " ".join(words)


def _compilation(scenario: Scenario) -> str | None:
    """vLLM's settings of graphs and fusions that are not its version's defaults."""
    given: dict[str, Any] = {key: getattr(scenario.engine, key) for key in OF_VLLM}
    told = {key: given[key] for key in GRAPH_KEYS if given[key] is not None}
    if (largest := given[FUSED]) is not None:
        usual = version_defaults(scenario, load_device(scenario.device))["engine"]
        if largest != usual.get(FUSED):
            size = {FUSED: largest} if largest else {}
            told["pass_config"] = {"fuse_allreduce_rms": largest > 0, **size}
    return f"'{json.dumps(told)}'" if told else None


RESULT, TRACE = "measured.json", "load.jsonl"
_TOOLS = {
    "vllm": (
        "vllm bench serve --backend openai",
        "random",
        f"--ignore-eos --save-result --save-detailed --result-filename {RESULT}",
    ),
    "sglang": (
        "python -m sglang.bench_serving --backend sglang",
        "random-ids --tokenize-prompt",
        f"--output-file {RESULT} --output-details",
    ),
}
"""Load tools: program, its dataset of random tokens, and how it saves the times of each request."""


def load_test(scenario: Scenario) -> tuple[str, str] | None:
    """The shell command that sends a resolved scenario's requests to its server and writes
    :data:`RESULT`, with comments above it; and the text of the file :data:`TRACE` that it reads,
    if any: a line a request, with its time in seconds, its lengths, and a number for its text. None
    without a checkpoint, and for sessions: no tool lets their turns wait for answers."""
    workload, served = scenario.workload, launch(scenario).checkpoint
    if served is None or workload.sessions is not None:
        return None
    engine, servers = scenario.policy.name, [scenario]
    if scenario.disaggregation is not None:
        servers = [pool_of(scenario, pool, Source("", "", {}, ()))[0] for pool in POOLS]
    longest = min(one.cluster.max_length or 0 for one in servers)
    # SGLang's tool sends them to SGLang if it can, else vLLM's, whose requests any engine takes.
    every = build_requests(scenario, longest, Source("workload", "", {}, ()))
    requests = [one for one in every if one.prompt_tokens + one.output_tokens <= longest]
    notes, left_out = _notes_of_load(scenario, requests), len(every) - len(requests)
    notes += [f"Left out because they are too long: {left_out:,} requests."] if left_out else []
    tools = ("sglang", "vllm") if engine == "sglang" else ("vllm",)
    drawn = {tool: "" if left_out else _drawn(workload, requests, tool) for tool in tools}
    tool, trace = next(filter(drawn.get, tools), "vllm"), ""
    program, dataset, saved = _TOOLS[tool]
    dataset = f"{dataset} {drawn[tool]}"
    if not drawn[tool]:
        dataset, trace = _replayed(workload.arrivals, requests)
        notes.append(f"{TRACE} has the time and the lengths of each request (vLLM 0.23 and later).")
    if tool != tools[0]:
        notes.append("This is vLLM's tool: SGLang's cannot send this load.")
    port = (_SERVERS if scenario.disaggregation is None else _POOLS)[engine].port
    words = [program, f"--base-url http://localhost:{port}", f"--model {shlex.quote(served.name)}"]
    words += ["--trust-remote-code"] if served.custom_code and tool == "vllm" else []
    words += [f"--num-prompts {len(requests)} --seed {scenario.seed} --dataset-name {dataset}"]
    return "".join(f"# {note}\n" for note in notes) + " ".join([*words, saved]), trace


def _drawn(workload: Workload, requests: Sequence[Request], tool: str) -> str:
    """The options with which a tool draws such lengths and arrivals itself; empty if it cannot."""
    lengths, arrivals = workload.lengths, workload.arrivals
    alike = {(one.prompt_tokens, one.output_tokens) for one in requests}
    plain = workload.shift == Shift() and not workload.system_prompts
    rate = f"--request-rate {getattr(arrivals, 'rate', math.inf):.6g}"
    ratio = 0.0 if tool == "vllm" else 1.0  # vLLM draws around a length, SGLang below it
    if len(alike) == 1:
        ((prompt, output),) = alike
    elif plain and isinstance(lengths, RandomLengths) and lengths.tool == tool:
        prompt, output, ratio = lengths.prompt, lengths.decode, lengths.range_ratio or ratio
    else:
        return ""
    if isinstance(arrivals, Gamma) and tool == "vllm" and workload.shift.burstiness == 1:
        rate += f" --burstiness {arrivals.cv**-2:.6g}"
    elif isinstance(arrivals, Closed):
        rate += f" --max-concurrency {arrivals.clients}"
    elif not isinstance(arrivals, AtOnce | Poisson) or workload.shift.burstiness != 1:
        return ""
    lens = f"--random-input-len {prompt} --random-output-len {output}"
    return f"{lens} --random-range-ratio {ratio:g} {rate}"


def _replayed(arrivals: Arrivals, requests: Sequence[Request]) -> tuple[str, str]:
    """The options with which vLLM's tool sends these requests, and the :data:`TRACE`: one number
    makes a prompt as long as its line says."""
    longest = max(one.prompt_tokens for one in requests)
    options = f"timed_trace --dataset-path {TRACE} --timed-trace-chunk-hash-size {longest}"
    if isinstance(arrivals, Closed):
        options += f" --no-self-timed --request-rate inf --max-concurrency {arrivals.clients}"
    rows = (
        {"timestamp": round(one.arrival_s, 6), "input_length": one.prompt_tokens}
        | {"output_length": one.output_tokens, "hash_ids": [number]}
        for number, one in enumerate(requests)
    )
    return options, "".join(f"{json.dumps(row)}\n" for row in rows)


def _notes_of_load(scenario: Scenario, requests: Sequence[Request]) -> list[str]:
    """What to know of it, and what of the scenario it does not have, a line each."""
    arrivals, replicas = scenario.workload.arrivals, scenario.cluster.replicas
    lasts_s = requests[-1].arrival_s - requests[0].arrival_s
    lasts = f" within {lasts_s:,.0f} s" if lasts_s else ""
    notes = [
        f"{len(requests):,} requests{lasts}.",
        f"Then compare: sarathi-sim score {RESULT} --config winner.yaml",
    ]
    if replicas > 1 and scenario.disaggregation is None:
        notes += [
            f"The address is that of a router in front of all {replicas} replicas. For one replica",
            "divide requests and rate by their number, and use score --set cluster.replicas=1.",
        ]
    if isinstance(arrivals, Closed) and arrivals.think_s:
        notes.append("Clients send the next request at once; the simulated ones wait before it.")
    if any(one.prefix for one in requests):
        notes.append("Prompts share nothing here, so the prefix cache saves less than predicted.")
    if scenario.speculation is not None:
        notes.append("Fewer drafts are accepted than predicted, because the tokens are random.")
    return notes


def _known(model: str) -> list[Checkpoint]:
    if listed := find_published(model):
        shipped, named = listed
        return [named, *checkpoints(shipped)]
    found, folder = checkpoints(model), user_path(model)
    if found or not folder.is_dir():
        return list(found)
    own = load_model(folder)
    return [Checkpoint(str(folder), "", own.dtype, own.kv_cache_dtype, own.moe_dtype)]


def _formats(one: Checkpoint | Scenario) -> tuple[str, str]:
    """Stored formats of layers and experts: activations in MXFP8 need no other checkpoint."""
    experts = one.moe_dtype or one.dtype or "bf16"
    return one.dtype or "bf16", "w4a16_mxfp4" if experts == "w4a8_mxfp4_mxfp8" else experts
