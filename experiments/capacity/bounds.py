"""Bounds on what a deployment can do, from its op times alone: no simulation is needed.

The throughput is bounded by the GPU time that a request takes at least: all its tokens at the best
rate that any batch allows, its prompt's attention in one piece, its decodes' attention in the
batch that suits them best. Latencies are bounded by a request that is alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.capacity.capacity_section import Objective
from experiments.capacity.options import Option
from experiments.config.deployment import Deployment
from policies.policy import chunking_of
from simulator.op_times.iteration import SUM, HostTime, IterationCost

SAMPLE = 64
SLACK = 1.02
"""The best rate is looked for on a grid."""
_TAIL = {"p90": 0.9, "p99": 0.99}


def _cost(deployment: Deployment) -> IterationCost:
    engine, cluster = deployment.scenario.engine, deployment.scenario.cluster
    return IterationCost(
        deployment.ops,
        deployment.ops.whole_layer if engine.layer_time == "measured" else SUM,
        deployment.scope if cluster.pp > 1 else None,
        engine.lm_head,
        HostTime(engine.host_iteration_s or 0.0, engine.host_sequence_s or 0.0),
    )


def most_requests_per_s(option: Option) -> float:
    """A rate that one replica cannot exceed, in requests a second."""
    deployment = option.deployment
    cost, sequences = _cost(deployment), deployment.scenario.batching.max_batch or 1
    sample = deployment.requests[:: max(1, len(deployment.requests) // SAMPLE)]
    prompt = np.array([request.prompt_tokens for request in sample], np.float64)
    output = np.array([request.output_tokens for request in sample], np.float64)
    chunking = chunking_of(deployment.scenario.policy.build())
    rows = int(chunking.rows if chunking else prompt.max()) + sequences
    sizes = np.unique(np.geomspace(1, rows, 160).astype(np.int64))
    linear = sum(cost.layer_parts(sizes).values(), np.zeros(len(sizes)))
    per_row = float((linear / sizes).min())
    context = float((prompt + output / 2).mean())
    most = max(1, min(sequences, int(deployment.kv_capacity // context)))
    batches = np.unique(np.geomspace(1, most, 40).astype(np.int64))
    decode = float((cost.decode_s(batches, context) / batches).min())
    head = float((cost.last_s(batches) / batches).min())
    layers = max(deployment.layers)
    attention = np.array([float(cost.prefill_s(tokens, 0.0)) for tokens in prompt])
    # No iteration has more decodes than sequences, nor takes less than that of one row.
    least = (output - 1) / most * float(linear[0])
    rows_s = np.maximum((prompt + output - 1) * per_row, least)
    of_layer = rows_s + attention + (output - 1) * decode
    # Each stage must do its part of every request; the last one the LM head, too.
    last = deployment.layers[-1] * of_layer + output * head
    stage_s = max(float((layers * of_layer).mean()), float(last.mean()))
    return SLACK / stage_s


def alone(option: Option, objectives: Sequence[Objective]) -> str:
    """Why no load at all can keep the SLO: a request that is alone breaks it. Empty if it may."""
    deployment = option.deployment
    cost = _cost(deployment)
    layers = sum(deployment.layers)
    prompts = [request.prompt_tokens for request in deployment.requests]
    token_s = layers * (_layer(cost, 1) + float(cost.decode_s(1, float(np.mean(prompts)))))
    token_s += float(cost.last_s(1))
    for one in objectives:
        for metric, limit in one.limits.items():
            if metric == "ttft_s" and one.statistic in _TAIL:
                tokens = float(np.quantile(prompts, _TAIL[one.statistic]))
                least_s = layers * float(cost.prefill_s(tokens, 0.0)) + _rows(option, cost, tokens)
                what = f"a prompt of {tokens:,.0f} tokens ({one.statistic}) alone"
            elif metric in ("tpot_s", "tbt_s", "tbt_max_s") and one.statistic:
                least_s, what = token_s, "a token of a request that is alone"
            else:
                continue
            if least_s > limit * SLACK:
                return f"{what} takes {1e3 * least_s:.0f} ms at least, more than {one.text}"
    return ""


def _layer(cost: IterationCost, tokens: int) -> float:
    return float(sum(cost.layer_parts(tokens).values(), np.zeros(())))


def _rows(option: Option, cost: IterationCost, tokens: float) -> float:
    """The linear ops of a prompt in the chunks that the budget allows, on all stages; those that go
    through a pipeline behind each other overlap."""
    deployment = option.deployment
    chunking = chunking_of(deployment.scenario.policy.build())
    chunk = int(min(tokens, chunking.tokens if chunking else tokens))
    passes, slowest = tokens / max(chunk, 1), max(deployment.layers)
    return _layer(cost, chunk) * (sum(deployment.layers) + slowest * (max(passes, 1.0) - 1.0))
