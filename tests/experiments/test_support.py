"""What runs where: the whole matrix is resolved, and what it calls supported gives op times."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sarathi_sim.experiments.run.support import Combination, cells
from sarathi_sim.profiler.facts.device import list_devices, load_device
from sarathi_sim.profiler.facts.model import list_models, load_model
from sarathi_sim.profiler.facts.ops import SENDS
from sarathi_sim.profiler.physics.shard_times import KINDS
from tests.experiments.small_config import called, deployed


@pytest.fixture(scope="module")
def every() -> list[Combination]:
    models, devices = map(load_model, list_models()), map(load_device, list_devices())
    return list(cells(list(models), devices))


def say(*arguments: str) -> str:
    done = called("list", "support", *arguments)
    assert not done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_cell_runs_or_says_why_not(every: list[Combination]) -> None:
    assert {cell.device.name for cell in every} == set(list_devices())
    assert {cell.model.name for cell in every} == set(list_models())
    for cell in every:
        degrees = {tp for tps in cell.refused.values() for tp in tps}
        assert degrees.isdisjoint(cell.sources) or cell.memory is None
        assert cell.memory is not None or cell.refused
        if cell.memory is not None:
            assert cell.kind in KINDS and 0 < cell.off_pct["GEMM"] < 150
            assert 0 < cell.off_pct["attention"] < 130  # lent to the A40
            assert ("experts" in cell.off_pct) == (cell.model.experts is not None)


@pytest.mark.slow
def test_what_it_calls_supported_has_op_times(every: list[Combination]) -> None:
    """Each cell in its smallest layout: every op at a small and a large size."""
    one, many = np.array([1.0, 64.0]), np.array([512.0, 4096.0])
    for cell in every:
        if cell.memory is None:
            continue
        tp = cell.memory[0][0]
        source = cell.sources[tp]
        times = {op: source.by_rows(op, many) for op in cell.model.row_ops}
        times |= {"prefill": source.prefill(many, many), "decode": source.decode(one, many)}
        times |= {op: source.send_recv(1024 * many, scope) for op, scope in SENDS.items()}
        if tp > 1:
            times["all-reduce"] = source.all_reduce(1024 * many)
        for op, found in times.items():
            assert (np.isfinite(found) & (found > 0)).all(), (cell.model.name, cell.kernels, op)


def test_fewer_layers_than_stages() -> None:
    """Where nothing fits, a model of four layers is refused as any other."""
    model = replace(load_model("llama-13b"), num_layers=4, hidden_size=2**17, ffn_hidden_size=2**20)
    cell = next(cells([model], [load_device("h100-80g-sxm")]))
    assert cell.memory is None and "does not fit 8 x 16 GPUs" in cell.refused


def test_details_are_those_of_a_run() -> None:
    """Origins, half-widths and memory are what ``run`` finds for the same layout."""
    text = say("--model", "llama-3.3-70b", "--device", "h100-80g-sxm", "--json")
    found = {(c["stack"], c["dtype"]): c for c in json.loads(text)["cells"]}
    fp8 = found["vllm", "fp8"]
    assert fp8["runs"] and fp8["smallest"] == {"tp": 1, "pp": 1}
    assert "nvfp4" in next(iter(found["vllm", "nvfp4"]["refused"]))
    config = "name: s\nmodel: llama-3.3-70b\ndevice: h100-80g-sxm\nstack: vllm\ndtype: fp8\n"
    config += "workload: {requests: 1, lengths: {kind: uniform, min: 9, max: 9}, pd_ratio: 2}\n"
    config += "cluster: {tp: 1, max_length: 4096}\npolicy: {name: vllm}\nscenarios: {a: {}}\n"
    run = deployed(config)["a"]
    meta = run.ops.meta
    assert meta.kernels is not None and run.memory is not None
    for op, origin in fp8["ops"].items():
        assert meta.environment[op] == origin["mark"]
        assert meta.kernels.half_width_pct[op] == origin["half_width_pct"]
    assert fp8["memory"]["weight_bytes"] == run.memory.weight_bytes
