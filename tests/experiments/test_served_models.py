"""Models that people serve today, on the GPUs that they serve them on: by name and from disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import deploy_all
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ATTENTION
from sarathi_sim.profiler.physics.shard_times import KINDS
from tests.profiler.hf_configs import DEEPSEEK_V3, GPT_OSS_20B

TEXT = """\
name: served
workload: {{requests: 4, lengths: {{kind: uniform, min: 200, max: 600}}, pd_ratio: 5}}
policy: {{name: vllm}}
model: {model}
device: {device}
stack: {stack}
cluster: {{tp: {tp}, pp: {pp}, max_length: 1024}}
scenarios: {{a: {changes}}}
"""

# Model, device, stack, tp, pp, number format (None: the checkpoint's), and what then is used.
CELLS = [
    ("llama-3.3-70b", "h100-80g-sxm", "vllm", 4, 1, "fp8", "fp8"),
    ("llama-3.3-70b", "h200-sxm", "trtllm", 2, 1, None, "bf16"),
    ("llama-3.3-70b", "b200-sxm", "sglang", 1, 1, "nvfp4", "nvfp4"),
    ("qwen3-32b", "h100-80g-sxm", "sglang", 2, 1, None, "bf16"),
    ("qwen3-32b", "h200-sxm", "vllm", 1, 1, "fp8", "fp8"),
    ("qwen3-32b", "b200-sxm", "vllm", 1, 1, "nvfp4", "nvfp4"),
    ("gpt-oss-120b", "h100-80g-sxm", "vllm", 2, 1, None, "bf16-moe-w4a16_mxfp4"),
    ("gpt-oss-120b", "h200-sxm", "vllm", 1, 1, None, "bf16-moe-w4a16_mxfp4"),
    # Blackwell computes with fp8 activations.
    ("gpt-oss-120b", "b200-sxm", "trtllm", 1, 1, None, "bf16-moe-w4a8_mxfp4_mxfp8"),
    ("deepseek-v3", "h100-80g-sxm", "sglang", 8, 2, None, "fp8_block"),
    ("deepseek-v3", "h200-sxm", "vllm", 8, 1, None, "fp8_block"),
    ("deepseek-v3", "b200-sxm", "trtllm", 8, 1, "nvfp4", "nvfp4"),
]


def deployed(folder: Path, model: str, *cell: object, **changes: str) -> Deployment:
    device, stack, tp, pp, dtype = cell
    given = {**({"dtype": dtype} if dtype else {}), **changes}
    path = folder / "served.yaml"
    path.write_text(
        TEXT.format(
            model=model, device=device, stack=stack, tp=tp, pp=pp, changes=json.dumps(given)
        )
    )
    return deploy_all(load_experiment(path))["a"]


@pytest.mark.parametrize(("model", "device", "stack", "tp", "pp", "dtype", "used"), CELLS)
def test_by_name(
    tmp_path: Path,
    model: str,
    device: str,
    stack: str,
    tp: int,
    pp: int,
    dtype: str | None,
    used: str,
) -> None:
    run = deployed(tmp_path, model, device, stack, tp, pp, dtype)
    assert run.bundle_name == f"{device}/{model}/tp{tp}-{stack}-{used}"
    (note,) = (note for note in run.notes if note.startswith("op times: "))
    marks = run.ops.meta.environment
    for op in (*run.model.row_ops, *ATTENTION, *([ALL_REDUCE] if tp > 1 else [])):
        assert str(marks[op]).startswith(KINDS) and op in note
    assert run.memory is not None and run.memory.num_blocks > 100


@pytest.mark.parametrize(
    ("config", "name"), [(DEEPSEEK_V3, "deepseek-v3"), (GPT_OSS_20B, "gpt-oss-20b")]
)
def test_from_a_config_json(tmp_path: Path, config: dict[str, object], name: str) -> None:
    """The same op times as by name, and a run of them."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    cell = ("h200-sxm", "vllm", 8, 1, None)
    found = deployed(tmp_path, str(folder), *cell)
    assert found.bundle_sha256 == deployed(tmp_path, name, *cell).bundle_sha256
    (log,) = found.simulate().replicas
    assert log.stage_durations().sum() > 0
