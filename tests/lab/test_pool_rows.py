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
from sarathi_sim.experiments.lab.servers.rows import Measured, read_launches
from sarathi_sim.experiments.lab.servers.scenarios import scenario_of, server_of, stack_of
from sarathi_sim.experiments.lab.servers.score import read_rows
from sarathi_sim.profiler.storage.strict import UserError

pytestmark = pytest.mark.lab

LAYOUT = "workers,tp,ep,dp_attention"
HEADER = ",".join(f"{pool}_{name}" for pool in ("prefill", "decode") for name in LAYOUT.split(","))
TRTLLM = "1.0,4.0,4.0,True,3,8.0,8.0,False"
SGLANG = "2,8,1,True,1,32,32,True"
MEASURED = "id,backend,backend_version,model,system,precision,mode,dense"
MEASURED += ",isl,osl,concurrency,ttft_ms,tpot_ms"


def launch_list(folder: Path, columns: str, *lines: str) -> Path:
    path = folder / "launch.csv"
    path.write_text("\n".join([f"id,matches,speculation,{HEADER}{columns}", *lines]) + "\n")
    return path


def row_of(
    folder: Path, launch: Path | None, backend: str, version: str = "0.5.8", system: str = "gb200"
) -> Measured:
    path = folder / "measured.csv"
    server = f"{backend},{version},deepseek-ai/DeepSeek-R1,{system},fp8,disagg,False"
    path.write_text(f"{MEASURED}\na,{server},1024,512,48,500,20\n")
    (row,), refused = read_rows([path], launch)
    assert not refused
    return row


def pools(row: Measured) -> dict[str, Any]:
    found: dict[str, Any] = scenario_of(row, NONE)["disaggregation"]
    return found


def test_trtllm_limits_are_a_ranks(tmp_path: Path) -> None:
    columns = ",prefill:max_batch_size,prefill:max_num_tokens,decode:max_batch_size"
    columns += ",decode:max_num_tokens,decode:kv_cache_config.free_gpu_memory_fraction"
    path = launch_list(tmp_path, columns, f"a,1,none,{TRTLLM},2.0,16384.0,8.0,8.0,0.7")
    row = row_of(tmp_path, path, "trtllm")
    prefill, decode = pools(row)["prefill"], pools(row)["decode"]
    router = {"rank_router": "least_prompt_tokens"}
    assert prefill["cluster"] == {"tp": 1, "dp": 4, "replicas": 1, "expert_parallel": True} | router
    assert decode["cluster"] == {"tp": 8, "dp": 1, "replicas": 3, "expert_parallel": True}
    assert prefill["policy"] == {"name": "trtllm", "max_batch_size": 2, "max_num_tokens": 16384}
    assert decode["policy"] == {"name": "trtllm", "max_batch_size": 8, "max_num_tokens": 8}
    assert decode["kv_cache"] == {"free_gpu_memory_fraction": 0.7}
    assert server_of(row).endswith("1x dp4 ep4 + 3x tp8 ep8")
    assert stack_of(row) == "trtllm in pools"


def test_without_known_limits_no_request_waits_for_a_slot(tmp_path: Path) -> None:
    """48 clients over three workers of one rank."""
    row = row_of(tmp_path, launch_list(tmp_path, "", f"a,1,none,{TRTLLM}"), "trtllm")
    assert pools(row)["decode"]["policy"]["max_batch_size"] == 16


def test_sglang_divides_its_limits_by_its_ranks(tmp_path: Path) -> None:
    columns = ",prefill:chunked-prefill-size,decode:max-running-requests,decode:moe-a2a-backend"
    columns += ",decode:ep-num-redundant-experts"
    path = launch_list(tmp_path, columns, f"a,2,mtp/none,{SGLANG},65536.0,1024.0,deepep,32.0")
    row = row_of(tmp_path, path, "sglang", "0.5.8.post1")
    prefill, decode = pools(row)["prefill"], pools(row)["decode"]
    assert prefill["policy"]["chunked_prefill_size"] == 8192
    assert prefill["cluster"] == {"tp": 1, "dp": 8, "replicas": 2, "rank_router": "round_robin"}
    assert decode["policy"]["max_running_requests"] == 32
    assert decode["cluster"] == {
        "tp": 1, "dp": 32, "replicas": 1, "expert_parallel": True, "moe_a2a_backend": "deepep",
        "redundant_experts": 32, "rank_router": "round_robin",
    }  # fmt: skip
    assert stack_of(row) == "sglang 0.5.8 in pools", "its releases are apart"

    path = launch_list(tmp_path, ",prefill:chunked-prefill-size", f"a,1,none,{SGLANG},-1.0")
    row = row_of(tmp_path, path, "sglang", "0.5.8")
    assert pools(row)["prefill"]["policy"]["chunked_prefill_size"] is None, "-1: no chunks"


@pytest.mark.parametrize(
    ("system", "dtype", "router"),
    [
        ("gb200", "fp8", "round_robin"),
        ("b200_sxm", "fp8", "random"),
        ("h200_sxm", "bf16", "random"),
    ],
)
def test_what_recipes_for_sglang_say_by_gpu(
    tmp_path: Path, system: str, dtype: str, router: str
) -> None:
    path = launch_list(tmp_path, "", f"a,1,none,{SGLANG}")
    found = scenario_of(row_of(tmp_path, path, "sglang", system=system), NONE)
    assert found["kv_cache_dtype"] == dtype
    routers = [found["disaggregation"][pool]["cluster"]["rank_router"] for pool in POOLS]
    assert routers == [router, "round_robin"]
    path = launch_list(tmp_path, "", f"a,1,none,{TRTLLM}")
    row = row_of(tmp_path, path, "trtllm", system=system)
    assert scenario_of(row, NONE)["kv_cache_dtype"] == "fp8"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("b,1,none," + TRTLLM, "no launch settings are known"),
        ("a,0,unknown,,,,,,,,", "no launch settings are known"),
    ],
)
def test_rows_without_an_answer(tmp_path: Path, line: str, reason: str) -> None:
    row = row_of(tmp_path, launch_list(tmp_path, "", line), "trtllm")
    with pytest.raises(UserError, match=reason):
        scenario_of(row, NONE)


@pytest.mark.parametrize(
    ("ep", "column", "redundant"), [(32, "288", 32), (32, "", 0), (48, "", 32)]
)
def test_redundant_experts(tmp_path: Path, ep: int, column: str, redundant: int) -> None:
    """Of 288 slots 256 are DeepSeek's experts. 48 ranks divide 288, not 256."""
    line = f"a,1,none,1,4,4,True,1,{ep},{ep},True,{column}"
    path = launch_list(tmp_path, ",decode:load_balancer.num_slots", line)
    cluster = pools(row_of(tmp_path, path, "trtllm"))["decode"]["cluster"]
    assert cluster.get("redundant_experts", 0) == redundant


DRAFTS = ",decode:speculative_config.num_nextn_predict_layers,decode:max_batch_size"


def test_drafts_take_the_nearest_published_acceptance(tmp_path: Path) -> None:
    """DeepSeek V4 Pro's at three drafts. A decode of eight sequences has 32 rows."""
    row = row_of(tmp_path, launch_list(tmp_path, DRAFTS, f"a,1,mtp,{TRTLLM},3,8"), "trtllm")
    scenario = scenario_of(row, NONE)
    assert scenario["speculation"] == {"method": "mtp", "draft_length": 3, "acceptance": 2.49}
    assert scenario["disaggregation"]["decode"]["policy"]["max_num_tokens"] == 64
    assert server_of(row).endswith("3x tp8 ep8, 3 drafts")
    assert not fitting(row, mixtures=True)
    assert grouped([row]) == {"all": [], "with drafts": [row]}
    either = row_of(tmp_path, launch_list(tmp_path, DRAFTS, f"a,1,mtp/none,{TRTLLM},3,8"), "trtllm")
    assert "speculation" not in scenario_of(either, NONE)


def test_unknown_limits_of_sglang_on_b200_are_its_recipes(tmp_path: Path) -> None:
    """Divided by the prefill pool's ranks; the slots of the decode pool are not limited."""
    path = launch_list(tmp_path, "", f"a,1,none,{SGLANG}")
    found = pools(row_of(tmp_path, path, "sglang", system="b200_sxm"))
    ranks = found["prefill"]["cluster"]["dp"]
    assert found["prefill"]["policy"] == {
        "name": "sglang",
        "ignore_eos": True,
        "chunked_prefill_size": 32768 // ranks,
        "max_prefill_tokens": 32768,
        "max_running_requests": 512 // ranks,
    }
    assert found["decode"]["policy"]["max_running_requests"] == 2048
    assert found["prefill"]["kv_cache"] == {"mem_fraction_static": 0.85}


def test_unknown_drafts_are_three_up_to_64_clients_a_rank(tmp_path: Path) -> None:
    row = row_of(tmp_path, launch_list(tmp_path, "", f"a,1,mtp,{TRTLLM}"), "trtllm")
    assert row.launch is not None and row.launch.decode is not None
    most = 64 * row.launch.decode.workers * row.launch.decode.ranks
    for clients, drafts in ((1, 3), (most, 3), (most + 1, 1)):
        asked = row.model_copy(update={"concurrency": clients})
        assert asked.drafts == drafts
        assert scenario_of(asked, NONE)["speculation"]["draft_length"] == drafts
    path = launch_list(tmp_path, "", f"a,1,mtp,{SGLANG}")
    assert row_of(tmp_path, path, "sglang").drafts == 2


def test_sglang_with_drafts_has_no_overlap_and_48_requests(tmp_path: Path) -> None:
    path = launch_list(tmp_path, ",decode:speculative-num-steps", f"a,1,mtp,{SGLANG},2")
    policy = pools(row_of(tmp_path, path, "sglang"))["decode"]["policy"]
    assert policy["disable_overlap_schedule"] and policy["max_running_requests"] == 48 // 32
    path = launch_list(tmp_path, "", f"a,1,none,{SGLANG}")
    policy = pools(row_of(tmp_path, path, "sglang"))["decode"]["policy"]
    assert "disable_overlap_schedule" not in policy and policy["max_running_requests"] == 2048


def test_without_a_launch_list_there_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no launch settings are known"):
        scenario_of(row_of(tmp_path, None, "trtllm"), NONE)


def test_a_broken_launch_list_is_named(tmp_path: Path) -> None:
    path = launch_list(tmp_path, "", "a,1,none," + TRTLLM.replace("4.0", "many", 1))
    with pytest.raises(UserError, match=r"launch\.csv: a: prefill\.tp: value 'many'"):
        read_launches(path)
