"""A configuration that names a stack: op times made on the fly, memory by number format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.cli.app import app
from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import deploy_all
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.storage.files import data_dir
from tests.experiments.small_config import message
from tests.profiler.hf_configs import LLAMA_3, MISTRAL_1

TEXT = """\
name: stacks
seed: 7
model: llama-3.1-8b
device: h100-80g-sxm
stack: vllm
workload: {requests: 8, lengths: {kind: uniform, min: 200, max: 600}, pd_ratio: 5}
cluster: {tp: 1, max_length: 1024}
policy: {name: sarathi, chunk_size: 256}
scenarios:
  bf16: {}
  fp8: {dtype: fp8}
  fp8_cache: {dtype: fp8, kv_cache_dtype: fp8}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "stacks.yaml"
    path.write_text(TEXT)
    return path


def deployed(path: Path, *assignments: str) -> dict[str, Deployment]:
    return deploy_all(load_experiment(path, assignments))


def test_number_formats_decide_memory_and_op_times(config: Path) -> None:
    runs = deployed(config)
    model = load_model("llama-3.1-8b")
    usable = 0.9 * 80e9
    _, matrices, norms = model.parameters_in()
    bf16 = 2 * (2 * model.vocab_size * model.hidden_size + norms)
    for name, weight, cache in (("bf16", 2, 2), ("fp8", 1, 2), ("fp8_cache", 1, 1)):
        left = usable - weight * matrices - bf16
        assert runs[name].kv_capacity == int(left // model.kv_bytes_per_token(cache)), name
        assert runs[name].ops.meta.source == "modelled"
        assert runs[name].ops.number_bytes.activation == 2, "of activations"
    assert runs["bf16"].bundle_name == "h100-80g-sxm/llama-3.1-8b/tp1-vllm-bf16"
    assert runs["fp8_cache"].bundle_name.endswith("tp1-vllm-fp8-kv-fp8")
    assert len({run.bundle_sha256 for run in runs.values()}) == 3
    layer = [float(run.ops.by_rows["ffn_ln1"](64)) for run in runs.values()]
    assert layer[1] == layer[2] < 0.75 * layer[0]


def test_a_simulation_runs_and_says_where_its_op_times_come_from(config: Path) -> None:
    run = deployed(config)["fp8"]
    (log,) = run.simulate().replicas
    assert log.stage_durations().sum() > 0
    (note,) = (note for note in run.notes if note.startswith("op times: "))
    assert "; modelled: others, embedding" in note and "measured: preproj, postproj" in note
    assert len(note) < 300  # the sources themselves are in meta.yaml


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (("stack=null", "dtype=fp8"), "dtype: value 'fp8': needs stack: sglang, trtllm, vllm"),
        (("stack=vlm",), "stack: value 'vlm': "),
        (("dtype=nvfp4",), "stack: no gemm of vllm was measured on h100-80g-sxm for dtype nvfp4"),
        (("device=a6000",), "stack: no kernels of stack vllm were fitted on device a6000"),
    ],
)
def test_mistakes(config: Path, assignments: tuple[str, ...], expected: str) -> None:
    text = message(config, *assignments)
    assert expected in text and "\n" not in text.strip()


def test_the_commands(tmp_path: Path) -> None:
    def say(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, done.output

    code, text = say("calibrate", "--report", "--stack", "vllm", "--device", "h100-80g-sxm")
    assert code == 0 and "gemm fp8" in text and "met" in text and "missed" in text
    assert "sglang, trtllm, vllm" in say("devices")[1]


def test_a_checkpoint_on_disk_sets_the_number_formats(config: Path, tmp_path: Path) -> None:
    """A folder or its config.json; what the configuration says goes before the checkpoint."""
    folder = tmp_path / "my-llama"
    folder.mkdir()
    cached = {"type": "float", "num_bits": 8}
    weights = {**cached, "strategy": "tensor"}
    section = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights, "input_activations": cached}},
        "kv_cache_scheme": cached,
    }
    (folder / "config.json").write_text(json.dumps({**LLAMA_3, "quantization_config": section}))
    for path in (folder, folder / "config.json"):
        runs = deployed(config, f"model={path}")
        assert runs["bf16"].bundle_name == "h100-80g-sxm/my-llama/tp1-vllm-fp8-kv-fp8"
        assert runs["bf16"].scenario.dtype == "fp8"
    plain = deployed(config, f"model={folder}", "dtype=bf16", "kv_cache_dtype=bf16")["bf16"]
    assert plain.kv_capacity == deployed(config)["bf16"].kv_capacity
    text = message(config, f"model={folder}", "stack=null", "scenarios={a: {}}")
    assert "stack: is needed for my-llama (dtype fp8, kv_cache_dtype fp8)" in text
    section["quant_method"] = "hqq"
    (folder / "config.json").write_text(json.dumps({**LLAMA_3, "quantization_config": section}))
    text = message(config, f"model={folder}")
    assert "quantization_config.quant_method 'hqq': not supported" in text


def test_windows_leave_room_for_more_sequences(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "windowed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MISTRAL_1))
    lengths = "workload.lengths={kind: uniform, min: 7000, max: 8000}"
    cluster = "cluster={tp: 1, max_length: 16384}"
    run = deployed(config, f"model={folder}", lengths, cluster, "workload.pd_ratio=50")["bf16"]
    assert run.model.windows is not None
    full = deployed(config, "model=mistral-7b", lengths, cluster, "workload.pd_ratio=50")["bf16"]
    share = full.kv_capacity / run.kv_capacity
    assert 4096 / 8000 < share < 4096 / 6800
    (note,) = (note for note in run.notes if note.startswith("windows: "))
    assert note == f"windows: the KV cache keeps {share:.0%} of this workload's tokens"


def test_a_device_of_the_users_has_no_stack(config: Path, tmp_path: Path) -> None:
    sheet = (data_dir() / "devices" / "h100-80g-sxm.yaml").read_text().partition("# --- below")[0]
    (tmp_path / "own.yaml").write_text(sheet.replace("name: h100-80g-sxm", "name: own"))
    said = "were fitted on own, a device of yours; take the closest shipped one"
    assert said in message(config, f"device={tmp_path / 'own.yaml'}")
