"""Engines' start-up lines beside our account of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from sarathi_sim.experiments.lab.pages import update
from sarathi_sim.experiments.lab.servers.rows import read_whole
from sarathi_sim.experiments.lab.servers.startup_lines import StartupLine, page_tables
from sarathi_sim.profiler.storage.strict import UserError

pytestmark = pytest.mark.lab

HEADER = (
    "source,engine,version,gpu,gpus,tp,pp,model,dtype_quantization,kv_cache_dtype,"
    "gpu_memory_utilization,max_model_len,max_num_seqs,max_num_batched_tokens,other_flags,"
    "measured_value,unit,note\n"
)
LINES = (
    # llm-d-planner: GiB beside weights, activations and memory outside of torch.
    "x,vllm,0.19.0,h100-80g-sxm,2,2,1,llama-3.1-8b,bf16,auto,0.95,8192,,,,63.76,GiB,\n"
    "x,vllm,,h100-80g-sxm,1,1,1,qwen3-0.6b,bf16,auto,0.9,16000,,,,64.45,GiB,of 2026-01-26\n"
    "x,vllm,0.15.1,h100-80g-sxm,4,4,1,llama-3.1-70b,bf16,,,,128,8192,,30425,blocks of 16,\n"
    "x,vllm,0.19.0,h100-80g-sxm,1,1,1,unheard-of,bf16,,,,,,,5,tokens,\n"
    "x,tgi,3,h100-80g-sxm,1,1,1,llama-3.1-8b,bf16,,,,,,,5,tokens,\n"
)
PAGE = "<!-- table: Lines within -->\n<!-- end -->\n<!-- table: Start-up lines -->\n<!-- end -->\n"


def test_lines_are_answered_with_the_versions_facts(tmp_path: Path) -> None:
    path = tmp_path / "lines.csv"
    path.write_text(HEADER + LINES)
    pair, small, large, unknown, other = read_whole(path, StartupLine).values()
    for line in (pair, small, large):
        assert line.ours == pytest.approx(line.measured_value, rel=0.01)
    assert small.release == "0.14" and not isinstance(small.memory, str)
    # 1,024 sequences of the default on an H100, each logit sorted by PyTorch.
    assert small.memory.activation_bytes > 38 * 1024 * 151936
    assert other.memory == "engine tgi: one of vllm, sglang, trtllm"
    assert unknown.ours is None
    page = update(PAGE, page_tables([pair, small, large, unknown]))
    assert "| lines | 4 |" in page and "| within 1 % | 3 |" in page
    assert "unheard-of: unknown model" in page and "| 30,425 blocks of 16 | 30,461 |" in page


def test_a_file_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.csv"
    path.write_text("engine,version\nvllm,0.19\n")
    with pytest.raises(UserError, match="column gpu is missing"):
        read_whole(path, StartupLine)
