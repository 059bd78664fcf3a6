"""Time and memory by the number of requests, online, Poisson: Sarathi on four replicas of four
stages, and vLLM with paged memory on one GPU.

python -m pytest tests/benchmarks/bench_scale.py -s             # 10,000 and 100,000
python -m pytest tests/benchmarks/bench_scale.py -s -k 1000000  # minutes, and 1.5 GB
python -m pytest tests/benchmarks/bench_scale.py -s -k vllm
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import resource, sys, time
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.simulator.views.metrics import Analysis

policy, count = sys.argv[1], int(sys.argv[2])
experiment = load_experiment(*{
    "sarathi": ("gpt3_pp", [
        "model=llama-2-70b",
        "cluster={tp: 4, pp: 4, replicas: 4, max_length: 2048, router: least_tokens}",
        "batching.max_batch=32",
        "workload.lengths={kind: uniform, min: 256, max: 1024}",
        "workload.arrivals={kind: poisson, rate: 60}",
        f"workload.requests={count}",
    ]),
    "vllm": ("bench_paged", [
        "workload.arrivals={kind: poisson, rate: 8}",
        f"workload.requests={count}",
    ]),
}[policy])
scenario = {"sarathi": "sarathi_pp"}.get(policy, policy)
deployment = deploy(experiment.scenarios[scenario], experiment.sources[scenario])
deployment.predictor
began = time.process_time()
records = deployment.simulate()
simulated = time.process_time()
tp = deployment.scenario.cluster.tp
summary = Analysis(records).summary(deployment.model, deployment.device, tp)
summed = time.process_time()
assert summary["finished"] == count and summary["steady"]["state"] == "steady"
tokens = sum(r.iterations["prefill_tokens"].sum() + r.iterations["decodes"].sum()
             for r in records.replicas)
assert tokens == (records.prompt_tokens + records.output_tokens - 1).sum()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # units of 2**20 bytes
print(f"{count:,} requests, {summary['iterations']:,} iterations: loop {simulated - began:.1f} s, "
      f"summary {summed - simulated:.1f} s, {1e6 * (simulated - began) / count:.1f} us a request, "
      f"{1e6 * (simulated - began) / summary['iterations']:.2f} us an iteration, "
      f"peak {peak:.0f} MB")
sys.exit(peak * 2**20 > 1.5e9)
"""


@pytest.mark.parametrize("policy", ["sarathi", "vllm"])
@pytest.mark.parametrize(
    "count",
    [
        10_000,
        100_000,
        pytest.param(
            1_000_000,
            marks=pytest.mark.skipif(
                "1000000" not in " ".join(sys.argv), reason="takes minutes: -k 1000000"
            ),
        ),
    ],
)
def test_scale(policy: str, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, policy, str(count)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr or "more than 1.5 GB"
