"""What is not modelled is refused by the names that users know, with what to do instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.config.scenario import PARAMETERS
from sarathi_sim.profiler.facts.device import list_devices, load_device
from sarathi_sim.profiler.facts.formats import KV_DTYPES, MOE_DTYPES, STACKS, WEIGHT_DTYPES
from sarathi_sim.profiler.facts.model import list_models, load_model
from sarathi_sim.profiler.storage.not_modelled import LIMITS, Limit, not_modelled
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import SMALL, message, refused
from tests.profiler.hf_configs import LLAMA_3


@pytest.mark.parametrize(
    ("assignment", "key"),
    [
        ("cluster.data_parallel_size=8", "cluster.dp"),
        ("policy.enable_dp_attention=true", "cluster.dp"),
        ("policy.num_speculative_tokens=3", "speculation"),
        ("speculation.draft_model=llama-3.2-1b", "speculation.model"),
        ("engine.speculative_draft_model_path=llama-3.2-1b", "speculation.model"),
        ("prefill_replicas=2", "disaggregation"),
        ("policy.attention_dp_config=true", "policy.enable_balance"),
        ("cluster.ep_num_redundant_experts=32", "cluster.redundant_experts"),
    ],
)
def test_an_engines_name_leads_to_the_key(assignment: str, key: str) -> None:
    assert f"(that is `{key}`)" in message(SMALL, assignment)


def test_a_name_stands_in_one_row_only() -> None:
    rows: list[Limit] = [row for kind in LIMITS.values() for row in kind]
    names = [name for row in rows for name in row.names.split()]
    assert len(names) == len(set(names)) and len({row.what for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("assignment", "what", "instead"),
    [
        ("speculation.method=medusa", "drafters other than", "`acceptance`"),
        ("lora.adapters=8", "LoRA adapters", "simulate the base model"),
        ("kv_cache.offload=cpu", "offload of KV cache", "reported_bytes"),
        ("autoscaling.max=4", "autoscaling", "recommend --rate"),
        ("kv_cache.hit_rate=0.5", "prefix-cache hit rates", "workload.system_prompts"),
        ("kv_cache.prefix_caching=0.5", "prefix-cache hit rates", "workload.sessions"),
        ("cluster.device_types=[a, b]", "replicas that differ", "simulate each kind apart"),
        ("cluster.replicas=[2, 4]", "replicas that differ", "simulate each kind apart"),
        ("device=[l40s, a100-80g-sxm]", "replicas that differ", "simulate each kind apart"),
        ("cluster.router=kv_aware", "KV-aware", "none follows sessions"),
        ("cluster.dcp_size=2", "context parallelism", "cluster.pp"),
        ("engine.eplb=true", "EPLB", "cluster.redundant_experts"),
        ("workload.best_of=4", "parallel sampling", "workload.system_prompts"),
        ("stack=tgi", "engines other than", "vllm, sglang or trtllm"),
        ("dtype=awq", "awq, gptq", "dtype: int4_wo"),
        ("moe_dtype=mxfp4", "mxfp4", "moe_dtype: w4a16_mxfp4"),
        ("kv_cache_dtype=fp8_e5m2", "other formats", "`fp8` for 8 bits"),
    ],
)
def test_keys_and_values(assignment: str, what: str, instead: str) -> None:
    text = message(SMALL, assignment)
    (line,) = {line for line in text.splitlines() if "not modelled" in line}
    where, _, told = line.partition("not modelled: ")
    assert what in told and instead in told and "docs/model/limits.md" in told
    assert assignment.partition("=")[0].split(".")[0] in where and "did you mean" not in line


def test_every_scenario_and_every_section_of_a_file_says_so() -> None:
    """Plain mistakes stay plain: `prefill` is no length, and no limit of the program."""
    said = message(SMALL, "scenarios.orca.lora={rank: 8}")
    assert "scenarios.orca.lora: unknown key: not modelled: LoRA" in said
    said = message(SMALL, "workload.lengths.prefill=3")
    assert "not modelled" not in said and "workload.lengths.prefill: unknown key" in said


@pytest.mark.parametrize(
    ("kind", "name", "what"),
    [
        ("model", "Qwen/Qwen2.5-VL-7B-Instruct", "read images"),
        ("model", "MiniMaxAI/MiniMax-M1-80k", "linear attention"),
        ("model", "deepseek-ai/DeepSeek-V4-Pro", "of compressed tokens"),
        ("model", "zai-org/GLM-5.2-FP8", "share an indexer"),
        ("model", "nvidia/Nemotron-H-8B-Base-8K", "state-space"),
        ("model", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "experts on a vector"),
        ("model", "CohereForAI/c4ai-command-r-plus", "side by side"),
        ("model", "allenai/OLMo-2-1124-7B", "norms come after"),
        ("model", "BAAI/bge-large-en-v1.5", "text decoder"),
        ("device", "MI300X", "profile it"),
        ("device", "TPU-v5e", "profile it"),
        ("device", "GB200-NVL72", "`gb200` is one tray of four"),
        ("device", "H100-80GB-PCIe", "differ from the SXM"),
        ("device", "L4", "profile it"),
    ],
)
def test_names(kind: str, name: str, what: str) -> None:
    """No model of text is proposed in place of one of images."""
    with pytest.raises(UserError) as caught:
        {"model": load_model, "device": load_device}[kind](name)
    text = str(caught.value)
    assert text.startswith(f"{kind} '{name}': not modelled: ") and what in text
    assert "did you mean" not in text and len(text.splitlines()) == 1


def test_of_a_device_small_and_capital_letters_are_alike() -> None:
    assert load_device("H100-80G-SXM") == load_device("h100-80g-sxm")
    assert load_device("H100") == load_device("h100-80g-sxm")
    for name in ("H10", "H100-80"):  # no whole word of a name
        with pytest.raises(UserError, match="unknown device"):
            load_device(name)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("recommend --model llama-3.1-8b --device mi300x --gpus 8 --slo X", "AMD GPUs"),
        ("recommend --model llama-3.1-8b --device gb200 --gpus 8 --slo X --dtype awq", "int4_wo"),
        ("list support --model llava-13b", "read images"),
        ("list support --device tpu-v5e", "Google TPU"),
        (
            "recommend --policy sarathi --gpus 1 --model llava-13b --device a6000 --workload 1K@14",
            "read images",
        ),
    ],
)
def test_options(
    command: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.replace("X", "p99 ttft 1s") for word in command.split()]
    line = refused(*words)
    assert "not modelled: " in line and expected in line and not list(tmp_path.iterdir())


def test_nothing_that_is_modelled_is_called_not_modelled() -> None:
    keys = {part for key in PARAMETERS for part in key.split(".")}
    formats = (*WEIGHT_DTYPES, *KV_DTYPES, *MOE_DTYPES, *STACKS)
    assert not [name for name in (*keys, *formats) if not_modelled(name)]
    assert load_experiment("vllm_llama3_8b").scenarios
    assert not [name for name in list_models() if not_modelled(name, "model")]
    assert not [name for name in list_devices() if not_modelled(name, "device")]


def test_where_a_format_that_was_not_measured_comes_from(tmp_path: Path) -> None:
    """AWQ on an H100 with vLLM: int4_wo stands in no line of the user's own."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    path = tmp_path / "awq.json"
    path.write_text(json.dumps({**LLAMA_3, "quantization_config": awq}))
    served = ("device=h100-80g-sxm", "stack=vllm", "cluster.tp=1", "profiles=null")
    text = message(SMALL, f"model={path}", *served)
    assert "no gemm of vllm was measured on h100-80g-sxm for dtype int4_wo; measured: " in text
    assert f"; dtype int4_wo is that of quantization_config of {path}: give another dtype" in text
    text = message(SMALL, "model=Qwen/Qwen3-8B-AWQ", *served)
    assert "; dtype int4_wo is that of Qwen/Qwen3-8B-AWQ: give another dtype" in text
    assert "is that of" not in message(SMALL, "model=qwen3-8b", "dtype=nvfp4", *served)
