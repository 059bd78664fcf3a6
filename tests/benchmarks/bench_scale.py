"""Time and memory by the number of requests, online, Poisson: Sarathi on four replicas of four
stages, or vLLM with paged memory on one GPU.

    python -m tests.benchmarks.bench_scale sarathi 100000
    python -m tests.benchmarks.bench_scale vllm 1000000      # minutes, and 1.5 GB
"""

import resource
import sys
import time

from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.simulator.views.metrics import Analysis

CONFIGS = {
    "sarathi": (
        *("gpt3_pp", "sarathi_pp", "model=llama-2-70b", "batching.max_batch=32"),
        "cluster={tp: 4, pp: 4, replicas: 4, max_length: 2048, router: least_tokens}",
        "workload.lengths={kind: uniform, min: 256, max: 1024}",
        "workload.arrivals={kind: poisson, rate: 60}",
    ),
    "vllm": ("bench_paged", "vllm", "workload.arrivals={kind: poisson, rate: 8}"),
}


def main(policy: str, count: int) -> int:
    """Print the numbers; 1 if they take more than 1.5 GB."""
    name, scenario, *changes = CONFIGS[policy]
    experiment = load_experiment(name, [*changes, f"workload.requests={count}"])
    deployment = deploy(experiment.scenarios[scenario], experiment.sources[scenario])
    _ = deployment.predictor  # its tables are made beforehand
    began = time.process_time()
    records = deployment.simulate()
    loop_s = time.process_time() - began
    summary = deployment.summary(Analysis(records))
    summary_s = time.process_time() - began - loop_s
    assert summary["finished"] == count and summary["steady"]["state"] == "steady"
    ran = (log.iterations for log in records.replicas)
    tokens = sum(each["prefill_tokens"].sum() + each["decodes"].sum() for each in ran)
    assert tokens == (records.prompt_tokens + records.output_tokens - 1).sum()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # units of 2**20 bytes
    each = f"{1e6 * loop_s / count:.1f} us a request, "
    each += f"{1e6 * loop_s / summary['iterations']:.2f} us an iteration"
    print(f"loop {loop_s:.1f} s, summary {summary_s:.1f} s, {each}, peak {peak:.0f} MB")  # noqa: T201
    return int(peak * 2**20 > 1.5e9)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
