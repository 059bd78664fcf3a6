"""The pages on workloads and traces: their examples work as printed, and give what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import ROOT, deployed

PAGE = (ROOT / "docs" / "research" / "workloads.md").read_text(encoding="utf-8")
TRACES = (ROOT / "docs" / "server" / "traces.md").read_text(encoding="utf-8")
REST = "name: x\nmodel: llama-3-8b\ndevice: a100-80g-sxm\npolicy: {name: vllm}\n"
pytestmark = pytest.mark.usefixtures("few_trees")


def test_prompts_that_share_their_beginning() -> None:
    (example,) = re.findall(r"```yaml\n(workload:.*?)```", PAGE, re.DOTALL)
    (deployment,) = deployed(REST + example).values()
    count = int(re.findall(r"requests: (\d+)", example)[0])
    assert len(deployment.requests) == count
    assert sum(bool(request.prefix) for request in deployment.requests) > 0.6 * count


def test_all_options_of_a_trace(tmp_path: Path) -> None:
    """50 requests of a log in which some failed; an empty session is a request alone."""
    (example,) = re.findall(r"```yaml\n(lengths:.*?)```", TRACES, re.DOTALL)
    log = [{"received": 10 * i, "usage": {"prompt": 9, "completion": i % 9}} for i in range(999)]
    text = "".join(json.dumps(line | {"chat": ""}) + "\n" for line in log)
    (tmp_path / "gateway.jsonl").write_text(text)
    lines = example.replace("gateway", f"{tmp_path}/gateway").splitlines()
    start = "workload:\n  requests: 50\n  arrivals: {kind: trace}\n"
    (deployment,) = deployed(REST + start + "".join(f"  {line}\n" for line in lines)).values()
    assert len(deployment.requests) == 50
    assert all(request.prefix for request in deployment.requests)


def test_prompts_that_begin_alike_are_found(tmp_path: Path) -> None:
    """In Mooncake's form: as many tokens as the page says."""
    (small,) = re.findall(r"<!-- file: small.jsonl -->\n```json\n(.*?)```", TRACES, re.DOTALL)
    (tmp_path / "small.jsonl").write_text(small)
    lengths = f"{{kind: trace, path: {tmp_path}/small.jsonl}}"
    workload = f"workload: {{lengths: {lengths}, arrivals: {{kind: trace}}}}\n"
    (deployment,) = deployed(REST + workload).values()
    found = Analysis(deployment.simulate()).requests["hit_tokens"]
    assert found.tolist() == [0, 1296, 512]
    assert "1,296" in TRACES and "the first 512" in TRACES
