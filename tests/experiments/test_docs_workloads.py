"""docs/workloads.md: its examples work as they stand there, and give what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.experiments.small_config import ROOT, deployed

PAGE = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")
YAML = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
pytestmark = pytest.mark.usefixtures("few_trees")


@pytest.mark.parametrize("example", YAML[:-1])
def test_an_example(example: str, tmp_path: Path) -> None:
    rest = "name: x\nmodel: llama-3-8b\ndevice: a100-80g-sxm\npolicy: {name: vllm}\n"
    (deployment,) = deployed(rest + whole(example, tmp_path)).values()
    count = int((re.findall(r"requests: (\d+)", example) or ["50"])[0])
    assert len(deployment.requests) == count
    shared = sum(bool(request.prefix) for request in deployment.requests)
    if "system_prompts:" in example or "sessions:" in example:
        assert shared > 0.6 * count
    else:
        assert shared == (count if "session:" in example else 0)


def whole(example: str, folder: Path) -> str:
    """A workload of 50 requests, where the page shows a part of one."""
    lines = [f"  {line}\n" for line in example.splitlines()]
    if example.startswith("arrivals:"):
        lines.append("  lengths: {kind: fixed, prompt: 9, decode: 9}\n")
        return "".join(["workload:\n  requests: 50\n", *lines])
    if example.startswith("lengths:"):
        log = [
            {"received": 10 * i, "usage": {"prompt": 9, "completion": i % 9}} for i in range(999)
        ]
        text = "".join(json.dumps(line | {"chat": ""}) + "\n" for line in log)
        (folder / "gateway.jsonl").write_text(text)
        lines = [line.replace("gateway", f"{folder}/gateway") for line in lines]
        return "".join(["workload:\n  requests: 50\n  arrivals: {kind: trace}\n", *lines])
    return example
