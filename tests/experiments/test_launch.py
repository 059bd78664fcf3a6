"""Launch commands: the checkpoint, the number formats, and every setting that was simulated.

The engines' own parsers read the commands where a Python has the engine: SARATHI_SIM_VLLM_PYTHON
(vLLM 0.32) and SARATHI_SIM_SGLANG_PYTHON (SGLang 0.5.23).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from sarathi_sim.experiments.capacity.launch import launch, load_test
from sarathi_sim.experiments.capacity.options import router_of_ranks
from sarathi_sim.experiments.config.inputs import version_defaults
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.config.pools import pool_of
from sarathi_sim.experiments.config.scenario import POOLS, Scenario
from sarathi_sim.profiler.facts.device import engine_facts, load_device
from sarathi_sim.profiler.facts.model import checkpoints, list_models, load_model
from sarathi_sim.profiler.storage.plain_yaml import parse_yaml
from tests.experiments.small_config import HERE, ROOT
from tests.profiler.hf_configs import LLAMA_3

ENGINES = ("vllm", "sglang", "trtllm")
WORKLOAD = {"requests": 4, "lengths": {"kind": "fixed", "prompt": 200, "decode": 20}}
OTHERWISE: dict[str, dict[str, Any]] = yaml.safe_load("""
vllm: {max_num_batched_tokens: 8192, max_num_seqs: 17, long_prefill_token_threshold: 512,
  adaptive_threshold: true, enable_chunked_prefill: false, scheduling_policy: priority,
  watermark: 0.0625, scheduler_reserve_full_isl: false, async_scheduling: false, version: "0.32"}
sglang: {chunked_prefill_size: null, max_prefill_tokens: 4096, max_running_requests: 17,
  schedule_conservativeness: 0.3, schedule_policy: lpm, enable_mixed_chunk: true,
  disable_overlap_schedule: true, scheduler_recv_interval: 3, ignore_eos: true, version: "0.5.22"}
trtllm: {max_num_tokens: 4096, max_batch_size: 17, capacity_scheduler_policy: max_utilization,
  enable_chunked_prefill: true, batch_wait_timeout_iters: 5, batch_wait_max_tokens_ratio: 0.5,
  disable_overlap_scheduler: true, enable_balance: true, timeout_iters: 9, batching_wait_iters: 2}
""")
"""Of every policy a value that is not its default."""
SHARES = {
    "vllm": "gpu_memory_utilization",
    "sglang": "mem_fraction_static",
    "trtllm": "free_gpu_memory_fraction",
}


def scenario(engine: str, model: str, otherwise: bool = False, **keys: Any) -> Scenario:
    """With every setting at its default, or every one at another value."""
    tree: dict[str, Any] = {"model": model, "device": "h100-80g-sxm", "stack": engine}
    tree |= {"workload": WORKLOAD, "cluster": {"tp": 2, "max_length": 4096}}
    tree |= {"policy": {"name": engine}, "kv_cache": {}, **keys}
    if otherwise:
        tree["cluster"] |= {"pp": 2, "layers_per_stage": [3, 5], "expert_parallel": True}
        tree["policy"] |= OTHERWISE[engine]
        tree["kv_cache"] |= {"block_size": 32, "prefix_caching": False, SHARES[engine]: 0.8125}
    return check_scenario(tree, HERE)


def words(command: str) -> list[str]:
    """The server's arguments: what follows the program, without the environment."""
    found = shlex.split(command.rpartition("END\n")[2], comments=True)
    while "=" in found[0]:
        found = found[1:]
    starts = {"vllm": 2, "python": 3, "trtllm-serve": 1}  # vllm serve; python -m sglang...
    return found[starts[found[0]] :]


def started(one: Scenario) -> str:
    command = launch(one).command
    assert command is not None
    return command


def drafts_of(method: str) -> dict[str, Any]:
    return {"method": method, "draft_length": 2, "acceptance": [0.8, 0.6]}


def test_every_policy_setting_is_another_one() -> None:
    for engine, policy in OTHERWISE.items():
        usual = scenario(engine, "qwen3-32b").policy.described()
        assert set(policy) == set(usual) - {"name"}
        assert not [key for key, value in policy.items() if value == usual[key]]


@pytest.mark.parametrize(
    ("engine", "model", "formats", "told"),
    [
        ("vllm", "llama-3.1-8b", {}, "serve meta-llama/Llama-3.1-8B-Instruct --tensor"),
        ("vllm", "llama-3.1-8b", {"dtype": "fp8"}, "serve nvidia/Llama-3.1-8B-Instruct-FP8 "),
        ("vllm", "qwen3-32b", {"dtype": "nvfp4"}, "serve nvidia/Qwen3-32B-NVFP4 "),
        ("vllm", "qwen3-32b", {"dtype": "int4_wo"}, "serve Qwen/Qwen3-32B-AWQ "),
        ("vllm", "qwen3-32b", {"dtype": "fp8_block"}, "serve Qwen/Qwen3-32B-FP8 "),
        ("vllm", "deepseek-v3", {"dtype": "fp8_block"}, "serve deepseek-ai/DeepSeek-V3 "),
        ("vllm", "deepseek-v3", {"moe_dtype": "nvfp4"}, "nvidia/DeepSeek-V3-0324-NVFP4 "),
        ("sglang", "gpt-oss-120b", {"moe_dtype": "w4a16_mxfp4"}, "path openai/gpt-oss-120b "),
        ("sglang", "gpt-oss-20b", {"moe_dtype": "w4a8_mxfp4_mxfp8"}, "path openai/gpt-oss-20b "),
        ("trtllm", "llama-3.1-8b", {"dtype": "fp8"}, "serve nvidia/Llama-3.1-8B-Instruct-FP8 "),
        # Names of the Hub lead to themselves, in their format.
        ("vllm", "meta-llama/Llama-3.1-8B", {}, "serve meta-llama/Llama-3.1-8B --"),
        ("vllm", "meta-llama/Llama-3.1-8B", {"dtype": "fp8"}, "Llama-3.1-8B-Instruct-FP8 "),
    ],
)
def test_a_quantised_format_is_a_quantised_checkpoint(
    engine: str, model: str, formats: dict[str, str], told: str
) -> None:
    found = launch(scenario(engine, model, **formats))
    assert found.needs is None and found.command is not None
    assert told in found.command and "--quantization" not in found.command


@pytest.mark.parametrize(
    ("engine", "dtype", "quantisation"),
    [("vllm", "fp8", "fp8_per_tensor"), ("vllm", "fp8_block", "fp8_per_block"),
     ("sglang", "fp8", "fp8")],
)  # fmt: skip
def test_engines_that_quantise_on_the_fly_are_told_so(
    engine: str, dtype: str, quantisation: str
) -> None:
    command = started(scenario(engine, "mistral-7b", dtype=dtype))
    assert "mistralai/Mistral-7B-v0.1" in command
    assert f" --quantization {quantisation} " in command


@pytest.mark.parametrize(
    ("engine", "model", "keys", "told"),
    [
        ("vllm", "gpt3-175b", {}, "no checkpoint of gpt3-175b in bf16 that vllm loads"),
        ("vllm", "mistral-7b", {"dtype": "int4_wo"}, "config.json gives its quantisation"),
        ("vllm", "mixtral-8x7b", {"moe_dtype": "fp8"}, "in bf16 with experts in fp8 that vllm"),
        ("sglang", "mistral-7b", {"dtype": "fp8_block"}, "mistral-7b in fp8_block"),
        ("trtllm", "mistral-7b", {"dtype": "fp8"}, "fp8 and a KV cache in bf16 that trtllm"),
        ("trtllm", "qwen3-32b", {"dtype": "int4_wo"}, "qwen3-32b in int4_wo"),
        # Its checkpoint says fp8, which this engine follows.
        ("trtllm", "qwen3-32b", {"dtype": "nvfp4"}, "in nvfp4 and a KV cache in bf16"),
    ],
)
def test_without_a_known_checkpoint_there_is_a_line_and_no_command(
    engine: str, model: str, keys: dict[str, Any], told: str
) -> None:
    found = launch(scenario(engine, model, **keys))
    assert found.command is None
    assert found.needs is not None and told in found.needs and "\n" not in found.needs


RANKS = {"dp": 4, "expert_parallel": True, "max_length": 4096}


@pytest.mark.parametrize(
    ("engine", "cluster"),
    [
        ("vllm", {**RANKS, "rank_router": "round_robin"}),
        ("sglang", {**RANKS, "rank_router": "least_tokens"}),
        ("vllm", {"tp": 2, "expert_parallel": True, "moe_a2a_backend": "nccl"}),
    ],
)
def test_what_no_command_says_is_no_command(engine: str, cluster: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no command says"):
        launch(scenario(engine, "qwen3-30b-a3b", cluster=cluster))


def with_ranks(engine: str, tp: int = 1, model: str = "deepseek-r1", **keys: Any) -> Scenario:
    """Four ranks of ``tp`` GPUs; of DeepSeek, whose engines write an fp8 cache."""
    cluster = {**RANKS, "tp": tp, "rank_router": router_of_ranks(engine)}
    formats = {"dtype": "fp8_block", "kv_cache_dtype": "fp8"}
    return scenario(engine, model, cluster=cluster, **formats, **keys)


def options(command: str) -> dict[str, str]:
    """The options of a server's command, each with the word behind it, if that is a value."""
    given = words(command)
    return {
        word: "" if following.startswith("--") else following
        for word, following in zip(given, [*given[1:], "--"], strict=True)
        if word.startswith("--")
    }


def comments(command: str) -> list[str]:
    return [line[2:] for line in command.splitlines() if line.startswith("# ")]


@pytest.mark.parametrize(
    ("engine", "method", "told"),
    [
        ("vllm", "mtp", '{"method": "mtp", "num_speculative_tokens": 2}'),
        ("vllm", "eagle3",
         '{"method": "eagle3", "num_speculative_tokens": 2, "model": "DRAFTER"}'),
        ("vllm", "ngram", '{"method": "ngram", "num_speculative_tokens": 2}'),
        # A chain: one token a step, and one row more than there are drafts.
        ("sglang", "mtp", "algorithm EAGLE, num-steps 2, eagle-topk 1, num-draft-tokens 3"),
        ("sglang", "eagle3", "algorithm EAGLE3, draft-model-path DRAFTER, num-steps 2, "
         "eagle-topk 1, num-draft-tokens 3"),
        ("sglang", "ngram",
         "algorithm NGRAM, num-steps 2, ngram-max-bfs-breadth 1, num-draft-tokens 3"),
        ("trtllm", "mtp", "decoding_type MTP, num_nextn_predict_layers 2"),
        ("trtllm", "ngram", "decoding_type NGram, max_draft_len 2"),
        ("trtllm", "eagle3",
         "decoding_type Eagle, max_draft_len 2, speculative_model_dir DRAFTER"),
    ],
)  # fmt: skip
def test_drafts(engine: str, method: str, told: str) -> None:
    drafts = {"speculation": drafts_of(method)}
    alone = scenario("sglang", "qwen3-30b-a3b", **drafts)
    command = started(alone if engine == "sglang" else with_ranks(engine, **drafts))
    prefix = re.compile(r"speculative[-_](config\.)?")
    given = [(key, value) for key, value in read_back(command).items() if prefix.match(key)]
    said = [f"{prefix.sub('', key, count=1)} {value}" for key, value in given]
    assert sorted(said) == sorted([f"config {told}"] if engine == "vllm" else told.split(", "))
    assert ("DRAFTER" in " ".join(comments(command))) == (method == "eagle3")


@pytest.mark.parametrize(
    ("engine", "tp", "told"),
    [
        ("vllm", 2, {"tensor-parallel-size": "2", "data-parallel-size": "4",
                     "enable-expert-parallel": "", "max-num-seqs": "256"}),
        ("trtllm", 1, {"tp_size": "4", "ep_size": "4", "max_batch_size": "2048",
                       "enable_attention_dp": "True"}),
    ],
)  # fmt: skip
def test_ranks(engine: str, tp: int, told: dict[str, str]) -> None:
    command = started(with_ranks(engine, tp))
    found = read_back(command)
    assert {key: found[key] for key in told} == told
    assert " rank." in " ".join(comments(command))


@pytest.mark.parametrize("tp", [1, 2])
def test_sglang_divides_what_it_is_told_by_its_ranks(tp: int) -> None:
    policy = {"name": "sglang", "chunked_prefill_size": 512, "max_running_requests": 12}
    command = started(with_ranks("sglang", tp, policy=policy))
    found = options(command)
    assert (found["--tp-size"], found["--dp-size"]) == (str(4 * tp), "4")
    assert found["--ep-size"] == str(4 * tp) and "--enable-dp-attention" in found
    assert "--enable-dp-lm-head" in found
    # As the server's arguments do: handle_data_parallelism, and the pools' sizes.
    assert int(found["--chunked-prefill-size"]) // 4 == 512
    assert int(found["--max-running-requests"]) // 4 == 12
    assert float(found["--schedule-conservativeness"]) * 0.3 == pytest.approx(1.0)
    assert (found.get("--moe-dense-tp-size") == "1") == (tp == 1)
    assert any("Dense layers" in line for line in comments(command)) == (tp == 2)


def test_what_ranks_cannot_have_and_that_they_are_on_several_nodes_is_said() -> None:
    for one, why in (
        (with_ranks("sglang", speculation=drafts_of("ngram")), "no n-gram drafts"),
        (with_ranks("trtllm", tp=2), "one GPU each"),
    ):
        found = launch(one)
        assert found.command is None and why in str(found.needs)
    one, many = (started(with_ranks("vllm", tp)) for tp in (2, 4))
    assert "nodes" not in one
    assert "16 GPUs need several nodes of 8" in " ".join(comments(many))


def test_a_checkpoint_of_ones_own_is_its_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "my model").mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3))
    command = started(scenario("vllm", str(folder)))
    assert words(command)[0] == str(folder)
    needs = launch(scenario("vllm", str(folder), dtype="int4_wo")).needs
    assert needs is not None and "int4_wo" in needs
    assert launch(scenario("vllm", str(folder / "config.json"))).command is None


def test_what_only_some_are_told() -> None:
    """Consent to a checkpoint's own code; uneven stages."""
    assert "--trust-remote-code" in started(scenario("vllm", "qwen-72b"))
    for engine in ("vllm", "sglang"):
        usual = started(scenario(engine, "qwen3-32b"))
        assert "--trust" not in usual and "PARTITION" not in usual
        uneven = started(scenario(engine, "qwen3-32b", otherwise=True))
        assert uneven.splitlines()[-1].startswith(f"{engine.upper()}_PP_LAYER_PARTITION=3,5 ")


@pytest.mark.parametrize("otherwise", [False, True])
def test_all_settings_of_tensorrt_llm(otherwise: bool) -> None:
    one = scenario("trtllm", "qwen3-30b-a3b", otherwise, kv_cache_dtype="fp8")
    policy, command = one.policy.described(), started(one)
    before, _, rest = command.partition("END\n")
    assert before.startswith("cat > trtllm.yaml <<'END'\n")
    same = ("enable_chunked_prefill", "disable_overlap_scheduler", "batch_wait_max_tokens_ratio")
    content = parse_yaml(before.partition("\n")[2], "trtllm.yaml")
    assert content == {
        "dtype": "bfloat16",
        **{key: policy[key] for key in same},
        "batch_wait_timeout_iters": policy["batch_wait_timeout_iters"] or 0,
        "scheduler_config": {
            "capacity_scheduler_policy": "MAX_UTILIZATION" if otherwise else "GUARANTEED_NO_EVICT"
        },
        "kv_cache_config": {
            "dtype": "fp8",
            "enable_block_reuse": not otherwise,
            "tokens_per_block": 32 if otherwise else 16,
            "free_gpu_memory_fraction": 0.8125 if otherwise else 0.9,
        },
        **({"pp_partition": [3, 5]} if otherwise else {}),
    }
    assert rest == (
        "trtllm-serve Qwen/Qwen3-30B-A3B --backend pytorch --tp_size 2 "
        f"--pp_size {2 if otherwise else 1} --ep_size {2 if otherwise else 1} --max_seq_len 4096 "
        f"--max_num_tokens {4096 if otherwise else 8192} "
        f"--max_batch_size {17 if otherwise else 2048} --extra_llm_api_options trtllm.yaml"
    )


TWO = {"prefill": {"cluster": {"replicas": 2}}, "decode": {"cluster": {"tp": 4}}}


def workers(engine: str, **keys: Any) -> list[str]:
    """The commands of a prefill worker, of a decode worker and of the router."""
    command = started(scenario(engine, "qwen3-32b", disaggregation=TWO, **keys))
    parts = command.split("# ")[1:]
    if engine != "trtllm":
        version = parts.pop(0)
        assert version == f"The simulated settings, for {engine} {engine_facts(engine).newest}.\n"
    first = ["2 prefill workers, on prefill-0, prefill-1", "1 decode worker, on decode-0"]
    assert [part.partition("\n")[0] for part in parts] == [*first, "the router"]
    return [part.partition("\n")[2].strip() for part in parts]


def test_vllms_workers_of_two_pools() -> None:
    prefill, decode, router = workers("vllm", dtype="nvfp4")
    for command, tp, role in ((prefill, 2, "kv_producer"), (decode, 4, "kv_consumer")):
        given = words(command)
        assert given[given.index("--tensor-parallel-size") + 1] == str(tp)
        sent = json.loads(given[given.index("--kv-transfer-config") + 1])
        assert sent == {"kv_connector": "NixlConnector", "kv_role": role}
        assert command.startswith("VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname) vllm serve nvidia/Qwen")
    assert router.endswith(
        "toy_proxy_server.py --port 8192 --prefiller-hosts prefill-0 prefill-1 --prefiller-ports "
        "8000 8000 --decoder-hosts decode-0 --decoder-ports 8000"
    )


def test_sglangs_workers_of_two_pools() -> None:
    prefill, decode, router = workers("sglang")
    for command, mode in ((prefill, "prefill"), (decode, "decode")):
        given = words(command)
        assert given[given.index("--disaggregation-mode") + 1] == mode
        assert given[given.index("--disaggregation-transfer-backend") + 1] == "nixl"
        # The engine's decode workers have no radix cache.
        assert ("--disable-radix-cache" in given) == (mode == "decode")
    addresses = [word for word in router.split() if word.startswith("http://")]
    assert addresses == [f"http://{name}:30000" for name in ("prefill-0", "prefill-1", "decode-0")]
    assert router.count("--prefill http") == 2 and " --policy round_robin " in router


def test_tensorrt_llms_workers_run_under_dynamo() -> None:
    without = {"policy": {"name": "trtllm", "disable_overlap_scheduler": True}}
    prefill, decode, router = workers("trtllm", kv_cache_dtype="fp8", dtype="fp8_block", **without)
    for command, pool, tp in ((prefill, "prefill", 2), (decode, "decode", 4)):
        before, _, rest = command.partition("END\n")
        content = parse_yaml(before.partition("\n")[2], f"{pool}.yaml")
        assert (content["tensor_parallel_size"], content["backend"]) == (tp, "pytorch")
        assert content["cache_transceiver_config"] == {"backend": "DEFAULT"}
        assert content["max_batch_size"] == 2048 and content["max_seq_len"] == 4096
        assert rest == (
            "python -m dynamo.trtllm --model-path Qwen/Qwen3-32B-FP8 --extra-engine-args "
            f"{pool}.yaml --disaggregation-mode {pool}"
        )
    assert router.startswith("python -m dynamo.frontend --router-mode round-robin")


def read_back(command: str) -> dict[str, str]:
    """A worker of a pool in the columns of a launch list: its own settings by the engine's names,
    its degrees by those of the list."""
    found = {key[2:]: value for key, value in options(command).items()}
    if "END\n" in command:
        text = command.split("'END'\n")[1].partition("END\n")[0]
        for key, value in parse_yaml(text, "worker.yaml").items():
            inner = value if isinstance(value, dict) else {"": value}
            found |= {f"{key}.{name}".rstrip("."): str(each) for name, each in inner.items()}
    names = {
        "tp": ("tp-size", "tensor_parallel_size"),
        "ep": ("ep-size", "moe_expert_parallel_size"),
    }
    degrees = {to: found[name] for to, some in names.items() for name in some if name in found}
    ranks = "enable-dp-attention" in found or found.get("enable_attention_dp") == "True"
    return {**found, **degrees, "dp_attention": str(ranks)}


@pytest.mark.lab
@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_a_launch_list_reads_what_was_written(engine: str) -> None:
    """From the commands of both pools to the reader of measured servers' settings, and back to the
    pools that were simulated."""
    from sarathi_sim.experiments.lab.servers.rows import StartedServer
    from sarathi_sim.experiments.lab.servers.scenarios import pools_of

    limits = {
        "sglang": {"chunked_prefill_size": 4096, "max_running_requests": 24,
                   "disable_overlap_schedule": True},
        "trtllm": {"max_num_tokens": 4096, "max_batch_size": 24},
    }  # fmt: skip
    share = {"sglang": "mem_fraction_static", "trtllm": "free_gpu_memory_fraction"}[engine]
    cluster = {"max_length": 4096}
    ranks = {**RANKS, "tp": 1, "rank_router": router_of_ranks(engine)}
    pools = {"prefill": {"cluster": {"tp": 8, "expert_parallel": True, "replicas": 3}},
             "decode": {"cluster": ranks}}  # fmt: skip
    both = scenario(
        engine, "deepseek-r1", dtype="fp8_block", kv_cache_dtype="fp8", cluster=cluster,
        policy={"name": engine, **limits[engine]}, kv_cache={share: 0.8}, disaggregation=pools,
        speculation=drafts_of("mtp"),
    )  # fmt: skip
    parts = re.split(r"^# (\d+) \w+ workers?, on .*\n", started(both), flags=re.M)
    columns: dict[str, Any] = {"id": "x", "speculation": "mtp"}
    for pool, many, text in zip(POOLS, parts[1::2], parts[2::2], strict=True):
        columns[f"{pool}_workers"] = many
        worker = text.partition("# the router")[0].strip()
        columns |= {f"{pool}:{key}": value for key, value in read_back(worker).items()}
    server = StartedServer.model_validate(columns)
    assert server.draft_length == 2
    about = {"isl": 1000, "osl": 100, "concurrency": 1, "drafts": 2, "system": "gb200"}
    row: Any = SimpleNamespace(backend=engine, launch=server, **about)
    found = pools_of(row, {}, 256)["disaggregation"]
    for pool in POOLS:
        simulated, _ = pool_of(both, pool, HERE)
        assert found[pool]["kv_cache"] == {share: 0.8}
        keys = ["tp", "dp", "replicas", "expert_parallel"]
        keys += ["rank_router"] if simulated.cluster.dp > 1 else []
        assert found[pool]["cluster"] == {key: getattr(simulated.cluster, key) for key in keys}
        policy = simulated.policy.described()
        assert {key: found[pool]["policy"][key] for key in limits[engine]} == {
            key: policy[key] for key in limits[engine]
        }


# The engines' own parsers --------------------------------------------------------------------

Formats = tuple[str, str | None]
Reading = Callable[[Scenario], Any]


def setting(key: str) -> Reading:
    return lambda one: one.policy.described()[key]


def cached(key: str, otherwise: Any = None) -> Reading:
    return lambda one: getattr(one.kv_cache, key) or otherwise


def drafted(one: Scenario) -> int | None:
    return one.speculation and one.speculation.draft_length


UNLIKE = ("adaptive_threshold", "version", "ignore_eos")
PARSED: dict[str, dict[str, Reading]] = {
    "vllm": {
        "tensor_parallel_size": lambda one: one.cluster.tp,
        "pipeline_parallel_size": lambda one: one.cluster.pp,
        "data_parallel_size": lambda one: one.cluster.dp,
        "speculative_config": lambda one: (
            {"method": "mtp", "num_speculative_tokens": drafted(one)} if drafted(one) else None
        ),
        "enable_expert_parallel": lambda one: bool(one.cluster.expert_parallel),
        "max_model_len": lambda one: one.cluster.max_length,
        "dtype": lambda one: "bfloat16",
        "kv_cache_dtype": lambda one: "fp8" if one.kv_cache_dtype == "fp8" else "bfloat16",
        **{key: setting(key) for key in OTHERWISE["vllm"] if key not in UNLIKE},
        "long_prefill_token_threshold": lambda one: (
            setting("long_prefill_token_threshold")(one) or 0
        ),
        "long_prefill_token_threshold_adaptive": setting("adaptive_threshold"),
        "gpu_memory_utilization": cached("gpu_memory_utilization", 0.9),
        "block_size": cached("block_size"),
        "enable_prefix_caching": cached("prefix_caching", False),
    },
    "sglang": {
        "tp_size": lambda one: one.cluster.tp * one.cluster.dp,
        "dp_size": lambda one: one.cluster.dp,
        "speculative_num_steps": drafted,
        "speculative_num_draft_tokens": lambda one: drafted(one) and drafted(one) + 1,
        "speculative_algorithm": lambda one: drafted(one) and "EAGLE",
        "enable_dp_lm_head": lambda one: one.cluster.dp > 1,
        "pp_size": lambda one: one.cluster.pp,
        "ep_size": lambda one: (
            one.cluster.tp * one.cluster.dp if one.cluster.expert_parallel else 1
        ),
        "context_length": lambda one: one.cluster.max_length,
        "dtype": lambda one: "bfloat16",
        "kv_cache_dtype": lambda one: "fp8_e4m3" if one.kv_cache_dtype == "fp8" else "bf16",
        **{key: setting(key) for key in OTHERWISE["sglang"] if key not in UNLIKE},
        "chunked_prefill_size": lambda one: (
            one.cluster.dp * (setting("chunked_prefill_size")(one) or -1)
        ),
        "max_running_requests": lambda one: one.cluster.dp * setting("max_running_requests")(one),
        "schedule_conservativeness": lambda one: (
            setting("schedule_conservativeness")(one) / (0.3 if one.cluster.dp > 1 else 1)
        ),
        "mem_fraction_static": cached("mem_fraction_static", 0.9),
        "page_size": cached("block_size"),
        "disable_radix_cache": lambda one: not cached("prefix_caching")(one),
    },
}
"""What the engine's parser must have read, by its names."""


def shipped(engine: str) -> Iterator[Scenario]:
    """All shipped models in all formats that have a name on the Hub or may be made on the fly, each
    with both KV formats and both sets of settings."""
    made: tuple[Formats, ...] = (("fp8", None), ("fp8_block", None))
    for model in list_models():
        own = [(one.dtype, one.moe_dtype) for one in checkpoints(model)]
        for dtype, moe_dtype in dict.fromkeys([*own, *(made if ("bf16", None) in own else ())]):
            keys = {"dtype": dtype} | ({"moe_dtype": moe_dtype} if moe_dtype else {})
            for kv, otherwise in product(("bf16", "fp8"), (False, True)):
                yield scenario(engine, model, otherwise, kv_cache_dtype=kv, **keys)
    if engine != "trtllm":
        for tp in (1, 2):
            yield with_ranks(engine, tp, speculation={"method": "mtp", "acceptance": 2.4})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engines_own_parser_reads_every_command(engine: str) -> None:
    variable = f"SARATHI_SIM_{engine.upper()}_PYTHON"
    here = sys.executable if importlib.util.find_spec(engine) else None
    if (python := os.environ.get(variable) or here) is None:
        pytest.skip(f"no {engine}: name in {variable} a Python with it")
    found = [(one, launch(one).command) for one in shipped(engine)]
    commands = [(one, words(command)) for one, command in found if command is not None]
    call, given = [python, "-m", "tests.engine_parsers", engine], [line for _, line in commands]
    given.append(["Qwen/Qwen3-32B"])  # what is nowhere said, the engine decides
    done = subprocess.run(
        call, cwd=ROOT, input=json.dumps(given), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *read, bare = json.loads(done.stdout)
    usual = scenario(engine, "qwen3-32b")
    defaults = version_defaults(usual, load_device(usual.device))
    for key, ours in (defaults["policy"] | defaults["kv_cache"]).items():
        assert bare.get(key) in (None, ours), f"the engine's default of {key}"
    assert len(read) == len(commands) > 300
    for (one, line), values in zip(commands, read, strict=True):
        wanted = {key: value(one) for key, value in PARSED[engine].items()}
        assert {key: values.get(key) for key in wanted} == wanted, (line, values.get("error"))
        named = values["model_tag" if engine == "vllm" else "model_path"]
        own = next(c for c in checkpoints(one.model) if c.name == named)
        formats = (own.dtype, own.moe_dtype)
        if values["quantization"] is None:
            assert formats == (one.dtype, one.moe_dtype)
        else:
            assert formats == ("bf16", None) and one.dtype in ("fp8", "fp8_block")
        assert values["trust_remote_code"] == own.custom_code


def test_a_load_leaves_out_what_either_pool_is_too_short_for(tmp_path: Path) -> None:
    (log := tmp_path / "log.csv").write_text("prompt,decode\n100,5\n300,5\n700,5\n900,5\n")
    load = {"lengths": {"kind": "trace", "path": str(log)}, "too_long": "reject"}
    longest = {"prefill": 800, "decode": 600}
    pools = {name: {"cluster": {"max_length": most}} for name, most in longest.items()}
    keys = {"cluster": {}, "disaggregation": pools, "workload": load}
    found = load_test(scenario("vllm", "qwen3-32b", **keys))
    assert found is not None and "Left out because they are too long: 2 requests." in found[0]


def test_graphs_and_fusions_that_are_not_the_versions_are_said() -> None:
    """vLLM's own defaults are left to it."""
    usual = started(scenario("vllm", "llama-3.1-8b"))
    assert "--compilation-config" not in usual
    keys = {"cudagraph_mode": "FULL_DECODE_ONLY", "splitting_ops": []}
    for size, told in (
        (0, {"fuse_allreduce_rms": False}),
        (8, {"fuse_allreduce_rms": True, "fi_allreduce_fusion_max_size_mb": 8.0}),
    ):
        engine = keys | {"fi_allreduce_fusion_max_size_mb": float(size)}
        command = started(scenario("vllm", "llama-3.1-8b").having("engine", **engine))
        words = shlex.split(command)
        found = json.loads(words[words.index("--compilation-config") + 1])
        assert found == keys | {"pass_config": told}


def test_vllm_starts_every_checkpoint_that_has_a_name() -> None:
    """The others say what they lack: SGLang makes no fp8_block, TensorRT-LLM nothing on the fly."""
    for engine in ENGINES:
        for one in shipped(engine):
            found = launch(one)
            assert (found.command is None) != (found.needs is None)
            assert engine != "vllm" or found.command is not None
    for model in list_models():
        spec = load_model(model)
        own = {"dtype": spec.dtype} | ({"moe_dtype": spec.moe_dtype} if spec.moe_dtype else {})
        found = launch(scenario("vllm", model, **own))
        assert (found.command is None) == (not checkpoints(model))
