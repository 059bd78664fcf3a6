"""Measured servers with prefill and decode on separate workers: their launch lists, and what a row
of them describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sarathi_sim.experiments.config.inputs import NONE
from sarathi_sim.experiments.config.scenario import POOLS
from sarathi_sim.experiments.lab.servers.errors import grouped
from sarathi_sim.experiments.lab.servers.host import fitting
from sarathi_sim.experiments.lab.servers.rows import Measured, StartedServer, read_servers
from sarathi_sim.experiments.lab.servers.scenarios import scenario_of, server_of, stack_of
from sarathi_sim.profiler.storage.strict import UserError

pytestmark = pytest.mark.lab

LAYOUT = "workers,tp,ep,dp_attention"
HEADER = ",".join(f"{pool}_{name}" for pool in ("prefill", "decode") for name in LAYOUT.split(","))
TRTLLM = "1.0,4.0,4.0,True,3,8.0,8.0,False"
SGLANG = "2,8,1,True,1,32,32,True"
LAYOUTS = {"trtllm": TRTLLM, "sglang": SGLANG}
LIMITS = {
    "prefill:max_batch_size": "2.0", "prefill:max_num_tokens": "16384.0",
    "decode:max_batch_size": "8.0", "decode:max_num_tokens": "8.0",
    "decode:kv_cache_config.free_gpu_memory_fraction": "0.7",
}  # fmt: skip
PREFILL = {
    "prefill:chunked-prefill-size": "65536.0", "decode:max-running-requests": "1024.0",
    "decode:moe-a2a-backend": "deepep", "decode:ep-num-redundant-experts": "32.0",
}  # fmt: skip
DRAFTS = {"decode:speculative_config.num_nextn_predict_layers": "3", "decode:max_batch_size": "8"}


def row_of(
    backend: str,
    settings: dict[str, str] | None = None,
    speculation: str = "none",
    system: str = "gb200",
    layout: str = "",
    **more: object,
) -> Measured:
    cells = zip(HEADER.split(","), (layout or LAYOUTS[backend]).split(","), strict=True)
    launch = {"id": "a", "speculation": speculation, **dict(cells), **(settings or {})}
    given = {"id": "a", "backend": backend, "backend_version": "0.5.8.post1", "system": system,
             "model": "deepseek-ai/DeepSeek-R1", "precision": "fp8", "mode": "disagg",
             "dense": False, "isl": 1024, "osl": 512, "concurrency": 48, "ttft_ms": 500,
             "tpot_ms": 20, "launch": StartedServer.model_validate(launch)}  # fmt: skip
    return Measured.model_validate({**given, **more})


def pools(row: Measured) -> dict[str, Any]:
    found: dict[str, Any] = scenario_of(row, NONE)["disaggregation"]
    return found


def test_a_launch_list_says_how_rows_were_started(tmp_path: Path) -> None:
    measured, launch = tmp_path / "measured.csv", tmp_path / "launch.csv"
    measured.write_text(
        "id,backend,model,system,mode,isl,osl,concurrency,ttft_ms,tpot_ms\n"
        + "".join(f"{id},trtllm,m,gb200,disagg,1024,512,48,500,20\n" for id in "ab")
    )
    launch.write_text(f"id,matches,speculation,{HEADER},decode:max_batch_size\na,1,,{TRTLLM},8.0\n")
    (row, other), _ = read_servers([measured], launch)
    assert row.launch is not None and row.launch.layout == "1x dp4 ep4 + 3x tp8 ep8"
    assert row.launch.decode is not None and row.launch.decode.max_batch_size == 8
    assert other.launch is None
    launch.write_text(f"id,speculation,{HEADER}\na,none,{TRTLLM.replace('4.0', 'many', 1)}\n")
    with pytest.raises(UserError, match=r"launch\.csv: a: prefill\.tp: value 'many'"):
        read_servers([measured], launch)


def test_without_launch_settings_there_is_no_answer() -> None:
    for launch in (None, StartedServer(id="a", speculation="unknown")):
        row = row_of("trtllm").model_copy(update={"launch": launch})
        with pytest.raises(UserError, match="no launch settings are known"):
            scenario_of(row, NONE)


def test_trtllm_limits_are_a_ranks() -> None:
    row = row_of("trtllm", LIMITS)
    router = {"rank_router": "least_prompt_tokens"}
    assert pools(row) == {
        "prefill": {
            "cluster": {"tp": 1, "dp": 4, "replicas": 1, "expert_parallel": True} | router,
            "policy": {"name": "trtllm", "max_batch_size": 2, "max_num_tokens": 16384},
            "kv_cache": {"free_gpu_memory_fraction": 0.6},
        },
        "decode": {
            "cluster": {"tp": 8, "dp": 1, "replicas": 3, "expert_parallel": True},
            "policy": {"name": "trtllm", "max_batch_size": 8, "max_num_tokens": 8},
            "kv_cache": {"free_gpu_memory_fraction": 0.7},
        },
    }
    assert server_of(row).endswith("1x dp4 ep4 + 3x tp8 ep8")
    assert stack_of(row) == "trtllm in pools"
    unlimited = pools(row_of("trtllm"))["decode"]["policy"]  # 48 clients over three workers
    assert unlimited["max_batch_size"] == 16, "no request waits for a slot"


def test_sglang_divides_its_limits_by_its_ranks() -> None:
    row = row_of("sglang", PREFILL, "mtp/none")
    prefill, decode = pools(row)["prefill"], pools(row)["decode"]
    assert prefill["policy"]["chunked_prefill_size"] == 8192
    assert prefill["cluster"] == {"tp": 1, "dp": 8, "replicas": 2, "rank_router": "round_robin"}
    assert decode["policy"]["max_running_requests"] == 32
    assert decode["cluster"] == {
        "tp": 1, "dp": 32, "replicas": 1, "expert_parallel": True, "moe_a2a_backend": "deepep",
        "redundant_experts": 32, "rank_router": "round_robin",
    }  # fmt: skip
    assert stack_of(row) == "sglang 0.5.8 in pools", "its releases are apart"
    none = pools(row_of("sglang", {"prefill:chunked-prefill-size": "-1.0"}))["prefill"]["policy"]
    assert none["chunked_prefill_size"] is None, "-1: no chunks"


def test_what_recipes_for_sglang_say_by_gpu() -> None:
    said = {"gb200": ("fp8", "round_robin"), "b200_sxm": ("fp8", "random")}
    for system, (dtype, router) in (said | {"h200_sxm": ("bf16", "random")}).items():
        found = scenario_of(row_of("sglang", system=system), NONE)
        assert found["kv_cache_dtype"] == dtype
        routers = [found["disaggregation"][pool]["cluster"]["rank_router"] for pool in POOLS]
        assert routers == [router, "round_robin"]
        assert scenario_of(row_of("trtllm", system=system), NONE)["kv_cache_dtype"] == "fp8"


def test_unknown_limits_of_sglang_on_b200_are_its_recipes() -> None:
    """Divided by the prefill pool's ranks; the slots of the decode pool are not limited."""
    found = pools(row_of("sglang", system="b200_sxm"))
    assert found["prefill"]["policy"] == {
        "name": "sglang", "ignore_eos": True, "chunked_prefill_size": 32768 // 8,
        "max_prefill_tokens": 32768, "max_running_requests": 512 // 8,
    }  # fmt: skip
    assert found["decode"]["policy"]["max_running_requests"] == 2048
    assert found["prefill"]["kv_cache"] == {"mem_fraction_static": 0.85}


def test_redundant_experts() -> None:
    """Of 288 slots 256 are DeepSeek's experts. 48 ranks divide 288, not 256."""
    for ep, column, redundant in (("32", "288", 32), ("32", "", 0), ("48", "", 32)):
        slots = {"decode:load_balancer.num_slots": column} if column else {}
        row = row_of("trtllm", slots, layout=f"1,4,4,True,1,{ep},{ep},True")
        assert pools(row)["decode"]["cluster"].get("redundant_experts", 0) == redundant


def test_drafts_take_the_nearest_published_acceptance() -> None:
    """DeepSeek V4 Pro's at three drafts. A decode of eight sequences has 32 rows."""
    row = row_of("trtllm", DRAFTS, "mtp")
    scenario = scenario_of(row, NONE)
    assert scenario["speculation"] == {"method": "mtp", "draft_length": 3, "acceptance": 2.49}
    assert scenario["disaggregation"]["decode"]["policy"]["max_num_tokens"] == 64
    assert server_of(row).endswith("3x tp8 ep8, 3 drafts")
    assert not fitting(row, mixtures=True)
    assert grouped([row]) == {"all": [], "with drafts": [row]}
    assert "speculation" not in scenario_of(row_of("trtllm", DRAFTS, "mtp/none"), NONE)
    # Where the number is not known: three up to 64 clients a rank of decodes.
    for clients, drafts in ((1, 3), (64 * 3, 3), (64 * 3 + 1, 1)):
        asked = row_of("trtllm", speculation="mtp", concurrency=clients)
        assert scenario_of(asked, NONE)["speculation"]["draft_length"] == drafts
    assert row_of("sglang", speculation="mtp").drafts == 2


def test_sglang_with_drafts_has_no_overlap_and_48_requests() -> None:
    drafted = row_of("sglang", {"decode:speculative-num-steps": "2"}, "mtp")
    policy, plain = (pools(row)["decode"]["policy"] for row in (drafted, row_of("sglang")))
    assert policy["disable_overlap_schedule"] and policy["max_running_requests"] == 48 // 32
    assert "disable_overlap_schedule" not in plain and plain["max_running_requests"] == 2048
